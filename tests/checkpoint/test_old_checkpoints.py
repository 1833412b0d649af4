"""Checkpoints that were written before the package moved into folders: today's code takes them and trains on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from old_checkpoints import (
    PROCESS,
    SETTINGS,
    SHARDED,
    Written,
    build,
    check_group,
    check_numbers,
    check_session,
    check_table,
    copied,
)
from resuming import stopped_after_loading, train


def test_one_processs_checkpoint_comes_back_as_its_files_say(tmp_path: Path) -> None:
    checkpoint = copied(PROCESS, tmp_path)
    with stopped_after_loading(build(tmp_path), str(checkpoint), **SETTINGS) as session:
        check_session(session, Written(PROCESS, 0))


def test_it_is_trained_on_and_replayed_from(tmp_path: Path) -> None:
    before = Written(PROCESS, 0)
    _, session = train(tmp_path, trainer=build(tmp_path), resume=str(copied(PROCESS, tmp_path)), **SETTINGS)
    assert session.update == 12
    assert session.totals.batches == 12
    assert session.totals.counters["replaced"] > before.session["totals"]["counters"]["replaced"]
    assert session.totals.counters["stored"] > before.session["totals"]["counters"]["stored"], "candidates settled"
    assert session.carry.serial > before.session["serial"]


def test_what_the_loss_had_shown_of_replayed_rows_is_taken_note_of_in_the_next_step(tmp_path: Path) -> None:
    written = Written(PROCESS, 0)
    trainer, settings = build(tmp_path, max_steps=9), {**SETTINGS, "replay_buffer_size": 50}
    _, session = train(tmp_path, trainer=trainer, resume=str(copied(PROCESS, tmp_path)), **settings)
    ((slot, serial),) = written.session["drawn"]
    rows = slice(4 * slot, 4 * slot + 4)
    seen, drift = (sum(written.session["measured"][name][rows]) for name in ("seen", "drift"))
    row = int(np.flatnonzero(session.buffer.table.serial == serial)[0])
    assert float(written.columns["drift"][written.columns["serial"] == serial][0]) == 0
    assert float(session.buffer.table.drift[row]) == pytest.approx(drift / seen)


def test_two_processes_checkpoint_is_put_together_on_one(tmp_path: Path) -> None:
    ranks = [Written(SHARDED, rank) for rank in (0, 1)]
    first = ranks[0]
    checkpoint = copied(SHARDED, tmp_path)
    settings = {**SETTINGS, "replay_scope": "sharded"}
    with stopped_after_loading(build(tmp_path), str(checkpoint), **settings) as session:
        entries = len(first.columns["serial"])
        changed = ("owner", "peers", "newer")  # one process owns everything, and an entry has come
        kept = {name: column for name, column in first.columns.items() if name not in changed}
        check_table(session, kept, entries)
        table = session.buffer.table
        assert table.serial.tolist() == [0, 1, 2, 3, 4], "the candidate had all its log-probs, and settled"
        assert set(table.owner.tolist()) == {0}
        assert table.prompt[4] == first.candidates["prompt"].numpy()[0]
        assert table.peers.tolist() == [2, 2, 1, 2, 2]
        for rank in ranks:
            for serial, tensors in rank.payload.items():
                check_group(session.buffer.load(serial), tensors)
        records = [first.candidates[f"4@{row}"] for row in range(4)]
        settled = session.buffer.load(4).tensors
        assert torch.equal(settled["old_per_token_logps"], torch.cat(records))
        assert torch.equal(settled["completion_ids"], first.candidates["4/completion_ids"])
        assert session.carry.pending_groups is None
        # to settle it took a tag from the shared generator, and was counted
        generator = np.random.default_rng()
        generator.bit_generator.state = first.session["generators"]["shared"]
        assert float(table.tag[4]) == 1.0 - generator.random(1)[0]
        first.session["generators"]["shared"] = generator.bit_generator.state
        first.session["totals"]["counters"]["stored"] += 1
        first.session["strategies"]["allowance"]["inserted"] += 1
        check_numbers(session, first)


def test_it_is_trained_on_by_one_process(tmp_path: Path) -> None:
    before = Written(SHARDED, 0).session["totals"]["counters"]["replaced"]
    settings = {**SETTINGS, "replay_scope": "sharded"}
    _, session = train(tmp_path, trainer=build(tmp_path), resume=str(copied(SHARDED, tmp_path)), **settings)
    assert session.update == 12
    assert session.totals.counters["replaced"] > before
