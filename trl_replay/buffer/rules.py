"""What a buffer goes by: strategies, limits, what passes, and how many slots replay may fill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from ..base.progress import Clock
from ..base.validation import ADAPTIVE, pass_rate_of
from ..data.success import Success
from ..data.table import Table
from ..data.types import Bools, Context, Groups
from ..errors import CheckpointError
from ..hooks import CheckedHooks
from ..protocols import Stateful
from ..registry import registry
from ..specs import Kind

PASS_RATE_BATCHES = 32
"""Generation batches over which the running pass rate averages (exponentially)."""
SPARSE, EVIDENCE, ENOUGH, PATIENCE, RUN_PART = 0.1, 40, 16, 4, 4
"""With `replay_start="adaptive"`: rewards are sparse as long as less than this share of the groups seen were live; so
many groups count as seen from the first batch on. Then replay waits until so many groups were stored, or a quarter of
the buffer's size, as long as live groups keep coming: within so many times their mean distance. It never waits longer
than the run's updates divided by the last number, nor again once it has begun, nor after a warm start. Groups that
have left since count too: with a limit on age or bytes the buffer may never hold so many at once."""


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The settings `replay_start` and `replay_max_fraction`."""

    start: int | str | None = None
    max_fraction: float = 1.0


def slots_within(max_fraction: float, groups: int) -> int:
    """Return how many of a batch's `groups` a share of them is, rounded down."""
    return int(max_fraction * groups + 1e-9)


SAVED = ("pass_rate", "inserted", "drawn", "seen", "live", "seen_at_live", "prefilled")
"""Attributes of [`RateLimiter`] that a checkpoint keeps."""


class RateLimiter:
    """Applies the limits. Processes that share a buffer give it equal numbers, so it answers alike.

    Args:
        limits ([`RateLimits`]): What may not be exceeded; nothing, if not given.

    Attributes:
        pass_rate (`float`, *optional*): Running share of completions that pass; None before the first batch.
        inserted, drawn (`int`): Newcomers of the buffer so far, and entries that were replayed.
        seen, live, seen_at_live (`int`): Groups generated; live ones of them; groups seen when the last live one came.
        prefilled (`bool`): The buffer was filled from elsewhere: there is nothing to wait for.
    """

    def __init__(self, limits: RateLimits | None = None) -> None:
        self._limits = limits or RateLimits()
        self.pass_rate: float | None = None
        self.inserted = 0
        self.drawn = 0
        self.seen = 0
        self.live = 0
        self.seen_at_live = 0
        self.prefilled = False

    def observe(self, fresh: Groups, passed: Bools, known: bool = True) -> None:
        """Take note of how a fresh batch went.

        Args:
            fresh ([`Groups`]): The batch.
            passed (`(n, G)`): Which of its completions passed.
            known (`bool`): Whether that is known.
        """
        scored = int((~fresh.unscored).sum())
        if not scored:
            return
        if known:
            rate = int(passed.sum()) / scored
            if self.pass_rate is None:
                self.pass_rate = rate
            self.pass_rate += (rate - self.pass_rate) / PASS_RATE_BATCHES
        self.seen += len(fresh)
        live = len(fresh) - int(fresh.dead.sum())
        if live:
            self.live += live
            self.seen_at_live = self.seen

    def slots_allowed(self, groups: int, capacity: int, clock: Clock) -> tuple[int, str]:
        """Return how many of a batch's `groups` replay may fill, and which limit says so.

        Args:
            groups (`int`): Of the fresh batch.
            capacity (`int`): Groups that the buffer may hold, on all processes that share it.
            clock ([`Clock`]): Updates done and planned.
        """
        rules, rate = self._limits, pass_rate_of(self._limits.start)
        if rules.start == ADAPTIVE:
            if self._waits(capacity, clock):
                return 0, "replay_start='adaptive' (sparse rewards, too few entries yet)"
        elif rate is not None:
            if (self.pass_rate or 0.0) < rate:
                return 0, f"replay_start={rules.start!r}"
        elif clock.update < int(rules.start or 0):
            return 0, "replay_start"
        return slots_within(rules.max_fraction, groups), "replay_max_fraction"

    def _waits(self, capacity: int, clock: Clock) -> bool:
        """Tell whether too few groups were stored yet of rewards that are sparse."""
        enough = min(ENOUGH, capacity // 4)
        has_begun = self.prefilled or self.drawn > 0
        if has_begun or not 0 < self.inserted < enough:  # with nothing stored, nothing is held back
            return False
        too_late = clock.planned > 0 and clock.update >= clock.planned // RUN_PART
        return not too_late and self._is_sparse() and self._live_groups_keep_coming()

    def _is_sparse(self) -> bool:
        return self.live < SPARSE * max(self.seen, EVIDENCE)

    def _live_groups_keep_coming(self) -> bool:
        if not self.live:
            return False
        since_live = self.seen - self.seen_at_live
        mean_distance = max(self.seen_at_live, EVIDENCE) / self.live
        return since_live <= PATIENCE * mean_distance

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps."""
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        for name in SAVED:
            setattr(self, name, state[name])


@dataclass(slots=True)
class Rules:
    """The rules of one buffer.

    Attributes:
        hooks ([`CheckedHooks`]): Scorer, evictor, and sampler, and the plugins next to them.
        limiter ([`RateLimiter`]): How many slots replay may fill.
        success ([`Success`]): What passes.
        reward (`str`, *optional*): The reward function that counts (`replay_reward`); None for the weighted sum.
        max_age (`int`, *optional*): Updates since generation after which an entry leaves.
        max_uses (`int`, *optional*): Replays after which an entry leaves.
        retire_passes (`int`, *optional*): So many passes of a group solve its prompt (`replay_retire_passes`).
        weigh (`Callable`, *optional*): The sampler's weights, if the correction asks for them.
        draws_same_prompt (`bool`): Whether entries are drawn for slots of their own prompt only.
        drops (`bool`): Whether a keep rank of -inf lets an entry leave where there is room.
        stateful (`dict[str, Stateful]`): Strategies whose running state travels with checkpoints, by kind.
    """

    hooks: CheckedHooks
    limiter: RateLimiter = field(default_factory=RateLimiter)
    success: Success = field(default_factory=Success)
    reward: str | None = None
    max_age: int | None = None
    max_uses: int | None = None
    retire_passes: int | None = None
    weigh: Callable[[Table, Context], NDArray[Any]] | None = None
    draws_same_prompt: bool = False
    drops: bool = False
    stateful: dict[str, Stateful] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        scorer: Any = "advantage_std",
        evictor: Any = "prompt_balanced",
        sampler: Any = "prompt_balanced",
        **limits: Any,
    ) -> Rules:
        """Rules with these strategies, for a buffer without a trainer.

        Args:
            scorer, evictor, sampler: Each by name or itself, as in settings.
            **limits: Other attributes of the rules.
        """
        named: dict[Kind, Any] = {"scorer": scorer, "evictor": evictor, "sampler": sampler}
        strategies = {kind: registry().resolve(kind, name) for kind, name in named.items()}
        made = {kind: strategy.make() for kind, strategy in strategies.items()}
        return cls(CheckedHooks([], strategies, made), **limits)

    @property
    def running(self) -> dict[str, Stateful]:
        """All that has running state, by name."""
        return {"rate_limiter": self.limiter, "success": self.success, **self.stateful}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {name: part.state_dict() for name, part in self.running.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave; strategies that are not here any more are passed over.

        Raises:
            CheckpointError: A strategy can't; names it.
        """
        for name, part in self.running.items():
            if name not in state:
                continue
            try:
                part.load_state_dict(state[name])
            except Exception as error:
                raise CheckpointError(
                    f"The {name} ({type(part).__qualname__}) can't take the state that was saved of it: "
                    f"{type(error).__name__}: {error}"
                ) from error
