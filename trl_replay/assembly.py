"""Builds a session's parts from its settings, and checks that they fit the trainer, before anything is patched."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from . import compat
from .batch.compose import compose
from .buffer.rate_limiter import RateLimiter
from .buffer.replay_buffer import ReplayBuffer
from .components import Components
from .errors import ConfigurationError, RefusedError
from .fields import FieldTable
from .hooks import SessionHooks
from .loss.bounds import Bounds
from .loss.gates import Gates
from .protocols import Stateful, division_of
from .registry import Strategy
from .rehearsal import ENTRIES, Rehearsal, rehearse
from .settings import Settings
from .specs import Kind
from .strategies.scopes import ProcessScope
from .strategies.storages import CpuStorage

SCOPE_VERBS = ("share", "admit", "fetch", "agree")
CALLED: tuple[Kind, ...] = ("scorer", "evictor", "sampler", "selector", "mixer", "correction")
"""Kinds of strategies that are called as functions."""
STORAGE_METHODS = ("put", "get", "remove", "nbytes")
RATE_LIMITER = "allowance"
"""The rate limiter's name in checkpoints: its first one."""


def exchange_scope(trainer: Any, settings: Settings, components: Components) -> None:
    """Puts the scope that these settings name in the place of the one that was chosen at first, with the capacity and
    generators that go with it. The buffer must be empty, and the same is done on every process."""
    scope = _make(settings.strategies["scope"], weakref.proxy(trainer.accelerator), components.fields.names)
    capacity, max_bytes = _capacity(trainer, settings, scope)
    components.scope = scope
    components.buffer.capacity = capacity
    components.buffer.max_bytes = max_bytes
    components.rate_limiter.capacity = capacity
    components.seed(_seed(trainer, settings, scope))


def assemble(trainer: Any, settings: Settings) -> Components:
    """What a session is made of, built from its settings.

    Args:
        trainer (`trl.GRPOTrainer`): Only read.
        settings ([`Settings`]): What it shall be.

    Raises:
        ReplayError: A strategy can't be made, or not be used with this trainer.
    """
    fields = FieldTable(
        compat.tokenizer(trainer).pad_token_id,
        compat.sequence_level_ratio(trainer),
        settings.fields,
        settings.logps_dtype,
    )
    accelerator = weakref.proxy(trainer.accelerator)  # a session that outlives its trainer keeps no model alive
    chosen = settings.strategies
    scope = _make(chosen["scope"], accelerator, fields.names)
    storage = _make(chosen["storage"])
    made = {kind: _make(chosen[kind]) for kind in CALLED}
    _refuse_inexact_token_weights(trainer, settings, made["correction"])
    multiple_of = trainer.pad_to_multiple_of
    hooks = SessionHooks(
        settings.plugins, chosen, made, lambda batch, placements: compose(batch, fields, placements, multiple_of)
    )
    mixes_rows = not getattr(made["mixer"], "takes_whole_groups", False)
    capacity, max_bytes = _capacity(trainer, settings, scope)
    if capacity:
        rehearse(_stage(trainer, settings, capacity), chosen, made, lenient=hooks.has_plugins)
    rate_limiter = RateLimiter(settings.rate_limits, capacity)
    stateful: dict[str, Stateful] = {RATE_LIMITER: rate_limiter}
    stateful |= {kind: strategy for kind, strategy in made.items() if isinstance(strategy, Stateful)}
    buffer = ReplayBuffer(
        capacity, storage, settings.limits, max_bytes, trainer.num_generations, len(trainer.reward_func_names)
    )
    buffer.table.reward_weights = compat.reward_setup(trainer).weights
    return Components(
        buffer=buffer,
        scope=scope,
        hooks=hooks,
        rate_limiter=rate_limiter,
        gates=Gates(
            settings.weight,
            settings.max_weight,
            settings.max_log_ratio,
            sequence_level=trainer.args.importance_sampling_level == "sequence",
        ),
        bounds=Bounds(compat.loss_form(trainer)),
        fields=fields,
        rng=np.random.default_rng(_seed(trainer, settings, scope)),
        num_generations=trainer.num_generations,
        token_weights=compat.allows_token_weights(trainer),
        forward=compat.has_other_loss_path(trainer),
        mixes_rows=mixes_rows,
        draws_same_prompt=_draws_same_prompt(made["sampler"], settings),
        records=_records(settings, hooks, made["selector"], mixes_rows),
        processes=trainer.accelerator.num_processes,
        weigh=_weights(settings, made),
        stateful=stateful,
    )


def _stage(trainer: Any, settings: Settings, capacity: int) -> Rehearsal:
    """Made-up groups of this trainer's sizes, as many as replay waits for."""
    return Rehearsal(
        trainer.num_generations,
        len(trainer.reward_func_names),
        capacity,
        max(ENTRIES, settings.limits.min_size),
        trainer.accelerator.device,
    )


def _draws_same_prompt(sampler: Any, settings: Settings) -> bool:
    """Whether entries are drawn for slots of their own prompt only, by whoever draws."""
    others = [plugin.object for plugin in settings.plugins_with("sample")]
    return all(getattr(drawer, "same_prompt", False) for drawer in others or [sampler])


def _records(settings: Settings, hooks: SessionHooks, selector: Any, mixes_rows: bool) -> bool:
    """Whether every batch gets a forward for its log-probs: `"auto"` takes one where rows of live groups may be
    replaced, whose log-probs the loss would never show."""
    if settings.dry_run or not settings.capacity:  # nothing is displaced, or nothing stored
        return False
    if settings.record != "auto":
        return settings.record == "forward"
    may_mix = mixes_rows or hooks.has_plugin_for("mix")
    may_choose_live = hooks.has_plugin_for("select") or not getattr(selector, "only_dead", False)
    return may_mix and may_choose_live


def idle_components(settings: Settings) -> Components:
    """What a disabled session is made of: an empty buffer without room, and no plugins."""
    return Components(
        buffer=ReplayBuffer(0, CpuStorage(), settings.limits),
        scope=ProcessScope(None),
        hooks=SessionHooks([], {}, {}),
        rate_limiter=RateLimiter(settings.rate_limits, 0),
        gates=Gates(),
        bounds=Bounds(),
        fields=FieldTable(0),
        rng=np.random.default_rng(0),
        num_generations=1,
        token_weights=False,
        forward=False,
    )


def _refuse_inexact_token_weights(trainer: Any, settings: Settings, correction: Any) -> None:
    if not getattr(correction, "token_weights", False) or compat.allows_token_weights(trainer):
        return
    raise ConfigurationError(
        f"replay_correction={settings.label('correction')!r} weighs single tokens, which is exact only with "
        f"importance_sampling_level='token' or loss_type='cispo'; this trainer has "
        f"importance_sampling_level={trainer.args.importance_sampling_level!r}. Use a correction with one "
        "weight a row (ratio, topr, a mask of rows such as sequence_mask, or truncated with level='sequence'), or "
        "change the level."
    )


def preflight(trainer: Any, settings: Settings, components: Components) -> None:
    """Refuses with all reasons at once: our own and those of the plugins that take part.

    Raises:
        RefusedError: There is at least one reason.
    """
    reasons = [*_misfits(trainer, settings, components)]
    reasons += _baselines_over_two_prompts(settings, components)
    if components.forward:
        reasons += _beside_the_tap(settings)
    for result in components.hooks.call("preflight", 0, trainer=trainer, config=settings.config):
        reasons += [str(reason) for reason in result]
    if reasons:
        listed = [f"- {reason}" for reason in reasons]
        raise RefusedError("\n".join(["Replay was not attached:", *listed]))


def _misfits(trainer: Any, settings: Settings, components: Components) -> Iterator[str]:
    """Settings that don't fit the trainer's numbers."""
    rows = compat.local_rows(trainer)
    size = trainer.num_generations
    division = division_of(components.scope)
    alone = division is not None and not division.one_buffer
    if alone and rows % size:
        yield (
            f"each process scores {rows} rows (per_device_train_batch_size × steps_per_generation), no multiple of "
            f"num_generations={size}, so that groups straddle processes and replay_scope='process' can't store them: "
            "change one of the three, or use replay_scope='gathered' or 'sharded', which put such groups together"
        )
    generations = trainer.args.steps_per_generation * trainer.num_iterations
    dataset = trainer.train_dataset
    again = settings.dynamic_sampling
    if again.rounds and again.prompts == "new" and compat.streams(dataset):
        yield (
            f"replay_refill_prompts='new' draws prompts by their numbers, and this trainer's dataset is a stream "
            f"({type(dataset).__name__}), which has none: use replay_refill_prompts='same', or a dataset with a length"
        )
    window = generations / trainer.args.gradient_accumulation_steps
    max_age = settings.limits.max_age
    if max_age is not None and max_age < window:
        yield (
            f"replay_max_age={max_age} is less than the {window:g} updates between two generations, "
            "so that every entry is too old when it is first offered: raise it, or generate more often"
        )
    if (settings.retire_passes or 0) > size:
        yield (
            f"replay_retire_passes={settings.retire_passes} is more than a group has rows (num_generations="
            f"{size}), so that no prompt would ever count as solved: lower it"
        )


def _baselines_over_two_prompts(settings: Settings, components: Components) -> Iterator[str]:
    """Advantages are computed over rows of one prompt only: the sampler must see to that."""
    setting = settings.advantages
    sampler = settings.label("sampler")
    computes = setting in ("joint", "split") or (setting == "auto" and components.mixes_rows)
    if not computes or components.draws_same_prompt or not settings.capacity:
        return
    yield (
        f"replay_advantages={setting!r} computes the advantages of mixed groups anew, for which all rows must have "
        f"the same prompt, and replay_sampler={sampler!r} does not say that it draws so (an attribute "
        "same_prompt = True): use replay_sampler='same_prompt', or replay_advantages='stored'"
    )


def _beside_the_tap(settings: Settings) -> Iterator[str]:
    """Settings that a loss which goes around the log-prob method leaves without effect."""
    inside = {
        "replay_unfilled": (settings.unfilled, ("keep", "intra_batch")),
        "replay_weight": (settings.weight, (1.0,)),
        "replay_max_weight": (settings.max_weight, (None,)),
        "replay_max_log_ratio": (settings.max_log_ratio, (None,)),
        "replay_min_ess": (settings.rate_limits.min_ess, (None,)),
        "replay_refresh": (settings.refresh, (None,)),
    }
    for name, (value, outside) in inside.items():
        if value not in outside:
            yield (
                f"{name}={value!r} acts inside {compat.LOGPS}, which use_liger_kernel=True goes "
                "around: leave it out, or use use_liger_kernel=False"
            )
    correction = settings.label("correction")
    if correction != "ratio":
        yield (
            f"replay_correction={correction!r} needs the loss to call {compat.LOGPS}, which "
            "use_liger_kernel=True goes around: use replay_correction='ratio' or use_liger_kernel=False"
        )


def dropout_modules(model: torch.nn.Module) -> list[str]:
    """Names of the modules that drop activations at random."""
    return [name for name, module in model.named_modules() if _drops(module)]


def _drops(module: torch.nn.Module) -> bool:
    """Whether it is a dropout, or keeps a rate for one (attention often applies it without a module)."""
    if isinstance(module, torch.nn.Dropout):
        return bool(module.p > 0)
    rates = [rate for name, rate in vars(module).items() if "dropout" in name]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _weights(settings: Settings, made: Mapping[Kind, Any]) -> Any:
    """The sampler's weights, if the correction asks for the chances of being drawn.

    Raises:
        ConfigurationError: They are not known.
    """
    if not getattr(made["correction"], "needs_priorities", False):
        return None
    weights = getattr(made["sampler"], "weights", None)
    others = [plugin.name for plugin in settings.plugins_with("sample")]
    if callable(weights) and not others:
        return weights
    correction, sampler = settings.label("correction"), settings.label("sampler")
    reason = f"the plugin {others[0]!r} may draw in its place" if others else "it is no WeightedSampler"
    raise ConfigurationError(
        f"replay_correction={correction!r} needs the chances with which entries are drawn, and "
        f"replay_sampler={sampler!r} does not tell them ({reason}): use proportional, prompt_balanced, "
        "uniform or another trl_replay.WeightedSampler, or replay_correction='ratio'."
    )


def _capacity(trainer: Any, settings: Settings, scope: Any) -> tuple[int, int | None]:
    """Groups and bytes that the buffer may hold: each process's, gathered's one, or what sharded ones hold in all."""
    division = division_of(scope)
    sharded = division is not None and division.one_buffer and not division.replicated
    shards = int(trainer.accelerator.num_processes) if sharded else 1
    max_bytes = None if settings.max_bytes is None else settings.max_bytes * shards
    return settings.capacity * shards, max_bytes


def _seed(trainer: Any, settings: Settings, scope: Any) -> int:
    if settings.seed is not None:
        return settings.seed
    division = division_of(scope)
    alone = division is not None and not division.one_buffer
    rank = trainer.accelerator.process_index if alone else 0
    return int(trainer.args.seed + rank)


def _make(strategy: Strategy, *given: Any) -> Any:
    """What the strategy makes, checked for its interface."""
    made = strategy.make(*given)
    required = {"scope": SCOPE_VERBS, "storage": STORAGE_METHODS}.get(strategy.kind, ("__call__",))
    missing = [name for name in required if not hasattr(made, name)]
    if isinstance(made, type) and not missing:
        missing = ["an instance"]
    if missing:
        raise ConfigurationError(
            f"replay_{strategy.kind}={strategy.label!r} gives {made!r}, which is no {strategy.kind}: it lacks "
            f"{', '.join(missing)}."
        )
    return made
