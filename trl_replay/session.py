"""The session: one attachment of a buffer and strategies to one trainer, and the step that it takes each batch."""

from __future__ import annotations

import time
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import compat
from .batch.compose import padding
from .batch.group_view import view
from .buffer.candidates import (
    STALE,
    Candidate,
    PendingGroups,
    StepCarry,
    collect_candidates,
)
from .components import Components
from .config import ReplayConfig
from .counters import NO_ROOM, Tally, Totals, metrics
from .distributed.communicator import Communicator
from .distributed.row_layout import Admitted, RowLayout, Sampled, duplicates
from .errors import ReplayError, SeamError
from .loss.dead_group_mask import NOTHING_MASKED, DeadGroupMask, dead_slots
from .loss.micro_batch import ROWS
from .loss.tap import Tap
from .offline.export import export
from .step.decisions import Decisions
from .types import (
    Batch,
    Context,
    Corrected,
    Groups,
    Ints,
    Placement,
    ReplayedRows,
)


class Session:
    """One attachment. Made by `attach`.

    Attributes:
        config ([`ReplayConfig`]): The settings in force, a preset's included.
        buffer ([`ReplayBuffer`]): `len(buffer)`, `buffer.table`, `buffer.capacity`, `buffer.nbytes`, `buffer.clear()`.
        scope ([`Scope`]): Who shares the buffer.
        metrics (`dict[str, float]`): The last generation batch's metrics, with the ratios of rows trained on since.
        totals ([`Totals`]): Counters since attach.
        enabled (`bool`): False if `use_replay=False` or the buffer has no room: then nothing is patched.
        paused (`bool`): Between `pause()` and `resume()`.
        components ([`Components`]): What the session is made of.
        progress ([`StepCarry`]): What the last generation batch left for the next one.
        replaced (`list[bool]`): Of all processes' rows of the last generation batch, those that were replaced.
    """

    def __init__(
        self,
        trainer: Any,
        config: ReplayConfig,
        components: Components,
        enabled: bool = True,
    ) -> None:
        self._trainer = weakref.ref(trainer)
        self.components = components
        self.config = config
        self.enabled = enabled
        self.paused = False
        self.buffer = components.buffer
        self.scope = components.scope
        self.metrics: dict[str, float] = {}
        self.totals = Totals()
        self.tap = Tap(
            self._correct,
            components.num_generations,
            components.token_weights,
            components.forward,
            components.processes > 1,
        )
        self.communicator = Communicator(
            components,
            self.tap,
            int(trainer.accelerator.process_index) if enabled else 0,
        )
        self.decide = Decisions(components, self.tap, self.context, config)
        self.rewards: torch.Tensor | None = None
        self.replaced: list[bool] = []
        self.carry = StepCarry()

    @property
    def trainer(self) -> Any:
        """The trainer, held weakly.

        Raises:
            ReplayError: It no longer exists.
        """
        trainer = self._trainer()
        if trainer is None:
            raise ReplayError("The trainer of this session no longer exists.")
        return trainer

    @property
    def update(self) -> int:
        """Optimizer updates since attach. (`trainer.state.global_step` starts at 0 again with every `train()`.)"""
        return self.tap.update

    @property
    def plugins(self) -> list[str]:
        """Names of the plugins whose hooks take part."""
        return self.components.plugins

    @property
    def parts(self) -> Components:
        """The former name of `components`."""
        _warn_of_rename("parts", "components")
        return self.components

    @property
    def progress(self) -> StepCarry:
        """The former name of `carry`."""
        _warn_of_rename("progress", "carry")
        return self.carry

    def pause(self) -> None:
        """From the next generation batch on, the trainer is stock; what is stored stays. Call it on every process."""
        self.paused = True
        self.carry.collected_at = None  # the updates to come need not go through the seam

    def resume(self) -> None:
        """Takes back `pause`."""
        self.paused = False

    def explain(self) -> str:
        """What was replayed so far and, where nothing or little was, why."""
        if not self.enabled:
            return "replay: off (use_replay=False or replay_buffer_size=0); the trainer is as TRL made it"
        return self.totals.explain(len(self.buffer), self.config.replay_dry_run)

    def step(self, batch: Batch) -> Batch:
        """One generation batch: what stock scored goes in, what is trained on comes out."""
        started, self.carry.unfinished = time.perf_counter(), True
        tally, pending, drawn = Tally(), *self.carry.take()
        rows, error = self.communicator.share(batch, batch["prompt_ids"].size(0), pending)
        admitted, sampled, fresh = Admitted(), Sampled(), None
        noteworthy, pairs = list[int](), list[tuple[int, int]]()
        try:
            fresh = self._view(rows)
            self.decide.record_replay_stats(drawn, rows.columns, tally)
            admitted = self._settle(pending, rows, self.decide.solve(fresh, tally), tally)
            slots = self.decide.select(fresh, tally)
            keys = rows.takes(self.components.fields.stored_keys(batch))
            sampled = self.decide.sample(slots, fresh, keys, self.carry.collected_at, tally)
            if self.config.replay_dry_run:
                sampled, tally.items_delta = Sampled(), 0.0
            else:
                pairs = self.decide.leave(fresh, sampled, rows, tally)
            noteworthy = self.decide.noteworthy(fresh, sampled, compat.OLD_LOGPS in batch, tally)
        except Exception as caught:
            error = error or caught
        total = self.communicator.agree(rows, tally, error, admitted, sampled)
        self.replaced = self.communicator.replaced
        groups = self.communicator.move(rows, admitted, sampled)
        try:
            assert fresh is not None  # without a view, agree has raised
            self.carry.drawn = dict(zip(sampled.slots, sampled.serials, strict=True))
            placements = rows.placements(sampled, groups)
            mask_of_dead = self._dead_mask(fresh, rows, sampled, total)
            composed = self._compose(
                batch,
                placements,
                duplicates(batch, rows, pairs, self.components.fields),
                total,
            )
            waiting = self._collect(batch, fresh, rows, noteworthy)
            ids = self.tap.expect(
                rows.count,
                waiting,
                placements,
                composed is not batch,
                mask_of_dead,
            )
            self._log(composed, tally, total, started)
        except Exception as caught:
            self.communicator.keep(caught)
            return batch
        return {**composed, ROWS: ids}

    def finish(self) -> None:
        """The end of training: candidates that wait for the next batch settle now, and kept errors are raised."""
        if not self.carry.unfinished:
            return
        self.carry.unfinished = False
        tally, admitted, pending, drawn = (
            Tally(),
            Admitted(),
            *self.carry.take(),
        )
        rows, error = self.communicator.share(None, compat.local_rows(self.trainer), pending)
        self.tap.stats.clear()
        try:
            self.decide.record_replay_stats(drawn, rows.columns, tally)
            admitted = self._settle(pending, rows, np.empty(0, np.int64), tally)
        except Exception as caught:
            error = error or caught
        self.communicator.agree(rows, tally, error, admitted, Sampled())
        self.communicator.move(rows, admitted, Sampled())
        self.communicator.agree(rows, Tally(), self.tap.take_error(), Admitted(), Sampled())
        self.totals.add(tally, batches=0)

    def export(self, path: str | Path) -> Path:
        """Writes what this process holds to a Parquet file, one row a completion: docs/files.md. Returns its path."""
        return export(path, self.trainer, self.components)

    def log_ratios(self) -> None:
        """Adds the importance ratios seen in the loss to the metrics."""
        self._record({**self.tap.stats.metrics(), **self.components.gates.metrics()})

    def reference_synced(self) -> None:
        """The reference model has changed: groups that hold its log-probs can't be replayed any more."""
        dropped = self.buffer.forget_with(compat.REF_LOGPS)
        if dropped:
            self.totals.reasons[f"an entry was dropped: {STALE}"] += dropped
        if self.carry.pending_groups is not None:
            self.carry.pending_groups.outdate(compat.REF_LOGPS)

    def context(self) -> Context:
        """What strategies may know at this moment."""
        return Context(
            update=self.update,
            rng=self.components.rng,
            capacity=self.buffer.capacity,
            num_generations=self.components.num_generations,
            table=self.buffer.table,
            metrics=self.metrics,
        )

    def _local_context(self) -> Context:
        """The same, with a generator from which this process may sampled as often as its own rows need."""
        return replace(self.context(), rng=self.components.local_rng)

    def notify(self, hook: str) -> None:
        """Calls the plugins' `trl_replay_attached` or `trl_replay_detached`."""
        self.components.hooks.call(hook, self.update, session=self)

    def _view(self, rows: RowLayout) -> Groups:
        if self.rewards is None:
            raise SeamError(f"{compat.SCORE} did not call {compat.REWARDS}: the rewards of the batch are not known.")
        rewards, self.rewards = (
            self.rewards.detach().double().cpu().numpy(),
            None,
        )
        rows.check(len(rewards), self.components.processes)
        return view(
            rows.columns,
            rewards,
            compat.reward_setup(self.trainer),
            rows.size,
            self.update,
        )

    def _settle(
        self,
        pending: PendingGroups | None,
        rows: RowLayout,
        solved: Ints,
        tally: Tally,
    ) -> Admitted:
        tally.refuse(self.buffer.withdraw(rows.overflowed()), NO_ROOM)
        return self.decide.settle(pending, rows, self.components.processes, solved, tally)

    def _compose(
        self,
        batch: Batch,
        placements: list[Placement],
        copies: list[Placement],
        total: dict[str, float],
    ) -> Batch:
        """The batch with the drawn groups in their slots, and its token count corrected by all ranks' exchanges."""
        placements = placements + copies
        composed = self.components.hooks.compose(batch, placements, self._local_context()) if placements else batch
        delta = total["items_delta"]
        if total["excluded"] < total["groups"]:  # a batch without any live group keeps its count: nothing is trained
            delta -= total["excluded_items"]
        if not delta:
            return composed
        items = batch["num_items_in_batch"]
        items = items + torch.as_tensor(delta, dtype=items.dtype, device=items.device)
        return {**composed, "num_items_in_batch": items}

    def _dead_mask(
        self,
        fresh: Groups,
        rows: RowLayout,
        sampled: Sampled,
        total: dict[str, float],
    ) -> DeadGroupMask:
        choice = self.config.replay_unfilled
        if choice not in ("mask", "exclude") or self.config.replay_dry_run:
            return NOTHING_MASKED
        masked = [rows.local(slot)[0] for slot in dead_slots(fresh, sampled.slots)]
        masked = [part for part in masked if part.stop]
        if choice == "mask" or total["excluded"] == total["groups"]:
            return DeadGroupMask(masked)
        factor = total["groups"] / (total["groups"] - total["excluded"])
        return DeadGroupMask(masked, factor, compat.denominator(self.trainer))

    def _collect(self, batch: Batch, fresh: Groups, rows: RowLayout, slots: list[int]) -> list[Candidate]:
        """Live groups become candidates; returns those whose rows here still need log-probs."""
        local = [(slot, *rows.local(slot)) for slot in slots]
        stored = self.components.fields.stored_keys(batch) | {compat.OLD_LOGPS}
        keys = [rows.holds(stored, slot) for slot in slots]
        candidates = collect_candidates(
            batch,
            self.components.fields,
            fresh,
            local,
            keys,
            self.carry.serial,
            self.update,
        )
        self.carry.serial += len(candidates)
        self.carry.pending_groups, self.carry.collected_at = (
            PendingGroups(fresh, candidates),
            self.update,
        )
        return [] if compat.OLD_LOGPS in batch else [each for each in candidates if each.group is not None]

    def _log(
        self,
        batch: Batch,
        tally: Tally,
        total: dict[str, float],
        started: float,
    ) -> None:
        self.totals.add(tally)
        self.metrics = {}
        self._record({**metrics(total), "replay/padding": padding(batch)})
        for result in self.components.hooks.call("metrics", self.update, context=self._local_context()):
            self._record({key: float(value) for key, value in result.items()})
        self._record({"replay/seconds": time.perf_counter() - started})

    def _record(self, values: dict[str, float]) -> None:
        """Puts values where the trainer's log averages them, and into `metrics`."""
        for key, value in values.items():
            self.trainer._metrics["train"][key].append(value)
        self.metrics = {**self.metrics, **values}

    def _correct(self, rows: ReplayedRows) -> Corrected:
        return self.components.gates(rows, self.components.hooks.correct(rows, self._local_context()))


def _warn_of_rename(old: str, new: str) -> None:
    warnings.warn(
        f"session.{old} is now session.{new}; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=3,
    )
