"""What is wrong with a run for certain, and the one thing to change next, by the table of advice.md.

Every bound lies beyond our own runs that went well. What a log does not tell meets none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from ...reporting import Advisor, Told
from .outcome import ALL_RIGHT, ALL_WRONG, HIGHEST, LOWEST, REPLACED, TINY, Outcome
from .run import DEAD, DEAD_EXACT, REDRAWN, SUM, Run, is_number

FEWEST, LEAST = 8, 5
"""A log with fewer steps has no alarm. Shares are of the last quarter of the steps, five at least."""
UNLIKELY = 0.01
"""A chance below which dead groups do not explain that no gradient was logged."""
IDLE = 0.05
"""Share of groups that were replaced, refilled, or drawn in further updates, up to which replay did nothing."""


class Facts(dict[str, Any]):
    """Facts of a run by name. What is no name is a metric: its mean over the last steps, NaN where it was not logged.

    Args:
        outcome ([`Outcome`]): The run's; it has at least one step.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.outcome, run, steps = outcome, outcome.run, outcome.steps
        self.last = steps[-max(len(steps) // 4, LEAST) :]
        alone = outcome.parts if len(outcome.parts) > 1 else []
        fallen = [part for part in alone if part.trend == "fell"] if Outcome(run, SUM, SUM).trend == "rose" else []
        silent = [part for part in alone if part.trend == "flat" and max(map(abs, part.values)) <= TINY]
        best, end = outcome.best, outcome.means[-1]
        failed = self["replay/failed_rows"] * len(steps) / max(run.spent("completions")[-1], 1.0)
        apart = self[HIGHEST] + self[LOWEST] <= 1 + TINY  # else all rewards so far were equal
        super().__init__(
            best=best,
            end=end,
            fall=(best - end) / max(best - min(*outcome.means, 0.0), TINY) if outcome.trend == "fell" else 0.0,
            step=outcome.best_at,
            varied=self["entropy"] / max(*run.numbers("entropy"), TINY, 0.0),
            right=np.nan_to_num(self[ALL_RIGHT] if is_number(self[ALL_RIGHT]) else self[HIGHEST] * apart),
            told_apart=run.attached or ALL_WRONG in self.last[-1],
            live=min(entry[DEAD] for entry in steps) < 1,
            replaced=run.mean(REPLACED) or 0.0,
            redrawn=run.mean(REDRAWN) or 0.0,
            refilled=run.mean("replay/refilled_fraction") or 0.0,
            unscored=np.nanmax([np.mean([not is_number(entry.get(SUM, 0.0)) for entry in self.last]), failed]),
            fallen=", ".join(f"{part.name!r} fell ({part.way})" for part in fallen),
            unpaid=_either([part for part in silent if run.counts in (None, part.name)]),
            hidden=_either([part for part in alone if not run.counts and part not in silent and self._hides(part)]),
            width=2 * self["replay/sequence_drift_mean"],
        )

    def __missing__(self, metric: str) -> float:
        found = self.outcome.run.mean(metric, self.last)
        return nan if found is None else found

    def _hides(self, part: Outcome) -> bool:
        """Whether most groups are dead by a function, of 0 and c, that half of the completions pass at most, and not
        by the sum."""
        dead, fails = self[f"{DEAD_EXACT}/{part.name}"], self[part.key] <= self[f"rewards/{part.name}/std"]
        return bool(fails and dead >= 0.5 >= dead - self[f"replay/live_without/{part.name}"])

    @property
    def untaught(self) -> bool:
        """Whether nine in ten steps with a live group have no gradient. A gradient may be of a part of its groups:
        those may all have been dead."""
        live = [entry for entry in self.last if entry[DEAD] < 1 and "grad_norm" in entry]
        chances = [entry[DEAD] if entry["grad_norm"] == 0 else 0.0 for entry in live if not entry["grad_norm"] > 0]
        return len(chances) >= 0.9 * len(live) and bool(np.prod(chances) < UNLIKELY)

    @property
    def alarms(self) -> list[str]:
        """Names of what is wrong for certain."""
        return [name for name, (holds, _) in ALARMS.items() if len(self.outcome.steps) >= FEWEST and holds(self)]

    @property
    def state(self) -> list[str]:
        """Its values in the columns of the table."""
        run, dead, right = self.outcome.run, self[DEAD], self["right"]
        kinds = {
            "hidden": self["hidden"],
            "solved": right >= 0.5,
            "none": not self["live"],
            "summed": dead < 0.5 and len(run.functions) > 1 and not run.attached,
            "few": dead < 0.5,
            "half": np.nanmax([dead - right, self[ALL_WRONG], self[LOWEST]]) < 0.85,
            "failing": self["told_apart"],
            "unclear": True,
        }
        updates = run.updates_per_batch or nan
        counts = {"one": updates < 1.5, "several": updates >= 1.5, "unknown": True}
        idle = max(self["replaced"], self["redrawn"], self["refilled"]) <= IDLE
        replay = {"off": not run.attached, "dry": run.only_counted, "idle": idle, "acting": True}
        told = (next(name for name, holds in each.items() if holds) for each in (kinds, counts, replay))
        return [*(self.alarms[:1] or ["none"]), self.outcome.trend, *told]


ALARMS: Mapping[str, tuple[Callable[[Facts], object], str]] = {
    "no_gradient": (
        lambda run: run.untaught,
        "grad_norm is 0 or no number although groups are live: nothing is trained",
    ),
    "unscored": (lambda run: run["unscored"] >= 0.25, "many completions have no reward: every function returned None"),
    "tools": (
        lambda run: run["tools/failure_frequency"] >= 0.95,
        "{tools/failure_frequency:.0%} of the tool calls fail",
    ),
    "engine": (
        lambda run: run["sampling/sampling_logp_difference/mean"] >= 0.4,
        "vLLM's log-probs are {sampling/sampling_logp_difference/mean:.2g} nats a token from the trainer's",
    ),
    "cut_off": (
        lambda run: (
            run["replay/untrained_fraction"] >= 0.1
            or (
                run["completions/clipped_ratio"] >= 0.9
                and run["right"] <= 0.05
                and run.outcome.trend != "rose"
                and not run["completions/max_length"] < 64
            )
        ),
        "{completions/clipped_ratio:.0%} of the completions are cut off at max_completion_length",
    ),
    "collapsed": (
        lambda run: (
            run[DEAD] >= 0.95
            and run["right"] < 0.5
            and run["live"]
            and (run["fall"] >= 0.5 or (run["told_apart"] and run["varied"] <= 0.1))
        ),
        "the policy has collapsed, or prompts got harder: hardly a group is live; reward {end:.2g}, once {best:.2g}",
    ),
    "one_fell": (lambda run: run["fallen"], "{fallen} while the sum of the rewards rose"),
    "never_paid": (lambda run: run["unpaid"], "{unpaid} never paid a completion, and teaches nothing"),
    "evaluation": (
        lambda run: (
            run.outcome.trend == "rose"
            and len(found := run.outcome.evaluated) > 2
            and 0 <= max(found[-2:]) < 0.8 * max(found)
        ),
        "the reward on evaluation prompts fell, while that of training rose",
    ),
    "clipped": (
        lambda run: run["replay/clip_ratio"] >= 0.5 and run["width"] > 0,
        "the loss clips {replay/clip_ratio:.0%} of the replayed rows, which then train nothing",
    ),
    "weightless": (
        lambda run: run["replay/weight_negative"] < 0.05 and any(run.outcome.run.numbers("replay/weight_negative")),
        "stored failures have no weight any more ({replay/weight_negative:.2g} in the mean)",
    ),
}
"""By name, the first thing to see to first: whether it is so for certain, and what it is, with facts in braces."""
ROWS = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines()
TABLE = [[cell.strip() for cell in row.strip("|").split("|")] for row in ROWS if row.startswith("| ")][1:]
"""The values of a state, the one thing to do there, and the page that says why."""


def cells_of(state: Sequence[str]) -> list[list[str]]:
    """Return the lines of the table for a state: one."""
    wanted = [{"*", value} for value in state]
    return [row for row in TABLE if all(one & {*cell.split()} for one, cell in zip(wanted, row, strict=False))]


def what_to_change(outcome: Outcome) -> tuple[dict[str, str], str]:
    """Return what is wrong for certain, a line by the alarm's name, and the line of the table."""
    facts = Facts(outcome)
    ((*_, change, page),) = cells_of(facts.state)
    alarms = {name: f"alarm: {ALARMS[name][1].format_map(facts)}" for name in facts.alarms}
    return alarms, f"what to change: {change.format_map(facts)} (docs/{page})"


def _either(parts: Sequence[Outcome]) -> str:
    return " or ".join(repr(part.name) for part in parts)


def advise(log: Sequence[Mapping[str, Any]]) -> Told:
    """Return what a log tells."""
    outcome = Outcome.of(Run.of_log(log))
    return (f"outcome: {outcome}", *what_to_change(outcome)) if outcome.steps else ("", {}, "")


def make_advisor() -> Advisor:
    """Return the advisor of every session."""
    return advise
