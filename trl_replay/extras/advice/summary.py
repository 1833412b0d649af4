"""What a session's summary begins and ends with: what the run came to, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...reporting import Run
from .outcome import outcome_of
from .rules import of_caps, remedy_for_masks, what_to_change


class RunAdvisor:
    """The [`Advisor`] of every session."""

    def frame(self, run: Run) -> tuple[list[str], list[str]]:
        """Return the outcome, and what to change."""
        came_to = outcome_of(run.log, run.settings["replay_reward"])
        outcome = [f"outcome: {came_to}"] if came_to else []
        caps = of_caps(run.held_back, run.replaced, run.settings)
        return outcome, what_to_change(run.log, run.settings, caps) if run.log else []

    def remedy_for_masks(self, settings: Mapping[str, Any]) -> str:
        """Return what to change where all that is replayed is masked; nothing where the correction means to."""
        return remedy_for_masks(settings)
