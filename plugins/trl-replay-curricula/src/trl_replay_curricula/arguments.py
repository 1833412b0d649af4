"""Arguments of the curricula, and what is said of those that can't be used."""

from __future__ import annotations

from trl_replay import ConfigurationError


def share(curriculum: str, name: str, value: float) -> float:
    """A number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigurationError(f"{curriculum}: {name}={value!r} can't be used: give a number from 0 to 1.")
    return float(value)


def at_least(curriculum: str, name: str, value: int, least: int) -> int:
    """A whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(
            f"{curriculum}: {name}={value!r} can't be used: give a whole number of at least {least}."
        )
    return value
