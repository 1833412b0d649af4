"""The handshake with the trainer's loss: nothing is replayed before the loss was seen to go through the seam."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..compat import HIGH_ENTROPY, LOGPS, LOSS, OLD_LOGPS, REF_LOGPS
from ..data.fields import ADVANTAGES
from ..errors import SeamError
from .micro_batch import MicroBatch

REMEDY = " Call the trainer's own loss with super() in an override, or train without replay: use_replay=False."


class Handshake:
    """Watches one trainer's losses.

    Attributes:
        verified (`bool`): Whether a loss has been served what replay changes for it.
        awaited (`bool`): Whether candidates were collected, and no loss has done so since.
    """

    def __init__(self) -> None:
        self.verified = False
        self.awaited = False

    def check(self, served: Sequence[MicroBatch], could_train: bool) -> None:
        """Look at what the tap has served in a loss.

        Args:
            served (`Sequence[MicroBatch]`): The calls of the inner loss that asked for log-probs.
            could_train (`bool`): Whether any of its rows has an advantage: without, a loss may skip the micro-batch.

        Raises:
            SeamError: It served nothing, or the loss did not choose tokens for the entropy bonus.
        """
        if not served and could_train:
            raise SeamError(
                f"{LOSS} never called {LOGPS} with gradients on its batch: replayed rows would train with a ratio of "
                f"1. Call the loss with super().{LOSS}(model, inputs), not by its class's name; in a loss of your "
                f"own, call self.{LOGPS} in {LOSS} itself, with its model and its prompts and completions; or train "
                "without replay: use_replay=False."
            )
        if any(micro.entropies is not None and micro.high_entropy is None for micro in served):
            raise SeamError(
                f"{LOSS} never called {HIGH_ENTROPY} after {LOGPS}: the entropy bonus would go by other rows than the "
                "loss." + REMEDY
            )
        self.verified = self.verified or bool(served)
        self.awaited = False

    @staticmethod
    def check_own(micro: MicroBatch, read: Collection[str], loss: torch.Tensor) -> None:
        """Look at how a loss that is not TRL's has used what the tap writes.

        Args:
            micro ([`MicroBatch`]): What it was given.
            read (`Collection[str]`): Keys that it has read since the tap has written.
            loss (`()`): What it returned.

        Raises:
            SeamError: It did not read it after the log-probs, or its advantages have no part in its gradient.
        """
        keys = (OLD_LOGPS, ADVANTAGES, *([] if micro.peek(REF_LOGPS) is None else [REF_LOGPS]))
        lost = [key for key in keys if key not in read]
        if micro.probe is not None and ADVANTAGES not in lost:
            (gradient,) = torch.autograd.grad(loss, micro.probe, retain_graph=True, allow_unused=True)
            lost += [ADVANTAGES] if gradient is None else []
        if lost:
            raise SeamError(
                f"{LOSS} did not use {lost[0]!r} after {LOGPS}: replayed rows would train without their correction. "
                f"Read it after that call, from the batch that {LOSS} was given, not from an earlier copy, or train "
                "without replay: use_replay=False."
            )

    def has_run(self, update: int, collected_at: int | None) -> bool:
        """Tell whether replayed rows would be corrected.

        Args:
            update (`int`): Updates done.
            collected_at (`int`, *optional*): Those done when candidates were last collected.

        Raises:
            SeamError: The model was updated since, and no loss went through the seam.
        """
        if self.awaited and collected_at is not None and update > collected_at:
            raise SeamError(
                f"The model was updated, but {LOSS} and {LOGPS} were not seen to run: the loss of this trainer goes "
                "around the seam, so that replayed rows could not be corrected." + REMEDY
            )
        return self.verified
