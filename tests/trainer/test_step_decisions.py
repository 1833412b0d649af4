"""Decisions of a step: entries that leave, groups that are noted, chances."""

import pytest
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards, record, replayed

import trl_replay
from trl_replay.loss.tap import ROWS
from trl_replay.testing import make_trainer


def test_a_dry_run_measures_and_changes_nothing(tmp_path):
    run = train(tmp_path, [LIVE, DEAD, HALF], [DEAD, DEAD, LIVE], max_steps=5, replay_dry_run=True)
    session = run.session
    assert all(after[key] is value for before, after in run.steps for key, value in before.items())
    assert session.metrics["replay/replaced_fraction"] == pytest.approx(2 / 3)
    assert session.metrics["replay/dead_fraction_after"] == 0.0
    assert "replay/ratio_mean" not in session.metrics, "nothing went through the loss"


@pytest.mark.parametrize(("layout", "stored"), [({}, 0), ({"num_iterations": 2}, 1)])
def test_a_displaced_live_group_is_stored_only_where_stocks_log_probs_are_known(tmp_path, layout, stored):
    settings = {"replay_selector": "always(share=1.0)", "replay_record": "loss"}
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD], [DEAD, HALF, DEAD]), max_steps=4, **layout)
    session = trl_replay.attach(trainer, **settings)
    steps = record(session)
    trainer.train()
    assert replayed(steps)[1] == 1
    slot = int((steps[1][1][ROWS][:, 0] < 0).nonzero()[0]) // 4
    assert slot == 0, "dead groups are replaced before live ones"
    session.buffer.clear()
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, LIVE, LIVE], [HALF, HALF, HALF]), max_steps=2 * (1 + stored), **layout
    )
    session = trl_replay.attach(trainer, **settings)
    trainer.train()
    assert len(session.buffer) == 3 + 3 * stored


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


def test_a_candidate_of_a_prompt_that_is_solved_meanwhile_is_refused(tmp_path):
    solved = [1.0, 1.0, 1.0, 1.0]
    run = train(tmp_path, [LIVE], [solved], [DEAD], replaced=0, max_steps=3, replay_retire_passes=4, **ONE_PROMPT)
    assert len(run.table) == 0
    assert run.counters["refused"] == 1


def test_a_full_buffer_keeps_every_prompt(tmp_path):
    """One prompt's group is live in the first batch only, the other's in all: by score alone it is crowded out."""
    first, often = [1.0, 0, 0, 0], [1.0, 1.0, 0, 0]
    kept = {}
    for evictor in ("heap", "prompt_balanced"):
        trainer = make_trainer(
            tmp_path / evictor, by_prompt({"1+1=": [first, DEAD], "2+2=": [often]}), prompts=["1+1=", "2+2="],
            max_steps=8, per_device_train_batch_size=8,
        )  # fmt: skip
        session = trl_replay.attach(trainer, replay_evictor=evictor, replay_buffer_size=4)
        trainer.train()
        kept[evictor] = sorted(session.buffer.table.peers.tolist())
    assert kept == {"heap": [4, 4, 4, 4], "prompt_balanced": [1, 3, 3, 3]}


def by_prompt(scripts):
    """A reward function with a script for each prompt, whose last rewards go on for ever."""
    calls = dict.fromkeys(scripts, 0)

    def scripted(prompts, **kwargs):
        rewards = []
        for prompt in prompts[::4]:
            script = scripts[prompt]
            rewards += script[min(calls[prompt], len(script) - 1)]
            calls[prompt] += 1
        return rewards

    return scripted


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
