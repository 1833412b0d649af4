"""The command line: `trl-replay list | check | demo`. Torch and TRL are imported only inside the commands that need
them."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import ReplayError

PACKAGES = (
    "trl-replay",
    "trl",
    "torch",
    "transformers",
    "accelerate",
    "pluggy",
)


class Command(NamedTuple):
    """A subcommand: its name, one line of help, what adds its options, and what runs it (returns the exit status)."""

    name: str
    summary: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=_positive,
        default=400,
        help="updates a run, each of 64 completions",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="one run of each arm a seed",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        help="folder of the picture and the figures",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("give a whole number of at least 1")
    return value


def offers() -> dict[str, list[dict[str, Any]]]:
    """Every strategy and preset on offer, with its distribution, and every plugin that could not be loaded."""
    from ..registry import BUILTIN, Plugin, registry
    from ..specs import SPECS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # failures are listed
        known = registry()

    def origin(plugin: Plugin, name: str) -> dict[str, Any]:
        qualified = name if plugin.name == BUILTIN else f"{plugin.name}/{name}"
        return {"name": qualified, "distribution": plugin.distribution}

    strategies = [
        {"kind": kind, **origin(plugin, spec.name), "summary": spec.summary}
        for kind in SPECS
        for plugin, spec in known.strategies(kind)
    ]
    presets = [
        {
            **origin(plugin, preset.name),
            "summary": preset.summary,
            "settings": dict(preset.settings),
        }
        for plugin, preset in known.presets()
    ]
    failures = [
        {
            "name": failure.name,
            "distribution": failure.distribution,
            "reason": failure.reason,
        }
        for failure in known.failures.values()
    ]
    return {"strategies": strategies, "presets": presets, "failures": failures}


def _list(options: argparse.Namespace) -> int:
    found = offers()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    console = _console()
    rows = [[row["kind"], row["name"], row["summary"], row["distribution"]] for row in found["strategies"]]
    rows += [["preset", row["name"], row["summary"], row["distribution"]] for row in found["presets"]]
    console.print(
        _table(
            "Strategies and presets",
            ("kind", "name", "what it does", "distribution"),
            rows,
        )
    )
    if found["failures"]:
        rows = [[row["name"], row["distribution"], row["reason"]] for row in found["failures"]]
        console.print(
            _table(
                "Plugins that were not loaded",
                ("plugin", "distribution", "why"),
                rows,
            )
        )
    return 0


def diagnosis() -> dict[str, Any]:
    """Versions, the tested TRL releases, and everything that makes the installed TRL unusable."""
    versions = {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }
    problems = [f"{name} is not installed" for name, found in versions.items() if found is None]
    tested, drifted = None, list[str]()
    if not problems:
        from .. import canary, compat
        from ..errors import ContractError

        tested = str(compat.TESTED)
        try:
            compat.check_release()
            import trl
            from trl import GRPOTrainer

            problems += compat.contract_problems(GRPOTrainer)
            drifted = canary.drift(Path(trl.__path__[0]))
        except (
            ContractError,
            ImportError,
            RuntimeError,
        ) as error:  # TRL's lazy modules raise RuntimeError
            problems.append(str(error))
    return {
        "versions": versions,
        "tested": tested,
        "problems": problems,
        "drift": drifted,
        "usable": not problems,
    }


def _check(options: argparse.Namespace) -> int:
    found = diagnosis()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0 if found["usable"] else 1
    console = _console()
    rows = [[name, version or "not installed"] for name, version in found["versions"].items()]
    console.print(_table("Installed", ("package", "version"), rows))
    if found["usable"]:
        console.print(
            f"usable: trl_replay was tested with TRL {found['tested']}, and trl.GRPOTrainer has every method that it "
            "wraps, with the parameters that it expects"
        )
        _show_drift(found["drift"])
        return 0
    console.print("[bold]not usable:[/bold]")
    for problem in found["problems"]:
        console.print(f"  - {problem}", markup=False)
    return 1


def _show_drift(drifted: Sequence[str]) -> None:
    """What the drift canary says of the installed TRL's source."""
    console = _console()
    if not drifted:
        console.print("its source: callers, batch keys and the order of reads in the loss are those that it relies on")
        return
    console.print("[bold]its source differs from what trl_replay relies on; run-time checks stay on:[/bold]")
    for words in drifted:
        console.print(f"  - {words}", markup=False)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint: …/checkpoint-12")
    parser.add_argument("out", type=Path, help="file to write: out.parquet")


def _export(options: argparse.Namespace) -> int:
    from ..offline.export import of_checkpoint, write

    count = write(options.out, of_checkpoint(options.checkpoint))
    print(f"written: {options.out}, {count} completions")
    return 0


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint: …/checkpoint-12")
    parser.add_argument(
        "--entries",
        type=_positive,
        default=3,
        help="entries shown from the top and from the bottom",
    )
    _json_option(parser)


def _inspect(options: argparse.Namespace) -> int:
    from ..report.inspection import facts, inspect

    found = inspect(options.checkpoint, options.entries)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    console = _console()
    console.print(_table(found["checkpoint"], ("", ""), facts(found)))
    for name, title in (("top", "Highest scores"), ("bottom", "Lowest scores")):
        rows = [
            [
                entry["prompt"],
                f"{entry['score']:.4g}",
                str(entry["age"]),
                str(entry["uses"]),
                _completions(entry),
            ]
            for entry in found[name]
        ]
        if rows:
            columns = (
                "prompt",
                "score",
                "age",
                "uses",
                "completions, advantage first",
            )
            console.print(_table(title, columns, rows))
    return 0


def _completions(entry: Mapping[str, Any]) -> str:
    return "\n".join(f"{row['advantage']:+.2f} {row['text']!r}" for row in entry["completions"])


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        help="the trainer's output_dir, or one of its checkpoints",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="file to write; report.html in the run's folder if not given",
    )


def _report(options: argparse.Namespace) -> int:
    from ..report.page import write_report

    print(f"written: {write_report(options.folder, options.out)}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from ..demo.show import show

    return show(options.steps, options.seeds, options.out)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*map(Text, row))  # a plugin's words are no markup
    return table


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


COMMANDS = (
    Command(
        "list",
        "every strategy and preset, with the distribution it comes from",
        _json_option,
        _list,
    ),
    Command(
        "check",
        "versions, and whether the installed TRL can be used",
        _json_option,
        _check,
    ),
    Command(
        "export",
        "writes a checkpoint's buffer to Parquet, one row a completion",
        _export_options,
        _export,
    ),
    Command(
        "inspect",
        "what is in a checkpoint's buffer",
        _inspect_options,
        _inspect,
    ),
    Command(
        "report",
        "a run's log and buffer as one HTML page",
        _report_options,
        _report,
    ),
    Command(
        "demo",
        "trains a tiny task with stock GRPO and with replay, in about a minute",
        _demo_options,
        _demo,
    ),
)


def parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    main_parser = argparse.ArgumentParser(prog="trl-replay", description="A replay buffer for TRL's GRPOTrainer.")
    subparsers = main_parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        command.options(subparser)
        subparser.set_defaults(run=command.run)
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (
        ReplayError,
        OSError,
    ) as error:  # the latter where a file can't be read or written
        print(f"trl-replay: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
