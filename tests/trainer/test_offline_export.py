"""Export to Parquet: what a file holds, and the round trip."""

import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pictures
import pytest
import scenarios
import torch
from datasets import load_dataset
from resuming import build, digits, group_hash, train
from support import DEAD, HALF, LIVE, Rewards, masked_rollout, record

import trl_replay
from trl_replay import ReplayError
from trl_replay.extras.outcome.outcome import Outcome
from trl_replay.extras.outcome.page import write_page
from trl_replay.extras.outcome.run import Run
from trl_replay.testing import make_model, make_tokenizer, make_trainer


def loaded(path, cache):
    rows = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(cache))
    return [dict(row) for row in rows]


def second(completions, **_):
    return [None if len(text) > 4 else 0.5 for text in completions]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    trainer = make_trainer(folder, [digits, second], max_steps=6, save_strategy="steps", save_steps=6)
    trainer, session = train(folder, trainer=trainer)
    path = session.export(folder / "out.parquet")
    return trainer, session, loaded(path, folder / "cache"), path


@pytest.fixture
def checkpoint(exported):
    return Path(exported[0].args.output_dir) / "checkpoint-6"


def test_an_export_has_one_row_a_completion_with_everything_that_a_reader_asks_for(exported):
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
            assert (row["update"], row["uses"]) == (table.update[number], table.uses[number])
            assert row["score"] == table.score[number]
            assert len(row["old_per_token_logps"]) == len(row["completion_ids"])


def test_107_a_checkpoint_without_its_tokenizer_gives_no_texts(checkpoint, tmp_path, said):
    """transformers makes a tokenizer of the model's configuration alone, which decodes every id to nothing."""
    copied = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint-6"))
    for path in copied.glob("*token*"):
        path.unlink()
    assert "holds no tokenizer, or another one" in said("export", copied, tmp_path / "out.parquet", fails=True)
    assert not (tmp_path / "out.parquet").exists()


def test_the_command_exports_a_checkpoint_without_the_trainer(checkpoint, tmp_path, said):
    out = tmp_path / "deep" / "out.parquet"
    told, rows = said("export", checkpoint, out), loaded(out, tmp_path)
    assert f"{len(rows)} completions" in told
    assert len(rows) >= 4
    assert set(rows[0]) >= {"prompt", "completion", "reward/digits", "reward/second", "advantage", "update", "score"}


def test_the_command_says_what_the_system_refuses(tmp_path, checkpoint, said):
    (tmp_path / "file").touch()
    assert "trl-replay: [Errno" in said("export", checkpoint, tmp_path / "file" / "out.parquet", fails=True)


def test_what_was_exported_warm_starts_another_run_bit_for_bit(exported, tmp_path):
    _, session, _, path = exported
    trainer = make_trainer(tmp_path, [digits, second], max_steps=1)
    other = trl_replay.attach(trainer, replay_warm_start=str(path))
    assert other.add(path) == len(session.buffer)
    one, two = session.buffer, other.buffer
    assert [group_hash(one.load(s)) for s in one.held()] == [
        group_hash(_without_tool_mask(two.load(s))) for s in two.held()
    ]
    for name in ("score", "reward_mean", "reward_std", "tokens", "prompt"):
        np.testing.assert_allclose(getattr(two.table, name), getattr(one.table, name), rtol=1e-6, err_msg=name)
    assert two.table.origin.tolist() == [1] * len(two)


def _without_tool_mask(group):
    return trl_replay.Group(group.tensors, group.keys - {"tool_mask"}, group.prompt_lengths, group.completion_lengths)


def test_masks_and_sampling_log_probs_make_the_round_trip_too(tmp_path):
    settings = {"rollout": masked_rollout, "max_steps": 2}
    run = scenarios.train(tmp_path, [LIVE, HALF, DEAD], **settings)
    session = run.session
    path = session.export(tmp_path / "out.parquet")
    again = make_trainer(tmp_path / "again", Rewards([DEAD] * 3))
    again.rollout_func = masked_rollout
    other = trl_replay.attach(again)
    assert other.add(path) == len(session.buffer) > 0
    one, two = session.buffer, other.buffer
    assert [group_hash(one.load(s)) for s in one.held()] == [group_hash(two.load(s)) for s in two.held()]
    assert "tool_mask" in one.load(one.held()[0]).tensors


def test_a_warm_started_run_replays_from_its_second_batch_on(exported, tmp_path):
    *_, path = exported

    trainer = make_trainer(tmp_path, [Rewards([DEAD] * 3, name=name) for name in ("digits", "second")], max_steps=3)
    with trl_replay.attached(trainer, replay_warm_start=str(path)) as session:
        steps = record(session)
        trainer.train()
        assert len(steps) == 3
        assert session.totals.counters["replaced"] == 6, "the loss had to be seen once"
        trainer.train()
        assert session.totals.counters["stored"] == len(session.buffer), "it was read once"


def test_a_resumed_run_does_not_read_the_file_again(exported, tmp_path):
    *_, path = exported
    settings = {"replay_warm_start": str(path), "replay_buffer_size": 50}
    trainer = make_trainer(tmp_path, [digits, second], max_steps=2, save_strategy="steps", save_steps=1)
    _, session = train(tmp_path, trainer=trainer, **settings)
    again = make_trainer(tmp_path, [digits, second], max_steps=2)
    _, resumed = train(tmp_path, trainer=again, resume=str(tmp_path / "checkpoint-1"), **settings)
    assert resumed.buffer.table.serial.tolist() == session.buffer.table.serial.tolist()


def test_ids_of_another_tokenizer_are_refused_and_texts_alone_count(exported, tmp_path):
    *_, made, path = exported
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["12"])
    trainer = make_trainer(tmp_path, [digits, second], model=make_model(tokenizer), max_steps=1)
    trainer._tokenizer.add_tokens(["12"])
    trainer.model.resize_token_embeddings(len(tokenizer))
    session = trl_replay.attach(trainer)
    with pytest.raises(ReplayError, match=r"token ids of another tokenizer.*remove_columns\), and its texts count"):
        session.add(path)
    texts = ("prompt", "completion", "group")
    kept = [{name: row[name] for name in row if name in texts or name.startswith("reward/")} for row in made]
    assert session.add(kept) > 0
    assert set(session.buffer.table.origin.tolist()) == {2}


def test_91_of_rows_of_more_reward_functions_those_of_the_trainer_count(exported, tmp_path):
    _, session, _, path = exported
    trainer = make_trainer(tmp_path, [digits])
    here = trl_replay.attach(trainer, replay_buffer_size=50)
    added = here.add(path)
    assert 0 < added <= len(session.buffer), "what one function more gave is left out"


def test_groups_with_images_come_back_with_those_of_the_dataset(tmp_path):
    rewards = Rewards([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])
    trainer = pictures.make_trainer(tmp_path, pictures.llava(), (1, 0, 2), rewards, max_steps=3)
    session = trl_replay.attach(trainer)
    trainer.train()
    found = pd.read_parquet(session.export(tmp_path / "out.parquet"))
    assert set(found["num_images"]) == {0, 1, 2}
    held = [session.buffer.load(serial) for serial in session.buffer]
    assert session.add(tmp_path / "out.parquet") == len(held)
    again = [session.buffer.load(serial) for serial in list(session.buffer)[len(held) :]]
    pictured = 0
    for one, other in zip(held, again, strict=True):
        assert one.tensors.keys() - {"tool_mask"} == other.tensors.keys() - {"tool_mask"}
        for name, values in one.tensors.items():
            torch.testing.assert_close(other.tensors[name], values)
        pictured += "pixel_values" in one.tensors
    assert pictured > 0
    rows = found.query("num_images > 0").drop(columns=["trl_replay_task"]).to_dict("records")
    with pytest.warns(UserWarning, match="it has images, and neither its file nor the dataset holds them"):
        session.add(rows)


def test_an_empty_buffer_is_exported_as_an_empty_table(tmp_path):
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer)
    path = session.export(tmp_path / "out.parquet")
    found = pd.read_parquet(path)
    assert len(found) == 0
    assert "completion_ids" in found.columns
    assert session.add(path) == 0


def test_an_export_that_fails_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    _, session = train(tmp_path)
    path = session.export(tmp_path / "out.parquet")
    before = path.read_bytes()

    def load(serial):
        raise OSError("no room")

    monkeypatch.setattr(session.buffer, "load", load)
    with pytest.raises(OSError, match="no room"):
        session.export(path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.glob("out*")] == ["out.parquet"]


def test_168_an_export_and_a_report_write_through_no_link_that_somebody_planted(tmp_path):
    trainer, session = train(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("out.parquet", "out.parquet.part", "report.html"):
        (tmp_path / name).symlink_to(victim)
    trainer.save_state()
    page = write_page(tmp_path / "report.html", [], [], [Outcome.of(Run("a", []))])
    for written in (session.export(tmp_path / "out.parquet"), page):
        assert not written.is_symlink()
        assert written.stat().st_size > 100
        assert written.stat().st_mode & 0o777 == victim.stat().st_mode & 0o777, "readable as any new file"
    assert victim.read_text() == "precious"
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(ReplayError, match=r"pipe.parquet is no regular file: give another path"):
        session.export(tmp_path / "pipe.parquet")


def test_51_reward_functions_of_one_name_have_a_column_each_and_are_read_back(tmp_path):
    def scored(value):
        def score(completions, **_):
            return [value * (row % 2) for row in range(len(completions))]

        return score

    functions = [scored(1.0), scored(10.0)]
    rule = {"rewards": functions, "reward_weights": [1.0, 0.25], "replaced": 0}
    run = scenarios.train(tmp_path, max_steps=3, **rule)
    session = run.session
    path = session.export(tmp_path / "out.parquet")
    found = pd.read_parquet(path)
    assert [name for name in found if name.startswith("reward/")] == ["reward/score", "reward/score#2"]
    assert set(found["reward/score"]) == {0.0, 1.0}
    assert set(found["reward/score#2"]) == {0.0, 10.0}
    again = make_trainer(tmp_path / "again", functions, max_steps=1, reward_weights=[1.0, 0.25])
    other = trl_replay.attach(again)
    assert other.add(path) == len(session.buffer) > 0
    assert other.buffer.table.reward_mean.tolist() == session.buffer.table.reward_mean.tolist()
