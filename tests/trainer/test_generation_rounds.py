"""Generating again for dead groups, through the trainer: what is trained on, what is logged, what is left alone."""

from collections import Counter
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from generating import PROMPTS, SIZE, Coins, rounds_of
from releases import since
from replaying import build
from scenarios import GENERATED_AGAIN, follow, train
from support import Spy, record, shaping

import trl_replay
from trl_replay.errors import RefusedError
from trl_replay.testing import make_trainer

rounds = partial(train, prompts=PROMPTS, replay_refill="new(rounds=2)", replay_buffer_size=0, replaced=0)
"""Trains with two further rounds a batch and no buffer."""


@pytest.mark.generates
def test_refilled_groups_are_trained_on(tmp_path):
    follow(tmp_path, GENERATED_AGAIN)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_advantages_of_a_batch_that_trls_rules_do_not_explain_are_refused_only_where_they_are_needed(tmp_path, scale):
    shaped = {"trainer_class": shaping(lambda advantages: advantages * 2), "scale_rewards": scale}
    words = r"scale_rewards='batch'.*this trainer shapes advantages itself.*Leave replay_refill out"
    refused = pytest.raises(trl_replay.SeamError, match=words)
    with refused if scale == "batch" else nullcontext():
        assert rounds(tmp_path, rewards=Coins(0.5), **shaped).counters["refilled"] > 0


# what is left alone


@pytest.mark.parametrize("how", [{"replay_dry_run": True}, {"use_replay": False}], ids=["dry run", "off"])
def test_nothing_is_generated_again_in_a_dry_run_or_with_replay_off(tmp_path, how):
    coins = Coins(0.0)
    rounds(tmp_path, rewards=coins, **how)
    assert [len(call) for call in coins.calls] == [3] * 4


# how many rounds


def test_new_prompts_are_not_those_of_the_batch_and_come_once_before_any_comes_again(tmp_path):
    coins = Coins(0.2, seed=1)
    trainer = make_trainer(tmp_path, coins, PROMPTS[:12], max_steps=6, shuffle_dataset=True)
    trainer.train_dataset = trainer.train_dataset.select(range(12))
    session = rounds(trainer).session
    new = []
    for numbers in rounds_of(coins.calls, 2):
        present = set(coins.prompts[numbers[0]])
        for number in numbers[1:]:
            assert not present & set(coins.prompts[number])
            assert len(set(coins.prompts[number])) == len(coins.prompts[number])
            present |= set(coins.prompts[number])
            new += coins.prompts[number]
    assert len(new) > 14
    assert max(Counter(new[:9]).values()) == 1
    assert len(session.prompts) == 12


@since("1.9.0", "streams as datasets")
def test_a_stream_gives_no_new_prompts_but_the_same_ones_and_its_run_resumes(tmp_path):
    from datasets import Dataset

    stream = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 4]).to_iterable_dataset()
    for steps in (2, 4):
        trainer = build(
            tmp_path, Coins(0.4), arguments={"train_dataset": stream}, trainer_class=Spy, max_steps=steps,
            save_strategy="steps", save_steps=2,
        )  # fmt: skip
        with pytest.raises(RefusedError, match=r"'new.rounds=2.' .* stream .* use 'same.rounds=2.'"):
            trl_replay.attach(trainer, replay_refill="new(rounds=2)")
        session = trl_replay.attach(trainer, replay_refill="same(rounds=2)")
        asked = pytest.warns(UserWarning, match="still in the dataset can't be told: it is a stream")
        with asked if steps > 2 else nullcontext():
            trainer.train(resume_from_checkpoint=steps > 2)
    assert session.totals.counters["refilled"] > 0
    assert session.step.rounds is not None
    assert session.step.rounds.batches == 4


# what the trainer logs


def test_each_round_is_logged_as_trl_does(tmp_path):
    """Metrics are means over the rounds of a batch, and the table of completions holds what was generated last."""
    coins = Coins(0.4, seed=2)

    def reward(completions, prompts, log_extra, log_metric, **_):
        log_extra("said", list(completions))
        log_metric("rows", float(len(completions)))
        return coins(completions, prompts)

    run = rounds(tmp_path, rewards=reward, trainer_class=Spy, max_steps=5)
    trainer, tokens, texts = run.trainer, 0, []
    batches = rounds_of(coins.calls, 2)
    assert max(map(len, batches)) == 3
    logs = [log for log in trainer.state.log_history if "reward" in log]
    for numbers, log in zip(batches, logs, strict=True):
        scored = [trainer.scored[number] for number in numbers]
        lengths = [batch["completion_mask"].sum(dim=1) for batch in scored]
        tokens += sum(int(batch["prompt_mask"].sum()) for batch in scored) + sum(int(one.sum()) for one in lengths)
        for batch in scored:
            texts += trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
        assert log["reward"] == pytest.approx(np.mean([np.mean(coins.calls[number]) for number in numbers]), abs=1e-6)
        assert log["completions/max_length"] == np.mean([int(one.max()) for one in lengths])
        assert log["rows"] == np.mean([len(one) for one in lengths])
        assert log["num_tokens"] == tokens
        assert log["replay/rounds"] == len(numbers) - 1
    columns = trainer._logs
    assert list(columns["completion"]) == list(columns["extra"]["said"]) == texts[-12:]


@pytest.mark.parametrize("round_number", [0, 2])
def test_an_error_in_the_reward_function_of_a_later_round_leaves_a_trainer_that_can_train(tmp_path, round_number):
    coins = Coins(0.0)
    calls = 0

    def reward(completions, prompts, **_):
        nonlocal calls
        calls += 1
        if calls == 4 + round_number:
            raise ZeroDivisionError("no luck")
        return coins(completions, prompts)

    trainer = make_trainer(tmp_path, reward, PROMPTS, max_steps=3)
    session = trl_replay.attach(trainer, replay_refill="new(rounds=2)")
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    columns = trainer._logs
    lengths = {len(columns[name]) for name in ("prompt", "completion", "advantages")}
    assert lengths == {12}
    trainer.train()
    assert trainer.state.global_step == 3
    assert session.totals.batches == 1 + 3


def leave_one_out(groups):
    """A plugin's advantages, computed from the rewards: of equal ones, rounding may leave 1e-16."""
    others = (groups.reward.sum(axis=1, keepdims=True) - groups.reward) / (SIZE - 1)
    return groups.reward - others


@pytest.mark.parametrize("live_groups", [0, 1])
def test_58_rounding_in_a_plugins_advantages_does_not_make_a_dead_group_live(tmp_path, live_groups):
    def reward(completions, **_):
        groups = len(completions) // SIZE
        live = live_groups if groups == 3 else 0  # none in further rounds, which have nothing larger to compare with
        return [1.0, 0.2, 0.2, 0.2] * live + [0.2] * SIZE * (groups - live)

    def good_form(completions, **_):
        return [1.0] * len(completions)

    settings = {"max_steps": 1, "reward_weights": [0.2, 0.8], "replay_buffer_size": 64}
    run = rounds(tmp_path, rewards=[reward, good_form], hooks={"advantages": leave_one_out}, **settings)
    assert np.abs(run.steps[0][1]["advantages"].numpy()[SIZE:]).max() > 0, "rounding leaves something"
    assert run.counters["refilled"] == 0
    assert run.counters["dead"] == run.counters["generated"] - live_groups
    assert len(run.table) == live_groups


@pytest.mark.parametrize("rows", [8, 16])
def test_60_batches_may_have_another_size_in_the_next_training(tmp_path, rows):
    trainer = make_trainer(tmp_path, Coins(0.4), PROMPTS, max_steps=3)
    session = rounds(trainer).session
    refilled = session.totals.counters["refilled"]
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = trainer.args.generation_batch_size = rows
    steps = record(session)
    trainer.train()
    assert [len(trained["advantages"]) for _, trained in steps] == [rows] * 3
    assert session.totals.counters["refilled"] > refilled
