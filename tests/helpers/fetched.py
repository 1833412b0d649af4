"""What a collector of the loss's sums has to tell, fetched as a session does."""

from typing import Any

from trl_replay.loss.supply import fetch_sums


def metrics_of(source: Any) -> dict[str, float]:
    """Its metrics since the last call."""
    metrics: dict[str, float] = source.metrics(*fetch_sums([source.take()]))
    return metrics
