"""Looking inside a run: `trl-replay report`."""

import html.parser
import json
import re
import shutil
import unicodedata

import pytest
from resuming import build, digits, rewrite, train
from support import DEAD, LIVE, Rewards
from trl_replay.extras.report.inspection import inspect
from trl_replay.extras.report.page import page, write_report

import trl_replay
from trl_replay import ReplayError
from trl_replay.testing import make_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a run")
    _, session = train(folder)
    return folder, session


def test_inspect_tells_the_buffer_in_numbers_and_texts(run):
    folder, _ = run
    found = inspect(folder / "checkpoint-12")
    assert (found["update"], found["scope"], found["processes"], found["num_generations"]) == (12, "process", 1, 4)
    assert found["groups"] == 5
    assert found["bytes"] > 0
    entries = inspect(folder / "checkpoint-12", shown=5)["top"]
    assert found["top"] == entries[:3]
    scores = [entry["score"] for entry in entries]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 5
    assert found["score"]["greatest"] == scores[0]
    assert found["age"]["least"] >= 0
    assert found["mean_reward"]["mean"] == pytest.approx(sum(entry["mean_reward"] for entry in entries) / 5)
    assert "pass_rate" not in found, "a mean reward is no rate"
    assert all(len(entry["completions"]) == 4 for entry in found["top"])
    for entry in found["top"]:
        for row in entry["completions"]:
            assert (row["advantage"] > 0) == (digits([row["text"]])[0] > 0)


def test_an_empty_buffer_is_told_as_one(tmp_path, said):
    train(tmp_path, trainer=make_trainer(tmp_path, lambda completions, **_: [0.0] * len(completions), max_steps=2,
                                         save_strategy="steps", save_steps=2))  # fmt: skip
    found = inspect(tmp_path / "checkpoint-2")
    assert (found["groups"], found["age"], found["top"]) == (0, None, [])
    text = write_report(tmp_path).read_text()
    assert "0 groups of 4 completions" in text, "of a run's folder: its newest checkpoint"
    assert "Highest scores" not in text
    (tmp_path / "nothing").mkdir()
    assert "holds no replay buffer" in said("export", tmp_path / "nothing", tmp_path / "out.parquet", fails=True)


class Page(html.parser.HTMLParser):
    """Titles, tags, attributes, links and balance of a page."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.outside = []
        self.titles = []
        self.names = set()
        self.feed(text)
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self.names |= {tag, *(name for name, _ in attributes)}
        self.outside += [f"{tag} {name}" for name, value in attributes if name in ("src", "href") and value]

    def handle_startendtag(self, tag, attributes):
        self.names |= {tag, *(name for name, _ in attributes)}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2"):
            self.titles.append(data)


def test_the_report_is_one_page_that_needs_nothing_else(run, said):
    folder, _ = run
    assert str(folder / "report.html") in said("report", folder)
    text = (folder / "report.html").read_text()
    parsed = Page(text)
    assert parsed.outside == []
    assert "script" not in text
    assert parsed.titles == [
        "What replay did", "Dead groups", "Reward", "How far the policy has moved",
        "In the buffer now", "Highest scores",
        "Settings in force", "What to change",
    ]  # fmt: skip
    assert text.count("<svg") == 3
    assert "nan" not in re.sub(r"<code>.*?</code>", "", text).lower()
    lead = re.search(r'class="lead">(.*?)</p>', text)
    assert lead is not None
    assert re.search(r"<b>[0-9.]+%</b> of the generated groups were dead", lead[1])
    assert "prefers-color-scheme:dark" in text


def test_a_run_without_replay_shows_what_it_would_have_had_to_gain(tmp_path):
    trainer = build(tmp_path, max_steps=4, save_steps=4)
    trainer.train()
    out = write_report(tmp_path, tmp_path / "page" / "stock.html")
    text = out.read_text()
    assert Page(text).titles == ["What replay could do", "Dead groups", "Reward", "What to change"]
    assert "This run used no replay. <b>" in text
    assert "of its groups were dead" in text


def test_105_a_dry_run_is_not_told_as_if_replay_had_acted(tmp_path, said):
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, LIVE], [DEAD, DEAD, LIVE]), max_steps=8)
    trl_replay.attach(trainer, replay_dry_run=True, replay_start=0)
    trainer.train()
    trainer.save_state()
    text = write_report(tmp_path, tmp_path / "dry.html").read_text()
    lead = re.sub("<[^>]+>", "", re.findall(r'class="lead">(.*?)</p>', text, re.DOTALL)[0])
    assert lead.startswith("reward 0.1 → 0.083 over 96 completions, 8 updates (means of the first")
    assert "62.5% of the generated groups were dead" in lead
    assert "Nothing was replaced (replay_dry_run)." in lead
    assert "Stored groups would have taken the places of 58.3% of all groups, and left 4.2% dead." in lead
    assert "trained on" not in text
    said("report", f"dry={tmp_path}", f"dry={tmp_path}", "--out", tmp_path / "two.html")
    assert (tmp_path / "two.html").read_text().count("62.5%") == 4, "generated, and trained on, of two runs"
    assert "Replay counted in this run, and replaced nothing (replay_dry_run)." in said("estimate", tmp_path)


def test_87_the_report_says_where_a_stock_log_cannot_count_dead_groups(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]), max_steps=8, scale_rewards="batch")
    trainer.train()
    trainer.save_state()
    text = write_report(tmp_path, tmp_path / "stock.html").read_text()
    assert "scale_rewards=&#39;batch&#39;" in text
    assert "there is little to replace" not in text


def test_the_report_tells_the_settings_that_were_in_force(run):
    folder, session = run
    buffer = inspect(folder / "checkpoint-12")
    assert buffer["settings"] == session.config.to_dict()
    text = page("run", [], {**buffer, "settings": {"replay_evictor": "fifo", "replay_max_age": None}})
    changed = text.partition("<h2>Settings in force</h2>")[2]
    assert re.findall("<th>(.*?)</th><td><code>(.*?)</code>", changed) == [("replay_evictor", "&#34;fifo&#34;")]
    assert "All settings are the defaults." in page("run", [], {**buffer, "settings": {"replay_max_age": None}})


MARKUP = "<script>alert(1)</script>"


def test_50_markup_in_a_log_is_neither_a_tag_nor_a_step(tmp_path):
    keys = ("step", "frac_reward_zero_std", "reward", "replay/size", "replay/dead_fraction", "replay/ess")
    hostile = [dict.fromkeys(keys, MARKUP), {**dict.fromkeys(keys, 0.5), "step": MARKUP, MARKUP: MARKUP}]
    good = [{**dict.fromkeys(keys, 0.5), "step": step, "reward": MARKUP} for step in range(3)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [*good, *hostile, MARKUP, None]}))
    text = write_report(tmp_path).read_text()
    assert "script" not in text
    assert "3 logged steps, up to step 2" in text
    assert "nothing was logged" in text, "the rewards are no numbers"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), pytest.param(10**400, id="1e400"), 5e-324, -1e299])
def test_a_number_that_no_axis_can_show_costs_no_more_than_its_point(number):
    log = [{"step": step, "frac_reward_zero_std": 0.5, "reward": 1.0} for step in range(3)]
    log += [{**log[0], "reward": number}, {**log[0], "step": number}]
    text = page("run", log, None)
    assert "<svg" in text
    assert "nan" not in text


def test_a_log_that_is_none_is_refused_in_words(tmp_path):
    for content in ("{}", "{", '{"log_history": 5}', "[" * 100_000):
        (tmp_path / "trainer_state.json").write_text(content)
        with pytest.raises(ReplayError, match="holds no log of a trainer"):
            write_report(tmp_path)


def test_50_markup_in_any_value_of_a_buffer_is_text(run):
    folder, _ = run
    buffer = inspect(folder / "checkpoint-12")
    expected = Page(page("run", [], buffer)).names
    for key in ("update", "scope", "processes", "num_generations", "groups", "waiting"):
        buffer[key] = MARKUP
    buffer["top"][0] |= {"prompt": MARKUP, "age": MARKUP, "uses": MARKUP}
    buffer["top"][0]["completions"][0]["text"] = MARKUP
    buffer["settings"] = {MARKUP: MARKUP, "replay_max_age": MARKUP}
    text = page(MARKUP, [], buffer)
    assert Page(text).names == expected
    assert text.count("&lt;script&gt;") == 15, "the name twice, six numbers, four of an entry, three of settings"


TERMINAL = "\x1b]0;title\x07\x1b[31mred\x9b1m\u202ebidi\u2066\u2028\ud800"


def test_50_an_error_prints_no_character_that_a_terminal_acts_on(run, tmp_path, said):
    checkpoint = shutil.copytree(run[0] / "checkpoint-12", tmp_path / "checkpoint-12")
    rank, name = checkpoint / "trl_replay" / "rank-00000", TERMINAL.removesuffix("\ud800")
    (rank / name).touch()
    rewrite(rank, lambda content: content["files"].update({name: "another checksum"}))
    told = said("report", checkpoint, fails=True)
    assert "its checksum differs" in told
    assert not {character for character in told if unicodedata.category(character)[0] == "C"} - {"\n"}


def test_a_folder_without_a_log_is_refused(tmp_path, said):
    assert "there is no log to read" in said("report", tmp_path, fails=True)
