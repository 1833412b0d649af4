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


ONE_PROMPT = {"prompts": ["1+1="], "per_device_train_batch_size": 4}


def test_a_solved_prompts_entries_leave_and_it_is_not_stored_again(tmp_path):
    """With one prompt in the data, a fresh group with three passes of four ends the replay of all its entries."""
    solved = [1.0, 1.0, 1.0, 0.0]
    script = [LIVE], [DEAD], [solved], [DEAD], [LIVE], [DEAD], [DEAD]
    run = train(tmp_path, *script, max_steps=7, replay_retire_passes=3, **ONE_PROMPT)
    assert run.replayed == [0, 1, 0, 0, 0, 1, 1]
    assert run.counters["retired"] == 1
    assert run.counters["stored"] == 2
    told = run.session.explain()
    assert "1 x an entry left: its prompt was solved (replay_retire_passes)" in told
    assert "1 x a group was refused: its prompt is solved (replay_retire_passes)" in told


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
