"""Builds a session's parts from its settings."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import compat
from ..base.progress import global_generators_kept
from ..base.validation import STRATEGY_KINDS
from ..buffer import Policy, ReplayBuffer
from ..buffer.replay_buffer import RateLimiter, RateLimits
from ..data.prompt_table import PromptTable
from ..data.success import Success
from ..data.table import Table
from ..data.tasks import Tasks
from ..data.types import NONE, Context, FieldTable, Groups, Ints, ReplayedRows
from ..errors import ConfigurationError, HookError, ResultError
from ..hooks import CheckedHooks
from ..loss.supply import Bounds, Gates, fitting
from ..protocols import Stateful
from ..registry import Plugin, Strategy
from ..specs import Kind
from ..strategies.scopes import Scope
from ..strategies.treatments import treatments
from .settings import Components, OfLoss, Settings

ENTRIES, SLOTS = 6, 3
"""Entries of the made-up buffer, and slots of the made-up batch."""
TOKENS = 5


def made_up_groups(rewards: Any, update: int = 0) -> Groups:
    """Groups with TRL's group-scaled advantages; functions have equal weights.

    Args:
        rewards (`(n, G, functions)`): Of each function.
        update (`int`): When they were generated.
    """
    rewards = np.asarray(rewards, np.float64)
    count, size, functions = rewards.shape
    reward = rewards.mean(axis=2)
    deviation = reward.std(axis=1, ddof=1, keepdims=True)
    tokens = np.full((count, size), TOKENS)
    return Groups(
        rewards=rewards,
        reward_weights=np.full(functions, 1 / functions),
        advantages=(reward - reward.mean(axis=1, keepdims=True)) / (deviation + 1e-4),
        lengths=tokens,
        trainable=tokens,
        dead=np.ptp(reward, axis=1) == 0,
        update=np.full(count, update),
        prompt=np.arange(count),
        behavior_logps=np.full((count, size), -3.0),
    )


def made_up_table(scores: Any, size: int, functions: int = 1, **columns: Any) -> Table:
    """A table with one entry a score: serials 0, 1, …, ascending updates, distinct tags and prompts. The first of an
    entry's rows passes.

    Args:
        scores (`(n,)`): Of each entry.
        size (`int`): Rows of an entry.
        functions (`int`): Reward functions.
        **columns: Further columns, or others.
    """
    count = len(scores)
    passes = np.zeros((count, size))
    passes[:, :1] = 1.0
    tokens = np.full(passes.shape, TOKENS)
    values: dict[str, Any] = {
        "serial": np.arange(count),
        "update": np.arange(count),
        "score": np.asarray(scores, np.float64),
        "tag": np.linspace(1.0, 0.1, count),
        "reward_mean": passes.mean(axis=1),
        "reward_std": passes.std(axis=1),
        "tokens": tokens.sum(axis=1),
        "items": tokens.sum(axis=1),
        "prompt": np.arange(count),
        "row_rewards": np.repeat(passes[:, :, None], functions, axis=2),
        "row_advantage": 2 * passes - 0.5,
        "row_logp": -1.0 - passes,
        "row_length": tokens,
        "row_items": tokens,
        **columns,
    }
    table = Table.empty(size, functions)
    table.reward_weights = np.full(functions, 1 / functions)
    table.append(values, count)
    return table


def made_up_rows(ages: Sequence[int], drift: float, device: Any = None) -> ReplayedRows:
    """Replayed rows of one group, whose first row passes; the last has one token less.

    Args:
        ages (`Sequence[int]`): Of each row.
        drift (`float`): Log ratio of every token.
        device (`torch.device`): Where the tensors are.
    """
    count = len(ages)
    mask = torch.ones(count, TOKENS, dtype=torch.bool, device=device)
    mask[-1, -1] = False
    logps = torch.full(mask.shape, -1.0, device=device)
    return ReplayedRows(
        logps=logps,
        behavior_logps=torch.where(mask, logps - drift, logps),
        proximal_logps=logps.clone(),
        mask=mask,
        advantages=torch.tensor([1.5, *[-0.5] * (count - 1)], device=device),
        ages=torch.tensor(ages, device=device),
        priorities=torch.ones(count, device=device),
    )


class Rehearsal:
    """The stage: a small buffer, a fresh batch, and replayed rows, of the trainer's sizes.

    Args:
        size (`int`): Rows of a group.
        functions (`int`): Reward functions.
        capacity (`int`): Groups that the real buffer may hold.
        device (`torch.device`): Where the trainer computes its loss.
        token_weights (`bool`): Whether a correction may give one weight a token.
    """

    def __init__(self, size: int, functions: int, capacity: int, device: Any, token_weights: bool) -> None:
        self._size = size
        self._functions = functions
        self._device = device
        self._token_weights = token_weights
        self._table = made_up_table(np.linspace(1.0, 2.0, ENTRIES), size, functions)
        generator = np.random.default_rng(0)
        self._context = Context(ENTRIES, generator, max(capacity, ENTRIES), size, self._table)
        self._drawn = np.arange(SLOTS)[:, None]

    @property
    def update(self) -> int:
        """Return the made-up number of updates."""
        return self._context.update

    def _groups(self, *passing: int) -> Groups:
        """Make groups of which the first so many rows pass, by every reward function."""
        passes = np.arange(self._size) < np.array(passing)[:, None]
        return made_up_groups(np.repeat(passes[:, :, None], self._functions, axis=2))

    def select(self, hooks: CheckedHooks) -> None:
        """Try a selector on a dead group, a live one, and one whose rows all pass."""
        hooks.select(self._groups(0, 1, self._size), self._context)

    def score(self, hooks: CheckedHooks) -> None:
        """Try a scorer on three live groups."""
        hooks.score(self._groups(1, self._size - 1, 1), self._context)

    def rank(self, hooks: CheckedHooks) -> None:
        """Try an evictor on all entries."""
        hooks.rank(self._table, self._context)

    def sample(self, hooks: CheckedHooks) -> None:
        """Try a sampler for three dead groups, and keep what is drawn for the mixer."""
        slots = self._groups(*[0] * SLOTS)
        drawn = hooks.sample(self._table, SLOTS, replace(self._context, slots=slots))
        filled = drawn[(drawn != NONE).any(axis=1)]
        if len(filled):
            self._drawn = filled

    def mix(self, hooks: CheckedHooks) -> None:
        """Try a mixer on dead groups of the prompts that were drawn."""
        slots = replace(self._groups(*[0] * len(self._drawn)), prompt=self._prompts(self._drawn))
        hooks.mix(self._table, self._drawn, slots, replace(self._context, slots=slots))

    def _prompts(self, drawn: Ints) -> Ints:
        first = (drawn != NONE).argmax(axis=1)[:, None]
        entries = np.take_along_axis(drawn, first, axis=1)[:, 0]
        return np.asarray(self._table.prompt[entries])

    def correct(self, hooks: CheckedHooks) -> None:
        """Try a correction on rows of both signs, slightly off-policy, each token by another ratio; the last row has
        one token less."""
        rows = made_up_rows([1, 2, 3], 0.1, self._device)
        drifts = (rows.logps - rows.behavior_logps) * torch.linspace(0.5, 1.5, TOKENS, device=self._device)
        rows = replace(rows, behavior_logps=rows.logps - drifts)
        fitting(rows, hooks.correct(rows, self._context), self._token_weights)

    def acts(self) -> dict[Kind, Callable[[CheckedHooks], None]]:
        """Return the trial of each kind of strategy, in the order of a step."""
        return {
            "selector": self.select,
            "scorer": self.score,
            "evictor": self.rank,
            "sampler": self.sample,
            "mixer": self.mix,
            "correction": self.correct,
        }


def rehearse(stage: Rehearsal, strategies: Mapping[Kind, Strategy], made: Mapping[Kind, Any], lenient: bool) -> None:
    """Try every strategy that can be made a second time.

    Args:
        stage ([`Rehearsal`]): What they get.
        strategies (`Mapping`): How each is made.
        made (`Mapping`): The real ones, which are left alone.
        lenient (`bool`): Whether a plugin takes part whose hooks may give strategies what is not here: columns of its
            own, a session. Then what raises may pass; what returns something wrong may not.

    Raises:
        ConfigurationError: Names the setting, what was wrong, and what to do.
    """
    with global_generators_kept():
        for kind, act in stage.acts().items():
            second = strategies[kind].make()
            if _is_the_real_one(second, made[kind]) and not _keeps_nothing(second):
                continue
            try:
                act(CheckedHooks([], strategies, {kind: second}))
            except (HookError, ResultError) as error:
                if lenient and isinstance(error, HookError):
                    continue
                reason = str(error).replace(f" at update {stage.update}", "")
                raise ConfigurationError(
                    f"replay_{kind}={strategies[kind].label!r} can't be used, as a trial on made-up groups before "
                    f"training shows. {reason.removesuffix('.')}. Mend it, or name another {kind}: `trl-replay list` "
                    "shows all."
                ) from (error.__cause__ or error)


def _is_the_real_one(made: Any, real: Any) -> bool:
    """Return whether both are one object, or methods of one object."""
    owner = getattr(made, "__self__", made)
    return owner is getattr(real, "__self__", real)


def _keeps_nothing(strategy: Any) -> bool:
    """Return whether a strategy is a function without a closure."""
    return isinstance(strategy, FunctionType) and strategy.__closure__ is None


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
    made = {kind: strategies[kind].make() for kind in STRATEGY_KINDS}
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
    policy = Policy(
        hooks=hooks,
        limiter=RateLimiter(RateLimits(config.replay_start, config.replay_max_fraction)),
        success=success,
        reward=config.replay_reward,
        max_age=config.replay_max_age,
        max_uses=config.replay_max_uses,
        retire_passes=config.replay_retire_passes,
        weigh=weigh,
        draws_same_prompt=_all_say(_objects(settings, "sample") or [made["sampler"]], "same_prompt"),
        drops=_all_say(_objects(settings, "rank") or [made["evictor"]], "drops"),
        stateful={kind: strategy for kind, strategy in made.items() if isinstance(strategy, Stateful)},
    )
    prompts = PromptTable() if settings.chooses_prompts else None
    buffer = ReplayBuffer(room.groups, policy, room.nbytes, size, rule, room.seed, prompts)
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
        buffer=ReplayBuffer(0, Policy(hooks)),
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
