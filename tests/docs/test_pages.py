"""Commands, code and names in the documentation: each one runs, or names something that there is."""

import dataclasses
import re
import shlex
import shutil
from pathlib import Path

import datasets
import pytest
from resuming import digits
from support import DEAD, HALF, LIVE, Rewards
from teacher import TEACHER

import trl_replay
from trl_replay.cli.commands import COMMANDS, RUN, main, parser
from trl_replay.data.types import FIELDS
from trl_replay.setup.preflight import ON_LONG_ANSWERS
from trl_replay.testing import make_trainer

ROOT = Path(__file__).parents[2]
WRITTEN = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "api"]
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *WRITTEN)}
OURS = ("README.md", "checkpoints.md", "files.md")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], flags=re.MULTILINE | re.DOTALL)


def commands(page):
    """The lines of shell blocks, continued ones as one, without comments."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.split("#")[0].strip()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a run in `out` and a teacher's file: what the documentation's commands are about."""
    import json

    folder = tmp_path_factory.mktemp("documented")
    trainer = make_trainer(folder / "out", digits, max_steps=12, save_strategy="steps", save_steps=12)
    trl_replay.attach(trainer)
    trainer.train()
    shutil.copytree(folder / "out", folder / "stock")
    (folder / "teacher.jsonl").write_text("\n".join(json.dumps(row) for row in TEACHER))
    return folder


OWN = [
    (page, line)
    for page in PAGES
    for line in commands(page)
    if line.startswith("trl-replay ") and not line.startswith("trl-replay run ")  # these in test_run.py
]
SCRIPTS = [
    (page, line)
    for page, text in PAGES.items()
    for line in [*commands(page), *re.findall(r"`(python \S+\.py[^`]*)`", text)]
    if re.search(r"\S+/\S+\.py\b", line)
]


@pytest.mark.parametrize(("page", "line"), OWN)
def test_every_command_of_ours_in_the_documentation_runs(page, line, run, monkeypatch, capsys):
    monkeypatch.chdir(run)
    assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_ours_within_the_text_is_one(page):
    known = {RUN, *(command.name for command in COMMANDS)}
    for words in re.findall(r"`trl-replay ([a-z]+)[^`]*`", PAGES[page]):
        assert words in known
    assert known <= set(re.findall(r"[a-z]+", parser().format_help()))


@pytest.mark.parametrize(("page", "line"), SCRIPTS)
def test_every_script_that_is_named_exists_and_has_the_options_that_are_given(page, line):
    script = re.findall(r"\S+/\S+\.py\b", line)[0]
    source = (ROOT / script).read_text()
    if "parser_of(" in source:  # those of several studies
        source += (ROOT / "benchmarks" / "toys.py").read_text()
    for option in re.findall(r"--\w+", line.split(script)[1]):
        assert f'"{option}"' in source, f"{page}: {script} has no {option}"


@pytest.mark.parametrize("page", ["checkpoints.md", "files.md"])
def test_the_code_runs_from_top_to_bottom(page, run, monkeypatch):
    """`GRPOTrainer(...)` is a tiny one; of the buffer's groups, all are live."""
    monkeypatch.chdir(run)
    made = []

    def tiny(*_):
        settings = {"save_strategy": "steps", "save_steps": 12, "max_steps": 16}
        rewards = digits if page == "checkpoints.md" else Rewards([LIVE, HALF, DEAD])  # as the checkpoint's
        made.append(make_trainer("out", rewards, **settings))
        return made[-1]

    namespace = {"trl_replay": trl_replay, "datasets": datasets, "GRPOTrainer": tiny}
    namespace["trainer"] = tiny()
    namespace["session"] = trl_replay.attach(namespace["trainer"])
    namespace["session"].add(TEACHER)
    for code in blocks(page, "python"):
        if "trl_replay.attach(trainer" in code and "GRPOTrainer" not in code:
            namespace["trainer"] = tiny()
        exec(code, namespace)
    if page == "checkpoints.md":
        assert made[-1].state.global_step == 16, "resumed from the twelfth step"
    else:
        assert len(namespace["session"].buffer) == 5, "the teacher's two, the same exported, and one more"


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_is_named_is_one(page):
    known = {field.name for field in dataclasses.fields(trl_replay.ReplayConfig)} | {"use_replay"}
    named = set(re.findall(r"(?<![\w/.])replay_\w+\b", PAGES[page])) - {"replay_"}
    assert named <= known | {"replay_buffer"}, f"{page} names {sorted(named - known)}"


def test_every_column_of_an_export_is_documented(run):
    import pandas as pd

    out = run / "columns.parquet"
    assert main(["export", str(run / "out" / "checkpoint-12"), str(out)]) == 0
    table = PAGES["files.md"].split("## Warm start")[0]
    for column in pd.read_parquet(out).columns:
        shown = "reward/<function>" if column.startswith("reward/") else column
        assert f"`{shown}`" in table or column in {field.name for field in FIELDS}, f"{column} is not documented"


def test_the_code_that_the_architecture_shows_stands_in_the_package():
    package = Path(trl_replay.__file__).parent
    source = " ".join(" ".join(path.read_text().split()) for path in sorted(package.rglob("*.py")))
    for block in blocks("architecture.md", "python"):
        assert " ".join(block.split()) in source, block


def test_all_places_give_one_advice_on_long_answers():
    skill = ROOT / ".agents" / "skills" / "trl-replay" / "SKILL.md"
    places = [PAGES[name] for name in ("README.md", "by-symptom.md", "agents.md", "evidence.md")]
    for text in (*places, skill.read_text()):
        assert ON_LONG_ANSWERS.rstrip(".") in " ".join(text.replace("`", "").split())
