"""Rewards that change while the buffer lives: weights that a callback sets, other functions when training resumes, and
what can't be seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards, shaping
from transformers import TrainerCallback

import trl_replay
from trl_replay.loss.micro_batch import ROWS
from trl_replay.step import rejudging
from trl_replay.testing import make_trainer

GRADES = [0.0, 1.0, 2.0, 3.0]
FIRST = ([LIVE, GRADES, HALF], [DEAD, DEAD, LIVE])
SECOND = ([[0, 0, 1, 1.0], [5, 1, 1, 0.0], [0, 1.0, 1, 0]], [DEAD, DEAD, LIVE])
SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}


def functions() -> list[Any]:
    return [Rewards(*FIRST, name="form"), Rewards(*SECOND, name="accuracy")]


def weigh(*weights: float) -> Callable[[Any], Any]:
    return lambda session: session.trainer.reward_weights.copy_(torch.tensor(weights))


def by_hand(rewards: Any, weights: Any, scale: str, batch: Any = None) -> Any:
    """TRL's rule for groups of raw `rewards`, `(n, G, functions)`; `batch` are the weighted sums of the batch."""
    total = np.asarray(rewards, np.float64) @ np.asarray(weights, np.float64)
    centered = total - total.mean(axis=1, keepdims=True)
    if scale == "group":
        return centered / (total.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return centered / (np.std(batch, ddof=1) + 1e-4) if scale == "batch" else centered


LEFT = f"an entry left: {rejudging.DEAD}"
GRADED = [
    {"prompt": "1=", "completion": text, "reward/form": float(index), "reward/accuracy": 0.0}
    for index, text in enumerate("abcd")
]


def with_advantages(*advantages: float) -> list[dict[str, Any]]:
    """Rows of a file with advantages of its own."""
    return [{**row, "advantage": advantage} for row, advantage in zip(GRADED, advantages, strict=True)]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_153_after_a_change_of_weights_stored_groups_have_the_advantages_of_today(tmp_path: Path, scale: str) -> None:
    """Of three groups one is dead with the weights 0 and 3: of equal rewards by the second function."""
    second = Rewards([DEAD, *SECOND[0][1:]], *SECOND[1:], name="accuracy")
    strategies = {"replay_sampler": "newest", "replay_scorer": "reward_std"}
    given = {"rewards": [functions()[0], second], "at": {2: weigh(0.0, 3.0)}, "scale_rewards": scale}
    run = train(tmp_path, **given, **strategies)
    table, batch = run.table, 3.0 * np.array([*DEAD, *DEAD, *LIVE])
    first = table.update == 0
    assert first.sum() == 2, "the third is dead by today's rewards"
    expected = by_hand(table.row_rewards[first], [0.0, 3.0], scale, batch)
    np.testing.assert_allclose(table.row_advantage[first], expected, rtol=1e-5)
    sums = 3.0 * table.row_rewards[first, :, 1]
    np.testing.assert_allclose(table.score[first], sums.std(axis=1, ddof=1), rtol=1e-6)
    np.testing.assert_allclose(table.reward_mean[first], sums.mean(axis=1), rtol=1e-6)
    for _, out in run.steps[2:]:
        replayed = out[ROWS][:, 0] < 0
        groups = out["advantages"][replayed].view(-1, 4).tolist()
        assert len(groups) == 2
        assert all(any(np.allclose(group, one, rtol=1e-5) for one in table.row_advantage) for group in groups)
    for serial in run.session.buffer:
        row = int(table.rows_of([serial])[0])
        assert run.session.buffer.load(serial).tensors["advantages"].tolist() == table.row_advantage[row].tolist()
    assert run.reasons[LEFT] == 1
    assert run.reasons[rejudging.ANEW] == 3, "a group of the second batch, too"
    assert rejudging.ANEW in run.session.explain()


def test_153_nothing_is_trained_for_a_reward_that_was_withdrawn(tmp_path: Path) -> None:
    """Accuracy is always 0: from the change of weights on, stock has no gradient."""
    rewards = [functions()[0], Rewards([DEAD] * 3, name="accuracy")]
    run = train(tmp_path, rewards=rewards, at={2: weigh(0.0, 1.0)}, max_steps=5)
    assert run.logged("grad_norm")[2:] == [0.0] * 3
    assert run.logged("replay/replaced_fraction") == [0.0, pytest.approx(2 / 3), 0.0, 0.0, 0.0]
    assert run.reasons[LEFT] == 4
    assert sum(run.logged("replay/retired")) == 4


def test_153_a_change_that_leaves_a_groups_sums_alone_leaves_the_group_alone(tmp_path: Path) -> None:
    """Whatever its advantages are: here a file's own."""
    file = with_advantages(7.0, 6.0, 5.0, 4.0)
    table = train(tmp_path, rewards=functions(), file=file, at={1: weigh(1.0, 3.0)}, max_steps=2).table
    assert table.row_advantage[table.rows_of([0])[0]].tolist() == [7.0, 6.0, 5.0, 4.0]


@pytest.mark.parametrize(
    ("source", "left"),
    [({"file": with_advantages(9.0, -1.0, -1.0, -1.0)}, 1), ({"trainer_class": shaping(lambda given: given**3)}, 4)],
    ids=["a file with advantages of its own", "a trainer that shapes"],
)
def test_153_groups_whose_advantages_are_not_trls_leave(tmp_path: Path, source: dict[str, Any], left: int) -> None:
    run = train(tmp_path, rewards=functions(), at={2: weigh(2.0, 1.0)}, max_steps=3, **source)
    assert run.reasons[f"an entry left: {rejudging.SHAPED}"] == left


def test_153_plugins_shape_what_is_judged_anew(tmp_path: Path) -> None:
    signs = {"advantages": lambda groups: np.sign(groups.advantages)}
    table = train(tmp_path, rewards=functions(), at={2: weigh(0.0, 1.0)}, max_steps=3, hooks=signs).table
    rewards = table.row_rewards[..., 1].astype(np.float64)
    expected = np.sign(np.round(rewards - rewards.mean(axis=1, keepdims=True), 6))
    assert len(table) == 3 + 1 + 1
    np.testing.assert_array_equal(table.row_advantage, expected)


def test_153_a_success_is_told_anew_by_todays_rewards(tmp_path: Path) -> None:
    """0 and 1 before, 0 and 2 now: no third value."""
    run = train(tmp_path, [LIVE, HALF, DEAD], at={2: weigh(2.0)}, replay_retire_passes=2)
    assert run.session.buffer.rules.success.values == [0.0, 2.0]
    assert "not known" not in run.session.explain()
    assert [group.tolist() for group in run.table.row_reward] == [[2.0, 0.0, 0.0, 0.0]] * 4


@pytest.mark.parametrize("change", ["weights", "a function less", "a function more"])
def test_153_resumed_with_other_rewards_entries_are_judged_by_them(tmp_path: Path, change: str) -> None:
    made = functions()[:1] if change == "a function more" else functions()
    train(tmp_path / "a", rewards=made, **SAVES)
    rewards = functions()[:1] if change == "a function less" else functions()
    weights = [0.0, 1.0] if change == "weights" else None
    run = train(
        tmp_path / "b", rewards=rewards, max_steps=3, reward_weights=weights,
        resume=str(tmp_path / "a" / "checkpoint-2"),
    )  # fmt: skip
    old = run.table.update < 2
    if change == "a function more":
        assert not old.any()
        assert run.reasons[f"an entry left: {rejudging.UNKNOWN}"] == 4
        return
    assert old.sum() == 4
    expected = by_hand(run.table.row_rewards[old], run.trainer.reward_weights.numpy(), "group")
    np.testing.assert_allclose(run.table.row_advantage[old], expected, rtol=1e-5)


def test_153_resumed_with_the_same_rewards_nothing_is_judged_anew(tmp_path: Path) -> None:
    train(tmp_path / "a", rewards=functions(), **SAVES)
    run = train(tmp_path / "b", rewards=functions(), resume=str(tmp_path / "a" / "checkpoint-2"))
    assert not any(rejudging.CHANGED in reason for reason in run.reasons)


def graded(completions: list[str], **_: Any) -> list[float]:
    return [float(helped(text)) for text in completions]


def helped(text: str) -> int:
    return len(text) % 3


def mended(text: str) -> int:
    return len(text) % 2


def test_153_a_mended_function_of_the_same_name_is_told_when_training_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a function that it calls; `session.clear()` takes what was stored."""
    train(tmp_path / "a", rewards=graded, **SAVES)
    monkeypatch.setitem(globals(), "helped", mended)
    trainer = make_trainer(tmp_path / "b", graded, max_steps=3)
    session = trl_replay.attach(trainer)
    sizes = []

    class Clearing(TrainerCallback):
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            session.clear()
            sizes.append(len(session.buffer))

    trainer.add_callback(Clearing())
    with pytest.warns(UserWarning, match=r"code of 'graded' has changed .* call session\.clear\(\)"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert sizes == [0]
    assert (session.buffer.table.update >= 2).all(), "nor are the last batch's groups stored"


def test_153_clear_from_a_callback_leaves_nothing_of_before(tmp_path: Path) -> None:
    table = train(tmp_path, rewards=functions(), at={2: lambda session: session.clear()}).table
    assert len(table) > 0
    assert (table.update >= 2).all()
