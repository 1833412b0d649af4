"""Reports of the processes of `trl-replay run`, and the exit status that follows from them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from ...base.files import regular

NOT_ATTACHED = 91
"""The command succeeded, and replay was attached to no trainer."""
REFUSED = 93
"""Replay could not be attached to a trainer."""

SKIPPED = (
    "no Python that it started ran the hook: python -I, -E and -S skip it, and so does whatever starts its processes "
    "with an environment of its own (containers, sudo, ssh)"
)


@dataclass(frozen=True)
class Report:
    """One process's word: that it `started`, or that hooking `failed`; and of each trainer that it `attached`,
    `refused`, or was of a class that it can't attach to (`unseen`). One that can't be read is `spoilt`."""

    event: str
    python: str
    installed: bool = True  # trl_replay, in this Python
    reason: str = ""
    own: bool = False  # the script had attached by itself


class Verdict(NamedTuple):
    """The exit status, with its message."""

    status: int
    message: str | None = None


def read(folder: Path) -> list[Report]:
    """Read all reports of a run, the oldest first."""
    return [_read(path) for path in sorted(folder.glob("*.json"), key=lambda path: path.lstat().st_mtime_ns)]


def _read(path: Path) -> Report:
    """Read a report; any process of the command may have written it."""
    known = {fact.name: type(fact.default) for fact in fields(Report)} | {"event": str, "python": str}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        facts: Any = json.loads(regular(path).read_text())
        if isinstance(facts, dict) and facts.keys() >= {"event", "python"}:
            kept = {name: facts[name] for name in known if name in facts}
            if all(isinstance(value, known[name]) for name, value in kept.items()):
                return Report(**kept)
    return Report("spoilt", "", reason=path.name)


def judge(reports: Sequence[Report], status: int, misplaced: Sequence[str] = ()) -> Verdict:
    """Return the verdict on a command that ended with `status`.

    Args:
        reports: Of all its processes.
        status: 0 if it succeeded.
        misplaced: Settings of replay among its arguments.
    """
    refused = [report for report in reports if report.event == "refused"]
    if refused:
        reasons = _distinct(report.reason for report in refused)
        return Verdict(REFUSED, f"replay could not be attached to a GRPOTrainer of this command:\n{reasons}")
    attached = [report for report in reports if report.event == "attached"]
    unseen = _distinct(report.reason for report in reports if report.event == "unseen")
    if unseen and status == 0:
        return Verdict(NOT_ATTACHED, f"replay was not attached: {unseen}.")
    if not attached:
        return _nothing_attached(reports, status)
    if any(report.own for report in attached):
        return Verdict(status, "the script attaches replay by itself; its own settings were used, not the given ones.")
    if spoilt := _spoilt(reports):
        return Verdict(status, f"{spoilt}: whether one was without replay is unknown.")
    if misplaced:
        names = ", ".join(misplaced)
        return Verdict(
            status, f"{names} after -- went to the script, which does not attach with them: put them before --."
        )
    return Verdict(status)


def _nothing_attached(reports: Sequence[Report], status: int) -> Verdict:
    if status != 0:
        return Verdict(status, f"the command ended with status {status} before a GRPOTrainer trained.")
    failed = _distinct(report.reason for report in reports if report.event == "failed")
    started = [report for report in reports if report.event == "started"]
    without = _distinct(report.python for report in started if not report.installed)
    if spoilt := _spoilt(reports):
        reason = spoilt
    elif failed:
        reason = f"its processes could not set it up: {failed}"
    elif not started:
        reason = SKIPPED
    elif without:
        reason = f"it ran in a Python that has no trl_replay: {without}. Install trl-replay there"
    else:
        reason = "no GRPOTrainer trained in it"
    return Verdict(NOT_ATTACHED, f"replay was not attached: {reason}.")


def _spoilt(reports: Sequence[Report]) -> str:
    names = ", ".join(report.reason for report in reports if report.event == "spoilt")
    return f"a report of its processes can't be read ({names})" if names else ""


def _distinct(texts: Iterable[str]) -> str:
    """Deduplicate texts, since ranks report the same."""
    return "\n".join(dict.fromkeys(texts))
