"""Values as JSON holds them, and as people write them. Imports no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any


def in_json(value: Any) -> Any:
    """Return a value as JSON holds it, else its text: a path, a strategy's name, an infinite number. No text shows an
    object's address."""
    if isinstance(value, Mapping):
        return {str(key): in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(item) for item in value]
    if isinstance(value, set | frozenset):  # whose order differs from process to process
        return sorted(map(in_json, value), key=repr)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return getattr(value, "__qualname__", None) or re.sub(" at 0x[0-9a-f]+", "", repr(value))
    return value


UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_bytes(value: object) -> int | None:
    """Bytes of `512`, `"512MB"`, `"1.5 GiB"`; None if it is no size of at least one byte."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    match = SIZE.fullmatch(str(value).strip())
    if match is None:
        return None
    number = float(match[1])
    unit = match[2].upper()
    if unit not in UNITS:
        return None
    return int(number * UNITS[unit]) or None


def format_bytes(nbytes: float) -> str:
    """`nbytes` in the largest decimal unit that leaves a number of at least 1."""
    for unit in ("TB", "GB", "MB", "KB"):
        if nbytes >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.3g} {unit}"
    return f"{nbytes:.0f} B"


def counted(number: object, noun: str, several: str | None = None) -> str:
    """A number with its noun: `1 group`, `2 groups`.

    Args:
        number: Of them.
        noun (`str`): One of them.
        several (`str`, *optional*): Any other number of them, where it is not the noun and an s.
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {several or noun + 's'}"
