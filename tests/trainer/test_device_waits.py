"""How often a step waits for the device: a few times, and no more often with more groups."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import waits
from support import DEAD, HALF, LIVE, Rewards
from transformers import TrainerCallback

import trl_replay
from trl_replay import transfer
from trl_replay.testing import make_trainer


class Each(TrainerCallback):
    """What was counted in each update."""

    def __init__(self) -> None:
        self.updates: list[Counter[str]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        waits.WAITS.clear()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.updates.append(Counter(waits.WAITS))


def counted(folder: Path, monkeypatch: Any, pattern: list[Any], **settings: Any) -> Counter[str]:
    """The waits of the last of six updates, in which something is stored, replayed and logged."""

    def together(devices: set[Any]) -> None:
        if devices:
            waits._note()

    monkeypatch.setattr(transfer, "wait", together)
    replay = {name: settings.pop(name) for name in list(settings) if name.startswith("replay_")}
    rows = 4 * len(pattern)
    trainer = make_trainer(
        folder, Rewards(pattern), trainer_class=waits.OnDevice, max_steps=6, num_generations=4,
        per_device_train_batch_size=rows, gradient_checkpointing=False, **settings,
    )  # fmt: skip
    session = trl_replay.attach(trainer, replay_start=0, **replay)
    each = Each()
    trainer.add_callback(each)
    trainer.train()
    assert session.metrics["replay/replaced_fraction"] > 0
    assert session.metrics["replay/stored"] > 0
    return each.updates[-1]


EVERY_STEP = {
    # the batch's columns; its candidates' sums; the last replay's figures; rewards; lengths of the rows that are cut
    # out; what is stored; and, where the trainer logs, the means over fresh rows
    "transfer.py: fetch": 7,
    "batch/compose.py: padding": 1,
    "hooks.py: correct": 1,
    "loss/off_policy_stats.py: metrics": 1,
}
"""What replay waits for, whatever the number of groups. `correct` once in each loss with replayed rows."""


@pytest.mark.parametrize("groups", [3, 12])
def test_a_step_waits_for_the_device_a_few_times_however_many_groups_there_are(
    tmp_path: Path, monkeypatch: Any, groups: int
) -> None:
    found = counted(tmp_path, monkeypatch, [LIVE, HALF, DEAD] * (groups // 3))
    assert found == EVERY_STEP
