"""What a row made elsewhere must be like: refused in words that name the row and the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ReplayError
from .export import TOKENS

Row = Mapping[str, Any]
SHOWN = 80
"""Characters of a value that an error shows."""


def checked(row: Any, label: str, vocabulary: int) -> Row:
    """The row, if it can be used.

    Args:
        row (`Any`): As read.
        label (`str`): What an error calls it.
        vocabulary (`int`): Token ids that the model knows.

    Raises:
        ReplayError: It lacks something, or has a value of another kind.
    """
    if not isinstance(row, Mapping):
        raise ReplayError(f"{label} is {_show(row)}, not a mapping.")
    missing = [name for name in ("prompt", "completion") if row.get(name) is None]
    if missing or not _has_reward(row):
        lacking = ", ".join(missing or ["reward"])
        raise ReplayError(f"{label} lacks {lacking}: it has {', '.join(map(str, row))}.")
    for name, value in row.items():
        if value is None:
            continue
        if name in ("prompt", "completion") and not _is_text(value):
            raise _refusal(label, name, value, "is neither text nor messages")
        if (name in ("reward", "advantage") or name.startswith("reward/")) and not _is_number(value):
            raise _refusal(label, name, value, "is no number")
        if name in ("prompt_ids", "completion_ids") and not _are_ids(value, vocabulary):
            raise _refusal(label, name, value, "are no token ids of this model")
        if name in TOKENS and not _are_numbers(value):
            raise _refusal(label, name, value, "are no numbers")
        ids = row.get("completion_ids")
        if name in TOKENS and ids is not None and len(value) != len(ids):
            raise ReplayError(f"{label} has {len(value)} {name} for {len(ids)} completion_ids.")
    return row


def compact(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its lists of numbers as arrays, which take a tenth of the room."""
    for name in ("prompt_ids", "completion_ids", *TOKENS):
        value = row.get(name)
        if isinstance(value, list) and None not in value:
            made = np.array(value)
            row[name] = made.astype(np.float32) if made.dtype.kind == "f" else made
    return row


def array(value: Any, dtype: Any) -> NDArray[Any]:
    """Numbers of any kind (a list, an array, a tensor) as an array."""
    return np.array([float(number) for number in value]).astype(dtype)


def has_images(row: Row) -> bool:
    """Whether a row belongs to images: their number, as exported, or a list of them."""
    images = row.get("images")
    return images is not None and bool(len(images) if hasattr(images, "__len__") else images)


def _has_reward(row: Row) -> bool:
    value = row.get("reward")
    if value is not None and not (isinstance(value, float) and math.isnan(value)):
        return True
    return any(name.startswith("reward/") for name in row)


def _is_text(value: Any) -> bool:
    """A text, or messages: mappings with a content."""
    if isinstance(value, str):
        return True
    return _is_list(value) and len(value) > 0 and all(isinstance(m, Mapping) and "content" in m for m in value)


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)


def _are_numbers(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "biuf"
    return _is_list(value) and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    """Whether it counts as a number: Python's, NumPy's, or a tensor of one."""
    if value is None or isinstance(value, str | bytes):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _are_ids(value: Any, vocabulary: int) -> bool:
    if not _are_numbers(value):
        return False
    ids = array(value, np.float64)
    return bool(((ids >= 0) & (ids < vocabulary) & (ids == np.floor(ids))).all())


def _refusal(label: str, name: str, value: Any, reason: str) -> ReplayError:
    return ReplayError(f"{label} has {name}={_show(value)}, which {reason}.")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
