"""Dynamic sampling and prompts in a checkpoint."""

import shutil

import numpy as np
import pytest
from resuming import PROMPTS, rewrite, train


@pytest.mark.parametrize("then", [{}, {"replay_refill": "new(rounds=1)"}], ids=["without rounds", "with rounds"])
def test_a_run_resumes_with_and_without_what_the_checkpoint_knows_of_generating(tmp_path, then):
    train(tmp_path, prompts=PROMPTS, **then)
    now = {} if then else {"replay_refill": "new(rounds=1)"}
    _, session = train(tmp_path, resume=str(tmp_path / "checkpoint-6"), prompts=PROMPTS, **now)
    assert (session.step.rounds is None) == bool(then)
    if session.step.rounds is not None:
        assert session.step.rounds.batches == 6
        assert len(session.step.rounds.table) > 0


def test_another_number_of_processes_puts_what_they_knew_together(tmp_path):
    """Two ranks' files, of which one was made from the other's: this process follows both."""
    train(tmp_path, prompts=PROMPTS, replay_refill="new(rounds=1)")
    folder = tmp_path / "checkpoint-6" / "trl_replay"
    two_ranks(folder)
    _, session = train(tmp_path, resume=str(tmp_path / "checkpoint-6"), prompts=PROMPTS, replay_refill="new(rounds=1)")
    table = session.step.rounds.table
    assert table.tries.sum() > 0
    assert len(np.unique(table.key)) == len(table)


def two_ranks(folder):
    """Makes the files of one rank those of two, each with half of the rows of a batch."""
    shutil.copytree(folder / "rank-00000", folder / "rank-00001")
    for rank in range(2):

        def change(content, rank=rank):
            content["rank"] = content["payload_rank"] = rank
            content["identity"]["processes"] = 2

        rewrite(folder / f"rank-0000{rank}", change)
