"""The scopes that `replay_scope="auto"` stands for."""

import pytest

from trl_replay.strategies.scopes import choose_scope


@pytest.mark.parametrize(
    ("processes", "rows", "size", "scope", "words"),
    [
        (1, 6, 4, "process", "one process"),
        (2, 32, 8, "process", "4 groups a batch, and all of their rows"),
        (2, 24, 8, "gathered", "3 groups a batch, fewer than 4"),
        (64, 8, 8, "gathered", "1 group a batch, fewer than 4"),
        (8, 36, 8, "gathered", "groups of 8 straddle processes of 36 rows each"),
    ],
)
def test_the_scope_goes_by_how_groups_lie(processes, rows, size, scope, words):
    choice = choose_scope(processes, rows, size)
    assert choice.name == scope
    assert words in choice.reason
