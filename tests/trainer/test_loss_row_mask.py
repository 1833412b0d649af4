"""`replay_unfilled`: what becomes of dead groups that nothing fills, through the real loss of every loss type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loss_by_hand import Row, reference_loss
from releases import since
from support import DEAD, HALF, LIVE, LOSSES, Rewards, Spy, real_tokens, record, rows_of
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import trl_replay
from trl_replay.loss.tap import ROWS
from trl_replay.testing import make_tokenizer, make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, DEAD, DEAD], [DEAD, LIVE, DEAD])
"""Nothing can be replayed in the first batch; one group at a time in the others, with the limit below."""


ONE = {"replay_max_fraction": 0.34}


def watch_losses(session: trl_replay.Session) -> list[float]:
    """Every loss from now on, as it leaves the seam."""
    losses: list[float] = []
    loss = session.tap.loss

    def watched(stock: Any, inputs: Any) -> Any:
        value = loss(stock, inputs)
        losses.append(float(value.detach()))
        return value

    session.tap.loss = watched  # type: ignore[method-assign]
    return losses


def train(
    tmp_path: Any, choice: str, script: Any = SCRIPT, replay: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, Any, list[Any], list[float]]:
    settings = {
        "max_steps": 4, "learning_rate": 2e-2, "max_completion_length": 5, "trainer_class": Spy,
        "gradient_checkpointing": False, **settings,
    }  # fmt: skip
    trainer = make_trainer(tmp_path, Rewards(*script), **settings)
    session = trl_replay.attach(trainer, replay_unfilled=choice, **ONE, **(replay or {}))
    steps, losses = record(session), watch_losses(session)
    trainer.train()
    return trainer, session, steps, losses


def by_hand(trainer: Any, loss: dict[str, Any], choice: str) -> list[Row]:
    """The rows of one loss as they should count: dead groups of the batch without weight, or not at all."""
    inputs, logps, mask = loss["inputs"], loss["logps"], loss["inputs"]["completion_mask"].bool()
    rows = []
    for index, (number, flags) in enumerate(inputs.rows.tolist()):
        silent = bool(flags & 2)
        if silent and choice == "exclude":
            continue
        new = logps[index][mask[index]]
        old = inputs["old_per_token_logps"][index][mask[index]] if number < 0 else new
        ref = inputs["ref_per_token_logps"][index][mask[index]] if "ref_per_token_logps" in inputs else None
        weight = torch.zeros_like(new) if silent else torch.ones_like(new)
        rows.append(Row(new, old, float(inputs["advantages"][index]), weight, ref))
    return rows


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("choice", ["mask", "exclude"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_the_one_computed_by_hand(tmp_path: Any, loss: str, choice: str, beta: float) -> None:
    trainer, _, steps, losses = train(tmp_path, choice, loss_type=loss, beta=beta)
    dead = [4, 8, 4, 4]  # rows of dead groups that nothing filled
    for at, (seen, value, (before, after)) in enumerate(zip(trainer.losses, losses, steps, strict=True)):
        flags = seen["inputs"].rows[:, 1]
        assert int((flags & 2).bool().sum()) == dead[at]
        rows = by_hand(trainer, seen, choice)
        assert len(rows) == 12 - dead[at] * (choice == "exclude")
        expected = reference_loss(trainer, rows)
        assert value == pytest.approx(expected, rel=2e-4, abs=2e-6)
        if choice == "exclude":
            live = [slot for slot in range(3) if not (after[ROWS][slot * 4, 1] & 2)]
            assert int(after["num_items_in_batch"]) == sum(
                int(rows_of(after, s)["completion_mask"].sum()) for s in live
            )
        assert before["prompt_ids"].shape[0] == after["prompt_ids"].shape[0] == 12


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
    _, _, steps, losses = train(tmp_path, "exclude", ([DEAD] * 3,), loss_type="dapo", beta=0.3)
    assert losses == [0.0] * 4
    for before, after in steps:
        assert after["num_items_in_batch"] is before["num_items_in_batch"]


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "luspo", "dapo", "bnpo"])
def test_exclude_over_several_micro_batches_divides_by_the_live_rows_of_them_all(tmp_path: Any, loss: str) -> None:
    trainer, _, _, losses = train(
        tmp_path, "exclude", loss_type=loss, per_device_train_batch_size=4, gradient_accumulation_steps=3, max_steps=1
    )
    assert len(losses) == 3
    parts = [by_hand(trainer, seen, "exclude") for seen in trainer.losses]
    rows = [row for part in parts for row in part]
    assert len(rows) == 8
    if loss == "bnpo":  # each micro-batch by its own tokens, as stock has it
        expected = sum(reference_loss(trainer, part) for part in parts if part)
    else:
        expected = reference_loss(trainer, rows, whole=True)
    assert sum(losses) == pytest.approx(expected, rel=2e-4, abs=2e-6)


class AuxiliarySpy(Spy):
    """Keeps the routers' auxiliary losses as stock computes them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.auxiliary: list[float] = []

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self.auxiliary += [float(result[2].detach())] if self.in_loss else []
        return result


@since("1.7.0", "the auxiliary loss")
def test_exclude_leaves_the_auxiliary_loss_as_it_is_in_every_micro_batch(tmp_path: Any) -> None:
    tokenizer = make_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, num_experts=4, moe_intermediate_size=32,
                shared_expert_intermediate_size=32, num_experts_per_tok=2, pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
            )
        )  # fmt: skip
    trainer, _, _, losses = train(
        tmp_path, "exclude", loss_type="grpo", trainer_class=AuxiliarySpy, model=model, router_aux_loss_coef=0.5,
        per_device_train_batch_size=2, gradient_accumulation_steps=6, max_steps=1,
    )  # fmt: skip
    silent = [bool((seen["inputs"].rows[:, 1] & 2).any()) for seen in trainer.losses]
    assert set(silent) == {True, False}
    rows = [row for seen in trainer.losses for row in by_hand(trainer, seen, "exclude")]
    expected = reference_loss(trainer, rows, aux=sum(trainer.auxiliary) / 6, whole=True)
    assert sum(losses) == pytest.approx(expected, rel=2e-4)


ROUNDED = {"num_iterations": 2, "replay": {"replay_logps_dtype": "bfloat16"}}


@pytest.mark.parametrize(
    "layout", [{}, {"num_iterations": 2}, ROUNDED], ids=["plain", "with stock's old log-probs", "stored in 16 bits"]
)
def test_intra_batch_fills_with_live_groups_of_the_same_batch(tmp_path: Any, layout: dict[str, Any]) -> None:
    trainer, session, steps, losses = train(
        tmp_path, "intra_batch", ([LIVE, DEAD, HALF], [DEAD, HALF, DEAD]), max_steps=4, **layout
    )
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
    if not layout:
        for seen, value in zip(trainer.losses, losses, strict=True):
            assert value == pytest.approx(reference_loss(trainer, by_hand(trainer, seen, "keep")), rel=2e-4)


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


def test_a_batch_without_a_live_group_stays_as_it_is(tmp_path: Any) -> None:
    _, _, steps, _ = train(tmp_path, "intra_batch", ([DEAD] * 3,))
    assert all(after[key] is value for before, after in steps for key, value in before.items())
