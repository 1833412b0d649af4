"""A trainer that is held weakly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ReplayError

if TYPE_CHECKING:
    import weakref


def living(trainer: weakref.ref[Any]) -> Any:
    """Return the trainer of a session.

    Raises:
        ReplayError: It no longer exists.
    """
    found = trainer()
    if found is None:
        raise ReplayError(
            "The trainer of this session no longer exists. Keep a reference to it as long as you read entries or "
            "export them."
        )
    return found
