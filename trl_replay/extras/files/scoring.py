"""Rewards of a file's rows, by the trainer's own functions, as if it had generated the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import tqdm

from ... import compat
from ...distributed.all_ranks import run_on_all_ranks
from ...errors import ReplayError
from .file_tasks import FileTasks
from .reader import Rollout, RolloutGroup
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


def score(trainer: Any, tasks: FileTasks, groups: Sequence[RolloutGroup], source: str, ranks: int) -> None:
    """Give the rows of these groups their rewards: TRL's second half of scoring, alone. Each rank computes its part;
    call it on all ranks, with the same groups.

    Raises:
        ReplayError: A row can't be scored: names it; or a reward function fails.
    """
    if not groups:
        return
    if compat.has_environments(trainer):
        raise ReplayError(
            f"{groups[0][0].label} can't be scored: rewards that depend on an environment need its episode. Give "
            "rewards, a column for each function."
        )
    size = trainer.num_generations
    most = max(compat.local_rows(trainer) // size, 1) * ranks  # groups that all ranks score at once
    with tqdm(total=len(groups), desc="Rewards of a file's groups", disable=trainer.args.disable_tqdm) as bar:
        for start in range(0, len(groups), most):
            piece = list(groups[start : start + most])
            filled = piece + piece[-1:] * (-len(piece) % ranks)  # all ranks gather as many rows
            part = len(filled) // ranks
            first = int(trainer.accelerator.process_index) * part
            rows = [one for group in filled[first : first + part] for one in group]
            rewards = _rewards(trainer, tasks, rows, source, ranks == 1).double().cpu().numpy()
            for one, of_row in zip((one for group in piece for one in group), rewards, strict=False):
                one.rewards = of_row
            bar.update(len(piece))


def _rewards(trainer: Any, tasks: FileTasks, given: Sequence[Rollout], source: str, alone: bool) -> torch.Tensor:
    """`(rows of all ranks, functions)`: NaN for None."""
    made: list[AsGenerated] = []
    run_on_all_ranks(lambda: made.append(_as_generated(trainer, tasks, given)), ReplayError, alone)
    (rows,) = made
    errors: list[tuple[str, Exception]] = []
    functions = trainer.reward_funcs
    trainer.reward_funcs = [
        _guarded(function, name, errors) for function, name in zip(functions, trainer.reward_func_names, strict=True)
    ]
    try:
        with compat.unnoticed(trainer, {}):
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


def _as_generated(trainer: Any, tasks: FileTasks, given: Sequence[Rollout]) -> AsGenerated:
    """Make rows of the trainer of a file's.

    Raises:
        ReplayError: A row lacks something: names it.
    """
    made = AsGenerated([], [], [], [])
    for one in given:
        lacking = tasks.lacking(one.inputs)
        if lacking:
            raise ReplayError(
                f"{one.label} can't be scored: it lacks {', '.join(map(repr, lacking))}, which reward functions get "
                "from the dataset, and no one row of that has its prompt: add the columns to the file (null, if the "
                "functions read none)."
            )
        prompt = one.inputs["prompt"]
        if tasks.first_prompt is not None and isinstance(prompt, str) != isinstance(tasks.first_prompt, str):
            shown, wanted = ("text", "messages") if isinstance(prompt, str) else ("messages", "text")
            raise ReplayError(
                f"{one.label} can't be scored: its prompt is {shown}, and the dataset's are {wanted}: reward "
                f"functions get {wanted}."
            )
        made.inputs.append(one.inputs)
        made.prompts.append(prompt)
        made.completions.append(_completion(trainer, one, prompt))
        made.completion_ids.append(one.completion_ids.tolist())
    return made


def _completion(trainer: Any, one: Rollout, prompt: Any) -> Any:
    """Return a completion in the form that reward functions get.

    Raises:
        ReplayError: The file has another form, which does not tell enough.
    """
    turns = one.row["completion"]
    if has_turns(turns):
        return cleaned(turns)
    if not isinstance(prompt, str) and not one.mask.all():
        raise ReplayError(
            f"{one.label} can't be scored: it has several turns as one text, and reward functions get messages: give "
            "messages."
        )
    return compat.completions_of(trainer, prompt, one.prompt_ids.tolist(), one.completion_ids.tolist())
