"""What a buffer goes by: strategies, limits, and what passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from ..data.success import Success
from ..data.table import Table
from ..data.types import Context
from ..errors import CheckpointError
from ..hooks import CheckedHooks
from ..protocols import Stateful
from ..registry import registry
from ..specs import Kind
from .rate_limiter import RateLimiter


@dataclass(slots=True)
class Rules:
    """The rules of one buffer.

    Attributes:
        hooks ([`CheckedHooks`]): Scorer, evictor, and sampler, and the plugins next to them.
        limiter ([`RateLimiter`]): How many slots replay may fill.
        success ([`Success`]): What passes.
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
