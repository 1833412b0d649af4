"""Keyword arguments of a strategy, read from its factory's signature. Imports no torch."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from ..specs import Kind

GIVEN: Mapping[str, int] = {"scope": 1}
"""Number of arguments that a session itself gives a factory, before the user's: a scope's accelerator."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: `alpha=1.0`.

    Attributes:
        name (`str`): As it stands in `replay_<kind>_kwargs`.
        required (`bool`): Whether it has no default.
        default: What it is if not given; None if it is required.
    """

    name: str
    required: bool = False
    default: Any = None

    def __str__(self) -> str:
        if self.required:
            return self.name
        shown = json.dumps(self.default) if isinstance(self.default, str) else repr(self.default)
        return f"{self.name}={shown}"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a strategy.

    Attributes:
        named (`tuple[Argument, ...]`): In the order of the signature.
        others (`bool`): Whether it takes arguments of any other name, too, or does not tell which.
    """

    named: tuple[Argument, ...] = ()
    others: bool = False

    def __bool__(self) -> bool:
        return bool(self.named) or self.others

    def __str__(self) -> str:
        shown = [str(argument) for argument in self.named]
        return ", ".join([*shown, "…"] if self.others else shown)


def arguments_of(factory: Any, kind: Kind | None = None) -> Arguments:
    """Read the arguments of a strategy's factory, apart from those that a session gives, or of a plugin's class."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # something compiled that does not tell
        return Arguments(others=True)
    named = []
    for parameter in parameters[GIVEN.get(kind or "plugin", 0) :]:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            required = parameter.default is parameter.empty
            named.append(Argument(parameter.name, required, None if required else parameter.default))
    others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return Arguments(tuple(named), others)


def refuse_unknown_arguments(setting: str, taker: str, taken: Arguments, given: Mapping[str, Any]) -> None:
    """Refuse arguments that are not taken.

    Args:
        setting (`str`): The setting with its value, for the message.
        taker (`str`): What takes arguments, in words.
        taken ([`Arguments`]): What it takes.
        given (`Mapping[str, Any]`): The arguments.

    Raises:
        ConfigurationError: Names the setting, the wrong arguments, the nearest right ones, and all of these.
    """
    known = [argument.name for argument in taken.named]
    wrong = [argument for argument in given if argument not in known]
    if not wrong or taken.others:
        return
    noun = "argument" if len(wrong) == 1 else "arguments"
    text = f"{setting} can't be used: {taker} has no {noun} {_quoted(wrong)}."
    near = [match for argument in wrong for match in difflib.get_close_matches(argument, known, n=1)]
    if near:
        text += f" Did you mean {_quoted(dict.fromkeys(near))}?"
    text += f" It takes {taken}." if known else " It takes no arguments."
    raise ConfigurationError(text)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
