"""From TRL's batch and the tapped rewards to the row-level view of groups, and which groups are dead."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import compat
from ..types import Batch, Bools, Floats, Groups, Ints
from .compose import loss_mask, row_lengths
from .images import images_per_row

NOISE = 8 * float(np.finfo(np.float32).eps)
"""Relative float32 error allowed for a group's mean and differences; 8 eps covers the sums of TRL's usual group
sizes."""
STD_EPSILON = 1e-4
"""TRL adds this to a standard deviation before dividing."""


def describe(batch: Batch, first_row: int, num_generations: int, pad: int) -> dict[str, NDArray[Any]]:
    """What scopes share of this process's `B` fresh rows, all on the CPU: 8-byte columns of shape `(B,)`.

    Args:
        batch (`dict`): As TRL returns it.
        first_row (`int`): Index of the first row among the rows of all processes.
        num_generations (`int`): Rows of a group.
        pad (`int`): The pad token's id.
    """
    rows = np.arange(first_row, first_row + batch["advantages"].size(0))
    lengths = row_lengths(batch, pad)[1]
    trainable = loss_mask(batch).ne(0).sum(dim=1)
    return {
        "row": rows,
        "advantages": batch["advantages"].detach().double().cpu().numpy(),
        "lengths": lengths.cpu().numpy().astype(np.int64),
        "trainable": trainable.cpu().numpy().astype(np.int64),
        "items": compat.counted_items(batch, lengths, trainable).cpu().numpy().astype(np.int64),
        "images": images_per_row(batch),
        "prompt": _prompt_hashes(batch, rows % num_generations == 0),
    }


def blank(first_row: int, count: int) -> dict[str, NDArray[Any]]:
    """All columns that scopes share of `count` rows, without any information in them."""
    whole = (
        "lengths",
        "trainable",
        "items",
        "images",
        "prompt",
        "recorded",
        "nbytes",
        "overflow",
    )
    return {
        "row": np.arange(first_row, first_row + count),
        "advantages": np.zeros(count),
        "logps": np.zeros(count),
        **{name: np.zeros(count, np.int64) for name in whole},
    }


def view(
    rows: Mapping[str, NDArray[Any]],
    rewards: Floats,
    setup: compat.RewardSetup,
    size: int,
    step: int,
) -> Groups:
    """The fresh groups that a scope shares.

    Args:
        rows (`Mapping[str, NDArray]`): The columns of `describe`, of all rows shared.
        rewards (`(rows of all processes, functions)`): Raw rewards, NaN where None.
        setup ([`RewardSetup`]): How TRL made advantages of them.
        size (`int`): Rows of a group.
        step (`int`): Updates done so far.
    """
    everywhere = rewards.reshape(-1, size, rewards.shape[1])
    advantages = rows["advantages"].reshape(-1, size)
    mine = rows["row"][::size] // size
    return Groups(
        rewards=everywhere[mine],
        reward_weights=setup.weights,
        advantages=advantages,
        lengths=rows["lengths"].reshape(-1, size),
        trainable=rows["trainable"].reshape(-1, size),
        items=rows["items"].reshape(-1, size),
        dead=np.ptp(advantages, axis=1) <= advantage_noise(everywhere, setup)[mine],
        step=np.full(len(advantages), step, np.int64),
        prompt=rows["prompt"][::size],
    )


def advantage_noise(rewards: Floats, setup: compat.RewardSetup) -> Floats:
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
        varying = (divisor - STD_EPSILON > NOISE * weighted.max(axis=1)).sum(axis=1, keepdims=True)
        errors += (varying > 1) * 2 * np.nan_to_num(np.abs(normalised)).max(axis=1) * STD_EPSILON / divisor
        sums = np.nansum(normalised, axis=2)  # (n, G); TRL divides them by their deviation over the whole batch
        return np.asarray(
            (errors.sum(axis=1) + NOISE * np.abs(sums).max(axis=1)) / (_bessel_std(sums.ravel()) + STD_EPSILON)
        )
    error = NOISE * weighted.sum(axis=2).max(axis=1)
    if setup.scale == "none":
        return np.asarray(error)
    sums = np.where(
        np.isnan(rewards).all(axis=2),
        np.nan,
        np.nansum(rewards * setup.weights, axis=2),
    )
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


def _prompt_hashes(batch: Batch, wanted: Bools) -> Ints:
    """Per row a 63-bit hash of its prompt tokens, padding left out; 0 for rows that are not wanted."""
    index = torch.from_numpy(np.flatnonzero(wanted)).to(batch["prompt_ids"].device)
    ids: NDArray[np.int64] = batch["prompt_ids"][index].cpu().numpy().astype(np.int64)
    masks: Bools = batch["prompt_mask"][index].ne(0).cpu().numpy()
    digests = [
        hashlib.blake2b(row[mask].tobytes(), digest_size=8).digest() for row, mask in zip(ids, masks, strict=True)
    ]
    hashes = np.zeros(len(wanted), np.int64)
    hashes[wanted] = [int.from_bytes(digest, "little") >> 1 for digest in digests]
    return hashes
