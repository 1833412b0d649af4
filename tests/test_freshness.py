"""Limits and selectors beyond the first ones: what they let through, by hand and through the real trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import DEAD, HALF, LIVE, Rewards, record, weights_hash

import trl_replay
from trl_replay.behaviour import ROWS
from trl_replay.registry import registry
from trl_replay.testing import make_context, make_groups, make_trainer


def replayed(steps: list[Any]) -> list[int]:
    return [int((after[ROWS][:, 0] < 0).sum()) // 4 for _, after in steps]


def test_a_cooldown_keeps_an_entry_from_being_used_again_too_soon(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD], [DEAD, DEAD, DEAD]), max_steps=8)
    session = trl_replay.attach(trainer, replay_cooldown=3)
    steps = record(session)
    trainer.train()
    assert replayed(steps) == [0, 1, 0, 0, 1, 0, 0, 1]
    assert "replay_cooldown" in session.explain()


def test_a_half_life_lets_newer_groups_win_over_higher_scores(tmp_path: Any) -> None:
    script = Rewards(
        [[5.0, 0, 0, 0], DEAD, DEAD], [DEAD, DEAD, DEAD], [DEAD, DEAD, DEAD], [DEAD, DEAD, LIVE], [DEAD] * 3
    )
    kept = {}
    for half_life in (None, 1.0):
        script.calls = 0
        trainer = make_trainer(tmp_path, script, max_steps=6)
        session = trl_replay.attach(
            trainer, replay_half_life=half_life, replay_buffer_size=1, replay_scorer="reward_std"
        )
        trainer.train()
        kept[half_life] = session.buffer.table.serial.tolist()
        assert float(session.buffer.table.score[0]) == pytest.approx(2.5 if half_life is None else 0.5)
    assert kept == {None: [0], 1.0: [1]}, "after three half-lives 2.5 is worth less than 0.5"


def test_a_dry_run_measures_and_changes_nothing(tmp_path: Any) -> None:
    script = ([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE])
    stock = make_trainer(tmp_path / "stock", Rewards(*script), max_steps=5)
    stock.train()
    trainer = make_trainer(tmp_path / "dry", Rewards(*script), max_steps=5)
    session = trl_replay.attach(trainer, replay_dry_run=True)
    steps = record(session)
    trainer.train()
    assert weights_hash(trainer) == weights_hash(stock)
    assert all(after[key] is value for before, after in steps for key, value in before.items())
    assert session.metrics["replay/replaced_fraction"] == pytest.approx(2 / 3)
    assert session.metrics["replay/dead_fraction_after"] == 0.0
    assert "replay/ratio_mean" not in session.metrics, "nothing went through the loss"


def select(name: str, rewards: list[list[float]], **kwargs: Any) -> list[int]:
    selector = registry().resolve("selector", name, "replay_selector").make(**kwargs)
    return np.asarray(selector(make_groups(rewards), make_context())).tolist()


REWARDS = [[1, 0, 0, 0.0], [1, 1, 1, 1.0], [0.5, 0.5, 0.5, 0.52], [1, 1, 0, 0.0], [1, 1, 1, 0.0]]
# standard deviations 0.5, 0, 0.01, 0.577, 0.5; variances 0.25, 0, 0.0001, 0.333, 0.25

SELECTIONS: list[tuple[str, dict[str, Any], list[int]]] = [
    ("zero_std", {}, [1]),
    ("low_std", {}, [1, 2]),
    ("low_std", {"threshold": 0.5}, [1, 2, 0, 4]),
    ("low_std", {"quantile": 0.25}, [1, 2]),
    ("top_p_variance", {"p": 0.3}, [1, 2, 0, 4]),
    ("top_p_variance", {"p": 0.6}, [1, 2, 4]),
    ("top_p_variance", {"p": 1.0}, [1]),
    ("pass_rate", {"low": 0.25, "high": 0.75}, [1, 2, 0, 4]),
    ("pass_rate", {"low": 0.0, "high": 1.0}, [1, 2]),
    ("always", {"share": 0.4}, [1, 2]),
    ("always", {"share": 0.1}, []),
    ("always", {"share": 1.0}, [1, 2, 0, 4, 3]),
]


@pytest.mark.parametrize(("name", "kwargs", "slots"), SELECTIONS)
def test_each_selector_chooses_by_hand(name: str, kwargs: dict[str, Any], slots: list[int]) -> None:
    assert select(name, REWARDS, **kwargs) == slots


BAD = [
    ("low_std", {"threshold": -1}, "threshold=-1"),
    ("low_std", {"quantile": 2}, "quantile=2"),
    ("top_p_variance", {"p": 0}, "p=0"),
    ("pass_rate", {"low": 0.9, "high": 0.1}, "low=0.9"),
    ("always", {"share": 0}, "share=0"),
]


@pytest.mark.parametrize(("name", "kwargs", "words"), BAD)
def test_a_bad_argument_of_a_selector_is_refused_by_name(name: str, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(trl_replay.ConfigurationError, match=words):
        select(name, REWARDS, **kwargs)


@pytest.mark.parametrize(("layout", "stored"), [({}, 0), ({"num_iterations": 2}, 1)])
def test_a_displaced_live_group_is_stored_only_where_stocks_log_probs_are_known(
    tmp_path: Any, layout: dict[str, Any], stored: int
) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD], [DEAD, HALF, DEAD]), max_steps=4, **layout)
    session = trl_replay.attach(trainer, replay_selector="always", replay_selector_kwargs={"share": 1.0})
    steps = record(session)
    trainer.train()
    assert replayed(steps)[1] == 1
    slot = int((steps[1][1][ROWS][:, 0] < 0).nonzero()[0]) // 4
    assert slot == 0, "dead groups are replaced before live ones"
    session.buffer.clear()
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, LIVE, LIVE], [HALF, HALF, HALF]), max_steps=2 * (1 + stored), **layout
    )
    session = trl_replay.attach(trainer, replay_selector="always", replay_selector_kwargs={"share": 1.0})
    trainer.train()
    assert len(session.buffer) == 3 + 3 * stored


BAD_SETTINGS = [
    {"replay_cooldown": 0},
    {"replay_half_life": 0.0},
    {"replay_half_life": float("inf")},
    {"replay_weight": -0.5},
    {"replay_weight": True},
    {"replay_dry_run": "yes"},
]


@pytest.mark.parametrize("settings", BAD_SETTINGS)
def test_a_bad_limit_names_setting_and_value(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(trl_replay.ConfigurationError, match=f"{name}={value!r} can't be used"):
        trl_replay.ReplayConfig(**settings)
