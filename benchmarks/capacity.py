"""Memory, traffic, checkpoints: what a buffer takes on many ranks, by scope, for docs/evidence-processes.md.

    python benchmarks/capacity.py   # prints the table; edit RUNS for a run of your own

The sizes of a group are those of a made-up one that goes through the same cutting and packing as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trl_replay.base.sizes import format_bytes
from trl_replay.batch.compose import cut
from trl_replay.batch.group_view import blank
from trl_replay.buffer.candidates import with_rewards
from trl_replay.data.fields import LOGPS_KEYS, FieldTable
from trl_replay.data.table import Table
from trl_replay.data.types import Group
from trl_replay.distributed.agreement import decision_message
from trl_replay.serialization.wire import packed_size
from trl_replay.strategies.scopes import GatheredScope, ProcessScope, ShardedScope

NUMBER = 8
"""Bytes of a number that ranks tell each other."""
SCOPES: dict[str, Callable[[Any], Any]] = {"process": ProcessScope, "gathered": GatheredScope, "sharded": ShardedScope}


@dataclass(frozen=True)
class Run:
    """A run as far as a buffer's size is concerned.

    Attributes:
        ranks (`int`): Processes.
        prompts (`int`): Groups of a generation batch, on all processes.
        generations (`int`): Completions of a group.
        tokens (`int`): Mean tokens of a completion.
        prompt_tokens (`int`): Tokens of a prompt.
        size (`int`): `replay_buffer_size`.
        live (`float`): Share of live groups.
        reference (`bool`): Whether there is a reference model (`beta` is not 0).
        logps_dtype (`str`): `replay_logps_dtype`.
    """

    ranks: int
    prompts: int
    generations: int = 8
    tokens: int = 1024
    prompt_tokens: int = 256
    size: int = 64
    live: float = 0.3
    reference: bool = False
    logps_dtype: str = "float32"

    @property
    def rows(self) -> int:
        """Completions of a batch on each process."""
        return math.ceil(self.prompts * self.generations / self.ranks)


@dataclass(frozen=True)
class Needs:
    """Memory of one scope, in bytes; traffic is what a rank receives in a step.

    Attributes:
        scope (`str`): Its name.
        groups (`int`): That the buffers of all ranks hold together.
        memory (`float`): Payload and table on each rank; of a shared buffer every rank has the whole table.
        columns (`int`): `share`.
        agreement (`int`): `agree`.
        payload (`float`): `admit` or `fetch`.
        checkpoint (`float`): What all ranks write together.
    """

    scope: str
    groups: int
    memory: float
    columns: int
    agreement: int
    payload: float
    checkpoint: float

    @property
    def traffic(self) -> float:
        """All that a rank receives in a step."""
        return self.columns + self.agreement + self.payload


def made_up_group(run: Run) -> Group:
    """A stored group of a run's sizes."""
    rows = run.generations
    prompts = torch.ones(rows, run.prompt_tokens, dtype=torch.int64)
    completions = torch.ones(rows, run.tokens, dtype=torch.int64)
    batch: dict[str, Any] = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-1, 1, rows),
        LOGPS_KEYS[0]: torch.zeros(rows, run.tokens),
    }
    if run.reference:
        batch["ref_per_token_logps"] = torch.zeros(rows, run.tokens)
    fields = FieldTable(pad_token_id=0, logps_dtype=run.logps_dtype)
    (group,) = cut(batch, fields, [slice(0, rows)])
    return with_rewards(group, np.zeros((rows, 1)))


def columns_of(rows: int) -> int:
    """Bytes that a rank with so many rows tells in `share`."""
    return NUMBER * rows * len(blank(0, 0))


def agreement_of(rows: int) -> int:
    """Bytes that it tells in `agree`: its mode, the message, and the length of an error's text."""
    return NUMBER * (1 + decision_message(rows).width + 1)


def needs(run: Run) -> list[Needs]:
    """Memory of each scope."""
    group = made_up_group(run)
    held, sent = group.nbytes, packed_size(group)
    entry = Table.empty(run.generations).row_bytes
    others = run.ranks - 1
    admitted = run.live * run.prompts
    filled = min((1 - run.live) * run.prompts, float(run.size * run.ranks)) / run.ranks  # of a rank's slots
    found = []
    for name, make in SCOPES.items():
        division = make(None).division
        groups = run.size if division.replicated else run.size * run.ranks
        payload = 0.0
        if division.replicated:
            payload = admitted * others / run.ranks * sent
        elif division.one_buffer:
            payload = filled * others / run.ranks * sent + NUMBER * others
        found.append(
            Needs(
                scope=name,
                groups=groups,
                memory=float(held * run.size + entry * (groups if division.one_buffer else run.size)),
                columns=columns_of(run.rows) * others if division.one_buffer else 0,
                agreement=agreement_of(run.rows) * others,
                payload=payload,
                checkpoint=float(held * groups),  # what all ranks hold is written once
            )
        )
    return found


RUNS = (
    Run(ranks=8, prompts=64, generations=8, tokens=1000),
    Run(ranks=64, prompts=512, generations=16, tokens=3000),
    Run(ranks=128, prompts=512, generations=16, tokens=20_000),
    Run(ranks=224, prompts=224, generations=8, tokens=32_000),
    Run(ranks=1024, prompts=2048, generations=16, tokens=8000),
)
"""The runs of the table."""


def table_row(run: Run) -> str:
    """A line of the table."""
    process, gathered, sharded = needs(run)
    cells = [
        f"{run.ranks:,}",
        f"{run.prompts:,} × {run.generations} × {run.tokens:,}",
        format_bytes(made_up_group(run).nbytes),
        f"{process.groups:,}",
        format_bytes(process.memory),
        format_bytes(sharded.memory),
        format_bytes(process.traffic),
        format_bytes(gathered.traffic),
        f"{format_bytes(sharded.traffic)} ({format_bytes(sharded.columns)})",
        format_bytes(process.checkpoint),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for run in RUNS:
        print(table_row(run))
