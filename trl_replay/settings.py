"""The settings of a session: one frozen value, made once at attach, which everything below takes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from . import compat
from .buffer.rate_limiter import RateLimits
from .buffer.replay_buffer import Limits
from .config import RULES, ReplayConfig
from .fields import FieldSpec
from .registry import BUILTIN, PLUGIN_ARGUMENTS, Plugin, Registry, Strategy, registry
from .specs import Kind
from .strategies.scope_choice import choose_scope
from .validation import AUTO, STRATEGY_KINDS, unusable

WITHOUT_BUFFER = ("trl_replay_advantages", "trl_replay_inputs", "trl_replay_plan")
"""Hooks of plugins that need no buffer."""


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """Generating again for dead groups.

    Attributes:
        rounds (`int`): How often, at most.
        prompts (`str`): For what: `"new"` prompts, or the `"same"` ones.
        until (`float`): Share of live groups at which no further round is begun.
    """

    rounds: int
    prompts: str
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings in force, a preset's included, with every name looked up.

    Attributes:
        config ([`ReplayConfig`]): The same as users and plugins read it.
        strategies (`Mapping[str, Strategy]`): By kind; none where replay is off.
        preset (`str`, *optional*): Its name, if one is named.
        plugins (`tuple[Plugin, ...]`): Those that take part.
        fields (`Sequence[FieldSpec]`): The batch keys that these declare.
        chosen_scope (`str`): Why this scope, where `replay_scope="auto"` chose it; empty where the user named it.
        capacity (`int`): Groups that the buffer keeps, before it is multiplied by the processes that share it.
        max_bytes (`int`, *optional*): Bytes that it keeps, likewise.
        logps_dtype (`str`): How stored log-probs are kept.
        limits ([`Limits`]): Which entries are eligible.
        rate_limits ([`RateLimits`]): How much is replayed.
        dynamic_sampling ([`DynamicSampling`]): Generating again for dead groups.
        weight, max_weight: Of [`Gates`].
        task_columns (`list[str]`, *optional*): Columns that tell tasks apart beside the prompt, sorted; None is all.
        reward (`str`, *optional*): The reward function that counts; None for the weighted sum.
        pass_reward (`float`): A completion passes with a reward of at least this.
        retire_passes (`int`, *optional*): Passing completions of a fresh group that solve its prompt.
        advantages (`str`): Advantages of a slot with stored rows.
        record (`str`): Where log-probs of fresh groups come from.
        unfilled (`str`): What becomes of dead groups that nothing fills.
        kl (`str`): Rows whose KL term counts.
        iterates (`bool`): Iterations 2 … `num_iterations` train on groups drawn anew.
        dry_run (`bool`): Decide and measure, but exchange nothing.
        seed (`int`, *optional*): Of the private generator, where the user gave one.
        goes_on_empty (`bool`): With an empty buffer, if a checkpoint's does not fit.
        warm_start (`str`, *optional*): A file that fills the buffer when training begins.
        warm_start_short (`str`): What to do with its groups of too few rows.
    """

    config: ReplayConfig
    strategies: Mapping[Kind, Strategy]
    preset: str | None
    plugins: tuple[Plugin, ...]
    fields: Sequence[FieldSpec]
    chosen_scope: str
    capacity: int
    max_bytes: int | None
    logps_dtype: str
    limits: Limits
    rate_limits: RateLimits
    dynamic_sampling: DynamicSampling
    weight: float
    max_weight: float | None
    task_columns: list[str] | None
    reward: str | None
    pass_reward: float
    retire_passes: int | None
    advantages: str
    record: str
    unfilled: str
    kl: str
    iterates: bool
    dry_run: bool
    seed: int | None
    goes_on_empty: bool
    warm_start: str | None
    warm_start_short: str

    @property
    def acts(self) -> bool:
        """Tells whether there is a buffer, or what needs none: generating again, something to do about dead groups, or
        a plugin that shapes advantages or chooses prompts."""
        if not self.strategies:
            return False
        if self.capacity or self.dynamic_sampling.rounds or self.unfilled != "keep" or self.kl != "all":
            return True
        return any(hook in plugin.hooks for plugin in self.plugins for hook in WITHOUT_BUFFER)

    def label(self, kind: Kind) -> str:
        """The label of a kind's strategy."""
        return self.strategies[kind].label

    @property
    def chooses_prompts(self) -> bool:
        """Tells whether prompts are chosen here: for dead groups again, or by a plugin; not in a dry run."""
        asks = any("trl_replay_inputs" in plugin.hooks for plugin in self.plugins)
        return not self.dry_run and (self.dynamic_sampling.rounds > 0 or asks)

    def equal_on_ranks(self, one_buffer: bool, seed: int) -> dict[str, Any]:
        """Collects what must be equal on all ranks, by name, as JSON holds it. Seeds may differ, and the bytes that a
        buffer keeps, where ranks do not share or choose by them.

        Args:
            one_buffer (`bool`): Whether ranks share a buffer.
            seed (`int`): In force: `replay_seed`, else the trainer's.
        """
        if not self.acts:
            return {"use_replay": self.config.use_replay, "replay_buffer_size": self.capacity}
        equal = {name: value for name, value in self.config.to_dict().items() if RULES[name].ranks == "equal"}
        equal |= {f"replay_{kind}": strategy.origin for kind, strategy in self.strategies.items()}
        equal["replay_plugins"] = [f"{plugin.name} ({plugin.distribution})" for plugin in self.plugins]
        equal["replay_warm_start"] = "a file" if self.warm_start else None
        equal["batch keys of plugins"] = [repr(field) for field in self.fields]
        equal["trl_replay"] = import_module(__package__).__version__
        if one_buffer:
            equal["replay_max_bytes"] = self.max_bytes
        if one_buffer or self.chooses_prompts:
            equal["replay_seed (else the trainer's)"] = seed
        return equal

    def with_scope(self, name: str, reason: str) -> Settings:
        """The same with a built-in scope that nobody named, and why this one."""
        config = copy.copy(self.config)
        vars(config)["replay_scope"] = name  # in force, and to read only
        scope = registry().resolve("scope", name)
        return replace(self, config=config, strategies={**self.strategies, "scope": scope}, chosen_scope=reason)


def resolve(config: ReplayConfig) -> Settings:
    """Looks up every name of a configuration, once.

    Args:
        config ([`ReplayConfig`]): In force.

    Raises:
        ReplayError: A name or an argument can't be used.
    """
    if not config.use_replay:
        return _settings(config, {}, (), ())
    arguments: Any = config.replay_plugins_kwargs or {}  # no text any more
    known = registry().with_arguments(arguments)
    plugins = [known.plugin(name, "replay_plugins") for name in config.replay_plugins or []]
    if config.replay_preset is not None:
        plugins.insert(0, known.preset(config.replay_preset)[0])
    strategies: dict[Kind, Strategy] = {}
    for kind in STRATEGY_KINDS:
        strategies[kind] = known.resolve(kind, getattr(config, f"replay_{kind}"), config.kwargs_of(kind))
    plugins += [strategy.plugin for strategy in strategies.values() if strategy.plugin is not None]
    _refuse_idle_plugins(config, known, strategies)
    taking_part = {plugin.name: plugin for plugin in plugins if plugin.name != BUILTIN}
    for name in arguments:
        if name not in taking_part:
            remedy = f"the plugin {name!r} takes no part; name it in replay_plugins, or leave its arguments out"
            raise unusable(PLUGIN_ARGUMENTS, arguments, remedy)
    fields = known.fields(set(taking_part))
    return _settings(config, strategies, tuple(taking_part.values()), fields)


def _refuse_idle_plugins(config: ReplayConfig, known: Registry, strategies: Mapping[Kind, Strategy]) -> None:
    """Refuses plugins that `replay_plugins` names, and of which nothing is used."""
    used = {strategy.plugin.name for strategy in strategies.values() if strategy.plugin is not None}
    for plugin, preset in known.presets():  # named, or spelled out
        if all(getattr(config, name, None) == value for name, value in preset.settings.items()):
            used.add(plugin.name)
    for name in config.replay_plugins or []:
        if not (name in used or known.plugins[name].takes_part or known.fields({name})):
            remedy = f"{name!r} has no hook for training; name one of its strategies or presets instead"
            raise unusable("replay_plugins", config.replay_plugins, f"{remedy}: `trl-replay list {name}`")


def settle_scope(trainer: Any, settings: Settings) -> Settings:
    """The settings with a scope in the place of `"auto"`, by how the trainer's groups lie on processes."""
    if settings.label("scope") not in (AUTO, f"{BUILTIN}/{AUTO}"):
        return settings
    choice = choose_scope(trainer.accelerator.num_processes, compat.local_rows(trainer), trainer.num_generations)
    return settings.with_scope(choice.name, choice.reason)


def _settings(
    config: ReplayConfig, strategies: Mapping[Kind, Strategy], plugins: tuple[Plugin, ...], fields: Sequence[FieldSpec]
) -> Settings:
    return Settings(
        config=config,
        strategies=strategies,
        preset=config.replay_preset,
        plugins=plugins,
        fields=fields,
        chosen_scope="",
        capacity=config.replay_buffer_size,
        max_bytes=config.max_bytes,
        logps_dtype=config.replay_logps_dtype,
        limits=Limits(config.replay_max_age, config.replay_max_uses),
        rate_limits=RateLimits(config.replay_start, config.replay_start_pass_rate, config.replay_max_fraction),
        dynamic_sampling=DynamicSampling(
            config.replay_refill_rounds, config.replay_refill_prompts, config.replay_refill_until
        ),
        weight=config.replay_weight,
        max_weight=config.replay_max_weight,
        task_columns=None if config.replay_task_columns is None else sorted(config.replay_task_columns),
        reward=config.replay_reward,
        pass_reward=config.replay_pass_reward,
        retire_passes=config.replay_retire_passes,
        advantages=config.replay_advantages,
        record=config.replay_record,
        unfilled=config.replay_unfilled,
        kl=config.replay_kl,
        iterates=config.replay_iterations == "replay",
        dry_run=config.replay_dry_run,
        seed=config.replay_seed,
        goes_on_empty=config.replay_on_mismatch == "empty",
        warm_start=config.replay_warm_start,
        warm_start_short=config.replay_warm_start_short,
    )
