"""What makes groups of a scored batch (`Judge`), and further rounds of generation, in which live groups take the place
of dead ones (dynamic sampling)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from .. import compat
from ..base.validation import pass_rate_of
from ..batch.compose import (
    batch_to_cpu,
    compose,
    cut,
    images_per_row,
    implied_values,
    with_blank_images,
    without_images,
)
from ..batch.groups import AdvantageFormula, rewards_of_batch, view
from ..data.prompt_table import PromptTable
from ..data.success import Success
from ..data.types import PIXELS, Batch, Bools, FieldTable, Floats, Groups, Ints, Row
from ..distributed.communicator import Communicator, Message, SharedRows
from ..errors import BatchError, SeamError
from ..setup.settings import Components, Settings
from .prompts import ANY, GroupPlaces, Prompts


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """A generation batch, or a further round of it, with its groups.

    Attributes:
        batch (`dict`): This process's rows, as TRL returned them.
        rows ([`SharedRows`]): Where they lie, with the columns that the scope shares.
        new_groups ([`Groups`]): The groups that the scope shares, with what a plugin made of their advantages.
        scored (`(rows of all processes, functions)`): Raw rewards, NaN where None.
        generations (`tuple[Groups, ...]`): The groups of every generation that the batch took, those included that
            were generated again for, or are left over.
        refilled (`int`): How many of its groups are of further rounds.
    """

    batch: Batch
    rows: SharedRows
    new_groups: Groups
    scored: torch.Tensor
    generations: tuple[Groups, ...]
    refilled: int = 0

    @classmethod
    def unseen(cls, batch: Batch, rows: SharedRows) -> JudgedBatch:
        """Return a batch whose groups are unavailable after an error, which all processes raise at their next
        message."""
        none = np.empty((0, rows.size))
        flat = np.empty(0, np.int64)
        whole = none.astype(np.int64)
        groups = Groups(none[:, :, None], np.ones(1), none, whole, whole, flat.astype(bool), flat, flat)
        return cls(batch, rows, groups, torch.empty(0, 1), ())

    @property
    def groups(self) -> Ints:
        """Numbers of the groups that the scope shares, among all processes' groups."""
        size = self.rows.size
        first_rows = self.rows.columns["row"][::size]
        return np.asarray(first_rows // size)

    @property
    def dead_here(self) -> Bools:
        """Mask of the dead groups among those with rows on this process."""
        return self.new_groups.dead[self.rows.slots_here]

    @property
    def items_here(self) -> Floats:
        """What each group's rows on this process add to `num_items_in_batch`."""
        here = self.rows.here
        groups = np.arange(here.start, here.stop) // self.rows.size
        items = self.rows.columns["items"][here]
        return np.asarray(np.bincount(groups - groups[0], items), np.float64)


class Judge:
    """Builds groups from the rows that the trainer scored.

    Args:
        trainer (`Callable`): Gives the trainer.
        settings ([`Settings`]): What needs a success.
        components ([`Components`]): The buffer, and which reward counts.
        shape (`Callable`): Lets a plugin shape the groups' advantages.

    Attributes:
        rewards (`list[torch.Tensor]`, *optional*): While the trainer scores: what its reward functions gave so far.
    """

    def __init__(
        self, trainer: Callable[[], Any], settings: Settings, components: Components, shape: Callable[[Groups], Groups]
    ) -> None:
        self.rewards: list[torch.Tensor] | None = None
        self._trainer = trainer
        self._settings = settings
        self._processes = components.processes
        self._success = components.success
        self._buffer = components.buffer
        self._fields = components.fields
        self._shape = shape
        self._has_doubted = False

    def to_cpu(self, batch: Batch) -> Batch:
        """Return what was just scored with its texts on the CPU, where all is decided, and put its rewards there: the
        one wait for it."""
        on_cpu, self.rewards = batch_to_cpu(batch, self._fields, self.rewards or [])
        return on_cpu

    def judge_batch(self, batch: Batch, rows: SharedRows) -> JudgedBatch:
        """Read rows that were just scored."""
        processes = self._processes
        setup = compat.reward_setup(self._trainer())
        scored = rewards_of_batch(self.rewards or [], rows.columns, setup, rows.size, rows.count * processes)
        rows.check(len(scored), processes)
        groups = self.groups_of(rows, scored, setup)
        if self._success.is_graded and not self._has_doubted:
            self._has_doubted = True
            doubt = doubt_of(self._settings, self._success, self._trainer())
            if doubt:
                warnings.warn(doubt, stacklevel=2)
        return JudgedBatch(batch, rows, groups, scored, (groups,))

    def groups_of(self, rows: SharedRows, scored: torch.Tensor, setup: compat.RewardSetup) -> Groups:
        """Return the groups that the scope shares, with advantages as plugins shape them."""
        table, update = self._buffer.table, self._buffer.clock.update
        groups = view(rows.columns, scored, setup, rows.size, update, table.counting, self._success)
        return self._shape(groups)


def doubt_of(settings: Settings, success: Success, trainer: Any) -> str:
    """Describe what does not act because it is not known what a success is, and the remedy; empty if all does, or
    the trainer no longer exists."""
    config, doubt = settings.config, success.doubt()
    waiting = [] if config.replay_retire_passes is None else [f"replay_retire_passes={config.replay_retire_passes}"]
    waiting += [] if pass_rate_of(config.replay_start) is None else [f"replay_start={config.replay_start!r}"]
    waiting += [f"the plugin {plugin.name!r}" for plugin in settings.plugins if plugin.needs_success]
    effects = [f"{' and '.join(waiting)} can't act"] if waiting else []
    if config.replay_kl == "all_wrong":
        effects.append("replay_kl='all_wrong' uses the lowest of them")
    if not doubt or not effects or trainer is None:
        return ""
    names = list(trainer.reward_func_names)
    which = f", or replay_reward to one of {', '.join(map(repr, names))}" if len(names) > 1 else ""
    best = f" ({success.remedy})" if success.is_graded else ""
    return f"{doubt}; {'; '.join(effects)}. Set replay_pass_reward to the least reward of a success{best}{which}."


KEPT = -1
"""The slot keeps the group that it has."""
OF_A_ROW = ("advantages", "lengths", "trainable", "items", "images", "prompt")
"""Shared columns that tell of the fresh batch; the others tell of the one before."""


def merged(
    current: JudgedBatch, other: JudgedBatch, sources: Ints, fields: FieldTable, multiple_of: int | None
) -> JudgedBatch:
    """Return the batch in which groups of a round replace some of its own.

    `num_items_in_batch` is passed through: what all processes exchanged is known later.

    Args:
        current ([`JudgedBatch`]): The batch.
        other ([`JudgedBatch`]): The round.
        sources (`(groups of all processes,)` int64): Of each slot, the round's group that takes it; `KEPT` for none.
        fields ([`FieldTable`]): How to cut and pad each key.
        multiple_of (`int`, *optional*): The trainer's `pad_to_multiple_of`.
    """
    scored = _merged_scores(current, other, sources)
    of_shared = sources[current.groups]
    slots = np.flatnonzero(of_shared != KEPT)
    taken = np.searchsorted(other.groups, of_shared[slots])  # from here on, places among the shared groups
    batch = _merged_batch(current, other, slots, taken, fields.exact(), multiple_of)
    rows = _merged_rows(current.rows, other.rows, slots, taken)
    new_groups = _merged_groups(current.new_groups, other.new_groups, slots, taken)
    return replace(current, batch=batch, rows=rows, new_groups=new_groups, scored=scored)


def _merged_groups(current: Groups, other: Groups, slots: Ints, sources: Ints) -> Groups:
    """The view of the merged batch."""
    if not len(slots):
        return current
    index = np.arange(len(current))
    index[slots] = len(current) + sources
    return Groups.concatenate([current, other]).take(index)


def _merged_scores(current: JudgedBatch, other: JudgedBatch, sources: Ints) -> torch.Tensor:
    """Return the merged batch's rewards, `(rows of all processes, functions)`."""
    scored = current.scored.clone()
    functions = scored.size(1)
    shape = (-1, current.rows.size, functions)
    by_group = scored.view(shape)
    of_round = other.scored.view(shape)
    taken = np.flatnonzero(sources != KEPT)
    slots = torch.from_numpy(taken)
    groups = torch.from_numpy(sources[taken])
    by_group[slots] = of_round[groups]
    return scored


def _merged_rows(current: SharedRows, other: SharedRows, slots: Ints, sources: Ints) -> SharedRows:
    """The shared columns of the merged batch."""
    columns = dict(current.columns)
    by_group = (-1, current.size)
    for name in OF_A_ROW:
        column = columns[name].copy()
        of_round = other.columns[name].reshape(by_group)
        column.reshape(by_group)[slots] = of_round[sources]
        columns[name] = column
    by_process = columns["images"].reshape(-1, current.count)
    columns["images"] = _images_of_batches(by_process).ravel()
    local = {"row": current.columns["row"][current.here]}
    return SharedRows(columns, local, current.size)


def _images_of_batches(images: NDArray[Any]) -> NDArray[Any]:
    """Return the number of images of each row, `(processes, rows)`; -1 in all rows of a batch without images, and only
    there."""
    pictured = (images > 0).any(axis=1, keepdims=True)
    return np.where(pictured, np.maximum(images, 0), -1)


def _merged_batch(
    current: JudgedBatch, other: JudgedBatch, slots: Ints, sources: Ints, fields: FieldTable, multiple_of: int | None
) -> Batch:
    """Return this process's batch with the round's rows in their slots."""
    exchanges = current.rows.exchanges(slots.tolist(), sources.tolist(), other.rows)
    if not exchanges:
        return current.batch
    batch, of_round = _with_the_same_keys(current.batch, other.batch, fields)
    groups = cut(of_round, fields, [one.source for one in exchanges])
    pictured = [group.tensors for group in groups if PIXELS in group.tensors]
    if pictured and batch.get(PIXELS) is None:
        batch = with_blank_images(batch, pictured[0], fields)
    placements = [one.placement(group) for one, group in zip(exchanges, groups, strict=True)]
    composed = compose(batch, fields, placements, multiple_of)
    if composed.get(PIXELS) is not None and not images_per_row(composed).any():
        return without_images(composed, fields)
    return composed


def _with_the_same_keys(batch: Batch, other: Batch, fields: FieldTable) -> tuple[Batch, Batch]:
    """Return both batches with the keys of either, except those of images.

    Raises:
        BatchError: A key of one of them stands for nothing where it is missing.
    """
    added: list[Batch] = []
    for one, another in ((batch, other), (other, batch)):
        filled = dict(one)
        for key, spec in fields.of(another).items():
            if one.get(key) is not None or fields.is_image(key):
                continue
            if spec.implied is None:
                raise BatchError(
                    f"One dynamic-sampling round has {key!r} and another does not, so they can't be merged. Leave "
                    "replay_refill out."
                )
            filled[key] = implied_values(one, spec, another[key].dtype)
        added.append(filled)
    return added[0], added[1]


LOW = 2**32
"""A key of 63 bits travels as two numbers, which float64 holds exactly."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Conclusions from all processes' messages.

    Attributes:
        needed (`int`): Dead groups of the process that has most.
        live (`int`): Live groups of the batch, on all processes.
        items (`float`): What `num_items_in_batch` changes by, with what was taken last.
        sources (`(groups of all processes,)` int64): The generated group that takes each slot; `KEPT` for none.
        keys (`(generated groups of all processes,)` int64): Of their prompts.
    """

    needed: int
    live: int
    items: float
    sources: Ints
    keys: Ints


class Reports:
    """Writes and reads the messages of one batch and its rounds.

    Args:
        layout ([`GroupPlaces`]): Where the batch's groups lie.
    """

    def __init__(self, layout: GroupPlaces) -> None:
        self._layout = layout
        width = layout.width
        self._message = Message(needed=(), live=(), items=(), takes=(width,), keys=(width, 2))

    def blank(self) -> Floats:
        """Return the vector of a process with nothing to report."""
        return self._message.pack()

    def of_batch(self, batch: JudgedBatch, keys: Sequence[int]) -> Floats:
        """Return this process's vector after the batch itself was generated.

        Args:
            batch ([`JudgedBatch`]): The batch.
            keys (`Sequence[int]`): Of the prompts of its groups with rows here.
        """
        none = np.full(len(batch.dead_here), KEPT)
        return self._write(batch.dead_here, none, 0.0, keys)

    def of_round(
        self, current: JudgedBatch, latest: JudgedBatch, keys: Sequence[int], targets: Sequence[int]
    ) -> Floats:
        """Return this process's vector after a further round.

        Args:
            current ([`JudgedBatch`]): The batch as it was before.
            latest ([`JudgedBatch`]): The round.
            keys (`Sequence[int]`): Of the prompts of the round's groups with rows here.
            targets (`Sequence[int]`): Of each of these groups, the slot with rows here that it was generated for;
                `ANY` if it may take any.
        """
        dead = current.dead_here
        takes = self._takes(dead, ~latest.dead_here, targets)
        taken = takes != KEPT
        gained = latest.items_here[takes[taken]].sum()
        lost = current.items_here[taken].sum()
        return self._write(dead & ~taken, takes, gained - lost, keys)

    def _write(self, dead: Bools, takes: Ints, items: float, keys: Sequence[int]) -> Floats:
        """Return the vector; `dead` and `takes` refer to the batch's groups with rows here."""
        counted = self._layout.begins()
        all_takes = np.zeros(self._layout.width)
        all_takes[: len(takes)] = takes + 1
        all_keys = np.zeros((self._layout.width, 2))
        for place, key in enumerate(keys):
            all_keys[place] = divmod(key, LOW)
        return self._message.pack(
            needed=(counted & dead).sum(), live=(counted & ~dead).sum(), items=items, takes=all_takes, keys=all_keys
        )

    def _takes(self, dead: Bools, live: Bools, targets: Sequence[int]) -> Ints:
        """Return the round's group that replaces each of the batch's groups here; `KEPT` for none.

        Args:
            dead (`(groups here,)`): Of the batch's.
            live (`(groups of the round here,)`): Of the round's.
            targets (`Sequence[int]`): Of the round's.
        """
        if self._layout.straddles:  # a slot takes the group of its own number
            return np.where(dead & live, np.arange(len(dead)), KEPT)
        takes = np.full(len(dead), KEPT)
        free: list[int] = []
        for source in np.flatnonzero(live).tolist():
            slot = targets[source]
            if slot == ANY:
                free.append(source)
            elif takes[slot] == KEPT:
                takes[slot] = source
        left = np.flatnonzero(dead & (takes == KEPT))
        pairs = min(len(left), len(free))
        takes[left[:pairs]] = free[:pairs]
        return takes

    def read(self, vectors: Floats, generated: GroupPlaces) -> RoundReport:
        """Read the messages of all processes.

        Args:
            vectors (`(ranks, numbers)`): Of all of them.
            generated ([`GroupPlaces`]): Where the groups lie that were generated last.

        Raises:
            SeamError: Two processes with rows of one group have different prompts for it.
        """
        told = self._message.unpack(vectors)
        takes = told["takes"].astype(np.int64) - 1
        keys = told["keys"].astype(np.int64)
        return RoundReport(
            needed=int(told["needed"].max()),
            live=int(told["live"].sum()),
            items=float(told["items"].sum()),
            sources=self._sources(takes, generated),
            keys=_keys(keys[..., 0] * LOW + keys[..., 1], generated),
        )

    def _sources(self, takes: Ints, generated: GroupPlaces) -> Ints:
        """Return, for each slot, the round's group that fills it, of what processes tell, `(ranks, width)`; `KEPT` for
        none."""
        sources = np.full(self._layout.groups, KEPT)
        ranks, places = np.nonzero(takes != KEPT)
        slots = self._layout.first(ranks) + places
        sources[slots] = generated.first(ranks) + takes[ranks, places]
        return sources


def _keys(told: Ints, generated: GroupPlaces) -> Ints:
    """Return the key of each generated group, from all processes' reports, `(ranks, width)`."""
    here = generated.here(np.arange(len(told)))
    ranks, places = np.nonzero(np.arange(told.shape[1]) < here[:, None])
    groups = generated.first(ranks) + places
    keys = np.empty(generated.groups, np.int64)
    keys[groups] = told[ranks, places]
    differing = np.flatnonzero(keys[groups] != told[ranks, places])
    if len(differing):
        group, rank = groups[differing[-1]], ranks[differing[-1]]
        raise SeamError(
            f"Group {group} of the batch has rows on rank {rank} and rank {rank + 1}, with different prompts: "
            "trl_replay_inputs must return the same rows on every process. Draw from context.rng alone, and depend "
            "on nothing that differs between processes."
        )
    return keys


Score: TypeAlias = Callable[[Sequence[Row]], Batch]
"""The trainer's own generating and scoring of some rows."""


class _BatchState:
    """One generation batch, from its scores to its last round.

    Attributes:
        origin (`(groups, 2)` int64): Of each slot of all processes, the round and the group in it that it holds.
        rounds (`list[JudgedBatch]`): The batch as it was first, and its rounds.
        items (`float`): What `num_items_in_batch` has changed by.
    """

    def __init__(self, groups: int) -> None:
        self.origin = np.stack([np.zeros(groups, np.int64), np.arange(groups)], axis=1)
        self.rounds: list[JudgedBatch] = []
        self.items = 0.0


class Rounds:
    """Runs a session's dynamic-sampling rounds.

    Attributes:
        table ([`PromptTable`]): The prompts generated for so far.
        batches (`int`): Generation batches begun.
        done (`int`): Further rounds of the last batch.
        seconds (`float`): What they took.

    Args:
        trainer (`Callable`): Gives the trainer.
        settings ([`Settings`]): How often, for what, and until when.
        components ([`Components`]): Hooks, fields, and how many processes there are.
        communicator ([`Communicator`]): Talks to the other processes.
        judge ([`Judge`]): Makes groups of what is generated.
    """

    def __init__(
        self,
        trainer: Callable[[], Any],
        settings: Settings,
        components: Components,
        communicator: Communicator,
        judge: Judge,
    ) -> None:
        here = trainer()
        size = components.num_generations
        self._trainer = trainer
        self._settings = settings
        self._fields = components.fields
        self._success = components.success
        self._communicator = communicator
        self._clock = components.buffer.clock
        self._judge = judge
        self._layout = GroupPlaces(compat.local_rows(here), size, communicator.rank, components.processes)
        self._reports = Reports(self._layout)
        self._refill = settings.config.refill
        self._prompts = Prompts(trainer, self._layout, components, int(here.args.seed), self._refill.prompts)
        self._errors = components.errors
        prompts = components.buffer.prompts
        self.table = PromptTable() if prompts is None else prompts
        self.batches = 0
        self.done = 0
        self.seconds = 0.0

    def begin(self, inputs: Sequence[Row]) -> Sequence[Row]:
        """Record the rows of a batch before it is generated, and let plugins change its prompts.

        What fails is raised on all processes after they have generated, so that none waits for another.

        Args:
            inputs (`Sequence[Row]`): This process's rows, as the trainer got them.

        Returns:
            The rows to generate for: the same ones, unless a plugin says otherwise.
        """
        if len(inputs) != self._layout.rows:
            self._lay_out(len(inputs))
        self.batches += 1
        self.done = 0
        with self._errors.keeping():
            return self._prompts.begin(inputs, self.batches)
        return inputs

    def _lay_out(self, rows: int) -> None:
        """Use a new number of rows per batch, which changed between two trainings."""
        before = self._layout
        self._layout = GroupPlaces(rows, before.size, before.rank, before.ranks)
        self._reports = Reports(self._layout)
        self._prompts.lay_out(self._layout)

    def complete(self, batch: Batch, rows: SharedRows, score: Score) -> JudgedBatch:
        """Resample dead groups while rounds are left and too few groups are live.

        Args:
            batch (`dict`): As TRL returned it, its texts on the CPU.
            rows ([`SharedRows`]): Where its rows lie.
            score (`Callable`): Generates and scores further rows, on all processes together.

        Returns:
            The batch that is trained on.

        Raises:
            SeamError: Another process failed, or two of them hold rows of one group with different prompts.
        """
        state = _BatchState(self._layout.groups)
        started = time.perf_counter()
        try:
            current = self._generate(state, batch, rows, score)
            if self.done:
                with self._errors.keeping():
                    current = self._final(state, current)
            return current
        finally:
            self.seconds = time.perf_counter() - started if self.done else 0.0

    def _generate(self, state: _BatchState, batch: Batch, rows: SharedRows, score: Score) -> JudgedBatch:
        """Return the batch in which groups of further rounds replace dead ones."""

        def of_batch() -> tuple[JudgedBatch, Floats]:
            first = self._judge.judge_batch(batch, rows)
            return first, self._reports.of_batch(first, self._prompts.keys)

        current, told = self._tell(state, of_batch, self._layout)
        while self.done < self._refill.rounds and not self._is_enough(told):
            self.done += 1
            current, told = self._further_round(state, current, told, score)
        return current

    def _further_round(
        self, state: _BatchState, current: JudgedBatch, told: RoundReport, score: Score
    ) -> tuple[JudgedBatch, RoundReport]:
        layout = self._layout.of_round(told.needed)
        batch = self._judge.to_cpu(score(self._inputs(current, layout.mine_here)))
        rows = self._communicator.share_round(batch)

        def of_round() -> tuple[JudgedBatch, Floats]:
            latest = self._judge.judge_batch(batch, rows)
            prompts = self._prompts
            return latest, self._reports.of_round(current, latest, prompts.keys, prompts.targets)

        latest, told = self._tell(state, of_round, layout)
        return self._merge(state, current, latest, told), told

    def _inputs(self, current: JudgedBatch, count: int) -> list[Row]:
        """Return this process's inputs of the next round, `count` groups; an error is kept for all ranks."""
        dead = np.flatnonzero(current.dead_here)
        with self._errors.keeping():
            return self._prompts.further(self.done, count, dead)
        return self._prompts.stand_ins(count)

    def _tell(
        self, state: _BatchState, judged: Callable[[], tuple[JudgedBatch, Floats]], layout: GroupPlaces
    ) -> tuple[JudgedBatch, RoundReport]:
        """Exchange a round's results, and add its groups to the prompt table and to the batch's state.

        Args:
            state ([`_BatchState`]): Gets them.
            judged (`Callable`): Gives the judged batch, and what this process tells of it.
            layout ([`GroupPlaces`]): Where they lie.
        """
        latest, vectors = self._communicator.tell(judged, self._reports.blank())
        told = self._reports.read(vectors, layout)
        state.rounds.append(latest)
        state.items += told.items
        new_groups = latest.new_groups
        self._prompts.present.update(told.keys.tolist())
        keys = told.keys[latest.groups]
        passed, known = self._success.passed(new_groups), self._success.least is not None
        self.table.note(
            keys, new_groups.prompt, passed, new_groups.dead, self._clock.update, ~new_groups.unscored, known
        )
        return latest, told

    def _is_enough(self, told: RoundReport) -> bool:
        target = self._refill.until * self._layout.groups
        return told.needed == 0 or told.live >= target - 1e-9

    def _merge(self, state: _BatchState, current: JudgedBatch, latest: JudgedBatch, told: RoundReport) -> JudgedBatch:
        """Return the batch with a round's groups in their slots; unchanged after an error, which is kept."""
        taken = np.flatnonzero(told.sources != KEPT)
        state.origin[taken, 0] = self.done
        state.origin[taken, 1] = told.sources[taken]
        if not len(taken):
            return current
        with self._errors.keeping():
            return merged(current, latest, told.sources, self._fields, self._trainer().pad_to_multiple_of)
        return current

    def _final(self, state: _BatchState, current: JudgedBatch) -> JudgedBatch:
        """Finish the batch after its last round: token count, advantages, and groups."""
        setup = compat.reward_setup(self._trainer())
        batch = dict(current.batch)
        counted = batch["num_items_in_batch"]
        change = torch.as_tensor(state.items).to(counted)
        batch["num_items_in_batch"] = counted + change
        generations = tuple(one.new_groups for one in state.rounds)
        refilled = int(np.count_nonzero(state.origin[current.groups, 0]))
        current = replace(current, batch=batch, generations=generations, refilled=refilled)
        if setup.over_batch and state.origin[:, 0].any():
            self._refuse_unexplained(state.rounds, setup)
            advantages = compat.advantages(current.scored, setup, self._layout.size)
            current = self._with_advantages(current, advantages, setup)
        return current

    def _with_advantages(
        self, current: JudgedBatch, advantages: torch.Tensor, setup: compat.RewardSetup
    ) -> JudgedBatch:
        """Return the batch with recomputed advantages, `(rows,)` of all processes."""
        rows = current.rows
        everywhere = advantages.double().cpu().numpy()
        columns = {**rows.columns, "advantages": everywhere[rows.columns["row"]]}
        rows = SharedRows(columns, {"row": columns["row"][rows.here]}, rows.size)
        here = slice(rows.first, rows.first + rows.count)
        batch = {**current.batch, "advantages": advantages[here].to(current.batch["advantages"])}
        return replace(current, batch=batch, rows=rows, new_groups=self._judge.groups_of(rows, current.scored, setup))

    def _refuse_unexplained(self, rounds: Sequence[JudgedBatch], setup: compat.RewardSetup) -> None:
        """Refuse to recompute advantages that TRL's rules do not explain."""
        for one in rounds:
            of_tokens = self._fields.has_token_advantages(one.batch)
            rule = AdvantageFormula(one.rows.columns, one.scored, setup, self._layout.size, of_tokens)
            if not rule.explains_batch:
                raise SeamError(
                    f"With scale_rewards={setup.scale!r} and multi_objective_aggregation={setup.aggregation!r}, "
                    "TRL's rules recompute the advantages of a batch with refilled groups, but this trainer shapes "
                    "advantages itself. Leave replay_refill out, or set scale_rewards='group', or shape them in a "
                    "plugin's trl_replay_advantages."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without the table of prompts."""
        return {"batches": self.batches, "source": self._prompts.source.state_dict()}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict` on this rank, or from all ranks' states of another layout."""
        self.batches = max(state["batches"] for state in states)
        self._prompts.source.load_state_dict(*(state["source"] for state in states))
