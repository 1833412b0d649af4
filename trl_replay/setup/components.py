"""The components of a session: strategies, plugins and generators, built before anything is patched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.progress import Clock, KeptErrors
from ..buffer.rate_limiter import RateLimiter
from ..buffer.replay_buffer import ReplayBuffer
from ..data.counters import Totals
from ..data.fields import FieldTable
from ..data.prompt_table import PromptTable
from ..data.success import Success
from ..data.table import Table
from ..data.tasks import Tasks
from ..data.types import Context, Corrected, Groups, ReplayedRows
from ..errors import CheckpointError
from ..hooks import CheckedHooks
from ..loss.bounds import Bounds
from ..loss.gates import Gates
from ..protocols import Scope, Stateful


@dataclass(slots=True)
class Components:
    """The components of one session.

    Attributes:
        buffer ([`ReplayBuffer`]): Where groups are kept.
        scope ([`Scope`]): Who shares the buffer.
        hooks ([`CheckedHooks`]): Plugins and strategies.
        fields ([`FieldTable`]): The batch keys that are known.
        tasks ([`Tasks`]): What rows are generated for.
        rng (`numpy.random.Generator`): Private, and in the same state on all processes that share the buffer.
        rate_limiter ([`RateLimiter`]): How many slots replay may fill.
        gates ([`Gates`]): What replayed rows must pass in the loss.
        bounds ([`Bounds`]): What no replayed row can pass there.
        num_generations (`int`): Rows of a group.
        pad_to_multiple_of (`int`, *optional*): The trainer's, of a composed batch's widths.
        token_weights (`bool`): Whether a correction may give one weight a token.
        beside_the_tap (`bool`): Whether the loss does not call the log-prob method, so that every batch gets a no-grad
            forward for its log-probs, and no row can be masked.
        mixes_rows (`bool`): Whether the configured mixer may put stored rows beside fresh ones in a group.
        draws_same_prompt (`bool`): Whether entries are drawn for slots of their own prompt only.
        forwards_to_record (`bool`): Whether every fresh batch gets a no-grad forward for its log-probs, which are
            stored and never trained on.
        processes (`int`): Number of processes.
        counting (`int`, *optional*): The reward function that counts; None for the weighted sum.
        success ([`Success`]): What passes.
        weigh (`Callable`, *optional*): The sampler's weights, if the correction asks for them.
        prompts ([`PromptTable`], *optional*): The prompts generated for so far: the one object that every
            `context.prompts` is. None where nothing is generated again and no plugin chooses prompts.
        stateful (`dict[str, Stateful]`): Strategies and limits whose running state travels with checkpoints, by name.
        local_rng (`numpy.random.Generator`): This process's own, drawn from as often as its rows need.
        clock ([`Clock`]): Counts updates.
        errors ([`KeptErrors`]): What failed here, until all processes hear of it.
        totals ([`Totals`]): Counters since attach.
        metrics (`dict[str, float]`): Of the last generation batch.
    """

    buffer: ReplayBuffer
    scope: Scope
    hooks: CheckedHooks
    fields: FieldTable
    tasks: Tasks
    rng: np.random.Generator
    rate_limiter: RateLimiter
    gates: Gates
    bounds: Bounds
    num_generations: int
    token_weights: bool
    beside_the_tap: bool
    pad_to_multiple_of: int | None = None
    mixes_rows: bool = False
    draws_same_prompt: bool = False
    forwards_to_record: bool = False
    processes: int = 1
    counting: int | None = None
    success: Success = field(default_factory=Success)
    weigh: Callable[[Table, Context], NDArray[Any]] | None = None
    prompts: PromptTable | None = None
    stateful: dict[str, Stateful] = field(default_factory=dict)
    local_rng: np.random.Generator = field(init=False)
    clock: Clock = field(init=False, default_factory=Clock)
    errors: KeptErrors = field(init=False)
    totals: Totals = field(init=False, default_factory=Totals)
    metrics: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.errors = KeptErrors(alone=self.processes == 1)
        self.local_rng = self.rng.spawn(1)[0]

    def context(self, slots: Groups | None = None) -> Context:
        """Return what strategies may know now; a sampler or mixer also of the `slots` that may be filled."""
        return Context(
            update=self.clock.update,
            rng=self.rng,
            capacity=self.buffer.capacity,
            num_generations=self.num_generations,
            table=self.buffer.table,
            metrics=self.metrics,
            slots=slots,
            prompts=self.prompts,
            noted=self.totals.reasons,
        )

    def local_context(self) -> Context:
        """Return the same, with a generator from which this process may draw as often as its own rows need."""
        return replace(self.context(), rng=self.local_rng)

    def correct(self, rows: ReplayedRows) -> Corrected:
        """Return what the correction gives replayed rows, within bounds and gates."""
        corrected = self.hooks.correct(rows, self.local_context())
        return self.gates(rows, self.bounds(rows, corrected))

    def weight_before_the_loss(self, age: int, chance: float) -> float:
        """Return the loss weight that the correction gives a row of which no log-probs are known yet.

        Args:
            age (`int`): Updates since generation.
            chance (`float`): Of being drawn first, relative to the least likely eligible entry.
        """
        unknown = torch.zeros(1, 1)
        rows = ReplayedRows(
            logps=unknown,
            behavior_logps=unknown,
            proximal_logps=unknown,
            mask=torch.ones(1, 1, dtype=torch.bool),
            advantages=torch.ones(1),
            ages=torch.tensor([age]),
            priorities=torch.tensor([chance]),
        )
        weights = self.hooks.correct(rows, self.local_context()).weights
        return 1.0 if weights is None else float(weights.flatten()[0])

    def seed(self, seed: int) -> None:
        """Begin both generators anew."""
        self.rng = np.random.default_rng(seed)
        self.local_rng = self.rng.spawn(1)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of generators and of strategies with running state."""
        return {
            "generators": {"shared": self.rng.bit_generator.state, "local": self.local_rng.bit_generator.state},
            "strategies": {name: component.state_dict() for name, component in self.stateful.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], shared: bool = True, local: bool = True) -> None:
        """Take what `state_dict` gave.

        Args:
            state (`Mapping`): As read; strategies that are not here any more are passed over.
            shared (`bool`): Whether to take the generator of all processes that share the buffer.
            local (`bool`): Whether to take this process's own generator.
        """
        if shared:
            self.rng.bit_generator.state = state["generators"]["shared"]
        if local:
            self.local_rng.bit_generator.state = state["generators"]["local"]
        for name, component in self.stateful.items():
            if name in state["strategies"]:
                _load(component, name, state["strategies"][name])


def _load(component: Stateful, kind: str, state: Mapping[str, Any]) -> None:
    """Have a strategy take its saved state.

    Raises:
        CheckpointError: It can't; names it.
    """
    try:
        component.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"The {kind} ({type(component).__qualname__}) can't take the state that was saved of it: "
            f"{type(error).__name__}: {error}"
        ) from error
