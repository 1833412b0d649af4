"""The session of an asynchronous trainer: the same buffer, strategies and metrics, fed by its queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from .. import compat
from ..base.progress import KeptErrors
from ..base.sizes import counted
from ..batch.stored import logps_dtype
from ..distributed.roll_call import roll_call_of
from ..session import TAG, Session
from ..setup.assembly import assemble
from ..setup.components import Components
from ..setup.queue_preflight import queue_preflight
from ..setup.settings import Settings
from .groups import Reading
from .queue import ReplayQueue
from .view import TrainerView


class AsyncSession(Session):
    """One attachment to an AsyncGRPOTrainer. Made by `attach`.

    Attributes:
        view ([`TrainerView`]): The trainer, with the names of a GRPOTrainer.
        queue ([`ReplayQueue`], *optional*): In the place of the trainer's; on the main process only.
    """

    def __init__(self, view: TrainerView, settings: Settings, components: Components) -> None:
        super().__init__(view, settings, components)
        self.view = view
        self.totals.unit = "updates"
        alone = TrainerView(view.own, ["reward"])  # the main process alone knows the worker's
        self.roll_call = roll_call_of(alone, settings, components.scope)
        self.queue: ReplayQueue | None = None
        if view.accelerator.is_main_process:
            reading = Reading(
                view.reward_func_names,
                components.buffer.table.counting,
                components.num_generations,
                components.tasks,
                logps_dtype(components.fields),
            )
            self.queue = ReplayQueue(getattr(view, compat.QUEUE), view, self, reading)
        else:  # nothing fills its buffer
            self.carry.warmed = True
            self.buffer.adder = lambda *given: 0

    @property
    def trainer(self) -> Any:
        """The trainer, with the names of a GRPOTrainer. Held weakly.

        Raises:
            ReplayError: It no longer exists.
        """
        assert self.view.own is not None
        return self.view

    def meet(self) -> None:
        """When training begins, also after one that was interrupted: what that had fetched is forgotten."""
        self.finish()
        super().meet()

    def updated(self) -> None:
        """The optimizer has made an update: the samples that it trained on are done."""
        super().updated()
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
        self._log_groups({**window, **held}, rewards, self.buffer.local_context(), {})
        if window["replaced"] and not self.config.replay_dry_run:
            compat.tag_model(self.view.own, TAG)

    def finish(self) -> None:
        """Training has ended: samples that the trainer has fetched are not trained on."""
        if self.queue is not None:
            self.queue.end()

    def pause(self) -> None:
        """From the next sample on, all pass as they come; what is stored stays."""
        self.paused = True

    def saving(self) -> Any:
        """Hold while a checkpoint is written."""
        return nullcontext() if self.queue is None else self.queue.counted_as_trained()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, with the samples that are not trained on yet."""
        return {**super().state_dict(), "queue": None if self.queue is None else self.queue.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        super().load_state_dict(state)
        if self.queue is not None and state.get("queue"):
            self.queue.load_state_dict(state["queue"])

    def _explain_replay(self) -> str:
        if self.queue is None:
            return "replay: the main process reads the queue; ask its session"
        told = super()._explain_replay()
        dropped, waited = counted(self.queue.dropped, "dead group"), counted(self.queue.waited, "group")
        return f"{told}\nqueue: {dropped} dropped, {waited} replayed while the worker was waited for"


def make_session(trainer: Any, settings: Settings) -> AsyncSession:
    """Build the session of an asynchronous trainer, which is only read.

    Raises:
        ReplayError: The settings can't be used with it.
    """
    compat.check_asynchronous(trainer)
    if settings.config.replay_scope == "auto":
        settings = settings.with_scope("process", "the main process reads the queue")
    main = trainer.accelerator.is_main_process
    names = compat.worker_rewards(trainer) if main else [settings.config.replay_reward or "reward"]
    view = TrainerView(trainer, names)
    components = assemble(view, settings)
    components.processes = 1  # no process decides with another
    components.errors = KeptErrors(alone=True)
    queue_preflight(trainer, settings, components)
    return AsyncSession(view, settings, components)
