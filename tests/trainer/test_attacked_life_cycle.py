"""What an attack found about the life of a session: what it keeps alive, copies of its trainer, nested blocks, presets
over given settings, folders of each node, and the names of plugins."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.strategies import scopes
from trl_replay.testing import make_model, make_tokenizer, make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE])


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

    def __init__(self, accelerator: Any, names: Any) -> None:
        super().__init__(accelerator, names)
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


# what a session keeps


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
    with pytest.raises(trl_replay.AttachError, match="is detached"):
        session.buffer.add([])


# copies


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


# blocks


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
