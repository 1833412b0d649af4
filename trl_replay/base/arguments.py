"""Arguments of a strategy or plugin: as a user writes them, and as its signature takes them. Imports no torch."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from ..errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: `alpha=1.0`.

    Attributes:
        name (`str`): As it stands in the parentheses of `replay_<kind>`.
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


LITERALS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "inf": inf}
"""Values that Python spells otherwise, as YAML writes them."""


class Named(NamedTuple):
    """A strategy's or plugin's name, and the arguments for it: `truncated(cap=2.0)`."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.name}({shown})" if shown else self.name

    @classmethod
    def read(cls, text: str) -> Named:
        """Read `name` or `name(argument=value, …)`. Nothing is executed: values are literals.

        Raises:
            ValueError: It is neither; says what to write.
        """
        name, parenthesis, rest = text.partition("(")
        if not parenthesis:
            return cls(text.strip(), {})
        try:
            call: Any = _Spelled().visit(ast.parse(f"_({rest}", mode="eval").body)
            arguments = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
            given_twice = len(arguments) < len(call.keywords)
            if call.func.id != "_" or call.args or None in arguments or given_twice or not name.strip():
                raise ValueError
        except (AttributeError, SyntaxError, TypeError, ValueError):
            raise ValueError(
                "give a name alone, or with arguments in parentheses, name(argument=value): each by its name and "
                "once, with a number, a text in quotes, true, false, null, inf, or a list of these"
            ) from None
        return cls(name.strip(), arguments)


class _Spelled(ast.NodeTransformer):
    """Puts values in the place of names that stand for them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """As `ast` calls it."""
        return ast.Constant(LITERALS[node.id]) if node.id in LITERALS else node


def arguments_of(factory: Any) -> Arguments:
    """Read the arguments of a strategy's factory, or of a plugin's class."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # something compiled that does not tell
        return Arguments(others=True)
    named = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            required = parameter.default is parameter.empty
            named.append(Argument(parameter.name, required, None if required else parameter.default))
    others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return Arguments(tuple(named), others)


def refuse_unknown_arguments(setting: str, taker: str, taken: Arguments, given: Mapping[str, Any]) -> None:
    """Raise for arguments that a factory does not accept.

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
