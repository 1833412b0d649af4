"""What a step decides in a dry run."""

import pytest
from scenarios import train
from support import DEAD, HALF, LIVE


def test_a_dry_run_measures_and_changes_nothing(tmp_path):
    run = train(tmp_path, [LIVE, DEAD, HALF], [DEAD, DEAD, LIVE], max_steps=5, replay_dry_run=True)
    session = run.session
    assert all(after[key] is value for before, after in run.steps for key, value in before.items())
    assert session.metrics["replay/replaced_fraction"] == pytest.approx(2 / 3)
    assert session.metrics["replay/dead_fraction_after"] == 0.0
    assert "replay/ratio_mean" not in session.metrics, "nothing went through the loss"
