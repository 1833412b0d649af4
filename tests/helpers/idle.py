"""Settings with which replay must change no bit of training: one table for one process and for several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from methods import INJECTED
from support import DEAD, HALF, LIVE, LOSSES, Forwards, Rewards, plugin_class, weights_hash
from transformers import AutoModelForCausalLM

import trl_replay
from trl_replay.testing import make_trainer

LAYOUTS: dict[str, dict[str, Any]] = {
    "one iteration": {},
    "two iterations": {"num_iterations": 2},
    "the same micro-batch twice in a window": {
        "gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2,
    },
    "generation over two updates": {
        "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1, "steps_per_generation": 2,
    },
    "two generations an update": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "accumulation": {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "steps_per_generation": 2},
    "a reference model": {"beta": 0.1},
    "a reference model, two iterations": {"beta": 0.1, "num_iterations": 2},
    "sequence-level importance": {"importance_sampling_level": "sequence"},
}  # fmt: skip
SCRIPT = ([LIVE, HALF, DEAD], [DEAD, LIVE, DEAD], [HALF, HALF, LIVE])
ALL_DEAD = [DEAD, DEAD, DEAD]
ALL_LIVE = [LIVE, HALF, LIVE]
PROMPTS = tuple(f"{number}=" for number in range(30))


def loud(groups):
    raise AssertionError("called in a dry run")


PLUGINS = {
    # answers every hook that may change a batch with what it was given
    "as_they_are": plugin_class(
        inputs=lambda groups_of_rows: groups_of_rows, advantages=lambda groups: groups.advantages.copy(),
        mix=lambda slots: np.full(slots.advantages.shape, -1),
    ),
    "silent": plugin_class(inputs=lambda: None),  # leaves the choice of prompts to the trainer
    "loud": plugin_class(advantages=loud),  # must not be asked
}  # fmt: skip


class Idle(NamedTuple):
    """Settings of the trainer and of replay, and rewards batch by batch; whether groups are stored all the same, and
    whether a forward without gradients a batch records their log-probs."""

    training: dict[str, Any]
    replay: dict[str, Any]
    rewards: Sequence[Any] = SCRIPT
    stores: bool = True
    records: bool = False


STORED_ONLY = {"replay_max_fraction": 0.0}
WHOLE = {**INJECTED, "replay_mixer": "whole", "replay_plugins": "as_they_are"}
ROUNDS = {"replay_refill": "new(rounds=3)", "replay_start": 0}
LOSS_TYPES = {f"loss {loss}": Idle({"loss_type": loss}, STORED_ONLY) for loss in LOSSES}
OTHERS = {
    **{name: Idle(settings, STORED_ONLY) for name, settings in LAYOUTS.items()},
    **{
        f"further rounds that nobody needs, {name}": Idle({**LAYOUTS[name], "prompts": PROMPTS}, ROUNDS, [ALL_LIVE])
        for name in ("two iterations", "generation over two updates", "accumulation", "a reference model")
    },
    **{
        f"{name}, replay_unfilled='{choice}'": Idle({"beta": 0.2}, {"replay_unfilled": choice, **dry}, rewards)
        for choice in ("mask", "exclude")
        for name, dry, rewards in (("a dry run", {"replay_dry_run": True}, SCRIPT), ("no dead group", {}, [ALL_LIVE]))
    },
    "a dry run of mixed rows": Idle({}, {**INJECTED, "replay_dry_run": True, "replay_plugins": "loud"}),
    "nothing stored yet": Idle({}, {}, [ALL_DEAD], stores=False),
    "no room": Idle({}, {"replay_buffer_size": 0}, stores=False),
    "switched off": Idle({}, {"use_replay": False}, stores=False),
    "a mixer that takes nothing, and TRL's own advantages": Idle({}, WHOLE, records=True),
    "the same beside stock's log-probs": Idle({"num_iterations": 2}, WHOLE),
    "TRL's own advantages and prompts": Idle(
        {}, {"replay_buffer_size": 0, "replay_plugins": "as_they_are"}, stores=False
    ),
    "no choice of prompts": Idle({}, {"replay_buffer_size": 0, "replay_plugins": "silent"}, stores=False),
}
ITERATIONS = {"replay_iterations": "replay", "replay_start": 0}
FURTHER = {
    **{
        f"further iterations that draw nothing, {name}": Idle(
            {**LAYOUTS[name], "num_iterations": 3, "max_steps": 9}, {**ITERATIONS, **STORED_ONLY}
        )
        for name in ("one iteration", "accumulation", "generation over two updates", "a reference model")
    },
    "a dry run of further iterations": Idle(
        {"num_iterations": 2, "beta": 0.1}, {**ITERATIONS, "replay_dry_run": True, "replay_kl": "fresh"}
    ),
}
IDLE = {**OTHERS, **LOSS_TYPES, **FURTHER}
OF_TIME = ("time", "runtime", "per_second")
"""In the names of what no two runs log alike."""


class Stock:
    """Trains every case with replay, and without it where no case before it had the same trainer and rewards.

    Args:
        model: A folder with the model that is trained, where there is to be a reference.
    """

    def __init__(self, model: Path | None = None) -> None:
        self.model = model
        self.runs: dict[str, dict[str, Any]] = {}

    def differences(self, folder: Path, name: str, **settings: Any) -> tuple[list[str], Any]:
        """In what a run differs from the stock trainer's, and its session; `settings` go on top of the case's."""
        case = IDLE[name]
        replay = {key: settings.pop(key) for key in list(settings) if key.startswith("replay_")}
        alike = repr((case.training, case.rewards))
        if alike not in self.runs:
            self.runs[alike], _ = self.trained(folder, case, None, **settings)
        found, session = self.trained(folder, case, {**case.replay, **replay}, **settings)
        policy = found["forwards"][0]
        policy["no grad"] -= policy["grad"] * case.records
        return [key for key, value in self.runs[alike].items() if found[key] != value], session

    def trained(
        self, folder: Path, case: Idle, replay: dict[str, Any] | None, **training: Any
    ) -> tuple[dict[str, Any], Any]:
        """The results of a run that replay must not change, and its session if it has `replay`."""
        if self.model and "beta" in case.training:
            training["model"] = AutoModelForCausalLM.from_pretrained(self.model)
        trainer = make_trainer(folder, Rewards(*case.rewards), **{**case.training, **training})
        session = None if replay is None else trl_replay.attach(trainer, **replay)
        counted = [Forwards(model) for model in (trainer.model, trainer.ref_model) if model is not None]
        trainer.train()
        log = [
            {key: value for key, value in entry.items() if not key.startswith("replay/") and not key.endswith(OF_TIME)}
            for entry in trainer.state.log_history
        ]
        return {"weights": weights_hash(trainer), "log": log, "forwards": [one.counts for one in counted]}, session
