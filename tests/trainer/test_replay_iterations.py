"""Iterations 2 … num_iterations on groups drawn anew (`replay_iterations`), and whose KL term counts (`replay_kl`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from corrected import CORRECTIONS, MASKED, PROXIMAL
from loss_by_hand import reference_loss
from releases import since
from replaying import ITERATED as SCRIPT
from replaying import ITERATING as REPLAY
from replaying import Checked, Watch, build, check_batches, check_losses, iterate_corrected, replay
from resuming import digits, last, train
from support import DEAD, HALF, LIVE, LOSSES, Rewards, logged, record
from transformers import TrainerCallback

import trl_replay
from trl_replay.loss.micro_batch import EXCLUDED, ROWS, SILENT
from trl_replay.testing import make_trainer

RIGHT = [1.0, 1.0, 1.0, 1.0]
EXCLUDE = {"replay_unfilled": "exclude"}
WINDOWS = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 6}
TWO_UPDATES = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "per_device_train_batch_size": 6}
KL = {
    "all": None,
    "fresh": lambda replayed, wrong: not replayed,
    "all_wrong": lambda replayed, wrong: wrong and not replayed,
}


def trained(folder: Any, settings: dict[str, Any], **trainer: Any) -> tuple[Any, Any]:
    """By hand: every batch and every loss of a run with three iterations."""
    built = build(folder, Rewards(*SCRIPT), **{"num_iterations": 3, "max_steps": 14, **trainer})
    session, watch = replay(built, **{**REPLAY, **settings})
    return session, watch


def of_loss(loss: str) -> dict[str, str]:
    """Its settings: LUSPO's loss is that of sequences."""
    return {"loss_type": loss, "importance_sampling_level": "sequence" if loss == "luspo" else "token"}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_of_every_iteration_is_the_one_by_hand(tmp_path: Path, loss: str) -> None:
    session, watch = trained(tmp_path, {}, **of_loss(loss))
    assert watch.iterations >= 4
    assert session.totals.counters["iterated"] > 4


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", [WINDOWS, TWO_UPDATES], ids=["accumulation", "two updates"])
def test_the_losses_of_an_iterations_micro_batches_are_those_by_hand_together(
    tmp_path: Path, loss: str, layout: dict[str, Any]
) -> None:
    """A mean over rows is scaled by the rows of the whole iteration, so its micro-batches are compared together."""
    trainer = build(tmp_path, Rewards(*SCRIPT), num_iterations=3, max_steps=14, **of_loss(loss), **layout)
    session = trl_replay.attach(trainer, **REPLAY)
    watch = follow(trainer, session)
    trainer.train()
    check_batches(watch)
    assert session.totals.counters["iterated"] > 4
    if loss in ("dapo", "cispo", "vespo", "bnpo"):
        check_losses(trainer)
        return
    updates = 2 / trainer.args.gradient_accumulation_steps
    for first in range(0, len(trainer.compared) - 1, 2):
        found = sum(loss for loss, _, _ in trainer.compared[first : first + 2])
        together = trainer.by_hand[first] + trainer.by_hand[first + 1]
        expected = reference_loss(trainer, together, whole=True) * updates if together else 0.0
        assert math.isclose(found, expected, rel_tol=2e-4, abs_tol=2e-5), first


@pytest.mark.parametrize(
    ("correction", "level"),
    [
        *((name, "token") for name in (*CORRECTIONS, MASKED, PROXIMAL)),
        *((name, "sequence") for name in ("ratio", "none", "sequence_mask", "topr")),
    ],
)
def test_loss_and_gradient_of_every_iteration_are_those_by_hand_with(
    tmp_path: Path, correction: str, level: str
) -> None:
    iterate_corrected(tmp_path, correction, level)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_iterations_entries_have_the_weights_of_their_own_draw(tmp_path: Path, level: str) -> None:
    settings = {"loss_type": "grpo", "importance_sampling_level": level, "learning_rate": 2e-2}
    trainer = build(tmp_path, Rewards(*SCRIPT), num_iterations=3, max_steps=9, **settings)
    trainer.gradients, trainer.correction = True, "per"
    weighed = {"replay_correction": "per", "replay_correction_kwargs": {"beta": 0.5, "final_beta": 0.5}}
    session, _ = replay(trainer, replay_sampler="proportional", **weighed, **REPLAY)
    assert session.totals.counters["iterated"] > 4


@since("1.8.0", "the entropy bonus")
@pytest.mark.parametrize(
    ("loss", "quantile"),
    [
        *((loss, 1.0) for loss in LOSSES),
        ("grpo", 0.37),
        pytest.param(
            "dapo", 0.37, marks=since("1.10.0", "an entropy bonus that is a mean over the tokens it acts on")
        ),
    ],
)
@pytest.mark.parametrize(
    "settings", [REPLAY, {"replay_start": 0, "replay_unfilled": "exclude"}], ids=["empty", "dead"]
)
def test_78_the_entropy_bonus_is_the_mean_over_the_tokens_that_the_loss_divides_by(
    tmp_path: Path, loss: str, quantile: float, settings: dict[str, Any]
) -> None:
    trainer = build(
        tmp_path,
        Rewards(*SCRIPT),
        num_iterations=3,
        max_steps=9,
        entropy_coef=0.5,
        top_entropy_quantile=quantile,
        learning_rate=1e-2,
        **of_loss(loss),
    )
    trainer.gradients = True
    session = trl_replay.attach(trainer, replay_max_fraction=0.34, **settings)
    follow(trainer, session)
    trainer.train()
    assert session.totals.counters["excluded"] + session.totals.counters["iterated"] > 0
    assert max(trainer.gradient_errors) < 1e-3


def test_with_lora_every_iteration_is_the_one_by_hand(tmp_path: Path) -> None:
    from peft import LoraConfig

    targets = ["q_proj", "v_proj", "down_proj"]
    adapters = {"peft_config": LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")}
    session, _ = trained(tmp_path, {}, arguments=adapters, beta=0.1)
    assert session.totals.counters["iterated"] > 4


def follow(trainer: Any, session: Any) -> Watch:
    """From now on every batch and loss is compared with the one by hand."""
    watch = Watch(session, 4, trainer._tokenizer.pad_token_id)
    trainer.watch, trainer.compared = watch, []
    return watch


def referred(folder: Path, **settings: Any) -> Any:
    """A trainer with a reference model."""
    rewards = Rewards([LIVE, HALF, LIVE], [DEAD, RIGHT, LIVE], [RIGHT, HALF, DEAD])
    defaults = {"beta": 0.3, "num_iterations": 2, "max_steps": 10, "trainer_class": Checked}
    return make_trainer(folder, rewards, **{**defaults, **settings})


@pytest.mark.parametrize("kl", KL)
@pytest.mark.parametrize("iterations", ["same", "replay"])
@pytest.mark.parametrize("loss", ["dapo", "grpo", "bnpo"])
def test_the_kl_term_counts_of_the_rows_that_are_asked_for(
    tmp_path: Path, kl: str, iterations: str, loss: str
) -> None:
    trainer = referred(tmp_path, loss_type=loss)
    session = trl_replay.attach(
        trainer, replay_kl=kl, replay_iterations=iterations, replay_start=0, replay_selector="always",
        replay_selector_kwargs={"share": 0.7}, replay_record="loss",
    )  # fmt: skip
    watch = follow(trainer, session)
    watch.counts_kl = KL[kl]
    trainer.train()
    if kl == "all":
        check_batches(watch)
    check_losses(trainer)
    stored = session.entry(int(session.buffer.table.serial[0]))
    assert ("ref_per_token_logps" in session.buffer.load(stored.serial).keys) == (kl == "all")


def test_79_a_copy_of_a_live_group_has_its_reference_log_probs(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, HALF]), beta=0.3, max_steps=2)
    trl_replay.attach(trainer, replay_kl="fresh", replay_unfilled="intra_batch")
    trainer.train()
    first = logged(trainer, "kl")[0]
    assert first == pytest.approx(0.0, abs=1e-7), "the policy is the reference model before the first update"


def test_the_preset_sample_efficient_needs_two_settings_of_the_trainer_and_trains(tmp_path: Path) -> None:
    trainer = build(tmp_path, Rewards(*SCRIPT))
    with pytest.raises(trl_replay.RefusedError, match=r"beta=0: set beta(.|\n)*set num_iterations=2"):
        trl_replay.attach(trainer, replay_preset="sample_efficient")
    trainer = referred(tmp_path, loss_type="grpo", num_iterations=3, max_steps=9)
    session = trl_replay.attach(trainer, replay_preset="sample_efficient")
    trainer.correction = "topr"
    watch = follow(trainer, session)
    watch.counts_kl = KL["all_wrong"]
    trainer.train()
    check_losses(trainer)
    assert session.totals.counters["iterated"] > 0


def test_all_wrong_groups_stay_fresh_where_their_kl_counts(tmp_path: Path) -> None:
    """All-right groups are replaced."""
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, LIVE], [DEAD, RIGHT, LIVE]), beta=0.1, max_steps=4)
    session = trl_replay.attach(trainer, replay_kl="all_wrong", replay_start=0)
    steps = record(session)
    trainer.train()
    slots = [(batch[ROWS][:, 0] < 0).view(-1, 4).all(dim=1).tolist() for _, batch in steps]
    assert slots == [[False] * 3, [False, True, False], [False, True, False], [False, True, False]]


def test_137_a_selector_has_the_whole_batch_where_all_wrong_groups_stay(tmp_path: Path, plug: Any) -> None:
    seen = []

    class Seeing:
        @trl_replay.hookimpl
        def trl_replay_select(self, groups: Any) -> None:
            seen.append(len(groups))

    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, LIVE], [RIGHT, DEAD, LIVE]), beta=0.1, max_steps=4)
    session = trl_replay.attach(
        trainer, replay_kl="all_wrong", replay_start=0, replay_plugins=plug(Seeing()), replay_selector="always",
        replay_selector_kwargs={"share": 0.34}, replay_record="loss",
    )  # fmt: skip
    steps = record(session)
    trainer.train()
    assert seen == [3] * 4
    slots = [(batch[ROWS][:, 0] < 0).view(-1, 4).all(dim=1).tolist() for _, batch in steps]
    assert slots[1:] == [[True, False, False]] * 3, "a share of the batch is a group"


def test_81_where_all_wrong_groups_stay_fresh_explain_says_so(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, LIVE], [DEAD, LIVE, DEAD]), beta=0.1, max_steps=4)
    session = trl_replay.attach(trainer, replay_kl="all_wrong", replay_start=0)
    trainer.train()
    told = session.explain()
    assert "x all-wrong groups stay: replay_kl='all_wrong' trains their KL term" in told
    assert "the selector chose none" not in told


def test_82_a_pause_leaves_the_counts_of_rollouts_and_updates_right(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), num_iterations=2, max_steps=20)
    session = trl_replay.attach(trainer, **REPLAY)
    trainer.add_callback(Act(4, session.pause))
    trainer.add_callback(Act(16, session.resume))
    trainer.train()
    assert logged(trainer, "replay/rollouts")[-1] == 10 * 12
    assert logged(trainer, "replay/replay_ratio")[-1] == 2.0
    trl_replay.detach(trainer)
    assert session.template is None, "no batch is kept"


def test_a_composed_batch_that_is_trained_on_again_in_a_pause_has_its_correction(tmp_path: Path) -> None:
    trainer = build(tmp_path, Rewards(*SCRIPT), num_iterations=3, max_steps=6, learning_rate=2e-2)
    trainer.gradients, trainer.correction = True, "ratio"
    session = trl_replay.attach(trainer, **REPLAY)
    watch = follow(trainer, session)
    trainer.add_callback(Act(5, session.pause))  # after the second iteration of a batch, on groups drawn anew
    trainer.train()
    check_losses(trainer)
    assert len(watch.steps) > 1
    assert trainer.compared[5][2] > 0, "the third iteration trains on the replayed rows of the first"


def batches_drawn(session: Any) -> list[Any]:
    """From now on, the batch of each further iteration."""
    drawn: list[Any] = []
    iterate = session.iterate
    session.iterate = lambda template: drawn.append(iterate(template)) or drawn[-1]
    return drawn


def test_a_batch_of_a_further_iteration_holds_distinct_stored_groups_and_empty_slots(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]), num_iterations=2, max_steps=4)
    drawn = batches_drawn(trl_replay.attach(trainer, **REPLAY))
    trainer.train()
    for batch, groups in zip(drawn, (1, 2), strict=True):  # live groups so far: each may stand in a batch once
        stored = batch[ROWS][:, 0] < 0
        assert int(stored.sum()) == 4 * groups
        empty = (batch[ROWS][:, 1] & (SILENT | EXCLUDED)) == SILENT | EXCLUDED
        assert torch.equal(empty, ~stored)
        assert int(batch["num_items_in_batch"]) == int(batch["completion_mask"][stored].sum())
        assert len(set(map(tuple, batch["completion_ids"][stored].tolist()))) == 4 * groups


def test_generated_groups_are_counted_once_a_generation(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), num_iterations=3, max_steps=12)
    session = trl_replay.attach(trainer, **REPLAY)
    trainer.train()
    assert session.totals.batches == 4
    assert session.totals.counters["generated"] == session.totals.counters["groups"] == 12
    assert session.metrics["replay/rollouts"] == 48
    assert session.metrics["replay/replay_ratio"] == 3.0
    assert "drawn in further iterations" in session.explain()
    assert session.totals.counters["stored"] == sum(logged(trainer, "replay/stored")) == 4


@pytest.mark.parametrize(
    "evaluation", [{}, {"eval_strategy": "steps", "eval_steps": 1, "eval_prompts": ["1=", "12="]}]
)
def test_an_iteration_begins_once_also_where_the_trainer_evaluates(tmp_path: Path, evaluation: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, digits, num_iterations=3, max_steps=9, **evaluation)
    drawn = batches_drawn(trl_replay.attach(trainer, **REPLAY))
    trainer.train()
    assert len(drawn) == 6


def test_resumed_in_the_midst_of_iterations_trains_on(tmp_path: Path) -> None:
    """Stock generates anew at once; candidates settle there, and nothing drawn is restored."""
    settings = {"num_iterations": 4, "max_steps": 12, "save_steps": 6, **REPLAY}
    train(tmp_path, **{**settings, "max_steps": 6})
    resumed, session = train(tmp_path, resume=last(tmp_path), **settings)
    assert resumed.state.global_step == 12
    assert session.totals.counters["iterated"] > 0
    assert all(torch.isfinite(parameter).all() for parameter in resumed.model.parameters())


class Act(TrainerCallback):
    """Does something after an update."""

    def __init__(self, at: int, action: Any) -> None:
        self.at = at
        self.action = action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            self.action()


@pytest.mark.parametrize("at", [4, 5, 6])
@pytest.mark.parametrize("detaches", [False, True])
def test_where_replay_ends_in_the_midst_of_iterations_training_goes_on(
    tmp_path: Path, detaches: bool, at: int
) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), num_iterations=3, max_steps=12)
    session = trl_replay.attach(trainer, **REPLAY)
    trainer.add_callback(Act(at, (lambda: trl_replay.detach(trainer)) if detaches else session.pause))
    trainer.train()
    assert trainer.state.global_step == 12
    assert session.totals.counters["iterated"] > 0
    assert ("_prepare_inputs" in trainer.__dict__) != detaches


def test_nothing_is_wrapped_for_the_same_batch_again(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), num_iterations=2)
    trl_replay.attach(trainer)
    assert "_prepare_inputs" not in trainer.__dict__


@pytest.mark.parametrize(
    ("trainer", "settings", "words"),
    [
        ({}, {}, "num_iterations=1: set num_iterations=2"),
        (
            {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
            {},
            "does not divide steps_per_generation=1",
        ),
        (
            {"num_iterations": 2},
            {"replay_mixer": "inject", "replay_sampler": "same_prompt"},
            "use replay_mixer='whole'",
        ),
        ({"num_iterations": 2}, {"replay_unfilled": "intra_batch"}, "replay_unfilled='intra_batch' does not go"),
        ({"num_iterations": 2}, {"replay_buffer_size": 0, "replay_unfilled": "mask"}, "replay_buffer_size=0"),
        ({"num_iterations": 2}, {"replay_kl": "fresh"}, "beta=0: set beta"),
        (
            {"num_iterations": 2, "beta": 0.1},
            {"replay_kl": "all_wrong", "replay_unfilled": "mask"},
            "use replay_unfilled='keep'",
        ),
        (
            {"num_iterations": 2, "beta": 0.1},
            {"replay_kl": "all_wrong", "replay_refill_rounds": 2},
            "replay_kl='all_wrong'.*replay_refill_rounds=2.*use replay_refill_rounds=0",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_at_attach(
    tmp_path: Path, trainer: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    made = make_trainer(tmp_path, Rewards(*SCRIPT), **trainer)
    with pytest.raises(trl_replay.RefusedError, match=words):
        trl_replay.attach(made, **{**REPLAY, **settings})
