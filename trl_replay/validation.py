"""Checks of the settings: each error names the setting, its value and the remedy."""

from __future__ import annotations

from numbers import Integral, Real
from typing import TYPE_CHECKING, TypeGuard

from .errors import ConfigurationError
from .sizes import parse_bytes
from .specs import Kind

if TYPE_CHECKING:
    from .config import ReplayConfig

STRATEGY_KINDS: tuple[Kind, ...] = (
    "scorer",
    "evictor",
    "sampler",
    "selector",
    "scope",
    "storage",
    "correction",
)

ADAPTIVE = "adaptive"
"""The value of `replay_start` that looks at how sparse rewards are."""

LEAST: dict[str, int] = {
    "replay_buffer_size": 0,
    "replay_min_size": 1,
    "replay_max_age": 1,
    "replay_max_uses": 1,
    "replay_cooldown": 1,
    "replay_retire_passes": 1,
    "replay_seed": 0,
}
"""Whole numbers, and the least of each."""
RANGES: dict[str, tuple[float, float, bool, str]] = {
    "replay_max_fraction": (0.0, 1.0, True, "a share between 0 and 1"),
    "replay_start_pass_rate": (0.0, 1.0, True, "a share between 0 and 1"),
    "replay_min_ess": (0.0, 1.0, True, "a share between 0 and 1"),
    "replay_half_life": (
        0.0,
        float("inf"),
        False,
        "a number of updates above 0",
    ),
    "replay_samples_per_insert": (0.0, float("inf"), False, "a number above 0"),
    "replay_max_log_ratio": (0.0, float("inf"), False, "a number above 0"),
    "replay_max_weight": (0.0, float("inf"), False, "a number above 0"),
    "replay_weight": (0.0, float("inf"), True, "a finite number of at least 0"),
    "replay_pass_reward": (
        -float("inf"),
        float("inf"),
        False,
        "a finite number",
    ),
}
"""Numbers: the least and the most, whether the least itself is allowed, and what to say. Infinity never is."""
CHOICES: dict[str, tuple[str, ...]] = {
    "replay_unfilled": ("keep", "mask", "exclude", "intra_batch"),
    "replay_refresh": ("ratio", "advantage"),
    "replay_warm_start_short": ("refuse", "resample"),
    "replay_logps_dtype": ("float32", "bfloat16"),
    "replay_on_mismatch": ("refuse", "empty"),
}
OPTIONAL = frozenset(
    {
        "replay_max_age",
        "replay_max_uses",
        "replay_cooldown",
        "replay_retire_passes",
        "replay_seed",
        "replay_start_pass_rate",
        "replay_min_ess",
        "replay_half_life",
        "replay_samples_per_insert",
        "replay_max_log_ratio",
        "replay_max_weight",
        "replay_refresh",
    }
)
"""Settings that may be None."""


def validate(config: ReplayConfig) -> None:
    """Checks all settings that can be checked without a trainer.

    Raises:
        ConfigurationError: At the first that can't be used.
    """
    for kind in STRATEGY_KINDS:
        name = getattr(config, f"replay_{kind}")
        if name is None or name == "":
            raise unusable(
                f"replay_{kind}",
                name,
                f"name a {kind}; `trl-replay list` shows all",
            )
    plugins = config.replay_plugins
    if plugins is not None and not (isinstance(plugins, list | tuple) and all(isinstance(p, str) for p in plugins)):
        raise unusable(
            "replay_plugins",
            plugins,
            "leave it out or give a list of plugin names",
        )
    if config.replay_preset is not None and not isinstance(config.replay_preset, str):
        raise unusable(
            "replay_preset",
            config.replay_preset,
            "leave it out or give the name of a preset",
        )
    for name in ("use_replay", "replay_dry_run"):
        if not isinstance(getattr(config, name), bool):
            raise unusable(name, getattr(config, name), "give true or false")
    for name, least in LEAST.items():
        value = getattr(config, name)
        if not (_absent(name, value) or (_is_whole(value) and value >= least)):
            raise unusable(
                name,
                value,
                f"{_either(name)}give a whole number of at least {least}",
            )
    for name, (least_, most, closed, words) in RANGES.items():
        value = getattr(config, name)
        if not (_absent(name, value) or (_is_number(value) and _within(float(value), least_, most, closed))):
            raise unusable(name, value, f"{_either(name)}give {words}")
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if not (_absent(name, value) or (isinstance(value, str) and value in choices)):
            given = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
            raise unusable(name, value, f"{_either(name)}give {given}")
    if config.replay_max_bytes is not None and parse_bytes(config.replay_max_bytes) is None:
        raise unusable(
            "replay_max_bytes",
            config.replay_max_bytes,
            "leave it out or give bytes, '512MB' or '2GiB'",
        )
    start = config.replay_start
    if start not in (None, ADAPTIVE) and not (_is_whole(start) and start >= 0):
        raise unusable(
            "replay_start",
            start,
            f"give {ADAPTIVE!r} or a number of updates of at least 0",
        )
    if 0 < config.replay_buffer_size < config.replay_min_size:
        raise unusable(
            "replay_min_size",
            config.replay_min_size,
            f"a buffer of replay_buffer_size={config.replay_buffer_size} groups never gets there; lower it",
        )


def unusable(name: str, value: object, remedy: str) -> ConfigurationError:
    """The error for a setting that can't be used."""
    return ConfigurationError(f"{name}={value!r} can't be used: {remedy}.")


def _absent(name: str, value: object) -> bool:
    return value is None and name in OPTIONAL


def _either(name: str) -> str:
    return "leave it out or " if name in OPTIONAL else ""


def _within(value: float, least: float, most: float, closed: bool) -> bool:
    return (least < value or (closed and value == least)) and value <= most and abs(value) != float("inf")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)
