"""The replay buffer: a table of metadata, the payloads, and the rules of capacity and eligibility."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.sizes import format_bytes
from ..base.transfer import fetch
from ..data.fields import PIXELS
from ..data.table import CORE, Table
from ..data.types import Bools, Group, Ints
from ..errors import ReplayError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on which entries are eligible for replay; None is no limit.

    Attributes:
        max_age (`int`, *optional*): Updates since generation.
        max_uses (`int`, *optional*): Replays of one entry.
    """

    max_age: int | None = None
    max_uses: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry to look at: rows in their order, texts decoded.

    Attributes:
        serial (`int`): Its serial number.
        prompts (`list[str]`): Of each row, special tokens included.
        completions (`list[str]`): Of each row, without special tokens.
        rewards (`dict[str, list[float]]`): Per reward function each row's reward, NaN where it returned None; under
            `"reward"` those of a file that does not name its functions.
        advantages (`list[float]`): As they were trained on.
        masked (`list[bool]`): Rows that train nothing.
        logps (`list[list[float]]`): Of each row, the log-prob of every completion token under the policy that
            generated it.
        columns (`dict[str, Any]`): Its row of the table: numbers, and of row columns lists.
    """

    serial: int
    prompts: list[str]
    completions: list[str]
    rewards: dict[str, list[float]]
    advantages: list[float]
    masked: list[bool]
    logps: list[list[float]]
    columns: dict[str, Any]


class ReplayBuffer:
    """Entries of up to `capacity` groups. The session fills and samples it; users look at it.

    Attributes:
        table ([`Table`]): The metadata columns.
        capacity (`int`): Groups (not rows, not tokens) that the buffer keeps.
        max_bytes (`int`, *optional*): Most bytes of payload and table rows.
        drops (`bool`): Whether a keep rank of -inf lets an entry leave where there is room.
        adder (`Callable`, *optional*): What `add` calls; set at attach.
        reader (`Callable`, *optional*): What `buffer[serial]` calls; set at attach.
    """

    def __init__(
        self, capacity: int, limits: Limits, max_bytes: int | None = None, size: int = 1, functions: int = 1
    ) -> None:
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.drops = False
        self.limits = limits
        self.table = Table.empty(size, functions)
        self._keysets: list[frozenset[str]] = []
        self._payload: dict[int, Group] = {}
        self._payload_bytes = 0
        self._has_warned = False
        self.adder: Callable[..., int] | None = None
        self.reader: Callable[[int], Entry] | None = None

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[int]:
        """Serial numbers of the entries, in the order of the table."""
        return iter(self.table.serial.tolist())

    def __contains__(self, serial: object) -> bool:
        if not isinstance(serial, int | np.integer):
            return False
        row = self.table.rows_of([int(serial)])[0]
        return bool(row >= 0)

    def __getitem__(self, serial: int) -> Entry:
        """Read an entry, as texts and numbers.

        Args:
            serial (`int`): Its serial number, as in `table.serial`.

        Raises:
            KeyError: No entry has it.
            ReplayError: Its payload is on another process, or the buffer belongs to no session.
        """
        if serial not in self:
            raise KeyError(serial)
        if serial not in self._payload:
            row = self.table.rows_of([serial])[0]
            owner = int(self.table.owner[row])
            raise ReplayError(
                f"The payload of entry {serial} is not here: it is on rank {owner}, where it arrives after the batch "
                "in which the entry is stored has been planned."
            )
        if self.reader is None:
            raise ReplayError("Only the buffer of a session can be read: attach(trainer).buffer[serial].")
        return self.reader(serial)

    @property
    def nbytes(self) -> int:
        """Bytes held: payload, and the used rows of all columns."""
        return self._payload_bytes + len(self.table) * self.table.row_bytes

    def add(self, source: Any, incomplete: str = "refuse", columns: Mapping[str, str] | None = None) -> int:
        """Add groups made elsewhere, on every process: another run's, a stronger model's, a person's.

        Args:
            source (`Any`): Paths of files, folders, or patterns, one or a list; or rows, as mappings, a `Dataset`, or
                a `DataFrame`, with `prompt`, `completion` and `reward`: docs/files.md lists all columns. All processes
                get the same.
            incomplete (`str`, *optional*, defaults to `"refuse"`): What to do with groups of too few rows;
                `"resample"` fills them up with rows of their own.
            columns (`Mapping[str, str]`, *optional*): What columns stand for that have other names:
                `{"question": "prompt"}`.

        Returns:
            How many groups are in the buffer now that were not before.

        Raises:
            ReplayError: The rows can't be used, or the buffer belongs to no session.
        """
        if self.adder is None:
            raise ReplayError(
                "Groups can be added to the buffer of an attached session only: attach(trainer).buffer.add(…)."
            )
        return self.adder(source, incomplete, columns)

    def clear(self) -> None:
        """Forget every entry. Groups noted but not yet settled are still stored later."""
        self._forget(np.arange(len(self)))

    def keyset(self, keys: frozenset[str]) -> int:
        """The number that stands for `keys` in the table's column of that name."""
        if keys not in self._keysets:
            self._keysets.append(keys)
        return self._keysets.index(keys)

    def offer(
        self,
        columns: Mapping[str, NDArray[Any]],
        rank: Callable[[Table], NDArray[Any]],
        rng: np.random.Generator,
        admitted: Callable[[Ints], None] | None = None,
    ) -> tuple[list[int], int]:
        """Offer newcomers' columns; over capacity the lowest keep ranks leave, of equal ranks the older.

        Args:
            columns (`Mapping[str, NDArray]`): One value a newcomer; `tag` is drawn here.
            rank (`Callable`): Maps the table, newcomers included, to keep ranks.
            rng (`numpy.random.Generator`): Draws the newcomers' tags.
            admitted (`Callable`, *optional*): Is told the newcomers' rows before any is ranked. What it raises takes
                them back.

        Returns:
            `(stored, evicted)`: serials of the newcomers that stayed, whose payload is expected by `receive`, and the
            number of old entries that left.
        """
        table = self.table
        serials: list[int] = columns["serial"].tolist()
        count = len(serials)
        first = len(table)
        tags = 1.0 - rng.random(count)  # in (0, 1]: log(tag) is finite
        table.append({**columns, "tag": tags}, count)
        rows = np.arange(first, first + count)
        if admitted is not None:
            try:
                admitted(rows)
            except Exception:
                self._forget(rows)
                raise
        left = self.trim(rank)
        stayed = table.rows_of(serials) >= 0
        stored = [serial for serial, stays in zip(serials, stayed, strict=True) if stays]
        newcomers_lost = count - len(stored)
        return stored, left - newcomers_lost

    def trim(self, rank: Callable[[Table], NDArray[Any]]) -> int:
        """Let the lowest keep ranks leave until the rest fits (with `drops` all of -inf); return how many left."""
        table = self.table
        excess = max(len(table) - self.capacity, 0)
        costs = table.nbytes + table.row_bytes
        total = int(costs.sum())
        is_over = self.max_bytes is not None and total > self.max_bytes
        if not (excess or is_over or (self.drops and len(table))):
            return 0
        ranks = rank(table)
        order = np.lexsort((table.serial, ranks))  # the lowest first, of equal ranks the older
        if self.drops:
            excess = max(excess, int(np.isneginf(ranks).sum()))
        if is_over:
            left = total - np.cumsum(costs[order])
            over = int(np.argmax(left <= self.max_bytes)) + 1
            if over > excess:
                self._warn_of_bytes(costs)
                excess = over
        return self._forget(order[:excess])

    def fits(self, nbytes: Ints) -> Bools:
        """Tell whether groups of `nbytes` payload would fit into the buffer alone."""
        most = np.inf if self.max_bytes is None else self.max_bytes - self.table.row_bytes
        return np.asarray(nbytes <= most)

    def load(self, serial: int) -> Group:
        """A fresh copy of payload that is on this process."""
        return self._payload[serial].map(torch.clone)

    def _warn_of_bytes(self, costs: Ints) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        mean = format_bytes(float(costs.mean()))
        warnings.warn(
            f"replay_max_bytes is reached with {len(costs) - 1} of replay_buffer_size={self.capacity} groups, and "
            f"evicts from now on. A group costs {mean} on average.",
            stacklevel=2,
        )

    def held(self) -> list[int]:
        """Serials of the entries whose payload is on this process, in the order of the table."""
        return [serial for serial in self.table.serial.tolist() if serial in self._payload]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, payload apart: copies of the table's `columns`, and `keysets`, sets of
        batch keys that its column `keys` counts in."""
        columns = {name: getattr(self.table, name).copy() for name in self.table.names}
        return {"columns": columns, "keysets": list(self._keysets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave in the place of its own entries; the payload that belongs here follows by
        `receive`.

        Columns of plugins that are absent now are left out, and new plugins' columns get their fill.

        Raises:
            KeyError: One of the table's own columns is missing.
        """
        self.clear()
        columns = state["columns"]
        renumbered = [self.keyset(keys) for keys in state["keysets"]]
        numbers = np.array(renumbered, np.int64)
        known = {name: columns[name] for name in self.table.names if name in CORE or name in columns}
        known["keys"] = numbers[columns["keys"]]
        self.table.append(known, len(columns["serial"]))

    def remember(self) -> Callable[[], None]:
        """Return what puts the entries of now back, with their payload."""
        state, payload, nbytes = self.state_dict(), dict(self._payload), self._payload_bytes

        def undo() -> None:
            self.load_state_dict(state)
            self._payload, self._payload_bytes = payload, nbytes

        return undo

    def receive(self, groups: Mapping[int, Group]) -> None:
        """Put away copies of the payload that lives on this process, in main memory.

        Args:
            groups (`Mapping[int, Group]`): By serial; their entries stand in the table.
        """
        for serial, group in _on_cpu(groups).items():
            self._payload[serial] = group.map(torch.clone)
            self._payload_bytes += group.nbytes

    def withdraw(self, serials: Sequence[int]) -> int:
        """Take back entries whose payload will not come or has no place; return their number."""
        if not len(serials):
            return 0
        rows = self.table.rows_of(serials)
        return self._forget(np.unique(rows[rows >= 0]))

    def eligible(
        self, update: int, keys: frozenset[str], unfit: Mapping[str, Bools] | None = None
    ) -> tuple[Ints, list[str]]:
        """Rows that may be replayed now, and what holds others back.

        Args:
            update (`int`): Updates done so far. An entry is eligible only after one update since its generation.
            keys (`frozenset[str]`): Batch keys that a group must be able to restore. `pixel_values` among them means
                that the batch can take groups with images; those without fit in any batch.
            unfit (`Mapping[str, NDArray]`, *optional*): Further reasons, each with the entries that it excludes.

        Returns:
            `(rows, reasons)`: row indices, and the reasons that exclude some entry.
        """
        too_new = {"too new": self.table.update >= update}
        excluded = too_new | self._spent(update) | self._unrestorable(keys) | dict(unfit or {})
        reasons = [reason for reason, entries in excluded.items() if entries.any()]
        eligible = np.ones(len(self.table), bool)
        for reason in reasons:
            eligible &= ~excluded[reason]
        return np.flatnonzero(eligible), reasons

    def _spent(self, update: int) -> dict[str, Bools]:
        """Return the entries that a limit excludes forever."""
        limits = self.limits
        excluded = {}
        if limits.max_age is not None:
            excluded["replay_max_age"] = update - self.table.update > limits.max_age
        if limits.max_uses is not None:
            excluded["replay_max_uses"] = self.table.uses >= limits.max_uses
        return excluded

    def _unrestorable(self, keys: frozenset[str]) -> dict[str, Bools]:
        """Return the entries that a batch with these keys can't take."""
        needed = keys - {PIXELS}
        unfit = {
            "lacks a tensor": [number for number, have in enumerate(self._keysets) if not needed <= have],
            "has images, the batch none": [] if PIXELS in keys else self._with(PIXELS),
        }
        return {reason: np.isin(self.table.keys, numbers) for reason, numbers in unfit.items() if numbers}

    def forget_with(self, key: str) -> int:
        """Drop the entries that hold the batch key `key`; return their number."""
        return self._forget_where(np.isin(self.table.keys, self._with(key)))

    def forget_prompts(self, prompts: Ints) -> int:
        """Drop the entries of these prompts; return their number."""
        return self._forget_where(np.isin(self.table.prompt, prompts)) if len(prompts) else 0

    def _with(self, key: str) -> list[int]:
        return [number for number, have in enumerate(self._keysets) if key in have]

    def use(self, rows: Ints) -> None:
        """Count that `rows` were replayed once more."""
        self.table.writable("uses")[rows] += 1

    def retire(self, update: int) -> int:
        """Drop the entries that no limit will ever let through again; return their number."""
        gone = np.zeros(len(self.table), bool)
        for spent in self._spent(update).values():
            gone |= spent
        return self._forget_where(gone)

    def _forget_where(self, gone: Bools) -> int:
        return self._forget(np.flatnonzero(gone))

    def _forget(self, rows: Sequence[int] | Ints) -> int:
        index = np.asarray(rows, dtype=np.int64)
        if len(index) == 0:
            return 0
        for serial in self.table.serial[index].tolist():
            group = self._payload.pop(serial, None)
            if group is not None:
                self._payload_bytes -= group.nbytes
        self.table.remove(index)
        return len(index)


def _on_cpu(groups: Mapping[int, Group]) -> dict[int, Group]:
    """Copy groups to the CPU, waiting for the device once."""
    tensors = {}
    for serial, group in groups.items():
        for key, tensor in group.tensors.items():
            tensors[serial, key] = tensor
    found = fetch(tensors)
    return {
        serial: replace(group, tensors={key: found[serial, key] for key in group.tensors})
        for serial, group in groups.items()
    }
