"""attach, detach, attached: what they refuse, what they change, and that they change it back."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from support import DEAD, HALF, LIVE, Rewards, record, weights_hash

import trl_replay
from trl_replay import compat
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
    assert set(trainer.__dict__) - set(before[0]) == set(compat.SEAM)
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


def test_groups_that_straddle_processes_are_refused_with_the_numbers(tmp_path: Any, monkeypatch: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    monkeypatch.setattr(trainer.args, "per_device_train_batch_size", 6)
    with pytest.raises(trl_replay.RefusedError, match=r"6 rows .* num_generations=4"):
        trl_replay.attach(trainer)


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
    class Other:
        pass

    with pytest.raises(trl_replay.ContractError, match=r"Other\._generate_and_score_completions is not a method"):
        trl_replay.attach(Other())


def test_pause_is_stock_and_resume_replays_again(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE]), max_steps=2)
    session = trl_replay.attach(trainer)
    trainer.train()
    stored, replaced = len(session.buffer), session.totals.counters["replaced"]
    session.pause()
    steps = record(session)
    trainer.train()
    assert steps == []
    assert len(session.buffer) == stored
    session.resume()
    trainer.train()
    assert session.totals.counters["replaced"] > replaced


def test_clear_empties_the_buffer_and_training_fills_it_again(trainer: Any) -> None:
    session = trl_replay.attach(trainer)
    trainer.train()
    session.buffer.clear()
    assert len(session.buffer) == 0
    assert session.buffer.nbytes == 0
    trainer.train()
    assert len(session.buffer) > 0


def test_a_config_object_and_keywords_mean_the_same(trainer: Any) -> None:
    config = trl_replay.ReplayConfig(replay_evictor="fifo")
    with trl_replay.attached(trainer, config, replay_buffer_size=5) as session:
        assert (session.config.replay_evictor, session.config.replay_buffer_size) == ("fifo", 5)
    assert config.replay_buffer_size == 64, "the user's object is not changed"


def test_dropout_is_warned_of_once(tmp_path: Any) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, torch.nn.Dropout(0.1))
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), model=model)
    with pytest.warns(UserWarning, match="model has dropout") as caught:
        trl_replay.attach(trainer)
    assert len(caught) == 1
    trainer.train()  # warnings are errors: a second one would fail here


def test_the_summary_says_why_nothing_was_replayed(tmp_path: Any, capsys: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), max_steps=2)
    session = trl_replay.attach(trainer)
    assert "no generation batch" in session.explain()
    trainer.train()
    printed = capsys.readouterr().out
    assert "6 groups, 6 dead (100%), 0 replaced" in printed
    assert "nothing was replayed:" in printed
    assert "2 x the" in printed or "x the buffer was empty" in printed


LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"replay_min_size": 50}, "replay_min_size"),
    ({"replay_max_age": 1}, ""),
    ({"replay_max_uses": 1}, ""),
    ({"replay_max_fraction": 0.34}, "replay_max_fraction allows 1 of 3 groups"),
]


@pytest.mark.parametrize(("settings", "words"), LIMITS)
def test_each_limit_holds_and_is_named_where_it_held_back(tmp_path: Any, settings: dict[str, Any], words: str) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, HALF], [DEAD, DEAD, DEAD]), max_steps=5)
    session = trl_replay.attach(trainer, **settings)
    steps = record(session)
    trainer.train()
    counts = [int((after["trl_replay_rows"][:, 0] < 0).sum()) // 4 for _, after in steps]
    name = next(iter(settings))
    if name == "replay_min_size":
        assert sum(counts) == 0
    if name == "replay_max_age":
        assert counts == [0, 2, 0, 0, 0], "an entry older than one update is not replayed"
    if name == "replay_max_uses":
        assert counts == [0, 2, 0, 0, 0], "an entry is used once"
    if name == "replay_max_fraction":
        assert counts == [0, 1, 1, 1, 1]
    assert words in session.explain()


MIX = [
    (scorer, evictor, sampler, storage, correction)
    for number, scorer in enumerate(["advantage_std", "reward_std", "mean_reward", "pass_rate", "recency", "constant"])
    for evictor in ["heap", "fifo", "reservoir", "weighted_reservoir"]
    for sampler in ["proportional", "uniform", "top", "newest"]
    for storage, correction in [
        (("cpu", "ratio"), ("device", "none"), ("cpu", "none"), ("device", "ratio"))[number % 4]
    ]
]


@pytest.mark.parametrize("part", range(4))
def test_any_strategies_mix(tmp_path: Any, part: int) -> None:
    """Every scorer × evictor × sampler, with storages and corrections in turn."""
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, HALF, DEAD], [DEAD, LIVE, DEAD]), max_steps=4, max_completion_length=2
    )
    for scorer, evictor, sampler, storage, correction in MIX[part::4]:
        settings = {"replay_max_age": 3, "replay_max_uses": 2, "replay_min_size": 2, "replay_max_fraction": 0.7}
        with trl_replay.attached(
            trainer, replay_scorer=scorer, replay_evictor=evictor, replay_sampler=sampler, replay_storage=storage,
            replay_correction=correction, replay_buffer_size=2, **settings,
        ) as session:  # fmt: skip
            trainer.train()
        assert session.totals.counters["replaced"] > 0, (scorer, evictor, sampler)
        assert len(session.buffer) <= 2
