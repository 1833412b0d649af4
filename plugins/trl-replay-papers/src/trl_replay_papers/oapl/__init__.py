"""OAPL: the log ratio of a stored completion is regressed on its advantage (arXiv 2602.19362).

The module is the plugin `oapl`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trl_replay import Context, Corrected, CorrectionSpec, Preset, ReplayedRows, hookimpl
from trl_replay.protocols import Correction
from trl_replay.strategies.corrections import sequence_log_ratio

from ..arguments import above
from ..cards import text_of

SETTINGS: dict[str, Any] = {
    "replay_iterations": "replay",
    "replay_buffer_size": 64,
    "replay_scorer": "constant",
    "replay_evictor": "fifo",
    "replay_sampler": "uniform",
    "replay_correction": "oapl/oapl",
    "replay_start": 0,
}


def make_oapl(beta: float = 1e-3) -> Correction:
    """No ratio, and advantages of A − `beta` × the sum of log r over the row's trained tokens (OAPL, arXiv
    2602.19362).

    That is the gradient of −(beta Σ log r − A)² / (2 beta): the row's log ratio is regressed on A / beta.

    Args:
        beta (`float`): What pulls a row back to the policy that generated it, above 0.
    """
    beta = above("oapl", "beta", beta, 0.0)

    def oapl(rows: ReplayedRows, context: Context) -> Corrected:
        return Corrected(rows.logps, shift=-beta * sequence_log_ratio(rows))

    return oapl


@hookimpl
def trl_replay_strategies() -> Iterator[CorrectionSpec]:
    """The correction."""
    yield CorrectionSpec("oapl", make_oapl, "on-policy loss with advantages of A − beta × the row's log ratio")


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset("oapl", SETTINGS, "more updates a completion, log ratios regressed on advantages", text_of("oapl"))
