"""Specs of what a plugin offers by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["scorer", "evictor", "sampler", "selector", "mixer", "scope", "correction"]


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A named strategy that a plugin offers. Use the subclass of its kind."""

    name: str
    factory: Callable[..., Any]
    summary: str


class ScorerSpec(StrategySpec):
    """`factory(**replay_scorer_kwargs)` returns a [`Scorer`]."""


class EvictorSpec(StrategySpec):
    """`factory(**replay_evictor_kwargs)` returns an [`Evictor`]."""


class SamplerSpec(StrategySpec):
    """`factory(**replay_sampler_kwargs)` returns a [`Sampler`]."""


class SelectorSpec(StrategySpec):
    """`factory(**replay_selector_kwargs)` returns a [`Selector`]."""


class MixerSpec(StrategySpec):
    """`factory(**replay_mixer_kwargs)` returns a [`Mixer`]."""


class ScopeSpec(StrategySpec):
    """`factory(accelerator, **replay_scope_kwargs)` returns a [`Scope`]."""


class CorrectionSpec(StrategySpec):
    """`factory(**replay_correction_kwargs)` returns a [`Correction`]."""


SPECS: dict[Kind, type[StrategySpec]] = {
    "scorer": ScorerSpec,
    "evictor": EvictorSpec,
    "sampler": SamplerSpec,
    "selector": SelectorSpec,
    "mixer": MixerSpec,
    "scope": ScopeSpec,
    "correction": CorrectionSpec,
}


@dataclass(frozen=True, slots=True)
class Preset:
    """A named bundle of settings. The user's own settings override it.

    Attributes:
        name (`str`): For `replay_preset`.
        settings (`Mapping`): Of [`ReplayConfig`].
        summary (`str`): One line.
        documentation (`str`, *optional*): What `trl-replay list NAME` prints below the settings: when to use it,
            where it comes from.
    """

    name: str
    settings: Mapping[str, Any]
    summary: str
    documentation: str = ""
