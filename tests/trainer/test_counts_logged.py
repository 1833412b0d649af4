"""Counts and states in the log are counts and states, however many batches a log entry covers."""

from pathlib import Path

import pytest
from scenarios import train
from support import DEAD, HALF, LIVE

from trl_replay.data.counters import METRICS

pytestmark = pytest.mark.usefixtures("all_metrics")

RIGHT = [1.0] * 4
SCRIPT = ([LIVE, HALF, DEAD], [RIGHT, DEAD, LIVE], [DEAD, RIGHT, DEAD])


def entries(folder, every, **settings):
    """The log of six batches."""
    run = train(folder, *SCRIPT, max_steps=6, logging_steps=every, **settings)
    return [entry for entry in run.trainer.state.log_history if "replay/size" in entry], run.session


def test_what_stands_at_a_step_is_logged_as_it_stands(tmp_path):
    often, _ = entries(tmp_path / "often", 1)
    seldom, _ = entries(tmp_path / "seldom", 3)
    for key in ("replay/rollouts", "replay/size", "replay/tasks", "replay/bytes"):
        assert [entry[key] for entry in seldom] == [often[2][key], often[5][key]], key
    assert [entry["replay/rollouts"] for entry in seldom] == [36, 72]


def test_counts_are_those_since_the_last_entry(tmp_path):
    often, _ = entries(tmp_path / "often", 1, replay_buffer_size=2)
    seldom, session = entries(tmp_path / "seldom", 3, replay_buffer_size=2)
    for key in ("replay/stored", "replay/evicted", "replay/refused", "replay/retired", "replay/lost"):
        windows = [often[:3], often[3:]]
        assert [entry[key] for entry in seldom] == [sum(entry[key] for entry in window) for window in windows], key
    assert sum(entry["replay/stored"] for entry in seldom) == session.totals.counters["stored"] == 3


def test_the_page_has_every_metric_of_the_table():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [key for key in METRICS if f"`{key}" not in page] == []
