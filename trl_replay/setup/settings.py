"""Settings of a session, resolved once at attach: a frozen value."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from .. import compat
from ..base.arguments import Named
from ..base.plain import in_json
from ..base.validation import AUTO, STRATEGY_KINDS, unusable
from ..data.fields import FieldSpec
from ..registry import BUILTIN, Plugin, Registry, Strategy, registry
from ..specs import Kind
from ..strategies.scopes import choose_scope
from .config import RULES, ReplayConfig

WITHOUT_BUFFER = ("trl_replay_advantages", "trl_replay_inputs", "trl_replay_plan")
"""Hooks of plugins that need no buffer."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in force, a preset's included, with every name looked up.

    Attributes:
        config ([`ReplayConfig`]): Their values.
        strategies (`Mapping[str, Strategy]`): By kind; none where replay is off.
        plugins (`tuple[Plugin, ...]`): Those that take part.
        fields (`Sequence[FieldSpec]`): The batch keys that these declare.
        chosen_scope (`str`): Why this scope, where `replay_scope="auto"` chose it; empty where the user named it.
    """

    config: ReplayConfig
    strategies: Mapping[Kind, Strategy] = field(default_factory=dict)
    plugins: tuple[Plugin, ...] = ()
    fields: Sequence[FieldSpec] = ()
    chosen_scope: str = ""

    @property
    def task_columns(self) -> list[str] | None:
        """Columns that tell tasks apart in addition to the prompt, sorted; None for all."""
        columns = self.config.replay_task_columns
        return None if columns is None else sorted(columns)

    @property
    def iterates(self) -> bool:
        """Tell whether iterations 2 … `num_iterations` train on groups drawn anew."""
        return self.config.replay_iterations == "replay"

    @property
    def acts(self) -> bool:
        """Tell whether there is a buffer, or what needs none: generating again, something to do about dead groups, or
        a plugin that shapes advantages or chooses prompts."""
        if not self.strategies:
            return False
        config = self.config
        if config.replay_buffer_size or config.replay_refill:
            return True
        if config.replay_unfilled != "keep" or config.replay_kl != "all":
            return True
        return any(hook in plugin.hooks for plugin in self.plugins for hook in WITHOUT_BUFFER)

    def label(self, kind: Kind) -> str:
        """Return the label of a kind's strategy."""
        return self.strategies[kind].label

    @property
    def chooses_prompts(self) -> bool:
        """Tell whether prompts are chosen here: for dead groups again, or by a plugin; not in a dry run."""
        asks = any("trl_replay_inputs" in plugin.hooks for plugin in self.plugins)
        return not self.config.replay_dry_run and (self.config.replay_refill is not None or asks)

    def equal_on_ranks(self, one_buffer: bool, seed: int) -> dict[str, Any]:
        """Collect what must be equal on all ranks, by name, as JSON holds it. Seeds may differ, and the bytes that a
        buffer keeps, where ranks do not share or choose by them.

        Args:
            one_buffer (`bool`): Whether ranks share a buffer.
            seed (`int`): The trainer's.
        """
        if not self.acts:
            return {"use_replay": self.config.use_replay, "replay_buffer_size": self.config.replay_buffer_size}
        equal = {name: value for name, value in self.config.to_dict().items() if RULES[name].ranks == "equal"}
        for kind, strategy in self.strategies.items():
            equal[f"replay_{kind}"] = _in_full(strategy.origin, strategy.arguments)
        equal["replay_plugins"] = [
            _in_full(f"{plugin.name} ({plugin.distribution}: {', '.join(sorted(plugin.hooks))})", plugin.arguments)
            for plugin in self.plugins
        ]
        equal["replay_warm_start"] = "a file" if self.config.replay_warm_start else None
        equal["batch keys of plugins"] = [repr(field) for field in self.fields]
        equal["trl_replay"] = import_module("trl_replay").__version__
        if one_buffer:
            equal["replay_max_bytes"] = self.config.max_bytes
        if one_buffer or self.chooses_prompts:
            equal["seed"] = seed
        return equal

    def with_scope(self, name: str, reason: str) -> Settings:
        """Return a copy with a built-in scope that nobody named, and the reason for it."""
        config = copy.copy(self.config)
        vars(config)["replay_scope"] = name  # in force, and to read only
        scope = registry().resolve("scope", name)
        return replace(self, config=config, strategies={**self.strategies, "scope": scope}, chosen_scope=reason)


def _in_full(origin: str, arguments: Mapping[str, Any]) -> str:
    """A strategy or plugin with its arguments: without these, ranks with other ones would pass as equal."""
    return str(Named(origin, in_json(arguments)))


def resolve(config: ReplayConfig) -> Settings:
    """Look up every name of a configuration, once.

    Args:
        config ([`ReplayConfig`]): In force.

    Raises:
        ReplayError: A name or an argument can't be used.
    """
    if not config.use_replay:
        return Settings(config)
    named = config.plugins
    known = registry().with_arguments({name: given for name, given in named.items() if given})
    plugins = [known.plugin(name, "replay_plugins") for name in named]
    if config.replay_preset is not None:
        plugins.insert(0, known.preset(config.replay_preset)[0])
    strategies: dict[Kind, Strategy] = {}
    for kind in STRATEGY_KINDS:
        strategies[kind] = known.resolve(kind, *config.strategy(kind))
    plugins += [strategy.plugin for strategy in strategies.values() if strategy.plugin is not None]
    _refuse_idle_plugins(config, known, strategies)
    taking_part = {plugin.name: plugin for plugin in plugins if plugin.name != BUILTIN}
    return Settings(config, strategies, tuple(taking_part.values()), known.fields(set(taking_part)))


def _refuse_idle_plugins(config: ReplayConfig, known: Registry, strategies: Mapping[Kind, Strategy]) -> None:
    """Refuse plugins that `replay_plugins` names, and of which nothing is used."""
    used = {strategy.plugin.name for strategy in strategies.values() if strategy.plugin is not None}
    for plugin, preset in known.presets():  # named, or spelled out
        if all(getattr(config, name, None) == value for name, value in preset.settings.items()):
            used.add(plugin.name)
    for name in config.plugins:
        if not (name in used or known.plugins[name].takes_part or known.fields({name})):
            remedy = f"{name!r} has no hook for training; name one of its strategies or presets instead"
            raise unusable("replay_plugins", config.replay_plugins, f"{remedy}: `trl-replay list {name}`")


def choose_scope_of(trainer: Any, settings: Settings) -> Settings:
    """Return the settings with `"auto"` replaced by the scope for how the trainer's groups lie on processes."""
    if settings.label("scope") not in (AUTO, f"{BUILTIN}/{AUTO}"):
        return settings
    choice = choose_scope(trainer.accelerator.num_processes, compat.local_rows(trainer), trainer.num_generations)
    return settings.with_scope(choice.name, choice.reason)
