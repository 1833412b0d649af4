"""Specs of what a plugin offers by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["scorer", "evictor", "sampler", "selector", "mixer", "correction"]


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A named strategy that a plugin offers. Use the subclass of its kind."""

    name: str
    factory: Callable[..., Any]
    summary: str


class ScorerSpec(StrategySpec):
    """`factory(**arguments)` returns a [`Scorer`]."""


class EvictorSpec(StrategySpec):
    """`factory(**arguments)` returns an [`Evictor`]."""


class SamplerSpec(StrategySpec):
    """`factory(**arguments)` returns a [`Sampler`]."""


class SelectorSpec(StrategySpec):
    """`factory(**arguments)` returns a [`Selector`]."""


class MixerSpec(StrategySpec):
    """`factory(**arguments)` returns a [`Mixer`]."""


class CorrectionSpec(StrategySpec):
    """`factory(**arguments)` returns a [`Correction`]."""


SPECS: dict[Kind, type[StrategySpec]] = {
    "scorer": ScorerSpec,
    "evictor": EvictorSpec,
    "sampler": SamplerSpec,
    "selector": SelectorSpec,
    "mixer": MixerSpec,
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
