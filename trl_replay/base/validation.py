"""Checks of single settings: each returns what to give instead, or None if the value can be used."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from ..errors import ConfigurationError, nearest
from ..specs import Kind
from .files import KINDS, are_paths, data_files, parse_bytes


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
    text = f"{setting} can't be used: {taker} has no {noun} {', '.join(map(repr, wrong))}."
    text += "".join(nearest(argument, known) for argument in wrong)
    text += f" It takes {taken}." if known else " It takes no arguments."
    raise ConfigurationError(text)


STRATEGY_KINDS: tuple[Kind, ...] = ("scorer", "evictor", "sampler", "selector", "mixer", "correction")

ADAPTIVE = "adaptive"
"""The value of `replay_start` that waits where rewards are sparse."""

AUTO = "auto"
"""The value of `replay_scope` that chooses a scope by how groups lie on processes."""

NO_STRATEGY = (NoneType, Real, bytes, dict, list, tuple, set)
"""Types given for a strategy by mistake: YAML reads `off` as False."""

Check: TypeAlias = Callable[[object], str | None]
"""Maps a value to the remedy, or to None if it can be used."""


def optional(check: Check) -> Check:
    """Return the same check, which None passes."""

    def checked(value: object) -> str | None:
        remedy = None if value is None else check(value)
        return remedy and f"leave it out or {remedy}"

    return checked


def true_or_false(value: object) -> str | None:
    """A bool."""
    return None if isinstance(value, bool) else "give true or false"


def whole(least: int) -> Check:
    """A whole number of at least `least`."""

    def checked(value: object) -> str | None:
        if _is_whole(value) and value >= least:
            return None
        return f"give a whole number of at least {least}"

    return checked


def number(words: str, least: float = -inf, most: float = inf, above: float = -inf) -> Check:
    """A finite number.

    Args:
        words (`str`): What to give.
        least (`float`): It is at least this.
        most (`float`): It is at most this.
        above (`float`): It is more than this.
    """

    def checked(value: object) -> str | None:
        if not is_number(value):
            return f"give {words}"
        given = float(value)
        fits = least <= given <= most and above < given < inf
        return None if fits else f"give {words}"

    return checked


def share(value: object) -> str | None:
    """A number from 0 to 1."""
    return number("a share between 0 and 1", least=0.0, most=1.0)(value)


def choice(*values: str) -> Check:
    """One of some texts."""
    *others, last = map(repr, values)
    words = f"give {', '.join(others)} or {last}"

    def checked(value: object) -> str | None:
        return None if isinstance(value, str) and value in values else words

    return checked


def strategy(kind: Kind) -> Check:
    """A strategy's name, or in Python the strategy itself."""

    def checked(value: object) -> str | None:
        if value != "" and not isinstance(value, NO_STRATEGY):
            return named(value) if isinstance(value, str) else None
        return (
            f"give the name of a {kind} as text (in YAML in quotes), or a {kind} itself; `trl-replay list` shows all"
        )

    return checked


def named(value: str) -> str | None:
    """A name, or one with arguments in parentheses."""
    try:
        Named.read(value)
    except ValueError as error:
        return str(error)
    return None


def size_in_bytes(value: object) -> str | None:
    """Bytes, as a number or a text."""
    return "give bytes, '512MB' or '2GiB'" if parse_bytes(value) is None else None


class Refill(NamedTuple):
    """Dynamic sampling, as `replay_refill` says: `new(rounds=2, until=0.8)`.

    Attributes:
        prompts (`str`): `"new"` or the `"same"`.
        rounds (`int`): The most of a batch; 0 if the setting is left out.
        until (`float`): Share of live groups at which rounds end.
    """

    prompts: str = "new"
    rounds: int = 0
    until: float = 1.0

    @classmethod
    def read(cls, text: str | None) -> Refill:
        """Read the setting.

        Raises:
            ValueError, TypeError: It can't be read, or has other arguments.
        """
        if text is None:
            return cls()
        prompts, given = Named.read(text)
        return cls(prompts, **{"rounds": 1, **given})


def refill(value: Any) -> str | None:
    """Prompts of dynamic sampling with the number of rounds."""
    remedy = (
        "give 'new(rounds=2)' for new prompts or 'same(rounds=2)' for the same ones: rounds of at least 1, and as "
        "until=1.0 a share of live groups above 0, at most 1"
    )
    try:
        prompts, rounds, until = Refill.read(value)
    except (AttributeError, TypeError, ValueError):
        return remedy
    fits = prompts in ("new", "same") and not whole(1)(rounds) and not number("", above=0.0, most=1.0)(until)
    return None if fits else remedy


def pass_rate_of(start: object) -> float | None:
    """The share in a start such as `pass_rate(0.35)`; None for any other."""
    found = isinstance(start, str) and re.fullmatch(r"pass_rate\((\d*\.?\d+)\)", start)
    return float(found[1]) if found else None


def start(value: object) -> str | None:
    """Updates, `ADAPTIVE`, or a share of completions that must pass."""
    if value in (None, ADAPTIVE) or (_is_whole(value) and value >= 0) or share(pass_rate_of(value)) is None:
        return None
    return f"give {ADAPTIVE!r}, a number of updates of at least 0, or 'pass_rate(0.35)', a share between 0 and 1"


def names(of: str) -> Check:
    """A list of texts, which name something."""

    def checked(value: object) -> str | None:
        if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
            return None
        return f"give a list of {of} names"

    return checked


def plugins(value: Any) -> str | None:
    """A list of names, each once, or with arguments in parentheses."""
    remedy = names("plugin")(value) or next(filter(None, map(named, value)), None)
    if remedy is None and len({Named.read(text).name for text in value}) < len(value):
        return "give each plugin once"
    return remedy


def preset_name(value: object) -> str | None:
    """A text."""
    return None if isinstance(value, str) and value else "give the name of a preset"


def function_name(value: object) -> str | None:
    """A text."""
    return None if isinstance(value, str) and value else "give the name of a reward function, as TRL logs it"


def readable_files(value: object) -> str | None:
    """Paths of files that are there."""
    if not are_paths(value):
        return f"give the path of {KINDS}, of a folder, or a list of these"
    try:
        data_files(value)
    except ValueError as error:
        return str(error)
    return None


def refuse_without_effect(settings: Mapping[str, Any], given: Container[str]) -> None:
    """Refuse settings of a warm start without one.

    Args:
        settings (`Mapping[str, Any]`): Values of all settings, by name; with a preset, which may set the others, once
            it has.
        given (`Container[str]`): Names of those that the user gave.

    Raises:
        ConfigurationError: Names the setting, its value and the remedy.
    """
    path = settings["replay_warm_start"]
    if "replay_warm_start" in given and path is not None and not settings["replay_buffer_size"]:
        raise unusable(
            "replay_warm_start", path, "replay_buffer_size=0 stores nothing; give a size, or leave this out"
        )
    for name in ("replay_warm_start_short", "replay_warm_start_rescore"):
        if name in given and settings[name] not in ("refuse", False) and path is None:
            remedy = "there is no file that it could be for; set replay_warm_start, or leave this out"
            raise unusable(name, settings[name], remedy)


def require(name: str, value: object, check: Check) -> None:
    """Refuse an argument that a check does not pass.

    Raises:
        ConfigurationError: Names the argument, its value and the remedy.
    """
    remedy = check(value)
    if remedy is not None:
        raise unusable(name, value, remedy)


def unusable(name: str, value: object, remedy: str) -> ConfigurationError:
    """Return the error for a setting that can't be used."""
    return ConfigurationError(f"{name}={value!r} can't be used: {remedy}.")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether it is a real number of any kind, but neither True nor False."""
    return isinstance(value, Real) and not isinstance(value, bool)
