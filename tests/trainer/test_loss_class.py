"""The class of ours that stands in front of the loss while it runs: where it stands, and that it is gone after it."""

import pytest
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards
from trl import GRPOTrainer

import trl_replay
from trl_replay.errors import ContractError
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])


class Noting(GRPOTrainer):
    """Notes its classes inside the loss and outside of it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.within = []
        self.outside = []

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.outside.append(type(self))
        return loss

    def _compute_loss(self, model, inputs):
        assert isinstance(self, Noting)
        self.within.append([base.__qualname__ for base in type(self).__mro__])
        return super()._compute_loss(model, inputs)


class Left(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs)


class Right(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs)


class Diamond(Noting, Left, Right):
    """An override on each way to TRL's class."""


def test_a_class_stands_in_front_of_trls_while_a_loss_runs_and_is_gone_after_it(tmp_path):
    trainer = train(tmp_path, *SCRIPT, trainer_class=Diamond, max_steps=3).trainer
    for names in trainer.within:
        assert names[:7] == ["Diamond", "Diamond", "Noting", "Left", "Right", "GRPOTrainer", "GRPOTrainer"]
    assert set(trainer.outside) == {Diamond}


def test_the_class_is_gone_after_a_loss_that_fails(tmp_path):
    class Failing(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            super()._compute_loss(model, inputs)
            raise ValueError("a loss of mine")

    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=Failing)
    trl_replay.attach(trainer)
    with pytest.raises(ValueError, match="a loss of mine"):
        trainer.train()
    assert type(trainer) is Failing


def test_another_trainer_of_the_same_class_keeps_its_class(tmp_path):
    replaying, stock = (make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=Noting) for _ in range(2))
    trl_replay.attach(replaying)
    stock.train()
    assert {names[1] for names in stock.within} == {"GRPOTrainer"}


class WithoutHeirs(GRPOTrainer):
    def __init_subclass__(cls):
        raise TypeError("no subclass of mine")


def test_a_class_that_allows_no_subclass_is_refused_at_attach(tmp_path):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=WithoutHeirs)
    before = dict(trainer.__dict__)
    with pytest.raises(ContractError, match=r"no subclass of it can be made.*no subclass of mine"):
        trl_replay.attach(trainer)
    assert (type(trainer), trainer.__dict__) == (WithoutHeirs, before)


class Slotted(GRPOTrainer):
    __slots__ = ("mine",)


def test_a_class_with_slots_trains(tmp_path):
    train(tmp_path, *SCRIPT, trainer_class=Slotted, max_steps=3)
