"""What is stored of a group next to TRL's own tensors: its raw rewards, and log-probs without gaps."""

from __future__ import annotations

import numpy as np
import torch

from ..compat import IS_RATIO, OLD_LOGPS, SAMPLING_LOGPS
from ..data.fields import STORED_REWARDS
from ..data.types import Floats, Group
from .compose import trained_tokens


def fill_missing(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace in place what vLLM could not score (NaN): the sampler is taken to agree with the policy there, as TRL
    does. Return the same."""
    sampling = tensors.get(SAMPLING_LOGPS)
    if sampling is not None:
        policy = tensors[OLD_LOGPS].to(sampling)
        tensors[SAMPLING_LOGPS] = torch.where(sampling.isnan(), policy, sampling)
    ratio = tensors.get(IS_RATIO)
    if ratio is not None:
        tensors[IS_RATIO] = ratio.nan_to_num(nan=1.0)
    return tensors


def with_rewards(group: Group, rewards: Floats) -> Group:
    """The group with the raw rewards of its rows beside TRL's tensors.

    Args:
        group ([`Group`]): Without them.
        rewards (`(rows or more, functions)` or `(rows or more,)`): From the group's first row on.
    """
    rows = len(group.completion_lengths)
    kept = torch.from_numpy(rewards[:rows].astype(np.float32))
    return Group({**group.tensors, STORED_REWARDS: kept}, group.keys, group.prompt_lengths, group.completion_lengths)


def trainable_sums(group: Group) -> Floats:
    """The summed behavior log-probs of each row's trainable tokens, of a group on the CPU; those of masked tokens do
    not matter."""
    kept = torch.where(trained_tokens(group), group.tensors[OLD_LOGPS].double(), 0.0)
    lengths = group.completion_lengths
    sums = np.add.reduceat(np.append(kept.numpy(), 0.0), lengths.cumsum() - lengths)
    return np.where(lengths > 0, sums, 0.0)
