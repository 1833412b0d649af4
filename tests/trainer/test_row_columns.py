"""Row columns and entries as users and plugins read them: filled, read-only, exported, and known of old files."""

import itertools

import numpy as np
import pytest
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards
from teacher import rows

import trl_replay
from trl_replay.errors import HookError
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, HALF, LIVE], [DEAD, LIVE, HALF])


def test_row_columns_say_what_the_payload_holds(tmp_path):
    run = train(tmp_path, *SCRIPT)
    table = run.table
    for row, serial in enumerate(table.serial.tolist()):
        entry = run.session.entry(serial)
        assert table.row_rewards[row, :, 0].tolist() == entry.rewards["scripted"]
        assert table.row_advantage[row].tolist() == entry.advantages
        means = [sum(logps) / len(logps) for logps in entry.logps]
        assert table.row_logp[row].tolist() == pytest.approx(means, abs=1e-5)
        assert entry.columns["row_length"] == table.row_length[row].tolist()
        assert entry.masked == [False] * 4


def test_the_weighted_reward_follows_the_trainers_weights_from_the_first_file_on(tmp_path):
    both = [Rewards(*SCRIPT), Rewards([HALF, LIVE, HALF], name="second")]
    trainer = make_trainer(tmp_path, both, reward_weights=[1.0, 0.5])
    session = trl_replay.attach(trainer)
    rewards = [{"reward/scripted": float(text == "a"), "reward/second": 1.0} for text in "abcd"]
    session.add([{"prompt": "1=", "completion": text, **row} for text, row in zip("abcd", rewards, strict=True)])
    table = session.buffer.table
    assert table.row_reward.tolist() == [[1.5, 0.5, 0.5, 0.5]], "before any training"
    trainer.train()
    np.testing.assert_allclose(table.row_reward, table.row_rewards[:, :, 0] + 0.5 * table.row_rewards[:, :, 1])
    trainer.reward_weights[:] = 2.0
    with pytest.warns(UserWarning, match="Another reward rule than the present one"):
        trainer.train()
    np.testing.assert_allclose(table.row_reward, 2 * table.row_rewards.sum(axis=2))


@pytest.mark.parametrize("scope", ["process", "gathered"])
def test_26_an_entry_is_a_group_and_can_be_read_by_its_serial(tmp_path, scope):
    run = train(tmp_path, *SCRIPT, replay_scope=scope, replay_buffer_size=3)
    session, buffer = run.session, run.session.buffer
    assert list(buffer) == buffer.table.serial.tolist()
    assert len(list(buffer)) == 3
    for serial in buffer:
        assert serial in buffer
        entry = session.entry(serial)
        assert entry.serial == serial
        assert len(entry.completions) == 4
        assert set(entry.prompts) <= {"1=", "12=", "123+4="}
        assert all(isinstance(text, str) for text in entry.completions)
    gone = next(serial for serial in range(99) if serial not in buffer)
    with pytest.raises(KeyError):
        session.entry(gone)
    trl_replay.detach(run.trainer)
    assert session.entry(serial).completions == entry.completions, "after detach it can still be read"


def test_42_core_columns_can_only_be_read_and_a_plugins_can_be_written(tmp_path):
    session = train(tmp_path, *SCRIPT).session
    table = session.buffer.table
    for part, name in itertools.product((table, table.take(np.array([0]))), table.names):
        with pytest.raises(ValueError, match="read-only"):
            getattr(part, name)[:] = 0
    table.add_column("mine")
    table.mine[:] = 3.0
    assert (session.buffer.table.mine == 3.0).all()


class Notes:
    """Fills a column of its own; at an update it fails."""

    def __init__(self, failing=99):
        self.failing = failing
        self.scores = []

    @trl_replay.hookimpl
    def trl_replay_attached(self, session):
        session.buffer.table.add_column("passes")

    @trl_replay.hookimpl
    def trl_replay_admitted(self, table, rows, groups, context):
        if context.update >= self.failing:
            raise ZeroDivisionError("no luck")
        table.passes[rows] = groups.reward.sum(axis=1)

    @trl_replay.hookimpl
    def trl_replay_rank(self, table, context):
        self.scores += table.passes.tolist()
        return table.passes


@pytest.fixture
def notes(plug):
    plugin = Notes()
    plug(plugin, "notes")
    return plugin


def test_a_plugins_column_is_filled_before_anything_is_ranked_and_for_files_too(tmp_path, notes):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3)
    session = trl_replay.attach(trainer, replay_plugins=["notes"], replay_buffer_size=2)
    assert session.add(rows()) == 1
    assert session.buffer.table.passes.tolist() == [1.0]
    trainer.train()
    assert 0.0 not in notes.scores, "every entry had its value when ranks were asked for"
    assert session.buffer.table.passes.tolist() == session.buffer.table.row_reward.sum(axis=1).tolist()


def test_an_error_while_a_file_is_added_adds_nothing(tmp_path, notes):
    notes.failing = 0
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    session = trl_replay.attach(trainer, replay_plugins=["notes"])
    with pytest.raises(HookError, match="no luck"):
        session.add(rows())
    assert len(session.buffer) == 0
    notes.failing = 99
    assert session.add(rows()) == 1


def test_an_error_there_takes_the_newcomers_back(tmp_path, notes):
    notes.failing = 2
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    session = trl_replay.attach(trainer, replay_plugins=["notes"])
    with pytest.raises(HookError, match=r"'notes'.* failed in trl_replay_admitted at update 2"):
        trainer.train()
    assert sorted(session.buffer) == [0, 1, 2], "those of the batch before"
    assert sorted(session.buffer.held()) == [0, 1, 2]


def test_masks_are_exported_and_come_back(tmp_path):
    masked = {"advantages": lambda groups: groups.advantages * np.array([np.nan, 1.0, 1.0, 1.0])}
    first = train(tmp_path / "one", *SCRIPT, hooks=masked)
    assert first.table.row_masked[:, 0].all()
    path = first.session.export(tmp_path / "groups.parquet")
    trainer = make_trainer(tmp_path / "two", Rewards(*SCRIPT), max_steps=1)
    again = trl_replay.attach(trainer)
    assert again.add(path) == len(first.table)
    table = again.buffer.table
    assert table.row_masked.tolist() == first.table.row_masked.tolist()
    assert (table.items == (table.row_items * ~table.row_masked).sum(axis=1)).all()


def test_masked_rows_of_a_file_are_in_no_baseline_and_groups_of_nothing_else_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([DEAD] * 3))
    session = trl_replay.attach(trainer)
    kept = [{"prompt": "1=", "completion": text, "reward/scripted": float(text in "ab")} for text in "abcd"]
    kept[0]["masked"] = True
    silent = [{**row, "prompt": "12=", "masked": True} for row in kept]
    alike = [{**row, "prompt": "123+4=", "masked": row["completion"] in "ab"} for row in kept]
    assert session.add([*kept, *silent, *alike]) == 1
    by_hand = np.array([0.0, 2 / 3, -1 / 3, -1 / 3]) / (np.sqrt(1 / 3) + 1e-4)
    np.testing.assert_allclose(session.entry(session.buffer.table.serial[0]).advantages, by_hand, rtol=1e-5, atol=1e-6)
    assert session.totals.reasons["a group was refused: it has no trainable token"] == 1
