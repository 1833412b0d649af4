"""Completions from elsewhere: vLLM's log-probs and importance ratios, rollout functions, environments with tools."""

from __future__ import annotations

import pytest
import torch
from generating import PROMPTS, Coins, watched
from releases import CLIPPED_RATIOS, since
from replaying import build, replay
from sampling import LENGTHS, StandIn
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.errors import MismatchError

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@pytest.mark.parametrize("lengths", [[5, 2, 4, 1, 3, 6, 2], [1]], ids=["several lengths", "one token each"])
@pytest.mark.parametrize("mode", MODES)
def test_8_and_19_vllm_ratios_and_missing_log_probs_are_replayed_with_their_rows(tmp_path, mode, lengths):
    trainer = sampled(tmp_path, mode, lengths=lengths, max_completion_length=max(lengths))
    generation = trainer.vllm_generation
    session, watch = replay(trainer)
    assert generation.syncs > 0
    width = 1 if mode.startswith("sequence") else max(lengths)
    for before, after in watch.steps:
        if (
            len(lengths) > 1 and generation.missing
        ):  # with (i + j) % 5 == 4, a completion of one token may be missing altogether
            assert bool(before["sampling_per_token_logps"].isnan().any()), "vLLM did not score every token"
        assert after["importance_sampling_ratio"].size(1) >= width
        assert (after["importance_sampling_ratio"].size(1) == 1) == (width == 1)
    assert session.totals.counters["refused"] == 0
    assert all(loss["loss"].isfinite() for loss in trainer.losses)


def sampled(folder, mode, *script, lengths=LENGTHS, rewards=None, **settings):
    """A trainer with vLLM's correction in that mode."""
    settings = {"vllm_importance_sampling_mode": mode, "learning_rate": 3e-2, **CLIPPED_RATIOS, **settings}
    trainer = build(folder, rewards or Rewards(*script or SCRIPT), **settings)
    StandIn(trainer, lengths)
    return trainer


RATIO = "importance_sampling_ratio"


@pytest.mark.parametrize("mode", MODES)
def test_144_a_file_keeps_vllms_ratios(tmp_path, mode):
    session = train(sampled(tmp_path / "first", mode)).session
    session.export(tmp_path / "groups.parquet")
    other = trl_replay.attach(sampled(tmp_path / "second", mode))
    assert other.add(tmp_path / "groups.parquet") == len(session.buffer)
    before, after = (
        [made.buffer.load(one).tensors[RATIO] for one in sorted(made.buffer)] for made in (session, other)
    )
    torch.testing.assert_close(after, before, atol=1e-3, rtol=1e-2)
    assert any(bool(ratios.ne(1).any()) for ratios in before)


@pytest.mark.parametrize(
    ("mode", "ratios"),
    [
        ("token_truncate", [[0.7, 1.2], [1.0, 1.1]]),
        ("token_mask", [[0.0, 0.0], [1.0, 1.1]]),
        ("sequence_truncate", [[1.2], [1.1]]),
        ("sequence_mask", [[0.0], [1.1]]),
    ],
)
@since("1.6.0", "a lower bound of vLLM's ratio")
def test_144_the_ratio_of_a_files_log_probs_is_the_trainers_own(tmp_path, mode, ratios):
    """Of ratios e⁻⁰·⁵ and e¹ of tokens, and 1 and 1.1."""
    session = trl_replay.attach(sampled(tmp_path, mode))
    old, log = [-1.0, -1.0], torch.tensor(1.1).log().item()
    samplers = [[-0.5, -2.0], [-1.0, -1.0 - log], [-1.0, -1.0 - log], [-1.0, -1.0 - log]]
    rows = [
        {"prompt": "1=", "completion": "12", "prompt_ids": [4], "completion_ids": [4, 5], "reward": float(number == 0),
         "old_per_token_logps": old, "sampling_per_token_logps": sampler}
        for number, sampler in enumerate(samplers)
    ]  # fmt: skip
    assert session.add(rows) == 1
    (serial,) = session.buffer
    found = session.buffer.load(serial).tensors[RATIO].view(4, -1)
    torch.testing.assert_close(found[:2], torch.tensor(ratios), atol=1e-3, rtol=1e-2)


def test_144_ratios_of_tokens_serve_no_mode_of_sequences(tmp_path):
    """Of a run in another mode, the ratios are computed anew."""
    first = train(sampled(tmp_path / "first", "token_truncate")).session
    path = str(first.export(tmp_path / "groups.parquet"))
    run = train(sampled(tmp_path / "second", "sequence_mask", [DEAD] * 3), replay_warm_start=path)
    session = run.session
    assert all(session.buffer.load(serial).tensors[RATIO].shape == (4, 1) for serial in session.buffer)


SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize(("then", "now"), [("token_truncate", "sequence_mask"), ("sequence_mask", "token_truncate")])
def test_143_a_checkpoint_with_ratios_of_another_shape_is_refused(tmp_path, then, now):
    train(sampled(tmp_path, then, **SAVING))
    with pytest.raises(MismatchError, match=f"vllm_importance_sampling_mode.*'{then}' and is '{now}'"):
        train(sampled(tmp_path, now, **SAVING), resume=str(tmp_path / "checkpoint-2"))


def test_143_a_checkpoint_with_ratios_of_the_same_shape_is_taken(tmp_path):
    train(sampled(tmp_path, "token_truncate", **SAVING))
    train(sampled(tmp_path, "token_mask", [DEAD] * 3, **SAVING), resume=str(tmp_path / "checkpoint-2"))


def test_vllm_without_its_correction_is_replayed_with_the_taps_log_probs(tmp_path):
    trainer = build(tmp_path, Rewards(*SCRIPT), vllm_importance_sampling_correction=False)
    StandIn(trainer, [5, 2, 4, 1, 3])
    _, watch = replay(trainer)
    assert "old_per_token_logps" not in watch.steps[0][0]
    assert "sampling_per_token_logps" in watch.steps[0][0]


@since("1.11.0", "log-probs that the sampler could not give")
def test_a_group_whose_sampler_told_nothing_is_still_replayed(tmp_path):
    trainer = build(tmp_path, Rewards(*SCRIPT))
    generation = StandIn(trainer, [3, 2, 4])
    generate = generation.generate

    def silent(*args, **kwargs):
        prompts, ids, logps, rest = generate(*args, **kwargs)
        return prompts, ids, [[[None] for _ in row] for row in logps], rest

    generation.generate = silent
    session, _ = replay(trainer)
    assert isinstance(session, trl_replay.Session)


# groups that are generated again


def test_refilled_groups_keep_vllms_ratios_and_weights_are_synced_once_an_update(tmp_path):
    coins = Coins(0.5)
    trainer = sampled(tmp_path, "sequence_mask", rewards=coins, rows=[{"prompt": prompt} for prompt in PROMPTS])
    generation = trainer.vllm_generation
    _, session, watch = watched(trainer, coins, 2, replay_buffer_size=0)
    assert generation.syncs == len(watch.steps)
    assert session.totals.counters["refilled"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_vllms_ratios_are_drawn_with_their_rows_in_further_iterations(tmp_path, mode):
    trainer = sampled(tmp_path, mode, num_iterations=3, max_steps=9)
    generation = trainer.vllm_generation
    session, _ = replay(trainer, replay_iterations="replay", replay_start=0)
    assert session.totals.counters["iterated"] > 4
    assert generation.syncs == 3, "once a generation"
