"""Advice: rules that say what to change in a run, from the means of what it logged last.

Every bound is taken from our own measurements (docs/evidence.md): it lies beyond the runs that went well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from .logged import ALL_RIGHT, ALL_WRONG, DEAD, DEAD_EXACT, Log, dead_bounds, is_number, mean

LAST_PART, FEWEST, LEAST = 0.25, 8, 4
"""Advice goes by the last part of a log with at least so many steps, and by so many of them at least."""
REPLACED, DEAD_AFTER, GATED = "replay/replaced_fraction", "replay/dead_fraction_after", "replay/gated_fraction"
DRIFT, ESS, RATIO, SIZE = "replay/drift_mean", "replay/ess", "replay/ratio_mean", "replay/size"

Facts = Mapping[str, Any]
"""Means of metrics, and settings, by name."""


class Bound(NamedTuple):
    """A bound on the mean of a metric. One that was not logged meets none."""

    metric: str
    least: float = -inf
    most: float = inf

    def holds(self, facts: Facts) -> bool:
        """Tell whether the mean meets it."""
        value = facts.get(self.metric)
        return is_number(value) and self.least <= value <= self.most

    def __str__(self) -> str:
        bound = f"≥ {self.least:g}" if self.least > -inf else f"≤ {self.most:g}"
        return f"`{self.metric}` {bound}"

    def measured(self, facts: Facts) -> str:
        """Describe the value and its bound."""
        return f"{self.metric} = {facts[self.metric]:.2g} ({str(self).rpartition('` ')[2]})"


class Given(NamedTuple):
    """A setting that has one of these values, or none of them."""

    setting: str
    values: tuple[Any, ...]
    one_of: bool = True

    def holds(self, facts: Facts) -> bool:
        """Tell whether it has."""
        return (facts.get(self.setting) in self.values) == self.one_of

    def __str__(self) -> str:
        values = " or ".join(f"`{value}`" for value in self.values)
        return f"`{self.setting}` is {'' if self.one_of else 'not '}{values}"


class Advice(NamedTuple):
    """A rule that applies, in words: what was seen, what to change, and what was measured."""

    seen: str
    change: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A sign that it is time to change something, and the change.

    Attributes:
        name (`str`): Two words.
        when (`tuple`): All of these hold.
        change (`str`): What that means, and what to set.
        evidence (`str`): What was measured.
        section (`str`): Page and anchor in docs/ of the measurement.
        signs (`tuple[Bound, ...]`): At least one of these holds, if there are any.
    """

    name: str
    when: tuple[Bound | Given, ...]
    change: str
    evidence: str
    section: str
    signs: tuple[Bound, ...] = ()

    def applies(self, facts: Facts) -> bool:
        """Tell whether it is time."""
        some = not self.signs or any(sign.holds(facts) for sign in self.signs)
        return some and all(condition.holds(facts) for condition in self.when)

    def words(self, facts: Facts) -> Advice:
        """Describe what was seen, what to change, and why."""
        signs = [sign for sign in self.signs or self.when[:1] if isinstance(sign, Bound) and sign.holds(facts)]
        seen = ", ".join(sign.measured(facts) for sign in signs)
        evidence = f"Measured: {self.evidence} (docs/{self.section})"
        return Advice(seen, self.change.replace("`", ""), evidence.replace("`", ""))


SAME = Given("replay_iterations", ("same",))
PRESET = '`replay_preset="sample_efficient"`, with `num_iterations=5` and `beta=2` (2 and 0.1 on a pretrained model)'
RULES = (
    Rule(
        "all wrong",
        (Bound(ALL_WRONG, least=0.99), Bound(SIZE, most=0.0), Given("replay_buffer_size", (0,), one_of=False)),
        "No completion passes and nothing is stored: replay can't help before a success. Take easier prompts first, "
        'fill the buffer from a teacher (`replay_warm_start="teacher.jsonl"`), or explore more: a higher '
        "`temperature`, a larger `num_generations`.",
        "all 17 stock runs with at least 97.5 % dead groups ended at reward 0.00; ten rounds of dynamic sampling did "
        "not help.",
        "evidence-defaults.md#dynamic-sampling-filtering-or-the-buffer",
    ),
    Rule(
        "all wrong, no buffer",
        (Bound(ALL_WRONG, least=0.99), Given("replay_buffer_size", (0,))),
        "No completion passes: neither replay nor dynamic sampling can help before a success. Take easier prompts "
        "first, or explore more: a higher `temperature`, a larger `num_generations`.",
        "all 17 stock runs with at least 97.5 % dead groups ended at reward 0.00; ten rounds of dynamic sampling did "
        "not help.",
        "evidence-defaults.md#dynamic-sampling-filtering-or-the-buffer",
    ),
    Rule(
        "all right",
        (Bound(ALL_RIGHT, least=0.5),),
        "These prompts are solved, and replaying old successes teaches little. Take harder prompts, or leave solved "
        'ones out: `replay_plugins=["skip_solved"]`, `replay_refill_rounds=1`, or `replay_retire_passes` equal to '
        "`num_generations`.",
        "with two thirds of the groups dead, dynamic sampling gave an accuracy of 0.164 for 0.130; "
        "`replay_retire_passes` did no harm.",
        "evidence-defaults.md#dynamic-sampling-filtering-or-the-buffer",
    ),
    Rule(
        "few dead",
        (Bound(DEAD_EXACT, most=0.2), SAME),
        "There is little to replace: nothing has to change, with replay or without. If a completion costs more than "
        f"an update: {PRESET}.",
        "on grades (16 to 27 % dead), 0.25 with the defaults, 0.21 without replay, 0.61 with the preset.",
        "evidence-defaults.md#all-tasks-one-table",
    ),
    Rule(
        "dead groups",
        (
            Bound(DEAD_EXACT, least=0.2),
            Bound(ALL_WRONG, most=0.98),
            Bound(ALL_RIGHT, most=0.5),
            Given("use_replay", (False,)),
        ),
        "Replay could fill these: attach it with its defaults; `replay_dry_run=True` measures first.",
        "the lock reached reward 0.25 after 12,928 completions instead of 96,000; addition gained 0.042.",
        "evidence.md#learning",
    ),
    Rule(
        "sparse rewards",
        (
            Bound(ALL_WRONG, least=0.5),
            Bound(REPLACED, least=0.3),
            Bound(DEAD_AFTER, most=0.3),
            Bound(GATED, most=0.1),
            Bound(DRIFT, most=1.0),
            SAME,
        ),
        f"Replay fills the dead slots. If a completion costs more than an update: {PRESET}.",
        "the vault ended at 0.91 instead of 0.37.",
        "evidence-defaults.md#all-tasks-one-table",
    ),
    Rule(
        "dead groups stay",
        (Bound(DEAD_AFTER, least=0.3), Bound(SIZE, least=16.0), Given("replay_kl", ("all_wrong",), one_of=False)),
        "Dead groups are trained on although others are stored. Lift the limit that `session.explain()` counts "
        "(`replay_max_fraction=1.0`, `replay_max_age=None`), or leave dead groups out: "
        '`replay_unfilled="mask"`.',
        "the defaults left 0 to 15 % dead on four tasks.",
        "evidence.md#learning",
    ),
    Rule(
        "no correction",
        (Bound(REPLACED, least=0.01), Given("replay_correction", ("none",))),
        'Replayed rows count as if they were fresh. Set `replay_correction="ratio"`.',
        "accuracy on addition 0.11 for 0.17 without replay, and a fifth of the defaults' reward on the lock.",
        "evidence-methods.md#methods-of-papers",
    ),
    Rule(
        "stale buffer",
        (Given("replay_correction", ("none", "topr", "imitation"), one_of=False),),
        "The policy has left what is stored. Halve `learning_rate`; then "
        '`replay_correction="topr"`; then newer groups: `replay_max_age=30`.',
        "with a drift of 1 or more, no run ended above 0.64 on the lock, but those with `topr` went well to 1.5; an "
        "age limit never helped by more than 0.03, and age alone is no sign.",
        "evidence-methods.md#methods-of-papers",
        signs=(Bound(DRIFT, least=1.0), Bound(ESS, most=0.5), Bound(RATIO, most=0.8)),
    ),
    Rule(
        "masked rows",
        (Bound(GATED, least=0.5), Given("replay_correction", ("imitation",), one_of=False)),
        'The correction masks what is replayed: set `replay_correction="sequence_mask"` (0.5 to 2) in the place of '
        'narrower limits, or `"ratio"`, the default.',
        "with either, the lock was learned alike; with the defaults 0 % are masked.",
        "evidence-defaults.md#one-setting-at-a-time",
    ),
)
"""All rules, in the order in which they are told."""


def facts_of(log: Log, settings: Mapping[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Collect what rules go by.

    Args:
        log (`Log`): Of a run with or without replay.
        settings (`Mapping[str, Any]`): Of [`ReplayConfig`].

    Returns:
        `tuple`: The steps of the last part of the log, and the means over them, with the settings; no steps where too
        little was logged.
    """
    entries = [entry for entry in log if DEAD in entry and is_number(entry.get("step"))]
    if len(entries) < FEWEST:
        return [], {}
    last = [{**_without_replay(entry), **entry} for entry in entries[-max(int(LAST_PART * len(entries)), LEAST) :]]
    names = {name for entry in last for name in entry if name.startswith("replay/")}
    means = {name: mean(last, name) for name in names}
    attached = any(DEAD_EXACT in entry for entry in entries)
    return [entry["step"] for entry in last], {**settings, **means, "use_replay": attached}


def _without_replay(entry: Mapping[str, Any]) -> dict[str, float]:
    """Derive what replay would have logged, at least, where TRL alone logged an entry."""
    dead = entry[DEAD]
    if DEAD_EXACT in entry or not is_number(dead):
        return {}
    unknown = (0.0, dead)
    all_wrong, all_right = dead_bounds(dead, entry.get("reward")) or (unknown, unknown)
    return {DEAD_EXACT: dead, ALL_WRONG: all_wrong[0], ALL_RIGHT: all_right[0], SIZE: 0.0}


def advise(log: Log, settings: Mapping[str, Any]) -> tuple[str, list[Advice]]:
    """Return which steps advice is about, in words, and what to change.

    Args:
        log (`Log`): Of a run with or without replay.
        settings (`Mapping[str, Any]`): Of [`ReplayConfig`].
    """
    steps, facts = facts_of(log, settings)
    if not steps:
        return f"fewer than {FEWEST} steps were logged: too little for advice", []
    about = f"means of logged steps {steps[0]:g} to {steps[-1]:g}"
    return about, [rule.words(facts) for rule in RULES if rule.applies(facts)]


def remedy_for_masks(settings: Mapping[str, Any]) -> str:
    """Return what to change where all that is replayed is masked; nothing where the correction means to."""
    found = [rule for rule in RULES if rule.applies({**settings, GATED: 1.0})]
    return found[0].change.replace("`", "") if found else ""


def what_to_change(log: Log, settings: Mapping[str, Any]) -> list[str]:
    """Return the same as lines under a title; none where no rule applies."""
    about, found = advise(log, settings)
    lines = [f"  * {seen}: {change}\n    {evidence}" for seen, change, evidence in found]
    return lines and [f"what to change ({about}):", *lines]
