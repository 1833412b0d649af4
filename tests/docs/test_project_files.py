"""The files beside the code: one version, links that lead somewhere, known failures that a test holds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

import trl_replay

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = PROJECT["project"]["urls"]["Repository"]
IN_REPOSITORY = re.compile(
    rf"(?:{re.escape(REPOSITORY)}/(?:blob|tree)|{REPOSITORY.replace('github.com', 'raw.githubusercontent.com')})/main/"
)
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md"))
]
WIDTH = 119


def inline(page: str, environment: dict[str, Any] | None = None) -> list[Token]:
    """The texts, links and pictures of a page, as they are rendered."""
    blocks = MarkdownIt().enable("table").parse((ROOT / page).read_text(), environment)
    return [child for block in blocks for child in block.children or ()]


def targets(page: str) -> list[str]:
    """Where a page's links and pictures lead."""
    found = [token.attrs.get("href") or token.attrs.get("src") for token in inline(page)]
    return [str(target) for target in found if target]


def test_the_version_stands_in_the_package_alone() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert "version" not in PROJECT["project"]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())
    source = (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text()
    assert f'__version__ = "{trl_replay.__version__}"' in source


def test_pre_commit_has_the_ruff_of_the_constraints() -> None:
    pinned = re.search(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert pinned
    assert repository["rev"] == f"v{pinned[1]}"


def test_continuous_integration_runs_on_every_python_that_is_promised() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["ci"]
    promised = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert job["strategy"]["matrix"]["python"] == promised
    assert ".ci/run" in [step.get("run") for step in job["steps"]]


def test_the_readmes_links_lead_somewhere_on_a_package_index_too() -> None:
    found = targets("README.md")
    assert len(found) > 10
    for target in found:
        assert target.startswith("https://"), f"{target} leads nowhere outside of the repository"
        place = IN_REPOSITORY.match(target)
        assert not place or (ROOT / target[place.end() :]).exists(), f"{target} does not exist"


@pytest.mark.parametrize("page", PAGES)
def test_every_reference_is_defined_and_every_definition_used(page: str) -> None:
    environment: dict[str, Any] = {}
    texts = [token.content for token in inline(page, environment) if token.type == "text"]
    assert not [text for text in texts if re.search(r"\[[^\]]*\w\.md\]|\]\[", text)], f"{page}: no such reference"
    for reference in environment.get("references", {}).values():
        assert reference["href"] in targets(page), f"{page}: nothing refers to {reference['href']}"


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page: str) -> None:
    for target in targets(page):
        path = target.partition("#")[0]
        if page.startswith("docs/") and path == "papers.md":  # made when the site is built
            continue
        assert re.match(r"https?:", target) or ((ROOT / page).parent / path).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_prose_is_wrapped(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    prose = [line for line in text.splitlines() if not re.match(r"\s*\||\[[^\]]+\]: ", line)]
    assert [line for line in prose if len(line) > WIDTH] == []


FAILURES = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in (ROOT / "docs" / "known-failures.md").read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


def numbers(test: str) -> set[int]:
    """Of the known failures that a test is about: 14 and 15 for `test_14_and_15_…`."""
    found = re.match(r"test_(\d+(?:_and_\d+)*)_", test)
    return {int(number) for number in found[1].split("_and_")} if found else set()


def test_known_failures_are_numbered_without_a_gap() -> None:
    assert [int(row[0]) for row in FAILURES] == list(range(1, len(FAILURES) + 1))
    assert len(FAILURES) >= 36


@pytest.mark.parametrize("row", FAILURES, ids=lambda row: row[0])
def test_every_known_failure_is_held_by_tests_that_exist(row: list[str]) -> None:
    number, *words, held = row
    assert len(words) == 3
    assert all(words)
    named = set(re.findall(r"`(test_\w+)`", held))
    assert named
    assert named <= TESTS, f"there is no {named - TESTS}"
    numbered = {name for name in TESTS if int(number) in numbers(name)}
    assert numbered <= named, f"{numbered - named} is about it, to go by its name"


def test_the_source_distribution_holds_the_documentation_and_no_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob(f"trl_replay-{trl_replay.__version__}.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    pages = {page for page in PAGES if not page.startswith("plugins/")}
    assert pages | {"LICENSE", "CITATION.cff", "pyproject.toml", "trl_replay/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "plugins/"))]


def test_the_changes_that_mutants_makes_by_name_stand_in_the_code() -> None:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    for one in mutants.NAMED:
        code = (ROOT / "trl_replay" / one.module).read_text()
        assert code.count(one.old) == 1, f"{one.name}: {one.module} holds its text {code.count(one.old)} times"
    files = {mutants.BROAD, *(name for names in mutants.ALSO.values() for name in names)}
    assert [name for name in sorted(files) if not (ROOT / "tests" / name).is_file()] == []
