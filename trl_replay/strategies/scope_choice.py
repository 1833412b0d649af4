"""Choose the scope of `replay_scope="auto"` from the layout of a batch's groups on processes."""

from __future__ import annotations

from typing import NamedTuple

from ..base.sizes import counted

SCOPES = ("process", "gathered", "sharded")
"""The built-in ones."""
FEW_GROUPS = 4
"""Groups a process and batch below which one buffer for all processes finds more to replay."""


class ScopeChoice(NamedTuple):
    """A chosen scope, with the reason."""

    name: str
    reason: str


def choose_scope(processes: int, rows: int, size: int) -> ScopeChoice:
    """Choose the scope for a layout.

    Args:
        processes (`int`): How many there are.
        rows (`int`): Rows of each process's generation batch.
        size (`int`): `num_generations`.
    """
    groups, rest = divmod(rows, size)
    if processes == 1:
        return ScopeChoice("process", "there is one process")
    if rest:
        return ScopeChoice("sharded", f"groups of {size} straddle processes of {rows} rows each")
    each = f"each process has {counted(groups, 'group')} a batch"
    if groups < FEW_GROUPS:
        return ScopeChoice("sharded", f"{each}, fewer than {FEW_GROUPS}: one buffer for all finds more to replay")
    return ScopeChoice("process", f"{each}, and all of their rows")
