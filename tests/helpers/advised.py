"""What rules say of a log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trl_replay import ReplayConfig
from trl_replay.extras.outcome.outcome import Outcome
from trl_replay.extras.outcome.rules import RULES, advise, what_to_change
from trl_replay.extras.outcome.run import Run

Log = Sequence[Mapping[str, Any]]


def outcome_of(log: Log, reward: str | None = None, **settings: Any) -> Outcome:
    """The outcome of a log whose settings are not known, but for those that are given."""
    return Outcome.of(Run.of_log(log, settings=settings), reward)


def with_settings(log: Log, **settings: Any) -> Outcome:
    """The outcome of a log whose settings are known: the defaults, but for these."""
    return outcome_of(log, **ReplayConfig(**settings).to_dict())


def rules_in(text: str) -> set[str]:
    """Names of the rules whose changes a text tells."""
    text = " ".join(text.split())
    return {rule.name for rule in RULES if re.split("NAME|RANGE", rule.change)[0].replace("`", "") in text}


def told_of(log: Log, **settings: Any) -> list[str]:
    """Names of the rules that a log is told, in their order."""
    return [name for each in advise(with_settings(log, **settings)) for name in rules_in(each.change)]


def said_of(log: Log, **settings: Any) -> str:
    """All that a log is told to change, in words."""
    return " ".join(what_to_change(with_settings(log, **settings)))


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
