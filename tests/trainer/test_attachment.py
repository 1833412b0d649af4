"""attach, detach, attached: what they refuse, what they change, and that they change it back."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEAD, HALF, LIVE, WINDOW, Interrupt, Rewards, Spy, weights_hash
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

import trl_replay
from trl_replay import ConfigurationError, ReplayConfig, compat, hookimpl
from trl_replay.loss.tap import ROWS
from trl_replay.strategies import scopes
from trl_replay.testing import make_model, make_tokenizer, make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE])


@pytest.fixture
def trainer(tmp_path: Any) -> Any:
    return make_trainer(tmp_path, Rewards(*SCRIPT))


def state(trainer: Any) -> tuple[dict[str, Any], list[Any]]:
    return dict(trainer.__dict__), list(trainer.callback_handler.callbacks)


def test_detach_restores_the_trainer_exactly(trainer: Any) -> None:
    before = state(trainer)
    methods = {name: getattr(type(trainer), name) for name in compat.SEAM}
    session = trl_replay.attach(trainer)
    assert set(trainer.__dict__) - set(before[0]) == {*compat.SEAM, "__getstate__"}
    assert session.trainer is trainer
    trl_replay.detach(trainer)
    assert state(trainer) == before
    assert {name: getattr(type(trainer), name) for name in compat.SEAM} == methods, "no class was touched"


def test_another_trainer_is_not_affected(trainer: Any, tmp_path: Any) -> None:
    other = make_trainer(tmp_path / "other", Rewards(*SCRIPT))
    before = state(other)
    trl_replay.attach(trainer)
    assert state(other) == before


def test_training_goes_on_as_stock_after_detach(tmp_path: Any) -> None:
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


def test_a_second_attach_and_a_second_detach_are_errors(trainer: Any) -> None:
    trl_replay.attach(trainer)
    with pytest.raises(trl_replay.AttachError, match="attached to this trainer already"):
        trl_replay.attach(trainer, replay_evictor="fifo")
    with pytest.raises(trl_replay.AttachError, match="attached to this trainer already"):
        trl_replay.attach(trainer, use_replay=False)
    trl_replay.detach(trainer)
    with pytest.raises(trl_replay.AttachError, match="not attached"):
        trl_replay.detach(trainer)


def test_a_foreign_override_is_refused_by_name(trainer: Any) -> None:
    def foreign(inputs: Any) -> Any:
        return inputs

    trainer._generate_and_score_completions = foreign
    before = state(trainer)
    with pytest.raises(trl_replay.AttachError, match=r"replaced by test_attach\.|replaced by .*foreign"):
        trl_replay.attach(trainer)
    assert state(trainer) == before


def test_detach_refuses_when_something_was_patched_on_top(trainer: Any) -> None:
    trl_replay.attach(trainer)
    ours = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: ours(model, inputs)
    before = state(trainer)
    with pytest.raises(trl_replay.AttachError, match="_compute_loss was replaced by"):
        trl_replay.detach(trainer)
    assert state(trainer) == before
    trainer._compute_loss = ours
    trl_replay.detach(trainer)


def test_a_class_patch_made_after_attach_still_applies(trainer: Any, monkeypatch: Any) -> None:
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


def test_the_trainer_is_held_weakly(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    session = trl_replay.attach(trainer)
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None
    with pytest.raises(trl_replay.ReplayError, match="no longer exists"):
        _ = session.trainer


def test_an_attached_trainer_refuses_to_be_pickled_or_copied_in_clear_words(trainer: Any) -> None:
    trl_replay.attach(trainer)
    for function in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"trl_replay\.detach"):
            function(trainer._compute_loss)


def test_pickling_and_the_saved_model_do_not_hold_the_seam(trainer: Any, tmp_path: Any) -> None:
    trl_replay.attach(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "training_args.bin").exists()


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"replay_evictor": "haep"}, trl_replay.UnknownNameError, "Did you mean 'heap'"),
    ({"replay_sampler_kwargs": {"alpha": -1}}, trl_replay.ConfigurationError, "alpha=-1"),
    ({"replay_sampler_kwargs": {"beta": 1}}, trl_replay.ConfigurationError, "replay_sampler_kwargs={'beta': 1}"),
    (
        {"replay_sampler_kwargs": {"alhpa": 1}},
        trl_replay.ConfigurationError,
        "replay_sampler_kwargs={'alhpa': 1} can't be used: the sampler 'prompt_balanced' has no argument 'alhpa'.",
    ),
    (
        {"replay_sampler_kwargs": {"alhpa": 1}},
        trl_replay.ConfigurationError,
        "Did you mean 'alpha'? It takes alpha=1.0.",
    ),
    (
        {"replay_evictor_kwargs": {"alpha": 1}},
        trl_replay.ConfigurationError,
        "the evictor 'prompt_balanced' has no argument 'alpha'. It takes no arguments.",
    ),
    (
        {"replay_scope": "sharded", "replay_scope_kwargs": {"slak": 1, "names": []}},
        trl_replay.ConfigurationError,
        "the scope 'sharded' has no arguments 'slak', 'names'. Did you mean 'slack'? It takes slack=8.",
    ),
    (
        {"replay_sampler": "heap"},
        trl_replay.UnknownNameError,
        "replay_sampler='heap': there is no sampler of that name. 'heap' is an evictor (replay_evictor).",
    ),
    ({"replay_buffer_sise": 3}, trl_replay.ConfigurationError, "Did you mean 'replay_buffer_size'"),
    ({"replay_buffer_size": -1}, trl_replay.ConfigurationError, "replay_buffer_size=-1"),
    ({"replay_max_fraction": 1.5}, trl_replay.ConfigurationError, "replay_max_fraction=1.5"),
    ({"replay_min_size": 65}, trl_replay.ConfigurationError, "replay_buffer_size=64"),
    ({"replay_plugins": ["absent"]}, trl_replay.UnknownNameError, "replay_plugins='absent'"),
    ({"replay_preset": "absent"}, trl_replay.UnknownNameError, "replay_preset='absent'"),
    ({"replay_storage": object()}, trl_replay.ConfigurationError, "which is no storage: it lacks put, get"),
    ({"replay_scorer": 3}, trl_replay.ConfigurationError, "which is no scorer"),
    ({"replay_evictor": "no.such:Thing"}, trl_replay.UnknownNameError, "can't be imported"),
]


@pytest.mark.parametrize(("settings", "error", "words"), REFUSALS)
def test_a_bad_setting_is_refused_with_the_trainer_untouched(
    trainer: Any, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    before = state(trainer)
    with pytest.raises(error) as caught:
        trl_replay.attach(trainer, **settings)
    assert words in str(caught.value)
    assert state(trainer) == before


def test_an_untested_trl_is_refused_with_a_way_out(trainer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(compat, "version", lambda name: "9.9.0")
    with pytest.raises(trl_replay.ContractError, match=f"{compat.UNTESTED_VARIABLE}=1"):
        trl_replay.attach(trainer)
    monkeypatch.setenv(compat.UNTESTED_VARIABLE, "1")
    trl_replay.attach(trainer)


def test_24_a_drifted_signature_is_refused_before_patching(tmp_path: Any) -> None:
    from trl import GRPOTrainer

    class Drifted(GRPOTrainer):
        def _compute_loss(self, inputs: Any, model: Any) -> Any:
            return super()._compute_loss(model, inputs)

    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=Drifted)
    before = state(trainer)
    with pytest.raises(trl_replay.ContractError, match=r"Drifted\._compute_loss takes \('inputs', 'model'\)"):
        trl_replay.attach(trainer)
    assert state(trainer) == before


def test_something_that_is_no_grpo_trainer_is_refused_by_what_it_lacks() -> None:
    class Other(Trainer):
        def __init__(self) -> None:
            pass

    with pytest.raises(trl_replay.ContractError, match=r"Other\._generate_and_score_completions is not a method"):
        trl_replay.attach(Other())


def test_a_config_object_and_keywords_mean_the_same(trainer: Any) -> None:
    config = trl_replay.ReplayConfig(replay_evictor="fifo")
    with trl_replay.attached(trainer, config, replay_buffer_size=5) as session:
        assert (session.config.replay_evictor, session.config.replay_buffer_size) == ("fifo", 5)
    assert config.replay_buffer_size == 64, "the user's object is not changed"


@pytest.mark.parametrize("name", ["auto", "builtin/auto"])
def test_a_scope_that_is_to_be_chosen_is_known_by_the_chosen_ones_name(trainer: Any, name: str) -> None:
    session = trl_replay.attach(trainer, replay_scope=name)
    assert session.config.replay_scope == "process"
    assert session.chosen_scope == "there is one process"


def test_dropout_is_warned_of_once(tmp_path: Any) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, torch.nn.Dropout(0.1))
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), model=model)
    with pytest.warns(UserWarning, match="model has dropout") as caught:
        trl_replay.attach(trainer)
    assert len(caught) == 1
    trainer.train()  # warnings are errors: a second one would fail here


DEAD_LATER = ([LIVE, HALF, DEAD], [DEAD, DEAD, DEAD])


def interrupted(tmp_path: Any, after: int = 3, **settings: Any) -> Any:
    trainer = make_trainer(tmp_path, Rewards(*DEAD_LATER), trainer_class=Spy, **WINDOW, **settings)
    trainer.add_callback(Interrupt(after))
    return trainer


def test_replayed_rows_left_in_the_trainers_buffer_are_not_trained_on_after_detach(tmp_path: Any) -> None:
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


def test_attaching_again_after_an_interrupted_window_trains(tmp_path: Any) -> None:
    trainer = interrupted(tmp_path)
    with pytest.raises(KeyboardInterrupt), trl_replay.attached(trainer):
        trainer.train()
    with trl_replay.attached(trainer):
        trainer.train()
        trainer.train()


def test_detaching_in_a_callback_skips_no_other_callback(tmp_path: Any) -> None:
    class Detach(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trl_replay.detach(trainer)

    class Count(TrainerCallback):
        steps: list[int] = []  # noqa: RUF012

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps.append(state.global_step)

    trainer = make_trainer(tmp_path, Rewards(*DEAD_LATER), max_steps=3)
    trl_replay.attach(trainer)
    trainer.add_callback(Detach())
    trainer.add_callback(Count())
    trainer.train()
    assert Count.steps == [1, 2, 3]


def test_attention_dropout_and_absolute_positions_are_warned_of(tmp_path: Any) -> None:
    tokenizer = make_tokenizer()
    trainer = make_trainer(tmp_path, Rewards(*DEAD_LATER), model=make_model(tokenizer, attention_dropout=0.3))
    with pytest.warns(UserWarning, match="model has dropout"):
        trl_replay.attach(trainer)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=1, pad_token_id=0)  # fmt: skip
    trainer = make_trainer(tmp_path, Rewards(*DEAD_LATER), model=GPT2LMHeadModel(config))
    with pytest.warns(UserWarning, match="learned absolute positions"):
        trl_replay.attach(trainer)


@pytest.mark.parametrize("given", [{"replay_buffer_size": 8}, 64, {}])
def test_something_else_than_a_config_is_refused_in_words(tmp_path: Any, given: Any) -> None:
    with pytest.raises(trl_replay.ConfigurationError, match="takes a ReplayConfig"):
        trl_replay.attach(make_trainer(tmp_path, Rewards(*DEAD_LATER)), given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda trainer: trainer.args, "not an object of type GRPOConfig: make the trainer first"),
        (lambda trainer: trainer.model, "not an object of type Qwen2ForCausalLM"),
        (lambda trainer: type(trainer), "not the class GRPOTrainer"),
        (lambda trainer: "model-name", "not an object of type str"),
        (lambda trainer: None, "not None"),
        (lambda trainer: ReplayConfig(), "not an object of type ReplayConfig"),
    ],
)
def test_what_is_no_trainer_is_answered_in_one_line(trainer: Any, make: Any, words: str) -> None:
    for function in (trl_replay.attach, trl_replay.detach):
        with pytest.raises(trl_replay.AttachError, match=f"{function.__name__}.. takes a trl.GRPOTrainer") as caught:
            function(make(trainer))
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 200


def test_the_trainers_own_config_in_the_place_of_ours_is_answered_in_one_line(trainer: Any) -> None:
    with pytest.raises(trl_replay.ConfigurationError, match="not an object of type GRPOConfig: give") as caught:
        trl_replay.attach(trainer, trainer.args)
    assert "\n" not in str(caught.value)


def weak(trainer: Any) -> dict[str, weakref.ref[Any]]:
    """What must be freed with the trainer."""
    return {
        "trainer": weakref.ref(trainer),
        "model": weakref.ref(trainer.model),
        "optimizer": weakref.ref(trainer.optimizer),
        "accelerator": weakref.ref(trainer.accelerator),
    }


def alive(references: dict[str, weakref.ref[Any]]) -> list[str]:
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


class Keeping(scopes.ProcessScope):
    """A third party's scope, which keeps the accelerator that it is given."""

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator)
        self.accelerator = accelerator


class KeepingPlugin:
    @trl_replay.hookimpl
    def trl_replay_strategies(self) -> Any:
        yield trl_replay.ScopeSpec("keeping", Keeping, "keeps the accelerator")


@pytest.fixture
def keeping() -> Any:
    trl_replay.register(KeepingPlugin(), "keeper")
    yield "keeper/keeping"
    trl_replay.unregister("keeper")


@pytest.mark.parametrize("scope", ["process", "gathered", "sharded", "third party"])
@pytest.mark.parametrize("block", [False, True])
def test_45_a_session_that_outlives_detach_keeps_neither_model_nor_optimizer_alive(
    tmp_path: Any, scope: str, block: bool, keeping: str
) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3)
    settings = {"replay_scope": keeping if scope == "third party" else scope, "replay_start": 0}
    if block:
        with trl_replay.attached(trainer, **settings) as session:
            trainer.train()
    else:
        session = trl_replay.attach(trainer, **settings)
        trainer.train()
        trl_replay.detach(trainer)
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


def test_45_a_session_that_was_never_detached_keeps_them_alive_no_longer_than_the_trainer(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3)
    session = trl_replay.attach(trainer)
    trainer.train()
    references = weak(trainer)
    del trainer
    assert alive(references) == []
    assert "groups" in session.explain()


def test_45_a_detached_session_takes_no_more_groups(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    session = trl_replay.attach(trainer)
    trl_replay.detach(trainer)
    with pytest.raises(trl_replay.ReplayError, match="an attached session only"):
        session.buffer.add([])


@pytest.mark.parametrize("function", [copy.copy, copy.deepcopy, pickle.dumps])
def test_46_an_attached_trainer_refuses_to_be_copied(tmp_path: Any, function: Any) -> None:
    """A copy would have the methods of the original: it would train with the original's model, in silence."""
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    trl_replay.attach(trainer)
    with pytest.raises(TypeError, match=r"trl_replay\.detach\(trainer\)"):
        function(trainer)
    trl_replay.detach(trainer)
    assert copy.copy(trainer).model is trainer.model, "a detached one can be copied as before"


@pytest.mark.parametrize("before", [False, True])
def test_46_a_copy_made_in_another_way_is_refused_when_it_trains(tmp_path: Any, before: bool) -> None:
    """Made before attach it has the callbacks of the original; made after, its methods too."""
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)

    def copied() -> Any:
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


def test_46_a_block_that_detached_already_ends_in_peace(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    with trl_replay.attached(trainer) as session:
        trainer.train()
        trl_replay.detach(trainer)
    assert session.totals.batches == 2


def test_46_a_block_does_not_detach_a_session_that_is_not_its_own(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    with trl_replay.attached(trainer):
        trl_replay.detach(trainer)
        other = trl_replay.attach(trainer)
    trainer.train()
    assert other.totals.batches == 2
    trl_replay.detach(trainer)


def test_46_a_block_that_fails_is_told_by_its_own_error(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))

    def fail() -> None:
        with trl_replay.attached(trainer):
            trl_replay.detach(trainer)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


class Detaching:
    """Detaches in one hook, once something was stored."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.trainer: Any = None

    def _in(self, hook: str, context: Any) -> None:
        if hook == self.hook and context.update == 2 and self.trainer is not None:
            trl_replay.detach(self.trainer)

    @hookimpl
    def trl_replay_select(self, groups: Any, context: Any) -> None:
        self._in("select", context)

    @hookimpl
    def trl_replay_sample(self, table: Any, count: int, context: Any) -> None:
        self._in("sample", context)

    @hookimpl
    def trl_replay_rank(self, table: Any, context: Any) -> None:
        self._in("rank", context)

    @hookimpl(wrapper=True)
    def trl_replay_compose(self, batch: Any, placements: Any, context: Any) -> Any:
        composed = yield
        self._in("compose", context)
        return composed

    @hookimpl
    def trl_replay_metrics(self, context: Any) -> dict[str, float]:
        self._in("metrics", context)
        return {}


@pytest.mark.parametrize("hook", ["select", "sample", "rank", "compose", "metrics"])
def test_52_detach_inside_a_hook_trains_on_the_trainers_own_batch(tmp_path: Path, plug: Any, hook: str) -> None:
    plugin = Detaching(hook)
    plugin.trainer = make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=Spy, max_steps=4)
    trl_replay.attach(plugin.trainer, replay_plugins=[plug(plugin)], replay_start=0, replay_buffer_size=1)
    plugin.trainer.train()
    assert "_compute_loss" not in plugin.trainer.__dict__, "it was detached"
    for loss in plugin.trainer.losses[2:]:
        assert "trl_replay_rows" not in loss["inputs"]
        assert loss["inputs"]["completion_ids"] is not None
    scored = plugin.trainer.scored[2]
    trained = plugin.trainer.losses[2]["inputs"]
    assert sorted(scored["advantages"].tolist()) == sorted(trained["advantages"].tolist()), "no row was exchanged"


def test_52_detach_inside_a_reward_function_ends_in_peace(tmp_path: Path) -> None:
    scripted = Rewards(*SCRIPT)

    def rewards(completions: list[str], **kwargs: Any) -> list[Any]:
        if scripted.calls == 2:
            trl_replay.detach(trainer)
        return scripted(completions, **kwargs)

    trainer = make_trainer(tmp_path, rewards, max_steps=4)
    trl_replay.attach(trainer, replay_start=0)
    trainer.train()
    assert trainer.state.global_step == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"replay_weight": 1e39},
        {"replay_max_weight": 1e39},
        {"replay_samples_per_insert": 1e308},
        {"replay_correction": "truncated", "replay_correction_kwargs": {"cap": 1e300}},
        {"replay_correction": "shaped", "replay_correction_kwargs": {"gamma": 1e300}},
    ],
)
def test_55_numbers_that_no_weight_can_be_are_refused_at_attach(tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    with pytest.raises(ConfigurationError, match=r"can't be used: .*give a number"):
        trl_replay.attach(trainer, **settings)


@pytest.mark.parametrize("settings", [{"replay_buffer_size": 0}, {"use_replay": False}])
def test_31_no_room_or_no_replay_patches_nothing(trainer: Any, settings: dict[str, Any]) -> None:
    before = state(trainer)
    session = trl_replay.attach(trainer, **settings)
    assert state(trainer) == before
    assert not session.enabled
    trainer.train()
    assert len(session.buffer) == 0
    trl_replay.detach(trainer)


def test_replay_that_is_off_takes_any_trainer(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    tokenizer = make_tokenizer()
    trainer = Trainer(make_model(tokenizer), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    assert not trl_replay.attach(trainer, use_replay=False).enabled
