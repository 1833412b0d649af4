"""The seam's memory grows as the batch does: with the tokens, not with their square, and in no spare copies."""

import importlib
from pathlib import Path

import pytest
import torch
from allocations import Allocations, batch_bytes
from transformers import TrainerCallback

import trl_replay
from trl_replay.testing import make_trainer

ROOT = Path(__file__).parents[2]
SHORT, LONG = 128, 512
ALLOCATED = 11.0
"""Most that the seam may allocate in a step, in batches: nearly all of it one micro-batch after the other."""
AT_A_TIME = 1.95
"""Most of that at a time, in batches: the composed batch, copies of the live group and of the replayed one, which have
a third each, and what is computed meanwhile. A second padded copy would be one more."""


@pytest.fixture
def long(monkeypatch):
    """The benchmark of long completions."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("long")


class Watch(TrainerCallback):
    """Per step, what the seam allocated, and the most of it at a time."""

    def __init__(self, allocations):
        self.allocations = allocations
        self.steps = []

    def on_step_end(self, *args, **kwargs):
        self.steps.append((self.allocations.allocated, self.allocations.most))
        self.allocations.begin()


def steps_of(long, folder, tokens, **settings):
    """Memory that the seam allocates in each step but the first two, in batches."""
    allocations = Allocations()
    trainer = make_trainer(
        folder,
        importlib.import_module("overhead").half_dead(16),
        ["1="],
        allocations.trainer_class(_generate_single_turn=long.generate),
        long.make_long_model(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        num_generations=16,
        max_completion_length=tokens,
        max_steps=4,
        gradient_checkpointing=False,
    )
    session = trl_replay.attach(trainer, replay_buffer_size=2, **settings)
    torch.manual_seed(0)  # of the lengths: how many tokens each group has decides what its copies take
    allocations.watch(trainer)
    watch = Watch(allocations)
    trainer.add_callback(watch)
    with allocations:
        trainer.train()
    batch = sum(batch_bytes(micro) for micro in trainer._buffered_inputs)
    assert session.metrics["replay/replaced_fraction"] == 0.5
    assert len(session.buffer) == 2
    return [{"allocated": allocated / batch, "most": most / batch} for allocated, most in watch.steps[long.WARM_UP :]]


def test_what_the_seam_allocates_grows_as_the_batch_does_and_holds_no_second_one(long, tmp_path):
    short = steps_of(long, tmp_path / "short", SHORT)
    longer = steps_of(long, tmp_path / "long", LONG)
    for step in (*short, *longer):
        assert 1 < step["allocated"] < ALLOCATED
        assert 1 < step["most"] < AT_A_TIME
    grown = max(step["allocated"] for step in longer) / max(step["allocated"] for step in short)
    assert grown < 1.1, f"the batch has {LONG // SHORT} times as many tokens, and takes {grown:.2f} times as much each"


def test_a_copy_that_is_made_and_a_mask_of_the_widths_square_are_counted():
    allocations = Allocations()
    batch = torch.ones(4, 100)

    def work():
        copy = batch.clone()
        copy[:, 0] = 0  # nothing new
        view = copy[1:]
        del copy
        square = torch.ones(100, 100)
        del view, square
        batch.clone()

    with allocations:
        work()
        assert allocations.allocated == 0, "the seam was not open"
        allocations.around(work, seam=True)()
    assert allocations.allocated == 4 * (400 + 100 * 100 + 400)
    assert allocations.most == 4 * (400 + 100 * 100)
    allocations.begin()
    with allocations:
        allocations.around(batch.clone, seam=True)()
    assert (allocations.allocated, allocations.most) == (1600, 1600), "what was freed counts no more"
