"""Freshness for trl_replay: a group's worth halves with its age. Imports neither torch nor trl.

The module itself is the plugin `freshness`, found through its entry point:

* sampler `freshness/half_life` draws in proportion to score × 2^(−age / half_life)
* evictor `freshness/decayed` keeps the highest score × 2^(−age / half_life)
* scorer `freshness/abs_reward` is the mean |reward| of a group
* preset `freshness/reward_half_life` combines them in the spirit of FreshPER (arXiv 2604.16918)

The age of a group is the number of optimizer updates since it was generated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import (
    ConfigurationError,
    Context,
    EvictorSpec,
    Groups,
    Preset,
    SamplerSpec,
    ScorerSpec,
    Table,
    WeightedSampler,
    hookimpl,
)

__all__ = ["REWARD_HALF_LIFE", "abs_reward", "freshness", "make_decayed", "make_half_life"]

Floats: TypeAlias = NDArray[np.float64]
Evictor: TypeAlias = Callable[[Table, Context], Floats]

REWARD_HALF_LIFE = Preset(
    "reward_half_life",
    {
        "replay_max_fraction": 0.5,
        "replay_buffer_size": 512,
        "replay_scorer": "freshness/abs_reward",
        "replay_sampler": f"freshness/half_life(half_life={500 * math.log(2)})",  # exp(−age / τ) with τ = 500
        "replay_evictor": "fifo",
    },
    "|reward| × exp(−age / 500), at most half a batch: in the spirit of FreshPER",
)
"""In the spirit of FreshPER, "Freshness-Aware Prioritized Experience Replay" (arXiv 2604.16918).

Faithful: groups are drawn in proportion to (|r| + ε) · exp(−age / τ), decayed anew at every draw; τ = 500 and
ε = 1e-6 are the defaults of `reward_fresh` in the authors' code, as is first-in-first-out eviction of their buffer;
replay fills at most half of a batch.

Not faithful: groups are stored and drawn instead of trajectories, with |r| averaged over a group; only dead groups are
replaced, so that replay fills *up to* half of a batch instead of half of each; the exponent on the priority is 1, not
0.6; a newcomer has its own priority from the start, not the highest so far; a batch draws without replacement and
without strata; and the importance ratio to the policy that generated the tokens, clipped by the trainer's loss, takes
the place of PER's β weights. The decay is given as a half-life, τ ln 2 ≈ 347 updates: the same curve. Their segment
tree is a fast way to draw, not another distribution.
"""


def freshness(table: Table, context: Context, half_life: float) -> Floats:
    """max(score, 0) × 2^(−age / half_life) of each entry, `(len(table),)`."""
    age = context.update - table.update
    return np.asarray(np.maximum(table.score, 0.0) * np.exp2(-age / half_life))


def make_half_life(half_life: float = 10.0) -> WeightedSampler:
    """A sampler that draws in proportion to max(score, 0) × 2^(−age / half_life).

    Args:
        half_life (`float`, *optional*, defaults to `10.0`): Updates after which a group's chance has halved.
    """
    _check("half_life", half_life)

    return WeightedSampler(lambda table, context: freshness(table, context, half_life))


def make_decayed(half_life: float = 10.0) -> Evictor:
    """An evictor that keeps the highest max(score, 0) × 2^(−age / half_life).

    Args:
        half_life (`float`, *optional*, defaults to `10.0`): Updates after which a group's keep rank has halved.
    """
    _check("decayed", half_life)

    def rank(table: Table, context: Context) -> Floats:
        return freshness(table, context, half_life)

    return rank


def abs_reward(groups: Groups, context: Context) -> Floats:
    """Mean |weighted reward| over the scored rows of each group, plus ε = 1e-6."""
    reward = groups.reward_or_total
    scored = np.isfinite(reward)
    total = np.abs(np.where(scored, reward, 0.0)).sum(axis=1)
    return np.asarray(total / np.maximum(scored.sum(axis=1), 1) + 1e-6)


@hookimpl
def trl_replay_strategies() -> Iterator[SamplerSpec | EvictorSpec | ScorerSpec]:
    """The sampler, the evictor and the scorer."""
    yield SamplerSpec("half_life", make_half_life, "drawn in proportion to score × 2^(−age / half_life)")
    yield EvictorSpec("decayed", make_decayed, "the lowest score × 2^(−age / half_life) leaves")
    yield ScorerSpec("abs_reward", lambda: abs_reward, "mean |reward|")


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield REWARD_HALF_LIFE


def _check(name: str, half_life: float) -> None:
    if isinstance(half_life, bool) or not isinstance(half_life, int | float) or not half_life > 0:
        raise ConfigurationError(
            f"freshness/{name}: half_life={half_life!r} can't be used: give a number of updates above 0."
        )
