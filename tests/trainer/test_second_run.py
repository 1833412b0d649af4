"""A second run on the completions of a first one (`replay_preset="second_run"`): one generated batch in all."""

import pytest
from resuming import digits

import trl_replay
from trl_replay.testing import make_trainer

UPDATES = 8


def first_run(folder, batches=6):
    """Stock's groups, exported."""
    trainer = make_trainer(folder / "first", digits, max_steps=batches)
    session = trl_replay.attach(trainer, replay_dry_run=True)
    trainer.train()
    return session.export(folder / "first.parquet")


def second_run(folder, file, **settings):
    """Not trained yet."""
    given = {"max_steps": UPDATES, "num_iterations": UPDATES, **settings}
    trainer = make_trainer(folder / "second", digits, **given)
    return trainer, trl_replay.attach(trainer, replay_preset="second_run", replay_warm_start=str(file))


def test_a_second_run_generates_one_batch_and_goes_through_the_file_in_passes(tmp_path):
    trainer, session = second_run(tmp_path, first_run(tmp_path))
    trainer.train()
    totals = session.totals
    assert totals.batches == 1
    assert trainer.state.global_step == UPDATES
    table = session.buffer.table
    taught = table.uses[table.origin > 0]
    slots = totals.counters["iterated"] + totals.counters["replaced"]
    assert slots == table.uses.sum() > 0
    assert taught.max() - taught.min() <= 1, "each group is used as often as the others, or once more"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_iterations": 4}, "num_iterations=4 with max_steps=8 generates another after every 4 updates"),
        ({"max_steps": -1}, "num_iterations=8 with num_train_epochs=3 generates another after every 8 updates"),
    ],
)
def test_a_second_run_that_would_generate_again_is_told_what_to_set(tmp_path, settings, words):
    file = first_run(tmp_path)
    with pytest.warns(UserWarning, match=words):
        second_run(tmp_path, file, **settings)


def test_a_second_run_is_judged_by_its_evaluations(tmp_path):
    file = first_run(tmp_path)
    trainer, session = second_run(tmp_path, file, logging_steps=1)
    trainer.train()
    told = session.explain().splitlines()
    assert told[0].startswith("outcome: no reward was logged; 12 completions, 8 updates, ")
    assert told[-1].startswith("what to change: Evaluate (eval_strategy, eval_dataset)")
    assert f"{len(session.buffer)} held, {(session.buffer.table.uses > 0).sum()} of them used, " in told[2]
    trainer, session = second_run(
        tmp_path, file, logging_steps=1, eval_strategy="steps", eval_steps=4, eval_prompts=["7=", "8="]
    )
    trainer.train()
    told, values = (
        session.explain().splitlines(),
        [e["eval_reward"] for e in trainer.state.log_history if "eval_reward" in e],
    )
    way = f"outcome: reward on evaluation prompts {values[0]:.2g} → {values[1]:.2g} over 12 completions, 8 updates, "
    assert told[0].startswith(way)
    verdict = "nothing; whether replay helped" if values[1] > values[0] else "The reward "
    assert told[-1].startswith(f"what to change: {verdict}")


def test_a_second_run_without_a_file_is_told_so(tmp_path):
    trainer = make_trainer(tmp_path, digits, max_steps=UPDATES, num_iterations=UPDATES)
    with pytest.warns(UserWarning, match="replay_warm_start is not set"):
        trl_replay.attach(trainer, replay_preset="second_run")


def test_a_second_run_that_loses_its_groups_is_told_once_when_it_repeats_its_batch(tmp_path):
    file = first_run(tmp_path, 2)
    trainer = make_trainer(tmp_path / "second", digits, max_steps=UPDATES, num_iterations=UPDATES)
    trl_replay.attach(trainer, replay_preset="second_run", replay_warm_start=str(file), replay_max_uses=1)
    told = r"an iteration trains on it again.*Raise the limit that holds groups back.*Why nothing was drawn: "
    with pytest.warns(UserWarning, match=told) as caught:
        trainer.train()
    assert sum("trains on it again" in str(one.message) for one in caught) == 1


def ended(folder, resume=None, **settings):
    """A run of eight updates that saves every three, resumed from a checkpoint if it is named."""
    given = {"save_strategy": "steps", "save_steps": 3, "gradient_checkpointing": False, **settings}
    trainer, session = second_run(folder, folder / "first.parquet", **given)
    checkpoint = str(folder / "second" / f"checkpoint-{resume}") if resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, session


@pytest.mark.parametrize("at", [3, 6])
def test_a_second_run_that_is_killed_in_its_middle_goes_on_with_its_groups(tmp_path, at):
    """As stock, it generates a batch on resuming."""
    first_run(tmp_path)
    _, session = ended(tmp_path)
    held = session.buffer.table.serial.tolist()
    resumed, session = ended(tmp_path, resume=at)
    assert resumed.state.global_step == UPDATES
    assert set(held) <= set(session.buffer.table.serial.tolist())
    assert session.totals.batches == 2
