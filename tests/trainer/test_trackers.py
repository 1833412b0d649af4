"""Replay's settings in the trackers' run configuration, with stand-ins for the trackers beneath transformers' own
callbacks."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support import DEAD, HALF, LIVE, Rewards
from transformers.integrations import WandbCallback
from trl.extras import profiling

import trl_replay
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE])
TRACKERS = ("wandb", "trackio")
CALLBACKS = {"wandb": "WandbCallback", "trackio": "TrackioCallback"}
SETTINGS = {"replay_buffer_size": 7, "replay_sampler": "uniform", "replay_max_age": 100}


def ours(values):
    return "replay_buffer_size" in values


class Told(dict[str, Any]):
    """The calls to one tracker's run, and a switch that makes it refuse what is ours."""

    def __init__(self):
        super().__init__()
        self.refuses = False
        self.times = 0
        self.alerts = []

    def alert(self, title, text):
        self.alerts.append(title)
        if self.refuses:
            raise ValueError("a run has no room for this")

    def update(self, values, allow_val_change=False):
        if ours(values):
            self.times += 1
            if self.refuses:
                raise ValueError("a run has no room for this")
        super().update(values)


def module(name, **contents):
    """A stand-in that `import` and `find_spec` find."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    vars(made).update(contents)
    return made


def stand_in_wandb(told):
    run = SimpleNamespace(_label=lambda **kwargs: None, summary={}, alert=told.alert, config=told)
    wandb = module("wandb", run=None, config=told, log=lambda values: None, termwarn=lambda *args, **kwargs: None)
    wandb.init = lambda **kwargs: setattr(wandb, "run", run)
    errors = module("wandb.sdk.lib.config_util", ConfigError=type("ConfigError", (Exception,), {}))
    return [wandb, module("wandb.sdk"), module("wandb.sdk.lib"), errors]


def stand_in_trackio(told):
    space = SimpleNamespace(current_space_id=SimpleNamespace(get=lambda: None))
    nothing = {
        "alert": told.alert,
        "init": lambda **kwargs: None,
        "log": lambda *args, **kwargs: None,
        "finish": lambda: None,
    }
    return [module("trackio", config=told, context_vars=space, __version__="0.1", **nothing)]


@pytest.fixture
def trackers(monkeypatch):
    """Stand-ins for all of them, by `report_to`: what their runs were told."""
    makers = (stand_in_wandb, stand_in_trackio)
    all_told = {name: Told() for name in TRACKERS}
    for name, make in zip(TRACKERS, makers, strict=True):
        for made in make(all_told[name]):
            monkeypatch.setitem(sys.modules, made.__name__, made)
            monkeypatch.setattr(profiling, made.__name__, made, raising=False)  # TRL imports what was there before
    return all_told


def tracked(folder, report_to=TRACKERS, steps=1):
    """A trainer that reports to these, attached."""
    trainer = make_trainer(folder, Rewards(*SCRIPT), max_steps=steps, report_to=list(report_to))
    return trainer, trl_replay.attach(trainer, **SETTINGS)


@pytest.mark.parametrize("name", TRACKERS)
def test_an_active_tracker_is_told_every_setting_beside_the_trainers_own(name, trackers, tmp_path):
    trainer, session = tracked(tmp_path, [name])
    assert not ours(trackers[name])
    trainer.train()
    told = trackers[name]
    assert session.config.to_dict().items() <= told.items()
    assert told["replay_buffer_size"] == 7
    assert "learning_rate" in told, "what transformers had written is still there"
    assert told.times == 1
    assert not any(ours(other) for each, other in trackers.items() if each != name)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_refuses_is_warned_of_and_training_goes_on(name, trackers, tmp_path):
    trackers[name].refuses = True
    trainer, session = tracked(tmp_path, steps=2)
    with pytest.warns(UserWarning, match=f"{CALLBACKS[name]}'s tracker: ValueError: a run has no room"):
        train_twice(trainer)
    assert session.totals.batches == 4
    assert trackers[name].times == 2
    assert [ours(told) for told in trackers.values()] == [each != name for each in TRACKERS]


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("name", TRACKERS)
def test_an_alarm_goes_to_trackers_that_alert_once(name, refuses, trackers, tmp_path, recwarn):
    def varied(completions, **_):
        return [float(len(set(text))) for text in completions]

    trainer = make_trainer(
        tmp_path,
        [Rewards([DEAD] * 3, name="silent"), varied],
        max_steps=40,
        learning_rate=1e-5,
        report_to=list(TRACKERS),
    )
    trl_replay.attach(trainer)
    trackers[name].refuses = refuses
    train_twice(trainer)
    assert trackers[name].alerts == ["replay: never_paid"]
    told = [str(one.message) for one in recwarn if "An alarm did not reach" in str(one.message)]
    assert (
        told
        == [f"An alarm did not reach {CALLBACKS[name]}'s tracker: ValueError: a run has no room for this"] * refuses
    )


def train_twice(trainer):
    trainer.train()
    trainer.train()


def test_every_train_tells_its_run_and_after_detach_none_is_told(trackers, tmp_path):
    trainer, _ = tracked(tmp_path, ["wandb"], 2)
    train_twice(trainer)
    trl_replay.detach(trainer)
    assert trackers["wandb"].times == 2
    trainer.train()
    assert trackers["wandb"].times == 2


def test_a_tracker_without_a_run_is_left_alone(trackers, tmp_path):
    class Offline(WandbCallback):
        def setup(self, *args, **kwargs):
            pass

        def on_log(self, *args, **kwargs):
            pass

    trainer, _ = tracked(tmp_path, ["none"])
    trainer.add_callback(Offline())
    trainer.train()
    assert not trackers["wandb"]


def test_only_the_main_process_tells(trackers, tmp_path, monkeypatch):
    trainer, _ = tracked(tmp_path)
    monkeypatch.setattr(type(trainer), "is_world_process_zero", lambda self: False)
    trainer.train()
    assert not any(trackers.values())
