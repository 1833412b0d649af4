"""Truncated rows train no token (`mask_truncated_completions`): no method injects one, and none is a success."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import DEAD, HALF, Rewards, masked_rollout, record, tokens_of_replayed, truncating

import trl_replay
from trl_replay.testing import make_tokenizer, make_trainer

SETTINGS: dict[str, dict[str, Any]] = {
    "exgrpo": {"replay_start_pass_rate": 0.0},
    "arpo": {},
    "repo": {"replay_mixer_kwargs": {"cached": 4}},
    "adv_per": {"replay_start": 0},
}
PROMPTS = ("1=", "12=", "123+4=")


def tokens(tmp_path: Path, *script: Any, rollout: Any, mask: bool = True, **settings: Any) -> tuple[Any, list[int]]:
    """Trains with a rollout function; the session, and the trained tokens of every replayed row."""
    trainer = make_trainer(tmp_path, Rewards(*script), mask_truncated_completions=mask, max_steps=4)
    trainer.rollout_func = rollout
    session = trl_replay.attach(trainer, **settings)
    steps = record(session)
    trainer.train()
    return session, tokens_of_replayed(steps)


@pytest.mark.parametrize("name", SETTINGS)
def test_no_method_mixes_in_a_row_that_trains_no_token(tmp_path: Path, name: str) -> None:
    script = ([HALF] * 3, [DEAD] * 3)
    session, found = tokens(tmp_path, *script, rollout=truncating(), replay_preset=name, **SETTINGS[name])
    assert found, session.explain()
    assert min(found) > 0
    assert not [reason for reason in session.totals.reasons if "trains nothing" in reason], "it chose well itself"


def test_exgrpo_stores_no_group_whose_only_successes_train_no_token(tmp_path: Path) -> None:
    settings = {"replay_preset": "exgrpo", "replay_start_pass_rate": 0.0}
    session, _ = tokens(tmp_path, [HALF] * 3, rollout=truncating((0, 1)), **settings)
    assert len(session.buffer) == 0
    assert session.totals.reasons["a group was refused: the scorer exgrpo/half_solved stores none like it (NaN)"] == 12


@pytest.mark.parametrize("name", ["rlep", "luffy"])
def test_successes_of_a_pool_that_train_no_token_are_not_mixed_in(tmp_path: Path, name: str) -> None:
    tokenizer = make_tokenizer()
    rows = [
        {
            "prompt": prompt,
            "completion": text,
            "reward": float(text in "ab"),
            "prompt_ids": tokenizer(prompt)["input_ids"],
            "completion_ids": tokenizer(text)["input_ids"],
            "tool_mask": [int(text != "a")],
        }
        for prompt in PROMPTS
        for text in "abcd"
    ]
    path = tmp_path / "pool.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    session, found = tokens(
        tmp_path, [DEAD] * 3, rollout=masked_rollout, mask=False, replay_preset=name, replay_warm_start=str(path)
    )
    assert found, session.explain()
    assert min(found) > 0
