"""The table of completions that TRL logs: right in every row, and with a column that marks what was not trained on."""

import pandas as pd
import pytest
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards, record
from transformers import TrainerCallback

import trl_replay
from trl_replay.loss.tap import ROWS
from trl_replay.testing import make_trainer

COLUMN = "replay/replaced"
SCRIPT = [LIVE, DEAD, HALF], [DEAD, LIVE, DEAD], [DEAD, DEAD, DEAD], [HALF, DEAD, LIVE]
STOCK = ["step", "prompt", "completion", "scripted", "advantage"]


class Mixed(Rewards):
    """Rewards of the script for training batches of twelve; a live group for each eval batch of four."""

    def __call__(self, completions, **kwargs):
        return super().__call__(completions, **kwargs) if len(completions) == 12 else list(LIVE)


def build(folder, **settings):
    return make_trainer(folder, Mixed(*SCRIPT), log_completions=True, **settings)


def table(folder, step):
    return pd.read_parquet(folder / "completions" / f"completions_{step:05d}.parquet")


def replaced(batch):
    return (batch[ROWS][:, 0] < 0).tolist()


def test_the_column_marks_the_rows_that_were_not_trained_on(tmp_path):
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer)
    steps = record(session)
    trainer.train()
    marked = 0
    for number, (fresh, out) in enumerate(steps, start=1):
        found = table(tmp_path, number)
        assert list(found) == [*STOCK[:-1], COLUMN, STOCK[-1]]
        assert found[COLUMN].dtype == bool
        assert found[COLUMN].tolist() == replaced(out)
        assert found["completion"].tolist() == trainer.processing_class.batch_decode(
            fresh["completion_ids"], skip_special_tokens=True
        ), "the rows are what was generated"
        assert found["advantage"].tolist() == fresh["advantages"].tolist()
        assert found["scripted"].tolist() == [reward for group in SCRIPT[number - 1] for reward in group]
        marked += sum(found[COLUMN])
    assert marked == 4 * session.totals.counters["replaced"] > 0


def test_rows_of_eval_batches_are_never_marked_and_shift_the_marks_with_their_rows(tmp_path):
    """Four eval rows push out four of the twelve rows that the table keeps."""
    trainer = build(tmp_path, eval_prompts=["1="], eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    session = trl_replay.attach(trainer)
    steps = record(session)
    trainer.train()
    for number, (_, out) in enumerate(steps, start=1):
        assert table(tmp_path, number)[COLUMN].tolist() == [*replaced(out)[4:], *[False] * 4]
    assert session.totals.counters["replaced"] > 0


@pytest.mark.parametrize("rows", [4, 12], ids=["with room left", "full"])
def test_rows_that_were_logged_before_attach_are_not_marked(tmp_path, rows):
    trainer = build(tmp_path, eval_prompts=["1="], per_device_eval_batch_size=4, max_steps=2)
    if rows == 12:
        trainer.train()
    trainer.evaluate()
    session = trl_replay.attach(trainer)
    trainer.evaluate()
    found = table(tmp_path, trainer.state.global_step)
    assert found[COLUMN].tolist() == [False] * min(rows + 4, 12)
    steps = record(session)
    trainer.train()
    assert table(tmp_path, 1)[COLUMN].tolist() == replaced(steps[0][1])


def test_attached_and_detached_in_the_middle_of_a_logging_window(tmp_path):
    class Switch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                steps.append(record(trl_replay.attach(trainer)))
            if state.global_step == 5:
                trl_replay.detach(trainer)

    trainer, steps = build(tmp_path, max_steps=6, logging_steps=2), []
    trainer.add_callback(Switch())
    trainer.train()
    assert table(tmp_path, 2)[COLUMN].tolist() == replaced(steps[0][0][1])
    assert table(tmp_path, 4)[COLUMN].tolist() == replaced(steps[0][2][1])
    assert list(table(tmp_path, 6)) == STOCK
    assert COLUMN not in trainer._logs["extra"]


def test_with_replay_off_the_table_is_stocks(tmp_path):
    trainer = build(tmp_path, max_steps=1)
    trl_replay.attach(trainer, use_replay=False)
    trainer.train()
    assert list(table(tmp_path, 1)) == STOCK


def test_a_paused_session_and_a_dry_run_mark_nothing(tmp_path):
    trainer = build(tmp_path, max_steps=2)
    session = trl_replay.attach(trainer, replay_dry_run=True)
    trainer.train()
    assert session.totals.counters["replaced"] > 0, "it would have replaced some"
    assert not any(table(tmp_path, 2)[COLUMN])
    trl_replay.detach(trainer)
    session = trl_replay.attach(trainer)
    trainer.train()
    session.pause()
    trainer.train()
    assert table(tmp_path, 2)[COLUMN].tolist() == [False] * 12


def test_columns_that_reward_functions_log_stay_right(tmp_path):
    script = Rewards(*SCRIPT)

    def scripted(completions, log_extra=None, **kwargs):
        log_extra("length", [len(text) for text in completions])
        return script(completions)

    steps = train(tmp_path, rewards=scripted, log_completions=True, max_steps=3).steps
    found = table(tmp_path, 3)
    assert found["length"].tolist() == [len(text) for text in script.completions[2]]
    assert found[COLUMN].tolist() == replaced(steps[2][1])


@pytest.mark.parametrize("rows", [4, 12], ids=["with room left", "full"])
@pytest.mark.parametrize("where", ["before stock logs", "after stock logs"])
def test_a_scoring_that_fails_leaves_a_table_that_can_be_logged(tmp_path, where, rows):
    trainer = build(tmp_path, eval_prompts=["1="], per_device_eval_batch_size=4, max_steps=3)
    session = trl_replay.attach(trainer)
    steps = record(session)
    if rows == 12:
        trainer.train()
    marks = [*replaced(steps[-1][1]), *[False] * 4][-12:] if steps else [False] * 4
    trainer.evaluate()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    if where == "before stock logs":
        trainer._generate = interrupt
    else:
        session.step.take = interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.log({})
    found = table(tmp_path, 0)[COLUMN].tolist()
    assert found == (marks if where == "before stock logs" else [False] * 12)
