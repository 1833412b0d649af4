"""Batches as TRL lays them out, made in code, and what is placed in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trl_replay import FieldSpec
from trl_replay.data.types import Placement

PAD = 0


SIZE = 3


KEYS = [
    "old_per_token_logps",
    "ref_per_token_logps",
    "importance_sampling_ratio",
    "tool_mask",
    "token_type_ids",
    "turns",
]


EXTRA = (FieldSpec("turns", "row"),)


def make_batch(lengths: list[list[tuple[int, int]]], keys: list[str], seed: int, shared: list[bool]) -> dict[str, Any]:
    """A batch as TRL lays it out; `lengths` holds (prompt, completion) tokens of each row of each group."""
    generator = np.random.default_rng(seed)
    pairs = [
        (group[0][0] if share else prompt, completion)
        for group, share in zip(lengths, shared, strict=True)
        for prompt, completion in group
    ]
    width, columns = max(p for p, _ in pairs), max(c for _, c in pairs)
    batch: dict[str, Any] = {}
    count = len(pairs)
    prompt_mask = np.array([[0] * (width - p) + [1] * p for p, _ in pairs])
    mask = np.array([[1] * c + [0] * (columns - c) for _, c in pairs])
    prompts = generator.integers(1, 50, (count, width))
    for number, share in enumerate(shared):
        if share:
            prompts[number * SIZE : (number + 1) * SIZE] = prompts[number * SIZE]
    values = {
        "prompt_ids": prompts * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": generator.integers(1, 50, (count, columns)) * mask,
        "completion_mask": mask,
        "advantages": generator.normal(size=count).astype(np.float32),
        "num_items_in_batch": np.array(mask.sum()),
    }
    for key in keys:
        if key == "tool_mask":
            values[key] = np.where(mask, generator.integers(0, 2, (count, columns)), 1)
        elif key == "importance_sampling_ratio":
            values[key] = np.where(mask, generator.random((count, columns)), 1).astype(np.float32)
        elif key == "token_type_ids":
            both = np.concatenate([prompt_mask, mask], axis=1)
            values[key] = generator.integers(1, 4, (count, width + columns)) * both
        elif key == "turns":
            values[key] = generator.integers(0, 9, (count, 2))
        elif key not in values:
            values[key] = (generator.normal(size=(count, columns)) * mask).astype(np.float32)
    for key, value in values.items():
        batch[key] = torch.from_numpy(np.asarray(value))
    return batch


def rows_of(slot: int) -> slice:
    return slice(slot * SIZE, (slot + 1) * SIZE)


def place(slot: int, group: Any) -> Placement:
    return Placement(slot, group, serial=slot, age=1, start=slot * SIZE, count=SIZE)
