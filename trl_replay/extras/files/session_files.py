"""What one session does with files: fills its buffer from them, and writes or reads its entries."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import tqdm

from ... import compat
from ...base.validation import choice, require, true_or_false
from ...buffer.replay_buffer import SOLVED
from ...data.counters import Tally
from ...data.fields import ADVANTAGES
from ...data.rewards import have_equal_rewards
from ...data.tasks import encoded, hashed
from ...data.types import FROM_FILE, FROM_POLICY, Batch, Entry, Groups, Ints
from ...distributed.all_ranks import run_on_all_ranks
from ...errors import ReplayError
from .export import of_buffer, read_entry, write
from .reader import Reader, RolloutGroup
from .rollouts import Rollouts
from .scoring import score
from .sources import source_name

Result = TypeVar("Result")
ALIKE = "its rewards do not differ"


class Piece(NamedTuple):
    """Groups that all processes score at once.

    Attributes:
        mine (`list[RolloutGroup]`): Those of this process.
        scope (`list[RolloutGroup]`): Those of all processes that share its buffer, in order.
        enters (`list[bool]`): Which of these are stored: others make the processes' parts equally long.
        computes (`bool`): Whether any process has one without log-probs.
    """

    mine: list[RolloutGroup]
    scope: list[RolloutGroup]
    enters: list[bool]
    computes: bool


class Files:
    """The files of one session.

    Args:
        session ([`Session`]): Or that of an asynchronous trainer.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._components = session.components
        self._buffer = session.components.buffer
        self._config = session.components.settings.config
        self._size = session.components.num_generations
        self._ranks = session.components.processes

    def _trainer(self) -> Any:
        return self._session.trainer

    def warm_start(self, again: bool = False) -> None:
        """Fill the buffer from `replay_warm_start`, once in the life of a run, and again once its groups have left as
        those of another reward rule.

        Args:
            again (`bool`): This process takes part though its own buffer may have them still.
        """
        config, buffer = self._config, self._buffer
        if config.replay_warm_start is None or (buffer.warmed and not again):
            return
        self._add(
            config.replay_warm_start,
            config.replay_warm_start_short,
            config.replay_warm_start_rescore,
            offers=not buffer.warmed,
        )
        buffer.warmed = True

    def add(self, source: Any, incomplete: str, rescore: bool) -> int:
        """Add groups made elsewhere: [`Session.add`]."""
        require("incomplete", incomplete, choice("refuse", "resample"))
        require("rescore", rescore, true_or_false)
        if self._session.scoring:
            raise ReplayError(
                "session.add was called while the trainer scores a batch: call it in a callback, or before training."
            )
        return self._add(source, incomplete, rescore)

    def _add(self, source: Any, incomplete: str, rescore: bool, offers: bool = True) -> int:
        trainer, buffer, name = self._trainer(), self._buffer, source_name(source)
        if self._ranks > 1:
            self._session.roll_call("add", "adding groups to its buffer")
        tally, reasons = Tally(), Counter[str]()
        groups = self._read(source, incomplete, rescore, tally)
        before, undo = set(buffer), buffer.remember()
        try:
            stay = self._staying(groups, offers)
            if self._scores:
                for piece in self._pieces(groups, stay):
                    reasons += self._store(piece, tally).reasons
            else:
                self._store_samples([groups[number] for number in stay[0]], tally)
        except BaseException:
            undo()
            raise
        without = len(groups) - len({number for of_rank in stay for number in of_rank})
        tally.note(without, "a group of a file found no room (replay_buffer_size)")
        buffer.totals.add(tally, batches=0)
        count = len(set(buffer) - before)
        buffer.rules.limiter.prefilled |= count > 0
        if trainer.accelerator.is_main_process:
            self._tell(name, count, without, len(groups), tally.reasons + reasons)
        return count

    def _tell(self, name: str, count: int, without: int, groups: int, reasons: Counter[str]) -> None:
        """Warn, once, of groups for which the buffer has no room, or of a source of which nothing was taken."""
        if without and self._buffer.capacity:
            warnings.warn(
                f"{without} of the {groups} groups of {name} found no room in the buffer, which holds "
                f"{self._buffer.capacity}: those with the lowest keep ranks are left out. Raise replay_buffer_size "
                "(and replay_max_bytes, if set).",
                stacklevel=4,
            )
        elif not count and reasons:
            warnings.warn(f"No group of {name} was added: {'; '.join(reasons)}.", stacklevel=4)

    def _run(self, action: Callable[[], Result]) -> list[Result]:
        """Do it on all processes that decide together."""
        results = run_on_all_ranks(action, ReplayError, alone=self._ranks == 1)
        return cast(list[Result], results)  # of a process that failed there is none: then all have raised

    def _read(self, source: Any, incomplete: str, rescore: bool, tally: Tally) -> list[RolloutGroup]:
        """The groups that can be used, with their rewards; the same ones on all processes.

        Raises:
            ReplayError: A process can't read them, or reads others.
        """
        trainer, name = self._trainer(), source_name(source)
        rule = compat.reward_rule(trainer)
        groups: list[RolloutGroup] = []
        reader = Reader(trainer, self._components.tasks, rescore, tally)

        def read() -> tuple[int, list[str]]:
            groups.extend(reader.read(source, incomplete))
            if groups and compat.awaits_its_engine(trainer):
                raise ReplayError(
                    "With DeepSpeed's ZeRO 3 the model can compute no log-probs before training begins: give the "
                    "groups' file as replay_warm_start, which is read then, or add them in a callback's "
                    "on_train_begin."
                )
            changes: list[str] = self._buffer.rule_changes(rule)
            return _digest(groups), changes

        found = self._run(read)
        tells = trainer.accelerator.is_main_process
        self._buffer.score_by(rule, found[0][1] or None, tally, tells)
        if len({digest for digest, _ in found}) > 1:
            raise ReplayError(
                f"The processes read different groups from {name}: give all of them the same file or rows. Nothing "
                "was added."
            )
        if not self._scores and (rescore or not all(map(_has_logps, groups))):
            raise ReplayError(
                f"Groups of {name} have no log-probs, or are to be scored anew, and an asynchronous trainer's worker "
                "does that for its own completions only: give a file that session.export() wrote of a run with this "
                "tokenizer."
            )
        if rescore:
            score(trainer, reader.tasks, groups, name, self._ranks)
        differing = [group for group in groups if self._may_be_alike or self._differs(group)]
        tally.refuse(len(groups) - len(differing), ALIKE)
        return differing

    @property
    def _scores(self) -> bool:
        """Tell whether the trainer scores completions; of the asynchronous one, a worker does, and only its own."""
        return compat.computes_rewards(self._trainer())

    @property
    def _may_be_alike(self) -> bool:
        """Tell whether groups whose rewards do not differ can be used: where rows stand beside fresh ones."""
        return bool(self._components.mixes_rows and self._config.replay_advantages != "stored")

    def _differs(self, group: RolloutGroup) -> bool:
        """Tell whether TRL's rule may give its rows different advantages, or the file does."""
        if any(one.masked or one.advantage is not None or ADVANTAGES in one.told for one in group):
            return True
        rewards = np.array([[one.rewards for one in group]])
        counting = self._buffer.table.counting
        if counting is not None and not np.isnan(rewards[..., counting]).all():
            rewards = rewards[..., [counting]]
            return not have_equal_rewards(rewards, np.ones(1))[0]
        return not have_equal_rewards(rewards, compat.reward_setup(self._trainer()).weights)[0]

    def _staying(self, groups: Sequence[RolloutGroup], offers: bool) -> list[list[int]]:
        """Of each process, the groups that its buffer will have room for."""
        rank = int(self._trainer().accelerator.process_index)
        one_buffer = self._components.scope.one_buffer
        mine = list(range(len(groups)) if one_buffer else range(rank, len(groups), self._ranks))

        def choose() -> list[int]:
            if not offers or len(self._buffer) + len(mine) <= self._buffer.capacity:
                return mine if offers else []
            stay = self._buffer.would_stay(self._seen([groups[number] for number in mine]))
            return [number for number, stays in zip(mine, stay, strict=True) if stays]

        return self._run(choose)

    def _seen(self, groups: Sequence[RolloutGroup]) -> Groups:
        """The groups as the buffer will see them, but without log-probs."""
        setup = compat.reward_setup(self._trainer())
        rewards = np.array([[one.rewards for one in group] for group in groups])
        rows = torch.from_numpy(rewards.reshape(-1, rewards.shape[-1]))
        computed = compat.advantages(rows, setup, self._size, within=rows).view(len(groups), -1).numpy()
        told = np.array([[np.nan if one.advantage is None else one.advantage for one in group] for group in groups])
        trainable = np.array([[int(one.mask.sum()) for one in group] for group in groups])
        return Groups(
            rewards=rewards,
            reward_weights=setup.weights,
            advantages=np.where(np.isnan(told), computed, told),
            lengths=np.array([[len(one.completion_ids) for one in group] for group in groups]),
            trainable=trainable,
            items=trainable,
            dead=np.zeros(len(groups), bool),
            update=np.full(len(groups), self._buffer.clock.update - 1),
            prompt=np.array([group[0].task for group in groups]),
            masked=np.array([[one.masked for one in group] for group in groups]),
            origin=_origins(groups),
            counting=self._buffer.table.counting,
        )

    def _pieces(self, groups: Sequence[RolloutGroup], stay: Sequence[Sequence[int]]) -> Iterator[Piece]:
        """As many groups at once as the trainer scores at once, as many on each process."""
        trainer, ranks = self._trainer(), self._ranks
        rank = int(trainer.accelerator.process_index)
        each = max(compat.local_rows(trainer) // self._size, 1)
        one_buffer = self._components.scope.one_buffer
        total = len({number for of_rank in stay for number in of_rank})
        with tqdm(total=total, desc="A file's groups", disable=not total or trainer.args.disable_tqdm) as bar:
            for start in range(0, max(map(len, stay)), each * ranks if one_buffer else each):
                parts = [list(of_rank[start : start + each]) for of_rank in stay]
                if one_buffer:  # dealt in the file's order
                    piece = stay[0][start : start + each * ranks]
                    most = -(-len(piece) // ranks)
                    parts = [list(piece[most * number : most * (number + 1)]) for number in range(ranks)]
                width = max(map(len, parts))
                filler = next(part[0] for part in parts if part)
                filled = [part + [filler] * (width - len(part)) for part in parts]
                scope = filled if one_buffer else [filled[rank]]
                kept = parts if one_buffer else [parts[rank]]
                yield Piece(
                    mine=[groups[number] for number in filled[rank]],
                    scope=[groups[number] for part in scope for number in part],
                    enters=[number < len(part) for part in kept for number in range(width)],
                    computes=not all(_has_logps(groups[number]) for part in filled for number in part),
                )
                bar.update(sum(map(len, parts)))

    def _store(self, piece: Piece, tally: Tally) -> Tally:
        """Let the trainer score a piece as if it had generated it, and the session keep its groups; return what the
        decision counted."""
        trainer, session, tasks = self._trainer(), self._session, self._components.tasks
        rollouts = Rollouts(trainer, [one for group in piece.mine for one in group], self._components)
        before = tasks.of_rows, session.step.judge.rewards
        tasks.of_rows = np.array([one.task for group in piece.mine for one in group], np.int64)
        session.step.judge.rewards = []

        def rewards(*given: Any, **named: Any) -> torch.Tensor:
            session.step.judge.rewards.append(rollouts.rewards())
            made: torch.Tensor = session.step.judge.rewards[-1]
            return made

        try:
            with compat.unnoticed(trainer, {**rollouts.instead, compat.REWARDS: rewards}):
                inputs = [copy.deepcopy(one.inputs) for group in piece.mine for one in group]
                scored = self._components.layout.incoming(
                    trainer, getattr(type(trainer), compat.SCORE)(trainer, inputs)
                )
                self._run(lambda: rollouts.check(scored))
                batches: list[Batch] = []
                self._run(lambda: batches.append(rollouts.complete(scored, piece.computes)))
                kept: Tally = session.step.keep(batches[0], partial(self._chosen, piece, tally))
                return kept
        finally:
            tasks.of_rows, session.step.judge.rewards = before

    def _store_samples(self, groups: Sequence[RolloutGroup], tally: Tally) -> None:
        """Store groups of another session's export, which need no scoring."""
        whole = [group for group in groups if not any(ADVANTAGES in one.told for one in group)]
        tally.refuse(
            len(groups) - len(whole), "its tokens have advantages of their own, and a sample of this trainer has one"
        )
        if whole:
            advantages = self._seen(whole).advantages
            for group, of_group in zip(whole, advantages.tolist(), strict=True):
                self._session.keep(group, of_group, tally)

    def _chosen(self, piece: Piece, tally: Tally, groups: Groups) -> tuple[Groups, list[int]]:
        """A piece's groups as they are stored, and the slots of those that are."""
        groups = replace(
            groups, update=groups.update - 1, origin=_origins(piece.scope)
        )  # old enough for the next batch
        enters = np.array(piece.enters)
        alike = enters & groups.dead & groups.trains.any(axis=1) & (not self._may_be_alike)
        solved = enters & ~alike & self._buffer.solved(groups)
        tally.refuse(int(alike.sum()), ALIKE)
        tally.refuse(int(solved.sum()), SOLVED)
        return groups, np.flatnonzero(enters & ~alike & ~solved).tolist()

    def entry(self, serial: int) -> Entry:
        """Read an entry: [`Session.entry`]."""
        buffer = self._buffer
        if serial not in buffer:
            raise KeyError(
                f"The buffer has no entry {serial!r}: it may have left; list(session.buffer) gives the serial numbers "
                "of those that are there."
            )
        if serial not in buffer.held():
            owner = int(buffer.table.owner[buffer.table.rows_of([serial])[0]])
            raise ReplayError(
                f"The payload of entry {serial} is not here: it is on rank {owner}, where it arrives after the batch "
                "in which the entry is stored has been planned."
            )
        return read_entry(serial, buffer, self._trainer())

    def export(self, path: str | Path) -> Path:
        """Write the entries that this process holds: [`Session.export`]."""
        path, trainer, components = Path(path), self._trainer(), self._components
        rank, ranks = int(trainer.accelerator.process_index), components.processes
        if ranks > 1:
            path = path.with_stem(f"{path.stem}-{rank:05d}-of-{ranks:05d}")
        write(path, of_buffer(components.buffer, components.tasks, trainer))
        return path


def _has_logps(group: RolloutGroup) -> bool:
    return all(compat.OLD_LOGPS in one.told for one in group)


def _origins(groups: Sequence[RolloutGroup]) -> Ints:
    """`(groups,)`: whose log-probs they have."""
    return np.array([FROM_FILE if _has_logps(group) else FROM_POLICY for group in groups])


def _digest(groups: Sequence[RolloutGroup]) -> int:
    """Tell the groups that one process read from those of another."""
    rows = [one for group in groups for one in group]
    told = [[one.prompt_ids, one.completion_ids, one.told, one.rewards, one.advantage, one.masked] for one in rows]
    return hashed(*map(encoded, told), *(encoded(one.task) for one in rows))


make_files = Files
