"""The notebook and the pages for newcomers: their code runs, and the notebook prints what it shows."""

import json
import re
import sys
from pathlib import Path

import pytest
from forked import check, launch
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.testing import make_trainer

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOK = DOCS / "first_run.ipynb"
RUN = """
import contextlib, io, json, sys

printed, namespace = [], {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        source = "".join(cell["source"])
        if source.startswith("%pip"):
            source = ""  # it is installed
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(source, namespace)
        printed.append(output.getvalue())
print("PRINTED" + json.dumps(printed))
"""
LIMIT = 300
"""Seconds after which the notebook counts as hanging."""
PAGES = ("index.md", "methods.md", "reference/strategies.md", "coming-from.md")


def code_cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def words(text):
    """A text without its numbers: another processor may round otherwise, and then sample another token; or be busy."""
    text = re.sub(r"save (half|a \w+|[\d.]+ %) of", "save of", text)
    text = re.sub(r"times, and (half|a \w+|[\d.]+ %)\)", "times)", text)
    return re.sub(r"\s+", " ", re.sub(r"[-\d.%]+", " ", text)).strip()


@pytest.mark.generates
def test_the_notebook_runs_from_top_to_bottom_and_prints_what_it_shows(tmp_path):
    """In a process of its own, which has everything imported."""
    script = tmp_path / "run.py"
    script.write_text(RUN)
    launched = launch(script, NOTEBOOK, limit=LIMIT, cwd=tmp_path, environment={"TMPDIR": str(tmp_path)})
    check(launched)
    printed = json.loads(launched[0].stdout.partition("PRINTED")[2])
    for cell, found in zip(code_cells(), printed, strict=True):
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert words(found) == words(shown), "run docs/first_run.ipynb anew in Jupyter, and save it with its outputs"


def test_the_notebook_was_saved_after_one_run_and_without_errors():
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds == {"stream"}
    names = {output["name"] for cell in cells for output in cell["outputs"]}
    assert names == {"stdout"}, "warnings are of one machine: leave them out"


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """Each block with a new tiny trainer where it makes none; the session stays from block to block."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--output_dir", "out", "--use_cpu", "true", "--bf16", "false"])
    rows = [{"prompt": "1=", "completion": text, "reward": float(text == "2")} for text in "2345"]
    rewards = Rewards([LIVE, DEAD, HALF])

    def tiny(*_):
        return make_trainer("out", rewards, max_steps=2)

    with trl_replay.attached(tiny()) as session:
        session.add(rows)
        session.export("out.parquet")
    namespace = {"trl_replay": trl_replay, "GRPOTrainer": tiny, "trainer": tiny()}
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        if "attach" in block and "GRPOTrainer" not in block:
            namespace["trainer"] = tiny()
        exec(block, namespace)
