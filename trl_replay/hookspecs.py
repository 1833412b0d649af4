"""The hooks that a plugin may implement. Imports neither torch nor trl.

A plugin is an object (a module, or an instance of a class) with some of these functions, marked with `hookimpl`.
Registry hooks are called on every installed plugin, to learn what it offers. Session hooks are called only on the
plugins that a configuration names: in `replay_plugins`, or through a strategy or preset of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from .data.plan import Plan
from .data.types import Context, Corrected, FieldSpec, Groups, InputsContext, Ints, ReplayedRows, Row
from .protocols import SessionLike
from .specs import Preset, StrategySpec

if TYPE_CHECKING:
    from .data.table import Table

PROJECT = "trl_replay"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as a hook."""


class RegistryHooks(Protocol):
    """What a plugin offers. Collected from every installed plugin; must not import torch."""

    @hookspec
    def trl_replay_strategies(self) -> Iterable[StrategySpec]:
        """Yield strategies by name.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_strategies(self):
        ...         yield EvictorSpec("most_used", lambda: lambda table, context: -table.uses, "the most used leaves")
        """

    @hookspec
    def trl_replay_fields(self) -> Iterable[FieldSpec]:
        """Yield batch keys that TRL does not have, from a rollout function or a trainer subclass.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_fields(self):
        ...         yield FieldSpec("turn_rewards", layout="completion", pad=0.0)
        """

    @hookspec
    def trl_replay_presets(self) -> Iterable[Preset]:
        """Yield named bundles of settings.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_presets(self):
        ...         yield Preset("short_lived", {"replay_max_age": 5, "replay_evictor": "fifo"}, "young groups only")
        """


class SessionHooks(Protocol):
    """Hooks of one session. Only plugins that the configuration names are called."""

    @hookspec
    def trl_replay_preflight(self, trainer: Any, config: Any) -> Iterable[str] | None:
        """Return reasons to refuse this trainer with this configuration; all are reported at once before anything is
        patched.

        `config` is the [`ReplayConfig`] in force, a preset's settings included.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_preflight(self, trainer, config):
        ...         if trainer.num_generations < 4:
        ...             yield "this plugin needs num_generations of at least 4"
        """

    @hookspec
    def trl_replay_attached(self, session: SessionLike) -> None:
        """Called once the trainer is wrapped. Add table columns here.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_attached(self, session):
        ...         session.buffer.table.add_column("difficulty", fill=0.5)
        """

    @hookspec
    def trl_replay_detached(self, session: SessionLike) -> None:
        """Called once the trainer is restored.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_detached(self, session):
        ...         print(session.explain())
        """

    @hookspec
    def trl_replay_metrics(self, context: Context) -> Mapping[str, float]:
        """Return further metrics of this generation batch, for the trainer's log.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_metrics(self, context):
        ...         return {"replay/oldest": float(context.update - min(context.table.update, default=context.update))}
        """

    @hookspec(firstresult=True)
    def trl_replay_select(self, groups: Groups, context: Context) -> Any:
        """Select the fresh groups that may be replaced, instead of the configured selector.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_select(self, groups, context):
        ...         return [] if context.update < 10 else None  # None: the next plugin, at last what is configured
        """

    @hookspec(firstresult=True)
    def trl_replay_score(self, groups: Groups, context: Context) -> Any:
        """Return priorities of settled groups, instead of the configured scorer.

        >>> class Plugin:
        ...     @hookimpl(wrapper=True)
        ...     def trl_replay_score(self, groups, context):
        ...         scores = yield
        ...         return scores * (groups.reward_mean > 0)
        """

    @hookspec(firstresult=True)
    def trl_replay_rank(self, table: Table, context: Context) -> Any:
        """Return keep ranks of all entries, instead of the configured evictor.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_rank(self, table, context):
        ...         return table.score / (1 + table.uses)
        """

    @hookspec(firstresult=True)
    def trl_replay_sample(self, table: Table, count: int, context: Context) -> Any:
        """Draw distinct rows of the eligible table to replay, instead of the configured sampler.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_sample(self, table, count, context):
        ...         return weighted_sample(1.0 / (1 + table.uses), count, context.rng)
        """

    @hookspec(firstresult=True)
    def trl_replay_mix(self, table: Table, drawn: Ints, slots: Groups, context: Context) -> Any:
        """Return the stored row that replaces each row of the slots, `(n, G)`, instead of the configured mixer; -1
        keeps the fresh row.

        >>> import numpy as np
        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_mix(self, table, drawn, slots, context):
        ...         reward = np.where(table.row_trains, table.row_reward, -np.inf)[drawn[:, 0]]
        ...         rows = np.full(slots.advantages.shape, -1)
        ...         rows[:, 0] = reward.argmax(axis=1)  # the best row in the place of the first
        ...         return rows
        """

    @hookspec(firstresult=True)
    def trl_replay_inputs(self, groups_of_rows: Sequence[Row], context: InputsContext) -> Any:
        """Replace the prompts that the trainer's sampler drew: return one row of the dataset per group, in order.
        Called in training only, before every generation, further rounds included.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_inputs(self, groups_of_rows, context):
        ...         def solved(row):  # by its last group
        ...             return context.prompts.get("pass_rate", [context.key(row)], default=0.0)[0] == 1.0
        ...
        ...         others = iter(context.new_prompts(sum(map(solved, groups_of_rows)), skip=solved))
        ...         return [next(others) if solved(row) else row for row in groups_of_rows]
        """

    @hookspec(firstresult=True)
    def trl_replay_advantages(self, groups: Groups, context: Context) -> Any:
        """Return advantages of the fresh rows, `(n, G)`, instead of the trainer's; NaN masks a row. Must be pure,
        since mixed groups pass through it, too.

        >>> import numpy as np
        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_advantages(self, groups, context):
        ...         return np.where(groups.lengths > 1000, np.nan, groups.advantages)  # too long: no gradient
        """

    @hookspec
    def trl_replay_eligible(self, table: Table, context: Context) -> Mapping[str, Any]:
        """Return masks, `(len(table),)`, of entries that may not be replayed now, by reason. `explain()` lists the
        reasons.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_eligible(self, table, context):
        ...         return {"younger than 5 updates": context.update - table.update < 5}
        """

    @hookspec
    def trl_replay_plan(self, plan: Plan, groups: Groups, table: Table, context: Context) -> None:
        """Edit what each row trains on, once slots are filled. Called in every iteration; not in a dry run.

        Set `plan.masked` or `plan.silent`, clear `plan.kl`, or change `plan.advantages`. `groups` are the fresh ones;
        `plan.column` gives a value for each row.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_plan(self, plan, groups, table, context):
        ...         too_long = plan.column(table.row_length, groups.lengths) > 1000
        ...         plan.masked |= too_long  # fresh or stored
        """

    @hookspec
    def trl_replay_admitted(self, table: Table, rows: Ints, groups: Groups, context: Context) -> None:
        """Fill a plugin's columns for new entries, which are at `rows` of the table and not ranked yet.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_attached(self, session):
        ...         session.buffer.table.add_column("difficulty")
        ...
        ...     @hookimpl
        ...     def trl_replay_admitted(self, table, rows, groups, context):
        ...         table.difficulty[rows] = 1 - groups.reward_mean
        """

    @hookspec(firstresult=True)
    def trl_replay_correct(self, rows: ReplayedRows, context: Context) -> Corrected | None:
        """Return old log-probs and weights of replayed rows, instead of the configured correction. Called inside the
        loss.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_correct(self, rows, context):
        ...         return Corrected(rows.behavior_logps, weights=0.5 ** (rows.ages / 8))
        """

    @hookspec
    def trl_replay_save(self, session: SessionLike, directory: Path) -> None:
        """Called while a checkpoint is written; the plugin may write files into `directory`.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_save(self, session, directory):
        ...         (directory / "my_plugin.json").write_text("{}")
        """

    @hookspec
    def trl_replay_load(self, session: SessionLike, directory: Path) -> None:
        """Called while a checkpoint is resumed; the plugin may read its files from `directory`.

        >>> class Plugin:
        ...     @hookimpl
        ...     def trl_replay_load(self, session, directory):
        ...         if directory.is_dir():  # else the checkpoint is older than the plugin
        ...             (directory / "my_plugin.json").read_text()
        """


def called_alone() -> list[str]:
    """Names of the hooks that are called on each plugin separately, which wrappers can't implement."""
    return [*hook_names(RegistryHooks), *(f"{PROJECT}_{name}" for name in ("eligible", "plan", "save", "load"))]


def hook_names(specs: type) -> list[str]:
    """Return the names of the hooks that a class of specifications declares."""
    return [name for name in vars(specs) if name.startswith(f"{PROJECT}_")]
