"""What a run came to: where the reward that counts began and ended, what was spent, and what became of its groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .run import AXES, DEAD, DEAD_AFTER, REDRAWN, SUM, Entry, Run, generated, is_number, width_of

REPLACED, ESS = "replay/replaced_fraction", "replay/ess"
ALL_WRONG, ALL_RIGHT = "replay/all_wrong_fraction", "replay/all_right_fraction"
LOWEST, HIGHEST = "replay/lowest_fraction", "replay/highest_fraction"
TINY = 1e-4
"""A rounding error."""
MOST_TOLD = 4
"""Reward functions that are told one by one, where none is named."""
FEWEST_UPDATES = 8
"""Of each kind, by whose time the cost of generation is told."""
FALL, FALL_ERRORS = 0.25, 6.0
"""Share of its best, and standard errors of a mean, by which a reward has fallen."""
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
        """Return it by the given reward function, or the one that counts in the run.

        Raises:
            ReplayError: The given one was not logged.
        """
        return cls(run, *run.key_of(reward))

    @cached_property
    def steps(self) -> list[Entry]:
        """The entries of new batches, with the least shares of all-wrong and all-right groups that a log of TRL's
        shows, where every reward is 0 or 1."""
        zero_one = not self.run.attached and pays_0_or_1(self.run.steps)
        return [_completed(entry, zero_one) for entry in self.run.steps]

    @cached_property
    def values(self) -> list[float]:
        """The reward that counts, wherever it was logged."""
        return self.run.numbers(self.key)

    @property
    def width(self) -> int:
        """Over how many steps its first and its last mean are."""
        return width_of(len(self.values))

    @property
    def ends(self) -> tuple[float, float]:
        """Its means over the first and the last steps."""
        width = self.width
        return sum(self.values[:width]) / width, sum(self.values[-width:]) / width

    @property
    def best(self) -> float:
        """Its highest mean over as many steps."""
        sums = np.cumsum([0.0, *self.values])
        return float((sums[self.width :] - sums[: -self.width]).max()) / self.width

    @property
    def error(self) -> float:
        """Standard error of such a mean, by how far values of adjacent steps differ."""
        squares = np.diff(self.values) ** 2
        return float(np.sqrt(squares.mean() / 2 / self.width)) if len(squares) else 0.0

    @property
    def fell(self) -> bool:
        """Whether it ended lower than it once was, by more than its values scatter."""
        return self.best - self.ends[1] > max(FALL * abs(self.best), FALL_ERRORS * self.error)

    @cached_property
    def evaluated(self) -> list[float]:
        """Its values on evaluation prompts."""
        return self.run.numbers(f"eval_{self.key}")

    @property
    def generated_once(self) -> bool:
        """Whether further updates trained on stored groups, and none generated."""
        return len(self.steps) == 1 < len(self.run.trained)

    @property
    def rose(self) -> bool:
        """Whether it ended higher than it began: on evaluation prompts, if nothing else tells."""
        values = self.evaluated if self.generated_once else self.ends if self.values else ()
        return len(values) > 1 and values[-1] > values[0]

    @property
    def spent(self) -> dict[str, str]:
        """What the run spent, as far as its log tells."""
        found = {axis: self.run.spent(axis)[-1:] for axis in AXES if axis != "tokens"}
        return {axis: f"{spent[0]:,.0f}" for axis, spent in found.items() if np.isfinite(spent).any()}

    def __str__(self) -> str:
        spent = ", ".join(f"{count} {axis}" for axis, count in self.spent.items())
        evaluated = f"{self.name} on evaluation prompts {_way(self.evaluated)}" if self.evaluated else ""
        if self.generated_once:
            sizes = self.run.numbers(ESS)
            sample = f"; effective sample size {_way(sizes)}" if sizes else ""
            unknown = "the log does not show whether it learned, as nothing was evaluated"
            return f"{evaluated or unknown}; {spent}, and one batch generated{sample}"
        if not self.values:
            return f"no reward was logged; {spent}"
        way = f"{self.name} {_way(self.ends)}"
        names = self.run.functions
        if self.name == SUM and 1 < len(names) <= MOST_TOLD:
            parts = [Outcome(self.run, name, f"rewards/{name}/mean") for name in names]
            way += f" ({'; '.join(f'{part.name} {_way(part.ends)}' for part in parts if part.values)})"
        means = f"(means of the first and last {self.width} of {len(self.values)} logged steps)"
        return f"{way} over {spent} {means}" + (f"; {evaluated}" if evaluated else "")

    @property
    def facts(self) -> dict[str, str]:
        """What became of the groups of the whole run."""
        run, steps = self.run, self.steps
        shares = {
            "dead groups": run.mean(DEAD, steps),
            "all wrong": run.mean(ALL_WRONG, steps),
            "all right": run.mean(ALL_RIGHT, steps),
            "replaced": run.mean(REPLACED),
            "dead groups trained on": run.mean(DEAD_AFTER),
            "drawn anew in further updates": run.mean(REDRAWN),
        }
        least = "" if run.attached else "at least "
        told = {name: f"{share:.1%}" for name, share in shares.items() if share is not None}
        told |= {name: least + told[name] for name in ("all wrong", "all right") if name in told}
        if run.only_counted:
            told |= {name: f"{told[name]}, in a dry run" for name in list(shares)[3:] if name in told}
        updates = run.updates_per_batch
        return {**self.spent, **({"updates a batch": f"{updates:.2g}"} if updates else {}), **told}

    @property
    def generation_passes(self) -> float | None:
        """Time of generating a batch, in passes of training over it. Updates that train on a batch again take as long
        as those that generate, less generation. None where a log has too few of either."""
        run = self.run
        both = run.numbers("step_time", run.steps)
        alone = run.numbers("step_time", [entry for entry in run.trained if not generated(entry)])
        if min(len(both), len(alone)) < FEWEST_UPDATES:
            return None
        runtime = run.numbers("train_runtime")
        beside = max(runtime[-1] - sum(both + alone), 0.0) / len(both + alone) if runtime else 0.0
        training = float(np.median(alone))
        passes = (float(np.median(both)) - training) / (training + beside) if training > 0 else -1.0
        return passes if passes > 0 else None


def cost_of(passes: float, forwards: int = 0) -> tuple[float, float]:
    """Return how many times the time of one update a batch two cost, and the share of the completions that they must
    save to pay.

    Args:
        passes (`float`): Time of generating a batch, in passes of training over it.
        forwards (`int`): Forward passes over it that one update does not need.
    """
    one, two = passes + 1, passes + 2 + forwards * FORWARD
    return two / one, 1 - one / two


def cost_in_words(passes: float) -> str:
    """Return the same as a sentence; the preset needs the old log-probs and the reference model's."""
    (times, saved), (most, at_most) = cost_of(passes), cost_of(passes, forwards=2)
    return (
        f"Generation takes {passes:.2g} training passes: two updates a batch cost {times:.2g} times the time, and pay "
        f"if they save {saved:.0%} of the completions (with the preset: {most:.2g} times, {at_most:.0%})."
    )


def pays_0_or_1(steps: Sequence[Entry]) -> bool:
    """Tell whether every reward of a log of TRL's was 0 or 1, of one function: its mean and deviation show it, unless
    an entry averages several batches. One that was 1, or 0, throughout counts as well."""
    rewards = list[float]()
    for entry in steps:
        reward, names = entry.get(SUM), [name[:-5] for name in entry if re.fullmatch("rewards/.+/mean", name)]
        deviation = entry.get(f"{names[0]}/std") if len(names) == 1 else None
        if not (is_number(reward) and is_number(deviation) and -TINY <= reward <= 1 + TINY):
            return False
        variance = reward * (1 - reward)
        if abs(entry[f"{names[0]}/mean"] - reward) > TINY or not -TINY <= deviation**2 - variance <= variance + TINY:
            return False
        rewards.append(reward)
    return any(0 < reward < 1 for reward in rewards) or len({round(reward) for reward in rewards}) == 1


def _completed(entry: Entry, zero_one: bool) -> Entry:
    """An entry with the shares of groups that are all wrong or right, and dead at the lowest or the highest reward."""
    dead, found = entry[DEAD], dict(entry)
    if zero_one and ALL_WRONG not in entry:
        reward = entry[SUM]
        found |= {ALL_WRONG: dead - min(reward, dead), ALL_RIGHT: max(reward - (1 - dead), 0.0)}
    for share, extreme in ((ALL_WRONG, LOWEST), (ALL_RIGHT, HIGHEST)):
        if share in found:
            found.setdefault(extreme, min(found[share], dead))
    return found


def _way(values: Sequence[float]) -> str:
    return f"{values[0]:.2g} → {values[-1]:.2g}" if len(values) > 1 else f"{values[0]:.2g}"
