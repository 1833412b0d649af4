"""Generating again and prompts that plugins choose: resuming is bit-identical to the run that never stopped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resuming import LAYOUTS, differences, everything, train

import trl_replay
from trl_replay.prompt_table import COLUMNS


class Curriculum:
    """Skips what is solved, and tries again what was dead last."""

    @trl_replay.hookimpl
    def trl_replay_inputs(self, groups_of_rows: Any, context: Any) -> Any:
        keys = [context.key(row) for row in groups_of_rows]
        dead = context.prompts.get("dead_streak", keys, default=0) > 0
        again = context.prompt_rows(context.prompts.key[context.prompts.dead_streak == 1][:1])
        rows = [*again, *context.new_prompts(int(dead.sum())), *groups_of_rows]
        return rows[: len(groups_of_rows)]


@pytest.fixture(autouse=True)
def _plugin() -> Iterator[None]:
    trl_replay.register(Curriculum(), "curriculum")
    yield
    trl_replay.unregister("curriculum")


PROMPTS = tuple(f"{number}=" for number in range(30))
SETTINGS: dict[str, dict[str, Any]] = {
    "new prompts": {"replay_refill_rounds": 2},
    "the same prompts": {"replay_refill_rounds": 2, "replay_refill_prompts": "same"},
    "no buffer": {"replay_refill_rounds": 2, "replay_buffer_size": 0},
    "a curriculum": {"replay_refill_rounds": 1, "replay_plugins": "curriculum"},
}


def all_of(trainer: Any, session: Any) -> dict[str, Any]:
    table = {f"prompts {name}": getattr(session.rounds.table, name) for name in COLUMNS}
    return {**everything(trainer, session), **table, "rounds": session.rounds.state_dict()}


PAIRS = [(name, list(LAYOUTS)[(number + shift) % 4]) for number, name in enumerate(SETTINGS) for shift in (0, 1)]
"""Every setting in two layouts, and every layout with two settings."""


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_resuming_is_bit_identical_to_the_run_that_never_stopped(tmp_path: Path, name: str, layout: str) -> None:
    settings = {**SETTINGS[name], **LAYOUTS[layout], "prompts": PROMPTS}
    whole = all_of(*train(tmp_path, **settings))
    assert whole["totals"][1]["refilled"] > 0
    resumed = all_of(*train(tmp_path, resume=str(tmp_path / "checkpoint-6"), **settings))
    assert not differences(whole, resumed)


@pytest.mark.parametrize("then", [{}, {"replay_refill_rounds": 1}], ids=["without rounds", "with rounds"])
def test_a_run_resumes_with_and_without_what_the_checkpoint_knows_of_generating(tmp_path: Path, then: Any) -> None:
    train(tmp_path, prompts=PROMPTS, **then)
    now = {} if then else {"replay_refill_rounds": 1}
    _, session = train(tmp_path, resume=str(tmp_path / "checkpoint-6"), prompts=PROMPTS, **now)
    assert (session.rounds is None) == bool(then)
    if session.rounds is not None:
        assert session.rounds.batches == 6
        assert len(session.rounds.table) > 0


def test_a_damaged_table_of_prompts_is_named(tmp_path: Path) -> None:
    train(tmp_path, prompts=PROMPTS, replay_refill_rounds=1)
    (file,) = (tmp_path / "checkpoint-6").rglob("prompts.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(trl_replay.CheckpointError, match=r"prompts\.safetensors is not what was saved"):
        train(tmp_path, resume=str(tmp_path / "checkpoint-6"), prompts=PROMPTS, replay_refill_rounds=1)


def test_another_number_of_processes_puts_what_they_knew_together(tmp_path: Path) -> None:
    """Two ranks' files, of which one was made from the other's: this process follows both."""
    train(tmp_path, prompts=PROMPTS, replay_refill_rounds=1)
    folder = tmp_path / "checkpoint-6" / "trl_replay"
    two_ranks(folder)
    _, session = train(tmp_path, resume=str(tmp_path / "checkpoint-6"), prompts=PROMPTS, replay_refill_rounds=1)
    table = session.rounds.table
    assert table.tries.sum() > 0
    assert len(np.unique(table.key)) == len(table)


def two_ranks(folder: Path) -> None:
    """Makes the files of one rank those of two, each with half of the rows of a batch."""
    import json

    from trl_replay.checkpoint.format import _digest

    shutil.copytree(folder / "rank-00000", folder / "rank-00001")
    for rank in range(2):
        path = folder / f"rank-0000{rank}" / "state.json"
        saved = json.loads(path.read_text())
        content = saved["content"]
        content["rank"] = content["payload_rank"] = rank
        content["identity"]["processes"] = 2
        saved["checksum"] = _digest(content)
        path.write_text(json.dumps(saved))
