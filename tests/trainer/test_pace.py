"""The time of generation in training passes, of a log of TRL's, and what further updates then cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trl_replay.cli import main
from trl_replay.extras.advice.pace import cost_of, in_words, passes_in
from trl_replay.extras.report.estimate import estimate


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


def test_a_log_of_trl_tells_it_where_batches_train_twice(tmp_path: Path, capsys: Any) -> None:
    assert passes_in(stock_log(7.0, 2.0)) == pytest.approx(2.5)
    log = stock_log(7.0, 2.0, train_runtime=16 * 4.5 + 16 * 0.5)
    assert passes_in(log) == pytest.approx(5.0 / 2.5), "half a second an update is in no step_time"
    (tmp_path / "log.json").write_text(json.dumps(log))
    assert estimate(tmp_path / "log.json").generation_passes == pytest.approx(2.0)
    assert main(["estimate", str(tmp_path / "log.json")]) == 0
    assert f"G{in_words(2.0)[1:]}." in " ".join(capsys.readouterr().out.split())
    assert passes_in([entry for entry in log if "reward" in entry]) is None, "all generate"
    assert passes_in(stock_log(2.0, 2.0)) is None
    assert passes_in(stock_log(7.0, 2.0, updates=8)) is None, "too few"
