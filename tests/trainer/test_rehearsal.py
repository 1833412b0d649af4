"""Strategies are tried before training: what can't work is refused, what can is not, and nothing shows of it."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from support import DEAD, LIVE, Rewards, plugin

import trl_replay
from trl_replay import ConfigurationError, Corrected
from trl_replay.registry import BUILTIN, registry
from trl_replay.testing import make_trainer

KINDS = ("scorer", "evictor", "sampler", "selector", "mixer", "correction")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """One that no test here trains: 3 groups of 4 rows."""
    return make_trainer(tmp_path_factory.mktemp("trainer"), Rewards([LIVE, DEAD, DEAD]))


def attach(trainer, **settings):
    with trl_replay.attached(trainer, **settings) as session:
        return session


class Raising:
    """A broken strategy of each kind; made by its name, as a plugin's would be."""

    def __call__(self, *given):
        raise ZeroDivisionError("no luck")


def ones(rows):
    return torch.ones_like(rows.logps)


def rows_like(slots, *row):
    return np.resize(row, slots.advantages.shape)


WRONG = [
    (
        "scorer",
        lambda groups, context: np.ones(len(groups) + 1),
        r"float64 values of shape \(4,\); it must return numbers of shape \(3,\)",
    ),
    (
        "scorer",
        lambda groups: groups.reward_std,
        "failed in trl_replay_score: TypeError: .* takes 1 positional argument",
    ),
    ("scorer", lambda groups, context: ["high"], "<U4 values"),
    ("scorer", lambda groups, context: torch.ones(len(groups), requires_grad=True), "a Tensor"),
    ("evictor", lambda table, context: np.ones(1), r"float64 values of shape \(1,\)"),
    ("evictor", lambda table, context: np.full(len(table), np.nan), "keep ranks with NaN"),
    ("sampler", lambda table, count, context: [0, 0], r"\[0, 0\].*distinct indices from 0 to 5 \(-1: the slot stays"),
    ("sampler", lambda table, count, context: [len(table)], r"\[6\]"),
    ("sampler", lambda table, count, context: range(count + 1), r"int64 values of shape \(4, 1\).*at most 3 slots"),
    ("sampler", lambda table, count, context: [0.0], "float64 values.*whole numbers"),
    ("sampler", lambda table, count, context: [[[0]]], r"int64 values of shape \(1, 1, 1\)"),
    ("sampler", lambda table, count, context: [[0], [0, 0]], "a list"),
    ("mixer", lambda table, drawn, slots, context: [0, 1, 2, 3], r"int64 values of shape \(4,\).*shape \(\d, 4\)"),
    ("mixer", lambda table, drawn, slots, context: rows_like(slots, 0), "every stored row at most once per slot"),
    ("mixer", lambda table, drawn, slots, context: rows_like(slots, 4, 5, 6, 7), "stored rows from 0 to 3"),
    ("selector", lambda groups, context: [1, 1], r"\[1, 1\].*distinct indices from 0 to 2"),
    ("selector", lambda groups, context: [3], r"\[3\]"),
    ("selector", lambda groups, context: groups.dead, r"bool values.*whole numbers"),
    ("correction", lambda rows, context: None, "a NoneType.*a Corrected"),
    ("correction", lambda rows, context: Corrected(None), "old_logps of type NoneType"),
    (
        "correction",
        lambda rows, context: Corrected(rows.logps[:, :1]),
        r"old_logps .*shape \(3, 1\); it must return a tensor of real numbers of shape \(3, 5\)",
    ),
    ("correction", lambda rows, context: Corrected(rows.logps, 0.5), "weights of type float"),
    ("correction", lambda rows, context: Corrected(rows.logps, torch.ones(1)), r"weights .*shape \(1,\)"),
    ("correction", lambda rows, context: Corrected(rows.logps, -ones(rows)[:, 0]), r"weights \[-1\.0, .*at least 0"),
    ("correction", lambda rows, context: Corrected(rows.logps, ones(rows) / 0), r"weights \[\[inf, .*finite"),
    ("correction", lambda rows, context: Corrected(rows.logps * 1j), r"old_logps torch.complex64 .*of real numbers"),
    (
        "correction",
        lambda rows, context: Corrected(rows.logps, ones(rows) * 3e38),
        r"weights \[\[3\.\d*e\+38.*1e\+09 at most",
    ),
    ("correction", lambda rows, context: Corrected(rows.logps, shift=0.1), "a shift of type float"),
    ("correction", lambda rows, context: Corrected(rows.logps, shift=ones(rows)), r"a shift .*\(3, 5\).*shape \(3,\)"),
    ("correction", lambda rows, context: Corrected(rows.logps, shift=ones(rows)[:, 0] * -2e9), "from -1e.09 to 1e.09"),
]


@pytest.mark.parametrize(("kind", "strategy", "words"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_result_is_refused_with_setting_value_and_remedy(trainer, kind, strategy, words):
    with pytest.raises(ConfigurationError, match=words) as refused:
        attach(trainer, **{f"replay_{kind}": strategy, "replay_advantages": "stored"})
    text = str(refused.value)
    assert text.startswith(f"replay_{kind}='{strategy.__name__}' can't be used")
    assert text.endswith(f"Mend it, or name another {kind}: `trl-replay list` shows all.")
    assert "update" not in text, "there was none"
    attach(trainer)


@pytest.mark.parametrize("kind", KINDS)
def test_what_raises_is_refused_whatever_its_kind(trainer, kind):
    with pytest.raises(ConfigurationError, match=f"replay_{kind}=.*: ZeroDivisionError: no luck.") as refused:
        attach(trainer, **{f"replay_{kind}": f"{__name__}:Raising"})
    assert isinstance(refused.value.__cause__, ZeroDivisionError)


def of_tokens(rows, context):
    """A weight for each token."""
    return Corrected(rows.logps, (rows.logps - rows.behavior_logps).exp().clamp(max=2) * rows.mask)


def test_166_token_weights_of_ones_own_are_refused_where_a_row_has_one_ratio(tmp_path):
    """As a built-in's are, and not only when the first row is replayed."""
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]), importance_sampling_level="sequence")
    with pytest.raises(ConfigurationError, match=r"'of_tokens' can't be used.*exact only with .*_level='token'"):
        attach(trainer, replay_correction=of_tokens)
    attach(trainer, replay_correction=lambda rows, context: Corrected(rows.logps, rows.mask.float()))


def test_every_built_in_strategy_passes(trainer):
    for kind in KINDS:
        for owner, spec in registry().strategies(kind):
            if owner.name in (BUILTIN, "freshness"):
                settings = {"replay_sampler": "proportional"} if spec.name == "per" else {}
                settings |= {"replay_advantages": "stored", "replay_record": "forward"}
                name = "always(share=0.5)" if spec.name == "always" else spec.name
                attach(trainer, **{**settings, f"replay_{kind}": name})


class Counting:
    """Keeps how often it was called, and draws."""

    made: ClassVar[list[Counting]] = []

    def __init__(self):
        self.calls = 0
        self.made.append(self)

    def __call__(self, table, count, context):
        self.calls += 1
        context.rng.random(7)
        random.random()
        np.random.random()
        torch.rand(1)
        return np.arange(min(count, len(table)))


def test_what_is_tried_is_not_what_is_used(trainer):
    seen = []
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    session = attach(trainer, replay_sampler=f"{__name__}:Counting")
    assert (states[1], states[2]) == (str(np.random.get_state()), torch.get_rng_state().tolist())
    assert states[0] == random.getstate()
    state = np.random.default_rng(trainer.args.seed)
    state.spawn(1)
    assert session.buffer.generators.shared.bit_generator.state == state.bit_generator.state
    assert [one.calls for one in Counting.made] == [0, 1], "the second one is thrown away"
    ready = Counting()
    attach(trainer, replay_sampler=ready)
    attach(trainer, replay_scorer=lambda groups, context: seen.append(1))
    assert (ready.calls, seen) == (0, []), "a ready-made object can't be made again, and is not tried"


def test_a_strategy_that_needs_its_plugins_columns_is_not_refused(trainer):
    seen = trl_replay.EvictorSpec("seen", lambda: lambda table, context: table.seen, "by a column of its own")
    with plugin("columns", strategies=lambda: [seen], admitted=lambda table, rows: None):  # which would write it
        attach(trainer, replay_evictor="columns/seen")


def test_without_a_buffer_nothing_is_tried(trainer):
    attach(trainer, replay_buffer_size=0, replay_scorer=f"{__name__}:Raising")
