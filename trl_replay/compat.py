"""What trl_replay relies on in TRL: the tested releases, and every private name used, each with its reason."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from packaging.specifiers import SpecifierSet

from .errors import ContractError

if TYPE_CHECKING:
    from .views import RewardSetup

TESTED = SpecifierSet(">=1.16.0,<1.17")
UNTESTED_VARIABLE = "TRL_REPLAY_ALLOW_UNTESTED_TRL"

SCORE = "_generate_and_score_completions"  # returns one generation batch: where groups are read and exchanged
REWARDS = "_calculate_rewards"  # returns the gathered raw rewards, which the batch does not hold
LOSS = "_compute_loss"  # gets the micro-batch that the log-prob tap writes old log-probs into
LOGPS = "_get_per_token_logps_and_entropies"  # returns the new policy's log-probs, before the loss reads the old ones
SAVE = "_save_checkpoint"  # writes a checkpoint: on_save is too late, since rotation and upload come before it
LOAD = "_load_optimizer_and_scheduler"  # gets the resolved checkpoint on every rank: TRL's own way to restore state

SEAM: dict[str, tuple[str, ...]] = {
    SCORE: ("inputs",),
    REWARDS: ("inputs", "prompts", "completions", "completion_ids_list"),
    LOSS: ("model", "inputs"),
    LOGPS: ("model",),
    SAVE: ("model", "trial"),
    LOAD: ("checkpoint",),
}
"""Wrapped methods and the names of their first parameters after `self`."""

ATTRIBUTES: dict[str, str] = {
    "num_generations": "rows of a group",
    "reward_weights": "weights of the reward functions",
    "scale_rewards": "how large float noise gets in advantages",
    "multi_objective_aggregation": "how large float noise gets in advantages",
    "pad_to_multiple_of": "widths that a composed batch may have",
    "num_iterations": "updates between two generations",
    "accelerator": "ranks and device",
    "callback_handler": "updates are counted by a callback",
    "_metrics": "lists that log() averages, which reach every tracker",
    "_tokenizer": "pad token id and vocabulary",
    "_get_output_dir": "where checkpoints are written",
}
"""Attributes of the trainer that are read, and what for."""

BUFFERED = "_buffered_inputs"
"""The trainer's micro-batches of the present generation batch; None makes it generate."""

OLD_LOGPS = "old_per_token_logps"
"""Batch key that the loss reads after it has called `LOGPS`."""


def check_release() -> None:
    """Refuses a TRL release outside `TESTED`.

    Raises:
        ContractError: Unless the environment variable `UNTESTED_VARIABLE` is 1.
    """
    installed = version("trl")
    if not TESTED.contains(installed, prereleases=True) and os.environ.get(UNTESTED_VARIABLE) != "1":
        raise ContractError(
            f"TRL {installed} is outside the releases that trl_replay was tested with ({TESTED}). Install one of "
            f"these, or "
            f"set {UNTESTED_VARIABLE}=1 to try it all the same: the contract check and the run-time checks stay on."
        )


def contract_problems(trainer_class: type) -> list[str]:
    """What a trainer class lacks of the methods and parameters in `SEAM`; empty when all is there."""
    problems = []
    for name, expected in SEAM.items():
        method = inspect.getattr_static(trainer_class, name, None)
        if not inspect.isfunction(method):
            problems.append(f"{trainer_class.__name__}.{name} is not a method")
            continue
        parameters = list(inspect.signature(method).parameters.values())[1:]
        named = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD]
        passes_on = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if tuple(named[: len(expected)]) != expected[: len(named)] or (len(named) < len(expected) and not passes_on):
            problems.append(f"{trainer_class.__name__}.{name} takes {tuple(named)}, not {expected}")
    return problems


def check_contract(trainer: Any) -> None:
    """Refuses a trainer that lacks a method of `SEAM` or an attribute of `ATTRIBUTES`.

    Raises:
        ContractError: Names everything that is missing.
    """
    problems = contract_problems(type(trainer))
    problems += [
        f"the trainer has no attribute {name!r} ({reason})"
        for name, reason in ATTRIBUTES.items()
        if not hasattr(trainer, name)
    ]
    if problems:
        raise ContractError(
            f"{type(trainer).__name__} (TRL {version('trl')}) can't be attached to: {'; '.join(problems)}. "
            "Attach to trl.GRPOTrainer or to a subclass that keeps its scoring step and loss."
        )


def reward_setup(trainer: Any) -> RewardSetup:
    """How this trainer turns rewards into advantages."""
    from .views import RewardSetup

    weights = trainer.reward_weights.detach().double().cpu().numpy()
    return RewardSetup(np.asarray(weights), str(trainer.scale_rewards), str(trainer.multi_objective_aggregation))


def sequence_level_ratio(trainer: Any) -> bool:
    """Whether vLLM's importance ratio has the shape (B, 1)."""
    return str(getattr(trainer, "vllm_importance_sampling_mode", "")).startswith("sequence")


def allows_token_weights(trainer: Any) -> bool:
    """Whether weights of single tokens, folded into the advantage, are exact in this trainer's loss."""
    return bool(trainer.args.importance_sampling_level == "token" or trainer.args.loss_type == "cispo")


def has_other_loss_path(trainer: Any) -> bool:
    """Whether the loss can go around `LOSS` and `LOGPS` (the Liger loss of TRL up to 1.13)."""
    return bool(getattr(trainer, "use_liger_kernel", False)) and hasattr(type(trainer), "compute_liger_loss")


def with_old_logps(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with old log-probs, from one no-grad forward where TRL left them out: for losses that go around
    `LOGPS`."""
    if OLD_LOGPS in batch:
        return batch
    import torch

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    width = batch["completion_ids"].size(1)
    rows = trainer.args.per_device_train_batch_size
    with torch.no_grad():
        logps = getattr(trainer, LOGPS)(trainer.model, ids, mask, width, batch_size=rows)[0]
    return {**batch, OLD_LOGPS: logps}


def local_rows(trainer: Any) -> int:
    """Rows of one rank's generation batch."""
    return int(trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation)


def checkpoint_folder(trainer: Any, trial: Any) -> Path:
    """The folder that a checkpoint of this moment is written to."""
    return Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"


def vocabulary_size(trainer: Any) -> int:
    """Token ids that the model knows."""
    return int(trainer.model.config.get_text_config().vocab_size)


def tokenizer_fingerprint(trainer: Any) -> str:
    """A hash of what each token id stands for."""
    tokens = sorted(trainer._tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
