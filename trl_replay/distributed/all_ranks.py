"""Run an action on every process: all continue, or all raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from accelerate.utils import gather_object

from ..errors import ReplayError

Result = TypeVar("Result")


def run_on_all_ranks(
    action: Callable[[], Result], failure: type[ReplayError], alone: bool = False
) -> list[Result | None]:
    """Run `action` on every process and wait for all. If it fails on one, all raise: one of our errors unchanged,
    otherwise `failure`.

    Args:
        action (`Callable`): What to do.
        failure (`type`): What other errors become.
        alone (`bool`, *optional*): This process does it and waits for no other.

    Returns:
        What it gave on each process, in the order of ranks.
    """
    error: Exception | None = None
    result: Result | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    text = f"{type(error).__name__}: {error}" if error else ""
    gathered = [(text, result)] if alone else gather_object([(text, result)])
    errors = [text for text, _ in gathered]
    if isinstance(error, ReplayError):
        raise error
    if any(errors):
        raise failure(join_errors(errors)) from error
    return [result for _, result in gathered]


def join_errors(errors: Sequence[str]) -> str:
    """Join the errors of all ranks into one sentence; the error of one process stays unchanged."""
    if len(errors) == 1:
        return errors[0]
    named = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
    return "; ".join(named)
