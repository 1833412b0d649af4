"""Rules that say what to change in a run, from the means of what it logged last.

Every bound is taken from our own measurements, which the rule's page tells: it lies beyond the runs that went well.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...data.counters import GATED
from ...setup.config import ReplayConfig
from .outcome import ALL_RIGHT, ALL_WRONG, ESS, HIGHEST, LOWEST, REPLACED, TINY, Outcome, cost_in_words
from .run import DEAD, DEAD_AFTER, DEAD_EXACT, GENERATIONS, SUM, Entry, Run, is_number

LAST_PART, FEWEST, LEAST = 0.25, 8, 4
"""Advice goes by the last part of a log with at least so many steps, and by so many of them at least."""
USUAL_SIZE = 8
"""Completions of a group, where they are not known."""
LEARNED, FEWEST_TO_FALL = 0.1, 20
"""A reward below the first hardly rises; of fewer steps than the second, none is told to have fallen."""
HELD_BACK = 0.25
"""Share of the slots that could be filled from which on a limit that left them is told."""
COLLAPSED = 0.95
UNLIKELY = 0.01
"""A chance below which dead groups do not explain that no gradient was logged."""
NAME = "NAME"
"""Stands for reward functions that do not differ where their sum does."""
RANGE = "RANGE"
"""Stands for a clip range as wide as twice the drift."""
CONDITION = re.compile(r"(.+) (≥|≤|<|is not|is) (.+)")
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}
LITTLE_DEAD = 0.2
SCALED_BY_BATCH = (
    "If you set scale_rewards='batch' or multi_objective_aggregation='normalize_then_sum', TRL's frac_reward_zero_std "
    "does not count dead groups: run with replay_dry_run=True, which does."
)
"""What a log of TRL's alone does not tell, if it has few dead groups."""

Facts = Mapping[str, Any]
"""Shares and counts, and settings, by name."""


class Advice(NamedTuple):
    """A rule that applies, in words: what was seen, what to change, and the page that says why."""

    seen: str
    change: str
    page: str

    def __str__(self) -> str:
        return f"{self.change} ({self.seen}; {self.page})"


class Rule(NamedTuple):
    """A sign that it is time to change something, and the change.

    Attributes:
        name (`str`): Two words.
        when (`tuple[str, …]`): All of these hold: `"dead groups ≥ 0.5"`, `"replay_scorer is heap or fifo"`. What is
            not known meets none.
        change (`str`): What that means, and what to set.
        section (`str`): Page and anchor in docs/ that say why.
        options (`Mapping[str, str]`): Settings that help, each with the condition that it is in force already.
    """

    name: str
    when: tuple[str, ...]
    change: str
    section: str
    options: Mapping[str, str] = {}

    def applies(self, facts: Facts) -> bool:
        """Tell whether it is time."""
        return all(holds(condition, facts) for condition in self.when)

    def told(self, facts: Facts) -> str:
        """Return the change, with the settings that are not in force yet; with none where a preset chose them."""
        preset = facts.get("replay_preset") is not None
        missing = [words for words, is_set in self.options.items() if not (preset or holds(is_set, facts))]
        options = f" Set {', or '.join(missing)}." if missing else ""
        return f"{self.change}{options}".replace(NAME, facts.get(NAME, NAME)).replace(
            RANGE, f"{2 * facts.get('drift of replayed rows', 0.0):.1g}"
        )

    def words(self, facts: Facts) -> Advice:
        """Return what was seen, what to change, and why."""
        name = next((name for name, *_ in map(_parts, self.when[0].split(" | ")) if name in facts), self.when[0])
        value = facts.get(name)
        seen = f"{name} {value:.2g}" if is_number(value) else f"{name} {value}"
        seen = seen.replace(NAME, facts.get(NAME, NAME).replace("'", ""))
        return Advice(seen, self.told(facts).replace("`", ""), f"docs/{self.section}")


def holds(condition: str, facts: Facts) -> bool:
    """Tell whether a condition, or one of several with `|` between them, holds. Of a list one element counts, and of a
    strategy or plugin its name."""
    if " | " in condition:
        return any(holds(part, facts) for part in condition.split(" | "))
    name, sign, wanted = _parts(condition)
    if name not in facts:
        return False
    value = facts[name]
    if sign in COMPARISONS:
        return is_number(value) and COMPARISONS[sign](value, float(wanted))
    values = value if isinstance(value, list) else [value]
    is_one = any(str(one).partition("(")[0] in wanted.split(" or ") for one in values)
    return is_one == (sign == "is")


def _parts(condition: str) -> tuple[str, str, str]:
    found = CONDITION.fullmatch(condition)
    if found is None:
        raise ValueError(f"{condition!r} is no condition")
    name, sign, wanted = found.groups()
    return name, sign, wanted


STOCK = ("replay is False", "live steps ≥ 1", "steps without a reward ≤ 0.1")
"""The log shows what groups were without replay, and some of them taught something."""
FAILING = ("failing groups ≥ 0.85", "reward of its best ≥ 0.5", *STOCK)
OWN = "replay_preset is None"
"""No preset has chosen the settings."""
COUNT_FIRST = {"`replay_dry_run=True` to count what replay would replace": "replay_dry_run is True"}
PRESET = {
    '`replay_preset="sample_efficient"`, with `GRPOConfig(num_iterations=2, beta=0.1)`': "replay_preset is not None"
}
TWO_UPDATES = {"`GRPOConfig(num_iterations=2)`": "updates a batch ≥ 1.5"}
NOTHING_ELSE_HELPS = ("no gradient", "cut off", "evaluation falls", "collapse", "deterministic", "pays anything")
"""Rules after which no other is told, but those that may have led there."""
LED_THERE = ("no correction", "overused")
COMPARE, RULE = "when-replay-pays.md#before-you-compare", "when-replay-pays.md#the-rule"
SAMPLING, PAPERS = "evidence.md#dynamic-sampling", "evidence.md#methods-of-papers"
TOY, SEVERAL = "evidence.md#tiny-models", "several-rewards.md#what-was-measured"
RULES = (
    Rule(
        "no gradient",
        ("steps without a gradient ≥ 0.9", "steps without a reward ≤ 0.1"),
        "`grad_norm` is 0 or no number although groups are live: nothing is trained. Look for an optimizer without "
        "trainable parameters, a frozen adapter, gradient clipping at 0, or an overflow (fp16), before you judge "
        "anything else, replay included.",
        COMPARE,
    ),
    Rule(
        "cut off",
        (
            "completions cut off ≥ 0.9",
            "longest completion ≥ 64",
            "all right groups ≤ 0.05",
            "reward ≤ 0.1 | dead groups ≥ 0.95 | the reward rose is not True",
        ),
        "Nearly all completions reach `max_completion_length` before they end, and their rewards teach little. Raise "
        "`max_completion_length`, ask for shorter answers, or find out why none ends (the EOS token), before you "
        "judge anything else, replay included.",
        COMPARE,
    ),
    Rule(
        "evaluation falls",
        ("evaluation below its best ≥ 0.1", "the reward rose is True"),
        "The reward on evaluation prompts falls while that of training rises: what is learned pays in training alone. "
        "Go back to the checkpoint of the best evaluation, read completions for what is rewarded by mistake, and "
        "train on more prompts, with `beta` above 0, or for fewer passes.",
        COMPARE,
    ),
    Rule(
        "collapse",
        ("groups at the lowest reward ≥ 0.95", "entropy of its highest ≤ 0.1", "groups once at the lowest ≤ 0.8"),
        "The policy has collapsed: every group now gets the lowest reward, and completions hardly vary. Replay can't "
        "undo that. Go back to a checkpoint from before, or begin again, with half the `learning_rate` or less.",
        TOY,
    ),
    Rule(
        "deterministic",
        (
            "dead groups ≥ 0.95",
            "entropy of its highest ≤ 0.1",
            "live steps ≥ 1",
            "all right groups ≤ 0.5",
            "told apart is True",
        ),
        "Hardly a group is live any more, and completions hardly vary: the policy has become deterministic before it "
        "solved the prompts. Replay can't bring variety back. Go back to a checkpoint from before, or begin again, "
        "with half the `learning_rate` or less, or a higher `temperature`.",
        COMPARE,
    ),
    Rule(
        "two completions",
        ("num_generations ≤ 2", "dead groups ≥ 0.5"),
        "Two completions that pass or fail agree in at least half of the groups, however good the policy is. Raise "
        "`num_generations` before you judge anything else, replay included.",
        RULE,
    ),
    Rule(
        "fallen reward",
        ("reward of its best ≤ 0.5",),
        "The mean reward fell below half of its best (where rewards are negative: below halfway from its lowest to "
        "its best). Unless the prompts became harder, halve the `learning_rate` before you judge anything else, "
        "replay included.",
        COMPARE,
    ),
    Rule(
        "nothing live",
        (
            "dead groups ≥ 0.99",
            "size ≤ 0",
            "all right groups ≤ 0.5",
            "untrained groups ≤ 0.1",
            "unscored completions ≤ 0.25",
        ),
        "No group is live (by `replay_reward` if it is set), so nothing is stored. Neither replay nor dynamic "
        "sampling can help before rewards differ within a group. If completions fail, start with easier prompts, or "
        "explore more: a higher `temperature`, a larger `num_generations`. If they succeed, take harder prompts. If "
        "they are cut off and masked (`mask_truncated_completions`), raise `max_completion_length`.",
        SAMPLING,
    ),
    Rule(
        "truncation",
        ("untrained groups ≥ 0.1", "completions cut off ≥ 0.3"),
        "Rewards differ in these groups, but no row with an advantage trains a token: completions that are cut off "
        "are masked. Raise `max_completion_length`, or set `mask_truncated_completions=False`.",
        "architecture.md#which-groups-are-dead",
    ),
    Rule(
        "no reward",
        ("unscored completions ≥ 0.25",),
        "No reward function scored these completions (all returned None), so they train nothing. Find out why first.",
        "compatibility.md#rollouts-that-failed",
    ),
    Rule(
        "pays anything",
        ("groups right from the first step ≥ 0.9", "all right groups ≥ 0.9 | groups at the highest reward ≥ 0.9"),
        "Nearly all completions got the best reward from the first step on: the function may pay anything. Score a "
        "nonsense text and another prompt's answer with it before you judge anything else.",
        "several-rewards.md#what-libraries-pay",
    ),
    Rule(
        "narrow clip",
        ("clipped replayed rows ≥ 0.5", "drift of replayed rows ≥ 0"),
        "The loss clips the ratio of most replayed rows, which then train nothing: the clip range is narrower than "
        f"what an update moves. Set `epsilon` and `epsilon_high` to {RANGE} or more.",
        "metrics.md#noise",
    ),
    Rule(
        "all right",
        ("all right groups ≥ 0.5", "groups at the highest reward ≥ 0.5"),
        "Most prompts are solved, and their completions teach nothing. Take harder prompts, or leave solved ones out.",
        SAMPLING,
        {
            '`replay_plugins=["skip_solved"]` (`pip install plugins/trl-replay-curricula`, in a clone)': (
                "replay_plugins is skip_solved"
            ),
            '`replay_refill="new(rounds=1)"`': "replay_refill is not None",
            "`replay_retire_passes` to `num_generations`": "replay_retire_passes is not None",
        },
    ),
    Rule(
        "dead function",
        ("dead groups by NAME ≥ 0.5", "dead groups of NAME's ≤ 0.5"),
        "Groups count as live if the sum of the rewards differs, even where NAME does not. If that is what you train "
        "for, set `replay_reward` to its name.",
        SEVERAL,
    ),
    Rule(
        "silent function",
        ("functions that never paid ≥ 1", "dead groups ≤ 0.95"),
        "No completion was ever paid by NAME, so it trains nothing. If that is what you train for, first take easier "
        "prompts or a teacher's completions, then set `replay_reward` to its name.",
        SEVERAL,
    ),
    Rule(
        "steps without a reward",
        ("steps without a reward ≥ 0.1", "counted by replay is False"),
        "The log has no reward for these steps: no function scored some rows, and TRL's share of dead groups leaves "
        "them out. Find out why; `replay_dry_run=True` counts these groups.",
        "compatibility.md#rollouts-that-failed",
    ),
    Rule(
        "sum alone",
        ("reward functions ≥ 2", "dead groups ≤ 0.5", "counted by replay is False"),
        "This log counts dead groups by the sum of the rewards, so one function may be dead where the sum is not. "
        "`replay_dry_run=True` logs the share for each function.",
        SEVERAL,
    ),
    Rule(
        "few dead",
        (
            "dead groups < 0.5",
            "dead groups by NAME ≤ 0.5",
            "functions that never paid ≤ 0",
            "steps that count ≥ 1",
            "replay is False",
        ),
        "Fewer than half of the groups are dead, so there is little to replace: leave replay out. To save "
        "completions, take two updates a batch first.",
        RULE,
        TWO_UPDATES,
    ),
    Rule(
        "stuck",
        (*FAILING, "told apart is True"),
        "Nearly all groups fail, but some were live. If none is live any more, halve the `learning_rate` first. "
        "Otherwise, use replay, or start with easier prompts or a teacher's completions. Toy tasks like this gained "
        'most from replay, and more with `replay_preset="sample_efficient"` (`num_iterations=5`, `beta=2` there). No '
        "pretrained model was measured in this state.",
        RULE,
        COUNT_FIRST,
    ),
    Rule(
        "dead, right or wrong",
        (*FAILING, "told apart is False"),
        "Nearly all groups are dead, but some were live. This log does not tell whether they fail or succeed. If "
        "they fail, use replay: toy tasks like this gained most from it. If they succeed, take harder prompts. "
        "`replay_dry_run=True` counts both.",
        RULE,
    ),
    Rule(
        "dead groups",
        ("dead groups ≥ 0.5", "failing groups ≤ 0.85", "all right groups ≤ 0.5", *STOCK),
        "Half of the groups or more are dead. Where prompts come again and generation is what costs, take the preset, "
        "which replays in a second update of each batch; compare it with this run, and with two updates alone. Where "
        "prompts are new, tune `learning_rate` first: too few groups fail for replay's defaults to gain much.",
        RULE,
        {**TWO_UPDATES, **PRESET, **COUNT_FIRST},
    ),
    Rule(
        "small buffer",
        ("dead groups trained on ≥ 0.1", "buffer full is True", "replay_buffer_size ≤ 16", OWN),
        "The buffer is full, and slots stay empty: raise `replay_buffer_size` (default: 64).",
        PAPERS,
    ),
    Rule(
        "dead groups stay",
        (
            "dead groups trained on ≥ 0.3",
            "size ≥ 16",
            "replay_kl is not all_wrong",
            "replay_unfilled is not mask or exclude",
            OWN,
        ),
        "Dead groups are trained on although the buffer has groups that could replace them.",
        TOY,
        {
            "`replay_max_fraction=1.0`": "replay_max_fraction is 1.0",
            "`replay_max_age=None`": "replay_max_age is None",
            "`replay_max_uses=None`": "replay_max_uses is None",
            '`replay_unfilled="mask"`': "replay_unfilled is not keep",
        },
    ),
    Rule(
        "no correction",
        ("replaced groups ≥ 0.01 | uses ≥ 2", "replay_correction is none", OWN),
        'Replayed rows train as if they were fresh. Set `replay_correction="ratio"`.',
        PAPERS,
    ),
    Rule(
        "overused",
        ("uses ≥ 300", "all right groups ≤ 0.5"),
        "A few stored groups are trained on again and again, and the policy learns them by heart. Store more groups, "
        "take fewer updates a batch (`num_iterations`), or limit how often a group is used.",
        "evidence.md#why-sample_efficient-learns-more",
        {"`replay_buffer_size=64`": "replay_buffer_size is 64", "`replay_max_uses=12`": "replay_max_uses is not None"},
    ),
    Rule(
        "stale buffer",
        (
            "effective sample size ≤ 0.5 | importance ratio ≤ 0.8",
            "replay_correction is not none or topr or imitation",
            "all right groups ≤ 0.5",
            "untrained groups ≤ 0.1",
            "the reward rose is not True",
        ),
        "Stored completions are too off-policy, and the reward does not rise: halve `learning_rate`. If that is not "
        "enough, change the correction.",
        PAPERS,
        {'`replay_correction="topr"`': "replay_correction is topr"},
    ),
    Rule(
        "masked rows",
        ("masked replayed rows ≥ 0.5", "replay_correction is not imitation"),
        'The correction masks at least half of the replayed rows. Set `replay_correction="sequence_mask"` (0.5 to 2) '
        'instead of narrower limits, or `"ratio"`, the default.',
        TOY,
    ),
)
"""All rules, in the order in which they are told."""
MEANS = {
    "dead groups": DEAD,
    "dead groups trained on": DEAD_AFTER,
    "replaced groups": REPLACED,
    "all right groups": ALL_RIGHT,
    "groups at the lowest reward": LOWEST,
    "groups at the highest reward": HIGHEST,
    "untrained groups": "replay/untrained_fraction",
    "completions cut off": "completions/clipped_ratio",
    "longest completion": "completions/max_length",
    "size": "replay/size",
    "uses": "replay/uses_mean",
    "effective sample size": ESS,
    "importance ratio": "replay/ratio_mean",
    "masked replayed rows": GATED,
    "clipped replayed rows": "replay/clip_ratio",
    "drift of replayed rows": "replay/sequence_drift_mean",
}
"""Facts that are means of a metric over the last part of a log."""


def facts_of(outcome: Outcome, count: int = 0) -> dict[str, Any]:
    """Return what rules go by, with the settings that are known; nothing of too short a log.

    Args:
        outcome ([`Outcome`]): Of a run.
        count (`int`): By how many of the last steps; 0 is a quarter of them.
    """
    run, steps = outcome.run, outcome.steps
    if len(steps) < FEWEST:
        return {}
    last = steps[-(count or max(int(LAST_PART * len(steps)), LEAST)) :]
    settings = dict(run.settings)
    if settings.keys() - {GENERATIONS}:
        settings = {**ReplayConfig().to_dict(), **settings}
    dry_run = bool(settings.get("replay_dry_run")) or run.only_counted
    known: dict[str, Any] = {"all right groups": 0.0, "longest completion": 64.0, "untrained groups": 0.0}
    known |= {name: value for name, key in MEANS.items() if (value := run.mean(key, last)) is not None}
    dead, size = known["dead groups"], settings.get(GENERATIONS)
    failing = max(
        dead - max(known["all right groups"], known.get("groups at the highest reward", 0.0)),
        known.get("groups at the lowest reward", 0.0),
    )
    rewards = run.numbers(SUM, last)
    known["groups right from the first step"] = _right_from_the_first(run, steps)
    entropy, lowest = (_windows(run, steps, key) for key in ("entropy", LOWEST))
    known |= {
        **_of_functions(run, steps, last),
        "replay": run.attached and not dry_run,
        "replay_dry_run": dry_run,
        "counted by replay": run.attached,
        "told apart": run.attached or any(ALL_WRONG in entry for entry in steps),
        "failing groups": failing ** (USUAL_SIZE / size) if is_number(size) and size >= 1 else failing,
        "live steps": sum(entry[DEAD] < 1 for entry in steps),
        "steps that count": sum(run.attached or entry[DEAD] > 0 for entry in steps),
        "reward of its best": _earned(outcome, last),
        "the reward rose": outcome.rose,
        "steps without a gradient": _untaught(last, run.updates_per_batch == 1),
        "steps without a reward": _unscored(last),
        "unscored completions": _failed(run, last),
        "evaluation below its best": _below_best(outcome.evaluated),
        "updates a batch": run.updates_per_batch,
    }
    if not run.attached and all(entry[DEAD] == 1 for entry in steps):
        known["size"] = 0.0  # nothing would have been stored
    known["buffer full"] = known.get("size", -1) >= settings.get("replay_buffer_size", 0) > 0
    if rewards and min(rewards) >= 0:
        known["reward"] = max(rewards)
    if entropy and max(entropy) > 0 and (now := run.mean("entropy", last)) is not None:
        known["entropy of its highest"] = now / max(entropy)
    if lowest:
        known["groups once at the lowest"] = min(lowest)
    return {**settings, **known}


def _right_from_the_first(run: Run, steps: Sequence[Entry]) -> float:
    """The share of groups at the best reward in the first steps that tell it from others."""
    right = run.numbers(ALL_RIGHT, steps) or [
        entry[HIGHEST] - entry[LOWEST] for entry in steps if HIGHEST in entry and LOWEST in entry
    ]
    return sum(right[:LEAST]) / LEAST


def _windows(run: Run, steps: Sequence[Entry], key: str, count: int = LEAST) -> list[float]:
    """Means of each `count` steps, one after the other."""
    parts = [steps[at : at + count] for at in range(0, len(steps) - count + 1, count)]
    return [value for part in parts if (value := run.mean(key, part)) is not None]


def _earned(outcome: Outcome, last: Sequence[Entry]) -> float:
    """The mean reward of the last steps as a share of the best mean, both above the lowest mean where rewards are
    negative; 1 where none is high enough to tell."""
    run, count = outcome.run, max(len(last), FEWEST_TO_FALL)
    means, now = _windows(run, outcome.steps, outcome.key, count), run.mean(outcome.key, outcome.steps[-count:])
    below = min(outcome.values, default=0.0) < 0
    least = min(means, default=0.0) if below else 0.0
    most = max(means, default=0.0) - least
    if now is None or most < LEARNED or (below and not outcome.fell):
        return 1.0
    return min((now - least) / most, 1.0)


def _untaught(last: Sequence[Entry], each: bool) -> float:
    """The share of steps without a gradient among those with a live group; 0 where none is logged. Unless `each` step
    is one update on a whole batch, the gradient is of a part of its groups: 0 where all of those may have been
    dead."""
    live = [entry for entry in last if "grad_norm" in entry and entry[DEAD] < 1]
    dead = [entry[DEAD] if entry["grad_norm"] == 0 else 0.0 for entry in live if not entry["grad_norm"] > 0]
    return len(dead) / len(live) if dead and (each or np.prod(dead) < UNLIKELY) else 0.0


def _unscored(last: Sequence[Entry]) -> float:
    """The share of steps whose mean reward or its deviation is no number; 0 where none is logged."""
    told = [is_number(entry.get(SUM)) and is_number(entry.get("reward_std")) for entry in last]
    return 1 - sum(told) / len(told) if any("reward_std" in entry for entry in last) else 0.0


def _failed(run: Run, last: Sequence[Entry]) -> float:
    """The share of completions that no function scored, as far as replay counted them."""
    rollouts = run.numbers("replay/rollouts", last)
    generated = rollouts[-1] - rollouts[0] if rollouts else 0.0
    return sum(run.numbers("replay/failed_rows", last[1:])) / generated if generated > 0 else 0.0


def _below_best(evaluated: Sequence[float]) -> float:
    """By which share of its best the last evaluations, two of several, lie below it."""
    recent, best = evaluated[-2:] if len(evaluated) > 2 else evaluated[-1:], max(evaluated, default=0.0)
    return 1 - max(recent) / best if best > 0 else 0.0


def _of_functions(run: Run, steps: Sequence[Entry], last: Sequence[Entry]) -> dict[str, Any]:
    """Facts about reward functions that did not differ over groups where their sum did: those that do so at times, or
    else those that never paid. One that is constant and pays may be a term that was learned; one that alone scores
    its groups differs where their sum does."""
    names = [name for name in run.functions if f"rewards/{name}/mean" in last[-1]]
    found: dict[str, Any] = {"reward functions": len(names), "functions that never paid": 0}
    if run.attached or len(names) < 2:
        found["dead groups by NAME"] = 0.0
    if run.counts:
        return found
    apart: dict[str, tuple[float, float]] = {}
    silent = []
    for name in names:
        metric = f"{DEAD_EXACT}/{name}"
        share, of_all = run.mean(metric, last), run.mean(metric, steps)
        live = run.mean(f"replay/live_without/{name}", last) or 0.0
        paid = run.mean(f"rewards/{name}/mean", last)
        pays = paid is None or paid > TINY
        if share is None or of_all is None:
            told = [run.numbers(f"rewards/{name}/{statistic}", steps) for statistic in ("mean", "std")]
            if len(names) > 1 and all(len(values) == len(steps) and max(map(abs, values)) <= TINY for values in told):
                silent.append(name)
        elif (0.5 <= share < 1 or (share >= 1 > of_all and not pays)) and share - live <= 0.5:
            apart[name] = share, share - live
        elif of_all == 1 and not pays:
            silent.append(name)
    if apart:
        most, of_sum = map(max, zip(*apart.values(), strict=True))
        return {**found, "dead groups by NAME": most, "dead groups of NAME's": of_sum, NAME: _either(apart)}
    return {**found, "functions that never paid": len(silent), NAME: _either(silent)} if silent else found


def _either(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))


def advise(outcome: Outcome) -> list[Advice]:
    """Return what to change, the first thing first. Rules on settings that are not known are left out."""
    facts, run = facts_of(outcome), outcome.run
    applying = [rule for rule in RULES if facts and rule.applies(facts)]
    if applying and applying[0].name in NOTHING_ELSE_HELPS:
        applying = [applying[0], *(rule for rule in applying if rule.name in LED_THERE)]
    slots = {name: count + run.replaced for name, count in run.held_back.items() if holds(OWN, run.settings)}
    caps = [
        Advice(
            f"{name}={run.settings[name]!r} left {run.held_back[name]} of {of} slots that could have been filled",
            f"A limit holds replay back: raise {name}, or leave it out.",
            "docs/by-symptom.md#which-settings-for-which-run",
        )
        for name, of in slots.items()
        if run.held_back[name] >= HELD_BACK * of
    ]
    return [*(rule.words(facts) for rule in applying), *caps]


def what_to_change(outcome: Outcome) -> list[str]:
    """Return what to change in lines, the first thing first; one line that says so where there is nothing."""
    found = advise(outcome)
    if not found:
        return [f"what to change: {_nothing(outcome)}"]
    return [f"what to change: {found[0]}", *(f"then: {each}" for each in found[1:])]


def notes(outcome: Outcome) -> list[str]:
    """Return what the figures of a run don't tell."""
    run, found = outcome.run, []
    if run.runs > 1:
        found.append(f"This log holds {run.runs} runs, each of which begins at its first step: this is the last one.")
    if not run.attached and 0 <= max(entry[DEAD] for entry in run.steps) < LITTLE_DEAD:
        found.append(SCALED_BY_BATCH)
    if run.attached and not run.settings.keys() - {GENERATIONS}:
        found.append(f"The settings are not known: {run.unknown} Rules that need them are left out.")
    if (passes := outcome.generation_passes) is not None:
        found.append(cost_in_words(passes))
    if GENERATIONS not in run.settings and (run.mean(DEAD, run.steps) or 0) >= 0.5:
        found.append("This assumes 8 completions per group. If yours differ, give --num_generations.")
    return found


def _nothing(outcome: Outcome) -> str:
    """That no rule applies, and no more than a log shows: whether replay helped, another run tells."""
    if outcome.generated_once:
        if len(outcome.evaluated) < 2:
            return (
                "evaluate (eval_strategy, eval_dataset): nothing else shows what a run learns that does not generate"
            )
        fallen = "no rule names a fault, but the reward on evaluation prompts did not rise: try half the learning_rate"
        return "nothing, by the evaluations" if outcome.rose else fallen
    steps = len(outcome.steps)
    if steps < FEWEST:
        return f"too few steps to tell: {steps} were logged, and {FEWEST} are needed, best with logging_steps=1"
    if outcome.values and steps >= FEWEST_TO_FALL:
        if outcome.fell:
            return (
                f"no rule names a fault, but the reward fell from {outcome.best:.2g} to {outcome.ends[1]:.2g}: go "
                "back to a checkpoint from before, and try half the learning_rate"
            )
        if not outcome.rose:
            return "no rule names a fault, but the reward did not rise"
    replayed = outcome.run.attached and not outcome.run.only_counted
    return "nothing" + ("; whether replay helped, a run without it tells (trl-replay report A B)" if replayed else "")


def healthy_before(history: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the last logged step before a collapse that goes on at the end of a log; None if there is none."""
    now = history[-1] if history else {}
    if max(now.get(ALL_WRONG, 0.0), now.get(LOWEST, 0.0)) < COLLAPSED:  # before the log is read, which may be long
        return None
    outcome = Outcome.of(Run.of_log(history))
    earlier = [entry["step"] for entry in outcome.steps[:-FEWEST] if entry.get(LOWEST, 0.0) < COLLAPSED]
    (collapse,) = (rule for rule in RULES if rule.name == "collapse")
    if len(outcome.steps) < 2 * FEWEST or not collapse.applies(facts_of(outcome, FEWEST)):
        return None
    return max(earlier, default=None)
