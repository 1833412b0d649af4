"""Logs as TRL and replay write them, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trl_replay.extras.outcome.advice import what_to_change
from trl_replay.extras.outcome.outcome import Outcome
from trl_replay.extras.outcome.run import Run

Log = Sequence[Mapping[str, Any]]


def outcome_of(log: Log, reward: str | None = None) -> Outcome:
    """The outcome of a log."""
    return Outcome.of(Run.of_log(log), reward)


def alarms_in(log: Log) -> list[str]:
    """Names of the alarms of a log."""
    return list(what_to_change(outcome_of(log))[0])


def said_of(log: Log) -> str:
    """The last line that a log is told: what to change."""
    return what_to_change(outcome_of(log))[1]


def logged(count: int = 40, **values: Any) -> list[dict[str, Any]]:
    """Steps of a log of TRL's, whose rewards are 0 or 1; `values` of a step, or functions of it, with `__` for `/`."""
    log = []
    for step in range(1, count + 1):
        given = {name.replace("__", "/"): value(step) if callable(value) else value for name, value in values.items()}
        reward = given.pop("reward", 0.34)
        healthy = {
            "step": step, "loss": 0.0, "grad_norm": 0.3, "completions/clipped_ratio": 0.05, "entropy": 0.4,
            "completions/max_length": 256.0, "rewards/accuracy/mean": reward, "reward": reward, "reward_std": 0.4,
            "rewards/accuracy/std": max(reward * (1 - reward), 0.0) ** 0.5, "frac_reward_zero_std": 0.3,
            "num_tokens": 9000.0 * step, "step_time": 10.0, "epoch": step / 40,
        }  # fmt: skip
        log.append({**healthy, **given})
    return log
