"""What pages have from the code: settings, commands, and presets. Imports no mkdocs.

    python docs/theme/generated.py    # or `make pages`: writes it between the marks of the pages, such as
                                      # <!-- settings --> and <!-- /settings -->

The site also gets a page for each preset, which is in no file: on a site that shows the repository, its card is.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import Field, fields
from itertools import starmap
from pathlib import Path
from typing import get_type_hints
from unittest import mock

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trl_replay"
sys.path[:0] = [str(ROOT), *map(str, ROOT.glob("plugins/*/src"))]

import trl_replay_curricula  # noqa: E402
from trl_replay_papers import METHODS  # noqa: E402
from trl_replay_papers.cards import parsed  # noqa: E402

from trl_replay import Preset, ReplayConfig, run  # noqa: E402
from trl_replay.base.validation import STRATEGY_KINDS  # noqa: E402
from trl_replay.cli.commands import RUN, parser  # noqa: E402
from trl_replay.strategies import Builtin  # noqa: E402

MARKED = re.compile(r"^<!-- (\w+) -->\n.*?^<!-- /\1 -->$", re.MULTILINE | re.DOTALL)
WIDTH = 119
HELP = re.compile(r"^  -h, --help .*\n", re.MULTILINE)
"""Every command has it."""
PAGE = re.compile(r"\bdocs/([\w/-]+\.md)")
PAPERS = "trl-replay-papers"
SETTINGS = {field.name: field for field in fields(ReplayConfig)}
TYPES = get_type_hints(ReplayConfig)


def filled(markdown: str) -> str:
    """A page with what the code says between its marks."""
    return MARKED.sub(
        lambda found: f"<!-- {found[1]} -->\n\n{PARTS[found[1]]().rstrip()}\n\n<!-- /{found[1]} -->", markdown
    )


def settings() -> str:
    """Every setting: a table by purpose, and a section with an anchor for each."""
    table = ["| to choose | settings |", "|---|---|", *starmap(_row, run.GROUPS.items())]
    sections = map(_section, SETTINGS.values())
    return "\n".join(table) + "\n\n" + "\n".join(sections)


def _row(purpose: str, names: str) -> str:
    return f"| {purpose} | {', '.join(f'[`replay_{name}`](#replay_{name})' for name in names.split())} |"


def _section(field: Field[object]) -> str:
    kind = field.name.removeprefix("replay_")
    listed = f" [All {kind}s](strategies.md#{kind}s)." if kind in STRATEGY_KINDS else ""
    hint = TYPES[field.name]  # field.type may be changed by TrlParser
    type_ = hint.__name__ if hint in (bool, int, float, str) else str(hint).replace("typing.", "")
    text = _wrapped(_linked(field.metadata["help"]) + listed)
    return f"## `{field.name}`\n\n`{type_}`, default: {_default(field)}\n\n{text}\n"


def _wrapped(text: str) -> str:
    """A docstring's paragraphs, as wide as our pages."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        textwrap.fill(each, WIDTH, break_long_words=False, break_on_hyphens=False) for each in paragraphs
    )


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
    with mock.patch.dict(os.environ, COLUMNS="100"):
        helps = {name: each.format_help() for name, each in {**subparsers.choices, RUN: run.parser()}.items()}
    shown = ((name, HELP.sub("", text.partition("\nsettings of replay:")[0])) for name, text in helps.items())
    return "\n".join(f"## `trl-replay {name}`\n\n```text\n{text.rstrip()}\n```\n" for name, text in shown)


def presets() -> str:
    """A table of all presets of papers."""
    rows = [" | ".join([f"| [`{name}`]({page})", *_cells(name)]) + " |" for name, page in BUILT_IN.items()]
    rows += [" | ".join([f"| [`{name}`][{name}]", *_cells(name)]) + " |" for name in METHODS]
    return "\n".join(["| preset | what it is | replays or changes |", "|---|---|---|", *rows])


def _cells(name: str) -> list[str]:
    preset = PRESETS[name]
    card = parsed(preset.documentation) if name in METHODS else None
    words = [card.title, card.level] if card else [preset.summary, "groups"]
    return [cell.replace("|", r"\|") for cell in words]


def _sets(preset: Preset) -> str:
    return ", ".join(f"`{name}={_literal(value)}`" for name, value in preset.settings.items())


def method_pages() -> dict[str, str]:
    """A page for each preset by its path in docs/."""
    return {f"methods/{name}.md": _method(preset) for name, preset in PRESETS.items()}


def _method(preset: Preset) -> str:
    """What a preset is, how to use it, what it sets, and what is written about it."""
    text = preset.documentation
    if not text.startswith("# "):
        text = f"# `{preset.name}`: {preset.summary}\n\n{_linked(text)}"
    head, gap, rest = text.partition("\n## ")
    install = (
        ""
        if preset.name not in METHODS
        else f"After `pip install plugins/trl-replay-curricula plugins/{_distribution(preset.name)}`, in a clone:\n\n"
    )
    use = f'```python\ntrl_replay.attach(trainer, replay_preset="{preset.name}")\n```\n'
    sets = f"Sets {_sets(preset)}. What you set yourself keeps your value."
    return f"{head.rstrip()}\n\n{install}{use}\n{sets}\n{gap}{rest}"


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
        points = tomllib.loads(file.read_text())["project"]["entry-points"].get("trl_replay", {})
        for name in points.keys() & set(METHODS):
            plugin = importlib.metadata.EntryPoint(name, points[name], "trl_replay").load()
            yield from plugin.trl_replay_presets()


BUILT_IN = {"sample_efficient": "replayed-groups.md", "second_run": "files.md"}
"""The presets of the package, with the page on each."""
PRESETS = {
    preset.name: preset for preset in sorted(_presets(), key=lambda preset: [*BUILT_IN, *METHODS].index(preset.name))
}
PARTS = {"settings": settings, "commands": commands, "presets": presets}


def pages() -> dict[Path, str]:
    """The pages that have something from the code, as they should be."""
    found = {page: page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))}
    return {page: filled(text) for page, text in found.items() if MARKED.search(text)}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
