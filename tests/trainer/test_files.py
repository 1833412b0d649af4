"""In and out: export to Parquet, warm start from files of any origin, and the round trip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import load_dataset
from resuming import build, digits, group_hash, train
from support import DEAD, HALF, LIVE, Rewards, record
from test_known_bugs import masked_rollout

import trl_replay
from trl_replay import ConfigurationError, ReplayConfig, ReplayError
from trl_replay.cli.commands import main
from trl_replay.testing import make_model, make_tokenizer, make_trainer


def loaded(path: Path, cache: Path) -> list[dict[str, Any]]:
    rows = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(cache))
    return [dict(row) for row in rows]


def second(completions: list[str], **_: Any) -> list[float | None]:
    return [None if len(text) > 4 else 0.5 for text in completions]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: Any) -> tuple[Any, Any, list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("exported")
    trainer = make_trainer(folder, [digits, second], max_steps=6, save_strategy="steps", save_steps=6)
    trainer, session = train(folder, trainer=trainer)
    path = session.export(folder / "out.parquet")
    return trainer, session, loaded(path, folder / "cache"), path


def test_an_export_has_one_row_a_completion_with_everything_that_a_reader_asks_for(exported: Any) -> None:
    trainer, session, rows, _ = exported
    table, tokenizer = session.buffer.table, trainer.processing_class
    assert len(rows) == 4 * len(session.buffer)
    for number, serial in enumerate(table.serial.tolist()):
        group = session.buffer.load(serial)
        told = rows[4 * number : 4 * number + 4]
        assert [row["group"] for row in told] == [number] * 4
        assert [row["completion_ids"] for row in told] == [
            part.tolist() for part in torch.split(group.tensors["completion_ids"], group.completion_lengths.tolist())
        ]
        assert [row["prompt_ids"] for row in told] == [group.tensors["prompt_ids"].tolist()] * 4
        for row, advantage in zip(told, group.tensors["advantages"].tolist(), strict=True):
            assert row["prompt"] == tokenizer.decode(row["prompt_ids"])
            assert row["completion"] == tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
            assert row["reward/digits"] == digits([row["completion"]])[0]
            assert row["reward/second"] == second([row["completion"]])[0]
            assert row["advantage"] == pytest.approx(advantage)
            assert (row["step"], row["uses"]) == (table.step[number], table.uses[number])
            assert row["score"] == table.score[number]
            assert len(row["old_per_token_logps"]) == len(row["completion_ids"])


def test_the_command_exports_a_checkpoint_without_the_trainer(exported: Any, tmp_path: Path, capsys: Any) -> None:
    trainer, _, _, _ = exported
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-6"
    out = tmp_path / "deep" / "out.parquet"
    assert main(["export", str(checkpoint), str(out)]) == 0
    rows = loaded(out, tmp_path)
    assert f"{len(rows)} completions" in capsys.readouterr().out
    assert len(rows) >= 4
    assert {row["completion"] for row in rows} <= {"".join(row["completion"]) for row in rows}
    assert set(rows[0]) >= {"prompt", "completion", "reward/digits", "reward/second", "advantage", "step", "score"}


def test_the_command_says_what_is_wrong(tmp_path: Path, exported: Any, capsys: Any) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out.parquet")]) == 1
    assert "holds no replay buffer" in capsys.readouterr().err
    checkpoint = Path(exported[0].args.output_dir) / "checkpoint-6"
    assert main(["export", str(checkpoint), str(tmp_path / "out.csv")]) == 1
    assert "ends in .parquet" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["export", str(checkpoint), str(tmp_path / "file" / "out.parquet")]) == 1
    assert "trl-replay: [Errno" in capsys.readouterr().err


# the round trip


def test_what_was_exported_warm_starts_another_run_bit_for_bit(exported: Any, tmp_path: Path) -> None:
    _, session, _, path = exported
    trainer = make_trainer(tmp_path, [digits, second], max_steps=1)
    other = trl_replay.attach(trainer, replay_warm_start=str(path))
    assert other.buffer.add(path) == len(session.buffer)
    one, two = session.buffer, other.buffer
    assert [group_hash(one.load(s)) for s in one.held()] == [
        group_hash(_without_tool_mask(two.load(s))) for s in two.held()
    ]
    for name in ("score", "reward_mean", "reward_std", "tokens", "prompt"):
        np.testing.assert_allclose(getattr(two.table, name), getattr(one.table, name), rtol=1e-6, err_msg=name)
    assert two.table.origin.tolist() == [1] * len(two)


def _without_tool_mask(group: Any) -> Any:
    return trl_replay.Group(group.tensors, group.keys - {"tool_mask"}, group.prompt_lengths, group.completion_lengths)


def tool_trainer(folder: Path, rewards: Any) -> Any:
    trainer = make_trainer(folder, rewards, max_steps=2)
    trainer.rollout_func = masked_rollout
    return trainer


def test_masks_and_sampling_log_probs_make_the_round_trip_too(tmp_path: Path) -> None:
    trainer = tool_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]))
    session = trl_replay.attach(trainer)
    trainer.train()
    path = session.export(tmp_path / "out.parquet")
    again = tool_trainer(tmp_path / "again", Rewards([LIVE, HALF, DEAD]))
    other = trl_replay.attach(again)
    assert other.buffer.add(path) == len(session.buffer) > 0
    one, two = session.buffer, other.buffer
    assert [group_hash(one.load(s)) for s in one.held()] == [group_hash(two.load(s)) for s in two.held()]
    assert "tool_mask" in one.load(one.held()[0]).tensors


def test_a_warm_started_run_replays_from_its_second_batch_on(exported: Any, tmp_path: Path) -> None:
    *_, path = exported
    trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), max_steps=3)
    with trl_replay.attached(trainer, replay_warm_start=str(path)) as session:
        steps = record(session)
        trainer.train()
        assert len(steps) == 3
        assert session.totals.counters["replaced"] == 6, "the loss had to be seen once"
        trainer.train()
        assert session.totals.counters["stored"] == len(session.buffer), "it was read once"


def test_a_resumed_run_does_not_read_the_file_again(exported: Any, tmp_path: Path) -> None:
    *_, path = exported
    settings = {"replay_warm_start": str(path), "replay_buffer_size": 50}
    trainer = make_trainer(tmp_path, [digits, second], max_steps=2, save_strategy="steps", save_steps=1)
    _, session = train(tmp_path, trainer=trainer, **settings)
    again = make_trainer(tmp_path, [digits, second], max_steps=2)
    _, resumed = train(tmp_path, trainer=again, resume=str(tmp_path / "checkpoint-1"), **settings)
    assert resumed.buffer.table.serial.tolist() == session.buffer.table.serial.tolist()


# rows of any origin


def rows_of(prompt: Any, completions: list[Any], rewards: list[float]) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": c, "reward": r} for c, r in zip(completions, rewards, strict=True)]


TEACHER = rows_of("1+1=", ["2", "3", "4", "5"], [1, 0, 0, 0]) + rows_of("2+2=", ["4", "4", "5", "6"], [1, 1, 0, 0])


@pytest.fixture
def attached(tmp_path: Path) -> Any:
    trainer = make_trainer(tmp_path, digits, max_steps=2, max_completion_length=3)
    session = trl_replay.attach(trainer)
    session.its_trainer = trainer
    return session


def test_prompts_completions_and_rewards_made_elsewhere_are_tokenised_and_get_the_policys_log_probs(
    attached: Any, tmp_path: Path
) -> None:
    path = tmp_path / "teacher.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in TEACHER) + "\n")
    assert attached.buffer.add(str(path)) == 2
    trainer = attached.trainer
    tokenizer = trainer.processing_class
    assert attached.buffer.table.origin.tolist() == [2, 2]
    group = attached.buffer.load(0)
    ids = torch.split(group.tensors["completion_ids"], group.completion_lengths.tolist())
    assert [part.tolist() for part in ids] == [
        [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in "2345"
    ]
    assert group.tensors["prompt_ids"].tolist() == tokenizer("1+1=")["input_ids"]
    sequences = torch.stack([torch.cat([group.tensors["prompt_ids"], part]) for part in ids]).long()
    with torch.no_grad():
        logps = trainer.model(sequences).logits.log_softmax(-1)
    wanted = logps[:, -3:-1].gather(2, sequences[:, -2:, None]).flatten()
    torch.testing.assert_close(group.tensors["old_per_token_logps"], wanted, rtol=1e-4, atol=1e-5)
    rewards = torch.tensor([1.0, 0, 0, 0])
    torch.testing.assert_close(group.tensors["advantages"], (rewards - rewards.mean()) / (rewards.std() + 1e-4))
    steps = record(attached)
    trainer.train()
    assert len(steps) == 2


def test_a_completion_that_fills_the_length_gets_no_end_token(attached: Any) -> None:
    attached.buffer.add(rows_of("1=", ["123", "12", "1", "0"], [1, 0, 0, 0]))
    assert attached.buffer.load(0).completion_lengths.tolist() == [3, 3, 2, 2]


def test_short_groups_are_refused_or_resampled_and_long_ones_give_several(attached: Any) -> None:
    short = rows_of("1=", ["1", "2", "3"], [1, 0, 0])
    assert attached.buffer.add(short) == 0
    assert "fewer rows in the rows given than num_generations=4" in str(attached.totals.reasons)
    assert attached.buffer.add(short, incomplete="resample") == 1
    assert len(attached.buffer.load(attached.buffer.held()[0]).completion_lengths) == 4
    long = rows_of("7=", list("12345678"), [1, 0, 0, 0, 0, 1, 1, 1])
    assert attached.buffer.add(long) == 2
    with pytest.raises(ConfigurationError, match="incomplete='drop' can't be used"):
        attached.buffer.add(short, incomplete="drop")


def test_groups_that_cannot_teach_are_refused_and_counted(attached: Any) -> None:
    assert attached.buffer.add(rows_of("1=", list("1234"), [1, 1, 1, 1])) == 0
    assert attached.totals.reasons["a group was refused: its rewards do not differ"] == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "1=", "reward": 1}], "Row 0 of the rows given lacks completion: it has prompt, reward"),
        ([*TEACHER, {"prompt": "1=", "completion": "2"}], "Row 8 of the rows given lacks reward"),
        (rows_of("", list("1234"), [1, 0, 0, 0]), "has no tokens"),
    ],
)
def test_rows_that_lack_something_are_named(attached: Any, rows: Any, words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        attached.buffer.add(rows)
    assert len(attached.buffer) == 0


@pytest.mark.parametrize("name", ["missing.parquet", "missing.jsonl", "rows.csv"])
def test_a_file_that_cannot_be_read_is_named(attached: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(ReplayError, match=f"{name} can't be read"):
        attached.buffer.add(tmp_path / name)


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    trainer = build(tmp_path, max_steps=1)
    trainer._tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    session = trl_replay.attach(trainer)
    prompt = [{"role": "user", "content": "1+1"}]
    session.buffer.add(rows_of(prompt, [[{"role": "assistant", "content": c}] for c in "2345"], [1, 0, 0, 0]))
    group = session.buffer.load(0)
    assert trainer.processing_class.decode(group.tensors["prompt_ids"]) == "1+1="


def test_with_another_tokenizer_the_texts_count_and_not_the_ids(exported: Any, tmp_path: Path) -> None:
    *_, path = exported
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["12"])
    trainer = make_trainer(tmp_path, [digits, second], model=make_model(tokenizer), max_steps=1)
    trainer._tokenizer.add_tokens(["12"])
    trainer.model.resize_token_embeddings(len(tokenizer))
    session = trl_replay.attach(trainer)
    assert session.buffer.add(path) > 0
    assert set(session.buffer.table.origin.tolist()) == {2}


def test_a_buffer_of_no_session_takes_nothing() -> None:
    from trl_replay.buffer.replay_buffer import Limits, ReplayBuffer
    from trl_replay.strategies.storages import CpuStorage

    with pytest.raises(ReplayError, match=r"of a session only"):
        ReplayBuffer(1, CpuStorage(), Limits()).add([])


def test_the_settings_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="replay_warm_start_short='drop' can't be used"):
        ReplayConfig(replay_warm_start_short="drop")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("warm_start.py", "3 of the teacher's groups are in the buffer, replayed "),
        ("export_buffer.py", "the highest advantage, "),
    ],
)
def test_the_examples_run(tmp_path: Path, name: str, words: str) -> None:
    root = Path(trl_replay.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(root / "examples" / name), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert words in done.stdout


def test_renamed_names_of_session_and_buffer_still_work_and_warn(attached: Any, tmp_path: Path) -> None:
    session = attached
    with pytest.warns(DeprecationWarning, match="session.parts is now session.components"):
        assert session.parts is session.components
    with pytest.warns(DeprecationWarning, match="session.progress is now session.carry"):
        assert session.progress is session.carry
    with pytest.warns(DeprecationWarning, match="add\\(short=…\\) is now add\\(incomplete=…\\)"):
        assert session.buffer.add([], short="resample") == 0
