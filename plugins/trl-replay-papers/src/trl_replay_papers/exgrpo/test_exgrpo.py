"""ExGRPO: which row is mixed in, and which prompts are asked again, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from methods import SIZE, mean_logp, mixed_slots, same_prompt, stored, train
from support import Rewards

import trl_replay
from trl_replay import ConfigurationError, InputsContext, PromptTable
from trl_replay.errors import RefusedError
from trl_replay.testing import make_table, make_trainer
from trl_replay_papers.exgrpo import SETTINGS, ExGRPO, exgrpo


def test_exgrpo_mixes_in_the_correct_row_that_the_policy_was_surest_of(tmp_path: Any) -> None:
    settings = {"replay_preset": "exgrpo", "replay_correction": "ratio", "replay_start": "pass_rate(0.01)"}
    session, watch = train(tmp_path, "joint", settings, scale_rewards="none", loss_type="dr_grpo")
    found = list(mixed_slots(watch))
    assert len(found) > 4
    for step, slot, rows in found:
        (place,) = rows
        serial, row = rows[place]
        assert place == SIZE - 1, "seven fresh rows and one stored one, here three and one"
        assert same_prompt(watch, step, slot, serial)
        correct = [other for other in range(SIZE) if stored(watch, serial, other) == 1.0]
        means = {other: mean_logp(watch, serial, other) for other in correct}
        assert means[row] == pytest.approx(max(means.values()), abs=1e-5)
    passes = [sum(stored(watch, serial, row) for row in range(SIZE)) for serial in session.buffer]
    assert set(passes) <= {1.0, 2.0, 3.0}, "solved and unsolved groups are not stored"


def seen(*groups: tuple[int, int]) -> PromptTable:
    """A table that has seen groups of eight, `(key, passes)` each."""
    table = PromptTable()
    for key, passes in groups:
        passed = np.arange(8)[None] < passes
        table.note(np.array([key]), np.array([key]), passed, np.array([passes in (0, 8)]), 3)
    return table


def context(prompts: PromptTable, stored: list[int], seed: int = 0) -> InputsContext:
    return InputsContext(
        update=9,
        rng=np.random.default_rng(seed),
        capacity=9,
        num_generations=8,
        table=make_table([1.0] * len(stored), prompt=stored),
        prompts=prompts,
        key=lambda row: row["number"],
        new_prompts=lambda count: [],
        prompt_rows=lambda keys: [{"number": key} for key in keys],
    )


def test_prompts_of_one_pass_count_share_its_weight_and_those_half_solved_weigh_most() -> None:
    prompts = seen((1, 4), (2, 3), (3, 3), (4, 7), (5, 8), (6, 0), (7, 4))
    chances = exgrpo._chances(prompts, make_table([1.0] * 6, prompt=[1, 2, 3, 4, 5, 6]))
    expected = [1.0, np.exp(-0.5) / 2, np.exp(-0.5) / 2, np.exp(-4.5), 0.0, 0.0, 0.0]
    assert chances.tolist() == pytest.approx(expected), "solved, unsolved and unknown ones never"


def test_half_of_a_batch_is_asked_again_as_often_as_the_chances_say() -> None:
    prompts, stored = seen((1, 4), (2, 3), (3, 8)), [1, 2, 3]
    given = [{"number": 10}, {"number": 11}]
    counts = dict.fromkeys((1, 2), 0)
    for seed in range(1000):
        made = exgrpo.trl_replay_inputs(given, context(prompts, stored, seed))
        assert made is not None
        assert made[0] == {"number": 10}, "half stay"
        counts[made[1]["number"]] += 1
    share = 1.0 / (1.0 + np.exp(-0.5))
    assert counts[1] / 1000 == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 1000))


def test_half_of_an_odd_number_is_rounded_up_or_down_at_random() -> None:
    prompts, stored = seen((1, 4), (2, 3), (3, 4)), [1, 2, 3]
    given = [{"number": number} for number in (10, 11, 12)]
    kept = []
    for seed in range(200):
        made = exgrpo.trl_replay_inputs(given, context(prompts, stored, seed))
        assert made is not None
        kept.append(sum(row in given for row in made))
    assert set(kept) == {1, 2}
    assert np.mean(kept) == pytest.approx(1.5, abs=4 * 0.5 / np.sqrt(200))


def test_where_nothing_is_stored_the_prompts_stay() -> None:
    assert exgrpo.trl_replay_inputs([{"number": 10}], context(seen((1, 4)), [])) is None
    assert exgrpo.trl_replay_inputs([{"number": 1}], context(seen((1, 4)), [1])) is None, "it is in the batch"


def test_a_share_that_can_not_be_used_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="share=2"):
        ExGRPO(share=2)


@pytest.mark.parametrize(
    "settings",
    [{"replay_preset": "my_exgrpo/exgrpo"}, {"replay_preset": "exgrpo/exgrpo", "replay_plugins": ["my_exgrpo"]}],
)
def test_one_of_your_own_beside_the_plugin_itself_is_refused_and_alone_it_is_used(
    tmp_path: Any, settings: dict[str, Any]
) -> None:
    trl_replay.register(ExGRPO(share=0.25), "my_exgrpo")
    try:
        trainer = make_trainer(tmp_path, lambda completions, **_: [0.0] * len(completions))
        with pytest.raises(RefusedError, match="would both ask prompts again"):
            trl_replay.attach(trainer, **settings)
        own = {"replay_scorer": "my_exgrpo/half_solved", "replay_mixer": "my_exgrpo/surest"}
        assert trl_replay.attach(trainer, **{**SETTINGS, **own}).enabled
    finally:
        trl_replay.unregister("my_exgrpo")


def test_140_where_it_is_not_known_what_is_solved_a_warning_says_that_nothing_is_asked_again(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([[1.0, 0.5, 0.0, 0.0]] * 3), max_steps=2)
    trl_replay.attach(trainer, replay_plugins=["exgrpo"])
    with pytest.warns(UserWarning, match=r"the plugin 'exgrpo' can't act\. Set replay_pass_reward"):
        trainer.train()
