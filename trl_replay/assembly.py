"""Builds a session's parts from its settings, and checks that they fit the trainer, before anything is patched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from . import compat
from .batch.compose import compose
from .buffer.rate_limiter import RateLimiter
from .buffer.replay_buffer import Limits, ReplayBuffer
from .components import Components
from .config import ReplayConfig
from .errors import ConfigurationError, RefusedError, ReplayError
from .fields import FieldTable
from .hooks import SessionHooks
from .loss.gates import Gates
from .protocols import Stateful
from .registry import BUILTIN, Plugin, Registry, Resolved
from .sizes import parse_bytes
from .specs import Kind
from .strategies.scopes import ProcessScope, ShardedScope
from .strategies.storages import CpuStorage
from .validation import STRATEGY_KINDS

SCOPE_VERBS = ("share", "admit", "fetch", "agree")
STORAGE_METHODS = ("put", "get", "remove", "nbytes")


def assemble(trainer: Any, config: ReplayConfig, known: Registry) -> tuple[ReplayConfig, Components]:
    """The settings in force and the parts built from them.

    Args:
        trainer (`trl.GRPOTrainer`): Only read.
        config ([`ReplayConfig`]): As the user gave it.
        known ([`Registry`]): Where names are looked up.

    Raises:
        ReplayError: A name, a setting or the trainer can't be used.
    """
    plugins: dict[str, Plugin] = {}
    if config.replay_preset is not None:
        plugin, preset = known.preset(config.replay_preset)
        plugins[plugin.name] = plugin
        config = config.with_defaults(preset.settings, f"The preset {config.replay_preset!r}")
    for name in config.replay_plugins or []:
        plugins[name] = known.plugin(name, "replay_plugins")
    resolved = {
        kind: known.resolve(kind, getattr(config, f"replay_{kind}"), f"replay_{kind}") for kind in STRATEGY_KINDS
    }
    plugins |= {found.plugin.name: found.plugin for found in resolved.values() if found.plugin}
    plugins.pop(BUILTIN, None)

    fields = FieldTable(
        trainer._tokenizer.pad_token_id,
        compat.sequence_level_ratio(trainer),
        known.fields(set(plugins)),
        config.replay_logps_dtype,
    )
    scope = _make("scope", resolved["scope"], config, trainer.accelerator, fields.names)
    storage = _make("storage", resolved["storage"], config)
    strategies: dict[str, Any] = {
        kind: _make(kind, resolved[kind], config) for kind in STRATEGY_KINDS if kind not in ("scope", "storage")
    }
    if getattr(strategies["correction"], "token_weights", False) and not compat.allows_token_weights(trainer):
        raise ConfigurationError(
            f"replay_correction={config.replay_correction!r} weighs single tokens, which is exact only with "
            f"importance_sampling_level='token' or loss_type='cispo'; this trainer has "
            f"importance_sampling_level={trainer.args.importance_sampling_level!r}. Use a correction with one "
            "weight a row (ratio, sequence_mask, topr, or truncated with level='sequence'), or change the level."
        )
    multiple_of = trainer.pad_to_multiple_of
    strategies["composer"] = lambda batch, placements: compose(batch, fields, placements, multiple_of)
    limits = Limits(
        config.replay_min_size,
        config.replay_max_age,
        config.replay_max_uses,
        config.replay_cooldown,
    )
    capacity, max_bytes = _capacity(trainer, config, scope)
    stateful = {kind: made for kind, made in strategies.items() if isinstance(made, Stateful)}
    return config, Components(
        buffer=ReplayBuffer(capacity, storage, limits, max_bytes),
        scope=scope,
        hooks=SessionHooks(plugins.values(), resolved, strategies),
        rate_limiter=(rate_limiter := RateLimiter(config, capacity)),
        gates=Gates(
            config.replay_weight,
            config.replay_max_weight,
            config.replay_max_log_ratio,
            trainer.args.importance_sampling_level == "sequence",
        ),
        fields=fields,
        rng=np.random.default_rng(_seed(trainer, config, scope)),
        num_generations=trainer.num_generations,
        token_weights=compat.allows_token_weights(trainer),
        forward=compat.has_other_loss_path(trainer),
        processes=trainer.accelerator.num_processes,
        plugins=list(plugins),
        weigh=_weights(config, strategies, plugins.values()),
        stateful={**stateful, "allowance": rate_limiter},
    )


def idle_components() -> Components:
    """The parts of a disabled session: an empty buffer without room, and no plugins."""
    return Components(
        buffer=ReplayBuffer(0, CpuStorage(), Limits()),
        scope=ProcessScope(None),
        hooks=SessionHooks([], {}, {}),
        rate_limiter=RateLimiter(ReplayConfig(), 0),
        gates=Gates(),
        fields=FieldTable(0),
        rng=np.random.default_rng(0),
        num_generations=1,
        token_weights=False,
        forward=False,
    )


def preflight(trainer: Any, config: ReplayConfig, components: Components) -> None:
    """Refuses with all reasons at once: our own and those of the plugins that take part.

    Raises:
        RefusedError: There is at least one reason.
    """
    reasons = []
    rows, size = compat.local_rows(trainer), trainer.num_generations
    if type(components.scope) is ProcessScope and rows % size:
        reasons.append(
            f"each process scores {rows} rows (per_device_train_batch_size × steps_per_generation), no multiple of "
            f"num_generations={size}, so that groups straddle processes and replay_scope='process' can't store them: "
            f"change one of the three, or use replay_scope='gathered' or 'sharded', which put such groups together"
        )
    window = trainer.args.steps_per_generation * trainer.num_iterations / trainer.args.gradient_accumulation_steps
    if config.replay_max_age is not None and config.replay_max_age < window:
        reasons.append(
            f"replay_max_age={config.replay_max_age} is less than the {window:g} updates between two generations, "
            "so that every entry is too old when it is first offered: raise it, or generate more often"
        )
    if (config.replay_retire_passes or 0) > size:
        reasons.append(
            f"replay_retire_passes={config.replay_retire_passes} is more than a group has rows (num_generations="
            f"{size}), so that no prompt would ever count as solved: lower it"
        )
    closed = {
        "replay_unfilled": config.replay_unfilled in ("mask", "exclude"),
        "replay_weight": config.replay_weight != 1.0,
        "replay_max_weight": config.replay_max_weight is not None,
        "replay_max_log_ratio": config.replay_max_log_ratio is not None,
        "replay_min_ess": config.replay_min_ess is not None,
        "replay_refresh": config.replay_refresh is not None,
    }
    reasons += [
        f"{name}={getattr(config, name)!r} acts inside {compat.LOGPS}, which use_liger_kernel=True goes around: leave "
        "it out, or use use_liger_kernel=False"
        for name, used in closed.items()
        if components.forward and used
    ]
    if components.forward and config.replay_correction != "ratio":
        reasons.append(
            f"replay_correction={config.replay_correction!r} needs the loss to call {compat.LOGPS}, which "
            f"use_liger_kernel=True "
            "goes around: use replay_correction='ratio' or use_liger_kernel=False"
        )
    for result in components.hooks.call("preflight", 0, trainer=trainer, config=config):
        reasons += [str(reason) for reason in result]
    if reasons:
        raise RefusedError("Replay was not attached:\n" + "\n".join(f"- {reason}" for reason in reasons))


def dropout_modules(model: torch.nn.Module) -> list[str]:
    """Names of the modules that drop activations at random."""
    return [name for name, module in model.named_modules() if _drops(module)]


def _drops(module: torch.nn.Module) -> bool:
    """Whether it is a dropout, or keeps a rate for one (attention often applies it without a module)."""
    if isinstance(module, torch.nn.Dropout):
        return bool(module.p > 0)
    return any(isinstance(rate, float) and rate > 0 for name, rate in vars(module).items() if "dropout" in name)


def _weights(
    config: ReplayConfig,
    strategies: Mapping[str, Any],
    plugins: Iterable[Plugin],
) -> Any:
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
    shards = int(trainer.accelerator.num_processes) if isinstance(scope, ShardedScope) else 1
    nbytes = parse_bytes(config.replay_max_bytes)
    return (
        config.replay_buffer_size * shards,
        None if nbytes is None else nbytes * shards,
    )


def _seed(trainer: Any, config: ReplayConfig, scope: Any) -> int:
    if config.replay_seed is not None:
        return config.replay_seed
    rank = trainer.accelerator.process_index if type(scope) is ProcessScope else 0
    return int(trainer.args.seed + rank)


def _make(kind: Kind, resolved: Resolved, config: ReplayConfig, *given: Any) -> Any:
    """The strategy that `resolved` makes of the configured arguments, checked for its interface."""
    kwargs = config.kwargs_of(kind)
    try:
        made = resolved.make(*given, **kwargs)
    except ReplayError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"replay_{kind}={resolved.label!r} can't be made with replay_{kind}_kwargs={kwargs!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    required = {"scope": SCOPE_VERBS, "storage": STORAGE_METHODS}.get(kind, ("__call__",))
    missing = [name for name in required if not hasattr(made, name)]
    if missing or isinstance(made, type):
        raise ConfigurationError(
            f"replay_{kind}={resolved.label!r} gives {made!r}, which is no {kind}: it lacks "
            f"{', '.join(missing) or 'an instance'}."
        )
    return made
