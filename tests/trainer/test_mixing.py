"""Stored rows beside fresh ones in a group: rows, advantages, token counts and losses, all written down by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from advantages_by_hand import mixed_advantages
from replaying import Checked, Watch, check_batches, check_losses
from support import DEAD, HALF, LIVE, LOSSES, Rewards, weights_hash

import trl_replay
from trl_replay.loss.micro_batch import ROWS
from trl_replay.testing import make_trainer

MOST = [1.0, 1.0, 1.0, 0.0]
SCRIPT = ([LIVE, HALF, MOST], [DEAD, LIVE, HALF], [HALF, DEAD, LIVE], [LIVE, MOST, DEAD])
OTHER = (
    [[0.5, 0.1, 0.2, 0.9], [0.3, 0.3, 0.1, 0.0], [0.2, 0.8, 0.7, 0.1]],
    [[0.1, 0.2, 0.3, 0.4], [0.9, 0.1, 0.5, 0.5], [0.0, 0.4, 0.4, 0.2]],
)
MIXED = {
    "replay_mixer": "inject",
    "replay_mixer_kwargs": {"rows": 2},
    "replay_sampler": "same_prompt",
    "replay_selector": "always",
    "replay_selector_kwargs": {"share": 1.0},
    "replay_record": "forward",
    "replay_start": 0,
}
"""Two stored rows of the same prompt into every group, live ones included."""


def mixed(
    tmp_path: Any,
    settings: dict[str, Any],
    rewards: Any = None,
    mode: str = "auto",
    weights: Any = (1.0,),
    scale: str = "group",
    aggregation: str = "sum_then_normalize",
    **training: Any,
) -> tuple[Any, Any, Watch]:
    """Trains with stored rows beside fresh ones, and checks rows, advantages and losses against those by hand."""
    training = {"max_steps": 6, "trainer_class": Checked, "scale_rewards": scale, **training}
    if aggregation != "sum_then_normalize":
        training["multi_objective_aggregation"] = aggregation
    trainer = make_trainer(tmp_path, rewards or Rewards(*SCRIPT), **training)
    session = trl_replay.attach(trainer, **{"replay_advantages": mode, **settings})
    watch = Watch(session, trainer.num_generations, trainer._tokenizer.pad_token_id)
    watch.advantages = lambda step: mixed_advantages(watch, step, mode, weights, scale, aggregation)
    trainer.watch, trainer.compared = watch, []
    trainer.train()
    check_batches(watch)
    check_losses(trainer)
    return trainer, session, watch


def partly(watch: Watch) -> int:
    """How many groups had fresh and stored rows."""
    return sum(
        0 < sum(row // watch.size == slot for row in taken) < watch.size
        for taken in watch.taken
        for slot in {row // watch.size for row in taken}
    )


@pytest.mark.parametrize("mode", ["auto", "stored", "joint", "split"])
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_advantages_and_loss_are_those_by_hand_for(tmp_path: Any, loss: str, mode: str) -> None:
    _, session, watch = mixed(tmp_path, MIXED, mode=mode, loss_type=loss)
    assert partly(watch) > 3
    assert session.totals.counters["lost"] == 0, "the forward shows every row's log-probs"
    assert session.totals.counters["stored"] > 8, "live groups are stored though their rows are displaced"


@pytest.mark.parametrize("mode", ["joint", "split"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_advantages_follow_trls_rules_with(tmp_path: Any, aggregation: str, scale: str, mode: str) -> None:
    first, second = Rewards(*SCRIPT), Rewards(*OTHER)
    second.__name__ = "other"
    _, _, watch = mixed(
        tmp_path,
        MIXED,
        [first, second],
        mode=mode,
        weights=(1.0, 0.7),
        scale=scale,
        aggregation=aggregation,
        reward_weights=[1.0, 0.7],
        loss_type="grpo",
    )
    assert partly(watch) > 3


SETTINGS: dict[str, dict[str, Any]] = {
    "two iterations": {"num_iterations": 2, "max_steps": 9},
    "accumulation": {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2},
    "two updates a batch": {
        "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 9,
    },
    "a reference model": {"beta": 0.1},
    "sequence level": {"importance_sampling_level": "sequence"},
    "truncated completions masked": {"mask_truncated_completions": True, "max_completion_length": 12, "max_steps": 9},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_are_mixed_rightly_with(tmp_path: Any, name: str) -> None:
    _, _, watch = mixed(tmp_path, MIXED, **SETTINGS[name])
    assert partly(watch) > 1


def test_rows_of_several_entries_and_rows_of_any_prompt_meet_in_one_group(tmp_path: Any) -> None:
    def several(table: Any, count: int, context: Any) -> Any:
        drawn = np.full((count, 2), -1)
        rows = context.rng.permutation(len(table))[: 2 * count]
        drawn.ravel()[: len(rows)] = rows
        return drawn

    def scattered(table: Any, drawn: Any, slots: Any, context: Any) -> Any:
        taken = np.full((len(drawn), 4), -1)
        for slot, entries in enumerate(drawn):
            known = [entry * 4 + row for entry in np.flatnonzero(entries >= 0) for row in range(4)]
            rows = context.rng.permutation(known)[:3]
            taken[slot, context.rng.permutation(4)[: len(rows)]] = rows
        return taken

    settings = {**MIXED, "replay_mixer_kwargs": None, "replay_sampler": several, "replay_mixer": scattered}
    _, session, watch = mixed(tmp_path, settings, mode="stored", max_steps=8)
    entries = [{taken[row][0] for row in taken if row // 4 == slot} for taken in watch.taken for slot in range(3)]
    assert max(map(len, entries)) == 2, "two entries gave rows to one slot"
    assert session.totals.counters["entries"] > session.totals.counters["replaced"]


def test_a_mixer_that_takes_nothing_and_advantages_that_are_trls_leave_training_bit_identical(tmp_path: Any) -> None:
    class Idle:
        @trl_replay.hookimpl
        def trl_replay_mix(self, table: Any, drawn: Any, slots: Any, context: Any) -> Any:
            return np.full(slots.advantages.shape, -1)

        @trl_replay.hookimpl
        def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
            return groups.advantages.copy()

    def trained(folder: str, **settings: Any) -> str:
        trainer = make_trainer(tmp_path / folder, Rewards(*SCRIPT), max_steps=6)
        if settings:
            trl_replay.attach(trainer, **settings)
        trainer.train()
        return weights_hash(trainer)

    trl_replay.register(Idle(), "idle")
    try:
        idle = {**MIXED, "replay_mixer": "whole", "replay_mixer_kwargs": None, "replay_plugins": ["idle"]}
        assert trained("idle", **idle) == trained("stock")
        assert trained("without a buffer", replay_plugins=["idle"], replay_buffer_size=0) == trained("again")
    finally:
        trl_replay.unregister("idle")


def test_only_stored_rows_are_flagged_and_fresh_ones_keep_a_ratio_of_one(tmp_path: Any) -> None:
    trainer, _, watch = mixed(tmp_path, MIXED, loss_type="grpo")
    for taken, (_, after) in zip(watch.taken, watch.steps, strict=True):
        flagged = np.flatnonzero((after[ROWS][:, 0] < 0).numpy()).tolist()
        assert flagged == sorted(taken)
    for loss in trainer.losses:
        if "old_per_token_logps" in loss["inputs"]:
            fresh = loss["inputs"].rows[:, 0] >= 0
            torch.testing.assert_close(
                loss["inputs"]["old_per_token_logps"][fresh], loss["logps"][fresh], rtol=0, atol=0
            )
