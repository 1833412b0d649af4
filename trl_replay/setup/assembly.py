"""Builds a session's parts from its settings."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import compat
from ..buffer import ReplayBuffer, Rules
from ..buffer.rules import RateLimiter, RateLimits
from ..data.fields import FieldTable
from ..data.prompt_table import PromptTable
from ..data.success import Success
from ..data.tasks import Tasks
from ..errors import ConfigurationError
from ..hooks import CheckedHooks
from ..loss.bounds import Bounds, Gates
from ..protocols import Stateful
from ..registry import Plugin
from ..specs import Kind
from ..strategies.scopes import Scope
from ..strategies.treatments import treatments
from .rehearsal import Rehearsal, rehearse
from .settings import Components, OfLoss, Settings

CALLED: tuple[Kind, ...] = ("scorer", "evictor", "sampler", "selector", "mixer", "correction")
"""Kinds of strategies that are called as functions."""


def assemble(trainer: Any, settings: Settings, loss: OfLoss) -> Components:
    """Build a session's components from its settings.

    Args:
        trainer (`trl.GRPOTrainer`): Only read.
        settings ([`Settings`]): What it shall be.
        loss ([`OfLoss`]): What the trainer's loss asks for.

    Raises:
        ReplayError: A strategy can't be made, or not be used with this trainer.
    """
    config = settings.config
    fields = FieldTable(compat.tokenizer(trainer).pad_token_id, compat.sequence_level_ratio(trainer), settings.fields)
    alive = weakref.ref(trainer)
    tasks = Tasks(settings.task_columns, lambda: compat.environments(alive()), trainer.accelerator.is_main_process)
    strategies = settings.strategies
    scope = _scope(trainer, settings)
    made = {kind: strategies[kind].make() for kind in CALLED}
    room = room_in(trainer, settings, scope)
    if not loss.token_weights:
        _refuse_inexact_token_weights(trainer, settings, made["correction"])
    weigh = _weights(settings, made)
    size = trainer.num_generations
    rule = compat.reward_rule(trainer)
    mixes_rows = not getattr(made["mixer"], "takes_whole_groups", False)
    records = _records(settings, made["selector"])
    if room.groups:
        stage = Rehearsal(size, len(rule.functions), room.groups, trainer.accelerator.device, loss.token_weights)
        rehearse(stage, strategies, made, lenient=any(plugin.takes_part for plugin in settings.plugins))
    success = Success(config.replay_pass_reward, rule.in_words(config.replay_reward))
    by_setting = treatments(config.replay_unfilled, config.replay_kl, success)
    hooks = CheckedHooks(settings.plugins, strategies, made, by_setting)
    rules = Rules(
        hooks=hooks,
        limiter=RateLimiter(RateLimits(config.replay_start, config.replay_max_fraction)),
        success=success,
        reward=config.replay_reward,
        max_age=config.replay_max_age,
        max_uses=config.replay_max_uses,
        retire_passes=config.replay_retire_passes,
        weigh=weigh,
        draws_same_prompt=_draws_same_prompt(settings, made["sampler"]),
        drops=_all_say(_objects(settings, "rank") or [made["evictor"]], "drops"),
        stateful={kind: strategy for kind, strategy in made.items() if isinstance(strategy, Stateful)},
    )
    prompts = PromptTable() if settings.chooses_prompts else None
    buffer = ReplayBuffer(room.groups, rules, room.nbytes, size, rule, room.seed, prompts)
    return Components(
        settings=settings,
        buffer=buffer,
        scope=scope,
        hooks=hooks,
        fields=fields,
        tasks=tasks,
        num_generations=size,
        loss=loss,
        mixes_rows=mixes_rows,
        forwards_to_record=records,
        processes=trainer.accelerator.num_processes,
        success=success,
    )


def of_loss(trainer: Any, settings: Settings) -> OfLoss:
    """What a GRPOTrainer's loss asks for."""
    form = compat.loss_form(trainer)
    return OfLoss(
        Gates(settings.config.replay_weight, settings.config.replay_max_weight, form.sequence_level),
        Bounds(form),
        compat.allows_token_weights(trainer),
        trainer.pad_to_multiple_of,
    )


def apply_scope(trainer: Any, settings: Settings, components: Components) -> None:
    """Put the scope that these settings name in the place of the one that was chosen at first, with the room and the
    generators that go with it. The buffer must be empty, and the same is done on every process."""
    components.settings, components.scope = settings, _scope(trainer, settings)
    room = room_in(trainer, settings, components.scope)
    components.buffer.resize(room.groups, room.nbytes, room.seed)


def _scope(trainer: Any, settings: Settings) -> Scope:
    accelerator = weakref.proxy(trainer.accelerator)  # a session that outlives its trainer keeps no model alive
    return Scope(accelerator, settings.config.replay_scope == "gathered")


class Capacity(NamedTuple):
    """A buffer's room, and the seed of its generators: each process's, or that of one buffer for all."""

    groups: int
    nbytes: int | None
    seed: int


def room_in(trainer: Any, settings: Settings, scope: Scope) -> Capacity:
    """Compute what a buffer of this scope may hold."""
    config = settings.config
    shards = int(trainer.accelerator.num_processes) if scope.one_buffer else 1
    nbytes = None if config.max_bytes is None else config.max_bytes * shards
    seed = int(trainer.args.seed + (0 if scope.one_buffer else trainer.accelerator.process_index))
    return Capacity(config.replay_buffer_size * shards, nbytes, seed)


def _plugins_with(settings: Settings, hook: str) -> list[Plugin]:
    return [plugin for plugin in settings.plugins if f"trl_replay_{hook}" in plugin.hooks]


def _objects(settings: Settings, hook: str) -> list[Any]:
    return [plugin.object for plugin in _plugins_with(settings, hook)]


def _all_say(givers: Sequence[Any], attribute: str) -> bool:
    return all(getattr(giver, attribute, False) for giver in givers)


def _draws_same_prompt(settings: Settings, sampler: Any) -> bool:
    """Tell whether entries are drawn for slots of their own prompt only, by whoever draws."""
    return _all_say(_objects(settings, "sample") or [sampler], "same_prompt")


def _records(settings: Settings, selector: Any) -> bool:
    """Tell whether every batch gets a forward for its log-probs: `"auto"` takes one where live groups may be replaced,
    or rows of them, whose log-probs the loss would never show."""
    config = settings.config
    if config.replay_dry_run or not config.replay_buffer_size:  # nothing is displaced, or nothing stored
        return False
    if config.replay_record != "auto":
        return config.replay_record == "forward"
    return not _all_say(_objects(settings, "select") or [selector], "only_dead")


def idle_components(settings: Settings) -> Components:
    """Build the components of a disabled session: an empty buffer without room, and no plugins."""
    hooks = CheckedHooks([], {}, {})
    return Components(
        settings=settings,
        buffer=ReplayBuffer(0, Rules(hooks)),
        scope=Scope(None),
        hooks=hooks,
        fields=FieldTable(0),
        tasks=Tasks(),
        num_generations=1,
    )


def _refuse_inexact_token_weights(trainer: Any, settings: Settings, correction: Any) -> None:
    if not getattr(correction, "token_weights", False):
        return
    raise ConfigurationError(
        f"replay_correction={settings.label('correction')!r} weighs single tokens, which is exact only with "
        f"importance_sampling_level='token' or loss_type='cispo'; this trainer has "
        f"importance_sampling_level={trainer.args.importance_sampling_level!r}. Use a correction with one "
        "weight a row (ratio, topr, a mask of rows such as sequence_mask, or truncated with level='sequence'), or "
        "change the level."
    )


def _weights(settings: Settings, made: Mapping[Kind, Any]) -> Any:
    """The sampler's weights, if the correction asks for the chances of being drawn.

    Raises:
        ConfigurationError: They are not known.
    """
    if not getattr(made["correction"], "needs_priorities", False):
        return None
    weights = getattr(made["sampler"], "weights", None)
    others = [plugin.name for plugin in _plugins_with(settings, "sample")]
    if callable(weights) and not others:
        return weights
    correction, sampler = settings.label("correction"), settings.label("sampler")
    reason = f"the plugin {others[0]!r} may draw in its place" if others else "it is no WeightedSampler"
    raise ConfigurationError(
        f"replay_correction={correction!r} needs the chances with which entries are drawn, and "
        f"replay_sampler={sampler!r} does not tell them ({reason}): use proportional, prompt_balanced, "
        "uniform or another trl_replay.WeightedSampler, or replay_correction='ratio'."
    )
