"""Treatments of unfilled dead groups (`replay_unfilled`), and of KL terms (`replay_kl`).

Each is a function of the hook `trl_replay_plan`. They run after the plugins' ones, in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ..data.plan import Plan
from ..data.success import Success
from ..data.types import Context, Groups

Treatment: TypeAlias = Callable[[Plan, Groups, Context], None]


def mask(plan: Plan, groups: Groups, context: Context) -> None:
    """Take unfilled dead groups out of the gradient."""
    plan.silent |= (groups.dead & plan.unfilled)[:, None]


def exclude(plan: Plan, groups: Groups, context: Context) -> None:
    """Take unfilled dead groups out of the gradient and the loss's denominator."""
    plan.masked |= (groups.dead & plan.unfilled)[:, None]


def intra_batch(plan: Plan, groups: Groups, context: Context) -> None:
    """Copy live groups of the same process into unfilled dead slots: each one once before any twice (POLARIS)."""
    assert context.rank_of_slot is not None  # while a plan is edited
    for rank in np.unique(context.rank_of_slot[context.rank_of_slot >= 0]).tolist():
        here = plan.unfilled & (context.rank_of_slot == rank)
        empty = np.flatnonzero(here & groups.dead)
        live = np.flatnonzero(here & ~groups.dead)
        if len(empty) and len(live):
            rounds = -(-len(empty) // len(live))
            order = np.concatenate([context.rng.permutation(live) for _ in range(rounds)])
            plan.copy(empty, order[: len(empty)])


def kl_of_fresh(plan: Plan, groups: Groups, context: Context) -> None:
    """Drop the KL term of stored rows."""
    plan.kl &= ~plan.stored


def kl_of_all_wrong(success: Success) -> Treatment:
    """Drop the KL term of all rows but those of fresh dead groups in which no row passes."""

    def kl(plan: Plan, groups: Groups, context: Context) -> None:
        plan.kl &= plan.fresh & success.without(groups)[:, None]

    return kl


def treatments(unfilled: str, kl: str, success: Success) -> dict[str, Treatment]:
    """Return the treatments that settings name, by setting and value, in the order in which they run."""
    of_dead: dict[str, Treatment] = {"mask": mask, "exclude": exclude, "intra_batch": intra_batch}
    of_kl: dict[str, Treatment] = {"fresh": kl_of_fresh, "all_wrong": kl_of_all_wrong(success)}
    found = {f"replay_unfilled={unfilled!r}": of_dead.get(unfilled), f"replay_kl={kl!r}": of_kl.get(kl)}
    return {name: treatment for name, treatment in found.items() if treatment is not None}
