"""The handshake with the trainer's loss: nothing is replayed before the loss was seen to go through the seam."""

from __future__ import annotations

from ..compat import HIGH_ENTROPY, LOGPS, LOSS, OLD_LOGPS, REF_LOGPS
from ..data.fields import ADVANTAGES
from ..errors import SeamError
from .micro_batch import MicroBatch

REMEDY = " Call the trainer's own loss with super() in an override, or train without replay: use_replay=False."


class Handshake:
    """Watches one trainer's losses.

    Attributes:
        verified (`bool`): Whether a loss has called the tap and then read the old log-probs.
        awaited (`bool`): Whether candidates were collected, and no loss has done so since.
    """

    def __init__(self) -> None:
        self.verified = False
        self.awaited = False

    def check(self, micro: MicroBatch) -> None:
        """Look at what a loss has done with its micro-batch.

        Raises:
            SeamError: It did not call the log-prob method with gradients, or did not use after it the old log-probs
                and what else the tap writes, or did not choose tokens for the entropy bonus.
        """
        if not micro.tapped:
            raise SeamError(
                f"{LOSS} never called {LOGPS} with gradients: replayed rows would train with a ratio of 1." + REMEDY
            )
        used = micro.uses.keys
        if OLD_LOGPS not in used:
            raise SeamError(
                f"{LOSS} did not use {OLD_LOGPS!r} after {LOGPS}: replayed rows would train with a ratio of 1."
                + REMEDY
            )
        lost = [key for key in (ADVANTAGES, REF_LOGPS) if key in micro and key not in used]
        if lost:
            raise SeamError(
                f"{LOSS} did not use the {lost[0]!r} that it was given after {LOGPS}, where replay changes those of "
                f"replayed rows. Put other values into the batch itself before you call super(), as in "
                f"inputs[{lost[0]!r}] = …, not into a copy of it, or train without replay: use_replay=False."
            )
        if micro.entropies is not None and micro.high_entropy is None:
            raise SeamError(
                f"{LOSS} never called {HIGH_ENTROPY} after {LOGPS}: the entropy bonus would go by other rows than the "
                "loss." + REMEDY
            )
        self.verified = True
        self.awaited = False

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
