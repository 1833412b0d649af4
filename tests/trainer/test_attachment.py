"""attach, detach, attached: what they refuse, what they change, and that they change it back."""

import copy
import gc
import io
import pickle
import sys
import weakref

import pytest
import torch
from replaying import build
from support import DEAD, HALF, LIVE, WINDOW, Act, Interrupt, Rewards, Spy, weights_hash
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import GRPOConfig

import trl_replay
from trl_replay import ConfigurationError, compat, hookimpl
from trl_replay.errors import ContractError, RefusedError
from trl_replay.loss.tap import ROWS
from trl_replay.testing import make_model, make_tokenizer, make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE])


@pytest.fixture
def trainer(tmp_path):
    return make_trainer(tmp_path, Rewards(*SCRIPT))


def state(trainer):
    return dict(trainer.__dict__), list(trainer.callback_handler.callbacks)


def test_detach_restores_the_trainer_exactly(trainer):
    before = state(trainer)
    methods = {name: getattr(type(trainer), name) for name in compat.SEAM}
    session = trl_replay.attach(trainer)
    assert set(trainer.__dict__) - set(before[0]) == {*compat.SEAM, "__getstate__"}
    assert session.trainer is trainer
    trl_replay.detach(trainer)
    assert state(trainer) == before
    assert {name: getattr(type(trainer), name) for name in compat.SEAM} == methods, "no class was touched"


def test_training_goes_on_as_stock_after_detach(tmp_path):
    hashes = []
    for attach in (False, True):
        trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD], *SCRIPT), max_steps=1)
        if attach:
            with trl_replay.attached(trainer) as session:
                trainer.train()
            assert session.totals.batches == 1
        else:
            trainer.train()
        trainer.args.max_steps = 3
        trainer.train()
        hashes.append(weights_hash(trainer))
    assert hashes[0] == hashes[1]


def test_a_second_attach_and_a_second_detach_are_errors(trainer):
    trl_replay.attach(trainer)
    with pytest.raises(trl_replay.AttachError, match="attached to this trainer already"):
        trl_replay.attach(trainer, replay_evictor="fifo")
    with pytest.raises(trl_replay.AttachError, match="attached to this trainer already"):
        trl_replay.attach(trainer, use_replay=False)
    trl_replay.detach(trainer)
    with pytest.raises(trl_replay.AttachError, match="not attached"):
        trl_replay.detach(trainer)


def test_a_foreign_override_is_refused_by_name(trainer):
    def foreign(inputs):
        return inputs

    trainer._generate_and_score_completions = foreign
    before = state(trainer)
    with pytest.raises(trl_replay.AttachError, match=r"replaced by test_attach\.|replaced by .*foreign"):
        trl_replay.attach(trainer)
    assert state(trainer) == before


def test_detach_refuses_when_something_was_patched_on_top(trainer):
    trl_replay.attach(trainer)
    ours = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: ours(model, inputs)
    before = state(trainer)
    with pytest.raises(trl_replay.AttachError, match="_compute_loss was replaced by"):
        trl_replay.detach(trainer)
    assert state(trainer) == before
    trainer._compute_loss = ours
    trl_replay.detach(trainer)


def test_a_patch_on_top_of_the_log_probs_is_refused_in_the_first_loss(trainer):
    """Stored log-probs would be those without the patch, and the loss would compare them with those of the patch."""
    trl_replay.attach(trainer)
    ours, before = trainer._get_per_token_logps_and_entropies, weights_hash(trainer)

    def halved(*args, **kwargs):
        logps, *others = ours(*args, **kwargs)
        return (logps / 2, *others)

    trainer._get_per_token_logps_and_entropies = halved
    with pytest.raises(trl_replay.SeamError, match=r"replaced by .*halved.* Make that replacement on the class"):
        trainer.train()
    assert weights_hash(trainer) == before


def test_a_class_patch_made_after_attach_still_applies(trainer, monkeypatch):
    trl_replay.attach(trainer)
    calls = []
    original = type(trainer)._calculate_rewards
    monkeypatch.setattr(
        type(trainer),
        "_calculate_rewards",
        lambda self, *args, **kwargs: calls.append(1) or original(self, *args, **kwargs),
    )
    trainer.train()
    assert len(calls) == 4


def test_an_untested_trl_is_refused_with_a_way_out(trainer, monkeypatch):
    monkeypatch.setattr(compat, "version", lambda name: "9.9.0")
    with pytest.raises(ContractError, match=f"{compat.UNTESTED_VARIABLE}=1"):
        trl_replay.attach(trainer)
    monkeypatch.setenv(compat.UNTESTED_VARIABLE, "1")
    trl_replay.attach(trainer)


def test_24_a_drifted_signature_is_refused_before_patching(tmp_path):
    from trl import GRPOTrainer

    class Drifted(GRPOTrainer):
        def _compute_loss(self, inputs, model):
            return super()._compute_loss(model, inputs)

    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=Drifted)
    before = state(trainer)
    with pytest.raises(ContractError, match=r"Drifted\._compute_loss takes \('inputs', 'model'\)"):
        trl_replay.attach(trainer)
    assert state(trainer) == before


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
MODELS = {
    "gpt2": ({"n_embd": 32, "n_layer": 1, "n_head": 2}, True),
    "opt": ({**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}, False),  # it takes positions from the mask
    "qwen2": ({**SIZES, "num_key_value_heads": 1}, False),
}
"""The sizes of a tiny model of each kind, and whether its log-probs change with the padding."""


@pytest.mark.parametrize("kind", MODELS)
def test_171_a_model_whose_log_probs_change_with_the_padding_is_warned_of_once(tmp_path, recwarn, kind):
    tokenizer = make_tokenizer()
    settings, changes = MODELS[kind]
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=1, pad_token_id=0, **settings
    )
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), model=AutoModelForCausalLM.from_config(config), max_steps=1)
    trainer.model.train()
    trainer.model.get_input_embeddings().eval()  # as a user has frozen it
    modes = [module.training for module in trainer.model.modules()]
    state = torch.get_rng_state()
    trl_replay.attach(trainer)
    assert sum("learned absolute positions" in str(one.message) for one in recwarn) == changes
    assert [module.training for module in trainer.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    if kind == "gpt2":
        recwarn.clear()
        trainer.train()
        assert not any("learned absolute positions" in str(one.message) for one in recwarn)


DEAD_LATER = ([LIVE, HALF, DEAD], [DEAD, DEAD, DEAD])


def interrupted(tmp_path, after=3, **settings):
    trainer = make_trainer(tmp_path, Rewards(*DEAD_LATER), trainer_class=Spy, **WINDOW, **settings)
    trainer.add_callback(Interrupt(after))
    return trainer


def test_replayed_rows_left_in_the_trainers_buffer_are_not_trained_on_after_detach(tmp_path):
    trainer = interrupted(tmp_path)
    with pytest.raises(KeyboardInterrupt), trl_replay.attached(trainer) as session:
        trainer.train()
    assert session.totals.counters["replaced"] > 0
    trainer.losses.clear()
    trainer.train()
    assert trainer.losses
    for loss in trainer.losses:
        assert ROWS not in loss["inputs"]
        assert bool((loss["inputs"]["advantages"] == 0).all()), "stock generated anew: its own dead groups"


def test_attaching_again_after_an_interrupted_window_trains(tmp_path):
    trainer = interrupted(tmp_path)
    with pytest.raises(KeyboardInterrupt), trl_replay.attached(trainer):
        trainer.train()
    with trl_replay.attached(trainer):
        trainer.train()
        trainer.train()


def test_detaching_in_a_callback_skips_no_other_callback(tmp_path):
    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    trainer, steps = make_trainer(tmp_path, Rewards(*DEAD_LATER), max_steps=3), []
    trl_replay.attach(trainer)
    trainer.add_callback(Act({1: lambda: trl_replay.detach(trainer)}))
    trainer.add_callback(Count())
    trainer.train()
    assert steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("given", "words"),
    [(64, "takes a ReplayConfig"), (GRPOConfig(use_cpu=True, bf16=False), "not a GRPOConfig: give")],
)
def test_what_is_no_replay_config_is_answered_in_one_line(trainer, given, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        trl_replay.attach(trainer, given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda trainer: trainer.args, "not a GRPOConfig: make the trainer first"),
        (lambda trainer: type(trainer), "not a type"),
        (lambda trainer: None, "not a NoneType"),
    ],
)
def test_what_is_no_trainer_is_answered_in_one_line(trainer, make, words):
    for function in (trl_replay.attach, trl_replay.detach):
        with pytest.raises(trl_replay.AttachError, match=f"{function.__name__}.. takes a trl.GRPOTrainer") as caught:
            function(make(trainer))
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def weak(trainer):
    """Objects that must be freed with the trainer."""
    return {
        "trainer": weakref.ref(trainer),
        "model": weakref.ref(trainer.model),
        "optimizer": weakref.ref(trainer.optimizer),
        "accelerator": weakref.ref(trainer.accelerator),
    }


def alive(references):
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize("scope", ["process", "gathered"])
def test_45_a_session_that_outlives_detach_keeps_neither_model_nor_optimizer_alive(tmp_path, scope):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3)
    with trl_replay.attached(trainer, replay_scope=scope, replay_start=0) as session:
        trainer.train()
    stored, replaced = len(session.buffer), session.totals.counters["replaced"]
    references = weak(trainer)
    del trainer
    assert alive(references) == []
    assert len(session.buffer) == len(session.buffer.held()) == stored > 0
    assert session.buffer.load(session.buffer.held()[0]).keys, "payload can be read"
    assert session.metrics["replay/size"] > 0
    assert f"{replaced:.0f} replaced" in session.explain()
    with pytest.raises(trl_replay.ReplayError, match="no longer exists"):
        _ = session.trainer
    parts = {name: weakref.ref(part) for name, part in (("session", session), ("tap", session.step.tap))}
    del session
    assert alive(parts) == []


def test_45_a_session_that_was_never_detached_keeps_them_alive_no_longer_than_the_trainer(tmp_path):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3)
    session = trl_replay.attach(trainer)
    trainer.train()
    references = weak(trainer)
    del trainer
    assert alive(references) == []
    assert "groups" in session.explain()


def test_45_a_detached_session_takes_no_more_groups(tmp_path):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    session = trl_replay.attach(trainer)
    trl_replay.detach(trainer)
    with pytest.raises(trl_replay.ReplayError, match="an attached session only"):
        session.add([])


@pytest.mark.parametrize("function", [copy.copy, copy.deepcopy, pickle.dumps])
def test_46_an_attached_trainer_refuses_to_be_copied(tmp_path, function):
    """A copy would have the methods of the original: it would train with the original's model, in silence."""
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    trl_replay.attach(trainer)
    with pytest.raises(TypeError, match=r"trl_replay\.detach\(trainer\)"):
        function(trainer)
    trl_replay.detach(trainer)
    assert copy.copy(trainer).model is trainer.model, "a detached one can be copied as before"


@pytest.mark.parametrize("before", [False, True])
def test_46_a_copy_made_in_another_way_is_refused_when_it_trains(tmp_path, before):
    """Made before attach it has the callbacks of the original; made after, its methods too."""
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)

    def copied():
        other = object.__new__(type(trainer))
        vars(other).update(vars(trainer))
        other.model = other.model_wrapped = make_model(make_tokenizer(), seed=5)
        return other

    other = copied() if before else None
    session = trl_replay.attach(trainer)
    other = other or copied()
    with pytest.raises(trl_replay.SeamError, match="copy of the trainer"):
        other.train()
    assert session.totals.batches == 0
    trainer.train()
    assert session.totals.batches == 2, "the original trains as before"


def test_46_a_block_does_not_detach_a_session_that_is_not_its_own(tmp_path):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    with trl_replay.attached(trainer):
        trl_replay.detach(trainer)
        other = trl_replay.attach(trainer)
    trainer.train()
    assert other.totals.batches == 2
    trl_replay.detach(trainer)


def test_46_a_block_that_fails_is_told_by_its_own_error(tmp_path):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))

    def fail():
        with trl_replay.attached(trainer):
            trl_replay.detach(trainer)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def detaching(hook, trainers):
    """A plugin that detaches when one hook has its result, once something was stored."""

    def act(self, context):
        result = yield
        if context.update == 2:
            trl_replay.detach(trainers[0])
        return result

    return type("Detaching", (), {f"trl_replay_{hook}": hookimpl(wrapper=True)(act)})()


@pytest.mark.parametrize("hook", ["select", "metrics"])
def test_52_detach_inside_a_hook_is_refused(tmp_path, plug, hook):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=4)
    plugin = plug(detaching(hook, [trainer]))
    trl_replay.attach(trainer, replay_plugins=plugin, replay_start=0, replay_buffer_size=1, replay_record="loss")
    with pytest.raises(trl_replay.ReplayError, match="detach between trainings"):
        trainer.train()


def test_52_detach_inside_a_reward_function_is_refused(tmp_path):
    scripted = Rewards(*SCRIPT)

    def rewards(completions, **kwargs):
        if scripted.calls == 2:
            trl_replay.detach(trainer)
        return scripted(completions, **kwargs)

    trainer = make_trainer(tmp_path, rewards, max_steps=4)
    trl_replay.attach(trainer, replay_start=0)
    with pytest.raises(trl_replay.AttachError, match="detach between trainings"):
        trainer.train()


@pytest.mark.parametrize("settings", [{"replay_buffer_size": 0}, {"use_replay": False}])
def test_31_no_room_or_no_replay_patches_nothing(trainer, settings):
    before = state(trainer)
    session = trl_replay.attach(trainer, **settings)
    assert state(trainer) == before
    assert not session.enabled
    trainer.train()
    assert len(session.buffer) == 0
    trl_replay.detach(trainer)


def test_replay_that_is_off_takes_any_trainer(tmp_path):
    tokenizer = make_tokenizer()
    trainer = Trainer(make_model(tokenizer), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    assert not trl_replay.attach(trainer, use_replay=False).enabled


def test_147_completions_without_a_limit_are_replayed(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]), max_completion_length=None, max_steps=2)
    session = trl_replay.attach(trainer, replay_start=0)
    trainer.generation_config.max_new_tokens = 4  # else up to the model's last position
    trainer.train()
    assert session.totals.counters["replaced"] > 0


def test_148_a_line_that_an_output_cannot_encode_ends_no_training(tmp_path, monkeypatch):
    """A file's name has signs that cp1252 lacks."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", output)
    trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), max_steps=10)
    session = trl_replay.attach(trainer)
    monkeypatch.setattr(session.reporting, "begins", lambda: "replay: 8 ≥ 7")
    trainer.train()
    output.flush()
    assert b"replay: 8 ? 7" in output.buffer.getvalue()


def test_149_task_columns_that_the_trainer_takes_out_are_refused(tmp_path):
    rows = [{"prompt": f"{number}=", "label": number} for number in range(3)]
    trainer = build(tmp_path, Rewards([DEAD, DEAD, DEAD]), rows, remove_unused_columns=True)
    with pytest.raises(RefusedError, match="remove_unused_columns=True takes 'label' out"):
        trl_replay.attach(trainer, replay_task_columns=["label"])
