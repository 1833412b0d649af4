"""Limits on what the buffer holds and on which entries are replayed, through the real trainer."""

import numpy as np
import pytest
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.serialization.groups import pack
from trl_replay.testing import make_trainer


def test_bytes_bound_a_gathered_buffer_and_the_warning_tells_what_a_group_costs(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=6)
    session = trl_replay.attach(trainer, replay_max_bytes="1.5KB", replay_scope="gathered", replay_evictor="fifo")
    with pytest.warns(UserWarning, match=r"replay_max_bytes is reached with \d of replay_buffer_size=64"):
        trainer.train()
    assert session.buffer.nbytes <= 1500
    assert 2 <= len(session.buffer) < 6


def test_a_group_larger_than_all_the_bytes_is_refused_and_evicts_nobody(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=3)
    with pytest.warns(UserWarning, match=r"replay_max_bytes=200 has no room for a group of 4 .*Raise it"):
        session = trl_replay.attach(trainer, replay_max_bytes=200)
    trainer.train()
    assert len(session.buffer) == 0
    assert "it alone is larger than replay_max_bytes" in session.explain()


def test_a_buffer_that_fails_once_has_no_entry_without_payload(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD], [DEAD, DEAD, DEAD]), max_steps=3)
    session = trl_replay.attach(trainer)
    receive = session.buffer.receive

    def second_fails(groups):
        if not groups:
            return
        session.buffer.receive = receive
        first, _ = groups
        receive({first: groups[first]})
        raise MemoryError("no memory")

    session.buffer.receive = second_fails
    with pytest.raises(MemoryError, match="no memory"):
        trainer.train()
    assert len(session.buffer) == 1
    trainer.train()
    assert session.buffer.held() == session.buffer.table.serial.tolist()


SCRIPT = ([LIVE, HALF, DEAD], [DEAD, DEAD, DEAD])


def test_numpy_numbers_and_a_huge_capacity_are_fine(tmp_path):
    run = train(
        tmp_path,
        *SCRIPT,
        max_steps=2,
        replay_buffer_size=10**14,
        replay_max_age=np.int64(3),
        replay_max_fraction=np.float32(0.5),
    )
    assert run.session.buffer.capacity == 10**14
    assert len(run.table) == 2


def test_what_a_group_weighs_and_what_ranks_tell_are_the_documented_bytes(tmp_path):
    """What a group weighs is on docs/processes.md#what-processes-exchange."""
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=2)
    session = trl_replay.attach(trainer, replay_scope="gathered")
    told = {"share": set(), "agree": set()}
    collectives = session.scope._collectives
    all_gather = collectives.all_gather

    def watched(verb, mine):
        told[verb].add(mine.nbytes)
        return all_gather(verb, mine)

    collectives.all_gather = watched
    trainer.train()
    table = session.buffer.table
    for serial, nbytes in zip(table.serial.tolist(), table.nbytes.tolist(), strict=True):
        assert nbytes == len(pack(session.buffer.load(serial)).data)
    rows = 12
    assert told["share"] == {88 * rows}
    assert 288 + 8 * -(-rows // 48) in told["agree"]
