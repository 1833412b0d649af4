"""Fresh live groups on their way into the buffer: collected at scoring, complete once their log-probs are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.transfer import Copies, begin, fetch
from ..batch.compose import trained_tokens
from ..compat import IS_RATIO, OLD_LOGPS, SAMPLING_LOGPS
from ..data.counters import Tally
from ..data.fields import STORED_REWARDS, FieldTable
from ..data.types import Floats, Group, Groups

STALE = "its reference log-probs are another reference model's: it changed since, or is not that of the checkpoint"


@dataclass(slots=True)
class Candidate:
    """This process's rows of a fresh live group.

    Attributes:
        serial (`int`): Its serial number.
        slot (`int`): Its index among the fresh groups that the scope shared.
        group ([`Group`], *optional*): The payload of the rows that this process has; None if it has none.
            `old_per_token_logps` is added at `complete`, where stock did not supply it.
        keys (`frozenset[str]`): Batch keys that it can restore, `pixel_values` for all that concern images.
        rows (`slice`): These rows in the process's batch.
        update (`int`): Updates done at generation.
        records (`list`): Per local row, the recorded log-probs `(C,)` on the training device; None until its forward
            ran.
        logps_dtype (`torch.dtype`): How recorded log-probs are kept.
        copies ([`Copies`], *optional*): The payload on its way to the CPU: begun as soon as it is complete, while the
            model trains.
    """

    serial: int
    slot: int
    group: Group | None
    keys: frozenset[str]
    rows: slice
    update: int
    records: list[torch.Tensor | None] = field(default_factory=list)
    logps_dtype: torch.dtype = torch.float32
    copies: Copies[str] | None = None

    @property
    def waits(self) -> bool:
        """Tell whether rows here still need log-probs."""
        return self.group is not None and OLD_LOGPS not in self.group.tensors

    def record(self, row: int, logps: torch.Tensor) -> bool:
        """Keep the log-probs, `(C,)`, of a row's first forward; return whether all rows have theirs."""
        if self.records[row] is None:
            # a view would keep the other rows of its micro-batch until the next generation batch
            self.records[row] = logps.clone()
        if any(record is None for record in self.records):
            return False
        with suppress(Exception):  # it happens again in describe, for all ranks to hear
            self.complete()
        return True

    def complete(self) -> bool:
        """Fill in the recorded log-probs; False if any local row's are missing."""
        if self.group is None or self.copies is not None:
            return True
        if OLD_LOGPS in self.group.tensors:
            fill_missing(self.group.tensors)
        elif not self._take_records(self.group):
            return False
        self.copies = begin(self.group.tensors)
        return True

    def payload(self) -> Group | None:
        """The rows that this process has, once complete: on the CPU."""
        if self.group is None or self.copies is None:
            return self.group
        return replace(self.group, tensors=self.copies.wait())

    def _take_records(self, group: Group) -> bool:
        lengths = group.completion_lengths.tolist()
        rows = []
        for record, length in zip(self.records, lengths, strict=True):
            if record is None:
                return False
            rows.append(record[:length])
        recorded = torch.cat(rows).to(self.logps_dtype)
        tensors = {**group.tensors, OLD_LOGPS: recorded}
        fill_missing(tensors)
        self.group = Group(tensors, group.keys | {OLD_LOGPS}, group.prompt_lengths, group.completion_lengths)
        self.records = []
        return True


@dataclass(frozen=True, slots=True)
class PendingGroups:
    """The candidates of one generation batch, the same ones on all processes that share the buffer.

    Attributes:
        groups ([`Groups`]): All fresh groups of that batch.
        candidates (`list[Candidate]`): By ascending serial.
        stale (`bool`): The reference model has changed since, and with it what these groups hold.
    """

    groups: Groups
    candidates: list[Candidate]
    stale: bool = False

    def outdated(self, key: str) -> PendingGroups:
        """These, marked as stale if one holds `key`: what its values were computed with has changed since."""
        held = any(key in candidate.keys for candidate in self.candidates)
        return replace(self, stale=self.stale or held)

    def describe(self, count: int) -> dict[str, NDArray[Any]]:
        """Describe them for scopes, as 8-byte columns over this process's `count` rows.

        `recorded` is 1 where a row's log-probs are known, `logps` the sum over its trainable tokens, and `nbytes`,
        which stands at the first local row of a candidate, the bytes of its local rows.
        """
        recorded = np.zeros(count, np.int64)
        logps = np.zeros(count)
        nbytes = np.zeros(count, np.int64)
        if any(candidate.rows.stop > count for candidate in self.candidates):  # batches are smaller now
            return {"recorded": recorded, "logps": logps, "nbytes": nbytes}
        complete = [candidate for candidate in self.candidates if candidate.group is not None and candidate.complete()]
        sums = fetch({candidate.serial: trainable_sums(_payload(candidate)) for candidate in complete})
        for candidate in complete:
            recorded[candidate.rows] = 1
            logps[candidate.rows] = sums[candidate.serial].numpy()
            nbytes[candidate.rows.start] = _payload(candidate).nbytes
        return {"recorded": recorded, "logps": logps, "nbytes": nbytes}

    def admissible(self, columns: Mapping[str, NDArray[Any]], tally: Tally) -> tuple[list[Candidate], Groups | None]:
        """The candidates that can be replayed correctly, and their view with log-probs; the others are counted.

        Args:
            columns (`Mapping[str, NDArray]`): Those of `describe`, as shared, over all rows.
            tally ([`Tally`]): Counts what is refused.

        Returns:
            `(usable, groups)`; `groups` is None if there are none.
        """
        if self.stale:
            tally.refuse(len(self.candidates), STALE)
            return [], None
        if len(columns["recorded"]) != self.groups.advantages.size:  # a training was interrupted
            tally.refuse(len(self.candidates), "batches have another size since it was generated")
            return [], None
        size = self.groups.advantages.shape[1]
        slots = np.array([candidate.slot for candidate in self.candidates], np.int64)
        recorded = columns["recorded"].reshape(-1, size)
        complete = recorded[slots].all(axis=1)
        logps = columns["logps"].reshape(-1, size)
        chosen = np.flatnonzero(complete)
        tally.refuse(len(slots) - len(chosen), "a row's first forward was missing or came after an update")
        if len(chosen) == 0:
            return [], None
        usable = [self.candidates[row] for row in chosen]
        return usable, self.groups.take(slots[chosen], logps[slots[chosen]])


def fill_missing(tensors: dict[str, torch.Tensor]) -> None:
    """Replace what vLLM could not score (NaN): the sampler is taken to agree with the policy there, as TRL does."""
    sampling = tensors.get(SAMPLING_LOGPS)
    if sampling is not None:
        policy = tensors[OLD_LOGPS].to(sampling)
        tensors[SAMPLING_LOGPS] = torch.where(sampling.isnan(), policy, sampling)
    ratio = tensors.get(IS_RATIO)
    if ratio is not None:
        tensors[IS_RATIO] = ratio.nan_to_num(nan=1.0)


def serials_of(pending: PendingGroups | None) -> list[int]:
    """The serial numbers of candidates, if there are any."""
    return [] if pending is None else [candidate.serial for candidate in pending.candidates]


SAVED = ("serial", "collected_at", "unfinished", "warmed", "settled")
"""Attributes of [`StepCarry`] that a checkpoint keeps."""


@dataclass(slots=True)
class StepCarry:
    """State that a session carries from one generation batch to the next.

    Attributes:
        serial (`int`): The next group's serial number.
        pending ([`PendingGroups`], *optional*): The last batch's candidates; None if they have settled.
        collected_at (`int`, *optional*): Update at which candidates were last collected.
        unfinished (`bool`): Whether a batch was scored since training last ended.
        warmed (`bool`): Whether the buffer was filled from `replay_warm_start`.
        settled (`dict[str, float]`): What further iterations have counted since the batch was generated, on all
            processes: the next batch's metrics tell it.
    """

    serial: int = 0
    pending: PendingGroups | None = None
    collected_at: int | None = None
    unfinished: bool = False
    warmed: bool = False
    settled: dict[str, float] = field(default_factory=dict)

    def take(self) -> PendingGroups | None:
        """Return the candidates, for the batch that settles them, and forget them here."""
        pending, self.pending = self.pending, None
        return pending

    def collected(self, pending: PendingGroups, update: int) -> None:
        """Keep a batch's candidates until the next batch settles them, with the number of updates done."""
        self.serial += len(pending.candidates)
        self.pending = pending
        self.collected_at = update

    def take_serials(self, count: int) -> range:
        """Take serial numbers for `count` groups, which no other group gets."""
        first = self.serial
        self.serial += count
        return range(first, self.serial)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, candidates apart."""
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, without candidates."""
        for name in SAVED:
            setattr(self, name, state[name])
        self.pending = None


def with_rewards(group: Group, rewards: Floats, key: str = STORED_REWARDS) -> Group:
    """The group with the raw rewards of its rows beside TRL's tensors.

    Args:
        group ([`Group`]): Without them.
        rewards (`(rows or more, functions)` or `(rows or more,)`): From the group's first row on.
        key (`str`, *optional*): `STORED_REWARD` if they are not of the trainer's functions.
    """
    rows = len(group.completion_lengths)
    kept = torch.from_numpy(rewards[:rows].astype(np.float32))
    return replace(group, tensors={**group.tensors, key: kept})


def named_rewards(rewards: NDArray[Any], then: Sequence[str], now: Sequence[str]) -> NDArray[Any]:
    """Raw rewards, `(…, functions)`, in the order of other reward functions; NaN for those that did not score. Of
    functions that share a name, the first goes with the first."""
    if list(then) == list(now):
        return rewards
    missing = np.full(rewards.shape[:-1], np.nan, rewards.dtype)
    known = _numbered(then)
    columns = [rewards[..., known.index(name)] if name in known else missing for name in _numbered(now)]
    return np.stack(columns, axis=-1)


def _numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    """Each name, and how often it came before."""
    return [(name, names[:place].count(name)) for place, name in enumerate(names)]


def with_named_rewards(group: Group, named: Callable[[NDArray[Any]], NDArray[Any]]) -> Group:
    """The group with its raw rewards as `named` orders them, on the CPU."""
    rewards = group.tensors.get(STORED_REWARDS)
    if rewards is None:
        return group
    ordered = torch.from_numpy(named(rewards.cpu().numpy()))
    return replace(group, tensors={**group.tensors, STORED_REWARDS: ordered})


def logps_dtype(fields: FieldTable) -> torch.dtype:
    """The type in which log-probs are kept."""
    dtype: torch.dtype = getattr(torch, fields.spec(OLD_LOGPS).dtype or "float32")
    return dtype


def _payload(candidate: Candidate) -> Group:
    assert candidate.group is not None
    return candidate.group


def trainable_sums(group: Group, key: str = OLD_LOGPS) -> torch.Tensor:
    """The summed behavior log-probs of each row's trainable tokens, float64, where the group is; those of masked
    tokens do not matter."""
    kept = torch.where(trained_tokens(group), group.tensors[key].float(), 0.0)
    rows = torch.split(kept, group.completion_lengths.tolist())
    return torch.stack([row.sum() for row in rows]).double()
