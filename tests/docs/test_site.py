"""The documentation site, without mkdocs: its pages, what stands on them, and how it is built."""

import importlib
import inspect
import re
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from trl_replay_papers import METHODS

import trl_replay
from trl_replay import ReplayConfig
from trl_replay.base.validation import arguments_of
from trl_replay.data.table import COLUMNS
from trl_replay.registry import registry
from trl_replay.specs import SPECS

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """Reads what mkdocs reads, but for Python objects."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
API = {path.name: path.read_text() for path in sorted((DOCS / "api").glob("*.md"))}
DIRECTIVES = [
    (page, name, yaml.safe_load(options or "{}"))
    for page, text in API.items()
    for name, options in re.findall(r"^::: ([\w.]+)\n((?:    .*\n)*)", text + "\n", re.MULTILINE)
]


def generated():
    """Pages that the site makes from the code: docs/theme/generated.py."""
    return SimpleNamespace(**runpy.run_path(str(DOCS / "theme" / "generated.py")))


def in_navigation(entries):
    """Every page that the navigation names, in its order."""
    if isinstance(entries, str):
        return [entries]
    nested = entries.values() if isinstance(entries, dict) else entries
    return [page for entry in nested for page in in_navigation(entry)]


NAVIGATION = in_navigation(CONFIG["nav"])
INSIDE = [page for page in NAVIGATION if not page.startswith("https://")]
OUTSIDE = [page for page in NAVIGATION if page.startswith("https://")]


def find(name):
    """The names in directives: `trl_replay.errors`, `trl_replay.hookspecs.SessionHooks`."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        found = getattr(found, part, None) or importlib.import_module(".".join(parts[:number]))
    return found


def rows(text):
    """The cells of all tables, headings included; a bar in a cell is escaped."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_page_is_in_the_navigation_once():
    pages = {path.relative_to(DOCS).as_posix() for kind in ("md", "ipynb") for path in DOCS.rglob(f"*.{kind}")}
    assert sorted(INSIDE) == sorted(pages)


def test_llms_txt_names_every_page_and_where_its_markdown_is():
    text = runpy.run_path(str(DOCS / "theme" / "llms.py"))["llms"](CONFIG)
    assert text.startswith(f"# trl-replay\n\n> {CONFIG['site_description']}\n\n## Start\n")
    raw = "https://raw.githubusercontent.com/trl-replay/trl-replay/main/docs/"
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.MULTILINE)
    written = [page for page in NAVIGATION if page in OUTSIDE or (DOCS / page).is_file()]
    assert links == [page if page in OUTSIDE else raw + page for page in written]
    assert (
        "(https://raw.githubusercontent.com/trl-replay/trl-replay/main/docs/running.md): `trl-replay run` runs" in text
    )
    assert "docs/theme/llms.py" in CONFIG["hooks"]


def test_what_the_navigation_names_outside_is_in_the_repository():
    prefix = f"{CONFIG['repo_url']}/blob/main/"
    for page in OUTSIDE:
        assert page.startswith(prefix)
        assert (ROOT / page.removeprefix(prefix)).is_file()


@pytest.mark.parametrize("page", [page for page in INSIDE if page.endswith(".md")])
def test_every_script_and_test_file_that_a_page_names_exists(page):
    for path in re.findall(r"\b(?:tests|benchmarks|examples)/[\w/]+\.py\b", (DOCS / page).read_text()):
        assert (ROOT / path).is_file(), f"docs/{page}: there is no {path}"


@pytest.mark.parametrize(("page", "name", "options"), DIRECTIVES, ids=lambda value: value if value else "")
def test_what_an_api_page_shows_exists_and_has_a_docstring(page, name, options):
    shown = find(name)
    assert inspect.getdoc(shown)
    members = options.get("options", {}).get("members") or []
    for member in members:
        assert inspect.getdoc(getattr(shown, member)), f"docs/api/{page}: {name}.{member}"


def test_every_column_of_the_table_is_described_with_its_type():
    described = {row[0]: row[1] for row in rows(API["buffer.md"])}
    for name, dtype in COLUMNS.items():
        assert described[f"`{name}`"] == np.dtype(dtype).name


STRATEGIES = (DOCS / "reference" / "strategies.md").read_text()


@pytest.mark.parametrize("kind", SPECS)
def test_every_built_in_strategy_has_a_row_in_its_table_with_its_arguments_and_the_default_is_bold(kind):
    section = re.search(rf"^## {kind}s?\n(.*?)^## ", STRATEGIES, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    assert section
    found = rows(section[1])
    default = getattr(ReplayConfig(), f"replay_{kind}")
    assert [row[0] for row in found if row[0].startswith("**")] == [f"**`{default}`**"]
    described = {row[0].strip("*`"): " ".join(row) for row in found}
    for plugin, spec in registry().strategies(kind):
        if plugin.name == "builtin":
            row = described[spec.name]
            for argument in arguments_of(spec.factory).named:
                text = argument.name if argument.default is None else str(argument)
                assert text in row, f"docs/reference/strategies.md: {text} is no argument of the {kind} {spec.name}"


def test_what_pages_have_from_the_code_stands_in_the_repository_as_it_is_now():
    """So that it can be read without building the site. Lines may break elsewhere with another Python's argparse."""
    pages = generated().pages()
    parts = {part for page in pages for part in re.findall(r"^<!-- (\w+) -->$", page.read_text(), re.MULTILINE)}
    assert parts == set(generated().PARTS)
    for page, text in pages.items():
        assert page.read_text().split() == text.split(), f"{page.relative_to(ROOT)} is old: make pages"


def test_every_public_name_stands_on_one_of_the_pages_of_the_api():
    described = "\n".join(text for page, text in API.items() if page != "index.md")
    assert [name for name in trl_replay.__all__ if not re.search(rf"(:::|`)\s?trl_replay\.{name}\b", described)] == []


def test_every_preset_has_a_page_with_what_it_sets_and_a_row_in_the_index():
    made = generated()
    index = (DOCS / "methods.md").read_text()
    for page, text in made.method_pages().items():
        name = Path(page).stem
        preset = made.PRESETS[name]
        assert text.startswith(f"# `{name}`: ")
        assert all(f"`{setting}=" in text for setting in preset.settings)
        assert f"[`{name}`]" in index
    assert {Path(page).stem for page in made.method_pages()} == {*made.BUILT_IN, *METHODS}
    assert {len(row) for row in rows(made.presets())} == {3}, "a bar in a title is no border of a cell"


def test_the_index_of_methods_leads_to_the_text_of_each():
    shown = re.findall(r"^\[(\w+)\]: \.\./(.+)$", (DOCS / "methods.md").read_text(), re.MULTILINE)
    pages = generated().sources()
    assert {name: pages[ROOT / path] for name, path in shown} == {name: f"methods/{name}.md" for name, _ in shown}
    assert {name for name, _ in shown} == {"sample_efficient", *METHODS}


def test_a_page_or_a_report_shows_every_picture_of_the_benchmarks():
    pages = [ROOT / "README.md", DOCS / "evidence.md", *(ROOT / "benchmarks" / "reports").glob("*.md")]
    shown = "".join(page.read_text() for page in pages)
    for picture in (ROOT / "benchmarks" / "results").glob("*.png"):
        assert f"results/{picture.name}" in shown, f"no page or report shows {picture.name}"


def test_what_builds_the_site_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    constraints = (ROOT / "constraints.txt").read_text()
    for requirement in project["optional-dependencies"]["docs"]:
        name = re.split(r"[\[>=]", requirement)[0]
        assert re.search(rf"^{re.escape(name)}==", constraints, re.MULTILINE), f"constraints.txt does not pin {name}"
