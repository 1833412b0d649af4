"""The session of an asynchronous trainer, and what it refuses before training."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trl_replay import compat
from trl_replay.base.files import counted
from trl_replay.base.progress import KeptErrors
from trl_replay.base.validation import AUTO
from trl_replay.buffer import Newcomer
from trl_replay.data.counters import Tally
from trl_replay.data.prompt_table import PromptTable
from trl_replay.data.types import FROM_FILE, Entry
from trl_replay.distributed.communicator import roll_call_of, run_on_all_ranks
from trl_replay.errors import AttachError, ReplayError
from trl_replay.extras.files.session_files import Files
from trl_replay.reporting import Reporting
from trl_replay.serialization.groups import pack
from trl_replay.session import NOT_ATTACHED
from trl_replay.setup.assembly import assemble
from trl_replay.setup.config import ReplayConfig
from trl_replay.setup.preflight import refuse, retires_never
from trl_replay.setup.settings import Components, OfLoss, Settings
from trl_replay.strategies.scopes import SCOPES

from . import compat as asynchronous
from .groups import SampleReader, TrainerView, sample_of_row
from .queue import ReplayQueue
from .samples import HELD

WITHIN_THE_LOSS = "reads log-probs of the policy that is trained, which are not known where samples are handed out"
CORRECTIONS = ("ratio", "per")
"""Corrections that need no log-probs of the present policy: the loss's own ratio, and weights of rows by priority."""
HOOKS = {
    "trl_replay_inputs": "the rollout worker chooses prompts by itself",
    "trl_replay_advantages": "the rollout worker computes advantages before samples are queued",
    "trl_replay_select": "dead groups are dropped as they arrive, before there is a batch to select from",
    "trl_replay_mix": "stored groups are replayed whole",
    "trl_replay_correct": f"it {WITHIN_THE_LOSS}",
    "trl_replay_plan": "there is no batch to plan: samples are handed out one by one",
}
"""Hooks that nothing would call."""


def queue_preflight(trainer: Any, settings: Settings, components: Components) -> None:
    """Refuse with all reasons at once. Plugins are asked for theirs if there is none of our own: one made for the
    other trainer reads what this one lacks.

    Raises:
        RefusedError: There is at least one reason.
    """
    reasons = [*_of_settings(settings), *_of_strategies(settings, components), *_of_plugins(settings)]
    reasons += retires_never(settings, components.num_generations)
    refuse(reasons, trainer, settings, components, ask=not reasons)


def _of_plugins(settings: Settings) -> Iterator[str]:
    for plugin in settings.plugins:
        for hook, reason in HOOKS.items():
            if hook in plugin.hooks:
                yield f"the plugin {plugin.name!r} has {hook}, and {reason}: leave it out of replay_plugins"


def _of_settings(settings: Settings) -> Iterator[str]:
    config = settings.config
    known: dict[str, tuple[Any, tuple[Any, ...], str]] = {
        "replay_advantages": (
            config.replay_advantages,
            ("auto", "stored"),
            "computes advantages of mixed groups, and stored groups are replayed whole here: use 'stored'",
        ),
        "replay_refill": (
            config.replay_refill,
            (None,),
            (
                "generates again, and the rollout worker goes on by itself: dropping dead groups is dynamic sampling "
                "here; leave it out"
            ),
        ),
        "replay_iterations": (
            config.replay_iterations,
            ("same",),
            "draws groups for further iterations, and this trainer trains on each sample once: use 'same'",
        ),
        "replay_kl": (
            config.replay_kl,
            ("all",),
            "chooses rows whose KL term counts, and this trainer's loss has none: use 'all'",
        ),
        "replay_record": (
            config.replay_record,
            ("auto", "loss"),
            "computes log-probs, and samples carry those of the policy that generated them: use 'auto'",
        ),
        "replay_unfilled": (
            config.replay_unfilled,
            ("keep", "exclude"),
            "treats dead groups of a batch, and here they are dropped as with 'exclude': use that, or leave it out",
        ),
        "replay_max_weight": (config.replay_max_weight, (None,), f"{WITHIN_THE_LOSS}: leave it out"),
        "replay_task_columns": (
            config.replay_task_columns,
            (None, []),
            (
                "tells tasks apart by columns of the dataset, and samples carry their prompt alone: use [], or leave "
                "it out"
            ),
        ),
    }
    for name, (value, usable, reason) in known.items():
        if value not in usable:
            yield f"{name}={value!r} {reason}"


def _of_strategies(settings: Settings, components: Components) -> Iterator[str]:
    if components.mixes_rows:
        yield (
            f"replay_mixer={settings.label('mixer')!r} puts stored rows beside fresh ones, and a group's samples are "
            "handed out one by one: use replay_mixer='whole'"
        )
    if settings.label("selector") != "zero_std":
        yield (
            f"replay_selector={settings.label('selector')!r} chooses among the groups of a batch, and samples are "
            "handed out one by one: use replay_selector='zero_std'"
        )
    if settings.label("correction") not in CORRECTIONS:
        yield (
            f"replay_correction={settings.label('correction')!r} {WITHIN_THE_LOSS}: use "
            f"{' or '.join(f'replay_correction={name!r}' for name in CORRECTIONS)}"
        )
    scope = settings.config.replay_scope
    if scope != "process" and scope in SCOPES:
        yield (
            f"replay_scope={scope!r} shares groups among processes, and the main process alone reads the queue: use "
            "replay_scope='auto'"
        )


class AsyncSession:
    """One attachment to an AsyncGRPOTrainer. Made by `attach`.

    Attributes:
        trainer ([`TrainerView`]): The trainer, with the names of a GRPOTrainer. Held weakly.
        queue ([`ReplayQueue`], *optional*): In the place of the trainer's; on the main process only.
        components, buffer, totals, roll_call, reporting, files: As of a [`Session`].
        detached (`bool`): After `detach`: buffer, metrics and `explain()` can still be read.
    """

    enabled = True
    scoring = False
    seam = (compat.SAVE, compat.LOAD)

    def __init__(self, view: TrainerView, settings: Settings, components: Components) -> None:
        self.trainer = view
        self.components = components
        self.buffer = components.buffer
        self.totals = components.buffer.totals
        self.totals.unit = "updates"
        self.detached = False
        self.reporting = Reporting(weakref.ref(view), components)
        self.files = Files(self)
        alone = TrainerView(view.own, ["reward"])  # the main process alone knows the worker's
        self.roll_call = roll_call_of(alone, settings, components.scope)
        self.queue: ReplayQueue | None = None
        if view.accelerator.is_main_process:
            reading = SampleReader(
                view.reward_func_names, self.buffer.table.counting, components.num_generations, components.tasks
            )
            self.queue = ReplayQueue(getattr(view, asynchronous.QUEUE), view, components, reading)
        else:
            self.buffer.warmed = True  # nothing fills its buffer

    def __repr__(self) -> str:
        return f"<AsyncSession: {self.reporting.in_one_line()}>"

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
        """Those of the groups that came last."""
        return self.totals.metrics

    @property
    def update(self) -> int:
        """Optimizer updates since attach."""
        return self.buffer.clock.update

    @property
    def prompts(self) -> PromptTable | None:
        """None: the worker chooses prompts."""
        return None

    @property
    def plugins(self) -> list[str]:
        """Names of the plugins whose hooks take part."""
        return [plugin.name for plugin in self.settings.plugins]

    def begin_training(self, updates: int) -> None:
        """Training of so many updates begins, also after one that was interrupted: what that had fetched is
        forgotten."""
        self.finish()
        self.roll_call.training = False
        self.buffer.clock.planned = updates
        self.roll_call.for_training()
        if self.config.replay_warm_start is not None:
            run_on_all_ranks(self.files.warm_start, ReplayError)

    def before_update(self) -> None:
        """The optimizer is about to step."""

    def updated(self) -> None:
        """The optimizer has made an update: the samples that it trained on are done."""
        self.buffer.clock.update += 1
        if self.queue is not None:
            self.queue.trained()

    def log_ratios(self) -> None:
        """At the end of an update: the metrics of the groups that came since the last."""
        if self.queue is None:
            return
        self.queue.note_version()
        window, scored = self.queue.window, self.queue.scored
        if not scored:
            return
        self.queue.window, self.queue.scored = Counter(), []
        self.totals.batches += 1
        held = {"size": len(self.buffer), "tasks": self.buffer.table.tasks, "bytes": self.buffer.nbytes}
        rewards = torch.from_numpy(np.concatenate(scored))
        self.reporting.log_groups({**window, **held}, rewards, None, {})

    def settle(self) -> None:
        """Settle nothing: no candidates wait."""

    def finish(self) -> None:
        """Training has ended: samples that the trainer has fetched are not trained on."""
        if self.queue is not None:
            self.queue.end()

    def clear(self) -> None:
        """Forget all groups, those whose samples are coming or wait here included. Call it from a callback where a
        reward function has changed, say."""
        self.buffer.clear()
        if self.queue is not None:
            self.queue.clear()

    def mark_detached(self) -> None:
        """Detached: samples pass as they come."""
        self.detached = True
        if self.queue is not None:
            self.queue.detached = True

    def put_on(self, trainer: Any) -> None:
        """Put the queue in the place of the trainer's."""
        if self.queue is not None:
            setattr(trainer, asynchronous.QUEUE, self.queue)

    def take_off(self, trainer: Any) -> None:
        """Give the trainer its queue back."""
        if self.queue is not None:
            setattr(trainer, asynchronous.QUEUE, self.queue.inner)

    def notify(self, hook: str) -> None:
        """Call the plugins' `trl_replay_attached` or `trl_replay_detached`."""
        self.components.hooks.call(hook, self.update, session=self)

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which a checkpoint is written, and samples that are saved count as trained."""
        return nullcontext() if self.queue is None else self.queue.counted_as_trained()

    def add(self, source: Any, incomplete: str = "refuse", rescore: bool = False) -> int:
        """Add groups that another session exported: see [`Session.add`]. On the main process only; the others add
        none."""
        if self.detached:
            raise ReplayError(NOT_ATTACHED)
        return 0 if self.queue is None else self.files.add(source, incomplete, rescore)

    def store(self, rows: Sequence[Any], advantages: Sequence[float], tally: Tally) -> None:
        """A group of another session's export enters the buffer.

        Args:
            rows (`Sequence`): With token ids, log-probs, rewards, and a task.
            advantages (`Sequence[float]`): Of each.
            tally ([`Tally`]): Counts what becomes of it.
        """
        assert self.queue is not None
        names = self.trainer.reward_func_names
        samples = [sample_of_row(row, value, names) for row, value in zip(rows, advantages, strict=True)]
        reading = self.queue.reading
        if not reading.are_live(samples):
            tally.refuse(1, "its rewards do not differ")
            return
        payload = reading.payload(samples)
        view = replace(
            reading.view(samples, self.update - 1, payload),
            prompt=np.array([rows[0].task]),
            masked=np.array([[row.masked for row in rows]]),
            origin=np.array([FROM_FILE]),
        )
        (serial,) = self.buffer.take_serials(1)
        packed = pack(payload)
        newcomer = Newcomer(serial, len(packed.data), HELD, payload=packed)
        self.buffer.extend(view, [newcomer], tally)

    def entry(self, serial: int) -> Entry:
        """Read an entry of the buffer: see [`Session.entry`]."""
        return self.files.entry(serial)

    def export(self, path: str | Path) -> Path:
        """Write what this process holds to a Parquet file: see [`Session.export`]."""
        return Path(path) if self.queue is None else self.files.export(path)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, with the samples that are not trained on yet; JSON can hold it."""
        return {
            "prompts": None,
            "metrics": self.metrics,
            "settings": self.config.to_dict(),
            "totals": self.totals.state_dict(),
            "queue": None if self.queue is None else self.queue.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], of_ranks: Any = None) -> None:
        """Take what `state_dict` gave."""
        self.totals.metrics = dict(state["metrics"])
        if self.queue is not None and state.get("queue"):
            self.queue.load_state_dict(state["queue"])

    def forget_pending(self) -> None:
        """Forget nothing: no candidates wait."""

    def explain(self) -> str:
        """Describe what was replayed so far, why not more was, and what to change."""
        if self.queue is None:
            return self.reporting.explain("replay: the main process reads the queue; ask its session")
        told = self.totals.explain_without_buffer()
        if self.buffer.capacity:
            told = self.totals.explain(len(self.buffer), self.config.replay_dry_run)
        dropped, waited = counted(self.queue.dropped, "dead group"), counted(self.queue.waited, "group")
        return self.reporting.explain(
            f"{told}\nqueue: {dropped} dropped, {waited} replayed while the worker was waited for"
        )


def make_session(trainer: Any, settings: Settings) -> AsyncSession | None:
    """Build the session of an asynchronous trainer, which is only read; None for other trainers.

    Raises:
        ReplayError: The settings can't be used with it, or it is training already.
    """
    if not asynchronous.is_asynchronous(trainer):
        return None
    asynchronous.check_asynchronous(trainer)
    if settings.config.replay_scope == AUTO:
        settings = settings.with_scope("process", "the main process reads the queue")
    main = trainer.accelerator.is_main_process
    names = asynchronous.worker_rewards(trainer) if main else [settings.config.replay_reward or "reward"]
    view = TrainerView(trainer, names)
    components = assemble(view, settings, OfLoss())
    components.processes = 1  # no process decides with another
    components.errors = KeptErrors(alone=True)
    queue_preflight(trainer, settings, components)
    if trainer.is_in_train:
        raise AttachError("Attach to an AsyncGRPOTrainer before train(): its dataset has taken its queue by now.")
    return AsyncSession(view, settings, components)
