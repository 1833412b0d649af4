"""Numbers of a trainer's log, in memory or from an untrusted file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from ...data.counters import DRY_RUN, JUDGED_BY

Log: TypeAlias = Sequence[Mapping[str, Any]]
"""Its entries: metrics by name."""
Bounds: TypeAlias = tuple[float, float]
"""The least and the greatest share that there may be."""
DEAD = "frac_reward_zero_std"
"""TRL's metric of the share of dead groups; a run with replay logs an exact one."""
DEAD_EXACT = "replay/dead_fraction"
SUM = "reward"
"""TRL's name for the weighted sum of all reward functions."""
ROLLOUTS = "replay/rollouts"
COUNTED_STEP = "step (counted)"
"""In entries of a log that names no steps: theirs are their numbers."""
SCALED_BY_BATCH = (
    "If you set scale_rewards='batch' or multi_objective_aggregation='normalize_then_sum', TRL's frac_reward_zero_std "
    "does not count dead groups: run with replay_dry_run=True, which does."
)
"""What a log of TRL's alone does not tell, if it has few dead groups."""
LITTLE_DEAD = 0.2
"""Share of dead groups below which there is little to replace."""
ALL_WRONG, ALL_RIGHT = "replay/all_wrong_fraction", "replay/all_right_fraction"
LARGEST_WHOLE = 2**53
"""Numbers beyond it have no place on an axis."""
TINY = 1e-4
"""A rounding error."""


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value can be drawn: neither a text nor NaN, infinite or huge."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_WHOLE


def only_counted(log: Log) -> bool:
    """Tell whether all that replay logged is of a dry run."""
    told = [entry.get(DRY_RUN) == 1 for entry in log if DEAD_EXACT in entry]
    return bool(told) and all(told)


def steps(log: Log) -> list[Mapping[str, Any]]:
    """Return the entries that are of a step of GRPO. TRL's asynchronous trainer logs no share of dead groups: replay's
    takes its place."""
    named = [{DEAD: entry[DEAD_EXACT], **entry} if DEAD_EXACT in entry else entry for entry in log]
    return [entry for entry in named if DEAD in entry and is_number(entry.get("step"))]


def at_ends(count: int) -> int:
    """Return of how many logged steps the mean counts as the beginning, and the end, of a run: a tenth, but four where
    there are few."""
    return max(count // 10, min(4, count // 2), 1)


def functions(log: Log) -> list[str]:
    """Return the names of the reward functions that a log has means of."""
    found = [name[8:-5] for entry in log for name in entry if name.startswith("rewards/") and name.endswith("/mean")]
    return list(dict.fromkeys(found))


def judged_by(log: Log) -> str | None:
    """Return the `replay_reward` of a run with replay, or None."""
    names = (name for entry in log for name in entry if name.startswith(f"{JUDGED_BY}/"))
    return next((name.removeprefix(f"{JUDGED_BY}/") for name in names), None)


def points(log: Log, key: str) -> list[tuple[float, float]]:
    """Return `(step, value)` wherever the log holds numbers."""
    return [(entry["step"], entry[key]) for entry in log if is_number(entry.get("step")) and is_number(entry.get(key))]


def numbers(log: Log, key: str) -> list[float]:
    """Return a metric's values, without what is no number."""
    return [entry[key] for entry in log if is_number(entry.get(key))]


def mean(log: Log, key: str) -> float | None:
    """Return the mean of a metric's values; None without any."""
    values = numbers(log, key)
    return float(np.mean(values)) if values else None


def pays_0_or_1(log: Log) -> bool:
    """Tell whether every reward of a log of TRL's was 0 or 1, of one function: its mean and deviation show it, unless
    an entry averages several batches. One that was 1, or 0, throughout counts as well."""
    rewards = list[float]()
    for entry in log:
        reward = entry.get("reward")
        means = [name for name in entry if name.startswith("rewards/") and name.endswith("/mean")]
        deviation = entry.get(f"{means[0][:-5]}/std") if len(means) == 1 else None
        if not is_number(reward) or not is_number(deviation) or not -TINY <= reward <= 1 + TINY:
            return False
        variance = reward * (1 - reward)
        if abs(entry[means[0]] - reward) > TINY or not -TINY <= deviation**2 - variance <= variance + TINY:
            return False
        rewards.append(reward)
    return any(0 < reward < 1 for reward in rewards) or len({round(reward) for reward in rewards}) == 1


def dead_bounds(dead: float, reward: float) -> tuple[Bounds, Bounds]:
    """Bounds of the shares of groups that are all wrong, and all right, where every reward is 0 or 1.

    Args:
        dead (`float`): Share of dead groups.
        reward (`float`): The mean reward.
    """
    least_right = max(reward - (1 - dead), 0.0)
    most_right = min(reward, dead)
    return (dead - most_right, dead - least_right), (least_right, most_right)
