"""Gates on replayed rows, by hand."""

import pytest
import torch
from fetched import metrics_of

from trl_replay import Corrected, ReplayedRows
from trl_replay.loss.supply import Gates


def rows(logs, mask=None):
    """Replayed rows with these log ratios."""
    new = torch.tensor(logs)
    trained = torch.ones_like(new, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    ones = torch.ones(len(logs))
    return ReplayedRows(new, torch.zeros_like(new), new, trained, ones, ones)


def gated(gates, given, weights=None):
    found = gates(given, Corrected(given.behavior_logps, None if weights is None else torch.tensor(weights)))
    assert found.old_logps is given.behavior_logps
    return found.weights


def test_tokens_that_are_not_trained_on_are_neither_capped_nor_counted():
    gates = Gates(max_weight=1.0)
    found = gated(gates, rows([[2.0, 2.0, -1.0, -1.0]], [[1, 0, 1, 0]]))
    assert found.tolist()[0][1:] == [1.0, 1.0, 1.0]
    assert metrics_of(gates.means) == {"replay/capped_fraction": 0.5}


def test_at_sequence_level_the_cap_is_on_the_rows_mean_ratio():
    gates = Gates(max_weight=1.0, sequence_level=True)
    logs, mask = [[1.0, 0.0, 9.0], [-1.0, 0.5, 9.0], [5.0, 5.0, 5.0]], [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
    found = gated(gates, rows(logs, mask))
    torch.testing.assert_close(found, torch.tensor([torch.tensor(-0.5).exp(), 1.0, 1.0]))
    assert metrics_of(gates.means) == {"replay/capped_fraction": 0.5}, "of the rows that train anything"
    found = gated(gates, rows(logs, mask), [[2.0, 0.5, 1.0]] * 3)
    capped = torch.tensor(-0.5).exp().item()
    assert found[0].tolist() == pytest.approx([capped, 0.5, 1.0]), "one ratio a row, weights of tokens"
    assert metrics_of(gates.means) == {"replay/capped_fraction": 0.5}
