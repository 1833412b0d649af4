"""GFPO: which rows train, and their advantages and tokens, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from methods import SCRIPT, SIZE
from replaying import Checked, Watch, check_batches, check_losses
from support import Rewards, Spy, record

import trl_replay
from trl_replay.errors import RefusedError
from trl_replay.loss.supply import EXCLUDED, ROWS, SILENT
from trl_replay.testing import make_trainer
from trl_replay_papers.gfpo import Gfpo


class ShortestByHand:
    """GFPO's formula: the two shortest rows of each group, normalized between themselves."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def kept(self, step: int, slot: int) -> list[int]:
        lengths = self.watch.steps[step][0]["completion_mask"].sum(dim=1).tolist()
        rows = range(slot * SIZE, (slot + 1) * SIZE)
        return sorted(rows, key=lambda row: (lengths[row], row))[:2]

    def fresh(self, step: int) -> list[float]:
        advantages = [0.0] * 12
        for slot in range(3):
            kept = self.kept(step, slot)
            values = [float(self.watch.rewards[step][row, 0]) for row in kept]
            spread = abs(values[0] - values[1]) / np.sqrt(2)
            for row, value in zip(kept, values, strict=True):
                advantages[row] = (value - sum(values) / 2) / (spread + 1e-4)
        return advantages

    def advantages(self, step: int) -> torch.Tensor:
        found = self.fresh(step)
        for row, stored_row in self.watch.taken[step].items():
            origin, source = self.watch.source(*stored_row)
            found[row] = self.fresh(origin)[source]
        return torch.tensor(found)

    def left_out(self, step: int) -> list[bool]:
        found = []
        for row in range(12):
            origin, source = step, row
            if row in self.watch.taken[step]:
                origin, source = self.watch.source(*self.watch.taken[step][row])
            found.append(source not in self.kept(origin, source // SIZE))
        return found


@pytest.mark.parametrize("loss", ["dapo", "grpo", "bnpo", "dr_grpo", "cispo"])
def test_gfpo_trains_the_shortest_rows_normalized_among_themselves(tmp_path: Any, loss: str) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=6, trainer_class=Checked, loss_type=loss)
    session = trl_replay.attach(trainer, replay_plugins=["gfpo"], replay_start=0)
    watch = Watch(session, SIZE, trainer._tokenizer.pad_token_id)
    by_hand = ShortestByHand(watch)
    watch.advantages = by_hand.advantages
    trainer.watch, trainer.compared = watch, []
    trainer.train()
    check_batches(watch)
    check_losses(trainer)
    for step, (_, after) in enumerate(watch.steps):
        flags = after[ROWS][:, 1] & (SILENT | EXCLUDED)
        assert flags.bool().tolist() == by_hand.left_out(step)
        assert set(flags.tolist()) == {0, SILENT | EXCLUDED}
        tokens = after["completion_mask"].sum(dim=1)[~flags.bool()]
        assert int(after["num_items_in_batch"]) == int(tokens.sum()), "masked rows are no tokens of the batch"
    table = session.buffer.table
    assert (table.row_masked.sum(axis=1) == 2).all()
    assert (table.row_advantage[table.row_masked] == 0).all()
    assert session.metrics["replay/masked_rows_fraction"] == pytest.approx(0.5)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_rows_that_no_function_scored_are_left_out_without_a_warning(tmp_path: Any) -> None:
    script = [[None] * 4, [None, None, None, 1.0], [1.0, None, 0.0, 0.0]]
    trainer = make_trainer(tmp_path, Rewards(script), max_steps=2, trainer_class=Spy)
    steps = record(trl_replay.attach(trainer, replay_preset="gfpo"))
    trainer.train()
    for _, after in steps:
        left_out = (after[ROWS][:, 1] & EXCLUDED).bool().tolist()
        assert left_out[:7] == [True] * 7
        assert left_out[9], "unscored"
        assert left_out[8:].count(False) == 2
    assert np.isfinite([float(loss["loss"]) for loss in trainer.losses]).all()


@pytest.mark.parametrize("size", [2, 3])
def test_groups_of_which_one_row_would_be_kept_are_refused(tmp_path: Any, size: int) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), num_generations=size, per_device_train_batch_size=size)
    with pytest.raises(RefusedError, match=f"num_generations={size} a single completion"):
        trl_replay.attach(trainer, replay_preset="gfpo")


def test_keeping_more_rows_than_a_group_has_is_refused(tmp_path: Any) -> None:
    trl_replay.register(Gfpo(keep=5), "keeps_five")
    try:
        with pytest.raises(RefusedError, match=r"Gfpo\(keep=5\) keeps more than num_generations=4"):
            trl_replay.attach(make_trainer(tmp_path, Rewards(*SCRIPT)), replay_plugins=["keeps_five"])
    finally:
        trl_replay.unregister("keeps_five")
