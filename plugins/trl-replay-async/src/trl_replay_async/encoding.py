"""Samples of an asynchronous trainer as JSON holds them, every number as it was."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import compat as asynchronous


def encoded(sample: Any, version: int) -> dict[str, Any]:
    """The sample as JSON holds it; its version counts from the present one."""
    arrays = {}
    for name in ("input_ids", "completion_mask", "old_log_probs"):
        array = np.ascontiguousarray(getattr(sample, name))
        arrays[name] = [str(array.dtype), base64.b64encode(array.tobytes()).decode()]
    return {
        "arrays": arrays,
        "prompt": _messages(sample.prompt),
        "completion": _messages(sample.completion),
        "advantage": float(sample.advantage),
        "model_version": int(sample.model_version) - version,
        "group_id": int(sample.group_id),
        "metrics": {name: float(value) for name, value in sample.metrics.items()},
    }


def _messages(messages: Any) -> Any:
    """Messages that JSON can hold; none of others, which only traces show."""
    try:
        return json.loads(json.dumps(messages))
    except (TypeError, ValueError):
        return []


def decoded(saved: Mapping[str, Any]) -> Any:
    """The sample that `encoded` was given."""
    arrays = {
        name: np.frombuffer(base64.b64decode(text), dtype).copy() for name, (dtype, text) in saved["arrays"].items()
    }
    fields = {name: value for name, value in saved.items() if name != "arrays"}
    return asynchronous.rollout_sample()(**arrays, **fields)
