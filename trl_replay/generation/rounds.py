"""Further rounds of generation, in which live groups take the place of dead ones (dynamic sampling)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from .. import compat
from ..batch.group_view import AdvantageRule
from ..data.prompt_table import PromptTable
from ..data.types import Batch, Floats, Row
from ..distributed.communicator import Communicator
from ..distributed.row_layout import RowLayout
from ..errors import SeamError
from ..setup.settings import Components, Settings
from .judge import Judge, JudgedBatch
from .prompts import GroupLayout, Prompts
from .reports import KEPT, Reports, RoundReport, merged

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
        self._layout = GroupLayout(compat.local_rows(here), size, communicator.rank, components.processes)
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
        self._layout = GroupLayout(rows, before.size, before.rank, before.ranks)
        self._reports = Reports(self._layout)
        self._prompts.lay_out(self._layout)

    def complete(self, batch: Batch, rows: RowLayout, score: Score) -> JudgedBatch:
        """Resample dead groups while rounds are left and too few groups are live.

        Args:
            batch (`dict`): As TRL returned it, its texts on the CPU.
            rows ([`RowLayout`]): Where its rows lie.
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

    def _generate(self, state: _BatchState, batch: Batch, rows: RowLayout, score: Score) -> JudgedBatch:
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
        batch = self._judge.fetch(score(self._inputs(current, layout.mine_here)))
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
        self, state: _BatchState, judged: Callable[[], tuple[JudgedBatch, Floats]], layout: GroupLayout
    ) -> tuple[JudgedBatch, RoundReport]:
        """Exchange a round's results, and add its groups to the prompt table and to the batch's state.

        Args:
            state ([`_BatchState`]): Gets them.
            judged (`Callable`): Gives the judged batch, and what this process tells of it.
            layout ([`GroupLayout`]): Where they lie.
        """
        latest, vectors = self._communicator.tell(judged, self._reports.blank())
        told = self._reports.read(vectors, layout)
        state.rounds.append(latest)
        state.items += told.items
        fresh = latest.fresh
        self._prompts.present.update(told.keys.tolist())
        keys = told.keys[latest.groups]
        passed, known = self._success.passed(fresh), self._success.least is not None
        self.table.note(keys, fresh.prompt, passed, fresh.dead, self._clock.update, ~fresh.unscored, known)
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
        generations = tuple(one.fresh for one in state.rounds)
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
        rows = RowLayout(columns, {"row": columns["row"][rows.here]}, rows.size)
        here = slice(rows.first, rows.first + rows.count)
        batch = {**current.batch, "advantages": advantages[here].to(current.batch["advantages"])}
        return replace(current, batch=batch, rows=rows, fresh=self._judge.groups_of(rows, current.scored, setup))

    def _refuse_unexplained(self, rounds: Sequence[JudgedBatch], setup: compat.RewardSetup) -> None:
        """Refuse to recompute advantages that TRL's rules do not explain."""
        for one in rounds:
            of_tokens = self._fields.has_token_advantages(one.batch)
            rule = AdvantageRule(one.rows.columns, one.scored, setup, self._layout.size, of_tokens)
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
        sources = [state["source"] for state in states]
        self._prompts.source.load_any(sources)
