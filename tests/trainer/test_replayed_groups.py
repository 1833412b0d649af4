"""Stored groups and what comes back of them: through a real GRPOTrainer, with three groups a batch or more."""

import pytest
import torch
from replaying import original, tokens_of
from scenarios import train
from support import DEAD, HALF, LIVE, WINDOW, Interrupt, Rewards, Spy, plugin_class, record, scoring

import trl_replay
from trl_replay.loss.tap import ROWS
from trl_replay.testing import make_trainer

pytestmark = pytest.mark.usefixtures("all_metrics")

ALL_DEAD = [DEAD, DEAD, DEAD]
ONE_LIVE = [LIVE, DEAD, DEAD]


def replayed_slots(out):
    return (out[ROWS][:, 0].view(-1, 4) < 0).all(dim=1).nonzero().flatten().tolist()


def test_7_a_key_more_or_less_than_when_stored_never_crashes_and_never_drops_a_key(tmp_path):
    script = Rewards([LIVE, DEAD, LIVE], [DEAD, DEAD, LIVE])
    trainer = make_trainer(tmp_path, script, max_steps=2, beta=0.1)
    session = train(trainer).session
    beta, reference = trainer.beta, trainer.ref_model
    trainer.beta = 0.0  # stored with reference log-probs, now without
    script.calls = 1
    steps = record(session)
    trainer.train()
    assert all(replayed_slots(after) for _, after in steps)
    assert all("ref_per_token_logps" not in after for _, after in steps)
    session.buffer.clear()
    script.calls = 0
    trainer.train()  # stored without
    trainer.beta, trainer.ref_model = beta, reference
    script.calls = 1
    steps = record(session)
    trainer.train()
    assert replayed_slots(steps[0][1]) == [], "what lacks a tensor of this configuration is not eligible"
    assert "lacks a tensor" in session.explain()
    assert replayed_slots(steps[1][1]), "a group stored with it is"
    assert all("ref_per_token_logps" in after for _, after in steps)


def test_10_eval_batches_pass_through_and_never_enter_the_buffer(tmp_path, monkeypatch):
    settings = {"trainer_class": Spy, "eval_prompts": ["1=", "2=", "3="], "per_device_eval_batch_size": 12}
    run = train(tmp_path, ONE_LIVE, max_steps=2, **settings)
    trainer, session = run.trainer, run.session
    before = session.buffer.table.serial.tolist()
    given = []
    prepare = Spy._prepare_inputs
    monkeypatch.setattr(Spy, "_prepare_inputs", lambda self, batch: given.append(prepare(self, batch)) or given[-1])
    trainer.evaluate()
    assert given, "eval batches were scored"
    assert all(batch is scored for batch, scored in zip(given, trainer.scored[-len(given) :], strict=True))
    assert session.buffer.table.serial.tolist() == before
    assert len(run.steps) == 2, "the step ran for the training batches only"


def test_11_and_12_an_entry_is_a_copy_of_few_bytes_that_neither_changes_nor_grows(tmp_path):
    """Every batch, as it came in and as it went out, is overwritten with zeros once its copy was handed on."""
    prompts = ["1=", "2=", "3=", *["123+456=", "12=", "1="] * 8]
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD], ALL_DEAD), prompts, max_steps=9)
    session = trl_replay.attach(trainer, replay_start=0)
    step, outs, sizes = session.step.take, [], []

    def overwriting(batch, *others):
        out = step(batch, *others)
        outs.append({key: value.clone() for key, value in out.items()})
        sizes.append(session.buffer.nbytes)
        for value in [*batch.values(), *out.values()]:
            value.zero_()
        return outs[-1]

    session.step.take = overwriting
    trainer.train()

    def tokens(out, slot):
        pad = trainer._tokenizer.pad_token_id
        return [tokens_of(original(out, row, pad)) for row in range(4 * slot, 4 * slot + 4)]

    expected = tokens(outs[0], 0)
    for out in outs[1:]:
        (slot,) = replayed_slots(out)
        assert tokens(out, slot) == expected
    assert session.buffer.table.uses.tolist() == [8]
    assert set(sizes[1:]) == {session.buffer.nbytes}
    count = len(expected[0][0]) + sum(len(completion) for _, completion in expected)
    assert session.buffer.table.nbytes[0] <= 5 * count + 96, "the prompt once, a byte an id"


def test_36_a_second_train_out_of_phase_drops_late_candidates_and_keeps_ages_right(tmp_path):
    run = train(tmp_path, [LIVE, HALF, DEAD], **WINDOW)
    trainer, session, steps = run.trainer, run.session, run.steps
    assert session.update == 4
    interrupt = Interrupt(1)
    trainer.add_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupt)
    steps.clear()
    trainer.train()
    assert session.update == 8, "the session counts its own updates; global_step started again"
    for _, after in steps:
        for slot in replayed_slots(after):
            assert after["advantages"].view(3, 4)[slot].abs().sum() > 0
    assert session.metrics["replay/age_mean"] > 0
    assert bool((session.update >= session.buffer.table.update).all())


def test_28_a_key_that_nobody_declares_is_refused_with_the_remedy(tmp_path, plug):
    """Nor does a plugin that is registered and not named."""
    plug(plugin_class(fields=lambda: [trl_replay.FieldSpec("bonus", layout="row")])())
    with_key = scoring(lambda batch: {**batch, "bonus": torch.arange(len(batch["advantages"]))})
    words = (
        r"'bonus' \(shape \(12,\)\).*use_replay=False.*trl_replay_fields.*FieldSpec\('bonus', .*`replay_plugins`\.$"
    )
    with pytest.raises(trl_replay.BatchError, match=words):
        train(tmp_path, ONE_LIVE, trainer_class=with_key)
