"""Counters of one generation batch, the metrics computed from them, and totals that explain a run."""

from __future__ import annotations

import math
import operator
import warnings
from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from ..errors import ResultError
from .success import Success
from .table import Table
from .types import Bools, Floats, Groups, Ints

DRY_RUN = "replay/dry_run"
"""1 where replay only counted: what it logs as replaced was not."""
JUDGED_BY = "replay/judged_by"
"""With a name after it, 1 where that reward function counts (`replay_reward`)."""
GATED, DRIFT, SEQUENCE_DRIFT = "replay/gated_fraction", "replay/drift_mean", "replay/sequence_drift_mean"
WEIGHTS = ("replay/weight_positive", "replay/weight_negative")
"""What a correction multiplies replayed tokens of positive and of negative advantages by, on average."""
LIVE_WITHOUT = "replay/live_without/"
"""With a reward function's name after it."""


class Metric(NamedTuple):
    """What is known about a metric of a batch.

    Attributes:
        counter, per (`str`): The counter that it is, or its share of another one; none where it is measured.
        over (`str`): What a log entry has of its batches: their `"mean"`, their `"sum"`, or the `"last"` value.
        where (`str`): Where the log has it: `"always"`; `"not 0"`, where it is not; `"judged"` or `"in doubt"`, while
            it is known, or not, what passes; `"never"`, in `session.metrics` alone; with another metric; or while a
            setting is not the default one.
        least (`float`): Value from which on it is logged whatever the setting is.
    """

    counter: str = ""
    per: str = ""
    over: str = "mean"
    where: str = "always"
    least: float = math.inf


METRICS: Mapping[str, Metric] = {
    "replay/size": Metric("size", over="last"),
    "replay/tasks": Metric("tasks", over="last", where="replay_task_columns"),
    "replay/bytes": Metric("bytes", over="last", where="replay_max_bytes"),
    "replay/stored": Metric("stored", over="sum", where="replay_selector"),
    "replay/evicted": Metric("evicted", over="sum", where="replay_evictor"),
    "replay/refused": Metric("refused", over="sum", where="not 0"),
    "replay/retired": Metric("retired", over="sum", where="not 0"),
    "replay/dead_fraction": Metric("dead", "generated"),
    "replay/lowest_fraction": Metric("at_lowest", "generated", where="in doubt"),
    "replay/highest_fraction": Metric("at_highest", "generated", where="in doubt"),
    "replay/untrained_fraction": Metric("untrained", "generated", where="not 0"),
    "replay/failed_rows": Metric("failed", over="sum", where="not 0"),
    "replay/dead_fraction_after": Metric("dead_after", "groups"),
    "replay/replaced_fraction": Metric("replaced", "groups"),
    "replay/replaced_rows_fraction": Metric("rows", "rows of the batch", where="replay_mixer"),
    "replay/masked_rows_fraction": Metric("muted", "rows of the batch", where="not 0"),
    "replay/lost": Metric("lost", over="sum", where="not 0"),
    "replay/all_wrong_fraction": Metric("all_wrong", "generated", where="judged"),
    "replay/all_right_fraction": Metric("all_right", "generated", where="judged"),
    "replay/age_mean": Metric("age", "entries"),
    "replay/uses_mean": Metric("uses", "entries", where="replay_max_uses", least=100.0),
    "replay/score_mean": Metric("score", "entries", where="replay_scorer"),
    "replay/rollouts": Metric(over="last"),
    "replay/replay_ratio": Metric(over="last"),
    DRY_RUN: Metric(over="last"),
    LIVE_WITHOUT: Metric(where="not 0"),
    "replay/capped_fraction": Metric(where="not 0"),
    "replay/kl_dropped_fraction": Metric(where="not 0"),
    GATED: Metric(where="not 0"),
    **dict.fromkeys((DRIFT, *WEIGHTS), Metric(where="replay_correction")),
    "replay/fresh_kl": Metric(where="replay_kl"),
    **dict.fromkeys(("replay/clip_ratio", "replay/fresh_clip_ratio"), Metric(where=SEQUENCE_DRIFT)),
    **dict.fromkeys(("replay/fresh_entropy", "replay/padding", "replay/seconds"), Metric(where="never")),
}
"""By key, in the order of a log. All others are measured, averaged, and always logged."""
UNTRAINED = "a group counted as dead though its rewards differ: no row with an advantage trains a token"
OF_NO_TASK = "a group counts as a task of its own: its prompts differ, and its environment has no task_id"
BY_THE_SUM = "a group was judged by the weighted sum: the function that replay_reward names did not score it"

HELD_BACK = " left a slot as it was that a stored group could have filled"
"""After the name of a setting: a reason why less was replayed."""


@dataclass(slots=True)
class Tally:
    """Counters of one generation batch on one rank, summed over ranks before metrics are computed.

    Attributes:
        items (`float`): Trainable tokens of the batch as TRL scored it.
        items_delta (`float`): Trainable tokens put in, less those taken out or masked.
        groups, dead_after, replaced (`float`): Groups of the batch; dead after replay; replaced.
        generated, dead (`float`): Groups generated for it, those of all rounds; dead ones among them.
        all_wrong, all_right (`float`): Groups generated for it in which no row passes, and in which all do; none while
            it is not known what passes.
        at_lowest, at_highest (`float`): Dead groups generated for it at the lowest and the highest reward seen so far.
        untrained (`float`): Groups generated for it that are dead for want of trained tokens alone.
        failed (`float`): Rows generated for it that no reward function scored.
        refilled, surplus (`float`): Groups of further rounds that took a slot, and those that did not.
        stored, evicted, refused (`float`): Newcomers that stayed; old entries that lost by rank; groups never
            admitted.
        retired (`float`): Entries that left because their prompt was solved, or another reward rule scored them.
        excluded (`float`): Groups of which all rows are masked.
        size, tasks, bytes (`float`): Entries of the buffer after this batch, the tasks that they are of, and bytes.
        entries, rows (`float`): Entries that gave a row; rows that they gave.
        masked (`float`): Masked rows of other groups.
        muted (`float`): Masked and silent rows of all groups but dead ones that stay as they are.
        iterated (`float`): Groups drawn in iterations 2 and up.
        lost (`float`): Live groups that can't be stored, since the loss did not see all of their rows.
        age, uses, score (`float`): Sums over the entries that gave a row.
    """

    items: float = 0
    items_delta: float = 0
    groups: float = 0
    generated: float = 0
    refilled: float = 0
    surplus: float = 0
    dead: float = 0
    all_wrong: float = 0
    all_right: float = 0
    at_lowest: float = 0
    at_highest: float = 0
    untrained: float = 0
    failed: float = 0
    dead_after: float = 0
    replaced: float = 0
    stored: float = 0
    evicted: float = 0
    refused: float = 0
    retired: float = 0
    excluded: float = 0
    entries: float = 0
    rows: float = 0
    masked: float = 0
    muted: float = 0
    iterated: float = 0
    lost: float = 0
    size: float = 0
    tasks: float = 0
    bytes: float = 0
    age: float = 0
    uses: float = 0
    score: float = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def note(self, count: int, reason: str) -> None:
        """Count a reason why less was replayed."""
        if count:
            self.reasons[reason] += count

    def refuse(self, count: int, reason: str) -> None:
        """Count groups that are rejected, with the reason."""
        self.refused += count
        self.note(count, f"a group was refused: {reason}")

    def retire(self, count: int, reason: str) -> None:
        """Count entries that were removed early, with the reason."""
        self.retired += count
        self.note(count, f"an entry left: {reason}")

    def judge(self, new_groups: Groups, passed: Bools, success: Success) -> None:
        """Count how generated groups went.

        Args:
            new_groups ([`Groups`]): The groups.
            passed (`(n, G)`): Which of their rows pass.
            success ([`Success`]): What the lowest and the highest reward are.
        """
        unscored = new_groups.unscored
        self.generated += len(new_groups)
        self.dead += int(new_groups.dead.sum())
        self.failed += int(new_groups.failed.sum())
        self.at_lowest += int(success.at_lowest(new_groups).sum())
        self.at_highest += int(success.at_highest(new_groups).sum())
        self.all_wrong += int((~passed.any(axis=1) & ~unscored.all(axis=1)).sum())
        self.all_right += int((passed.any(axis=1) & (passed | unscored).all(axis=1)).sum())
        for_want_of_tokens = new_groups.dead & ~new_groups.trains.all(axis=1)
        untrained = int((for_want_of_tokens & ~new_groups.equal_rewards).sum()) if for_want_of_tokens.any() else 0
        self.untrained += untrained
        self.note(untrained, UNTRAINED)
        self.note(int((unscored.all(axis=1) & ~new_groups.failed.all(axis=1)).sum()), BY_THE_SUM)
        self.note(int((new_groups.prompt < 0).sum()), OF_NO_TASK)

    def replay(self, table: Table, rows: Ints, update: int) -> None:
        """Count that these rows of the table give rows, at an update."""
        self.entries = len(rows)
        self.age = float((update - table.update[rows]).sum())
        self.score = float(table.score[rows].sum())
        self.uses = float(table.uses[rows].sum())

    def of_iteration(self) -> Tally:
        """Return what a further iteration adds to a run's totals, which has no generated groups and no fresh slots."""
        settled = {name: getattr(self, name) for name in SETTLED}
        return Tally(**settled, iterated=self.replaced, reasons=self.reasons)

    def vector(self) -> Floats:
        """Return all counters in the order of the fields."""
        return np.array(COUNTS_OF(self), dtype=np.float64)


COUNTERS = tuple(counter.name for counter in fields(Tally) if counter.name != "reasons")
COUNTS_OF = operator.attrgetter(*COUNTERS)


def metrics(total: Mapping[str, float], size: int, judged: bool = True) -> dict[str, float]:
    """Return the `replay/*` metrics of one generation batch; undefined ones are omitted.

    Args:
        total (`Mapping[str, float]`): Its counters, summed over ranks.
        size (`int`): Rows of a group.
        judged (`bool`): Whether it is known what passes.
    """
    of = {**total, "rows of the batch": total["groups"] * size, "": 1.0}
    values = {
        key: of[metric.counter] / of[metric.per]
        for key, metric in METRICS.items()
        if metric.counter and of[metric.per] and (judged or metric.where != "judged")
    }
    return {key: value for key, value in values.items() if math.isfinite(value)}


def about(key: str) -> Metric:
    """Return what is known about a metric."""
    return METRICS.get(LIVE_WITHOUT if key.startswith(LIVE_WITHOUT) else key, Metric())


def own_metrics(values: Mapping[str, float], taken: Mapping[str, float]) -> dict[str, float]:
    """Return a plugin's finite metrics; warn about the others.

    Args:
        values (`Mapping[str, float]`): By key.
        taken (`Mapping[str, float]`): Those of others.

    Raises:
        ResultError: A key is taken.
    """
    twice = sorted(values.keys() & taken.keys())
    if twice:
        raise ResultError(f"trl_replay_metrics of a plugin returned {twice[0]!r}, which is already logged: rename it.")
    for key, value in values.items():
        if not math.isfinite(value):
            warnings.warn(
                f"trl_replay_metrics of a plugin returned {key}={value}, which is not logged: omit undefined values, "
                "or fix the plugin.",
                stacklevel=2,
            )
    return {key: value for key, value in values.items() if math.isfinite(value)}


def log(values: Mapping[str, float], averaged: Mapping[str, list[float]]) -> None:
    """Add a batch's metrics to those that the trainer's log averages, sums and last values as such.

    Args:
        values (`Mapping[str, float]`): By key.
        averaged (`Mapping[str, list[float]]`): A list a key, which a log entry empties.
    """
    for key, value in values.items():
        waiting, over = averaged[key], about(key).over
        if over != "mean":
            value += sum(waiting) if over == "sum" else 0.0
            waiting.clear()
        waiting.append(value)


def drop_zeros(averaged: dict[str, list[float]]) -> None:
    """Take losses and refusals that are 0 off what the trainer is about to log.

    Args:
        averaged (`dict[str, list[float]]`): A list a key.
    """
    for key in [key for key in averaged if about(key).where == "not 0" and not any(averaged[key])]:
        del averaged[key]


SETTLED = ("stored", "evicted", "refused", "retired")
"""Counters that change when candidates settle, at a generation batch or at a further iteration."""


def _add_to(sums: MutableMapping[str, Any], added: Mapping[str, float]) -> None:
    for name, count in added.items():
        sums[name] += count


class Totals:
    """Counters over the whole session, and the reasons why slots stayed fresh.

    Attributes:
        unit (`str`): What is counted as a batch.
        metrics (`dict[str, float]`): Of the last generation batch.
    """

    def __init__(self) -> None:
        self.unit = "generation batches"
        self.batches = 0
        self.metrics: dict[str, float] = {}
        self.counters: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.of_all_ranks: Counter[str] = Counter()

    def add(self, tally: Tally, batches: int = 1, of_all_ranks: Mapping[str, float] | None = None) -> None:
        """Add the counters of `batches` generation batches.

        Args:
            tally ([`Tally`]): This rank's.
            batches (`int`): How many.
            of_all_ranks (`Mapping[str, float]`, *optional*): The same, summed over all ranks.
        """
        self.batches += batches
        _add_to(self.of_all_ranks, of_all_ranks or {})
        _add_to(self.counters, dict(zip(COUNTERS, COUNTS_OF(tally), strict=True)))
        _add_to(self.reasons, tally.reasons)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "batches": self.batches,
            "counters": {name: float(count) for name, count in self.counters.items()},
            "reasons": dict(self.reasons),
            "of_all_ranks": {name: float(count) for name, count in self.of_all_ranks.items()},
        }

    def load_state_dict(self, any_rank: Mapping[str, Any], *own: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`.

        Args:
            any_rank (`Mapping`): On any rank: what all of them did together.
            *own (`Mapping`): On the ranks that this one follows.
        """
        self.batches = any_rank["batches"]
        self.of_all_ranks = Counter(any_rank["of_all_ranks"])
        self.counters.clear()
        self.reasons.clear()
        for state in own:
            self.counters.update(state["counters"])
            self.reasons.update(state["reasons"])

    def explain_without_buffer(self) -> str:
        """Describe what was generated and shaped on all processes, if nothing is stored."""
        count = self.of_all_ranks
        trained_on = count["groups"] - count["excluded"]
        live = (count["groups"] - count["dead_after"]) / max(trained_on, 1)
        return (
            f"replay: no buffer (replay_buffer_size=0); {self.batches} generation batches, {_generated(count)}; "
            f"{live:.0%} of the groups trained on were live"
        )

    def explain(self, size: int, dry_run: bool = False, rank: int = 0, ranks: int = 1, used: str = "") -> str:
        """Describe what was replayed (in a dry run: would have been) and why replaceable groups were not replaced.

        Args:
            size (`int`): Entries in this rank's buffer.
            dry_run (`bool`): Whether nothing was exchanged.
            rank (`int`): This process.
            ranks (`int`): Number of processes; with several, what all of them did together stands below.
            used (`str`): How often the entries were used, in words.
        """
        if not self.batches:
            why = "(was trainer.train() called?)"
            return "\n".join([f"replay: no {self.unit} since attach {why}", *self._told_reasons()])
        who = "replay" if ranks == 1 else f"replay on rank {rank} of {ranks}"
        lines = [
            f"{who}: {self.batches} {self.unit}, {_replaced(self.counters, dry_run)}",
            f"buffer: {_stored(self.counters)}, {size} held{used}",
        ]
        if ranks > 1:
            count = self.of_all_ranks
            lines.append(f"all ranks together: {_replaced(count, dry_run)}; {_stored(count)}")
        if not (self.counters["replaced"] or self.counters["iterated"]):
            cause = ":" if self.reasons else ": the buffer has just begun"
            lines.append(f"nothing was replayed{cause}")
        elif self.reasons:
            lines.append("why groups were not replaced or stored:")
        return "\n".join([*lines, *self._told_reasons()])

    def _told_reasons(self) -> list[str]:
        return [f"  {times} x {reason}" for reason, times in self.reasons.most_common()]


def _generated(count: Mapping[str, float]) -> str:
    """Counters of what was generated, in words."""
    groups, again = int(count["generated"]), int(count["generated"] - count["groups"])
    dead_share = count["dead"] / max(groups, 1)
    rounds = f" ({again} of them in further rounds, which refilled {count['refilled']:.0f} slots)" if again else ""
    return f"{groups} groups{rounds}, {count['dead']:.0f} dead ({dead_share:.0%})"


def _replaced(count: Mapping[str, float], dry_run: bool) -> str:
    """Counters of what was generated and replaced, in words."""
    replacing = "would have been replaced (dry run)" if dry_run else "replaced"
    drawn_anew = f", {count['iterated']:.0f} drawn in further iterations" if count["iterated"] else ""
    return f"{_generated(count)}, {count['replaced']:.0f} {replacing}{drawn_anew}"


def _stored(count: Mapping[str, float]) -> str:
    """Counters of the buffer, in words."""
    return f"{count['stored']:.0f} stored, {count['evicted']:.0f} evicted, {count['refused']:.0f} refused"
