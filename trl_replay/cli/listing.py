"""`trl-replay list`: what the installed plugins offer, and what one strategy, preset or plugin is."""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import UnknownNameError
from ..plain import in_json
from .command import Command, add_json_option
from .tables import make_console, make_table, printable

if TYPE_CHECKING:
    from rich.table import Table

    from ..registry import Plugin, Registry
    from ..specs import Kind, StrategySpec

NEAREST = 3
"""How many similar names an unknown one is answered with, at most."""


def offers() -> dict[str, list[dict[str, Any]]]:
    """Every strategy and preset on offer and every plugin that can take part in training, with its distribution; and
    the plugins that could not be loaded."""
    from ..registry import registry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # failures are listed
        known = registry()
    return {
        "strategies": _strategies(known),
        "presets": _presets(known),
        "plugins": _plugins(known),
        "failures": _failures(known),
    }


def _strategies(known: Registry) -> list[dict[str, Any]]:
    from ..config import ReplayConfig
    from ..specs import SPECS

    defaults = ReplayConfig()
    rows = []
    for kind in SPECS:
        default = getattr(defaults, f"replay_{kind}")
        rows += [_strategy(kind, plugin, spec, default) for plugin, spec in known.strategies(kind)]
    return rows


def _strategy(kind: Kind, plugin: Plugin, spec: StrategySpec, default: str) -> dict[str, Any]:
    from ..arguments import arguments_of

    name = _qualified(spec.name, plugin)
    taken = arguments_of(spec.factory, kind)
    return {
        "kind": kind,
        "name": name,
        "distribution": plugin.distribution,
        "summary": spec.summary,
        "default": name == default,
        "arguments": [
            {"name": argument.name, "required": argument.required, "default": in_json(argument.default)}
            for argument in taken.named
        ],
        "signature": str(taken),
        "docstring": _docstring(spec.factory),
    }


def _docstring(factory: Any) -> str:
    """A factory's own; of a factory that was given some arguments before, that of the first."""
    while isinstance(factory, partial):
        factory = factory.func
    return inspect.getdoc(factory) or ""


def _presets(known: Registry) -> list[dict[str, Any]]:
    rows = []
    for plugin, preset in known.presets():
        rows.append(
            {
                "name": _qualified(preset.name, plugin),
                "distribution": plugin.distribution,
                "summary": preset.summary,
                "settings": dict(preset.settings),
                "documentation": preset.documentation,
            }
        )
    return rows


def _plugins(known: Registry) -> list[dict[str, Any]]:
    """Those for `replay_plugins`: with a hook that is called in a session."""
    from ..hookspecs import SessionHooks, hook_names
    from ..registry import BUILTIN

    rows = []
    for plugin in known.plugins.values():
        hooks = [hook for hook in hook_names(SessionHooks) if callable(getattr(plugin.object, hook, None))]
        if hooks and plugin.name != BUILTIN:
            docstring = inspect.getdoc(plugin.object) or ""
            rows.append(
                {
                    "name": plugin.name,
                    "distribution": plugin.distribution,
                    "summary": docstring.partition("\n")[0],
                    "hooks": hooks,
                    "signature": _signature(plugin.object),
                    "docstring": docstring,
                }
            )
    return rows


def _signature(plugin: object) -> str:
    """The arguments that a plugin is made with; empty if it takes none."""
    from ..arguments import arguments_of

    return "" if inspect.ismodule(plugin) else str(arguments_of(type(plugin)))


def _failures(known: Registry) -> list[dict[str, Any]]:
    rows = []
    for failure in known.failures.values():
        rows.append({"name": failure.name, "distribution": failure.distribution, "reason": failure.reason})
    return rows


def _qualified(name: str, plugin: Plugin) -> str:
    """The name as a setting takes it, where other plugins may offer the same."""
    from ..registry import BUILTIN

    return name if plugin.name == BUILTIN else f"{plugin.name}/{name}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a strategy's, preset's or plugin's name: shows arguments and documentation; all are listed without",
    )
    add_json_option(parser)


def _list(options: argparse.Namespace) -> int:
    on_offer = offers()
    if options.name is not None:
        on_offer = _called(options.name, on_offer)
    if options.json:
        print(json.dumps(on_offer, indent=2))
    elif options.name is not None:
        texts = [
            *map(_strategy_in_words, on_offer["strategies"]),
            *map(_preset_in_words, on_offer["presets"]),
            *map(_plugin_in_words, on_offer["plugins"]),
        ]
        print(printable("\n\n\n".join(texts)))
    else:
        _print_tables(on_offer)
    return 0


def _called(name: str, on_offer: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Of all that is on offer what has this name, with or without its plugin's.

    Raises:
        UnknownNameError: Nothing has; says the nearest names, and which plugins were not loaded.
    """
    found = {}
    for what in ("strategies", "presets", "plugins"):
        found[what] = [offer for offer in on_offer[what] if name in _names(offer)]
    if any(found.values()):
        return found
    known = {known for what in found for offer in on_offer[what] for known in _names(offer)}
    near = difflib.get_close_matches(name, sorted(known), n=NEAREST)
    hint = f" The nearest: {', '.join(near)}." if near else ""
    failed = [
        f" The plugin {failure['name']!r} from {failure['distribution']} was not loaded: {failure['reason']}"
        for failure in on_offer["failures"]
    ]
    raise UnknownNameError(
        f"There is no strategy, preset or plugin {name!r}.{hint} `trl-replay list` shows all.{''.join(failed)}"
    )


def _names(offer: dict[str, Any]) -> set[str]:
    """What it can be called: `freshness/decayed`, `decayed`, and with all that its plugin offers `freshness`."""
    plugin, _, short = offer["name"].rpartition("/")
    return {offer["name"], short, plugin} - {""}


def _strategy_in_words(strategy: dict[str, Any]) -> str:
    kind = strategy["kind"]
    facts = {
        "kind": f"{kind}: replay_{kind}={json.dumps(strategy['name'])}",
        "distribution": strategy["distribution"],
        "arguments": f"{strategy['signature']} (replay_{kind}_kwargs)" if strategy["signature"] else "none",
        "what it does": strategy["summary"],
    }
    default = f", the default {kind}" if strategy["default"] else ""
    return _in_words(f"{strategy['name']}{default}", facts, strategy["docstring"])


def _preset_in_words(preset: dict[str, Any]) -> str:
    facts = {
        "kind": f"preset: replay_preset={json.dumps(preset['name'])}",
        "distribution": preset["distribution"],
        "what it does": preset["summary"],
    }
    settings = "\n".join(f"{name}={value!r}" for name, value in preset["settings"].items())
    return _in_words(preset["name"], facts, settings, preset["documentation"].strip())


def _plugin_in_words(plugin: dict[str, Any]) -> str:
    facts = {
        "kind": f"plugin: replay_plugins={json.dumps([plugin['name']])}",
        "distribution": plugin["distribution"],
        "arguments": f"{plugin['signature']} (replay_plugins_kwargs)" if plugin["signature"] else "none",
        "hooks": ", ".join(plugin["hooks"]),
    }
    return _in_words(plugin["name"], facts, plugin["docstring"])


def _in_words(title: str, facts: dict[str, str], *texts: str) -> str:
    """A title, a line for each fact, and texts that are not empty, each after an empty line."""
    lines = [f"  {name:12}  {fact}" for name, fact in facts.items()]
    return "\n".join([title, *lines, *(f"\n{text}" for text in texts if text)])


def _print_tables(on_offer: dict[str, list[dict[str, Any]]]) -> None:
    console = make_console()
    rows = []
    for strategy in on_offer["strategies"]:
        name = f"{strategy['name']} (default)" if strategy["default"] else strategy["name"]
        rows.append(_row(strategy["kind"], name, strategy, strategy["signature"]))
    for preset in on_offer["presets"]:
        rows.append(_row("preset", preset["name"], preset, ""))
    for plugin in on_offer["plugins"]:
        rows.append(_row("plugin", plugin["name"], plugin, plugin["signature"]))
    columns = ("kind", "name", "what it does", "arguments", "distribution")
    console.print(make_table("Strategies, presets and plugins", columns, rows))
    if on_offer["failures"]:
        console.print(_failures_table(on_offer["failures"]))


def _row(kind: str, name: str, offer: dict[str, Any], arguments: str) -> list[str]:
    return [kind, name, offer["summary"], arguments, offer["distribution"]]


def _failures_table(failures: Sequence[dict[str, Any]]) -> Table:
    columns = ("plugin", "distribution", "why")
    rows = [[failure["name"], failure["distribution"], failure["reason"]] for failure in failures]
    return make_table("Plugins that were not loaded", columns, rows)


LIST = Command(
    "list", "every strategy, preset and plugin with its arguments, or what one of them is", _add_options, _list
)
