"""The installed plugins and what they offer: discovery, conflicts, and lookup of strategies by name.

One registry serves the process. Discovery does not use pluggy's own entry-point loader, which stops at the first
broken plugin and lets a second plugin of the same name vanish; here each failure is kept with its distribution, warned
about once, and raised only when something asks for the failed plugin.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from .base.validation import Named, arguments_of, refuse_unknown_arguments, unusable
from .data.types import FieldSpec
from .errors import ConfigurationError, PluginError, ReplayError, UnknownNameError, nearest
from .hookspecs import PROJECT, RegistryHooks, SessionHooks, called_alone, hook_names
from .specs import SPECS, Kind, Preset, StrategySpec

BUILTIN = "builtin"
PLUGINS = "replay_plugins"
IN_THIS_PROCESS = "registered in this process"
USABLE_NAME = re.compile(r"[A-Za-z][\w. -]{0,79}", re.ASCII)
OFFERS: dict[str, type] = {"strategies": StrategySpec, "presets": Preset, "fields": FieldSpec}
"""The registry hooks, and what each yields."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A registered plugin: its name, object, distribution, hooks, and the arguments of this run."""

    name: str
    object: Any
    distribution: str
    hooks: frozenset[str]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def takes_part(self) -> bool:
        """Whether the plugin has a session hook."""
        return not self.hooks.isdisjoint(hook_names(SessionHooks))

    @property
    def needs_success(self) -> bool:
        """Whether the plugin needs to know which completions pass."""
        return bool(getattr(self.object, "needs_success", False))


@dataclass(frozen=True, slots=True)
class Failure:
    """A plugin that could not be loaded, and why."""

    name: str
    distribution: str
    reason: str


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy that settings name, before it is made.

    Attributes:
        kind (`str`): Of which it is.
        label (`str`): What it is called.
        factory (`Callable`): Makes it.
        arguments (`Mapping[str, Any]`): The user's, which the factory takes.
        plugin ([`Plugin`], *optional*): Offers it; None for an object or import reference.
    """

    kind: Kind
    label: str
    factory: Callable[..., Any]
    arguments: Mapping[str, Any]
    plugin: Plugin | None

    @property
    def origin(self) -> str:
        """The label, with the distribution unless built in."""
        if self.plugin is None or self.plugin.name == BUILTIN:
            return self.label
        return f"{self.label} ({self.plugin.distribution})"

    @property
    def taken(self) -> str:
        """All arguments, with the user's values and defaults."""
        defaults = {argument.name: argument.default for argument in arguments_of(self.factory).named}
        return ", ".join(f"{name}={value!r}" for name, value in {**defaults, **self.arguments}.items())

    def make(self) -> Any:
        """Make the strategy from its arguments.

        Raises:
            ConfigurationError: Names the setting and what the factory raised, or what is missing of that which it
                made.
        """
        setting = f"replay_{self.kind}={str(Named(self.label, self.arguments))!r}"
        try:
            made = self.factory(**self.arguments)
        except Exception as error:
            if isinstance(error, ReplayError) and not isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"{setting} can't be made: {_told(error)}{self._remedy()}") from error
        if isinstance(made, type):
            raise ConfigurationError(
                f"{setting} gives the class {made.__name__}: give an instance, {made.__name__}()."
            )
        if not callable(made):
            raise ConfigurationError(
                f"{setting} gives {made!r}, which is not a valid {self.kind}: it can't be called."
            )
        return made

    def _remedy(self) -> str:
        """What to do if a spec names the strategy itself in the place of its factory."""
        wanted = [argument.name for argument in arguments_of(self.factory).named if argument.required]
        if "context" not in wanted:
            return ""
        return (
            f". The factory takes ({', '.join(wanted)}), as the {self.kind} itself does: a spec takes what makes it, "
            "which is lambda: f for a function f."
        )


def new_manager() -> pluggy.PluginManager:
    """Return a pluggy manager with all hook specifications."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(RegistryHooks)
    manager.add_hookspecs(SessionHooks)
    return manager


class Registry:
    """Plugins by name, each checked when it is added."""

    def __init__(self) -> None:
        self.plugins: dict[str, Plugin] = {}
        self.failures: dict[str, Failure] = {}
        self._manager = new_manager()
        self._offers: dict[tuple[str, str], list[Any]] = {}

    def add(self, plugin: Any, name: str, distribution: str = IN_THIS_PROCESS) -> None:
        """Add a plugin object under `name`.

        Raises:
            PluginError: A class instead of an instance, a name that is taken or can't name a folder of a checkpoint, a
                hook that does not exist, no hook at all, or an offer that is not what its hook asks for. Nothing is
                added then.
        """
        _refuse_unusable_name(name, distribution)
        if name in self.plugins:
            other = self.plugins[name].distribution
            remedy = "Uninstall one."
            if other == distribution == IN_THIS_PROCESS:
                remedy = f"Unregister the first, trl_replay.unregister({name!r}), or give the second another name."
            raise PluginError(f"Two plugins claim the name {name!r}: {other} and {distribution}. {remedy}")
        if type(plugin).__hash__ is None:
            raise PluginError(f"Plugin {name!r} can't be hashed: a dataclass needs @dataclass(eq=False).")
        if inspect.isclass(plugin):
            raise PluginError(
                f"Plugin {name!r} is the class {plugin.__qualname__}; register an instance of it: {plugin.__name__}()."
            )
        try:
            self._refuse_unknown_hooks(plugin, name)
            self._refuse_lone_wrappers(plugin, name)
            self._manager.register(plugin, name)
            self._manager.check_pending()
            self._require_marked_hooks(plugin, name)
            for hook in OFFERS:
                self._offers[name, hook] = self._collect(plugin, name, hook)
        except Exception as error:
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            if isinstance(error, PluginError):
                raise
            raise PluginError(f"Plugin {name!r} ({distribution}): {type(error).__name__}: {error}") from error
        hooks = frozenset(caller.name for caller in self._manager.get_hookcallers(plugin) or ())
        self.plugins[name] = Plugin(name, plugin, distribution, hooks)
        self.failures.pop(name, None)

    def with_arguments(self, given: Mapping[str, Mapping[str, Any]]) -> Registry:
        """Return a registry in which some plugins are made anew with other arguments, or this one if there are none. A
        missing argument comes from the plugin's attribute of that name, otherwise from its class's default.

        Args:
            given (`Mapping[str, Mapping[str, Any]]`): Keyword arguments by plugins' names.

        Raises:
            ConfigurationError: A plugin takes no arguments, or not these.
            PluginError: It can't be made with them, or could not be loaded.
            UnknownNameError: There is no plugin of that name.
        """
        if not given:
            return self
        made = {name: _made_with(self.plugin(name, PLUGINS), arguments) for name, arguments in given.items()}
        changed = Registry()
        changed.failures = dict(self.failures)
        for name, plugin in self.plugins.items():
            changed.add(made.get(name, plugin.object), name, plugin.distribution)
            changed.plugins[name] = replace(changed.plugins[name], arguments=given.get(name, {}))
        return changed

    def remove(self, name: str) -> None:
        """Remove a plugin; sessions that use it keep it."""
        self.plugin(name, "unregister")
        self._manager.unregister(name=name)
        del self.plugins[name]

    def discover(self) -> None:
        """Load all entry points once; a broken one warns and is recorded in `failures`."""
        claims_of: dict[str, dict[str, EntryPoint]] = {}
        for point in entry_points(group=PROJECT):
            claims = claims_of.setdefault(point.name, {})
            claims[_distribution(point)] = point
        for name, claims in sorted(claims_of.items()):
            self._load(name, claims)

    def _load(self, name: str, claims: dict[str, EntryPoint]) -> None:
        """Register the plugin that one distribution offers under `name`; if that fails, record and warn why."""
        sources = " and ".join(sorted(claims))
        try:
            if len(claims) > 1:
                raise PluginError(
                    f"Two distributions claim the plugin name {name!r}: {sources}. Uninstall one of them."
                )
            (point,) = claims.values()
            self.add(point.load(), name, sources)
        except (Exception, SystemExit) as error:  # a plugin may raise anything at import
            reason = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
            self.failures[name] = Failure(name, sources, reason)
            warnings.warn(
                f"trl_replay plugin {name!r} from {sources} was not loaded: {reason}", RuntimeWarning, stacklevel=4
            )

    def _refuse_unknown_hooks(self, plugin: Any, name: str) -> None:
        known = [*hook_names(RegistryHooks), *hook_names(SessionHooks)]
        for hook in dir(plugin):
            if (
                hook.startswith(f"{PROJECT}_")
                and hook not in known
                and self._manager.parse_hookimpl_opts(plugin, hook)
            ):
                raise PluginError(self._unknown(f"Plugin {name!r}", hook, "hook", known))

    def _refuse_lone_wrappers(self, plugin: Any, name: str) -> None:
        """Refuse wrappers of hooks that are called on one plugin at a time."""
        for hook in called_alone():
            options = self._manager.parse_hookimpl_opts(plugin, hook) if hasattr(plugin, hook) else None
            if options and (options.get("wrapper") or options.get("hookwrapper")):
                raise PluginError(
                    f"Plugin {name!r} implements {hook} as a wrapper, but this hook is called on each plugin "
                    "separately: remove wrapper=True and the yield."
                )

    def _require_marked_hooks(self, plugin: Any, name: str) -> None:
        """Refuse hooks without a mark, which pluggy silently ignores."""
        unmarked = []
        for hook in [*hook_names(RegistryHooks), *hook_names(SessionHooks)]:
            present = callable(getattr(plugin, hook, None))
            if present and self._manager.parse_hookimpl_opts(plugin, hook) is None:
                unmarked.append(hook)
        if unmarked:
            problem = f"has {', '.join(unmarked)} without"
        elif not self._manager.get_hookcallers(plugin):
            problem = "has no function with"
        else:
            return
        raise PluginError(f"Plugin {name!r} {problem} the mark @trl_replay.hookimpl, so it would do nothing.")

    def _collect(self, plugin: Any, name: str, hook: str) -> list[Any]:
        """Collect the yields of a plugin's registry hook."""
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        caller = self._manager.subset_hook_caller(f"{PROJECT}_{hook}", others)
        wanted = OFFERS[hook]
        offers = [offer for result in caller() for offer in result]
        for offer in offers:
            if not isinstance(offer, wanted) or type(offer) is StrategySpec:
                raise PluginError(
                    f"Plugin {name!r}: {PROJECT}_{hook} yields {offer!r}, which is no {wanted.__name__}."
                )
        counts = Counter((type(offer).__name__, offer.name) for offer in offers)
        for (kind, offered), count in counts.items():
            if count > 1:
                raise PluginError(f"Plugin {name!r} offers the {kind} {offered!r} twice.")
        return offers

    def strategies(self, kind: Kind | None = None) -> Iterator[tuple[Plugin, StrategySpec]]:
        """Yield all strategies, of one kind or of all, built-in ones first."""
        wanted = SPECS[kind] if kind else StrategySpec
        for name, plugin in self.plugins.items():
            for spec in self._offers[name, "strategies"]:
                if isinstance(spec, wanted):
                    yield plugin, spec

    def presets(self) -> Iterator[tuple[Plugin, Preset]]:
        """Yield all presets."""
        for name, plugin in self.plugins.items():
            for preset in self._offers[name, "presets"]:
                yield plugin, preset

    def fields(self, names: set[str]) -> list[FieldSpec]:
        """Return the batch keys that the plugins called `names` declare."""
        specs: list[FieldSpec] = []
        for name in sorted(names & set(self.plugins)):
            specs += self._offers[name, "fields"]
        return specs

    def plugin(self, name: str, setting: str, given: str = "") -> Plugin:
        """Return the plugin called `name`.

        Args:
            name (`str`): Of the plugin.
            setting (`str`): Asks for it.
            given (`str`): The setting with its value, where that is more than the name.

        Raises:
            PluginError: It was found but could not be loaded.
            UnknownNameError: There is none.
        """
        if name in self.failures and name not in self.plugins:
            failure = self.failures[name]
            raise PluginError(
                f"{setting} names the plugin {name!r} from {failure.distribution}, which was not loaded: "
                f"{failure.reason}"
            )
        if name not in self.plugins:
            names = [plugin for plugin in self.plugins if plugin != BUILTIN]
            raise UnknownNameError(self._unknown(given or f"{setting}={name!r}", name, "plugin", names))
        return self.plugins[name]

    def resolve(self, kind: Kind, name: Any, arguments: Mapping[str, Any] | None = None) -> Strategy:
        """Return the strategy that `replay_<kind>` names.

        Args:
            kind (`str`): Kind of strategy.
            name: `"heap"`, `"plugin/name"`, `"package.module:Attribute"`, or in Python the strategy itself.
            arguments (`Mapping[str, Any]`, *optional*): What it shall be made with.

        Raises:
            UnknownNameError: Nothing has that name; lists what exists, the nearest, and plugins that failed to load.
            ConfigurationError: Several plugins offer the name, it is a spec of another kind, or it does not take
                these arguments.
        """
        setting = f"replay_{kind}"
        plugin = None
        label = name
        if not isinstance(name, str):  # the strategy itself
            label = getattr(name, "__qualname__", type(name).__qualname__)
            factory = lambda: name  # noqa: E731
        elif ":" in name:
            factory = _imported(name, kind, bool(arguments))
        else:
            offers = [(plugin, spec.name, spec.factory) for plugin, spec in self.strategies(kind)]
            factory, plugin = self._find(name, setting, kind, offers)
        given = dict(arguments or {})
        whole = f"{setting}={str(Named(label, given))!r}"
        refuse_unknown_arguments(whole, f"the {kind} {label!r}", arguments_of(factory), given)
        return Strategy(kind, label, factory, given, plugin)

    def preset(self, name: str) -> tuple[Plugin, Preset]:
        """Return the preset that `replay_preset` names, and its plugin."""
        offers = [(plugin, preset.name, preset) for plugin, preset in self.presets()]
        preset, plugin = self._find(name, "replay_preset", "preset", offers)
        return plugin, preset

    def _find(self, name: str, setting: str, kind: str, offers: list[tuple[Plugin, str, Any]]) -> tuple[Any, Plugin]:
        """Return the offer called `name`, which may be prefixed by its plugin's name, and its plugin."""
        owner, _, short = name.rpartition("/")
        if owner:
            self.plugin(owner, setting, f"{setting}={name!r}")
        matches = []
        for plugin, offered, value in offers:
            if offered == short and owner in ("", plugin.name):
                matches.append((value, plugin))
        builtin = [match for match in matches if match[1].name == BUILTIN]
        if builtin:
            return builtin[0]
        namesakes = [match for match in matches if match[1].name == short]
        if namesakes and len({plugin.distribution for _, plugin in matches}) == 1:
            return namesakes[0]
        if len(matches) == 1:
            return matches[0]
        if matches:
            choices = ", ".join(f"{plugin.name}/{short} ({plugin.distribution})" for _, plugin in matches)
            raise ConfigurationError(f"{setting}={name!r} is offered by several plugins: use one of {choices}.")
        names = [offered if plugin.name == BUILTIN else f"{plugin.name}/{offered}" for plugin, offered, _ in offers]
        raise UnknownNameError(self._unknown(f"{setting}={name!r}", name, kind, names))

    def _unknown(self, given: str, name: str, kind: str, names: list[str]) -> str:
        short = [offered.rpartition("/")[2] for offered in names]
        text = f"{given}: there is no {kind} {name!r}.{nearest(name, [*names, *short])}"
        text += f" There are: {', '.join(sorted(names)) or 'none'}."
        for failure in self.failures.values():
            text += f" The plugin {failure.name!r} from {failure.distribution} was not loaded: {failure.reason}"
        return text


def _imported(reference: str, kind: Kind, called: bool) -> Callable[..., Any]:
    """Return the factory that `package.module:Attribute` names: the attribute itself if it is a class, takes the given
    arguments, or accepts what a session passes; otherwise a factory that returns the attribute."""
    target = _import(reference, f"replay_{kind}")
    factory: Callable[..., Any] = target
    if inspect.isclass(target) or called or _takes_nothing(target):
        return factory
    return lambda: target


def _import(reference: str, setting: str) -> Any:
    module, _, attribute = reference.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError, SystemExit) as error:
        raise UnknownNameError(
            f"{setting}={reference!r} can't be imported: {type(error).__name__}: {error}. Give "
            "package.module:attribute of what the Python that trains can import."
        ) from error
    return target


def _takes_nothing(target: Any) -> bool:
    """Whether `target` can be called without arguments; False for a builtin without a signature."""
    try:
        inspect.signature(target).bind()
    except (TypeError, ValueError):
        return False
    return True


def _made_with(plugin: Plugin, arguments: Mapping[str, Any]) -> Any:
    """Return a new plugin object of the same class with other arguments."""
    maker = type(plugin.object)
    taken = arguments_of(maker)
    if inspect.ismodule(plugin.object) or not taken:
        remedy = f"the plugin {plugin.name!r} takes no arguments; leave them out"
        raise unusable(PLUGINS, [str(Named(plugin.name, arguments))], remedy)
    given = f"{PLUGINS}={[str(Named(plugin.name, arguments))]!r}"
    refuse_unknown_arguments(given, f"the plugin {plugin.name!r}", taken, arguments)
    names = [argument.name for argument in taken.named if hasattr(plugin.object, argument.name)]
    kept = {name: getattr(plugin.object, name) for name in names}
    try:
        return maker(**{**kept, **arguments})
    except Exception as error:
        if isinstance(error, ReplayError) and not isinstance(error, ConfigurationError):
            raise
        who = f"Plugin {plugin.name!r} ({plugin.distribution})"
        kind = ConfigurationError if isinstance(error, ConfigurationError) else PluginError
        raise kind(f"{who} can't be made with {given}: {_told(error)}") from error


def _told(error: Exception) -> str:
    """Return an error's text, with its type unless it is a ConfigurationError."""
    return str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"


def _distribution(point: EntryPoint) -> str:
    if point.dist is None:
        return "an unknown distribution"
    return f"{point.dist.name} {point.dist.version}"


_registry: Registry | None = None


def registry() -> Registry:
    """Return the process's registry, with the built-in plugin and those of all entry points."""
    global _registry
    if _registry is None:
        from .strategies import Builtin

        _registry = Registry()
        _registry.add(Builtin(), BUILTIN, "trl-replay")
        _registry.discover()
    return _registry


def _refuse_unusable_name(name: str, distribution: str) -> None:
    """Refuse a name that can't be a folder in checkpoints or stand before a slash and a strategy's name."""
    if not isinstance(name, str) or not USABLE_NAME.fullmatch(name):
        raise PluginError(
            f"The plugin name {name!r} of {distribution} can't be used: give it at most 80 letters, digits, spaces, "
            "dots, - and _, beginning with a letter."
        )


def register(plugin: Any, name: str) -> None:
    """Register a plugin object for this process, like an entry point: for notebooks, scripts and tests.

    Raises:
        PluginError: See [`Registry.add`].
    """
    registry().add(plugin, name)


def unregister(name: str) -> None:
    """Undo `register`."""
    registry().remove(name)
