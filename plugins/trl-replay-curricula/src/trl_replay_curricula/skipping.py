"""Curricula that pass over prompts: new ones take their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import Context, InputsContext, Preset, PromptTable, ReplayConfig, hookimpl

from .arguments import at_least, share
from .cards import card
from .memory import SavesState

Row: TypeAlias = dict[str, Any]
Skips: TypeAlias = Callable[[Sequence[int], InputsContext], NDArray[np.bool_]]
"""Which of the prompts with these keys are passed over."""
TRIES = 16
"""How often new prompts are asked for in the places of others. What is still open then keeps the prompt it had: where
every prompt would be passed over, training goes on."""
LEAST_CHANCE = 0.01
"""GRESO's: even the longest streak leaves a prompt this chance of being asked again."""


class Skipping:
    """The base of plugins that pass over prompts."""

    needs_success = True

    @hookimpl
    def trl_replay_preflight(self, trainer: Any, config: ReplayConfig) -> Iterator[str]:
        """New prompts are asked for by their number in the dataset."""
        if not hasattr(trainer.train_dataset, "__len__"):
            yield (
                f"{type(self).__name__} puts new prompts in the places of those that it passes over, and a stream "
                "(IterableDataset) can't be asked for them: use a dataset with a length."
            )


class SkipSolved(Skipping):
    """Passes over prompts that are solved, and asks them again later, so that forgetting is noticed.

    Args:
        pass_rate (`float`, *optional*, defaults to `1.0`): The share of the last group's completions that passed, from
            which on a prompt is solved. A completion passes with a reward of `replay_pass_reward`.
        groups (`int`, *optional*, defaults to `1`): With 2 or more, its last so many groups must have been dead, too.
        again_after (`int`, *optional*, defaults to `100`): Updates after which a solved prompt is asked again.
    """

    def __init__(self, pass_rate: float = 1.0, groups: int = 1, again_after: int = 100) -> None:
        self.pass_rate = share("SkipSolved", "pass_rate", pass_rate)
        self.groups = at_least("SkipSolved", "groups", groups, 1)
        self.again_after = at_least("SkipSolved", "again_after", again_after, 1)

    @hookimpl
    def trl_replay_inputs(self, groups_of_rows: Sequence[Row], context: InputsContext) -> list[Row] | None:
        """The prompts without the solved ones."""
        return replaced(groups_of_rows, context, self.solved)

    def solved(self, keys: Sequence[int], context: InputsContext) -> NDArray[np.bool_]:
        """Mark the prompts that are solved and not due yet."""
        prompts = table(context)
        passed = prompts.get("pass_rate", keys, -1.0) >= self.pass_rate
        if self.groups > 1:
            passed &= prompts.get("dead_streak", keys, 0) >= self.groups
        rested = context.update - prompts.get("update", keys, 0)
        return np.asarray(passed & (rested < self.again_after))


@dataclass
class Chances:
    """GRESO's chances of asking a prompt again after one dead group.

    Attributes:
        easy (`float`): Where all completions passed.
        hard (`float`): Where none did.
    """

    easy: float
    hard: float


class Greso(Skipping, SavesState[Chances]):
    """Passes over prompts by chance, after GRESO: with z dead groups in a row, a prompt is asked with chance p^z.

    After every batch p moves by `step`: down where as many groups as aimed at or more were dead, else up. Prompts that
    always pass (easy) and prompts that never do (hard) have a p of their own, and a third and two thirds of the aim.

    Args:
        easy (`float`, *optional*, defaults to `0.5`): p of easy prompts at the start.
        hard (`float`, *optional*, defaults to `0.5`): p of hard prompts at the start.
        target (`float`, *optional*, defaults to `0.25`): Dead groups aimed at, as a share of those generated.
        step (`float`, *optional*, defaults to `0.01`): What p moves by.
        lowest (`float`, *optional*, defaults to `0.05`): Least p.
        highest (`float`, *optional*, defaults to `0.95`): Largest p.
    """

    def __init__(
        self,
        easy: float = 0.5,
        hard: float = 0.5,
        target: float = 0.25,
        step: float = 0.01,
        lowest: float = 0.05,
        highest: float = 0.95,
    ) -> None:
        super().__init__()
        self.easy = share("Greso", "easy", easy)
        self.hard = share("Greso", "hard", hard)
        self.target = share("Greso", "target", target)
        self.step = share("Greso", "step", step)
        self.lowest = share("Greso", "lowest", lowest)
        self.highest = share("Greso", "highest", highest)

    def first_state(self) -> Chances:
        """The chances at the start."""
        return Chances(self.easy, self.hard)

    @hookimpl
    def trl_replay_inputs(self, groups_of_rows: Sequence[Row], context: InputsContext) -> list[Row] | None:
        """The prompts that chance leaves, and new ones, which it must leave as well."""
        return replaced(groups_of_rows, context, self.skipped)

    def skipped(self, keys: Sequence[int], context: InputsContext) -> NDArray[np.bool_]:
        """Mark the prompts that are passed over now: one draw each."""
        return np.asarray(context.rng.random(len(keys)) < self.skip_chance(keys, table(context)))

    def skip_chance(self, keys: Sequence[int], prompts: PromptTable) -> NDArray[np.float64]:
        """1 − p^z of each prompt; 0 for those that are new or whose last group was live."""
        chances = self.state(prompts)
        passed = prompts.get("pass_rate", keys, -1.0)
        dead_groups = prompts.get("dead_streak", keys, 0)
        p = np.select([passed == 1.0, passed == 0.0], [chances.easy, chances.hard], 1.0)
        return np.asarray(1.0 - np.maximum(p**dead_groups, LEAST_CHANCE))

    @hookimpl
    def trl_replay_presets(self) -> Iterator[Preset]:
        """GRESO's run: nothing is stored, dead groups are generated again."""
        settings = {"replay_buffer_size": 0, "replay_refill": "new(rounds=10)", "replay_unfilled": "exclude"}
        yield Preset(
            "greso",
            settings,
            "prompts that taught nothing are mostly skipped, dead groups generated again",
            card("greso"),
        )

    @hookimpl
    def trl_replay_metrics(self, context: Context) -> Mapping[str, float]:
        """Move the chances, once a batch, by what it was generated for, further rounds included."""
        if context.prompts is None:  # a dry run
            return {}
        prompts = context.prompts
        chances = self.state(prompts)
        latest = prompts.update == context.update
        if latest.any() and (prompts.tries > context.num_generations).any():  # some prompt came a second time
            dead = latest & (prompts.dead_streak > 0)
            easy = (dead & (prompts.pass_rate == 1.0)).sum() / latest.sum()
            hard = (dead & (prompts.pass_rate == 0.0)).sum() / latest.sum()
            chances.easy = self._moved(chances.easy, easy >= self.target / 3)
            chances.hard = self._moved(chances.hard, hard >= self.target * 2 / 3)
        return {"greso/p_easy": chances.easy, "greso/p_hard": chances.hard}

    def _moved(self, chance: float, down: bool) -> float:
        moved = chance - self.step if down else chance + self.step
        return min(max(moved, self.lowest), self.highest)


def replaced(rows: Sequence[Row], context: InputsContext, skips: Skips) -> list[Row] | None:
    """The rows, with new prompts in the places of those that are passed over; None where none is. New ones that would
    be passed over, too, or that are there already, are left out."""
    keys = [context.key(row) for row in rows]
    skipped = skips(keys, context)
    if not skipped.any():
        return None
    chosen = list(rows)
    places = np.flatnonzero(skipped).tolist()
    taken = {key for key, skip in zip(keys, skipped, strict=True) if not skip}
    for _ in range(TRIES):
        if not places:
            break
        offered = context.new_prompts(len(places))
        offered_keys = [context.key(row) for row in offered]
        for row, key, skip in zip(offered, offered_keys, skips(offered_keys, context), strict=True):
            if not skip and key not in taken:
                taken.add(key)
                chosen[places.pop(0)] = row
    return chosen


def table(context: Context) -> PromptTable:
    """The prompts generated for so far: they are there wherever a plugin has `trl_replay_inputs`."""
    assert context.prompts is not None
    return context.prompts
