"""GRPO's advantages from the papers, group by group in plain Python; no code of TRL's or of trl_replay's is in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from replaying import Watch

EPSILON = 1e-4
"""What is added to a deviation before it divides."""
Rows = Sequence[Sequence[float]]
"""Rewards, one list a row."""


def scored(values: Sequence[float]) -> list[float]:
    """Without those that are None, which are NaN here."""
    return [value for value in values if not math.isnan(value)]


def mean(values: Sequence[float]) -> float:
    return sum(scored(values)) / max(len(scored(values)), 1)


def deviation(values: Sequence[float]) -> float:
    """Bessel-corrected; of one value 0."""
    center = mean(values)
    return math.sqrt(sum((value - center) ** 2 for value in scored(values)) / max(len(scored(values)) - 1, 1))


def total(row: Sequence[float], weights: Sequence[float]) -> float:
    return sum(scored([weight * value for weight, value in zip(weights, row, strict=True)]))


def normalized_sums(group: Rows, weights: Sequence[float]) -> list[float]:
    """Each function's rewards normalized within the group, and then summed (GDPO)."""
    columns = list(zip(*group, strict=True))
    sums = [0.0] * len(group)
    for weight, column in zip(weights, columns, strict=True):
        for number, value in enumerate(column):
            if not math.isnan(value):
                sums[number] += weight * (value - mean(column)) / (deviation(column) + EPSILON)
    return sums


def advantages(
    group: Rows, batch: Sequence[Rows], weights: Sequence[float], scale: str, aggregation: str
) -> list[float]:
    """Advantages of a group, with the mean and deviation of all groups of `batch` where those count."""
    if len(group) == 1:
        return [0.0]
    if aggregation == "normalize_then_sum":
        everything = [value for other in batch for value in normalized_sums(other, weights)]
        return [
            (value - mean(everything)) / (deviation(everything) + EPSILON) for value in normalized_sums(group, weights)
        ]
    totals = [total(row, weights) for row in group]
    divisor = {
        "group": deviation(totals) + EPSILON,
        "batch": deviation([total(row, weights) for other in batch for row in other]) + EPSILON,
        "none": 1.0,
    }[scale]
    return [(value - mean(totals)) / divisor for value in totals]


def mixed_advantages(
    watch: Watch, step: int, mode: str, weights: Sequence[float], scale: str, aggregation: str
) -> torch.Tensor:
    """`(B,)`: the advantages of a composed batch, from the rewards that its rows got when they were generated."""
    before, size = watch.steps[step][0], watch.size
    fresh = watch.rewards[step].tolist()
    batch = [fresh[begin : begin + size] for begin in range(0, len(fresh), size)]
    expected = before["advantages"].view(-1).tolist()
    parts: list[tuple[list[int], bool]] = []  # rows that are normalized together, and whether they are fresh alone
    rewards = dict(enumerate(fresh))
    for begin in range(0, len(fresh), size):
        rows = list(range(begin, begin + size))
        taken = {row: watch.source(*watch.taken[step][row]) for row in rows if row in watch.taken[step]}
        if not taken:
            continue
        one_entry = len({watch.taken[step][row][0] for row in taken}) == 1
        whole = len(taken) == size and one_entry
        if mode == "stored" or (mode == "auto" and whole):
            for row, (origin, source) in taken.items():
                expected[row] = float(watch.steps[origin][0]["advantages"].view(-1)[source])
            continue
        rewards |= {row: watch.rewards[origin][source].tolist() for row, (origin, source) in taken.items()}
        if mode == "split":
            parts += [(list(taken), False), ([row for row in rows if row not in taken], True)]
        else:
            parts.append((rows, False))
    for rows, is_fresh in parts:
        if not rows:
            continue
        mixed = [[rewards[row] for row in others] for others, other_fresh in parts if not other_fresh]
        within = batch if is_fresh else [*batch, *mixed]
        found = advantages([rewards[row] for row in rows], within, weights, scale, aggregation)
        for row, value in zip(rows, found, strict=True):
            expected[row] = value
    return torch.tensor(expected)
