"""Builds a session's parts from its settings, and checks that they fit the trainer, before anything is patched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from . import compat
from .arguments import refuse_unknown_arguments
from .batch.compose import compose
from .buffer.rate_limiter import RateLimiter
from .buffer.replay_buffer import Limits, ReplayBuffer
from .components import Components
from .config import ReplayConfig
from .errors import ConfigurationError, RefusedError, ReplayError
from .fields import FieldTable
from .hooks import SessionHooks
from .loss.bounds import Bounds
from .loss.gates import Gates
from .protocols import Stateful, division_of
from .registry import BUILTIN, PLUGIN_ARGUMENTS, Plugin, Registry, Resolved
from .rehearsal import ENTRIES, Rehearsal, rehearse
from .sizes import parse_bytes
from .specs import Kind
from .strategies.scope_choice import choose_scope
from .strategies.scopes import ProcessScope
from .strategies.storages import CpuStorage
from .validation import AUTO, STRATEGY_KINDS, unusable

SCOPE_VERBS = ("share", "admit", "fetch", "agree")
STORAGE_METHODS = ("put", "get", "remove", "nbytes")
RATE_LIMITER = "allowance"
"""The rate limiter's name in checkpoints: its first one."""


def in_force(config: ReplayConfig, known: Callable[[], Registry]) -> ReplayConfig:
    """The settings with those of their preset, for all that the user did not give.

    Args:
        config ([`ReplayConfig`]): As the user gave it.
        known (`Callable`): Gives the registry, which need not be read where no preset is named.

    Raises:
        ReplayError: There is no such preset, or its settings can't be used.
    """
    name = config.replay_preset
    if name is None:
        return config
    _, preset = known().preset(name)
    return config.with_defaults(preset.settings, f"The preset {name!r}")


def settle_scope(trainer: Any, config: ReplayConfig) -> tuple[ReplayConfig, str]:
    """The settings with a scope in the place of `"auto"`, and why that one; an empty text where the user named it.

    Raises:
        ConfigurationError: Arguments are given, and no scope that takes them.
    """
    if config.replay_scope not in (AUTO, f"{BUILTIN}/{AUTO}"):
        return config, ""
    given = config.replay_scope_kwargs
    if given:
        raise unusable("replay_scope_kwargs", given, f"name the scope that takes them, instead of {AUTO!r}")
    choice = choose_scope(trainer.accelerator.num_processes, compat.local_rows(trainer), trainer.num_generations)
    return config.with_settings({"replay_scope": choice.name}, "attach()"), choice.reason


def exchange_scope(trainer: Any, config: ReplayConfig, components: Components, known: Registry) -> None:
    """Puts the scope that these settings name in the place of the one that was chosen at first, with the capacity and
    generators that go with it. The buffer must be empty, and the same is done on every process."""
    resolved = known.resolve("scope", config.replay_scope, "replay_scope")
    accelerator = weakref.proxy(trainer.accelerator)
    scope = _make("scope", resolved, config, accelerator, components.fields.names)
    capacity, max_bytes = _capacity(trainer, config, scope)
    components.scope = scope
    components.buffer.capacity = capacity
    components.buffer.max_bytes = max_bytes
    components.rate_limiter.capacity = capacity
    components.seed(_seed(trainer, config, scope))


def assemble(trainer: Any, config: ReplayConfig, known: Registry) -> Components:
    """What a session is made of, built from its settings.

    Args:
        trainer (`trl.GRPOTrainer`): Only read.
        config ([`ReplayConfig`]): The settings in force.
        known ([`Registry`]): Where names are looked up.

    Raises:
        ReplayError: A name, a setting or the trainer can't be used.
    """
    resolved = _resolve_all(config, known)
    plugins = {plugin.name: plugin for plugin in plugins_of(config, known, resolved)}
    fields = FieldTable(
        compat.tokenizer(trainer).pad_token_id,
        compat.sequence_level_ratio(trainer),
        known.fields(set(plugins)),
        config.replay_logps_dtype,
    )
    accelerator = weakref.proxy(trainer.accelerator)  # a session that outlives its trainer keeps no model alive
    scope = _make("scope", resolved["scope"], config, accelerator, fields.names)
    storage = _make("storage", resolved["storage"], config)
    strategies: dict[str, Any] = {}
    for kind in STRATEGY_KINDS:
        if kind not in ("scope", "storage"):
            strategies[kind] = _make(kind, resolved[kind], config)
    _refuse_inexact_token_weights(trainer, config, strategies["correction"])
    multiple_of = trainer.pad_to_multiple_of
    strategies["composer"] = lambda batch, placements: compose(batch, fields, placements, multiple_of)

    hooks = SessionHooks(plugins.values(), resolved, strategies)
    mixes_rows = not getattr(strategies["mixer"], "takes_whole_groups", False)
    capacity, max_bytes = _capacity(trainer, config, scope)
    if capacity:
        stage = _stage(trainer, config, capacity)
        rehearse(stage, resolved, strategies, config.kwargs_of, lenient=hooks.has_plugins)
    rate_limiter = RateLimiter(config, capacity)
    stateful: dict[str, Stateful] = {RATE_LIMITER: rate_limiter}
    for name, strategy in strategies.items():
        if isinstance(strategy, Stateful):
            stateful[name] = strategy
    buffer = ReplayBuffer(
        capacity, storage, _limits(config), max_bytes, trainer.num_generations, len(trainer.reward_func_names)
    )
    buffer.table.reward_weights = compat.reward_setup(trainer).weights
    return Components(
        buffer=buffer,
        scope=scope,
        hooks=hooks,
        rate_limiter=rate_limiter,
        gates=_gates(trainer, config),
        bounds=Bounds(compat.loss_form(trainer)),
        fields=fields,
        rng=np.random.default_rng(_seed(trainer, config, scope)),
        num_generations=trainer.num_generations,
        token_weights=compat.allows_token_weights(trainer),
        forward=compat.has_other_loss_path(trainer),
        mixes_rows=mixes_rows,
        draws_same_prompt=_draws_same_prompt(strategies["sampler"], plugins.values()),
        records=_records(config, hooks, strategies["selector"], mixes_rows),
        processes=trainer.accelerator.num_processes,
        plugins=list(plugins),
        weigh=_weights(config, strategies, plugins.values()),
        stateful=stateful,
    )


def _stage(trainer: Any, config: ReplayConfig, capacity: int) -> Rehearsal:
    """Made-up groups of this trainer's sizes, as many as replay waits for."""
    return Rehearsal(
        trainer.num_generations,
        len(trainer.reward_func_names),
        capacity,
        max(ENTRIES, config.replay_min_size),
        trainer.accelerator.device,
    )


def _draws_same_prompt(sampler: Any, plugins: Iterable[Plugin]) -> bool:
    """Whether entries are drawn for slots of their own prompt only, by whoever draws."""
    others = [plugin.object for plugin in plugins if hasattr(plugin.object, "trl_replay_sample")]
    return all(getattr(drawer, "same_prompt", False) for drawer in others or [sampler])


def _records(config: ReplayConfig, hooks: SessionHooks, selector: Any, mixes_rows: bool) -> bool:
    """Whether every batch gets a forward for its log-probs: `"auto"` takes one where rows of live groups may be
    replaced, whose log-probs the loss would never show."""
    if config.replay_dry_run or not config.replay_buffer_size:  # nothing is displaced, or nothing stored
        return False
    if config.replay_record != "auto":
        return config.replay_record == "forward"
    may_mix = mixes_rows or hooks.has_plugin_for("mix")
    may_choose_live = hooks.has_plugin_for("select") or not getattr(selector, "only_dead", False)
    return may_mix and may_choose_live


def plugins_of(config: ReplayConfig, known: Registry, resolved: Mapping[Kind, Resolved] | None = None) -> list[Plugin]:
    """The plugins that a configuration names: by preset, in `replay_plugins`, and by their strategies."""
    plugins: dict[str, Plugin] = {}
    if config.replay_preset is not None:
        plugin, _ = known.preset(config.replay_preset)
        plugins[plugin.name] = plugin
    for name in config.replay_plugins or []:
        plugins[name] = known.plugin(name, "replay_plugins")
    for found in (resolved or _resolve_all(config, known)).values():
        if found.plugin is not None and found.plugin.name != BUILTIN:
            plugins[found.plugin.name] = found.plugin
    for name in config.kwargs_of_plugins():
        if name not in plugins:
            remedy = f"the plugin {name!r} takes no part; name it in replay_plugins, or leave its arguments out"
            raise unusable(PLUGIN_ARGUMENTS, config.replay_plugins_kwargs, remedy)
    return list(plugins.values())


def idle_components() -> Components:
    """What a disabled session is made of: an empty buffer without room, and no plugins."""
    return Components(
        buffer=ReplayBuffer(0, CpuStorage(), Limits()),
        scope=ProcessScope(None),
        hooks=SessionHooks([], {}, {}),
        rate_limiter=RateLimiter(ReplayConfig(), 0),
        gates=Gates(),
        bounds=Bounds(),
        fields=FieldTable(0),
        rng=np.random.default_rng(0),
        num_generations=1,
        token_weights=False,
        forward=False,
    )


def _resolve_all(config: ReplayConfig, known: Registry) -> dict[Kind, Resolved]:
    """What each kind's setting names."""
    resolved: dict[Kind, Resolved] = {}
    for kind in STRATEGY_KINDS:
        setting = f"replay_{kind}"
        resolved[kind] = known.resolve(kind, getattr(config, setting), setting)
    return resolved


def _refuse_inexact_token_weights(trainer: Any, config: ReplayConfig, correction: Any) -> None:
    if not getattr(correction, "token_weights", False) or compat.allows_token_weights(trainer):
        return
    raise ConfigurationError(
        f"replay_correction={config.replay_correction!r} weighs single tokens, which is exact only with "
        f"importance_sampling_level='token' or loss_type='cispo'; this trainer has "
        f"importance_sampling_level={trainer.args.importance_sampling_level!r}. Use a correction with one "
        "weight a row (ratio, topr, a mask of rows such as sequence_mask, or truncated with level='sequence'), or "
        "change the level."
    )


def _limits(config: ReplayConfig) -> Limits:
    return Limits(config.replay_min_size, config.replay_max_age, config.replay_max_uses, config.replay_cooldown)


def _gates(trainer: Any, config: ReplayConfig) -> Gates:
    return Gates(
        config.replay_weight,
        config.replay_max_weight,
        config.replay_max_log_ratio,
        sequence_level=trainer.args.importance_sampling_level == "sequence",
    )


def preflight(trainer: Any, config: ReplayConfig, components: Components) -> None:
    """Refuses with all reasons at once: our own and those of the plugins that take part.

    Raises:
        RefusedError: There is at least one reason.
    """
    reasons = [*_misfits(trainer, config, components)]
    reasons += _baselines_over_two_prompts(config, components)
    if components.forward:
        reasons += _beside_the_tap(config)
    for result in components.hooks.call("preflight", 0, trainer=trainer, config=config):
        reasons += [str(reason) for reason in result]
    if reasons:
        listed = [f"- {reason}" for reason in reasons]
        raise RefusedError("\n".join(["Replay was not attached:", *listed]))


def _misfits(trainer: Any, config: ReplayConfig, components: Components) -> Iterator[str]:
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
    if config.replay_refill_rounds and config.replay_refill_prompts == "new" and compat.streams(dataset):
        yield (
            f"replay_refill_prompts='new' draws prompts by their numbers, and this trainer's dataset is a stream "
            f"({type(dataset).__name__}), which has none: use replay_refill_prompts='same', or a dataset with a length"
        )
    window = generations / trainer.args.gradient_accumulation_steps
    if config.replay_max_age is not None and config.replay_max_age < window:
        yield (
            f"replay_max_age={config.replay_max_age} is less than the {window:g} updates between two generations, "
            "so that every entry is too old when it is first offered: raise it, or generate more often"
        )
    if (config.replay_retire_passes or 0) > size:
        yield (
            f"replay_retire_passes={config.replay_retire_passes} is more than a group has rows (num_generations="
            f"{size}), so that no prompt would ever count as solved: lower it"
        )


def _baselines_over_two_prompts(config: ReplayConfig, components: Components) -> Iterator[str]:
    """Advantages are computed over rows of one prompt only: the sampler must see to that."""
    setting = config.replay_advantages
    computes = setting in ("joint", "split") or (setting == "auto" and components.mixes_rows)
    if not computes or components.draws_same_prompt or not config.replay_buffer_size:
        return
    yield (
        f"replay_advantages={setting!r} computes the advantages of mixed groups anew, for which all rows must have "
        f"the same prompt, and replay_sampler={config.replay_sampler!r} does not say that it draws so (an attribute "
        "same_prompt = True): use replay_sampler='same_prompt', or replay_advantages='stored'"
    )


def _beside_the_tap(config: ReplayConfig) -> Iterator[str]:
    """Settings that a loss which goes around the log-prob method leaves without effect."""
    inside = {
        "replay_unfilled": config.replay_unfilled in ("mask", "exclude"),
        "replay_weight": config.replay_weight != 1.0,
        "replay_max_weight": config.replay_max_weight is not None,
        "replay_max_log_ratio": config.replay_max_log_ratio is not None,
        "replay_min_ess": config.replay_min_ess is not None,
        "replay_refresh": config.replay_refresh is not None,
    }
    for name, used in inside.items():
        if used:
            yield (
                f"{name}={getattr(config, name)!r} acts inside {compat.LOGPS}, which use_liger_kernel=True goes "
                "around: leave it out, or use use_liger_kernel=False"
            )
    if config.replay_correction != "ratio":
        yield (
            f"replay_correction={config.replay_correction!r} needs the loss to call {compat.LOGPS}, which "
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


def _weights(config: ReplayConfig, strategies: Mapping[str, Any], plugins: Iterable[Plugin]) -> Any:
    """The sampler's weights, if the correction asks for the chances of being drawn.

    Raises:
        ConfigurationError: They are not known.
    """
    if not getattr(strategies["correction"], "needs_priorities", False):
        return None
    weights = getattr(strategies["sampler"], "weights", None)
    others = [plugin.name for plugin in plugins if hasattr(plugin.object, "trl_replay_sample")]
    if callable(weights) and not others:
        return weights
    reason = f"the plugin {others[0]!r} may draw in its place" if others else "it is no WeightedSampler"
    raise ConfigurationError(
        f"replay_correction={config.replay_correction!r} needs the chances with which entries are drawn, and "
        f"replay_sampler={config.replay_sampler!r} does not tell them ({reason}): use proportional, prompt_balanced, "
        "uniform or another trl_replay.WeightedSampler, or replay_correction='ratio'."
    )


def _capacity(trainer: Any, config: ReplayConfig, scope: Any) -> tuple[int, int | None]:
    """Groups and bytes that the buffer may hold: each process's, gathered's one, or what sharded ones hold in all."""
    division = division_of(scope)
    sharded = division is not None and division.one_buffer and not division.replicated
    shards = int(trainer.accelerator.num_processes) if sharded else 1
    nbytes = parse_bytes(config.replay_max_bytes)
    max_bytes = None if nbytes is None else nbytes * shards
    return config.replay_buffer_size * shards, max_bytes


def _seed(trainer: Any, config: ReplayConfig, scope: Any) -> int:
    if config.replay_seed is not None:
        return config.replay_seed
    division = division_of(scope)
    alone = division is not None and not division.one_buffer
    rank = trainer.accelerator.process_index if alone else 0
    return int(trainer.args.seed + rank)


def _make(kind: Kind, resolved: Resolved, config: ReplayConfig, *given: Any) -> Any:
    """The strategy that `resolved` makes of the configured arguments, checked for its interface."""
    setting = f"replay_{kind}={resolved.label!r}"
    kwargs = config.kwargs_of(kind)
    refuse_unknown_arguments(kind, resolved.label, resolved.make, kwargs)
    try:
        made = resolved.make(*given, **kwargs)
    except ReplayError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{setting} can't be made with replay_{kind}_kwargs={kwargs!r}: {reason}") from error
    required = {"scope": SCOPE_VERBS, "storage": STORAGE_METHODS}.get(kind, ("__call__",))
    missing = [name for name in required if not hasattr(made, name)]
    if isinstance(made, type) and not missing:
        missing = ["an instance"]
    if missing:
        raise ConfigurationError(f"{setting} gives {made!r}, which is no {kind}: it lacks {', '.join(missing)}.")
    return made
