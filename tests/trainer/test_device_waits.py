"""A step waits for the device a few times, and no more often with more groups."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import waits
from support import DEAD, HALF, LIVE, Rewards
from transformers import TrainerCallback

import trl_replay
from trl_replay.base import transfer
from trl_replay.batch import candidates
from trl_replay.testing import make_trainer


class Each(TrainerCallback):
    """The counts of each update, and the copies waited for that had been begun an update before."""

    def __init__(self) -> None:
        self.updates: list[Counter[str]] = []
        self.begun_before = 0
        self._number = 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        waits.WAITS.clear()
        self._number += 1
        self.begun_before = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.updates.append(Counter(waits.WAITS))

    def mark(self, device: Any) -> Any:
        """An event of a device that does what it is asked to within the update."""
        begun = self._number

        def synchronize() -> None:
            if begun == self._number:
                waits._note()
            else:
                self.begun_before += 1

        return SimpleNamespace(synchronize=synchronize)


def counted(folder: Path, monkeypatch: Any, pattern: list[Any], **settings: Any) -> Each:
    """The waits of the last of six updates, in which something is stored, replayed and logged."""
    each = Each()
    monkeypatch.setattr(transfer, "mark", each.mark)
    replay = {name: settings.pop(name) for name in list(settings) if name.startswith("replay_")}
    rows = 4 * len(pattern)
    trainer = make_trainer(
        folder, Rewards(pattern), trainer_class=waits.OnDevice, max_steps=6, num_generations=4,
        per_device_train_batch_size=rows, gradient_checkpointing=False, **settings,
    )  # fmt: skip
    session = trl_replay.attach(trainer, replay_start=0, **replay)
    trainer.add_callback(each)
    trainer.train()
    assert session.metrics["replay/replaced_fraction"] > 0
    assert session.metrics["replay/stored"] > 0
    return each


EVERY_STEP = {
    # the batch's columns; its candidates' sums; rewards; lengths of the rows that are cut out; and, where the trainer
    # logs, the means over fresh rows
    "base/transfer.py: wait": 4,
    "batch/compose.py: padding": 1,
    "hooks.py: correct": 1,
    "loss/off_policy_stats.py: metrics": 1,
}
"""What replay waits for, whatever the number of groups. `correct` once in each loss with replayed rows."""


@pytest.mark.parametrize("groups", [3, 12])
def test_a_step_waits_for_the_device_a_few_times_however_many_groups_there_are(
    tmp_path: Path, monkeypatch: Any, groups: int
) -> None:
    each = counted(tmp_path, monkeypatch, [LIVE, HALF, DEAD] * (groups // 3))
    assert each.updates[-1] == EVERY_STEP
    assert each.begun_before == 2 * (groups // 3), "the live groups' payload, while the model trained"


def test_log_probs_that_are_recorded_by_a_forward_leave_with_the_batch(tmp_path: Path, monkeypatch: Any) -> None:
    each = counted(tmp_path, monkeypatch, [LIVE, HALF, DEAD], replay_record="forward")
    assert each.begun_before == 2


def test_a_copy_that_can_not_be_begun_in_the_loss_is_made_by_the_step(tmp_path: Path, monkeypatch: Any) -> None:
    """There all processes hear of an error, if it fails again."""
    begin, failed = transfer.begin, []

    def without_memory_once(tensors: Any) -> Any:
        if not failed:
            failed.append(tensors)
            raise RuntimeError("no pinned memory")
        return begin(tensors)

    monkeypatch.setattr(candidates, "begin", without_memory_once)
    counted(tmp_path, monkeypatch, [LIVE, HALF, DEAD])
    assert failed
