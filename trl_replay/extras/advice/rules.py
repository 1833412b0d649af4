"""Advice: rules that say what to change in a run, from the means of what it logged last.

Every bound is taken from our own measurements, which the rule's page tells: it lies beyond the runs that went well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from ...data.counters import DRIFT, GATED
from .logged import (
    ALL_RIGHT,
    ALL_WRONG,
    DEAD,
    DEAD_EXACT,
    LITTLE_DEAD,
    SUM,
    TINY,
    Log,
    dead_bounds,
    is_number,
    judged_by,
    mean,
    numbers,
    only_counted,
    pays_0_or_1,
    steps,
)
from .outcome import Outcome, outcome_of

LAST_PART, FEWEST, LEAST = 0.25, 8, 4
"""Advice goes by the last part of a log with at least so many steps, and by so many of them at least."""
REPLACED, DEAD_AFTER = "replay/replaced_fraction", "replay/dead_fraction_after"
USES = "replay/uses_mean"
ESS, RATIO, SIZE = "replay/ess", "replay/ratio_mean", "replay/size"
HIGHEST = "replay/highest_fraction"

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
        least, most = (f"≥ {self.least:g}", self.least > -inf), (f"≤ {self.most:g}", self.most < inf)
        return f"`{self.metric}` {' and '.join(words for words, told in (least, most) if told)}"

    def measured(self, facts: Facts) -> str:
        """Describe the value and its bound. Without replay, TRL's own metric tells the dead groups."""
        name = DEAD if self.metric == DEAD_EXACT and facts.get("use_replay") is False else self.metric
        return f"{name} = {facts[self.metric]:.2g} ({str(self).rpartition('` ')[2]})"


class Given(NamedTuple):
    """A setting that has one of these values, or none of them; of a list, one element counts, and of a strategy or
    plugin its name. One that is not known meets neither."""

    setting: str
    values: tuple[Any, ...]
    one_of: bool = True

    def holds(self, facts: Facts) -> bool:
        """Tell whether it has."""
        if self.setting not in facts:
            return False
        value = facts[self.setting]
        found = value if isinstance(value, list) else [value]
        names = [one.partition("(")[0] if isinstance(one, str) else one for one in found]
        return any(one in self.values for one in names) == self.one_of

    def __str__(self) -> str:
        values = " or ".join(f"`{value}`" for value in self.values)
        return f"`{self.setting}` is {'' if self.one_of else 'not '}{values}"


class Option(NamedTuple):
    """A setting that may be given, unless it has that effect already."""

    words: str
    unless: Given


class Advice(NamedTuple):
    """A rule that applies, in words: what was seen, what to change, and the page that says why."""

    seen: str
    change: str
    page: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A sign that it is time to change something, and the change.

    Attributes:
        name (`str`): Two words.
        when (`tuple`): All of these hold.
        change (`str`): What that means, and what to set.
        section (`str`): Page and anchor in docs/ that say why.
        signs (`tuple[Bound, ...]`): At least one of these holds, if there are any.
        options (`tuple[Option, ...]`): Settings that help; those in force are not told.
    """

    name: str
    when: tuple[Bound | Given, ...]
    change: str
    section: str
    signs: tuple[Bound, ...] = ()
    options: tuple[Option, ...] = ()

    def applies(self, facts: Facts) -> bool:
        """Tell whether it is time."""
        some = not self.signs or any(sign.holds(facts) for sign in self.signs)
        return some and all(condition.holds(facts) for condition in self.when)

    def words(self, facts: Facts) -> Advice:
        """Describe what was seen, what to change, and why."""
        signs = [sign for sign in self.signs or self.when[:1] if isinstance(sign, Bound) and sign.holds(facts)]
        seen = ", ".join(sign.measured(facts) for sign in signs).replace(NAME, facts.get(NAME, NAME).replace("'", ""))
        return Advice(seen, self.told(facts).replace("`", ""), f"docs/{self.section}")

    def told(self, facts: Facts) -> str:
        """The change, with the settings that are not in force yet; with all, where there are no facts, and with none
        where a preset has chosen the settings."""
        chosen = facts.get("replay_preset") is not None
        open_ones = [option.words for option in self.options if not (chosen or (facts and option.unless.holds(facts)))]
        options = f" Set {', or '.join(open_ones)}." if open_ones else ""
        return f"{self.change}{options}".replace(NAME, facts.get(NAME, NAME))


NAME = "NAME"
"""Stands for functions that do not differ where the sum does, in words and in [`OF_FUNCTION`]."""
OF_FUNCTION = f"replay/dead_fraction/{NAME}"
"""The largest share of groups in which one function that is not constant does not differ. 0 with one function, and
where one of them counts; not known of a log of several functions without replay."""
LIVE_WITHOUT = f"replay/live_without/{NAME}"
"""The share of groups in which one function does not differ, and the sum does."""
SUM_THERE = "dead groups among those that NAME scores"
GENERATIONS, USUAL_SIZE = "num_generations", 8
"""Completions of a group: of the trainer, and where it is not known."""
WAS_LIVE = "steps with a live group"
SILENT = "reward functions that never paid"
UNSCORED = "steps without a reward"
NO_GRADIENT = "steps without a gradient"
"""Those with a live group whose `grad_norm` is 0 or no number."""
LONGEST = "completions/max_length"
LOW = "rewards hardly rise above their lowest"
UNSOLVED = "share of groups of 8 that fail"
"""Of another size those that would fail of 8 completions, at the same pass rate."""
CAME_AGAIN = "prompts came again"
"""The log tells of two epochs; a dataset that lists a prompt twice does not show it."""
TOLD_APART = "dead groups told apart"
"""The log tells those that succeed from those that fail."""
COUNTED = "steps with a dead group, or with an exact count"
"""0 where TRL's share is 0 throughout: it is, whatever groups are, if rewards are scaled by batch."""
WITHOUT_REPLAY = "trained without replay"
"""Replay was not attached, or made a dry run."""
FUNCTIONS, CHURN, NO_REWARD = "reward functions", "evicted per stored", "completions without a reward"
UNTRAINED, CLIPPED, LOWEST = "replay/untrained_fraction", "completions/clipped_ratio", "replay/lowest_fraction"
ENTROPY, BEFORE = "entropy (share of its highest)", "replay/lowest_fraction at its least"
EARNED = "reward (share of its best)"
"""Of the function that counts, where no mean is negative. Means over as many steps as advice goes by, and at least
[`FEWEST_TO_FALL`]; 1 where the best is below [`LEARNED`]."""
ROSE = "the reward rose"
LEARNED, FEWEST_TO_FALL = 0.1, 20
FALL = 0.25
"""Share of its best by which a reward has fallen that no rule explains."""
FALL_ERRORS = 6.0
"""Standard errors of a mean that it must have fallen by, too: its best is the highest of many."""
OWN_SETTINGS = Given("replay_preset", (None,))
"""No preset has chosen them."""
COUNT_FIRST = Option(
    "`replay_dry_run=True` to count what replay would replace, also where completions are cut off and masked "
    "(`mask_truncated_completions`)",
    Given("replay_dry_run", (True,)),
)
PRESET = Option(
    '`replay_preset="sample_efficient"`, with `num_iterations=2` and `beta=0.1` on a pretrained model',
    Given("replay_preset", (None,), one_of=False),
)
LEAST_DEAD = 0.95
HELD_BACK = 0.25
"""Share of the slots that could be filled from which on a limit that left them is told."""
COLLAPSED = (Bound(LOWEST, least=LEAST_DEAD), Bound(ENTROPY, most=0.1), Bound(BEFORE, most=0.8))
TAUGHT_WITHOUT_REPLAY = (Bound(WAS_LIVE, least=1.0), Bound(UNSCORED, most=0.1), Given(WITHOUT_REPLAY, (True,)))
"""The log shows what its groups were without replay, and some of them taught something."""
HARDLY_LIVE = (Bound(UNSOLVED, least=0.85), Bound(EARNED, least=0.5), *TAUGHT_WITHOUT_REPLAY)
SOME_DEAD = (
    Bound(UNSOLVED, most=0.85),
    Bound(DEAD_EXACT, least=LITTLE_DEAD),
    Bound(ALL_RIGHT, most=0.5),
    *TAUGHT_WITHOUT_REPLAY,
)
NOTHING_ELSE_HELPS = ("no gradient", "collapse", "deterministic")
"""Rules after which no other is told, but those that may have led there."""
LED_THERE = ("no correction", "overused")
RULES = (
    Rule(
        "no gradient",
        (Bound(NO_GRADIENT, least=0.9), Bound(UNSCORED, most=0.1)),
        "`grad_norm` is 0 or no number although groups are live: nothing is trained. Look for an optimizer without "
        "trainable parameters, a frozen adapter, gradient clipping at 0, or an overflow (fp16), before you judge "
        "anything else, replay included.",
        "when-replay-pays.md#before-you-compare",
    ),
    Rule(
        "cut off",
        (
            Bound(CLIPPED, least=0.9),
            Bound(LONGEST, least=64),
            Bound(DEAD_EXACT, least=0.5),
            Bound(ALL_RIGHT, most=0.05),
            Bound(LOW, least=1.0),
        ),
        "Nearly all completions reach `max_completion_length` before they end, and hardly one is rewarded. Raise "
        "`max_completion_length`, or ask for shorter answers, before you judge anything else, replay included.",
        "when-replay-pays.md#before-you-compare",
    ),
    Rule(
        "collapse",
        COLLAPSED,
        "The policy has collapsed: every group now gets the lowest reward, and completions hardly vary. Replay can't "
        "undo that. Go back to a checkpoint from before, or begin again, with half the `learning_rate` or less.",
        "evidence.md#tiny-models",
    ),
    Rule(
        "deterministic",
        (
            Bound(DEAD_EXACT, least=LEAST_DEAD),
            Bound(ENTROPY, most=0.1),
            Bound(WAS_LIVE, least=1.0),
            Bound(ALL_RIGHT, most=0.5),
            Given(TOLD_APART, (True,)),
        ),
        "Hardly a group is live any more, and completions hardly vary: the policy has become deterministic before it "
        "solved the prompts. Replay can't bring variety back. Go back to a checkpoint from before, or begin again, "
        "with half the `learning_rate` or less, or a higher `temperature`.",
        "when-replay-pays.md#before-you-compare",
    ),
    Rule(
        "two completions",
        (Bound(GENERATIONS, least=1, most=2), Bound(DEAD_EXACT, least=0.5)),
        "Two completions that pass or fail agree in at least half of the groups, however good the policy is. Raise "
        "`num_generations` before you judge anything else, replay included.",
        "when-replay-pays.md#the-rule",
    ),
    Rule(
        "fallen reward",
        (Bound(EARNED, most=0.5),),
        "The mean reward fell below half of its best. Unless the prompts became harder, halve the `learning_rate` "
        "before you judge anything else, replay included.",
        "when-replay-pays.md#before-you-compare",
    ),
    Rule(
        "nothing live",
        (
            Bound(DEAD_EXACT, least=0.99),
            Bound(SIZE, most=0.0),
            Bound(ALL_RIGHT, most=0.5),
            Bound(UNTRAINED, most=0.1),
            Bound(NO_REWARD, most=0.25),
        ),
        "No group is live (by `replay_reward` if it is set), so nothing is stored. Neither replay nor dynamic "
        "sampling can help before rewards differ within a group. If completions fail, start with easier prompts, or "
        "explore more: a higher `temperature`, a larger `num_generations`. If they succeed, take harder prompts. If "
        "they are cut off and masked (`mask_truncated_completions`), raise `max_completion_length`.",
        "evidence.md#dynamic-sampling",
    ),
    Rule(
        "truncation",
        (Bound(UNTRAINED, least=0.1), Bound(CLIPPED, least=0.3)),
        "Rewards differ in these groups, but no row with an advantage trains a token: completions that are cut off "
        "are masked. Raise `max_completion_length`, or set `mask_truncated_completions=False`.",
        "architecture.md#which-groups-are-dead",
    ),
    Rule(
        "no reward",
        (Bound(NO_REWARD, least=0.25),),
        "No reward function scored these completions (all returned None), so they train nothing. Find out why first.",
        "compatibility.md#rollouts-that-failed",
    ),
    Rule(
        "all right",
        (Bound(ALL_RIGHT, least=0.5), Bound(HIGHEST, least=0.5)),
        "Most prompts are solved, and their completions teach nothing. Take harder prompts, or leave solved ones out.",
        "evidence.md#dynamic-sampling",
        options=(
            Option(
                '`replay_plugins=["skip_solved"]` (`pip install plugins/trl-replay-curricula`, in a clone)',
                Given("replay_plugins", ("skip_solved",)),
            ),
            Option('`replay_refill="new(rounds=1)"`', Given("replay_refill", (None,), one_of=False)),
            Option(
                "`replay_retire_passes` to `num_generations`", Given("replay_retire_passes", (None,), one_of=False)
            ),
        ),
    ),
    Rule(
        "dead function",
        (Bound(OF_FUNCTION, least=0.5), Bound(SUM_THERE, most=0.5)),
        "Groups count as live if the sum of the rewards differs, even where NAME does not. If that is what you train "
        "for, set `replay_reward` to its name.",
        "howto/several-rewards.md#what-was-measured",
    ),
    Rule(
        "silent function",
        (Bound(SILENT, least=1.0), Bound(DEAD_EXACT, most=0.95)),
        "No completion was ever paid by NAME, so it trains nothing. If that is what you train for, first take easier "
        "prompts or a teacher's completions, then set `replay_reward` to its name.",
        "howto/several-rewards.md#what-was-measured",
    ),
    Rule(
        "steps without a reward",
        (Bound(UNSCORED, least=0.1), Given("use_replay", (False,))),
        "The log has no reward for these steps: no function scored some rows, and TRL's share of dead groups leaves "
        "them out. Find out why; `replay_dry_run=True` counts these groups.",
        "compatibility.md#rollouts-that-failed",
    ),
    Rule(
        "sum alone",
        (Bound(FUNCTIONS, least=2.0), Bound(DEAD_EXACT, most=0.5), Given("use_replay", (False,))),
        "This log counts dead groups by the sum of the rewards, so one function may be dead where the sum is not. "
        "`replay_dry_run=True` logs the share for each function.",
        "howto/several-rewards.md#what-was-measured",
    ),
    Rule(
        "few dead",
        (
            Bound(DEAD_EXACT, most=LITTLE_DEAD),
            Bound(OF_FUNCTION, most=0.5),
            Bound(SILENT, most=0.0),
            Bound(COUNTED, least=1),
            Given(WITHOUT_REPLAY, (True,)),
        ),
        "Few groups are dead, so there is little to replace: leave replay out.",
        "when-replay-pays.md#the-rule",
    ),
    Rule(
        "stuck",
        (*HARDLY_LIVE, Given(TOLD_APART, (True,))),
        "Nearly all groups fail, but some were live. If none is live any more, halve the `learning_rate` first. "
        "Otherwise, use replay, or start with easier prompts or a teacher's completions. Toy tasks like this gained "
        "most from replay, and more with "
        '`replay_preset="sample_efficient"` (`num_iterations=5`, `beta=2` there). No pretrained model was measured '
        "in this state.",
        "when-replay-pays.md#the-rule",
        options=(COUNT_FIRST,),
    ),
    Rule(
        "dead, right or wrong",
        (*HARDLY_LIVE, Given(TOLD_APART, (False,))),
        "Nearly all groups are dead, but some were live. This log does not tell whether they fail or succeed. If "
        "they fail, use replay: toy tasks like this gained most from it. If they succeed, take harder prompts. "
        "`replay_dry_run=True` counts both.",
        "when-replay-pays.md#the-rule",
    ),
    Rule(
        "list again",
        (*SOME_DEAD, Given(CAME_AGAIN, (True,))),
        "These prompts come again. If completions are what costs, use the preset: on lists like this, most of its "
        "runs reached stock's final accuracy with fewer.",
        "when-replay-pays.md#the-rule",
        options=(PRESET,),
    ),
    Rule(
        "dead groups",
        (*SOME_DEAD, Given(CAME_AGAIN, (False,))),
        "If your prompts repeat and generation is what costs, use the preset. If not, tune "
        "`learning_rate` first: too few groups fail for replay's defaults to gain much.",
        "when-replay-pays.md#the-rule",
        options=(PRESET, COUNT_FIRST),
    ),
    Rule(
        "small buffer",
        (
            Bound(CHURN, least=0.8),
            Bound(DEAD_AFTER, least=0.1),
            Bound("replay_buffer_size", least=1.0, most=16.0),
            OWN_SETTINGS,
        ),
        "The buffer evicts nearly all that it stores, and slots stay empty: raise `replay_buffer_size` (default: 64).",
        "evidence.md#methods-of-papers",
    ),
    Rule(
        "dead groups stay",
        (
            Bound(DEAD_AFTER, least=0.3),
            Bound(SIZE, least=16.0),
            Given("replay_kl", ("all_wrong",), one_of=False),
            Given("replay_unfilled", ("mask", "exclude"), one_of=False),
            OWN_SETTINGS,
        ),
        "Dead groups are trained on although the buffer has groups that could replace them.",
        "evidence.md#tiny-models",
        options=(
            Option("`replay_max_fraction=1.0`", Given("replay_max_fraction", (1.0,))),
            Option("`replay_max_age=None`", Given("replay_max_age", (None,))),
            Option("`replay_max_uses=None`", Given("replay_max_uses", (None,))),
            Option('`replay_unfilled="mask"`', Given("replay_unfilled", ("keep",), one_of=False)),
        ),
    ),
    Rule(
        "no correction",
        (Given("replay_correction", ("none",)), OWN_SETTINGS),
        'Replayed rows train as if they were fresh. Set `replay_correction="ratio"`.',
        "evidence.md#methods-of-papers",
        signs=(Bound(REPLACED, least=0.01), Bound(USES, least=2.0)),
    ),
    Rule(
        "overused",
        (Bound(USES, least=300.0), Bound(ALL_RIGHT, most=0.5)),
        "A few stored groups are trained on again and again, and the policy learns them by heart. Store more groups, "
        "take fewer updates a batch (`num_iterations`), or limit how often a group is used.",
        "evidence.md#why-sample_efficient-learns-more",
        options=(
            Option("`replay_buffer_size=64`", Given("replay_buffer_size", (64,))),
            Option("`replay_max_uses=12`", Given("replay_max_uses", (None,), one_of=False)),
        ),
    ),
    Rule(
        "stale buffer",
        (
            Given("replay_correction", ("none", "topr", "imitation"), one_of=False),
            Bound(ALL_RIGHT, most=0.5),
            Bound(UNTRAINED, most=0.1),
            Given(ROSE, (True,), one_of=False),
        ),
        "Stored completions are too off-policy, and the reward does not rise: halve `learning_rate`. If that is not "
        "enough, change the correction.",
        "evidence.md#methods-of-papers",
        signs=(Bound(DRIFT, least=1.0), Bound(ESS, most=0.5), Bound(RATIO, most=0.8)),
        options=(Option('`replay_correction="topr"`', Given("replay_correction", ("topr",))),),
    ),
    Rule(
        "masked rows",
        (Bound(GATED, least=0.5), Given("replay_correction", ("imitation",), one_of=False)),
        'The correction masks at least half of the replayed rows. Set `replay_correction="sequence_mask"` (0.5 to 2) '
        'instead of narrower limits, or `"ratio"`, the default.',
        "evidence.md#tiny-models",
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
    entries = steps(log)
    if len(entries) < FEWEST:
        return [], {}
    settings = {**settings, "replay_reward": settings.get("replay_reward") or judged_by(entries)}
    came_to = outcome_of(log, settings["replay_reward"])
    labeled = pays_0_or_1(entries)
    attached = any(DEAD_EXACT in entry for entry in entries)
    never_live = all(entry[DEAD] == 1 for entry in entries)
    entries = [{**_without_replay(entry, labeled, never_live), **entry} for entry in entries]
    last = entries[-max(int(LAST_PART * len(entries)), LEAST) :]
    names = {name for entry in last for name in entry if name.startswith("replay/")} | {CLIPPED, LONGEST}
    means = {name: value for name in names if (value := mean(last, name)) is not None}
    known = {
        UNTRAINED: 0.0,
        NO_REWARD: 0.0,
        ALL_RIGHT: 0.0,
        HIGHEST: 0.0,
        SILENT: 0.0,
        CAME_AGAIN: max(numbers(entries, "epoch"), default=0.0) >= 2,
        EARNED: _earned(entries, len(last), SUM if came_to is None else came_to.key),
        ROSE: came_to is not None and came_to.rose,
        TOLD_APART: labeled or attached,
        **means,
        **_derived(entries, last, settings, attached),
    }
    if DEAD_EXACT in known:  # which a damaged log may lack
        solved = max(known[ALL_RIGHT], known[HIGHEST])
        failing = max(known[DEAD_EXACT] - solved, known.get(LOWEST, 0.0))  # live groups may be all right, too
        size = settings.get(GENERATIONS)
        known[UNSOLVED] = failing ** (USUAL_SIZE / size) if is_number(size) and size >= 1 else failing
    dry_run = bool(settings.get("replay_dry_run")) or only_counted(last)
    known |= {WITHOUT_REPLAY: not attached or dry_run, "use_replay": attached, "replay_dry_run": dry_run}
    return [entry["step"] for entry in last], {**settings, **known}


def _derived(entries: Log, last: Log, settings: Mapping[str, Any], attached: bool) -> dict[str, Any]:
    """Facts that no single metric tells."""
    functions = [name[8:-5] for name in last[-1] if name.startswith("rewards/") and name.endswith("/mean")]
    found: dict[str, Any] = {FUNCTIONS: len(functions), UNSCORED: _unscored(last), NO_GRADIENT: _untaught(last)}
    rewards = numbers(last, SUM)
    found[LOW] = float(bool(rewards) and 0 <= min(rewards) <= max(rewards) <= LEARNED)
    found[COUNTED] = sum(attached or entry[DEAD_EXACT] > 0 for entry in entries if is_number(entry.get(DEAD_EXACT)))
    found[WAS_LIVE] = sum(entry[DEAD_EXACT] < 1 for entry in entries if is_number(entry.get(DEAD_EXACT)))
    if attached or len(functions) < 2:
        found[OF_FUNCTION] = 0.0
    if settings.get("replay_reward") is None:
        found |= _of_functions(functions, entries, last)
    stored = sum(numbers(last, "replay/stored"))
    if stored:
        found[CHURN] = sum(numbers(last, "replay/evicted")) / stored
    rollouts = numbers(last, "replay/rollouts")
    if len(rollouts) > 1 and rollouts[-1] > rollouts[0]:
        found[NO_REWARD] = sum(numbers(last[1:], "replay/failed_rows")) / (rollouts[-1] - rollouts[0])
    now, highest = mean(last, "entropy"), max(_windows(entries, "entropy"), default=0.0)
    if now is not None and highest > 0:
        found[ENTROPY] = now / highest
    least = min(_windows(entries, LOWEST), default=None)
    return found if least is None else {**found, BEFORE: least}


def _of_functions(functions: Sequence[str], entries: Log, last: Log) -> dict[str, Any]:
    """Facts about reward functions that did not differ over groups where their sum did: those that do so at times, or
    else those that never paid. One that is constant and pays may be a term that was learned; one that alone scores
    its groups differs where their sum does."""
    apart: dict[str, tuple[float, float]] = {}
    silent = []
    for name in functions:
        metric = OF_FUNCTION.replace(NAME, name)
        share, of_all, paid = mean(last, metric), mean(entries, metric), mean(last, f"rewards/{name}/mean")
        live = mean(last, LIVE_WITHOUT.replace(NAME, name))
        if share is None and len(functions) > 1 and _never_paid(entries, name):
            silent.append(name)
        if share is None or live is None or of_all is None or share < 0.5:
            continue
        pays = paid is None or paid > TINY
        if share < 1 or (of_all < 1 and not pays):
            apart[name] = share, share - live
        elif of_all == 1 and not pays:
            silent.append(name)
    apart = {name: shares for name, shares in apart.items() if shares[1] <= 0.5}
    if apart:
        most, of_sum = map(max, zip(*apart.values(), strict=True))
        return {OF_FUNCTION: most, SUM_THERE: of_sum, NAME: " or ".join(map(repr, apart))}
    return {SILENT: len(silent), NAME: " or ".join(map(repr, silent))} if silent else {}


def _never_paid(entries: Log, name: str) -> bool:
    """Tell whether a reward function gave 0 to every completion of a log of TRL's."""
    told = [numbers(entries, f"rewards/{name}/{statistic}") for statistic in ("mean", "std")]
    return all(len(values) == len(entries) and max(map(abs, values)) <= TINY for values in told)


def _untaught(last: Log) -> float:
    """Return the share of steps without a gradient among those with a live group; 0 where none is logged."""
    live = [entry["grad_norm"] for entry in last if "grad_norm" in entry and entry.get(DEAD_EXACT, 1) < 1]
    return sum(not is_number(norm) or norm == 0 for norm in live) / len(live) if live else 0.0


def _unscored(last: Log) -> float:
    """Return the share of a log's steps whose mean reward or its deviation is no number; 0 where none is logged."""
    told = [is_number(entry.get("reward")) and is_number(entry.get("reward_std")) for entry in last]
    return 1 - sum(told) / len(told) if any("reward_std" in entry for entry in last) else 0.0


def healthy_before(log: Log) -> float | None:
    """Return the last logged step before a collapse that goes on at the end of a log; None if there is none."""
    now = log[-1].get(LOWEST) if log else None
    if not is_number(now) or now < LEAST_DEAD:  # before the whole log is looked at, which may be long
        return None
    entries = [entry for entry in log if is_number(entry.get(LOWEST))]
    if len(entries) < 2 * FEWEST or entries[-1][LOWEST] < LEAST_DEAD:
        return None
    recent, earlier = entries[-FEWEST:], entries[:-FEWEST]
    facts = {LOWEST: mean(recent, LOWEST), BEFORE: min(_windows(earlier, LOWEST), default=1.0)}
    now, highest = mean(recent, "entropy"), max(_windows(entries, "entropy"), default=0.0)
    facts[ENTROPY] = None if now is None or highest <= 0 else now / highest
    if not all(bound.holds(facts) for bound in COLLAPSED):
        return None
    return float(max(entry["step"] for entry in earlier if entry[LOWEST] < LEAST_DEAD))


def _earned(entries: Log, count: int, key: str) -> float:
    """Return the mean reward of the last entries as a share of the best mean; 1 where none is high enough to tell, and
    where one is negative."""
    count = max(count, FEWEST_TO_FALL)
    if any(value < 0 for value in numbers(entries, key)):
        return 1.0
    best, now = max(_windows(entries, key, count), default=0.0), mean(entries[-count:], key)
    return 1.0 if now is None or best < LEARNED else min(now / best, 1.0)


def _windows(entries: Log, name: str, count: int = LEAST) -> list[float]:
    """Means of each `count` entries, one after the other."""
    parts = [entries[at : at + count] for at in range(0, len(entries) - count + 1, count)]
    return [value for part in parts if (value := mean(part, name)) is not None]


def _without_replay(entry: Mapping[str, Any], labeled: bool, never_live: bool) -> dict[str, float]:
    """Derive what replay would have logged, at least, where TRL alone logged an entry.

    Args:
        entry (`Mapping[str, Any]`): One of TRL's.
        labeled (`bool`): Its rewards are 0 and 1.
        never_live (`bool`): No group of the whole log was live, so that nothing would have been stored.
    """
    dead = entry[DEAD]
    if DEAD_EXACT in entry or not is_number(dead):
        return {}
    found = {DEAD_EXACT: dead, SIZE: 0.0} if never_live else {DEAD_EXACT: dead}
    if not labeled:
        return found
    (wrong, _), (right, _) = dead_bounds(dead, entry["reward"])
    return {**found, ALL_WRONG: wrong, LOWEST: wrong, ALL_RIGHT: right, HIGHEST: right}


def advise(log: Log, settings: Mapping[str, Any]) -> tuple[str, list[Advice]]:
    """Return which steps advice is about, in words, and what to change.

    Args:
        log (`Log`): Of a run with or without replay.
        settings (`Mapping[str, Any]`): Of [`ReplayConfig`]; none where they are not known.
    """
    last, facts = facts_of(log, settings)
    if not last:
        return f"{len(steps(log))} steps were logged, and {FEWEST} are needed", []
    about = f"updates {last[0]:g} to {last[-1]:g}"
    applying = [rule for rule in RULES if rule.applies(facts)]
    if applying and applying[0].name in NOTHING_ELSE_HELPS:
        applying = [applying[0], *(rule for rule in applying if rule.name in LED_THERE)]
    return about, [rule.words(facts) for rule in applying]


def remedy_for_masks(settings: Mapping[str, Any]) -> str:
    """Return what to change where all that is replayed is masked; nothing where the correction means to."""
    found = [rule for rule in RULES if rule.applies({**settings, GATED: 1.0})]
    return found[0].told(settings).replace("`", "") if found else ""


def of_caps(held_back: Mapping[str, int], replaced: int, settings: Mapping[str, Any]) -> list[Advice]:
    """Return what to change where a limit kept replay from a good part of what it could have replaced.

    Args:
        held_back (`Mapping[str, int]`): By setting, slots that stored groups could have filled without it.
        replaced (`int`): Groups that were replaced.
        settings (`Mapping[str, Any]`): Of [`ReplayConfig`].
    """
    if not OWN_SETTINGS.holds(settings):
        return []
    return [
        Advice(
            f"{name}={settings[name]!r} left {count} of {count + replaced} slots as they were that could be filled",
            f"A limit holds replay back: raise {name}, or leave it out.",
            "docs/choosing.md",
        )
        for name, count in held_back.items()
        if count >= HELD_BACK * (count + replaced)
    ]


def what_to_change(log: Log, settings: Mapping[str, Any], caps: Sequence[Advice] = ()) -> list[str]:
    """Return what to change in lines, the first thing first; one line that says so where there is nothing.

    Args:
        log (`Log`): Of a run with or without replay.
        settings (`Mapping[str, Any]`): Of [`ReplayConfig`].
        caps (`Sequence[Advice]`): What is known from elsewhere.
    """
    about, found = advise(log, settings)
    return in_lines(about, [*found, *caps], outcome_of(log, settings.get("replay_reward")), has_replayed(log))


def in_lines(about: str, found: Sequence[Advice], came_to: Outcome | None, replayed: bool = False) -> list[str]:
    """Describe advice in lines: a title and the first thing, then the others."""
    if not found:
        return [f"what to change: {nothing(about, came_to, replayed)}"]
    lines = [f"{change} ({seen}; {page})" for seen, change, page in found]
    return [f"what to change, by {about}: {lines[0]}", *(f"then: {line}" for line in lines[1:])]


def has_replayed(log: Log) -> bool:
    """Tell whether a log is of a run that trained on stored groups."""
    return any(is_number(entry.get(USES)) for entry in log) and not only_counted(log)


def nothing(about: str, came_to: Outcome | None, replayed: bool = False) -> str:
    """Describe that no rule applies, and no more than a log shows: whether replay helped, another run tells."""
    if came_to is not None and came_to.generated_once:
        return _by_evaluations(came_to)
    if not about.startswith("updates"):
        return f"too few steps to tell: {about}, best with logging_steps=1"
    unseen = f"nothing, by {about}"
    if replayed:
        unseen += "; whether replay helped, a run without it tells (trl-replay report)"
    if came_to is None or came_to.steps < FEWEST_TO_FALL:
        return unseen
    best, last = came_to.best, came_to.last
    if best - last > max(FALL * abs(best), FALL_ERRORS * came_to.error):
        return (
            f"no rule names a fault by {about}, but the reward fell from {best:.2g} to {last:.2g}: go back to a "
            "checkpoint from before, and try half the learning_rate"
        )
    return unseen if came_to.rose else f"no rule names a fault by {about}, but the reward did not rise"


def _by_evaluations(came_to: Outcome) -> str:
    """The same of a run that does not generate again, whose reward is logged once."""
    if len(came_to.evaluated) < 2:
        return "evaluate (eval_strategy, eval_dataset): nothing else shows what a run learns that does not generate"
    if came_to.rose:
        return "nothing, by the evaluations"
    return "no rule names a fault, but the reward on evaluation prompts did not rise: try half the learning_rate"
