"""Everything that trl_replay relies on in TRL: the tested releases, and every private name used, each with its
reason."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import os
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from . import built_in
from .base.progress import global_generators_kept
from .data.rewards import RewardRule
from .data.rewards import RewardSetup as RewardSetup
from .data.types import FIELDS, IMAGE_LAYOUTS, Batch, Ints
from .errors import ContractError

TESTED = SpecifierSet(">=1.5.1,<1.17")
UNTESTED_VARIABLE = "TRL_REPLAY_ALLOW_UNTESTED_TRL"

SCORE = "_generate_and_score_completions"  # returns one generation batch: where groups are read and exchanged
REWARDS = "_calculate_rewards"  # returns the gathered raw rewards, which the batch does not hold
LOSS = "_compute_loss"  # gets the micro-batch that the log-prob tap writes old log-probs into
LOGPS = "_get_per_token_logps_and_entropies"  # returns the new policy's log-probs, before the loss reads the old ones
HIGH_ENTROPY = "get_high_entropy_mask"  # with top_entropy_quantile: the tokens that an entropy bonus goes by
SAVE = "_save_checkpoint"  # writes a checkpoint: on_save is too late, since rotation and upload come before it
LOAD = "_load_optimizer_and_scheduler"  # gets the resolved checkpoint on every rank: TRL's own way to restore state
PREPARE = "_prepare_inputs"  # gives out micro-batches: where a further iteration gets a batch of its own

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
    "_logs": "columns of the table of completions, in which replaced rows are marked",
    "_tokenizer": "pad token id and vocabulary",
    "_get_output_dir": "where checkpoints are written",
}
"""Attributes of the trainer that are read, and what for."""

BUFFERED = "_buffered_inputs"
"""The trainer's micro-batches of the present generation batch; None makes it generate."""
REFUSED: dict[str, str] = {
    "GRPOWithReplayBufferTrainer": "it replays by itself, from a buffer of its own",
    "RLOOTrainer": "its loss reads one old log-prob a sequence, and takes the KL term into the reward",
}
"""Trainers that keep the methods of `SEAM` but can't be replayed for, by a part of their qualified names."""

OF_OTHERS = {"AsyncGRPOTrainer": "trl-replay-async", "UnslothGRPOTrainer": "trl-replay-unsloth"}
"""Distributions for other trainers, by the names of their classes."""

LIGER_LOSS = "compute_liger_loss"  # TRL up to 1.13: goes around LOSS and LOGPS
REFERENCE_SYNC = "SyncRefModelCallback"  # changes the reference model, and with it stored reference log-probs

ENTROPY_WINDOW = "_entropy_window_stats"
"""Sum and number of the entropies of this window's tokens so far, of which the adaptive control takes the mean."""
LAST_ENTROPY = "_last_world_entropy"
"""The mean of the last window."""

OLD_LOGPS = "old_per_token_logps"
"""Batch key that the loss reads after it has called `LOGPS`."""
REF_LOGPS = "ref_per_token_logps"
"""Batch key of the reference model's log-probs."""
SAMPLING_LOGPS = "sampling_per_token_logps"
"""Batch key of the log-probs that the sampler (vLLM, a rollout function) reported."""
IS_RATIO = "importance_sampling_ratio"
"""Batch key of the ratio between trainer and sampler."""


STD_EPSILON = 1e-4
"""TRL adds this to a standard deviation of rewards before it divides by it."""


@dataclass(frozen=True, slots=True)
class LossForm:
    """Importance ratios in a trainer's loss: how they are made and used.

    Attributes:
        sequence_level (`bool`): Whether it forms one ratio a row.
        sums_ratios (`bool`): Whether it weighs rows by the product of their ratios, and bounds that weight (`vespo`).
        weighs_kl (`bool`): Whether it multiplies the KL term by the ratio (`use_bias_correction_kl`).
        clip_low (`float`, *optional*): The ratio below which it clips negative advantages, if it does.
        clip_high (`float`, *optional*): The ratio above which it clips positive advantages, if it does.
    """

    sequence_level: bool = False
    sums_ratios: bool = False
    weighs_kl: bool = False
    clip_low: float | None = None
    clip_high: float | None = None

    @property
    def narrowest(self) -> float:
        """The smallest log ratio, in size, that it clips; infinite if it clips none."""
        edges = [edge for edge in (self.clip_low, self.clip_high) if edge is not None and edge > 0]
        return min((abs(math.log(edge)) for edge in edges), default=math.inf)


def check_release(tested: SpecifierSet = TESTED, trainer: str = "GRPOTrainer") -> None:
    """Refuse a TRL release outside those that were tested with this trainer.

    Raises:
        ContractError: Unless the environment variable `UNTESTED_VARIABLE` is 1.
    """
    installed = version("trl")
    if not tested.contains(installed, prereleases=True) and os.environ.get(UNTESTED_VARIABLE) != "1":
        raise ContractError(
            f"TRL {installed} is outside the releases whose {trainer} trl_replay was tested with ({tested}). Install "
            f"one of these, or set {UNTESTED_VARIABLE}=1 to try it all the same: the contract check and the run-time "
            "checks stay on."
        )


def accepts(named: tuple[str, ...], passes_on: bool, expected: tuple[str, ...]) -> bool:
    """Return whether parameters of these names, with or without `*args` after them, take the expected ones first."""
    return named[: len(expected)] == expected[: len(named)] and (len(named) >= len(expected) or passes_on)


def contract_problems(trainer_class: type, seam: Mapping[str, tuple[str, ...]] = SEAM) -> list[str]:
    """Return what a trainer class lacks of the methods and parameters in a seam; nothing if all is there."""
    problems = []
    for name, expected in seam.items():
        method = inspect.getattr_static(trainer_class, name, None)
        if not inspect.isfunction(method):
            problems.append(f"{trainer_class.__name__}.{name} is not a method")
            continue
        parameters = list(inspect.signature(method).parameters.values())[1:]
        named = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD]
        if not accepts(tuple(named), any(p.kind is p.VAR_POSITIONAL for p in parameters), expected):
            problems.append(f"{trainer_class.__name__}.{name} takes {tuple(named)}, not {expected}")
    return problems


def check_contract(trainer: Any, of_layout: Sequence[str] = ()) -> None:
    """Refuse a trainer that lacks a method of `SEAM` or an attribute of `ATTRIBUTES`, or with problems `of_layout`.

    Raises:
        ContractError: Names everything that is missing.
    """
    if not hasattr(trainer, SCORE):
        raise ContractError(
            f"Attach to a trl.GRPOTrainer: {type(trainer).__name__} has no {SCORE}, which replay wraps, and no "
            f"built-in attaches to it ({', '.join(built_in.BUILT_IN)}). There is no replay for trainers that do not "
            "train by GRPO: train without it."
        )
    problems = [
        f"{base.__name__}: {reason}"
        for base in type(trainer).__mro__
        for name, reason in REFUSED.items()
        if name in f"{base.__module__}.{base.__qualname__}"
    ][:1]
    problems = problems or [*contract_problems(type(trainer)), *of_layout]
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


def refuse_others(trainer: Any) -> None:
    """Refuse a trainer that a distribution of its own is for, which is not installed.

    Raises:
        ContractError: Names the distribution.
    """
    for base in type(trainer).__mro__:
        needed = OF_OTHERS.get(base.__name__.removeprefix("_"))
        if needed:
            raise ContractError(
                f"{type(trainer).__name__} can't be attached to without {needed}: install it from this repository "
                f"(pip install ./plugins/{needed})."
            )


def reward_setup(trainer: Any) -> RewardSetup:
    """Return this trainer's rule from rewards to advantages."""
    weights = np.array(trainer.reward_weights.tolist(), np.float64)  # a copy: users change theirs in place
    return RewardSetup(weights, str(trainer.scale_rewards), str(trainer.multi_objective_aggregation))


_SOURCES: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def source_of(function: Any) -> str:
    """A hash of a reward function's source, and of all that it names of its module, in turn: of an object that of its
    class, of a reward model its class's name. Comments do not count, and no value does: not what a variable or an
    attribute holds. It is read once an object."""
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    if hasattr(function, "named_parameters"):
        return str(type(function).__qualname__)
    one = inspect.unwrap(function) if isinstance(function, FunctionType | type) else type(function)
    if one not in _SOURCES:
        _SOURCES[one] = hashlib.sha256("\0".join(_sources(one)).encode()).hexdigest()[:16]
    return _SOURCES[one]


def _sources(one: Any) -> Iterator[str]:
    """The source of a function or class, with that of a function around it, and of what its module defines of the
    names in it."""
    module = sys.modules.get(one.__module__)
    defined = _definitions(module)
    seen = set[str]()
    due: list[ast.AST] = [_parsed(one)]
    names = {one.__qualname__.partition(".")[0]}
    yield one.__qualname__
    while due:
        tree = due.pop()
        yield ast.unparse(tree)
        names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for name in sorted(names - seen):
            found = getattr(module, name, None)
            is_here = isinstance(found, FunctionType | type) and found.__module__ == one.__module__
            due += defined.get(name) or ([_parsed(found)] if is_here else [])
        seen |= names


def _definitions(module: Any) -> Mapping[str, Sequence[ast.AST]]:
    """The statements of a module's file that give a name its value."""
    found = defaultdict[str, list[ast.AST]](list)
    for statement in _parsed(module).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[statement.name].append(statement)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found[node.id].append(statement)
    return found


def _parsed(one: Any) -> ast.Module:
    """What was written of a module, class, or function; nothing of what was compiled, or typed into a shell."""
    try:
        source = textwrap.dedent(inspect.getsource(one))
    except (OSError, TypeError):
        return ast.Module([], [])
    try:
        return ast.parse(source)
    except SyntaxError:  # a lambda among other arguments
        return ast.Module([ast.Expr(ast.Constant(source))], [])


def reward_rule(trainer: Any) -> RewardRule:
    """Return what gives the trainer's completions their rewards and advantages now."""
    return RewardRule(
        functions=tuple(trainer.reward_func_names),
        sources=tuple(map(source_of, getattr(trainer, "reward_funcs", None) or ())),
        weights=tuple(trainer.reward_weights.tolist()),
        scale=str(trainer.scale_rewards),
        aggregation=str(trainer.multi_objective_aggregation),
    )


def advantages(
    rewards: torch.Tensor, setup: RewardSetup, size: int, within: torch.Tensor | None = None
) -> torch.Tensor:
    """TRL's advantages, `(rows,)`, as the installed release computes them.

    In the rewards' type, on their device and operation by operation, since rounding errors of a group with equal
    rewards grow up to 10,000 times: so computed they are the same.

    Args:
        rewards (`(rows, functions)`): Raw rewards of all processes, as `REWARDS` returns them: NaN where None.
        setup ([`RewardSetup`]): The trainer's.
        size (`int`): Rows of a group.
        within (`(batch rows, functions)`, *optional*): Rewards of the batch whose mean and deviation count where TRL
            takes them over all rows; these rows themselves if not given. Rows without any reward, which stand for
            none, are then left out in all releases.
    """
    from trl.trainer.utils import nanstd

    # before 1.6, rows that no function scored have 0
    leaves_out_unscored = within is not None or not counts_unscored()
    mean, std = (torch.nanmean, nanstd) if leaves_out_unscored else (torch.mean, torch.std)
    sums_normalized = setup.aggregation == "normalize_then_sum"
    total = _summed(rewards, setup, size, leaves_out_unscored)
    batch = total if within is None else _summed(within, setup, size, leaves_out_unscored)
    groups = total.view(-1, size)
    if sums_normalized:
        result = (groups - mean(batch.view(-1, size))) / (std(batch) + STD_EPSILON)
    else:
        result = groups - mean(groups, dim=1).unsqueeze(1)
        if setup.scale == "group":
            result = result / (std(groups, dim=1).unsqueeze(1) + STD_EPSILON)
        elif setup.scale == "batch":
            result = result / (std(batch) + STD_EPSILON)
    return (torch.nan_to_num(result, nan=0.0) if leaves_out_unscored else result).flatten()


@cache
def installed() -> Version:
    """The installed release of TRL, read from its metadata once: that takes a millisecond."""
    return Version(version("trl"))


def _is_before(release: str) -> bool:
    return installed() < Version(release)


def counts_unscored() -> bool:
    """Return whether rows that no function scored count with a reward of 0 (before TRL 1.6)."""
    return _is_before("1.6")


def _summed(rewards: torch.Tensor, setup: RewardSetup, size: int, leaves_out_unscored: bool) -> torch.Tensor:
    """`(rows,)`: the weighted sum of each row's rewards, or of what is normalized within its group."""
    from trl.trainer.utils import nanstd

    weights = torch.as_tensor(setup.weights).to(rewards)
    scored = rewards
    if setup.aggregation == "normalize_then_sum":
        by_function = rewards.view(-1, size, rewards.size(1))  # (groups, size, functions)
        centered = by_function - torch.nanmean(by_function, dim=1, keepdim=True)
        deviations = nanstd(by_function, dim=1, keepdim=True)
        scored = (centered / (deviations + STD_EPSILON)).view(rewards.shape)
    total = (scored * weights).nansum(dim=1)
    missing = rewards.isnan()
    if leaves_out_unscored and missing.any():
        total[missing.all(dim=1)] = torch.nan
    return total


def loss_form(trainer: Any) -> LossForm:
    """Return how this trainer's loss makes and uses importance ratios."""
    args = trainer.args
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    clip_low: float | None = None
    clip_high: float | None = None
    if args.loss_type == "cispo":
        clip_high = high
    elif args.loss_type not in ("sapo", "vespo"):
        clip_low = 1 - args.epsilon
        clip_high = 1 + high
    return LossForm(
        sequence_level=args.importance_sampling_level == "sequence",
        sums_ratios=args.loss_type == "vespo",
        weighs_kl=bool(args.beta) and args.use_bias_correction_kl,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def leave_out_of_entropy_control(
    trainer: Any, entropies: torch.Tensor, mask: torch.Tensor, replayed: torch.Tensor
) -> None:
    """Keep replayed rows out of the mean entropy that TRL's adaptive control of the entropy bonus goes by.

    The loss is about to add all tokens of a micro-batch to the sums of its window: those of replayed rows are taken
    off before. A micro-batch without any other token counts as one token of the last mean, or a window of nothing else
    would look like an entropy of 0. Where there is no last mean, which TRL then takes for infinite, it counts as in
    stock.

    Args:
        trainer (`trl.GRPOTrainer`): Its sums are changed if it uses the adaptive control (from 1.8 on).
        entropies (`(b, C)`): As the loss gets them, detached.
        mask (`(b, C)`): Tokens that the bonus goes by.
        replayed (`(b,)` bool): Which rows are replayed.
    """
    if not getattr(trainer, "use_adaptive_entropy", False):
        return
    left_out = mask * replayed.unsqueeze(1)
    sums = [-(entropies * left_out).sum(), -left_out.sum().to(entropies.dtype)]
    if not bool((mask * ~replayed.unsqueeze(1)).any()):
        last = getattr(trainer, LAST_ENTROPY)
        if not math.isfinite(last):
            return
        sums = [sums[0] + last, sums[1] + 1]
    change = torch.stack(sums)
    before = getattr(trainer, ENTROPY_WINDOW)
    setattr(trainer, ENTROPY_WINDOW, change if before is None else before + change)


def chooses_by_entropy(trainer: Any) -> bool:
    """Return whether an entropy bonus (from 1.8 on) goes by the tokens that `HIGH_ENTROPY` chooses."""
    args = trainer.args
    has_bonus = getattr(args, "entropy_coef", 0.0) or getattr(args, "use_adaptive_entropy", False)
    return bool(has_bonus) and args.top_entropy_quantile < 1.0


def sequence_level_ratio(trainer: Any) -> bool:
    """Return whether vLLM's importance ratio has the shape (B, 1)."""
    return is_of_sequences(getattr(trainer, "vllm_importance_sampling_mode", ""))


def is_of_sequences(mode: str) -> bool:
    """Return whether a mode of vLLM's importance ratio gives one a row, not one a token."""
    return str(mode).startswith("sequence")


def sampler_ratio_mode(trainer: Any) -> str | None:
    """Return the mode of vLLM's importance ratio; None for a trainer whose batches hold none."""
    return str(trainer.vllm_importance_sampling_mode) if corrects_sampler(trainer) else None


def allows_token_weights(trainer: Any) -> bool:
    """Return whether weights of single tokens, folded into the advantage, are exact in this trainer's loss."""
    return bool(trainer.args.importance_sampling_level == "token" or trainer.args.loss_type == "cispo")


def denominator(trainer: Any) -> str:
    """Return the denominator of the policy term in this trainer's loss: `"items"`, that is `num_items_in_batch`;
    `"tokens"` of the micro-batch; or `"rows"`."""
    return {"cispo": "items", "dapo": "items", "vespo": "items", "bnpo": "tokens"}.get(trainer.args.loss_type, "rows")


def bonus_over_items(trainer: Any) -> bool:
    """Return whether `num_items_in_batch` divides the entropy bonus, too (TRL 1.8 and 1.9)."""
    return denominator(trainer) == "items" and _is_before("1.10")


def is_stock_loss(function: Any) -> bool:
    """Return whether a loss is TRL's own, which makes one forward and reads the rest after it; its globals tell, which
    no decorator copies."""
    return getattr(function, "__globals__", {}).get("__name__") == "trl.trainer.grpo_trainer"


def liger_problems(trainer: Any) -> list[str]:
    """Return why replay is refused with the Liger loss of TRL up to 1.13; nothing with another loss."""
    if not _is_before("1.14") or not getattr(trainer, "use_liger_kernel", False):
        return []
    problem = (
        f"use_liger_kernel=True makes TRL {installed()} train with {LIGER_LOSS}, which never calls {LOGPS}, where "
        "replayed rows are corrected: install TRL 1.14 or newer, or set use_liger_kernel=False (and apply Liger's "
        "kernels to the model yourself, before you make the trainer)"
    )
    return [problem]


def step(trainer: Any) -> int:
    """Micro-batches trained on so far."""
    return int(trainer._step)


def begins_iteration(trainer: Any) -> bool:
    """Return whether the next micro-batch begins an iteration 2 … `num_iterations` of the generation batch at hand."""
    if not trainer.model.training or getattr(trainer, BUFFERED) is None:
        return False
    split = trainer.args.steps_per_generation
    step = trainer._step
    return bool(step % split == 0 and step % (split * trainer.num_iterations))


def iteration(trainer: Any) -> int:
    """Return the number of the iteration of the generation batch that the next micro-batch is of; 0 for the first."""
    return int(trainer._step // trainer.args.steps_per_generation % trainer.num_iterations)


def is_training(trainer: Any) -> bool:
    """Tell whether the call comes from within `train`: `is_in_train` stays set where an error ended a training."""
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "train" and frame.f_locals.get("self") is trainer):
        frame = frame.f_back
    return frame is not None


def has_seen_all(trainer: Any) -> bool:
    """Tell whether every micro-batch of the generation batch at hand has had its first forward, or more."""
    return bool(trainer._step % trainer.args.steps_per_generation == 0)


def generates_once(trainer: Any) -> bool:
    """Tell whether the iterations of one generation batch are the whole training."""
    args = trainer.args
    micro_batches = trainer.num_iterations * args.steps_per_generation
    return bool(micro_batches >= trainer.state.max_steps * args.gradient_accumulation_steps)


def split_images(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with a list, of one tensor a row, for each image field that has any number of entries a row; one
    of one entry a row stays a tensor."""
    from trl.trainer.utils import split_pixel_values_by_grid

    split: dict[str, Any] = split_pixel_values_by_grid(batch)
    return split


def micro_batches(trainer: Any, batch: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """A generation batch as the trainer buffers it, rows permuted by `seed`: the global generator stays as it is."""
    from trl.trainer import grpo_trainer as trl

    batch = trl.split_pixel_values_by_grid(batch)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        batch = trl.shuffle_sequence_dict(batch)
    parts = trl.split_tensor_dict(batch, trainer.args.steps_per_generation)
    return [trl.unsplit_pixel_values_by_grid(part) for part in parts]


def counted_items(batch: dict[str, Any], lengths: Ints, trainable: Ints) -> Ints:
    """`(B,)`: what each row adds to `num_items_in_batch`.

    From 1.9 on these are the tokens that the loss trains on. Before, they are those of the completion, or of the tool
    mask where there is one, truncated rows included, also where `mask_truncated_completions` takes them out.
    (With both a tool mask and truncated rows, the batch does not say which of these rows' tokens came from tools: all
    of them count here.)
    """
    if not _is_before("1.9"):
        return trainable
    if "tool_mask" not in batch:
        return lengths
    mask = batch["tool_mask"].ne(0).numpy()
    counted = (mask & (np.arange(mask.shape[1]) < lengths[:, None])).sum(axis=1)
    return np.where(batch["completion_mask"].ne(0).numpy().any(axis=1), counted, lengths)


def has_gradients(trainer: Any) -> bool:
    """Return whether the optimizer has anything to step by; True where an engine keeps gradients to itself."""
    parameters = trainer.model.parameters()
    return steps_in_backward(trainer) or any(parameter.grad is not None for parameter in parameters)


def steps_in_backward(trainer: Any) -> bool:
    """Return whether the optimizer steps in the backward pass, before a callback hears of it (DeepSpeed)."""
    return bool(getattr(trainer, "is_deepspeed_enabled", False))


def syncs_reference(trainer: Any) -> bool:
    """Return whether the reference model changes in training (`sync_ref_model`)."""
    for callback in trainer.callback_handler.callbacks:
        names = [base.__name__ for base in type(callback).__mro__]
        if REFERENCE_SYNC in names and callback.ref_model is not None:
            return True
    return False


def reference_problems(trainer: Any, kl: str) -> Iterator[str]:
    """Yield why the reference, of which stored groups hold log-probs, would change, or change the policy; `kl` is
    `replay_kl`."""
    if trainer.beta and kl == "all" and syncs_reference(trainer):
        yield (
            "sync_ref_model=True changes the reference model, and stored groups hold the log-probs of that before: "
            "set replay_kl='fresh', sync_ref_model=False, or beta=0"
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not trainer.beta or not hasattr(model, "disable_adapter"):
        return
    active = model.active_adapters
    if active[1:]:
        yield (
            f"with beta={trainer.beta:g} TRL activates one adapter after each look at the reference, and "
            f"{', '.join(map(repr, active))} are active: the policy would change. Merge the others into the base "
            "model, or set beta=0"
        )
    for bias in {getattr(model.peft_config[name], "bias", "none") for name in active} - {"none"}:
        yield (
            f"bias={bias!r} of the adapter's config trains biases of the base model, which is the reference "
            f"(beta={trainer.beta:g}): every update would change it. Use bias='none', or set beta=0"
        )


def awaits_its_engine(trainer: Any) -> bool:
    """Return whether DeepSpeed's ZeRO 3 has sharded the model, and no engine can gather it: the trainer makes one when
    training begins."""
    sharded = any(hasattr(parameter, "ds_id") for parameter in trainer.model.parameters())
    return sharded and getattr(trainer, "deepspeed", None) is None


OF_IMAGES = [spec.name for spec in FIELDS if spec.layout in (*IMAGE_LAYOUTS, "sequence")]
"""Keys of a batch that the log-prob method takes, too."""


def forward_logps(trainer: Any, batch: dict[str, Any]) -> torch.Tensor | None:
    """Log-probs of a fresh batch under the policy that generated it, `(B, C)`, by one forward as TRL's own old
    log-probs are made: without gradients and without activation checkpointing. None where the batch holds them."""
    if OLD_LOGPS in batch:
        return None
    from trl.models.utils import disable_gradient_checkpointing

    with disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        return _forward(trainer, trainer.model, batch)


def _forward(trainer: Any, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The log-probs of all completion tokens by one no-grad forward."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    width = batch["completion_ids"].size(1)
    rows = trainer.args.per_device_train_batch_size
    method = getattr(type(trainer), LOGPS)
    # not those that it names: TRL 1.14's own, and many an override, take any and hand them on
    images = {key: batch[key] for key in OF_IMAGES if batch.get(key) is not None}
    with torch.no_grad():
        logps: torch.Tensor = method(trainer, model, ids, mask, width, batch_size=rows, **images)[0]
    return logps


def training_data(trainer: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    """The dataset that the trainer's batches come from, with the columns it uses, and what makes a batch of its rows.

    In training it is that of the running dataloader; before, the one that was given.
    """
    loader = getattr(trainer.callback_handler, "train_dataloader", None)
    if loader is None:
        dataset = trainer.train_dataset
        unused = unused_columns(trainer, getattr(dataset, "column_names", None) or [])
        return (dataset.remove_columns(unused) if unused else dataset), trainer.data_collator
    return loader.dataset, loader.collate_fn


def why_rows_cant_be_asked(trainer: Any) -> str:
    """Return why nobody can ask the trainer's dataset whether it still has a row; empty if it can be asked."""
    dataset = getattr(trainer, "train_dataset", None)
    if dataset is None or streams(dataset):
        return "it is a stream"
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        return "it has a transform (set_transform)"
    return ""


def longest_completion(trainer: Any) -> float:
    """Return how many tokens a completion may have now; a callback may change that."""
    most = getattr(trainer, "max_completion_length", None)
    return float("inf") if most is None else float(most)


def unused_columns(trainer: Any, columns: Sequence[str]) -> list[str]:
    """Return those of a dataset's columns that `remove_unused_columns` takes out of its rows."""
    if not trainer.args.remove_unused_columns:
        return []
    trainer._set_signature_columns_if_needed()
    return [column for column in columns if column not in trainer._signature_columns]


def environments(trainer: Any) -> list[Any]:
    """The environment of each row that this process generated last; none if the trainer has no
    `environment_factory`."""
    return getattr(trainer, "environments", None) or []


def has_environments(trainer: Any) -> bool:
    """Return whether the trainer's rows have environments, also before its first batch."""
    return bool(getattr(trainer, "environment_factories", None) or environments(trainer))


def task_id(environment: Any) -> Any:
    """Return the task that an environment says it has, by an attribute or a method; None if it does not."""
    told = getattr(environment, "task_id", None)
    return told() if callable(told) else told


def templated(trainer: Any, messages: list[Any]) -> list[int]:
    """Return the token ids of a prompt of messages, as this trainer gives it to its model: with its tools."""
    tools = getattr(trainer, "tools", None) or None
    ids: list[int] = _in_template(trainer, messages, True, tools=tools, return_dict=True)["input_ids"]
    return ids


def rendered(trainer: Any, messages: Sequence[Any], opens: bool) -> str:
    """Return messages as text, in this trainer's chat template; `opens`: with what stands before an answer."""
    text: str = _in_template(trainer, messages, opens, tokenize=False)
    return text


def _in_template(trainer: Any, messages: Sequence[Any], opens: bool, **how: Any) -> Any:
    template, settings = getattr(trainer, "chat_template", None), {**trainer.chat_template_kwargs, **how}
    apply = tokenizer(trainer).apply_chat_template
    return apply(messages, chat_template=template, add_generation_prompt=opens, **settings)


def stop_ids(trainer: Any) -> list[int]:
    """Return the tokens that end a completion: those of the model's generation config, too, from 1.14 on."""
    return list(getattr(trainer, "eos_token_ids", None) or [tokenizer(trainer).eos_token_id])


def computes_rewards(trainer: Any) -> bool:
    """Tell whether the trainer scores completions itself: of the asynchronous one, a worker does."""
    return hasattr(trainer, REWARDS)


WHILE_SCORING_OTHERS: dict[str, Any] = {
    "tools": [],  # no calls run: what tools said is in the rows
    "use_vllm": False,  # no weights are synced for generation, and no ratio is computed without log-probs
    "environments": None,  # no episode begins
    "environment_factories": None,
    "environment_factory": None,  # its name before TRL 1.16
}
"""Attributes of the trainer, and what they are while it scores what it did not generate."""


@contextmanager
def unnoticed(trainer: Any, instead: Mapping[str, Any]) -> Iterator[None]:
    """Let the trainer score what it did not generate, as in training but without dropout: neither its log, its table
    of completions, its counters, nor a global generator notices.

    Args:
        trainer (`trl.GRPOTrainer`): Is as it was afterwards.
        instead (`Mapping[str, Any]`): Attributes of it meanwhile, those alone that it has.
    """
    log = {"_metrics": {"train": defaultdict(list), "eval": defaultdict(list)}, "_logs": copy_of_logs(trainer)}
    pending: dict[str, Any] = {"_pending_extra_logs": defaultdict(list), "_pending_metrics": defaultdict(list)}
    changed = {name: value for name, value in {**log, **pending, **instead}.items() if hasattr(trainer, name)}
    before = {name: trainer.__dict__[name] for name in changed if name in trainer.__dict__}
    seen, model, device = trainer.state.num_input_tokens_seen, trainer.model, trainer.accelerator.device
    modes = [(module, module.training) for module in model.modules()]
    try:
        with global_generators_kept(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            trainer.__dict__.update(changed)
            model.eval()
            model.training = True  # by which the trainer tells a batch to train on; its layers stay in evaluation
            yield
    finally:
        for name in changed.keys() - before.keys():
            del trainer.__dict__[name]
        trainer.__dict__.update(before)
        trainer.state.num_input_tokens_seen = seen
        for module, mode in modes:
            module.training = mode


def copy_of_logs(trainer: Any) -> dict[str, Any]:
    """Return a copy of the table of completions, to be written to in its place."""
    return {
        name: defaultdict(held.default_factory, {key: value.copy() for key, value in held.items()})
        if isinstance(held, defaultdict)
        else held.copy()
        for name, held in completions_table(trainer).items()
    }


def own_generation(trainer: Any) -> str:
    """Name the first method of generating or scoring that is not TRL's own; empty if all are."""
    for name in ("_generate", SCORE, "_generate_single_turn"):
        owner = next(base for base in type(trainer).__mro__ if name in base.__dict__)
        if not owner.__module__.startswith("trl."):
            return f"{owner.__qualname__}.{name}"
    return ""


def cuts_off(trainer: Any) -> bool:
    """Return whether completions without an end are masked."""
    return bool(getattr(trainer, "mask_truncated_completions", False))


def streams(dataset: Any) -> bool:
    """Return whether a dataset gives its rows one after the other, without numbers."""
    return not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def corrects_sampler(trainer: Any) -> bool:
    """Return whether every batch holds `IS_RATIO`."""
    return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


def sampler_ratio(trainer: Any, logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute `IS_RATIO` as this trainer does, `(B, C)`, or `(B, 1)` in a mode of sequences.

    Args:
        trainer (`trl.GRPOTrainer`): Its mode and bounds count.
        logps, sampling_logps (`(B, C)`): The policy's and the sampler's; NaN where the sampler told none.
        mask (`(B, C)` bool): Tokens that the loss trains on.
    """
    difference = ((logps - sampling_logps) * mask).nan_to_num(nan=0.0)
    if sequence_level_ratio(trainer):
        difference = difference.sum(dim=1, keepdim=True)
    ratio = difference.exp()
    low = getattr(trainer, "vllm_importance_sampling_clip_min", None)
    name = "vllm_importance_sampling_clip_max"
    high = getattr(trainer, name if hasattr(trainer, name) else "vllm_importance_sampling_cap")  # before TRL 1.6
    bounded = ratio.clamp(min=-math.inf if low is None else low, max=math.inf if high is None else high)
    if trainer.vllm_importance_sampling_mode.endswith("truncate"):
        return bounded
    return ratio.where(ratio == bounded, 0.0)


def keeps_sampler(trainer: Any) -> bool:
    """Return whether batches can hold `SAMPLING_LOGPS`."""
    return bool(trainer.use_vllm or trainer.rollout_func is not None)


def autocasts(trainer: Any) -> bool:
    """Return whether forward passes are computed in another dtype than the weights'."""
    return str(trainer.accelerator.mixed_precision) != "no"


def local_rows(trainer: Any) -> int:
    """Rows of one rank's generation batch."""
    return int(trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation)


def training_metrics(trainer: Any) -> dict[str, list[float]]:
    """Return the values that the trainer's log averages over training steps: a list a key."""
    metrics: dict[str, list[float]] = trainer._metrics["train"]
    return metrics


def start_metrics_anew(trainer: Any) -> None:
    """Give the trainer empty metrics of its own; those it had so far are not written to."""
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}


def completions_table(trainer: Any) -> dict[str, Any]:
    """The columns of the table of completions: deques of equal lengths, one a column; further ones in `"extra"`."""
    columns: dict[str, Any] = trainer._logs
    return columns


def tokenizer(trainer: Any) -> Any:
    """Return the tokenizer; of a processor, its own."""
    return getattr(trainer, "_tokenizer", None) or trainer.processing_class


def checkpoint_folder(trainer: Any, trial: Any) -> Path:
    """The folder that a checkpoint of this moment is written to."""
    return Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"


def files_beside(trainer: Any) -> list[str]:
    """Files of a checkpoint that the trainer writes on this rank without waiting for the other ranks, or after
    `trainer_state.json`, which otherwise comes last."""
    args, names = trainer.args, list[str]()
    if not args.save_only_model:
        names.append("rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth")
    if getattr(trainer, "use_adaptive_entropy", False) and args.should_save:  # since TRL 1.8
        names.append("entropy_ctrl_state.json")
    return names


def vocabulary_size(trainer: Any) -> int:
    """Token ids that the model knows."""
    return int(trainer.model.config.get_text_config().vocab_size)


def positions(trainer: Any) -> int | None:
    """Tokens of the longest row that the model has positions for; None where its configuration names no number."""
    count = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
    return count if isinstance(count, int) and count > 0 else None


def tokenizer_fingerprint(trainer: Any) -> str:
    """A hash of what each token id stands for."""
    return fingerprint(tokenizer(trainer))


def fingerprint(of_tokenizer: Any) -> str:
    """The hash of a tokenizer that no trainer has."""
    tokens = sorted(of_tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


class Dialect:
    """How a trainer lays out its batches, and where its loss is: TRL's way. Those of other trainers derive from it.

    Attributes:
        runs_model (`bool`): Whether an engine of its own runs the model, so that `attach` does not try it.
        around (`Mapping[str, Callable]`): What stands around methods of its own, by name: called with the session,
            the trainer, its method, and the arguments.
    """

    runs_model = False
    around: Mapping[str, Callable[..., Any]] = {}

    def problems(self, trainer: Any) -> list[str]:
        """Return what the trainer lacks, beside TRL's contract: reasons of a `ContractError`."""
        return []

    def untested(self, trainer: Any) -> Iterable[str]:
        """Return reasons to refuse the trainer."""
        return ()

    def check(self, trainer: Any) -> None:
        """Try the trainer's loss; raise a `ContractError` if it is not the known one."""

    def seam(self, trainer: Any, iterates: bool) -> list[str]:
        """Return the names of the methods to wrap; `iterates`: with `replay_iterations="replay"`."""
        entropy = [HIGH_ENTROPY] if chooses_by_entropy(trainer) else []
        return [*SEAM, *entropy, *([PREPARE] if iterates else [])]

    def incoming(self, trainer: Any, batch: Batch) -> Batch:
        """Return a batch that the trainer scored as TRL lays it out."""
        return batch

    def outgoing(self, trainer: Any, batch: Batch) -> Batch:
        """Return a composed batch as the trainer lays it out."""
        return batch

    def in_loss(self, trainer: Any, micro: Batch) -> Batch:
        """Return the keys of a micro-batch that stock's loss reads in another layout."""
        return {}

    def forward_logps(self, trainer: Any, batch: Batch) -> torch.Tensor | None:
        """Return log-probs of a batch in TRL's layout: `compat.forward_logps`."""
        return forward_logps(trainer, batch)
