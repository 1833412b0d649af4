"""The files beside the code: one version, links that lead somewhere, known failures that a test holds."""

import ast
import dataclasses
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from markdown_it import MarkdownIt

import trl_replay
from trl_replay.testing import make_groups

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = PROJECT["project"]["urls"]["Repository"]
IN_REPOSITORY = re.compile(
    rf"(?:{re.escape(REPOSITORY)}/(?:blob|tree)|{REPOSITORY.replace('github.com', 'raw.githubusercontent.com')})/main/"
)
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("plugins/*/README.md"),
        *ROOT.glob("benchmarks/**/*.md"),
        *ROOT.glob("examples/*.md"),
    )
]
WIDTH = 119


def inline(page, environment=None):
    """The texts, links and pictures of a page, as they are rendered."""
    blocks = MarkdownIt().enable("table").parse((ROOT / page).read_text(), environment)
    return [child for block in blocks for child in block.children or ()]


def targets(page):
    """The targets of a page's links and pictures."""
    found = [token.attrs.get("href") or token.attrs.get("src") for token in inline(page)]
    return [str(target) for target in found if target]


def test_the_version_stands_in_the_package_alone():
    assert "version" in PROJECT["project"]["dynamic"]
    assert "version" not in PROJECT["project"]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())
    source = (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text()
    assert f'__version__ = "{trl_replay.__version__}"' in source


def test_pre_commit_has_the_ruff_of_the_constraints():
    pinned = re.search(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert pinned
    assert repository["rev"] == f"v{pinned[1]}"


def test_continuous_integration_runs_on_every_python_that_is_promised():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["ci"]
    promised = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert job["strategy"]["matrix"]["python"] == promised
    assert ".ci/run" in [step.get("run") for step in job["steps"]]


WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_every_action_is_pinned_by_its_commit_with_the_version_beside_it():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (.*)", path.read_text())
        assert used
        assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_only_what_uploads_may_ask_for_an_identity():
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job, content in workflow["jobs"].items():
            writes = "write" in content.get("permissions", {}).values()
            assert writes == ((name, job) in {("release", "build"), ("release", "publish"), ("docs", "deploy")})


def test_a_release_whose_tag_is_another_version_stops():
    (command,) = [
        step["run"] for step in WORKFLOWS["release"]["jobs"]["build"]["steps"] if "tag" in step.get("name", "")
    ]
    for tag, status in ((f"v{trl_replay.__version__}", 0), ("v9.9.9", 1)):
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env={"GITHUB_REF_NAME": tag}, capture_output=True)
        assert done.returncode == status, tag


SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "smollm2_reasoning.py"])
def test_an_example_says_what_it_needs_so_that_uv_can_run_it(name):
    """One needs a package without its requirements, which no header can say."""
    source = (ROOT / "examples" / name).read_text()
    (block,) = re.findall(r"^# /// script\n((?:#(?: .*)?\n)+?)# ///$", source, re.MULTILINE)
    header = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    assert header["requires-python"] == PROJECT["project"]["requires-python"]
    ours = {re.split("[<>=]", line)[0] for line in PROJECT["project"]["dependencies"]}
    comes_along = ours | {"__future__", "datasets", "tokenizers", "trl_replay"}  # TRL brings these
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    imported = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    needed = imported - comes_along - {Path(script).stem for script in SCRIPTS}
    assert sorted(header["dependencies"]) == sorted({"trl-replay", *needed})
    assert header["tool"]["uv"]["sources"] == {"trl-replay": {"path": ".."}}


@pytest.mark.parametrize("page", PAGES)
def test_every_reference_is_defined_and_every_definition_used(page):
    environment = {}
    texts = [token.content for token in inline(page, environment) if token.type == "text"]
    assert not [text for text in texts if re.search(r"\[[^\]]*\w\.md\]|\]\[", text)], f"{page}: no such reference"
    for reference in environment.get("references", {}).values():
        assert reference["href"] in targets(page), f"{page}: nothing refers to {reference['href']}"


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page):
    for target in targets(page):
        path = target.partition("#")[0]
        assert re.match(r"https?:", target) or ((ROOT / page).parent / path).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_prose_is_wrapped(page):
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


def numbers(test):
    """Of the known failures that a test is about: 14 and 15 for `test_14_and_15_…`."""
    found = re.match(r"test_(\d+(?:_and_\d+)*)_", test)
    return {int(number) for number in found[1].split("_and_")} if found else set()


def test_known_failures_are_numbered_without_a_gap():
    assert [int(row[0]) for row in FAILURES] == list(range(1, 37))


@pytest.mark.parametrize("row", FAILURES, ids=lambda row: row[0])
def test_every_known_failure_has_a_test_with_its_number(row):
    number, *words = row
    assert len(words) == 2
    assert all(words)
    assert any(int(number) in numbers(name) for name in TESTS)


def test_the_source_distribution_holds_the_documentation_and_no_tests_and_its_description_has_absolute_links(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob(f"trl_replay-{trl_replay.__version__}.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        metadata = archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert metadata is not None
        description = metadata.read().decode()
    pages = {page for page in PAGES if not page.startswith(("plugins/", "benchmarks/"))}
    assert pages | {"LICENSE", "CITATION.cff", "pyproject.toml", "trl_replay/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "plugins/"))]
    links = [
        link
        for link in re.findall(r"""(?:\]\(|src="|srcset=")([^)"]+)""", description)
        if not re.search("//arxiv.org/|/badge|/actions/|//colab.research.google.com/", link)
    ]
    assert len(links) > 20
    for link in links:
        place = IN_REPOSITORY.match(link)
        assert place, f"{link} leads nowhere on a package index"
        assert (ROOT / link[place.end() :].partition("#")[0]).exists(), link


def test_the_changes_that_mutants_makes_by_name_stand_in_the_code():
    mutants = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "mutants.py")))
    for one in mutants.NAMED:
        code = (ROOT / "trl_replay" / one.module).read_text()
        assert code.count(one.old) == 1, f"{one.name}: {one.module} holds its text {code.count(one.old)} times"
    files = {mutants.BROAD, *(name for names in mutants.ALSO.values() for name in names)}
    assert [name for name in sorted(files) if not (ROOT / "tests" / name).is_file()] == []


def test_the_skill_for_coding_agents_is_true():
    path = ROOT / ".agents" / "skills" / "trl-replay" / "SKILL.md"
    _, head, text = path.read_text().split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["name"] == path.parent.name
    assert len(about["description"]) < 1024
    settings = set(re.findall(r"\breplay_[a-z_]+", text))
    known = {field.name for field in dataclasses.fields(trl_replay.ReplayConfig)}
    assert settings <= known, settings - known
    module = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1], module)
    (spec,) = module["trl_replay_strategies"]()
    assert spec.factory()(make_groups([[0.0, 1.0], [0.0, 0.5]]), None).tolist() == [1.0, 0.5]
