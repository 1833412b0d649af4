"""Bounds on replayed tokens, by hand: what moves, what is dropped, and what stays to the last bit."""

import math

import pytest
import torch

from trl_replay.compat import LossForm
from trl_replay.data.types import Corrected, ReplayedRows
from trl_replay.loss.supply import RATIO_LIMIT, REACH, Bounds, Noise

LIMIT = math.log(RATIO_LIMIT)


def rows(logps, mask=None):
    new = torch.tensor(logps)
    trained = torch.ones_like(new, dtype=torch.bool) if mask is None else torch.tensor(mask)
    count = len(logps)
    return ReplayedRows(new, new, new, trained, torch.ones(count), torch.ones(count, dtype=torch.int64))


def bounded(bounds, logps, old, **others):
    result = bounds(rows(logps, **others), Corrected(torch.tensor(old)))
    return result.old_logps.tolist()


NARROW = LossForm(sequence_level=True, clip_low=1 - 3e-4, clip_high=1 + 4e-4)


@pytest.mark.parametrize("form", [NARROW, LossForm(sequence_level=True, clip_low=0.8, clip_high=1.2), LossForm()])
def test_a_rows_ratio_is_1_within_the_noise_and_untouched_beyond_it_where_the_clip_range_is_narrower(form):
    """Noise of 1e-3 reaches a mean of 0.005 over four tokens."""
    noise = Noise(token_mean=1e-3, token_max=1e-2, tokens=4)
    edge = REACH * 1e-3 / 2
    new = [[-1.0, -2.0, -3.0, -4.0]] * 3
    old = [[value - shift for value in new[0]] for shift in (0.9 * edge, -0.9 * edge, 1.1 * edge)]
    old[0][0], old[0][1] = old[0][0] - 0.5, old[0][1] + 0.5  # tokens far off, whose mean is within
    seen = bounded(Bounds(form, noise=noise), new, old)
    expected = [new[0], new[1], old[2]] if form is NARROW else old
    assert torch.equal(torch.tensor(seen), torch.tensor(expected))
