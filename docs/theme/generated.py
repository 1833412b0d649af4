"""What the site makes from the code: the settings, the commands, and a page for each preset. Imports no mkdocs."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import get_type_hints

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *map(str, ROOT.glob("plugins/*/src"))]

import trl_replay_curricula  # noqa: E402
from trl_replay_papers import METHODS  # noqa: E402
from trl_replay_papers.cards import parsed  # noqa: E402

from trl_replay import Preset, ReplayConfig  # noqa: E402
from trl_replay.cli.commands import parser  # noqa: E402
from trl_replay.strategies import Builtin  # noqa: E402

MARK = re.compile(r"^<!-- (\w+) -->$", re.MULTILINE)
FIRST = re.compile(r".+?[.:](?= |$)")
"""The first sentence of a setting's help."""
PAGE = re.compile(r"\bdocs/([\w/-]+\.md)")
PAPERS = "trl-replay-papers"
SETTINGS = {field.name: field for field in fields(ReplayConfig)}
TYPES = get_type_hints(ReplayConfig)


def filled(markdown: str) -> str:
    """A page with what the code says in the place of its marks, such as `<!-- settings -->`."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), markdown)


def settings() -> str:
    """Every setting: a table, and a section with an anchor for each."""
    table = ["| setting | default | |", "|---|---|---|", *map(_row, SETTINGS.values())]
    sections = map(_section, SETTINGS.values())
    return "\n".join(table) + "\n\n" + "\n".join(sections)


def _row(field: Field[object]) -> str:
    return f"| [`{field.name}`](#{field.name}) | {_default(field)} | {_first(field)} |"


def _first(field: Field[object]) -> str:
    found = FIRST.match(field.metadata["help"])
    assert found, field.name
    return found[0].rstrip(":")


def _section(field: Field[object]) -> str:
    kind = re.fullmatch(r"replay_(\w+?)(?:_kwargs)?", field.name)
    listed = f" [All {kind[1]}s](strategies.md#{kind[1]}s)." if kind and f"replay_{kind[1]}_kwargs" in SETTINGS else ""
    listed = "" if field.name.startswith("replay_plugins") else listed
    hint = TYPES[field.name]  # field.type may be changed by TrlParser
    type_ = hint.__name__ if hint in (bool, int, float, str) else str(hint).replace("typing.", "")
    return f"## `{field.name}`\n\n`{type_}`, default: {_default(field)}\n\n{_linked(field.metadata['help'])}{listed}\n"


def _default(field: Field[object]) -> str:
    value = getattr(ReplayConfig(), field.name)
    return "not set" if value is None else f"`{_literal(value)}`"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _linked(text: str) -> str:
    """A docstring in which the pages that it names are links, from a folder of docs/."""
    return PAGE.sub(r"[\1](../\1)", text)


def commands() -> str:
    """The help of every command; of `run` without the settings, which have their page."""
    (subparsers,) = (action for action in parser()._actions if action.dest == "run" or action.choices)
    assert isinstance(subparsers.choices, dict)
    shown = ((name, each.format_help().partition("\nsettings:")[0]) for name, each in subparsers.choices.items())
    return "\n".join(f"## `trl-replay {name}`\n\n```text\n{text.rstrip()}\n```\n" for name, text in shown)


def presets() -> str:
    """A table of all presets of papers."""
    rows = [f"| [`{name}`](methods/{name}.md) | {' | '.join(_cells(name))} |" for name in METHODS]
    return "\n".join(["| preset | what it is | replays or changes |", "|---|---|---|", *rows])


def _cells(name: str) -> list[str]:
    card = parsed(PRESETS[name].documentation)
    return [cell.replace("|", r"\|") for cell in (card.title, card.level)]


def method_pages() -> dict[str, str]:
    """A page for each preset by its path in docs/."""
    return {f"methods/{name}.md": _method(preset) for name, preset in PRESETS.items()}


def _method(preset: Preset) -> str:
    """What a preset is, how to use it, what it sets, and what is written about it."""
    text = preset.documentation
    if not text.startswith("# "):
        text = f"# `{preset.name}`: {preset.summary}\n\n{_linked(text)}"
    head, gap, rest = text.partition("\n## ")
    sets = ", ".join(f"`{name}={_literal(value)}`" for name, value in preset.settings.items())
    install = (
        ""
        if preset.name not in METHODS
        else f"After `pip install plugins/{_distribution(preset.name)}`, in a clone:\n\n"
    )
    use = f'```python\ntrl_replay.attach(trainer, replay_preset="{preset.name}")\n```\n'
    return f"{head.rstrip()}\n\n{install}{use}\nSets {sets}. What you set yourself keeps your value.\n{gap}{rest}"


def _distribution(name: str) -> str:
    return "trl-replay-curricula" if hasattr(trl_replay_curricula, name) else PAPERS


def sources() -> dict[Path, str]:
    """By the file that a preset's text stands in, the path of its page in docs/."""
    package = ROOT / "plugins" / PAPERS / "src" / "trl_replay_papers"
    cards = Path(trl_replay_curricula.__file__).parent / "cards"
    found = {package / name / "card.md": f"methods/{name}.md" for name in METHODS}
    found |= {cards / f"{name}.md": f"methods/{name}.md" for name in METHODS}
    return found | {ROOT / "trl_replay" / "strategies" / "__init__.py": "methods/sample_efficient.md"}


def _presets() -> Iterator[Preset]:
    """The built-in presets, and those of the methods' plugins."""
    yield from Builtin().trl_replay_presets()
    for file in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        points = tomllib.loads(file.read_text())["project"]["entry-points"]["trl_replay"]
        for name in points.keys() & set(METHODS):
            plugin = importlib.metadata.EntryPoint(name, points[name], "trl_replay").load()
            yield from plugin.trl_replay_presets()


BUILT_IN = ("sample_efficient", "second_run")
PRESETS = {
    preset.name: preset for preset in sorted(_presets(), key=lambda preset: [*BUILT_IN, *METHODS].index(preset.name))
}
PARTS = {"settings": settings, "commands": commands, "presets": presets}
