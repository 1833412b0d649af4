"""The loss of any log-probs of replayed tokens, and the bounds on it and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.extra.numpy as hn
import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import Phase, given
from hypothesis import settings as hypothesis_settings
from support import DEAD, HALF, LIVE, Rewards, Spy

import trl_replay
from trl_replay.loss.tap import ROWS
from trl_replay.registry import registry
from trl_replay.testing import make_trainer


class Scripted(Spy):
    """The stock trainer, whose loss is given log-probs instead of the model's."""

    given: Any = None
    others: tuple[Any, ...] = ()

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if self.given is None:
            result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            self.others = (torch.zeros(()), *result[2:])
            return result
        return self.given, torch.zeros_like(self.given), *self.others[1:]


class LateBinding:
    """The correction that a test names last."""

    def __init__(self, names: Sequence[str]) -> None:
        self.name = "ratio"
        self.made = {name: registry().resolve("correction", name).make() for name in ("ratio", *names)}

    def __call__(self, rows, context):
        return self.made[self.name](rows, context)


class Loss:
    """The stock loss of one real micro-batch with replayed and fresh rows, for any log-probs."""

    def __init__(self, folder: Any, corrections: Sequence[str] = (), **settings: Any) -> None:
        script = Rewards([LIVE, HALF, [1, 1, 1, 0.0]], [DEAD, LIVE, DEAD])
        self.trainer = make_trainer(
            folder, script, trainer_class=Scripted, max_steps=2, beta=0.04, max_completion_length=3, **settings
        )
        self.correction = LateBinding(corrections)
        self.session = trl_replay.attach(self.trainer, replay_correction=self.correction, replay_sampler="newest")
        self.trainer.train()
        (self.micro,) = self.trainer._buffered_inputs
        self.replayed = self.micro[ROWS][:, 0] < 0
        assert int(self.replayed.sum()) == 8
        self.mask = self.micro["completion_mask"].bool()
        self.largest = float(self.micro["advantages"].abs().max())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mask.shape)

    def __call__(self, new: Any, behavior: Any, reference: Any) -> tuple[float, torch.Tensor]:
        """Loss and gradient, times the number of rows; fresh rows lie on the reference."""
        logps = torch.from_numpy(new).clone().requires_grad_()
        reference = torch.where(self.replayed.unsqueeze(1), torch.from_numpy(reference), logps.detach())
        for number, row in zip(self.micro[ROWS][:, 0].tolist(), range(len(new)), strict=True):
            if number < 0:
                placed = self.session.step.supply.placed
                place = -1 - number - placed.first
                length = placed.lengths[place]
                placed.tensors["logps"][place, :length] = torch.from_numpy(behavior[row, :length])
                placed.proximal[place] = None
        self.trainer.given = logps
        self.trainer.model.train()
        loss = self.trainer._compute_loss(self.trainer.model, {**self.micro, "ref_per_token_logps": reference.float()})
        loss.backward()
        return float(loss.detach()) * len(new), logps.grad * len(new)


LOG_PROBS = st.one_of(
    st.sampled_from([0.0, -1.0, -3.5, -19.0, -21.0, -60.0, -88.0, -100.0, -1e3, -1e4]),
    st.floats(-1e4, 0.0, width=32),
    st.floats(-30.0, 0.0, width=32),
)


def check_bounds(folder: Any, corrections: Sequence[str], loss: str, level: str, bias_correction: bool) -> None:
    """Tries many log-probs: a replayed token's gradient is at most 20 times its advantage, and 440 times beta."""
    settings = {"loss_type": loss, "importance_sampling_level": level, "use_bias_correction_kl": bias_correction}
    measured = Loss(folder, corrections, **settings)
    arrays = hn.arrays(np.float32, measured.shape, elements=LOG_PROBS)

    @hypothesis_settings(max_examples=60, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(new=arrays, behavior=arrays, reference=arrays, correction=st.sampled_from(corrections))
    def check(new: Any, behavior: Any, reference: Any, correction: str) -> None:
        measured.correction.name = correction
        value, gradient = measured(new, behavior, reference)
        assert np.isfinite(value)
        assert bool(gradient.isfinite().all())
        assert float(gradient.abs().max()) <= 1.01 * (20 * measured.largest + 0.04 * 440)
        sums = measured.shape[1] if loss == "luspo" else 1
        by_log_prob = 1.3 * 1e4 * measured.largest if loss in ("cispo", "vespo") else 0.0
        assert abs(value) <= len(new) * (sums * (20 * measured.largest + 0.04 * 440) + by_log_prob)

    check()
