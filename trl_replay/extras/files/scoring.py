"""Rewards of a file's rows, by the trainer's own functions, as if it had generated the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import tqdm

from ... import compat
from ...distributed.all_ranks import run_on_all_ranks
from ...errors import ReplayError
from .reader import Member, OfflineGroup
from .tokens import cleaned, has_turns


@dataclass(slots=True)
class AsGenerated:
    """Rows as the trainer gives its own to its reward functions.

    Attributes:
        inputs (`list[dict]`): Of the dataset.
        prompts (`list`): Texts or messages.
        completions (`list`): In the same form.
        completion_ids (`list[list[int]]`): Their tokens.
    """

    inputs: list[dict[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]


def scored(trainer: Any, groups: Sequence[OfflineGroup], source: str, ranks: int) -> list[OfflineGroup]:
    """Return the groups with the rewards of those that have none. Each rank computes its part; call it on all ranks,
    with the same groups.

    Raises:
        ReplayError: A row can't be scored: names it; or a reward function fails.
    """
    made = list(groups)
    waiting = [number for number, group in enumerate(groups) if group.unscored]
    if not waiting:
        return made
    _refuse_foreign_rewards(trainer, groups[waiting[0]].unscored[0])
    size = trainer.num_generations
    most = max(compat.local_rows(trainer) // size, 1) * ranks  # groups that all ranks score at once
    with tqdm(total=len(waiting), desc="Rewards of a file's groups", disable=trainer.args.disable_tqdm) as bar:
        for start in range(0, len(waiting), most):
            numbers = waiting[start : start + most]
            filled = numbers + numbers[-1:] * (-len(numbers) % ranks)  # all ranks gather as many rows
            part = len(filled) // ranks
            first = int(trainer.accelerator.process_index) * part
            mine = [groups[number] for number in filled[first : first + part]]
            rewards = _rewards(trainer, mine, source, ranks == 1).view(len(filled), size, -1)
            for number, of_group in zip(numbers, rewards.double().cpu().numpy(), strict=False):
                made[number] = replace(groups[number], rewards=of_group, unscored=())
            bar.update(len(numbers))
    return made


def _refuse_foreign_rewards(trainer: Any, member: Member) -> None:
    """Refuse to score where the trainer can't.

    Raises:
        ReplayError: Names a row.
    """
    reason = ""
    if not compat.computes_rewards(trainer):
        reason = "an asynchronous trainer's worker computes rewards of its own completions only"
    elif compat.has_environments(trainer):
        reason = "rewards that depend on an environment need its episode"
    if reason:
        raise ReplayError(f"{member.label} has no reward, or is to be scored anew, and can't be: {reason}.")


def _rewards(trainer: Any, groups: Sequence[OfflineGroup], source: str, alone: bool) -> torch.Tensor:
    """`(rows of all ranks, functions)`: NaN for None."""
    made: list[AsGenerated] = []
    run_on_all_ranks(lambda: made.append(_as_generated(trainer, groups)), ReplayError, alone)
    (rows,) = made
    errors: list[tuple[str, Exception]] = []
    functions = trainer.reward_funcs
    trainer.reward_funcs = [
        _guarded(function, name, errors) for function, name in zip(functions, trainer.reward_func_names, strict=True)
    ]
    try:
        with compat.unlogged(trainer):
            method = getattr(type(trainer), compat.REWARDS)
            rewards: torch.Tensor = method(trainer, rows.inputs, rows.prompts, rows.completions, rows.completion_ids)
    finally:
        trainer.reward_funcs = functions

    def tell() -> None:
        for name, error in errors:
            raise ReplayError(
                f"The reward function {name!r} can't score the rows of {source}: {type(error).__name__}: {error}"
            ) from error

    run_on_all_ranks(tell, ReplayError, alone)
    return rewards


def _guarded(function: Any, name: str, errors: list[tuple[str, Exception]]) -> Any:
    """Return a function that keeps its error, so that the other ranks do not wait for this one; a model is left as it
    is."""
    if isinstance(function, torch.nn.Module):
        return function

    def checked(rewards: Any, count: int) -> Any:
        numbers = [np.nan if reward is None else reward for reward in rewards]
        if len(numbers) != count:
            raise ValueError(f"it returned {len(numbers)} rewards for {count} completions")
        return torch.tensor(numbers, dtype=torch.float32).tolist()

    def failed(error: Exception, count: int) -> list[float]:
        errors.append((name, error))
        return [0.0] * count

    async def wait(**given: Any) -> Any:
        try:
            return checked(await function(**given), len(given["completions"]))
        except Exception as error:
            return failed(error, len(given["completions"]))

    def call(**given: Any) -> Any:
        try:
            return checked(function(**given), len(given["completions"]))
        except Exception as error:
            return failed(error, len(given["completions"]))

    return wait if compat.is_async(function) else call


def _as_generated(trainer: Any, groups: Sequence[OfflineGroup]) -> AsGenerated:
    """Make rows of the trainer of a file's.

    Raises:
        ReplayError: A row lacks something: names it.
    """
    made = AsGenerated([], [], [], [])
    for member in (member for group in groups for member in group.unscored):
        try:
            inputs = member.tasks.row(member.row, member.task)
            completion = _completion(trainer, member, inputs["prompt"])
        except ReplayError as error:
            raise ReplayError(f"{member.label} can't be scored: {error}.") from None
        made.inputs.append(inputs)
        made.prompts.append(inputs["prompt"])
        made.completions.append(completion)
        made.completion_ids.append(member.completion_ids.tolist())
    return made


def _completion(trainer: Any, member: Member, prompt: Any) -> Any:
    """Return a completion in the form that reward functions get.

    Raises:
        ReplayError: The file has another form, which does not tell enough.
    """
    form = member.tasks.prompt_form
    if form is not None and not isinstance(prompt, form):
        given, wanted = ("text", "messages") if form is list else ("messages", "text")
        raise ReplayError(f"its prompt is {given}, and the dataset's are {wanted}: reward functions get {wanted}")
    turns = member.row["completion"]
    if has_turns(turns):
        return cleaned(turns)
    if not isinstance(prompt, str) and not member.tokens.get("tool_mask", np.ones(1)).all():
        raise ReplayError("it has several turns as one text, and reward functions get messages: give messages")
    return compat.completions_of(trainer, prompt, member.prompt_ids.tolist(), member.completion_ids.tolist())
