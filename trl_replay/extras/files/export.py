"""Entries as a table with one row a completion: Parquet that `datasets.load_dataset("parquet", …)` reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ... import compat
from ...base.files import replacing
from ...buffer import ReplayBuffer
from ...checkpoint import format as saved
from ...checkpoint.discovery import FOLDER, last_complete_checkpoint
from ...data.table import Table
from ...data.types import ADVANTAGES, FIELDS, STORED_REWARDS, TOKEN_ADVANTAGES, Entry, Group
from ...errors import CheckpointError, ReplayError
from ...serialization.groups import unpack
from .reader import TASK, TOKENIZER, reward_columns

if TYPE_CHECKING:
    import pyarrow

EXPORTED = tuple(spec.name for spec in FIELDS if spec.layout == "completion" and spec.name != "completion_ids")
EXPORTED += (ADVANTAGES,)
"""Token-level fields, each a column of lists; null where all values are implied or absent."""
PORTION = 4096
"""Rows that are in memory at once."""


class StoredEntry(NamedTuple):
    """One entry: its numbers in the table, and its payload."""

    columns: Mapping[str, Any]
    group: Group


class Source(NamedTuple):
    """Entries, and how to read them.

    Attributes:
        entries (`Iterable[StoredEntry]`): In the order of the table.
        tokenizer (`Any`): Decodes them.
        reward_functions (`Sequence[str]`): Names of the reward functions.
        fingerprint (`str`): Of the tokenizer.
    """

    entries: Iterable[StoredEntry]
    tokenizer: Any
    reward_functions: Sequence[str]
    fingerprint: str


def of_buffer(buffer: ReplayBuffer, trainer: Any) -> Source:
    """Return the entries that this process holds."""
    table = buffer.table
    held = set(buffer.held())

    def entries() -> Iterator[StoredEntry]:
        for row, serial in enumerate(table.serial.tolist()):
            if serial in held:
                yield StoredEntry(_columns(table, row), buffer.load(serial))

    return Source(
        entries=entries(),
        tokenizer=compat.tokenizer(trainer),
        reward_functions=list(trainer.reward_func_names),
        fingerprint=compat.tokenizer_fingerprint(trainer),
    )


def _columns(table: Table, row: int) -> dict[str, Any]:
    """A row of the table: numbers, and lists in row columns."""
    return {name: getattr(table, name)[row].tolist() for name in table.names}


def read_entry(serial: int, buffer: ReplayBuffer, trainer: Any) -> Entry:
    """Return an entry whose payload is here, decoded: [`Session.entry`]."""
    table = buffer.table
    row = int(np.flatnonzero(table.serial == serial)[0])
    entry = StoredEntry(_columns(table, row), buffer.load(serial))
    functions = list(trainer.reward_func_names)
    source = Source([entry], compat.tokenizer(trainer), functions, "")
    rows = list(rows_of(serial, entry, source))
    values = {name: [held[name] for held in rows] for name in rows[0]}
    named = reward_columns(functions)
    return Entry(
        serial=serial,
        prompts=values["prompt"],
        completions=values["completion"],
        rewards={name.removeprefix("reward/"): np.array(values[name], np.float64).tolist() for name in named},
        advantages=entry.columns["row_advantage"],
        masked=values["masked"],
        logps=values[compat.OLD_LOGPS],
        columns={**entry.columns, "row_reward": table.row_reward[row].tolist()},
    )


def checkpoint_of(path: Path) -> Path:
    """Return the folder itself where it holds a buffer, or the newest complete checkpoint in it.

    Raises:
        ReplayError: There is nothing at this path.
    """
    if not path.exists():
        raise ReplayError(f"{path} does not exist: give a run's output_dir or one of its checkpoints.")
    is_checkpoint = path.is_file() or (path / FOLDER).is_dir()
    return path if is_checkpoint else Path(last_complete_checkpoint(path) or path)


def of_checkpoint(folder: str | Path) -> Source:
    """The entries of all ranks of a checkpoint, each once.

    Raises:
        CheckpointError: It holds no buffer, or a damaged one, or not the tokenizer of its token ids.
    """
    from transformers import AutoTokenizer

    states = saved.read_all(folder)

    def entries() -> Iterator[StoredEntry]:
        for state in states:
            serials = state.columns["serial"].tolist()
            rows = {serial: row for row, serial in enumerate(serials)}
            for serial, packed in state.payload():
                row = rows[serial]
                columns = {name: column[row].tolist() for name, column in state.columns.items()}
                yield StoredEntry(columns, unpack(packed))

    first = states[0]
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(
            f"The tokenizer in {folder} can't be read ({type(error).__name__}: {error}). Put the tokenizer's files of "
            "that run there, or give another checkpoint."
        ) from error
    if compat.fingerprint(tokenizer) != first.identity.tokenizer:
        raise CheckpointError(
            f"{folder} holds no tokenizer, or another one than its buffer's token ids are of: texts would be wrong. "
            "Put the tokenizer's files of that run there."
        )
    return Source(
        entries=entries(),
        tokenizer=tokenizer,
        reward_functions=first.session["reward_rule"][0],
        fingerprint=first.identity.tokenizer,
    )


def write(path: str | Path, source: Source) -> int:
    """Write entries to a Parquet file; return the number of rows.

    Raises:
        ReplayError: The path does not end in `.parquet`.
    """
    import pyarrow
    from pyarrow import parquet

    path = Path(path)
    if path.suffix != ".parquet":
        raise ReplayError(f"{path} can't be written: give a path that ends in .parquet.")
    schema = _schema(source)
    rows = (row for number, entry in enumerate(source.entries) for row in rows_of(number, entry, source))
    count = 0
    with replacing(path) as part, parquet.ParquetWriter(part, schema) as writer:
        while portion := list(islice(rows, PORTION)):
            writer.write_table(pyarrow.Table.from_pylist(portion, schema))
            count += len(portion)
    return count


def _schema(source: Source) -> pyarrow.Schema:
    """The columns of a file."""
    import pyarrow

    ints = pyarrow.list_(pyarrow.int32())
    floats = pyarrow.list_(pyarrow.float32())
    columns: dict[str, Any] = {
        "prompt": pyarrow.string(),
        "completion": pyarrow.string(),
        "prompt_ids": ints,
        "completion_ids": ints,
        **dict.fromkeys(reward_columns(source.reward_functions), pyarrow.float32()),
        "advantage": pyarrow.float32(),
        "masked": pyarrow.bool_(),
        "forked": pyarrow.bool_(),
        "update": pyarrow.int64(),
        "uses": pyarrow.int64(),
        "score": pyarrow.float64(),
        "group": pyarrow.int64(),
        "num_images": pyarrow.int32(),
        **dict.fromkeys(EXPORTED, floats),
        TASK: pyarrow.int64(),
        TOKENIZER: pyarrow.string(),
    }
    return pyarrow.schema(list(columns.items()))


def rows_of(number: int, entry: StoredEntry, source: Source) -> Iterator[dict[str, Any]]:
    """One row a completion of an entry; `number` tells groups apart, whose serials may be equal on several ranks."""
    group = entry.group
    tensors = group.tensors
    size = len(group.completion_lengths)
    lengths = group.completion_lengths.tolist()
    prompts = _split(tensors["prompt_ids"], group.prompt_lengths.tolist())
    if len(prompts) == 1:
        prompts = prompts * size
    completions = _split(tensors["completion_ids"], lengths)
    tokens = {key: _split(tensors[key], lengths) for key in EXPORTED if _is_flat(group, key)}
    rewards = tensors[STORED_REWARDS].tolist()  # NaN where a function returned None
    no_images = torch.zeros(1, dtype=torch.int32)
    images = tensors.get("num_images", no_images).expand(size).tolist()
    reward_names = reward_columns(source.reward_functions)
    masked = masked_rows(group, entry.columns["row_masked"])
    for row in range(size):
        named = dict(zip(reward_names, rewards[row], strict=True))
        yield {
            "prompt": source.tokenizer.decode(prompts[row]),
            "completion": source.tokenizer.decode(completions[row], skip_special_tokens=True),
            "prompt_ids": prompts[row],
            "completion_ids": completions[row],
            **{column: None if np.isnan(value) else value for column, value in named.items()},
            "advantage": None if ADVANTAGES in tokens else float(group.advantages[row]),
            "masked": masked[row],
            "forked": size > len(entry.columns["row_masked"]),
            "update": entry.columns["update"],
            "uses": entry.columns["uses"],
            "score": entry.columns["score"],
            "group": number,
            "num_images": images[row],
            **{key: parts[row] for key, parts in tokens.items()},
            TASK: entry.columns["prompt"],
            TOKENIZER: source.fingerprint,
        }


def masked_rows(group: Group, masked: Sequence[bool]) -> Sequence[bool]:
    """Return which of a stored group's rows are masked, given its masked completions: if a completion has several
    rows, those that no function scored."""
    rows = len(group.completion_lengths)
    if rows <= len(masked):
        return masked
    rewards = group.tensors.get(STORED_REWARDS)
    if rewards is None or not any(masked):
        return [False] * rows
    failed = rewards.isnan().all(dim=1)
    of_rows: list[bool] = (failed & ~failed.all()).tolist()
    return of_rows


def _is_flat(group: Group, key: str) -> bool:
    """Return whether a key has one value a completion token (not one a row, as vLLM's ratio in a sequence mode)."""
    if key not in group.tensors or (key == ADVANTAGES and TOKEN_ADVANTAGES not in group.keys):
        return False
    tokens = int(group.completion_lengths.sum())
    return group.tensors[key].shape == (tokens,)


def _split(tensor: torch.Tensor, lengths: list[int]) -> list[list[float]]:
    """The values of each row."""
    if tensor.is_floating_point():
        tensor = tensor.float()
    rows: list[list[float]] = [part.tolist() for part in torch.split(tensor, lengths)]
    return rows
