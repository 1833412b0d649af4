"""A run, from a log or a folder: its steps and metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from ...checkpoint.discovery import TRAINER_STATE, last_complete_checkpoint
from ...data.counters import DRY_RUN, JUDGED_BY, about
from ...data.types import Floats
from ...errors import ReplayError

Entry: TypeAlias = Mapping[str, float]
"""An entry of a log: numbers by name, NaN included."""
READ = (
    f"Give a run's output_dir, one of its checkpoints, or {TRAINER_STATE}; or a table of its metrics by step, as "
    ".csv, .jsonl, .json, or .parquet. What a program printed is not read. To make a table: "
    "json.dump(trainer.state.log_history, open('log.json', 'w')) after training."
)
STEPS = ("step", "train/global_step", "global_step", "global_step/max_steps", "_step", "Step")
"""Names of the step in logs of trainers and trackers; ms-swift's is a text, `"9/547"`."""

LARGEST = 2**53
"""What is larger has no place on an axis."""


def read_log(path: Path) -> list[Entry]:
    """Return the entries of the last run in a log.

    Args:
        path (`Path`): A run's folder, one of its checkpoints, or a file. Of a folder and its newest complete
            checkpoint, the state that goes further is read.

    Raises:
        ReplayError: There is no log, or it can't be read.
    """
    if not path.exists():
        raise ReplayError(f"{path} does not exist. {READ}")
    states = (
        [path / TRAINER_STATE, Path(last_complete_checkpoint(path) or path) / TRAINER_STATE]
        if path.is_dir()
        else [path]
    )
    logs = [_read(state) for state in dict.fromkeys(states) if state.is_file()]
    if not logs:
        raise ReplayError(f"{path} holds neither {TRAINER_STATE} nor a complete checkpoint. {READ}")
    return _last_run(max(logs, key=lambda log: max((entry.get("step", 0.0) for entry in log), default=0.0)))


def _read(path: Path) -> list[Entry]:
    try:
        rows = _rows(path)
        if not isinstance(rows, list):
            raise TypeError(f"its entries are no list, but {type(rows).__name__}")
        return [plain(row) for row in rows if isinstance(row, Mapping)]
    except KeyError as error:
        raise ReplayError(f"{path} can't be read: it has no {error}. {READ}") from error
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ReplayError(f"{path} can't be read: {str(error).rstrip('.')}. {READ}") from error


def _rows(path: Path) -> Any:
    """The rows of a file, by its ending."""
    ending = path.suffix.lower()
    if ending == ".json":
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        return found["log_history"] if isinstance(found, Mapping) else found
    if ending not in (".csv", ".jsonl", ".parquet"):
        raise ValueError(f"files that end in {ending or 'nothing'!r} are not read")
    import pandas

    lines = {"lines": True} if ending == ".jsonl" else {}
    return getattr(pandas, f"read_{ending[1:].replace('jsonl', 'json')}")(path, **lines).to_dict("records")


def plain(row: Mapping[str, Any]) -> Entry:
    """Return an entry with the names that the trainer logs, and its numbers alone; what is huge is NaN."""
    steps = [step for name in STEPS if is_number(step := _number(row.get(name)))]
    values = {str(name).removeprefix("train/"): _number(value) for name, value in row.items()}
    plain = {name: value for name, value in values.items() if value is not None}
    return {**plain, "step": steps[0]} if steps else plain


def _number(value: Any) -> float | None:
    """A value as a number, NaN if it is huge; a text may tell it, as transformers 5 prints it, and a step before the
    number of all steps."""
    try:
        text = value.partition("/")[0] if isinstance(value, str) else value
        number = float(text) if type(value) in (int, float, str) else None
    except ValueError:
        return None
    except OverflowError:
        return nan
    return number if number is None or abs(number) < LARGEST else nan


def _last_run(entries: Sequence[Entry]) -> list[Entry]:
    """The last run of a log: where the step is back, another run begins, or one is resumed, and what stood beyond is
    gone."""
    kept, last = list[Entry](), 0.0
    for entry in entries:
        step = entry.get("step", last)
        if step < last:
            kept = [earlier for earlier in kept if earlier.get("step", 0.0) < step]
        last = step
        kept.append(entry)
    return kept


DEAD, DEAD_EXACT, DEAD_AFTER = "frac_reward_zero_std", "replay/dead_fraction", "replay/dead_fraction_after"
"""The share of dead groups as TRL logs it, as replay counts it, and after replay."""
REDRAWN = "replay/redrawn_fraction"
SUM = "reward"
"""TRL's name for the weighted sum of all reward functions."""
AXES = {"completions": "replay/rollouts", "tokens": "num_tokens", "updates": "step", "seconds": "step_time"}
"""What is spent on training, and the metric that tells it. Tokens are of prompts and completions."""
CHECKPOINT = re.compile(r"checkpoint-\d+|trainer_state\.json")
SEED = re.compile(r"[-_.]?(?:seed|(?<=[-_.])s)[-_.]?\d+$")
"""The end of a folder's name that tells the seed: `-seed3`, `_s3`."""


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value can be drawn: neither missing nor NaN, infinite or huge."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def width_of(count: int) -> int:
    """Return of how many logged values the mean counts as the beginning, and the end: a tenth, but four of few."""
    return max(count // 10, min(4, count // 2), 1)


class Curve(NamedTuple):
    """Means of a metric, by what had been spent when it was measured.

    Attributes:
        spent (`Sequence[float]`): Completions, say; ascending.
        values (`Sequence[float]`): What was measured there.
    """

    spent: Sequence[float]
    values: Sequence[float]

    @property
    def end(self) -> float:
        """The last value."""
        return self.values[-1]

    def first(self, level: float) -> float:
        """Return where the curve first crosses a level, by a straight line between the two measurements around it;
        infinity if it never does."""
        at = int(np.argmax(np.array([*self.values, np.inf]) >= level))
        around = slice(max(at - 1, 0), at + 1)
        return float(np.interp(level, self.values[around], self.spent[around])) if at < len(self.values) else np.inf


@dataclass(frozen=True)
class Run:
    """A run of GRPO, with or without replay.

    Attributes:
        label (`str`): Names its settings: runs with one label differ by seed.
        log (`Sequence[Entry]`): Numbers by name.
        seed (`str`): At the end of its folder's name; may be empty.
        per_batch (`int`, *optional*): Completions of a generation batch, where the log does not count them.
    """

    label: str
    log: Sequence[Entry]
    seed: str = ""
    per_batch: int | None = None

    @classmethod
    def of_log(cls, history: Sequence[Mapping[str, Any]], **known: Any) -> Run:
        """Return the run of a trainer's `log_history`."""
        return cls(known.pop("label", ""), [plain(entry) for entry in history], **known)

    @classmethod
    def of_folder(cls, given: str | Path, per_batch: int | None = None) -> Run:
        """Read a run: its `output_dir`, a checkpoint, or a file of its metrics, with `label=` before it or without.
        Without a label, the folder's name is it, but for a seed.

        Args:
            given (`str` or `Path`): Where it is.
            per_batch (`int`, *optional*): Completions of a generation batch.

        Raises:
            ReplayError: It can't be read, or it is no run of GRPO.
        """
        label, path = _labeled(str(given))
        log = read_log(path)
        parts = [part for part in path.resolve().parts if not CHECKPOINT.fullmatch(part)]
        name = Path(parts[-1]).stem if path.suffix else parts[-1]
        found = SEED.search(name)
        seed = found[0] if found else ""
        run = cls(label or SEED.sub("", name) or name, log, seed, per_batch)
        if not run.steps:
            raise ReplayError(f"{path} {run.what_is_missing} {READ}")
        return run

    @property
    def what_is_missing(self) -> str:
        """Why the log can't be used, by what it has."""
        names = dict.fromkeys(name for entry in self.log for name in entry)
        return (
            f"has no column 'step' with {DEAD!r}, the share of dead groups: older TRL and notebooks' tables leave it "
            f"out. It has {', '.join(list(names)[:8]) or 'no entries'}."
        )

    @cached_property
    def trained(self) -> list[Entry]:
        """Entries of updates, further ones of a batch included. Other rows of a table have no loss, or NaN."""
        told = (entry for entry in self.log if is_number(entry.get("step")))
        return [entry for entry in told if is_number(entry.get("loss")) or generated(entry)]

    @cached_property
    def steps(self) -> list[Entry]:
        """Entries of updates on a new batch, with the share of its groups that were dead: as replay counted it, where
        it did. TRL's asynchronous trainer logs none."""
        return [
            {**entry, DEAD: entry[DEAD_EXACT] if is_number(entry.get(DEAD_EXACT)) else entry[DEAD]}
            for entry in self.trained
            if generated(entry)
        ]

    @property
    def attached(self) -> bool:
        """Whether replay counted dead groups."""
        return any(is_number(entry.get(DEAD_EXACT)) for entry in self.log)

    @property
    def only_counted(self) -> bool:
        """Whether all that replay logged is of a dry run."""
        return all(entry.get(DRY_RUN) == 1 for entry in self.log if DEAD_EXACT in entry)

    @property
    def updates_per_batch(self) -> float | None:
        """Updates that train on a generation batch; None where not every update was logged."""
        at = self.column("step")
        every = len(at) > 1 and bool((np.diff(at) == 1).all())
        return len(at) / len(self.steps) if every else None

    @cached_property
    def functions(self) -> list[str]:
        """Names of the reward functions that were logged, in the order of a log that was written and read."""
        names = {name for entry in self.steps for name in entry}
        return [name[8:-5] for name in sorted(names) if re.fullmatch("rewards/.+/mean", name)]

    @property
    def counts(self) -> str | None:
        """Its `replay_reward`; None where it has none."""
        names = (name.partition(f"{JUDGED_BY}/")[2] for entry in self.steps for name in entry)
        return next(filter(None, names), None)

    def key_of(self, reward: str | None = None) -> tuple[str, str]:
        """Return the name of the reward function that counts, and of its mean in the log: the given one, or else the
        run's `replay_reward`, or else the sum.

        Raises:
            ReplayError: The given one was not logged.
        """
        name = reward or self.counts or SUM
        for key in (f"rewards/{name}/mean", name):
            if self.numbers(key):
                return name, key
        if reward:
            raise ReplayError(
                f"The log of {self.label} has no reward {name!r}. It has: {', '.join([SUM, *self.functions])}. Name "
                "one of them: --reward NAME."
            )
        return SUM, SUM

    def numbers(self, key: str, last: Sequence[Entry] | None = None) -> list[float]:
        """Return a metric's values, of the whole log or of some entries. What is not logged while it is 0 is 0 in
        entries of replay's."""
        entries = self.log if last is None else last
        if about(key).where == "not 0":
            entries = [{key: 0.0, **entry} for entry in entries if DEAD_EXACT in entry]
        return [value for entry in entries if is_number(value := entry.get(key))]

    def mean(self, key: str, last: Sequence[Entry] | None = None) -> float | None:
        """Return the mean of a metric's values; None without any."""
        values = self.numbers(key, last)
        return float(np.mean(values)) if values else None

    def column(self, key: str) -> Floats:
        """A metric of each update; NaN where it has none."""
        values = [entry.get(key) for entry in self.trained]
        return np.array([value if is_number(value) else np.nan for value in values], np.float64)

    def spent(self, axis: str) -> Floats:
        """What was spent up to each update, by one of `AXES`; NaN throughout where the log does not tell."""
        found, updates = self.column(AXES[axis]), self.column("step")
        if axis == "seconds":
            return (np.diff(updates, prepend=0) * found).cumsum()
        if axis == "completions" and self.per_batch and np.isnan(found).all():
            batches = np.cumsum([generated(entry) for entry in self.trained])
            return self.per_batch * (updates if self.updates_per_batch is None else batches)
        known = np.isfinite(found)
        return np.interp(updates, updates[known], found[known]) if known.any() else found

    def points(self, key: str, axis: str = "updates") -> Curve:
        """A metric's values, by what was spent up to each of them."""
        log = self.steps if key == DEAD else self.log
        told = [entry for entry in log if is_number(entry.get("step")) and is_number(entry.get(key))]
        at, spent = [entry["step"] for entry in told], self.spent(axis)
        places = np.interp(at, self.column("step"), spent) if len(spent) else np.array([])
        return Curve(places.tolist(), [entry[key] for entry in told])

    def curve(self, key: str, axis: str = "updates") -> Curve:
        """The same as means over a tenth of the values, each where its last value is."""
        spent, values = self.points(key, axis)
        width = width_of(len(values))
        means = np.convolve(values, np.full(width, 1 / width), "valid") if values else np.array([])
        return Curve(spent[width - 1 :], means.tolist())


def generated(entry: Entry) -> bool:
    """Tell whether an entry is of an update on a new batch."""
    return is_number(entry.get(DEAD)) or is_number(entry.get(DEAD_EXACT))


def _labeled(given: str) -> tuple[str, Path]:
    """The label, which may be empty, and the folder, whose name may have an equals sign."""
    label, _, path = given.partition("=")
    return (label, Path(path)) if path and not Path(given).exists() else ("", Path(given))
