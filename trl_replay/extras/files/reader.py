"""Rows made elsewhere, checked and combined into groups, with what TRL's scoring step is to be handed for each."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import compat
from ...base.files import ENDINGS, are_paths, data_files
from ...data.counters import Tally
from ...data.tasks import PROMPT_COLUMNS, Tasks
from ...data.types import ADVANTAGES, LARGEST_ADVANTAGE, Floats
from ...errors import ReplayError, SeamError
from ...generation.prompts import Dataset

QUESTION = {"role": "user", "content": "question"}
ANSWER = "trl-replay-answer"
"""What stands for an answer where only the template around it counts."""
WORDS = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "tool_calls", "function_call")
"""Keys of a message whose values are words of the model, too: how it says them, only its tokens tell."""
UNSAID = re.compile(r"\A\s*<(\w+)>\s*</\1>\s*")
"""An empty block of reasoning, which templates put before an answer without any: the model never said it."""


class RowError(ValueError):
    """Why the trainer could not have made a row. It counts; nothing is raised to the user."""


class Tokens:
    """Makes token ids of prompts and completions.

    Args:
        trainer (`trl.GRPOTrainer`): Its tokenizer, chat template, and end tokens count.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._tokenizer = compat.tokenizer(trainer)
        self._stops = frozenset(compat.stop_ids(trainer))
        self._added = frozenset(self._tokenizer.get_added_vocab().values())

    def prompt(self, prompt: Any) -> list[int]:
        """Return the ids of a text, or of messages in the trainer's chat template.

        Raises:
            ReplayError: An environment adds what the file does not tell.
        """
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        if compat.has_environments(self._trainer):
            raise ReplayError(
                "The prompts of this file are messages, and environments add their tools and words to those of the "
                "run: give the prompt's text as the model gets it, or prompt_ids and completion_ids."
            )
        return compat.templated(self._trainer, cleaned(prompt))

    def completion(self, prompt: Any, prompt_ids: Sequence[int], completion: Any, cut_off: bool = False) -> list[int]:
        """Return the ids of a text, or of one message that is `cleaned`, with an end where there is room for it, and
        it was not `cut_off`.

        Raises:
            RowError: The trainer could not have made it.
        """
        if isinstance(completion, str):
            ids = self._one_turn(self._begun(prompt_ids, self._of_text(completion)))
        elif [message["role"] for message in completion] != ["assistant"] or any(map(completion[0].get, WORDS)):
            raise RowError(
                "it is not one message of the assistant's with text alone: of several turns, calls of tools, and "
                "reasoning, give completion_ids, and tool_mask"
            )
        else:
            ids = self._model_turn(prompt_ids, completion[0]["content"])
        most = self._trainer.max_completion_length
        if cut_off or self._stops.intersection(ids[-1:]) or (most is not None and len(ids) >= most):
            return ids
        return [*ids, self._tokenizer.eos_token_id if isinstance(prompt, str) else self._ending]

    @cached_property
    def _ending(self) -> int:
        """The token at which the chat template ends an answer; the tokenizer's end token, where there is no template,
        or the model goes on at its."""
        after = ""
        with suppress(RowError):
            _, _, after = self._said(ANSWER).partition(ANSWER)
        ends = [token for token in self._of_text(after) if token in self._stops]
        return int([*ends, self._tokenizer.eos_token_id][0])

    def _of_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _begun(self, prompt_ids: Sequence[int], ids: list[int]) -> list[int]:
        """Return a completion's ids without what its prompt ends with: a template may open the reasoning."""
        if not ids or ids[0] not in self._added:
            return ids
        lengths = range(min(len(prompt_ids), len(ids)), 0, -1)
        return ids[next((length for length in lengths if list(prompt_ids[-length:]) == ids[:length]), 0) :]

    def _one_turn(self, ids: list[int]) -> list[int]:
        """Return the ids up to the first end of a turn, where no words follow it."""
        end = next((place + 1 for place, token in enumerate(ids) if token in self._stops), len(ids))
        if self._tokenizer.decode(ids[end:], skip_special_tokens=True).strip():
            raise RowError("its text goes on after the end of a turn")
        return ids[:end]

    def _model_turn(self, before: Sequence[int], content: Any) -> list[int]:
        """Return the ids of one message of the model, without an end: its text as it is or, where the chat template
        puts a channel before it, what that makes of it."""
        text = _text(content)
        said = self._said(ANSWER if text else "")
        heading, _, _ = said.partition(ANSWER)
        if not {*self._tokenizer.all_special_ids}.intersection(self._of_text(heading)):
            said = text
        ids = self._one_turn(self._begun(before, self._of_text(said.replace(ANSWER, text))))
        has_end = not self._stops.isdisjoint(ids[-1:])
        if said is not text and not has_end:
            raise RowError("the chat template ends it with no token at which the model stops")
        return ids[:-1] if has_end else ids

    def _said(self, content: str) -> str:
        """Return what the chat template makes of a text of the model, after what asks for it.

        Raises:
            RowError: It can't.
        """
        try:
            text = compat.rendered(self._trainer, [QUESTION, {"role": "assistant", "content": content}], False)
            opened = compat.rendered(self._trainer, [QUESTION], True)
        except Exception as error:
            raise RowError(f"the chat template can't say it ({type(error).__name__}: {error})") from error
        return UNSAID.sub("", text.removeprefix(opened)) if text.startswith(opened) else ANSWER


def cleaned(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages without keys that are None: files with columns have all keys of all messages, and all arguments
    of all calls.

    Raises:
        RowError: A message says nothing, or a call of a tool is not as TRL has it.
    """
    made = [_filled(message) for message in messages]
    for message in made:
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = calls
        elif "content" not in message:
            raise RowError("a message says nothing")
        message.setdefault("content", "")
        for call in calls or ():
            if not isinstance(call, Mapping) or not isinstance(call.get("function", {}).get("arguments"), Mapping):
                raise RowError(
                    'a call of a tool is not {"type": "function", "function": {"name": …, "arguments": {…}}}: parse '
                    "arguments that are text (json.loads)"
                )
    return made


def _filled(value: Any) -> Any:
    """Return a value without the keys of its mappings that are None."""
    if isinstance(value, Mapping):
        return {name: _filled(held) for name, held in value.items() if held is not None}
    return [_filled(held) for held in value] if isinstance(value, list) else value


def _text(content: Any) -> str:
    """Return the text of a message.

    Raises:
        RowError: It holds something else.
    """
    if isinstance(content, str):
        return content
    if any(not isinstance(part.get("text"), str) for part in content):
        raise RowError("a message holds more than text")
    return "".join(part["text"] for part in content)


FileRow = Mapping[str, Any]
TASK = "trl_replay_task"
"""Column of an export: the hash of the dataset's row."""
TOKENIZER = "trl_replay_tokenizer"
"""Column of an export: a hash of the tokenizer that made its token ids."""
GIVEN = "the rows given"
"""Name in errors of what is no file."""
KINDS = {".parquet": "parquet", ".csv": "csv"}
IMAGES = PROMPT_COLUMNS[1:]
OWN = {"reward", "advantage", "group", "masked", "forked", "is_truncated"}
"""Columns that are a file's, whatever the dataset has."""
MASKS = ("completion_mask", "tool_mask")
LOGPS = (-1000.0, 1e-3)
"""Least and most log-prob that a model gives: fillers for "none" are less (vLLM's server writes -9999), and rounding
makes less than that of 0."""
TOKENS = {compat.OLD_LOGPS: LOGPS, compat.SAMPLING_LOGPS: LOGPS, ADVANTAGES: (-LARGEST_ADVANTAGE, LARGEST_ADVANTAGE)}
"""Token-level fields beside masks, and their limits."""
CHARACTERS_SHOWN = 80
"""Characters of a value that an error shows."""


@dataclass(slots=True)
class Rollout:
    """One row, as the trainer's scoring step gets it.

    Attributes:
        label (`str`): What an error calls it.
        inputs (`dict`): The row of the dataset that it stands for.
        task (`int`): As in the table.
        prompt_ids, completion_ids (`NDArray`): The file's, or made of its texts.
        mask (`(tokens,)` int64): 1 for tokens that the model said.
        told (`dict[str, NDArray]`): Other token-level fields that the file has, by batch key.
        rewards (`(functions,)`, *optional*): Of the trainer's functions, NaN for None; None if these are to score it.
        advantage (`float`, *optional*): The file's, if it counts.
        messages (`list`, *optional*): Its completion, where the file has messages.
        masked (`bool`): Whether it trains nothing, as the file says.
        forked (`bool`): Whether completions of its group have several rows.
    """

    label: str
    inputs: dict[str, Any]
    task: int
    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    mask: NDArray[np.int64]
    told: dict[str, NDArray[np.float32]]
    rewards: Floats | None
    advantage: float | None
    messages: list[dict[str, Any]] | None
    masked: bool
    forked: bool

    @property
    def is_sample(self) -> bool:
        """Whether it tells all that a sample of the asynchronous trainer has, and no more."""
        return compat.OLD_LOGPS in self.told and self.advantage is not None and ADVANTAGES not in self.told


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
        self._tasks = FileTasks(trainer, tasks)
        self._tokens = Tokens(trainer)
        self._rewards = reward_columns(trainer.reward_func_names)
        self._fingerprint = compat.tokenizer_fingerprint(trainer)
        self._positions = compat.positions(trainer)
        self._vocabulary = compat.vocabulary_size(trainer)

    def read(self, source: Any, incomplete: str) -> list[RolloutGroup]:
        """Return the groups of a source: rows of one task belong together, in each file and by its column `group`;
        more than `num_generations` rows give several groups.

        Raises:
            ReplayError: The source can't be read, or a row lacks what is needed: names the row.
        """
        if self._rescore and compat.has_environments(self._trainer):
            raise ReplayError(
                f"{source_name(source)} can't be scored: rewards that depend on an environment need its episode. Give "
                "rewards, a column for each function."
            )
        rng = np.random.default_rng(self._trainer.args.seed)
        gathered: dict[tuple[Any, ...], list[Rollout | None]] = {}
        for file, number, given in read_rows(source):
            label = f"Row {number} of {file}"
            row = self._checked(given, label)
            rows: list[Rollout | None] = []
            try:
                inputs, task = self._tasks.of(row)
                rows = gathered.setdefault((file, row.get("group"), row.get(TASK) or task), [])
                rows.append(self._rollout(row, label, inputs, task))
            except RowError as reason:
                rows.append(None)
                self._tally.note(1, f"a row was refused: {reason}")
        return [group for rows in gathered.values() for group in self._groups(rows, incomplete, rng)]

    def _checked(self, given: Any, label: str) -> FileRow:
        """The row, with ids in the columns for ids, and a prompt.

        Raises:
            ReplayError: It lacks something, or has something of another kind.
        """
        if not isinstance(given, Mapping):
            raise ReplayError(
                f"{label} is {shown(given)}, not a mapping: of a table, give datasets.Dataset.from_pandas(table)."
            )
        row = dict(given)
        for name in ("prompt", "completion"):
            value, ids = row.get(name), row.get(f"{name}_ids")
            if isinstance(value, list) and value and isinstance(value[0], int):
                row[f"{name}_ids"] = ids = row.pop(name)
            if ids is None and name not in row:
                raise ReplayError(
                    f"{label} lacks {name}: it has {', '.join(map(str, given))}. One row is one completion: "
                    "docs/files.md has the two lines that convert other forms."
                )
            if name in row and not (value is None or isinstance(value, str) or _are_messages(value)):
                raise ReplayError(
                    f"{label} has {name}={shown(value)}, which is neither text nor messages. CSV makes numbers of "
                    "texts: write JSON Lines or Parquet."
                )
            if ids is not None:
                numbers = _numbers(row, f"{name}_ids", label, (0, self._vocabulary - 1), whole=True)
                row[f"{name}_ids"] = numbers.astype(np.int32)
        if row.get("prompt") is None and row.get("prompt_ids") is not None:
            row["prompt"] = compat.tokenizer(self._trainer).decode(row["prompt_ids"])
        if row.get(TOKENIZER) not in (None, self._fingerprint):
            raise ReplayError(
                f"{label} has token ids of another tokenizer. Take the file's columns of ids, masks, log-probs, and "
                f"{TOKENIZER} away (dataset.remove_columns), and its texts count."
            )
        return row

    def _rollout(self, row: FileRow, label: str, inputs: dict[str, Any], task: int) -> Rollout:
        """The row as it is handed on.

        Raises:
            RowError: The trainer could not have made it.
        """
        said, ids, prompt = row.get("completion"), row.get("completion_ids"), row.get("prompt_ids")
        messages = cleaned(said) if isinstance(said, list) else None
        has_mask = any(row.get(name) is not None for name in MASKS)
        told: dict[str, NDArray[np.float32]] = {}
        if ids is None and not said and said != "":
            raise RowError("it has no completion")
        if (ids is None or self._rescore) and isinstance(inputs["prompt"], str) and self._tasks.has_messages:
            raise RowError("its prompt is text, and the dataset's are messages")
        self._refuse_images_and_columns(row, inputs)
        if prompt is None:
            prompt = np.array(self._tokens.prompt(row["prompt"]), np.int32)
        if ids is None:
            completion = said if messages is None else messages
            cut_off = _flag(row, "is_truncated", label)
            ids = np.array(self._tokens.completion(row["prompt"], prompt.tolist(), completion, cut_off), np.int32)
            mask = np.ones(len(ids), np.int64)
        elif messages and not has_mask and any(message["role"] != "assistant" for message in messages):
            raise RowError("it has several turns, and no tool_mask tells which of its completion_ids the model said")
        else:
            mask, told = _token_values(row, label, len(ids))
            if self._rescore and messages is None and not mask.all():
                raise RowError("it has ids of several turns alone, and reward functions get messages: add completion")
        most = self._trainer.max_completion_length
        if not len(prompt) or not len(ids):
            raise RowError("its prompt or its completion has no tokens")
        if most is not None and len(ids) > most:
            raise RowError(f"its completion is longer than max_completion_length={most}")
        if self._positions is not None and len(prompt) + len(ids) > self._positions:
            raise RowError(f"it is longer than the model's {self._positions} positions")
        advantage = float(_reward(row, "advantage", label))
        return Rollout(
            label, inputs, task, prompt, ids, mask, told, self._rewards_of(row, label),
            None if self._rescore or np.isnan(advantage) else advantage, messages,
            _flag(row, "masked", label), _flag(row, "forked", label),
        )  # fmt: skip

    def _refuse_images_and_columns(self, row: FileRow, inputs: FileRow) -> None:
        """Refuse a row that lacks what the model or reward functions get from the dataset.

        Raises:
            RowError: Names it.
        """
        if any(row.get(name) for name in ("num_images", *IMAGES)) and inputs.keys().isdisjoint(IMAGES):
            raise RowError("it has images, and neither its file nor the dataset holds them")
        lacking = self._tasks.lacking(inputs) if self._rescore else []
        if lacking:
            raise RowError(
                f"it lacks {', '.join(map(repr, lacking))}, which reward functions get from the dataset, and no one "
                "row of that has its prompt: add the columns (null, if the functions read none)"
            )

    def _rewards_of(self, row: FileRow, label: str) -> Floats | None:
        """`(functions,)`: of each function, or the one reward; NaN for None. None if the functions score it.

        Raises:
            RowError: It has no reward.
            ReplayError: It has no such columns.
        """
        if self._rescore:
            return None
        if row.keys() >= {*self._rewards}:
            return np.array([_reward(row, name, label) for name in self._rewards])
        if "reward" not in row or len(self._rewards) > 1:
            names = dict(zip(self._trainer.reward_func_names, self._rewards, strict=True))
            lacking = [name for name in self._rewards if name not in row]
            raise ReplayError(
                f"{label} lacks rewards in {', '.join(map(repr, lacking))}: its columns are "
                f"{', '.join(map(repr, row))}. Name a column for each reward function "
                f"(dataset.rename_columns({names})), or let the trainer's functions score the rows: rescore=True of "
                "session.add, replay_warm_start_rescore=True."
            )
        reward = _reward(row, "reward", label)
        if np.isnan(reward):
            raise RowError("it has no reward")
        return reward[None]

    def _groups(
        self, rows: Sequence[Rollout | None], incomplete: str, rng: np.random.Generator
    ) -> Iterator[RolloutGroup]:
        """Groups of `num_generations` rows. What is left over is refused, or filled up with rows of its own. Only
        whole groups of a file keep its advantages."""
        size = self._size
        kept = [one for one in rows if one is not None]
        if any(one.forked for one in kept):
            self._tally.refuse(1, "completions of it have several rows (forked conversations), and here each has one")
            return
        if len(rows) != size or any(one is None or one.advantage is None for one in rows):
            for one in kept:
                one.advantage = None
        for start in range(0, len(kept), size):
            part = kept[start : start + size]
            missing = size - len(part)
            if missing and incomplete != "resample":
                reason = f"it has fewer rows than num_generations={size}"
                self._tally.refuse(1, f"{reason} ('resample' in replay_warm_start_short fills it up)")
                return
            yield part + [part[number] for number in rng.integers(len(part), size=missing)]


class FileTasks:
    """Finds the dataset's rows that a file's rows are of.

    Args:
        trainer (`trl.GRPOTrainer`): With the dataset.
        tasks ([`Tasks`]): Tells its rows apart.
    """

    def __init__(self, trainer: Any, tasks: Tasks) -> None:
        self._dataset = Dataset(lambda: compat.training_data(trainer), tasks.key)
        self._tasks = tasks
        self._columns = set() if compat.has_environments(trainer) else self._dataset.columns or set()
        self._needed = self._columns if tasks.columns is None else {"prompt", *tasks.columns}

    def of(self, row: FileRow) -> tuple[dict[str, Any], int]:
        """Return the trainer's input for a row, and its task: the dataset's row that an export names; else the file's
        columns and, where it lacks some, those of the dataset's row with its prompt.

        Raises:
            RowError: Several rows of the dataset have its prompt.
        """
        told = int(row.get(TASK) or 0)
        if told in self._rows:
            return dict(self._dataset.row(self._rows[told])), told
        names = {"prompt"} if told else {"prompt", *self._columns} - OWN  # an export's other columns are its own
        made = {name: row[name] for name in names if name in row}
        if not told and self._needed <= made.keys():
            return made, self._tasks.key(made)
        of_prompt = self._by_prompt.get(_of_prompt(made), {})
        if len(of_prompt) > 1:
            if told:
                raise RowError("its row of the dataset is gone, and several others have its prompt")
            lacking = ", ".join(map(repr, sorted(self._columns - made.keys())))
            raise RowError(f"several rows of the dataset have its prompt: add the columns {lacking}")
        for key, number in of_prompt.items():
            return {**self._dataset.row(number), **made}, key
        return made, max(told, 0) or _of_prompt(made)  # a task below 0 is that of one group

    @cached_property
    def _by_prompt(self) -> dict[int, dict[int, int]]:
        """By each prompt of the dataset, the first row of each of its tasks; none of a stream."""
        found: dict[int, dict[int, int]] = {}
        if self._dataset.size is not None and self._columns:
            with suppress(SeamError):  # a collator that makes something else of rows
                for number, row in enumerate(self._dataset):
                    found.setdefault(_of_prompt(row), {}).setdefault(self._tasks.key(row), number)
        return found

    @cached_property
    def _rows(self) -> dict[int, int]:
        """The dataset's rows, by task."""
        return {key: number for of_prompt in self._by_prompt.values() for key, number in of_prompt.items()}

    @cached_property
    def has_messages(self) -> bool:
        """Whether the dataset's prompts are messages, as far as that is known."""
        with suppress(SeamError):
            return bool(self._dataset.size) and isinstance(self._dataset.row(0).get("prompt"), list)
        return False

    def lacking(self, made: FileRow) -> list[str]:
        """Return the dataset's columns that an input lacks."""
        return sorted(self._columns - made.keys() - {*PROMPT_COLUMNS})


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, Mapping) and "role" in message for message in value)


def _of_prompt(row: FileRow) -> int:
    return Tasks([]).key({"prompt": row.get("prompt")})


def _numbers(
    row: FileRow, name: str, label: str, limits: tuple[float, float], whole: bool = False, dimensions: int = 1
) -> Floats:
    """A column's numbers, `(n,)`, or its one number; NaN for null, except where they are whole.

    Raises:
        ReplayError: It has something else.
    """
    low, high = limits
    try:
        found = np.asarray(row.get(name), np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.full((1,) * (dimensions + 1), np.nan)
    wrong = (found < low) | (found > high) | (whole & (found != np.floor(found))) | (found.ndim != dimensions)
    if wrong.any():
        value = shown(row[name]) if found.ndim != dimensions else f"{found[wrong][0]:g}"
        kind = ("a number", "numbers")[dimensions]
        raise ReplayError(f"{label} has {value} in {name}, which takes {kind} from {low:g} to {high:g}.")
    return found


def _reward(row: FileRow, name: str, label: str) -> Floats:
    """A reward or an advantage, `()`; NaN for None."""
    return _numbers(row, name, label, TOKENS[ADVANTAGES], dimensions=0)


def _flag(row: FileRow, name: str, label: str) -> bool:
    if row.get(name) not in (None, False, True):
        raise ReplayError(f"{label} has {name}={shown(row[name])}, which is neither true nor false.")
    return bool(row.get(name))


def _token_values(row: FileRow, label: str, size: int) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float32]]]:
    """The mask of tokens that are trained on, and the token-level fields that a row has.

    Raises:
        ReplayError: They are not one a token, or can't be.
    """
    found = {name: row[name] for name in (*MASKS, *TOKENS) if row.get(name) is not None}
    for name, values in found.items():
        if len(values) != size:
            raise ReplayError(f"{label} has {len(values)} {name} for {size} completion_ids.")
    mask = np.ones(size, np.int64)
    for name in MASKS:
        if name in found:
            mask *= _numbers(found, name, label, (0, 1), whole=True).astype(np.int64)
    trained = mask > 0
    told: dict[str, NDArray[np.float32]] = {}
    for name, limits in TOKENS.items():
        if name in found:
            told[name] = np.asarray(found[name], np.float32)
            counting = {name: np.where(trained, told[name], 0)}  # nothing reads those of other tokens
            _numbers(counting, name, label, limits)
    return mask, told


def reward_columns(names: Sequence[str]) -> list[str]:
    """Return the column of each reward function: `reward/name`, and for a further one of that name `reward/name#2`."""
    counts = [names[:place].count(name) + 1 for place, name in enumerate(names)]
    return [f"reward/{name}" + (f"#{count}" if count > 1 else "") for name, count in zip(names, counts, strict=True)]


def read_rows(source: Any) -> Iterator[tuple[str, int, Any]]:
    """Yield the file, number, and content of each row.

    Args:
        source (`Any`): Paths, or rows: an iterable of mappings, such as a dataset.

    Raises:
        ReplayError: Something can't be read.
    """
    if are_paths(source):
        try:
            files = data_files(source)
        except ValueError as error:
            raise ReplayError(f"{source_name(source)} can't be read: {error}.") from None
        for path in files:
            yield from ((str(path), number, row) for number, row in enumerate(_read(path)))
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        yield from ((GIVEN, number, row) for number, row in enumerate(source))
    else:
        raise ReplayError(f"{shown(source)} can't be read: give a path, a Dataset, or rows as mappings.")


def _read(path: Path) -> Iterator[Any]:
    from datasets import load_dataset

    kind = next((KINDS[suffix] for suffix in path.suffixes if suffix in KINDS), "json")
    ending = next(ending for ending in reversed(ENDINGS) if path.name.endswith(ending))
    try:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder) / f"rows{ending}"  # datasets would take brackets for a pattern, and :: for a chain
            link.symlink_to(path.absolute())
            yield from load_dataset(kind, data_files=str(link), split="train", streaming=True)
    except Exception as error:  # of datasets, pyarrow, pandas or the system
        raise ReplayError(
            f"{path} can't be read: {type(error).__name__}: {error}. Give what datasets.load_dataset({kind!r}, "
            "data_files=…) reads, with a row or more."
        ) from error


def source_name(source: Any) -> str:
    """Return the name of a source in errors."""
    if not are_paths(source):
        return GIVEN
    return ", ".join(map(str, source)) if isinstance(source, list | tuple) else str(source)


def shown(value: Any) -> str:
    """A value as errors show it."""
    text = repr(value)
    return text if len(text) <= CHARACTERS_SHOWN else f"{text[:CHARACTERS_SHOWN]}…"
