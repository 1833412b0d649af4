"""Plugins that a run's settings make anew, with other arguments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from support import DEAD, HALF, LIVE, Rewards, record

import trl_replay
from trl_replay import ConfigurationError, PluginError, ReplayConfig, ScorerSpec
from trl_replay.errors import UnknownNameError
from trl_replay.registry import registry
from trl_replay.testing import make_trainer


class Scale:
    """Scales advantages, and offers a scorer of its own size."""

    def __init__(self, by=1.0, worth=1.0):
        if not by > 0:
            raise ValueError("by must be above 0")
        self.by = by
        self.worth = worth

    def score(self, groups, context):
        return np.full(len(groups), self.worth)

    @trl_replay.hookimpl
    def trl_replay_strategies(self):
        yield ScorerSpec("constant", lambda: self.score, "the same for all")

    @trl_replay.hookimpl
    def trl_replay_advantages(self, groups, context):
        return None if self.by == 1 else self.by * groups.advantages


class Plain:
    """Takes no arguments."""

    @trl_replay.hookimpl
    def trl_replay_attached(self, session):
        pass


@pytest.fixture(autouse=True)
def registered(plug):
    plug(Scale(), "scale")
    plug(Plain(), "plain")


def trained(folder, **settings):
    """The session after two updates, and the advantages that the first one trained on."""
    trainer = make_trainer(folder, Rewards([LIVE, HALF, DEAD]), max_steps=2)
    session = trl_replay.attach(trainer, replay_start=0, **settings)
    steps = record(session)
    trainer.train()
    return session, steps[0][1]["advantages"].tolist()


def test_a_plugin_is_made_with_the_arguments_of_the_run(tmp_path):
    _, stock = trained(tmp_path / "stock", replay_plugins=["scale"])
    session, halved = trained(tmp_path / "half", replay_plugins=["scale(by=0.5)"])
    assert any(stock)
    np.testing.assert_allclose(sorted(halved), sorted(0.5 * np.array(stock)), rtol=1e-6)
    assert "plugins that take part: scale(by=0.5)" in session.explain()
    assert registry().plugins["scale"].object.by == 1.0, "other runs have the plugin as it was registered"


def test_what_a_plugin_offers_has_its_arguments_too(tmp_path):
    session, _ = trained(tmp_path, replay_scorer="scale/constant", replay_plugins=["scale(worth=3.0)"])
    assert len(session.buffer)
    assert session.buffer.table.score.tolist() == [3.0] * len(session.buffer)


def test_an_argument_that_is_not_named_stays_what_the_registered_plugin_was_made_with(tmp_path, plug):
    plug(Scale(by=0.5, worth=2.0), "halves")
    settings = {"replay_scorer": "halves/constant", "replay_plugins": ["halves(worth=3.0)"]}
    session, advantages = trained(tmp_path, **settings)
    assert session.buffer.table.score.tolist() == [3.0] * len(session.buffer)
    assert max(advantages) < 1.0, "without it the largest is 1.5"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slotted:
    """Keeps its arguments in slots."""

    by: float = 1.0
    worth: float = 1.0

    @trl_replay.hookimpl
    def trl_replay_advantages(self, groups, context):
        return self.by * groups.advantages


def test_141_a_plugin_with_slots_keeps_what_it_was_made_with(tmp_path, plug):
    plug(Slotted(by=0.5), "slotted")
    _, advantages = trained(tmp_path, replay_plugins=["slotted(worth=2.0)"])
    assert max(advantages) < 1.0, "without it the largest is 1.5"


@pytest.mark.parametrize(
    ("plugins", "kind", "told"),
    [
        ("scale(bye=2.0)", ConfigurationError, ["has no argument 'bye'", "Did you mean 'by'?", "by=1.0"]),
        ("plain(by=2.0)", ConfigurationError, ["'plain' takes no arguments", "leave them out"]),
        ("trl-replay(by=1)", UnknownNameError, ["trl-replay"]),
        ("scale(by=0)", PluginError, ["'scale'", "can't be made", "by must be above 0"]),
        ("scale(", ConfigurationError, ["name(argument=value)"]),
        (["scale", "scale(by=2.0)"], ConfigurationError, ["give each plugin once"]),
    ],
)
def test_arguments_that_can_not_be_used_are_refused_before_training(tmp_path, plugins, kind, told):
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]))
    with pytest.raises(kind) as caught:
        trl_replay.attach(trainer, replay_plugins=plugins)
    assert all(text in str(caught.value) for text in told), str(caught.value)
    assert "_compute_loss" not in vars(trainer), "nothing is wrapped"


def test_without_replay_nothing_is_looked_up(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]))
    config = ReplayConfig(use_replay=False, replay_plugins=["nobody(by=2)"])
    assert not trl_replay.attach(trainer, config).enabled
