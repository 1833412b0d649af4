"""Rows of files, datasets, and tables, one mapping a completion, by the columns that the reader knows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...base.data_files import are_paths, data_files
from ...errors import ReplayError
from .export import PORTION
from .file_tasks import IN_JSON, TASK, TASK_COLUMNS
from .schema import FINGERPRINT, OWN, TOKENS, compact, reward_columns

METADATA = (FINGERPRINT, TASK_COLUMNS, IN_JSON)
"""Keys of a Parquet file's metadata."""
LOGGED = {"step", "prompt", "completion", "advantage"}
"""Columns of a table of completions that TRL logs; each reward function has one, too, by its name."""
GIVEN = "the rows given"
"""Name in errors of what is no file."""


@dataclass(slots=True)
class Source:
    """Rows of one file, or those given.

    Attributes:
        name (`str`): In errors.
        rows (`Iterable`): One a completion.
        metadata (`Mapping[str, str]`): What a file says of itself: `METADATA`.
        logged (`bool`): Whether TRL logged it: texts without special tokens, before release 1.15.
    """

    name: str
    rows: Iterable[Any]
    metadata: Mapping[str, str] = field(default_factory=dict)
    logged: bool = False


def source_name(source: Any) -> str:
    """Return the name of a source in errors."""
    if not are_paths(source):
        return GIVEN
    return ", ".join(map(str, source)) if isinstance(source, list | tuple) else str(source)


def read_sources(source: Any, columns: Mapping[str, str], functions: Sequence[str]) -> list[Source]:
    """Read everything that is meant, whole.

    Args:
        source (`Any`): Paths, or rows: an iterable of mappings, a dataset, a table of pandas or pyarrow.
        columns (`Mapping[str, str]`): By names in the source, the names that they stand for.
        functions (`Sequence[str]`): Names of the trainer's reward functions.

    Raises:
        ReplayError: Something can't be read.
    """
    if not are_paths(source):
        sources = [Source(GIVEN, _given(source))]
    else:
        try:
            files = data_files(source)
        except ValueError as error:
            raise ReplayError(f"{source_name(source)} can't be read: {error}.") from None
        sources = [_read(path) for path in files]
    found = [_prepared(one, columns, functions) for one in sources]
    return [one for one, before in zip(found, [None, *found], strict=False) if not _logged_again(one, before)]


def _given(source: Any) -> Any:
    """Return the rows of what is no file."""
    import pandas
    import pyarrow

    try:
        if isinstance(source, pandas.DataFrame):
            _named_once((name, None) for name in source.columns)
            source = pyarrow.Table.from_pandas(source, preserve_index=False)
        if isinstance(source, pyarrow.Table):
            _named_once((name, None) for name in source.column_names)
            return source.to_pylist()
    except ValueError as error:  # of pyarrow, too: columns of mixed types
        raise ReplayError(f"{GIVEN} can't be read: {error}.") from error
    if not isinstance(source, Iterable) or isinstance(source, Mapping):
        raise ReplayError(f"{source!r} can't be read: give a path, or rows as mappings.")
    return source


def _read(path: Path) -> Source:
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        if ".csv" in path.suffixes:
            return Source(str(path), _read_csv(path))
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rb") as file:
            content: bytes = file.read()
        lines = [content] if content.lstrip()[:1] == b"[" else content.split(b"\n")
        values = [json.loads(line, object_pairs_hook=_named_once) for line in lines if line.strip()]
        return Source(str(path), values[0] if len(values) == 1 and isinstance(values[0], list) else values)
    except Exception as error:  # of pyarrow, pandas, json or the system
        raise ReplayError(f"{path} can't be read: {type(error).__name__}: {error}") from error


def _read_parquet(path: Path) -> Source:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    _named_once((name, None) for name in file.schema_arrow.names)
    found = file.schema_arrow.metadata or {}
    metadata = {key: found[key.encode()].decode() for key in METADATA if key.encode() in found}
    in_json = json.loads(metadata.get(IN_JSON, "[]"))
    rows: list[dict[str, Any]] = []
    for batch in file.iter_batches(PORTION):
        for row in map(compact, batch.to_pylist()):
            rows.append(row | {name: json.loads(row[name]) for name in in_json if row.get(name) is not None})
    return Source(str(path), rows, metadata)


def _read_csv(path: Path) -> list[dict[str, Any]]:
    """Texts of all columns: `007` stays `007`. In a file's own columns numbers, true and false, and lists are JSON."""
    import pandas

    table = pandas.read_csv(path, header=None, dtype=str, keep_default_na=False)
    names, *lines = table.itertuples(index=False, name=None)
    once = list(_named_once((name, None) for name in names))
    return [{name: _of_text(name, text) for name, text in zip(once, line, strict=True)} for line in lines]


def _of_text(name: str, text: str) -> Any:
    """Return the value that a cell of a CSV file stands for."""
    if name in ("prompt", "completion") or not (name in OWN or name.startswith("reward/") or name == TASK):
        return text
    if not text:
        return None
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def _named_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
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


def _prepared(source: Source, columns: Mapping[str, str], functions: Sequence[str]) -> Source:
    """Return the source with the columns that the reader knows, one row a completion."""
    rows = list(_expanded(source, _renamed(source, columns)))
    names = set(rows[0]) if rows and isinstance(rows[0], Mapping) else set()
    source.logged = names >= LOGGED and "reward" not in names
    if source.logged and set(functions) <= names:
        named = dict(zip(functions, reward_columns(functions), strict=True))
        rows = [{named.get(name, name): value for name, value in row.items()} for row in rows]
    source.rows = rows
    return source


def _renamed(source: Source, columns: Mapping[str, str]) -> Iterator[Any]:
    for number, row in enumerate(source.rows):
        if not columns or not isinstance(row, Mapping):
            yield row
            continue
        absent = sorted(columns.keys() - row.keys())
        if absent:
            raise ReplayError(
                f"Row {number} of {source.name} lacks {', '.join(absent)}, which columns={dict(columns)!r} names: it "
                f"has {', '.join(map(str, row))}."
            )
        try:
            yield _named_once((columns.get(name, name), value) for name, value in row.items())
        except ValueError as error:
            raise ReplayError(
                f"Row {number} of {source.name} can't be read: with columns={dict(columns)!r} {error}."
            ) from None


def _expanded(source: Source, rows: Iterable[Any]) -> Iterator[Any]:
    """Yield a row for each of a prompt's `completions`, with its part of all that is listed beside them."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or row.get("completions") is None or "completion" in row:
            yield row
            continue
        completions = list(row["completions"])
        common: dict[str, Any] = {"group": f"row {number}"}
        listed: dict[str, list[Any]] = {"completion": completions}
        for name, value in row.items():
            if name == "rewards" or (_of_completion(name) and _is_list_of(value, name)):
                if len(value) != len(completions):
                    raise ReplayError(
                        f"Row {number} of {source.name} has {len(value)} values of {name} for {len(completions)} "
                        "completions."
                    )
                listed["reward" if name == "rewards" else name] = list(value)
            elif name != "completions":
                common[name] = value
        for values in zip(*listed.values(), strict=True):
            yield {**common, **dict(zip(listed, values, strict=True))}


def _of_completion(name: str) -> bool:
    """Tell whether a column has a value a completion."""
    return name in {*OWN} - {"group", "prompt_ids", "images"} or name.startswith("reward/")


def _is_list_of(value: Any, name: str) -> bool:
    """Tell a list of a column's values from one value, which may be a list itself."""
    is_list = isinstance(value, list | tuple | np.ndarray)
    if name not in (*TOKENS, "completion_ids"):
        return is_list
    return is_list and len(value) > 0 and isinstance(value[0], list | tuple | np.ndarray)


def _logged_again(source: Source, before: Source | None) -> bool:
    """Tell whether TRL logged the same batch as before: it does, where it logs more often than it generates."""
    if before is None or not (source.logged and before.logged):
        return False

    def without_step(rows: Iterable[Any]) -> str:
        return json.dumps([{**row, "step": 0} for row in rows], default=str, sort_keys=True)

    return without_step(source.rows) == without_step(before.rows)
