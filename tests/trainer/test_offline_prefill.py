"""Groups made elsewhere, put into the buffer: tokens, log-probs, advantages and what the loss needs beside."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
import pytest
import torch
from advantages_by_hand import advantages
from chat import QUESTION, room_trainer, tool_trainer
from releases import since
from resuming import build, differences, digits, state
from support import DEAD, LIVE, Rewards, Spy, record, replayed
from teacher import IDS, TEACHER, rows, rows_of
from users_losses import alone

import trl_replay
from trl_replay import ConfigurationError, compat
from trl_replay.batch.compose import loss_mask
from trl_replay.loss.supply import ROWS
from trl_replay.testing import make_trainer


@pytest.fixture
def attached(tmp_path):
    trainer = make_trainer(tmp_path, digits, max_steps=2, max_completion_length=3)
    session = trl_replay.attach(trainer)
    session.its_trainer = trainer
    return session


def test_prompts_completions_and_rewards_made_elsewhere_are_tokenised_and_get_the_policys_log_probs(
    attached, tmp_path
):
    path = tmp_path / "teacher.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in TEACHER) + "\n")
    assert attached.add(str(path)) == 2
    trainer = attached.trainer
    tokenizer = trainer.processing_class
    assert attached.buffer.table.origin.tolist() == [2, 2]
    group = attached.buffer.load(0)
    ids = torch.split(group.tensors["completion_ids"], group.completion_lengths.tolist())
    assert [part.tolist() for part in ids] == [
        [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in "2345"
    ]
    assert group.tensors["prompt_ids"].tolist() == tokenizer("1+1=")["input_ids"]
    prompt = group.tensors["prompt_ids"].tolist()
    wanted = torch.cat([alone(trainer.model, (prompt, part.tolist()), gradients=False) for part in ids])
    torch.testing.assert_close(group.tensors["old_per_token_logps"], wanted, rtol=1e-4, atol=1e-5)
    rewards = torch.tensor([1.0, 0, 0, 0])
    torch.testing.assert_close(group.tensors["advantages"], (rewards - rewards.mean()) / (rewards.std() + 1e-4))


def test_short_groups_are_refused_or_resampled_and_long_ones_give_several(attached):
    short = rows_of("1=", ["1", "2", "3"], [1, 0, 0])
    with pytest.warns(UserWarning, match="No group of the rows given was added: .* fewer rows than num_generations=4"):
        assert attached.add(short) == 0
    assert "fewer rows than num_generations=4" in str(attached.totals.reasons)
    assert attached.add(short, incomplete="resample") == 1
    assert len(attached.buffer.load(attached.buffer.held()[0]).completion_lengths) == 4
    long = rows_of("7=", list("12345678"), [1, 0, 0, 0, 0, 1, 1, 1])
    assert attached.add(long) == 2
    with pytest.raises(ConfigurationError, match="incomplete='drop' can't be used"):
        attached.add(short, incomplete="drop")


@since("1.7.1", "tools with the response templates of transformers 5.13 and later")
def test_145_messages_of_a_file_get_the_trainers_tools(tmp_path):
    trainer = tool_trainer(tmp_path)
    session = trl_replay.attach(trainer)
    session.add(rows_of(QUESTION, list("2345"), [1, 0, 0, 0]))
    stored = session.buffer.load(0).tensors["prompt_ids"].tolist()
    trainer.train()
    batch = trainer.scored[0]
    assert stored == batch["prompt_ids"][0][batch["prompt_mask"][0].bool()].tolist()


@since("1.7.1", "tools with the response templates of transformers 5.13 and later")
def test_145_messages_to_which_an_environment_adds_are_refused(tmp_path):
    trainer = room_trainer(tmp_path)
    session = trl_replay.attach(trainer)
    with pytest.raises(trl_replay.ReplayError, match="environments add their tools"):
        session.add(rows_of(QUESTION, list("2345"), [1, 0, 0, 0]))


def test_152_a_group_of_two_tasks_is_refused(attached):
    rows = rows_of("1=", list("2345"), [1, 0, 0, 0])
    with pytest.warns(UserWarning, match="No group .* it has fewer rows than num_generations=4"):
        attached.add([{**row, "group": 7, "trl_replay_task": 1 + number // 2} for number, row in enumerate(rows)])


def test_76_a_row_that_no_function_scored_does_not_count(tmp_path):
    """As in TRL: the mean and the deviation are those of the other rows, and its advantage is 0. It is masked."""
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer)
    made = [{**row, "reward/digits": row["reward"]} for row in rows(**IDS)]
    made[3]["reward/digits"] = None
    assert session.add([{**row, "reward": None} for row in made]) == 1
    scored = torch.tensor([1.0, 0, 0])
    expected = [*((scored - scored.mean()) / (scored.std() + 1e-4)).tolist(), 0.0]
    assert session.buffer.load(0).tensors["advantages"].tolist() == pytest.approx(expected)
    assert session.buffer.table.row_masked.tolist() == [[False, False, False, True]]


ACCURACY, LENGTH = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0], [-100.0, 0.0, -50.0, -20.0, 0.0, -10.0, -5.0, -80.0]
"""Of two groups: by the sum, the long answer that is right has the lowest reward of its group."""


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_102_advantages_of_a_file_follow_the_trainers_aggregation(tmp_path, aggregation):
    functions = [Rewards([DEAD], name=name) for name in ("accuracy", "length")]
    rule = {"multi_objective_aggregation": aggregation, "reward_weights": [2.0, 1.0]}
    trainer = make_trainer(tmp_path, functions, **rule)
    session = trl_replay.attach(trainer)
    made = [
        {"prompt": prompt, "completion": str(number), "reward/accuracy": right, "reward/length": length}
        for prompt, numbers in (("1=", range(4)), ("12=", range(4, 8)))
        for number, right, length in ((n, ACCURACY[n], LENGTH[n]) for n in numbers)
    ]
    assert session.add(made) == 2
    pairs = list(zip(ACCURACY, LENGTH, strict=True))
    groups = [pairs[:4], pairs[4:]]
    expected = [advantages(group, groups, (2.0, 1.0), "group", aggregation) for group in groups]
    np.testing.assert_allclose(session.buffer.table.row_advantage, expected, rtol=1e-5)
    assert (session.buffer.table.row_advantage[0, 0] > 0) == (aggregation == "normalize_then_sum")


@pytest.mark.parametrize("adapter", [False, True], ids=["a reference model", "an adapter turned off"])
def test_groups_made_elsewhere_get_this_trainers_reference_log_probs(tmp_path, adapter):
    made = rows(**IDS, ref_per_token_logps=[-9.0, -9.0])
    settings = {"beta": 0.1, "max_steps": 3}
    trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), **settings)
    if adapter:
        trainer = with_adapter(tmp_path, trainer)
    session = trl_replay.attach(trainer)
    assert session.add(made) == 1
    stored = session.buffer.load(0).tensors["ref_per_token_logps"]
    reference = trainer.model.get_base_model() if adapter else trainer.ref_model
    expected = alone(reference, ([4, 5], [6, 7]), gradients=False)
    torch.testing.assert_close(stored, expected.repeat(4), rtol=1e-4, atol=1e-5)
    steps = record(session)
    trainer.train()
    assert len(steps) == 3
    assert session.totals.counters["replaced"] == 2, session.explain()


def with_adapter(folder, trainer):
    from peft import LoraConfig
    from trl import GRPOTrainer

    return GRPOTrainer(
        model=str(folder / "initial_model"), reward_funcs=Rewards([DEAD, DEAD, DEAD]), args=trainer.args,
        train_dataset=trainer.train_dataset, processing_class=trainer.processing_class,
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip


@pytest.mark.parametrize("given", ["a file", "rows"])
def test_after_a_warm_start_sparse_rewards_do_not_make_replay_wait(tmp_path, given):
    """One group in 16 is live: without the warm start, replay waits, as in test_adaptive_start.py."""
    made = rows()
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in made))
    scripted = Rewards([LIVE, DEAD, DEAD, DEAD], *[[DEAD] * 4] * 3)
    trainer = make_trainer(tmp_path, scripted, max_steps=12, per_device_train_batch_size=16, max_completion_length=2)
    session = trl_replay.attach(trainer, replay_warm_start=str(path) if given == "a file" else None)
    if given == "rows":
        session.add(made)
    steps = record(session)
    trainer.train()
    assert replayed(steps)[1:4] == [2, 2, 2]


ALL_RIGHT = [row for prompt in ("1=", "12=", "123+4=") for row in rows_of(prompt, ["2", "3", "4", "5"], [1, 1, 1, 1])]


@pytest.mark.parametrize("mixed", [1, 4])
def test_a_group_that_is_all_right_gives_rows_to_a_dead_slot_but_never_takes_the_whole_of_it(tmp_path, mixed):
    trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), max_steps=3, trainer_class=Spy)
    mixer = {"replay_mixer": f"inject(rows={mixed!r})", "replay_sampler": "same_prompt"}
    session = trl_replay.attach(trainer, **mixer, replay_start=0)
    assert session.add(ALL_RIGHT) == 3
    steps = record(session)
    trainer.train()
    for _, after in steps[1:]:
        assert (after[ROWS][:, 0] < 0).sum() == (3 if mixed == 1 else 0), "with advantages of 0 it would teach nothing"


TOOLS = [
    {"prompt": "1=", "completion_ids": [20 + row, 21, 22], "tool_mask": [1, 0, 1], "reward": float(row % 2)}
    for row in range(4)
]


def test_a_group_whose_tokens_a_file_masks_is_replayed_beside_others(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD], [DEAD, DEAD, DEAD]), max_steps=2)
    session = trl_replay.attach(trainer, replay_start=0)
    assert session.add(TOOLS) == 1
    steps = record(session)
    trainer.train()
    _, after = steps[1]
    masks = loss_mask(after).view(3, 4, -1)
    lengths = after["completion_mask"].view(3, 4, -1)
    of_file = (after["completion_ids"].view(3, 4, -1)[:, :, 1:3] == torch.tensor([21, 22])).all(dim=(1, 2))
    assert of_file.sum() == 1
    assert masks[of_file][0, :, :3].tolist() == [[1, 0, 1]] * 4
    assert torch.equal(masks[~of_file], lengths[~of_file]), "all tokens of the others train"
    assert int(after["num_items_in_batch"]) == int(masks.sum())
    assert (after["advantages"].view(3, 4) != 0).any(dim=1).sum() >= 2, "another group trains beside it"


def test_a_scorer_is_told_the_log_probs_of_a_files_groups(tmp_path):
    seen = []

    def watching(groups, context):
        seen.append(groups.behavior_logps)
        return groups.reward_std

    trainer = make_trainer(tmp_path, digits, max_completion_length=3)
    session = trl_replay.attach(trainer, replay_scorer=watching)
    assert session.add(TEACHER) == 2
    assert session.add(rows(**IDS)) == 1
    assert np.isfinite(seen[-2]).all()
    assert seen[-1].tolist() == [[-3.0] * 4]


def test_groups_whose_log_probs_turn_out_not_finite_are_refused(attached):
    session = attached
    with torch.no_grad():
        session.trainer.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.warns(UserWarning, match="No group .* a trainable token has no finite log-prob"):
        assert session.add(TEACHER) == 0
    assert len(session.buffer) == len(session.buffer.held()) == 0
    assert (
        session.totals.reasons[
            "a group was refused: a trainable token has no finite log-prob: its file or the loss gave none"
        ]
        == 2
    )
    assert session.totals.counters["stored"] == 0


@pytest.mark.parametrize("stored", [[], TEACHER], ids=["an empty buffer", "a full one"])
def test_129_a_forward_that_fails_leaves_the_buffer_as_it_was(tmp_path, monkeypatch, stored):
    trainer = make_trainer(tmp_path, digits, max_completion_length=3)
    session = trl_replay.attach(trainer, replay_buffer_size=2, replay_evictor="fifo")
    session.add(stored)
    before = state(session)
    monkeypatch.setattr(compat, "forward_logps", mock.Mock(side_effect=MemoryError("no room")))
    with pytest.raises(trl_replay.ReplayError, match="no room"):
        session.add([row for task in "345" for row in rows_of(f"{task}=", ["1", "2", "3", "4"], [1, 0, 0, 0])])
    after = state(session)
    assert len(session.buffer) == len(session.buffer.held()) == len(stored) // 4
    assert not differences(before, after)
