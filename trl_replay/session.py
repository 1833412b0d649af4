"""The session: one attachment of a buffer and strategies to one trainer, and the step that it takes each batch."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from . import compat
from .batch import check, compose, cut, loss_mask
from .behaviour import ROWS, Tap
from .buffer import ReplayBuffer
from .callback import ReplayCallback
from .candidates import Candidate, admissible
from .config import ReplayConfig
from .errors import ReplayError, SeamError
from .fields import FieldTable
from .hooks import SessionHooks
from .report import COUNTERS, Tally, Totals, metrics
from .types import Batch, Context, Corrected, Groups, Placement, ReplayedRows
from .views import view


@dataclass(slots=True)
class Parts:
    """What a session is made of, built before anything is patched."""

    buffer: ReplayBuffer
    hooks: SessionHooks
    fields: FieldTable
    rng: np.random.Generator
    num_generations: int
    token_weights: bool
    forward: bool
    plugins: list[str] = field(default_factory=list)


class Session:
    """One attachment. Made by `attach`.

    Attributes:
        config ([`ReplayConfig`]): The settings in force, a preset's included.
        buffer ([`ReplayBuffer`]): `len(buffer)`, `buffer.table`, `buffer.capacity`, `buffer.nbytes`, `buffer.clear()`.
        metrics (`dict[str, float]`): The last generation batch's metrics, with the ratios of the rows trained on
            since.
        enabled (`bool`): False if `use_replay=False` or the buffer has no room: then nothing is patched.
        paused (`bool`): Between `pause()` and `resume()`.
    """

    def __init__(self, trainer: Any, config: ReplayConfig, parts: Parts, enabled: bool = True) -> None:
        self._trainer = weakref.ref(trainer)
        self._parts = parts
        self.config = config
        self.enabled = enabled
        self.paused = False
        self.buffer = parts.buffer
        self.metrics: dict[str, float] = {}
        self.totals = Totals()
        self.tap = Tap(self._correct, parts.num_generations, parts.token_weights, parts.forward)
        self.rewards: torch.Tensor | None = None
        self.callback = ReplayCallback(self)
        self._candidates: list[Candidate] = []
        self._serial = 0
        self._noted_at: int | None = None

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
        return self._parts.plugins

    def pause(self) -> None:
        """From the next generation batch on, the trainer is stock; what is stored stays."""
        self.paused = True

    def resume(self) -> None:
        """Takes back `pause`."""
        self.paused = False

    def explain(self) -> str:
        """What was replayed so far and, where nothing or little was, why."""
        if not self.enabled:
            return "replay: off (use_replay=False or replay_buffer_size=0); the trainer is as TRL made it"
        return self.totals.explain(len(self.buffer))

    def step(self, batch: Batch) -> Batch:
        """One generation batch: what stock scored goes in, what is trained on comes out."""
        started = time.perf_counter()
        tally, composed, error = Tally(), batch, None
        try:
            fresh = self._view(batch)
            self._settle(tally)
            slots = self._select(fresh, tally)
            placements = self._sample(slots, batch, tally)
            composed = self._compose(batch, placements, tally)
            rows = self._note(batch, fresh, placements, tally)
        except Exception as caught:
            error = caught
        total = self._agree(tally, error)
        composed = self._with_items(composed, total["items_delta"])
        self._log(composed, tally, total, started)
        return {**composed, ROWS: rows}

    def finish(self) -> None:
        """The end of training: candidates that wait for the next batch settle now."""
        tally = Tally()
        self._settle(tally)
        for name in ("stored", "evicted", "refused"):
            self.totals.counters[name] += getattr(tally, name)
        self.totals.reasons.update(tally.reasons)

    def log_ratios(self) -> None:
        """Adds the importance ratios seen in the loss to the metrics."""
        self._record(self.tap.ratio_statistics())

    def context(self) -> Context:
        """What strategies may know at this moment."""
        return Context(
            update=self.update,
            rng=self._parts.rng,
            capacity=self.buffer.capacity,
            num_generations=self._parts.num_generations,
            table=self.buffer.table,
            metrics=self.metrics,
        )

    def notify(self, hook: str) -> None:
        """Calls the plugins' `trl_replay_attached` or `trl_replay_detached`."""
        self._parts.hooks.call(hook, self.update, session=self)

    def _view(self, batch: Batch) -> Groups:
        check(batch, self._parts.fields)
        if self.rewards is None:
            raise SeamError(f"{compat.SCORE} did not call {compat.REWARDS}: the rewards of the batch are not known.")
        trainer = self.trainer
        rewards, self.rewards = self.rewards, None
        return view(
            batch,
            rewards,
            compat.reward_setup(trainer),
            self._parts.num_generations,
            self._parts.fields.pad_token_id,
            self.update,
            trainer.accelerator.process_index,
        )

    def _settle(self, tally: Tally) -> None:
        """The last batch's candidates have their log-probs now: score them and offer them to the buffer."""
        candidates, self._candidates = self._candidates, []
        self.buffer.retire(self.update)
        usable, groups = admissible(candidates, tally)
        if groups is None:
            return
        context = self.context()
        scores = self._parts.hooks.score(groups, context)
        finite = np.flatnonzero(np.isfinite(scores))
        tally.refuse(len(scores) - len(finite), "its score is not finite")
        admitted, groups = [usable[row] for row in finite], groups.take(finite)
        columns = {
            "serial": np.array([candidate.serial for candidate in admitted], np.int64),
            "step": groups.step,
            "score": scores[finite],
            "reward_mean": groups.reward_mean,
            "reward_std": groups.reward_std,
            "tokens": groups.trainable.sum(axis=1),
            "prompt": groups.prompt,
            "keys": np.array([self.buffer.keyset(candidate.group.keys) for candidate in admitted], np.int64),
        }
        payload = {candidate.serial: candidate.group for candidate in admitted}
        hooks, rng = self._parts.hooks, self._parts.rng
        stored, evicted = self.buffer.admit(
            self.buffer.scope.share(columns), payload, lambda table: hooks.rank(table, context), rng
        )
        tally.stored += stored
        tally.evicted += evicted

    def _select(self, fresh: Groups, tally: Tally) -> list[int]:
        """The slots that replay may fill, most replaceable first, no more than `replay_max_fraction` allows."""
        tally.groups, tally.dead = len(fresh), int(fresh.dead.sum())
        slots = self._parts.hooks.select(fresh, self.context()).tolist()
        most = int(self.config.replay_max_fraction * len(fresh) + 1e-9)
        if len(slots) > most:
            tally.reasons[f"replay_max_fraction allows {most} of {len(fresh)} groups"] += 1
        elif not slots:
            tally.reasons["no group of the batch was replaceable (the selector chose none)"] += 1
        return list(slots[:most])

    def _sample(self, slots: Sequence[int], batch: Batch, tally: Tally) -> list[Placement]:
        """Eligible entries for the slots, never one twice."""
        if not slots:
            return []
        if not self.tap.verified:
            if self._noted_at is not None and self.update > self._noted_at:
                raise SeamError(
                    f"The model was updated, but {compat.LOSS} and {compat.LOGPS} were not seen to run: this "
                    f"trainer's loss "
                    "goes around the seam, so that replayed rows could not be corrected."
                )
            tally.reasons["the loss has not run yet"] += 1
            return []
        specs = self._parts.fields.of(batch)
        needed = frozenset(key for key, spec in specs.items() if spec.layout != "scalar")
        rows, held_back = self.buffer.eligible(self.update, needed)
        drawn = np.empty(0, np.int64)
        if len(rows):
            everything = len(rows) == len(self.buffer)
            table = self.buffer.table if everything else self.buffer.table.take(rows)
            drawn = rows[self._parts.hooks.sample(table, min(len(slots), len(rows)), self.context())]
        if len(drawn) < len(slots):
            held = "; ".join(sorted(f"held back by {reason}" for reason in held_back))
            empty = (
                "the buffer was empty" if not len(self.buffer) else "the buffer held fewer eligible groups than slots"
            )
            tally.reasons[f"{empty}{f' ({held})' if held else ''}"] += 1
        table = self.buffer.table
        serials, ages = table.serial[drawn].tolist(), (self.update - table.step[drawn]).tolist()
        tally.replaced, tally.age, tally.score = len(drawn), float(sum(ages)), float(table.score[drawn].sum())
        groups = self.buffer.use(drawn, self.update)
        tally.uses = float(table.uses[drawn].sum())
        return [Placement(*placed) for placed in zip(slots, groups, serials, ages, strict=False)]

    def _compose(self, batch: Batch, placements: list[Placement], tally: Tally) -> Batch:
        """The batch with the drawn groups in their slots."""
        if not placements:
            return batch
        composed = self._parts.hooks.compose(batch, placements, self.context())
        tally.items_delta = float(loss_mask(composed).sum() - loss_mask(batch).sum())
        return composed

    def _note(self, batch: Batch, fresh: Groups, placements: list[Placement], tally: Tally) -> torch.Tensor:
        """Live groups that the loss will see become candidates; returns the id of each row."""
        size = self._parts.num_generations
        displaced = {placed.slot for placed in placements}
        tally.dead_after = sum(bool(fresh.dead[slot]) for slot in range(len(fresh)) if slot not in displaced)
        known = compat.OLD_LOGPS in batch
        live = [slot for slot in np.flatnonzero(~fresh.dead).tolist() if known or slot not in displaced]
        trainable = [slot for slot in live if fresh.trainable[slot].any()]
        tally.refuse(len(live) - len(trainable), "it has no trainable token")
        waiting: dict[int, Candidate] = {}
        for slot, group in zip(trainable, cut(batch, self._parts.fields, trainable, size), strict=True):
            candidate = Candidate(self._serial, group, fresh.take([slot]), self.update)
            self._serial += 1
            self._candidates.append(candidate)
            if not known:
                waiting[slot] = candidate
        self._noted_at = self.update
        return self.tap.expect(len(fresh) * size, waiting, placements)

    def _agree(self, tally: Tally, error: Exception | None) -> dict[str, float]:
        """Sums the counters over all ranks; an error on any rank is raised on all."""
        tally.size, tally.bytes = len(self.buffer), self.buffer.nbytes
        agreement = self.buffer.scope.agree(tally.vector(), f"{type(error).__name__}: {error}" if error else "")
        if error:
            raise error
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(agreement.errors) if text]
        if failed:
            raise SeamError(f"Replay stopped on another process. {'; '.join(failed)}")
        return dict(zip(COUNTERS, agreement.vectors.sum(axis=0).tolist(), strict=True))

    def _with_items(self, batch: Batch, delta: float) -> Batch:
        """The batch with its token count corrected by what all ranks put in and took out."""
        if not delta:
            return batch
        items = batch["num_items_in_batch"]
        return {**batch, "num_items_in_batch": items + torch.as_tensor(delta, dtype=items.dtype, device=items.device)}

    def _log(self, batch: Batch, tally: Tally, total: dict[str, float], started: float) -> None:
        real = batch["prompt_mask"].sum() + batch["completion_mask"].sum()
        tally.positions = float(batch["prompt_mask"].numel() + batch["completion_mask"].numel())
        tally.padding = tally.positions - float(real)
        self.totals.add(tally)
        self.metrics = {}
        self._record(metrics({**total, "positions": tally.positions, "padding": tally.padding}))
        for result in self._parts.hooks.call("metrics", self.update, context=self.context()):
            self._record({key: float(value) for key, value in result.items()})
        self._record({"replay/seconds": time.perf_counter() - started})

    def _record(self, values: dict[str, float]) -> None:
        """Puts values where the trainer's log averages them, and into `metrics`."""
        for key, value in values.items():
            self.trainer._metrics["train"][key].append(value)
        self.metrics = {**self.metrics, **values}

    def _correct(self, rows: ReplayedRows) -> Corrected:
        return self._parts.hooks.correct(rows, self.context())


def composer(fields: FieldTable, num_generations: int, multiple_of: int | None) -> Any:
    """The last resort of the hook `trl_replay_compose`."""
    return lambda batch, placements: compose(batch, fields, placements, num_generations, multiple_of)
