"""Every batch of text that TRL can produce: stored, replayed, and trained on with the loss written down by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from releases import since
from replaying import Checked, build, check_losses, replay
from support import DEAD, HALF, LIVE, LOSSES, Rewards

import trl_replay
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])
BATCHES: dict[str, dict[str, Any]] = {
    "two iterations": {"num_iterations": 2},
    "three iterations over an accumulated window": {
        "num_iterations": 3, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "max_steps": 9,
    },
    "accumulation": {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2},
    "more generations than accumulation": {
        "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 8,
    },
    "more accumulation than generations": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "more accumulation, and iterations": {
        "gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2,
    },
    "generation not in step with accumulation": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 8,
    },
    "padding to a multiple": {"pad_to_multiple_of": 8},
    "a reference model": {"beta": 0.1, "learning_rate": 3e-2},
    "a reference model, KL not multiplied by the ratio": {"beta": 0.1, "use_bias_correction_kl": False},
    "a reference model, sequence level": {"beta": 0.1, "importance_sampling_level": "sequence"},
    "a reference model, two iterations": {"beta": 0.1, "num_iterations": 2},
    "truncated completions masked": {"mask_truncated_completions": True, "max_completion_length": 12, "max_steps": 8},
    "high-entropy tokens only": {"top_entropy_quantile": 0.5},
    "two-sided clipping": {"delta": 1.5, "epsilon_high": 0.4, "learning_rate": 3e-2},
    "rewards scaled by batch": {"scale_rewards": "batch"},
    "rewards not scaled": {"scale_rewards": "none"},
    "a KL penalty, dr_grpo, accumulation": {
        "beta": 0.05, "loss_type": "dr_grpo", "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2,
    },
    **{f"{loss}, {level} level": {"loss_type": loss, "importance_sampling_level": level}
       for loss in LOSSES for level in ("token", "sequence")},
}  # fmt: skip
NEWER = {"luspo, token level": since("1.10.0", "a token-level luspo loss that leaves padding out")}


def checked(tmp_path: Any, rewards: Any = None, **settings: Any) -> Any:
    settings = {"max_steps": 5, "trainer_class": Checked, **settings}
    return make_trainer(tmp_path, rewards or Rewards(*SCRIPT), **settings)


@pytest.mark.parametrize("batch", [pytest.param(name, marks=NEWER.get(name, ())) for name in BATCHES])
def test_replay_is_right_with(tmp_path: Any, batch: str) -> None:
    trainer = checked(tmp_path, **BATCHES[batch])
    session, _ = replay(trainer)
    if "truncated" not in batch:
        assert session.totals.counters["refused"] == 0
    check_ratios(trainer)


def check_ratios(trainer: Any) -> None:
    """A replayed row's ratio is not 1; a fresh one's is, bit for bit, where it is the tap that supplies it."""
    for loss in trainer.losses:
        inputs, replayed = loss["inputs"], loss["inputs"].rows[:, 0] < 0
        if not replayed.any():
            continue
        mask = inputs["completion_mask"][replayed].bool()
        moved = (loss["logps"] - inputs["old_per_token_logps"])[replayed][mask]
        assert float(moved.abs().max()) > 1e-4, "a replayed row's ratio is not 1"
        if "old_per_token_logps" not in trainer.scored[0]:
            fresh, old = loss["logps"][~replayed], inputs["old_per_token_logps"][~replayed]
            torch.testing.assert_close(old, fresh, rtol=0, atol=0, msg="a fresh row's ratio is 1")


def test_the_loss_by_hand_notices_replay_without_correction(tmp_path: Any) -> None:
    with pytest.raises(AssertionError, match="replayed rows is"):
        replay(checked(tmp_path, learning_rate=3e-2), replay_correction="none")


def test_replay_is_right_with_the_off_policy_mask_and_drops_rows(tmp_path: Any) -> None:
    trainer = checked(tmp_path, off_policy_mask_threshold=1e-3, learning_rate=3e-2, max_steps=6)
    replay(trainer)
    dropped = 0
    for loss in trainer.losses:
        rows = loss["inputs"].rows[:, 0] < 0
        if rows.any():
            mask = loss["inputs"]["completion_mask"]
            drift = ((loss["inputs"]["old_per_token_logps"] - loss["logps"]) * mask).sum(1) / mask.sum(1)
            dropped += int((rows & (loss["inputs"]["advantages"] < 0) & (drift > 1e-3)).sum())
    assert dropped > 0, "the mask took some replayed row out of the loss"


@since("1.8.0", "the entropy bonus")
@pytest.mark.parametrize(
    "settings",
    [
        {"entropy_coef": 0.01},
        {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0, "entropy_coef_delta": 0.002},
        {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 1.0},
    ],
    ids=["static", "adaptive", "adaptive, above its target"],
)
def test_replay_is_right_with_an_entropy_bonus(tmp_path: Any, settings: dict[str, Any]) -> None:
    trainer = checked(tmp_path, **settings)
    replay(trainer)
    if settings.get("entropy_target") == 1.0:
        assert trainer.applied_entropy_coef == 0.0, "so uncertain a model gets no bonus"
    else:
        assert trainer.applied_entropy_coef > 0.0
    if settings.get("entropy_target") == 5.0:
        assert trainer.entropy_coef > 0.01, "the coefficient has moved"


@since("1.7.0", "the auxiliary loss")
@pytest.mark.parametrize("family", ["Qwen2Moe", "Mixtral"])
def test_replay_is_right_with_a_mixture_of_experts_and_its_auxiliary_loss(tmp_path: Any, family: str) -> None:
    import transformers

    from trl_replay.testing import make_tokenizer

    tokenizer = make_tokenizer()
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
    }  # fmt: skip
    if family == "Qwen2Moe":
        shape |= {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    else:
        shape |= {"num_local_experts": 4}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**shape))
    trainer = checked(tmp_path, model=model, router_aux_loss_coef=0.1)
    assert trainer.aux_loss_enabled
    replay(trainer)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_replay_is_right_with_several_reward_functions(tmp_path: Any, aggregation: str, scale: str) -> None:
    """With weights, rows that one function or none has scored, and a group that none has."""
    nothing = [None] * 4
    functions = [
        Rewards([[1, 0, None, 0.5], LIVE, nothing], [nothing, DEAD, DEAD]),
        Rewards([[0.2, None, None, 0.1], DEAD, nothing], [nothing, DEAD, DEAD]),
    ]
    functions[1].__name__ = "second"
    settings = {"multi_objective_aggregation": aggregation, "scale_rewards": scale, "reward_weights": [1.0, 2.0]}
    session, _ = replay(checked(tmp_path, functions, **settings))
    assert all(math.isfinite(value) for value in session.buffer.table.score)


def test_replay_is_right_with_conversations(tmp_path: Any) -> None:
    from trl_replay.testing import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + '*' + message.content + '-' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant*' }}{% endif %}"
    )
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("1=", "12=", "123+4=")]
    scripted, texts = Rewards(*SCRIPT), []

    def reward(completions: Any, **kwargs: Any) -> Any:
        texts.extend(completion[0]["content"] for completion in completions)
        return scripted(completions, **kwargs)

    replay(build(tmp_path, reward, rows, tokenizer))
    assert len(texts) == 60, "completions came as messages"


@since("1.9.0", "iterable datasets")
def test_replay_is_right_with_an_iterable_dataset(tmp_path: Any) -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": prompt} for prompt in ("1=", "12=", "123+4=")] * 16).to_iterable_dataset()
    replay(build(tmp_path, Rewards(*SCRIPT), arguments={"train_dataset": rows}))


def test_replay_is_right_with_eval_and_logged_completions(tmp_path: Any, capsys: Any) -> None:
    trainer = checked(
        tmp_path, Scored(), eval_prompts=["1=", "2=", "3="], eval_strategy="steps", eval_steps=1, log_completions=True,
        per_device_eval_batch_size=12,
    )  # fmt: skip
    _, watch = replay(trainer)
    assert len(watch.steps) == 5, "the step ran for training batches only"
    assert sum("eval_reward" in entry for entry in trainer.state.log_history) == 5
    assert len(list((tmp_path / "completions").iterdir())) >= 5
    assert "Prompt" in capsys.readouterr().out


class Scored(Rewards):
    """Rewards of the script for training batches; 0 for eval batches, which come after each update."""

    def __init__(self) -> None:
        super().__init__(*SCRIPT)
        self.turn = 0

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        self.turn += 1
        return super().__call__(completions, **kwargs) if self.turn % 2 else [0.0] * len(completions)


def test_replay_is_right_with_dropout_and_warns_once(tmp_path: Any) -> None:
    from trl_replay.testing import make_model, make_tokenizer

    model = make_model(make_tokenizer(), attention_dropout=0.2)
    trainer = checked(tmp_path, model=model)
    trainer.independent = False  # a second forward would draw another dropout
    with pytest.warns(UserWarning, match="The model has dropout") as caught:
        replay(trainer)
    assert len([one for one in caught if "dropout" in str(one.message)]) == 1


def test_a_sync_of_the_reference_model_makes_what_was_stored_before_ineligible(tmp_path: Any) -> None:
    script = Rewards([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE], [DEAD, DEAD, DEAD])
    trainer = checked(
        tmp_path, script, beta=0.1, sync_ref_model=True, ref_model_sync_steps=3, ref_model_mixup_alpha=1.0,
        max_steps=8, learning_rate=3e-2,
    )  # fmt: skip
    session, watch = replay(trainer, replay_start=0)
    for number, slots in enumerate(watch.slots):
        for _, serial in slots:
            assert watch.origin[serial][0] // 3 == number // 3, "nothing from before the last sync (every 3 updates)"
    assert watch.slots[1], "replayed before the sync"
    assert not any(watch.slots[3:]), "all that was stored was from before it"
    assert "reference log-probs are another reference model's: it was synced since" in session.explain()
    assert len(session.buffer) == 0, "stale entries take no room"


def test_a_candidate_of_a_window_with_a_sync_is_refused_and_counted(tmp_path: Any) -> None:
    trainer = checked(
        tmp_path, Rewards([LIVE, DEAD, HALF]), beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, max_steps=3
    )
    session = trl_replay.attach(trainer)
    trainer.train()
    assert session.totals.counters["replaced"] == 0
    assert session.totals.counters["refused"] == 6
    assert len(session.buffer) == 0


def test_a_reference_sync_matters_only_where_reference_log_probs_are_used(tmp_path: Any) -> None:
    session, _ = replay(checked(tmp_path, sync_ref_model=False, beta=0.0))
    session.reference_synced()
    assert len(session.buffer) > 0


def test_check_losses_sees_a_wrong_loss(tmp_path: Any) -> None:
    trainer = checked(tmp_path)
    replay(trainer)
    trainer.compared[-1] = (trainer.compared[-1][0] + 1e-3, *trainer.compared[-1][1:])
    with pytest.raises(AssertionError, match="by hand"):
        check_losses(trainer)
