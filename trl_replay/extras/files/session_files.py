"""What one session does with files: fills its buffer from them, and writes or reads its entries."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather

from ... import compat
from ...base.validation import choice, require, true_or_false
from ...batch.compose import loss_mask
from ...buffer.replay_buffer import OTHER_RULE, SOLVED
from ...data.counters import Tally
from ...data.tasks import encoded, hashed
from ...data.types import ADVANTAGES, FROM_FILE, FROM_POLICY, Batch, Bools, Entry, Groups
from ...distributed.communicator import run_on_all_ranks
from ...errors import ReplayError
from ...setup.settings import Components
from .export import of_buffer, read_entry, write
from .reader import Reader, Rollout, RolloutGroup, source_name


class Rollouts:
    """Some rows of one process, in whole groups.

    Args:
        trainer (`trl.GRPOTrainer`): Scores them.
        rows (`Sequence[Rollout]`): With their rewards.
        components ([`Components`]): Of the session.
    """

    def __init__(self, trainer: Any, rows: Sequence[Rollout], components: Components) -> None:
        self._trainer = trainer
        self._rows = rows
        self._components = components
        self._keeps_sampler = compat.keeps_sampler(trainer)
        self._corrects_sampler = compat.corrects_sampler(trainer)

    @property
    def instead(self) -> dict[str, Any]:
        """What the trainer has meanwhile in the place of its own."""
        return {**compat.WHILE_SCORING_OTHERS, "rollout_func": self._rollout}

    def _rollout(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [one.prompt_ids.tolist() for one in self._rows],
            "completion_ids": [one.completion_ids.tolist() for one in self._rows],
            "logprobs": None,
            "env_mask": [one.mask.tolist() for one in self._rows],
        }

    def rewards(self, inputs: Any, prompts: Any, completions: Sequence[Any], completion_ids: Any) -> torch.Tensor:
        """`(rows of all processes, functions)`: the file's or, where these are to score it, those of the trainer's
        functions; NaN for None, and for a masked row, which counts in no mean."""
        trainer, device = self._trainer, self._trainer.accelerator.device
        if self._rows[0].rewards is None:
            said = [one.messages or made for one, made in zip(self._rows, completions, strict=True)]
            rewards = getattr(type(trainer), compat.REWARDS)(trainer, inputs, prompts, said, completion_ids)
        else:
            told = np.array([one.rewards for one in self._rows])
            rewards = gather(torch.tensor(told, dtype=torch.float32, device=device))
        counts = [not one.masked or one.advantage is not None for one in self._rows]
        made: torch.Tensor = rewards.where(gather(torch.tensor(counts, device=device))[:, None], torch.nan)
        return made

    def check(self, batch: Batch) -> None:
        """Refuse a batch of other rows than were handed in.

        Raises:
            ReplayError: Names the override that makes them.
        """
        as_many = batch["completion_ids"].size(0) == len(self._rows)
        if as_many and all(self._is_as_handed(batch, row, one) for row, one in enumerate(self._rows)):
            return
        where = compat.own_generation(self._trainer) or "this release of TRL"
        raise ReplayError(
            f"{where} made other completions or masks than those it was handed ({self._rows[0].label} and on), so "
            "their rewards would have been those of other texts: none of these was stored. Let it ask rollout_func, "
            "as TRL's own _generate does, and leave completions as they are; or train without rows from elsewhere."
        )

    def _is_as_handed(self, batch: Batch, row: int, one: Rollout) -> bool:
        count = len(one.completion_ids)
        ids, mask = batch["completion_ids"][row].cpu().numpy(), batch["completion_mask"][row].cpu().numpy()
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].cpu().numpy()
        said = mask * batch["tool_mask"][row].cpu().numpy() if "tool_mask" in batch else mask
        is_cut = compat.cuts_off(self._trainer) and not mask.any()
        return (
            np.array_equal(prompt, one.prompt_ids)
            and np.array_equal(ids[:count], one.completion_ids)
            and (is_cut or (np.array_equal(said[:count], one.mask) and mask[:count].all() and not mask[count:].any()))
        )

    def complete(self, batch: Batch, computes: bool) -> Batch:
        """The batch with what the rows tell beside: log-probs of the policy and its sampler, advantages, and masks.

        Args:
            batch (`dict`): As TRL scored it.
            computes (`bool`): Whether rows of any process lack log-probs, which the policy of now gives.

        Raises:
            ReplayError: Its tokens have advantages of their own, and the trainer's do not.
        """
        batch = dict(batch)
        logps = batch.get(compat.OLD_LOGPS)
        if logps is None and computes:
            logps = self._components.dialect.forward_logps(self._trainer, batch)
        if logps is None:
            logps = torch.zeros(batch["completion_ids"].shape, device=batch["completion_ids"].device)
        batch[compat.OLD_LOGPS] = self._with_told(logps, compat.OLD_LOGPS)
        if self._keeps_sampler:
            batch[compat.SAMPLING_LOGPS] = self._with_told(batch[compat.OLD_LOGPS], compat.SAMPLING_LOGPS)
        if self._corrects_sampler:
            mask = loss_mask(batch).bool()
            pair = batch[compat.OLD_LOGPS], batch[compat.SAMPLING_LOGPS]
            batch[compat.IS_RATIO] = compat.sampler_ratio(self._trainer, *pair, mask)
        batch[ADVANTAGES] = self._advantages(batch)
        return batch

    def _with_told(self, values: torch.Tensor, key: str) -> torch.Tensor:
        """`(B, C)`: the values, but those of rows that tell their own."""
        made = values.clone()
        for row, one in enumerate(self._rows):
            if key in one.told:
                made[row] = 0
                made[row, : len(one.completion_ids)] = torch.from_numpy(one.told[key]).to(made)
        return made

    def _advantages(self, batch: Batch) -> torch.Tensor:
        """As TRL computed them; those of the file where it tells them, and NaN for rows that it masks."""
        advantages: torch.Tensor = batch[ADVANTAGES].clone()
        of_tokens = self._components.fields.has_token_advantages(batch)
        for row, one in enumerate(self._rows):
            if ADVANTAGES in one.told and not of_tokens:
                raise ReplayError(
                    f"{one.label} has advantages of its tokens, and this trainer gives one to each row: drop the "
                    "column 'advantages', and the trainer computes one from the rewards."
                )
            if ADVANTAGES in one.told:
                advantages[row, : len(one.completion_ids)] = torch.from_numpy(one.told[ADVANTAGES]).to(advantages)
            elif one.advantage is not None:
                advantages[row] = one.advantage
            if one.masked:
                advantages[row] = torch.nan
        return advantages


ALIKE = "its rewards do not differ"


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

    def warm_start(self) -> None:
        """Fill the buffer from `replay_warm_start`, once in the life of a run."""
        config, buffer = self._config, self._buffer
        if config.replay_warm_start is None or buffer.warmed:
            return
        self._add(config.replay_warm_start, config.replay_warm_start_short, config.replay_warm_start_rescore)
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

    def _add(self, source: Any, incomplete: str, rescore: bool) -> int:
        trainer, buffer, tally = self._trainer(), self._buffer, Tally()
        if self._ranks > 1:
            self._session.roll_call("add", "adding groups to its buffer")
        groups = self._read(source, incomplete, rescore, tally)
        before, reasons = set(buffer), Counter[str]()
        most = max(compat.local_rows(trainer) // self._size, 1) * self._ranks  # groups of a generation batch
        if self._scores:
            for start in range(0, len(groups), most):
                reasons += self._store(groups[start : start + most], tally).reasons
        else:
            for group in groups:
                self._session.store(group, [one.advantage for one in group], tally)
        buffer.totals.add(tally, batches=0)
        count = len(set(buffer) - before)
        buffer.policy.limiter.prefilled |= count > 0
        reasons += tally.reasons
        if trainer.accelerator.is_main_process and reasons and not count:
            warnings.warn(f"No group of {source_name(source)} was added: {'; '.join(reasons)}.", stacklevel=3)
        elif trainer.accelerator.is_main_process and len(groups) > buffer.capacity:
            warnings.warn(
                f"{source_name(source)} has {len(groups)} groups, and {count} of them are in the buffer: raise "
                f"replay_buffer_size={self._config.replay_buffer_size}, or give fewer.",
                stacklevel=3,
            )
        return count

    def _run(self, action: Callable[[], Any]) -> list[Any]:
        """Do it on all processes that decide together."""
        return run_on_all_ranks(action, ReplayError, alone=self._ranks == 1)

    def _read(self, source: Any, incomplete: str, rescore: bool, tally: Tally) -> list[RolloutGroup]:
        """The groups that can be used; the same ones on all processes.

        Raises:
            ReplayError: A process can't read them, or reads others.
        """
        trainer, name = self._trainer(), source_name(source)
        rule = compat.reward_rule(trainer)
        groups: list[RolloutGroup] = []

        def read() -> tuple[int, list[str]]:
            groups.extend(Reader(trainer, self._components.tasks, rescore, tally).read(source, incomplete))
            if groups and compat.awaits_its_engine(trainer):
                raise ReplayError(
                    "With DeepSpeed's ZeRO 3 the model can compute no log-probs before training begins: give the "
                    "groups' file as replay_warm_start, which is read then, or add them in a callback's "
                    "on_train_begin."
                )
            changes: list[str] = self._buffer.rule.changes(rule)
            return _digest(groups), changes

        found = self._run(read)
        tells = trainer.accelerator.is_main_process
        tally.retire(self._buffer.score_by(rule, found[0][1], tells), OTHER_RULE)
        if len({digest for digest, _ in found}) > 1:
            raise ReplayError(
                f"The processes read different groups from {name}: give all of them the same file or rows. Nothing "
                "was added."
            )
        if not self._scores and (rescore or not all(one.is_sample for group in groups for one in group)):
            raise ReplayError(
                f"Rows of {name} lack log-probs or advantages, or are to be scored anew, and an asynchronous "
                "trainer's worker does that for its own completions only: give a file that session.export() wrote of "
                "a run with this tokenizer and num_generations."
            )
        return groups

    @property
    def _scores(self) -> bool:
        """Tell whether the trainer scores completions; of the asynchronous one, a worker does, and only its own."""
        return compat.computes_rewards(self._trainer())

    def _store(self, piece: Sequence[RolloutGroup], tally: Tally) -> Tally:
        """Let the trainer score a piece as if it had generated it, and the session keep its groups; return what the
        decision counted."""
        trainer, session, tasks = self._trainer(), self._session, self._components.tasks
        groups = [*piece, *piece[-1:] * (-len(piece) % self._ranks)]  # all processes score as many
        each = len(groups) // self._ranks
        first = each * int(trainer.accelerator.process_index)
        rows = [one for group in groups[first : first + each] for one in group]
        scope = range(len(groups)) if self._components.scope.one_buffer else range(first, first + each)
        enters = [number < len(piece) for number in scope]
        computes = not all(map(_has_logps, piece))
        rollouts = Rollouts(trainer, rows, self._components)
        before = tasks.of_rows, session.step.judge.rewards
        tasks.of_rows = np.array([one.task for one in rows], np.int64)
        session.step.judge.rewards = []

        def rewards(*given: Any) -> torch.Tensor:
            made = rollouts.rewards(*given)
            session.step.judge.rewards.append(made)
            return made

        def choose(fresh: Groups) -> tuple[Groups, list[int]]:
            origin = np.array([FROM_FILE if _has_logps(groups[number]) else FROM_POLICY for number in scope])
            aged = replace(fresh, update=fresh.update - 1, origin=origin)  # old enough for the next batch
            return aged, self._chosen(aged, np.array(enters), tally)

        try:
            with compat.unnoticed(trainer, {**rollouts.instead, compat.REWARDS: rewards}):
                inputs = [copy.deepcopy(one.inputs) for one in rows]
                scored = self._components.dialect.incoming(
                    trainer, getattr(type(trainer), compat.SCORE)(trainer, inputs)
                )
                self._run(lambda: rollouts.check(scored))
                batches: list[Batch] = []
                self._run(lambda: batches.append(rollouts.complete(scored, computes)))
                kept: Tally = session.step.store(batches[0], choose)
                return kept
        finally:
            tasks.of_rows, session.step.judge.rewards = before

    def _chosen(self, groups: Groups, enters: Bools, tally: Tally) -> list[int]:
        """Slots of a piece's groups that are stored: groups whose rewards do not differ only where rows of them stand
        beside fresh ones."""
        takes_alike = self._components.mixes_rows and self._config.replay_advantages != "stored"
        alike = enters & groups.dead & groups.trains.any(axis=1) & (not takes_alike)
        solved = enters & ~alike & self._buffer.solved(groups)
        tally.refuse(int(alike.sum()), ALIKE)
        tally.refuse(int(solved.sum()), SOLVED)
        return np.flatnonzero(enters & ~alike & ~solved).tolist()

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
        write(path, of_buffer(components.buffer, trainer))
        return path


def _has_logps(group: RolloutGroup) -> bool:
    return all(compat.OLD_LOGPS in one.told for one in group)


def _digest(groups: Sequence[RolloutGroup]) -> int:
    """Tell the groups that one process read from those of another."""
    rows = [one for group in groups for one in group]
    told = [[one.task, one.prompt_ids, one.completion_ids, one.mask, one.told] for one in rows]
    return hashed(*map(encoded, told), *(encoded([one.rewards, one.advantage, one.masked]) for one in rows))


make_files = Files
