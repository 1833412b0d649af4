"""The session: one attachment of a buffer and strategies to one trainer, and the step that it takes each batch."""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import compat
from .batch.compose import padding
from .batch.group_view import view
from .buffer.candidates import STALE, Candidate, Noted, Progress, note
from .components import Parts
from .config import ReplayConfig
from .counters import NO_ROOM, Tally, Totals, metrics
from .distributed.communicator import Traffic
from .distributed.row_layout import Admission, Draw, Rows, duplicates
from .errors import ReplayError, SeamError
from .loss.dead_group_mask import KEPT, Unfilled, dead_slots
from .loss.micro_batch import ROWS
from .loss.tap import Tap
from .offline.export import export
from .step.decisions import Decisions
from .types import Batch, Context, Corrected, Groups, Ints, Placement, ReplayedRows


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
        parts ([`Parts`]): What the session is made of.
        progress ([`Progress`]): What the last generation batch left for the next one.
        replaced (`list[bool]`): Of all processes' rows of the last generation batch, those that were replaced.
    """

    def __init__(self, trainer: Any, config: ReplayConfig, parts: Parts, enabled: bool = True) -> None:
        self._trainer = weakref.ref(trainer)
        self.parts = parts
        self.config = config
        self.enabled = enabled
        self.paused = False
        self.buffer = parts.buffer
        self.scope = parts.scope
        self.metrics: dict[str, float] = {}
        self.totals = Totals()
        self.tap = Tap(self._correct, parts.num_generations, parts.token_weights, parts.forward, parts.processes > 1)
        self.traffic = Traffic(parts, self.tap, int(trainer.accelerator.process_index) if enabled else 0)
        self.decide = Decisions(parts, self.tap, self.context, config)
        self.rewards: torch.Tensor | None = None
        self.replaced: list[bool] = []
        self.progress = Progress()

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
        return self.parts.plugins

    def pause(self) -> None:
        """From the next generation batch on, the trainer is stock; what is stored stays. Call it on every process."""
        self.paused = True
        self.progress.noted_at = None  # the updates to come need not go through the seam

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
        started, self.progress.pending = time.perf_counter(), True
        tally, noted, drawn = Tally(), *self.progress.take()
        rows, error = self.traffic.share(batch, batch["prompt_ids"].size(0), noted)
        admission, draw, fresh = Admission(), Draw(), None
        noteworthy, pairs = list[int](), list[tuple[int, int]]()
        try:
            fresh = self._view(rows)
            self.decide.measure(drawn, rows.columns, tally)
            admission = self._settle(noted, rows, self.decide.solve(fresh, tally), tally)
            slots = self.decide.select(fresh, tally)
            keys = rows.takes(self.parts.fields.stored_keys(batch))
            draw = self.decide.sample(slots, fresh, keys, self.progress.noted_at, tally)
            if self.config.replay_dry_run:
                draw, tally.items_delta = Draw(), 0.0
            else:
                pairs = self.decide.leave(fresh, draw, rows, tally)
            noteworthy = self.decide.noteworthy(fresh, draw, compat.OLD_LOGPS in batch, tally)
        except Exception as caught:
            error = error or caught
        total = self.traffic.agree(rows, tally, error, admission, draw)
        self.replaced = self.traffic.replaced
        groups = self.traffic.move(rows, admission, draw)
        try:
            assert fresh is not None  # without a view, agree has raised
            self.progress.drawn = dict(zip(draw.slots, draw.serials, strict=True))
            placements = rows.placements(draw, groups)
            unfilled = self._unfilled(fresh, rows, draw, total)
            composed = self._compose(batch, placements, duplicates(batch, rows, pairs, self.parts.fields), total)
            waiting = self._note(batch, fresh, rows, noteworthy)
            ids = self.tap.expect(rows.count, waiting, placements, composed is not batch, unfilled)
            self._log(composed, tally, total, started)
        except Exception as caught:
            self.traffic.keep(caught)
            return batch
        return {**composed, ROWS: ids}

    def finish(self) -> None:
        """The end of training: candidates that wait for the next batch settle now, and kept errors are raised."""
        if not self.progress.pending:
            return
        self.progress.pending = False
        tally, admission, noted, drawn = Tally(), Admission(), *self.progress.take()
        rows, error = self.traffic.share(None, compat.local_rows(self.trainer), noted)
        self.tap.measures.clear()
        try:
            self.decide.measure(drawn, rows.columns, tally)
            admission = self._settle(noted, rows, np.empty(0, np.int64), tally)
        except Exception as caught:
            error = error or caught
        self.traffic.agree(rows, tally, error, admission, Draw())
        self.traffic.move(rows, admission, Draw())
        self.traffic.agree(rows, Tally(), self.tap.take_error(), Admission(), Draw())
        self.totals.add(tally, batches=0)

    def export(self, path: str | Path) -> Path:
        """Writes what this process holds to a Parquet file, one row a completion: docs/files.md. Returns its path."""
        return export(path, self.trainer, self.parts)

    def log_ratios(self) -> None:
        """Adds the importance ratios seen in the loss to the metrics."""
        self._record({**self.tap.measures.metrics(), **self.parts.gates.metrics()})

    def reference_synced(self) -> None:
        """The reference model has changed: groups that hold its log-probs can't be replayed any more."""
        dropped = self.buffer.forget_with(compat.REF_LOGPS)
        if dropped:
            self.totals.reasons[f"an entry was dropped: {STALE}"] += dropped
        if self.progress.noted is not None:
            self.progress.noted.outdate(compat.REF_LOGPS)

    def context(self) -> Context:
        """What strategies may know at this moment."""
        return Context(
            update=self.update,
            rng=self.parts.rng,
            capacity=self.buffer.capacity,
            num_generations=self.parts.num_generations,
            table=self.buffer.table,
            metrics=self.metrics,
        )

    def _local_context(self) -> Context:
        """The same, with a generator from which this process may draw as often as its own rows need."""
        return replace(self.context(), rng=self.parts.local_rng)

    def notify(self, hook: str) -> None:
        """Calls the plugins' `trl_replay_attached` or `trl_replay_detached`."""
        self.parts.hooks.call(hook, self.update, session=self)

    def _view(self, rows: Rows) -> Groups:
        if self.rewards is None:
            raise SeamError(f"{compat.SCORE} did not call {compat.REWARDS}: the rewards of the batch are not known.")
        rewards, self.rewards = self.rewards.detach().double().cpu().numpy(), None
        rows.check(len(rewards), self.parts.processes)
        return view(rows.columns, rewards, compat.reward_setup(self.trainer), rows.size, self.update)

    def _settle(self, noted: Noted | None, rows: Rows, solved: Ints, tally: Tally) -> Admission:
        tally.refuse(self.buffer.withdraw(rows.lost()), NO_ROOM)
        return self.decide.settle(noted, rows, self.parts.processes, solved, tally)

    def _compose(
        self, batch: Batch, placements: list[Placement], copies: list[Placement], total: dict[str, float]
    ) -> Batch:
        """The batch with the drawn groups in their slots, and its token count corrected by all ranks' exchanges."""
        placements = placements + copies
        composed = self.parts.hooks.compose(batch, placements, self._local_context()) if placements else batch
        delta = total["items_delta"]
        if total["excluded"] < total["groups"]:  # a batch without any live group keeps its count: nothing is trained
            delta -= total["excluded_items"]
        if not delta:
            return composed
        items = batch["num_items_in_batch"]
        items = items + torch.as_tensor(delta, dtype=items.dtype, device=items.device)
        return {**composed, "num_items_in_batch": items}

    def _unfilled(self, fresh: Groups, rows: Rows, draw: Draw, total: dict[str, float]) -> Unfilled:
        choice = self.config.replay_unfilled
        if choice not in ("mask", "exclude") or self.config.replay_dry_run:
            return KEPT
        silent = [rows.local(slot)[0] for slot in dead_slots(fresh, draw.slots)]
        silent = [part for part in silent if part.stop]
        if choice == "mask" or total["excluded"] == total["groups"]:
            return Unfilled(silent)
        factor = total["groups"] / (total["groups"] - total["excluded"])
        return Unfilled(silent, factor, compat.denominator(self.trainer))

    def _note(self, batch: Batch, fresh: Groups, rows: Rows, slots: list[int]) -> list[Candidate]:
        """Live groups become candidates; returns those whose rows here still need log-probs."""
        local = [(slot, *rows.local(slot)) for slot in slots]
        stored = self.parts.fields.stored_keys(batch) | {compat.OLD_LOGPS}
        keys = [rows.holds(stored, slot) for slot in slots]
        candidates = note(batch, self.parts.fields, fresh, local, keys, self.progress.serial, self.update)
        self.progress.serial += len(candidates)
        self.progress.noted, self.progress.noted_at = Noted(fresh, candidates), self.update
        return [] if compat.OLD_LOGPS in batch else [each for each in candidates if each.group is not None]

    def _log(self, batch: Batch, tally: Tally, total: dict[str, float], started: float) -> None:
        self.totals.add(tally)
        self.metrics = {}
        self._record({**metrics(total), "replay/padding": padding(batch)})
        for result in self.parts.hooks.call("metrics", self.update, context=self._local_context()):
            self._record({key: float(value) for key, value in result.items()})
        self._record({"replay/seconds": time.perf_counter() - started})

    def _record(self, values: dict[str, float]) -> None:
        """Puts values where the trainer's log averages them, and into `metrics`."""
        for key, value in values.items():
            self.trainer._metrics["train"][key].append(value)
        self.metrics = {**self.metrics, **values}

    def _correct(self, rows: ReplayedRows) -> Corrected:
        return self.parts.gates(rows, self.parts.hooks.correct(rows, self._local_context()))
