"""Each row keeps the ratio that it was generated with, where vLLM's precision is not the trainer's."""

import pytest
import torch
from advantages_by_hand import mixed_advantages
from generating import PROMPTS, Coins, watched
from methods import INJECTED, SCRIPT, mixed_slots
from replaying import Watch, check_batches, check_losses, original, replay
from support import DEAD, HALF, LIVE, Rewards

import trl_replay

ENGINE = {"dtype": "bfloat16"}
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
SPARSE = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])
BOUNDS = {"vllm_importance_sampling_clip_min": 0.98, "vllm_importance_sampling_clip_max": 1.02}


def ratio_by_hand(row, mode):
    """The policy's probability of what was sampled over vLLM's, cut off or masked at the bounds."""
    logs = row["old_per_token_logps"] - row["sampling_per_token_logps"]
    ratio = (logs.sum(dim=0, keepdim=True) if mode.startswith("sequence") else logs).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(0.98, 1.02)
    return torch.where((ratio < 0.98) | (ratio > 1.02), 0.0, ratio)


def replayed_rows(watch):
    steps = zip(watch.steps, watch.taken, strict=True)
    return [original(after, row, watch.pad) for (_, after), taken in steps for row in taken]


@pytest.mark.parametrize("mode", MODES)
def test_a_replayed_row_has_the_ratio_that_it_was_generated_with(tmp_path, engine, mode):
    settings = {"vllm_importance_sampling_mode": mode, **BOUNDS}
    trainer = engine.trainer(tmp_path, Rewards(*SPARSE), learning_rate=3e-2, **settings)
    session, watch = replay(trainer)
    assert session.totals.counters["refused"] == 0
    rows = replayed_rows(watch)
    for row in rows:
        assert (row["ratio_width"] == 1) == mode.startswith("sequence")
        torch.testing.assert_close(row["importance_sampling_ratio"], ratio_by_hand(row, mode))
    ratios = torch.cat([row["importance_sampling_ratio"] for row in rows])
    assert bool(((ratios > 0.98) & (ratios < 1.02) & (ratios != 1)).any()), "no ratio is within the bounds"
    at_bounds = (ratios == 0) if mode.endswith("mask") else (ratios - 1).abs() > 0.0199
    assert bool(at_bounds.any()), "no ratio is out of bounds"


@pytest.mark.parametrize("mode", ["token_mask", "sequence_truncate"])
def test_mixed_groups_have_the_ratio_of_each_row(tmp_path, engine, mode):
    settings = {"vllm_importance_sampling_mode": mode, **BOUNDS}
    trainer = engine.trainer(tmp_path, Rewards(*SCRIPT), learning_rate=2e-2, max_steps=6, **settings)
    session = trl_replay.attach(trainer, **INJECTED, replay_advantages="joint")
    watch = Watch(session, 4, trainer._tokenizer.pad_token_id)
    watch.advantages = lambda step: mixed_advantages(watch, step, "joint", (1.0,), "group", "sum_then_normalize")
    trainer.watch, trainer.compared = watch, []
    trainer.train()
    check_batches(watch)
    check_losses(trainer)
    assert any(0 < len(taken) < 4 for _, _, taken in mixed_slots(watch))
    for row in replayed_rows(watch):
        torch.testing.assert_close(row["importance_sampling_ratio"], ratio_by_hand(row, mode))


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_groups_of_further_rounds_have_their_ratios(tmp_path, engine, mode):
    coins = Coins(0.5)
    settings = {"vllm_importance_sampling_mode": mode, **BOUNDS}
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    trainer = engine.trainer(tmp_path, coins, rows, learning_rate=3e-2, **settings)
    _, session, watch = watched(trainer, coins, 2)
    assert session.totals.counters["refilled"] > 0
    for batch, _ in watch.steps:
        for number in range(len(batch["advantages"])):
            row = original(batch, number, watch.pad)
            torch.testing.assert_close(row["importance_sampling_ratio"], ratio_by_hand(row, mode))


def test_without_trls_correction_the_policys_log_probs_are_replayed(tmp_path, engine):
    trainer = engine.trainer(tmp_path, Rewards(*SPARSE), vllm_importance_sampling_correction=False)
    _, watch = replay(trainer)
    for batch, _ in watch.steps:
        assert "sampling_per_token_logps" in batch
        assert "importance_sampling_ratio" not in batch
        assert "old_per_token_logps" not in batch
