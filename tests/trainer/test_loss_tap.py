"""The tap inside the loss: which rows it records, and what it hands to the loss."""

import pytest
import torch
from scenarios import train
from support import DEAD, HALF, LIVE, WINDOW, Interrupt, Rewards, Spy, record

import trl_replay
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, HALF, DEAD], [DEAD, DEAD, DEAD])


@pytest.mark.parametrize("how", ["from a checkpoint", "by hand"])
def test_rows_noted_before_weights_were_loaded_are_not_recorded(tmp_path, how):
    """Interrupted in a window, then trained on with other weights in the same process."""
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, HALF, LIVE]), trainer_class=Spy, max_steps=6, save_strategy="steps", save_steps=1,
        learning_rate=5e-2, **WINDOW,
    )  # fmt: skip
    trainer.add_callback(Interrupt(4))
    session = trl_replay.attach(trainer, replay_max_fraction=0.0)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    noted = session.buffer.serial
    if how == "by hand":
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.5)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1") if how == "from a checkpoint" else None)
    kept = [serial for serial in session.buffer.table.serial.tolist() if serial < noted]
    assert kept, "groups from before the interruption are kept"
    assert max(kept) < noted - 3, "those of the batch at hand are not recorded under other weights"
    assert session.totals.counters["refused"] > 0


def test_a_correction_is_told_of_each_rows_tokens_and_its_age(tmp_path):
    told = []

    def watched(rows, context):
        told.append(rows)
        return trl_replay.Corrected(rows.behavior_logps)

    script = Rewards([LIVE, HALF, DEAD], [DEAD, LIVE, DEAD], [DEAD, DEAD, DEAD])
    trainer = train(
        tmp_path,
        rewards=script,
        trainer_class=Spy,
        learning_rate=5e-2,
        replay_correction=watched,
        replay_sampler="newest",
    ).trainer
    rows, inputs = told[-1], trainer.losses[-1]["inputs"]
    assert torch.equal(rows.mask, inputs["completion_mask"].bool())
    slots = (inputs.rows[:, 0].max() - inputs.rows[:, 0]) // 4
    assert rows.ages.tolist() == [(2, 3, 3)[slot] for slot in slots.tolist()], "the newest group took the first slot"


def test_replayed_rows_of_an_earlier_generation_batch_are_an_error(tmp_path):
    """Their log-probs are gone."""
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3)
    steps = record(trl_replay.attach(trainer))
    trainer.train()
    (_, earlier), (_, last) = steps[1:]
    with pytest.raises(trl_replay.SeamError, match="replayed rows of an earlier generation batch"):
        trainer._compute_loss(trainer.model, earlier)
    trainer._compute_loss(trainer.model, last)
