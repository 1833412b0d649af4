"""Columns of a file, and checks of rows made elsewhere: errors name row and value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ... import compat
from ...data.fields import ADVANTAGES, FIELDS, LOGPS_KEYS
from ...data.types import LARGEST_ADVANTAGE, Bools, Floats
from ...errors import ReplayError

Row = Mapping[str, Any]
TOKENIZER = "trl_replay_tokenizer"
"""Column of an export: a hash of the tokenizer that made its token ids."""
CHARACTERS_SHOWN = 80
"""Characters of a value that an error shows."""
MASKS = ("completion_mask", "tool_mask")
"""Fields that tell which tokens are trained on."""
TOKENS = (*MASKS, compat.OLD_LOGPS, compat.SAMPLING_LOGPS, ADVANTAGES)
"""Token-level fields that are read, each a column of lists; null where all values are implied or absent."""
EXPORTED = tuple(spec.name for spec in FIELDS if spec.layout == "completion" and spec.name != "completion_ids")
EXPORTED += (ADVANTAGES,)
"""Those that are written."""
TEXTS = ("prompt", "completion")
WRITTEN_OUT = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")
"""How a text begins that pandas, or JSON, made of messages."""
LOGP_FLOOR = -1000.0
"""Least log-prob that a model gives: its logits lie within about 100 of each other, and a temperature of 0.1 makes
1000 of that. Below are the fillers for "none": vLLM's server writes -9999, others -1e9 or float32's least."""
LOGP_CEILING = 1e-3
"""Most that rounding can make of a log-prob of 0: float32 at logits of 1000 is off by less."""


def checked(given: Any, label: str, vocabulary: int) -> Row:
    """Return the row if it can be used, with ids in the columns for ids.

    Args:
        given (`Any`): As read.
        label (`str`): What an error calls it.
        vocabulary (`int`): Token ids that the model knows.

    Raises:
        ReplayError: It lacks something, or has a value of another kind, or one that can't be.
    """
    if not isinstance(given, Mapping):
        raise ReplayError(
            f"{label} is {shown(given)}, not a mapping: of a table, give datasets.Dataset.from_pandas(table)."
        )
    ids = {f"{name}_ids": given[name] for name in TEXTS if _is_list_of_ids(given.get(name))}
    row: Row = {**given, **ids}
    missing = [name for name in TEXTS if name not in row and row.get(f"{name}_ids") is None]
    if missing:
        raise ReplayError(
            f"{label} lacks {', '.join(missing)}: it has {', '.join(map(str, row))}. One row is one completion: "
            "docs/files.md has the two lines that convert other forms."
        )
    for name, value in row.items():
        fault = None if value is None else _fault(name, value, vocabulary)
        if fault is not None:
            raise _refusal(label, name, value, fault)
    reward = row.get("reward")
    if reward is not None and math.isnan(reward) and not any(name.startswith("reward/") for name in row):
        raise _refusal(label, "reward", reward, "is no number")
    if row.get("completion_ids") is not None:  # without them, nothing token-level is read
        _refuse_token_values(row, label)
    return row


def _is_list_of_ids(value: Any) -> bool:
    return not isinstance(value, str) and are_numbers(value, 1) and len(value) > 0


def _fault(name: str, value: Any, vocabulary: int) -> str | None:
    """Return the fault in a column's value, if its kind is wrong."""
    if name in TEXTS:
        if _is_list_of_ids(value):
            return None
        is_none = name == "completion" and isinstance(value, list | np.ndarray) and not len(value)
        return None if is_none else _text_fault(value)
    if name in ("reward", "advantage") or name.startswith("reward/"):
        if not are_numbers(value, 0):
            return "is no number"
        if math.isinf(float(value)):
            return "is not finite"
        too_large = abs(float(value)) > LARGEST_ADVANTAGE
        return f"is larger than {LARGEST_ADVANTAGE:g}, which no gradient of float32 bears" if too_large else None
    if name in ("masked", "forked", "is_truncated"):
        return None if isinstance(value, bool | np.bool_) else "is neither true nor false"
    if name in ("prompt_ids", "completion_ids"):
        return None if _are_ids(value, vocabulary) else "are no token ids of this model"
    if name in TOKENS:
        return None if are_numbers(value, 1) else "are no numbers"
    if name == "error" and isinstance(value, list | tuple):
        return "is a list: one row is one completion (docs/files.md)"
    return None


def _refuse_token_values(row: Row, label: str) -> None:
    """Refuse per-token values of the right type but of a wrong number or an impossible size."""
    size = len(row["completion_ids"])
    fields = {name: row[name] for name in TOKENS if row.get(name) is not None}
    for name, values in fields.items():
        if len(values) != size:
            raise ReplayError(f"{label} has {len(values)} {name} for {size} completion_ids.")
    trained = np.ones(size, bool)
    for name in MASKS:
        if name in fields:
            trained &= np.asarray(fields[name]) != 0
    for name, values in fields.items():
        numbers = np.asarray(values, np.float64)
        possible, fault = _possible(name, numbers, trained)
        if not possible.all():
            token = int(np.argmin(possible))
            raise _refusal(label, f"{name}[{token}]", float(numbers[token]), fault)


def _possible(name: str, numbers: Floats, trained: Bools) -> tuple[Bools, str]:
    """`(tokens,)`: which of a field's numbers can be, and what is wrong with the others.

    Log-probs of tokens that are not trained on may be anything: nothing reads them. One that is not finite stands for
    one that is not known: its group is refused, and not the file.
    """
    if name in MASKS:
        return np.isin(numbers, (0, 1)), "is neither 0 nor 1"
    if name in LOGPS_KEYS:
        within = (numbers >= LOGP_FLOOR) & (numbers <= LOGP_CEILING)
        fault = f"is no log-prob: these lie between {LOGP_FLOOR:g} and 0"
        return within | ~np.isfinite(numbers) | ~trained, fault
    within = np.isfinite(numbers) & (np.abs(numbers) <= LARGEST_ADVANTAGE)
    return within, f"is no advantage: these are finite, and {LARGEST_ADVANTAGE:g} at most"


def compact(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its lists of numbers as arrays, which take a tenth of the memory."""
    for name in ("prompt_ids", "completion_ids", *TOKENS):
        value = row.get(name)
        if isinstance(value, list) and None not in value:
            numbers = np.array(value)
            row[name] = numbers.astype(np.float32 if numbers.dtype.kind == "f" else np.int32)
    return row


def reward_columns(names: Sequence[str]) -> list[str]:
    """Return the column of each reward function: `reward/name`, and for a further one of that name `reward/name#2`."""
    columns: list[str] = []
    for name in names:
        column = f"reward/{name}"
        number = 1
        while column in columns:
            number += 1
            column = f"reward/{name}#{number}"
        columns.append(column)
    return columns


def _text_fault(value: Any) -> str | None:
    """Return the fault in a prompt or a completion."""
    if are_numbers(value, 0):
        return "is a number: CSV holds no text that looks like one, so give JSONL or Parquet"
    if not isinstance(value, str) and not _are_messages(value):
        return "is neither text nor messages"
    if isinstance(value, str) and WRITTEN_OUT.match(value):
        return "is messages written as text: give them as a list (CSV can't hold any; JSONL and Parquet can)"
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair"
    return None


def _are_messages(value: Any) -> bool:
    is_list = isinstance(value, Sequence | np.ndarray) and len(value) > 0
    return is_list and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    """Tell a mapping with a text, a list of parts, or calls of tools from anything else."""
    if not isinstance(value, Mapping):
        return False
    content = value.get("content")
    if content is None:
        return value.get("tool_calls") is not None and len(value["tool_calls"]) > 0
    return isinstance(content, str | list | np.ndarray)


def are_numbers(value: Any, dimensions: int) -> bool:
    """Tell a number (no dimension) or a list of numbers (one) of any type from anything else."""
    try:
        found = np.asarray(value)
    except Exception:  # ragged lists, tensors with gradients
        return False
    return found.ndim == dimensions and found.dtype.kind in "biuf"


def _are_ids(value: Any, vocabulary: int) -> bool:
    if not are_numbers(value, 1):
        return False
    ids = np.asarray(value)
    known = (ids >= 0) & (ids < vocabulary)
    whole = ids == np.floor(ids)
    return bool((known & whole).all())


def _refusal(label: str, name: str, value: Any, reason: str) -> ReplayError:
    return ReplayError(f"{label} has {name}={shown(value)}, which {reason}.")


def shown(value: Any) -> str:
    """A value as errors show it."""
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= CHARACTERS_SHOWN else f"{text[:CHARACTERS_SHOWN]}…"
