"""What is told of a session: the metrics of its batches, and a summary of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from . import compat
from .base.sizes import counted
from .batch.group_view import dead_by_function
from .data.counters import DRY_RUN, JUDGED_BY, metrics, own_metrics
from .data.counters import log as put_into_log
from .data.types import Context
from .generation.judge import doubt_of
from .protocols import Scope
from .setup.components import Components
from .setup.settings import Settings

TOLD = 1e-3
"""A token's noise in nats from which on it is told."""


class Run(NamedTuple):
    """What advice goes by.

    Attributes:
        log (`list`): The trainer's `log_history`.
        settings (`dict`): Of [`ReplayConfig`], with `num_generations`.
        held_back (`dict`): By setting, slots that stored groups could have filled without it.
        replaced (`int`): Groups that were replaced.
    """

    log: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    held_back: Mapping[str, int]
    replaced: int


class Advisor(Protocol):
    """Whoever knows what a log tells and what to change; given at attach."""

    def frame(self, run: Run) -> tuple[list[str], list[str]]:
        """Return the lines before and after the summary of a run."""

    def remedy_for_masks(self, settings: Mapping[str, Any]) -> str:
        """Return what to change where all that is replayed is masked; nothing where the correction means to."""


class Reporting:
    """The metrics and the summary of one session.

    Args:
        trainer (`Callable`): Gives the trainer, None if it no longer exists.
        components ([`Components`]): What the session is made of.
        advisor ([`Advisor`]): Says what the run came to and what to change.
    """

    def __init__(self, trainer: Callable[[], Any], components: Components, advisor: Advisor) -> None:
        self._trainer = trainer
        self._components = components
        self._advisor = advisor
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

    def explain(self, replayed: str) -> str:
        """Return the summary of a run.

        Args:
            replayed (`str`): What was replayed.
        """
        components, settings, trainer = self._components, self._components.settings, self._trainer()
        config, totals = settings.config, self._totals
        run = Run(
            [] if trainer is None else trainer.state.log_history,
            {**config.to_dict(), "num_generations": components.num_generations},
            totals.held_back(),
            int(totals.counters["replaced"]),
        )
        outcome, advice = self._advisor.frame(run)
        lines = [*outcome, replayed]
        if components.buffer.capacity and components.processes > 1:
            lines.append(_scope_in_words(settings, components.scope, components.processes))
        if settings.plugins:
            lines.append(_plugins_in_words(settings))
        noise = components.loss.bounds.noise
        if noise is not None and noise.token_mean >= TOLD:
            lines.append(f"noise: {noise}; so much of replay/drift_mean is no staleness")
        doubt = doubt_of(settings, components.success, trainer)
        if not doubt and components.success.is_graded:
            doubt = f"{components.success.doubt()}; set {components.success.remedy}"
        lines += [doubt] if doubt else []
        return "\n".join([*lines, *advice])


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
    return f"scope {settings.label('scope')}{why}; {counted(size, 'group')} a process, {size * ranks} in all"
