"""A trainer that gives each token its own advantage, watched."""

from __future__ import annotations

from typing import Any

import torch
from replaying import Checked, Watch, watched
from support import DEAD, HALF, LIVE

import trl_replay
from trl_replay.data.types import ADVANTAGES

CREDITED = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD], [HALF, DEAD, DEAD])
SHARES = torch.tensor([1.0, -0.5, 0.25, 0.0] * 8)
"""Of a row's advantage, by place: both signs within each row."""


def credited(batch: Any, shares: torch.Tensor = SHARES) -> Any:
    width = batch["completion_ids"].size(1)
    return {**batch, ADVANTAGES: batch[ADVANTAGES].unsqueeze(1) * shares[:width]}


class Credit(Checked):
    """The stock trainer with an advantage for each token."""

    shares = SHARES

    def _generate_and_score_completions(self, inputs):
        return credited(super()._generate_and_score_completions(inputs), self.shares)


def followed(trainer: Any, **chosen: Any) -> tuple[Any, Watch]:
    session = trl_replay.attach(trainer, replay_start=0, **chosen)
    watch = watched(trainer, session)
    trainer.train()
    return session, watch
