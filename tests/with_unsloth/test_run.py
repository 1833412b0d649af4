"""`trl-replay run` with Unsloth's own class: attached, or told by name."""

import os
import subprocess
import sys
from pathlib import Path

import unsloth_replay
from real_unsloth import PLAIN, dressed
from trl import GRPOConfig

from trl_replay.testing import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
TRAINS = """
import sys
import real_unsloth
from scenarios import SCRIPT
from support import Rewards

trainer = real_unsloth.trainer_of(sys.argv[1], Rewards(*SCRIPT), max_steps=3)
trainer.train()
print("ATTACHED", "compute_loss" in vars(trainer))
"""


def run(folder, **environment):
    script = folder / "script.py"
    script.write_text(TRAINS)
    command = [sys.executable, "-m", "trl_replay", "run", "--replay_buffer_size", "16"]
    return subprocess.run(
        [*command, str(script), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests/helpers"), **environment},
        capture_output=True,
        text=True,
    )


def test_a_command_that_trains_with_unsloth_is_attached_to(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ATTACHED True" in done.stdout


def test_a_command_whose_trainer_is_refused_ends_with_a_message_that_names_it(tmp_path):
    done = run(tmp_path, UNSLOTH_GRPO_LOSS_AGGREGATION="prompt")
    assert done.returncode == 1
    assert "Unsloth's trainer and the environment variable UNSLOTH_GRPO_LOSS_AGGREGATION" in done.stderr


def test_the_example_trains_and_replays(tmp_path):
    tokenizer = make_tokenizer()
    settings = {**PLAIN, "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8}
    args = GRPOConfig(str(tmp_path), **{**settings, "num_iterations": 2, "beta": 0.1, "max_steps": 6})
    model = make_model(tokenizer)
    model.save_pretrained(tmp_path / "model")
    model.config._name_or_path = str(tmp_path / "model")  # where TRL loads the reference model from
    session = unsloth_replay.train(dressed(model), tokenizer, args)
    assert session.totals.batches == 3
    assert unsloth_replay.is_product([" 3 * 4", "2 * 7"], [12, 12]) == [1.0, 0.0]
