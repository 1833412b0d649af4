"""A curriculum that tries prompts again."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trl_replay import ConfigurationError, Context, InputsContext, Preset, PromptTable, hookimpl

from .arguments import at_least, share
from .cards import card
from .memory import SavesState
from .skipping import Row, table

SETTINGS: dict[str, Any] = {
    "replay_refill": "new(rounds=1)",
    "replay_buffer_size": 128,
    "replay_scorer": "pass_rate",
    "replay_evictor": "fifo",
    "replay_sampler": "top",
    "replay_correction": "truncated(cap=3.0)",
    "replay_start": 0,
}


@dataclass
class Batches:
    """The progress of a session.

    Attributes:
        done (`int`): Generation batches.
    """

    done: int = 0


class Bapo(SavesState[Batches]):
    """Tries prompts again that hardly ever passed, after BAPO.

    With `replay_refill` they are tried in a batch's first further round, for the slots of its dead groups: of
    those that have become live, each takes one. Without, they take the places of some of the batch's own prompts.

    Args:
        low (`float`, *optional*, defaults to `0.0`): Least pass rate of a hard prompt, by its last group. Above 0,
            prompts that did not pass at all are left alone.
        high (`float`, *optional*, defaults to `1 / 8`): Largest pass rate of a hard prompt.
        kept (`int`, *optional*, defaults to `128`): How many hard prompts there are to choose from: those that were
            generated for last.
        at_once (`int`, *optional*, defaults to `32`): The most that a process tries again in a batch.
        every (`int`, *optional*, defaults to `2`): Number of batches from one try of hard prompts to the next.
        fraction (`float`, *optional*, defaults to `0.5`): Without `replay_refill`, the share of a batch's
            prompts whose places they may take.
    """

    needs_success = True

    def __init__(
        self,
        low: float = 0.0,
        high: float = 1 / 8,
        kept: int = 128,
        at_once: int = 32,
        every: int = 2,
        fraction: float = 0.5,
    ) -> None:
        super().__init__()
        self.low = share("Bapo", "low", low)
        self.high = share("Bapo", "high", high)
        if self.low > self.high:
            raise ConfigurationError(f"Bapo: low={low!r} can't be used: give at most high={high!r}.")
        self.kept = at_least("Bapo", "kept", kept, 1)
        self.at_once = at_least("Bapo", "at_once", at_once, 1)
        self.every = at_least("Bapo", "every", every, 1)
        self.fraction = share("Bapo", "fraction", fraction)
        self._rounds: weakref.WeakKeyDictionary[PromptTable, int] = weakref.WeakKeyDictionary()

    def first_state(self) -> Batches:
        """Start before the first batch."""
        return Batches()

    @hookimpl
    def trl_replay_attached(self, session: Any) -> None:
        """Tell whether there are further rounds to try them in."""
        if session.prompts is not None:
            self._rounds[session.prompts] = min(session.config.refill.rounds, 1)

    @hookimpl
    def trl_replay_inputs(self, groups_of_rows: Sequence[Row], context: InputsContext) -> list[Row] | None:
        """The prompts, with hard ones in the places of some."""
        prompts = table(context)
        its_round = self._rounds.get(prompts, 0)
        due = (self.state(prompts).done + 1) % self.every == 0
        if not due or context.round != its_round:
            return None
        places = len(groups_of_rows)
        if its_round == 0:
            places = int(self.fraction * places + context.rng.random())  # of a single group, by chance
        hard = self.hard(context, {context.key(row) for row in groups_of_rows})
        count = min(places, self.at_once, len(hard))
        again = context.prompt_rows(context.rng.choice(hard, count, replace=False).tolist())
        if not again:
            return None
        chosen = list(groups_of_rows)
        for place, row in zip(context.rng.permutation(len(chosen)).tolist(), again, strict=False):
            chosen[place] = row
        return chosen

    def hard(self, context: InputsContext, present: Collection[int] = ()) -> NDArray[np.int64]:
        """Keys of the hard prompts to choose from: none that is in this batch."""
        prompts = table(context)
        is_hard = (prompts.pass_rate >= self.low) & (prompts.pass_rate <= self.high)
        rows = np.flatnonzero(is_hard & (prompts.update < context.update))
        latest = rows[np.argsort(prompts.update[rows], kind="stable")][-self.kept :]
        keys = prompts.key[latest]
        return np.asarray(keys[~np.isin(keys, list(present))])

    @hookimpl
    def trl_replay_presets(self) -> Iterator[Preset]:
        """BAPO's run: hard prompts are tried again, and stored groups that were half solved fill what is left."""
        yield Preset("bapo", SETTINGS, "hard prompts again, then stored groups that were half solved", card("bapo"))

    @hookimpl
    def trl_replay_metrics(self, context: Context) -> None:
        """Count batches."""
        if context.prompts is not None:  # there are none in a dry run
            self.state(context.prompts).done += 1
