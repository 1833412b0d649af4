"""Strategies are tried before training: what can't work is refused, what can is not, and nothing shows of it."""

from __future__ import annotations

import random
import time
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support import DEAD, LIVE, Rewards, weights_hash

import trl_replay
from trl_replay import ConfigurationError, Corrected
from trl_replay.registry import BUILTIN, registry
from trl_replay.testing import make_trainer

KINDS = ("scorer", "evictor", "sampler", "selector", "mixer", "correction")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: Any) -> Any:
    """One that no test here trains: 3 groups of 4 rows."""
    return make_trainer(tmp_path_factory.mktemp("trainer"), Rewards([LIVE, DEAD, DEAD]))


def attach(trainer: Any, **settings: Any) -> Any:
    with trl_replay.attached(trainer, **settings) as session:
        return session


class Raising:
    """What no kind of strategy may do; made by its name, as a plugin's would be."""

    def __call__(self, *given: Any) -> Any:
        raise ZeroDivisionError("no luck")


def one_too_many(groups: Any, context: Any) -> Any:
    return np.ones(len(groups) + 1)


def as_text(groups: Any, context: Any) -> Any:
    return ["much"] * len(groups)


def of_nan(table: Any, context: Any) -> Any:
    return table.score * np.nan


def the_same_twice(table: Any, count: int, context: Any) -> Any:
    return np.zeros(count, int)


def outside(groups: Any, context: Any) -> Any:
    return [len(groups)]


def in_one_row(table: Any, drawn: Any, slots: Any, context: Any) -> Any:
    return drawn[:, 0]


def unweighted(rows: Any, context: Any) -> Any:
    return Corrected(rows.behavior_logps, rows.ages[:1].float())


def alone(groups: Any) -> Any:
    return groups.reward_std


@pytest.mark.parametrize(
    ("kind", "strategy", "reason"),
    [
        ("scorer", one_too_many, r"returned float64 values of shape \(4,\); it must return numbers of shape \(3,\)"),
        ("scorer", as_text, "it must return numbers of shape"),
        ("scorer", alone, r"failed in trl_replay_score: TypeError: alone.. takes 1 positional argument"),
        ("evictor", of_nan, "returned keep ranks with NaN; it must return numbers that can be compared"),
        ("sampler", the_same_twice, r"returned \[0, 0, 0\]; it must return distinct indices from 0 to 5"),
        ("selector", outside, r"returned \[3\]; it must return at most 3 distinct indices from 0 to 2"),
        ("mixer", in_one_row, r"it must return whole numbers of shape \(3, 4\)"),
        ("correction", unweighted, r"it must return a tensor of shape \(3,\) or \(3, 5\)"),
    ],
)
def test_a_wrong_result_is_refused_with_setting_value_and_remedy(
    trainer: Any, kind: str, strategy: Any, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason) as refused:
        attach(trainer, **{f"replay_{kind}": strategy})
    text = str(refused.value)
    assert text.startswith(f"replay_{kind}='{strategy.__name__}' can't be used")
    assert text.endswith(f"Mend it, or name another {kind}: `trl-replay list` shows all.")
    assert "update" not in text, "there was none"
    attach(trainer)


@pytest.mark.parametrize("kind", KINDS)
def test_what_raises_is_refused_whatever_its_kind(trainer: Any, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"replay_{kind}=.*: ZeroDivisionError: no luck.") as refused:
        attach(trainer, **{f"replay_{kind}": f"{__name__}:Raising"})
    assert isinstance(refused.value.__cause__, ZeroDivisionError)


def test_every_built_in_strategy_passes(trainer: Any) -> None:
    for kind in KINDS:
        for plugin, spec in registry().strategies(kind):
            if plugin.name in (BUILTIN, "freshness"):
                settings = {"replay_sampler": "proportional"} if spec.name == "per" else {}
                attach(trainer, **{"replay_advantages": "stored", **settings, f"replay_{kind}": spec.name})


class Counting:
    """Keeps how often it was called, and draws."""

    made: ClassVar[list[Counting]] = []

    def __init__(self) -> None:
        self.calls = 0
        self.made.append(self)

    def __call__(self, table: Any, count: int, context: Any) -> Any:
        self.calls += 1
        context.rng.random(7)
        random.random()
        np.random.random()
        torch.rand(1)
        return np.arange(min(count, len(table)))


def test_what_is_tried_is_not_what_is_used(trainer: Any) -> None:
    seen: list[int] = []
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    session = attach(trainer, replay_sampler=f"{__name__}:Counting", replay_seed=5)
    assert (states[1], states[2]) == (str(np.random.get_state()), torch.get_rng_state().tolist())
    assert states[0] == random.getstate()
    state = np.random.default_rng(5)
    state.spawn(1)
    assert session.components.rng.bit_generator.state == state.bit_generator.state
    assert [one.calls for one in Counting.made] == [0, 1], "the second one is thrown away"
    ready = Counting()
    attach(trainer, replay_sampler=ready)
    attach(trainer, replay_scorer=lambda groups, context: seen.append(1))
    assert (ready.calls, seen) == (0, []), "a ready-made object can't be made again, and is not tried"


def test_a_strategy_that_needs_its_plugins_columns_is_not_refused(trainer: Any) -> None:
    class Plugin:
        @trl_replay.hookimpl
        def trl_replay_strategies(self) -> Any:
            yield trl_replay.EvictorSpec("seen", lambda: lambda table, context: table.seen, "by a column of its own")

        @trl_replay.hookimpl
        def trl_replay_admitted(self, table: Any, rows: Any) -> None:
            """Where the column would be written."""

    trl_replay.register(Plugin(), "columns")
    try:
        attach(trainer, replay_evictor="columns/seen")
    finally:
        registry().plugins.pop("columns")


def test_without_a_buffer_nothing_is_tried(trainer: Any) -> None:
    attach(trainer, replay_buffer_size=0, replay_scorer=one_too_many)


def test_as_many_entries_are_made_up_as_replay_waits_for(trainer: Any) -> None:
    attach(trainer, replay_sampler=f"{__name__}:sixteen", replay_min_size=16)
    with pytest.raises(ConfigurationError, match="failed in trl_replay_sample: ValueError"):
        attach(trainer, replay_sampler=f"{__name__}:sixteen")


def sixteen(table: Any, count: int, context: Any) -> Any:
    return context.rng.choice(len(table), 16, replace=False)[:count]


def test_a_trial_takes_milliseconds(trainer: Any) -> None:
    attach(trainer)
    started = time.process_time()
    attach(trainer)
    assert time.process_time() - started < 0.5


def test_training_is_the_same_bit_for_bit_with_and_without_a_trial(tmp_path: Any, monkeypatch: Any) -> None:
    hashes = []
    for tried in (True, False):
        if not tried:
            monkeypatch.setattr("trl_replay.assembly.rehearse", lambda *given, **named: None)
        trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]), max_completion_length=2)
        session = trl_replay.attach(trainer, replay_start=0, replay_sampler="uniform")
        trainer.train()
        assert session.totals.counters["replaced"]
        hashes.append(weights_hash(trainer))
    assert hashes[0] == hashes[1]
