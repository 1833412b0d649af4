"""What log-probs differ by at equal weights is no staleness: rounding in half precision, and dropout."""

import pytest
import torch
from replaying import build
from transformers import TrainerCallback
from trl import GRPOTrainer

import trl_replay
from trl_replay.loss.supply import Noise
from trl_replay.testing import make_model, make_tokenizer

PROMPTS = [{"prompt": "1+2=" * count} for count in (1, 3, 2, 5, 4, 6)]
CLIPS_NARROWLY = {
    "importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4,
    "per_device_train_batch_size": 8, "max_steps": 40,
}  # fmt: skip


class Measured(TrainerCallback):
    """Looks at the session whenever the trainer has logged."""

    def __init__(self, look):
        self.look = look

    def on_log(self, *_, **__):
        self.look()


def digit(completions, **_):
    return [float(text[:1] in "012345") for text in completions]


def model(scale=12.0, **settings):
    """One whose activations are as large as a trained model's, which bfloat16 rounds as coarsely."""
    made = make_model(make_tokenizer(), **settings)
    with torch.no_grad():
        for weights in made.parameters():
            weights.mul_(scale if weights.dim() > 1 else 1.0)
    return made


def trained(folder, **settings):
    """A run of replay whose batches differ in shape."""
    trainer = build(folder, digit, PROMPTS, model=model(), **{**CLIPS_NARROWLY, **settings}, trainer_class=GRPOTrainer)
    session = trl_replay.attach(trainer, replay_start=0, replay_selector="always(share=0.5)", replay_record="forward")
    metrics = []
    trainer.add_callback(Measured(lambda: metrics.append(session.metrics)))
    trainer.train()
    assert session.totals.counters["replaced"] > 10
    return metrics, session


def values(metrics, name="replay/clip_ratio"):
    return [one[name] for one in metrics if name in one]


def test_coarse_rounding_in_half_precision_is_not_taken_for_a_model_that_reads_the_padding(tmp_path):
    """As Gemma 3 270M's is, by 0.11 nats a token. Warnings are errors."""
    coarse = model(24.0, hidden_size=64, layers=4)
    session = trl_replay.attach(build(tmp_path, digit, PROMPTS, model=coarse, bf16=True))
    assert session.components.loss.bounds.noise.token_max > 1.0


@pytest.mark.parametrize("bf16", [True, False])
def test_at_rate_0_no_replayed_row_is_clipped(tmp_path, bf16):
    metrics, _ = trained(tmp_path, bf16=bf16, learning_rate=0.0)
    assert max(values(metrics)) == 0.0
    assert (max(values(metrics, "replay/drift_mean")) > 1e-3) == bf16, (
        "what is not clipped is noise, and there is some"
    )


def test_at_an_ordinary_rate_as_many_rows_are_clipped_as_in_single_precision(tmp_path):
    shares = []
    for bf16 in (True, False):
        metrics, _ = trained(tmp_path, bf16=bf16, learning_rate=3e-3, max_steps=60)
        shares.append(sum(values(metrics)) / len(values(metrics)))
    assert abs(shares[0] - shares[1]) <= 0.03, shares
    assert shares[1] > 0.4


def test_the_noise_is_known_at_attach_and_told(tmp_path):
    told = {}
    for bf16 in (True, False):
        trainer = build(tmp_path, digit, model=model(), bf16=bf16, trainer_class=GRPOTrainer)
        session = trl_replay.attach(trainer)
        assert isinstance(session.noise, Noise)
        assert session.noise.token_mean <= session.noise.token_max
        assert session.noise.sequence_mean == pytest.approx(session.noise.token_mean / 6**0.5)
        told[bf16] = session.noise.token_mean
        assert ("noise: at equal weights" in session.explain()) == bf16
    assert told[False] < 1e-5 < 1e-3 < told[True]


def test_dropout_in_the_losss_forward_is_told_with_its_share_and_the_remedy(tmp_path):
    """TRL's disable_dropout leaves attention alone, which drops by a number in the model's config."""
    settings = {"disable_dropout": True, "trainer_class": GRPOTrainer}
    trainer = build(tmp_path, digit, model=model(attention_dropout=0.2), **settings)
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="100% of what .* Set {'attention_dropout': 0.0} in the model's config"):
        session = trl_replay.attach(trainer)
    assert torch.equal(torch.get_rng_state(), state)
    assert session.noise.dropout > 1e-3
    assert "% of it dropout" in session.explain()


def test_lora_dropout_is_told_and_turned_off_by_disable_dropout(tmp_path, recwarn):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    for disable in (False, True):
        settings = {"disable_dropout": disable, "arguments": {"peft_config": adapter}, "trainer_class": GRPOTrainer}
        trainer = build(tmp_path, digit, model=model(), **settings)
        recwarn.clear()
        noise = trl_replay.attach(trainer).noise
        assert any("Set disable_dropout=True" in str(one.message) for one in recwarn) == (not disable)
        assert (noise.dropout > 1e-3) == (not disable)


def test_a_quantized_model_on_a_cpu_is_not_tried(tmp_path):
    """4-bit weights of bitsandbytes are packed for good by their first forward in eval mode there."""
    forwards = []
    trainer = build(tmp_path, digit, model=model())
    trainer.model.is_quantized = True
    trainer.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    session = trl_replay.attach(trainer)
    assert session.noise is None
    assert forwards == []


def test_a_model_that_can_not_be_tried_is_said_so(tmp_path):
    trainer = build(tmp_path, digit, trainer_class=GRPOTrainer)

    def fails(*_, **__):
        raise ValueError("this model takes no rows of others.")

    trainer.model.forward = fails
    with pytest.warns(UserWarning, match=r"could not be tried at attach: .*ValueError: this model takes no rows"):
        session = trl_replay.attach(trainer)
    assert session.noise is None
    assert "noise:" not in session.explain()
