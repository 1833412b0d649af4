"""Rows made elsewhere (Parquet, JSONL, or mappings), read and combined into groups of token ids."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import compat
from ..base.sizes import counted
from ..data.counters import Tally
from ..data.fields import ADVANTAGES
from ..data.rewards import weighted_rewards
from ..data.types import Bools, Floats
from ..errors import ReplayError
from ..session import Session
from .export import PORTION
from .file_tasks import IN_JSON, TASK, TASK_COLUMNS, UNKNOWN, FileTasks
from .schema import FINGERPRINT, TOKENS, Row, checked, compact, has_images, reward_columns

METADATA = (FINGERPRINT, TASK_COLUMNS, IN_JSON)
"""Keys of a Parquet file's metadata."""


@dataclass(frozen=True, slots=True)
class OfflineGroup:
    """`G` completions of one prompt.

    Attributes:
        prompt_ids (`list[NDArray]`): Of each row.
        completion_ids (`list[NDArray]`): Of each row.
        rewards (`(G, functions)`): Raw rewards, NaN for None.
        weights (`(functions,)`): The trainer's weight of each; 1 where they are not the trainer's functions.
        named (`bool`): Whether they are.
        advantages (`(G,)`, *optional*): The file's.
        masked (`(G,)` bool): Rows that train nothing, as the file says.
        task (`int`): What it was generated for, as in the table; `UNKNOWN` if the file does not say.
        tokens (`dict[str, list[NDArray]]`): Token-level fields that the file has for every row, by batch key.
    """

    prompt_ids: list[NDArray[np.int32]]
    completion_ids: list[NDArray[np.int32]]
    rewards: Floats
    weights: Floats
    named: bool
    advantages: Floats | None
    masked: Bools
    task: int
    tokens: dict[str, list[NDArray[np.float32]]] = field(default_factory=dict)

    @property
    def is_shaped(self) -> bool:
        """Tell whether equal advantages of its rows may still train."""
        return bool(self.masked.any()) or ADVANTAGES in self.tokens


def read_groups(session: Session, source: Any, incomplete: str, tally: Tally) -> list[OfflineGroup]:
    """The groups of a file or of rows, each with the trainer's number of rows.

    Rows belong together by the column `group` where there is one, and else by their task; a group of more rows than
    `num_generations` gives several. Token ids and log-probs count only if the file's tokenizer is this one.

    Raises:
        ReplayError: The source can't be read, or a row lacks what is needed: names the row.
    """
    name = source_name(source)
    trainer = session.trainer
    rows, metadata = _read(source)
    tasks = FileTasks(trainer, session.components.tasks, metadata)
    gathered = _gathered(rows, name, compat.vocabulary_size(trainer), tasks)
    same_tokenizer = metadata.get(FINGERPRINT) in (None, compat.tokenizer_fingerprint(trainer))
    size = session.components.num_generations
    rng = np.random.default_rng(trainer.args.seed)
    groups: list[OfflineGroup] = []
    sorted_by_reward = 0
    for members in gathered:
        parts = _parts(size, members, name, incomplete, tally, rng)
        cut = [_group(trainer, part, same_tokenizer, tasks) for part in parts]
        sorted_by_reward += _is_sorted(cut)
        groups += cut
    if sorted_by_reward and trainer.accelerator.is_main_process:
        warnings.warn(
            f"In {name}, {counted(sorted_by_reward, 'prompt')} of different rewards gave only groups of equal ones, "
            "which teach nothing: neighboring rows make a group, and these are sorted by reward. Shuffle the rows, or "
            "number the groups in a column `group`.",
            stacklevel=2,
        )
    if trainer.accelerator.is_main_process and any(group.advantages is not None for group in groups):
        _warn_of_other_functions(trainer, gathered, name)
    if trainer.accelerator.is_main_process and not any("prompt_ids" in row for rows in gathered for row in rows):
        _warn_of_plain_texts(trainer, [rows[0]["prompt"] for rows in gathered], name)
    return _fitting(trainer, groups, name, tally)


def _warn_of_plain_texts(trainer: Any, prompts: Sequence[Any], source: str) -> None:
    """Warn of texts that lack the chat template which the trainer puts around its dataset's messages."""
    dataset = trainer.train_dataset
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts or compat.streams(dataset) or compat.has_environments(trainer) or not len(dataset):
        return
    messages = dataset[0].get("prompt")
    if not isinstance(messages, list):
        return
    ending = compat.templated(trainer, messages)[-1]
    if all(_prompt_ids(trainer, text)[-1:] != ending for text in texts):
        warnings.warn(
            f"The prompts in {source} are texts without a chat template, and those of the dataset are messages: the "
            "model never gets such prompts. Give messages, as in the dataset.",
            stacklevel=3,
        )


def _warn_of_other_functions(trainer: Any, gathered: Sequence[Sequence[Row]], source: str) -> None:
    """Warn of advantages that were made from rewards of other functions than the trainer has."""
    trained = set(reward_columns(trainer.reward_func_names))
    scored = {name for rows in gathered for row in rows for name, value in row.items() if value is not None}
    counted_in = {name for name in scored if name.startswith("reward/")}
    others = sorted(counted_in - trained)
    lacking = sorted(trained - {name for rows in gathered for row in rows for name in row})
    if counted_in and (others or lacking):
        words = [f"with {name}" for name in others] + [f"without {name}" for name in lacking]
        warnings.warn(
            f"The advantages in {source} are of other reward functions than the trainer's ({', '.join(words)}), and "
            "are used as they are. To have them computed from its functions, drop the column `advantage`.",
            stacklevel=2,
        )


def _is_sorted(groups: Sequence[OfflineGroup]) -> bool:
    """Tell whether a prompt's rewards differ between groups, and in none of them."""
    rewards = [weighted_rewards(group.rewards, group.weights) for group in groups]
    known = [of_group[~np.isnan(of_group)] for of_group in rewards if not np.isnan(of_group).all()]
    alike = all((of_group == of_group[0]).all() for of_group in known) and not any(one.is_shaped for one in groups)
    return alike and len({float(of_group[0]) for of_group in known}) > 1


def _gathered(rows: Iterable[Any], source: str, vocabulary: int, tasks: FileTasks) -> list[list[Row]]:
    """Rows that belong together, if all of them can be used."""
    gathered: dict[str, list[Row]] = {}
    for number, given in enumerate(rows):
        label = f"Row {number} of {source}"
        row = checked(given, label, vocabulary)
        key = row.get("group")
        if key is None:
            key = [tasks.of(row), row["prompt"]]
        text = json.dumps(key, sort_keys=True, default=str)
        members = gathered.setdefault(text, [])
        if members and row.get(TASK) != members[0].get(TASK):
            raise ReplayError(
                f"{label} is of another task ({TASK}) than another row of its group {row.get('group')!r}: rewards of "
                "two tasks have no baseline in common. Number groups apart."
            )
        if members and row["prompt"] != members[0]["prompt"] and not row.get(TASK):
            raise ReplayError(
                f"{label} has the prompt {row['prompt']!r}, and another row of its group {row['group']!r} has "
                f"{members[0]['prompt']!r}: rewards of two prompts have no baseline in common. Number groups apart."
            )
        members.append(row)
    return list(gathered.values())


def _parts(
    size: int, members: list[Row], source: str, incomplete: str, tally: Tally, rng: np.random.Generator
) -> Iterator[list[Row]]:
    """Parts of `size` rows. What is left over is refused, or filled up with rows of its own."""
    if any(map(has_images, members)):
        tally.refuse(1, "it has images, and its file does not hold them")
        return
    whole = len(members) // size * size
    for start in range(0, whole, size):
        yield members[start : start + size]
    rest = members[whole:]
    if rest and incomplete == "resample":
        drawn = rng.integers(len(rest), size=size - len(rest))
        yield rest + [rest[index] for index in drawn]
    elif rest:
        reason = f"it has fewer rows in {source} than num_generations={size}"
        tally.refuse(1, f"{reason} ('resample' in replay_warm_start_short fills it up)")


def _fitting(trainer: Any, groups: Sequence[OfflineGroup], source: str, tally: Tally) -> list[OfflineGroup]:
    """The groups whose rows are no longer than this trainer's may be. One warning tells of all others."""
    limit = trainer.max_completion_length
    positions = compat.positions(trainer)
    fitting = list(groups)
    reasons: list[str] = []
    for most, length, fault in (
        (limit, _longest_completion, f"a completion is longer than max_completion_length={limit}"),
        (positions, _longest_row, f"a prompt with its completion is longer than the model's {positions} positions"),
    ):
        if most is None:
            continue
        refused = [group for group in fitting if length(group) > most]
        if refused:
            fitting = [group for group in fitting if length(group) <= most]
            reason = f"{fault}: the longest has {max(map(length, refused))} tokens"
            tally.refuse(len(refused), reason)
            reasons.append(reason)
    if reasons and trainer.accelerator.is_main_process:
        warnings.warn(
            f"{len(groups) - len(fitting)} of the {len(groups)} groups of {source} were refused: "
            f"{'; '.join(reasons)}. All rows of a batch are padded to its longest one, so that replaying such a group "
            "would make every row of its batch that long.",
            stacklevel=2,
        )
    return fitting


def _longest_completion(group: OfflineGroup) -> int:
    return max(map(len, group.completion_ids))


def _longest_row(group: OfflineGroup) -> int:
    """Tokens of the longest prompt with its completion."""
    pairs = zip(group.prompt_ids, group.completion_ids, strict=True)
    return max(len(prompt) + len(completion) for prompt, completion in pairs)


def _read(source: Any) -> tuple[Iterable[Any], Mapping[str, str]]:
    """The rows, and what their file says of itself: `METADATA`."""
    if not isinstance(source, str | Path):
        if not isinstance(source, Iterable):
            raise ReplayError(f"{source!r} can't be read: give a path, or rows as mappings.")
        return source, {}
    path = Path(source)
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        if path.suffix == ".jsonl":
            lines = path.read_bytes().split(b"\n")
            return [json.loads(line, object_pairs_hook=_named_once) for line in lines if line.strip()], {}
    except Exception as error:  # of pyarrow, json or the system
        raise ReplayError(f"{path} can't be read: {type(error).__name__}: {error}") from error
    raise ReplayError(f"{path} can't be read: give a path that ends in .parquet or .jsonl.")


def _named_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of a JSON object or of a file's columns.

    Raises:
        ValueError: A name comes twice.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {name!r} twice")
        found[name] = value
    return found


def _read_parquet(path: Path) -> tuple[list[Row], Mapping[str, str]]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    _named_once([(name, None) for name in file.schema_arrow.names])
    found = file.schema_arrow.metadata or {}
    metadata = {key: found[key.encode()].decode() for key in METADATA if key.encode() in found}
    in_json = json.loads(metadata.get(IN_JSON, "[]"))
    rows: list[Row] = []
    for batch in file.iter_batches(PORTION):
        for row in map(compact, batch.to_pylist()):
            rows.append(row | {name: json.loads(row[name]) for name in in_json if row.get(name) is not None})
    return rows, metadata


def source_name(source: Any) -> str:
    """Return the name of a source in errors."""
    return str(source) if isinstance(source, str | Path) else "the rows given"


def _group(trainer: Any, rows: Sequence[Row], same_tokenizer: bool, tasks: FileTasks) -> OfflineGroup:
    with_ids = same_tokenizer and all(map(_has_ids, rows))
    if with_ids:
        prompts = [np.asarray(row["prompt_ids"]).astype(np.int32) for row in rows]
        completions = [np.asarray(row["completion_ids"]).astype(np.int32) for row in rows]
    else:
        prompts = [_prompt_ids(trainer, row["prompt"]) for row in rows]
        completions = [_completion_ids(trainer, row["completion"]) for row in rows]
    if not all(map(len, prompts)) or not all(map(len, completions)):
        raise ReplayError(f"A row with the prompt {rows[0]['prompt']!r} has no tokens.")
    rewards, weights, named = _rewards(trainer, rows)
    of_rows = {tasks.of(row) for row in rows}
    return OfflineGroup(
        prompt_ids=prompts,
        completion_ids=completions,
        rewards=rewards,
        weights=weights,
        named=named,
        advantages=_advantages(rows),
        masked=np.array([bool(row.get("masked")) for row in rows]),
        task=of_rows.pop() if len(of_rows) == 1 else UNKNOWN,
        tokens=_token_fields(rows) if with_ids else {},
    )


def _has_ids(row: Row) -> bool:
    return row.get("prompt_ids") is not None and row.get("completion_ids") is not None


def _token_fields(rows: Sequence[Row]) -> dict[str, list[NDArray[np.float32]]]:
    """Return the token-level fields that every row has."""
    present = [name for name in TOKENS if all(row.get(name) is not None for row in rows)]
    return {name: [np.asarray(row[name]).astype(np.float32) for row in rows] for name in present}


def _advantages(rows: Sequence[Row]) -> Floats | None:
    """`(G,)`, if every row has one."""
    advantages = [row.get("advantage") for row in rows]
    if any(value is None for value in advantages):
        return None
    return np.array(advantages, np.float64)


def _rewards(trainer: Any, rows: Sequence[Row]) -> tuple[Floats, Floats, bool]:
    """`(G, functions)` rewards, `(functions,)` weights, and whether they are of the trainer's functions.

    Of these where the file names them all; else the column `reward`, or other functions at weight 1.
    """
    total = _columns(rows, ["reward"])
    has_total = not np.isnan(total).all()
    names = reward_columns(trainer.reward_func_names)
    if all(name in row for row in rows for name in names):
        rewards = _columns(rows, names)
        if not (has_total and np.isnan(rewards).all()):
            return rewards, compat.reward_setup(trainer).weights, True
    if has_total:
        return total, np.ones(1), False
    present = {name for row in rows for name in row}
    others = sorted(name for name in present if name.startswith("reward/"))
    return _columns(rows, others), np.ones(len(others)), False


def _columns(rows: Sequence[Row], names: Sequence[str]) -> Floats:
    """`(G, names)`; NaN for None."""
    return np.array([[row.get(name) for name in names] for row in rows], np.float64)


def _prompt_ids(trainer: Any, prompt: Any) -> NDArray[np.int32]:
    """Of a text, or of messages in the trainer's chat template.

    Raises:
        ReplayError: An environment adds what the file does not tell.
    """
    tokenizer = compat.tokenizer(trainer)
    if isinstance(prompt, str):
        encoded = tokenizer(prompt)
        return np.array(encoded["input_ids"], np.int32)
    if compat.has_environments(trainer):
        raise ReplayError(
            "The prompts of this file are messages, and environments add their tools and words to those of the run: "
            "give the prompt's text as the model gets it, or prompt_ids and completion_ids."
        )
    return np.array(compat.templated(trainer, list(prompt)), np.int32)


def _completion_ids(trainer: Any, completion: Any) -> NDArray[np.int32]:
    """Of a text, or of messages of which the last one counts; the end token follows where there is room for it."""
    tokenizer = compat.tokenizer(trainer)
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    encoded = tokenizer(text, add_special_tokens=False)
    ids = list(encoded["input_ids"])
    limit = trainer.max_completion_length
    ended = ids[-1:] == [tokenizer.eos_token_id]
    full = limit is not None and len(ids) >= limit
    if not ended and not full:
        ids.append(tokenizer.eos_token_id)
    return np.array(ids, np.int32)
