"""Everything that trl_replay relies on in Unsloth's trainer: the tested releases, the names that are used, and where
the tokens of its batches lie."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from trl_replay import compat
from trl_replay.compat import UNTESTED_VARIABLE

UNSLOTH = "UnslothGRPOTrainer"
"""The class that Unsloth generates from TRL's source and puts in its place; it is no subclass."""
UNSLOTH_TESTED = {"unsloth": SpecifierSet("==2026.10.9"), "unsloth_zoo": SpecifierSet("==2026.10.9")}
UNSLOTH_TESTED_TRL = SpecifierSet(">=1.14.2,<1.16")
UNSLOTH_LOSS = "compute_loss"  # is its loss: LOSS is never called, and LOGPS returns nothing there
UNSLOTH_APPLIED = "UnslothEfficientGRPO"  # its apply gets the policy's log-probs, and all that stands next to them
UNSLOTH_FORWARD = "grpo_accumulated_loss"  # looks UNSLOTH_APPLIED up in its module, and calls it
UNSLOTH_PARAMETERS = (
    "_new_logps", "_old_logps", "_ref_logps", "_sampling_per_token_logps", "lm_head", "_input_ids", "_mask",
    "_advantages",
)  # fmt: skip
"""First parameters of UNSLOTH_APPLIED."""
UNSLOTH_LEFT_PAD = "max_left_pad"
"""Batch key of Unsloth's, `(B, 1)`: the most padding of a prompt."""
UNSLOTH_SWITCHES = ("UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE", "UNSLOTH_GRPO_LOSS_AGGREGATION",
                    "UNSLOTH_GRPO_ROLLOUT_LOGPROBS_AS_OLD", "UNSLOTH_GRPO_ROLLOUT_RS",
                    "UNSLOTH_GRPO_TRUNCATED_SUPPORT")  # fmt: skip
"""Environment variables with which Unsloth's loss is another one."""


def is_unsloth(trainer: Any) -> bool:
    """Return whether Unsloth has generated this trainer's class, or one that it is a subclass of."""
    return any(base.__name__ in (UNSLOTH, f"_{UNSLOTH}") for base in type(trainer).__mro__)


def unsloth_names(trainer_class: type) -> dict[str, Any]:
    """The global names of the module that Unsloth generated: its loss looks up there what it calls."""
    generated = next(base for base in trainer_class.__mro__ if base.__name__ in (UNSLOTH, f"_{UNSLOTH}"))
    names: dict[str, Any] = inspect.unwrap(getattr(generated, UNSLOTH_LOSS)).__globals__
    return names


def unsloth_problems(trainer_class: type) -> list[str]:
    """Return why replay has not been tested with a class that Unsloth generated."""
    problems = []
    for name, tested in {**UNSLOTH_TESTED, "trl": UNSLOTH_TESTED_TRL}.items():
        installed = _release_of(name)
        if not tested.contains(installed, prereleases=True) and os.environ.get(UNTESTED_VARIABLE) != "1":
            problems.append(f"replay was tested with {name} {tested} and Unsloth's trainer, not with {installed}")
    names = unsloth_names(trainer_class)
    forward = getattr(names.get(UNSLOTH_FORWARD), "__globals__", None)
    if forward is not names or UNSLOTH_APPLIED not in names:
        problems.append(f"Unsloth's loss does not call {UNSLOTH_FORWARD} and {UNSLOTH_APPLIED} of its own module")
        return problems
    parameters = tuple(inspect.signature(names[UNSLOTH_APPLIED].forward).parameters)[1:]
    if parameters[: len(UNSLOTH_PARAMETERS)] != UNSLOTH_PARAMETERS:
        problems.append(f"{UNSLOTH_APPLIED} takes {parameters}, not {UNSLOTH_PARAMETERS} first")
    return problems


def _release_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "0"


class LeftPacked:
    """Where the tokens of a micro-batch lie once every row is moved left over its padding.

    Of the packed columns, `(b, C + M)`, those of a row's completion begin M less the row's padding from the left; M is
    the most padding of a row. Pad tokens within a completion are left out, and what follows them moves up.

    Args:
        prompts, completions (`(b, P)` and `(b, C)` int64): Token ids.
        pad (`int`): The pad token's id.

    Attributes:
        real (`(b, C)` bool): Which completion tokens are not the pad token.
        most (`int`): M.
    """

    def __init__(self, prompts: torch.Tensor, completions: torch.Tensor, pad: int) -> None:
        self.real = completions != pad
        padding = (prompts == pad).sum(dim=1, keepdim=True)
        self.most = int(padding.max())
        self._from_end = self.real.cumsum(dim=1) - 1 - completions.size(1) - padding

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """`(b, C)` from packed columns; 0 for pad tokens."""
        columns = (values.size(1) + self._from_end).clamp(min=0)
        return torch.where(self.real, values.gather(1, columns), 0)

    def pack(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """`(b, width)` packed columns from `(b, C)`; 0 elsewhere."""
        rows, places = self.real.nonzero(as_tuple=True)
        packed = values.new_zeros(len(values), width)
        packed[rows, width + self._from_end[rows, places]] = values[rows, places]
        return packed


def left_packed(trainer: Any, batch: Mapping[str, Any]) -> LeftPacked:
    """Return where Unsloth has the log-probs of this batch's completions."""
    return LeftPacked(batch["prompt_ids"], batch["completion_ids"], compat.tokenizer(trainer).pad_token_id)
