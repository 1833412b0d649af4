"""Rows made elsewhere in the place of what the trainer generates: TRL's own scoring step makes a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather

from ... import compat
from ...batch.compose import loss_mask
from ...data.fields import ADVANTAGES
from ...data.types import Batch
from ...errors import ReplayError
from ...setup.settings import Components
from .reader import Rollout


class Rollouts:
    """Some rows of one process, in whole groups.

    Args:
        trainer (`trl.GRPOTrainer`): Scores them.
        rows (`Sequence[Rollout]`): With their rewards.
        components ([`Components`]): Of the session.
    """

    def __init__(self, trainer: Any, rows: Sequence[Rollout], components: Components) -> None:
        self._trainer = trainer
        self._rows = rows
        self._components = components
        self._keeps_sampler = compat.keeps_sampler(trainer)
        self._corrects_sampler = compat.corrects_sampler(trainer)

    @property
    def instead(self) -> dict[str, Any]:
        """What the trainer has meanwhile in the place of its own."""
        return {**compat.WHILE_SCORING_OTHERS, "rollout_func": self._rollout}

    def _rollout(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [one.prompt_ids.tolist() for one in self._rows],
            "completion_ids": [one.completion_ids.tolist() for one in self._rows],
            "logprobs": None,
            "env_mask": [one.mask.tolist() for one in self._rows],
        }

    def rewards(self, inputs: Any, prompts: Any, completions: Sequence[Any], completion_ids: Any) -> torch.Tensor:
        """`(rows of all processes, functions)`: the file's or, where these are to score it, those of the trainer's
        functions; NaN for None, and for a masked row, which counts in no mean."""
        trainer, device = self._trainer, self._trainer.accelerator.device
        if self._rows[0].rewards is None:
            said = [one.messages or made for one, made in zip(self._rows, completions, strict=True)]
            rewards = getattr(type(trainer), compat.REWARDS)(trainer, inputs, prompts, said, completion_ids)
        else:
            told = np.array([one.rewards for one in self._rows])
            rewards = gather(torch.tensor(told, dtype=torch.float32, device=device))
        counts = [not one.masked or one.advantage is not None for one in self._rows]
        made: torch.Tensor = rewards.where(gather(torch.tensor(counts, device=device))[:, None], torch.nan)
        return made

    def check(self, batch: Batch) -> None:
        """Refuse a batch of other rows than were handed in.

        Raises:
            ReplayError: Names the override that makes them.
        """
        as_many = batch["completion_ids"].size(0) == len(self._rows)
        if as_many and all(self._is_as_handed(batch, row, one) for row, one in enumerate(self._rows)):
            return
        where = compat.own_generation(self._trainer) or "this release of TRL"
        raise ReplayError(
            f"{where} made other completions or masks than those it was handed ({self._rows[0].label} and on), so "
            "their rewards would have been those of other texts: none of these was stored. Let it ask rollout_func, "
            "as TRL's own _generate does, and leave completions as they are; or train without rows from elsewhere."
        )

    def _is_as_handed(self, batch: Batch, row: int, one: Rollout) -> bool:
        count = len(one.completion_ids)
        ids, mask = batch["completion_ids"][row].cpu().numpy(), batch["completion_mask"][row].cpu().numpy()
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].cpu().numpy()
        said = mask * batch["tool_mask"][row].cpu().numpy() if "tool_mask" in batch else mask
        is_cut = compat.cuts_off(self._trainer) and not mask.any()
        return (
            np.array_equal(prompt, one.prompt_ids)
            and np.array_equal(ids[:count], one.completion_ids)
            and (is_cut or (np.array_equal(said[:count], one.mask) and mask[:count].all() and not mask[count:].any()))
        )

    def complete(self, batch: Batch, computes: bool) -> Batch:
        """The batch with what the rows tell beside: log-probs of the policy and its sampler, advantages, and masks.

        Args:
            batch (`dict`): As TRL scored it.
            computes (`bool`): Whether rows of any process lack log-probs, which the policy of now gives.

        Raises:
            ReplayError: Its tokens have advantages of their own, and the trainer's do not.
        """
        batch = dict(batch)
        logps = batch.get(compat.OLD_LOGPS)
        if logps is None and computes:
            logps = self._components.layout.forward_logps(self._trainer, batch)
        if logps is None:
            logps = torch.zeros(batch["completion_ids"].shape, device=batch["completion_ids"].device)
        batch[compat.OLD_LOGPS] = self._with_told(logps, compat.OLD_LOGPS)
        if self._keeps_sampler:
            batch[compat.SAMPLING_LOGPS] = self._with_told(batch[compat.OLD_LOGPS], compat.SAMPLING_LOGPS)
        if self._corrects_sampler:
            mask = loss_mask(batch).bool()
            pair = batch[compat.OLD_LOGPS], batch[compat.SAMPLING_LOGPS]
            batch[compat.IS_RATIO] = compat.sampler_ratio(self._trainer, *pair, mask)
        batch[ADVANTAGES] = self._advantages(batch)
        return batch

    def _with_told(self, values: torch.Tensor, key: str) -> torch.Tensor:
        """`(B, C)`: the values, but those of rows that tell their own."""
        made = values.clone()
        for row, one in enumerate(self._rows):
            if key in one.told:
                made[row] = 0
                made[row, : len(one.completion_ids)] = torch.from_numpy(one.told[key]).to(made)
        return made

    def _advantages(self, batch: Batch) -> torch.Tensor:
        """As TRL computed them; those of the file where it tells them, and NaN for rows that it masks."""
        advantages: torch.Tensor = batch[ADVANTAGES].clone()
        of_tokens = self._components.fields.has_token_advantages(batch)
        for row, one in enumerate(self._rows):
            if ADVANTAGES in one.told and not of_tokens:
                raise ReplayError(
                    f"{one.label} has advantages of its tokens, and this trainer gives one to each row: drop the "
                    "column 'advantages', and the trainer computes one from the rewards."
                )
            if ADVANTAGES in one.told:
                advantages[row, : len(one.completion_ids)] = torch.from_numpy(one.told[ADVANTAGES]).to(advantages)
            elif one.advantage is not None:
                advantages[row] = one.advantage
            if one.masked:
                advantages[row] = torch.nan
        return advantages
