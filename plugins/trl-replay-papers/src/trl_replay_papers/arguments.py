"""Arguments of strategies, and what is said of those that can't be used."""

from __future__ import annotations

from trl_replay import ConfigurationError


def at_least(strategy: str, name: str, value: int, least: int) -> int:
    """A whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(
            f"{strategy}: {name}={value!r} can't be used: give a whole number of at least {least}."
        )
    return value


def above(strategy: str, name: str, value: float, limit: float) -> float:
    """A finite number above `limit`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not limit < value < float("inf"):
        raise ConfigurationError(f"{strategy}: {name}={value!r} can't be used: give a finite number above {limit:g}.")
    return float(value)


def fraction(strategy: str, name: str, value: float) -> float:
    """A number from 0 to 1."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise ConfigurationError(f"{strategy}: {name}={value!r} can't be used: give a number from 0 to 1.")
    return float(value)


def finite(strategy: str, name: str, value: float) -> float:
    """A finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < float("inf"):
        raise ConfigurationError(f"{strategy}: {name}={value!r} can't be used: give a finite number.")
    return float(value)
