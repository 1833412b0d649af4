"""Discovery and names: fake distributions on `sys.path`, each test with a registry of its own."""

from __future__ import annotations

import dataclasses
import itertools

import installed
import numpy as np
import pytest

import trl_replay
from trl_replay import ConfigurationError, EvictorSpec, PluginError, SamplerSpec, hookimpl
from trl_replay.errors import UnknownNameError
from trl_replay.registry import BUILTIN, Registry
from trl_replay.strategies import Builtin
from trl_replay.testing import make_context, make_table

numbers = itertools.count()

GOOD = """
from trl_replay import EvictorSpec, Preset, hookimpl

def coldest(table, context):
    return -table.uses

@hookimpl
def trl_replay_strategies():
    yield EvictorSpec("coldest", lambda: coldest, "the most used leaves")

@hookimpl
def trl_replay_presets():
    yield Preset("young", {"replay_max_age": 3}, "young groups only")
"""
BROKEN = "raise ImportError('needs a library that is not here')"


def offers(*specs):
    """A plugin object that offers some strategies."""

    class Plugin:
        @hookimpl
        def trl_replay_strategies(self):
            yield from specs

    return Plugin()


@pytest.fixture
def registry():
    registry = Registry()
    registry.add(Builtin(), BUILTIN, "trl-replay")
    return registry


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution with one entry point on the path: `install(distribution, name, code)`."""

    def install(distribution, name, code=GOOD, version="1.0"):
        module = f"fake_plugin_{next(numbers)}"
        site = tmp_path / module
        installed.install(site, distribution, f"{name} = {module}", version)
        (site / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(site)
        return module

    return install


# discovery


def test_an_installed_plugin_is_found_with_its_distribution(registry, install):
    install("replay-cold", "cold", version="2.3")
    registry.discover()
    assert registry.plugins["cold"].distribution == "replay-cold 2.3"
    assert registry.resolve("evictor", "cold/coldest").plugin.name == "cold"
    assert registry.preset("cold/young")[1].settings == {"replay_max_age": 3}


def test_a_broken_plugin_warns_and_raises_with_its_reason_only_when_it_is_asked_for(registry, install):
    install("replay-broken", "broken", BROKEN)
    install("replay-cold", "cold")
    words = r"'broken' from replay-broken 1\.0 was not loaded: ImportError: needs a lib"
    with pytest.warns(RuntimeWarning, match=words):
        registry.discover()
    assert "cold" in registry.plugins
    registry.resolve("evictor", "heap")
    with pytest.raises(UnknownNameError, match=words):
        registry.resolve("sampler", "their_sampler")
    for ask in (
        lambda: registry.plugin("broken", "replay_plugins"),
        lambda: registry.resolve("evictor", "broken/anything"),
        lambda: registry.preset("broken/anything"),
    ):
        with pytest.raises(PluginError, match=r"broken.*replay-broken 1\.0.*needs a library that is not here"):
            ask()


@pytest.mark.parametrize("status", ["0", "3", "'bye'"])
def test_71_a_plugin_that_exits_when_it_is_imported_is_a_broken_plugin(registry, install, status):
    module = install("leaves", "leaves", f"import sys\nsys.exit({status})\n")
    with pytest.warns(RuntimeWarning, match=r"'leaves' from leaves 1\.0 was not loaded: SystemExit"):
        registry.discover()
    with pytest.raises(PluginError, match=r"leaves 1\.0.*SystemExit"):
        registry.plugin("leaves", "replay_plugins")
    with pytest.raises(UnknownNameError, match=rf"{module}:score.*SystemExit"):
        registry.resolve("scorer", f"{module}:score")


def test_two_distributions_that_claim_one_name_are_both_named(registry, install):
    install("replay-first", "cold", version="1.0")
    install("replay-second", "cold", version="2.0")
    with pytest.warns(RuntimeWarning, match=r"replay-first 1\.0 and replay-second 2\.0"):
        registry.discover()
    with pytest.raises(PluginError, match=r"replay-first 1\.0 and replay-second 2\.0\. Uninstall one"):
        registry.resolve("evictor", "cold/coldest")
    with pytest.raises(UnknownNameError, match="replay-second"):
        registry.resolve("evictor", "coldest")


def test_a_plugin_registered_at_run_time_keeps_its_name_from_a_later_distribution(registry, install):
    mine = offers(EvictorSpec("mine", lambda: None, ""))
    registry.add(mine, "cold")
    install("replay-late", "cold")
    with pytest.warns(RuntimeWarning, match=r"registered in this process.*replay-late 1\.0"):
        registry.discover()
    assert registry.plugin("cold", "replay_plugins").object is mine


def test_no_distribution_can_take_the_built_in_plugins_name(registry, install):
    install("replay-impostor", BUILTIN)
    with pytest.warns(RuntimeWarning, match="trl-replay and replay-impostor"):
        registry.discover()
    assert registry.resolve("evictor", "builtin/heap").plugin.distribution == "trl-replay"


# what no plugin can be


@pytest.fixture
def refusal(registry):
    """The error of a plugin that can't be registered; it leaves nothing behind."""

    def refusal(plugin):
        known = dict(registry.plugins)
        with pytest.raises(PluginError) as caught:
            registry.add(plugin, "mine", "theirs 1.0")
        assert registry.plugins == known
        return str(caught.value)

    return refusal


def test_a_name_that_is_given_in_this_process_is_taken_back_by_unregister(registry):
    registry.add(offers(), "mine")
    words = r"Two plugins claim the name 'mine'.*trl_replay\.unregister\('mine'\), or give the second another name"
    with pytest.raises(PluginError, match=words):
        registry.add(offers(), "mine")


@dataclasses.dataclass
class WithoutHash:
    by: int = 1

    @hookimpl
    def trl_replay_attached(self, session):
        pass


class WrongArgument:
    @hookimpl
    def trl_replay_score(self, group):
        return None


class MistypedHook:
    @hookimpl
    def trl_replay_strategeis(self):
        return []


class WithoutMark:
    def trl_replay_strategies(self):
        return []


class OffersAnotherHooks:
    @hookimpl
    def trl_replay_presets(self):
        yield EvictorSpec("heap", lambda: None, "")


class Raises:
    @hookimpl
    def trl_replay_strategies(self):
        yield 1 / 0


TWICE = SamplerSpec("twice", lambda: None, "")
OF_NO_KIND = trl_replay.specs.StrategySpec("bare", lambda: None, "of no kind")
MISTAKES = [
    (WithoutHash(), "'mine' can't be hashed", "@dataclass(eq=False)"),
    (WithoutMark, "; register an instance of it: WithoutMark()"),
    (WrongArgument(), "Argument(s) {'group'} are declared in the hookimpl but can not be found in the hookspec"),
    (MistypedHook(), "there is no hook 'trl_replay_strategeis'. Did you mean 'trl_replay_strategies'?"),
    (WithoutMark(), "has trl_replay_strategies without the mark @trl_replay.hookimpl"),
    (object(), "has no function with the mark @trl_replay.hookimpl"),
    (offers("half_life"), "trl_replay_strategies yields 'half_life', which is no StrategySpec"),
    (offers(OF_NO_KIND), "which is no StrategySpec"),
    (offers(TWICE, TWICE), "offers the SamplerSpec 'twice' twice"),
    (OffersAnotherHooks(), "trl_replay_presets yields ", ", which is no Preset"),
    (Raises(), "'mine' (theirs 1.0): ZeroDivisionError"),
]


@pytest.mark.parametrize(("plugin", "words"), [(plugin, words) for plugin, *words in MISTAKES])
def test_53_a_mistake_in_a_plugin_is_named(refusal, plugin, words):
    told = refusal(plugin)
    assert [part for part in words if part not in told] == []


@pytest.mark.parametrize("hook", ["eligible", "plan", "save", "load", "strategies", "fields", "presets"])
@pytest.mark.parametrize("kind", ["wrapper", "hookwrapper"])
def test_139_a_wrapper_of_a_hook_that_is_called_on_each_plugin_alone_is_refused(refusal, hook, kind):
    def wrapping(self):
        yield

    name = f"trl_replay_{hook}"
    told = refusal(type("Wrapping", (), {name: hookimpl(**{kind: True})(wrapping)})())
    assert f"'mine' implements {name} as a wrapper" in told
    assert "remove wrapper=True" in told


# names


def test_an_unknown_name_lists_what_exists_and_suggests_the_nearest(registry):
    with pytest.raises(UnknownNameError) as caught:
        registry.resolve("evictor", "resevoir")
    message = str(caught.value)
    assert message.startswith("replay_evictor='resevoir': there is no evictor 'resevoir'. Did you mean 'reservoir'?")
    assert "fifo, " in message
    assert "heap, " in message


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("Factory", "has no argument 'pwoer'. Did you mean 'power'? It takes power=1."),
        ("make", "has no argument 'pwoer'. Did you mean 'power'? It takes power=1."),
        ("plain", "has no argument 'pwoer'. It takes table, context."),
    ],
)
def test_an_import_references_wrong_argument_is_answered_with_the_right_ones(registry, install, attribute, words):
    module = install("replay-references", "references", REFERENCES)
    with pytest.raises(ConfigurationError) as caught:
        registry.resolve("evictor", f"{module}:{attribute}", {"pwoer": 2})
    assert (
        f"replay_evictor='{module}:{attribute}(pwoer=2)' can't be used: the evictor '{module}:{attribute}' {words}"
        in str(caught.value)
    )


def test_what_takes_any_argument_or_does_not_tell_is_left_to_answer_itself(registry):
    def open_to_all(**options):
        return options

    for factory in (open_to_all, dict):
        registry.add(offers(EvictorSpec("open", factory, "")), factory.__name__)
        resolved = registry.resolve("evictor", f"{factory.__name__}/open", {"anything": 1})
        assert resolved.arguments == {"anything": 1}


def test_a_name_that_two_distributions_offer_must_be_qualified_and_both_are_named(registry):
    registry.add(offers(SamplerSpec("coldest", lambda: len, "…")), "coldest", "replay-cold 2.3")
    registry.add(offers(SamplerSpec("coldest", lambda: len, "…")), "ice", "replay-ice 1.0")
    words = r"one of coldest/coldest \(replay-cold 2\.3\), ice/coldest \(replay-ice 1\.0\)"
    with pytest.raises(ConfigurationError, match=words):
        registry.resolve("sampler", "coldest")
    assert registry.resolve("sampler", "ice/coldest").plugin.name == "ice"


def test_of_several_plugins_of_one_distribution_the_one_of_that_name_is_meant(registry):
    for owner in ("one", "shared"):
        registry.add(offers(EvictorSpec("shared", lambda owner=owner: owner, "")), owner)
    assert registry.resolve("evictor", "shared").factory() == "shared"
    assert registry.resolve("evictor", "one/shared").factory() == "one"


def test_a_built_in_name_can_not_be_shadowed(registry):
    registry.add(offers(EvictorSpec("heap", lambda: "impostor", "")), "one")
    assert registry.resolve("evictor", "heap").plugin.name == BUILTIN
    assert registry.resolve("evictor", "one/heap").factory() == "impostor"


REFERENCES = """
def plain(table, context):
    return table.uses

class Factory:
    def __init__(self, power=1):
        self.power = power
    def __call__(self, table, context):
        return table.uses ** self.power

def make(power=1):
    return Factory(power)

instance = Factory(2)

class Space:
    inner = staticmethod(plain)
"""


@pytest.mark.parametrize(
    ("attribute", "kwargs", "expected"),
    [
        ("plain", {}, [3, 2]),
        ("Space.inner", {}, [3, 2]),
        ("Factory", {}, [3, 2]),
        ("Factory", {"power": 2}, [9, 4]),
        ("make", {"power": 2}, [9, 4]),
        ("instance", {}, [9, 4]),
    ],
)
def test_an_import_reference_may_name_a_strategy_or_a_factory(registry, install, attribute, kwargs, expected):
    module = install("replay-references", "references", REFERENCES)
    resolved = registry.resolve("evictor", f"{module}:{attribute}", kwargs)
    table = make_table([1.0, 1.0], uses=[3, 2])
    np.testing.assert_array_equal(resolved.make()(table, make_context(table)), expected)
    assert resolved.plugin is None


@pytest.mark.parametrize("reference", ["no_such_module_here:thing", "trl_replay:no_such_thing", ":heap"])
def test_an_import_reference_that_can_not_be_followed_is_quoted(registry, reference):
    with pytest.raises(UnknownNameError, match=f"replay_evictor='{reference}' can't be imported: "):
        registry.resolve("evictor", reference)


def test_an_object_is_taken_as_it_is_and_takes_no_arguments(registry):
    def mine(table, context):
        return table.uses

    resolved = registry.resolve("evictor", mine)
    assert resolved.make() is mine
    assert resolved.label.endswith("mine")
    with pytest.raises(ConfigurationError, match=r"replay_evictor=.*power=2\)' can't be used: .* no arguments"):
        registry.resolve("evictor", mine, {"power": 2})


# the package
