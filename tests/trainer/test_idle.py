"""With nothing to replay, and with replay off the cost side: bit-identical weights, no forward more."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from corrected import CORRECTIONS
from idle import ALL_DEAD, IDLE, LAYOUTS, PLUGINS, SCRIPT, Stock
from support import DEAD, LIVE, LOSSES, Forwards, Rewards, Spy, masked_rollout

import trl_replay
from trl_replay.testing import make_trainer


def test_the_loss_types_are_all_that_trl_has() -> None:
    from trl import GRPOConfig

    help_text = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    named = set(re.findall(r"'(\w+)'", help_text)) - {"sequence"}  # the help also names an importance level
    assert named == set(LOSSES), "TRL's loss types changed: test them here"


@pytest.fixture(scope="module")
def stock() -> Stock:
    return Stock()


@pytest.mark.parametrize("name", IDLE)
def test_idle_is_bit_identical_to_stock(tmp_path: Any, plug: Any, stock: Stock, name: str) -> None:
    """Weights, TRL's own log, and no forward more or less; live groups are stored where there is room."""
    for plugin, make in PLUGINS.items():
        plug(make(), plugin)
    differences, session = stock.differences(tmp_path, name)
    assert not differences
    assert (len(session.buffer) > 0) == IDLE[name].stores
    assert session.totals.counters["refused"] == 0


CORRECTED: list[dict[str, Any]] = [
    *({"replay_correction": name} for name in CORRECTIONS),
    {"replay_correction": "per", "replay_sampler": "proportional"},
    {"replay_max_weight": 1.01},
    {"replay_unfilled": "mask"},
    {"replay_unfilled": "exclude"},
    {"replay_unfilled": "intra_batch"},
]
"""What looks at log-probs of replayed rows or at what is left of dead groups."""


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        *((layout, [{}]) for layout in ("two iterations", "accumulation", "a reference model")),
        ("one iteration", CORRECTED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_replay_adds_no_forward_of_the_policy_or_the_reference(
    tmp_path: Any, layout: str, settings: list[dict[str, Any]]
) -> None:
    counts = []
    training = {**LAYOUTS[layout], "max_steps": 4, "max_completion_length": 4, "learning_rate": 0.0}
    for replay in (None, *settings):
        trainer = make_trainer(tmp_path, Rewards(*SCRIPT), **training)
        session = None if replay is None else trl_replay.attach(trainer, **replay)
        forwards = [Forwards(model) for model in (trainer.model, trainer.ref_model) if model is not None]
        trainer.train()
        assert session is None or session.totals.counters["replaced"] > 0
        counts.append([forward.counts for forward in forwards])
    assert counts == counts[:1] * len(counts)


class AroundTheTap(Spy):
    """A trainer with a loss that reads the old log-probs and never calls the tap, as the Liger loss up to TRL 1.13."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self.compute_liger_loss(model, inputs)

    def compute_liger_loss(self, model: Any, inputs: Any) -> Any:
        assert inputs["old_per_token_logps"].isfinite().all()
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return model(input_ids=ids).logits.float().mean()


@pytest.mark.parametrize(("script", "replaced"), [(SCRIPT, 2), ([ALL_DEAD], 0)], ids=["replayed", "nothing stored"])
def test_a_loss_around_the_tap_gets_one_forward_a_batch_chosen_at_attach(
    tmp_path: Any, script: Any, replaced: int
) -> None:
    """Whatever was drawn."""
    trainer = make_trainer(tmp_path, Rewards(*script), trainer_class=AroundTheTap, gradient_checkpointing=False)
    trainer.use_liger_kernel, trainer.rollout_func = True, masked_rollout  # which makes no forward
    session = trl_replay.attach(trainer)
    forwards = Forwards(trainer.model.base_model)  # with this setting, TRL 1.14's scoring calls it, not the model
    trainer.train()
    assert forwards.counts == {"grad": 4, "no grad": 4}
    assert session.totals.counters["replaced"] == replaced
    trl_replay.detach(trainer)
    with pytest.raises(trl_replay.RefusedError, match="replay_correction='none' needs the loss to call"):
        trl_replay.attach(trainer, replay_correction="none")


def test_23_with_a_learning_rate_of_0_replay_changes_no_completion(tmp_path: Any) -> None:
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
