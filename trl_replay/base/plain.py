"""Values in a form that JSON can hold. Imports no torch."""

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
