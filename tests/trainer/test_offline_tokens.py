"""Token ids made of a file's texts and messages: those that the trainer would have made, or the row is refused."""

import itertools
import json

import pytest
import torch
from chat import ENDS_WHOLE, NAMES_CHANNEL, QUESTION, attached, chat_trainer, stored, tool_trainer
from releases import since
from support import DEAD, LIVE, Rewards, record
from teacher import rows, rows_of

from trl_replay.batch.compose import loss_mask
from trl_replay.testing import make_tokenizer, make_trainer

REWARDS = [1.0, 0.0, 0.0, 0.0]


def said(*texts):
    """Completions of one message."""
    return [[{"role": "assistant", "content": text}] for text in texts]


# the end of a turn


@since("1.14", "the model's own end tokens")
def test_154_what_the_template_puts_after_an_answer_ends_it_and_never_twice(tmp_path):
    session = attached(chat_trainer(tmp_path))
    session.add(rows_of(QUESTION, [*said("1", "2<end>"), "3", "4<end>\n"], REWARDS))
    assert stored(session) == ["1<end>", "2<end>", "3<end>", "4<end>"]
    steps = record(session)
    session.trainer.train()
    assert any(ids.tolist()[:2] == [8, 5] for _, after in steps for ids in after["completion_ids"]), "it is trained on"


@since("1.14", "the model's own end tokens")
@pytest.mark.parametrize(("template", "before"), [(ENDS_WHOLE, ""), (NAMES_CHANNEL, "<think>said ")])
def test_154_what_a_template_puts_around_an_answer_is_that_answers(tmp_path, template, before):
    trainer = chat_trainer(tmp_path, template=template, max_completion_length=20)
    session = attached(trainer)
    assert session.add(rows_of(QUESTION, said("1", "2<end>", "3", "4"), REWARDS)) == 1
    assert stored(session) == [f"{before}{text}<end>" for text in "1234"]
    assert session.add(rows_of(QUESTION, list("1234"), REWARDS)) == 1
    assert stored(session, 1) == [f"{text}<end>" for text in "1234"], "the text is all that was said"


@since("1.14", "the model's own end tokens")
def test_154_texts_get_the_end_token_where_no_template_is_in_sight(tmp_path):
    session = attached(chat_trainer(tmp_path, prompt="1="))
    session.add(rows_of("1=", ["1", "2<eos>", "3<end>", "456789"], REWARDS))
    assert stored(session) == ["1<eos>", "2<eos>", "3<end>", "456789"]


def test_154_the_trainers_end_stands_where_the_model_goes_on_at_the_templates(tmp_path):
    session = attached(chat_trainer(tmp_path, ends=False))
    session.add(rows_of(QUESTION, [*said("1", "2"), "3", "4"], REWARDS))
    assert stored(session) == ["1<eos>", "2<eos>", "3<eos>", "4<eos>"]


# the beginning of a prompt


def test_157_a_prompt_gets_one_token_in_front(tmp_path):
    trainer = chat_trainer(tmp_path)
    session = attached(trainer)
    session.add(rows_of(QUESTION, list("1234"), REWARDS))
    trainer.train()
    batch = trainer.scored[0]
    of_trainer = batch["prompt_ids"][0][batch["prompt_mask"][0].bool()].tolist()
    assert session.buffer.load(0).tensors["prompt_ids"].tolist() == of_trainer
    assert of_trainer.count(3) == 1


def test_157_a_plain_prompt_gets_its_token_as_before(tmp_path):
    session = attached(chat_trainer(tmp_path, prompt="1="))
    session.add(rows_of("1=", list("1234"), REWARDS))
    assert stored(session, key="prompt_ids") == ["<bos>1="]


def test_157_what_a_prompt_ends_with_is_not_said_again(tmp_path):
    """Templates of reasoning models begin the reasoning, and a teacher's text does, too."""
    session = attached(chat_trainer(tmp_path, prompt="1=<think>"))
    session.add(rows_of("1=<think>", ["<think>12", "3", "4", "5"], REWARDS))
    assert [text[:2] for text in stored(session)] == ["12", "3<", "4<", "5<"]


# completions that were cut off


@pytest.mark.parametrize("with_ids", [False, True])
def test_156_cut_off_rows_of_files_are_masked_as_the_trainer_masks_its_own(tmp_path, with_ids):
    tokenizer = make_tokenizer()
    made = rows_of("1=", ["1", "222222", "333333", "444444"], REWARDS)
    if with_ids:
        made[0] |= {"completion_ids": [*tokenizer("1")["input_ids"], tokenizer.eos_token_id]}
        made[1:] = [{**row, "completion_ids": tokenizer(row["completion"])["input_ids"]} for row in made[1:]]
        made = [{**row, "prompt_ids": tokenizer("1=")["input_ids"]} for row in made]
    trainer = make_trainer(tmp_path, Rewards([DEAD] * 3), max_steps=2, mask_truncated_completions=True)
    session = attached(trainer, replay_start=0)
    assert session.add(made) == 1
    advantages = session.buffer.table.row_advantage[0]
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-3), "cut-off rows count in the mean"
    steps = record(session)
    trainer.train()
    replaced = steps[1][1]["advantages"] != 0
    assert loss_mask(steps[1][1])[replaced].sum(dim=1).tolist() == [2, 0, 0, 0]


def test_156_a_group_of_cut_off_rows_alone_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([DEAD]), mask_truncated_completions=True)
    session = attached(trainer)
    with pytest.warns(UserWarning, match="it has no trainable token"):
        assert session.add(rows_of("1=", ["123456", "222222", "333333", "444444"], REWARDS)) == 0
    assert list(session.totals.reasons) == ["a group was refused: it has no trainable token"]


# groups that are cut or filled up


@pytest.mark.parametrize(("size", "short"), [(4, "refuse"), (2, "refuse"), (6, "resample")])
def test_160_groups_that_are_cut_or_filled_up_get_advantages_anew(tmp_path, size, short):
    made = [
        {**row, "advantage": 30.0 if row["reward"] else -10.0, "group": number}
        for number, right in enumerate("14")
        for row in rows_of("1=", list("1234"), [float(text == right) for text in "1234"])
    ]
    session = attached(make_trainer(tmp_path, Rewards([[0.0] * size] * 3), num_generations=size))
    assert session.add(made, incomplete=short) == 2
    for serial in session.buffer:
        entry = session.entry(serial)
        rewards = torch.tensor(entry.rewards["scripted"])
        by_rule = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        expected = by_rule if size != 4 else 40 * rewards - 10
        assert entry.advantages == pytest.approx(expected.tolist(), abs=1e-5)


# several turns


@since("1.7.1", "tools with the response templates of transformers 5.13 and later")
def test_155_turns_and_tools_of_a_file_are_what_the_trainer_made_of_them_by_their_ids(tmp_path):
    kept = []

    def reward(completions, **_):
        kept[:] = completions
        return LIVE

    trainer = tool_trainer(tmp_path, reward)
    trainer.train()
    (batch,) = trainer.scored
    assert [message["role"] for message in kept[0]] == ["assistant", "tool", "assistant"]
    made = rows_of(QUESTION, kept, LIVE)
    lengths = batch["completion_mask"].sum(dim=1).tolist()
    ids = [row[:length].tolist() for row, length in zip(batch["completion_ids"], lengths, strict=True)]
    mask = [row[:length].tolist() for row, length in zip(batch["tool_mask"], lengths, strict=True)]
    beside = zip(made, ids, mask, strict=True)  # a mask of the model's tokens, as other libraries name it
    made = [row | {"prompt_ids": [3], "completion_ids": one, "completion_mask": its} for row, one, its in beside]
    session = attached(trainer)
    assert session.add(made) == 1
    group = session.buffer.load(0)
    assert group.tensors["completion_ids"].tolist() == [*itertools.chain(*ids)]
    assert group.tensors["tool_mask"].tolist() == [*itertools.chain(*mask)]
    assert 0 in mask[0]
    assert "completion_mask" not in group.tensors, "all of it is seen"


@since("1.7.1", "tools with the response templates of transformers 5.13 and later")
@pytest.mark.parametrize("form", ["mappings", "from_list"])
def test_arguments_that_a_dataset_fills_in_reach_no_template(tmp_path, form):
    """`from_list` of datasets 5.2 gives every call all arguments of all calls, None where it had none."""
    from datasets import Dataset

    arguments = [{"key": "a"}, {"other": {"x": 1}}, {"key": "c", "other": {"y": [2]}}]
    asked = [*QUESTION, *itertools.chain(*map(calling, arguments)), *QUESTION]
    made = rows_of(asked, said(*"1234"), REWARDS)
    trainer = tool_trainer(tmp_path)
    session = attached(trainer)
    assert session.add(made if form == "mappings" else Dataset.from_list(made)) == 1
    (prompt,) = stored(session, key="prompt_ids")
    assert all(as_qwen(given) in prompt for given in arguments)


def calling(arguments):
    """A completion that calls a tool and says nothing beside."""
    call = {"type": "function", "function": {"name": "lookup", "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]


def as_qwen(arguments):
    return f'<tool_call>\n{{"name": "lookup", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (
            [{"role": "user", "content": "1"}],
            "of several turns, calls of tools, and reasoning, give completion_ids, and tool_mask",
        ),
        ([*said("1")[0], {"role": "tool", "content": "2"}, *said("2")[0]], "of several turns"),
        ("1<end>\n<turn>user 2", "goes on after the end of a turn"),
        ([{"role": "assistant", "content": "1", "reasoning_content": "hm"}], "calls of tools, and reasoning, give"),
        (calling({"key": "a"}), "calls of tools, and reasoning, give completion_ids, and tool_mask"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], "more than text"),
        ([{"role": "assistant", "content": None, "tool_calls": ["{"]}], "parse arguments that are text"),
        ([{"role": "assistant", "content": None}], "says nothing"),
    ],
)
def test_155_a_row_that_the_trainer_could_not_have_made_is_refused_and_counted(tmp_path, completion, reason):
    session = attached(chat_trainer(tmp_path))
    assert session.add(rows_of(QUESTION, [completion, *said(*"2345")], [0.0, *REWARDS])) == 1
    (counted,) = [told for told in session.totals.reasons if told.startswith("a row was refused")]
    assert reason in counted


def test_155_rollouts_that_failed_are_no_wrong_answers(tmp_path):
    """As verifiers writes them: with a reward of 0."""
    session = attached(chat_trainer(tmp_path))
    failed = rows_of(QUESTION, [[], None], [0.0] * 2)
    assert session.add([*failed, *rows_of(QUESTION, said(*"2345"), REWARDS)]) == 1
    assert stored(session)[0].startswith("2")
    reasons = {reason: count for reason, count in session.totals.reasons.items() if reason.startswith("a row")}
    assert reasons == {"a row was refused: it has no completion": 2}


def test_156_a_row_that_its_file_calls_cut_off_gets_no_end(tmp_path):
    session = attached(chat_trainer(tmp_path, mask_truncated_completions=True))
    made = rows_of(QUESTION, said(*"1234"), REWARDS)
    made[3]["is_truncated"] = True
    assert session.add(made) == 1
    assert stored(session) == ["1<end>", "2<end>", "3<end>", "4"]
    assert session.buffer.load(0).tensors["completion_mask"].tolist() == [1, 1, 1, 1, 1, 1, 0], "it is masked"


def test_155_ids_of_several_turns_without_a_mask_are_refused(tmp_path):
    session = attached(make_trainer(tmp_path, Rewards([DEAD])))
    turns = [*said("1")[0], {"role": "tool", "content": "2"}, *said("3")[0]]
    with pytest.warns(UserWarning, match="it has several turns"):
        assert session.add(rows(prompt_ids=[4], completion_ids=[6, 7], completion=turns)) == 0
    assert session.totals.reasons["a row was refused: it has several turns, and no tool_mask tells which of its "
                                  "completion_ids the model said"] == 4  # fmt: skip
