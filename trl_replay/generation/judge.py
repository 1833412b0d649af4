"""Determine dead groups among scored ones, and what a success is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .. import compat
from ..base.validation import pass_rate_of
from ..batch.compose import fetch_batch
from ..batch.group_view import rewards_of_batch, view
from ..data.success import Success
from ..data.types import Batch, Groups
from ..distributed.row_layout import RowLayout
from ..setup.assembly import rewards_in_words
from ..setup.components import Components
from ..setup.settings import Settings
from .generated import Generated


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

    def fetch(self, batch: Batch) -> Batch:
        """Return what was just scored with its texts on the CPU, where all is decided, and put its rewards there: the
        one wait for it."""
        fetched, self.rewards = fetch_batch(batch, self._fields, self.rewards or [])
        return fetched

    def look(self, batch: Batch, rows: RowLayout) -> Generated:
        """Read rows that were just scored."""
        processes = self._processes
        setup = compat.reward_setup(self._trainer())
        scored = rewards_of_batch(self.rewards or [], rows.columns, setup, rows.size, rows.count * processes)
        rows.check(len(scored), processes)
        groups = self.see(rows, scored)
        if self._success.is_graded and not self._has_doubted:
            self._has_doubted = True
            doubt = doubt_of(self._settings, self._success, self._trainer())
            if doubt:
                warnings.warn(doubt, stacklevel=2)
        return Generated(batch, rows, groups, scored, (groups,))

    def see(self, rows: RowLayout, scored: torch.Tensor) -> Groups:
        """Return the groups that the scope shares, with advantages as plugins shape them."""
        setup = compat.reward_setup(self._trainer())
        table, update = self._buffer.table, self._buffer.clock.update
        if not np.array_equal(table.reward_weights, setup.weights):
            table.reward_weights = setup.weights
            self._success.begin_anew(rewards_in_words(self._trainer(), table.counting))
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
