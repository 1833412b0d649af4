"""The time of generation in training passes, by a clock that tests advance, and what further updates then cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from generating import Coins
from scenarios import train
from support import logged
from trl import GRPOTrainer

import trl_replay
from trl_replay.base.pace import Pace, Spent
from trl_replay.cli import main
from trl_replay.extras.advice.pace import cost_of, in_words, passes_in
from trl_replay.extras.report.estimate import estimate
from trl_replay.testing import make_trainer

METRIC = "replay/generation_passes"


class Clock:
    """Stands still but where a test says otherwise."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Timed(GRPOTrainer):
    """Generating and scoring a batch takes 6 seconds, and a micro-batch 2; the first of each much longer."""

    clock = Clock()
    slow = 50.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.clock.now += 6.0 + self.slow if self.model.training else 1000.0
        return super()._generate_and_score_completions(inputs)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.clock.now += (2.0 + self.slow) if self.model.training else 1000.0
        self.slow = 0.0
        return super()._compute_loss(model, inputs)


LAYOUTS: dict[str, tuple[dict[str, Any], float]] = {
    "a batch an update": ({}, 3.0),
    "two updates a batch": ({"num_iterations": 2}, 3.0),
    "a batch in three micro-batches": (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, 1.0),
    "a pass in two updates": ({"per_device_train_batch_size": 6, "steps_per_generation": 2}, 1.5),
    "three batches an update": (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "steps_per_generation": 1}, 3.0),
    "dynamic sampling": ({"replay_refill_rounds": 2}, 3.0),
    "evaluation": ({"eval_strategy": "steps", "eval_steps": 2, "eval_prompts": ("1=",) * 4,
                    "per_device_eval_batch_size": 4}, 3.0),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_is_measured_in_passes_of_training_over_its_batch(tmp_path: Path, layout: str) -> None:
    """Neither the first update counts, nor further rounds, nor evaluation."""
    settings, expected = LAYOUTS[layout]
    settings = dict(settings)
    replay = {name: settings.pop(name) for name in list(settings) if name.startswith("replay_")}
    trainer = make_trainer(
        tmp_path, Coins(0.5), trainer_class=Timed, max_steps=12, gradient_checkpointing=False, **settings
    )
    session = trl_replay.attach(trainer, **replay)
    session.pace._clock = trainer.clock = Clock()
    trainer.train()
    passes = logged(trainer, METRIC)
    assert passes[-3:] == pytest.approx([expected] * 3)
    (told,) = [line for line in session.explain().splitlines() if line.startswith("generation takes")]
    alike = layout not in ("a pass in two updates", "three batches an update")
    assert told == in_words(expected, 2, "updates a batch" if alike else "passes over a batch")


def test_a_dry_run_tells_what_further_updates_cost_and_so_does_its_log(tmp_path: Path, capsys: Any) -> None:
    trainer = make_trainer(tmp_path, Coins(0.5), trainer_class=Timed, max_steps=12)
    session = trl_replay.attach(trainer, replay_dry_run=True)
    session.pace._clock = trainer.clock = Clock()
    trainer.train()
    told = (
        "eneration takes 3 training passes: two updates a batch cost 1.2 times the time; they pay if they save a "
        "fifth of the completions (with the old log-probs and the reference model of the preset sample_efficient: 1.4 "
        "times, and 29 %)"
    )
    assert told in session.explain()
    trainer.save_state()
    assert estimate(tmp_path).generation_passes == pytest.approx(3.0)
    assert main(["estimate", str(tmp_path)]) == 0
    assert f"G{told}." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("passes", "updates", "times", "saved"),
    [(4.1, 2, 6.1 / 5.1, 1 - 5.1 / 6.1), (1.0, 2, 1.5, 1 / 3), (0.0, 2, 2.0, 0.5), (5.0, 4, 1.5, 1 / 3)],
)
def test_a_batch_costs_its_generation_and_a_pass_for_each_update(
    passes: float, updates: int, times: float, saved: float
) -> None:
    assert cost_of(passes, updates) == pytest.approx((times, saved))


def test_two_further_forward_passes_cost_two_thirds_of_a_pass() -> None:
    """The preset's: old log-probs and the reference's; its table of evidence tells hours by 2.67 passes a batch."""
    assert cost_of(1.2, 2, forwards=2)[0] == pytest.approx((1.2 + 2.67) / 2.2, abs=2e-3)


def test_the_sentence_is_in_plain_words() -> None:
    assert in_words(4.1) == (
        "generation takes 4.1 training passes: two updates a batch cost 1.2 times the time; they pay if they save a "
        "sixth of the completions (with the old log-probs and the reference model of the preset sample_efficient: 1.3 "
        "times, and a quarter)"
    )
    assert "4 updates a batch" not in in_words(1.0, 4)
    assert "cost 1.8 times the time; they pay if they save 45 % of the completions (with" in in_words(0.2)
    assert "sample_efficient: 1.1 times, and 7 %)" in in_words(20.0)
    assert in_words(123.4).startswith("generation takes 123 training passes")


def stock_log(generating: float, training: float, updates: int = 16, **last: float) -> list[dict[str, Any]]:
    """A log of two updates a batch."""
    log: list[dict[str, Any]] = []
    for step in range(1, updates + 1):
        of_batch = {"frac_reward_zero_std": 0.5, "reward": 0.1} if step % 2 else {}
        log.append({"step": step, "step_time": generating if step % 2 else training, **of_batch})
    return [*log, {"step": updates, **last}] if last else log


def test_a_log_of_trl_tells_it_where_batches_train_twice(tmp_path: Path) -> None:
    assert passes_in(stock_log(7.0, 2.0)) == pytest.approx(2.5)
    log = stock_log(7.0, 2.0, train_runtime=16 * 4.5 + 16 * 0.5)
    assert passes_in(log) == pytest.approx(5.0 / 2.5), "half a second an update is in no step_time"
    (tmp_path / "log.json").write_text(json.dumps(log))
    assert estimate(tmp_path / "log.json").generation_passes == pytest.approx(2.0)
    assert passes_in([entry for entry in log if "reward" in entry]) is None, "all generate"
    assert passes_in(stock_log(2.0, 2.0)) is None
    assert passes_in(stock_log(7.0, 2.0, updates=8)) is None, "too few"
    assert passes_in([{"step": step, METRIC: value} for step, value in enumerate((9.0, 3.0, 1.0))]) == 3.0


def test_what_was_not_measured_is_not_told(tmp_path: Path) -> None:
    assert Spent(5.0, 1, 0.0, 0).passes(1) is None
    assert Spent(0.0, 0, 5.0, 3).passes(1) is None
    pace = Pace(Clock())
    pace.update_ends()
    with pace.scoring(), pace.generating():
        pass
    assert pace.spent == Spent()
    session = train(tmp_path, rewards=Coins(0.5)).session
    assert "generation takes" not in session.explain(), "too few updates"
