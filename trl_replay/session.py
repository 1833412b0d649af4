"""The session: one attachment of a buffer and strategies to one trainer, and the step that it takes each batch."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from . import compat
from .advice.logged import DRY_RUN, JUDGED_BY
from .advice.outcome import outcome_of
from .advice.pace import FEWEST_UPDATES, PASSES, in_words
from .advice.rules import GENERATIONS, of_caps, remedy_for_masks, what_to_change
from .base.living import living
from .base.pace import Pace
from .base.sizes import counted
from .base.weights import fingerprint
from .batch.candidates import STALE, Candidate, PendingGroups, serials_of
from .batch.compose import padding, split_reference, with_reference
from .batch.group_view import AdvantageRule, dead_by_function
from .data.counters import SETTLED, Tally, log, metrics, own_metrics
from .data.prompt_table import PromptTable
from .data.types import Batch, Context, Group, Placement, Row
from .distributed.communicator import Agreed, Communicator
from .distributed.decision import DETACHED, PAUSED, RUNS, Decision
from .distributed.roll_call import roll_call_of
from .distributed.row_layout import RowLayout
from .errors import SeamError
from .generation.generated import Generated
from .generation.judge import Judge
from .generation.rounds import Rounds, Score
from .loss.denominator import Denominator
from .loss.handshake import Handshake
from .loss.mask_watch import MaskWatch
from .loss.micro_batch import ROWS
from .loss.supply import Supply
from .loss.tap import Tap
from .protocols import Scope
from .setup.components import Components
from .setup.config import ReplayConfig
from .setup.settings import Settings
from .step.carry import StepCarry
from .step.decisions import Decisions
from .step.fresh_batch import FreshBatch
from .step.template import IterationTemplate
from .step.training_batch import (
    collect,
    compose_batch,
    count_items,
    reference_of,
    row_factor,
    row_flags,
    write_advantages,
)

TAG = "trl-replay"
"""On the card of a model that was trained on replayed groups."""
MEETING = 600.0
"""Seconds that a process waits for the others when training begins: the main one may be starting a tracker's run."""


class Session:
    """One attachment. Made by `attach`.

    Attributes:
        settings ([`Settings`]): What the session goes by.
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
        pace ([`Pace`]): Times generation and updates.
        resumes_at (`int`): After resuming in the midst of a generation batch's iterations, the one that comes next.
        rebuilds (`bool`): Whether a batch is generated in the place of one that was lost so.
        exporter (`Callable`, *optional*): What `export` calls; set at attach.
        reward_code (`dict[str, str]`): Hashes of the reward functions' code, by name.
        reference (`str`): Tells the reference model's states apart: that of the last look.
    """

    def __init__(self, trainer: Any, settings: Settings, components: Components) -> None:
        self._trainer = weakref.ref(trainer)
        self.components = components
        self.settings = settings
        self.enabled = enabled = settings.acts
        self.paused = False
        self.detached = False
        self.met = False
        self.buffer = components.buffer
        self.totals = components.buffer.totals
        self.handshake = Handshake(components.beside_the_tap)
        self.supply = Supply(components.correct, components.bounds, components.token_weights)
        self.mask_watch = MaskWatch(_what_masks(settings))
        self.tap = Tap(
            self.supply,
            components.num_generations,
            components.beside_the_tap,
            self.handshake,
            components.errors,
            components.bounds.form,
            self._trainer,
        )
        self.communicator = Communicator(components, int(trainer.accelerator.process_index))
        self.decisions = Decisions(components, self.handshake, settings)
        self.judge = Judge(self._trainer, settings, components, self.decisions.mixing)
        self.rounds: Rounds | None = None
        if enabled and settings.chooses_prompts:
            self.rounds = Rounds(self._trainer, settings, components, self.communicator, self.judge)
        self.roll_call = roll_call_of(trainer, settings, components.scope)
        self.replaced: list[bool] = []
        self.carry = StepCarry()
        self.template: IterationTemplate | None = None
        self.pace = Pace()
        self.resumes_at = 0
        self.rebuilds = False
        self.exporter: Callable[[str | Path, Any, Components], Path] | None = None
        self.reference = self._reference_now() if enabled else ""
        self.reward_code = compat.code_of_rewards(trainer) if enabled else {}

    @property
    def config(self) -> ReplayConfig:
        """The settings in force, a preset's included."""
        return self.settings.config

    @property
    def metrics(self) -> dict[str, float]:
        """The last generation batch's metrics, with the ratios of rows trained on since."""
        return self.totals.metrics

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

    def meet(self) -> None:
        """When training begins: makes sure that replay is attached on all processes, with the same settings.

        Raises:
            SeamError: It is not.
            ConfigurationError: It is, with other settings.
        """
        if not self.met:
            self.roll_call("train", "training", MEETING)
            self.met = True

    def abstain(self, count: int, at_end: bool = False) -> None:
        """A generation batch of `count` rows that replay leaves as it is. The other processes must hear of it, or they
        would wait for this one.

        Args:
            count (`int`): Rows of this process.
            at_end (`bool`): Training ends: nothing was generated.

        Raises:
            SeamError: Replay runs on another process.
        """
        if self.paused and not at_end:
            self.totals.pause(count * self.components.processes)
        if self.components.processes == 1:
            return
        self.meet()
        rows = self.communicator.share(None, count, None)
        if self.rounds is not None and not at_end:
            self.rounds.abstain(self.mode)
        self.communicator.agree(rows, Decision, mode=self.mode)

    def let_go(self) -> None:
        """Detached: nothing more is recorded, and what was taken off the trainer for the next batch is forgotten."""
        self.detached = True
        self.buffer.adder = None
        self.tap.forget()

    def explain(self) -> str:
        """Describe what the run came to, what was replayed, why not more was, and what to change."""
        if not self.enabled:
            return "replay: off (use_replay=False or replay_buffer_size=0); the trainer is as TRL made it"
        trainer = self._trainer()
        log = [] if trainer is None else trainer.state.log_history
        came_to = outcome_of(log, self.config.replay_reward)
        lines = [f"outcome: {came_to}"] if came_to else []
        lines.append(self._explain_replay())
        if self.buffer.capacity and self.communicator.ranks > 1:
            lines.append(self._explain_scope(self.communicator.ranks))
        if self.settings.plugins:
            lines.append(self._explain_plugins())
        doubt = self.judge.doubt()
        lines += [doubt] if doubt else []
        lines += self._explain_pace()
        settings = {**self.config.to_dict(), GENERATIONS: self.components.num_generations}
        caps = of_caps(self.totals.held_back(), int(self.totals.counters["replaced"]), settings)
        lines += what_to_change(log, settings, caps) if log else []
        return "\n".join(lines)

    @property
    def _updates_per_pass(self) -> float:
        """Updates that one pass of training over a batch takes."""
        args = self.trainer.args
        return float(args.steps_per_generation / args.gradient_accumulation_steps)

    def _explain_pace(self) -> list[str]:
        """Tell what further updates of a batch cost, once enough of them were timed."""
        spent = self.pace.spent
        if self._trainer() is None or spent.updates < FEWEST_UPDATES or not spent.batches:
            return []
        per_pass = self._updates_per_pass
        passes = spent.passes(per_pass)
        if passes is None:
            return []
        unit = "updates a batch" if per_pass == 1 else "passes over a batch"
        return [in_words(passes, max(int(self.trainer.num_iterations), 2), unit)]

    def _explain_replay(self) -> str:
        if not self.buffer.capacity:
            return self.totals.explain_without_buffer()
        rank = self.communicator.rank
        ranks = self.communicator.ranks
        return self.totals.explain(len(self.buffer), self.settings.config.replay_dry_run, rank, ranks)

    def _explain_plugins(self) -> str:
        """Whose hooks take part, with the arguments that this run gives them."""
        told = []
        for plugin in self.settings.plugins:
            arguments = ", ".join(f"{name}={value!r}" for name, value in plugin.arguments.items())
            told.append(f"{plugin.name}({arguments})" if arguments else plugin.name)
        preset = self.settings.config.replay_preset
        origin = f" (preset {preset!r})" if preset else ""
        return f"plugins that take part{origin}: {', '.join(told)}"

    def _explain_scope(self, ranks: int) -> str:
        """Describe which processes share a buffer, why, and how much it holds."""
        label = self.settings.label("scope")
        why = f", chosen by replay_scope='auto': {self.settings.chosen_scope}" if self.settings.chosen_scope else ""
        room = _room(self.scope, self.settings.config.replay_buffer_size, ranks)
        return f"scope {label}{why}; {room}"

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
        self.meet()
        started = time.perf_counter()
        self.carry.unfinished = True
        pending, rows = self._share(batch, batch["prompt_ids"].size(0))
        fresh = self._fresh(self._generate_again(batch, rows, score))
        decide = partial(self.decisions.fill_batch, fresh, pending, self.carry.collected_at)
        agreed = self.communicator.agree(fresh.rows, decide, serials_of(pending))
        payload = self.communicator.move(fresh.rows, agreed.decision)
        return self._train_on(fresh, agreed, payload, started)

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
        """
        rows = template.fresh.rows
        if self.mode != RUNS:
            self.abstain(rows.count, at_end=True)
            self.tap.expect_again(template.expected)
            return None
        fresh = template.fresh
        pending, rows = self._share(None, rows.count)
        iteration = compat.iteration(self.trainer)
        decide = partial(self.decisions.fill_iteration, fresh, rows, pending, self.carry.collected_at, iteration)
        agreed = self.communicator.agree(rows, decide, serials_of(pending))
        payload = self.communicator.move(rows, agreed.decision)
        self._count_iteration(agreed)
        with self.components.errors.keeping():
            if agreed.total["replaced"]:
                composed, placements = compose_batch(fresh, agreed.decision, payload, self.components)
                return self._expect(fresh, agreed, composed, [], placements)
        self.tap.expect_again(template.expected)
        return None

    def rebuild(self, batch: Batch) -> Batch:
        """Take a batch in the place of the one that was lost when training was interrupted in the midst of its
        iterations: the next ones are composed on it. It trains only where nothing is drawn.

        Args:
            batch (`dict`): As TRL returned it.
        """
        self.meet()
        success, shares = self.buffer.rules.success, self.communicator.shares
        known = success.state_dict()
        rows = self.communicator.share(batch, batch["prompt_ids"].size(0), None)
        fresh = self._fresh(self._generate_again(batch, rows, None))
        self.template = IterationTemplate(fresh.emptied(), self.tap.expected)
        success.load_state_dict(known)
        self.communicator.shares = shares
        return batch

    def _count_iteration(self, agreed: Agreed[Decision]) -> None:
        settled = {name: agreed.total[name] for name in SETTLED}
        counted = {**settled, "iterated": agreed.total["replaced"]}
        self.totals.add(agreed.decision.tally.of_iteration(), batches=0, of_all_ranks=counted)
        self.carry.settled = {name: settled[name] + self.carry.settled.get(name, 0.0) for name in SETTLED}

    def finish(self) -> None:
        """The end of training: candidates that wait for the next batch settle now, and kept errors are raised."""
        if not self.carry.unfinished:
            return
        self.carry.unfinished = False
        self.roll_call("end", "the end of training")
        count = compat.local_rows(self.trainer)
        if self.detached:
            self.abstain(count, at_end=True)
            return
        pending, rows = self._share(None, count)
        agreed = self.communicator.agree(rows, partial(self._settle, rows, pending), serials_of(pending))
        self.communicator.move(rows, agreed.decision)
        self.communicator.agree(rows, Decision)  # what failed while payload moved
        self.totals.add(agreed.decision.tally, batches=0, of_all_ranks=agreed.total)

    def _settle(self, rows: RowLayout, pending: PendingGroups | None) -> Decision:
        """Decide what is left at the end of training."""
        tally = Tally()
        return Decision(tally, self.decisions.settle(pending, rows, [], tally))

    def _generate_again(self, batch: Batch, rows: RowLayout, score: Score | None) -> Generated:
        """The batch, with further groups in the slots of dead ones where that is set."""
        if self.rounds is not None and score is not None:
            return self.rounds.complete(batch, rows, score)
        with self.components.errors.keeping():
            return self.judge.look(batch, rows)
        return Generated.unseen(batch, rows)

    def _fresh(self, generated: Generated) -> FreshBatch:
        """The batch with all that decisions need: old log-probs where the loss goes around the tap, log-probs that
        are stored without being seen by the loss, and a plugin's advantages. What fails is kept, since another process
        may wait in a forward pass."""
        rows = generated.rows
        setup = compat.reward_setup(self.trainer)
        batch, reference = split_reference(generated.batch, self.settings.config.replay_kl)
        of_tokens = self.components.fields.has_token_advantages(batch)
        recorded = None
        keys: frozenset[str] = frozenset()
        with self.components.errors.keeping():
            if self.components.beside_the_tap:
                batch = compat.with_old_logps(self.trainer, batch)
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
        counted = count_items(composed, total, size)
        return with_reference({**counted, ROWS: ids}, reference_of(fresh, plan))

    def export(self, path: str | Path) -> Path:
        """Write what this process holds to a Parquet file, one row a completion: docs/files.md. Return its path.

        Raises:
            ReplayError: The path does not end in `.parquet`.
        """
        assert self.exporter is not None  # attach gives one
        return self.exporter(path, self.trainer, self.components)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the session, buffer and candidates apart; JSON can hold it."""
        return {
            "shares": self.communicator.shares,
            "iteration": 0 if self.template is None else compat.begun_iteration(self.trainer),
            "paused": self.paused,
            "verified": self.handshake.verified,
            **self.carry.state_dict(),
            "metrics": self.metrics,
            "reference": self.reference,
            "settings": self.config.to_dict(),
            "totals": self.totals.state_dict(),
            "rounds": None if self.rounds is None else self.rounds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, but for what belongs to the last generation batch and the totals."""
        self.communicator.shares = state["shares"]
        self.resumes_at = state["iteration"] if self.draws_again else 0
        self.paused = self.paused or state["paused"]
        self.handshake.verified = state["verified"]
        self.handshake.awaited = False
        self.carry.load_state_dict(state)
        self.totals.metrics = dict(state["metrics"])

    def load_rounds(
        self,
        states: Sequence[Mapping[str, Any]],
        tables: Sequence[Mapping[str, NDArray[Any]] | None],
        own: bool = False,
    ) -> None:
        """Take what is known about generating, of this rank or of several that it follows; runs that generated
        nothing again have left nothing.

        Args:
            states (`Sequence[Mapping]`): What `state_dict` gave.
            tables (`Sequence[Mapping]`): Columns of the prompts generated for.
            own (`bool`): Whether they are of this rank alone, and no other one takes them.
        """
        if self.rounds is None:
            return
        known = [state["rounds"] for state in states if state["rounds"]]
        if known:
            self.rounds.load_state_dict(*known)
        seen = [table for table in tables if table]
        if seen:
            self.rounds.table.load_state_dict(*seen, own=own)

    def log_ratios(self) -> None:
        """Add the importance ratios seen in the loss to the metrics."""
        measured = self.supply.stats.metrics()
        self.mask_watch(measured)
        self._record(measured)
        self._record(self.components.gates.means.metrics())
        self._record(self.components.bounds.means.metrics())
        self._record(self.tap.fresh.means.metrics())

    def _share(self, batch: Batch | None, count: int) -> tuple[PendingGroups | None, RowLayout]:
        """Share the columns of `count` rows of this process, and of the last batch's candidates, which are returned.
        If the reference model of any process has changed since the last batch, groups that hold its log-probs leave
        everywhere, those that wait included."""
        changed = False
        with self.components.errors.keeping():
            changed = self.has_other_reference()
        rows = self.communicator.share(batch, count, self.carry.pending, changed)
        if rows.columns["changed"].any():
            self.forget_reference()
        return self.carry.take(), rows

    def has_other_reference(self) -> bool:
        """Look at the reference model: has it changed since the last look? A callback may copy the policy into it, or
        put another one in its place. While none is used, the last one counts."""
        before, now = self.reference, self._reference_now()
        self.reference = now or before
        return self.reference != before

    def _reference_now(self) -> str:
        return fingerprint(compat.reference_parameters(self._trainer()))

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
        passes = self.pace.since_last().passes(self._updates_per_pass)
        if passes is not None:
            values[PASSES] = passes
        batches = self.totals.batches + self.totals.of_all_ranks["paused_batches"]
        if self.iterates and batches > 1:
            values["replay/replay_ratio"] = self.update / (batches - 1)
        if self.rounds is not None:
            values["replay/rounds"] = float(self.rounds.done)
            values["replay/refilled_fraction"] = total["refilled"] / total["groups"]
        context = replace(self.buffer.local_context(), fresh=fresh.groups)
        self._log_groups({**total, **since}, fresh.rule.scored, context, values)
        generating = 0.0 if self.rounds is None else self.rounds.seconds  # the trainer's own work
        self._record({"replay/seconds": time.perf_counter() - started - generating})

    def _log_groups(
        self, total: Mapping[str, float], scored: torch.Tensor, context: Context, further: Mapping[str, float]
    ) -> None:
        """Begin the metrics of a batch anew: those of its groups, and those of plugins.

        Args:
            total (`Mapping[str, float]`): Its counters, summed over ranks.
            scored (`(rows of all processes, functions)`): Raw rewards, NaN where None.
            context ([`Context`]): What plugins see.
            further (`Mapping[str, float]`): Further metrics, by key.
        """
        size = self.components.num_generations
        so_far = self.totals.of_all_ranks
        rollouts = so_far["generated"] * size + so_far["paused_rows"]
        self.totals.metrics = {}
        self._record(metrics(total, size, self.components.success.least is not None))
        self._record({"replay/rollouts": rollouts, **further})
        if self.config.replay_dry_run:
            self._record({DRY_RUN: 1.0})
        if self.config.replay_reward:
            self._record({f"{JUDGED_BY}/{self.config.replay_reward}": 1.0})
        weights = compat.reward_setup(self.trainer).weights
        self._record(dead_by_function(scored, self.trainer.reward_func_names, weights, size))
        for result in self.components.hooks.call("metrics", self.update, context=context):
            self._record(own_metrics(result, self.metrics))

    def _record(self, values: Mapping[str, float]) -> None:
        """Put values into `metrics`, and those that are to be logged where the trainer's log averages them."""
        self.totals.metrics = {**self.metrics, **values}
        log(values, compat.training_metrics(self.trainer))


def _what_masks(settings: Settings) -> str:
    """Describe what masks replayed rows where nothing is left of them, and the remedy; empty where that is meant."""
    correction = settings.strategies.get("correction")
    remedy = remedy_for_masks(settings.config.to_dict())
    if correction is None or not remedy:
        return ""
    return f"replay_correction={correction.label!r} ({correction.taken}). {remedy}"


def _room(scope: Scope, size: int, ranks: int) -> str:
    """Describe how many groups there is room for."""
    each = counted(size, "group")
    if scope.division.replicated:
        return f"{each} in all, on every process"
    return f"{each} a process, {size * ranks} in all"
