"""What a run came to: where the reward that counts began and ended, what was spent, and what became of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan

import numpy as np

from ...data.types import Floats
from .run import AXES, DEAD, DEAD_AFTER, REDRAWN, SUM, Entry, Run, generated, width_of

REPLACED, ESS = "replay/replaced_fraction", "replay/ess"
ALL_WRONG, ALL_RIGHT = "replay/all_wrong_fraction", "replay/all_right_fraction"
LOWEST, HIGHEST = "replay/lowest_fraction", "replay/highest_fraction"
TINY, RELATIVE = 1e-4, 1e-6
"""Rounding errors: of a logged share, and of a mean."""
SHARES = {
    "dead groups": DEAD,
    "all wrong": ALL_WRONG,
    "all right": ALL_RIGHT,
    "replaced": REPLACED,
    "dead groups trained on": DEAD_AFTER,
    "drawn anew in further updates": REDRAWN,
}
LEAST_TOLD = 5e-4
"""Of a share of which the log shows the least."""
MOST_TOLD = 4
"""Reward functions that are told one by one, where none is named."""
FEWEST_UPDATES = 8
"""Of each kind, by whose time the cost of generation is told."""
FEWEST_TO_TELL = 20
"""Logged steps without which it is not told whether a reward rose or fell."""
FALL, FALL_ERRORS, RISE_ERRORS = 0.1, 6.0, 4.0
"""A reward fell if it ends below its best by this share of its range, and by so many standard errors of a mean; it
rose by so many. Of 3,000 made logs of noise alone, fewer than 1 % do (of 40 steps or more)."""
FORWARD = 1 / 3
"""A forward pass without gradients, in training passes."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        run ([`Run`]): The run.
        name (`str`): The reward function that counts, or `"reward"`, the sum.
        key (`str`): Its mean in the log.
    """

    run: Run
    name: str
    key: str

    @classmethod
    def of(cls, run: Run, reward: str | None = None) -> Outcome:
        """Return it by the given reward function, or the one that counts in the run; on evaluation prompts, if
        nothing else tells, as further updates trained on stored groups alone.

        Raises:
            ReplayError: The given one was not logged.
        """
        name, key = run.key_of(reward)
        generated_once = len(run.steps) == 1 < len(run.trained)
        return cls(run, f"{name} on evaluation prompts", f"eval_{key}") if generated_once else cls(run, name, key)

    @cached_property
    def steps(self) -> list[Entry]:
        """The entries of new batches, with the least shares of all-wrong and all-right groups that a log of TRL's
        shows, where every reward is 0 or 1."""
        if self.run.attached or not pays_0_or_1(self.run):
            return self.run.steps
        return [
            {ALL_WRONG: max(entry[DEAD] - entry[SUM], 0.0), ALL_RIGHT: max(entry[DEAD] + entry[SUM] - 1, 0.0), **entry}
            for entry in self.run.steps
        ]

    @cached_property
    def values(self) -> Sequence[float]:
        """The reward that counts."""
        return self.run.points(self.key).values

    @property
    def evaluated(self) -> Sequence[float]:
        """Its values on evaluation prompts."""
        return self.run.points(f"eval_{self.key}").values

    @property
    def width(self) -> int:
        """Over how many steps its first, best, and last means are."""
        return width_of(len(self.values))

    @cached_property
    def means(self) -> Floats:
        """Its means over so many steps."""
        return np.array(self.run.curve(self.key).values or [0.0])

    @property
    def best(self) -> float:
        """The highest of them."""
        return float(self.means.max())

    @property
    def best_at(self) -> float:
        """The step where it is."""
        return [*self.run.curve(self.key).spent, nan][self.means.argmax()]

    @cached_property
    def error(self) -> float:
        """Standard error of such a mean, by how far values lie from the line through their neighbors (Gasser, Sroka,
        and Jennen-Steinmetz 1986), so that a trend is no noise."""
        bends = np.diff(self.values, 2)
        noise = np.sqrt((bends**2).sum() / 6 / max(len(bends), 1) / self.width)
        return float(noise + RELATIVE * np.abs(self.means).max())

    @property
    def rises(self) -> bool:
        """Whether it ends above where it began, beyond its error."""
        return bool(self.means[-1] - self.means[0] > RISE_ERRORS * self.error)

    @property
    def falls(self) -> bool:
        """Whether it ends below its best, beyond its error."""
        fall = self.best - self.means[-1]
        return bool(fall > max(FALL * float(np.ptp(self.means)), FALL_ERRORS * self.error))

    @cached_property
    def trend(self) -> str:
        """Whether it `"rose"`, stayed `"flat"`, or `"fell"` from its best; `"short"` of a log with too few steps, and
        `"unseen"` of one that shows no reward."""
        count, enough = len(self.values), 2 if self.key.startswith("eval_") else FEWEST_TO_TELL
        if count < enough:
            return "unseen" if count < 2 and len(self.run.trained) >= enough else "short"
        return "fell" if self.falls else "rose" if self.rises else "flat"

    @property
    def way(self) -> str:
        """Its first and its last mean, and its best between them where it fell from there."""
        first, best, last = (f"{mean:.2g}" for mean in (self.means[0], self.best, self.means[-1]))
        peak = self.trend == "fell" and best != first
        return f"{first} → {best} at best → {last}" if peak else f"{first} → {last}"

    @property
    def spent(self) -> dict[str, str]:
        """What the run spent, as far as its log tells."""
        found = {axis: self.run.spent(axis)[-1:] for axis in AXES if axis != "tokens"}
        return {axis: f"{spent[0]:,.0f}" for axis, spent in found.items() if np.isfinite(spent).any()}

    def __str__(self) -> str:
        spent = ", ".join(f"{count} {axis}" for axis, count in self.spent.items())
        if not self.values:
            return f"no reward was logged; {spent}"
        way, names = f"{self.name} {self.way}", self.run.functions
        if self.name == SUM and 1 < len(names) <= MOST_TOLD:
            way += f" ({'; '.join(f'{part.name} {part.way}' for part in self.parts)})"
        means = f"(means of the first and last {self.width} of {len(self.values)} logged steps)"
        ends = [f"{value:.2g}" for value in self.evaluated[:: max(len(self.evaluated) - 1, 1)]]
        evaluated = f"; {self.name} on evaluation prompts {' → '.join(ends)}" if ends else ""
        return f"{way} over {spent} {means}{evaluated}"

    @property
    def parts(self) -> list[Outcome]:
        """The outcome by each reward function that was logged."""
        found = [Outcome(self.run, name, f"rewards/{name}/mean") for name in self.run.functions]
        return [part for part in found if part.values]

    @property
    def facts(self) -> dict[str, str]:
        """What became of the groups of the whole run."""
        run, told = self.run, self.spent
        if run.updates_per_batch:
            told["updates a batch"] = f"{run.updates_per_batch:.2g}"
        for name, key in SHARES.items():
            share = run.mean(key, run.log if key == REDRAWN else self.steps)
            least = key in (ALL_WRONG, ALL_RIGHT) and not run.attached  # which may be 0
            if share is not None and (share >= LEAST_TOLD or not least):
                counted = ", in a dry run" * (key in (REPLACED, DEAD_AFTER, REDRAWN) and run.only_counted)
                told[name] = f"{'at least ' * least}{share:.1%}{counted}"
        return told


def cost_in_words(run: Run) -> list[str]:
    """Return what two updates a batch cost, as a sentence, by the times of updates that train on a batch again: those
    that generate take as long, and generation, old log-probs, and the reference model's. Nothing where a log has too
    few of either."""
    both = run.numbers("step_time", run.steps)
    alone = run.numbers("step_time", [entry for entry in run.trained if not generated(entry)])
    reference = FORWARD * bool(run.numbers("kl"))
    enough = min(len(both), len(alone)) >= FEWEST_UPDATES
    passes = float(np.median(both) / np.median(alone)) - 1 - FORWARD - reference if enough else 0.0
    one = passes + 1 + reference
    two, preset = one + 1 + FORWARD, passes + 2 + 2 * FORWARD
    told = (
        f"Generation takes {passes:.2g} training passes: two updates a batch cost {two / one:.3g} times the time, and "
        f"pay if they save {1 - one / two:.0%} of the completions (with the preset: {preset / one:.3g} times, "
        f"{1 - one / preset:.0%})."
    )
    return [told] if passes > 0 else []


def pays_0_or_1(run: Run) -> bool:
    """Tell whether every reward of a log of TRL's was 0 or 1, of one function: its mean and deviation show it, unless
    an entry averages several batches."""
    names = run.functions
    told = [(entry.get(SUM, nan), entry.get(f"rewards/{name}/std", nan)) for entry in run.steps for name in names]
    spread = [(deviation**2, reward * (1 - reward)) for reward, deviation in told]
    return len(names) == 1 and all(-TINY <= seen - of_0_1 <= of_0_1 + TINY for seen, of_0_1 in spread)
