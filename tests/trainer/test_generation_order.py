"""New prompts of dynamic sampling where the trainer samples in an order: the dataset's, or a user's sampler's."""

from __future__ import annotations

import threading
from itertools import chain
from typing import Any

import pytest
import torch
from generating import PROMPTS, Coins
from trl import GRPOTrainer

import trl_replay
from trl_replay.testing import make_trainer

PROMPTS = PROMPTS[:12]


class Backwards(torch.utils.data.Sampler[int]):
    """TRL's rows, from the last to the first."""

    def __init__(self, stock):
        self.stock = stock

    def __iter__(self):
        return (11 - number for number in self.stock)

    def __len__(self):
        return len(self.stock)


class Sampled(GRPOTrainer):
    """A trainer with a sampler of its own, which may draw by a generator that it shares."""

    own: list[Any] | None = None

    def _get_train_sampler(self, dataset=None):
        stock = super()._get_train_sampler(dataset)
        if self.own:
            stock.shuffle, (stock.generator, stock.lock) = True, self.own
        return Backwards(stock)


def prompts_of(folder, own=None, refill=2, **settings):
    """The prompts of all calls of a run in which every group is dead, over a list of 12."""
    coins = Coins(0.0)
    trainer = make_trainer(folder, coins, PROMPTS, max_steps=5, **settings)
    trainer.train_dataset = trainer.train_dataset.select(range(12))
    trainer.own = own
    if refill:
        trl_replay.attach(trainer, replay_refill=f"new(rounds={refill})", replay_buffer_size=0)
    trainer.train()
    return coins.prompts


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, Sampled], ids=["the dataset's", "a sampler's"])
def test_175_new_prompts_are_drawn_at_random_where_the_trainer_samples_in_an_order(tmp_path, trainer_class):
    order = PROMPTS if trainer_class is GRPOTrainer else PROMPTS[::-1]
    found = prompts_of(tmp_path, trainer_class=trainer_class)
    for batch in range(len(found) // 3):
        first, *further = found[3 * batch : 3 * batch + 3]
        assert list(first) == [order[(3 * batch + place) % 12] for place in range(3)]
        drawn = list(chain(first, *further))
        assert len(set(drawn)) == len(drawn), "no prompt twice in a batch"


def test_175_a_sampler_is_not_read(tmp_path):
    """Its generator, and a lock that can't be copied, stay as they are."""
    runs = []
    for refill in (0, 2):
        own = [torch.Generator().manual_seed(3), threading.Lock()]
        runs.append(prompts_of(tmp_path / str(refill), own, refill, trainer_class=Sampled))
    assert runs[1][::3] == runs[0]
