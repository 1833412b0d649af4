"""Truncated rows train no token (`mask_truncated_completions`): no method injects one, and none is a success. Rows
that the trainer masks are in no method's baseline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import DEAD, HALF, Rewards, masked_rollout, record, tokens_of_replayed, truncating
from trl import GRPOTrainer
from trl_replay_papers.gfpo import Gfpo
from trl_replay_papers.rl_zvp import RlZvp

import trl_replay
from trl_replay.loss.supply import EXCLUDED, ROWS
from trl_replay.testing import make_context, make_groups, make_table, make_tokenizer, make_trainer

SETTINGS: dict[str, dict[str, Any]] = {
    "exgrpo": {"replay_start": "pass_rate(0)"},
    "arpo": {},
    "repo": {"replay_mixer": "repo/cached(cached=4)"},
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
    settings = {"replay_preset": "exgrpo", "replay_start": "pass_rate(0)"}
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


class Masking(GRPOTrainer):
    """Masks the first row of every group."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        advantages = batch["advantages"].clone()
        advantages[::4] = float("nan")
        return {**batch, "advantages": advantages}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("rloo", [0.0, 1.0, -0.5, -0.5]), ("maxrl", [0.0, 2.0, -1.0, -1.0]), ("sign_advantage", [0.0, 1.0, -1.0, -1.0])],
)
def test_134_a_row_that_the_trainer_masked_stays_masked_and_is_in_no_baseline(
    tmp_path: Path, name: str, expected: list[float]
) -> None:
    trainer = make_trainer(tmp_path, Rewards([HALF] * 3), max_steps=1, trainer_class=Masking)
    steps = record(trl_replay.attach(trainer, replay_preset=name))
    trainer.train()
    ((_, after),) = steps
    assert (after[ROWS][:, 1] & EXCLUDED).bool().tolist() == [True, False, False, False] * 3
    assert after["advantages"].tolist() == pytest.approx(expected * 3)


def test_134_gfpo_keeps_rows_that_are_not_masked_and_normalizes_these_alone() -> None:
    masked = np.array([[True, False, False, False]])
    groups = replace(make_groups([[0.0, 1.0, 0.0, 0.0]]), masked=masked, lengths=np.array([[1, 2, 3, 4]]))
    shaped = Gfpo().trl_replay_advantages(groups, make_context(make_table([])))
    half = 0.5 / (np.sqrt(0.5) + 1e-4)
    np.testing.assert_allclose(shaped, [[np.nan, half, -half, np.nan]])


def test_134_rl_zvp_goes_by_rows_that_are_not_masked() -> None:
    masked = np.array([[True, True, True, False]])
    groups = replace(make_groups([[1.0, 1.0, 1.0, 0.0]]), masked=masked, dead=np.array([True]))
    shaped = RlZvp().trl_replay_advantages(groups, make_context(make_table([])))
    assert shaped[0, 3] == -0.1
