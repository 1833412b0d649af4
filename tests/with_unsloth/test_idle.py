"""With nothing to replay Unsloth's trainer trains bit for bit as without, and so it does once replay is taken off."""

import pytest
import torch
from real_unsloth import trainer_of
from replaying import loadable_model
from scenarios import SCRIPT
from support import Rewards, weights_hash
from transformers import TrainerCallback

import trl_replay

TWO = {"per_device_train_batch_size": 6, "steps_per_generation": 2}
CONFIGURATIONS = {
    "dapo": {},
    "accumulation": {"gradient_accumulation_steps": 2, **TWO},
    "two iterations": {"num_iterations": 2},
    "two updates a generation": TWO,
    "sequence level": {"importance_sampling_level": "sequence"},
    "beta, two iterations of two updates": {"beta": 0.1, "num_iterations": 2, **TWO},
    "pad tokens in completions": {"generation_kwargs": {}, "num_iterations": 2},
}


def made(folder, **settings):
    if settings.get("beta"):
        settings["model"] = loadable_model(folder)
    torch.manual_seed(0)
    return trainer_of(folder, Rewards(*SCRIPT), **{"max_steps": 6, "learning_rate": 2e-2, **settings})


def result(trainer):
    """The weights, and all losses."""
    return weights_hash(trainer), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_is_that_without_replay_bit_for_bit(tmp_path, name):
    results = []
    for attached in (False, True):
        trainer = made(tmp_path, **CONFIGURATIONS[name])
        session = trl_replay.attach(trainer, replay_max_fraction=0.0) if attached else None
        trainer.train()
        results.append(result(trainer))
    assert session is not None
    assert session.totals.counters["stored"] > 0
    assert results[0] == results[1]


class Detach(TrainerCallback):
    """Takes replay off after the first update."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            trl_replay.detach(self.trainer)


@pytest.mark.parametrize("name", ["two iterations", "beta, two iterations of two updates", "two updates a generation"])
def test_what_is_left_of_a_batch_when_replay_is_taken_off_trains_as_without_it(tmp_path, name):
    results = []
    for attached in (False, True):
        trainer = made(tmp_path, **CONFIGURATIONS[name])
        if attached:
            trl_replay.attach(trainer)
            trainer.add_callback(Detach(trainer))
        trainer.train()
        results.append(result(trainer))
    assert results[0] == results[1]
    assert "compute_loss" not in trainer.__dict__


def test_a_run_that_resumes_ends_as_one_that_was_never_interrupted(tmp_path):
    ends = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        trainer = made(tmp_path, save_strategy="steps", save_steps=3)
        if checkpoint:
            trainer.reward_funcs[0].calls = 3
        session = trl_replay.attach(trainer, replay_start=0)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert session.totals.counters["replaced"] > 0
        ends.append(weights_hash(trainer))
    assert ends[0] == ends[1]


def test_evaluation_in_the_midst_of_training_goes_around_replay(tmp_path):
    from datasets import Dataset

    evaluated = Dataset.from_list([{"prompt": "7="}, {"prompt": "12345="}])
    settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8}
    trainer = made(tmp_path, arguments={"eval_dataset": evaluated}, **settings)
    session = trl_replay.attach(trainer, replay_start=0)
    trainer.reward_funcs[0] = lambda completions, **columns: [float("1" in text) for text in completions]
    trainer.train()
    assert len([entry for entry in trainer.state.log_history if "eval_loss" in entry]) == 3
    assert session.totals.batches == 6
