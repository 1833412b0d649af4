"""`trl-replay list`: the names that installed plugins offer, and the documentation of one of them."""

from __future__ import annotations

import argparse
import inspect
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UnknownNameError, nearest
from .tables import Command, make_console, make_table, printable

if TYPE_CHECKING:
    from ..registry import Plugin, Registry

SETTINGS = {"preset": 'replay_preset="{}"', "plugin": 'replay_plugins=["{}"]'}
"""The settings that name a preset and a plugin."""


class Offer(NamedTuple):
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
    def short(self) -> str:
        """The name alone where the plugin is called the same."""
        plugin, _, name = self.name.rpartition("/")
        return name if plugin in ("", name) else self.name

    @property
    def names(self) -> set[str]:
        """`freshness/decayed`, `decayed`, and with all that its plugin offers `freshness`."""
        plugin, _, short = self.name.rpartition("/")
        return {self.name, short, plugin} - {""}

    def __str__(self) -> str:
        setting = SETTINGS.get(self.kind, f'replay_{self.kind}="{{}}"').format(self.name)
        facts = {self.kind: setting, "from": self.distribution, "arguments": self.arguments or "none"}
        title = f"{self.name}, the default {self.kind}" if self.default else self.name
        lines = [f"  {name:12}  {fact}" for name, fact in facts.items()]
        return "\n".join([f"{title}: {self.summary}", *lines, "", self.documentation])


def offers(known: Registry) -> Iterator[Offer]:
    """Return every preset and strategy, and every plugin with a session hook."""
    from ..base.validation import arguments_of
    from ..registry import BUILTIN
    from ..setup.config import ReplayConfig
    from ..specs import SPECS

    for plugin, preset in known.presets():
        settings = "\n".join(f"{name}={value!r}" for name, value in preset.settings.items())
        text = f"{settings}\n\n{preset.documentation}".strip()
        yield Offer("preset", _qualified(preset.name, plugin), plugin.distribution, preset.summary, documentation=text)
    for kind in SPECS:
        default = getattr(ReplayConfig(), f"replay_{kind}")
        for plugin, spec in known.strategies(kind):
            name, arguments = _qualified(spec.name, plugin), str(arguments_of(spec.factory))
            text = _docstring(spec.factory)
            yield Offer(kind, name, plugin.distribution, spec.summary, arguments, text, name == default)
    for plugin in known.plugins.values():
        if plugin.takes_part and plugin.name != BUILTIN:
            text = inspect.getdoc(plugin.object) or ""
            is_module = inspect.ismodule(plugin.object)
            arguments = "" if is_module else str(arguments_of(type(plugin.object)))
            yield Offer("plugin", plugin.name, plugin.distribution, text.partition("\n")[0], arguments, text)


def _docstring(factory: Any) -> str:
    """A factory's docstring; for a partial, that of the wrapped factory."""
    while isinstance(factory, partial):
        factory = factory.func
    return inspect.getdoc(factory) or ""


def _qualified(name: str, plugin: Plugin) -> str:
    """The name as a setting needs it if several plugins offer the same."""
    from ..registry import BUILTIN

    return name if plugin.name == BUILTIN else f"{plugin.name}/{name}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="a kind (preset, scorer, …): what each of its names does; or a name: its arguments and documentation",
    )


def _list(options: argparse.Namespace) -> int:
    from ..registry import registry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # failures are listed
        known = registry()
    found, name = list(offers(known)), getattr(options, "name", None)
    kinds = dict.fromkeys(offer.kind for offer in found)
    if name in kinds:
        rows = [(offer.name, offer.summary, offer.distribution) for offer in found if offer.kind == name]
        make_console().print(make_table(f"{name}s", ("name", "what it does", "from"), rows))
        return 0
    if name is not None:
        print(printable("\n\n\n".join(map(str, _called(name, found)))))
        return 0
    for kind in kinds:
        of_kind = [offer for offer in found if offer.kind == kind]
        names = [f"{offer.short} (default)" if offer.default else offer.short for offer in of_kind]
        line = f"{kind:10}  {', '.join(names)}"
        print(printable(textwrap.fill(line, make_console().width, subsequent_indent=" " * 12, break_on_hyphens=False)))
    for failure in known.failures.values():
        print(printable(f"not loaded  {failure.name} ({failure.distribution}): {failure.reason}"))
    print("\ntrl-replay list KIND tells what each does, and trl-replay list NAME documents one.")
    return 0


def _called(name: str, found: Sequence[Offer]) -> list[Offer]:
    """The offers of this name, with or without their plugin's name.

    Raises:
        UnknownNameError: There is none; says the nearest name.
    """
    called = [offer for offer in found if name in offer.names]
    if called:
        return called
    names = sorted(set().union(*(offer.names for offer in found)))
    near = nearest(name, names)
    raise UnknownNameError(f"There is no strategy, preset or plugin {name!r}.{near} `trl-replay list` shows all.")


LIST = Command("list", "presets, strategies and plugins by name, or what one of them is", _add_options, _list)
