"""What a session's summary begins and ends with: what the run came to, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...reporting import Advisor
from .outcome import Outcome
from .rules import RULES, healthy_before, what_to_change
from .run import Run


class RunAdvisor(Advisor):
    """The [`Advisor`] of every session."""

    def frame(
        self,
        log: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
        held_back: Mapping[str, int],
        replaced: int,
    ) -> tuple[list[str], list[str]]:
        """Return the lines before and after the summary of a run."""
        if not log:
            return [], []
        outcome = Outcome.of(Run.of_log(log, settings=settings, held_back=held_back, replaced=replaced))
        return [f"outcome: {outcome}"] if outcome.steps else [], what_to_change(outcome)

    def remedy_for_masks(self, settings: Mapping[str, Any]) -> str:
        """Return what to change where all that is replayed is masked; nothing where the correction means to."""
        (rule,) = (rule for rule in RULES if rule.name == "masked rows")
        applies = rule.applies({**settings, "masked replayed rows": 1.0})
        return rule.told(settings).replace("`", "") if applies else ""

    def healthy_before(self, history: Sequence[Mapping[str, Any]]) -> float | None:
        """Return the last logged step before a collapse that goes on."""
        return healthy_before(history)


make_advisor = RunAdvisor
