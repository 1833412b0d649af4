"""With nothing to replay, and with replay off the cost side: bit-identical weights, no forward more."""

import re

import pytest
from idle import IDLE, LAYOUTS, PLUGINS, SCRIPT, Stock
from support import DEAD, LIVE, LOSSES, Forwards, Rewards

import trl_replay
from trl_replay.testing import make_trainer

pytestmark = pytest.mark.generates


def test_the_loss_types_are_all_that_trl_has():
    from trl import GRPOConfig

    help_text = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    named = set(re.findall(r"'(\w+)'", help_text)) - {"sequence"}  # the help also names an importance level
    assert named == set(LOSSES), "TRL's loss types changed: test them here"


@pytest.fixture(scope="module")
def stock():
    return Stock()


@pytest.mark.parametrize("name", IDLE)
def test_idle_is_bit_identical_to_stock(tmp_path, plug, stock, name):
    """Weights, TRL's own log, and no forward more or less; live groups are stored where there is room."""
    for plugin, make in PLUGINS.items():
        plug(make(), plugin)
    differences, session = stock.differences(tmp_path, name)
    assert not differences
    assert (len(session.buffer) > 0) == IDLE[name].stores
    assert session.totals.counters["refused"] == 0


@pytest.mark.parametrize("layout", ["one iteration", "two iterations", "accumulation", "a reference model"])
def test_replay_adds_no_forward_of_the_policy_or_the_reference(tmp_path, layout):
    counts = []
    training = {**LAYOUTS[layout], "max_steps": 4, "max_completion_length": 4, "learning_rate": 0.0}
    for replay in (None, {}, {"replay_unfilled": "exclude", "replay_max_weight": 1.01}):
        trainer = make_trainer(tmp_path, Rewards(*SCRIPT), **training)
        session = None if replay is None else trl_replay.attach(trainer, **replay)
        forwards = [Forwards(model) for model in (trainer.model, trainer.ref_model) if model is not None]
        trainer.train()
        assert session is None or session.totals.counters["replaced"] > 0
        counts.append([forward.counts for forward in forwards])
    assert counts == counts[:1] * len(counts)


def test_23_with_a_learning_rate_of_0_replay_changes_no_completion(tmp_path):
    """Replay draws from generators of its own."""
    completions = []
    for attach in (False, True):
        rewards = Rewards([LIVE, DEAD, DEAD], [DEAD, DEAD, DEAD])
        trainer = make_trainer(tmp_path, rewards, learning_rate=0.0)
        session = trl_replay.attach(trainer, use_replay=attach)
        trainer.train()
        assert (session.totals.counters["replaced"] > 0) == attach
        completions.append(rewards.completions)
    assert completions[0] == completions[1]
