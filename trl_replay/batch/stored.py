"""What is stored of a group next to TRL's own tensors: its raw rewards, and log-probs without gaps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..compat import IS_RATIO, OLD_LOGPS, SAMPLING_LOGPS
from ..data.fields import STORED_REWARDS
from ..data.types import Floats, Group
from .compose import trained_tokens


def fill_missing(tensors: dict[str, torch.Tensor]) -> None:
    """Replace what vLLM could not score (NaN): the sampler is taken to agree with the policy there, as TRL does."""
    sampling = tensors.get(SAMPLING_LOGPS)
    if sampling is not None:
        policy = tensors[OLD_LOGPS].to(sampling)
        tensors[SAMPLING_LOGPS] = torch.where(sampling.isnan(), policy, sampling)
    ratio = tensors.get(IS_RATIO)
    if ratio is not None:
        tensors[IS_RATIO] = ratio.nan_to_num(nan=1.0)


def with_rewards(group: Group, rewards: Floats) -> Group:
    """The group with the raw rewards of its rows beside TRL's tensors.

    Args:
        group ([`Group`]): Without them.
        rewards (`(rows or more, functions)` or `(rows or more,)`): From the group's first row on.
    """
    rows = len(group.completion_lengths)
    kept = torch.from_numpy(rewards[:rows].astype(np.float32))
    return replace(group, tensors={**group.tensors, STORED_REWARDS: kept})


def trainable_sums(group: Group) -> torch.Tensor:
    """The summed behavior log-probs of each row's trainable tokens, float64, where the group is; those of masked
    tokens do not matter."""
    kept = torch.where(trained_tokens(group), group.tensors[OLD_LOGPS].float(), 0.0)
    rows = torch.split(kept, group.completion_lengths.tolist())
    return torch.stack([row.sum() for row in rows]).double()
