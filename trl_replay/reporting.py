"""What is told of a session: the metrics of its batches, and a summary of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import compat
from .advice.logged import DRY_RUN, JUDGED_BY
from .advice.outcome import outcome_of
from .advice.rules import GENERATIONS, of_caps, what_to_change
from .base.sizes import counted
from .batch.group_view import dead_by_function
from .data.counters import log as put_into_log
from .data.counters import metrics, own_metrics
from .data.types import Context
from .generation.judge import doubt_of
from .protocols import Scope
from .setup.components import Components
from .setup.settings import Settings


class Reporting:
    """The metrics and the summary of one session.

    Args:
        trainer (`Callable`): Gives the trainer, None if it no longer exists.
        components ([`Components`]): What the session is made of.
    """

    def __init__(self, trainer: Callable[[], Any], components: Components) -> None:
        self._trainer = trainer
        self._components = components
        self._totals = components.buffer.totals

    def record(self, values: Mapping[str, float]) -> None:
        """Put values into `metrics`, and those that are to be logged where the trainer's log averages them."""
        self._totals.metrics = {**self._totals.metrics, **values}
        put_into_log(values, compat.training_metrics(self._trainer()))

    def log_groups(
        self, total: Mapping[str, float], scored: torch.Tensor, context: Context, further: Mapping[str, float]
    ) -> None:
        """Begin the metrics of a batch anew: those of its groups, and those of plugins.

        Args:
            total (`Mapping[str, float]`): Its counters, summed over ranks.
            scored (`(rows of all processes, functions)`): Raw rewards, NaN where None.
            context ([`Context`]): What plugins see.
            further (`Mapping[str, float]`): Further metrics, by key.
        """
        components, so_far = self._components, self._totals.of_all_ranks
        config = components.settings.config
        size = components.num_generations
        rollouts = so_far["generated"] * size + so_far["paused_rows"]
        self._totals.metrics = {}
        self.record(metrics(total, size, components.success.least is not None))
        self.record({"replay/rollouts": rollouts, **further})
        if config.replay_dry_run:
            self.record({DRY_RUN: 1.0})
        if config.replay_reward:
            self.record({f"{JUDGED_BY}/{config.replay_reward}": 1.0})
        trainer = self._trainer()
        self.record(dead_by_function(scored, trainer.reward_func_names, compat.reward_setup(trainer).weights, size))
        for result in components.hooks.call("metrics", context.update, context=context):
            self.record(own_metrics(result, self._totals.metrics))

    def explain(self, replayed: str, costs: Sequence[str] = ()) -> str:
        """Return the summary of a run.

        Args:
            replayed (`str`): What was replayed.
            costs (`Sequence[str]`): What further updates cost.
        """
        components, settings, trainer = self._components, self._components.settings, self._trainer()
        config, totals = settings.config, self._totals
        log = [] if trainer is None else trainer.state.log_history
        came_to = outcome_of(log, config.replay_reward)
        lines = [f"outcome: {came_to}"] if came_to else []
        lines.append(replayed)
        if components.buffer.capacity and components.processes > 1:
            lines.append(_scope_in_words(settings, components.scope, components.processes))
        if settings.plugins:
            lines.append(_plugins_in_words(settings))
        doubt = doubt_of(settings, components.success, trainer)
        lines += [doubt] if doubt else []
        lines += costs
        told = {**config.to_dict(), GENERATIONS: components.num_generations}
        caps = of_caps(totals.held_back(), int(totals.counters["replaced"]), told)
        lines += what_to_change(log, told, caps) if log else []
        return "\n".join(lines)


def _plugins_in_words(settings: Settings) -> str:
    """Whose hooks take part, with the arguments that this run gives them."""
    told = []
    for plugin in settings.plugins:
        arguments = ", ".join(f"{name}={value!r}" for name, value in plugin.arguments.items())
        told.append(f"{plugin.name}({arguments})" if arguments else plugin.name)
    preset = settings.config.replay_preset
    origin = f" (preset {preset!r})" if preset else ""
    return f"plugins that take part{origin}: {', '.join(told)}"


def _scope_in_words(settings: Settings, scope: Scope, ranks: int) -> str:
    """Describe which processes share a buffer, why, and how much it holds."""
    why = f", chosen by replay_scope='auto': {settings.chosen_scope}" if settings.chosen_scope else ""
    size = settings.config.replay_buffer_size
    each = counted(size, "group")
    replicated = scope.division.replicated
    room = f"{each} in all, on every process" if replicated else f"{each} a process, {size * ranks} in all"
    return f"scope {settings.label('scope')}{why}; {room}"
