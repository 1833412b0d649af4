"""Rewards that change while the buffer lives: weights that a callback sets, other functions when training resumes, and
what can't be seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import DEAD, HALF, LIVE, Rewards, Spy, logged, record
from transformers import TrainerCallback

import trl_replay
from trl_replay.loss.micro_batch import ROWS
from trl_replay.step import rejudging
from trl_replay.testing import make_trainer

GRADES = [0.0, 1.0, 2.0, 3.0]
FIRST = ([LIVE, GRADES, HALF], [DEAD, DEAD, LIVE])
SECOND = ([[0, 0, 1, 1.0], [5, 1, 1, 0.0], [0, 1.0, 1, 0]], [DEAD, DEAD, LIVE])
SAVES = {"save_strategy": "steps", "save_steps": 2}


def functions() -> list[Any]:
    made = [Rewards(*FIRST), Rewards(*SECOND)]
    for function, name in zip(made, ("form", "accuracy"), strict=True):
        function.__name__ = name
    return made


class Calling(TrainerCallback):
    """Does something at the end of an update."""

    def __init__(self, update: int, act: Callable[[], Any]) -> None:
        self.update, self.act = update, act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.update:
            self.act()


def weigh(trainer: Any, *weights: float) -> Callable[[], Any]:
    return lambda: trainer.reward_weights.copy_(torch.tensor(weights))


def by_hand(rewards: Any, weights: Any, scale: str, batch: Any = None) -> Any:
    """TRL's rule for groups of raw `rewards`, `(n, G, functions)`; `batch` are the weighted sums of the batch."""
    total = np.asarray(rewards, np.float64) @ np.asarray(weights, np.float64)
    centered = total - total.mean(axis=1, keepdims=True)
    if scale == "group":
        return centered / (total.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return centered / (np.std(batch, ddof=1) + 1e-4) if scale == "batch" else centered


def told(session: Any, reason: str) -> float:
    return float(session.totals.reasons[reason])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_153_after_a_change_of_weights_stored_groups_have_the_advantages_of_today(tmp_path: Path, scale: str) -> None:
    """Of three groups one is dead with the weights 0 and 3: of equal rewards by the second function."""
    second = Rewards([DEAD, *SECOND[0][1:]], *SECOND[1:])
    made = functions()
    second.__name__ = "accuracy"
    trainer = make_trainer(tmp_path, [made[0], second], max_steps=4, scale_rewards=scale, trainer_class=Spy)
    session = trl_replay.attach(trainer, replay_start=0, replay_sampler="newest", replay_scorer="reward_std")
    trainer.add_callback(Calling(2, weigh(trainer, 0.0, 3.0)))
    steps = record(session)
    trainer.train()
    table, batch = session.buffer.table, 3.0 * np.array([*DEAD, *DEAD, *LIVE])
    first = table.update == 0
    assert first.sum() == 2, "the third is dead by today's rewards"
    expected = by_hand(table.row_rewards[first], [0.0, 3.0], scale, batch)
    np.testing.assert_allclose(table.row_advantage[first], expected, rtol=1e-5)
    sums = 3.0 * table.row_rewards[first, :, 1]
    np.testing.assert_allclose(table.score[first], sums.std(axis=1, ddof=1), rtol=1e-6)
    np.testing.assert_allclose(table.reward_mean[first], sums.mean(axis=1), rtol=1e-6)
    for _, out in steps[2:]:
        replayed = out[ROWS][:, 0] < 0
        groups = out["advantages"][replayed].view(-1, 4).tolist()
        assert len(groups) == 2
        assert all(any(np.allclose(group, one, rtol=1e-5) for one in table.row_advantage) for group in groups)
    for serial in session.buffer:
        row = int(table.rows_of([serial])[0])
        assert session.buffer.load(serial).tensors["advantages"].tolist() == table.row_advantage[row].tolist()
    assert told(session, f"an entry left: {rejudging.DEAD}") == 1
    assert told(session, rejudging.ANEW) == 3, "a group of the second batch, too"
    assert rejudging.ANEW in session.explain()


def test_153_nothing_is_trained_for_a_reward_that_was_withdrawn(tmp_path: Path) -> None:
    """Accuracy is always 0: from the change of weights on, stock has no gradient."""
    accuracy = Rewards([DEAD] * 3)
    accuracy.__name__ = "accuracy"
    trainer = make_trainer(tmp_path, [functions()[0], accuracy], max_steps=5)
    session = trl_replay.attach(trainer, replay_start=0)
    trainer.add_callback(Calling(2, weigh(trainer, 0.0, 1.0)))
    trainer.train()
    assert logged(trainer, "grad_norm")[2:] == [0.0] * 3
    assert logged(trainer, "replay/replaced_fraction") == [0.0, pytest.approx(2 / 3), 0.0, 0.0, 0.0]
    assert told(session, f"an entry left: {rejudging.DEAD}") == 4
    assert sum(logged(trainer, "replay/retired")) == 4


def test_153_a_change_that_leaves_a_groups_sums_alone_leaves_the_group_alone(tmp_path: Path) -> None:
    """Whatever its advantages are: here a file's own."""
    trainer = make_trainer(tmp_path, functions(), max_steps=2)
    session = trl_replay.attach(trainer, replay_start=0)
    rows = [{"prompt": "1=", "completion": text, "advantage": 7.0 - index, "reward/form": float(index),
             "reward/accuracy": 0.0} for index, text in enumerate("abcd")]  # fmt: skip
    session.add(rows)
    trainer.add_callback(Calling(1, weigh(trainer, 1.0, 3.0)))
    trainer.train()
    table = session.buffer.table
    assert table.row_advantage[table.rows_of([0])[0]].tolist() == [7.0, 6.0, 5.0, 4.0]


@pytest.mark.parametrize("source", ["a file with advantages of its own", "a trainer that shapes"])
def test_153_groups_whose_advantages_are_not_trls_leave(tmp_path: Path, source: str) -> None:
    class Shaping(Spy):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "advantages": batch["advantages"] ** 3}

    shapes = source == "a trainer that shapes"
    trainer = make_trainer(tmp_path, functions(), max_steps=3, trainer_class=Shaping if shapes else Spy)
    session = trl_replay.attach(trainer, replay_start=0)
    if not shapes:
        rows = [{"prompt": "1=", "completion": text, "advantage": advantage, "reward/form": float(index),
                 "reward/accuracy": 0.0} for index, (text, advantage) in enumerate(zip("abcd", [9.0, -1, -1, -1],
                                                                                       strict=True))]  # fmt: skip
        session.add(rows)
    trainer.add_callback(Calling(2, weigh(trainer, 2.0, 1.0)))
    trainer.train()
    left = told(session, f"an entry left: {rejudging.SHAPED}")
    assert left == (4 if shapes else 1)


def test_153_plugins_shape_what_is_judged_anew(tmp_path: Path) -> None:
    class Signs:
        @trl_replay.hookimpl
        def trl_replay_advantages(self, groups: Any) -> Any:
            return np.sign(groups.advantages)

    trl_replay.register(Signs(), "signs")
    try:
        trainer = make_trainer(tmp_path, functions(), max_steps=3)
        session = trl_replay.attach(trainer, replay_start=0, replay_plugins=["signs"])
        trainer.add_callback(Calling(2, weigh(trainer, 0.0, 1.0)))
        trainer.train()
    finally:
        trl_replay.unregister("signs")
    table = session.buffer.table
    rewards = table.row_rewards[..., 1].astype(np.float64)
    expected = np.sign(np.round(rewards - rewards.mean(axis=1, keepdims=True), 6))
    assert len(table) == 3 + 1 + 1
    np.testing.assert_array_equal(table.row_advantage, expected)


def test_153_a_success_is_told_anew_by_todays_rewards(tmp_path: Path) -> None:
    """0 and 1 before, 0 and 2 now: no third value."""
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=4)
    session = trl_replay.attach(trainer, replay_retire_passes=2, replay_start=0)
    trainer.add_callback(Calling(2, weigh(trainer, 2.0)))
    trainer.train()
    assert session.buffer.rules.success.values == [0.0, 2.0]
    assert "not known" not in session.explain()
    assert [group.tolist() for group in session.buffer.table.row_reward] == [[2.0, 0.0, 0.0, 0.0]] * 4


@pytest.mark.parametrize("change", ["weights", "a function less", "a function more"])
def test_153_resumed_with_other_rewards_entries_are_judged_by_them(tmp_path: Path, change: str) -> None:
    made = functions()
    first = make_trainer(tmp_path / "a", made if change != "a function more" else made[:1], max_steps=2, **SAVES)
    trl_replay.attach(first, replay_start=0)
    first.train()
    rewards = functions()[:1] if change == "a function less" else functions()
    weights = [0.0, 1.0] if change == "weights" else None
    trainer = make_trainer(tmp_path / "b", rewards, max_steps=3, reward_weights=weights)
    session = trl_replay.attach(trainer, replay_start=0)
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    table = session.buffer.table
    old = table.update < 2
    if change == "a function more":
        assert not old.any()
        assert told(session, f"an entry left: {rejudging.UNKNOWN}") == 4
        return
    assert old.sum() == 4
    expected = by_hand(table.row_rewards[old], trainer.reward_weights.numpy(), "group")
    np.testing.assert_allclose(table.row_advantage[old], expected, rtol=1e-5)


def test_153_resumed_with_the_same_rewards_nothing_is_judged_anew(tmp_path: Path) -> None:
    for folder, steps in (("a", 2), ("b", 4)):
        trainer = make_trainer(tmp_path / folder, functions(), max_steps=steps, **SAVES)
        session = trl_replay.attach(trainer, replay_start=0)
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2") if folder == "b" else None)
    assert not any(rejudging.CHANGED in reason for reason in session.totals.reasons)


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
    first = make_trainer(tmp_path / "a", graded, max_steps=2, **SAVES)
    trl_replay.attach(first)
    first.train()
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
    trainer = make_trainer(tmp_path, functions(), max_steps=4)
    session = trl_replay.attach(trainer, replay_start=0)
    trainer.add_callback(Calling(2, session.clear))
    trainer.train()
    assert len(session.buffer) > 0
    assert (session.buffer.table.update >= 2).all()
