"""What replay relies on in TRL's asynchronous trainer: the tested releases, and every private name used."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet

from trl_replay.compat import LOAD, SAVE, check_release
from trl_replay.errors import ContractError

TESTED_ASYNCHRONOUS = SpecifierSet(">=1.16,<1.17")
QUEUE = "rollout_queue"
"""The asynchronous trainer's queue of samples, which its dataset reads on the main process."""
OF_ASYNCHRONOUS: dict[str, str] = {
    QUEUE: "where samples are read",
    "rollout_worker": "its health",
    "model_version": "how old samples are",
    "_trained_groups": "groups that count in epochs",
    "_step_samples": "samples trained on in this update",
    "_metrics": "lists that log() reduces",
    "accelerator": "ranks and device",
    "callback_handler": "updates are counted by a callback",
    "processing_class": "pad token id and vocabulary",
}
"""Attributes of an asynchronous trainer that are read, and what for."""
OF_SAMPLE = ("input_ids", "completion_mask", "old_log_probs", "advantage", "model_version", "group_id", "metrics")
"""Fields of its samples."""
OF_ARGS = ("max_staleness", "weight_sync_steps", "token_budget", "heartbeat_stale_after_s", "num_generations")
"""Settings of it that are read."""


def is_asynchronous(trainer: Any) -> bool:
    """Return whether this is TRL's AsyncGRPOTrainer, or a subclass."""
    return any(base.__name__ == "AsyncGRPOTrainer" for base in type(trainer).__mro__)


def check_asynchronous(trainer: Any) -> None:
    """Refuse an AsyncGRPOTrainer of a release that was not tested, or of another shape.

    Raises:
        ContractError: Names the release, and everything that is missing.
    """
    check_release(TESTED_ASYNCHRONOUS, "AsyncGRPOTrainer")
    problems = [
        f"the trainer has no attribute {name!r} ({reason})"
        for name, reason in OF_ASYNCHRONOUS.items()
        if not hasattr(trainer, name)
    ]
    problems += [f"its args have no {name!r}" for name in OF_ARGS if not hasattr(trainer.args, name)]
    problems += [f"the trainer has no method {name}" for name in (SAVE, LOAD) if not hasattr(trainer, name)]
    try:
        fields = rollout_sample().__dataclass_fields__
    except ImportError as error:
        problems.append(f"its samples can't be imported ({error})")
    else:
        problems += [f"its samples have no {name!r}" for name in OF_SAMPLE if name not in fields]
    if problems:
        raise ContractError(
            f"The {type(trainer).__name__} of TRL {version('trl')} can't be attached to: {'; '.join(problems)}. Use a "
            "release that docs/compatibility.md names for it, or train without replay."
        )


def rollout_sample() -> Any:
    """Return the class of an asynchronous trainer's samples."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    return RolloutSample


def trained_groups(trainer: Any) -> set[int]:
    """Return the ids of the groups that count in epochs: the trainer's own set."""
    groups: set[int] = trainer._trained_groups
    return groups


def step_samples(trainer: Any) -> int:
    """Return the samples that all ranks have trained on since the last update ended."""
    trained: float = trainer._step_samples
    return round(trained)


def restarts_worker(trainer: Any) -> bool:
    """Return whether the worker is TRL's own, which resumes at the first group that has not been trained on."""
    return any(base.__name__ == "AsyncRolloutWorker" for base in type(trainer.rollout_worker).__mro__)


def worker_rewards(trainer: Any) -> list[str]:
    """Return the names under which the worker's samples tell their rewards; of a worker that names none, `reward`."""
    worker = trainer.rollout_worker
    given = getattr(worker, "reward_func_names", None)
    if given is None and restarts_worker(trainer):
        from trl.trainer.utils import get_callable_name

        settings = worker._loop_kwargs  # its process makes the names of them
        given = [get_callable_name(function) for function in settings["reward_funcs"]]
        given += _owners_of_rewards(settings.get("environment_factory"))
        if "harness_session_factory" in settings:
            given.append("harness_reward")
    return list(given or ["reward"])


def worker_functions(trainer: Any) -> list[Any]:
    """Return the reward functions of its worker; none of a worker that does not show them."""
    worker = trainer.rollout_worker
    given = getattr(worker, "reward_funcs", None)
    if given is None and restarts_worker(trainer):
        given = worker._loop_kwargs["reward_funcs"]
    return list(given or [])


def _owners_of_rewards(factory: Any) -> list[str]:
    """Name the classes of environments that have `get_reward`, each once, as TRL's worker names their rewards."""
    if factory is None:
        return []
    factories = factory.values() if isinstance(factory, Mapping) else [factory]
    made = [one if isinstance(one, type) else type(one()) for one in factories]
    return [owner.__name__ for owner in dict.fromkeys(made) if inspect.isfunction(getattr(owner, "get_reward", None))]
