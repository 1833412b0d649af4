"""AsymRE: REINFORCE without a ratio, with a baseline a little below the mean reward (arXiv 2506.20520).

The module is the plugin `asymre`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trl_replay import Context, Corrected, CorrectionSpec, Preset, ReplayedRows, hookimpl
from trl_replay.protocols import Correction

from ..arguments import finite
from ..cards import text_of

SETTINGS: dict[str, Any] = {
    "replay_iterations": "replay",
    "replay_buffer_size": 64,
    "replay_scorer": "constant",
    "replay_evictor": "fifo",
    "replay_sampler": "uniform",
    "replay_correction": "asymre/asymre",
    "replay_start": 0,
}


def make_asymre(delta: float = 0.1) -> Correction:
    """No ratio, and advantages of A + `delta`: a baseline `delta` below the trainer's (AsymRE, arXiv 2506.20520).

    Args:
        delta (`float`): What is added to the advantage of every stored row, in the units of the advantages in force:
            TRL divides them by a standard deviation unless `scale_rewards="none"`, the paper does not.
    """
    delta = finite("asymre", "delta", delta)

    def asymre(rows: ReplayedRows, context: Context) -> Corrected:
        return Corrected(rows.logps, shift=rows.advantages.new_full(rows.ages.shape, delta))

    return asymre


@hookimpl
def trl_replay_strategies() -> Iterator[CorrectionSpec]:
    """The correction."""
    yield CorrectionSpec("asymre", make_asymre, "on-policy loss with advantages of A + delta")


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset("asymre", SETTINGS, "more updates a completion, without a ratio, with A + 0.1", text_of("asymre"))
