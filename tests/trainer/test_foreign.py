"""Files made elsewhere, as careless as they come: refused in words, or right; never trained on wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pictures
import pytest
import torch
from replaying import build as build_checked
from resuming import build, digits, train
from support import DEAD, HALF, LIVE, Rewards, record

import trl_replay
from trl_replay import ReplayError
from trl_replay.testing import make_trainer

IDS: dict[str, Any] = {"prompt_ids": [4, 5], "completion_ids": [6, 7], "old_per_token_logps": [-1.0, -2.0]}


def rows(**columns: Any) -> list[dict[str, Any]]:
    """Four completions of one prompt, the first one right; `columns` are the same in every row."""
    return [{"prompt": "1=", "completion": c, "reward": float(c == "2"), **columns} for c in "2345"]


def changed(**columns: Any) -> list[dict[str, Any]]:
    """The same, with columns changed in the third row."""
    made = rows(**IDS)
    made[2] |= columns
    return made


@pytest.fixture
def attached(tmp_path: Path) -> Any:
    trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), max_steps=3)
    session = trl_replay.attach(trainer)
    session.its_trainer = trainer
    return session


def reasons(session: Any) -> list[str]:
    return list(session.totals.reasons)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_what_is_right_is_taken(attached: Any, kind: Any) -> None:
    assert attached.buffer.add(rows(**{name: kind(values) for name, values in IDS.items()})) == 1
    stored = attached.buffer.load(0).tensors
    assert stored["completion_ids"].tolist() == [6, 7] * 4
    assert stored["old_per_token_logps"].tolist() == [-1.0, -2.0] * 4
    attached.trainer.train()
    assert attached.totals.counters["replaced"] == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_log_probs_that_are_no_numbers_never_reach_the_loss(attached: Any, value: float) -> None:
    assert attached.buffer.add(changed(old_per_token_logps=[-1.0, value])) == 0
    assert reasons(attached) == ["a group was refused: a trainable token's log-prob is not finite"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_advantages_that_are_no_numbers_never_reach_the_loss(attached: Any, value: float) -> None:
    made = [{**row, "advantage": row["reward"] - 0.25} for row in rows()]
    made[0]["advantage"] = value
    assert attached.buffer.add(made) == 0
    assert reasons(attached) == ["a group was refused: an advantage is not finite"]


def test_a_reward_that_is_no_number_is_none(attached: Any) -> None:
    with pytest.raises(ReplayError, match="Row 2 of the rows given lacks reward"):
        attached.buffer.add(changed(reward=float("nan")))
    assert attached.buffer.add(changed(reward=float("inf"))) == 0
    assert reasons(attached) == ["a group was refused: an advantage is not finite"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"reward": "good"}, r"Row 2 of the rows given has reward='good', which is no number"),
        ({"advantage": "high"}, r"Row 2 of the rows given has advantage='high', which is no number"),
        ({"reward": [1, 2]}, r"Row 2 of the rows given has reward=\[1, 2\], which is no number"),
        ({"completion_ids": [6, 44]}, r"Row 2 .*completion_ids=\[6, 44\], which are no token ids of this model"),
        ({"prompt_ids": [-1]}, r"Row 2 .*prompt_ids=\[-1\], which are no token ids of this model"),
        ({"completion_ids": "23"}, r"Row 2 .*completion_ids='23', which are no token ids of this model"),
        ({"old_per_token_logps": [-1.0, None]}, r"Row 2 .*old_per_token_logps=\[-1.0, None\], which are no numbers"),
        ({"old_per_token_logps": [-1.0]}, r"Row 2 of the rows given has 1 old_per_token_logps for 2 completion_ids"),
        ({"completion": 5, "prompt_ids": None}, r"Row 2 .*completion=5, which is neither text nor messages"),
        ({"prompt": 7, "prompt_ids": None, "group": 1}, r"Row 2 .*prompt=7, which is neither text nor messages"),
        ({"prompt": {"a": 1}, "prompt_ids": None}, r"Row 2 .*prompt=\{'a': 1\}, which is neither text nor messages"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_row(attached: Any, columns: Any, words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        attached.buffer.add(changed(**columns))
    assert len(attached.buffer) == 0


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"completion_ids": [6, 44]},
            r"Row 2 of .*rows.parquet has completion_ids=array\(\[ ?6, 44\]\), which are no",
        ),
        (
            {"old_per_token_logps": [-1.0, None]},
            r"Row 2 of .*old_per_token_logps=\[-1.0, None\], which are no numbers",
        ),
        ({"completion_ids": [], "old_per_token_logps": []}, "has no tokens"),
        ({"reward": None}, "Row 2 of .*rows.parquet lacks reward"),
    ],
)
def test_so_is_one_in_a_parquet_file(attached: Any, tmp_path: Path, columns: Any, words: str) -> None:
    pd.DataFrame(changed(**columns)).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ReplayError, match=words):
        attached.buffer.add(tmp_path / "rows.parquet")
    pd.DataFrame(changed()).to_parquet(tmp_path / "rows.parquet")
    assert attached.buffer.add(tmp_path / "rows.parquet") == 1


def test_a_row_that_is_no_mapping_is_named(attached: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1=", "completion": "2", "reward": 1}\n[1, 2]\n')
    with pytest.raises(ReplayError, match=r"Row 1 of .*rows.jsonl is \[1, 2\], not a mapping"):
        attached.buffer.add(path)


@pytest.mark.parametrize("character", ["\u2028", "\u0085", "\x1c", "é", "\r"])
def test_a_line_of_jsonl_ends_at_a_line_feed_and_nowhere_else(attached: Any, tmp_path: Path, character: str) -> None:
    lines = [json.dumps({**row, "note": f"a{character}b"}, ensure_ascii=False) for row in rows()]
    (tmp_path / "rows.jsonl").write_bytes("\r\n".join(lines).encode())
    assert attached.buffer.add(tmp_path / "rows.jsonl") == 1


def test_a_row_that_no_function_scored_does_not_count(tmp_path: Path) -> None:
    """As in TRL: the mean and the deviation are those of the other rows, and its advantage is 0."""
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer)
    made = [{**row, "reward/digits": row["reward"]} for row in rows(**IDS)]
    made[3]["reward/digits"] = None
    assert session.buffer.add([{**row, "reward": None} for row in made]) == 1
    scored = torch.tensor([1.0, 0, 0])
    expected = [*((scored - scored.mean()) / (scored.std() + 1e-4)).tolist(), 0.0]
    assert session.buffer.load(0).tensors["advantages"].tolist() == pytest.approx(expected)


# what a row's rewards are called


def test_a_reward_of_no_function_is_not_passed_off_as_one_of_the_trainers(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer)
    session.buffer.add(rows())
    session.buffer.add([{**row, "prompt": "2=", "reward/digits": 3 * row["reward"]} for row in rows()])
    session.buffer.add([{**row, "prompt": "3=", "reward": None, "reward/other": row["reward"]} for row in rows()])
    found = pd.read_parquet(session.export(tmp_path / "out.parquet"))
    assert found["reward"].tolist()[::4] == pytest.approx([1, float("nan"), 1], nan_ok=True)
    assert found["reward/digits"].tolist()[::4] == pytest.approx([float("nan"), 3, float("nan")], nan_ok=True)
    again = build(tmp_path)
    other = trl_replay.attach(again)
    assert other.buffer.add(tmp_path / "out.parquet") == 3
    for name in ("reward_mean", "reward_std", "score"):
        assert getattr(other.buffer.table, name).tolist() == pytest.approx(
            getattr(session.buffer.table, name).tolist()
        )
    second = pd.read_parquet(other.export(tmp_path / "again.parquet"))
    pd.testing.assert_frame_equal(found, second)


def halves(completions: list[str], **_: Any) -> list[float]:
    return [0.5] * len(completions)


def test_rewards_keep_their_names_when_a_run_is_resumed_with_other_functions(tmp_path: Path) -> None:
    """The functions are `halves` and `digits`, and then `digits` and another one."""

    def other(completions: list[str], **_: Any) -> list[float]:
        return [7.0] * len(completions)

    trainer = make_trainer(tmp_path, [halves, digits], max_steps=6, save_strategy="steps", save_steps=6)
    train(tmp_path, trainer=trainer, replay_buffer_size=50)
    trainer = make_trainer(tmp_path, [digits, other], max_steps=8, save_strategy="steps", save_steps=8)
    _, session = train(tmp_path, trainer=trainer, resume=str(tmp_path / "checkpoint-6"), replay_buffer_size=50)
    found = pd.read_parquet(session.export(tmp_path / "out.parquet"))
    assert found["reward/digits"].tolist() == digits(found["completion"].tolist())
    old = found["step"] < 6
    assert old.any()
    assert (~old).any()
    assert found["reward/other"][old].isna().all()
    assert (found["reward/other"][~old] == 7).all()


# what the loss needs beside log-probs


@pytest.mark.parametrize("adapter", [False, True], ids=["a reference model", "an adapter turned off"])
def test_groups_made_elsewhere_get_this_trainers_reference_log_probs(tmp_path: Path, adapter: bool) -> None:
    made = rows(**IDS, ref_per_token_logps=[-9.0, -9.0])
    settings: dict[str, Any] = {"beta": 0.1, "max_steps": 3}
    trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), **settings)
    if adapter:
        trainer = with_adapter(tmp_path, trainer)
    session = trl_replay.attach(trainer)
    assert session.buffer.add(made) == 1
    stored = session.buffer.load(0).tensors["ref_per_token_logps"]
    sequence = torch.tensor([[4, 5, 6, 7]])
    reference = trainer.model.get_base_model() if adapter else trainer.ref_model
    with torch.no_grad():
        expected = reference(sequence).logits.log_softmax(-1)[0, [1, 2], [6, 7]]
    torch.testing.assert_close(stored, expected.repeat(4), rtol=1e-4, atol=1e-5)
    steps = record(session)
    trainer.train()
    assert len(steps) == 3
    assert session.totals.counters["replaced"] == 2, session.explain()


def with_adapter(folder: Path, trainer: Any) -> Any:
    from peft import LoraConfig
    from trl import GRPOTrainer

    return GRPOTrainer(
        model=str(folder / "initial_model"), reward_funcs=Rewards([DEAD, DEAD, DEAD]), args=trainer.args,
        train_dataset=trainer.train_dataset, processing_class=trainer.processing_class,
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip


def sampled(prompts: list[str], trainer: Any) -> dict[str, Any]:
    ids = [[6, 7, 8]] * len(prompts)
    return {"prompt_ids": [[4, 5]] * len(prompts), "completion_ids": ids, "logprobs": [[-1.0] * 3] * len(prompts)}


def test_groups_made_elsewhere_fit_a_trainer_that_keeps_the_samplers_log_probs(tmp_path: Path) -> None:
    """The sampler is taken to agree with the policy, as where vLLM gave no log-prob."""
    trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), max_steps=3)
    trainer.rollout_func = sampled
    session = trl_replay.attach(trainer)
    session.buffer.add(rows(**IDS))
    steps = record(session)
    trainer.train()
    assert "sampling_per_token_logps" in steps[0][0]
    assert session.totals.counters["replaced"] == 2, session.explain()
    group = session.buffer.load(0)
    assert group.tensors["sampling_per_token_logps"].tolist() == group.tensors["old_per_token_logps"].tolist()


# images


def test_groups_with_images_are_exported_as_such_and_refused_on_the_way_back(tmp_path: Path) -> None:
    model, processor = pictures.llava()
    trainer = build_checked(
        tmp_path, Rewards([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD]), tokenizer=processor, model=model, max_steps=3,
        arguments={"train_dataset": pictures.dataset((1, 0, 2))},
    )  # fmt: skip
    session = trl_replay.attach(trainer)
    trainer.train()
    found = pd.read_parquet(session.export(tmp_path / "out.parquet"))
    assert set(found["images"]) == {0, 1, 2}
    before = len(session.buffer)
    live = found.groupby("group")["images"].max()
    added = session.buffer.add(tmp_path / "out.parquet")
    assert added == int((live == 0).sum()) > 0
    assert len(session.buffer) == before + added
    refused = "a group was refused: it has images, and its file does not hold them"
    assert session.totals.reasons[refused] == int((live > 0).sum()) > 0


# odd files


def test_an_empty_buffer_is_exported_as_an_empty_table(attached: Any, tmp_path: Path) -> None:
    path = attached.export(tmp_path / "out.parquet")
    found = pd.read_parquet(path)
    assert len(found) == 0
    assert "completion_ids" in found.columns
    assert attached.buffer.add(path) == 0


def test_an_export_that_fails_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: Any) -> None:
    _, session = train(tmp_path)
    path = session.export(tmp_path / "out.parquet")
    before = path.read_bytes()

    def load(serial: int) -> Any:
        raise OSError("no room")

    monkeypatch.setattr(session.buffer, "load", load)
    with pytest.raises(OSError, match="no room"):
        session.export(path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.glob("out*")] == ["out.parquet"]
