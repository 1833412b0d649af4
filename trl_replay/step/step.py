"""What a session does with each batch that the trainer scored, up to the one that is trained on, and with those that
only enter the buffer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from .. import compat
from ..base.progress import begin, send
from ..batch.compose import compose, cut, padding, with_stored_fields
from ..batch.groups import (
    LONGER,
    AdvantageFormula,
    Block,
    Candidate,
    PendingGroups,
    Recorded,
    fill_missing,
    serials_of,
    with_rewards,
)
from ..data.counters import SETTLED, Tally
from ..data.plan import FRESH, Plan
from ..data.types import PIXELS, Batch, Bools, FieldTable, Floats, Group, Groups, Ints, Placement, Row
from ..distributed.communicator import Agreed, Communicator, Decision, RollCall, SharedRows
from ..errors import ConfigurationError, ReplayError, SeamError
from ..generation.rounds import Judge, JudgedBatch, Rounds, Score
from ..loss.supply import COMPOSED, EXCLUDED, ROWS, SILENT, WITHOUT_KL, Denominator, Placed, Supply
from ..loss.tap import Handshake, Tap, TapState
from ..reporting import Reporting
from ..setup.settings import Components
from .decisions import Decisions, ScoredBatch

NOTHING_LEFT = (
    "Another reward rule than the present one scored the groups of this run, so they have left the buffer, and it "
    "generates no further batch: it would train on its one batch again and again. Call session.add(...) in the "
    "callback that changes the rule, or in on_train_begin where training is resumed; or go back to the rule of then."
)
REPEATS = (
    "This run generates one batch, and an iteration trains on it again, for no stored group could be drawn: it learns "
    "nothing from its file. Raise the limit that holds groups back, or end the run here."
)


SAVED = ("collected_at", "unfinished", "settled")
"""Attributes of [`StepCarry`] that a checkpoint keeps."""


@dataclass(slots=True)
class StepCarry:
    """State that a session carries from one generation batch to the next.

    Attributes:
        pending ([`PendingGroups`], *optional*): The last batch's candidates; None if they have settled.
        collected_at (`int`, *optional*): Update at which candidates were last collected.
        unfinished (`bool`): Whether a batch was scored since training last ended.
        settled (`dict[str, float]`): What further iterations have counted since the batch was generated, on all
            processes: the next batch's metrics tell it.
    """

    pending: PendingGroups | None = None
    collected_at: int | None = None
    unfinished: bool = False
    settled: dict[str, float] = field(default_factory=dict)

    def pop_candidates(self) -> PendingGroups | None:
        """Return the candidates, for the batch that settles them, and forget them here."""
        pending, self.pending = self.pending, None
        return pending

    def collected(self, pending: PendingGroups, update: int) -> None:
        """Keep a batch's candidates until the next batch settles them, with the number of updates done."""
        self.pending = pending
        self.collected_at = update

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, candidates apart."""
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, without candidates."""
        for name in SAVED:
            setattr(self, name, state[name])
        self.pending = None


@dataclass(slots=True)
class IterationTemplate:
    """One generation batch, kept until the next one.

    Attributes:
        scored ([`ScoredBatch`]): The batch before anything was exchanged, with all groups dead: a further iteration
            may fill each slot.
        expected ([`TapState`]): What the tap does about the composed batch.
        micro_batches (`list`, *optional*): The composed batch as the trainer buffers it, once an iteration has begun.
        step (`int`, *optional*): The trainer's count of micro-batches when an iteration last began.
    """

    scored: ScoredBatch
    expected: TapState
    micro_batches: list[Any] | None = None
    step: int | None = None


class Step:
    """The step of one session. `take` and `iterate` return the batch that is trained on; `store` returns none. Every
    process calls them equally often.

    Args:
        trainer (`Callable`): Gives the trainer.
        components ([`Components`]): What the session is made of.
        reporting ([`Reporting`]): Gets the metrics.
        roll_call ([`RollCall`]): Checks that all processes come here.

    Attributes:
        handshake ([`Handshake`]): Whether the loss was seen to go through the tap.
        supply ([`Supply`]): What replayed rows get in the loss.
        tap ([`Tap`]): Records and supplies log-probs inside the loss.
        communicator ([`Communicator`]): Talks to the other processes.
        decisions ([`Decisions`]): Decides from columns alone.
        judge ([`Judge`]): Makes groups of what the trainer scores. The trainer's wrapped `_calculate_rewards` feeds it
            (`judge.rewards`) while the batch is scored, before `take`.
        rounds ([`Rounds`], *optional*): Dynamic sampling, and prompts that a plugin chooses. None where neither is
            set.
        carry ([`StepCarry`]): What the last generation batch left for the next one.
        template ([`IterationTemplate`], *optional*): The batch on which further iterations are composed.
    """

    def __init__(
        self, trainer: Callable[[], Any], components: Components, reporting: Reporting, roll_call: RollCall
    ) -> None:
        settings = components.settings
        self._trainer = trainer
        self._components = components
        self._buffer = components.buffer
        self._totals = components.buffer.totals
        self._reporting = reporting
        self._roll_call = roll_call
        components.errors.defers = components.processes == 1 and not compat.steps_in_backward(trainer())
        self.handshake = Handshake()
        self.supply = Supply(
            components.correct, components.loss.bounds, components.loss.token_weights, components.errors.check
        )
        self.tap = Tap(
            self.supply,
            components.num_generations,
            self.handshake,
            components.errors,
            components.loss.bounds.form,
            trainer,
        )
        self.communicator = Communicator(components, int(trainer().accelerator.process_index))
        self.decisions = Decisions(components, self.handshake, settings)
        self.judge = Judge(trainer, settings, components, self.decisions.mixing.shape)
        self.rounds: Rounds | None = None
        if settings.acts and settings.chooses_prompts:
            self.rounds = Rounds(trainer, settings, components, self.communicator, self.judge)
        self.carry = StepCarry()
        self.template: IterationTemplate | None = None
        self._repetition_told = False
        self._longest = compat.longest_completion(trainer())

    def begin(self, inputs: Sequence[Row]) -> Sequence[Row]:
        """The rows to generate a batch for: the trainer's own, unless a plugin changes prompts."""
        if self.rounds is not None:
            inputs = self.rounds.begin(inputs)
        return self.note_tasks(inputs)

    def note_tasks(self, inputs: Sequence[Row]) -> Sequence[Row]:
        """Note what tasks the rows are of that the trainer is about to generate for; return them."""
        first = self.communicator.rank * len(inputs)
        size = self._components.num_generations
        with self._components.errors.keeping():
            now = self._trainer().num_generations
            if now != size:
                raise SeamError(
                    f"num_generations was {size} at attach and is {now} now: stored groups have {size} rows. "
                    "Set it back, or detach and attach again."
                )
            self._components.tasks.begin(inputs, first, size)
        return inputs

    def take(self, batch: Batch, score: Score | None = None) -> Batch:
        """Take one generation batch: what stock scored goes in, what is trained on comes out.

        Args:
            batch (`dict`): As TRL returned it. Its rewards are those that the judge was fed while it was scored.
            score (`Callable`, *optional*): Scores further rows as TRL does; needed where something is generated again.
        """
        self._roll_call.for_training()
        self._warn_of_no_update()
        started = time.perf_counter()
        self.carry.unfinished = True
        on_cpu = self.judge.to_cpu(batch)
        pending, rows = self._share(on_cpu, batch["prompt_ids"].size(0))
        scored = self._scored(self._judge(on_cpu, rows, score), batch, on_cpu)
        decide = partial(self.decisions.fill_batch, scored, pending, self.carry.collected_at)
        agreed = self.communicator.agree(scored.rows, decide, serials_of(pending))
        payload = self.communicator.move(scored.rows, agreed.decision)
        return self._train_on(scored, agreed, payload, started)

    def _warn_of_no_update(self) -> None:
        """Warn where a second batch is scored, and neither training nor an update was heard of."""
        clock = self._buffer.clock
        if self._totals.batches == 1 and not clock.update and not clock.planned:
            warnings.warn(
                "A second batch is scored, and replay has seen no update: nothing would be replayed. It counts them "
                "in trainer.train(); in a loop of your own, call session.updated() after each optimizer.step().",
                stacklevel=2,
            )

    @property
    def iterates(self) -> bool:
        """Tell whether iterations 2 … `num_iterations` draw groups of their own."""
        return self._components.settings.acts and self._components.settings.iterates

    @property
    def draws_again(self) -> bool:
        """Tell whether they train on these groups: not in a dry run."""
        return self.iterates and not self._components.settings.config.replay_dry_run

    def iterate(self, template: IterationTemplate) -> Batch | None:
        """Begin a further iteration of a generation batch, on all processes together.

        Args:
            template ([`IterationTemplate`]): The generation batch.

        Returns:
            A batch of groups drawn anew. None where no process drew any: the composed batch is trained on again.

        Raises:
            ReplayError: The run generates no further batch, and another reward rule scored its groups.
        """
        scored, rows = template.scored, template.scored.rows
        pending, rows = self._share(None, rows.count)
        iteration = compat.iteration(self._trainer())
        decide = partial(self.decisions.fill_iteration, scored, rows, pending, self.carry.collected_at, iteration)
        agreed = self.communicator.agree(rows, decide, serials_of(pending))
        payload = self.communicator.move(rows, agreed.decision)
        self._count_iteration(agreed)
        once = compat.generates_once(self._trainer())
        with self._components.errors.keeping():
            if once and self._buffer.scored_from and not self._buffer.table.origin.any():
                raise ReplayError(NOTHING_LEFT)
            if agreed.total["replaced"]:
                composed, placements = compose_batch(scored, agreed.decision, payload, self._components)
                return self._expect(scored, agreed, composed, [], placements)
            if once:
                self._warn_of_repetition(agreed.decision.tally)
        self.tap.expect_again(template.expected)
        return None

    def _warn_of_repetition(self, tally: Tally) -> None:
        """Warn once where a run that generates one batch finds no group to draw."""
        if not self._repetition_told and self.communicator.rank == 0:
            self._repetition_told = True
            why = "; ".join(tally.reasons) or "see session.explain()"
            warnings.warn(f"{REPEATS} Why nothing was drawn: {why}.", stacklevel=2)

    def check_loss(self) -> None:
        """Raise, before the optimizer steps on a whole batch, if no loss on its live rows went through the seam."""
        trainer, pending = self._trainer(), self.carry.pending
        if self.handshake.awaited and not compat.has_gradients(trainer):
            self.handshake.awaited = False  # the trainer has skipped all of it
        args = trainer.args
        is_whole = args.steps_per_generation <= args.gradient_accumulation_steps and self._components.processes == 1
        if is_whole and (self.supply.placed.lengths or (pending is not None and pending.candidates)):
            self.handshake.has_run(self._buffer.clock.update + 1, self.carry.collected_at)

    def _count_iteration(self, agreed: Agreed[Decision]) -> None:
        settled = {name: agreed.total[name] for name in SETTLED}
        drawn = {**settled, "iterated": agreed.total["replaced"]}
        self._totals.add(agreed.decision.tally.of_iteration(), batches=0, of_all_ranks=drawn)
        self._carry_settled(settled)
        self._reporting.log_iteration(agreed.total)

    def finish(self) -> None:
        """The end of training: candidates that wait for the next batch settle now, and kept errors are raised."""
        if not self.carry.unfinished:
            return
        self.carry.unfinished = False
        self._roll_call("end", "the end of training")
        pending, rows = self._share(None, compat.local_rows(self._trainer()))
        self._settle(rows, pending)

    def settle(self) -> None:
        """Settle the last batch's candidates now, once all of its rows have had a forward: a checkpoint holds none.

        The next batch's metrics tell of it.
        """
        if self.carry.pending is None or not compat.has_seen_all(self._trainer()):
            return
        pending, rows = self._share(None, compat.local_rows(self._trainer()))
        self._carry_settled(self._settle(rows, pending).total)

    def _carry_settled(self, total: Mapping[str, float]) -> None:
        self.carry.settled = {name: total[name] + self.carry.settled.get(name, 0.0) for name in SETTLED}

    def store(self, batch: Batch, choose: Callable[[Groups], tuple[Groups, list[int]]]) -> Tally:
        """Let a scored batch enter the buffer: share, judge, collect, and settle it. Nothing of it is trained on, and
        nothing in it is replaced.

        Args:
            batch (`dict`): As TRL returned it, with log-probs.
            choose (`Callable`): Of its groups, gives them as they are to be stored, and which of them are.

        Returns:
            What was counted.
        """
        count = batch["prompt_ids"].size(0)
        on_cpu = self.judge.to_cpu(batch)
        rows = self._share_columns(on_cpu, count, None)
        scored = self._scored(self._judge(on_cpu, rows, None), batch, on_cpu)
        pending = PendingGroups(scored.groups, [])
        with self._components.errors.keeping():
            groups, slots = choose(scored.groups)
            pending = PendingGroups(groups, collect(replace(scored, groups=groups), slots, self._components))
        rows = self._share_columns(None, count, pending)
        return self._settle(rows, pending).decision.tally

    def _settle(self, rows: SharedRows, pending: PendingGroups | None) -> Agreed[Decision]:
        """Settle candidates, and nothing else; return what was counted."""

        def decide() -> Decision:
            tally = Tally()
            return Decision(tally, self.decisions.settle(pending, rows, [], tally))

        agreed = self.communicator.agree(rows, decide, serials_of(pending))
        self.communicator.move(rows, agreed.decision)
        self.communicator.agree(rows, Decision)  # what failed while payload moved
        self._totals.add(agreed.decision.tally, batches=0, of_all_ranks=agreed.total)
        return agreed

    def _judge(self, batch: Batch, rows: SharedRows, score: Score | None) -> JudgedBatch:
        """The batch, with further groups in the slots of dead ones where that is set."""
        if self.rounds is not None and score is not None:
            return self.rounds.complete(batch, rows, score)
        with self._components.errors.keeping():
            return self.judge.judge_batch(batch, rows)
        return JudgedBatch.unseen(batch, rows)

    def _scored(self, generated: JudgedBatch, given: Batch, on_cpu: Batch) -> ScoredBatch:
        """The batch with all that decisions need: log-probs that are stored without being seen by the loss, and a
        plugin's advantages. What fails is kept, since another process may wait in a forward pass."""
        rows = generated.rows
        setup = compat.reward_setup(self._trainer())
        batch = generated.batch
        of_tokens = self._components.fields.has_token_advantages(batch)
        recorded = None
        keys: frozenset[str] = frozenset()
        with self._components.errors.keeping():
            if self._components.forwards_to_record:
                forwarded, _ = send_batch(generated.batch, given, on_cpu, self._components.fields)
                logps = self._components.dialect.forward_logps(self._trainer(), forwarded)
                recorded = None if logps is None else Block(logps)
        with self._components.errors.keeping():
            batch = write_advantages(batch, rows, generated.new_groups, of_tokens)
            keys = rows.takes(self._components.fields.stored_keys(batch))
        return ScoredBatch(
            batch=batch,
            given=given,
            on_cpu=on_cpu,
            rows=rows,
            groups=generated.new_groups,
            generations=generated.generations,
            refilled=generated.refilled,
            formula=AdvantageFormula(rows.columns, generated.scored, setup, rows.size, of_tokens),
            keys=keys,
            recorded=recorded,
            logps_known=recorded is not None or compat.OLD_LOGPS in batch,
        )

    def _train_on(
        self, scored: ScoredBatch, agreed: Agreed[Decision], payload: Mapping[int, Group], started: float
    ) -> Batch:
        """Compose and collect: the batch that is trained on, and what the loss shall record and supply for it."""
        if self.draws_again:  # whatever fails below: all ranks come to the next iteration
            self.template = IterationTemplate(scored.emptied(), self.tap.expected)
        try:
            composed, placements = compose_batch(scored, agreed.decision, payload, self._components)
            candidates = collect(scored, agreed.decision.candidates, self._components)
            self.carry.collected(PendingGroups(scored.groups, candidates), self._buffer.clock.update)
            self.handshake.awaited = self._buffer.capacity > 0
            waiting = [] if scored.logps_known else [candidate for candidate in candidates if candidate.waits]
            share = padding(composed)
            composed = self._expect(scored, agreed, composed, waiting, placements)
            if self.template is not None:
                self.template.expected = self.tap.expected
            self._totals.add(agreed.decision.tally, of_all_ranks=agreed.total)
            self._log(share, agreed.total, scored, started)
            return composed
        except Exception as caught:
            self.handshake.awaited = False  # the loss gets a batch that need not go through the seam
            self.tap.expect_nothing()
            self._components.errors.keep(caught)
            return self._sent(scored.batch, scored)

    def _expect(
        self,
        scored: ScoredBatch,
        agreed: Agreed[Decision],
        composed: Batch,
        candidates: Sequence[Candidate],
        placements: Sequence[Placement],
    ) -> Batch:
        """The composed batch as the loss gets it: tokens counted, row ids added."""
        plan, total, size = agreed.decision.plan, agreed.total, scored.rows.size
        factor = row_factor(total, size)
        flags = row_flags(scored.rows, plan, leaves_out=factor != 1.0)
        trainer = self._trainer()
        denominator = Denominator(compat.denominator(trainer), factor, compat.bonus_over_items(trainer))
        ids = self.tap.expect(flags, candidates, placements, denominator, composed["advantages"])
        told = scored.rows.told_items if denominator.kind == "items" else None
        composed = {**count_items(composed, total, size, told), ROWS: ids}
        return self._sent(composed, scored, self.supply.placed)

    def _sent(self, batch: Batch, scored: ScoredBatch, placed: Placed | None = None) -> Batch:
        """A batch that was composed of a fresh one, on the trainer's device, and with it what was placed there."""
        placed = Placed() if placed is None else placed
        sent, placed.tensors = send_batch(batch, scored.given, scored.on_cpu, self._components.fields, placed.tensors)
        return sent

    def _share(self, batch: Batch | None, count: int) -> tuple[PendingGroups | None, SharedRows]:
        """Share the columns of `count` rows of this process and of the last batch's candidates, and whether the reward
        rule is another one. The candidates leave the carry here, and are returned: this step settles them."""
        self._forget_longer()
        rows = self._share_columns(batch, count, self.carry.pending)
        return self.carry.pop_candidates(), rows

    def _share_columns(self, batch: Batch | None, count: int, pending: PendingGroups | None) -> SharedRows:
        rule = self._buffer.rule
        changes: list[str] = []
        with self._components.errors.keeping():
            rule = compat.reward_rule(self._trainer())
            changes = self._buffer.rule.changes(rule)
        rows = self.communicator.share(batch, count, pending, bool(changes))
        if rows.columns["changed"][0]:  # as the first of the processes that share the buffer has found
            with self._components.errors.keeping():
                told = changes or ["on another process"]
                self.decisions.rescored += self._buffer.score_by(rule, told, tells=rows.first == 0)
        return rows

    def _forget_longer(self) -> None:
        """Groups leave that are longer than completions may be now, if that is less than before."""
        before, self._longest = self._longest, compat.longest_completion(self._trainer())
        if self._longest >= before:
            return
        dropped = self._buffer.forget(np.any(self._buffer.table.row_length > self._longest, axis=1))
        pending = self.carry.pending
        if pending is not None:
            self.carry.pending, refused = pending.up_to(self._longest)
            dropped += refused
        self._totals.reasons[f"an entry was dropped: {LONGER}={self._longest:.0f}"] += dropped

    def _log(self, share: float, total: dict[str, float], scored: ScoredBatch, started: float) -> None:
        since = {name: total[name] + count for name, count in self.carry.settled.items()}
        self.carry.settled = {}
        values = {"replay/padding": share}
        batches = self._totals.batches
        if self.iterates and batches > 1:
            values["replay/replay_ratio"] = self._buffer.clock.update / (batches - 1)
        if self.rounds is not None:
            values["replay/rounds"] = float(self.rounds.done)
            values["replay/refilled_fraction"] = total["refilled"] / total["groups"]
        self._reporting.log_groups({**total, **since}, scored.formula.scored, scored.groups, values)
        generating = 0.0 if self.rounds is None else self.rounds.seconds  # the trainer's own work
        self._reporting.record({"replay/seconds": time.perf_counter() - started - generating})

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it; JSON can hold all but `prompts` (columns of those generated for)."""
        rounds = self.rounds
        return {
            "prompts": None if rounds is None else rounds.table.state_dict(),
            "shares": self.communicator.shares,
            "verified": self.handshake.verified,
            "longest": self._longest,
            **self.carry.state_dict(),
            "rounds": None if rounds is None else rounds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], of_ranks: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Take what `state_dict` gave; runs that generated nothing again have left neither `rounds` nor `prompts`.

        Args:
            state (`Mapping`): This rank's.
            of_ranks (`Sequence[Mapping]`, *optional*): Of several ranks, what is known about generating, where these
                are not the same as then.
        """
        self.communicator.shares = state["shares"]
        self.handshake.verified = state["verified"]
        self.handshake.awaited = False
        self._longest = state["longest"]
        self.carry.load_state_dict(state)
        if self.rounds is None:
            return
        ranks = of_ranks or [state]
        known = [of_rank["rounds"] for of_rank in ranks if of_rank["rounds"]]
        if known:
            self.rounds.load_state_dict(*known)
        seen = [of_rank["prompts"] for of_rank in ranks if of_rank["prompts"]]
        if seen:
            self.rounds.table.load_state_dict(*seen, own=of_ranks is None)


def write_advantages(batch: Batch, rows: SharedRows, groups: Groups, of_tokens: bool) -> Batch:
    """The batch with what a plugin made of the advantages of this process's rows; values that it left keep their
    bits, and without any other the batch itself returns.

    Args:
        batch (`dict`): As TRL returned it.
        rows ([`SharedRows`]): With the columns of the trainer's own.
        groups ([`Groups`]): As the plugin shaped them.
        of_tokens (`bool`): Whether each token has its own advantage.
    """
    shaped = rows.of_here(groups.advantages)
    changed = shaped != rows.columns["advantages"][rows.here]
    if of_tokens and shaped[changed].any():
        raise ConfigurationError(
            "A plugin's trl_replay_advantages gave a row another advantage, and this trainer gives one to each of its "
            "tokens: there a plugin can only mask rows (NaN) or give them 0. Leave the plugin out."
        )
    return _with_advantages(batch, shaped, changed)


def _with_advantages(batch: Batch, values: Floats, changed: Bools) -> Batch:
    """The batch with some of its advantages changed; `values` and `changed` are `(B,)`."""
    if not changed.any():
        return batch
    advantages = batch["advantages"]
    shape = (-1, *[1] * (advantages.dim() - 1))
    where = torch.from_numpy(changed).view(shape)
    written = torch.tensor(values).to(advantages).view(shape)  # a copy: the view of the groups can only be read
    return {**batch, "advantages": torch.where(where, written, advantages)}


def compose_batch(
    scored: ScoredBatch, decision: Decision, payload: Mapping[int, Group], components: Components
) -> tuple[Batch, list[Placement]]:
    """The batch that the plan describes; the fresh one itself where every row trains on itself.

    Args:
        scored ([`ScoredBatch`]): The batch.
        decision ([`Decision`]): With the plan.
        payload (`Mapping[int, Group]`): What was drawn, by serial.
        components ([`Components`]): How to pad.

    Returns:
        The batch, and the placements of stored rows.
    """
    rows, plan, fields, buffer = scored.rows, decision.plan, components.fields, components.buffer
    replayed = rows.placements(decision, buffer.table, buffer.clock.update, payload)
    batch, placements = with_stored_fields(scored.batch, fields, replayed)
    composed = compose(batch, fields, placements, components.loss.pad_to_multiple_of)
    own = plan.column(buffer.table.row_advantage, scored.groups.advantages)
    changed = rows.of_here(plan.advantages != own)
    return _with_advantages(composed, rows.of_here(plan.advantages), changed), replayed


def row_flags(rows: SharedRows, plan: Plan, leaves_out: bool) -> Ints:
    """The second column of the batch key `ROWS`, `(B,)` int64.

    Args:
        rows ([`SharedRows`]): Where rows lie.
        plan ([`Plan`]): What they train on.
        leaves_out (`bool`): Whether masked rows are out of denominators.
    """
    flags = np.where(plan.masked | plan.silent, SILENT, 0)
    flags |= np.where(plan.masked & leaves_out, EXCLUDED, 0)
    flags |= np.where(plan.kl, 0, WITHOUT_KL)
    here = rows.of_here(flags)
    here |= COMPOSED * int((rows.of_here(plan.entry) != FRESH).any())
    return here


def row_factor(total: Mapping[str, float], size: int) -> float:
    """Rows of all processes over those that are not masked; 1 where none is left, and denominators stay."""
    rows = total["groups"] * size
    left = rows - total["excluded"] * size - total["masked"]
    return rows / left if left else 1.0


def count_items(batch: Batch, total: Mapping[str, float], size: int, told: int | None) -> Batch:
    """The composed batch with its token count corrected by what all ranks exchanged and left out.

    Args:
        batch (`dict`): Composed.
        total (`Mapping[str, float]`): Counters of all ranks.
        size (`int`): Rows of a group.
        told (`int`, *optional*): The token count of the batch as it was scored, where the loss divides by it.

    Raises:
        SeamError: It counts something else than the tokens that train.
    """
    masked = total["excluded"] * size + total["masked"]
    if not total["items_delta"] or masked == total["groups"] * size:
        return batch
    if told is not None and told != total["items"] and not total["refilled"]:
        raise SeamError(
            f"num_items_in_batch of the scored batch is {told}, and its rows have {total['items']:.0f} tokens that "
            "train: replay can't tell what it would be with other rows. Leave the count as TRL made it and change the "
            "loss instead, or train without replay: use_replay=False."
        )
    items = batch["num_items_in_batch"]
    change = torch.as_tensor(total["items_delta"], dtype=items.dtype, device=items.device)
    counted = items + change
    return {**batch, "num_items_in_batch": torch.where(counted > 0, counted, items)}


def collect(scored: ScoredBatch, slots: Sequence[int], components: Components) -> list[Candidate]:
    """The live groups that are to be stored, as candidates: complete where their log-probs are known.

    Args:
        scored ([`ScoredBatch`]): The batch.
        slots (`Sequence[int]`): Which groups.
        components ([`Components`]): How to cut each key, and the buffer, which numbers them.
    """
    batch, fields, buffer = scored.batch, components.fields, components.buffer
    stored = fields.stored_keys(batch) | {compat.OLD_LOGPS}
    local = {slot: scored.rows.local(slot) for slot in slots}
    groups = iter(cut(batch, fields, [rows for rows, _ in local.values() if rows.stop]))
    candidates = []
    numbers = buffer.take_serials(len(slots))
    for number, (slot, (rows, first)) in zip(numbers, local.items(), strict=True):
        candidate = Candidate(
            serial=number,
            slot=slot,
            group=with_rewards(next(groups), scored.groups.rewards[slot, first:]) if rows.stop else None,
            keys=scored.rows.holds(stored, slot),
            rows=rows,
            update=buffer.clock.update,
        )
        candidates.append(candidate)
        if candidate.group is None:
            continue
        if scored.recorded is not None:
            candidate.records = [Recorded(scored.recorded, row) for row in range(rows.start, rows.stop)]
        elif not candidate.waits:
            fill_missing(candidate.group.tensors)
        if PIXELS in candidate.group.tensors:
            tensors = candidate.group.tensors.items()
            candidate.images = begin({key: tensor for key, tensor in tensors if fields.is_image(key)})
    return candidates


def send_batch(
    batch: Batch,
    given: Batch,
    on_cpu: Batch,
    fields: FieldTable,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> tuple[Batch, dict[str, torch.Tensor]]:
    """A composed batch on the trainer's device: tensors that are still those of the fresh batch are the trainer's own,
    and all others go up in one copy.

    Args:
        batch (`dict`): Its texts on the CPU.
        given, on_cpu (`dict`): The fresh batch on the trainer's device and on the CPU.
        fields ([`FieldTable`]): The batch keys that are known.
        others (`Mapping[str, torch.Tensor]`): What goes up with it.

    Returns:
        The batch, and `others`.
    """
    sent: Batch = {
        key: given[key] if key in on_cpu and value is on_cpu[key] else value for key, value in batch.items()
    }
    device = given["prompt_ids"].device
    away = {
        key: value
        for key, value in sent.items()
        if torch.is_tensor(value) and value.device != device and key != ROWS and not fields.is_image(key)
    }
    moved = send({**away, **{("", name): value for name, value in others.items()}}, device)
    return {**sent, **{key: moved[key] for key in away}}, {name: moved["", name] for name in others}
