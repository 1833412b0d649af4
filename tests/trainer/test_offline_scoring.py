"""Rows of files without a reward are scored by the trainer's functions, exactly as completions that it generates."""

import numpy as np
import pytest
import torch
from chat import QUESTION, attached, chat_tokenizer, room_trainer, tool_trainer
from releases import since
from replaying import build
from support import LIVE, Spy
from teacher import rows, rows_of

from trl_replay import ConfigurationError, ReplayError
from trl_replay.testing import make_model, make_tokenizer, make_trainer

PROMPTS = ["1=", "12=", "123+4="]


def right(completions, **_):
    return [float(text == "2") for text in completions]


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def accuracy(completions, answer, log_extra, log_metric, **_):
    """With a column of the dataset, and logs of its own."""
    log_extra("length", [len(text_of(completion)) for completion in completions])
    log_metric("calls", 1.0)
    return [float(text_of(one).count(right)) for one, right in zip(completions, answer, strict=True)]


async def length(completion_ids, trainer_state, **_):
    """Asynchronous, of tokens and of the time; no reward for some."""
    return [len(ids) / (1 + trainer_state.global_step) if sum(ids) % 3 else None for ids in completion_ids]


def rare(prompts, completions, **_):
    """Looks at the group, and at prompts in the form of the dataset."""
    texts = [text_of(completion) for completion in completions]
    return [len(set(text)) - texts.count(text) + len(prompt) / 10 for text, prompt in zip(texts, prompts, strict=True)]


class Kept(Spy):
    """Keeps the raw rewards of what it generates."""

    def _calculate_rewards(self, *given):
        self.raw = super()._calculate_rewards(*given)
        self.given = given
        return self.raw


def reward_model(tokenizer):
    from transformers import Qwen2ForSequenceClassification

    torch.manual_seed(0)
    return Qwen2ForSequenceClassification(make_model(tokenizer, num_labels=1).config)


def scoring_trainer(folder, messages, **settings):
    tokenizer = chat_tokenizer() if messages else make_tokenizer()
    dataset = [
        {"prompt": [{"role": "user", "content": prompt}] if messages else prompt, "answer": str(number)}
        for number, prompt in enumerate(PROMPTS)
    ]
    functions = [accuracy, length, rare, reward_model(tokenizer)]
    arguments = {"reward_processing_classes": [None, None, None, tokenizer]}
    settings = {"max_steps": 1, "reward_weights": [1.0, 0.5, 2.0, 3.0], **settings}
    return build(folder, functions, dataset, tokenizer, make_model(tokenizer), Kept, arguments=arguments, **settings)


def rows_of_batch(trainer):
    """What was generated, without anything that scoring gave."""
    (batch,) = trainer.scored
    _, prompts, completions, completion_ids = trainer.given
    made = []
    for number, (prompt, completion, ids) in enumerate(zip(prompts, completions, completion_ids, strict=True)):
        prompt_ids = batch["prompt_ids"][number][batch["prompt_mask"][number].bool()].tolist()
        made.append({"prompt": prompt, "completion": completion, "prompt_ids": prompt_ids, "completion_ids": ids})
    return made


def raw_rewards(session):
    """Of each group, `(G, functions)`."""
    return [session.buffer.load(serial).tensors["trl_replay_rewards"].numpy() for serial in session.buffer]


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("rule", ["sum_then_normalize", "normalize_then_sum"])
def test_rescored_rows_get_the_rewards_of_the_stock_trainer(tmp_path, messages, rule):
    stock = scoring_trainer(tmp_path / "stock", messages, multi_objective_aggregation=rule)
    stock.train()
    trainer = scoring_trainer(tmp_path / "replay", messages, multi_objective_aggregation=rule, log_completions=True)
    session = attached(trainer)
    calls = len(trainer._pending_metrics)
    assert session.add(rows_of_batch(stock), rescore=True) == 3, session.totals.reasons
    table = session.buffer.table
    np.testing.assert_array_equal(np.concatenate(raw_rewards(session)), stock.raw.numpy())
    assert stock.raw.isnan().any()
    np.testing.assert_allclose(
        table.row_advantage.ravel(), stock.scored[0]["advantages"].numpy(), rtol=1e-5, atol=1e-6
    )
    assert len(trainer._pending_metrics) == calls
    trainer.train()  # which logs a table of its own rows, with as many in each column
    assert len(trainer._logs["extra"]["length"]) == len(trainer._logs["prompt"])


def test_texts_without_a_reward_are_scored_in_parts_of_whole_groups(tmp_path):
    sizes = []

    def right(completions, **_):
        sizes.append(len(completions))
        return [float(text == "2") for text in completions]

    trainer = make_trainer(tmp_path, right, per_device_train_batch_size=8)
    session = attached(trainer)
    made = [{name: row[name] for name in ("prompt", "completion")} for row in rows()]
    assert session.add([{**row, "prompt": f"{number}="} for number in range(5) for row in made], rescore=True) == 5
    assert sizes == [8, 8, 4]
    assert session.buffer.table.row_reward.tolist() == [LIVE] * 5


def test_a_group_that_lacks_a_reward_is_refused_and_rescore_scores_all(tmp_path):
    def right(completions, **_):
        return [float(text == "3") for text in completions]

    made = rows_of("1=", list("2345"), [7.0, 0, 0, 0]) + rows_of("2=", list("2345"), [7.0, 0, 0, None])
    made = [{**row, "advantage": row["reward"]} for row in made]
    session = attached(make_trainer(tmp_path, right))
    assert session.add(made) == 1
    assert session.buffer.table.row_advantage[0].tolist() == [7.0, 0.0, 0.0, 0.0], "the file's"
    assert session.totals.reasons["a row was refused: it has no reward"] == 1, "nothing is guessed"
    session.buffer.clear()
    assert session.add(made, rescore=True) == 2
    assert session.buffer.table.row_reward.tolist() == [[0.0, 1.0, 0.0, 0.0]] * 2
    assert session.buffer.table.row_advantage[0, 1] == pytest.approx(1.5, abs=1e-3), "not the file's"


def test_a_warm_start_is_rescored_by_its_setting(tmp_path):
    made = "".join(f'{{"prompt": "1=", "completion": "{text}", "reward": 5}}\n' for text in "2345")
    (tmp_path / "rows.jsonl").write_text(made)

    trainer = make_trainer(tmp_path, right, max_steps=1)
    with pytest.raises(ConfigurationError, match="replay_warm_start_rescore=True can't be used: there is no file"):
        attached(trainer, replay_warm_start_rescore=True)
    session = attached(trainer, replay_warm_start=str(tmp_path / "rows.jsonl"), replay_warm_start_rescore=True)
    trainer.train()
    assert session.entry(0).rewards == {"right": LIVE}


def test_columns_that_a_row_lacks_are_those_of_the_datasets_row_with_its_prompt(tmp_path):
    seen = []

    def reward(answer, level, **_):
        seen[:] = list(zip(answer, level, strict=True))
        return LIVE * (len(answer) // 4)

    dataset = [{"prompt": prompt, "answer": prompt[0], "level": len(prompt)} for prompt in PROMPTS]
    trainer = build(tmp_path, reward, dataset, trainer_class=Spy, per_device_train_batch_size=4)
    session = attached(trainer)
    made = [{name: row[name] for name in ("prompt", "completion")} for row in rows(prompt="12=")]
    assert session.add(made, rescore=True) == 1
    assert seen == [("1", 3)] * 4
    session.add([{**row, "answer": "7"} for row in made], rescore=True)
    assert seen == [("7", 3)] * 4, "the file's own comes first"
    with pytest.warns(UserWarning, match=r"No group .*: it lacks 'level', which reward functions get"):
        assert session.add([{**row, "prompt": "5=", "answer": "5"} for row in made], rescore=True) == 0
    session.add([{**row, "prompt": "5=", "answer": "5", "level": None} for row in made], rescore=True)
    assert seen == [("5", None)] * 4


@since("1.7.1", "tools with the response templates of transformers 5.13 and later")
def test_turns_with_tools_are_scored_as_messages(tmp_path):
    kept = []

    def reward(completions, **_):
        kept.append(completions)
        return LIVE

    trainer = tool_trainer(tmp_path, reward)
    trainer.train()
    session = attached(trainer)
    (batch,) = trainer.scored
    rows = [{"prompt": QUESTION, "completion": completion} for completion in kept[0]]
    for number, length in enumerate(batch["completion_mask"].sum(dim=1).tolist()):
        rows[number] |= {key: batch[key][number, :length].tolist() for key in ("completion_ids", "tool_mask")}
    assert session.add(rows, rescore=True) == 1
    assert kept[1] == kept[0]
    ids = {"prompt": QUESTION, "completion_ids": [20, 21, 22], "tool_mask": [1, 0, 1]}
    with pytest.warns(UserWarning, match="it has ids of several turns alone, and reward functions get messages"):
        assert not session.add([ids] * 4, rescore=True)
    assert len(kept) == 2, "no function is asked"


@since("1.7.1", "tools with the response templates of transformers 5.13 and later")
def test_rewards_of_an_environment_are_not_made_up(tmp_path):
    trainer = room_trainer(tmp_path)
    session = attached(trainer)
    made = [{"prompt": "1=", "completion": text} for text in "2345"]
    with pytest.raises(ReplayError, match=r"the rows given can't be scored: .* need its episode"):
        session.add(made, rescore=True)
