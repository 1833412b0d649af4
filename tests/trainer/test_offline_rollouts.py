"""Rows from elsewhere in the place of what the trainer generates: checked afterwards, and noticed by nothing."""

import json
import random

import numpy as np
import pytest
import torch
from chat import QUESTION, attached, chat_trainer, stored
from resuming import digits
from support import DEAD, LIVE, Rewards, Spy
from teacher import TEACHER, rows_of
from transformers import TrainerCallback

from trl_replay import ReplayError
from trl_replay.testing import make_model, make_tokenizer, make_trainer


class OwnGenerate(Spy):
    """Its completions are the model's, whatever rollout_func says."""

    def _generate(self, prompts):
        function, self.rollout_func = self.rollout_func, None
        try:
            return super()._generate(prompts)
        finally:
            self.rollout_func = function


class OwnScoring(Spy):
    """Makes something else of completions."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return {**batch, "completion_ids": batch["completion_ids"].flip(0)}


class OwnMask(Spy):
    """Trains no first token."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if "tool_mask" in batch:
            batch["tool_mask"][:, 0] = 0
        return batch


@pytest.mark.parametrize(
    ("made", "method"),
    [(OwnGenerate, "_generate"), (OwnScoring, "_generate_and_score_completions"), (OwnMask, "_generate_and_score_")],
)
def test_a_trainer_that_makes_other_completions_or_masks_of_rows_is_refused_by_name(tmp_path, made, method):
    session = attached(make_trainer(tmp_path, Rewards([DEAD] * 3), trainer_class=made))
    words = (
        rf"{made.__name__}\.{method}.* made other completions or masks .*Row 0 of the rows .*none of these was stored"
    )
    with pytest.raises(ReplayError, match=words):
        session.add(TEACHER)
    assert len(session.buffer) == len(session.buffer.held()) == 0


def everything(trainer):
    """What a trainer shows and draws from."""
    logs = {name: str(held) for name, held in trainer._logs.items()}
    shown = (str(trainer._metrics), logs, str(trainer._pending_extra_logs), str(trainer._pending_metrics))
    modes = [module.training for module in trainer.model.modules()]
    attributes = {
        name: id(trainer.__dict__[name]) for name in ("rollout_func", "tools", "use_vllm", "_metrics", "_logs")
    }
    methods = sorted(name for name in trainer.__dict__ if name.startswith("_calculate"))
    return shown, trainer.state.num_input_tokens_seen, modes, attributes, methods


@pytest.mark.parametrize("rescore", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_neither_log_counters_nor_generators_notice_rows_from_elsewhere(tmp_path, rescore, training):
    def noisy(completions, log_extra, log_metric, **_):
        log_extra("length", list(map(len, completions)))
        log_metric("calls", random.random() + np.random.rand() + float(torch.rand(())))
        return [float(text == "2") for text in completions]

    trainer = make_trainer(tmp_path, noisy, max_steps=1, beta=0.1)
    session = attached(trainer)
    trainer.train()
    trainer.model.train(training)
    before = everything(trainer)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert session.add(TEACHER[:4], rescore=rescore) == 1
    assert everything(trainer) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]


def test_rows_can_not_be_added_while_the_trainer_scores(tmp_path):
    told = []

    def reward(completions, **_):
        with pytest.raises(ReplayError, match="while the trainer scores a batch: call it in a callback"):
            session.add(TEACHER)
        told.append(1)
        return [0.0] * len(completions)

    trainer = make_trainer(tmp_path, reward, max_steps=1)
    session = attached(trainer)
    trainer.train()
    assert told


def test_ids_alone_are_enough(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([DEAD] * 3))
    session = attached(trainer)
    tokenizer = trainer.processing_class
    prompt = tokenizer("1=")["input_ids"]
    ids = [tokenizer(text)["input_ids"] for text in "2345"]
    for end in ("", "_ids"):
        made = zip(ids, LIVE, strict=True)
        rows = [{f"prompt{end}": prompt, f"completion{end}": one, "reward": value} for one, value in made]
        assert session.add(rows) == 1
    for serial in session.buffer:
        assert session.buffer.load(serial).tensors["completion_ids"].tolist() == [
            token for one in ids for token in one
        ]
        assert session.entry(serial).prompts[0] == "1="


@pytest.mark.parametrize("how", ["null", "left out of a file"])
def test_a_functions_null_counts_as_none_and_a_file_may_leave_it_out(tmp_path, how):
    trainer = make_trainer(tmp_path, [digits, Rewards([DEAD], name="form")], reward_weights=[1.0, 0.5])
    session = attached(trainer)
    made = [
        {"prompt": "1=", "completion": text, "reward/digits": value, "reward/form": other}
        for text, value, other in zip("abcd", LIVE, [None, 1.0, 0.0, 1.0], strict=True)
    ]
    if how != "null":
        del made[0]["reward/form"]
    if how == "left out of a file":
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in made))
    assert session.add(tmp_path / "rows.jsonl" if how == "left out of a file" else made) == 1
    assert session.buffer.table.row_reward[0].tolist() == pytest.approx([1.0, 0.5, 0.0, 0.5])
    for lacking in (["reward/form"], ["reward/digits"]):
        with pytest.raises(ReplayError, match=f"lacks rewards in '{lacking[0]}'"):
            session.add([{name: value for name, value in row.items() if name not in lacking} for row in made])


def test_a_files_own_group_that_solves_its_prompt_is_not_stored(tmp_path):
    trainer = make_trainer(tmp_path, digits)
    session = attached(trainer, replay_retire_passes=3, replay_pass_reward=1.0)
    solved = rows_of("1=", list("2345"), [1.0, 1.0, 1.0, 0.0])
    with pytest.warns(UserWarning, match=r"No group .*its prompt is solved \(replay_retire_passes\)"):
        assert session.add(solved) == 0
    assert session.add(rows_of("2=", list("2345"), [1.0, 1.0, 0.0, 0.0])) == 1


def test_a_row_without_the_datasets_columns_finds_its_task_by_its_prompt_unless_several_have_it(tmp_path):
    from replaying import build

    dataset = [{"prompt": prompt, "answer": answer} for prompt, answer in (("1=", "1"), ("2=", "2"), ("2=", "3"))]
    trainer = build(tmp_path, Rewards([DEAD] * 3), dataset)
    session = attached(trainer)
    with pytest.warns(UserWarning, match="same prompt differ in 'answer'"):
        session.add(rows_of("1=", list("2345"), LIVE))
    assert session.buffer.table.prompt.tolist() == [session.components.tasks.key(dataset[0])]
    with pytest.warns(UserWarning, match="several rows of the dataset have its prompt: add the columns 'answer'"):
        assert session.add(rows_of("2=", list("2345"), LIVE)) == 0
    assert session.add([{**row, "answer": "3"} for row in rows_of("2=", list("2345"), LIVE)]) == 1
    assert session.buffer.table.prompt.tolist()[1] == session.components.tasks.key(dataset[2])


@pytest.mark.parametrize("rescore", [False, True])
def test_a_group_of_an_export_whose_dataset_row_is_gone_takes_none_of_several_with_its_prompt(tmp_path, rescore):
    from replaying import build

    def right(completions, answer, **_):
        return [float(text.startswith(one)) for text, one in zip(completions, answer, strict=True)]

    first = attached(build(tmp_path / "a", right, [{"prompt": "1=", "answer": "2"}]))
    assert first.add([{**row, "answer": "2"} for row in rows_of("1=", list("2345"), LIVE)]) == 1
    path = first.export(tmp_path / "groups.parquet")
    dataset = [{"prompt": "1=", "answer": answer} for answer in "34"]
    session = attached(build(tmp_path / "b", right, dataset))
    gone = "its row of the dataset is gone, and several others have its prompt"
    with pytest.warns(UserWarning, match="same prompt differ in 'answer'"), pytest.warns(UserWarning, match=gone):
        assert session.add(path, rescore=rescore) == 0


def test_a_column_of_the_dataset_with_the_name_of_a_files_own_tells_no_task(tmp_path):
    from replaying import build

    dataset = [{"prompt": prompt, "group": 7, "reward": 0.5} for prompt in ("1=", "2=")]
    session = attached(build(tmp_path, Rewards([DEAD] * 3), dataset))
    assert session.add([{**row, "group": 0} for row in rows_of("2=", list("2345"), LIVE)]) == 1
    assert session.buffer.table.prompt.tolist() == [session.components.tasks.key(dataset[1])]


THINKS = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<turn>' + m['role'] + ' ' }}"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>' + m.get('reasoning_content', '') + '</think>' }}{% endif %}{{ m['content'] }}"
    "{% for call in m.get('tool_calls') or [] %}{{ 'call ' + call['function']['name'] }}{% endfor %}{{ '<end>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>assistant ' }}{% endif %}"
)
"""As Qwen3's: the last answer begins with a block of reasoning, also if there is none."""


def test_an_empty_block_of_reasoning_is_not_the_models(tmp_path):
    session = attached(chat_trainer(tmp_path, template=THINKS))
    turns = [[{"role": "assistant", "content": f"{row}"}] for row in range(4)]
    assert session.add(rows_of(QUESTION, turns, LIVE)) == 1
    assert stored(session) == [f"{row}<end>" for row in range(4)]


def test_a_batch_wide_scale_is_that_of_each_piece_of_a_file(tmp_path):
    """As docs/files.md says: a piece is a batch."""
    trainer = make_trainer(tmp_path, digits, scale_rewards="batch", per_device_train_batch_size=4)
    session = attached(trainer)
    assert session.add(rows_of("1=", list("2345"), LIVE) + rows_of("2=", list("2345"), [9.0, 0.0, 0.0, 0.0])) == 2
    assert session.buffer.table.row_advantage[:, 0].tolist() == pytest.approx([1.5, 1.5], abs=1e-3)


def test_rows_added_in_a_callback_are_replayed_with_the_batch_at_hand_as_it_was(tmp_path):
    class Add(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                session.add(rows_of("1=", list("2345"), LIVE) + rows_of("12=", list("2345"), LIVE))

    trainer = make_trainer(tmp_path, Rewards([DEAD] * 3), max_steps=3, model=make_model(make_tokenizer()))
    session = attached(trainer, replay_start=0)
    trainer.add_callback(Add())
    trainer.train()
    assert session.totals.counters["replaced"] == 4, session.explain()
