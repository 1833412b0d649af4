"""Tasks: the dataset row of a group as a number, hashed from its content. Imports no torch."""

from __future__ import annotations

import datetime
import hashlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError

PROMPT_COLUMNS = ("prompt", "image", "images")
"""Columns of a row's prompt, in TRL's terms."""
PLAIN = (type(None), bool, int, float, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, Decimal)
"""Types of values whose `repr` is their content: of a float all bits, and of NaN always the same."""
REMEMBERED = 10_000
"""Prompts that are watched for rows that differ in other columns."""


class Tasks:
    """Identifies tasks: rows with equal content have equal keys, on every process and machine.

    Args:
        columns (`Sequence[str]`, *optional*): `replay_task_columns`.
        environments (`Callable`): Gives the environments of the rows generated last, if the trainer has any.
        warns (`bool`): Whether this process tells what it finds.

    Attributes:
        of_rows (`(B,)` int64): The keys of this process's rows in the generation at hand.
    """

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        environments: Callable[[], Sequence[Any]] = tuple,
        warns: bool = True,
    ) -> None:
        self.columns = columns
        self.environments = environments
        self.of_rows: NDArray[np.int64] = np.empty(0, np.int64)
        self._warns = warns
        self._left_out: set[str] = set()
        self._met: dict[int, dict[str, bytes]] = {}  # by prompt, the digests of its first row
        self._watches = columns is None
        self._keys: dict[tuple[tuple[str, Any], ...], int] = {}

    def key(self, row: Mapping[str, Any]) -> int:
        """Return a 63-bit hash of a row's prompt, images and other columns, except those that are None.

        Raises:
            ConfigurationError: The row lacks a column that `replay_task_columns` names.
        """
        digests: dict[str, bytes] = {}
        for name in self._names(row):
            digest = self._digest(name, row[name])
            if digest is not None:
                digests[name] = digest
        if self._watches and not digests.keys().isdisjoint(PROMPT_COLUMNS):
            self._watch(digests)
        return _joined(digests)

    def begin(self, inputs: Sequence[Mapping[str, Any]], first: int, size: int) -> None:
        """Record this process's rows before the trainer writes into them.

        Args:
            inputs (`Sequence[Mapping]`): Its rows.
            first (`int`): Index of the first one among those of all processes.
            size (`int`): Rows of a group, which are of one dataset row.
        """
        keys: list[int] = []
        for number in range(len(inputs)):
            is_first = not keys or (first + number) % size == 0
            keys.append(self._known_key(inputs[number]) if is_first else keys[-1])
        self.of_rows = np.array(keys, np.int64)

    def _known_key(self, row: Mapping[str, Any]) -> int:
        """Return [`key`][trl_replay.data.tasks.Tasks.key], which rows of the same texts and whole numbers have had."""
        if any(type(value) not in (str, int) for value in row.values()):
            return self.key(row)
        content = tuple(row.items())
        if content not in self._keys:
            if len(self._keys) == REMEMBERED:
                self._keys.clear()
            self._keys[content] = self.key(row)
        return self._keys[content]

    def _names(self, row: Mapping[str, Any]) -> list[str]:
        """Return the columns that count, in order."""
        present = {name for name, value in row.items() if value is not None}
        if self.columns is None:
            return sorted(present)
        missing = sorted(set(self.columns) - row.keys())
        if missing:
            raise ConfigurationError(
                f"replay_task_columns={list(self.columns)!r} can't be used: a row of the dataset has no column "
                f"{missing[0]!r}, it has {', '.join(map(repr, row))}. Name columns that every row has."
            )
        return sorted(present & {*PROMPT_COLUMNS, *self.columns})

    def _digest(self, name: str, value: Any) -> bytes | None:
        """Return a digest of the column's content; None if it can't be compared. A prompt that can't be compared
        matches no other."""
        try:
            return hashlib.blake2b(encoded(value), digest_size=8).digest()
        except (TypeError, RecursionError) as error:
            is_prompt = name in PROMPT_COLUMNS
            if name not in self._left_out:
                self._left_out.add(name)
                self._tell(
                    f"The dataset's column {name!r} can't be compared by its content ({error}): "
                    + ("no two groups count as one task." if is_prompt else "it does not tell tasks apart.")
                )
            return os.urandom(8) if is_prompt else None

    def _watch(self, digests: dict[str, bytes]) -> None:
        """Warn once if rows with the same prompt differ, and in which columns."""
        prompt = _joined({name: digests[name] for name in PROMPT_COLUMNS if name in digests})
        if len(self._met) < REMEMBERED:
            self._met.setdefault(prompt, digests)
        known = self._met.get(prompt, digests)
        if known == digests:
            return
        differing = sorted(name for name in known | digests if known.get(name) != digests.get(name))
        self._watches = False
        self._met = {}
        self._tell(
            f"Rows of the dataset with the same prompt differ in {', '.join(map(repr, differing))} and count as "
            "different tasks, which never exchange completions. If this does not tell tasks apart (an id, an "
            "index), set replay_task_columns to the columns that do, or to [] for the prompt alone."
        )

    def _tell(self, text: str) -> None:
        if self._warns:
            warnings.warn(text, stacklevel=2)


def hashed(*parts: bytes) -> int:
    """Return a 63-bit hash of byte strings, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(_framed(b"", part))
    return int.from_bytes(digest.digest(), "little") >> 1


def own(*numbers: int) -> int:
    """Return a negative task key that no other group can share, made of these numbers."""
    return -1 - hashed(encoded(numbers))


def task_of_group(tasks: NDArray[np.int64], rows: NDArray[np.int64], size: int, *moment: int) -> NDArray[np.int64]:
    """Return the task of each row's group: that of all its rows or, if they differ, a unique one.

    Args:
        tasks (`(B,)` int64): As each process knows them.
        rows (`(B,)` int64): Their indices among the rows of all processes.
        size (`int`): Rows of a group. If these are not whole groups, tasks stay as they are.
        *moment (`int`): No other generation has these numbers.
    """
    if len(tasks) % size:
        return tasks
    by_group = tasks.reshape(-1, size).copy()
    for group, (task, *others) in enumerate(by_group.tolist()):
        if any(other != task for other in others):
            by_group[group] = own(*moment, int(rows[group * size]))
    return by_group.ravel()


def encoded(value: Any) -> bytes:
    """Encode a value's content as bytes: floats by their bits (except NaN), lists and mappings by their items, arrays
    as lists, pictures by their pixels.

    Raises:
        TypeError: It is an object of which nothing is known.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, PLAIN):
        return _framed(b"plain", repr(value).encode())
    if isinstance(value, str):
        return _framed(b"text", value.encode(errors="surrogatepass"))
    if isinstance(value, bytes):
        return _framed(b"bytes", value)
    if isinstance(value, list | tuple):
        if all(map(PLAIN.__contains__, map(type, value))):  # of many numbers, at once
            return _framed(b"plain list", repr(list(value)).encode())
        return _framed(b"list", *map(encoded, value))
    if isinstance(value, Mapping):
        items = sorted(_framed(b"item", encoded(key), encoded(held)) for key, held in value.items())
        return _framed(b"mapping", *items)
    if hasattr(value, "getpalette"):  # a picture of PIL
        form = (value.mode, value.size, value.getpalette())
        return _framed(b"picture", encoded(form), value.tobytes())
    if hasattr(value, "tolist"):  # a tensor
        return encoded(value.tolist())
    raise TypeError(f"it holds a {type(value).__name__}")


def _framed(kind: bytes, *parts: bytes) -> bytes:
    """Encode parts so that different parts give different bytes."""
    framed = [kind, b"%d:" % len(parts)]
    for part in parts:
        framed += [b"%d:" % len(part), part]
    return b"".join(framed)


def _joined(digests: Mapping[str, bytes]) -> int:
    """Hash columns by name."""
    parts: list[bytes] = []
    for name, digest in sorted(digests.items()):
        parts += [name.encode(), digest]
    return hashed(*parts)
