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
from .batch import check, join, padding
from .behaviour import ROWS, Tap
from .candidates import STALE, Noted, Progress, note
from .config import ReplayConfig
from .decisions import Decisions
from .errors import ReplayError, SeamError
from .exchange import MISSING, Admission, Draw, Rows, reason_to_stop, unpacked
from .exporting import export
from .parts import Parts
from .report import COUNTERS, NO_ROOM, Tally, Totals, metrics
from .types import Batch, Context, Corrected, Group, Groups, Placement, ReplayedRows
from .views import blank, describe, view


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
        self.decide = Decisions(parts.buffer, parts.hooks, self.tap, self.context, config)
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
        """One generation batch: what stock scored goes in, what is trained on comes out.

        Everything is decided from columns before `agree`, and payload moves after it. So an error on one process
        reaches all of them at `agree`, and none waits for payload that another will not send.
        """
        started, self.progress.pending = time.perf_counter(), True
        tally = Tally()
        rows, error = self._share(batch)
        admission, draw, fresh, noteworthy = Admission(), Draw(), None, list[int]()
        try:
            fresh = self._view(rows)
            admission = self._settle(rows, tally)
            slots = self.decide.select(fresh, tally)
            keys = rows.takes(self.parts.fields.stored_keys(batch))
            draw = self.decide.sample(slots, fresh, keys, self.progress.noted_at, tally)
            if self.config.replay_dry_run:
                draw, tally.items_delta = Draw(), 0.0
            noteworthy = self.decide.noteworthy(fresh, draw, compat.OLD_LOGPS in batch, tally)
        except Exception as caught:
            error = error or caught
        total = self._agree(rows, tally, error, admission, draw)
        groups = self._move(rows, admission, draw)
        try:
            placements = rows.placements(draw, groups)
            composed = self._compose(batch, placements, total["items_delta"])
            ids = self._note(batch, fresh, rows, noteworthy, placements)
            self._log(composed, tally, total, started)
        except Exception as caught:
            self._keep(caught)
            return batch
        return {**composed, ROWS: ids}

    def finish(self) -> None:
        """The end of training: candidates that wait for the next batch settle now, and kept errors are raised."""
        if not self.progress.pending:
            return
        self.progress.pending = False
        tally, admission = Tally(), Admission()
        rows, error = self._share(None)
        try:
            admission = self._settle(rows, tally)
        except Exception as caught:
            error = error or caught
        self._agree(rows, tally, error, admission, Draw())
        self._move(rows, admission, Draw())
        self._agree(rows, Tally(), self.tap.take_error(), Admission(), Draw())
        self.totals.add(tally, batches=0)

    def export(self, path: str | Path) -> Path:
        """Writes what this process holds to a Parquet file, one row a completion: docs/files.md. Returns its path."""
        return export(path, self.trainer, self.parts)

    def log_ratios(self) -> None:
        """Adds the importance ratios seen in the loss to the metrics."""
        self._record(self.tap.ratio_statistics())

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

    def _share(self, batch: Batch | None) -> tuple[Rows, Exception | None]:
        """Row columns of the fresh batch (None: the end of training) and of the last one's candidates, from all ranks.

        A process whose batch can't be described shares blank columns, so that the others need not wait for it.
        """
        parts, error = self.parts, self.tap.take_error()
        count = batch["prompt_ids"].size(0) if batch is not None else compat.local_rows(self.trainer)
        first = self.trainer.accelerator.process_index * count
        local = blank(first, count)
        for row, serial in enumerate(self.buffer.homeless[:count]):
            local["lost"][row] = serial + 1
        try:
            if self.progress.noted is not None:
                local |= self.progress.noted.describe(count, parts.fields.names)
            if batch is not None:
                check(batch, parts.fields)
                local |= describe(batch, first, parts.num_generations, parts.fields.pad_token_id)
        except Exception as caught:
            error = error or caught
        return Rows(self.scope.share(local), local, parts.num_generations), error

    def _view(self, rows: Rows) -> Groups:
        rows.check()
        if self.rewards is None:
            raise SeamError(f"{compat.SCORE} did not call {compat.REWARDS}: the rewards of the batch are not known.")
        rewards, self.rewards = self.rewards.detach().double().cpu().numpy(), None
        return view(rows.columns, rewards, compat.reward_setup(self.trainer), rows.size, self.update)

    def _settle(self, rows: Rows, tally: Tally) -> Admission:
        noted, self.progress.noted = self.progress.noted, None
        tally.refuse(self.buffer.withdraw(rows.lost()), NO_ROOM)
        return self.decide.settle(noted, rows, self.parts.processes, tally)

    def _agree(
        self, rows: Rows, tally: Tally, error: Exception | None, admission: Admission, draw: Draw
    ) -> dict[str, float]:
        """Sums the counters over all ranks; an error on any rank is raised on all, and so are different decisions.

        Of the ranks that share a buffer only the first counts what they decide together; each counts its own bytes.
        """
        tally.size, tally.bytes = len(self.buffer), self.buffer.nbytes
        counters = tally.vector() if rows.leads else Tally(bytes=tally.bytes).vector()
        vector = np.concatenate([counters, rows.identity(self.buffer.table, admission, draw), rows.filled(draw)])
        agreement = self.scope.agree(vector, f"{type(error).__name__}: {error}" if error else "")
        reason = reason_to_stop(agreement, len(counters))
        if reason:
            self.buffer.withdraw(admission.serials)
            if error is None:
                raise SeamError(f"Replay stops on all processes. {reason}")
            if self.parts.processes > 1:
                error.add_note(f"Replay stops on all processes. {reason}")
            raise error
        self.replaced = unpacked(agreement.vectors[:, len(counters) + 2 :], rows.count)
        return dict(zip(COUNTERS, agreement.vectors.sum(axis=0).tolist()[: len(counters)], strict=True))

    def _move(self, rows: Rows, admission: Admission, draw: Draw) -> dict[int, Group]:
        """Moves admitted payload to where it lives, and drawn payload to its slots; returns what came here."""
        buffer, fields = self.buffer, self.parts.fields
        parts = self.scope.admit(buffer.table, admission.arrivals, admission.mine)
        try:
            buffer.receive({serial: join(held, fields) for serial, held in parts.items()})
        except Exception as caught:
            if self.parts.processes == 1:  # several stop together, and until then must go on with the same table
                buffer.withdraw_missing(list(parts))
            self._keep(caught)
        return self.scope.fetch(rows.requests(draw, buffer.table.owner), self._load)

    def _load(self, serial: int) -> Group:
        try:
            return self.buffer.load(serial)
        except Exception as caught:
            self._keep(caught)
            return MISSING

    def _keep(self, error: Exception) -> None:
        """Raises an error that no other process can have heard of; if there are others, at the next `agree`."""
        if self.parts.processes == 1:
            raise error
        self.tap.error = self.tap.error or error

    def _compose(self, batch: Batch, placements: list[Placement], items_delta: float) -> Batch:
        """The batch with the drawn groups in their slots, and its token count corrected by all ranks' exchanges."""
        composed = self.parts.hooks.compose(batch, placements, self._local_context()) if placements else batch
        if not items_delta:
            return composed
        items = batch["num_items_in_batch"]
        delta = torch.as_tensor(items_delta, dtype=items.dtype, device=items.device)
        return {**composed, "num_items_in_batch": items + delta}

    def _note(
        self, batch: Batch, fresh: Groups | None, rows: Rows, slots: list[int], placements: list[Placement]
    ) -> torch.Tensor:
        """Live groups become candidates; returns the id of each local row."""
        assert fresh is not None  # without a view, agree has raised
        local = [(slot, *rows.local(slot)) for slot in slots]
        stored = self.parts.fields.stored_keys(batch) | {compat.OLD_LOGPS}
        keys = [rows.holds(stored, slot) for slot in slots]
        candidates = note(batch, self.parts.fields, fresh, local, keys, self.progress.serial, self.update)
        self.progress.serial += len(candidates)
        self.progress.noted, self.progress.noted_at = Noted(fresh, candidates), self.update
        waiting = [] if compat.OLD_LOGPS in batch else [c for c in candidates if c.group is not None]
        return self.tap.expect(rows.count, waiting, placements)

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
        corrected, weight = self.parts.hooks.correct(rows, self._local_context()), self.config.replay_weight
        if weight == 1.0:
            return corrected
        weights = torch.ones_like(rows.advantages) if corrected.weights is None else corrected.weights
        return replace(corrected, weights=weights * weight)
