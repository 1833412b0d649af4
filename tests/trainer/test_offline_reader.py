"""Files made elsewhere, as careless as they come: refused in words, or right; never trained on wrong."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from support import DEAD, Rewards, masked_rollout
from teacher import IDS, TEACHER, rows

import trl_replay
from trl_replay import ConfigurationError, ReplayError
from trl_replay.testing import make_model, make_tokenizer, make_trainer


def changed(**columns):
    """Four rows with token ids and log-probs; `columns` are changed in the third one."""
    made = rows(**IDS)
    made[2] |= columns
    return made


def written(path, made):
    if path.suffix == ".parquet":
        pd.DataFrame(made).to_parquet(path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in made))
    return path


def build(folder, **settings):
    return make_trainer(folder, Rewards([DEAD, DEAD, DEAD]), **{"max_steps": 3, **settings})


@pytest.fixture
def session(tmp_path):
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer)
    session.its_trainer = trainer
    return session


def check_training(session):
    """The one group that was added is replayed, and leaves no weight that is not finite."""
    session.trainer.train()
    assert session.totals.counters["replaced"] == 2
    assert all(bool(parameter.isfinite().all()) for parameter in session.trainer.model.parameters())


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_what_is_right_is_taken(session, kind):
    assert session.add(rows(**{name: kind(values) for name, values in IDS.items()})) == 1
    stored = session.buffer.load(0).tensors
    assert stored["completion_ids"].tolist() == [6, 7] * 4
    assert stored["old_per_token_logps"].tolist() == [-1.0, -2.0] * 4
    check_training(session)


def test_38_values_at_the_stated_limits_are_taken_and_train(session):
    made = changed(old_per_token_logps=[-1000.0, 1e-6], tool_mask=[True, True])
    made[3]["old_per_token_logps"] = [-0.0, 0.0]
    assert session.add(made) == 1
    check_training(session)


@pytest.mark.parametrize("value", [-9999.0, 5.0, float("nan")])
def test_38_log_probs_of_tokens_that_are_not_trained_on_may_be_fillers(session, value):
    """The second token comes from a tool: files hold anything in its place."""
    session.trainer.rollout_func = masked_rollout
    assert session.add(rows(**IDS | {"old_per_token_logps": [-1.0, value], "tool_mask": [1, 0]})) == 1
    stored = session.buffer.load(0).tensors
    assert (
        stored["sampling_per_token_logps"][::2].tolist() == stored["old_per_token_logps"][::2].tolist() == [-1.0] * 4
    )
    check_training(session)


# groups that are refused and counted

NOT_FINITE = "a trainable token has no finite log-prob: its file or the loss gave none"
REFUSED = [
    (changed(old_per_token_logps=[-1.0, math.nan]), NOT_FINITE),
    ([{**row, "reward": 1e-300 * row["reward"]} for row in rows()], "its rewards do not differ"),
    (rows(**IDS, tool_mask=[0, 0]), "it has no trainable token"),
]


@pytest.mark.parametrize(("made", "reason"), REFUSED)
def test_55_groups_from_files_that_teach_nothing_are_refused_and_counted(session, made, reason):
    with pytest.warns(UserWarning, match=f"No group of the rows given was added: .*{reason}"):
        assert session.add(made) == 0
    assert list(session.totals.reasons) == [f"a group was refused: {reason}"]


def test_47_rows_longer_than_the_trainers_completions_or_the_models_positions_are_refused(tmp_path):
    """One of 4000 tokens would have padded every row of its batch to 4000."""
    long, fits = rows(), rows(prompt="2=", prompt_ids=[4] * 13, completion_ids=[6, 7, 8])
    long[1]["completion"] = "1" * 4000
    trainer = build(tmp_path, model=make_model(make_tokenizer(), max_position_embeddings=16))
    session = trl_replay.attach(trainer)
    assert session.add([*long, *fits, *rows(prompt="3=", prompt_ids=[4] * 14, completion_ids=[6, 7, 8])]) == 1
    reasons = session.totals.reasons
    assert reasons["a row was refused: its completion is longer than max_completion_length=6"] == 1
    assert reasons["a row was refused: it is longer than the model's 16 positions"] == 4


# values that are named

REWARD = r"which takes a number from -1e\+09 to 1e\+09"
LOGP, MASK, NO_TEXT = "takes numbers from -1000 to 0.001", "which takes numbers from 0 to 1", "is neither text nor"
IDS_TO = "which takes numbers from 0 to 43"
WRONG = [
    ({"reward": "good"}, f"'good' in reward, {REWARD}"),
    ({"reward": 10**400}, f"10+… in reward, {REWARD}"),
    ({"reward": math.inf}, f"inf in reward, {REWARD}"),
    ({"advantage": "high"}, f"'high' in advantage, {REWARD}"),
    ({"completion_ids": [6, 44]}, f"44 in completion_ids, {IDS_TO}"),
    ({"completion_ids": [6, 1.5]}, "1.5 in completion_ids"),
    ({"completion_ids": [6, None]}, "nan in completion_ids"),
    ({"prompt_ids": [-1]}, f"-1 in prompt_ids, {IDS_TO}"),
    ({"completion_ids": "23"}, f"'23' in completion_ids, {IDS_TO}"),
    ({"old_per_token_logps": [-1.0]}, "1 old_per_token_logps for 2 completion_ids"),
    ({"completion": 5, "completion_ids": None}, f"completion=5, which {NO_TEXT}"),
    ({"prompt": {"a": 1}, "prompt_ids": None}, rf"prompt=\{{'a': 1\}}, which {NO_TEXT}"),
    ({"old_per_token_logps": [-1.0, -9999.0]}, f"-9999 in old_per_token_logps, which {LOGP}"),
    ({"old_per_token_logps": [-1.0, 0.01]}, f"0.01 in old_per_token_logps, which {LOGP}"),
    ({"sampling_per_token_logps": [3.0, -1.0]}, f"3 in sampling_per_token_logps, which {LOGP}"),
    ({"masked": "false"}, "masked='false', which is neither true nor false"),
    ({"advantages": [1.0, 0.5]}, "advantages of its tokens, .* drop the column 'advantages'"),
    ({"tool_mask": [1, 2]}, f"2 in tool_mask, {MASK}"),
    ({"completion_mask": [1, math.nan]}, f"nan in completion_mask, {MASK}"),
]


@pytest.mark.parametrize(("columns", "words"), WRONG)
def test_38_and_51_a_value_that_cannot_be_used_is_named_with_its_row(session, columns, words):
    with pytest.raises(ReplayError, match=f"Row 2 of the rows given has {words}"):
        session.add(changed(**columns))
    assert len(session.buffer) == 0


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "1=", "reward": 1}], "^Row 0 of the rows given lacks completion: it has prompt, reward"),
        ([TEACHER[0], [1, 2]], r"Row 1 of the rows given is \[1, 2\], not a mapping"),
    ],
)
def test_rows_that_lack_something_are_named(session, rows, words):
    with pytest.raises(ReplayError, match=words):
        session.add(rows)
    assert len(session.buffer) == 0


# files and other sources


@pytest.mark.parametrize("character", ["\u2028", "\u0085", "\x1c", "é", "\r"])
def test_a_line_of_jsonl_ends_at_a_line_feed_and_nowhere_else(session, tmp_path, character):
    lines = [json.dumps({**row, "note": f"a{character}b"}, ensure_ascii=False) for row in rows()]
    (tmp_path / "rows.jsonl").write_bytes("\r\n".join(lines).encode())
    assert session.add(tmp_path / "rows.jsonl") == 1


@pytest.mark.parametrize("value", [5, "", b"rows.jsonl", ["rows.jsonl"]])
def test_51_a_warm_start_that_is_no_path_is_refused_by_name(tmp_path, value):
    with pytest.raises(ConfigurationError, match=r"replay_warm_start=.* can't be used: leave it out or give the path"):
        trl_replay.attach(build(tmp_path), replay_warm_start=value)


def of_prompt(prompt, rewards, **columns):
    """Rows of a prompt, each of its own completion."""
    return [
        {"prompt": prompt, "completion": str(number), "reward": float(reward), **columns}
        for number, reward in enumerate(rewards)
    ]


def test_85_a_group_of_two_prompts_is_refused(session):
    made = of_prompt("1=", "11", group=7) + of_prompt("12=", "00", group=7)
    with pytest.warns(UserWarning, match="No group .* it has fewer rows than num_generations=4"):
        assert session.add(made) == 0


def test_85_a_group_whose_rows_name_a_task_may_have_several_prompts(session):
    made = of_prompt("1=", "10", group=7, trl_replay_task=3) + of_prompt("12=", "01", group=7, trl_replay_task=3)
    assert session.add(made) == 1
