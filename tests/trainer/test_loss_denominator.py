"""`replay_unfilled`: what becomes of dead groups that nothing fills, through the real loss of every loss type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replaying import Checked, Watch, check_losses
from support import DEAD, HALF, LIVE, LOSSES, Rewards, real_tokens, record, rows_of

import trl_replay
from trl_replay.loss.micro_batch import EXCLUDED, ROWS, SILENT
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, DEAD, DEAD], [DEAD, LIVE, DEAD])
"""Nothing can be replayed in the first batch; one group at a time in the others, with the limit below."""


ONE = {"replay_max_fraction": 0.34}


def train(tmp_path: Any, choice: str, script: Any = SCRIPT, **settings: Any) -> tuple[Any, Any, Watch]:
    """Trains, and compares every loss with the one by hand: of dead groups without weight, or without them at all."""
    replay = {name: settings.pop(name) for name in list(settings) if name.startswith("replay_")}
    settings = {"learning_rate": 2e-2, "max_completion_length": 5, "gradient_checkpointing": False, **settings}
    trainer = make_trainer(tmp_path, Rewards(*script), trainer_class=Checked, **settings)
    session = trl_replay.attach(trainer, replay_unfilled=choice, **ONE, **replay)
    watch = Watch(session, 4, trainer._tokenizer.pad_token_id)
    trainer.watch, trainer.compared = watch, []
    trainer.train()
    if choice != "intra_batch":  # of whose copies nothing tells where they are from
        check_losses(trainer, replays=False)
    return trainer, session, watch


@pytest.mark.parametrize("choice", ["mask", "exclude"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_the_one_computed_by_hand(tmp_path: Any, loss: str, choice: str) -> None:
    trainer, _, watch = train(tmp_path, choice, loss_type=loss, beta=0.3)
    silent = [int((seen["inputs"].rows[:, 1] & SILENT).bool().sum()) for seen in trainer.losses]
    assert silent == [4, 8, 4, 4], "rows of dead groups that nothing filled"
    for _, after in watch.steps:
        live = (after[ROWS][:, 1] & EXCLUDED) == 0
        assert int(after["num_items_in_batch"]) == int(after["completion_mask"][live].sum())


@pytest.mark.parametrize("loss", LOSSES)
def test_mask_takes_the_gradient_of_kl_and_entropy(tmp_path: Any, loss: str) -> None:
    """A batch of dead groups alone trains nothing, though beta and the entropy bonus are not 0; as stock has it, it
    does."""
    norms = {}
    for choice in ("keep", "mask", "exclude"):
        trainer, *_ = train(
            tmp_path / choice, choice, ([DEAD] * 3,), loss_type=loss, beta=0.3, entropy_coef=0.1, max_steps=2
        )
        norms[choice] = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert norms["keep"][1] > 1e-3
    assert norms["mask"] == norms["exclude"] == [0.0, 0.0]


def test_excluding_all_groups_changes_no_denominator(tmp_path: Any) -> None:
    trainer, _, watch = train(tmp_path, "exclude", ([DEAD] * 3,), loss_type="dapo", beta=0.3)
    assert [loss for loss, _, _ in trainer.compared] == [0.0] * 4
    for before, after in watch.steps:
        assert after["num_items_in_batch"] is before["num_items_in_batch"]


ROUNDED = {"num_iterations": 2, "replay_logps_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "layout", [{}, {"num_iterations": 2}, ROUNDED], ids=["plain", "with stock's old log-probs", "stored in 16 bits"]
)
def test_intra_batch_fills_with_live_groups_of_the_same_batch(tmp_path: Any, layout: dict[str, Any]) -> None:
    _, session, watch = train(tmp_path, "intra_batch", ([LIVE, DEAD, HALF], [DEAD, HALF, DEAD]), **layout)
    steps = watch.steps
    before, after = steps[0]
    assert real_tokens(after, 1) in (real_tokens(before, 0), real_tokens(before, 2))
    before, after = steps[1]
    filled = [slot for slot in (0, 2) if not bool((after[ROWS][slot * 4 : slot * 4 + 4, 0] < 0).any())]
    assert len(filled) == 1, "replay comes first"
    assert real_tokens(after, filled[0]) == real_tokens(before, 1)
    for key, value in rows_of(before, 1).items():
        width = value.size(1) if value.dim() > 1 else None
        kept = rows_of(after, filled[0])[key]
        shown = kept if width is None else (kept[:, -width:] if key.startswith("prompt") else kept[:, :width])
        assert torch.equal(shown, value), key
    assert bool((after[ROWS][filled[0] * 4 : filled[0] * 4 + 4, 0] == 0).all()), (
        "a copy counts as fresh and is no candidate"
    )
    for before, after in steps:
        added = int(after["completion_mask"].sum()) - int(before["completion_mask"].sum())
        assert int(after["num_items_in_batch"]) - int(before["num_items_in_batch"]) == added
    assert session.metrics["replay/dead_fraction_after"] == 0.0
    assert session.totals.counters["stored"] == 1 + len(steps), "copies are not stored"


def test_intra_batch_copies_every_live_group_once_before_any_twice(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, DEAD, HALF, DEAD, DEAD, DEAD]), max_steps=1, per_device_train_batch_size=24
    )
    session = trl_replay.attach(trainer, replay_unfilled="intra_batch")
    steps = record(session)
    trainer.train()
    ((before, after),) = steps
    sources = [
        next(live for live in (0, 2) if real_tokens(before, live) == real_tokens(after, slot)) for slot in (1, 3, 4, 5)
    ]
    assert sorted(sources[:2]) == sorted(sources[2:]) == [0, 2]


def test_3_a_batch_without_a_live_group_stays_as_it_is(tmp_path: Any) -> None:
    _, _, watch = train(tmp_path, "intra_batch", ([DEAD] * 3,))
    assert all(after[key] is value for before, after in watch.steps for key, value in before.items())
