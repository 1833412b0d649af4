"""Tells the states of a model apart."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from .transfer import fetch

SAMPLED = 8
"""Values of each parameter that count, spread over it: thousands in all. A change that leaves all of them alone, as of
a few values of one matrix, hardly moves a log-prob."""


def fingerprint(parameters: Iterable[Any]) -> str:
    """A hash of a sample of this process's values, whoever changed them; empty if there are no parameters.

    Neither identities nor torch's counts of changes would do: `parameter.data` goes around these, and engines that
    shard parameters give them other memory at every forward.
    """
    import torch

    samples: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        values = _local(parameter).detach().reshape(-1)
        samples[values.device, values.dtype].append(values[:: max(len(values) // SAMPLED, 1)])
    if not samples:
        return ""
    found = fetch({kind: torch.cat(values) for kind, values in samples.items()})
    hashed = hashlib.blake2b(digest_size=16)
    for values in found.values():
        hashed.update(values.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def changes_in_place(parameters: Iterable[Any]) -> int:
    """How often torch has seen parameters being changed in place, of those that no engine shards: it sees one row of a
    matrix, which a sample may leave out."""
    import torch

    return sum(one._version for one in parameters if type(one) is torch.nn.Parameter and not hasattr(one, "ds_id"))


def _local(parameter: Any) -> Any:
    """What this process has of a parameter: of one that FSDP 2 or DeepSpeed's ZeRO 3 shards, its part."""
    sharded = getattr(parameter, "ds_tensor", None)
    if sharded is not None:
        return sharded
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
