"""RePO: rows cached for a prompt beside its fresh ones, each kind normalized among themselves (arXiv 2506.09340).

The module is the plugin `repo`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import ConfigurationError, Context, Groups, MixerSpec, Preset, ReplayConfig, Table, hookimpl

from ..arguments import at_least
from ..cards import text_of

Ints: TypeAlias = NDArray[np.int64]
Mixer: TypeAlias = Callable[[Table, Ints, Groups, Context], Ints]

CHOICES = ("variance", "reward", "recent", "random")
SETTINGS: dict[str, Any] = {
    "replay_sampler": "same_prompt(entries=2)",
    "replay_mixer": "repo/cached",
    "replay_advantages": "split",
    "replay_selector": "always(share=1.0)",
    "replay_record": "forward",
    "replay_scorer": "constant",
    "replay_evictor": "prompt_balanced",
    "replay_buffer_size": 1024,
    "replay_start": 0,
}


def make_cached(rows: int | None = None, cached: int | None = None, by: str = "variance") -> Mixer:
    """Stored rows of the slot's prompt take the places of its last fresh rows. Those that no function scored, or that
    train nothing, are left out.

    Args:
        rows (`int`, *optional*): Stored rows a slot: half of a group if not given.
        cached (`int`, *optional*): Rows of the prompt that must be stored before any is used: as many as the sampler
            may draw, which with `entries=2` are two groups, if not given.
        by (`str`, *optional*, defaults to `"variance"`): Which of them: the best and the worst by turns
            (`"variance"`), the best (`"reward"`), the newest (`"recent"`) or any (`"random"`).
    """
    if rows is not None:
        at_least("cached", "rows", rows, 2)  # one row alone has no deviation
    if cached is not None:
        at_least("cached", "cached", cached, 1)
    if by not in CHOICES:
        raise ConfigurationError(f"cached: by={by!r} can't be used: give one of {', '.join(CHOICES)}.")

    def cached_rows(table: Table, drawn: Ints, slots: Groups, context: Context) -> Ints:
        count, size = slots.advantages.shape
        most = min(size // 2 if rows is None else rows, size)
        needed = drawn.shape[1] * size if cached is None else cached
        taken = np.full((count, size), -1)
        trains = table.row_trains
        for slot in range(count):
            known = np.flatnonzero(np.repeat(drawn[slot] >= 0, size))
            if len(known) < needed:
                continue
            entries = drawn[slot][known // size]
            reward = table.row_reward[entries, known % size]
            usable = np.isfinite(reward) & trains[entries, known % size]
            known, reward = known[usable], reward[usable]
            chosen = known[_order(reward, by, context)][:most]
            taken[slot, size - len(chosen) :] = chosen
        return taken

    return cached_rows


def _order(reward: NDArray[np.float64], by: str, context: Context) -> Ints:
    """Return rows in draw order; `reward` has the newest group's first."""
    if by == "recent":
        return np.arange(len(reward))
    if by == "random":
        return context.rng.permutation(len(reward))
    best_first = np.argsort(-reward, kind="stable")
    if by == "reward":
        return best_first
    by_turns = np.empty_like(best_first)
    half = (len(best_first) + 1) // 2
    by_turns[0::2] = best_first[:half]
    by_turns[1::2] = best_first[half:][::-1]
    return by_turns


@hookimpl
def trl_replay_preflight(trainer: Any, config: ReplayConfig) -> Iterator[str]:
    """Two stored rows are the least that can be normalized among themselves."""
    mixer, given = config.strategy("mixer")
    size = trainer.num_generations
    if mixer == SETTINGS["replay_mixer"] and "rows" not in given and size // 2 < 2:
        yield (
            f"'repo/cached' takes half of a group from the cache, with num_generations={size} a single row, which "
            "has no other to be compared with: use num_generations of 4 or more, or set "
            "replay_mixer='repo/cached(rows=2)'."
        )


@hookimpl
def trl_replay_strategies() -> Iterator[MixerSpec]:
    """The mixer."""
    yield MixerSpec("cached", make_cached, "rows cached for the prompt, for its last fresh ones")


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset(
        "repo", SETTINGS, "rows cached for a prompt beside fresh ones, each kind normalized apart", text_of("repo")
    )
