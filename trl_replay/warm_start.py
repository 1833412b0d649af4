"""Fills the buffer with groups made elsewhere: read, grouped, tokenised, given log-probs, and offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast

from . import compat
from .batch import cut
from .candidates import trainable_sums, with_rewards
from .checkpoint import kind_of
from .errors import ConfigurationError, ReplayError
from .foreign import ForeignGroup, read_groups
from .report import Tally
from .session import Session
from .together import together
from .types import Batch, Floats, Group, Groups
from .views import STD_EPSILON, describe

FROM_FILE, FROM_POLICY = 1, 2
"""Values of the table's column `origin`: whose log-probs a group made elsewhere has; 0 is a group generated here."""


@dataclass(slots=True)
class Made:
    """A group as the buffer takes it."""

    group: Group
    view: Groups
    origin: int


def begin(session: Session) -> None:
    """Fills the buffer from `replay_warm_start`, once in the life of a run."""
    path = session.config.replay_warm_start
    if path is not None and not session.progress.warmed:
        add(session, path, session.config.replay_warm_start_short)
        session.progress.warmed = True


def add(session: Session, source: Any, short: str = "refuse") -> int:
    """What [`ReplayBuffer.add`] does."""
    if short not in ("refuse", "resample"):
        raise ConfigurationError(f"short={short!r} can't be used: give 'refuse' or 'resample'.")
    kind, tally, found = kind_of(session), Tally(), list[ForeignGroup]()
    if kind is None:
        raise ReplayError(f"How replay_scope={session.config.replay_scope!r} divides a buffer is not known.")
    together(lambda: found.extend(read_groups(session, source, short, tally)), ReplayError)
    advantages = _advantages(session, found)
    live = [number for number, values in enumerate(advantages) if np.ptp(values) > 0]
    tally.refuse(len(found) - len(live), "its rewards do not differ")
    made = [_make(session, found[number], advantages[number]) for number in live]
    rank, ranks = int(session.trainer.accelerator.process_index), session.parts.processes
    if kind == "process":
        made = made[rank::ranks]
    before = set(session.buffer.table.serial.tolist())
    _offer(session, made, kind, tally)
    session.totals.add(tally, batches=0)
    return len(set(session.buffer.table.serial.tolist()) - before)


def _offer(session: Session, made: Sequence[Made], kind: str, tally: Tally) -> None:
    if not made:
        return
    buffer, progress = session.buffer, session.progress
    rank, ranks = int(session.trainer.accelerator.process_index), session.parts.processes
    serials = [progress.serial + number for number in range(len(made))]
    progress.serial += len(made)
    kept = session.decide.offer(
        Groups.concatenate([each.view for each in made]),
        serials,
        [each.group.nbytes for each in made],
        [each.group.keys for each in made],
        tally,
    )
    for number, (serial, each) in enumerate(zip(serials, made, strict=True)):
        if serial not in kept:
            continue
        row = buffer.table.serial == serial
        owner = number % ranks if kind == "sharded" else rank
        buffer.table.origin[row], buffer.table.owner[row] = each.origin, owner
        if owner == rank:
            buffer.receive({serial: each.group})


def _make(session: Session, foreign: ForeignGroup, advantages: Floats) -> Made:
    """One group, through the same cutting as a batch of TRL's."""
    trainer, fields, size = session.trainer, session.parts.fields, session.parts.num_generations
    batch = _batch(session, foreign, advantages)
    origin = FROM_FILE
    if compat.OLD_LOGPS not in batch:
        origin, training = FROM_POLICY, trainer.model.training
        trainer.model.eval()
        batch = compat.with_old_logps(trainer, batch)
        trainer.model.train(training)
        if session.parts.processes > 1:  # all ranks must hold the same bits
            batch[compat.OLD_LOGPS] = broadcast(batch[compat.OLD_LOGPS].contiguous())
    (group,) = cut(batch, fields, [slice(0, size)])
    if "tool_mask" not in batch:  # a mask of ones takes no room, and lets runs with tools take the group
        group = Group(group.tensors, group.keys | {"tool_mask"}, group.prompt_lengths, group.completion_lengths)
    columns = describe(batch, 0, size, fields.pad_token_id)
    view = Groups(
        rewards=foreign.rewards[None],
        reward_weights=foreign.weights,
        advantages=columns["advantages"][None],
        lengths=columns["lengths"][None],
        trainable=columns["trainable"][None],
        items=columns["items"][None],
        dead=np.zeros(1, bool),
        step=np.array([session.update - 1]),  # so that it is old enough for the next batch
        prompt=columns["prompt"][:1],
        behaviour_logps=trainable_sums(group)[None],
    )
    return Made(with_rewards(group, foreign.rewards), view, origin)


def _batch(session: Session, foreign: ForeignGroup, advantages: Floats) -> Batch:
    """A batch of one group, padded as TRL pads."""
    device, fields = session.trainer.accelerator.device, session.parts.fields
    prompts, completions = foreign.prompt_ids, foreign.completion_ids
    widths = max(map(len, prompts)), max(map(len, completions))

    def padded(rows: Sequence[Sequence[float]], width: int, value: float, dtype: torch.dtype, left: bool) -> Any:
        out = torch.full((len(rows), width), value, dtype=dtype)
        for row, values in enumerate(rows):
            place = slice(width - len(values), width) if left else slice(0, len(values))
            out[row, place] = torch.tensor(values, dtype=dtype)
        return out.to(device)

    pad = fields.pad_token_id
    batch: Batch = {
        "prompt_ids": padded(prompts, widths[0], pad, torch.int64, left=True),
        "prompt_mask": padded([[1] * len(row) for row in prompts], widths[0], 0, torch.int64, left=True),
        "completion_ids": padded(completions, widths[1], pad, torch.int64, left=False),
        "completion_mask": padded([[1] * len(row) for row in completions], widths[1], 0, torch.int64, left=False),
        "advantages": torch.tensor(advantages, dtype=torch.float32, device=device),
    }
    for key, rows in foreign.tokens.items():
        spec = fields.spec(key)
        dtype = torch.float32 if spec.dtype in (None, "float32", "bfloat16") else torch.int64
        batch[key] = padded(rows, widths[1], fields.pad_value(spec), dtype, left=False)
    return batch


def _advantages(session: Session, found: Sequence[ForeignGroup]) -> list[Floats]:
    """The file's advantages; where it has none, TRL's normalisation of the weighted sum of its rewards.

    With `scale_rewards="batch"` the deviation is taken over all groups of the file.
    """
    sums = [np.nansum(group.rewards * group.weights, axis=1) for group in found]
    scale = compat.reward_setup(session.trainer).scale
    everything = np.concatenate(sums) if sums else np.zeros(0)
    deviation = float(everything.std(ddof=1)) if len(everything) > 1 else 0.0
    values = []
    for group, total in zip(found, sums, strict=True):
        std = {"none": 1.0 - STD_EPSILON, "batch": deviation}.get(scale, float(total.std(ddof=1)))
        computed = (total - total.mean()) / (std + STD_EPSILON)
        values.append(computed if group.advantages is None else group.advantages)
    return values
