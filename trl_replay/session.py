"""The session: one attachment of a buffer and strategies to one trainer, and the step that it takes each batch."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from . import compat
from .base.sizes import counted
from .base.weights import changes_in_place, fingerprint
from .batch.candidates import LONGER, STALE, Candidate, PendingGroups, serials_of
from .batch.compose import padding, split_reference, with_reference
from .batch.group_view import REFERENCE, RULE, AdvantageRule
from .data.counters import SETTLED, Tally
from .data.prompt_table import PromptTable
from .data.types import Batch, Entry, Group, Groups, Placement, Row
from .distributed.communicator import Agreed, Communicator
from .distributed.decision import DETACHED, PAUSED, RUNS, Decision
from .distributed.roll_call import roll_call_of
from .distributed.row_layout import RowLayout
from .errors import ReplayError, SeamError
from .generation.generated import Generated
from .generation.judge import Judge
from .generation.rounds import Rounds, Score
from .generation.trainer_log import add_column, take_column
from .loss.bounds import Noise
from .loss.denominator import Denominator
from .loss.handshake import Handshake
from .loss.micro_batch import ROWS
from .loss.off_policy_stats import MaskWatch
from .loss.supply import Supply
from .loss.tap import Tap
from .protocols import Scope, SessionFiles
from .reporting import Advisor, Reporting
from .setup.components import Components
from .setup.config import ReplayConfig
from .setup.settings import Settings
from .step.carry import IterationTemplate, StepCarry
from .step.decisions import Decisions
from .step.fresh_batch import FreshBatch
from .step.training_batch import (
    collect,
    compose_batch,
    count_items,
    reference_of,
    row_factor,
    row_flags,
    write_advantages,
)

NOT_ATTACHED = "Groups can be added to the buffer of an attached session only: attach(trainer).add(…)."
NOTHING_LEFT = (
    "Another reward rule than the present one scored the groups of this run, so they have left the buffer, and it "
    "generates no further batch: it would train on its one batch again and again. Name their file as "
    "replay_warm_start, which is read again under a new rule; or call session.add(...) in the callback that changes "
    "the rule, or in on_train_begin where training is resumed; or go back to the rule of then."
)
REPEATS = (
    "This run generates one batch, and an iteration trains on it again, for no stored group could be drawn: it learns "
    "nothing from its file. Raise the limit that holds groups back, or end the run here."
)
TAG = "trl-replay"
"""On the card of a model that was trained on replayed groups."""


class Session:
    """One attachment. Made by `attach`.

    Attributes:
        config ([`ReplayConfig`]): The same for its users: the settings in force, a preset's included.
        buffer ([`ReplayBuffer`]): `len(buffer)`, `buffer.table`, `buffer.capacity`, `buffer.nbytes`, `buffer.clear()`.
        scope ([`Scope`]): Who shares the buffer.
        totals ([`Totals`]): Counters since attach.
        enabled (`bool`): False with `use_replay=False`, and with `replay_buffer_size=0` where nothing works without a
            buffer: then nothing is patched. Generating again, `replay_unfilled` and a plugin that shapes advantages or
            chooses prompts do.
        paused (`bool`): Between `pause()` and `resume()`.
        detached (`bool`): After `detach`: buffer, metrics and `explain()` can still be read.
        components ([`Components`]): What the session is made of.
        carry ([`StepCarry`]): What the last generation batch left for the next one.
        replaced (`list[bool]`): Of all processes' rows of the last generation batch, those that were replaced.
        judge ([`Judge`]): Makes groups of what the trainer scores.
        rounds ([`Rounds`], *optional*): What is done about generating: for dead groups again, and for prompts that a
            plugin chooses. None where nothing is.
        resumes_at (`int`): After resuming in the midst of a generation batch's iterations, the one that comes next.
        rebuilds (`bool`): Whether a batch is generated in the place of one that was lost so.
        files ([`SessionFiles`]): Reads and writes files for it; given by `attach`.
        reference (`str`): Tells the reference model's states apart: that of the last look.
    """

    def __init__(self, trainer: Any, settings: Settings, components: Components, advisor: Advisor) -> None:
        self._trainer = weakref.ref(trainer)
        self.components = components
        self.enabled = enabled = settings.acts
        self.paused = False
        self.detached = False
        self.buffer = components.buffer
        self.totals = components.buffer.totals
        self.handshake = Handshake()
        self.supply = Supply(components.correct, components.loss.bounds, components.loss.token_weights)
        self.mask_watch = MaskWatch(_what_masks(settings, advisor))
        self.tap = Tap(
            self.supply,
            components.num_generations,
            self.handshake,
            components.errors,
            components.loss.bounds.form,
            self._trainer,
        )
        self.communicator = Communicator(components, int(trainer.accelerator.process_index))
        self.decisions = Decisions(components, self.handshake, settings, lambda: compat.reward_rule(self.trainer))
        self.judge = Judge(self._trainer, settings, components, self.decisions.mixing)
        self.rounds: Rounds | None = None
        if enabled and settings.chooses_prompts:
            self.rounds = Rounds(self._trainer, settings, components, self.communicator, self.judge)
        self.roll_call = roll_call_of(trainer, settings, components.scope)
        self.replaced: list[bool] = []
        self.carry = StepCarry()
        self.template: IterationTemplate | None = None
        self.resumes_at = 0
        self.rebuilds = False
        self._repetition_told = False
        self.files: SessionFiles
        self.reporting = Reporting(self._trainer, components, advisor)
        self.reference = ""
        self._reference_changes = 0
        self._longest = compat.longest_completion(trainer)
        if enabled:
            self._look_at_reference()

    def __repr__(self) -> str:
        return f"<Session: {self.reporting.in_one_line()}>"

    @property
    def settings(self) -> Settings:
        """What the session goes by."""
        return self.components.settings

    @property
    def config(self) -> ReplayConfig:
        """The settings in force, a preset's included."""
        return self.settings.config

    @property
    def metrics(self) -> dict[str, float]:
        """The last generation batch's metrics, with the ratios of rows trained on since."""
        return self.totals.metrics

    @property
    def noise(self) -> Noise | None:
        """How far log-probs move at equal weights, as tried at attach; None where that was not possible."""
        return self.components.loss.bounds.noise

    @property
    def scope(self) -> Scope:
        """The processes that share the buffer."""
        return self.components.scope

    @property
    def trainer(self) -> Any:
        """The trainer, held weakly.

        Raises:
            ReplayError: It no longer exists.
        """
        return living(self._trainer)

    @property
    def update(self) -> int:
        """Optimizer updates since attach. (`trainer.state.global_step` starts at 0 again with every `train()`.)"""
        return self.buffer.clock.update

    def updated(self) -> None:
        """The optimizer has made an update: rows that have had no forward yet can't be recorded any more."""
        self.buffer.clock.update += 1
        self.tap.forget()

    @property
    def prompts(self) -> PromptTable | None:
        """The prompts generated for so far: the one object that every `context.prompts` is. None where nothing is
        generated again and no plugin chooses prompts."""
        return self.buffer.prompts

    @property
    def plugins(self) -> list[str]:
        """Names of the plugins whose hooks take part."""
        return [plugin.name for plugin in self.settings.plugins]

    def clear(self) -> None:
        """Forget all groups, those of the last batch that are not stored yet included. Call it on every process, also
        from a callback: where a reward function has changed, say."""
        self.buffer.clear()
        if self.carry.pending is not None:
            self.carry.pending = replace(self.carry.pending, candidates=[])

    def pause(self) -> None:
        """From the next generation batch on, the trainer is stock; what is stored stays. Call it on every process."""
        self.paused = True
        self.handshake.awaited = False  # the updates to come need not go through the seam

    def resume(self) -> None:
        """Take back `pause`. Call it on every process."""
        self.paused = False

    @property
    def mode(self) -> int:
        """`RUNS`, `PAUSED` or `DETACHED`."""
        if self.detached:
            return DETACHED
        return PAUSED if self.paused else RUNS

    def begin_training(self, updates: int) -> None:
        """Training of so many updates begins. Weights may have been loaded since: rows noted before are not recorded
        any more. The buffer is filled once from the file that is to start it, with the model in its place.

        Raises:
            SeamError: Replay is not attached on all processes.
            ConfigurationError: It is, with other settings.
        """
        self.tap.forget()
        self.roll_call.training = False
        if self.has_other_reference():  # also if an engine has only now sharded it
            self.forget_reference()
        self.buffer.clock.planned = updates
        self.roll_call.for_training()
        self.files.warm_start()

    def skip_batch(self, count: int, at_end: bool = False) -> None:
        """A generation batch of `count` rows that replay leaves as it is. The other processes must hear of it, or they
        would wait for this one.

        Args:
            count (`int`): Rows of this process.
            at_end (`bool`): Training ends: nothing was generated.

        Raises:
            SeamError: Replay runs on another process.
        """
        if not at_end:
            self.tap.expect_nothing()
        if self.paused and not at_end:
            self.totals.pause(count * self.components.processes)
        if self.components.processes == 1:
            return
        self.roll_call.for_training()
        rows = self.communicator.share(None, count, None)
        if self.rounds is not None and not at_end:
            self.rounds.skip_batch(self.mode)
        self.communicator.agree(rows, Decision, mode=self.mode)

    def mark_detached(self) -> None:
        """Detached: nothing more is recorded, and what was taken off the trainer for the next batch is forgotten."""
        self.detached = True
        self.tap.forget()

    @property
    def scoring(self) -> bool:
        """Tell whether the trainer is scoring a batch."""
        return self.judge.rewards is not None

    def put_on(self, trainer: Any) -> None:
        """Add what is on the trainer beside the seam's methods: a column in its table of completions."""
        add_column(trainer)

    def take_off(self, trainer: Any) -> list[Batch]:
        """Take it away again, and replayed rows that are left in the trainer's buffer: without the tap they can't be
        trained on, so stock scores a new batch. Of several processes all do, whichever has such rows: they generate
        together or not at all. Return the micro-batches of the trainer's buffer, without what was flagged in them."""
        self.template = None  # not before: where other ranks go on, this one comes to their iterations
        buffered = getattr(trainer, compat.BUFFERED, None) or []
        ours = [micro for micro in buffered if ROWS in micro]
        if any(self.components.processes > 1 or bool(micro[ROWS][:, 1].any()) for micro in ours):
            setattr(trainer, compat.BUFFERED, None)  # stock's own sign that it must generate
        for micro in ours:
            del micro[ROWS]
        take_column(trainer)
        return ours

    def saving(self) -> AbstractContextManager[Any]:
        """Hold while a checkpoint is written."""
        return nullcontext()

    def explain(self) -> str:
        """Describe what the run came to, what was replayed, why not more was, and what to change."""
        if not self.enabled:
            return "replay: off (use_replay=False or replay_buffer_size=0); the trainer is as TRL made it"
        if not self.buffer.capacity:
            return self.reporting.explain(self.totals.explain_without_buffer())
        rank, ranks = self.communicator.rank, self.communicator.ranks
        replayed = self.totals.explain(len(self.buffer), self.config.replay_dry_run, rank, ranks, self._used())
        return self.reporting.explain(replayed)

    def _used(self) -> str:
        """How often groups were used, where iterations draw them."""
        uses = self.buffer.table.uses
        if not self.totals.counters["iterated"] or not uses.any():
            return ""
        used = uses[uses > 0]
        span = used.min(), used.max()
        times = f"{span[0]} to {span[1]} times" if span[0] < span[1] else counted(int(used[0]), "time")
        return f", {len(used)} of them used, {times} each"

    def begin(self, inputs: Sequence[Row]) -> Sequence[Row]:
        """The rows to generate a batch for: the trainer's own, unless a plugin changes prompts."""
        if self.rounds is not None:
            inputs = self.rounds.begin(inputs)
        return self.note_tasks(inputs)

    def note_tasks(self, inputs: Sequence[Row]) -> Sequence[Row]:
        """Note what tasks the rows are of that the trainer is about to generate for; return them."""
        first = self.communicator.rank * len(inputs)
        size = self.components.num_generations
        with self.components.errors.keeping():
            if self.trainer.num_generations != size:
                raise SeamError(
                    f"num_generations was {size} at attach and is {self.trainer.num_generations} now: stored groups "
                    f"have {size} rows. Set it back, or detach and attach again."
                )
            self.components.tasks.begin(inputs, first, size)
        return inputs

    def step(self, batch: Batch, score: Score | None = None) -> Batch:
        """One generation batch: what stock scored goes in, what is trained on comes out.

        Args:
            batch (`dict`): As TRL returned it.
            score (`Callable`, *optional*): Scores further rows as TRL does; needed where something is generated again.
        """
        self.roll_call.for_training()
        started = time.perf_counter()
        self.carry.unfinished = True
        pending, rows = self._share(batch, batch["prompt_ids"].size(0))
        fresh = self._fresh(self._judge(batch, rows, score))
        decide = partial(self.decisions.fill_batch, fresh, pending, self.carry.collected_at)
        agreed = self.communicator.agree(fresh.rows, decide, serials_of(pending))
        payload = self.communicator.move(fresh.rows, agreed.decision)
        composed = self._train_on(fresh, agreed, payload, started)
        self._read_again(agreed)
        return composed

    def _read_again(self, agreed: Agreed[Decision]) -> bool:
        """Read the file of `replay_warm_start` once more where its groups have left; tell whether that was done."""
        if not agreed.total["unread"]:
            return False
        self.files.warm_start(again=True)
        return True

    @property
    def iterates(self) -> bool:
        """Tell whether iterations 2 … `num_iterations` draw groups of their own."""
        return self.enabled and self.settings.iterates

    @property
    def draws_again(self) -> bool:
        """Tell whether they train on these groups: not in a dry run."""
        return self.iterates and not self.config.replay_dry_run

    def iterate(self, template: IterationTemplate) -> Batch | None:
        """Begin a further iteration of a generation batch, on all processes together.

        Args:
            template ([`IterationTemplate`]): The generation batch.

        Returns:
            A batch of groups drawn anew. None where no process drew any, or replay is paused or detached: the composed
            batch is trained on again.

        Raises:
            ReplayError: The run has nothing else to train on, as another reward rule scored its groups.
        """
        rows = template.fresh.rows
        if self.mode != RUNS:
            self.skip_batch(rows.count, at_end=True)
            self.tap.expect_again(template.expected)
            return None
        fresh = template.fresh
        pending, rows = self._share(None, rows.count)
        iteration = compat.iteration(self.trainer)
        decide = partial(self.decisions.fill_iteration, fresh, rows, pending, self.carry.collected_at, iteration)
        agreed = self.communicator.agree(rows, decide, serials_of(pending))
        payload = self.communicator.move(rows, agreed.decision)
        self._count_iteration(agreed)
        if self._read_again(agreed):
            return self.iterate(template)
        with self.components.errors.keeping():
            if agreed.total["replaced"]:
                composed, placements = compose_batch(fresh, agreed.decision, payload, self.components)
                return self._expect(fresh, agreed, composed, [], placements)
            if compat.generates_once(self.trainer):
                self._stop_repeating(agreed.decision.tally)
        self.tap.expect_again(template.expected)
        return None

    def _stop_repeating(self, tally: Tally) -> None:
        """A run that generates one batch finds no group to draw: refuse where none will come, else warn once.

        Raises:
            ReplayError: Another reward rule scored its groups.
        """
        if not len(self.buffer) and self.buffer.scored_from:
            raise ReplayError(NOTHING_LEFT)
        if not self._repetition_told and self.communicator.rank == 0:
            self._repetition_told = True
            why = "; ".join(tally.reasons) or "see session.explain()"
            warnings.warn(f"{REPEATS} Why nothing was drawn: {why}.", stacklevel=2)

    def rebuild(self, batch: Batch) -> Batch:
        """Take a batch in the place of the one that was lost when training was interrupted in the midst of its
        iterations: the next ones are composed on it. It trains only where nothing is drawn.

        Args:
            batch (`dict`): As TRL returned it.
        """
        self.tap.expect_nothing()
        self.roll_call.for_training()
        success, shares = self.buffer.rules.success, self.communicator.shares
        known = success.state_dict()
        rows = self.communicator.share(batch, batch["prompt_ids"].size(0), None)
        fresh = self._fresh(self._judge(batch, rows, None))
        self.template = IterationTemplate(fresh.emptied(), self.tap.expected)
        success.load_state_dict(known)
        self.communicator.shares = shares
        return batch

    def _count_iteration(self, agreed: Agreed[Decision]) -> None:
        settled = {name: agreed.total[name] for name in SETTLED}
        drawn = {**settled, "iterated": agreed.total["replaced"]}
        self.totals.add(agreed.decision.tally.of_iteration(), batches=0, of_all_ranks=drawn)
        self.carry.settled = {name: settled[name] + self.carry.settled.get(name, 0.0) for name in SETTLED}
        self.reporting.log_iteration(agreed.total)

    def finish(self) -> None:
        """The end of training: candidates that wait for the next batch settle now, and kept errors are raised."""
        if not self.carry.unfinished:
            return
        self.carry.unfinished = False
        self.roll_call("end", "the end of training")
        count = compat.local_rows(self.trainer)
        if self.detached:
            self.skip_batch(count, at_end=True)
            return
        pending, rows = self._share(None, count)
        agreed = self.communicator.agree(rows, partial(self._settle, rows, pending), serials_of(pending))
        self.communicator.move(rows, agreed.decision)
        self.communicator.agree(rows, Decision)  # what failed while payload moved
        self.totals.add(agreed.decision.tally, batches=0, of_all_ranks=agreed.total)

    def keep(self, batch: Batch, choose: Callable[[Groups], tuple[Groups, list[int]]]) -> Tally:
        """A scored batch enters the buffer: nothing of it is trained on, and nothing in it is replaced.

        Args:
            batch (`dict`): As TRL returned it, with log-probs.
            choose (`Callable`): Of its groups, gives them as they are to be stored, and which of them are.

        Returns:
            What was counted.
        """
        count = batch["prompt_ids"].size(0)
        rows = self._share_columns(batch, count, None)
        fresh = self._fresh(self._judge(batch, rows, None))
        pending = PendingGroups(fresh.groups, [])
        with self.components.errors.keeping():
            groups, slots = choose(fresh.groups)
            pending = PendingGroups(groups, collect(replace(fresh, groups=groups), slots, self.components))
        rows = self._share_columns(None, count, pending)
        agreed = self.communicator.agree(rows, partial(self._settle, rows, pending), serials_of(pending))
        self.communicator.move(rows, agreed.decision)
        self.communicator.agree(rows, Decision)  # what failed while payload moved
        self.totals.add(agreed.decision.tally, batches=0, of_all_ranks=agreed.total)
        return agreed.decision.tally

    def _settle(self, rows: RowLayout, pending: PendingGroups | None) -> Decision:
        """Decide what is left at the end of training."""
        tally = Tally()
        return Decision(tally, self.decisions.settle(pending, rows, [], tally))

    def _judge(self, batch: Batch, rows: RowLayout, score: Score | None) -> Generated:
        """The batch, with further groups in the slots of dead ones where that is set."""
        if self.rounds is not None and score is not None:
            return self.rounds.complete(batch, rows, score)
        with self.components.errors.keeping():
            return self.judge.look(batch, rows)
        return Generated.unseen(batch, rows)

    def _fresh(self, generated: Generated) -> FreshBatch:
        """The batch with all that decisions need: log-probs that are stored without being seen by the loss, and a
        plugin's advantages. What fails is kept, since another process may wait in a forward pass."""
        rows = generated.rows
        setup = compat.reward_setup(self.trainer)
        batch, reference = split_reference(generated.batch, self.settings.config.replay_kl)
        of_tokens = self.components.fields.has_token_advantages(batch)
        recorded = None
        keys: frozenset[str] = frozenset()
        with self.components.errors.keeping():
            if self.components.forwards_to_record:
                recorded = compat.forward_logps(self.trainer, batch)
        with self.components.errors.keeping():
            batch = write_advantages(batch, rows, generated.fresh, of_tokens)
            keys = rows.takes(self.components.fields.stored_keys(batch))
        return FreshBatch(
            batch=batch,
            rows=rows,
            groups=generated.fresh,
            generations=generated.generations,
            refilled=generated.refilled,
            rule=AdvantageRule(rows.columns, generated.scored, setup, rows.size, of_tokens),
            keys=keys,
            recorded=recorded,
            reference=reference,
            logps_known=recorded is not None or compat.OLD_LOGPS in batch,
        )

    def _train_on(
        self, fresh: FreshBatch, agreed: Agreed[Decision], payload: Mapping[int, Group], started: float
    ) -> Batch:
        """Compose and collect: the batch that is trained on, and what the loss shall record and supply for it."""
        self.replaced = agreed.replaced
        if agreed.total["replaced"] and not self.settings.config.replay_dry_run:
            compat.tag_model(self.trainer, TAG)
        if self.draws_again:  # whatever fails below: all ranks come to the next iteration
            self.template = IterationTemplate(fresh.emptied(), self.tap.expected)
        try:
            composed, placements = compose_batch(fresh, agreed.decision, payload, self.components)
            candidates = collect(fresh, agreed.decision.candidates, self.components)
            self.carry.collected(PendingGroups(fresh.groups, candidates), self.update)
            self.handshake.awaited = True
            waiting = [candidate for candidate in candidates if candidate.waits]
            composed = self._expect(fresh, agreed, composed, waiting, placements)
            if self.template is not None:
                self.template.expected = self.tap.expected
            self.totals.add(agreed.decision.tally, of_all_ranks=agreed.total)
            self._log(composed, agreed.total, fresh, started)
            return composed
        except Exception as caught:
            self.handshake.awaited = False  # the loss gets a batch that need not go through the seam
            self.tap.expect_nothing()
            self.components.errors.keep(caught)
            return with_reference(fresh.batch, fresh.reference)

    def _expect(
        self,
        fresh: FreshBatch,
        agreed: Agreed[Decision],
        composed: Batch,
        candidates: Sequence[Candidate],
        placements: Sequence[Placement],
    ) -> Batch:
        """The composed batch as the loss gets it: tokens counted, row ids added, the reference's log-probs back."""
        plan, total, size = agreed.decision.plan, agreed.total, fresh.rows.size
        factor = row_factor(total, size)
        flags = row_flags(fresh.rows, plan, leaves_out=factor != 1.0)
        trainer = self.trainer
        denominator = Denominator(compat.denominator(trainer), factor, compat.bonus_over_items(trainer))
        ids = self.tap.expect(flags, candidates, placements, denominator, composed["advantages"])
        told = fresh.rows.told_items if denominator.kind == "items" else None
        with_count = count_items(composed, total, size, told)
        return with_reference({**with_count, ROWS: ids}, reference_of(fresh, plan))

    def add(self, source: Any, incomplete: str = "refuse", rescore: bool = False) -> int:
        """Add groups made elsewhere, on every process: another run's, a stronger model's, a person's. The trainer
        scores them as its own.

        Args:
            source (`Any`): What `datasets.load_dataset` reads: a path, a pattern, or a list of these; or rows, as a
                `Dataset` or mappings. One row is one completion, with the columns `prompt` and `completion` (texts,
                messages, or ids), those of the trainer's dataset, and `reward`, or `reward/NAME` for each reward
                function: docs/files.md. All processes get the same.
            incomplete (`str`, *optional*, defaults to `"refuse"`): What to do with groups of too few rows;
                `"resample"` fills them up with rows of their own.
            rescore (`bool`, *optional*, defaults to `False`): Whether the trainer's reward functions score all rows.

        Returns:
            How many groups are in the buffer now that were not before.

        Raises:
            ReplayError: The rows can't be used, the trainer makes others of them, or the session is not attached.
        """
        if self.detached or not self.enabled:
            raise ReplayError(NOT_ATTACHED)
        return self.files.add(source, incomplete, rescore)

    def entry(self, serial: int) -> Entry:
        """Read an entry of the buffer, as texts and numbers.

        Args:
            serial (`int`): Its serial number, as in `buffer.table.serial`.

        Raises:
            KeyError: No entry has it.
            ReplayError: Its payload is on another process.
        """
        return self.files.entry(serial)

    def export(self, path: str | Path) -> Path:
        """Write what this process holds to a Parquet file, one row a completion: docs/files.md. Return its path.

        Raises:
            ReplayError: The path does not end in `.parquet`.
        """
        return self.files.export(path)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the session, buffer apart; JSON can hold all but `pending` (candidates)
        and `prompts` (columns of those generated for)."""
        rounds = self.rounds
        return {
            "pending": self.carry.pending,
            "prompts": None if rounds is None else rounds.table.state_dict(),
            "shares": self.communicator.shares,
            "iteration": 0 if self.template is None else compat.begun_iteration(self.trainer),
            "paused": self.paused,
            "verified": self.handshake.verified,
            **self.carry.state_dict(),
            "metrics": self.metrics,
            "reference": self.reference,
            "settings": self.config.to_dict(),
            "totals": self.totals.state_dict(),
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
        self.resumes_at = state["iteration"] if self.draws_again else 0
        self.paused = self.paused or state["paused"]
        self.handshake.verified = state["verified"]
        self.handshake.awaited = False
        self.carry.load_state_dict(state)
        self.carry.pending = state["pending"]
        self.totals.metrics = dict(state["metrics"])
        if self.rounds is None:
            return
        ranks = of_ranks or [state]
        known = [of_rank["rounds"] for of_rank in ranks if of_rank["rounds"]]
        if known:
            self.rounds.load_state_dict(*known)
        seen = [of_rank["prompts"] for of_rank in ranks if of_rank["prompts"]]
        if seen:
            self.rounds.table.load_state_dict(*seen, own=of_ranks is None)

    def forget_pending(self) -> None:
        """Forget what the last generation batch left."""
        self.carry = StepCarry()
        self.resumes_at = 0

    def resumed(self, state: Mapping[str, Any]) -> None:
        """Look at the reference model once all is loaded: the trainer does not save it, and resumes with the one that
        it was made with, whatever `sync_ref_model` had made of it."""
        self.has_other_reference()
        if state["reference"] != self.reference:
            self.forget_reference()

    def log_ratios(self) -> None:
        """Add the importance ratios seen in the loss to the metrics."""
        measured = self.supply.stats.metrics()
        self.mask_watch(measured)
        self.reporting.record(measured)
        self.reporting.record(self.components.loss.gates.means.metrics())
        self.reporting.record(self.components.loss.bounds.means.metrics())
        self.reporting.record(self.tap.fresh.means.metrics())

    def _share(self, batch: Batch | None, count: int) -> tuple[PendingGroups | None, RowLayout]:
        """Share the columns of `count` rows of this process, and of the last batch's candidates, which are returned,
        and whether the reward rule is another one. If the reference model of any process has changed since the last
        batch, groups that hold its log-probs leave everywhere, those that wait included."""
        self._forget_longer()
        rows = self._share_columns(batch, count, self.carry.pending)
        return self.carry.take(), rows

    def _share_columns(self, batch: Batch | None, count: int, pending: PendingGroups | None) -> RowLayout:
        changed = 0
        with self.components.errors.keeping():
            changed = (REFERENCE * self.has_other_reference()) | (RULE * self.decisions.has_other_rule())
        rows = self.communicator.share(batch, count, pending, changed)
        if (rows.columns["changed"] & REFERENCE).any():
            self.forget_reference()
        return rows

    def _forget_longer(self) -> None:
        """Groups leave that are longer than completions may be now, if that is less than before."""
        before, self._longest = self._longest, compat.longest_completion(self._trainer())
        if self._longest >= before:
            return
        dropped = self.buffer.forget_longer(self._longest)
        pending = self.carry.pending
        if pending is not None:
            self.carry.pending, refused = pending.up_to(self._longest)
            dropped += refused
        self.totals.reasons[f"an entry was dropped: {LONGER}={self._longest:.0f}"] += dropped

    def has_other_reference(self) -> bool:
        """Look at the reference model: has it changed since the last look? A callback may copy the policy into it, or
        put another one in its place. While none is used, the last one counts."""
        before, changes = self.reference, self._reference_changes
        self._look_at_reference()
        return before != self.reference or changes != self._reference_changes

    def _look_at_reference(self) -> None:
        parameters = compat.reference_parameters(self._trainer())
        self.reference = fingerprint(parameters) or self.reference
        is_model = getattr(self._trainer(), "ref_model", None) is not None  # vLLM's adapters are merged in place
        self._reference_changes = changes_in_place(parameters) if is_model else 0

    def forget_reference(self) -> None:
        """Groups that hold the reference's log-probs leave; those that wait are refused."""
        dropped = self.buffer.forget_with(compat.REF_LOGPS)
        if dropped:
            self.totals.reasons[f"an entry was dropped: {STALE}"] += dropped
        if self.carry.pending is not None:
            self.carry.pending = self.carry.pending.outdated(compat.REF_LOGPS)

    def notify(self, hook: str) -> None:
        """Call the plugins' `trl_replay_attached` or `trl_replay_detached`."""
        self.components.hooks.call(hook, self.update, session=self)

    def _log(self, batch: Batch, total: dict[str, float], fresh: FreshBatch, started: float) -> None:
        since = {name: total[name] + count for name, count in self.carry.settled.items()}
        self.carry.settled = {}
        values = {"replay/padding": padding(batch)}
        batches = self.totals.batches + self.totals.of_all_ranks["paused_batches"]
        if self.iterates and batches > 1:
            values["replay/replay_ratio"] = self.update / (batches - 1)
        if self.rounds is not None:
            values["replay/rounds"] = float(self.rounds.done)
            values["replay/refilled_fraction"] = total["refilled"] / total["groups"]
        context = replace(self.buffer.local_context(), fresh=fresh.groups)
        self.reporting.log_groups({**total, **since}, fresh.rule.scored, context, values)
        generating = 0.0 if self.rounds is None else self.rounds.seconds  # the trainer's own work
        self.reporting.record({"replay/seconds": time.perf_counter() - started - generating})


def living(trainer: weakref.ref[Any]) -> Any:
    """Return the trainer of a session.

    Raises:
        ReplayError: It no longer exists.
    """
    found = trainer()
    if found is None:
        raise ReplayError(
            "The trainer of this session no longer exists. Keep a reference to it as long as you read entries or "
            "export them."
        )
    return found


def _what_masks(settings: Settings, advisor: Advisor) -> str:
    """Describe what masks replayed rows where nothing is left of them, and the remedy; empty where that is meant."""
    correction = settings.strategies.get("correction")
    remedy = advisor.remedy_for_masks(settings.config.to_dict())
    if correction is None or not remedy:
        return ""
    return f"replay_correction={correction.label!r} ({correction.taken}). {remedy}"
