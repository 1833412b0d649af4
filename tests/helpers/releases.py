"""Differences of earlier releases of TRL that a test has to know."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from packaging.version import Version

TRL = Version(version("trl"))
COUNTS_TRUNCATED = Version("1.9.0") > TRL
"""`num_items_in_batch` counts the tokens of completions that `mask_truncated_completions` takes out."""
SCALES_BY_BATCH = Version("1.9.1") > TRL
"""The losses that divide by `num_items_in_batch` do not rescale it to one accumulation window."""
SCORES_EVERY_TOKEN = Version("1.11.0") > TRL
"""A log-prob that vLLM could not give is an error."""


CLIPPED_RATIOS = (
    {"vllm_importance_sampling_clip_max": 1.2, "vllm_importance_sampling_clip_min": 0.7}
    if Version("1.6.0") <= TRL
    else {"vllm_importance_sampling_cap": 1.2}
)
"""Settings that clip vLLM's importance ratio."""
SAMPLES_IMAGE_TOKENS = Version("1.16.0") > TRL
"""A completion may hold the image token, after which no model takes its batch."""


INTERPRETED = Version("1.15") <= TRL < Version("1.16") and not torch.cuda.is_available()
"""The loss is a Triton kernel without another path, which on a CPU Triton has to interpret."""


def since(release: str, what: str) -> pytest.MarkDecorator:
    """Skips a test of something that TRL has since `release`."""
    return pytest.mark.skipif(Version(release) > TRL, reason=f"TRL {release} brought {what}")


def shipping(package: str) -> pytest.MarkDecorator:
    """Skips a test of a package of `trl.experimental` that this release does not ship."""
    return pytest.mark.skipif(
        find_spec(f"trl.experimental.{package}") is None,
        reason=f"this release does not ship trl.experimental.{package}; `make compat` trains with those that do",
    )
