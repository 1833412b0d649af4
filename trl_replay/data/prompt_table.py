"""The prompts of a run: how often each was sampled, and how often it passed. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
LIMIT = 100_000
"""Prompts that a table keeps; those that were generated for the longest ago leave first."""
COLUMNS: dict[str, type] = {
    "key": np.int64,
    "prompt": np.int64,
    "tries": np.int64,
    "passes": np.int64,
    "dead_streak": np.int64,
    "update": np.int64,
    "pass_rate": np.float64,
    "shared_tries": np.int64,
    "shared_passes": np.int64,
}


class PromptTable:
    """A table of prompts as read-only columns of equal length, in order of first use.

    Attributes:
        key (`(n,)` int64): `context.key` of the prompt's dataset row.
        prompt (`(n,)` int64): A hash of its tokens, as in `Groups.prompt` and the buffer's table.
        tries (`(n,)` int64): Completions generated for it that were scored.
        passes (`(n,)` int64): Those of them that passed, where it was known what passes (`replay_pass_reward`).
        dead_streak (`(n,)` int64): Groups generated for it that were dead, since the last one that was live.
        update (`(n,)` int64): Optimizer updates done when it was last generated for.
        pass_rate (`(n,)` float64): Share of its last group's scored completions that passed; NaN if it was not known
            then what passes.
        shared_tries (`(n,)` int64): Those of the tries that all processes count: of a checkpoint that another number
            of processes wrote.
        shared_passes (`(n,)` int64): Those of the passes.

    Args:
        limit (`int`): The most prompts to keep.
    """

    key: Ints
    prompt: Ints
    tries: Ints
    passes: Ints
    dead_streak: Ints
    update: Ints
    pass_rate: NDArray[np.float64]
    shared_tries: Ints
    shared_passes: Ints

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._clear()

    def __len__(self) -> int:
        return len(self.key)

    def rows(self, keys: Sequence[int] | Ints) -> Ints:
        """Return the position of prompts in the columns, `(len(keys),)`; -1 for unknown ones."""
        found = [self._row.get(int(key), -1) for key in keys]
        return np.array(found, np.int64)

    def get(self, column: str, keys: Sequence[int] | Ints, default: float) -> NDArray[Any]:
        """Look up prompts in a column, `(len(keys),)`; `default` for prompts that were never sampled.

        >>> PromptTable().get("pass_rate", [17], default=0.5).tolist()
        [0.5]
        """
        rows = self.rows(keys)
        values = getattr(self, column)
        known = rows >= 0
        found = np.full(len(rows), default, values.dtype)
        found[known] = values[rows[known]]
        return found

    def note(
        self,
        keys: Ints,
        prompts: Ints,
        passed: NDArray[np.bool_],
        dead: NDArray[np.bool_],
        update: int,
        scored: NDArray[np.bool_] | None = None,
        known: bool = True,
    ) -> None:
        """Record generated groups.

        Args:
            keys (`(n,)` int64): Of their dataset rows; one may stand there more than once.
            prompts (`(n,)` int64): Hashes of their tokens.
            passed (`(n, G)` bool): Which completions passed.
            dead (`(n,)` bool): Which groups are dead.
            update (`int`): Updates done.
            scored (`(n, G)` bool, *optional*): Which completions have a reward; the others count for nothing.
            known (`bool`): Whether it is known what passes.
        """
        tried = np.full(len(keys), passed.shape[1]) if scored is None else scored.sum(axis=1)
        columns = self._with_room_for(keys.tolist())
        streaks = columns["dead_streak"]
        for number, key in enumerate(keys.tolist()):
            row = self._row[key]
            passes = int(passed[number].sum())
            columns["prompt"][row] = prompts[number]
            columns["update"][row] = update
            if not tried[number]:
                continue
            columns["tries"][row] += tried[number]
            columns["passes"][row] += passes
            columns["pass_rate"][row] = passes / tried[number] if known else np.nan
            streaks[row] += 1
            if not dead[number]:
                streaks[row] = 0
        self._put(columns)

    def _with_room_for(self, keys: list[int]) -> dict[str, NDArray[Any]]:
        """Return a copy of the columns with a row for each of these keys."""
        columns = self._columns()
        unknown = [key for key in dict.fromkeys(keys) if key not in self._row]
        for name, column in columns.items():
            blank = np.zeros(len(unknown), column.dtype)
            columns[name] = np.append(column, blank)
        for row, key in enumerate(unknown, len(self)):
            columns["key"][row] = key
            self._row[key] = row
        return columns

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """The columns."""
        return self._columns()

    def load_state_dict(self, *states: Mapping[str, NDArray[Any]], own: bool = False) -> None:
        """Restore the state from `state_dict`.

        Args:
            *states (`Mapping`): On one rank, or on several; of a prompt that several knew, all tries count, those that
                they share once, and the last one's outcome.
            own (`bool`): Whether no other process takes these: it goes on from its own.
        """
        joined = {name: np.concatenate([state[name] for state in states]) for name in COLUMNS}
        self._clear()
        columns = self._with_room_for(joined["key"].tolist())
        rows = self.rows(joined["key"])
        by_age = np.argsort(joined["update"], kind="stable")
        for name in ("prompt", "dead_streak", "update", "pass_rate"):
            columns[name][rows[by_age]] = joined[name][by_age]  # of a prompt, the last one stays
        for name in ("tries", "passes"):
            shared = f"shared_{name}"
            np.maximum.at(columns[shared], rows, joined[shared])
            np.add.at(columns[name], rows, joined[name] - joined[shared])
            columns[name] += columns[shared]
            if not own:
                columns[shared] = columns[name].copy()
        self._put(columns)

    def _clear(self) -> None:
        self._row: dict[int, int] = {}
        self._put({name: np.empty(0, dtype) for name, dtype in COLUMNS.items()})

    def _columns(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name).copy() for name in COLUMNS}

    def _put(self, columns: dict[str, NDArray[Any]]) -> None:
        surplus = len(columns["key"]) - self._limit
        if surplus > 0:
            leaving = surplus + max(self._limit // 16, 1)  # in one go, so that not every batch moves all
            by_age = np.argsort(columns["update"], kind="stable")
            oldest = by_age[:leaving]
            columns = {name: np.delete(column, oldest) for name, column in columns.items()}
            self._row = {key: row for row, key in enumerate(columns["key"].tolist())}
        for name, column in columns.items():
            column.flags.writeable = False
            setattr(self, name, column)
