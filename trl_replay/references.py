"""Strategies given as an import reference or as an object, where no plugin offers them by name."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from .errors import ConfigurationError, UnknownNameError
from .specs import StrategySpec


def given(strategy: Any, kwargs: dict[str, Any], setting: str) -> Any:
    """The strategy itself, given as an object.

    Raises:
        ConfigurationError: It can't take keyword arguments any more.
    """
    if kwargs:
        raise ConfigurationError(f"{setting}_kwargs={kwargs!r} can't be used with an object: give it configured.")
    return strategy


def imported(reference: str, setting: str) -> Any:
    """The attribute that `package.module:Attribute` names."""
    module, _, attribute = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownNameError(
            f"{setting}={reference!r} can't be imported: {type(error).__name__}: {error}"
        ) from error
    return found


def made(found: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an imported attribute stands for: a spec, a factory that takes these arguments, or else the strategy
    itself."""
    if isinstance(found, StrategySpec):
        return found.factory(*args, **kwargs)
    if not inspect.isclass(found) and not kwargs:
        try:
            inspect.signature(found).bind(*args)
        except (
            TypeError,
            ValueError,
        ):  # it takes other arguments, or is a builtin that does not tell
            return found
    return found(*args, **kwargs)
