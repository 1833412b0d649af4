"""Cuts stored groups out of an asynchronous trainer's samples, and makes samples of stored groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trl_replay.batch.compose import trained_tokens
from trl_replay.compat import OLD_LOGPS
from trl_replay.data.types import ADVANTAGES, Group, Ints
from trl_replay.extras.files.export import masked_rows

from . import compat as asynchronous

REPLAYED = [{"role": "assistant", "content": "(a replayed sample)"}]
"""In the place of a replayed sample's messages, which only traces show."""
HELD = frozenset({"prompt_ids", "completion_ids", "completion_mask", "tool_mask", ADVANTAGES, OLD_LOGPS})
"""Batch keys that a stored group can restore."""


def cut_samples(samples: Sequence[Any]) -> Group:
    """Return the group of these samples as it is stored, one row per sample.

    Args:
        samples (`Sequence`): TRL's samples of one group.
    """
    starts = [first_trained(sample) for sample in samples]
    prompts = [sample.input_ids[:start] for sample, start in zip(samples, starts, strict=True)]
    if all(np.array_equal(prompt, prompts[0]) for prompt in prompts):
        prompts = prompts[:1]
    rest = [slice(start, None) for start in starts]
    ids = [sample.input_ids[part] for sample, part in zip(samples, rest, strict=True)]
    masks = [sample.completion_mask[part] for sample, part in zip(samples, rest, strict=True)]
    logps = [sample.old_log_probs[part] for sample, part in zip(samples, rest, strict=True)]
    tensors = {
        "prompt_ids": _flat(prompts, torch.int32),
        "completion_ids": _flat(ids, torch.int32),
        ADVANTAGES: torch.tensor([float(sample.advantage) for sample in samples], dtype=torch.float64),
        OLD_LOGPS: _flat(logps, torch.float32),
    }
    if not all(np.all(mask) for mask in masks):
        tensors["tool_mask"] = _flat(masks, torch.int8)
    lengths = [np.array([len(part) for part in parts], np.int64) for parts in (prompts, ids)]
    return Group(tensors, HELD, *lengths)


def first_trained(sample: Any) -> int:
    """Count the tokens before the first trained one; without any, all but the last."""
    trained = np.flatnonzero(sample.completion_mask)
    return int(trained[0]) if len(trained) else len(sample.input_ids) - 1


def conversations(samples: Sequence[Any], size: int) -> Ints:
    """Number each sample's completion. Of more samples than `size`, some are forks of one; what that does not explain
    counts to the last completion."""
    return np.arange(len(samples)) if len(samples) <= size else np.minimum(completion_numbers(samples), size - 1)


def completion_numbers(samples: Sequence[Any]) -> list[int]:
    """Number completions in order: neighbors with one message and one advantage are forks of one."""
    changes = [a.completion != b.completion or a.advantage != b.advantage for a, b in itertools.pairwise(samples)]
    return [0, *itertools.accumulate(changes)]


def samples_of(group: Group, masked: Sequence[bool], weight: float) -> list[Any]:
    """Return a stored group's samples as the queue delivers them, without version and id, and without those that have
    no gradient.

    Args:
        group ([`Group`]): As stored.
        masked (`Sequence[bool]`): Which of its completions train nothing.
        weight (`float`): In the loss, by which advantages are multiplied.
    """
    make = asynchronous.rollout_sample()
    lengths = group.completion_lengths.tolist()
    ids, logps = (torch.split(group.tensors[key], lengths) for key in ("completion_ids", OLD_LOGPS))
    masks = torch.split(trained_tokens(group), lengths)
    masked = masked_rows(group, masked)
    prompts = torch.split(group.tensors["prompt_ids"], group.prompt_lengths.tolist())
    prompts = prompts * len(lengths) if len(prompts) == 1 else prompts
    samples = []
    for row, (prompt, mask) in enumerate(zip(prompts, masks, strict=True)):
        if masked[row] or not mask.any():
            continue
        nothing = np.zeros(len(prompt))
        samples.append(
            make(
                prompt=[],
                completion=REPLAYED,
                input_ids=torch.cat([prompt, ids[row]]).numpy().astype(np.int64),
                completion_mask=np.concatenate([nothing, mask.numpy()]).astype(np.int64),
                old_log_probs=np.concatenate([nothing, logps[row].float().numpy()]).astype(np.float32),
                advantage=float(group.tensors[ADVANTAGES][row]) * weight,
                model_version=0,
                group_id=-1,
                metrics={},
            )
        )
    return samples


def _flat(parts: Sequence[NDArray[Any]], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(part) for part in parts])).to(dtype)
