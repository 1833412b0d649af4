"""The contract suites of plugins: one that keeps its word passes, and each way of breaking it is noticed."""

import itertools
import json
import weakref
from types import ModuleType

import numpy as np
import pytest
from scenarios import train
from support import DEAD, HALF, LIVE, plugin_class

import trl_replay
from trl_replay import Corrected, hookimpl
from trl_replay.errors import HookError, ResultError
from trl_replay.testing import (
    AdvantagesContract,
    CorrectionContract,
    EvictorContract,
    InputsContract,
    MixerContract,
    PlanContract,
    PluginContract,
    SamplerContract,
    ScorerContract,
    SelectorContract,
    make_groups,
    make_inputs_context,
    make_prompts,
)


class Counts:
    """Counts the batches of each session."""

    def __init__(self):
        self.batches = weakref.WeakKeyDictionary()

    @staticmethod
    def key(table):
        return table

    @hookimpl
    def trl_replay_metrics(self, context):
        key = self.key(context.table)
        self.batches[key] = self.batches.get(key, 0) + 1
        return {"counts/batches": float(self.batches[key])}

    @hookimpl
    def trl_replay_save(self, session, directory):
        (directory / "counts.json").write_text(json.dumps(self.batches.get(self.key(session.buffer.table), 0)))

    @hookimpl
    def trl_replay_load(self, session, directory):
        if directory.is_dir():
            self.batches[self.key(session.buffer.table)] = json.loads((directory / "counts.json").read_text())


class CountsForAll(Counts):
    """Tells no session from another."""

    @staticmethod
    def key(table):
        return Counts


class Forgets(Counts):
    @hookimpl
    def trl_replay_load(self, session, directory):
        pass


class NeedsItsFolder(Counts):
    @hookimpl
    def trl_replay_load(self, session, directory):
        self.batches[session.buffer.table] = json.loads((directory / "counts.json").read_text())


def shapes(shape):
    return plugin_class(advantages=shape)


def chooses(choose):
    return plugin_class(inputs=lambda groups_of_rows, context: choose(groups_of_rows))


CALLS = itertools.count(1)


def masks_old(plan, groups, table, context):
    """Masks stored rows, and as many fresh ones as it draws."""
    plan.masked |= plan.stored & (table.difficulty.max() > 0.8)
    plan.silent |= plan.fresh & (context.rng.random(plan.entry.shape) < 0.5)


def unmasks(plan):
    plan.masked[:] = plan.entry == -(2**63)
    plan.kl[:] = True
    plan.masked[:, 0] = False


def differs(plan):
    plan.advantages = np.where(plan.fresh, plan.advantages / next(CALLS), plan.advantages)


def perform(suite, folder, **attributes):
    contract = type("Suite", (suite,), attributes)()
    for name in dir(suite):
        if name.startswith("test_"):
            arguments = [folder / name] if suite is PluginContract else []
            getattr(contract, name)(*arguments)


@pytest.mark.parametrize(
    ("suite", "plugin"),
    [
        (PluginContract, Counts),
        (AdvantagesContract, shapes(lambda groups: groups.advantages / 2)),
        (InputsContract, chooses(lambda rows: rows[::-1])),
    ],
)
def test_a_plugin_that_keeps_its_contract_passes(tmp_path, suite, plugin):
    perform(suite, tmp_path, plugin=plugin)


def test_176_a_plan_that_reads_a_column_of_the_plugins_keeps_its_contract(tmp_path):
    perform(PlanContract, tmp_path, plugin=plugin_class(plan=masks_old), columns={"difficulty": [0.5, 0.9]})


@pytest.mark.parametrize("installed", [True, False])
def test_176_a_module_with_hooks_keeps_its_contract_under_its_own_name(tmp_path, installed):
    module = ModuleType("my_replay")
    counts = Counts()
    vars(module).update({name: getattr(counts, name) for name in vars(Counts) if name.startswith("trl_replay_")})
    if installed:
        trl_replay.register(module, "mine")
    try:
        perform(PluginContract, tmp_path, plugin=module)
    finally:
        if installed:
            trl_replay.unregister("mine")
    saved = next((tmp_path / "test_what_it_saved_comes_back").rglob("counts.json"))
    assert saved.parent.name == ("mine" if installed else "under_test")


def easiest(table, count, context):
    return np.argsort(-table.difficulty)[:count]


STRATEGIES = [
    (SamplerContract, easiest),
    (EvictorContract, lambda table, context: table.difficulty),
    (ScorerContract, lambda groups, context: groups.reward_mean + context.table.difficulty.sum()),
    (SelectorContract, lambda groups, context: np.flatnonzero(groups.dead)[: len(context.table.difficulty)]),
    (MixerContract, lambda table, drawn, slots, context: np.where(
        table.difficulty[np.maximum(drawn[:, :1], 0)] > 9, 0, np.full(slots.advantages.shape, -1))),
    (CorrectionContract, lambda rows, context: Corrected(rows.logps + context.table.difficulty.sum())),
]  # fmt: skip


@pytest.mark.parametrize(("suite", "strategy"), STRATEGIES)
def test_176_strategies_may_read_columns_of_a_plugin(tmp_path, suite, strategy):
    perform(suite, tmp_path, strategy=staticmethod(strategy), columns={"difficulty": 0.5})
    with pytest.raises((HookError, AttributeError), match="has no column 'difficulty'"):
        perform(suite, tmp_path, strategy=staticmethod(strategy))


@pytest.mark.parametrize(
    ("suite", "plugin", "words"),
    [
        (PluginContract, CountsForAll, "began with what the first had left"),
        (PluginContract, Forgets, "saves other files than it has loaded"),
        (PluginContract, NeedsItsFolder, "No such file"),
        (
            AdvantagesContract,
            shapes(lambda groups, context: groups.advantages / (1 + context.update)),
            "the same groups got other advantages",
        ),
        (AdvantagesContract, shapes(lambda groups: groups.reward_mean), r"must return numbers of shape \(3, 4\)"),
        (InputsContract, chooses(lambda rows: [{"prompt": str(next(CALLS))} for _ in rows]), "chose other rows"),
        (InputsContract, chooses(lambda rows: rows[:1]), "must return a list of 4 rows"),
        (PlanContract, plugin_class(plan=unmasks), "was unmasked"),
        (PlanContract, plugin_class(plan=differs), "gave another plan.advantages"),
        (PlanContract, plugin_class(plan=lambda plan: np.random.random() * 0 or None), "global generator was used"),
    ],
)
def test_a_plugin_that_breaks_its_contract_is_noticed(tmp_path, suite, plugin, words):
    with pytest.raises(Exception, match=words):
        perform(suite, tmp_path, plugin=plugin)


def writes(rows, context):
    rows.advantages[:] = 0
    return Corrected(rows.behavior_logps)


@pytest.mark.parametrize(
    ("correction", "words"),
    [
        (lambda rows, context: Corrected(rows.behavior_logps, -rows.ages.float()), "finite weights of at least 0"),
        (lambda rows, context: Corrected(rows.behavior_logps[:1]), "a tensor of real numbers"),
        (lambda rows, context: Corrected(rows.behavior_logps, next(CALLS) * rows.priorities), "would differ"),
        (lambda rows, context: Corrected(rows.logps, shift=next(CALLS) * rows.priorities), "would differ"),
        (writes, "changed advantages"),
    ],
)
def test_a_correction_that_breaks_its_contract_is_noticed(tmp_path, correction, words):
    with pytest.raises((AssertionError, ResultError), match=words):
        perform(CorrectionContract, tmp_path, strategy=staticmethod(correction))


def test_contexts_are_made_in_one_line():
    context = make_inputs_context([{"prompt": "8="}, {"prompt": "9="}], make_prompts((5, 4, 99), (6, 2, 99)))
    assert context.prompts.get("pass_rate", [5, 6, 7], 0.0).tolist() == [1.0, 0.5, 0.0]
    assert context.new_prompts(1, skip=lambda row: row["prompt"] == "8=") == [{"prompt": "9="}]
    assert [row["prompt"] for row in context.new_prompts(3)] == ["8=", "9=", "8="]
    assert context.prompt_rows([context.key({"prompt": "9="})]) == [{"prompt": "9="}]
    assert not make_groups([LIVE, DEAD]).masked.any()


def at_most(entries, drops):
    def at_most(table, context):
        return np.where(table.newer < entries, table.score, -np.inf)

    at_most.drops = drops
    return at_most


@pytest.mark.parametrize(("drops", "expected"), [(True, 2), (False, 8)])
def test_an_evictor_that_says_so_drops_entries_where_there_is_room(tmp_path, drops, expected):
    run = train(tmp_path, [LIVE, HALF, DEAD], prompts=("1=", "2=", "3="), replay_evictor=at_most(1, drops))
    assert len(run.table) == expected, "at most one entry of each of two prompts"
    assert run.counters["evicted"] == 8 - expected
    if drops:
        assert run.table.update.tolist() == [3, 3], "the newest stay"


def test_a_plugin_that_ranks_says_by_itself_whether_it_drops(tmp_path):
    ranks = {"rank": lambda table, context: np.full(len(table), -np.inf)}
    assert len(train(tmp_path, [LIVE, HALF, DEAD], replay_evictor=at_most(1, True), hooks=ranks).table) == 8


def test_metrics_are_told_of_the_fresh_groups_as_they_train(tmp_path):
    seen = []
    watching = {
        "advantages": lambda groups: np.where(groups.reward == 0.0, np.nan, groups.advantages),
        "metrics": lambda context: seen.append(context.fresh) or {},
    }
    train(tmp_path, [LIVE, HALF, DEAD], max_steps=2, hooks=watching)
    assert len(seen) == 2
    for fresh in seen:
        assert fresh.reward_mean.tolist() == [0.25, 0.5, 0.0], "replaced ones included"
        assert fresh.masked.sum(axis=1).tolist() == [3, 2, 4]
        assert fresh.dead.tolist() == [False, False, True]


OTHERS = ("inputs", "advantages", "select", "score", "admitted", "rank", "correct")
HOLDS = {
    "sample": {"slots", "prompts"},
    "mix": {"slots", "prompts"},
    "metrics": {"fresh", "prompts"},
    **{hook: {"prompts"} for hook in OTHERS},
}
"""What the page on hooks says that a hook's context holds."""


def test_a_context_holds_what_the_page_on_hooks_says(tmp_path):
    held = {}

    def watch(hook):
        def watching(context):
            held[hook] = {name for name in ("slots", "prompts", "fresh") if getattr(context, name) is not None}

        return watching

    settings = {"replay_buffer_size": 2, "replay_record": "loss"}
    train(tmp_path, [LIVE, HALF, DEAD], hooks={hook: watch(hook) for hook in HOLDS}, **settings)
    assert held == HOLDS
