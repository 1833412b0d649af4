"""`benchmarks/capacity.py`: what it says of a buffer is what a real one takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEAD, HALF, LIVE, Rewards
from trl import GRPOTrainer

import trl_replay
from trl_replay.serialization.wire import packed_size
from trl_replay.testing import make_table, make_trainer

ROOT = Path(trl_replay.__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from capacity import RUNS, Run, agreement_of, columns_of, made_up_group, needs, table_row

TOKENS = 6


class FullLength(GRPOTrainer):
    """Completions of random letters that all have the same length."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.randint(20, len(self.processing_class), (len(prompt_ids), TOKENS)).tolist(), None


@pytest.mark.parametrize(
    ("training", "replay"),
    [
        ({}, {}),
        ({"beta": 0.04}, {"replay_scope": "gathered"}),
        ({}, {"replay_logps_dtype": "bfloat16", "replay_scope": "sharded"}),
    ],
)
def test_a_buffer_takes_what_was_planned(tmp_path: Path, training: dict[str, Any], replay: dict[str, Any]) -> None:
    script = ([LIVE, HALF, DEAD], [LIVE, DEAD, DEAD])
    settings = {"prompts": ["12=", "34=", "56="], "trainer_class": FullLength, "max_completion_length": TOKENS}
    trainer = make_trainer(tmp_path, Rewards(*script), max_steps=4, **settings, **training)
    session = trl_replay.attach(trainer, **replay)
    trainer.train()
    run = Run(
        ranks=1,
        prompts=3,
        generations=4,
        tokens=TOKENS,
        prompt_tokens=3,
        size=len(session.buffer),
        reference="beta" in training,
        logps_dtype=replay.get("replay_logps_dtype", "float32"),
    )
    group = made_up_group(run)
    for serial, nbytes in zip(session.buffer.table.serial.tolist(), session.buffer.table.nbytes.tolist(), strict=True):
        stored = session.buffer.load(serial)
        assert nbytes == packed_size(stored) + 2 * 8 * 4, "and two lengths a row"
        assert stored.nbytes == group.nbytes
        assert packed_size(stored) == pytest.approx(packed_size(group), rel=0.02), "a header is compressed"
    by_name = {each.scope: each for each in needs(run)}
    assert by_name[session.config.replay_scope].memory == session.buffer.nbytes


def test_what_is_said_in_columns_and_agreement_is_counted_from_what_is_said(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=2)
    session = trl_replay.attach(trainer, replay_scope="gathered")
    said: dict[str, set[int]] = {"share": set(), "agree": set()}
    collectives = session.scope._collectives
    all_gather = collectives.all_gather

    def watched(verb: str, mine: Any) -> Any:
        said[verb].add(mine.nbytes)
        return all_gather(verb, mine)

    collectives.all_gather = watched
    trainer.train()
    assert said["share"] == {columns_of(12)}
    assert agreement_of(12) in said["agree"]


def test_scopes_differ_in_what_travels_and_in_what_they_hold() -> None:
    run = Run(ranks=8, prompts=64, generations=8, tokens=1000, prompt_tokens=100, size=32, live=0.25)
    group = made_up_group(run)
    sent = packed_size(group)
    process, gathered, sharded = needs(run)
    assert process.columns == 0
    assert process.payload == 0
    assert gathered.payload == 16 * 7 / 8 * sent, "seven eighths of 16 live groups come from others"
    assert sharded.payload == 6 * 7 / 8 * sent + 8 * 7, "six dead slots a rank, and the sizes"
    assert [each.groups for each in (process, gathered, sharded)] == [256, 32, 256]
    entry = make_table([1.0]).row_bytes * 8 / 4  # of groups of eight
    assert process.memory == gathered.memory
    assert sharded.memory - process.memory == (256 - 32) * (process.memory / 32 - group.nbytes), "the whole table"
    assert 0 < process.memory / 32 - group.nbytes < entry
    assert gathered.columns == sharded.columns == columns_of(64) * 7


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.ranks} ranks")
def test_the_documented_table_is_what_the_formulas_give(run: Run) -> None:
    assert table_row(run) in (ROOT / "docs" / "evidence-processes.md").read_text()
