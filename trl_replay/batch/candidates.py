"""Live fresh groups that wait for their log-probs, and what is stored of a group beside TRL's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.transfer import Copies, begin
from ..compat import IS_RATIO, OLD_LOGPS, SAMPLING_LOGPS
from ..data.counters import Tally
from ..data.types import STORED_REWARDS, Floats, Group, Groups, Packed
from ..serialization.groups import pack
from .compose import MASKS, trained_tokens


def fill_missing(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace in place what vLLM could not score (NaN): the sampler is taken to agree with the policy there, as TRL
    does. Return the same."""
    sampling = tensors.get(SAMPLING_LOGPS)
    if sampling is not None:
        policy = tensors[OLD_LOGPS].to(sampling)
        tensors[SAMPLING_LOGPS] = torch.where(sampling.isnan(), policy, sampling)
    ratio = tensors.get(IS_RATIO)
    if ratio is not None:
        tensors[IS_RATIO] = ratio.nan_to_num(nan=1.0)
    return tensors


def with_rewards(group: Group, rewards: Floats) -> Group:
    """The group with the raw rewards of its rows beside TRL's tensors.

    Args:
        group ([`Group`]): Without them.
        rewards (`(rows or more, functions)` or `(rows or more,)`): From the group's first row on.
    """
    rows = len(group.completion_lengths)
    kept = torch.from_numpy(rewards[:rows].astype(np.float32))
    return Group({**group.tensors, STORED_REWARDS: kept}, group.keys, group.prompt_lengths, group.completion_lengths)


def trainable_sums(groups: Sequence[Group]) -> Floats:
    """The summed behavior log-probs of each row's trainable tokens, of groups on the CPU, one after the other; those
    of masked tokens do not matter."""
    kept = []
    for group in groups:
        logps = group.tensors[OLD_LOGPS]
        has_masks = not group.tensors.keys().isdisjoint(MASKS)
        kept.append((torch.where(trained_tokens(group), logps, 0.0) if has_masks else logps).numpy())
    lengths = np.concatenate([group.completion_lengths for group in groups])
    values = np.concatenate([*kept, np.zeros(1)])  # one more: a row at the end may be empty
    return np.where(lengths > 0, np.add.reduceat(values, lengths.cumsum() - lengths), 0.0)


LONGER = "a completion is longer than max_completion_length"


class Block:
    """Log-probs of one forward, `(rows, C)`, on their way to the CPU while the model trains.

    Args:
        logps (`torch.Tensor`): On the training device; nothing changes them.
    """

    def __init__(self, logps: torch.Tensor) -> None:
        self._logps = logps
        self._copies: Copies[int] | None = None
        self._rows: NDArray[np.float32] | None = None
        with suppress(Exception):  # it happens again in `rows`, for all ranks to hear
            self._begin()

    def _begin(self) -> Copies[int]:
        if self._copies is None:
            self._copies = begin({0: self._logps})
            del self._logps
        return self._copies

    def rows(self) -> NDArray[np.float32]:
        """They, on the CPU."""
        if self._rows is None:
            self._rows = self._begin().wait()[0].float().numpy()
        return self._rows


class Recorded(NamedTuple):
    """One row of a block."""

    block: Block
    place: int


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
        records (`list[Recorded]`): Per local row, its log-probs; None until its forward ran.
        images ([`Copies`], *optional*): Its images on their way to the CPU, while the model trains.
    """

    serial: int
    slot: int
    group: Group | None
    keys: frozenset[str]
    rows: slice
    update: int
    records: list[Recorded | None] = field(default_factory=list)
    images: Copies[str] | None = None
    _packed: Packed | None = None

    @property
    def waits(self) -> bool:
        """Tell whether rows here still need log-probs."""
        return self.group is not None and OLD_LOGPS not in self.group.tensors

    def complete(self) -> bool:
        """Fill in the recorded log-probs; False if any local row's are missing."""
        if self.group is None or not self.waits:
            return True
        lengths = self.group.completion_lengths.tolist()
        records = [record for record in self.records if record is not None]
        if len(records) < len(lengths):
            return False
        logps = np.full(sum(lengths), np.nan, np.float32)  # the loss may leave out a row's end
        end = 0
        for (block, place), length in zip(records, lengths, strict=True):
            row = block.rows()[place, :length]
            logps[end : end + len(row)] = row
            end += length
        recorded = torch.from_numpy(logps)
        if np.isnan(logps).any():
            recorded = torch.where(trained_tokens(self.group), recorded, recorded.nan_to_num(0.0))
        tensors = fill_missing({**self.group.tensors, OLD_LOGPS: recorded})
        group = self.group
        self.group = Group(tensors, group.keys | {OLD_LOGPS}, group.prompt_lengths, group.completion_lengths)
        self.records, self._packed = [], None
        return True

    def payload(self) -> Packed | None:
        """The rows that this process has, once complete: to be stored."""
        if self.group is None or self._packed is not None:
            return self._packed
        images = {} if self.images is None else self.images.wait()
        self._packed = pack(replace(self.group, tensors=self.group.tensors | images))
        return self._packed


@dataclass(frozen=True, slots=True)
class PendingGroups:
    """The candidates of one generation batch, the same ones on all processes that share the buffer.

    Attributes:
        groups ([`Groups`]): All fresh groups of that batch.
        candidates (`list[Candidate]`): By ascending serial.
    """

    groups: Groups
    candidates: list[Candidate]

    def up_to(self, longest: float) -> tuple[PendingGroups, int]:
        """These, without groups that have a longer completion, and the number of those."""
        fitting = [one for one in self.candidates if self.groups.lengths[one.slot].max() <= longest]
        return replace(self, candidates=fitting), len(self.candidates) - len(fitting)

    def describe(self, count: int) -> dict[str, NDArray[Any]]:
        """Complete the candidates whose log-probs are all recorded, and describe all for scopes, as 8-byte columns
        over this process's `count` rows.

        `recorded` is 1 where a row's log-probs are known, `logps` the sum over its trainable tokens, and `nbytes`,
        which stands at the first local row of a candidate, the bytes of its local rows.
        """
        recorded = np.zeros(count, np.int64)
        logps = np.zeros(count)
        nbytes = np.zeros(count, np.int64)
        if any(candidate.rows.stop > count for candidate in self.candidates):  # batches are smaller now
            return {"recorded": recorded, "logps": logps, "nbytes": nbytes}
        complete = [candidate for candidate in self.candidates if candidate.complete()]
        groups = []
        rows: list[int] = []
        for candidate in complete:
            payload = candidate.payload()
            if candidate.group is None or payload is None:
                continue
            groups.append(candidate.group)
            rows += range(candidate.rows.start, candidate.rows.stop)
            nbytes[candidate.rows.start] = len(payload.data)
        if groups:
            recorded[rows] = 1
            logps[rows] = trainable_sums(groups)
        return {"recorded": recorded, "logps": logps, "nbytes": nbytes}

    def admissible(self, columns: Mapping[str, NDArray[Any]], tally: Tally) -> tuple[list[Candidate], Groups | None]:
        """The candidates that can be replayed correctly, and their view with log-probs; the others are counted.

        Args:
            columns (`Mapping[str, NDArray]`): Those of `describe`, as shared, over all rows.
            tally ([`Tally`]): Counts what is refused.

        Returns:
            `(usable, groups)`; `groups` is None if there are none.
        """
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


def serials_of(pending: PendingGroups | None) -> list[int]:
    """The serial numbers of candidates, if there are any."""
    return [] if pending is None else [candidate.serial for candidate in pending.candidates]
