"""`trl-replay report RUN`: what it prints, and its page."""

import html
import html.parser
import json
import re
import shutil
import sys
import unicodedata

import pytest
import scenarios
from advised import logged
from resuming import rewrite, train
from support import DEAD, HALF, LIVE, Rewards

from trl_replay.cli import main
from trl_replay.extras.outcome.page import NO_CHARTS, charts_of
from trl_replay.extras.outcome.run import Run
from trl_replay.testing import make_trainer

RIGHT = [1.0, 1.0, 1.0, 1.0]
SCRIPT = ([LIVE, DEAD, RIGHT], [DEAD, DEAD, HALF], [DEAD, RIGHT, DEAD], [LIVE, HALF, DEAD])
"""Dead of three: 2, 2, 3, 1; all wrong 1, 2, 2, 1; all right 1, 0, 1, 0."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with replay and checkpoints."""
    folder = tmp_path_factory.mktemp("a run")
    _, session = train(folder)
    return folder, session


OUTSIDE = re.compile(r"""<[^>]*\s(?:src|href)=["']?[^"'\s>]""")
"""What a page has that leads out of it."""


def paged(folder, said):
    """The page of a run."""
    said("report", folder, "--html", folder / "page.html")
    return (folder / "page.html").read_text()


def test_the_page_needs_nothing_else_and_says_what_was_printed(run, said):
    folder, _ = run
    text = paged(folder, said)
    assert OUTSIDE.findall(text) == []
    assert "script" not in text
    assert re.findall("<h2[^>]*>([^<]+)<", text) == [
        "Reward over completions", "Reward over seconds", "Dead groups", "Replayed groups",
        "How far the policy has moved",
    ]  # fmt: skip
    assert text.count("<svg") == 5
    assert "prefers-color-scheme:dark" in text
    shown = " ".join(html.unescape(text).split())
    printed = said("report", folder)
    assert " ".join(printed.partition("┏")[0].split()) in shown


def test_without_matplotlib_tables_are_printed_and_the_page_says_what_to_install(run, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "dead groups" in said("report", run[0])
    text = paged(run[0], said)
    assert NO_CHARTS in text
    assert "<svg" not in text


def test_a_run_of_stock_is_told_its_dead_groups_wherever_its_log_is(tmp_path, said):
    trainer = make_trainer(tmp_path / "run", Rewards(*SCRIPT), save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_state()
    folder = tmp_path / "run"
    for source in (folder, folder / "trainer_state.json", folder / "checkpoint-4"):
        told = said("report", source)
        assert re.search(r"dead groups +│ 66.7%", told)
        assert re.search(r"all right +│ at least 10.4%", told), "1, 0, 4, and 0 twelfths"
    assert Run.of_folder(folder).label == "run"


def test_a_run_with_replay_is_told_by_replays_own_counts(tmp_path, said):
    scenarios.train(tmp_path, *SCRIPT).trainer.save_state()
    facts = dict(re.findall(r"│ (.+?) +│ (\S+) +│", said("report", tmp_path / "trainer_state.json")))
    assert {facts["dead groups"], facts["all wrong"], facts["all right"]} == {"66.7%", "50.0%", "16.7%"}
    assert facts["completions"] == "48"


def test_the_log_that_goes_further_is_read(tmp_path):
    """Where `save_state` was called once, and training went on to a checkpoint."""
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    trainer.train()
    trainer.save_state()
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=4, save_strategy="steps", save_steps=4)
    trainer.train()
    assert [entry["step"] for entry in Run.of_folder(tmp_path).steps] == [1, 2, 3, 4]


def test_a_dry_run_is_not_told_as_if_replay_had_acted(tmp_path, said):
    run = scenarios.train(tmp_path, [LIVE, DEAD, LIVE], [DEAD, DEAD, LIVE], max_steps=8, replay_dry_run=True)
    run.trainer.save_state()
    told = said("report", tmp_path)
    assert "58.3%, in a dry run" in told
    assert "4.2%, in a dry run" in told


MARKUP = "<script>alert(1)</script>"


def test_markup_in_a_log_or_a_label_is_neither_a_tag_nor_a_step(tmp_path, said):
    (tmp_path / "run").mkdir()
    good = logged(12, replay__dead_fraction=0.5, replay__ess=0.5)
    hostile = [dict.fromkeys(good[0], MARKUP), {**good[0], "step": MARKUP, MARKUP: MARKUP}]
    (tmp_path / "run" / "trainer_state.json").write_text(json.dumps({"log_history": [*good, *hostile, MARKUP, None]}))
    out = tmp_path / "page.html"
    said("report", f"{MARKUP}={tmp_path / 'run'}", f"$x_1$={tmp_path / 'run'}", "--html", out)
    text = out.read_text()
    assert "<script" not in text
    assert OUTSIDE.findall(text) == []
    assert {f" {MARKUP}", " $x_1$"} <= {html.unescape(found) for found in re.findall(r">([^<]+)</text>", text)}


TERMINAL = "\x1b]0;title\x07\x1b[31mred\x9b1m\u202ebidi\u2066\u2028"


def test_an_error_prints_no_character_that_a_terminal_acts_on(run, tmp_path, said):
    checkpoint = shutil.copytree(run[0] / "checkpoint-12", tmp_path / "checkpoint-12")
    rank = checkpoint / "trl_replay" / "rank-00000"
    (rank / TERMINAL).touch()
    rewrite(rank, lambda content: content["files"].update({TERMINAL: "another checksum"}))
    told = said("export", checkpoint, tmp_path / "out.parquet", fails=True)
    assert "its checksum differs" in told
    assert not {character for character in told if unicodedata.category(character)[0] == "C"} - {"\n"}
    said("report", checkpoint)


def test_little_is_drawn_too():
    charts = charts_of([Run.of_log(logged(1))], "reward")
    assert charts is not None
    assert all(chart.startswith("<svg") for chart in charts.values())
    assert charts_of([Run.of_log([])], "reward") == {}


DAMAGES = {
    "emptied": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "of other bytes": lambda data: bytes(255 - one for one in data),
    "of another form": lambda data: b"[1]",
    "null": lambda data: b"null",
    "of empty objects": lambda data: b"{}",
}


@pytest.mark.parametrize("kind", [*DAMAGES, "missing", "a folder"])
def test_no_damaged_file_of_a_checkpoint_ends_a_command_in_a_traceback(run, tmp_path, said, kind, capsys):
    """Each file in turn. A log without its buffer is still told; an export is right, or refused."""
    files = [path.relative_to(run[0]) for path in sorted((run[0] / "checkpoint-12").rglob("*")) if path.is_file()]
    assert len(files) > 10
    for name in files:
        folder = tmp_path / "checkpoint-12"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run[0] / "checkpoint-12", folder)
        path = tmp_path / name
        if kind in DAMAGES:
            path.write_bytes(DAMAGES[kind](path.read_bytes()))
        else:
            path.unlink()
            if kind == "a folder":
                path.mkdir()
        for words in (["export", str(folder), str(tmp_path / "out.parquet")], ["report", str(folder)]):
            capsys.readouterr()
            assert main(words) in (0, 1), (name, words)
            printed = capsys.readouterr()
            assert printed.out or printed.err.startswith("trl-replay: "), (name, words)
            if name.name == "trainer_state.json" and words[0] == "report":
                assert str(path) in printed.err or str(folder) in printed.err
