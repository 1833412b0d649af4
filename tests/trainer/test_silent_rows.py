"""Rows and groups that train no token, and masks in mixed groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from methods import EVERY_GROUP, SAME_PROMPT
from support import DEAD, HALF, Rewards, record, replayed, tokens_of_replayed, truncating
from trl import GRPOTrainer

import trl_replay
from trl_replay.loss.micro_batch import ROWS, SILENT
from trl_replay.testing import make_trainer

SIZE = 4
MIDDLE = [1.0, 0.5, 0.0, 0.5]
"""The rows that `truncated` leaves trained have an advantage of 0."""
ALL_DEAD = [DEAD, DEAD, DEAD]
ALL_HALF = [HALF, HALF, HALF]
INJECT = {"replay_mixer": "inject", "replay_advantages": "joint", **EVERY_GROUP, **SAME_PROMPT}
NOTHING_TRAINS = "a group counted as dead though its rewards differ: no row with an advantage trains a token"


def trained(
    tmp_path: Any, *script: Any, rollout: Any = None, training: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, list[Any]]:
    """Trains with truncated completions masked; the session and its recorded steps."""
    trainer = make_trainer(
        tmp_path, Rewards(*script), mask_truncated_completions=True, **{"max_steps": 3, **(training or {})}
    )
    trainer.rollout_func = rollout or truncating()
    session = trl_replay.attach(trainer, **{"replay_start": 0, **settings})
    steps = record(session)
    trainer.train()
    return session, steps


def test_62_a_row_without_a_trained_token_has_no_log_prob_and_is_injected_nowhere(tmp_path: Any) -> None:
    session, steps = trained(tmp_path, ALL_HALF, ALL_DEAD, **INJECT)
    tokens = tokens_of_replayed(steps)
    assert len(tokens) == 6, "one row for each dead group"
    assert min(tokens) > 0
    assert np.isnan(session.buffer.table.row_logp).tolist() == [[True, False, True, False]] * 3
    assert session.buffer.table.row_trains.tolist() == [[False, True, False, True]] * 3


def first_row(table: Any, drawn: Any, slots: Any, context: Any) -> Any:
    """A mixer that does not look at what the rows train."""
    return np.tile([0, -1, -1, -1], (len(drawn), 1))


class FirstRow:
    @trl_replay.hookimpl
    def trl_replay_mix(self, table: Any, drawn: Any, slots: Any, context: Any) -> Any:
        return first_row(table, drawn, slots, context)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"replay_mixer": first_row}, "The mixer 'first_row'"),
        ({"replay_plugins": ["first_row"]}, "Plugin 'first_row' (registered in this process), in trl_replay_mix,"),
    ],
)
def test_62_a_mixer_that_chooses_such_a_row_is_named_and_the_fresh_row_stays(
    tmp_path: Any, plug: Any, settings: dict[str, Any], name: str
) -> None:
    plug(FirstRow(), "first_row")
    session, steps = trained(tmp_path, ALL_HALF, ALL_DEAD, **{**INJECT, **settings})
    assert tokens_of_replayed(steps) == []
    assert session.totals.reasons[f"{name} chose a stored row that trains nothing: the fresh row stays"] == 6


def test_62_a_group_that_is_replayed_whole_keeps_its_truncated_rows(tmp_path: Any) -> None:
    _, steps = trained(tmp_path, ALL_HALF, ALL_DEAD)
    assert replayed(steps) == [0, 3, 3]
    for _, after in steps[1:]:
        tokens = after["completion_mask"].sum(dim=1).view(3, SIZE)
        assert (tokens > 0).tolist() == [[False, True, False, True]] * 3


UNTRAINED = {
    "rows with an advantage are truncated": (MIDDLE, truncating()),
    "all rows are truncated": (HALF, truncating((0, 1, 2, 3), (0,))),
}


class Doubling:
    @trl_replay.hookimpl
    def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
        return 2 * groups.advantages


@pytest.mark.parametrize("plugin", [None, Doubling()], ids=["TRL's own advantages", "a plugin's advantages"])
@pytest.mark.parametrize("name", UNTRAINED)
def test_18_and_64_a_group_in_which_no_row_with_an_advantage_trains_a_token_is_dead(
    tmp_path: Any, plug: Any, name: str, plugin: Any
) -> None:
    rewards, rollout = UNTRAINED[name]
    settings = {"replay_plugins": plug(plugin)} if plugin else {}
    session, steps = trained(tmp_path, [rewards, HALF, HALF], rollout=rollout, **settings)
    assert session.totals.counters["dead"] == 3, "one of each batch"
    assert session.totals.counters["stored"] == 6, "the live ones"
    assert session.totals.counters["refused"] == 0
    assert replayed(steps) == [0, 1, 1], "it is replaced"
    assert session.totals.reasons[NOTHING_TRAINS] == 3
    assert NOTHING_TRAINS in session.explain()


@pytest.mark.parametrize("name", UNTRAINED)
def test_64_it_is_generated_again(tmp_path: Any, name: str) -> None:
    rewards, rollout = UNTRAINED[name]
    settings = {"replay_buffer_size": 0, "replay_refill_rounds": 1}
    session, _ = trained(
        tmp_path, [rewards, HALF, HALF], [HALF], rollout=rollout, training={"max_steps": 1}, **settings
    )
    assert session.totals.counters["generated"] == 4


@pytest.mark.parametrize("name", UNTRAINED)
def test_64_it_is_not_copied_but_copied_over(tmp_path: Any, name: str) -> None:
    rewards, rollout = UNTRAINED[name]
    _, steps = trained(
        tmp_path, [rewards, DEAD, HALF], rollout=rollout, replay_buffer_size=0, replay_unfilled="intra_batch"
    )
    for before, after in steps:
        live = before["advantages"].view(3, SIZE)[2].tolist()
        assert after["advantages"].view(3, SIZE).tolist() == [live] * 3


def test_64_a_mixed_group_that_would_train_no_row_with_an_advantage_stays_fresh(tmp_path: Any) -> None:
    """Two of four pass, and both rows that are left beside the stored ones have an advantage of 0."""

    def middle(table: Any, drawn: Any, slots: Any, context: Any) -> Any:
        return np.tile([-1, 1, -1, 3], (len(drawn), 1))

    quarters = [1.0, 0.5, 0.0, 0.5]
    session, steps = trained(
        tmp_path, ALL_HALF, [quarters] * 3, **{**INJECT, "replay_mixer": middle}, rollout=truncating()
    )
    assert session.totals.counters["dead"] == 6
    for _, after in steps[1:]:
        advantages = after["advantages"].view(3, SIZE)
        tokens = after["completion_mask"].sum(dim=1).view(3, SIZE)
        assert bool(((advantages.abs() > 1e-6) & (tokens > 0)).any(dim=1).all())


class Masking(GRPOTrainer):
    """Masks the first row of the first group, and the second of the second."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        advantages = batch["advantages"].clone()
        advantages[[0, SIZE + 1]] = float("nan")
        return {**batch, "advantages": advantages}


class Centered:
    @trl_replay.hookimpl
    def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
        return groups.reward - groups.reward.mean(axis=1, keepdims=True)


def test_134_a_plugin_unmasks_no_row_that_the_trainer_masked(tmp_path: Any, plug: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(ALL_HALF), max_steps=1, trainer_class=Masking)
    steps = record(trl_replay.attach(trainer, replay_plugins=plug(Centered()), replay_buffer_size=0))
    trainer.train()
    ((_, after),) = steps
    masked = (after[ROWS][:, 1] & SILENT).bool()
    assert masked.nonzero().flatten().tolist() == [0, SIZE + 1]
    assert after["advantages"].view(3, SIZE).tolist() == [
        [0.0, 0.5, -0.5, -0.5],
        [0.5, 0.0, -0.5, -0.5],
        [0.5, 0.5, -0.5, -0.5],
    ]


class LongestMasked:
    @trl_replay.hookimpl
    def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
        shaped = groups.advantages.copy()
        shaped[np.arange(len(groups)), groups.lengths.argmax(axis=1)] = np.nan
        return shaped


def second_row(table: Any, drawn: Any, slots: Any, context: Any) -> Any:
    """A mixer that puts the second stored row in the place of the second fresh one."""
    return np.tile([-1, 1, -1, -1], (len(drawn), 1))


@pytest.mark.parametrize(("stored", "longest"), [(1, 3), (9, 1)])
def test_65_a_hook_decides_again_which_rows_of_a_mixed_group_are_masked(
    tmp_path: Any, plug: Any, stored: int, longest: int
) -> None:
    """Of the fresh rows the last is the longest, and masked; a stored one may be longer."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        shortest = 2 if trainer.state.global_step else stored
        ids = [tokenizer("a" * (shortest + number % SIZE))["input_ids"] for number in range(len(prompts))]
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [[*row, tokenizer.eos_token_id] for row in ids],
            "logprobs": [[-1.0] * (len(row) + 1) for row in ids],
        }

    script = ([[0.0, 2.0, 0.0, 1.0]] * 3, [[0.0, 0.0, 1.0, 3.0]] * 3)
    settings = {**INJECT, "replay_mixer": second_row, "replay_plugins": plug(LongestMasked())}
    training = {"scale_rewards": "none", "max_steps": 2}
    session, steps = trained(tmp_path, *script, rollout=rollout, training=training, **settings)
    _, after = steps[1]
    rows = after[ROWS].view(3, SIZE, 2)
    assert (rows[:, :, 0] < 0).tolist() == [[False, True, False, False]] * 3
    masked = (rows[:, :, 1] & SILENT).bool()
    assert masked.tolist() == [[row == longest for row in range(SIZE)]] * 3
    trained_tokens = after["completion_mask"][~masked.flatten()].sum()
    assert int(after["num_items_in_batch"]) == int(trained_tokens)
    joint = np.array([0.0, 2.0, 1.0, 3.0]) - 1.5  # over all rows, as TRL's own before the hook
    joint[longest] = 0.0
    np.testing.assert_allclose(after["advantages"].view(3, SIZE).numpy(), [joint] * 3, atol=1e-6)
    assert session.metrics["replay/masked_rows_fraction"] == 0.25
