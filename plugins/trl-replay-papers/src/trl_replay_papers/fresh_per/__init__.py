"""FreshPER: prioritised replay whose priorities fade with age (arXiv 2604.16918).

The module is the plugin `fresh_per`. The preset `freshness/reward_half_life` of trl-replay-freshness is a shorter
one after the same paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trl_replay import Context, Groups, Preset, SamplerSpec, ScorerSpec, Table, WeightedSampler, hookimpl

from ..arguments import above
from ..cards import text_of

EPSILON = 1e-6
SETTINGS: dict[str, Any] = {
    "replay_buffer_size": 4096,
    "replay_scorer": "fresh_per/mean_abs_reward",
    "replay_evictor": "fifo",
    "replay_sampler": "fresh_per/fading",
    "replay_correction": "per(beta=0.4, final_beta=1.0, updates=1000)",
    "replay_max_fraction": 0.5,
    "replay_start": 0,
}


def make_fading(alpha: float = 0.6, tau: float = 500.0) -> WeightedSampler:
    """Draw in proportion to (score × exp(−age / tau))^alpha, age in optimizer updates.

    Args:
        alpha (`float`, *optional*, defaults to `0.6`): Exponent of the priority.
        tau (`float`, *optional*, defaults to `500.0`): Updates in which a priority falls to 1/e.
    """
    above("fading", "alpha", alpha, 0)
    above("fading", "tau", tau, 0)

    def weights(table: Table, context: Context) -> NDArray[np.float64]:
        age = context.update - table.update
        faded = np.maximum(table.score, 0.0) * np.exp(-age / tau)
        return np.asarray(faded**alpha)

    return WeightedSampler(weights)


def mean_abs_reward(groups: Groups, context: Context) -> NDArray[np.float64]:
    """Mean |weighted reward| over the scored rows of each group, plus 1e-6."""
    reward = groups.reward_or_total
    scored = np.isfinite(reward)
    total = np.abs(np.where(scored, reward, 0.0)).sum(axis=1)
    return np.asarray(total / np.maximum(scored.sum(axis=1), 1) + EPSILON)


@hookimpl
def trl_replay_strategies() -> Iterator[SamplerSpec | ScorerSpec]:
    """The sampler and the scorer."""
    yield SamplerSpec("fading", make_fading, "drawn in proportion to (score × exp(−age / tau))^alpha")
    yield ScorerSpec("mean_abs_reward", lambda: mean_abs_reward, "mean |reward|")


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset(
        "fresh_per", SETTINGS, "|reward| × exp(−age / 500), to the power 0.6, with PER's weights", text_of("fresh_per")
    )
