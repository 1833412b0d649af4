"""Decisions of a step: entries that leave, groups that are noted, chances."""

import pytest
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.testing import make_trainer


def test_a_dry_run_measures_and_changes_nothing(tmp_path):
    run = train(tmp_path, [LIVE, DEAD, HALF], [DEAD, DEAD, LIVE], max_steps=5, replay_dry_run=True)
    session = run.session
    assert all(after[key] is value for before, after in run.steps for key, value in before.items())
    assert session.metrics["replay/replaced_fraction"] == pytest.approx(2 / 3)
    assert session.metrics["replay/dead_fraction_after"] == 0.0
    assert "replay/ratio_mean" not in session.metrics, "nothing went through the loss"


@pytest.mark.parametrize("sampler", ["proportional", "prompt_balanced", "uniform"])
def test_chances_are_relative_to_the_least_likely_entry(tmp_path, sampler):
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, HALF], [LIVE, DEAD, HALF], [DEAD] * 3), max_steps=4)
    session = trl_replay.attach(trainer, replay_sampler=sampler, replay_correction="per")
    seen = []
    place = session.step.decisions._fill_slots

    def placed(*args):
        table = session.buffer.table
        chances = {"uniform": table.score * 0 + 1, "proportional": table.score}.get(sampler, table.score / table.peers)
        plan, priorities = place(*args)
        seen.extend((chances[entry] / chances.min(), priority) for entry, priority in priorities.items())
        return plan, priorities

    session.step.decisions._fill_slots = placed
    trainer.train()
    assert len(seen) == 7
    assert [priority for _, priority in seen] == pytest.approx([chance for chance, _ in seen])
    assert sampler == "uniform" or max(chance for chance, _ in seen) > 1
