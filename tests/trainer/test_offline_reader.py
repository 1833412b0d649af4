"""Files made elsewhere, as careless as they come: refused in words, or right; never trained on wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import DEAD, Rewards
from teacher import IDS, TEACHER, rows, rows_of

import trl_replay
from trl_replay import ReplayError
from trl_replay.testing import make_trainer


def changed(**columns: Any) -> list[dict[str, Any]]:
    """The same, with columns changed in the third row."""
    made = rows(**IDS)
    made[2] |= columns
    return made


@pytest.fixture
def attached(tmp_path: Path) -> Any:
    trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), max_steps=3)
    session = trl_replay.attach(trainer)
    session.its_trainer = trainer
    return session


def reasons(session: Any) -> list[str]:
    return list(session.totals.reasons)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_what_is_right_is_taken(attached: Any, kind: Any) -> None:
    assert attached.buffer.add(rows(**{name: kind(values) for name, values in IDS.items()})) == 1
    stored = attached.buffer.load(0).tensors
    assert stored["completion_ids"].tolist() == [6, 7] * 4
    assert stored["old_per_token_logps"].tolist() == [-1.0, -2.0] * 4
    attached.trainer.train()
    assert attached.totals.counters["replaced"] == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_log_probs_that_are_no_numbers_never_reach_the_loss(attached: Any, value: float) -> None:
    assert attached.buffer.add(changed(old_per_token_logps=[-1.0, value])) == 0
    assert reasons(attached) == ["a group was refused: a trainable token's log-prob is not finite"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_advantages_that_are_no_numbers_never_reach_the_loss(attached: Any, value: float) -> None:
    made = [{**row, "advantage": row["reward"] - 0.25} for row in rows()]
    made[0]["advantage"] = value
    assert attached.buffer.add(made) == 0
    assert reasons(attached) == ["a group was refused: an advantage is not finite"]


def test_a_reward_that_is_no_number_is_not_trained_on(attached: Any) -> None:
    with pytest.raises(ReplayError, match="Row 2 of the rows given has reward=nan, which is no number"):
        attached.buffer.add(changed(reward=float("nan")))
    assert attached.buffer.add(changed(reward=float("inf"))) == 0
    assert reasons(attached) == ["a group was refused: an advantage is not finite"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"reward": "good"}, r"Row 2 of the rows given has reward='good', which is no number"),
        ({"advantage": "high"}, r"Row 2 of the rows given has advantage='high', which is no number"),
        ({"reward": [1, 2]}, r"Row 2 of the rows given has reward=\[1, 2\], which is no number"),
        ({"completion_ids": [6, 44]}, r"Row 2 .*completion_ids=\[6, 44\], which are no token ids of this model"),
        ({"prompt_ids": [-1]}, r"Row 2 .*prompt_ids=\[-1\], which are no token ids of this model"),
        ({"completion_ids": "23"}, r"Row 2 .*completion_ids='23', which are no token ids of this model"),
        ({"old_per_token_logps": [-1.0, None]}, r"Row 2 .*old_per_token_logps=\[-1.0, None\], which are no numbers"),
        ({"old_per_token_logps": [-1.0]}, r"Row 2 of the rows given has 1 old_per_token_logps for 2 completion_ids"),
        ({"completion": 5, "prompt_ids": None}, r"Row 2 .*completion=5, which is neither text nor messages"),
        ({"prompt": 7, "prompt_ids": None, "group": 1}, r"Row 2 .*prompt=7, which is neither text nor messages"),
        ({"prompt": {"a": 1}, "prompt_ids": None}, r"Row 2 .*prompt=\{'a': 1\}, which is neither text nor messages"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_row(attached: Any, columns: Any, words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        attached.buffer.add(changed(**columns))
    assert len(attached.buffer) == 0


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"completion_ids": [6, 44]},
            r"Row 2 of .*rows.parquet has completion_ids=array\(\[ ?6, 44\]\), which are no",
        ),
        (
            {"old_per_token_logps": [-1.0, None]},
            r"Row 2 of .*old_per_token_logps=\[-1.0, None\], which are no numbers",
        ),
        ({"completion_ids": [], "old_per_token_logps": []}, "has no tokens"),
        ({"reward": None}, "Row 2 of .*rows.parquet lacks reward"),
    ],
)
def test_so_is_one_in_a_parquet_file(attached: Any, tmp_path: Path, columns: Any, words: str) -> None:
    pd.DataFrame(changed(**columns)).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ReplayError, match=words):
        attached.buffer.add(tmp_path / "rows.parquet")
    pd.DataFrame(changed()).to_parquet(tmp_path / "rows.parquet")
    assert attached.buffer.add(tmp_path / "rows.parquet") == 1


def test_a_row_that_is_no_mapping_is_named(attached: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1=", "completion": "2", "reward": 1}\n[1, 2]\n')
    with pytest.raises(ReplayError, match=r"Row 1 of .*rows.jsonl is \[1, 2\], not a mapping"):
        attached.buffer.add(path)


@pytest.mark.parametrize("character", ["\u2028", "\u0085", "\x1c", "é", "\r"])
def test_a_line_of_jsonl_ends_at_a_line_feed_and_nowhere_else(attached: Any, tmp_path: Path, character: str) -> None:
    lines = [json.dumps({**row, "note": f"a{character}b"}, ensure_ascii=False) for row in rows()]
    (tmp_path / "rows.jsonl").write_bytes("\r\n".join(lines).encode())
    assert attached.buffer.add(tmp_path / "rows.jsonl") == 1


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
