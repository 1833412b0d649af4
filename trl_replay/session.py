"""The session: one attachment of a buffer and strategies to one trainer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from . import compat
from .base.files import counted
from .built_in import BUILT_IN, ask_built_in
from .data.prompt_table import PromptTable
from .data.types import Entry
from .distributed.communicator import roll_call_of
from .errors import ReplayError
from .loss.supply import ROWS, MaskWatch, Means, Noise, fetch_sums
from .protocols import SessionFiles
from .reporting import Reporting
from .setup.config import ReplayConfig
from .setup.settings import Components, Settings
from .step.step import Step, StepCarry
from .strategies.scopes import Scope

NOT_ATTACHED = "Groups can be added to the buffer of an attached session only: attach(trainer).add(…)."


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
        detached (`bool`): After `detach`: buffer, metrics and `explain()` can still be read.
        components ([`Components`]): What the session is made of.
        step ([`Step`]): What is done with each batch that the trainer scored.
    """

    def __init__(self, trainer: Any, settings: Settings, components: Components) -> None:
        self._trainer = weakref.ref(trainer)
        self.components = components
        self.enabled = settings.acts
        self.detached = False
        self.buffer = components.buffer
        self.totals = components.buffer.totals
        self.roll_call = roll_call_of(trainer, settings, components.scope)
        self.reporting = Reporting(self._trainer, components)
        self._mask_watch = MaskWatch(_what_masks(settings))
        self.step = Step(self._trainer, components, self.reporting, self.roll_call)
        self.seam = components.dialect.seam(trainer, self.iterates) if self.enabled else []

    def __repr__(self) -> str:
        return f"<Session: {self.reporting.in_one_line()}>"

    @cached_property
    def files(self) -> SessionFiles:
        """Reads and writes files for it.

        Raises:
            ReplayError: No built-in does.
        """
        files: SessionFiles | None = ask_built_in("make_files", self)
        if files is None:
            raise ReplayError(f"None of trl_replay.built_in.BUILT_IN reads and writes files: {', '.join(BUILT_IN)}.")
        return files

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

    def before_update(self) -> None:
        """The optimizer is about to step: look at what the loss has computed, and that it went through the seam."""
        self.components.errors.check_due()
        self.step.check_loss()

    def updated(self) -> None:
        """The optimizer has made an update: rows that have had no forward yet can't be recorded any more."""
        self.buffer.clock.update += 1
        self.step.tap.forget()

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
        if self.step.carry.pending is not None:
            self.step.carry.pending = replace(self.step.carry.pending, candidates=[])

    @property
    def iterates(self) -> bool:
        """Tell whether iterations 2 … `num_iterations` draw groups of their own."""
        return self.step.iterates

    def begin_training(self, updates: int) -> None:
        """Training of so many updates begins. Weights may have been loaded since: rows noted before are not recorded
        any more. The buffer is filled once from the file that is to start it, with the model in its place.

        Raises:
            SeamError: Replay is not attached on all processes.
            ConfigurationError: It is, with other settings.
        """
        self.step.tap.forget()
        self.roll_call.training = False
        self.buffer.clock.planned = updates
        self.roll_call.for_training()
        if self.config.replay_warm_start is not None:
            self.files.warm_start()

    def mark_detached(self) -> None:
        """Detached: nothing more is recorded, and what was taken off the trainer for the next batch is forgotten."""
        self.detached = True
        self.step.tap.forget()

    @property
    def scoring(self) -> bool:
        """Tell whether the trainer is scoring a batch."""
        return self.step.judge.rewards is not None

    def put_on(self, trainer: Any) -> None:
        """Put nothing on the trainer beside the seam's methods."""

    def take_off(self, trainer: Any) -> None:
        """Take it away again, and replayed rows that are left in the trainer's buffer: without the tap they can't be
        trained on, so stock scores a new batch. Of several processes all do, whichever has such rows: they generate
        together or not at all. The other micro-batches of the trainer's buffer are as stock's loss reads them."""
        self.step.template = None  # not before: where other ranks go on, this one comes to their iterations
        buffered = getattr(trainer, compat.BUFFERED, None) or []
        ours = [micro for micro in buffered if ROWS in micro]
        if any(self.components.processes > 1 or bool(micro[ROWS][:, 1].any()) for micro in ours):
            setattr(trainer, compat.BUFFERED, None)  # stock's own sign that it must generate
        for micro in ours:
            del micro[ROWS]
            micro.update(self.components.dialect.in_loss(trainer, micro))

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which a checkpoint is written; it does nothing here."""
        return nullcontext()

    def explain(self) -> str:
        """Describe what the run came to, what was replayed, why not more was, and what to change."""
        if not self.enabled:
            return "replay: off (use_replay=False or replay_buffer_size=0); the trainer is as TRL made it"
        if not self.buffer.capacity:
            return self.reporting.explain(self.totals.explain_without_buffer())
        rank, ranks = self.step.communicator.rank, self.step.communicator.ranks
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

    def add(self, source: Any, incomplete: str = "refuse", rescore: bool = False) -> int:
        """Add groups made elsewhere, on every process: another run's, a stronger model's, a person's. The trainer
        scores them as its own.

        Args:
            source (`Any`): What `datasets.load_dataset` reads: a path, a folder, or a list of these; or rows, as a
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

    def settle(self) -> None:
        """A checkpoint is about to be written: what waits for the next batch settles now."""
        self.step.settle()

    def finish(self) -> None:
        """Training ends: what waits for the next batch settles now."""
        self.step.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the session, buffer apart; see [`Step.state_dict`]."""
        return {
            **self.step.state_dict(),
            "metrics": self.metrics,
            "settings": self.config.to_dict(),
            "totals": self.totals.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], of_ranks: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Take what `state_dict` gave; see [`Step.load_state_dict`]."""
        self.step.load_state_dict(state, of_ranks)
        self.totals.metrics = dict(state["metrics"])

    def forget_pending(self) -> None:
        """Forget what the last generation batch left."""
        self.step.carry = StepCarry()

    def log_ratios(self) -> None:
        """Add the importance ratios seen in the loss to the metrics."""
        step, loss = self.step, self.components.loss
        stats, means = step.supply.stats, (loss.gates.means, loss.bounds.means, step.tap.fresh.means)
        of_stats, *of_means = fetch_sums([stats.take(), *(one.take() for one in means)])
        measured = stats.metrics(of_stats)
        self._mask_watch(measured)
        self.reporting.record(measured | Means.metrics({name: sums for one in of_means for name, sums in one.items()}))

    def notify(self, hook: str) -> None:
        """Call the plugins' `trl_replay_attached` or `trl_replay_detached`."""
        self.components.hooks.call(hook, self.update, session=self)


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


def _what_masks(settings: Settings) -> str:
    """Describe what masks replayed rows where nothing is left of them, and the remedy; empty where that is meant."""
    correction = settings.strategies.get("correction")
    if correction is None or correction.label == "imitation":
        return ""
    return (
        f'replay_correction={correction.label!r} ({correction.taken}). Set replay_correction="sequence_mask" (0.5 '
        'to 2) instead of narrower limits, or "ratio", the default.'
    )
