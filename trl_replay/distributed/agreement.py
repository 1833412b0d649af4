"""Messages that processes exchange in one all-gather, and the errors that they then all raise."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..data.counters import COUNTERS
from ..data.types import Bools, Floats
from ..protocols import Agreement

MODES = ("runs", "is paused", "is detached")
"""States of replay on a process, in words, by mode."""
WORD = 48
"""Bits that travel in one float64, which holds whole numbers of up to 53 bits."""
POWERS = 2 ** np.arange(WORD)
ROUNDING = 1e-6
"""Of the sum of a batch's advantages, the share by which machines may differ."""


class Message:
    """Named numbers, sent as one vector of float64.

    Args:
        **shapes (`tuple[int, ...]`): Of each field, in order; `()` for one number.
    """

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._dtype = np.dtype([(name, np.float64, shape) for name, shape in shapes.items()])

    @property
    def width(self) -> int:
        """Length of the vector."""
        return self._dtype.itemsize // np.dtype(np.float64).itemsize

    def pack(self, **values: ArrayLike) -> Floats:
        """Pack fields into a vector, `(width,)`; missing fields are 0."""
        record = np.zeros(1, self._dtype)
        for name, value in values.items():
            record[name] = value
        return record.view(np.float64)

    def unpack(self, vectors: Floats) -> NDArray[np.void]:
        """Unpack vectors, `(ranks, width)`, into `(ranks,)` records with a field per name."""
        return np.ascontiguousarray(vectors).view(self._dtype)[:, 0]


@cache
def decision_message(rows: int) -> Message:
    """Define the message of a process with so many rows: counters, the leader of its buffer, a hash of its decisions,
    sums of its advantages, and its filled rows."""
    words = -(-rows // WORD)
    return Message(counters=(len(COUNTERS),), leader=(), decided=(), advantages=(2,), filled=(words,))


def packed_bits(mask: Bools) -> Floats:
    """Pack a mask, `(rows,)`, into numbers of `WORD` bits."""
    words = -(-len(mask) // WORD)
    bits = np.zeros(words * WORD, np.int64)
    bits[: len(mask)] = mask
    return np.asarray(bits.reshape(words, WORD) @ POWERS, np.float64)


def unpacked_bits(words: Floats, rows: int) -> list[bool]:
    """Unpack the masks of all processes, concatenated.

    Args:
        words (`(ranks, numbers)`): Of each, [`packed_bits`].
        rows (`int`): Of each.
    """
    bits = words.astype(np.int64)[:, :, None] // POWERS % 2
    by_rank = bits.reshape(len(words), -1)[:, :rows]
    mask: list[bool] = by_rank.ravel().astype(bool).tolist()
    return mask


def reason_of_failure(agreement: Agreement) -> str:
    """Describe what failed on which process; empty if nothing did."""
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(agreement.errors) if text]
    return "; ".join(failures)


def reason_of_modes(told: Floats) -> str:
    """Describe what replay does on each process; empty if it does the same on all.

    Args:
        told (`(ranks,)`): The mode of each.
    """
    modes = told.astype(int).tolist()
    if len(set(modes)) == 1:
        return ""
    parts = []
    for mode, words in enumerate(MODES):
        ranks = [str(rank) for rank, found in enumerate(modes) if found == mode]
        if ranks:
            parts.append(f"{words} on rank {', '.join(ranks)}")
    return f"It {' and '.join(parts)}: pause, resume and detach on all processes, after the same update."


def reason_of_decisions(leaders: Floats, decided: Floats, advantages: Floats) -> str:
    """Describe different decisions of processes that share a buffer; empty if there are none.

    Args:
        leaders (`(ranks,)`): Of each process, the first of those that share its buffer.
        decided (`(ranks,)`): Of each, a hash of what it decided.
        advantages (`(ranks, 2)`): Of each, two sums of the advantages of all shared rows, the second of their sizes.
    """
    if len(leaders) == 1:
        return ""
    differing = np.unique(np.stack([leaders, decided]), axis=1)
    if differing.shape[1] > len(np.unique(leaders)):
        return (
            "Processes that share a buffer decided differently. Strategies must do the same on every rank and draw "
            "from context.rng only; clear and pause a session on all ranks."
        )
    sums, sizes = advantages.T
    _, places, group = np.unique(leaders, return_index=True, return_inverse=True)
    first = places[group]
    if (np.abs(sums - sums[first]) > ROUNDING * np.maximum(sizes, sizes[first])).any():
        return (
            "Processes that share a buffer give its rows different advantages. Plugins must compute them alike on "
            "every rank, from what they are given: it holds the rows of all ranks."
        )
    return ""
