"""Settings with every name looked up, and the components that a session is made of."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from .. import compat
from ..base.files import in_json
from ..base.progress import KeptErrors
from ..base.validation import AUTO, STRATEGY_KINDS, Named, unusable
from ..buffer import ReplayBuffer
from ..compat import Dialect
from ..data.success import Success
from ..data.tasks import Tasks
from ..data.types import Corrected, FieldSpec, FieldTable, ReplayedRows
from ..hooks import CheckedHooks
from ..loss.supply import Bounds, Gates
from ..registry import BUILTIN, Plugin, Registry, Strategy, registry
from ..specs import Kind
from ..strategies.scopes import Scope, choose_scope
from .config import CHECKED, ReplayConfig

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
        equal = {name: value for name, value in self.config.to_dict().items() if CHECKED[name].ranks == "equal"}
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
        return replace(self, config=config, chosen_scope=reason)


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
    if settings.config.replay_scope != AUTO:
        return settings
    choice = choose_scope(trainer.accelerator.num_processes, compat.local_rows(trainer), trainer.num_generations)
    return settings.with_scope(choice.name, choice.reason)


@dataclass(frozen=True, slots=True)
class OfLoss:
    """What the trainer's loss asks for, of a trainer that composes batches.

    Attributes:
        gates ([`Gates`]): What replayed rows must pass there.
        bounds ([`Bounds`]): What no replayed row can pass.
        token_weights (`bool`): Whether a correction may give one weight a token.
        pad_to_multiple_of (`int`, *optional*): The trainer's, of a composed batch's widths.
    """

    gates: Gates = field(default_factory=Gates)
    bounds: Bounds = field(default_factory=Bounds)
    token_weights: bool = True
    pad_to_multiple_of: int | None = None


@dataclass(slots=True)
class Components:
    """The components of one session.

    Attributes:
        settings ([`Settings`]): What the session goes by.
        buffer ([`ReplayBuffer`]): Where groups are kept.
        scope ([`Scope`]): Who shares the buffer.
        hooks ([`CheckedHooks`]): Plugins and strategies.
        fields ([`FieldTable`]): The batch keys that are known.
        tasks ([`Tasks`]): What rows are generated for.
        num_generations (`int`): Rows of a group.
        loss ([`OfLoss`]): What its loss asks for.
        mixes_rows (`bool`): Whether the configured mixer may put stored rows beside fresh ones in a group.
        forwards_to_record (`bool`): Whether every fresh batch gets a no-grad forward for its log-probs, which are
            stored and never trained on.
        processes (`int`): Number of processes.
        success ([`Success`]): What passes.
        dialect ([`Dialect`]): Of the trainer's batches and its loss.
        errors ([`KeptErrors`]): What failed here, until all processes hear of it.
    """

    settings: Settings
    buffer: ReplayBuffer
    scope: Scope
    hooks: CheckedHooks
    fields: FieldTable
    tasks: Tasks
    num_generations: int
    loss: OfLoss = field(default_factory=OfLoss)
    mixes_rows: bool = False
    forwards_to_record: bool = False
    processes: int = 1
    success: Success = field(default_factory=Success)
    dialect: Dialect = field(default_factory=Dialect)
    errors: KeptErrors = field(init=False)

    def __post_init__(self) -> None:
        self.errors = KeptErrors(alone=self.processes == 1)

    def correct(self, rows: ReplayedRows) -> Corrected:
        """Return what the correction gives replayed rows, within bounds and gates."""
        corrected = self.hooks.correct(rows, self.buffer.context(local=True), self.errors.check)
        return self.loss.gates(rows, self.loss.bounds(rows, corrected))

    def weight_before_the_loss(self, age: int, chance: float) -> float:
        """Return the loss weight that the correction gives a row of which no log-probs are known yet.

        Args:
            age (`int`): Updates since generation.
            chance (`float`): Of being drawn first, relative to the least likely eligible entry.
        """
        unknown = torch.zeros(1, 1)
        rows = ReplayedRows(
            logps=unknown,
            behavior_logps=unknown,
            proximal_logps=unknown,
            mask=torch.ones(1, 1, dtype=torch.bool),
            advantages=torch.ones(1),
            ages=torch.tensor([age]),
            priorities=torch.tensor([chance]),
        )
        weights = self.hooks.correct(rows, self.buffer.context(local=True)).weights
        return 1.0 if weights is None else float(weights.flatten()[0])
