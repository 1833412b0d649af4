"""Corrections: what the loss takes as old log-probs and weights of replayed rows. Each runs inside the loss.

With r = π/μ the ratio of the trained to the generating policy, a correction chooses the old log-probs, and so what the
loss's own ratio and clipping see, and detached weights, which multiply the policy term. Folding a weight into the
advantage is exact for every loss type at row level, and for token weights with token-level importance sampling and
with cispo. A weight can move no advantage of 0 and none past it, so what a correction adds to a row's advantages is a
term of its own, the shift, which is exact for every loss too: `asymre` and `oapl` in trl-replay-papers.

TRL's bias-corrected KL (`use_bias_correction_kl`) multiplies the KL term by the loss's own ratio. Corrections that set
the old log-probs to the new ones (`none`, `truncated`, `topr`, `imitation`) leave it as for a fresh row; `ratio`,
`per` and all masks multiply it by r. A weight of exactly 0 takes the KL term and the entropy gradient of its row or
token away too.

A mask is `ratio` with weights of 0 and 1. Limits of r belong to what is kept; they are compared as logarithms, which
don't overflow. Those of plugins may be made of the same parts, from `geometric_mask` on: trl-replay-papers has twelve.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..base.validation import choice, number, require, share
from ..data.types import LOG_RATIO_LIMIT, Context, Corrected, ReplayedRows
from ..protocols import Correction

if TYPE_CHECKING:
    import torch

SMALLEST_GAIN = 1e-4
"""Smallest advantage that a weight undoes: below it, a weight would not fit into every type."""
LARGEST_WEIGHT = 1e6
"""Largest argument of a correction; larger numbers do not fit into every type that weights are computed in."""


class TokenWeights:
    """A correction with a weight for each token: only where the loss's ratio is each token's own."""

    token_weights = True

    def __init__(self, correct: Correction) -> None:
        self._correct = correct

    def __call__(self, rows: ReplayedRows, context: Context) -> Corrected:
        """The wrapped correction."""
        return self._correct(rows, context)


def ratio(rows: ReplayedRows, context: Context) -> Corrected:
    """The importance ratio to the policy that generated the tokens, clipped by the trainer's own loss (PPO).

    PPO does not clip the ratio of a negative advantage from above. With this and every other correction it is at most
    20: see `trl_replay.loss.supply`.
    """
    return Corrected(old_logps=rows.behavior_logps)


def none(rows: ReplayedRows, context: Context) -> Corrected:
    """No correction: replayed rows are trained on as if the current policy had generated them. For comparison only."""
    return Corrected(old_logps=rows.logps)


class SamplingWeights:
    """`ratio`, and weights that undo uneven drawing: (P / least P)^-β, P an entry's chance to be drawn (PER, arXiv
    1511.05952).

    The least likely entries have weight 1, the others less. β grows in a straight line from `beta` to `final_beta`
    over the first `updates` updates.

    Args:
        beta (`float`): Exponent at first, from 0 to 1.
        final_beta (`float`): Exponent at last; 1 undoes the drawing's preferences altogether.
        updates (`int`): Updates until then.
    """

    needs_priorities = True

    def __init__(self, beta: float = 0.4, final_beta: float = 1.0, updates: int = 1000) -> None:
        require("per: beta", beta, share)
        require("per: final_beta", final_beta, share)
        require_above("per", "updates", updates, above=0)
        self.beta = beta
        self.final_beta = final_beta
        self.updates = updates

    def __call__(self, rows: ReplayedRows, context: Context) -> Corrected:
        """Weights of the rows' groups."""
        done = min(context.update / self.updates, 1.0)
        way = self.final_beta - self.beta
        beta = self.beta + way * done
        if rows.priorities is None:
            return Corrected(rows.behavior_logps)
        return Corrected(rows.behavior_logps, rows.priorities**-beta)


def make_truncated(cap: float = 2.0, level: str = "token") -> Correction:
    """Truncated importance sampling: weight min(r, cap) on an otherwise on-policy loss (TIS; IMPALA, arXiv
    1802.01561).

    Args:
        cap (`float`): Largest weight, above 0.
        level (`str`): `"token"`: each token's r. `"sequence"`: the product over the row's trained tokens, one weight
            a row.
    """
    require_above("truncated", "cap", cap, above=0.0)
    require("truncated: level", level, choice("token", "sequence"))

    def truncated(rows: ReplayedRows, context: Context) -> Corrected:
        logs = log_ratio(rows) if level == "token" else sequence_log_ratio(rows)
        return Corrected(rows.logps, ratios(logs).clamp(max=cap))

    return TokenWeights(truncated) if level == "token" else truncated


def make_sequence_mask(low: float = 0.5, high: float = 2.0) -> Correction:
    """`ratio`, but a row whose geometric mean of r over its trained tokens leaves [low, high] is taken out.

    Masked importance sampling at sequence level, with GSPO's length-normalized ratio (arXiv 2507.18071).
    """
    return geometric_mask("sequence_mask", low, high)


def make_topr(cap: float = 1.0, level: str = "sequence") -> Correction:
    """Tapered off-policy REINFORCE: weight 1 for A > 0, min(r, cap) for A < 0 (TOPR, arXiv 2503.14286).

    Args:
        cap (`float`): Largest weight of a negative advantage, above 0.
        level (`str`): `"sequence"`: r is the product over the row's trained tokens, as in the paper; it goes to 0 as
            answers get longer. `"token"`: each token's own r.
    """
    require_above("topr", "cap", cap, above=0.0)
    require("topr: level", level, choice("token", "sequence"))

    def topr(rows: ReplayedRows, context: Context) -> Corrected:
        logs = log_ratio(rows) if level == "token" else sequence_log_ratio(rows).unsqueeze(1)
        negative = rows.advantages.view(len(logs), -1) < 0
        weights = ratios(logs).clamp(max=cap).where(negative, 1.0)
        return Corrected(rows.logps, weights.squeeze(1))

    return TokenWeights(topr) if level == "token" else topr


def make_imitation(c: float = 0.3) -> Correction:
    """Log-likelihood of stored rows with a positive advantage, at a fixed coefficient.

    No ratio, no clip, no advantage.

    The weight c / A on the on-policy loss leaves c × the row's log-likelihood; other stored rows train nothing. Next
    to fresh rows with Dr. GRPO's or MaxRL's advantages this is the update of Re:Dr and Re:Max.

    Args:
        c (`float`): The coefficient, above 0.
    """
    require_above("imitation", "c", c, above=0.0)

    def imitation(rows: ReplayedRows, context: Context) -> Corrected:
        gains = rows.advantages.clamp(min=SMALLEST_GAIN)
        weights = (c / gains).where(rows.advantages > 0, gains.new_zeros(()))
        return Corrected(rows.logps, weights)

    return imitation


def geometric_mask(name: str, low: float, high: float) -> Correction:
    """Masks the rows whose geometric mean of r leaves [low, high]; `name` is the correction's."""
    require_range(name, low, high)

    def mask(rows: ReplayedRows, context: Context) -> Corrected:
        return masked(rows, within(mean_log_ratio(rows), low, high))

    return mask


def masked(rows: ReplayedRows, keep: torch.Tensor) -> Corrected:
    """`ratio`, with weight 1 for the rows, `(R,)`, or tokens, `(R, C)`, that `keep` (bool) names, and 0 for others."""
    return Corrected(rows.behavior_logps, keep.to(rows.logps.dtype))


def within(log_ratios: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return a mask of the ratios in [low, high], from their logarithms; a NaN is not."""
    return (log_ratios >= math.log(low)) & (log_ratios <= math.log(high))


def log_ratio(rows: ReplayedRows) -> torch.Tensor:
    """`(R, C)`: log r of each token; 0 where the loss does not train."""
    return rows.logps - rows.behavior_logps


def sequence_log_ratio(rows: ReplayedRows) -> torch.Tensor:
    """`(R,)`: the sum of log r over the row's trained tokens."""
    logs = log_ratio(rows) * rows.mask
    return logs.sum(dim=1)


def mean_log_ratio(rows: ReplayedRows) -> torch.Tensor:
    """`(R,)`: the logarithm of the geometric mean of r over the row's trained tokens; 0 without any."""
    return row_means(log_ratio(rows), rows.mask)


def row_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`(R,)`: the mean of values, `(R, C)`, over each row's trained tokens; 0 without any."""
    total = values.masked_fill(~mask, 0.0).sum(dim=1)
    return total / mask.sum(dim=1).clamp(min=1)


def ratios(log_ratios: torch.Tensor) -> torch.Tensor:
    """Ratios from their logarithms, finite ones."""
    bounded = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return bounded.exp()


def require_above(correction: str, name: str, value: Any, above: float) -> None:
    """Refuse an argument that is no number above this."""
    words = f"a number above {above:g}, and at most {LARGEST_WEIGHT:g}"
    require(f"{correction}: {name}", value, number(words, above=above, most=LARGEST_WEIGHT))


def require_range(correction: str, low: Any, high: Any) -> None:
    """Refuse limits of which `low` is not above 0, or `high` not above `low`."""
    require_above(correction, "low", low, above=0.0)
    require_above(correction, "high", high, above=low)
