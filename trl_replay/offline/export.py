"""Entries as a table with one row a completion: Parquet that `datasets.load_dataset("parquet", …)` reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import compat
from ..buffer.replay_buffer import ReplayBuffer
from ..checkpoint import format as saved
from ..components import Components
from ..errors import CheckpointError, ReplayError
from ..fields import REWARD, REWARDS
from ..protocols import division_of
from ..types import Group
from .schema import FINGERPRINT, TOKENS, reward_columns

PORTION = 512
"""Groups that are in memory at once."""


class Entry(NamedTuple):
    """One entry: its numbers in the table, and its payload."""

    columns: Mapping[str, Any]
    group: Group


class Source(NamedTuple):
    """Where entries come from, and how to read them.

    Attributes:
        entries (`Iterable[Entry]`): In the order of the table.
        tokenizer (`Any`): Decodes them.
        reward_functions (`Sequence[str]`): Names of the reward functions.
        fingerprint (`str`): Of the tokenizer.
    """

    entries: Iterable[Entry]
    tokenizer: Any
    reward_functions: Sequence[str]
    fingerprint: str


def export(path: str | Path, trainer: Any, components: Components) -> Path:
    """What [`Session.export`] does."""
    path, rank, ranks = (
        Path(path),
        int(trainer.accelerator.process_index),
        components.processes,
    )
    division = division_of(components.scope)
    copies = division is not None and division.replicated
    if ranks > 1 and not copies:
        path = path.with_stem(f"{path.stem}-{rank:05d}-of-{ranks:05d}")
    if rank == 0 or not copies:
        write(path, of_buffer(components.buffer, trainer))
    return path


def of_buffer(buffer: ReplayBuffer, trainer: Any) -> Source:
    """What this process holds."""
    table, held = buffer.table, set(buffer.held())

    def entries() -> Iterator[Entry]:
        for row, serial in enumerate(table.serial.tolist()):
            if serial in held:
                yield Entry(
                    {name: getattr(table, name)[row].item() for name in table.names},
                    buffer.load(serial),
                )

    fingerprint = compat.tokenizer_fingerprint(trainer)
    return Source(
        entries(),
        compat.tokenizer(trainer),
        list(trainer.reward_func_names),
        fingerprint,
    )


def of_checkpoint(folder: str | Path) -> Source:
    """The entries of all ranks of a checkpoint, each once.

    Raises:
        CheckpointError: It holds no buffer, or a damaged one.
    """
    from transformers import AutoTokenizer

    ours = Path(folder) / saved.FOLDER
    states = [saved.read(ours, rank) for rank in saved.ranks_in(ours)]
    if not states:
        raise CheckpointError(f"{folder} holds no replay buffer.")

    def entries() -> Iterator[Entry]:
        for state in states:
            rows = {serial: row for row, serial in enumerate(state.columns["serial"].tolist())}
            for serial, group in state.payload() if state.payload_rank == state.rank else ():
                yield Entry(
                    {name: column[rows[serial]].item() for name, column in state.columns.items()},
                    group,
                )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Source(
        entries(),
        tokenizer,
        states[0].session["reward_functions"],
        states[0].identity.tokenizer,
    )


def write(path: str | Path, source: Source) -> int:
    """Writes entries to a Parquet file; returns the number of rows.

    Raises:
        ReplayError: The path does not end in `.parquet`.
    """
    import pyarrow
    from pyarrow import parquet

    path = Path(path)
    if path.suffix != ".parquet":
        raise ReplayError(f"{path} can't be written: give a path that ends in .parquet.")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")  # what was there before stays until all is written
    floats, ints = (
        pyarrow.list_(pyarrow.float32()),
        pyarrow.list_(pyarrow.int32()),
    )
    columns: dict[str, Any] = {
        "prompt": pyarrow.string(),
        "completion": pyarrow.string(),
        "prompt_ids": ints,
        "completion_ids": ints,
        **dict.fromkeys(reward_columns(source.reward_functions), pyarrow.float32()),
        "reward": pyarrow.float32(),
        "advantage": pyarrow.float32(),
        "step": pyarrow.int64(),
        "uses": pyarrow.int64(),
        "score": pyarrow.float64(),
        "group": pyarrow.int64(),
        "images": pyarrow.int32(),
        **dict.fromkeys(TOKENS, floats),
    }
    schema = pyarrow.schema(list(columns.items())).with_metadata({FINGERPRINT: source.fingerprint})
    rows, count = list[dict[str, Any]](), 0
    try:
        with parquet.ParquetWriter(part, schema) as writer:
            for number, entry in enumerate(source.entries):
                rows += rows_of(number, entry, source)
                if number % PORTION == PORTION - 1:
                    writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                    count, rows = count + len(rows), []
            if rows:  # an empty row group is more than readers expect
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count + len(rows)


def rows_of(number: int, entry: Entry, source: Source) -> Iterator[dict[str, Any]]:
    """One row a completion of an entry; `number` tells groups apart, whose serials may be equal on several ranks."""
    group, columns = entry.group, entry.columns
    size = len(group.completion_lengths)
    lengths = group.completion_lengths.tolist()
    prompts = _split(group.tensors["prompt_ids"], group.prompt_lengths.tolist())
    prompts = prompts * size if len(prompts) == 1 else prompts
    completions = _split(group.tensors["completion_ids"], lengths)
    tokens = {key: _split(group.tensors[key], lengths) for key in TOKENS if _is_flat(group, key)}
    rewards, reward = _rewards_of(group), group.tensors.get(REWARD)
    images = group.tensors.get("num_images", torch.zeros(1, dtype=torch.int32)).expand(size).tolist()
    for row in range(size):
        named = dict(zip(reward_columns(source.reward_functions), rewards[row], strict=False))
        yield {
            "prompt": source.tokenizer.decode(prompts[row]),
            "completion": source.tokenizer.decode(completions[row], skip_special_tokens=True),
            "prompt_ids": prompts[row],
            "completion_ids": completions[row],
            **{column: None if np.isnan(value) else value for column, value in named.items()},
            "reward": None if reward is None else float(reward[row]),
            "advantage": float(group.tensors["advantages"][row]),
            **{name: columns[name] for name in ("step", "uses", "score")},
            "group": number,
            "images": images[row],
            **{key: parts[row] for key, parts in tokens.items()},
        }


def _rewards_of(group: Group) -> list[list[float]]:
    """Per row, the raw reward of each function; NaN where it returned None."""
    stored = group.tensors.get(REWARDS)
    rows: list[list[float]] = [[] for _ in group.completion_lengths] if stored is None else stored.tolist()
    return rows


def _is_flat(group: Group, key: str) -> bool:
    """Whether a key has one value a completion token (not, as vLLM's ratio in a sequence mode, one a row)."""
    return key in group.tensors and group.tensors[key].shape == (int(group.completion_lengths.sum()),)


def _split(tensor: torch.Tensor, lengths: list[int]) -> list[list[float]]:
    """The values of each row."""
    parts: list[list[float]] = [part.float().tolist() if part.is_floating_point() else part.tolist()
                                for part in torch.split(tensor, lengths)]  # fmt: skip
    return parts
