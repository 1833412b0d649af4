"""The card of a model that was trained on replayed groups says so, and nothing else changes."""

import pytest
from support import DEAD, HALF, LIVE, Rewards, weights_hash
from trl import GRPOTrainer

import trl_replay
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, HALF, DEAD], [DEAD, DEAD, LIVE])


def trained(folder, **settings):
    trainer = make_trainer(folder, Rewards(*SCRIPT))
    trl_replay.attach(trainer, replay_start=0, **settings)
    trainer.train()
    trl_replay.detach(trainer)
    return trainer


def test_the_card_and_the_model_of_a_run_that_replayed_are_tagged(tmp_path):
    trainer = trained(tmp_path)
    trainer.create_model_card()
    assert "- trl-replay\n" in (tmp_path / "README.md").read_text()
    assert trainer.model.model_tags.count("trl-replay") == 1
    assert trainer._tag_names == ["trl", "grpo", "trl-replay"]
    assert GRPOTrainer._tag_names == ["trl", "grpo"], "another trainer's card is its own"


@pytest.mark.parametrize("settings", [{"use_replay": False}, {"replay_dry_run": True}, {"replay_max_fraction": 0.0}])
def test_a_run_in_which_nothing_was_replayed_is_not_tagged(tmp_path, settings):
    trainer = trained(tmp_path, **settings)
    assert "_tag_names" not in vars(trainer)
    assert "trl-replay" not in trainer.model.model_tags


@pytest.mark.parametrize("broken", ["raises", "is missing", "is no list"])
def test_a_model_that_cant_be_tagged_trains_to_the_same_bits(tmp_path, monkeypatch, broken):
    before = weights_hash(trained(tmp_path / "tagged"))
    make = make_trainer(tmp_path / "made", Rewards(*SCRIPT))
    if broken == "is no list":
        monkeypatch.setattr(GRPOTrainer, "_tag_names", None)
    else:
        attribute = property(lambda model: 1 / 0) if broken == "raises" else None
        monkeypatch.setattr(type(make.model), "add_model_tags", attribute, raising=False)
    trl_replay.attach(make, replay_start=0)
    make.train()
    assert weights_hash(make) == before
