"""Environments in every form of TRL's: replayed, mixed, generated again and resumed; and rollouts that failed."""

import re
from pathlib import Path

import pytest
from advantages_by_hand import mixed_advantages
from episodes import FORMS, OWN_REWARDS, TURNS, Episode, build
from methods import INJECTED
from replaying import Checked, Watch, check_batches, check_losses, watched
from replaying import build as build_with
from support import Spy, logged, weights_hash
from tools import tool_tokenizer
from trl import GRPOTrainer

import trl_replay
from trl_replay.testing import make_model

FORM = pytest.mark.parametrize("form", [pytest.param(form, marks=OWN_REWARDS) for form in FORMS])
SAMPLED = {"replay_refill": "new(rounds=1)"}
WAYS = {"replay": {}, "mixing": INJECTED, "sampled": SAMPLED}


@pytest.mark.parametrize("way", WAYS)
@FORM
def test_33_what_is_trained_is_right_by_hand(tmp_path, form, way):
    trainer = build(tmp_path, form, max_steps=5, learning_rate=2e-2)
    session = trl_replay.attach(trainer, **{"replay_start": 0, **WAYS[way]})
    watch = watched(trainer, session)
    weights = [1.0] * len(trainer.reward_funcs)

    def by_hand(step):
        for rewards in watch.rewards:
            rewards.nan_to_num_(0.0)  # of the function of another environment
        return mixed_advantages(watch, step, "auto", weights, "group", "sum_then_normalize")

    watch.advantages = by_hand if way == "mixing" else None
    trainer.train()
    check_batches(watch)
    check_losses(trainer)
    assert session.totals.counters["refilled"] > 0 or way != "sampled"
    assert Episode.rollouts == 4 * session.totals.counters["generated"], "each is reset once, in every round"


@FORM
def test_a_resumed_run_ends_as_the_one_that_went_on(tmp_path, form):
    def trained(begin=0, checkpoint=None):
        settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "trainer_class": Spy}
        trainer = build(tmp_path, form, begin, **settings)
        session = trl_replay.attach(trainer, **INJECTED, **SAMPLED)
        trainer.train(resume_from_checkpoint=checkpoint)
        table = session.buffer.table
        assert table.uses.sum() > 2
        return (weights_hash(trainer), table.prompt.tolist(), table.uses.tolist()), trainer.counted.rollouts.get(3, 0)

    whole, rollouts = trained()
    assert trained(rollouts, str(tmp_path / "checkpoint-3"))[0] == whole


@OWN_REWARDS
def test_the_pages_credit_of_turns_is_replayed_right(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    defined = {}
    exec(code, defined)
    credited = type("Credited", (Checked, defined["TurnCredit"]), {})
    trainer = build(tmp_path, "several turns with a tool", trainer_class=credited, max_steps=5)
    session = trl_replay.attach(trainer, replay_start=0)
    watch = watched(trainer, session)
    trainer.train()
    check_batches(watch)
    check_losses(trainer)
    batch = watch.steps[0][0]
    own = (batch["completion_mask"] * batch["tool_mask"]).bool()
    shares = [set((row[mask] / row[mask][-1]).tolist()) for row, mask in zip(batch["advantages"], own, strict=True)]
    turns = [sorted(of_row) for of_row in shares if len(of_row) == TURNS]
    assert turns
    assert turns[0] == pytest.approx([0.81, 0.9, 1.0])


# rollouts that failed


def failing(rollout):
    """Of three groups: one row of the first failed, all of the second, and one of the third, where the others are
    right."""
    group, row = divmod(rollout % 12, 4)
    if group == 1 or row == 1:
        return None
    return 1.0 if group == 2 else float(row == 0)


@OWN_REWARDS
def test_a_rollout_that_failed_is_no_wrong_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(Episode, "_score", staticmethod(failing))
    trainer = build(tmp_path, "reward and data of its own", max_steps=4)
    session = trl_replay.attach(trainer, replay_start=0)
    watch = watched(trainer, session)
    trainer.train()
    check_losses(trainer)
    fresh = watch.steps[0][0]["advantages"].tolist()
    assert fresh[:4] == pytest.approx([1.1546, 0.0, -0.5773, -0.5773], abs=1e-3), "of the rows that were scored"
    assert logged(trainer, "replay/failed_rows") == [6.0] * 4
    assert logged(trainer, "replay/all_wrong_fraction") == [0.0] * 4
    assert logged(trainer, "replay/all_right_fraction") == pytest.approx([1 / 3] * 4)
    table = session.buffer.table
    assert table.row_masked.tolist() == [[False, True, False, False]] * len(table)
    assert session.metrics["replay/masked_rows_fraction"] > 0, "of what is replayed, it trains nothing"


@OWN_REWARDS
def test_a_rollout_that_failed_is_no_row_of_a_mixed_group_and_trains_as_stock_where_nothing_is_replayed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Episode, "_score", staticmethod(failing))

    def trained(**chosen):
        trainer = build(tmp_path, "reward and data of its own", max_steps=4, trainer_class=Spy, beta=0.0)
        session = trl_replay.attach(trainer, **chosen)
        watch = Watch(session, 4, trainer._tokenizer.pad_token_id) if chosen.get("use_replay", True) else None
        trainer.train()
        return weights_hash(trainer), watch

    assert trained(use_replay=False)[0] == trained(replay_max_fraction=0.0)[0]
    _, watch = trained(**INJECTED)
    sources = {source for taken in watch.taken for _, source in taken.values()}
    assert sources
    assert 1 not in sources


@OWN_REWARDS
def test_a_curriculum_counts_the_scored_rollouts_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(Episode, "_score", staticmethod(failing))
    trainer = build(tmp_path, "reward and data of its own", max_steps=2, trainer_class=Spy)
    session = trl_replay.attach(trainer, replay_refill="new(rounds=1)", replay_buffer_size=0, replay_pass_reward=0.5)
    trainer.train()
    prompts = session.prompts
    assert prompts is not None
    assert prompts.tries.sum() < 4 * session.totals.counters["generated"]
    assert prompts.tries.sum() == 4 * session.totals.counters["generated"] - session.totals.counters["failed"]


class Solved:
    """A rollout that always succeeds, and owns its prompt and its reward."""

    def reset(self, **columns):
        return "Go"

    def get_reward(self):
        return 1.0


@OWN_REWARDS
def test_114_a_curriculum_takes_rows_without_a_prompt(tmp_path):
    tokenizer = tool_tokenizer()
    levels = [{"environment": name, "level": level} for name in ("one", "two") for level in range(4)]
    trainer = build_with(
        tmp_path, [], levels, tokenizer, make_model(tokenizer, max_position_embeddings=2048), GRPOTrainer,
        arguments={"environment_factory": {"one": Solved, "two": type("Other", (Solved,), {})}},
        per_device_train_batch_size=8, max_completion_length=4, max_steps=6,
    )  # fmt: skip
    session = trl_replay.attach(trainer, replay_plugins=["skip_solved"], replay_pass_reward=1.0)
    trainer.train()
    assert trainer.state.global_step == 6
    assert session.totals.counters["all_right"] > 0
