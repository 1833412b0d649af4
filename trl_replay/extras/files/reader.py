"""Rows made elsewhere, checked and combined into groups, with what TRL's scoring step is to be handed for each."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import compat
from ...buffer.replay_buffer import NOT_FINITE
from ...data.counters import Tally
from ...data.fields import ADVANTAGES
from ...data.tasks import PROMPT_COLUMNS, Tasks
from ...data.types import Floats
from ...errors import ReplayError
from .file_tasks import TASK, FileTasks, RowError
from .schema import MASKS, TOKENIZER, TOKENS, Row, checked, reward_columns
from .sources import Source, read_sources, source_name
from .tokens import EMPTY, FAILED, SEVERAL, Tokens, cleaned, has_turns


@dataclass(slots=True)
class Rollout:
    """One row, as the trainer's scoring step gets it.

    Attributes:
        label (`str`): What an error calls it.
        row (`Mapping`): As read.
        inputs (`dict`): The row of the dataset that it stands for.
        task (`int`): As in the table.
        prompt_ids, completion_ids (`NDArray`): The file's, or made of its texts.
        told (`dict[str, NDArray]`): Token-level fields that the file has, by batch key.
        rewards (`(functions,)`, *optional*): Of the trainer's functions, NaN for None; None if these are to score it.
        advantage (`float`, *optional*): The file's, if it counts.
        messages (`list`, *optional*): Its completion, where the file has messages.
    """

    label: str
    row: Row
    inputs: dict[str, Any]
    task: int
    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    told: dict[str, NDArray[np.float32]]
    rewards: Floats | None = None
    advantage: float | None = None
    messages: list[dict[str, Any]] | None = None

    @property
    def mask(self) -> NDArray[np.int64]:
        """`(tokens,)`: 1 for tokens that the model said."""
        ones = np.ones(len(self.completion_ids), np.float32)
        return self.told.get("tool_mask", ones).astype(np.int64)

    @property
    def is_sample(self) -> bool:
        """Whether it tells all that a sample of the asynchronous trainer has, and no more."""
        return compat.OLD_LOGPS in self.told and self.advantage is not None and ADVANTAGES not in self.told

    @property
    def masked(self) -> bool:
        """Whether it trains nothing, as the file says."""
        return bool(self.row.get("masked"))


IMAGES = PROMPT_COLUMNS[1:]
RolloutGroup = list[Rollout]
"""`G` rows of one prompt."""


class Reader:
    """Makes groups of files or of rows, each with the trainer's number of rows.

    Args:
        trainer (`trl.GRPOTrainer`): Whose groups they shall be.
        tasks ([`Tasks`]): Tells the rows of its dataset apart.
        rescore (`bool`): Whether its functions score every row.
        tally ([`Tally`]): Counts what is refused.
    """

    def __init__(self, trainer: Any, tasks: Tasks, rescore: bool, tally: Tally) -> None:
        self._trainer = trainer
        self._rescore = rescore
        self._tally = tally
        self._size = trainer.num_generations
        self._fingerprint = compat.tokenizer_fingerprint(trainer)
        self.tasks = FileTasks(trainer, tasks)
        self._tokens = Tokens(trainer)
        self._rewards = reward_columns(trainer.reward_func_names)

    def read(self, source: Any, incomplete: str) -> list[RolloutGroup]:
        """Return the groups of a source: rows belong together by the column `group` of their file or, without one, by
        their prompt; more than `num_generations` rows give several groups.

        Raises:
            ReplayError: The source can't be read, or a row lacks what is needed: names the row.
        """
        rng = np.random.default_rng(self._trainer.args.seed)
        groups: list[RolloutGroup] = []
        for file in read_sources(source):
            gathered, short = self._gathered(file)
            for key, rows in gathered.items():
                whole = len(rows) == self._size and key not in short
                for part in self._parts(rows, incomplete, rng):
                    groups += self._usable(part, whole)
        if self._trainer.accelerator.is_main_process:
            _warn_of_ends(self._trainer, self._tokens, [rollout for group in groups for rollout in group])
        return self._fitting(groups, source_name(source))

    def _gathered(self, file: Source) -> tuple[dict[str, RolloutGroup], set[str]]:
        """The rows of a file that can be used, by group, and groups that lack others: these are counted."""
        vocabulary = compat.vocabulary_size(self._trainer)
        rows = [checked(row, f"Row {number} of {file.name}", vocabulary) for number, row in enumerate(file.rows)]
        if any(row.get(TOKENIZER) not in (None, self._fingerprint) for row in rows):
            raise ReplayError(
                f"{file.name} has token ids of another tokenizer. Take its columns of ids, masks, log-probs, and "
                f"{TOKENIZER} away (dataset.remove_columns), and its texts count."
            )
        read_rewards = self._reward_reader(rows, file.name)
        gathered: dict[str, RolloutGroup] = {}
        short: set[str] = set()
        for number, row in enumerate(rows):
            label = f"Row {number} of {file.name}"
            key = ""
            try:
                row = self._with_texts(row)
                inputs, task = self.tasks.of(row)
                self._refuse_unscorable(inputs)
                key = json.dumps([row.get("group"), None if row.get("group") is not None else task], default=str)
                self._refuse_failed(row)
                prompt, completion, told = self._token_ids(row)
                rewards = read_rewards(row)
            except RowError as reason:
                short.add(key)
                self._tally.note(1, f"a row was refused: {reason}")
                continue
            if not len(prompt) or not len(completion):
                raise ReplayError(f"{label}, with the prompt {row['prompt']!r}, has no tokens.")
            members = gathered.setdefault(key, [])
            if members:
                _refuse_another_task(row, members[0].row, label)
            rollout = Rollout(label, row, inputs, task, prompt, completion, told, rewards)
            if not isinstance(row["completion"], str):
                rollout.messages = cleaned(row["completion"])
            if not self._rescore and row.get("advantage") is not None:
                rollout.advantage = float(row["advantage"])
            members.append(rollout)
        return gathered, short

    def _reward_reader(self, rows: Sequence[Row], name: str) -> Any:
        """Return what gives a row's rewards, `(functions,)`: of each function where the file names them; else its one
        reward, if there is one function.

        Raises:
            ReplayError: The file has no such columns.
        """
        if self._rescore and compat.has_environments(self._trainer):
            raise ReplayError(
                f"{name} can't be scored: rewards that depend on an environment need its episode. Give rewards, a "
                "column for each function."
            )
        if self._rescore or not rows:
            return lambda row: None
        columns = dict.fromkeys(column for row in rows for column in row)
        used = {column for row in rows for column, value in row.items() if value is not None}
        if used.intersection(self._rewards) and columns.keys() >= {*self._rewards}:
            return lambda row: _numbers(row, self._rewards)
        if "reward" in used and len(self._rewards) == 1 and not used.intersection(self._rewards):
            return _one_reward
        single = ["reward"] if len(self._rewards) == 1 else []
        lacking = ", ".join(repr(one) for one in [*self._rewards, *single] if one not in used)
        logged = {one: f"reward/{one}" for one in self._trainer.reward_func_names if one in columns}
        rename = f"rename_columns({logged})" if logged else "rename_column(…)"
        raise ReplayError(
            f"{name} lacks rewards in {lacking}: its columns are {', '.join(map(repr, columns))}. Name a column for "
            f"each reward function (dataset.{rename}), or let the trainer's functions score the rows: rescore=True "
            "of session.add, replay_warm_start_rescore=True."
        )

    def _with_texts(self, row: Row) -> Row:
        """The row with texts where it has ids alone."""
        decode = compat.tokenizer(self._trainer).decode
        made = dict(row)
        for name, skips in (("prompt", False), ("completion", True)):
            ids = row.get(f"{name}_ids")
            if ids is not None and (name not in row or _is_array(row[name])):
                made[name] = decode(ids, skip_special_tokens=skips)
        return made

    def _refuse_unscorable(self, inputs: Mapping[str, Any]) -> None:
        """Refuse a row to which reward functions could give no reward as to the trainer's own.

        Raises:
            RowError: Names the columns that it lacks.
        """
        if not self._rescore:
            return
        lacking = self.tasks.lacking(inputs)
        if isinstance(inputs["prompt"], str) and isinstance(self.tasks.first_prompt, list):
            raise RowError("its prompt is text, and the dataset's are messages")
        if lacking:
            raise RowError(
                f"it lacks {', '.join(map(repr, lacking))}, which reward functions get from the dataset, and no one "
                "row of that has its prompt: add the columns (null, if the functions read none)"
            )

    def _refuse_failed(self, row: Row) -> None:
        """Refuse a row of a rollout that gave nothing, or failed: its reward is none of the model's.

        Raises:
            RowError: It is one.
        """
        completion = row["completion"]
        if row.get("completion_ids") is None and (completion is None or (completion != "" and not len(completion))):
            raise RowError(EMPTY)
        columns = getattr(self._trainer.train_dataset, "column_names", None) or ()
        if row.get("error") and "error" not in columns:
            raise RowError(FAILED)

    def _token_ids(self, row: Row) -> tuple[NDArray[np.int32], NDArray[np.int32], dict[str, NDArray[np.float32]]]:
        """Token ids of prompt and completion, those of the file or made of its texts, and token-level fields.

        Raises:
            RowError: The trainer could not have made it.
        """
        told: dict[str, NDArray[np.float32]] = {}
        prompt, completion = row.get("prompt_ids"), row.get("completion_ids")
        if completion is not None and prompt is None:
            prompt = self._tokens.prompt(row["prompt"])
        if completion is not None:
            told = {name: np.asarray(row[name]).astype(np.float32) for name in TOKENS if row.get(name) is not None}
            if not any(name in told for name in MASKS) and has_turns(row["completion"]):
                raise RowError(SEVERAL)
            _move_mask(told)
        else:
            prompt = self._tokens.prompt(row["prompt"])
            if isinstance(row["prompt"], str) and self._opening_ends not in (None, *prompt[-1:]):
                raise RowError("its prompt is text, and the dataset's are messages, which the chat template wraps")
            cut_off = bool(row.get("is_truncated"))
            completion, tool_mask = self._tokens.completion(row["prompt"], prompt, row["completion"], cut_off)
            if tool_mask is not None:
                told["tool_mask"] = np.array(tool_mask, np.float32)
        return np.asarray(prompt).astype(np.int32), np.asarray(completion).astype(np.int32), told

    @cached_property
    def _opening_ends(self) -> int | None:
        """The token after which the model answers messages; None where the dataset has none, or it is not known."""
        prompt = None if compat.has_environments(self._trainer) else self.tasks.first_prompt
        return self._tokens.prompt(prompt)[-1] if isinstance(prompt, list) else None

    def _parts(self, rows: RolloutGroup, incomplete: str, rng: np.random.Generator) -> Iterator[RolloutGroup]:
        """Parts of `num_generations` rows. What is left over is refused, or filled up with rows of its own."""
        size, whole = self._size, len(rows) // self._size * self._size
        if any(one.row.get("forked") for one in rows):
            self._tally.refuse(1, "completions of it have several rows (forked conversations), and here each has one")
            return
        yield from (rows[start : start + size] for start in range(0, whole, size))
        rest = rows[whole:]
        if rest and incomplete == "resample":
            yield rest + [rest[index] for index in rng.integers(len(rest), size=size - len(rest))]
        elif rest:
            reason = f"it has fewer rows than num_generations={size}"
            self._tally.refuse(1, f"{reason} ('resample' in replay_warm_start_short fills it up)")

    def _usable(self, group: RolloutGroup, whole: bool) -> Iterator[RolloutGroup]:
        """The group, unless it is refused. Only whole groups of a file keep its advantages."""
        advantages = [rollout.advantage for rollout in group]
        if not whole or None in advantages:
            for rollout in group:
                rollout.advantage = None
        reason = ""
        if any(map(_lacks_images, group)):
            reason = "it has images, and neither its file nor the dataset holds them"
        elif whole and not np.isfinite([value for value in advantages if value is not None]).all():
            reason = "an advantage is not finite"
        elif any(np.isinf(one.told.get(compat.SAMPLING_LOGPS, one.mask))[one.mask > 0].any() for one in group):
            reason = NOT_FINITE
        elif all(one.masked for one in group):
            reason = "all of its rows are masked"
        if reason:
            self._tally.refuse(1, reason)
        else:
            yield group

    def _fitting(self, groups: list[RolloutGroup], name: str) -> list[RolloutGroup]:
        """The groups whose rows are no longer than this trainer's may be. One warning tells of all others."""
        limit, positions = self._trainer.max_completion_length, compat.positions(self._trainer)
        reasons: list[str] = []
        fitting = groups
        for most, length, fault in (
            (limit, _completion_length, f"a completion is longer than max_completion_length={limit}"),
            (positions, _length, f"a prompt with its completion is longer than the model's {positions} positions"),
        ):
            longest = [max(map(length, group)) for group in fitting]
            refused = [value for value in longest if most is not None and value > most]
            if refused:
                fitting = [group for group, value in zip(fitting, longest, strict=True) if value <= (most or value)]
                reasons.append(f"{fault}: the longest has {max(refused)} tokens")
                self._tally.refuse(len(refused), reasons[-1])
        if reasons and self._trainer.accelerator.is_main_process:
            warnings.warn(
                f"{len(groups) - len(fitting)} of the {len(groups)} groups of {name} were refused: "
                f"{'; '.join(reasons)}. All rows of a batch are padded to its longest one, so that replaying such a "
                "group would make every row of its batch that long.",
                stacklevel=2,
            )
        return fitting


def _numbers(row: Row, names: Sequence[str]) -> Floats:
    """`(names,)`; NaN for None."""
    return np.array([row.get(name) for name in names], np.float64)


def _one_reward(row: Row) -> Floats:
    """`(1,)`: the one reward of a row."""
    if row.get("reward") is None:
        raise RowError("it has no reward")
    return _numbers(row, ["reward"])


def _is_array(value: Any) -> bool:
    """Tell a list of ids from texts and messages."""
    return not isinstance(value, str) and value is not None and len(value) > 0 and not isinstance(value[0], Mapping)


def _lacks_images(one: Rollout) -> bool:
    told = any(one.row.get(name) for name in ("num_images", *IMAGES))
    return told and one.inputs.keys().isdisjoint(IMAGES)


def _completion_length(one: Rollout) -> int:
    return len(one.completion_ids)


def _length(one: Rollout) -> int:
    return len(one.prompt_ids) + len(one.completion_ids)


def _refuse_another_task(row: Row, first: Row, label: str) -> None:
    """Refuse a row of another task or prompt than the first one of its group.

    Raises:
        ReplayError: Names both.
    """
    advice = "Number groups apart, or give files by their paths: each then has groups of its own."
    if row.get(TASK) != first.get(TASK):
        raise ReplayError(
            f"{label} is of another task ({TASK}) than another row of its group {row['group']!r}: rewards of two "
            f"tasks have no baseline in common. {advice}"
        )
    if row["prompt"] != first["prompt"] and not row.get(TASK):
        raise ReplayError(
            f"{label} has the prompt {row['prompt']!r}, and another row of its group {row['group']!r} has "
            f"{first['prompt']!r}: rewards of two prompts have no baseline in common. {advice}"
        )


def _move_mask(told: dict[str, NDArray[np.float32]]) -> None:
    """Make a tool mask of a completion mask that leaves out some tokens: they count in no loss, but the model has
    seen them. (TRL's own is all ones, or all zeros.)"""
    mask = told.get("completion_mask")
    if mask is not None and mask.any() and not mask.all():
        del told["completion_mask"]
        told["tool_mask"] = told.get("tool_mask", np.ones_like(mask)) * mask


def _warn_of_ends(trainer: Any, tokens: Tokens, rollouts: Sequence[Rollout]) -> None:
    """Warn of messages whose end, by the chat template, is none for this trainer."""
    texts = [one.row for one in rollouts if one.row.get("completion_ids") is None]
    said = any(not (isinstance(row["prompt"], str) and isinstance(row["completion"], str)) for row in texts)
    if said and not tokens.ends_turns:
        tokenizer = compat.tokenizer(trainer)
        stops = tokenizer.convert_ids_to_tokens(compat.stop_ids(trainer))
        warnings.warn(
            f"The chat template ends an answer with {tokenizer.decode(tokens.ending)!r}, and this trainer's model "
            f"goes on after it: it stops at {', '.join(map(repr, stops))}. Add that token to eos_token_id of the "
            "model's generation_config before the trainer is made (TRL 1.14 and later), or make it the tokenizer's "
            "eos_token.",
            stacklevel=3,
        )
