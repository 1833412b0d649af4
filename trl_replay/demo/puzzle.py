"""The lock itself: its keys, their codes, and the reward. It needs neither torch nor TRL."""

from __future__ import annotations

import random
from typing import Any

KEYS = 8
LETTERS = "abcdefghijklmnop"


def codes(seed: int) -> dict[str, str]:
    """The code that opens each key."""
    rng = random.Random(seed)
    code_of = {}
    for key in range(KEYS):
        first = rng.choice(LETTERS)
        code_of[str(key)] = first + rng.choice(LETTERS)
    return code_of


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right code, else 0."""
    return [float(completion == code) for completion, code in zip(completions, answer, strict=True)]
