"""Session hooks through a real trainer: who is called with what, whose result counts, and who is blamed."""

import doctest
from collections import defaultdict
from contextlib import contextmanager
from inspect import signature

import numpy as np
import pytest
import torch
from support import DEAD, LIVE, Rewards, plugin_class, record
from trl import GRPOTrainer

import trl_replay
from trl_replay import (
    ConfigurationError,
    Context,
    Corrected,
    EvictorSpec,
    FieldSpec,
    InputsContext,
    Preset,
    hookimpl,
    hookspecs,
)
from trl_replay.errors import HookError, RefusedError, ResultError
from trl_replay.registry import registry
from trl_replay.specs import SPECS
from trl_replay.testing import make_trainer

HOOKS = [*hookspecs.hook_names(hookspecs.RegistryHooks), *hookspecs.hook_names(hookspecs.SessionHooks)]
KIND_OF_HOOK = {
    "select": "selector",
    "score": "scorer",
    "rank": "evictor",
    "sample": "sampler",
    "mix": "mixer",
    "correct": "correction",
}


@contextmanager
def plugin(name="mine", **hooks):
    """A registered plugin of the distribution `mine 1.0` with the functions `hooks`, which take no `self`."""
    registry().add(plugin_class(**hooks)(), name, f"{name} 1.0")
    try:
        yield
    finally:
        trl_replay.unregister(name)


def trainer_of(path, **settings):
    return make_trainer(path, Rewards([LIVE, DEAD, DEAD]), **settings)


def train(path, replay_plugins="mine", **replay):
    """Trains four updates of one live and two dead groups each; returns the session."""
    trainer = trainer_of(path)
    session = trl_replay.attach(trainer, replay_plugins=replay_plugins, **{"replay_record": "loss", **replay})
    trainer.train()
    session.its_trainer = trainer  # the session holds it weakly
    return session


def offering(kind, strategy):
    """The hook that offers `strategy` by the name `bad`, ready made."""
    spec = SPECS[kind]
    return lambda: [spec("bad", lambda: strategy, "")]


# called, on whom, with what


def arguments_of(hook):
    specs = vars(hookspecs.RegistryHooks) | vars(hookspecs.SessionHooks)
    return [name for name in signature(specs[f"trl_replay_{hook}"]).parameters if name != "self"]


def check_strategies(calls, session):
    assert [type(spec) for _, spec in registry().strategies("evictor") if spec.name == "watched"] == [EvictorSpec]


def check_fields(calls, session):
    assert [spec.name for spec in registry().fields({"watcher"})] == ["watched_key"]


def check_presets(calls, session):
    assert registry().preset("watcher/watched")[1].settings == {"replay_max_uses": 3}


def check_preflight(calls, session):
    assert calls == [{"trainer": session.trainer, "config": session.config}]


def check_attached(calls, session):
    assert calls == [{"session": session}]


def check_metrics(calls, session):
    assert [call["context"].update for call in calls] == [0, 1, 2, 3]
    context = calls[-1]["context"]
    assert isinstance(context, Context)
    assert (context.capacity, context.num_generations) == (2, 4)
    assert context.table is session.buffer.table
    assert isinstance(context.rng, np.random.Generator)
    assert "replay/size" in context.metrics


def check_select(calls, session):
    assert [call["context"].update for call in calls] == [0, 1, 2, 3]
    groups = calls[0]["groups"]
    assert groups.rewards.shape == (3, 4, 1)
    assert groups.dead.tolist() == [False, True, True]
    assert groups.behavior_logps is None


def check_score(calls, session):
    assert [len(call["groups"]) for call in calls] == [1, 1, 1, 1]
    assert [call["context"].update for call in calls] == [1, 2, 3, 4]
    assert calls[0]["groups"].behavior_logps.shape == (1, 4)
    assert (calls[0]["groups"].behavior_logps < 0).all()


def check_rank(calls, session):
    assert [call["length"] for call in calls] == [3, 3], "only where the buffer of two overflows, newcomer included"


def check_sample(calls, session):
    assert [(call["length"], call["count"]) for call in calls] == [(1, 2), (2, 2), (2, 2)]
    assert calls[0]["context"].slots.dead.tolist() == [True, True]


def check_mix(calls, session):
    assert [call["drawn"].shape for call in calls] == [(1, 1), (2, 1), (2, 1)]
    assert [len(call["slots"]) for call in calls] == [1, 2, 2]
    assert calls[1]["context"].slots.dead.tolist() == [True, True]


def check_inputs(calls, session):
    assert [len(call["groups_of_rows"]) for call in calls] == [3, 3, 3, 3]
    row = calls[0]["groups_of_rows"][0]
    assert set(row) == {"prompt"}
    context = calls[-1]["context"]
    assert isinstance(context, InputsContext)
    assert context.round == 0
    assert len(context.prompts) == 3
    assert context.prompts.get("tries", [context.key(row)], default=0).tolist() == [16]
    assert context.prompt_rows([context.key(row)]) == [row]


def check_advantages(calls, session):
    assert [call["context"].update for call in calls] == [0, 1, 2, 3]
    assert calls[0]["groups"].rewards.shape == (3, 4, 1)
    assert not calls[0]["groups"].masked.any()


def check_eligible(calls, session):
    assert [call["length"] for call in calls] == [1, 2, 2], "all entries; not before the first loss"
    assert [call["context"].update for call in calls] == [1, 2, 3]


def check_plan(calls, session):
    assert [call["context"].iteration for call in calls] == [0] * 4
    assert [call["plan"].stored.any(axis=1).sum() for call in calls] == [0, 1, 2, 2]
    assert all(call["groups"].dead.tolist() == [False, True, True] for call in calls)


def check_admitted(calls, session):
    assert [call["rows"].tolist() for call in calls] == [[0], [1], [2], [2]]
    assert [call["length"] for call in calls] == [1, 2, 3, 3], "before any is ranked"
    assert calls[0]["groups"].behavior_logps.shape == (1, 4)


def check_correct(calls, session):
    """A correction's arguments are tested in tests/trainer/test_loss_tap.py."""
    rows = calls[0]["rows"]
    assert rows.ages.tolist() == [1] * 4
    assert not rows.logps.requires_grad
    assert torch.equal(rows.logps[~rows.mask], rows.behavior_logps[~rows.mask])


def check_detached(calls, session):
    assert calls == [{"session": session}]


def check_save(calls, session, saves=True):
    (call,) = calls
    assert (call["session"] is session) == saves, "a new session resumed"
    assert call["directory"].parts[-5:] == ("checkpoint-4", "trl_replay", "rank-00000", "plugins", "watcher")


def check_load(calls, session):
    check_save(calls, session, saves=False)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The arguments of every call of every hook in one run, by hook, and the session."""
    calls = defaultdict(list)

    def watch(hook, function):
        def watching(arguments):
            length = {"length": len(arguments["table"])} if "table" in arguments else {}  # the table itself moves on
            calls[hook].append(arguments | length)
            return function()

        names = ", ".join(arguments_of(hook))  # pluggy reads argument names from a function's code
        return eval(f"lambda {names}: watching(dict(locals()))", locals())

    offers = {
        "strategies": lambda: [EvictorSpec("watched", lambda: None, "")],
        "fields": lambda: [FieldSpec("watched_key", "row")],
        "presets": lambda: [Preset("watched", {"replay_max_uses": 3}, "")],
        "metrics": lambda: {"replay/watched": 1.0},
    }
    names = [hook.removeprefix("trl_replay_") for hook in HOOKS]
    with plugin("watcher", **{hook: watch(hook, offers.get(hook, lambda: None)) for hook in names}):
        folder = tmp_path_factory.mktemp("watched")
        trainer = trainer_of(folder, save_strategy="steps", save_steps=4)
        settings = {"replay_plugins": "watcher", "replay_buffer_size": 2, "replay_record": "loss"}
        session = trl_replay.attach(trainer, **settings)
        trainer.train()
        trl_replay.detach(trainer)
        first = {hook: list(arguments) for hook, arguments in calls.items()}
        again = trainer_of(folder)
        trl_replay.attach(again, **settings)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        yield first | {"load": calls["load"]}, session, trainer


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_called_with_its_documented_arguments(watched, hook):
    calls, session, _ = watched
    name = hook.removeprefix("trl_replay_")
    check = globals().get(f"check_{name}")
    assert check is not None, f"{hook} has no check_{name} in this file"
    check(calls.get(name, []), session)


def test_a_plugins_metrics_reach_the_log_beside_ours(watched):
    _, session, trainer = watched
    logged = [entry for entry in trainer.state.log_history if "replay/watched" in entry]
    assert [entry["replay/watched"] for entry in logged] == [1.0] * 4
    assert session.metrics["replay/watched"] == 1.0


# who takes part


def test_an_installed_plugin_that_is_not_named_is_never_called(tmp_path):
    def called(*arguments):
        raise AssertionError("a plugin that is not named was called")

    session_hooks = [hook for hook in HOOKS if hook in vars(hookspecs.SessionHooks)]
    functions = {hook.removeprefix("trl_replay_"): lambda: called() for hook in session_hooks}
    with plugin(**functions):
        session = train(tmp_path, replay_plugins=None)
        trl_replay.detach(session.trainer)
    assert session.plugins == []
    assert session.metrics["replay/replaced_fraction"] > 0


@pytest.mark.parametrize("settings", [{"replay_sampler": "mine/bad"}, {"replay_preset": "mine/bundle"}])
def test_naming_a_plugins_strategy_or_preset_makes_its_hooks_take_part(tmp_path, settings):
    hooks = {
        "strategies": offering("sampler", lambda table, count, context: np.arange(min(count, len(table)))),
        "presets": lambda: [Preset("bundle", {"replay_max_uses": 3}, "")],
        "metrics": lambda context: {"replay/mine": 1.0},
    }
    with plugin(**hooks):
        session = train(tmp_path, replay_plugins=None, **settings)
    assert session.plugins == ["mine"]
    assert session.metrics["replay/mine"] == 1.0


# whose result counts


def test_none_passes_on_to_the_configured_strategy_and_an_empty_list_does_not(tmp_path):
    with plugin(select=lambda groups, context: [] if context.update < 3 else None):
        session = train(tmp_path)
    replaced = [entry["replay/replaced_fraction"] for entry in session.trainer.state.log_history[:4]]
    assert replaced == [0, 0, 0, pytest.approx(2 / 3)]


def test_zero_stops_the_chain_too(tmp_path):
    with (
        plugin(score=lambda groups: 0),
        pytest.raises(ResultError, match=r"^Plugin 'mine' \(mine 1.0\), in trl_replay_score, returned int64"),
    ):
        train(tmp_path)


def test_the_plugin_named_last_is_asked_first(tmp_path):
    first, second = (lambda groups: np.full(len(groups), 1.0)), (lambda groups: np.full(len(groups), 2.0))
    with plugin("one", score=first), plugin("two", score=second):
        session = train(tmp_path, replay_plugins=["one", "two"])
    assert set(session.buffer.table.score.tolist()) == {2.0}


def wrapping(generator):
    return hookimpl(wrapper=True)(generator)


@wrapping
def doubling(groups):
    return 2 * (yield)


@wrapping
def rescuing(groups):
    try:
        yield
    except HookError:
        return np.full(len(groups), 3.0)
    raise AssertionError("nothing was raised")


def test_71_a_wrapper_gets_what_is_returned_and_what_is_raised_below_it(tmp_path):
    with plugin(score=doubling):
        session = train(tmp_path, replay_scorer=lambda groups, context: np.full(len(groups), 2.0))
    assert set(session.buffer.table.score) == {4.0}
    with plugin(score=rescuing):
        session = train(tmp_path, replay_scorer=lambda groups, context: boom())
    assert set(session.buffer.table.score) == {3.0}


@wrapping
def never_yielding(groups):
    if len(groups) < 0:
        yield
    return np.ones(len(groups))


@wrapping
def yielding_twice(groups):
    yield
    return (yield)


@pytest.mark.parametrize(("wrapper", "reason"), [(never_yielding, "did not"), (yielding_twice, "twice")])
def test_71_a_wrapper_that_does_not_yield_once_is_named(tmp_path, wrapper, reason):
    with (
        plugin(score=wrapper),
        pytest.raises(HookError, match=f"Plugin 'mine'.*failed in trl_replay_score.*must yield once.*{reason}"),
    ):
        train(tmp_path)


# who is blamed


def boom(*arguments):
    raise ValueError("boom")


def nothing(*arguments):
    return None


@pytest.mark.parametrize(
    ("hook", "wrapper"),
    [
        (hook, wrapper)
        for hook in hookspecs.hook_names(hookspecs.SessionHooks)
        for wrapper in (False, True)
        if hook[-4:] not in ("save", "load") and not (wrapper and hook in hookspecs.called_alone())
    ],
)
def test_an_error_in_a_hook_names_plugin_distribution_hook_and_update(tmp_path, hook, wrapper):
    def after():
        yield
        boom()

    def run(function):
        with plugin(**{hook.removeprefix("trl_replay_"): function}):
            trl_replay.detach(train(tmp_path, replay_buffer_size=2).trainer)

    words = rf"^Plugin 'mine' \(mine 1\.0\) failed in {hook} at update \d: ValueError: boom$"
    with pytest.raises(HookError, match=words) as caught:
        run(hookimpl(wrapper=True)(after) if wrapper else lambda: boom())
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.fixture
def untried(monkeypatch):
    """Strategies are not tried at attach, and go wrong in training."""
    monkeypatch.setattr("trl_replay.setup.assembly.rehearse", lambda *given, **named: None)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("hook", "kind"), KIND_OF_HOOK.items())
@pytest.mark.parametrize(
    ("strategy", "kind_of_error", "words"),
    [
        (boom, HookError, r"failed in HOOK at update \d: ValueError"),
        (nothing, ResultError, r"returned .* at update \d"),
    ],
)
def test_an_error_in_a_strategy_and_a_wrong_result_name_it_with_its_plugin(
    tmp_path, hook, kind, strategy, kind_of_error, words
):
    """Wrong results are in tests/trainer/test_rehearsal.py: a trial before training finds them by the same rules."""
    words = rf"^The {kind} 'mine/bad' \(plugin 'mine', mine 1\.0\) {words.replace('HOOK', f'trl_replay_{hook}')}"
    settings = {f"replay_{kind}": "mine/bad", "replay_advantages": "stored"}
    with plugin(strategies=offering(kind, strategy)), pytest.raises(kind_of_error, match=words):
        train(tmp_path, replay_plugins=None, replay_buffer_size=2, **settings)


def reasons_that_fail():
    yield "a reason"
    boom()


@pytest.mark.parametrize(
    ("hook", "function", "words"),
    [
        ("preflight", reasons_that_fail, "ValueError: boom"),
        ("attached", lambda: boom(), "ValueError: boom"),
        ("attached", lambda session: session.buffer.table.add_column("score"), "'score' can't be added"),
    ],
)
def test_an_error_at_attach_leaves_the_trainer_as_it_was(tmp_path, hook, function, words):
    trainer = trainer_of(tmp_path)
    before, callbacks = dict(trainer.__dict__), list(trainer.callback_handler.callbacks)
    with (
        plugin(**{hook: function}),
        pytest.raises(HookError, match=rf"'mine'.*trl_replay_{hook} at update 0: .*{words}"),
    ):
        trl_replay.attach(trainer, replay_plugins="mine")
    assert trainer.__dict__ == before
    assert trainer.callback_handler.callbacks == callbacks
    assert trl_replay.attach(trainer).enabled


def test_a_presets_arguments_are_not_given_to_a_strategy_of_the_users_own(tmp_path):
    settings = {"replay_sampler": "proportional(alpha=0.5)"}
    with plugin(presets=lambda: [Preset("bundle", settings, "")]):
        session = trl_replay.attach(trainer_of(tmp_path), replay_preset="mine/bundle", replay_sampler="uniform")
    assert session.config.strategy("sampler")[1] == {}


# preflight


def test_all_reasons_of_all_plugins_are_reported_at_once_and_nothing_is_patched(tmp_path):
    def several(trainer, config):
        yield f"it has {trainer.num_generations} generations"
        yield f"the evictor is {config.replay_evictor}"

    trainer = trainer_of(tmp_path)
    before, callbacks = dict(trainer.__dict__), list(trainer.callback_handler.callbacks)
    with (
        plugin("one", preflight=several),
        plugin("two", preflight=lambda: ["a list"]),
        plugin("three", preflight=lambda: "a lone string"),
        plugin("four", preflight=lambda: None),
        pytest.raises(RefusedError) as caught,
    ):
        trl_replay.attach(trainer, replay_plugins=["one", "two", "three", "four"], replay_evictor="fifo")
    lines = str(caught.value).splitlines()
    assert set(lines[1:]) == {"- it has 4 generations", "- the evictor is fifo", "- a list", "- a lone string"}
    assert trainer.__dict__ == before
    assert trainer.callback_handler.callbacks == callbacks


# what strategies must return


def test_a_wrong_result_of_a_hook_or_wrapper_is_not_blamed_on_the_strategy(tmp_path):
    @hookimpl(wrapper=True)
    def cut_short(groups):
        scores = yield
        return scores[1:]

    with (
        plugin(sample=lambda count: [0.5]),
        pytest.raises(ResultError, match=r"^Plugin 'mine' \(mine 1\.0\), in trl_replay_sample, returned"),
    ):
        train(tmp_path / "hook")
    words = r"^Plugin 'mine' \(mine 1\.0\), as a wrapper of The scorer 'advantage_std' .*, returned"
    with plugin(score=cut_short), pytest.raises(ResultError, match=words):
        train(tmp_path / "wrapper")


@pytest.mark.parametrize("result", [5, {"replay/mine": "high"}, {"replay/mine": None}])
def test_metrics_that_are_no_numbers_by_name_are_blamed_on_their_plugin(tmp_path, result):
    with (
        plugin(metrics=lambda: result),
        pytest.raises(HookError, match=r"^Plugin 'mine' .* failed in trl_replay_metrics"),
    ):
        train(tmp_path)


# batch keys


class Bonus(GRPOTrainer):
    """Adds a key of its own to the batch: one number a row, different in every batch."""

    batches = 0

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        batch["bonus"] = torch.arange(len(inputs)) + 100.0 * self.batches
        self.batches += 1
        return batch


def test_a_key_that_a_plugin_declares_travels_with_its_group(tmp_path):
    trainer = trainer_of(tmp_path, trainer_class=Bonus)
    with plugin(fields=lambda: [FieldSpec("bonus", layout="row")]):
        session = trl_replay.attach(trainer, replay_plugins="mine", replay_sampler="newest")
        steps = record(session)
        trainer.train()
    assert [out["bonus"][4:8].tolist() for _, out in steps[:3]] == [
        [4, 5, 6, 7],  # nothing to replay yet
        [0, 1, 2, 3],  # the first batch's live group in the first dead slot
        [100, 101, 102, 103],
    ]


# the examples in the docstrings

OFFERED = {
    "trl_replay_strategies": {"replay_plugins": None, "replay_evictor": "example/most_used"},
    "trl_replay_presets": {"replay_plugins": None, "replay_preset": "example/short_lived"},
}
"""What names the plugin where it has no hook for training."""


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_of_every_hook_runs_and_trains(tmp_path, hook):
    specs = hookspecs.RegistryHooks if hook in vars(hookspecs.RegistryHooks) else hookspecs.SessionHooks
    names = {name: getattr(trl_replay, name) for name in trl_replay.__all__}
    example = doctest.DocTestParser().get_doctest(vars(specs)[hook].__doc__, names, hook, None, 0)
    assert example.examples, f"{hook} has no example in its docstring"
    report = []
    failed, _ = doctest.DocTestRunner().run(example, out=report.append, clear_globs=False)
    assert not failed, "".join(report)
    instance = example.globs["Plugin"]()
    assert hasattr(instance, hook)
    registry().add(instance, "example")
    try:
        named = OFFERED.get(hook, {"replay_plugins": "example"})
        session = train(tmp_path, **named, replay_buffer_size=2)
        trl_replay.detach(session.trainer)
    finally:
        trl_replay.unregister("example")


# what strategies and corrections see


def test_54_what_scorers_and_selectors_see_can_only_be_read(tmp_path):
    def writing(groups):
        groups.rewards[:] = 777.0

    for hook in ("score", "select"):
        with plugin(**{hook: writing}), pytest.raises(HookError, match=f"'mine'.*trl_replay_{hook}.*read-only"):
            train(tmp_path)


def unmasking(rows):
    """Empties the mask by which its own result is checked."""
    rows.mask[:] = False
    return Corrected(torch.full_like(rows.logps, float("nan")))


def heavy(rows):
    """Weights that float64 holds and float32 does not."""
    return Corrected(rows.behavior_logps, torch.full((len(rows.ages),), 1e300, dtype=torch.float64))


def shifted(rows):
    """Advantages that are 0 alone, and not with what is added to them."""
    ones = torch.ones(len(rows.ages))
    return Corrected(rows.behavior_logps, ones * 1e6, shift=ones * 1e6)


@pytest.mark.parametrize(
    ("correct", "words"),
    [
        (unmasking, "old_logps that are not finite"),
        (heavy, "finite weights"),
        (shifted, r"the weights \[1000000\.0, .* times the rows' advantages 1e\+09 at most"),
    ],
)
def test_54_a_correction_is_checked_by_what_it_was_given_and_in_the_type_that_is_applied(tmp_path, correct, words):
    with plugin(correct=correct), pytest.raises(ResultError, match=words):
        train(tmp_path)


def test_56_a_column_of_objects_is_refused_when_it_is_added(tmp_path):
    session = trl_replay.attach(trainer_of(tmp_path))
    with pytest.raises(ConfigurationError, match="is not a numeric type"):
        session.buffer.table.add_column("mine", dtype=object)
    session.buffer.table.add_column("mine", dtype=np.int32)
