"""The hooks of one session: the plugins that its configuration names, and last the configured strategies.

Errors are attributed here, and what strategies return is checked here, so that no other module needs to doubt either.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pluggy
from numpy.typing import NDArray

from .errors import HookError, ReplayError, ResultError
from .hookspecs import PROJECT, hookimpl
from .registry import Plugin, Resolved, new_manager
from .table import Table
from .types import Batch, Context, Corrected, Floats, Groups, Ints, Placement, ReplayedRows


class SessionHooks:
    """Calls the session hooks of `plugins`; the firstresult hooks fall back to the configured `strategies`."""

    def __init__(
        self, plugins: Iterable[Plugin], resolved: Mapping[Any, Resolved], strategies: Mapping[Any, Any]
    ) -> None:
        self._manager = new_manager()
        self._resolved = resolved
        self._update = 0
        for plugin in plugins:
            self._manager.register(plugin.object, plugin.name)
            self._attribute(plugin.object, _plugin_label(plugin))
        last = _Configured(strategies)
        self._manager.register(last, "configured strategies")
        self._attribute(last, self._strategy_label)

    def call(self, hook: str, update: int, **arguments: Any) -> Any:
        """Calls a hook on every plugin; returns pluggy's list of results."""
        self._update = update
        return getattr(self._manager.hook, f"{PROJECT}_{hook}")(**arguments)

    def select(self, groups: Groups, context: Context) -> Ints:
        """Distinct indices of replaceable fresh groups."""
        result = self.call("select", context.update, groups=groups, context=context)
        return self._indices("selector", result, len(groups), len(groups))

    def score(self, groups: Groups, context: Context) -> Floats:
        """Priorities, `(n,)`; non-finite ones are the caller's to refuse."""
        result = self.call("score", context.update, groups=groups, context=context)
        return self._numbers("scorer", result, len(groups)).astype(np.float64)

    def rank(self, table: Table, context: Context) -> NDArray[Any]:
        """Keep ranks, `(len(table),)`, without NaN."""
        ranks = self._numbers("evictor", self.call("rank", context.update, table=table, context=context), len(table))
        if np.isnan(ranks).any():
            raise self._bad("evictor", "keep ranks with NaN", "numbers that can be compared")
        return ranks

    def sample(self, table: Table, count: int, context: Context) -> Ints:
        """At most `count` distinct rows of the eligible `table`."""
        result = self.call("sample", context.update, table=table, count=count, context=context)
        return self._indices("sampler", result, len(table), count)

    def correct(self, rows: ReplayedRows, context: Context) -> Corrected:
        """Old log-probs and weights of replayed rows."""
        result = self.call("correct", context.update, rows=rows, context=context)
        if not isinstance(result, Corrected):
            raise self._bad("correction", repr(type(result)), "a Corrected")
        shape = tuple(rows.logps.shape)
        if tuple(result.old_logps.shape) != shape:
            raise self._bad("correction", f"old_logps of shape {tuple(result.old_logps.shape)}", f"the shape {shape}")
        if result.weights is not None:
            weights = result.weights
            if tuple(weights.shape) not in (shape, shape[:1]) or not bool(
                (weights >= 0).all() & weights.isfinite().all()
            ):
                raise self._bad(
                    "correction", f"weights {weights}", f"finite weights of at least 0, {shape[:1]} or {shape}"
                )
        return result

    def compose(self, batch: Batch, placements: Sequence[Placement], context: Context) -> Batch:
        """The batch with the placed groups in their slots."""
        result = self.call("compose", context.update, batch=batch, placements=placements, context=context)
        if not isinstance(result, dict) or list(result) != list(batch):
            raise self._bad("composer", "other keys than the batch's", "a dict with the same keys in the same order")
        return result

    def _attribute(self, plugin: object, label: Callable[[str], str]) -> None:
        """Wraps a plugin's hook implementations so that what they raise names the plugin, the hook and the update."""
        for caller in self._manager.get_hookcallers(plugin) or []:
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin:
                    guarded = self._guarded(implementation, caller.name, label)
                    object.__setattr__(implementation, "function", guarded)  # typed as final, and the only way in

    def _guarded(self, implementation: pluggy.HookImpl, hook: str, label: Callable[[str], str]) -> Callable[..., Any]:
        function: Callable[..., Any] = implementation.function

        def blame(error: Exception) -> HookError:
            return HookError(
                f"{label(hook)} failed in {hook} at update {self._update}: {type(error).__name__}: {error}"
            )

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except ReplayError:
                raise
            except Exception as error:
                raise blame(error) from error

        @functools.wraps(function)
        def wrap(*arguments: Any) -> Generator[Any, Any, Any]:
            try:
                return (yield from function(*arguments))
            except ReplayError:
                raise
            except Exception as error:
                raise blame(error) from error

        @functools.wraps(function)
        def collect(*arguments: Any) -> Any:
            return list(wrap(*arguments))

        if implementation.wrapper or implementation.hookwrapper:
            return wrap
        return collect if inspect.isgeneratorfunction(function) else call

    def _strategy_label(self, hook: str) -> str:
        kind = KIND_OF_HOOK.get(hook.removeprefix(f"{PROJECT}_"), "")
        return self._label(kind) if kind in self._resolved else "trl_replay"

    def _label(self, kind: str) -> str:
        resolved = self._resolved.get(kind)
        if resolved is None:
            return f"The {kind}"
        plugin = resolved.plugin
        origin = f" (plugin {plugin.name!r}, {plugin.distribution})" if plugin else ""
        return f"The {kind} {resolved.label!r}{origin}"

    def _numbers(self, kind: str, result: Any, count: int) -> NDArray[Any]:
        try:
            numbers = np.asarray(result)
        except ValueError:
            numbers = np.asarray(None)
        if numbers.shape != (count,) or not (np.issubdtype(numbers.dtype, np.number) or numbers.dtype == bool):
            shown = f"{numbers.dtype} values of shape {numbers.shape}"
            raise self._bad(kind, shown, f"numbers of shape ({count},), one for each")
        return numbers

    def _indices(self, kind: str, result: Any, size: int, most: int) -> Ints:
        indices = np.asarray(result)
        if indices.size == 0:
            return np.empty(0, np.int64)
        if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
            raise self._bad(kind, f"{indices.dtype} values of shape {indices.shape}", "a list of whole numbers")
        distinct = len(np.unique(indices))
        if indices.min() < 0 or indices.max() >= size or distinct < len(indices) or len(indices) > most:
            raise self._bad(kind, str(indices.tolist()), f"at most {most} distinct indices from 0 to {size - 1}")
        return indices.astype(np.int64)

    def _bad(self, kind: str, shown: str, wanted: str) -> ResultError:
        return ResultError(f"{self._label(kind)} returned {shown} at update {self._update}; it must return {wanted}.")


KIND_OF_HOOK = {
    "select": "selector",
    "score": "scorer",
    "rank": "evictor",
    "sample": "sampler",
    "correct": "correction",
}


def _plugin_label(plugin: Plugin) -> Callable[[str], str]:
    return lambda hook: f"Plugin {plugin.name!r} ({plugin.distribution})"


class _Configured:
    """The configured strategies as the last plugin of the firstresult hooks."""

    def __init__(self, strategies: Mapping[Any, Any]) -> None:
        self._strategies = strategies

    @hookimpl(trylast=True)
    def trl_replay_select(self, groups: Groups, context: Context) -> Any:
        return self._strategies["selector"](groups, context)

    @hookimpl(trylast=True)
    def trl_replay_score(self, groups: Groups, context: Context) -> Any:
        return self._strategies["scorer"](groups, context)

    @hookimpl(trylast=True)
    def trl_replay_rank(self, table: Table, context: Context) -> Any:
        return self._strategies["evictor"](table, context)

    @hookimpl(trylast=True)
    def trl_replay_sample(self, table: Table, count: int, context: Context) -> Any:
        return self._strategies["sampler"](table, count, context)

    @hookimpl(trylast=True)
    def trl_replay_correct(self, rows: ReplayedRows, context: Context) -> Any:
        return self._strategies["correction"](rows, context)

    @hookimpl(trylast=True)
    def trl_replay_compose(self, batch: Batch, placements: Sequence[Placement], context: Context) -> Any:
        return self._strategies["composer"](batch, placements)
