"""`trl-replay estimate`: what replay could do for a run of GRPO, with or without replay, from what the run logged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import format as saved
from ..checkpoint.save_id import FOLDER
from ..errors import ReplayError
from ..strategies.scope_choice import choose_scope
from ..table import Table
from .log import DEAD, DEAD_EXACT, Log, is_number, mean, newest, points, read_log

LENGTH = "completions/mean_length"
REPLACED = "replay/replaced"
"""Our column in a table of completions."""
GENERATIONS = 8
"""Completions of a group where nothing tells: TRL's default."""
PERIODS = 4
"""Parts of the run that are shown apart."""
TOKEN_BYTES = 8
"""A stored completion token: an int32 id and a float32 log-prob."""
PROMPT_BYTES = 4
"""A stored prompt token, once a group."""
ROW_BYTES = 8
"""A stored row beside its tokens: advantage and one reward, float32."""
LITTLE, SPARSE = 0.2, 0.9
"""Dead shares below which there is little to replace, and above which rewards are sparse."""


@dataclass(frozen=True, slots=True)
class Period:
    """A part of a run.

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
    """What a run's log says about replay.

    Attributes:
        source (`str`): Where it was read from.
        periods (`list[Period]`): The run in parts, in their order.
        dead (`float`): Share of dead groups over the whole run.
        bound (`float`, *optional*): Most that filling dead groups can multiply the live groups of a batch by:
            1 / (1 − dead). None if all were dead.
        num_generations (`int`): Completions of a group.
        prompt_tokens (`float`): Tokens of a prompt that are assumed.
        completion_tokens (`float`, *optional*): Mean tokens of a completion.
        group_bytes (`int`, *optional*): What a stored group takes.
        buffer_bytes (`int`, *optional*): What the whole buffer takes on each process that holds it.
        scope (`str`): The `replay_scope` that fits.
        advice (`list[str]`): What to set, in words.
    """

    source: str
    periods: list[Period]
    dead: float
    bound: float | None
    num_generations: int
    prompt_tokens: float
    completion_tokens: float | None
    group_bytes: int | None
    buffer_bytes: int | None
    scope: str
    advice: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Step:
    """One logged step."""

    number: int
    dead: float
    all_wrong: float | None = None
    all_right: float | None = None


def estimate(
    source: str | Path,
    buffer_size: int = 64,
    num_generations: int | None = None,
    ranks: int = 1,
    groups: int = 8,
    completion_tokens: float | None = None,
    prompt_tokens: float = 128.0,
    pass_reward: float = 0.5,
) -> Estimate:
    """What replay could do for a run.

    Args:
        source (`str` or `Path`): A run's `output_dir`, one of its checkpoints, a `trainer_state.json`, or a
            `completions_….parquet` of `log_completions=True` (or the folder that holds them).
        buffer_size (`int`): Groups that a buffer would keep.
        num_generations (`int`, *optional*): Rows of a group, where neither a Parquet file nor a checkpoint's buffer
            tells; 8 if not given.
        ranks (`int`): Processes.
        groups (`int`): Groups of a generation batch, on each process.
        completion_tokens (`float`, *optional*): Mean tokens of a completion, where the log does not tell.
        prompt_tokens (`float`): Mean tokens of a prompt.
        pass_reward (`float`): A completion passes with a reward of at least this.

    Raises:
        ReplayError: There is nothing to read, or it is no log of GRPO.
    """
    path = Path(source)
    tables = _parquet_files(path)
    if tables:
        steps, size, had_replay = _steps_of_tables(tables, pass_reward)
        log = _log_beside(path)
    else:
        log = read_log(path)
        steps = _steps_of_log(log)
        size = _saved_generations(path) or num_generations or GENERATIONS
        had_replay = any(DEAD_EXACT in entry for entry in log)
    if completion_tokens is None:
        completion_tokens = mean(log, LENGTH)
    if not steps:
        raise ReplayError(f"{path} says nothing about dead groups: {DEAD!r} was never logged. Is it a run of GRPO?")
    dead = float(np.mean([step.dead for step in steps]))
    nbytes = None if completion_tokens is None else _group_bytes(size, completion_tokens, prompt_tokens)
    scope = choose_scope(ranks, groups * size, size).name
    return Estimate(
        source=str(path),
        periods=_periods(steps),
        dead=dead,
        bound=1 / (1 - dead) if dead < 1 else None,
        num_generations=size,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        group_bytes=nbytes,
        buffer_bytes=None if nbytes is None else nbytes * buffer_size,
        scope=scope,
        advice=_advice(dead, scope, ranks, groups, had_replay),
    )


def _group_bytes(rows: int, completion_tokens: float, prompt_tokens: float) -> int:
    """Payload and table row of one group whose prompt is shared by its rows."""
    tokens = rows * (TOKEN_BYTES * completion_tokens + ROW_BYTES)
    table_row = Table.preallocated(1, rows).row_bytes
    return round(tokens + PROMPT_BYTES * prompt_tokens + table_row)


def _advice(dead: float, scope: str, ranks: int, groups: int, had_replay: bool) -> list[str]:
    """Which settings fit."""
    words = []
    if had_replay:
        words.append("replay was attached to this run already: `trl-replay report` shows what it did")
    if dead < LITTLE:
        words.append(f"few groups are dead ({dead:.0%}): replay has little to replace, and may not pay")
    elif dead >= SPARSE:
        words.append("rewards are sparse: the defaults (prompt_balanced, an adaptive start) are made for that")
    else:
        words.append("the defaults fit: dead groups are filled, off-policy rows corrected by their importance ratio")
    if scope == "sharded":
        words.append(
            f"with {groups} groups on each of {ranks} processes one buffer for all finds more: replay_scope='sharded'"
        )
    words.append("replay_dry_run=True measures what would be replayed and leaves training as it is")
    return words


def _periods(steps: Sequence[_Step]) -> list[Period]:
    periods = []
    for part in np.array_split(np.arange(len(steps)), min(PERIODS, len(steps))):
        of_part = [steps[index] for index in part.tolist()]
        periods.append(
            Period(
                first=of_part[0].number,
                last=of_part[-1].number,
                dead=float(np.mean([step.dead for step in of_part])),
                all_wrong=_mean_known([step.all_wrong for step in of_part]),
                all_right=_mean_known([step.all_right for step in of_part]),
            )
        )
    return periods


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _saved_generations(path: Path) -> int | None:
    """Completions of a group as a checkpoint's buffer has them; None where there is none that can be read."""
    folder = (newest(path) if path.is_dir() else path.parent) / FOLDER
    for rank in saved.ranks_in(folder)[:1]:
        try:
            text = json.loads((folder / f"rank-{rank:05d}" / saved.STATE).read_text(encoding="utf-8"))
            size = text["content"]["identity"]["num_generations"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return size if isinstance(size, int) and size > 0 else None
    return None


def _log_beside(path: Path) -> Log:
    """The trainer's log of the run that tables of completions belong to; nothing where there is none."""
    folders = [path] if path.is_dir() else []
    for folder in (*folders, *list(path.absolute().parents)[:2]):
        with suppress(ReplayError):
            return read_log(folder)
    return []


def _steps_of_log(log: Log) -> list[_Step]:
    return [_Step(int(step), dead) for step, dead in points(log, DEAD_EXACT) or points(log, DEAD)]


def _parquet_files(path: Path) -> list[Path]:
    """Tables of completions, in the order of their steps."""
    if path.suffix == ".parquet":
        return [path] if path.is_file() else []
    if not path.is_dir():
        return []
    here = sorted(path.glob("completions_*.parquet"))
    return here or sorted((path / "completions").glob("completions_*.parquet"))


def _steps_of_tables(paths: Sequence[Path], pass_reward: float) -> tuple[list[_Step], int, bool]:
    """The steps of tables of completions, the rows of a group, and whether replay was attached.

    TRL's table has the columns `step`, `prompt`, `completion`, one for each reward function, and `advantage`.
    """
    from pyarrow import parquet

    steps: dict[int, _Step] = {}
    size = 1
    had_replay = False
    for path in paths:
        try:
            rows = parquet.read_table(path).to_pylist()
        except Exception as error:  # of pyarrow, which has many
            raise ReplayError(f"{path} can't be read: {type(error).__name__}: {error}") from error
        if not rows or not {"step", "prompt", "advantage"} <= rows[0].keys():
            raise ReplayError(f"{path} is no table of completions: it lacks step, prompt or advantage.")
        names = _reward_names(list(rows[0]))
        had_replay = had_replay or REPLACED in rows[0]
        size = max(size, _rows_of_a_group(rows))
        groups = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
        number = int(rows[0]["step"])
        steps[number] = _judge(number, groups, names, pass_reward)
    return [steps[number] for number in sorted(steps)], size, had_replay


def _reward_names(columns: Sequence[str]) -> list[str]:
    """TRL puts the reward functions' columns between `completion` and what is extra; ours is `replay/replaced`."""
    others = {"step", "prompt", "completion", "advantage", "images", REPLACED}
    return [name for name in columns if name not in others]


def _rows_of_a_group(rows: Sequence[Mapping[str, Any]]) -> int:
    """The shortest run of rows with one prompt: two groups of the same prompt may follow each other."""
    prompts = [json.dumps(row["prompt"], sort_keys=True, default=str) for row in rows]
    return min(len(list(run)) for _, run in groupby(prompts))


def _judge(
    number: int, groups: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[str], pass_reward: float
) -> _Step:
    """Dead, all-wrong and all-right shares of one step's groups."""
    dead = wrong = right = 0
    for group in groups:
        totals = [sum(float(row[name]) for name in names if is_number(row[name])) for row in group]
        if max(totals) - min(totals) > 1e-9:
            continue
        dead += 1
        passes = totals[0] >= pass_reward
        right += passes
        wrong += not passes
    count = len(groups)
    return _Step(number, dead / count, wrong / count, right / count)
