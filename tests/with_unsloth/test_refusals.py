"""What replay was not tested with in Unsloth's trainer is refused by name, and an unknown layout before training."""

from types import SimpleNamespace

import pytest
import torch
from real_unsloth import Followed, trainer_of
from scenarios import SCRIPT
from support import Rewards, scoring, weights_hash
from trl_replay_unsloth import contract, layout_probe

import trl_replay
from trl_replay.errors import ContractError, RefusedError

UNTESTED = {
    "use_vllm=True": ("use_vllm", True),
    "DeepSpeed": ("is_deepspeed_enabled", True),
    "FSDP": ("is_fsdp_enabled", True),
    "a processor, or images": ("processing_class", object()),
    "a rollout function, tools or environments": ("rollout_func", print),
    "entropy_coef=0.1": ("args.entropy_coef", 0.1),
    "use_adaptive_entropy=True": ("args.use_adaptive_entropy", True),
    "top_entropy_quantile=0.5": ("args.top_entropy_quantile", 0.5),
}


def made(folder, **settings):
    return trainer_of(folder, Rewards(*SCRIPT), **settings)


@pytest.mark.parametrize("name", UNTESTED)
def test_a_setting_that_was_not_tested_is_refused_by_name(tmp_path, name):
    trainer = made(tmp_path)
    path, value = UNTESTED[name]
    owner, attribute = (trainer.args, path[5:]) if path.startswith("args.") else (trainer, path)
    setattr(owner, attribute, value)
    before = dict(trainer.__dict__)
    with pytest.raises(RefusedError, match=f"not tested with Unsloth's trainer and {name}: leave it out"):
        trl_replay.attach(trainer)
    assert trainer.__dict__ == before


def test_several_processes_are_refused(tmp_path, monkeypatch):
    trainer = made(tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(RefusedError, match="Unsloth's trainer and 2 processes"):
        trl_replay.attach(trainer, replay_scope="process")


@pytest.mark.parametrize("name", contract.UNSLOTH_SWITCHES)
def test_a_switch_of_unsloths_own_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(RefusedError, match=f"the environment variable {name}"):
        trl_replay.attach(made(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda batch: {"advantages": batch["advantages"].unsqueeze(1) * batch["completion_mask"]},
            "an advantage for each token",
        ),
        (
            lambda batch: {"unsloth_sample_weight": torch.ones(len(batch["advantages"]))},
            "holds 'unsloth_sample_weight'",
        ),
        (lambda batch: {"pixel_values": torch.zeros(12, 4)}, "holds 'pixel_values'"),
    ],
)
def test_a_batch_that_was_not_tested_is_refused(tmp_path, change, message):
    trainer = made(tmp_path, trainer_class=scoring(lambda batch: {**batch, **change(batch)}, Followed))
    trl_replay.attach(trainer)
    with pytest.raises(trl_replay.BatchError, match=message):
        trainer.train()


def names():
    return contract.unsloth_names(Followed)


def unpacked(patch):
    """Prompts stay padded on the left, as in TRL."""
    patch.setitem(names(), "left_pack_padding", lambda tensor, pad: tensor)


def aligned_with_completions(patch):
    """Old log-probs shall be `(b, C)`: no columns are kept for prompts."""
    patch.setitem(names(), "calculate_pad_tokens_in_prompt", lambda ids, kept, pad: torch.zeros(len(ids)).long())


def shifted_mask(patch):
    stock = names()["create_completion_attention_mask"]
    patch.setitem(names(), "create_completion_attention_mask", lambda *given: stock(*given).roll(1, dims=1))


def shifted_log_probs(patch):
    efficient = names()[contract.UNSLOTH_APPLIED]

    def apply(new, *rest):
        return efficient.apply(new.roll(1, dims=1), *rest)

    stub = SimpleNamespace(apply=apply, forward=efficient.forward)
    patch.setitem(names(), contract.UNSLOTH_APPLIED, stub)
    try_it = layout_probe._try

    def tried(trainer):
        seen, loss, batch = try_it(trainer)
        return {**seen, "new": seen["new"].roll(1, dims=1)}, loss, batch

    patch.setattr(layout_probe, "_try", tried)


def other_key(patch):
    """The loss takes no old log-probs from the batch."""
    stock = names()[contract.UNSLOTH_FORWARD]

    def forward(*given, old_logps, **named):
        return stock(*given, old_logps=None, **named)

    forward = type(stock)(forward.__code__, names(), closure=forward.__closure__)
    forward.__kwdefaults__ = None
    patch.setitem(names(), contract.UNSLOTH_FORWARD, forward)


def heeds_factors(patch):
    """Backward multiplies by the gradient that reaches it, as autograd does."""
    efficient = names()[contract.UNSLOTH_APPLIED]

    def backward(ctx, gradient, *others):
        return (ctx.saved_tensors[0] * gradient, *[None] * 12)

    patch.setattr(efficient, "backward", staticmethod(backward))


LAYOUTS = {
    "prompts padded left": (unpacked, "tokens of completions are in other columns"),
    "the width of completions": (aligned_with_completions, "the mask marks other tokens"),
    "another mask": (shifted_mask, "the mask marks other tokens"),
    "log-probs in other columns": (shifted_log_probs, "log-probs are off by"),
    "old log-probs that are not read": (other_key, "old_per_token_logps does not arrive"),
    "a gradient that heeds factors": (heeds_factors, "a factor on the loss reaches its gradient"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_release_with_another_layout_is_refused(tmp_path, monkeypatch, name):
    change, message = LAYOUTS[name]
    trainer = made(tmp_path)
    change(monkeypatch)
    before = dict(trainer.__dict__)
    with pytest.raises(ContractError, match=f"is not laid out as in the releases.*{message}"):
        trl_replay.attach(trainer)
    assert trainer.__dict__ == before


def test_a_release_with_other_names_is_refused(tmp_path, monkeypatch):
    trainer = made(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(names()[contract.UNSLOTH_APPLIED], "forward", lambda ctx, old, new: None)
        with pytest.raises(ContractError, match=r"UnslothEfficientGRPO takes \('old', 'new'\)"):
            trl_replay.attach(trainer)
    monkeypatch.delitem(names(), contract.UNSLOTH_APPLIED)
    with pytest.raises(ContractError, match="does not call grpo_accumulated_loss and UnslothEfficientGRPO"):
        trl_replay.attach(trainer)


def test_a_release_that_was_not_tested_is_refused(tmp_path, monkeypatch):
    version = contract.version
    monkeypatch.setattr(contract, "version", lambda name: "2026.12.1" if name == "unsloth" else version(name))
    trainer = made(tmp_path)
    with pytest.raises(ContractError, match=r"tested with unsloth .* and Unsloth's trainer, not with 2026"):
        trl_replay.attach(trainer)
    monkeypatch.setenv(contract.UNTESTED_VARIABLE, "1")
    trl_replay.attach(trainer)


def test_attach_leaves_no_trace_of_the_probe(tmp_path):
    trainer = made(tmp_path)
    before, state = weights_hash(trainer), torch.get_rng_state()
    names_of_model = [set(vars(module)) for module in trainer.model.modules()]
    modes = [module.training for module in trainer.model.modules()]
    trl_replay.attach(trainer)
    assert [set(vars(module)) for module in trainer.model.modules()] == names_of_model
    assert [module.training for module in trainer.model.modules()] == modes
    assert weights_hash(trainer) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(trainer._metrics.values())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
