"""`trl-replay estimate`: what replay could do for a run of GRPO, with or without replay, from what the run logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..advice import Advice, advise
from ..config import ReplayConfig
from ..errors import ReplayError
from ..logged import ALL_RIGHT, ALL_WRONG, DEAD, DEAD_EXACT, Log, all_right_bounds, is_number
from .log import read_log

REPLACED = "replay/replaced"
"""Our column in a table of completions."""
PERIODS = 4
"""Parts of the run that are shown apart."""
Bounds: TypeAlias = tuple[float, float]
"""The least and the greatest share that there may be."""


@dataclass(frozen=True, slots=True)
class Period:
    """A part of a run, at least one step.

    Attributes:
        first, last (`int`): Its steps.
        dead (`float`): Share of dead groups.
        all_wrong, all_right (`Bounds`, *optional*): Shares of groups without and with nothing but passing completions.
            TRL's log gives bounds, which hold if every reward is 0 or 1, and none where it can't be.
    """

    first: int
    last: int
    dead: float
    all_wrong: Bounds | None = None
    all_right: Bounds | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate of replay's use from a run's log.

    Attributes:
        source (`str`): Where it was read from.
        periods (`list[Period]`): The run in parts, in their order.
        dead (`float`): Share of dead groups over the whole run.
        bound (`float`, *optional*): Most that filling dead groups can multiply the live groups of a batch by:
            1 / (1 − dead). None if all were dead.
        had_replay (`bool`): Replay was attached to the run.
        counted (`bool`): All-wrong and all-right groups were counted, not bounded.
        about (`str`): The steps that the advice is about, in words.
        advice (`list[Advice]`): What to change.
    """

    source: str
    periods: list[Period]
    dead: float
    bound: float | None
    had_replay: bool
    counted: bool
    about: str
    advice: list[Advice]


def estimate(source: str | Path, pass_reward: float = 0.5) -> Estimate:
    """Estimates what replay could do for a run.

    Args:
        source (`str` or `Path`): A run's `output_dir`, one of its checkpoints, a `trainer_state.json`, or a
            `completions_….parquet` of `log_completions=True` (or the folder that holds them).
        pass_reward (`float`): A completion passes with a reward of at least this.

    Raises:
        ReplayError: There is nothing to read, or it is no log of GRPO.
    """
    path = Path(source)
    tables = [_read_table(file) for file in _parquet_files(path)]
    if tables:
        size = min(_rows_of_a_group(table) for table in tables)
        steps = [_judge(table, size, pass_reward) for table in tables]
        had_replay = any(REPLACED in table.columns for table in tables)
        log: Log = [_entry(step) for step in steps]
    else:
        log = read_log(path)
        steps = [step for entry in log if (step := _logged(entry))]
        had_replay = any(DEAD_EXACT in entry for entry in log)
    if not steps:
        raise ReplayError(f"{path} says nothing about dead groups: {DEAD!r} was never logged. Is it a run of GRPO?")
    dead = float(np.mean([step.dead for step in steps]))
    bound = 1 / (1 - dead) if dead < 1 else None
    counted = all(ALL_WRONG in entry for entry in log if DEAD in entry)
    about, advice = advise(log, ReplayConfig().to_dict())
    return Estimate(str(path), _periods(steps), dead, bound, had_replay, counted, about, advice)


def _logged(entry: Mapping[str, Any]) -> Period | None:
    """The shares of an entry of a trainer's log; None if it is not of a step."""
    dead = entry.get(DEAD_EXACT, entry.get(DEAD))
    if not is_number(entry.get("step")) or not is_number(dead):
        return None
    step = int(entry["step"])
    wrong, right = entry.get(ALL_WRONG), entry.get(ALL_RIGHT)
    if is_number(wrong) and is_number(right):
        return Period(step, step, dead, (wrong, wrong), (right, right))
    bounds = all_right_bounds(dead, entry.get("reward"))
    return Period(step, step, dead, bounds and (dead - bounds[1], dead - bounds[0]), bounds)


def _entry(step: Period) -> dict[str, float]:
    """The shares of a table of completions as a trainer would log them."""
    assert step.all_wrong is not None
    assert step.all_right is not None
    return {"step": step.first, DEAD: step.dead, ALL_WRONG: step.all_wrong[0], ALL_RIGHT: step.all_right[0]}


def _periods(steps: Sequence[Period]) -> list[Period]:
    """The run in parts of about as many steps."""
    periods = []
    for part in np.array_split(np.arange(len(steps)), min(PERIODS, len(steps))):
        of_part = [steps[index] for index in part.tolist()]
        periods.append(
            Period(
                first=of_part[0].first,
                last=of_part[-1].last,
                dead=float(np.mean([step.dead for step in of_part])),
                all_wrong=_mean_known([step.all_wrong for step in of_part]),
                all_right=_mean_known([step.all_right for step in of_part]),
            )
        )
    return periods


def _mean_known(bounds: Sequence[Bounds | None]) -> Bounds | None:
    known = [bound for bound in bounds if bound is not None]
    if not known:
        return None
    least, greatest = np.mean(known, axis=0).tolist()
    return least, greatest


def _parquet_files(path: Path) -> list[Path]:
    """Tables of completions, in the order of their steps."""
    if path.suffix == ".parquet":
        return [path] if path.is_file() else []
    if not path.is_dir():
        return []
    here = sorted(path.glob("completions_*.parquet"))
    return here or sorted((path / "completions").glob("completions_*.parquet"))


def _read_table(path: Path) -> Any:
    """A table of completions as a data frame, one row a completion.

    TRL's table has the columns `step`, `prompt`, `completion`, one for each reward function, and `advantage`.
    """
    from pyarrow import parquet

    try:
        table = parquet.read_table(path).to_pandas()
    except Exception as error:  # of pyarrow, which has many
        raise ReplayError(f"{path} can't be read: {type(error).__name__}: {error}") from error
    if table.empty or not {"step", "prompt", "advantage"} <= {*table.columns}:
        raise ReplayError(f"{path} is no table of completions: it lacks step, prompt or advantage.")
    return table


def _rows_of_a_group(table: Any) -> int:
    """The shortest run of rows with one prompt: two groups of the same prompt may follow each other."""
    prompts = table["prompt"].map(str)
    run = (prompts != prompts.shift()).cumsum()
    return int(run.value_counts().min())


def _judge(table: Any, size: int, pass_reward: float) -> Period:
    """Dead, all-wrong and all-right shares of one step's groups."""
    rewards = table.drop(columns=["step", "advantage", REPLACED], errors="ignore").select_dtypes("number")
    totals = rewards.sum(axis=1).to_numpy(float)
    groups = totals[: len(totals) // size * size].reshape(-1, size)
    dead = float((np.ptp(groups, axis=1) <= 1e-9).mean())
    wrong = float((groups.max(axis=1) < pass_reward).mean())
    right = float((groups.min(axis=1) >= pass_reward).mean())
    step = int(table["step"].iloc[0])
    return Period(step, step, dead, (wrong, wrong), (right, right))
