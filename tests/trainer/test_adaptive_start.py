"""`replay_start="adaptive"` in training: when it waits, and how long."""

from support import DEAD, LIVE, Rewards, record, replayed
from transformers import TrainerCallback

import trl_replay
from trl_replay.testing import make_trainer

SPARSE = [[LIVE, DEAD, DEAD, DEAD], *[[DEAD] * 4] * 3]
"""Of 16 groups one is live: the very first."""
LONG = 400
"""Updates of a run whose quarter is out of sight."""


class Stop(TrainerCallback):
    """Ends training after a number of updates."""

    def __init__(self, after):
        self.after = after

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.after


def train(tmp_path, *batches, steps, planned=LONG, **settings):
    """The session, and how many groups each of the first steps replayed."""
    trainer = make_trainer(
        tmp_path,
        Rewards(*batches),
        max_steps=planned,
        per_device_train_batch_size=4 * len(batches[0]),
        max_completion_length=2,
    )
    trainer.add_callback(Stop(steps))
    session = trl_replay.attach(trainer, **settings)
    recorded = record(session)
    trainer.train()
    return session, replayed(recorded)


def test_sparse_rewards_wait_from_the_first_update_and_no_longer_than_a_quarter_of_the_run(tmp_path):
    session, filled = train(tmp_path, *SPARSE, steps=9, planned=19)
    assert filled[:4] == [0, 0, 0, 0], "one entry is too few to be replayed again and again"
    assert all(filled[4:]), session.explain()
    assert "3 x replay_start='adaptive' (sparse rewards, too few entries yet) allows 0 of 4" in session.explain()


def test_once_it_has_begun_it_does_not_wait_again(tmp_path):
    """Four groups of 40 are live, then none: fewer than one in ten."""
    _, filled = train(tmp_path, [LIVE] * 4, [DEAD] * 4, steps=14, replay_buffer_size=256)
    assert filled[1:] == [4] * 13


def test_entries_that_a_limit_lets_leave_meanwhile_count(tmp_path):
    """Of a live group in every fourth batch one is ever young enough, and three are to come first."""
    _, filled = train(tmp_path, *SPARSE * 3, steps=12, replay_buffer_size=12, replay_max_age=4)
    assert filled == [0] * 9 + [1] * 3
