"""Doing something on every process: all of them go on, or all of them raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accelerate.utils import gather_object

from ..errors import ReplayError


def run_on_all_ranks(action: Callable[[], None], failure: type[ReplayError]) -> None:
    """Runs `action` on every process and waits for all; where it fails on one, all raise: our own errors, or
    `failure`."""
    error: Exception | None = None
    try:
        action()
    except Exception as caught:
        error = caught
    told = gather_object([f"{type(error).__name__}: {error}" if error else ""])
    if isinstance(error, ReplayError):
        raise error
    if any(told):
        raise failure(join_errors(told)) from error


def join_errors(told: Sequence[str]) -> str:
    """What every rank told, in one sentence; of one process alone, its own words."""
    if len(told) == 1:
        return told[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
