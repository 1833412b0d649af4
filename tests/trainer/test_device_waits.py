"""A step hardly waits for the device, never in the loss, and no more often with more groups."""

import traceback
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import waits
from support import DEAD, HALF, LIVE, Rewards, weights_hash
from transformers import TrainerCallback

import trl_replay
from trl_replay.batch import groups
from trl_replay.errors import ResultError
from trl_replay.testing import make_trainer


class Each(TrainerCallback):
    """What replay did to the device in each update."""

    def __init__(self, device):
        self.updates = []
        self._device = device

    def on_step_begin(self, *args, **kwargs):
        waits.OURS.clear()
        waits.THEIRS.clear()
        self._device.update += 1

    def on_step_end(self, *args, **kwargs):
        self.updates.append(Counter(waits.OURS))

    def last(self, what):
        """In the last update, by file and function."""
        return {place: count for (kind, place), count in self.updates[-1].items() if kind == what}


def trained(folder, pattern, *callbacks, **settings):
    """The session of six updates, in which something is stored and logged; by default something is replayed, too."""
    replay = {name: settings.pop(name) for name in list(settings) if name.startswith("replay_")}
    rows = 4 * len(pattern)
    settings = {"trainer_class": waits.OnDevice, "max_steps": 6, "gradient_checkpointing": False, **settings}
    trainer = make_trainer(folder, Rewards(pattern), num_generations=4, per_device_train_batch_size=rows, **settings)
    session = trl_replay.attach(trainer, replay_start=0, **replay)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    assert session.metrics["replay/stored"] > 0
    return session


def counted(folder, monkeypatch, pattern, **settings):
    """What each update did."""
    device = waits.Device()
    device.install(monkeypatch.setattr)
    each = Each(device)
    session = trained(folder, pattern, each, **settings)
    assert (session.metrics["replay/replaced_fraction"] > 0) == (DEAD in pattern)
    return each


@pytest.mark.parametrize("groups", [3, 12])
def test_a_step_that_replays_waits_three_times_and_never_in_the_loss(tmp_path, monkeypatch, groups):
    """For what was scored, for what the correction gave, and to log; further copies were begun an update before."""
    each = counted(tmp_path, monkeypatch, [LIVE, HALF, DEAD] * (groups // 3))
    assert each.last(waits.WAIT) == {"base/progress.py: wait": 3}
    assert each.last(waits.LOSS) == {}
    assert each.last(waits.UP) == {}, "a copy from pageable memory waits"
    assert each.last(waits.PINNED) == {"base/progress.py: send": 3}, "the batch, row ids, and which rows are replayed"
    assert each.last(waits.BEFORE) == {"base/progress.py: wait": 1}, "the log-probs that the last loss recorded"
    assert sum(each.last(waits.CALL).values()) <= 100
    assert waits.THEIRS[waits.WAIT] > 20, "stock's own"


def test_a_step_that_replays_nothing_waits_twice_and_computes_next_to_nothing_on_the_device(tmp_path, monkeypatch):
    each = counted(tmp_path, monkeypatch, [LIVE, HALF, LIVE])
    assert each.last(waits.WAIT) == {"base/progress.py: wait": 2}
    assert each.last(waits.LOSS) == each.last(waits.UP) == {}
    assert each.last(waits.PINNED) == {"base/progress.py: send": 1}
    assert sum(each.last(waits.CALL).values()) <= 12


def test_the_counter_sees_copies_to_the_device_and_what_waits(monkeypatch):
    there = waits.mark(torch.ones(4))
    monkeypatch.setattr(waits, "PACKAGE", str(Path(__file__).parent))
    waits.OURS.clear()
    with waits.Watched():
        torch.ones(4).to(there.device)
        torch.tensor([1.0], device=there.device)
        there[[0, 1]] = torch.zeros(2)
        assert (waits.ours(waits.UP), waits.ours(waits.WAIT)) == (4, 0)
        torch.ones(4).to(there.device, non_blocking=True)
        assert (waits.ours(waits.UP), waits.ours(waits.PINNED)) == (4, 1)
        assert bool(there[3])
        assert there[there > 0].sum().item() == 2.0
    assert waits.ours(waits.WAIT) == 3


def test_log_probs_that_are_recorded_by_a_forward_leave_with_the_batch(tmp_path, monkeypatch):
    each = counted(tmp_path, monkeypatch, [LIVE, HALF, DEAD], replay_record="forward")
    assert each.last(waits.BEFORE) == {"base/progress.py: wait": 1}
    assert each.last(waits.LOSS) == each.last(waits.UP) == {}


def test_a_copy_that_can_not_be_begun_in_the_loss_is_made_by_the_step(tmp_path, monkeypatch):
    """There all processes hear of an error, if it fails again."""
    begin, failed = groups.begin, []

    def without_memory_once(tensors):
        if not failed:
            failed.append(tensors)
            raise RuntimeError("no pinned memory")
        return begin(tensors)

    monkeypatch.setattr(groups, "begin", without_memory_once)
    counted(tmp_path, monkeypatch, [LIVE, HALF, DEAD])
    assert failed


class NoNumbers:
    """A correction that gives no numbers from an update on, and what the weights were before and after."""

    def __init__(self, update):
        self.update = update
        self.hashes = []

    def __call__(self, rows, context):
        old = rows.behavior_logps * (float("nan") if context.update >= self.update else 1.0)
        return trl_replay.Corrected(old)


def test_a_correction_that_gives_no_numbers_is_refused_before_the_optimizer_steps(tmp_path):
    """Nobody looks at it in the loss, which would wait for the device."""
    correction = NoNumbers(3)
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=6)
    trl_replay.attach(trainer, replay_start=0, replay_correction=correction)

    class Weights(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            correction.hashes.append(weights_hash(trainer))

    trainer.add_callback(Weights())
    with pytest.raises(ResultError, match="old_logps that are not finite at update 3"):
        trainer.train()
    assert len(correction.hashes) == 4
    assert correction.hashes[-1] == weights_hash(trainer)
    assert correction.hashes[-1] != correction.hashes[-2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which alone tells what waits for it")
@pytest.mark.parametrize("pattern", [[LIVE, HALF, DEAD], [LIVE, HALF, LIVE]])
def test_on_a_gpu_torch_warns_of_no_wait_of_ours_in_the_loss(tmp_path, pattern):
    stacks = []

    def show(message, *args, **kwargs):
        if "synchron" in str(message):
            stacks.append([f"{frame.filename}:{frame.name}" for frame in traceback.extract_stack()])

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trained(tmp_path, pattern, trainer_class=None, use_cpu=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    innermost = [
        [frame for frame in stack if "/torch/" not in frame and __file__ not in frame][-1] for stack in stacks
    ]
    in_loss = [last for stack, last in zip(stacks, innermost, strict=True) if any(":compute_loss" in f for f in stack)]
    assert stacks, "TRL's own loss waits"
    assert not [last for last in in_loss if last.startswith(waits.PACKAGE)]
