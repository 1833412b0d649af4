"""Runs of methods, watched: which stored rows meet which fresh ones. And what tests share of their settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from advantages_by_hand import mixed_advantages
from replaying import Checked, Watch, check_batches, check_losses, watched
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay import hookimpl
from trl_replay.testing import make_trainer

EVERY_GROUP = {"replay_selector": "always(share=1.0)", "replay_record": "forward"}
SAME_PROMPT = {"replay_sampler": "same_prompt", "replay_start": 0}
INJECTED = {"replay_mixer": "inject(rows=2)", **EVERY_GROUP, **SAME_PROMPT}
"""Two stored rows of the same prompt into every group, live ones included."""
SIZE = 4
MOST = [1.0, 1.0, 1.0, 0.0]
SCRIPT = ([LIVE, HALF, MOST], [DEAD, LIVE, HALF], [HALF, DEAD, LIVE], [LIVE, MOST, DEAD])


class ZScore:
    """Rewards against the mean and deviation of all rewards of earlier batches (trl#7291)."""

    only_dead = True  # it looks on while others select

    def __init__(self):
        self.count, self.sum, self.squares = 0.0, 0.0, 0.0

    @hookimpl
    def trl_replay_advantages(self, groups, context):
        if not self.count:
            return None
        mean = self.sum / self.count
        return (groups.reward - mean) / (np.sqrt(max(self.squares / self.count - mean**2, 0.0)) + 1e-4)

    @hookimpl
    def trl_replay_select(self, groups, context):
        self.count += groups.reward.size
        self.sum += groups.reward.sum()
        self.squares += (groups.reward**2).sum()


def train(tmp_path: Any, mode: Any, replay: dict[str, Any], **training: Any) -> tuple[Any, Watch]:
    """Trains a method. Rows, tokens, masks and the loss are checked against those by hand, and, where stored rows
    stand beside fresh ones, the advantages of the mode, which may be a function of the watch and step."""
    scale = training.get("scale_rewards", "group")
    script = training.pop("script", SCRIPT)
    training = {"max_steps": 8, "trainer_class": Checked, **training}
    trainer = make_trainer(tmp_path, Rewards(*script), **training)
    session = trl_replay.attach(trainer, **replay)
    watch = watched(trainer, session)
    if callable(mode):
        watch.advantages = lambda step: mode(watch, step)
    elif mode is not None:
        watch.advantages = lambda step: mixed_advantages(watch, step, mode, (1.0,), scale, "sum_then_normalize")
    watch.trainer = trainer  # which a session holds weakly
    trainer.train()
    check_batches(watch)
    check_losses(trainer)
    return session, watch


MAXRL = {4: [0.0], 3: [1 / 3, -1.0], 2: [1.0, -1.0], 1: [3.0, -1.0], 0: [0.0, 0.0]}
"""MaxRL's advantages of a success and a failure, by the number of successes among four."""


def maxrl_advantages(watch: Watch, step: int) -> torch.Tensor:
    """`(B,)`: MaxRL's of fresh rows, and of stored ones as they were generated."""
    whole = [
        [MAXRL[int(sum(group))][int(not reward)] for group in rewards.view(-1, SIZE).tolist() for reward in group]
        for rewards in watch.rewards
    ]
    found = whole[step].copy()
    for row, stored in watch.taken[step].items():
        origin, source = watch.source(*stored)
        found[row] = whole[origin][source]
    return torch.tensor(found)


def mixed_slots(watch: Watch) -> Iterator[tuple[int, int, dict[int, tuple[int, int]]]]:
    """Step, slot, and which stored row (as serial and row) stands in which of its rows."""
    for step, taken in enumerate(watch.taken):
        for slot in sorted({row // SIZE for row in taken}):
            yield step, slot, {row % SIZE: stored for row, stored in taken.items() if row // SIZE == slot}


def fresh(watch: Watch, step: int, slot: int) -> list[float]:
    """The rewards of the slot's own rows."""
    return watch.rewards[step][slot * SIZE : (slot + 1) * SIZE, 0].tolist()


def stored(watch: Watch, serial: int, row: int) -> float:
    """The reward of a stored row."""
    step, source = watch.source(serial, row)
    return float(watch.rewards[step][source, 0])


def same_prompt(watch: Watch, step: int, slot: int, serial: int) -> bool:
    """The script's prompts are the same three in every batch."""
    return watch.origin[serial][1] == slot and watch.origin[serial][0] < step


def mean_logp(watch: Watch, serial: int, row: int) -> float:
    """Of a stored row, by the policy that generated it."""
    step, source = watch.source(serial, row)
    return float(watch.policy[step][source].mean())
