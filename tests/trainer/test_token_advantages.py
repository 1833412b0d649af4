"""A trainer that gives each token its own advantage, as for the credit of turns: stored, placed and corrected so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from credit import CREDITED as SCRIPT
from credit import Credit
from methods import INJECTED
from replaying import build, replay
from scenarios import train
from support import COLUMN, DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.data.types import ADVANTAGES
from trl_replay.testing import make_trainer

pytestmark = pytest.mark.usefixtures("all_metrics")

SEQUENCE = {"importance_sampling_level": "sequence"}


def shares(*of_places):
    """A trainer with these shares of a row's advantage, by place."""
    return type("Of", (Credit,), {"shares": torch.tensor(of_places * (32 // len(of_places)))})


def test_rows_of_one_sign_get_one_weight_at_sequence_level_and_rows_of_both_are_refused(tmp_path):
    settings = {"loss_type": "grpo", "learning_rate": 5e-2, **SEQUENCE}
    trainer = build(tmp_path, Rewards(*SCRIPT), trainer_class=shares(0.25, 0.5, 1.0, 2.0), **settings)
    trainer.correction = "topr"
    replay(trainer, replay_correction="topr")
    with pytest.raises(trl_replay.ReplayError, match="sign of an advantage gives them to rows whose tokens have both"):
        train(tmp_path, *SCRIPT, trainer_class=Credit, replay_correction="topr", **settings)


def test_a_shift_makes_a_token_without_an_advantage_count_at_sequence_level(tmp_path):
    def halves_pauses(rows, context):
        weights = 1.0 - 0.5 * rows.advantages.eq(0)
        return trl_replay.Corrected(rows.logps, weights, rows.advantages.new_ones(len(weights)))

    pausing = {"trainer_class": shares(1.0, 0.5, 0.0, 0.25), "loss_type": "grpo", **SEQUENCE}
    with pytest.raises(trl_replay.ReplayError, match="token weights"):
        train(tmp_path, *SCRIPT, replay_correction=halves_pauses, **pausing)


@pytest.mark.parametrize("setting", ["joint", "split", "auto"])
def test_advantages_computed_by_trls_rule_are_refused(tmp_path, setting):
    """Also where those of all tokens of a row happen to be TRL's own."""
    settings = {**INJECTED, "replay_advantages": setting, "trainer_class": shares(1.0)}
    with pytest.raises(trl_replay.SeamError, match=f"replay_advantages='{setting}'.*replay_advantages='stored'"):
        train(tmp_path, [LIVE, HALF, LIVE], **settings)


def test_tokens_that_cancel_are_not_dead_and_their_group_scores_by_their_sizes(tmp_path):
    run = train(tmp_path, [LIVE, DEAD, DEAD], [DEAD] * 3, trainer_class=shares(1.0, -1.0), max_steps=2)
    (found,) = run.table.row_advantage.tolist()
    assert [abs(value) for value in found] == pytest.approx([1.4998, 0.4999, 0.4999, 0.4999], abs=1e-3)
    assert run.table.score[0] > 0
    assert run.counters["dead"] == 5


class Unknown(Credit):
    """Some advantages are NaN: of the first row, or of one of its tokens."""

    unknown: slice

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        batch[ADVANTAGES][0, self.unknown] = torch.nan
        return batch


def test_nan_for_all_tokens_masks_a_row_and_for_some_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([[1.0, 0.0, 1.0, 0.0], DEAD, HALF]), trainer_class=Unknown, max_steps=3)
    trainer.unknown = slice(None)
    run = train(trainer)
    assert run.session.metrics["replay/masked_rows_fraction"] > 0
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert bool(run.table.row_masked.any())
    trainer.unknown = slice(0, 1)
    with pytest.raises(trl_replay.BatchError, match="some trained tokens have finite advantages"):
        trainer.train()


def times(factor):
    """Plugin's advantages, in which the second row's is another."""
    return {"advantages": lambda groups: groups.advantages * np.array([1.0, factor, 1.0, 1.0])}


def test_a_plugin_may_mask_rows_and_not_change_them(tmp_path):
    settings = {"trainer_class": Credit, "max_steps": 3}
    run = train(tmp_path, [HALF, DEAD, LIVE], hooks=times(np.nan), **settings)
    assert run.session.metrics["replay/masked_rows_fraction"] > 0
    with pytest.raises(trl_replay.ConfigurationError, match=r"gives one to each of its tokens.*mask rows"):
        train(tmp_path, [HALF, DEAD, LIVE], hooks=times(2.0), **settings)


def test_they_take_four_bytes_a_token_and_travel_through_files(tmp_path):
    first = train(tmp_path, [LIVE, DEAD, DEAD], [DEAD] * 3, trainer_class=Credit, max_steps=3)
    again = train(
        tmp_path, [DEAD] * 3, trainer_class=Credit, max_steps=3,
        replay_warm_start=first.session.export(tmp_path / "groups.parquet"),
    )  # fmt: skip
    (group,), (read,) = ([run.session.buffer.load(serial) for serial in run.session.buffer] for run in (first, again))
    assert group.tensors[ADVANTAGES].nbytes == 4 * int(group.completion_lengths.sum())
    for mine, theirs in zip(read.advantages, group.advantages, strict=True):
        assert torch.equal(mine, theirs)


SAVES = {"save_strategy": "steps", "max_steps": 6, "save_steps": 3}


def test_entries_with_token_advantages_are_refused_by_a_trainer_with_one_a_row(tmp_path):
    train(tmp_path, [LIVE, DEAD, HALF], trainer_class=Credit, **SAVES)
    with pytest.raises(trl_replay.BatchError, match="per-token advantages, but the batch has one per row"):
        train(tmp_path, [LIVE, DEAD, HALF], resume=str(tmp_path / "checkpoint-3"), **SAVES)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_84_a_batch_of_one_token_does_not_decide_how_advantages_are_laid_out(tmp_path, first):
    """Advantages `(B, 1)`, and one batch in which every completion has one token."""
    batches = 0

    class OfOneToken(COLUMN):
        def _generate_single_turn(self, prompt_ids, *others, **named):
            nonlocal batches
            batches += 1
            length = 1 if batches == first else 5
            return [[20 + (batches + row) % 9] * length for row in range(len(prompt_ids))], None

    script = [LIVE, DEAD, HALF], [LIVE, HALF, DEAD], [DEAD] * 3
    assert train(tmp_path, *script, trainer_class=OfOneToken, max_steps=6).counters["replaced"] > 6
