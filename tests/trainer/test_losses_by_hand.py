"""Batches and losses that no setting alone makes: stored, replayed, and trained on with the loss written down by hand.

All that settings make is in test_any_settings.py.
"""

import pytest
from releases import since
from replaying import build, replay
from scenarios import SCRIPT, experts, follow
from support import DEAD, HALF, LIVE, Rewards

from trl_replay.testing import make_tokenizer


def test_the_loss_by_hand_notices_replay_without_correction(tmp_path):
    with pytest.raises(AssertionError, match="replayed rows is"):
        replay(build(tmp_path, Rewards(*SCRIPT), learning_rate=3e-2), replay_correction="none")


@since("1.7.0", "the auxiliary loss")
def test_replay_is_right_with_another_mixture_of_experts_and_its_auxiliary_loss(tmp_path):
    accumulated = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    settings = {"router_aux_loss_coef": 0.5, "loss_type": "grpo", **accumulated}
    trainer = build(tmp_path, Rewards(*SCRIPT), model=experts("Mixtral"), **settings)
    assert trainer.aux_loss_enabled
    replay(trainer)


@pytest.mark.parametrize("name", ["generated again and mixed", "ratios at both bounds, vespo, beta"])
def test_loss_and_gradient_are_those_by_hand_with(tmp_path, name):
    follow(tmp_path, name)


def test_replay_is_right_with_conversations(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + '*' + message.content + '-' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant*' }}{% endif %}"
    )
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("1=", "12=", "123+4=")]
    scripted, texts = Rewards(*SCRIPT), []

    def reward(completions, **kwargs):
        texts.extend(completion[0]["content"] for completion in completions)
        return scripted(completions, **kwargs)

    replay(build(tmp_path, reward, rows, tokenizer))
    assert len(texts) == 60, "completions came as messages"


@pytest.mark.parametrize("eos", ["several", "pad"])
def test_losses_are_those_by_hand_where_an_answer_has_other_ends(tmp_path, eos):
    """Several tokens end an answer, or the token that ends it is the one that pads."""
    tokenizer = make_tokenizer()
    if eos == "pad":
        tokenizer.pad_token = tokenizer.eos_token
    ends = [tokenizer.eos_token_id, *tokenizer("79")["input_ids"]] if eos == "several" else tokenizer.eos_token_id
    settings = {"generation_kwargs": {"eos_token_id": ends}, "mask_truncated_completions": eos == "pad"}
    trainer = build(tmp_path, Rewards([LIVE, HALF, DEAD], [DEAD, LIVE, DEAD], [HALF, DEAD, DEAD]), tokenizer=tokenizer,
                    max_steps=8, **settings)  # fmt: skip
    session, _ = replay(trainer, replay_start=0)
    assert session.totals.counters["replaced"]
