"""Corrections: what the loss takes as old log-probs and weights of replayed rows. Each runs inside the loss."""

from __future__ import annotations

from ..types import Context, Corrected, ReplayedRows


def ratio(rows: ReplayedRows, context: Context) -> Corrected:
    """The importance ratio to the policy that generated the tokens, clipped by the trainer's own loss (PPO)."""
    return Corrected(old_logps=rows.behaviour_logps)


def none(rows: ReplayedRows, context: Context) -> Corrected:
    """No correction: replayed rows are trained on as if the current policy had generated them. For comparison only."""
    return Corrected(old_logps=rows.logps)
