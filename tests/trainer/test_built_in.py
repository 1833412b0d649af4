"""What the package has beside its core is named in one tuple: each name can be taken out, and another one added."""

import sys
from types import ModuleType

import pytest
from queued import Script, all_live, make_async_trainer, stand_in
from support import DEAD, HALF, LIVE, Rewards, weights_hash
from trl import GRPOTrainer

import trl_replay
from trl_replay import built_in
from trl_replay.built_in import BUILT_IN
from trl_replay.compat import Dialect
from trl_replay.errors import ContractError
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE], [LIVE, DEAD, DEAD])
(FILES,) = (name for name in BUILT_IN if "files" in name)


def without(monkeypatch, taken_out):
    monkeypatch.setattr(built_in, "BUILT_IN", tuple(name for name in BUILT_IN if name != taken_out))


def trained(folder, **settings):
    trainer = make_trainer(folder, Rewards(*SCRIPT), max_steps=3, save_strategy="steps", save_steps=2, **settings)
    session = trl_replay.attach(trainer, replay_start=0)
    trainer.train()
    assert session.totals.counters["replaced"]
    assert "replaced" in session.explain()
    trl_replay.detach(trainer)
    return weights_hash(trainer), session.buffer.table.serial.tolist()


@pytest.mark.parametrize("taken_out", BUILT_IN)
def test_a_trainer_trains_alike_without_a_built_in(tmp_path, monkeypatch, taken_out):
    expected = trained(tmp_path)
    without(monkeypatch, taken_out)
    assert trained(tmp_path) == expected


def test_an_asynchronous_trainer_without_its_distribution_is_refused_with_its_name(policy, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    trainer = make_async_trainer(tmp_path, policy, Script(all_live))
    monkeypatch.setattr(built_in, "_installed", lambda: ())
    queue = trainer.rollout_queue
    with pytest.raises(ContractError, match=r"without trl-replay-async: install it .*plugins/trl-replay-async"):
        trl_replay.attach(trainer)
    assert trainer.rollout_queue is queue


def test_files_without_their_built_in_are_refused(tmp_path, monkeypatch):
    without(monkeypatch, FILES)
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    session = trl_replay.attach(trainer)
    with pytest.raises(trl_replay.ReplayError, match="BUILT_IN reads and writes files"):
        session.add([{"prompt": "1=", "completion": "2", "reward": 1.0}])
    trl_replay.detach(trainer)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1=", "completion": "2", "reward": 1.0}')
    trl_replay.attach(trainer, replay_warm_start=str(rows))
    with pytest.raises(trl_replay.ReplayError, match="BUILT_IN reads and writes files"):
        trainer.train()


def renamed(batch, old, new):
    return {new if key == old else key: value for key, value in batch.items()}


class Renamed(GRPOTrainer):
    """Calls advantages otherwise, between scoring and the loss."""

    def _generate_and_score_completions(self, inputs):
        return renamed(super()._generate_and_score_completions(inputs), "advantages", "signals")

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, renamed(inputs, "signals", "advantages"))


class RenamedDialect(Dialect):
    def incoming(self, trainer, batch):
        return renamed(batch, "signals", "advantages")

    def outgoing(self, trainer, batch):
        return renamed(batch, "advantages", "signals")


def test_a_batch_of_another_layout_is_replayed_by_whoever_knows_it(tmp_path, monkeypatch):
    expected = trained(tmp_path)
    module = ModuleType("layout_of_a_test")
    module.make_dialect = lambda trainer: RenamedDialect() if isinstance(trainer, Renamed) else None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(built_in, "BUILT_IN", (*BUILT_IN, module.__name__))
    assert trained(tmp_path, trainer_class=Renamed) == expected


def test_unsloths_trainer_without_its_distribution_is_refused_with_its_name(tmp_path, monkeypatch):
    class _UnslothGRPOTrainer(GRPOTrainer):  # as Unsloth names it
        pass

    monkeypatch.setattr(built_in, "_installed", lambda: ())
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=_UnslothGRPOTrainer)
    with pytest.raises(ContractError, match="without trl-replay-unsloth: install it"):
        trl_replay.attach(trainer)
