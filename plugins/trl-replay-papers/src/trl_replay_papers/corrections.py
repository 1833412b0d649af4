"""Corrections of papers and of other libraries, by their plain names: what the loss takes as old log-probs and weights
of replayed rows.

The module is the plugin `papers`. A mask is `ratio` with weights of 0 and 1. Limits of r belong to what is kept; they
are compared as logarithms, which don't overflow. `m2po`, `icepop` and `suffix_veto` mask tokens; the others
(`geo_mask`, `k3_mask`, `outlier_mask`, `veto_negative`) mask rows, and look at no token that the loss does not train.
Where the loss forms a ratio of the whole row, as `vespo` and `cispo` at sequence level do, a masked token's ratio
still counts in it.
"""

from __future__ import annotations

from collections.abc import Iterator

from trl_replay import Context, Corrected, CorrectionSpec, ReplayedRows, hookimpl
from trl_replay.protocols import Correction
from trl_replay.strategies.corrections import (
    TokenWeights,
    geometric_mask,
    log_ratio,
    masked,
    mean_log_ratio,
    ratios,
    require_above,
    require_range,
    row_means,
    within,
)


def make_geo_mask(low: float = 0.99, high: float = 1.01) -> Correction:
    """`sequence_mask` with the narrow range that SkyRL recommends against the gap between trainer and sampler.

    A row's weight is 1 if low ≤ exp(mean of log r over its trained tokens) ≤ high, else 0 (`sequence_mask_metric:
    geometric` in SkyRL; Geo-RS in verl, with 0.999 and 1.001).

    Args:
        low (`float`): Least geometric mean, above 0.
        high (`float`): Largest, above `low`.
    """
    return geometric_mask("geo_mask", low, high)


def make_k3_mask(threshold: float = 0.01) -> Correction:
    """`ratio`, but a row whose estimated KL divergence exceeds `threshold` is taken out.

    A row's weight is 1 if the mean of r − 1 − log r over its trained tokens is ≤ threshold, else 0. That is the
    estimator k3 (Schulman, "Approximating KL Divergence") of KL(μ ‖ π), from the policy that generated the tokens to
    the one that is trained, in nats a token. Every term is ≥ 0, so that unlike in a geometric mean tokens that got
    likelier don't make up for others that got less likely (K3-RS in verl, `seq_mean_k3`, where the threshold of its
    presets is 0.01).

    Args:
        threshold (`float`): Largest estimate, above 0.
    """
    require_above("k3_mask", "threshold", threshold, above=0.0)

    def k3_mask(rows: ReplayedRows, context: Context) -> Corrected:
        logs = log_ratio(rows)
        k3 = logs.expm1() - logs
        return masked(rows, row_means(k3, rows.mask) <= threshold)

    return k3_mask


def make_icepop(low: float = 0.5, high: float = 2.0) -> Correction:
    """`ratio`, but tokens whose r leaves [low, high] are taken out.

    A token's weight is 1 if low ≤ r ≤ high, else 0; with the r of the loss, which clips it within the range, that is
    IcePop's M(r) A (Ring-1T, arXiv 2510.18855). The range is the one that SkyRL suggests to start from. IcePop's
    authors, whose ratio is that of trainer to sampler alone, and verl take 0.5 and 5.

    Args:
        low (`float`): Least r, above 0.
        high (`float`): Largest, above `low`.
    """
    require_range("icepop", low, high)

    def icepop(rows: ReplayedRows, context: Context) -> Corrected:
        near = within(log_ratio(rows), low, high)
        return masked(rows, near & rows.mask)

    return TokenWeights(icepop)


def make_outlier_mask(low: float = 1e-4, high: float = 100.0) -> Correction:
    """`ratio`, but a row with any trained token whose r leaves [low, high] is taken out.

    A row's weight is 1 if low ≤ min r and max r ≤ high over its trained tokens, else 0 (SkyRL's
    `outlier_token_is_threshold_low` and `…_high`, with the values suggested there).

    Args:
        low (`float`): Least r, above 0.
        high (`float`): Largest, above `low`.
    """
    require_range("outlier_mask", low, high)

    def outlier_mask(rows: ReplayedRows, context: Context) -> Corrected:
        near = within(log_ratio(rows), low, high)
        outliers = ~near & rows.mask
        return masked(rows, ~outliers.any(dim=1))

    return outlier_mask


def make_veto_negative(low: float = 0.5, high: float = 2.0) -> Correction:
    """`sequence_mask` for rows with A < 0 alone; the others are all kept.

    A row's weight is 0 if A < 0 and exp(mean of log r over its trained tokens) leaves [low, high], else 1. The idea is
    DeepSeek-V3.2's (arXiv 2512.02556): what is far off the policy misleads where it is pushed away from. There a row
    with A < 0 is masked if the mean of −log r exceeds δ, which is `low` = exp(−δ) without a `high`; here both sides
    count, with the limits of `sequence_mask`.

    Args:
        low (`float`): Least geometric mean of r over a row's trained tokens, above 0.
        high (`float`): Largest, above `low`.
    """
    require_range("veto_negative", low, high)

    def veto_negative(rows: ReplayedRows, context: Context) -> Corrected:
        near = within(mean_log_ratio(rows), low, high).unsqueeze(1)
        keep = near | (rows.advantages.view(len(near), -1) >= 0)
        return masked(rows, keep.squeeze(1))

    return veto_negative


def make_suffix_veto(low: float = 0.1, high: float = 10.0) -> Correction:
    """`ratio`, but all with A < 0 that follows a row's first token whose r leaves [low, high] is taken out.

    The negative-advantage veto of μ-GRPO (arXiv 2605.17570): behind such a trigger, a failed completion pushes against
    a text that the trained policy would not have written. The token itself stays. What the paper takes for a trigger
    could not be verified; either side of the range is one here, and the limits are ours. Its relaxed clipping is the
    trainer's `epsilon` and `epsilon_high`.

    Args:
        low (`float`): Least r, above 0.
        high (`float`): Largest, above `low`.
    """
    require_range("suffix_veto", low, high)

    def suffix_veto(rows: ReplayedRows, context: Context) -> Corrected:
        near = within(log_ratio(rows), low, high)
        triggers = (~near & rows.mask).long()
        before = triggers.cumsum(dim=1) - triggers
        advantages = rows.advantages.view(len(near), -1)
        return masked(rows, before.eq(0) | (advantages >= 0))

    return TokenWeights(suffix_veto)


def make_gipo(sigma: float = 1.0) -> Correction:
    """Truncated importance sampling with a Gaussian in place of the clip (GIPO, arXiv 2603.03955).

    A token's weight is r exp(−(log r)² / 2σ²), on the on-policy loss: 1 at r = 1, at most exp(σ² / 2), and never 0.

    Args:
        sigma (`float`): Width of the Gaussian over log r, above 0. The value is ours.
    """
    require_above("gipo", "sigma", sigma, above=0.0)

    def gipo(rows: ReplayedRows, context: Context) -> Corrected:
        logs = log_ratio(rows)
        weights = ratios(logs - logs**2 / (2 * sigma**2))
        return Corrected(rows.logps, weights)

    return TokenWeights(gipo)


def make_pnpo() -> Correction:
    """`ratio`, with the geometric mean of r over the row's trained tokens up to each in the place of its own (PNPO,
    arXiv 2608.01418).

    The loss clips this mean, and its gradient goes through the token's own log-prob alone. Whether the paper's goes
    through those before it, too, could not be verified.
    """

    def pnpo(rows: ReplayedRows, context: Context) -> Corrected:
        logs = log_ratio(rows).masked_fill(~rows.mask, 0.0)
        means = logs.cumsum(dim=1) / rows.mask.cumsum(dim=1).clamp(min=1)
        return Corrected(rows.logps - means)

    return TokenWeights(pnpo)


def make_minpro() -> Correction:
    """`ratio`, with each token's r times the smallest r of the row's trained tokens before it (MinPRO, arXiv
    2601.22718).

    The loss clips this product, and its gradient goes through the token's own log-prob alone. What the paper clips
    could not be verified.
    """

    def minpro(rows: ReplayedRows, context: Context) -> Corrected:
        logs = log_ratio(rows).masked_fill(~rows.mask, float("inf"))
        smallest = logs.cummin(dim=1).values.roll(1, dims=1)
        smallest[:, 0] = float("inf")
        return Corrected(rows.behavior_logps - smallest.masked_fill(smallest.isinf(), 0.0))

    return TokenWeights(minpro)


def make_m2po(threshold: float = 0.04) -> Correction:
    """`ratio`, with tokens masked, largest (log r)² first, until its mean over the rest is ≤ threshold (arXiv
    2510.01161).

    The mean is over the replayed tokens of one micro-batch; fresh tokens, whose r is 1, are not counted.
    """
    require_above("m2po", "threshold", threshold, above=0.0)

    def m2po(rows: ReplayedRows, context: Context) -> Corrected:
        squares = log_ratio(rows) ** 2
        squares = squares.masked_fill(~rows.mask, 0.0)
        ordered, order = squares.flatten().sort()
        mask = rows.mask.flatten()[order]
        tokens = mask.cumsum(0).clamp(min=1)
        means = ordered.cumsum(0) / tokens  # of each token and all smaller ones
        keep = ordered.new_zeros(ordered.shape)
        keep[order] = (means <= threshold).to(keep.dtype)
        return Corrected(rows.behavior_logps, keep.view(squares.shape))

    return TokenWeights(m2po)


def make_decoupled(cap: float = 2.0) -> Correction:
    """Decoupled PPO: clip around a recent proximal policy π₀, and weight by min(π₀/μ, cap) (AReaL, arXiv 2505.24298).

    π₀ is the policy at the row's first training forward since it was drawn: with one update a generation batch, the
    trained policy itself.
    """
    require_above("decoupled", "cap", cap, above=0.0)

    def decoupled(rows: ReplayedRows, context: Context) -> Corrected:
        drift = ratios(rows.proximal_logps - rows.behavior_logps)
        return Corrected(rows.proximal_logps, drift.clamp(max=cap))

    return TokenWeights(decoupled)


def make_shaped(gamma: float = 0.1) -> Correction:
    """Ratio shaping f(r) = r / (r + γ) in the place of r: favors tokens that the policy finds unlikely.

    The gradient of f(r) is γ r / (r + γ)² times that of log π, which is the weight given here; nothing is clipped
    (LUFFY, arXiv 2504.14945; ExGRPO, arXiv 2510.02245, with γ = 0.1).
    """
    require_above("shaped", "gamma", gamma, above=0.0)

    def shaped(rows: ReplayedRows, context: Context) -> Corrected:
        r = ratios(log_ratio(rows))
        slope = gamma * r / (r + gamma) ** 2
        return Corrected(rows.logps, slope)

    return TokenWeights(shaped)


@hookimpl
def trl_replay_strategies() -> Iterator[CorrectionSpec]:
    """The corrections."""
    yield CorrectionSpec("geo_mask", make_geo_mask, "sequence_mask within one percent of the policy")
    yield CorrectionSpec("k3_mask", make_k3_mask, "ratio; rows of large estimated KL left out")
    yield CorrectionSpec("icepop", make_icepop, "ratio; tokens far off the policy left out")
    yield CorrectionSpec("outlier_mask", make_outlier_mask, "ratio; rows with any extreme token left out")
    yield CorrectionSpec("veto_negative", make_veto_negative, "sequence_mask for rows of negative advantage only")
    yield CorrectionSpec("suffix_veto", make_suffix_veto, "ratio; failed rows end where they leave the policy")
    yield CorrectionSpec("gipo", make_gipo, "on-policy loss weighted by r and a Gaussian of log r")
    yield CorrectionSpec("pnpo", make_pnpo, "ratio of the geometric mean up to each token")
    yield CorrectionSpec("minpro", make_minpro, "ratio times the smallest before it")
    yield CorrectionSpec("m2po", make_m2po, "ratio; tokens masked until its second moment is small")
    yield CorrectionSpec("decoupled", make_decoupled, "clips around a recent policy, weighted by its ratio")
    yield CorrectionSpec("shaped", make_shaped, "ratio shaped to r / (r + gamma)")
