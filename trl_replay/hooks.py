"""The hooks of one session: those of the plugins that its configuration names, then the configured strategies.

Errors are attributed here, and what strategies return is checked here, so that no other module needs to doubt either.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .base.progress import CheckLater, check_at_once
from .data.plan import Plan
from .data.table import Table
from .data.types import (
    LARGEST_ADVANTAGE,
    NONE,
    Bools,
    Context,
    Corrected,
    Floats,
    Groups,
    InputsContext,
    Ints,
    ReplayedRows,
    Row,
)
from .errors import HookError, PluginError, ResultError
from .hookspecs import PROJECT, hookimpl
from .protocols import SessionLike
from .registry import Plugin, Strategy, new_manager
from .strategies.treatments import Treatment

PREFLIGHT = f"{PROJECT}_preflight"
METRICS = f"{PROJECT}_metrics"
WHOLE = "iu"
"""NumPy's dtype kinds of whole numbers."""


class CheckedHooks:
    """Calls the session hooks of `plugins`; firstresult hooks fall back to the configured `strategies`, as `made`."""

    def __init__(
        self,
        plugins: Iterable[Plugin],
        strategies: Mapping[Any, Strategy],
        made: Mapping[Any, Any],
        treatments: Mapping[str, Treatment] | None = None,
    ) -> None:
        self._manager = new_manager()
        self._strategies = strategies
        self._update = 0
        self._hook = ""
        self._giver = ""  # of the last result; empty: the configured strategy
        for setting, treatment in reversed(list((treatments or {}).items())):  # who is registered first is called last
            self._register(_Treating(treatment), setting, _constant(setting))
        for plugin in plugins:
            self._register(plugin.object, plugin.name, _constant(f"Plugin {plugin.name!r} ({plugin.distribution})"))
        self._register(_Configured(made), "configured strategies", self._strategy_label)

    def call(self, hook: str, update: int, **arguments: Any) -> Any:
        """Call a hook on every plugin; return pluggy's list of results."""
        self._update = update
        self._hook = f"{PROJECT}_{hook}"
        self._giver = ""
        return getattr(self._manager.hook, self._hook)(**arguments)

    def select(self, groups: Groups, context: Context) -> Ints:
        """Return distinct indices of replaceable fresh groups."""
        result = self.call("select", context.update, groups=groups, context=context)
        return self._indices(result, len(groups))

    def score(self, groups: Groups, context: Context) -> Floats:
        """Return priorities, `(n,)`; the caller rejects non-finite ones."""
        result = self.call("score", context.update, groups=groups, context=context)
        return self._numbers(result, len(groups)).astype(np.float64)

    def rank(self, table: Table, context: Context) -> NDArray[Any]:
        """Return keep ranks, `(len(table),)`, without NaN."""
        result = self.call("rank", context.update, table=table, context=context)
        ranks = self._numbers(result, len(table))
        if len(ranks) and np.isnan(ranks.min()):
            raise self._bad("keep ranks with NaN", "numbers that can be compared")
        return ranks

    def sample(self, table: Table, count: int, context: Context) -> Ints:
        """Return distinct rows of the eligible `table`, `(m, k)`, for the first `m` of `count` slots; -1 for none."""
        result = self.call("sample", context.update, table=table, count=count, context=context)
        drawn = self._array(result)
        if drawn.size == 0:
            return np.empty((0, 1), np.int64)
        if drawn.ndim == 1:
            drawn = drawn[:, None]
        if drawn.ndim != 2 or drawn.dtype.kind not in WHOLE or len(drawn) > count:
            raise self._bad(
                _shown(drawn), f"whole numbers, one for each of at most {count} slots, or (slots, k) of them"
            )
        entries: list[int] = drawn[drawn != NONE].tolist()
        if not _are_distinct_below(len(table), entries):
            raise self._bad(
                str(self._array(result).tolist()),
                f"distinct indices from 0 to {len(table) - 1} (-1: the slot stays fresh)",
            )
        return drawn.astype(np.int64)

    def mix(self, table: Table, drawn: Ints, slots: Groups, context: Context) -> Ints:
        """Return the stored row, of `k * G` per slot, that replaces each row, `(n, G)`; -1 for none."""
        result = self.call("mix", context.update, table=table, drawn=drawn, slots=slots, context=context)
        rows = self._array(result)
        shape = slots.advantages.shape
        if rows.shape != shape or rows.dtype.kind not in WHOLE:
            raise self._bad(_shown(rows), f"whole numbers of shape {shape}, one for each row of each slot")
        most = drawn.shape[1] * shape[1]
        if rows.min() < NONE or rows.max() >= most:
            raise self._bad(str(rows.tolist()), f"stored rows from 0 to {most - 1} (-1: the fresh row stays)")
        ordered = np.sort(rows, axis=1)
        if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NONE)).any():
            raise self._bad(str(rows.tolist()), "every stored row at most once per slot")
        if (drawn == NONE).any() and _asks_for_none(rows, drawn):
            raise self._bad(str(rows.tolist()), "rows of entries that were drawn (-1 in `drawn` means none)")
        return rows.astype(np.int64)

    def advantages(self, groups: Groups, context: Context) -> Floats | None:
        """Return advantages as a plugin shapes them, `(n, G)`, NaN for masked rows; None if no plugin does."""
        result = self.call("advantages", context.update, groups=groups, context=context)
        if result is None:
            return None
        numbers = self._array(result)
        shape = groups.advantages.shape
        if numbers.shape != shape or numbers.dtype.kind not in "fiu":
            raise self._bad(_shown(numbers), f"numbers of shape {shape}, one for each row (NaN masks it)")
        advantages = numbers.astype(np.float64)
        largest = np.abs(np.nan_to_num(advantages, nan=0.0, posinf=np.inf, neginf=-np.inf)).max(initial=0.0)
        if largest > LARGEST_ADVANTAGE:
            raise self._bad(
                f"an advantage of {largest:g}", f"numbers of at most {LARGEST_ADVANTAGE:g}, or NaN to mask a row"
            )
        return advantages

    def eligible(self, table: Table, context: Context) -> dict[str, Bools]:
        """Return the entries that plugins hold back, by reason."""
        held: dict[str, Bools] = {}
        shape = (len(table),)
        for call in self._each("eligible", context.update):
            for result in call(table=table, context=context):
                if not isinstance(result, Mapping):
                    raise self._bad(
                        f"a {type(result).__name__}", f"a dict from reasons to masks, bool of shape {shape}"
                    )
                for reason, given in result.items():
                    mask = self._array(given)
                    if mask.shape != shape or mask.dtype.kind != "b":
                        raise self._bad(f"{_shown(mask)} for {reason!r}", f"masks, bool of shape {shape}")
                    held[str(reason)] = held.get(str(reason), np.zeros(shape, bool)) | mask
        return held

    def plan(self, plan: Plan, groups: Groups, table: Table, context: Context, of_tokens: bool) -> None:
        """Let every plugin edit the plan, then `replay_unfilled` and `replay_kl`.

        Raises:
            ResultError: A plan does not allow an edit; names who made it.
        """
        for call in self._each("plan", context.update):
            before = plan.guard()
            if call(plan=plan, groups=groups, table=table, context=context):
                raise self._bad("a value", "None: edit the plan")
            fault = plan.fault(before, of_tokens)
            if fault:
                raise ResultError(f"{self.giver} made an invalid edit at update {self._update}: {fault}.")

    def _each(self, hook: str, update: int) -> Iterator[Callable[..., list[Any]]]:
        """Yield calls that reach one plugin each, in pluggy's order, then the settings."""
        self._update = update
        self._hook = name = f"{PROJECT}_{hook}"
        plugins: list[Any] = [one.plugin for one in reversed(getattr(self._manager.hook, name).get_hookimpls())]
        plugins.sort(key=lambda plugin: plugin.is_ours)  # settings act after a plugin that asks to be last
        for plugin in plugins:
            self._giver = f"{plugin.label(name)}, in {name},"
            yield self._manager.subset_hook_caller(name, [other for other in plugins if other is not plugin])

    def inputs(self, rows: Sequence[Row], context: InputsContext) -> list[Row] | None:
        """Return the rows that a plugin chooses, one per group; None if it keeps those given."""
        result = self.call("inputs", context.update, groups_of_rows=list(rows), context=context)
        if result is None:
            return None
        wanted = f"a list of {len(rows)} rows of the dataset (dicts), one for each group"
        if not isinstance(result, list | tuple) or not all(isinstance(row, Mapping) for row in result):
            raise self._bad(f"a {type(result).__name__}", wanted)
        if len(result) != len(rows):
            raise self._bad(f"{len(result)} rows", wanted)
        if all("prompt" in row for row in rows) and not all("prompt" in row for row in result):
            raise self._bad("a row without a 'prompt'", wanted)
        return [dict(row) for row in result]

    def admitted(self, table: Table, rows: Ints, groups: Groups, context: Context) -> None:
        """Tell plugins about new entries in the table."""
        if self.has_plugin_for("admitted"):
            self.call("admitted", context.update, table=table, rows=rows, groups=groups, context=context)

    def has_plugin_for(self, hook: str) -> bool:
        """Whether a plugin, not only a configured strategy, implements a hook."""
        return not all(implementation.plugin.is_ours for implementation in self._implementations(hook))

    @property
    def edits_plans(self) -> bool:
        """Whether a plugin or a setting edits plans."""
        return bool(self._implementations("plan"))

    def _implementations(self, hook: str) -> list[Any]:
        found: list[Any] = getattr(self._manager.hook, f"{PROJECT}_{hook}").get_hookimpls()
        return found

    def correct(self, rows: ReplayedRows, context: Context, check: CheckLater = check_at_once) -> Corrected:
        """Return old log-probs and weights of replayed rows; [`KeptErrors.check`] looks whether they are numbers."""
        copies = replace(
            rows, logps=rows.logps.clone(), behavior_logps=rows.behavior_logps.clone(), mask=rows.mask.clone()
        )  # what is checked and bounded below can't be edited
        result = self.call("correct", context.update, rows=copies, context=context)
        if not isinstance(result, Corrected):
            raise self._bad(f"a {type(result).__name__}", "a Corrected")
        weights: Any = result.weights
        shift: Any = result.shift
        finite = self._are_finite(result.old_logps, rows)
        if shift is not None:
            self._check_tensor("a shift", shift, tuple(rows.ages.shape))
        verdicts = {"old_logps": finite}
        if weights is not None:
            verdicts["weights"] = self._are_usable(weights, shift, rows)
        if shift is not None:
            verdicts["shift"] = (shift.abs() <= LARGEST_ADVANTAGE).all()  # NaN is not
        giver, update = self.giver, self._update

        def raise_for(fit: list[bool]) -> None:
            self._giver, self._update = giver, update
            wrong = {name for name, is_fit in zip(verdicts, fit, strict=True) if not is_fit}
            if "old_logps" in wrong:
                raise self._bad("old_logps that are not finite", "finite old_logps wherever rows.mask is set")
            if "weights" in wrong:
                raise self._bad(
                    f"the weights {weights.tolist()}",
                    f"finite weights of at least 0, as {rows.logps.dtype}, and times the rows' advantages "
                    f"{LARGEST_ADVANTAGE:g} at most",
                )
            if wrong:
                raise self._bad(
                    f"the shift {shift.tolist()}", f"numbers from {-LARGEST_ADVANTAGE:g} to {LARGEST_ADVANTAGE:g}"
                )

        check(torch.stack([*verdicts.values()]), raise_for)
        return result

    def _are_finite(self, old_logps: Any, rows: ReplayedRows) -> torch.Tensor:
        """Whether all old log-probs that count are finite."""
        self._check_tensor("old_logps", old_logps, tuple(rows.logps.shape))
        finite: torch.Tensor = ((old_logps.abs() < math.inf) | ~rows.mask).all()
        return finite

    def _are_usable(self, weights: Any, shift: Any, rows: ReplayedRows) -> torch.Tensor:
        """Whether weights are valid in the type in which they are applied, which may be narrower than theirs."""
        shape = tuple(rows.logps.shape)
        self._check_tensor("weights", weights, shape[:1], shape)
        applied = weights.to(rows.logps.dtype)
        sizes = rows.advantages.view(len(rows.ages), -1).float()
        if torch.is_tensor(shift):
            sizes = sizes + shift.float().view(-1, 1)
        weighted = (weights.float().view(len(rows.ages), -1) * sizes).abs()
        small = weighted.expand(shape).masked_fill(~rows.mask, 0.0) <= LARGEST_ADVANTAGE  # NaN is not
        usable: torch.Tensor = ((weights >= 0) & applied.isfinite()).all() & small.all()
        return usable

    def _check_tensor(self, name: str, given: Any, *shapes: tuple[int, ...]) -> None:
        """Refuse what is no tensor of real numbers of one of these shapes."""
        if not torch.is_tensor(given) or tuple(given.shape) not in shapes or given.is_complex():
            wanted = " or ".join(map(str, shapes))
            raise self._bad(f"{name} {_shown(given)}", f"a tensor of real numbers of shape {wanted}")

    def save(self, session: SessionLike, directory: Path) -> None:
        """Let every plugin with state write into its own folder in `directory`."""
        for folder, call in self._calls("save", directory, session.update):
            folder.mkdir(parents=True)
            call(session=session, directory=folder)

    def load(self, session: SessionLike, directory: Path) -> None:
        """Let every plugin with state read from its folder in `directory`."""
        for folder, call in self._calls("load", directory, session.update):
            call(session=session, directory=folder)

    def _calls(self, hook: str, directory: Path, update: int) -> Iterator[tuple[Path, Callable[..., Any]]]:
        """Yield each plugin's folder and a call of this hook on that plugin alone."""
        self._update = update
        name = f"{PROJECT}_{hook}"
        implementations = getattr(self._manager.hook, name).get_hookimpls()
        plugins = {implementation.plugin_name: implementation.plugin for implementation in implementations}
        for plugin_name in sorted(plugins):
            folder = directory / plugin_name
            others = [plugin for other, plugin in plugins.items() if other != plugin_name]
            yield folder, self._manager.subset_hook_caller(name, others)

    def _register(self, plugin: object, name: str, label: Callable[[str], str]) -> None:
        """Register a plugin's hooks so that their errors name the plugin, the hook and the update."""
        guard = _Guard(label, isinstance(plugin, _Configured | _Treating))
        for attribute in dir(plugin):
            options = self._manager.parse_hookimpl_opts(plugin, attribute)
            if options is not None:
                guarded = self._guarded(getattr(plugin, attribute), options, attribute, label)
                setattr(guard, attribute, hookimpl(**options)(guarded))
        self._manager.register(guard, name)

    def _guarded(
        self, function: Callable[..., Any], options: Any, hook: str, label: Callable[[str], str]
    ) -> Callable[..., Any]:
        hook = options.get("specname") or hook
        is_strategy = label == self._strategy_label
        giver = label(hook) if is_strategy else f"{label(hook)}, in {hook},"

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            try:
                result = _complete(hook, function(*arguments, **keywords))
            except Exception as error:
                self._blame(error, label, hook)
                raise
            if result is not None:
                self._giver = giver
            return result

        @functools.wraps(function)
        def wrap(*arguments: Any, **keywords: Any) -> Generator[Any, Any, Any]:
            try:
                result = yield from _with_one_yield(function(*arguments, **keywords))
            except Exception as error:
                self._blame(error, label, hook)
                raise
            inner = self.giver.removesuffix(f", in {hook},")
            self._giver = f"{label(hook)}, as a wrapper of {inner} in {hook},"
            return result

        return wrap if options.get("wrapper") or options.get("hookwrapper") else call

    def _blame(self, error: Exception, label: Callable[[str], str], hook: str) -> None:
        """Raise a HookError that names the origin of `error`; an error that is already attributed passes."""
        if isinstance(error, PluginError):
            return
        raise HookError(
            f"{label(hook)} failed in {hook} at update {self._update}: {type(error).__name__}: {error}"
        ) from error

    @property
    def giver(self) -> str:
        """Name the origin of the last result."""
        return self._giver or self._strategy_label(self._hook)

    def label(self, kind: str) -> str:
        """What the configured strategy of a kind is called."""
        return self._strategies[kind].label

    def _strategy_label(self, hook: str) -> str:
        """Name the configured strategy of a hook's kind, the fallback of plugins."""
        kind = KIND_OF_HOOK.get(hook.removeprefix(f"{PROJECT}_"), "")
        strategy = self._strategies.get(kind)
        if strategy is None:
            return "trl_replay"
        plugin = strategy.plugin
        origin = f" (plugin {plugin.name!r}, {plugin.distribution})" if plugin else ""
        return f"The {kind} {strategy.label!r}{origin}"

    def _numbers(self, result: Any, count: int) -> NDArray[Any]:
        numbers = self._array(result)
        is_real = numbers.dtype.kind in "fiub"
        if numbers.shape != (count,) or not is_real:
            raise self._bad(_shown(numbers), f"numbers of shape ({count},), one for each")
        return numbers

    def _indices(self, result: Any, size: int) -> Ints:
        indices = self._array(result)
        if indices.size == 0:
            return np.empty(0, np.int64)
        if indices.ndim != 1 or indices.dtype.kind not in WHOLE:
            raise self._bad(_shown(indices), "a list of whole numbers")
        if not _are_distinct_below(size, indices.tolist()):
            raise self._bad(str(indices.tolist()), f"distinct indices from 0 to {size - 1}")
        return indices.astype(np.int64)

    def _array(self, result: Any) -> NDArray[Any]:
        if np.ma.is_masked(result):
            raise self._bad("masked values (np.ma)", "plain ones; NaN in advantages masks a row")
        try:
            return np.asarray(result)
        except Exception as error:  # ragged lists, tensors with gradients or on another device
            raise self._bad(f"a {type(result).__name__} ({error})", "what NumPy can make an array of") from error

    def _bad(self, shown: str, wanted: str) -> ResultError:
        return ResultError(f"{self.giver} returned {shown} at update {self._update}; it must return {wanted}.")


KIND_OF_HOOK = {
    "select": "selector",
    "score": "scorer",
    "rank": "evictor",
    "sample": "sampler",
    "mix": "mixer",
    "correct": "correction",
}


def _with_one_yield(body: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run a hook wrapper's generator around one yield.

    Raises:
        RuntimeError: It does not yield exactly once.
    """
    try:
        next(body)
    except StopIteration:
        raise RuntimeError("a wrapper must yield once, to call what it wraps; this one did not") from None
    try:
        given = yield
        resume = functools.partial(body.send, given)
    except BaseException as error:
        resume = functools.partial(body.throw, error)
    try:
        resume()
    except StopIteration as end:
        return end.value
    raise RuntimeError("a wrapper must yield once, to call what it wraps; this one did so twice")


def _complete(hook: str, result: Any) -> Any:
    """Run a hook's generator to the end, so that errors in it are attributed, and return its result."""
    if result is None:
        return None
    if hook == PREFLIGHT:
        return [result] if isinstance(result, str) else [str(reason) for reason in result]
    if hook == METRICS:
        return {str(key): float(value) for key, value in result.items()}
    return list(result) if inspect.isgenerator(result) else result


def _asks_for_none(rows: Ints, drawn: Ints) -> bool:
    """Whether a mixer requests rows, `(n, G)`, of an entry that was not drawn, `(n, k)`."""
    wanted = rows != NONE
    entries = np.where(wanted, rows, 0) // rows.shape[1]
    given = np.take_along_axis(drawn, entries, axis=1)
    return bool((given[wanted] == NONE).any())


def _are_distinct_below(size: int, indices: list[int]) -> bool:
    inside = min(indices, default=0) >= 0 and max(indices, default=-1) < size
    return inside and len(set(indices)) == len(indices)


def _shown(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} values of shape {tuple(value.shape)}"
    return f"of type {type(value).__name__}"


def _constant(label: str) -> Callable[[str], str]:
    return lambda hook: label


class _Guard:
    """A proxy registered in place of a plugin, whose hooks are wrapped so that errors are attributed."""

    def __init__(self, label: Callable[[str], str], is_ours: bool) -> None:
        self.label = label
        self.is_ours = is_ours


class _Treating:
    """A plugin that applies a setting's treatment of rows."""

    def __init__(self, treatment: Treatment) -> None:
        self._treatment = treatment

    @hookimpl
    def trl_replay_plan(self, plan: Plan, groups: Groups, context: Context) -> None:
        self._treatment(plan, groups, context)


class _Configured:
    """The configured strategies, as the last plugin of the firstresult hooks."""

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
    def trl_replay_mix(self, table: Table, drawn: Ints, slots: Groups, context: Context) -> Any:
        return self._strategies["mixer"](table, drawn, slots, context)

    @hookimpl(trylast=True)
    def trl_replay_correct(self, rows: ReplayedRows, context: Context) -> Any:
        return self._strategies["correction"](rows, context)
