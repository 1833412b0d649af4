"""`trl-replay list`: what the installed plugins offer."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .command import Command, add_json_option
from .tables import make_console, make_table

if TYPE_CHECKING:
    from rich.table import Table

    from ..registry import Plugin, Registry


def offers() -> dict[str, list[dict[str, Any]]]:
    """Every strategy and preset on offer, with its distribution, and every plugin that could not be loaded."""
    from ..registry import registry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # failures are listed
        known = registry()
    return {
        "strategies": _strategies(known),
        "presets": _presets(known),
        "failures": _failures(known),
    }


def _strategies(known: Registry) -> list[dict[str, Any]]:
    from ..specs import SPECS

    rows = []
    for kind in SPECS:
        for plugin, spec in known.strategies(kind):
            rows.append(
                {
                    "kind": kind,
                    "name": _qualified(spec.name, plugin),
                    "distribution": plugin.distribution,
                    "summary": spec.summary,
                }
            )
    return rows


def _presets(known: Registry) -> list[dict[str, Any]]:
    rows = []
    for plugin, preset in known.presets():
        rows.append(
            {
                "name": _qualified(preset.name, plugin),
                "distribution": plugin.distribution,
                "summary": preset.summary,
                "settings": dict(preset.settings),
            }
        )
    return rows


def _failures(known: Registry) -> list[dict[str, Any]]:
    rows = []
    for failure in known.failures.values():
        rows.append(
            {
                "name": failure.name,
                "distribution": failure.distribution,
                "reason": failure.reason,
            }
        )
    return rows


def _qualified(name: str, plugin: Plugin) -> str:
    """The name as a setting takes it, where other plugins may offer the same."""
    from ..registry import BUILTIN

    return name if plugin.name == BUILTIN else f"{plugin.name}/{name}"


def _list(options: argparse.Namespace) -> int:
    on_offer = offers()
    if options.json:
        print(json.dumps(on_offer, indent=2))
        return 0
    console = make_console()
    rows = []
    for strategy in on_offer["strategies"]:
        rows.append(_row(strategy["kind"], strategy))
    for preset in on_offer["presets"]:
        rows.append(_row("preset", preset))
    columns = ("kind", "name", "what it does", "distribution")
    console.print(make_table("Strategies and presets", columns, rows))
    if on_offer["failures"]:
        console.print(_failures_table(on_offer["failures"]))
    return 0


def _row(kind: str, offer: dict[str, Any]) -> list[str]:
    return [kind, offer["name"], offer["summary"], offer["distribution"]]


def _failures_table(failures: Sequence[dict[str, Any]]) -> Table:
    columns = ("plugin", "distribution", "why")
    rows = [[failure["name"], failure["distribution"], failure["reason"]] for failure in failures]
    return make_table("Plugins that were not loaded", columns, rows)


LIST = Command(
    "list",
    "every strategy and preset, with the distribution it comes from",
    add_json_option,
    _list,
)
