"""Defects that an attack found in files and rows made elsewhere, by number; each through a real GRPOTrainer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support import DEAD, Rewards, masked_rollout
from teacher import rows

import trl_replay
from trl_replay import ConfigurationError, ReplayError
from trl_replay.testing import make_model, make_tokenizer, make_trainer

IDS: dict[str, Any] = {"prompt_ids": [4, 5], "completion_ids": [6, 7, 8], "old_per_token_logps": [-1.0, -2.0, -3.0]}


def changed(**columns: Any) -> list[dict[str, Any]]:
    """The same with token ids and log-probs, and with columns changed in the third row."""
    made = rows(**IDS)
    made[2] |= columns
    return made


def written(folder: Path, made: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in made))
    return str(path)


def build(folder: Path, **settings: Any) -> Any:
    return make_trainer(folder, Rewards([DEAD, DEAD, DEAD]), **{"max_steps": 3, **settings})


LOGP_WORDS = "which is no log-prob: these lie between -1000 and 0"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"old_per_token_logps": [-1.0, -9999.0, -1.0]}, rf"old_per_token_logps\[1\]=-9999\.0, {LOGP_WORDS}"),
        ({"old_per_token_logps": [5.0, -1.0, -1.0]}, rf"old_per_token_logps\[0\]=5\.0, {LOGP_WORDS}"),
        ({"old_per_token_logps": [-1.0, -1.0, 0.01]}, rf"old_per_token_logps\[2\]=0\.01, {LOGP_WORDS}"),
        ({"ref_per_token_logps": [-1.0, -1.0, -9999.0]}, rf"ref_per_token_logps\[2\]=-9999\.0, {LOGP_WORDS}"),
        ({"sampling_per_token_logps": [3.0, -1.0, -1.0]}, rf"sampling_per_token_logps\[0\]=3\.0, {LOGP_WORDS}"),
        ({"tool_mask": [1, 2, 1]}, r"tool_mask\[1\]=2\.0, which is neither 0 nor 1"),
        ({"completion_mask": [1, 0.5, 1]}, r"completion_mask\[1\]=0\.5, which is neither 0 nor 1"),
        ({"completion_mask": [1, 1, float("nan")]}, r"completion_mask\[2\]=nan, which is neither 0 nor 1"),
        ({"importance_sampling_ratio": [1, -1, 1]}, r"importance_sampling_ratio\[1\]=-1\.0, which is no ratio"),
        ({"importance_sampling_ratio": [1, 1, 1e30]}, r"importance_sampling_ratio\[2\]=1e\+30, which is no ratio"),
        ({"importance_sampling_ratio": [float("inf"), 1, 1]}, r"importance_sampling_ratio\[0\]=inf, which"),
        ({"importance_sampling_ratio": [float("nan"), 1, 1]}, r"importance_sampling_ratio\[0\]=nan, which"),
    ],
    ids=str,
)
def test_38_a_token_level_value_that_cannot_be_is_named_with_its_row(tmp_path: Path, columns: Any, words: str) -> None:
    path = written(tmp_path, changed(**columns))
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer, replay_warm_start=path)
    with pytest.raises(ReplayError, match=f"Row 2 of .*rows.jsonl has {words}"):
        trainer.train()
    assert len(session.buffer) == 0
    assert trainer.state.global_step == 0


def test_38_so_is_one_in_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pd.DataFrame(changed(old_per_token_logps=[-1.0, -9999.0, -1.0])).to_parquet(path)
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer)
    with pytest.raises(ReplayError, match=r"Row 2 of .*rows.parquet has old_per_token_logps\[1\]=-9999\.0"):
        session.buffer.add(path)
    assert len(session.buffer) == 0


def test_38_values_at_the_stated_limits_are_taken_and_train(tmp_path: Path) -> None:
    made = changed(
        old_per_token_logps=[-1000.0, 1e-6, -0.0],
        importance_sampling_ratio=[0.0, 1000.0, 1.0],
        tool_mask=[True, True, True],
    )
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer)
    assert session.buffer.add(made) == 1
    trainer.train()
    assert session.totals.counters["replaced"] == 2
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


@pytest.mark.parametrize("value", [-9999.0, 5.0, float("nan")])
def test_38_log_probs_of_tokens_that_are_not_trained_on_may_be_fillers(tmp_path: Path, value: float) -> None:
    """The second token comes from a tool: files hold anything in its place."""
    trainer = build(tmp_path)
    trainer.rollout_func = masked_rollout
    session = trl_replay.attach(trainer)
    logps = [-1.0, value, -1.0]
    assert session.buffer.add(rows(**IDS | {"old_per_token_logps": logps, "tool_mask": [1, 0, 1]})) == 1
    trainer.train()
    assert session.totals.counters["replaced"] == 2
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def test_38_infinite_sampling_log_probs_are_refused_with_their_group(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.rollout_func = masked_rollout
    session = trl_replay.attach(trainer)
    made = rows(**IDS, sampling_per_token_logps=[-1.0, -1.0, -1.0])
    made[1]["sampling_per_token_logps"] = [-1.0, float("-inf"), -1.0]
    assert session.buffer.add(made) == 0
    assert list(session.totals.reasons) == ["a group was refused: a trainable token's log-prob is not finite"]


def test_47_completions_longer_than_the_trainers_are_refused_with_the_numbers(tmp_path: Path) -> None:
    """One of 4000 tokens would have padded every row of its batch to 4000."""
    long = rows()
    long[1]["completion"] = "1" * 4000
    path = written(tmp_path, [*long, *({**row, "prompt": "2="} for row in rows())])
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer, replay_warm_start=path)
    with pytest.warns(UserWarning, match=r"1 of the 2 groups of .*rows.jsonl were refused.*4000 tokens") as caught:
        trainer.train()
    assert sum("groups of" in str(warning.message) for warning in caught) == 1
    reason = "a group was refused: a completion is longer than max_completion_length=6: the longest has 4000 tokens"
    assert session.totals.reasons[reason] == 1
    assert f"1 x {reason}" in session.explain()
    assert session.totals.counters["replaced"] == 2, "the other group is replayed"


def test_47_rows_longer_than_the_models_positions_are_refused_with_the_numbers(tmp_path: Path) -> None:
    model = make_model(make_tokenizer(), max_position_embeddings=16)
    trainer = build(tmp_path, model=model)
    session = trl_replay.attach(trainer)
    fits = rows(prompt_ids=[4] * 13, completion_ids=[6, 7, 8])
    with pytest.warns(UserWarning, match="1 of the 2 groups of the rows given were refused.*16 positions.*17 tokens"):
        assert session.buffer.add([*fits, *rows(prompt="2=", prompt_ids=[4] * 14, completion_ids=[6, 7, 8])]) == 1
    reason = "a prompt with its completion is longer than the model's 16 positions: the longest has 17 tokens"
    assert session.totals.reasons[f"a group was refused: {reason}"] == 1


def test_47_a_completion_that_just_fits_is_taken_without_a_warning(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer)
    assert session.buffer.add(rows(completion_ids=[6] * 6, prompt_ids=[4])) == 1


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_51_a_reward_of_nan_is_named_as_that(tmp_path: Path, kind: Any) -> None:
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer)
    with pytest.raises(ReplayError, match=r"Row 2 of the rows given has reward=.*nan.*, which is no number"):
        session.buffer.add(changed(reward=kind("nan")))


def test_51_a_reward_of_nan_beside_rewards_of_functions_is_none(tmp_path: Path) -> None:
    """As pandas gives what was null in a file."""
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer)
    made = [{**row, "reward": float("nan"), "reward/other": row["reward"]} for row in rows()]
    assert session.buffer.add(made) == 1


def test_51_reward_functions_of_one_name_have_a_column_each_and_are_read_back(tmp_path: Path) -> None:
    def scored(value: float) -> Any:
        def score(completions: list[str], **_: Any) -> list[float]:
            return [value * (row % 2) for row in range(len(completions))]

        return score

    functions = [scored(1.0), scored(10.0)]
    trainer = make_trainer(tmp_path, functions, max_steps=3, reward_weights=[1.0, 0.25])
    session = trl_replay.attach(trainer)
    trainer.train()
    path = session.export(tmp_path / "out.parquet")
    found = pd.read_parquet(path)
    assert [name for name in found if name.startswith("reward/")] == ["reward/score", "reward/score#2"]
    assert set(found["reward/score"]) == {0.0, 1.0}
    assert set(found["reward/score#2"]) == {0.0, 10.0}
    again = make_trainer(tmp_path / "again", functions, max_steps=1, reward_weights=[1.0, 0.25])
    other = trl_replay.attach(again)
    assert other.buffer.add(path) == len(session.buffer) > 0
    assert other.buffer.table.reward_mean.tolist() == session.buffer.table.reward_mean.tolist()
    pd.testing.assert_frame_equal(pd.read_parquet(other.export(tmp_path / "b.parquet"))[list(found)[4:7]],
                                  found[list(found)[4:7]])  # fmt: skip


@pytest.mark.parametrize("value", [5, "", b"rows.jsonl", ["rows.jsonl"]])
def test_51_a_warm_start_that_is_no_path_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"replay_warm_start=.* can't be used: leave it out or give the path"):
        trl_replay.attach(build(tmp_path), replay_warm_start=value)


def test_51_a_warm_start_from_a_file_that_does_not_exist_is_refused_at_attach(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    words = r"replay_warm_start='.*missing.jsonl' can't be used: .*a file that exists"
    with pytest.raises(ConfigurationError, match=words):
        trl_replay.attach(trainer, replay_warm_start=str(tmp_path / "missing.jsonl"))
    session = trl_replay.attach(trainer, replay_warm_start=Path(written(tmp_path, rows())))
    trainer.train()
    assert len(session.buffer) == 1


@pytest.mark.parametrize("columns", [{"advantage": 1e30}, {"advantage": -2e9}, {"reward": 1e39}])
def test_38_rewards_and_advantages_that_no_gradient_bears_are_refused(
    tmp_path: Path, columns: dict[str, float]
) -> None:
    trainer = build(tmp_path)
    ((name, value),) = columns.items()
    session = trl_replay.attach(trainer)
    with pytest.raises(
        ReplayError, match=rf"Row 2 of the rows given has {name}={re.escape(repr(value))}, which is larger than 1e\+09"
    ):
        session.buffer.add(changed(**columns))
    assert len(session.buffer) == 0
