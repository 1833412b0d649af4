"""Gates on replayed rows, by hand."""

from __future__ import annotations

from typing import Any

import torch

import trl_replay
from trl_replay.loss.gates import Gates


def test_gates_act_together(tmp_path: Any) -> None:
    logs = torch.tensor([[0.5, -0.1], [0.0, 0.0], [3.0, 3.0]])
    rows = trl_replay.ReplayedRows(
        logs, torch.zeros(3, 2), logs, torch.ones(3, 2, dtype=torch.bool), torch.ones(3), torch.ones(3)
    )
    gates = Gates(weight=0.5, max_weight=0.75, max_log_ratio=1.0)
    corrected = gates(rows, trl_replay.Corrected(rows.behaviour_logps))
    torch.testing.assert_close(corrected.weights, torch.tensor([[0.75 / 1.6487213, 0.5], [0.5, 0.5], [0.0, 0.0]]))
    assert gates.metrics() == {"replay/capped_fraction": 0.5}
    assert gates.metrics() == {}


def test_without_gates_what_the_correction_gave_passes_as_it_is() -> None:
    given = trl_replay.Corrected(torch.zeros(1, 2))
    assert Gates()(None, given) is given  # type: ignore[arg-type]
