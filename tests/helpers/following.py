"""Follows tasks through a run: of each stored row in a batch, what it was generated for and what its slot asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from methods import SCRIPT
from support import DEAD, LIVE, Rewards, Spy

import trl_replay
from trl_replay.testing import make_trainer


class Followed:
    """The tasks of stored rows and of the slots that they stand in: by the column `label` of dataset rows, or by what
    environments call `secret`.

    Attributes:
        pairs (`list[tuple]`): Of each stored row in a batch, its entry's task and its slot's.
        born (`dict[int, Any]`): By serial, the task of each group that was to be stored.
    """

    def __init__(self, session: Any, born: dict[int, Any] | None = None) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self.born: dict[int, Any] = dict(born or {})
        begin, step, move = session.step.begin, session.step.take, session.step.communicator.move
        size = session.components.num_generations
        asked: list[Any] = []

        def beginning(inputs):
            asked[:] = of_all_ranks([row.get("label") for row in inputs])
            return begin(inputs)

        def moving(rows, decision):
            for entry, places in decision.plan.drawn():
                serial = int(session.buffer.table.serial[entry])
                self.pairs += [(self.born[serial], asked[place]) for place in places.tolist()]
            return move(rows, decision)

        def stepping(batch, score=None):
            environments = session.components.tasks.environments()
            if environments:
                asked[:] = of_all_ranks([environment.secret for environment in environments])
            out = step(batch, score)
            for candidate in session.step.carry.pending.candidates:
                self.born[candidate.serial] = asked[candidate.slot * size]
            return out

        session.step.begin, session.step.take, session.step.communicator.move = beginning, stepping, moving


def crossed(followed: Followed) -> list[tuple[Any, Any]]:
    """Stored rows that stand in a slot of another task."""
    return [(stored, slot) for stored, slot in followed.pairs if stored != slot]


def of_all_ranks(values: list[Any]) -> list[Any]:
    """The values of all processes, in their order."""
    if not torch.distributed.is_initialized():
        return values
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, values)
    return [value for part in found for value in part]


def build(folder: Path, rows: Sequence[dict[str, Any]], rewards: Any = None, **settings: Any) -> Any:
    """A trainer on these dataset rows, repeated; rewards are scripted."""
    rewards = rewards or Rewards(*[*SCRIPT, [DEAD, DEAD, LIVE]] * 4)
    trainer = make_trainer(folder, rewards, trainer_class=Spy, **{"max_steps": 16, **settings})
    trainer.train_dataset = Dataset.from_list(list(rows) * 32)
    return trainer


def follow(
    trainer: Any, resume: str | None = None, born: dict[int, Any] | None = None, **replay: Any
) -> tuple[Any, Followed]:
    """Trains with replay; `born` tells of entries that a run has left which this one resumes."""
    session = trl_replay.attach(trainer, **{"replay_start": 0, **replay})
    followed = Followed(session, born)
    trainer.train(resume_from_checkpoint=resume)
    return session, followed
