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
    text = f"{type(error).__name__}: {error}" if error else ""
    errors = gather_object([text])
    if isinstance(error, ReplayError):
        raise error
    if any(errors):
        raise failure(join_errors(errors)) from error


def join_errors(errors: Sequence[str]) -> str:
    """The errors of all ranks, empty where there was none, in one sentence; of one process alone, its own words."""
    if len(errors) == 1:
        return errors[0]
    named = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
    return "; ".join(named)
