"""`replay_reward`: which reward function counts. Users pay sums: format, accuracy, length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replaying import build, replay
from support import DEAD, HALF, LIVE, Rewards, logged, record, replayed

import trl_replay
from trl_replay import ConfigurationError, hookimpl
from trl_replay.loss.micro_batch import EXCLUDED, ROWS
from trl_replay.testing import make_trainer

SPREAD = [0.1, 0.2, 0.3, 0.4]
"""Rewards of a length term: never equal."""


def functions(*accuracy: Any) -> list[Any]:
    """A length term that is never equal over a group, and accuracy."""
    length, right = Rewards([SPREAD] * 3), Rewards(*accuracy)
    length.__name__, right.__name__ = "length", "accuracy"
    return [length, right]


def test_groups_are_dead_by_the_function_that_counts_and_advantages_stay_trls(tmp_path: Path) -> None:
    script = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])
    by_sum = make_trainer(tmp_path / "sum", functions(*script), max_steps=4)
    session = trl_replay.attach(by_sum, replay_start=0)
    by_sum.train()
    assert session.totals.counters["dead"] == 0, "the sum always differs"
    trainer = make_trainer(tmp_path / "accuracy", functions(*script), max_steps=4)
    session = trl_replay.attach(trainer, replay_start=0, replay_reward="accuracy")
    steps = record(session)
    trainer.train()
    assert session.totals.counters["dead"] == 1 + 2 * 3
    assert replayed(steps)[0] == 0
    assert sum(replayed(steps)) > 3
    first = steps[0]
    assert (first[0]["advantages"] == first[1]["advantages"]).all(), (
        "a dead group that nothing fills trains as in stock"
    )
    assert set(session.buffer.table.reward_mean.round(3).tolist()) <= {0.25, 0.5}, "of accuracy alone"
    assert (session.buffer.table.row_reward < session.buffer.table.row_total).all()


@pytest.mark.parametrize(
    "settings", [{}, {"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}]
)
def test_the_loss_of_what_is_replayed_is_the_one_by_hand(tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = build(tmp_path, functions([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD]), max_steps=6, **settings)
    session, _ = replay(trainer, replay_reward="accuracy")
    assert session.totals.counters["replaced"] > 2


class Overlong:
    """A mask of rows above a length, as in docs/hooks.md."""

    @hookimpl
    def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
        return np.where(groups.lengths > 5, np.nan, groups.advantages)


@pytest.mark.parametrize("plugin", ["overlong", "rloo"])
def test_109_a_plugin_that_shapes_advantages_brings_no_dead_group_to_life(tmp_path: Path, plugin: str) -> None:
    """By the function that counts, whose groups the sum never has equal."""
    trl_replay.register(Overlong(), "overlong")
    try:
        trainer = make_trainer(tmp_path, functions([DEAD, DEAD, LIVE]), max_steps=4)
        session = trl_replay.attach(trainer, replay_start=0, replay_reward="accuracy", replay_plugins=[plugin])
        trainer.train()
    finally:
        trl_replay.unregister("overlong")
    assert session.totals.counters["dead"] >= 8
    assert session.totals.counters["replaced"] > 0
    assert (session.buffer.table.reward_mean > 0).all(), "of accuracy"


def test_109_signs_of_groups_that_are_alike_by_the_function_train(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, functions([DEAD, DEAD, LIVE]), max_steps=2)
    session = trl_replay.attach(trainer, replay_preset="sign_advantage", replay_reward="accuracy")
    trainer.train()
    assert session.totals.counters["dead"] == 0


def test_109_a_mixed_group_that_is_alike_by_the_function_stays_fresh(tmp_path: Path) -> None:
    right = [1.0, 1.0, 1.0, 1.0]
    script = [[LIVE] * 3, [right] * 3]
    trainer = make_trainer(tmp_path, functions(*script), prompts=["1=", "2=", "3="], max_steps=6)
    session = trl_replay.attach(
        trainer, replay_start=0, replay_reward="accuracy", replay_sampler="same_prompt", replay_mixer=successes
    )
    trainer.train()
    assert session.totals.counters["replaced"] == 0
    assert session.totals.reasons["a mixed group would have been dead"] > 0


def successes(table: Any, drawn: Any, slots: Any, context: Any) -> Any:
    """A stored success for the first row of each slot."""
    taken = np.full(slots.advantages.shape, -1)
    for slot, entry in enumerate(drawn[:, 0].tolist()):
        if entry >= 0:
            taken[slot, 0] = int(table.row_reward[entry].argmax())
    return taken


@pytest.mark.parametrize("value", [0.7, 100.1])
def test_110_a_mask_on_a_dead_group_leaves_it_dead(tmp_path: Path, value: float) -> None:
    """TRL divides rounding errors of eight equal rewards by almost nothing; a plugin leaves these on other rows."""
    trl_replay.register(Overlong(), "overlong")
    dead, live = [value] * 8, [value + 1, *[value] * 7]
    try:
        trainer = make_trainer(tmp_path, Rewards([dead, dead, live]), num_generations=8, max_steps=4)
        session = trl_replay.attach(trainer, replay_start=0, replay_plugins=["overlong"])
        trainer.train()
    finally:
        trl_replay.unregister("overlong")
    assert session.totals.counters["dead"] >= 8
    assert (session.buffer.table.reward_std > 0.1).all()


NOT_SCORED: Any = [None] * 4


@pytest.mark.parametrize("selector", ["min_range", "min_nontrivial", "pass_rate"])
def test_111_a_live_group_that_the_function_does_not_score_keeps_its_place(tmp_path: Path, selector: str) -> None:
    """It is judged by the sum, which differs: another task, say."""
    apart, right = Rewards([[0.1, 0.2, 0.3, 0.9], DEAD, DEAD]), Rewards([NOT_SCORED, LIVE, HALF])
    apart.__name__, right.__name__ = "apart", "accuracy"
    trainer = make_trainer(tmp_path, [apart, right], max_steps=5)
    settings = {"replay_reward": "accuracy", "replay_selector": selector, "replay_record": "loss"}
    session = trl_replay.attach(trainer, replay_start=0, **settings)
    steps = record(session)
    trainer.train()
    assert session.totals.counters["stored"] > 8
    assert not any(bool((after[ROWS][:4, 0] < 0).any()) for _, after in steps)


@pytest.mark.parametrize("scorer", ["pass_rate", "freshness/abs_reward", "fresh_per/mean_abs_reward"])
def test_111_the_priority_of_a_group_that_the_function_does_not_score_is_that_of_the_sum(
    tmp_path: Path, scorer: str
) -> None:
    apart, right = Rewards([[0.1, 0.2, 0.3, 0.9], DEAD, DEAD]), Rewards([NOT_SCORED, LIVE, HALF])
    apart.__name__, right.__name__ = "apart", "accuracy"
    trainer = make_trainer(tmp_path, [apart, right], max_steps=2)
    session = trl_replay.attach(trainer, replay_start=0, replay_reward="accuracy", replay_scorer=scorer)
    trainer.train()
    assert (session.buffer.table.score > 0.2).all()


def test_111_gfpo_normalizes_the_sum_and_trains_groups_that_the_function_does_not_score(tmp_path: Path) -> None:
    advantages = []
    for which in (None, "accuracy"):
        apart, right = Rewards([[0.1, 0.2, 0.3, 0.9]] * 3), Rewards([NOT_SCORED, LIVE, HALF])
        apart.__name__, right.__name__ = "apart", "accuracy"
        trainer = make_trainer(tmp_path / str(which), [apart, right], max_steps=1)
        session = trl_replay.attach(trainer, replay_reward=which, replay_preset="gfpo")
        steps = record(session)
        trainer.train()
        advantages.append(steps[0][1]["advantages"].tolist())
        assert not bool((steps[0][1][ROWS][:4, 1] & EXCLUDED).all())
    assert advantages[0] == advantages[1]


@pytest.mark.parametrize("least", [0.9, 0.7, 0.35, -0.1])
def test_108_a_reward_of_the_least_of_a_success_is_one(tmp_path: Path, least: float) -> None:
    """TRL keeps rewards as float32: 0.9 is less than 0.9 there."""
    right, mixed, wrong = [least] * 4, [least, -1.0, -1.0, -1.0], [-1.0] * 4
    trainer = make_trainer(tmp_path, Rewards([right, mixed, wrong]), max_steps=2)
    session = trl_replay.attach(trainer, replay_pass_reward=least)
    trainer.train()
    assert session.metrics["replay/all_right_fraction"] == pytest.approx(1 / 3)
    assert session.metrics["replay/all_wrong_fraction"] == pytest.approx(1 / 3)


def test_the_dead_share_of_each_function_is_logged(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, functions([LIVE, DEAD, DEAD]), max_steps=3)
    trl_replay.attach(trainer)
    trainer.train()
    assert logged(trainer, "replay/dead_fraction/accuracy") == pytest.approx([2 / 3] * 3)
    assert logged(trainer, "replay/dead_fraction/length") == [0.0] * 3
    assert logged(trainer, "replay/live_without/accuracy") == pytest.approx([2 / 3] * 3), "length differs"
    assert logged(trainer, "replay/live_without/length") == [0.0] * 3
    alone = make_trainer(tmp_path / "alone", Rewards([LIVE, DEAD, DEAD]), max_steps=1)
    session = trl_replay.attach(alone)
    alone.train()
    assert not any(key.startswith("replay/dead_fraction/") for key in session.metrics), "the same as dead_fraction"


def test_solved_prompts_are_told_by_the_function_that_counts(tmp_path: Path) -> None:
    """A format reward of 1 and no right answer: by the sum, everything passes."""
    format_reward, right = Rewards([[1.0] * 4] * 3), Rewards([DEAD] * 3)
    format_reward.__name__, right.__name__ = "format", "accuracy"
    trainer = make_trainer(tmp_path, [format_reward, right], max_steps=12)
    session = trl_replay.attach(trainer, replay_reward="accuracy")
    trainer.train()
    assert session.metrics["replay/lowest_fraction"] == 1.0
    assert "These prompts are solved" not in session.explain()


def test_a_group_that_the_function_does_not_score_is_judged_by_the_sum(tmp_path: Path) -> None:
    other = [None] * 4
    trainer = make_trainer(tmp_path, functions([other, DEAD, LIVE]), max_steps=3)
    session = trl_replay.attach(trainer, replay_reward="accuracy", replay_start=0)
    trainer.train()
    assert session.totals.counters["dead"] == 3, "the second group of each batch"
    assert "3 x a group was judged by the weighted sum" in session.explain()


@pytest.mark.parametrize("name", ["acuracy", "reward"])
def test_a_name_that_is_none_of_the_trainers_raises_and_lists_them(tmp_path: Path, name: str) -> None:
    trainer = make_trainer(tmp_path, functions([LIVE]))
    with pytest.raises(ConfigurationError, match=f"replay_reward='{name}' names none .*'length', 'accuracy'"):
        trl_replay.attach(trainer, replay_reward=name)


def test_92_a_name_that_several_functions_share_raises_with_the_remedy(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [Rewards([LIVE]), Rewards([DEAD])])
    with pytest.raises(ConfigurationError, match=r"names 2 of .*give each a `__name__` of its own"):
        trl_replay.attach(trainer, replay_reward="scripted")


def test_stored_rows_mixed_with_fresh_ones_get_advantages_of_the_whole_sum(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, functions([LIVE, LIVE, LIVE], [DEAD] * 3), ["1="], max_steps=4)
    session = trl_replay.attach(
        trainer, replay_start=0, replay_reward="accuracy", replay_sampler="same_prompt", replay_mixer="inject",
        replay_advantages="joint",
    )  # fmt: skip
    steps = record(session)
    trainer.train()
    assert session.totals.counters["replaced"] == 9
    for _, after in steps:
        advantages = after["advantages"].view(3, 4).numpy()
        assert np.abs(advantages.sum(axis=1)).max() < 1e-4, "centered within the group"


def test_resuming_keeps_what_counts(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    script = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])
    trainer = make_trainer(tmp_path, functions(*script), **settings)
    session = trl_replay.attach(trainer, replay_start=0, replay_reward="accuracy")
    trainer.train()
    again = make_trainer(tmp_path, functions(*script), **{**settings, "max_steps": 6})
    resumed = trl_replay.attach(again, replay_start=0, replay_reward="accuracy")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.totals.counters["dead"] > session.totals.counters["dead"]
    assert resumed.buffer.table.row_reward.max() == 1.0


def test_99_the_priority_of_a_group_that_the_function_does_not_score_is_that_of_the_sum(tmp_path: Path) -> None:
    unscored = [None] * 4
    trainer = make_trainer(tmp_path, functions([unscored, LIVE, unscored]), max_steps=3)
    session = trl_replay.attach(trainer, replay_reward="accuracy", replay_start=0)
    trainer.train()
    table = session.buffer.table
    scored = np.isfinite(table.row_rewards[..., table.counting]).all(axis=1)
    assert 0 < scored.sum() < len(table)
    assert table.reward_std[~scored] == pytest.approx(np.std(SPREAD, ddof=1))
    assert table.score[~scored].min() > 0


def test_100_a_function_of_negative_weight_can_not_count(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, functions([LIVE, DEAD, DEAD]), reward_weights=[1.0, -0.5])
    with pytest.raises(ConfigurationError, match=r"replay_reward='accuracy' names .* weight -0\.5.*positive weight"):
        trl_replay.attach(trainer, replay_reward="accuracy")


def test_101_a_group_of_a_file_is_dead_by_the_function_that_counts(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, functions([LIVE, DEAD, DEAD]))
    session = trl_replay.attach(trainer, replay_reward="accuracy")
    rows = [
        {"prompt": f"{group}=", "completion": text, "reward/accuracy": right, "reward/length": length}
        for group, rewards in enumerate(([0.0] * 4, LIVE))
        for text, right, length in zip("2345", rewards, SPREAD, strict=True)
    ]
    assert session.add(rows) == 1
    assert session.totals.reasons["a group was refused: its rewards do not differ (replay_reward)"] == 1
    assert session.totals.counters["refused"] == 1


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
def test_135_rows_of_a_file_with_a_single_reward_are_mixed_into_slots_that_failed(
    tmp_path: Path, weight: float
) -> None:
    trainer = make_trainer(tmp_path, functions([DEAD] * 3), max_steps=3, reward_weights=[1.0, weight])
    session = trl_replay.attach(
        trainer, replay_start=0, replay_reward="accuracy", replay_sampler="same_prompt", replay_mixer="inject"
    )
    rows = [
        {"prompt": prompt, "completion": text, "reward": float(text == "2")}
        for prompt in ("1=", "12=", "123+4=")
        for text in "2345"
    ]
    assert session.add(rows) == 3
    steps = record(session)
    trainer.train()
    assert session.totals.counters["replaced"] == 6, session.explain()
    for _, after in steps[1:]:
        stored = (after[ROWS][:, 0] < 0).view(3, 4)
        advantages = after["advantages"].view(3, 4)
        assert stored.nonzero().tolist() == [[0, 0], [1, 0], [2, 0]], "in the place of the lowest"
        total = np.array([1.0, 0.2, 0.3, 0.4])
        by_hand = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(advantages.numpy(), [by_hand] * 3, atol=1e-5)


@pytest.mark.parametrize("preset", [None, "repo"])
def test_136_groups_that_the_function_does_not_score_are_mixed_by_the_sum(tmp_path: Path, preset: str | None) -> None:
    apart, right = Rewards([LIVE] * 3, [DEAD] * 3), Rewards([NOT_SCORED] * 3)
    apart.__name__, right.__name__ = "apart", "accuracy"
    trainer = make_trainer(tmp_path, [apart, right], max_steps=3)
    settings: dict[str, Any] = {"replay_sampler": "same_prompt", "replay_mixer": "inject", "replay_start": 0}
    if preset is not None:
        settings = {"replay_preset": preset, "replay_sampler_kwargs": {"entries": 1}}
    session = trl_replay.attach(trainer, replay_reward="accuracy", **settings)
    trainer.train()
    assert session.totals.counters["replaced"] == 6, session.explain()
    assert (session.buffer.table.row_reward == session.buffer.table.row_total).all()
