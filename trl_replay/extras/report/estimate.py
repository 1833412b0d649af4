"""`trl-replay estimate`: what replay could do for a run of GRPO, with or without replay, from what the run logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import ReplayError
from ..advice.logged import (
    ALL_RIGHT,
    ALL_WRONG,
    DEAD,
    DEAD_EXACT,
    Bounds,
    Log,
    dead_bounds,
    is_number,
    only_counted,
    pays_0_or_1,
)
from ..advice.outcome import Outcome, outcome_of
from ..advice.pace import passes_in
from ..advice.rules import GENERATIONS, Advice
from .inspection import advice_on, settings_of
from .log import HOW_TO_MAKE_ONE, STEPS, read_log


class Step(NamedTuple):
    """The shares of a step's groups that are dead, all wrong and all right; the latter as bounds, if there are any."""

    dead: float
    all_wrong: Bounds | None
    all_right: Bounds | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate of replay's use from a run's log.

    Attributes:
        source (`str`): Where it was read from.
        dead (`float`): Share of dead groups over the whole run.
        all_wrong, all_right (`tuple[float, float]`, *optional*): Least and greatest shares of groups without and with
            nothing but passing completions. TRL's log gives bounds where it shows that every reward was 0 or 1
            (one function, `logging_steps=1`), and none elsewhere.
        outcome ([`Outcome`], *optional*): Where its reward began and ended.
        had_replay (`bool`): Replay was attached to the run.
        dry_run (`bool`): It replaced nothing (`replay_dry_run`).
        num_generations (`int`, *optional*): Completions of a group: given, or of the checkpoint; None where it is not
            known. The advice then takes 8.
        generation_passes (`float`, *optional*): Time of generating a batch, in passes of training over it, where the
            log tells it.
        about (`str`): The steps that the advice is about, in words.
        advice (`list[Advice]`): What to change.
    """

    source: str
    dead: float
    all_wrong: Bounds | None
    all_right: Bounds | None
    outcome: Outcome | None
    had_replay: bool
    dry_run: bool
    num_generations: int | None
    generation_passes: float | None
    about: str
    advice: list[Advice]


def estimate(source: str | Path, num_generations: int | None = None) -> Estimate:
    """Estimate what replay could do for a run.

    Args:
        source (`str` or `Path`): A run's `output_dir`, one of its checkpoints, or a file of its metrics.
        num_generations (`int`, *optional*): The trainer's, which its log does not tell.

    Raises:
        ReplayError: There is nothing to read, or it is no log of GRPO.
    """
    path = Path(source)
    log = read_log(path)
    labeled = pays_0_or_1([entry for entry in log if DEAD in entry])
    steps = [step for entry in log if (step := _logged(entry, labeled))]
    if not steps:
        raise ReplayError(_what_is_missing(path, log))
    dead = float(np.mean([step.dead for step in steps]))
    settings = settings_of(path)
    if num_generations is not None:
        settings[GENERATIONS] = num_generations
    about, advice = advice_on(log, settings)
    return Estimate(
        source=str(path),
        dead=dead,
        all_wrong=_mean_known([step.all_wrong for step in steps]),
        all_right=_mean_known([step.all_right for step in steps]),
        outcome=outcome_of(log, settings.get("replay_reward")),
        had_replay=any(DEAD_EXACT in entry for entry in log),
        dry_run=only_counted(log),
        num_generations=settings.get(GENERATIONS),
        generation_passes=passes_in(log),
        about=about,
        advice=advice,
    )


def _what_is_missing(path: Path, log: Log) -> str:
    """Say why a log can't be used, by what it has."""
    told = [entry for entry in log if is_number(entry.get(DEAD)) or is_number(entry.get(DEAD_EXACT))]
    if told:
        return (
            f"{path} tells no step of its shares of dead groups: name the column {STEPS[0]!r} (or one of "
            f"{', '.join(STEPS[1:])})."
        )
    names = list(dict.fromkeys(str(name) for entry in log for name in entry))
    if "reward_std" in names:
        return f"{path} has rewards and no share of dead groups, {DEAD!r}: older releases of TRL did not log it."
    has = f"It has {', '.join(names[:8])}{' …' if len(names) > 8 else ''}. " if names else ""
    return (
        f"{path} says nothing about dead groups: {DEAD!r} was never logged. {has}Is it a run of GRPO? TRL's "
        f"AsyncGRPOTrainer does not log it without replay. To make a log: {HOW_TO_MAKE_ONE}."
    )


def _logged(entry: Mapping[str, Any], labeled: bool) -> Step | None:
    """The shares of an entry of a trainer's log; None if it is not of a step. Only of `labeled` entries does TRL's log
    bound them."""
    exact = is_number(entry.get(DEAD_EXACT))
    dead = entry[DEAD_EXACT] if exact else entry.get(DEAD)
    if not is_number(entry.get("step")) or not is_number(dead):
        return None
    wrong, right = entry.get(ALL_WRONG), entry.get(ALL_RIGHT)
    if is_number(wrong) and is_number(right):
        return Step(dead, (wrong, wrong), (right, right))
    if exact or not labeled:
        return Step(dead, None, None)
    return Step(dead, *dead_bounds(dead, entry["reward"]))


def _mean_known(bounds: Sequence[Bounds | None]) -> Bounds | None:
    known = [bound for bound in bounds if bound is not None]
    if not known:
        return None
    least, greatest = np.mean(known, axis=0).tolist()
    return least, greatest
