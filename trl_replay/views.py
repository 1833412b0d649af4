"""From TRL's batch and the tapped rewards to the row-level view of groups, and which groups are dead."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .batch import loss_mask, row_lengths
from .types import Batch, Bools, Floats, Groups, Ints

NOISE = 8 * float(np.finfo(np.float32).eps)
"""Relative float32 error allowed for a group's mean and differences; 8 eps covers the sums of TRL's usual group
sizes."""
STD_EPSILON = 1e-4
"""TRL adds this to a standard deviation before dividing."""


@dataclass(frozen=True, slots=True)
class RewardSetup:
    """How the trainer turns rewards into advantages.

    Attributes:
        weights (`(functions,)` float64): The trainer's `reward_weights`.
        scale (`str`): `args.scale_rewards`: `"group"`, `"batch"` or `"none"`.
        aggregation (`str`): `args.multi_objective_aggregation`.
    """

    weights: Floats
    scale: str
    aggregation: str


def view(
    batch: Batch, rewards: torch.Tensor, setup: RewardSetup, num_generations: int, pad: int, step: int, rank: int = 0
) -> Groups:
    """This rank's fresh groups, all on the CPU.

    Args:
        batch (`dict`): As TRL returns it, this rank's `B` rows.
        rewards (`(ranks * B, functions)` tensor): What `_calculate_rewards` returned: the rows of all ranks.
        setup ([`RewardSetup`]): How TRL made advantages of them.
        num_generations (`int`): Rows of a group.
        pad (`int`): The pad token's id.
        step (`int`): Updates done so far.
        rank (`int`): This process's index.
    """
    shape = (-1, num_generations)
    everywhere = rewards.detach().double().cpu().numpy().reshape(*shape, rewards.size(1))
    count = batch["advantages"].size(0) // num_generations
    mine = slice(rank * count, (rank + 1) * count)
    raw = everywhere[mine]
    advantages = batch["advantages"].detach().double().cpu().numpy().reshape(shape)
    trainable = loss_mask(batch).ne(0).sum(dim=1).cpu().numpy().reshape(shape)
    lengths = row_lengths(batch, pad)[1].cpu().numpy().reshape(shape)
    return Groups(
        rewards=raw,
        reward_weights=setup.weights,
        advantages=advantages,
        lengths=lengths,
        trainable=trainable,
        dead=np.ptp(advantages, axis=1) <= advantage_noise(everywhere, setup)[mine],
        step=np.full(len(raw), step, np.int64),
        prompt=_prompt_hashes(batch, num_generations),
    )


def advantage_noise(rewards: Floats, setup: RewardSetup) -> Floats:
    """How far apart float noise alone can put the advantages of a group with equal rewards, `(n,)`.

    TRL subtracts means in float32 and divides by a standard deviation plus `STD_EPSILON`, so that rounding errors of
    1e-8 grow up to 10,000 times: eight rewards of 0.7 give advantages of 6e-4, eight of 100.1 give 0.07.

    Args:
        rewards (`(n, G, functions)`): Raw rewards, NaN where None, of all groups that TRL scaled together.
        setup ([`RewardSetup`]): TRL's normalisation.
    """
    weighted = np.nan_to_num(np.abs(rewards)) * np.abs(setup.weights)  # (n, G, functions)
    if setup.aggregation == "normalize_then_sum":
        divisor = _std(rewards) + STD_EPSILON  # (n, functions)
        normalised = (rewards - _mean(rewards)[:, None]) / divisor[:, None] * setup.weights
        errors = NOISE * weighted.max(axis=1) / divisor
        # functions that cancel out do so up to STD_EPSILON's share in their divisors, on both sides of the mean
        errors += 2 * np.nan_to_num(np.abs(normalised)).max(axis=1) * STD_EPSILON / divisor
        sums = np.nansum(normalised, axis=2)  # (n, G); TRL divides them by their deviation over the whole batch
        return np.asarray(
            (errors.sum(axis=1) + NOISE * np.abs(sums).max(axis=1)) / (_bessel_std(sums.ravel()) + STD_EPSILON)
        )
    error = NOISE * weighted.sum(axis=2).max(axis=1)
    if setup.scale == "none":
        return np.asarray(error)
    sums = np.where(np.isnan(rewards).all(axis=2), np.nan, np.nansum(rewards * setup.weights, axis=2))
    std = _bessel_std(sums.ravel()) if setup.scale == "batch" else _std(sums[:, :, None])[:, 0]
    return np.asarray(error / (std + STD_EPSILON))


def _mean(values: Floats) -> Floats:
    """Mean over axis 1 without NaN; 0 where there is nothing."""
    return np.asarray(np.nansum(values, axis=1) / np.maximum((~np.isnan(values)).sum(axis=1), 1))


def _std(values: Floats) -> Floats:
    """Bessel-corrected standard deviation over axis 1 without NaN; 0 with fewer than two values."""
    deviations = np.nan_to_num(values - _mean(values)[:, None])
    return np.asarray(np.sqrt((deviations**2).sum(axis=1) / np.maximum((~np.isnan(values)).sum(axis=1) - 1, 1)))


def _bessel_std(values: Floats) -> float:
    return float(_std(values[None, :, None])[0, 0])


def _prompt_hashes(batch: Batch, num_generations: int) -> Ints:
    """A 63-bit hash of the first row's prompt tokens of each group, padding left out."""
    ids: NDArray[np.int64] = batch["prompt_ids"][::num_generations].cpu().numpy()
    masks: Bools = batch["prompt_mask"][::num_generations].ne(0).cpu().numpy()
    digests = [
        hashlib.blake2b(row[mask].astype(np.int64).tobytes(), digest_size=8).digest()
        for row, mask in zip(ids, masks, strict=True)
    ]
    return np.array([int.from_bytes(digest, "little") >> 1 for digest in digests], dtype=np.int64)
