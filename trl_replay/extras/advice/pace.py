"""What further updates of a batch cost, by the time that its generation takes."""

from __future__ import annotations

import numpy as np

from .logged import DEAD, Log, is_number, numbers

FEWEST_UPDATES = 8
"""By so many at least a cost is told."""
STEP_TIME = "step_time"
"""TRL's metric of an update's seconds, generation included."""
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five"}
SHARES = ("half", "third", "quarter", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
ABOUT = 0.08
"""How far a share may be from the fraction that names it, relative to it."""


FORWARD = 1 / 3
"""A forward pass without gradients, in training passes."""


def cost_of(passes: float, updates: int = 2, forwards: int = 0) -> tuple[float, float]:
    """Return how many times the time of one update a batch several cost, and the share of the completions that they
    must save to pay.

    A batch takes `passes` + 1 passes with one update, and `passes` + `updates` with several, and a third of a pass for
    each further forward pass.

    Args:
        passes (`float`): Time of generating a batch, in passes of training over it.
        updates (`int`): Updates that train on it, one pass each.
        forwards (`int`): Forward passes over it that one update does not need.
    """
    one, several = passes + 1, passes + updates + forwards * FORWARD
    return several / one, 1 - one / several


def in_words(passes: float, updates: int = 2, unit: str = "updates a batch") -> str:
    """Return the same as a sentence."""
    times, saved = cost_of(passes, updates)
    most, saved_at_most = cost_of(passes, updates, forwards=2)
    told = f"{passes:.2g}" if passes < 99.5 else f"{passes:.0f}"
    several = f"{NUMBERS.get(updates, updates)} {unit}"
    return (
        f"generation takes {told} training passes: {several} cost {times:.2g} times the time; they pay if they "
        f"save {_share(saved)} of the completions (with the old log-probs and the reference model of the preset "
        f"sample_efficient: {most:.2g} times, and {_share(saved_at_most)})"
    )


def _share(share: float) -> str:
    nearest = round(1 / share)
    if 2 <= nearest < 2 + len(SHARES) and abs(share * nearest - 1) <= ABOUT:
        return "half" if nearest == 2 else f"a {SHARES[nearest - 2]}"
    return f"{share:.0%}".replace("%", " %")


def passes_in(log: Log) -> float | None:
    """Return what the steps tell that train on a batch again, which take as long as those that generate, less
    generation. None where a log has too few of either."""
    timed = [entry for entry in log if is_number(entry.get("step")) and is_number(entry.get(STEP_TIME))]
    generated = numbers([entry for entry in timed if DEAD in entry], STEP_TIME)
    trained = numbers([entry for entry in timed if DEAD not in entry], STEP_TIME)
    if min(len(generated), len(trained)) < FEWEST_UPDATES:
        return None
    alone = float(np.median(trained))
    passes = (float(np.median(generated)) - alone) / (alone + _beside(log, timed)) if alone > 0 else -1.0
    return passes if passes > 0 else None


def _beside(log: Log, timed: Log) -> float:
    """Return the seconds of an update that its `step_time` leaves out: on a GPU the end of the backward pass, and the
    optimizer's step."""
    runtimes = numbers(log, "train_runtime")
    if not runtimes:
        return 0.0
    total = sum(numbers(timed, STEP_TIME))
    return max(runtimes[-1] - total, 0.0) / len(timed)
