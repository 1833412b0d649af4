"""What happened: counters of one generation batch, the metrics made of them, and totals that explain a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .types import Floats

NO_ROOM = "the storage had no room for it"


@dataclass(slots=True)
class Tally:
    """Counters of one generation batch on one rank. They are summed over ranks before metrics are made of them.

    Attributes:
        items_delta (`float`): Trainable tokens put in, less those taken out.
        groups, dead, dead_after, replaced (`float`): Groups of the batch; dead before and after replay; replaced.
        stored, evicted, refused (`float`): Newcomers that stayed; old entries that lost by rank; groups never
            admitted.
        retired (`float`): Entries that left because they had drifted off the policy or their prompt was solved.
        excluded, excluded_items (`float`): Dead groups taken out of the loss's denominator, and their tokens.
        size, bytes (`float`): Entries and bytes of the buffer after this batch.
        age, uses, score (`float`): Sums over the replayed groups.
    """

    items_delta: float = 0
    groups: float = 0
    dead: float = 0
    dead_after: float = 0
    replaced: float = 0
    stored: float = 0
    evicted: float = 0
    refused: float = 0
    retired: float = 0
    excluded: float = 0
    excluded_items: float = 0
    size: float = 0
    bytes: float = 0
    age: float = 0
    uses: float = 0
    score: float = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def refuse(self, count: int, reason: str) -> None:
        """Counts groups that will never be admitted, and why."""
        if count:
            self.refused += count
            self.reasons[f"a group was refused: {reason}"] += count

    def retire(self, count: int, reason: str) -> None:
        """Counts entries that left before their time, and why."""
        if count:
            self.retired += count
            self.reasons[f"an entry left: {reason}"] += count

    def vector(self) -> Floats:
        """All counters in the order of the fields."""
        return np.array([getattr(self, name) for name in COUNTERS], dtype=np.float64)


COUNTERS = tuple(counter.name for counter in fields(Tally) if counter.name != "reasons")


def metrics(total: Mapping[str, float]) -> dict[str, float]:
    """The `replay/*` metrics of one generation batch from its counters, summed over ranks; undefined ones are
    absent."""
    values = {
        "replay/size": total["size"],
        "replay/bytes": total["bytes"],
        "replay/stored": total["stored"],
        "replay/evicted": total["evicted"],
        "replay/refused": total["refused"],
        "replay/retired": total["retired"],
        "replay/dead_fraction": total["dead"] / total["groups"],
        "replay/dead_fraction_after": total["dead_after"] / total["groups"],
        "replay/replaced_fraction": total["replaced"] / total["groups"],
    }
    if total["replaced"]:
        for name in ("age", "uses", "score"):
            mean = total[name] / total["replaced"]
            if np.isfinite(mean):
                values[f"replay/{name}_mean"] = mean
    return values


class Totals:
    """Counters over the whole session, and why slots stayed as they were."""

    def __init__(self) -> None:
        self.batches = 0
        self.counters: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def add(self, tally: Tally, batches: int = 1) -> None:
        """Adds the counters of `batches` generation batches."""
        self.batches += batches
        for name in COUNTERS:
            self.counters[name] += getattr(tally, name)
        self.reasons.update(tally.reasons)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "batches": self.batches,
            "counters": {name: float(count) for name, count in self.counters.items()},
            "reasons": dict(self.reasons),
        }

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave on one rank, or on several that this one follows; nothing if on none."""
        self.batches = max((state["batches"] for state in states), default=0)
        self.counters = Counter()
        self.reasons = Counter()
        for state in states:
            self.counters.update(state["counters"])
            self.reasons.update(state["reasons"])

    def explain(self, size: int, dry_run: bool = False) -> str:
        """What was replayed (in a dry run: would have been) and, where replaceable groups stayed, why; in plain
        words."""
        count = self.counters
        if not self.batches:
            return "replay: no generation batch was scored since attach (was trainer.train() called?)"
        number = {name: int(total) for name, total in count.items()}
        dead_share = number["dead"] / number["groups"]
        replacing = "would have been replaced (dry run)" if dry_run else "replaced"
        facts = [
            f"{self.batches} generation batches",
            f"{number['groups']} groups",
            f"{number['dead']} dead ({dead_share:.0%})",
            f"{number['replaced']} {replacing}; {number['stored']} stored",
            f"{number['evicted']} evicted",
            f"{number['refused']} refused; {size} in the buffer",
        ]
        lines = [f"replay: {', '.join(facts)}"]
        if number["replaced"] == 0:
            lines.append("nothing was replayed:")
        elif self.reasons:
            lines.append("where less was replayed, or a group was refused:")
        for reason, times in self.reasons.most_common():
            lines.append(f"  {times} x {reason}")
        return "\n".join(lines)
