"""Tries each strategy once before training, on made-up groups: what can't work is refused while nothing has run.

What is tried is never what will be used. A strategy is made a second time and thrown away, and has a generator of its
own. A ready-made object can't be made again; of these only plain functions, which keep nothing, are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import torch

from ..base.progress import global_generators_kept
from ..data.table import Table
from ..data.types import NONE, Context, Groups, Ints, ReplayedRows
from ..errors import ConfigurationError, HookError, ResultError
from ..hooks import CheckedHooks
from ..loss.supply import fitting
from ..registry import Strategy
from ..specs import Kind

ENTRIES, SLOTS = 6, 3
"""Entries of the made-up buffer, and slots of the made-up batch."""
TOKENS = 5


def made_up_groups(rewards: Any, update: int = 0) -> Groups:
    """Groups with TRL's group-scaled advantages; functions have equal weights.

    Args:
        rewards (`(n, G, functions)`): Of each function.
        update (`int`): When they were generated.
    """
    rewards = np.asarray(rewards, np.float64)
    count, size, functions = rewards.shape
    reward = rewards.mean(axis=2)
    deviation = reward.std(axis=1, ddof=1, keepdims=True)
    tokens = np.full((count, size), TOKENS)
    return Groups(
        rewards=rewards,
        reward_weights=np.full(functions, 1 / functions),
        advantages=(reward - reward.mean(axis=1, keepdims=True)) / (deviation + 1e-4),
        lengths=tokens,
        trainable=tokens,
        dead=np.ptp(reward, axis=1) == 0,
        update=np.full(count, update),
        prompt=np.arange(count),
        behavior_logps=np.full((count, size), -3.0),
    )


def made_up_table(scores: Any, size: int, functions: int = 1, **columns: Any) -> Table:
    """A table with one entry a score: serials 0, 1, …, ascending updates, distinct tags and prompts. The first of an
    entry's rows passes.

    Args:
        scores (`(n,)`): Of each entry.
        size (`int`): Rows of an entry.
        functions (`int`): Reward functions.
        **columns: Further columns, or others.
    """
    count = len(scores)
    passes = np.zeros((count, size))
    passes[:, :1] = 1.0
    tokens = np.full(passes.shape, TOKENS)
    values: dict[str, Any] = {
        "serial": np.arange(count),
        "update": np.arange(count),
        "score": np.asarray(scores, np.float64),
        "tag": np.linspace(1.0, 0.1, count),
        "reward_mean": passes.mean(axis=1),
        "reward_std": passes.std(axis=1),
        "tokens": tokens.sum(axis=1),
        "items": tokens.sum(axis=1),
        "prompt": np.arange(count),
        "row_rewards": np.repeat(passes[:, :, None], functions, axis=2),
        "row_advantage": 2 * passes - 0.5,
        "row_logp": -1.0 - passes,
        "row_length": tokens,
        "row_items": tokens,
        **columns,
    }
    table = Table.empty(size, functions)
    table.reward_weights = np.full(functions, 1 / functions)
    table.append(values, count)
    return table


def made_up_rows(ages: Sequence[int], drift: float, device: Any = None) -> ReplayedRows:
    """Replayed rows of one group, whose first row passes; the last has one token less.

    Args:
        ages (`Sequence[int]`): Of each row.
        drift (`float`): Log ratio of every token.
        device (`torch.device`): Where the tensors are.
    """
    count = len(ages)
    mask = torch.ones(count, TOKENS, dtype=torch.bool, device=device)
    mask[-1, -1] = False
    logps = torch.full(mask.shape, -1.0, device=device)
    return ReplayedRows(
        logps=logps,
        behavior_logps=torch.where(mask, logps - drift, logps),
        proximal_logps=logps.clone(),
        mask=mask,
        advantages=torch.tensor([1.5, *[-0.5] * (count - 1)], device=device),
        ages=torch.tensor(ages, device=device),
        priorities=torch.ones(count, device=device),
    )


class Rehearsal:
    """The stage: a small buffer, a fresh batch, and replayed rows, of the trainer's sizes.

    Args:
        size (`int`): Rows of a group.
        functions (`int`): Reward functions.
        capacity (`int`): Groups that the real buffer may hold.
        device (`torch.device`): Where the trainer computes its loss.
        token_weights (`bool`): Whether a correction may give one weight a token.
    """

    def __init__(self, size: int, functions: int, capacity: int, device: Any, token_weights: bool) -> None:
        self._size = size
        self._functions = functions
        self._device = device
        self._token_weights = token_weights
        self._table = made_up_table(np.linspace(1.0, 2.0, ENTRIES), size, functions)
        generator = np.random.default_rng(0)
        self._context = Context(ENTRIES, generator, max(capacity, ENTRIES), size, self._table)
        self._drawn = np.arange(SLOTS)[:, None]

    @property
    def update(self) -> int:
        """Return the made-up number of updates."""
        return self._context.update

    def _groups(self, *passing: int) -> Groups:
        """Make groups of which the first so many rows pass, by every reward function."""
        passes = np.arange(self._size) < np.array(passing)[:, None]
        return made_up_groups(np.repeat(passes[:, :, None], self._functions, axis=2))

    def select(self, hooks: CheckedHooks) -> None:
        """Try a selector on a dead group, a live one, and one whose rows all pass."""
        hooks.select(self._groups(0, 1, self._size), self._context)

    def score(self, hooks: CheckedHooks) -> None:
        """Try a scorer on three live groups."""
        hooks.score(self._groups(1, self._size - 1, 1), self._context)

    def rank(self, hooks: CheckedHooks) -> None:
        """Try an evictor on all entries."""
        hooks.rank(self._table, self._context)

    def sample(self, hooks: CheckedHooks) -> None:
        """Try a sampler for three dead groups, and keep what is drawn for the mixer."""
        slots = self._groups(*[0] * SLOTS)
        drawn = hooks.sample(self._table, SLOTS, replace(self._context, slots=slots))
        filled = drawn[(drawn != NONE).any(axis=1)]
        if len(filled):
            self._drawn = filled

    def mix(self, hooks: CheckedHooks) -> None:
        """Try a mixer on dead groups of the prompts that were drawn."""
        slots = replace(self._groups(*[0] * len(self._drawn)), prompt=self._prompts(self._drawn))
        hooks.mix(self._table, self._drawn, slots, replace(self._context, slots=slots))

    def _prompts(self, drawn: Ints) -> Ints:
        first = (drawn != NONE).argmax(axis=1)[:, None]
        entries = np.take_along_axis(drawn, first, axis=1)[:, 0]
        return np.asarray(self._table.prompt[entries])

    def correct(self, hooks: CheckedHooks) -> None:
        """Try a correction on rows of both signs, slightly off-policy, each token by another ratio; the last row has
        one token less."""
        rows = made_up_rows([1, 2, 3], 0.1, self._device)
        drifts = (rows.logps - rows.behavior_logps) * torch.linspace(0.5, 1.5, TOKENS, device=self._device)
        rows = replace(rows, behavior_logps=rows.logps - drifts)
        fitting(rows, hooks.correct(rows, self._context), self._token_weights)

    def acts(self) -> dict[Kind, Callable[[CheckedHooks], None]]:
        """Return the trial of each kind of strategy, in the order of a step."""
        return {
            "selector": self.select,
            "scorer": self.score,
            "evictor": self.rank,
            "sampler": self.sample,
            "mixer": self.mix,
            "correction": self.correct,
        }


def rehearse(stage: Rehearsal, strategies: Mapping[Kind, Strategy], made: Mapping[Kind, Any], lenient: bool) -> None:
    """Try every strategy that can be made a second time.

    Args:
        stage ([`Rehearsal`]): What they get.
        strategies (`Mapping`): How each is made.
        made (`Mapping`): The real ones, which are left alone.
        lenient (`bool`): Whether a plugin takes part whose hooks may give strategies what is not here: columns of its
            own, a session. Then what raises may pass; what returns something wrong may not.

    Raises:
        ConfigurationError: Names the setting, what was wrong, and what to do.
    """
    with global_generators_kept():
        for kind, act in stage.acts().items():
            second = strategies[kind].make()
            if _is_the_real_one(second, made[kind]) and not _keeps_nothing(second):
                continue
            try:
                act(CheckedHooks([], strategies, {kind: second}))
            except (HookError, ResultError) as error:
                if lenient and isinstance(error, HookError):
                    continue
                reason = str(error).replace(f" at update {stage.update}", "")
                raise ConfigurationError(
                    f"replay_{kind}={strategies[kind].label!r} can't be used, as a trial on made-up groups before "
                    f"training shows. {reason.removesuffix('.')}. Mend it, or name another {kind}: `trl-replay list` "
                    "shows all."
                ) from (error.__cause__ or error)


def _is_the_real_one(made: Any, real: Any) -> bool:
    """Return whether both are one object, or methods of one object."""
    owner = getattr(made, "__self__", made)
    return owner is getattr(real, "__self__", real)


def _keeps_nothing(strategy: Any) -> bool:
    """Return whether a strategy is a function without a closure."""
    return isinstance(strategy, FunctionType) and strategy.__closure__ is None
