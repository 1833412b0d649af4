"""What a scored batch is: its groups, their rewards, and which of them are dead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import compat
from ..base.validation import pass_rate_of
from ..batch.compose import batch_to_cpu
from ..batch.group_view import rewards_of_batch, view
from ..data.success import Success
from ..data.types import Batch, Bools, Floats, Groups, Ints
from ..distributed.communicator import SharedRows
from ..setup.settings import Components, Settings


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """A generation batch, or a further round of it, with its groups.

    Attributes:
        batch (`dict`): This process's rows, as TRL returned them.
        rows ([`SharedRows`]): Where they lie, with the columns that the scope shares.
        new_groups ([`Groups`]): The groups that the scope shares, with what a plugin made of their advantages.
        scored (`(rows of all processes, functions)`): Raw rewards, NaN where None.
        generations (`tuple[Groups, ...]`): The groups of every generation that the batch took, those included that
            were generated again for, or are left over.
        refilled (`int`): How many of its groups are of further rounds.
    """

    batch: Batch
    rows: SharedRows
    new_groups: Groups
    scored: torch.Tensor
    generations: tuple[Groups, ...]
    refilled: int = 0

    @classmethod
    def unseen(cls, batch: Batch, rows: SharedRows) -> JudgedBatch:
        """Return a batch whose groups are unavailable after an error, which all processes raise at their next
        message."""
        none = np.empty((0, rows.size))
        flat = np.empty(0, np.int64)
        whole = none.astype(np.int64)
        groups = Groups(none[:, :, None], np.ones(1), none, whole, whole, flat.astype(bool), flat, flat)
        return cls(batch, rows, groups, torch.empty(0, 1), ())

    @property
    def groups(self) -> Ints:
        """Numbers of the groups that the scope shares, among all processes' groups."""
        size = self.rows.size
        first_rows = self.rows.columns["row"][::size]
        return np.asarray(first_rows // size)

    @property
    def dead_here(self) -> Bools:
        """Mask of the dead groups among those with rows on this process."""
        return self.new_groups.dead[self.rows.slots_here]

    @property
    def items_here(self) -> Floats:
        """What each group's rows on this process add to `num_items_in_batch`."""
        here = self.rows.here
        groups = np.arange(here.start, here.stop) // self.rows.size
        items = self.rows.columns["items"][here]
        return np.asarray(np.bincount(groups - groups[0], items), np.float64)


class Judge:
    """Builds groups from the rows that the trainer scored.

    Args:
        trainer (`Callable`): Gives the trainer.
        settings ([`Settings`]): What needs a success.
        components ([`Components`]): The buffer, and which reward counts.
        shape (`Callable`): Lets a plugin shape the groups' advantages.

    Attributes:
        rewards (`list[torch.Tensor]`, *optional*): While the trainer scores: what its reward functions gave so far.
    """

    def __init__(
        self, trainer: Callable[[], Any], settings: Settings, components: Components, shape: Callable[[Groups], Groups]
    ) -> None:
        self.rewards: list[torch.Tensor] | None = None
        self._trainer = trainer
        self._settings = settings
        self._processes = components.processes
        self._success = components.success
        self._buffer = components.buffer
        self._fields = components.fields
        self._shape = shape
        self._has_doubted = False

    def to_cpu(self, batch: Batch) -> Batch:
        """Return what was just scored with its texts on the CPU, where all is decided, and put its rewards there: the
        one wait for it."""
        on_cpu, self.rewards = batch_to_cpu(batch, self._fields, self.rewards or [])
        return on_cpu

    def judge_batch(self, batch: Batch, rows: SharedRows) -> JudgedBatch:
        """Read rows that were just scored."""
        processes = self._processes
        setup = compat.reward_setup(self._trainer())
        scored = rewards_of_batch(self.rewards or [], rows.columns, setup, rows.size, rows.count * processes)
        rows.check(len(scored), processes)
        groups = self.groups_of(rows, scored, setup)
        if self._success.is_graded and not self._has_doubted:
            self._has_doubted = True
            doubt = doubt_of(self._settings, self._success, self._trainer())
            if doubt:
                warnings.warn(doubt, stacklevel=2)
        return JudgedBatch(batch, rows, groups, scored, (groups,))

    def groups_of(self, rows: SharedRows, scored: torch.Tensor, setup: compat.RewardSetup) -> Groups:
        """Return the groups that the scope shares, with advantages as plugins shape them."""
        table, update = self._buffer.table, self._buffer.clock.update
        groups = view(rows.columns, scored, setup, rows.size, update, table.counting, self._success)
        return self._shape(groups)


def doubt_of(settings: Settings, success: Success, trainer: Any) -> str:
    """Describe what does not act because it is not known what a success is, and the remedy; empty if all does, or
    the trainer no longer exists."""
    config, doubt = settings.config, success.doubt()
    waiting = [] if config.replay_retire_passes is None else [f"replay_retire_passes={config.replay_retire_passes}"]
    waiting += [] if pass_rate_of(config.replay_start) is None else [f"replay_start={config.replay_start!r}"]
    waiting += [f"the plugin {plugin.name!r}" for plugin in settings.plugins if plugin.needs_success]
    effects = [f"{' and '.join(waiting)} can't act"] if waiting else []
    if config.replay_kl == "all_wrong":
        effects.append("replay_kl='all_wrong' uses the lowest of them")
    if not doubt or not effects or trainer is None:
        return ""
    names = list(trainer.reward_func_names)
    which = f", or replay_reward to one of {', '.join(map(repr, names))}" if len(names) > 1 else ""
    best = f" ({success.remedy})" if success.is_graded else ""
    return f"{doubt}; {'; '.join(effects)}. Set replay_pass_reward to the least reward of a success{best}{which}."
