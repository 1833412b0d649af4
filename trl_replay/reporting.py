"""What is told of a session: the metrics of its batches, and a summary of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from . import compat
from .base.files import counted
from .base.validation import Named
from .batch.groups import dead_by_function
from .built_in import ask_built_in
from .data.counters import DRY_RUN, JUDGED_BY, about, drop_zeros, metrics, own_metrics
from .data.counters import log as put_into_log
from .data.types import Groups
from .generation.rounds import doubt_of
from .setup.config import ReplayConfig
from .setup.settings import Components, Settings

TOLD = 1e-3
"""A token's noise in nats from which on it is told."""
DEFAULTS = ReplayConfig()

Told: TypeAlias = tuple[str, Mapping[str, str], str]
"""What a run came to, what is wrong for certain, by a name, and what to change: a line each, empty where nothing is
known."""
Advisor: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], Told]
"""Reads the trainer's `log_history`."""


class Reporting:
    """The metrics and the summary of one session.

    Args:
        trainer (`Callable`): Gives the trainer, None if it no longer exists.
        components ([`Components`]): What the session is made of.
    """

    def __init__(self, trainer: Callable[[], Any], components: Components) -> None:
        self._trainer = trainer
        self._components = components
        self.advise: Advisor = ask_built_in("make_advisor") or (lambda log: ("", {}, ""))
        self._totals = components.buffer.totals

    def record(self, values: Mapping[str, float]) -> None:
        """Put values into `metrics`, and those that are to be logged where the trainer's log averages them."""
        self._totals.metrics = {**self._totals.metrics, **values}
        config, judged = self._components.settings.config, self._components.success.least is not None
        logged = {key: value for key, value in values.items() if is_logged(key, values, config, judged)}
        put_into_log(logged, compat.training_metrics(self._trainer()))

    def about_to_log(self) -> None:
        """The trainer writes its log: losses and refusals that are 0 are left out."""
        drop_zeros(compat.training_metrics(self._trainer()))

    def log_groups(
        self, total: Mapping[str, float], scored: torch.Tensor, fresh: Groups | None, further: Mapping[str, float]
    ) -> None:
        """Begin the metrics of a batch anew: those of its groups, and those of plugins.

        Args:
            total (`Mapping[str, float]`): Its counters, summed over ranks.
            scored (`(rows of all processes, functions)`): Raw rewards, NaN where None.
            fresh ([`Groups`], *optional*): What was generated, for plugins to see.
            further (`Mapping[str, float]`): Further metrics, by key.
        """
        components, so_far = self._components, self._totals.of_all_ranks
        config = components.settings.config
        size = components.num_generations
        rollouts = so_far["generated"] * size
        self._totals.metrics = {}
        self.record(metrics(total, size, components.success.least is not None))
        self.record({"replay/rollouts": rollouts, **further})
        if config.replay_dry_run:
            self.record({DRY_RUN: 1.0})
        if config.replay_reward:
            self.record({f"{JUDGED_BY}/{config.replay_reward}": 1.0})
        trainer = self._trainer()
        self.record(dead_by_function(scored, trainer.reward_func_names, compat.reward_setup(trainer).weights, size))
        if components.hooks.has_plugin_for("metrics"):
            context = replace(components.buffer.context(local=True), fresh=fresh)
            for result in components.hooks.call("metrics", context.update, context=context):
                self.record(own_metrics(result, self._totals.metrics))

    def log_iteration(self, total: Mapping[str, float]) -> None:
        """Log the share of the groups of a further update that were drawn anew.

        Args:
            total (`Mapping[str, float]`): Its counters, summed over ranks.
        """
        self.record({"replay/redrawn_fraction": total["replaced"] / max(total["groups"], 1)})

    def begins(self) -> str:
        """Return the line with which a run begins."""
        components, buffer = self._components, self._components.buffer
        config, processes = components.settings.config, components.processes
        parts = [config.replay_preset] if config.replay_preset else []
        each = f"buffer {processes} × " if processes > 1 else "buffer "
        parts.append(f"{each}{counted(buffer.capacity, 'group')}" if buffer.capacity else "no buffer")
        parts += [f"{counted(len(buffer), 'group')} in it"] if len(buffer) else []
        parts += ["dry run"] if config.replay_dry_run else []
        return f"replay: {', '.join(parts)}"

    def in_one_line(self) -> str:
        """Return what the buffer holds, and how many groups were replaced."""
        count, buffer = self._totals.counters, self._components.buffer
        drawn = f", {count['iterated']:.0f} drawn in further updates" if count["iterated"] else ""
        dry = " (dry run)" if self._components.settings.config.replay_dry_run else ""
        held = f"{len(buffer)} of {counted(buffer.capacity, 'group')}"
        return f"{held}, {count['replaced']:.0f} of {count['groups']:.0f} replaced{dry}{drawn}"

    def explain(self, replayed: str) -> str:
        """Return the summary of a run.

        Args:
            replayed (`str`): What was replayed.
        """
        components, settings, trainer = self._components, self._components.settings, self._trainer()
        outcome, alarms, change = self.advise([] if trainer is None else trainer.state.log_history)
        lines = [outcome, replayed]
        if components.buffer.capacity and components.processes > 1:
            lines.append(_scope_in_words(settings, components.processes))
        if settings.plugins:
            lines.append(_plugins_in_words(settings))
        noise = components.loss.bounds.noise
        if noise is not None and noise.token_mean >= TOLD:
            lines.append(f"noise: {noise}; so much of replay/drift_mean is no staleness")
        doubt = doubt_of(settings, components.success, trainer)
        if not doubt and components.success.is_graded:
            doubt = f"{components.success.doubt()}; set {components.success.remedy}"
        return "\n".join(filter(None, [*lines, doubt, *alarms.values(), change]))


def is_logged(key: str, values: Mapping[str, float], config: ReplayConfig, judged: bool) -> bool:
    """Tell whether the trainer's log has a metric; `session.metrics` has all.

    Args:
        key (`str`): Its name.
        values (`Mapping[str, float]`): With it, those that are recorded beside it.
        config ([`ReplayConfig`]): The settings in force.
        judged (`bool`): Whether it is known what passes.
    """
    metric = about(key)
    where = metric.where
    if where.startswith("replay_"):
        return values[key] >= metric.least or getattr(config, where) != getattr(DEFAULTS, where)
    told = {"in doubt": not judged, "never": False}
    return where in values if where.startswith("replay/") else told.get(where, True)


def _plugins_in_words(settings: Settings) -> str:
    """Whose hooks take part, with the arguments that this run gives them."""
    told = [str(Named(plugin.name, plugin.arguments)) for plugin in settings.plugins]
    preset = settings.config.replay_preset
    origin = f" (preset {preset!r})" if preset else ""
    return f"plugins that take part{origin}: {', '.join(told)}"


def _scope_in_words(settings: Settings, ranks: int) -> str:
    """Describe which processes share a buffer, why, and how much it holds."""
    why = f", chosen by replay_scope='auto': {settings.chosen_scope}" if settings.chosen_scope else ""
    size = settings.config.replay_buffer_size
    return f"scope {settings.config.replay_scope}{why}; {counted(size, 'group')} a process, {size * ranks} in all"
