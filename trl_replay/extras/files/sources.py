"""Rows of files, as `datasets.load_dataset` reads them, and rows that are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.data_files import are_paths, data_files
from ...errors import ReplayError
from .schema import compact, shown

GIVEN = "the rows given"
"""Name in errors of what is no file."""
KINDS = {".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of one file, or those given.

    Attributes:
        name (`str`): In errors.
        rows (`list`): One a completion.
    """

    name: str
    rows: list[Any]


def source_name(source: Any) -> str:
    """Return the name of a source in errors."""
    if not are_paths(source):
        return GIVEN
    return ", ".join(map(str, source)) if isinstance(source, list | tuple) else str(source)


def read_sources(source: Any) -> list[Source]:
    """Read everything that is meant, whole.

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
        return [_read(path) for path in files]
    if not isinstance(source, Iterable) or isinstance(source, Mapping):
        raise ReplayError(f"{shown(source)} can't be read: give a path, a Dataset, or rows as mappings.")
    return [Source(GIVEN, list(source))]


def _read(path: Path) -> Source:
    from datasets import load_dataset

    kind = next((KINDS[suffix] for suffix in path.suffixes if suffix in KINDS), "json")
    try:
        rows = load_dataset(kind, data_files=str(path), split="train", streaming=True)
        return Source(str(path), [compact(row) for row in rows])
    except Exception as error:  # of datasets, pyarrow, pandas or the system
        raise ReplayError(f"{path} can't be read: {type(error).__name__}: {error}") from error
