"""Unsloth's layout of a batch, as a session asks for it: packed left in the loss, TRL's between scoring and the
loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from trl_replay import compat
from trl_replay.compat import LOAD, LOSS, PREPARE, REWARDS, SAVE, SCORE, SEAM, Dialect
from trl_replay.data.types import Batch

from . import contract, loss
from .contract import left_packed
from .layout_probe import check_layout


class UnslothDialect(Dialect):
    """Unsloth's."""

    runs_model = True
    around: Mapping[str, Callable[..., Any]] = {contract.UNSLOTH_LOSS: loss.around}

    def problems(self, trainer: Any) -> list[str]:
        """What is not as in the releases that were tested."""
        of_loss = compat.contract_problems(type(trainer), {contract.UNSLOTH_LOSS: SEAM[LOSS]})
        return of_loss + contract.unsloth_problems(type(trainer))

    def untested(self, trainer: Any) -> Iterator[str]:
        """What replay was not tested with in Unsloth's trainer."""
        args = trainer.args
        tokenizer = compat.tokenizer(trainer)
        known = getattr(trainer.train_dataset, "column_names", None) or []
        untested = {
            "use_vllm=True": trainer.use_vllm,
            f"{trainer.accelerator.num_processes} processes": trainer.accelerator.num_processes > 1,
            "DeepSpeed": trainer.is_deepspeed_enabled,
            "FSDP": trainer.is_fsdp_enabled,
            "a processor, or images": trainer.processing_class is not tokenizer or {"image", "images"} & set(known),
            "a rollout function, tools or environments": trainer.rollout_func is not None
            or bool(trainer.tools)
            or compat.has_environments(trainer),
            f"entropy_coef={getattr(args, 'entropy_coef', 0)}": bool(getattr(args, "entropy_coef", 0)),
            "use_adaptive_entropy=True": bool(getattr(args, "use_adaptive_entropy", False)),
            f"top_entropy_quantile={args.top_entropy_quantile}": args.top_entropy_quantile < 1.0,
            **{f"the environment variable {name}": name in os.environ for name in contract.UNSLOTH_SWITCHES},
        }
        for name, given in untested.items():
            if given:
                yield f"replay was not tested with Unsloth's trainer and {name}: leave it out, or use_replay=False"

    def check(self, trainer: Any) -> None:
        """Try the loss on a made-up micro-batch."""
        check_layout(trainer)

    def seam(self, trainer: Any, iterates: bool) -> list[str]:
        """Its own loss in the place of TRL's."""
        return [SCORE, REWARDS, contract.UNSLOTH_LOSS, SAVE, LOAD, *([PREPARE] if iterates else [])]

    def incoming(self, trainer: Any, batch: Batch) -> Batch:
        """Log-probs are unpacked."""
        return loss.as_trl(trainer, batch)

    def outgoing(self, trainer: Any, batch: Batch) -> Batch:
        """Its own key is added."""
        return loss.as_unsloth(trainer, batch)

    def in_loss(self, trainer: Any, micro: Batch) -> Batch:
        """Log-probs are packed."""
        return loss.packed(trainer, micro)

    def forward_logps(self, trainer: Any, batch: Batch) -> torch.Tensor | None:
        """Unpacked, and a copy: its values are of inference mode, and a loss could not save them for its gradient."""
        logps = super().forward_logps(trainer, batch)
        return None if logps is None else left_packed(trainer, batch).unpack(logps.clone())


def make_dialect(trainer: Any) -> UnslothDialect | None:
    """Return the layout of Unsloth's trainer; None for others."""
    return UnslothDialect() if contract.is_unsloth(trainer) else None
