"""Where the groups of a batch lie, and the prompts that are generated for beside the batch's own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar

import numpy as np

from .. import compat
from ..data.types import Bools, InputsContext, Ints, Row
from ..errors import SeamError
from ..setup.settings import Components

TRIES = 8
LEAST_TRIES = 64
"""Rows that are looked at for each that is wanted, and at least: a dataset may repeat a few prompts many times."""


def repeated(rows: Sequence[Row], size: int) -> list[Row]:
    """Repeat each row `size` times as copies, since the trainer writes into its inputs."""
    return [copy.deepcopy(row) for row in rows for _ in range(size)]


Data: TypeAlias = tuple[Any, Callable[[list[Any]], Any]]
"""A dataset, and what makes a batch of some of its rows."""


class Dataset:
    """The trainer's dataset, by row number.

    Args:
        data (`Callable`): Gives the dataset and what makes a batch of its rows: both may change with every `train()`.
        key (`Callable`): Tells rows apart.
    """

    def __init__(self, data: Callable[[], Data], key: Callable[[Row], int]) -> None:
        self._data = data
        self.key = key
        self._numbers: dict[int, int] = {}
        self._indexed: Any = None

    def __len__(self) -> int:
        """Number of rows.

        Raises:
            SeamError: It is a stream.
        """
        dataset, _ = self._data()
        if compat.streams(dataset):
            raise SeamError(
                f"The trainer's dataset is a stream ({type(dataset).__name__}) without row numbers: it has no new "
                "prompts, and no row can be found by its key. Use a dataset with a length."
            )
        return len(dataset)

    @property
    def size(self) -> int | None:
        """Number of rows; None for a stream."""
        dataset, _ = self._data()
        return None if compat.streams(dataset) else len(dataset)

    @property
    def columns(self) -> set[str] | None:
        """Names of the columns; None for a stream that does not list them."""
        dataset, _ = self._data()
        names = getattr(dataset, "column_names", None)
        if names is None and self.size:
            names = self.row(0)
        return None if names is None else set(names)

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows, as the trainer's collator returns them."""
        return map(self.row, range(len(self)))

    def row(self, number: int) -> Row:
        """Return one row, as the trainer's collator returns it.

        Raises:
            SeamError: It gives something else than one row for one.
        """
        dataset, collate = self._data()
        collated = collate([dataset[number]])
        rows = collated if isinstance(collated, list) else []
        if len(rows) != 1 or not isinstance(rows[0], Mapping):
            raise SeamError(
                f"The trainer's data_collator returns a {type(collated).__name__} for a row of its dataset, not a "
                "list with that row, so new prompts can't be sampled. Use replay_refill='same(rounds=…)'."
            )
        return dict(rows[0])

    def number_of(self, key: int) -> int | None:
        """Return the number of the first row with this key. The first call reads the whole dataset."""
        dataset, _ = self._data()
        if self._indexed is not dataset:
            self._indexed = dataset
            self._numbers = {}
            for number in reversed(range(len(self))):
                self._numbers[self.key(self.row(number))] = number
        return self._numbers.get(key)


class PromptSource:
    """New prompts of the dataset: each once per epoch, shuffled. Ranks with their own batches share one order and take
    disjoint parts.

    Args:
        dataset ([`Dataset`]): Where they come from.
        seed (`int`): The same on all ranks.
        part (`int`): Which part is this rank's.
        parts (`int`): How many there are.

    Attributes:
        position (`int`): How many of this rank's part have been passed in this order.
        order (`int`): How many orders were begun before.
    """

    def __init__(self, dataset: Dataset, seed: int, part: int = 0, parts: int = 1) -> None:
        self._dataset = dataset
        self._seed = seed
        self._part = part
        self._parts = parts
        self.position = 0
        self.order = 0
        self._size = -1
        self._numbers: Ints = np.empty(0, np.int64)
        self._shuffled = (-1, -1)  # the order and the size that the numbers are of

    def take(self, count: int, present: Collection[int] = (), skip: Callable[[Row], bool] | None = None) -> list[Row]:
        """Return up to `count` rows with distinct keys that are not in `present`.

        Args:
            count (`int`): How many.
            present (`Collection[int]`): Keys that are there already.
            skip (`Callable`, *optional*): Tells rows that are not wanted.
        """
        rows: list[Row] = []
        others: list[Row] = []
        taken = set(present)
        left = min(self._begin(), count * TRIES + LEAST_TRIES)
        while len(rows) < count and left:
            row = self._next()
            key = self._dataset.key(row)
            unwanted = key in taken or (skip is not None and skip(row))
            (others if unwanted else rows).append(row)
            taken.add(key)
            left -= 1
        again = itertools.cycle(others or rows)  # a dataset with fewer prompts than are asked for
        missing = count - len(rows)
        return rows + list(itertools.islice(again, missing))

    def _next(self) -> Row:
        """Return the next row of this rank's part, or the first one of the next order."""
        if self.position == len(self._numbers):
            self.position = 0
            self.order += 1
            self._begin()
        number = int(self._numbers[self.position])
        self.position += 1
        return self._dataset.row(number)

    def _begin(self) -> int:
        """Compute this order's part if needed; return its length."""
        size = len(self._dataset)
        if self._size not in (-1, size):  # another dataset
            self.position = 0
        self._size = size
        if self._shuffled != (self.order, size):  # of ten million rows, shuffling takes a second
            rng = np.random.default_rng([self._seed, self.order])
            shuffled = rng.permutation(size)
            mine = shuffled[self._part :: self._parts]
            self._numbers = mine if len(mine) else shuffled
            self._shuffled = (self.order, size)
        self.position = min(self.position, len(self._numbers))
        return len(self._numbers)

    def state_dict(self) -> dict[str, int]:
        """Return the position in the current order."""
        return {"position": self.position, "order": self.order, "size": self._size, "parts": self._parts}

    def load_state_dict(self, *states: Mapping[str, int]) -> None:
        """Continue at the saved position of this rank's part, or of the only state; with another number of ranks or
        rows, at the beginning of the next order."""
        state = states[self._part] if len(states) == self._parts else max(states, key=lambda state: state["order"])
        goes_on = state["parts"] == self._parts and state["size"] in (-1, self._dataset.size)
        self._size = -1
        self.position = state["position"] if goes_on else 0
        self.order = state["order"] + (not goes_on)


_Rank = TypeVar("_Rank", int, Ints)


class GroupPlaces:
    """Layout of the groups of a batch or of a further round on processes.

    Whole groups: a round has as many groups on each process as the process that needs most. Groups that straddle
    processes: a round is a whole batch, laid out as the batch itself.

    Args:
        rows (`int`): Rows of each process's batch.
        size (`int`): Rows of a group.
        rank (`int`): This process.
        ranks (`int`): Number of processes.

    Attributes:
        groups (`int`): Groups of the batch, on all processes.
        straddles (`bool`): Whether groups straddle processes.
        width (`int`): Groups with rows on one process, at most.
    """

    def __init__(self, rows: int, size: int, rank: int, ranks: int) -> None:
        self.rows = rows
        self.size = size
        self.rank = rank
        self.ranks = ranks
        self.groups = rows * ranks // size
        self.straddles = rows % size != 0
        self.width = max(self.here(rank) for rank in range(ranks))

    def first(self, rank: _Rank) -> _Rank:
        """The first group with rows on a process (or on each of several)."""
        return rank * self.rows // self.size

    def here(self, rank: _Rank) -> _Rank:
        """Return the number of groups with rows on a process (or on each of several)."""
        end = (rank + 1) * self.rows
        last = (end - 1) // self.size
        return last - self.first(rank) + 1

    @property
    def mine_first(self) -> int:
        """The first group with rows on this process."""
        return self.first(self.rank)

    @property
    def mine_here(self) -> int:
        """Number of groups with rows on this process."""
        return self.here(self.rank)

    def rows_here(self) -> list[range]:
        """Return, for each group with rows here, its range of rows in this process's batch."""
        parts = []
        start = self.mine_first * self.size - self.rank * self.rows
        for _ in range(self.mine_here):
            stop = start + self.size
            parts.append(range(max(start, 0), min(stop, self.rows)))
            start = stop
        return parts

    def begins(self) -> Bools:
        """Return a mask of the groups with rows here whose first row is here, which this process counts."""
        groups = self.mine_first + np.arange(self.mine_here)
        first_rows = groups * self.size
        return np.asarray(first_rows >= self.rank * self.rows)

    def of_round(self, needed: int) -> GroupPlaces:
        """Return the layout of a round in which the neediest process needs `needed` groups."""
        if self.straddles:
            return self
        return GroupPlaces(needed * self.size, self.size, self.rank, self.ranks)


_T = TypeVar("_T")
ANY = -1
"""A prompt of a further round that is not that of a dead slot."""


class Prompts:
    """The current batch's prompts, one row per group with rows on this process.

    Args:
        trainer (`Callable`): Gives the trainer.
        layout ([`GroupPlaces`]): Where groups lie.
        hooks ([`CheckedHooks`]): Plugins, which may change prompts.
        context (`Callable`): What strategies may know at this moment.
        key (`Callable`): Tells rows apart.
        seed (`int`): The same on all processes.
        again (`str`): Of further rounds: `"new"`, or the `"same"`.

    Attributes:
        rows (`list[dict]`): The batch's raw rows, as they were before the trainer got them.
        keys (`list[int]`): Of the prompts that this process generated for last.
        targets (`list[int]`): Of each of them, the one of this process's slots that it was generated for; `ANY` if it
            may take any.
        present (`set[int]`): Keys of all prompts that any process has generated for in this batch.
        source ([`PromptSource`]): Where new prompts come from.
    """

    def __init__(
        self, trainer: Callable[[], Any], layout: GroupPlaces, components: Components, seed: int, again: str
    ) -> None:
        self._layout = layout
        self._hooks = components.hooks
        self._context = components.buffer.context
        self._seed = seed
        self._again = again
        self._asks = components.hooks.has_plugin_for("inputs")
        self._key = key = components.tasks.key
        self._dataset = Dataset(lambda: compat.training_data(trainer()), key)
        self.source = self._source()
        self._batch = 0
        self.rows: list[Row] = []
        self.keys: list[int] = []
        self.targets: list[int] = []
        self.present: set[int] = set()

    def _source(self) -> PromptSource:
        straddles = self._layout.straddles  # then all processes pick for all groups, each the same
        part, parts = (0, 1) if straddles else (self._layout.rank, self._layout.ranks)
        return PromptSource(self._dataset, self._seed, part, parts)

    def lay_out(self, layout: GroupPlaces) -> None:
        """Use a new layout of groups from now on: the trainer's batch size has changed."""
        straddled = self._layout.straddles
        self._layout = layout
        if straddled != layout.straddles:
            self.source = self._source()

    def begin(self, inputs: Sequence[Row], batch: int) -> Sequence[Row]:
        """Return the inputs of generation batch number `batch`: the trainer's own, unless a plugin changes prompts.

        Raises:
            SeamError: The rows of a group have different prompts.
            HookError: A plugin failed.
        """
        self._batch = batch
        self.keys = []
        self.present = set()
        self.rows = self._one_a_group(inputs)
        changed = self._ask(self.rows, 0)
        if changed is not None:
            self.rows = changed
            inputs = self._repeated(changed)
        self.keys = list(map(self._key, self.rows))
        return inputs

    def further(self, number: int, count: int, dead: Ints) -> list[Row]:
        """Return the inputs of a further round.

        Args:
            number (`int`): Of the round, from 1.
            count (`int`): Groups with rows on this process.
            dead (`(n,)` int64): Which of this process's groups need another.
        """
        new = self._again == "new"
        rows = self._new(count) if new else self._same(count, dead)
        self.targets = [ANY] * count if new else _cycled(dead.tolist() or [ANY], count)
        changed = self._ask(rows, number)
        if changed is not None:
            for place, (meant, row) in enumerate(zip(rows, changed, strict=True)):
                if self._key(row) != self._key(meant):
                    self.targets[place] = ANY
            rows = changed
        self.keys = list(map(self._key, rows))
        return self._repeated(rows)

    def stand_ins(self, count: int) -> list[Row]:
        """Return substitute inputs for `count` groups after an error, so that other ranks need not wait."""
        return self._repeated(_cycled(self.rows, count))

    def _one_a_group(self, inputs: Sequence[Row]) -> list[Row]:
        """Return a copy of one row of each group, since the trainer writes into its own."""
        raw: list[Row] = []
        for part in self._layout.rows_here():
            prompts = [inputs[row].get("prompt") for row in part]
            if any(prompt != prompts[0] for prompt in prompts):
                raise SeamError(
                    f"The trainer's rows {part.start} to {part.stop - 1} on rank {self._layout.rank} belong to one "
                    "group but have different prompts: its sampler does not repeat each prompt num_generations "
                    "times. Use TRL's RepeatSampler."
                )
            raw.append(copy.deepcopy(inputs[part.start]))
        return raw

    def _new(self, count: int) -> list[Row]:
        if not self._layout.straddles:
            return self.source.take(count, self.present)
        every = self.source.take(self._layout.groups, self.present)
        first = self._layout.mine_first
        return every[first : first + count]

    def _same(self, count: int, dead: Ints) -> list[Row]:
        if self._layout.straddles:
            return self.rows
        again = [self.rows[slot] for slot in dead.tolist()]
        return _cycled(again or self.rows, count)

    def _repeated(self, rows: Sequence[Row]) -> list[Row]:
        """Repeat each group's row for its rows on this process, as copies."""
        if not self._layout.straddles:
            return repeated(rows, self._layout.size)
        inputs: list[Row] = []
        for row, part in zip(rows, self._layout.rows_here(), strict=True):
            inputs += repeated([row], len(part))
        return inputs

    def _ask(self, rows: list[Row], number: int) -> list[Row] | None:
        """Let plugins change a round's prompts; return None if they do not.

        Groups that straddle processes are asked about one by one: processes with rows of the same one must get the
        same answer.
        """
        if not self._asks:
            return None
        first = self._layout.mine_first
        if not self._layout.straddles:
            context = self._inputs_context(number, first, rows)
            return self._hooks.inputs(copy.deepcopy(rows), context)
        answers = []
        for group, row in enumerate(rows, first):
            context = self._inputs_context(number, group, [row])
            answer = self._hooks.inputs([copy.deepcopy(row)], context)
            answers += [row] if answer is None else answer
        return answers

    def _inputs_context(self, number: int, group: int, rows: Sequence[Row]) -> InputsContext:
        """Return a plugin's context, whose generator is the same on all processes with rows of the group."""
        rng = np.random.default_rng([self._seed, self._batch, number, group])
        source = self.source
        if self._layout.straddles:  # what was given out before differs between processes
            source = PromptSource(self._dataset, int(rng.integers(2**32)))
        present = self.present | {self._key(row) for row in rows}

        def new_prompts(count: int, skip: Callable[[Row], bool] | None = None) -> list[Row]:
            found = source.take(count, present, skip)
            present.update(self._key(row) for row in found)
            return [copy.deepcopy(row) for row in found]

        base = self._context()
        known = {spec.name: getattr(base, spec.name) for spec in fields(base)}
        known["rng"] = rng
        return InputsContext(
            **known, round=number, batch=self._batch, key=self._key, new_prompts=new_prompts, prompt_rows=self._find
        )

    def _find(self, keys: Sequence[int]) -> list[Row]:
        """Return copies of the dataset's rows with these keys, in order."""
        numbers = map(self._dataset.number_of, map(int, keys))
        return [copy.deepcopy(self._dataset.row(number)) for number in numbers if number is not None]


def _cycled(values: Sequence[_T], count: int) -> list[_T]:
    """Return `count` values by cycling through these."""
    return list(itertools.islice(itertools.cycle(values), count))
