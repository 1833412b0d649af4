"""Treatments of unfilled dead groups (`replay_unfilled`), and of KL terms (`replay_kl`).

Each is a function of the hook `trl_replay_plan`. They run after the plugins' ones, in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

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
    of_dead: dict[str, Treatment] = {"mask": mask, "exclude": exclude}
    of_kl: dict[str, Treatment] = {"fresh": kl_of_fresh, "all_wrong": kl_of_all_wrong(success)}
    found = {f"replay_unfilled={unfilled!r}": of_dead.get(unfilled), f"replay_kl={kl!r}": of_kl.get(kl)}
    return {name: treatment for name, treatment in found.items() if treatment is not None}
