"""Models: adapters, checkpointed activations, autocast, weights in bfloat16, compiled models."""

import pytest
import torch
from releases import INTERPRETED
from replaying import build, replay
from support import DEAD, HALF, LIVE, Rewards, Spy
from users_losses import alone

import trl_replay
from trl_replay.errors import RefusedError
from trl_replay.testing import make_model, make_tokenizer

pytestmark = pytest.mark.generates

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])
LAYERS = {"target_modules": ["q_proj", "v_proj"]}


def test_replay_goes_with_lora_dropout(tmp_path):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
    trainer = build(tmp_path, Rewards(*SCRIPT), arguments={"peft_config": adapter})
    trainer.independent = False
    replay(trainer)


def adapter(method, **settings):
    import peft

    return getattr(peft, f"{method}Config")(task_type="CAUSAL_LM", **settings)


@pytest.mark.filterwarnings("ignore:The model has learned absolute positions")  # padding lies behind virtual tokens
@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("Lora", LAYERS),
        ("Lora", {**LAYERS, "use_dora": True}),
        ("Lora", {**LAYERS, "trainable_token_indices": [4, 5, 6, 7]}),
        ("Lora", {**LAYERS, "modules_to_save": ["lm_head"]}),
        ("TrainableTokens", {"token_indices": [4, 5, 6, 7]}),
        ("Vera", {**LAYERS, "r": 4}),
        ("OFT", {**LAYERS, "oft_block_size": 8, "r": 0}),
        ("PromptTuning", {"num_virtual_tokens": 3}),
        ("PrefixTuning", {"num_virtual_tokens": 3}),
    ],
)
def test_the_stored_reference_is_the_base_model_whatever_the_adapter(tmp_path, method, settings):
    """Held against a forward of the base model that never had an adapter."""
    chosen = {"peft_config": adapter(method, **settings)}
    trainer = build(tmp_path, Rewards(*SCRIPT), trainer_class=Spy, arguments=chosen, beta=0.1, max_steps=4)
    session = trl_replay.attach(trainer)
    trainer.train()
    assert session.totals.counters["replaced"] > 0
    plain = make_model(make_tokenizer()).eval()
    updates = set()
    for serial in session.buffer:
        group = session.buffer.load(serial)
        lengths = group.completion_lengths.tolist()
        completions = group.tensors["completion_ids"].long().split(lengths)
        references = group.tensors["ref_per_token_logps"].split(lengths)
        prompt = group.tensors["prompt_ids"][: int(group.prompt_lengths[0])].long()
        updates.add(int(session.buffer.table.update[session.buffer.table.rows_of([serial])[0]]))
        for ids, reference in zip(completions, references, strict=True):
            expected = alone(plain, (prompt.tolist(), ids.tolist()), gradients=False)
            torch.testing.assert_close(reference, expected, rtol=1e-4, atol=1e-5)
    assert max(updates) > 0, "some are of a policy that had been trained"
    policy = trainer.losses[-1]["logps"] - trainer.losses[-1]["inputs"]["ref_per_token_logps"]
    assert (policy * trainer.losses[-1]["inputs"]["completion_mask"]).abs().max() > 1e-3, "the adapter was trained"


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_an_adapter_that_trains_the_reference_along_is_refused(tmp_path, bias):
    chosen = {"peft_config": adapter("Lora", **LAYERS, bias=bias)}
    with pytest.raises(RefusedError, match=rf"bias='{bias}' .*beta=0.1.* Use bias='none', or set beta=0"):
        trl_replay.attach(build(tmp_path / "on", Rewards(*SCRIPT), arguments=chosen, beta=0.1))
    trl_replay.attach(build(tmp_path / "off", Rewards(*SCRIPT), arguments=chosen))


def test_a_second_active_adapter_is_refused_with_a_reference(tmp_path):
    """TRL 1.16 activates `model.active_adapter`, which is one, after it has computed the reference's log-probs."""
    from peft import get_peft_model

    def model():
        made = get_peft_model(make_model(make_tokenizer()), adapter("Lora", **LAYERS))
        made.add_adapter("other", adapter("Lora", **LAYERS))
        made.base_model.set_adapter(["default", "other"])
        return made

    with pytest.raises(RefusedError, match=r"'default', 'other' are active.* Merge the others .* or set beta=0"):
        trl_replay.attach(build(tmp_path / "on", Rewards(*SCRIPT), model=model(), beta=0.1))
    trl_replay.attach(build(tmp_path / "off", Rewards(*SCRIPT), model=model()))


def test_replay_is_right_with_gradient_checkpointing(tmp_path):
    replay(build(tmp_path, Rewards(*SCRIPT), gradient_checkpointing=True))


def test_replay_is_right_under_bfloat16_autocast(tmp_path):
    trainer = build(tmp_path, Rewards(*SCRIPT), bf16=True, learning_rate=3e-2)
    trainer.independent = False  # a second forward outside autocast would round elsewhere
    session, _ = replay(trainer)
    assert session.metrics["replay/ratio_mean"] != 1.0


@pytest.mark.skipif(INTERPRETED, reason="PyTorch can't compile a kernel that Triton interprets")
@pytest.mark.filterwarnings("ignore")
def test_replay_is_right_with_a_compiled_model(tmp_path):
    """With the eager backend: inductor needs a C++ compiler. While it traces, warnings are torch's own."""
    trainer = build(tmp_path, Rewards(*SCRIPT), torch_compile=True, torch_compile_backend="eager", max_steps=3)
    replay(trainer)


def test_bfloat16_weights_store_log_probs_as_they_were_computed(tmp_path):
    model = make_model(make_tokenizer()).to(torch.bfloat16)
    trainer = build(tmp_path, Rewards(*SCRIPT), model=model)
    trainer.independent = False
    replay(trainer)
