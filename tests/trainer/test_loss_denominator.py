"""`replay_unfilled`: what becomes of dead groups that nothing fills, through the real loss of every loss type."""

import pytest
import torch
from scenarios import UNFILLED, follow, train
from support import DEAD, HALF, LIVE, LOSSES, real_tokens, rows_of

from trl_replay.loss.supply import ROWS, SILENT

ALL_DEAD = [DEAD, DEAD, DEAD]
ONE = {"replay_max_fraction": 0.34}


@pytest.mark.parametrize("name", UNFILLED)
def test_the_loss_and_gradient_are_those_by_hand_with(tmp_path, name):
    trainer, _ = follow(tmp_path, name)
    silent = [int((seen["inputs"].rows[:, 1] & SILENT).bool().sum()) for seen in trainer.losses]
    assert silent == [4, 8, 4, 4], "rows of dead groups that nothing filled"


@pytest.mark.parametrize("loss", LOSSES)
def test_mask_takes_the_gradient_of_kl_and_entropy(tmp_path, loss):
    """A batch of dead groups alone trains nothing, though beta and the entropy bonus are not 0; as stock has it, it
    does."""
    norms = {}
    for choice in ("keep", "mask", "exclude"):
        settings = {"loss_type": loss, "beta": 0.3, "entropy_coef": 0.1, "max_steps": 2, "learning_rate": 2e-2}
        run = train(tmp_path / choice, ALL_DEAD, replaced=0, replay_unfilled=choice, **settings)
        norms[choice] = run.logged("grad_norm")
    assert norms["keep"][1] > 1e-3
    assert norms["mask"] == norms["exclude"] == [0.0, 0.0]


def test_excluding_all_groups_changes_no_denominator(tmp_path):
    run = train(tmp_path, ALL_DEAD, replaced=0, replay_unfilled="exclude", loss_type="dapo", beta=0.3)
    assert run.logged("loss") == [0.0] * 4
    for before, after in run.steps:
        assert after["num_items_in_batch"] is before["num_items_in_batch"]


@pytest.mark.parametrize("layout", [{}, {"num_iterations": 2}], ids=["plain", "with stock's old log-probs"])
def test_intra_batch_fills_with_live_groups_of_the_same_batch(tmp_path, layout):
    run = train(tmp_path, [LIVE, DEAD, HALF], [DEAD, HALF, DEAD], replay_unfilled="intra_batch", **ONE, **layout)
    steps = run.steps
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
    assert run.session.metrics["replay/dead_fraction_after"] == 0.0
    assert run.counters["stored"] == 1 + len(steps), "copies are not stored"


def test_intra_batch_copies_every_live_group_once_before_any_twice(tmp_path):
    settings = {"max_steps": 1, "per_device_train_batch_size": 24, "replay_unfilled": "intra_batch"}
    steps = train(tmp_path, [LIVE, DEAD, HALF, DEAD, DEAD, DEAD], replaced=0, **settings).steps
    ((before, after),) = steps
    sources = [
        next(live for live in (0, 2) if real_tokens(before, live) == real_tokens(after, slot)) for slot in (1, 3, 4, 5)
    ]
    assert sorted(sources[:2]) == sorted(sources[2:]) == [0, 2]


def test_3_a_batch_without_a_live_group_stays_as_it_is(tmp_path):
    steps = train(tmp_path, ALL_DEAD, replaced=0, replay_unfilled="intra_batch").steps
    assert all(after[key] is value for before, after in steps for key, value in before.items())
