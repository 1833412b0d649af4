"""`trl-replay list`: what installed plugins offer, and the documentation of one strategy, preset or plugin."""

from __future__ import annotations

import argparse
import difflib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import UnknownNameError
from .command import Command
from .tables import make_console, make_table, printable

if TYPE_CHECKING:
    from ..registry import Plugin, Registry

NEAREST = 3
"""Most similar names that an unknown one is answered with."""
SETTINGS = {"preset": 'replay_preset="{}"', "plugin": 'replay_plugins=["{}"]'}
"""The settings that name a preset and a plugin."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A strategy, preset or plugin.

    Attributes:
        kind (`str`): A strategy's, `"preset"`, or `"plugin"`.
        name (`str`): As a setting takes it: with its plugin's name before it where it is not built in.
        distribution (`str`): Where it comes from.
        summary (`str`): One line.
        arguments (`str`): With their defaults; empty if it takes none.
        documentation (`str`): Its docstring; a preset's settings come first.
        default (`bool`): Whether it is the default of its kind.
    """

    kind: str
    name: str
    distribution: str
    summary: str
    arguments: str = ""
    documentation: str = ""
    default: bool = False

    @property
    def setting(self) -> str:
        """The setting that names it."""
        return SETTINGS.get(self.kind, f'replay_{self.kind}="{{}}"').format(self.name)

    @property
    def names(self) -> set[str]:
        """`freshness/decayed`, `decayed`, and with all that its plugin offers `freshness`."""
        plugin, _, short = self.name.rpartition("/")
        return {self.name, short, plugin} - {""}


def offers(known: Registry) -> list[Offer]:
    """Return every strategy and preset, and every plugin with a session hook."""
    return [*_strategies(known), *_presets(known), *_plugins(known)]


def _registry() -> Registry:
    from ..registry import registry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # failures are listed
        return registry()


def _strategies(known: Registry) -> Iterator[Offer]:
    from ..base.arguments import arguments_of
    from ..setup.config import ReplayConfig
    from ..specs import SPECS

    defaults = ReplayConfig()
    for kind in SPECS:
        default = getattr(defaults, f"replay_{kind}")
        for plugin, spec in known.strategies(kind):
            name = _qualified(spec.name, plugin)
            arguments = str(arguments_of(spec.factory, kind))
            text = _docstring(spec.factory)
            yield Offer(kind, name, plugin.distribution, spec.summary, arguments, text, name == default)


def _docstring(factory: Any) -> str:
    """Return a factory's docstring; for a partial, that of the wrapped factory."""
    while isinstance(factory, partial):
        factory = factory.func
    return inspect.getdoc(factory) or ""


def _presets(known: Registry) -> Iterator[Offer]:
    for plugin, preset in known.presets():
        settings = "\n".join(f"{name}={value!r}" for name, value in preset.settings.items())
        text = f"{settings}\n\n{preset.documentation}".strip()
        yield Offer("preset", _qualified(preset.name, plugin), plugin.distribution, preset.summary, documentation=text)


def _plugins(known: Registry) -> Iterator[Offer]:
    """Return the plugins for `replay_plugins`: those with a session hook."""
    from ..registry import BUILTIN

    for plugin in known.plugins.values():
        if plugin.takes_part and plugin.name != BUILTIN:
            text = inspect.getdoc(plugin.object) or ""
            arguments = _arguments(plugin.object)
            yield Offer("plugin", plugin.name, plugin.distribution, text.partition("\n")[0], arguments, text)


def _arguments(plugin: object) -> str:
    """Return the arguments of a plugin's class; empty if there are none."""
    from ..base.arguments import arguments_of

    return "" if inspect.ismodule(plugin) else str(arguments_of(type(plugin)))


def _qualified(name: str, plugin: Plugin) -> str:
    """Return the name as a setting needs it if several plugins offer the same."""
    from ..registry import BUILTIN

    return name if plugin.name == BUILTIN else f"{plugin.name}/{name}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a strategy's, preset's or plugin's name: shows arguments and documentation; all are listed without",
    )


def _list(options: argparse.Namespace) -> int:
    known = _registry()
    on_offer = offers(known)
    if options.name is None:
        _print_tables(on_offer, known)
    else:
        called = _called(options.name, on_offer)
        print(printable("\n\n\n".join(map(_in_words, called))))
    return 0


def _called(name: str, on_offer: Sequence[Offer]) -> list[Offer]:
    """Return the offers of this name, with or without their plugin's name.

    Raises:
        UnknownNameError: There is none; says the nearest names.
    """
    found = [offer for offer in on_offer if name in offer.names]
    if found:
        return found
    names = sorted(set().union(*(offer.names for offer in on_offer)))
    near = difflib.get_close_matches(name, names, n=NEAREST)
    hint = f" The nearest: {', '.join(near)}." if near else ""
    raise UnknownNameError(f"There is no strategy, preset or plugin {name!r}.{hint} `trl-replay list` shows all.")


def _in_words(offer: Offer) -> str:
    facts = {
        offer.kind: offer.setting,
        "distribution": offer.distribution,
        "arguments": str(offer.arguments) or "none",
        "what it does": offer.summary,
    }
    title = f"{offer.name}, the default {offer.kind}" if offer.default else offer.name
    lines = [f"  {name:12}  {fact}" for name, fact in facts.items()]
    return "\n".join([title, *lines, "", offer.documentation])


def _print_tables(on_offer: Sequence[Offer], known: Registry) -> None:
    console = make_console()
    rows = []
    for offer in on_offer:
        name = f"{offer.name} (default)" if offer.default else offer.name
        rows.append([offer.kind, name, offer.summary, offer.arguments, offer.distribution])
    columns = ("kind", "name", "what it does", "arguments", "distribution")
    console.print(make_table("Strategies, presets and plugins", columns, rows))
    failures = [[failure.name, failure.distribution, failure.reason] for failure in known.failures.values()]
    if failures:
        console.print(make_table("Plugins that were not loaded", ("plugin", "distribution", "why"), failures))


LIST = Command(
    "list", "every strategy, preset and plugin with its arguments, or what one of them is", _add_options, _list
)
