"""`trl-replay estimate`: what replay could do for a run of GRPO, with or without replay, from what the run logged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ReplayError
from ..logged import DEAD, DEAD_EXACT, points
from .log import read_log

REPLACED = "replay/replaced"
"""Our column in a table of completions."""
PERIODS = 4
"""Parts of the run that are shown apart."""
LITTLE, SPARSE = 0.2, 0.9
"""Dead shares below which there is little to replace, and above which rewards are sparse."""


@dataclass(frozen=True, slots=True)
class Period:
    """A part of a run, at least one step.

    Attributes:
        first, last (`int`): Its steps.
        dead (`float`): Share of dead groups.
        all_wrong, all_right (`float`, *optional*): Shares of groups without and with nothing but passing completions;
            None where the log does not tell them apart.
    """

    first: int
    last: int
    dead: float
    all_wrong: float | None = None
    all_right: float | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate of replay's use from a run's log.

    Attributes:
        source (`str`): Where it was read from.
        periods (`list[Period]`): The run in parts, in their order.
        dead (`float`): Share of dead groups over the whole run.
        bound (`float`, *optional*): Most that filling dead groups can multiply the live groups of a batch by:
            1 / (1 − dead). None if all were dead.
        advice (`list[str]`): What to set, in words.
    """

    source: str
    periods: list[Period]
    dead: float
    bound: float | None
    advice: list[str]


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
    else:
        log = read_log(path)
        steps = [Period(int(step), int(step), dead) for step, dead in points(log, DEAD_EXACT) or points(log, DEAD)]
        had_replay = any(DEAD_EXACT in entry for entry in log)
    if not steps:
        raise ReplayError(f"{path} says nothing about dead groups: {DEAD!r} was never logged. Is it a run of GRPO?")
    dead = float(np.mean([step.dead for step in steps]))
    bound = 1 / (1 - dead) if dead < 1 else None
    return Estimate(str(path), _periods(steps), dead, bound, _advice(dead, had_replay))


def _advice(dead: float, had_replay: bool) -> list[str]:
    """Return the settings that fit, in words."""
    words = []
    if had_replay:
        words.append("replay was attached to this run already: `trl-replay report` shows what it did")
    if dead < LITTLE:
        words.append(f"few groups are dead ({dead:.0%}): replay has little to replace, and may not pay")
    elif dead >= SPARSE:
        words.append("rewards are sparse: the defaults (prompt_balanced, an adaptive start) are made for that")
    else:
        words.append("the defaults fit: dead groups are filled, off-policy rows corrected by their importance ratio")
    words.append("replay_dry_run=True measures what would be replayed and leaves training as it is")
    return words


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


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


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
    dead = np.ptp(groups, axis=1) <= 1e-9
    right = dead & (groups[:, 0] >= pass_reward)
    step = int(table["step"].iloc[0])
    return Period(step, step, dead.mean(), (dead & ~right).mean(), right.mean())
