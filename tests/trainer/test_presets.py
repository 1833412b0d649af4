"""Presets fill in what was not given, and nothing else."""

import pytest
from support import DEAD, HALF, LIVE, Rewards, plugin, plugin_class
from trl import TrlParser

import trl_replay
from trl_replay import PluginError, Preset, ReplayConfig
from trl_replay.testing import make_trainer

SETTINGS = {"replay_max_fraction": 0.5, "replay_max_age": 3, "replay_evictor": "fifo"}
DEFAULTS = {"replay_max_fraction": 1.0, "replay_max_age": None, "replay_evictor": "prompt_balanced"}


PRESETS = [Preset("half", SETTINGS, "half of everything"), Preset("off", {"use_replay": False}, "no replay")]


@pytest.fixture(autouse=True)
def _presets():
    with plugin("presets", presets=lambda: PRESETS):
        yield


@pytest.fixture
def trainer(tmp_path):
    return make_trainer(tmp_path, Rewards([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE]), max_steps=2)


def in_force(config):
    return {name: getattr(config, name) for name in SETTINGS}


def test_48_a_default_that_was_given_in_python_is_not_overridden_by_a_preset(trainer):
    with trl_replay.attached(trainer, replay_preset="presets/half", **DEFAULTS) as session:
        assert in_force(session.config) == DEFAULTS
    with trl_replay.attached(trainer, ReplayConfig(replay_preset="presets/half", **DEFAULTS)) as session:
        assert in_force(session.config) == DEFAULTS
    with trl_replay.attached(trainer, replay_preset="presets/half") as session:
        assert in_force(session.config) == SETTINGS


def test_48_settings_given_at_attach_go_on_top_of_a_config_and_both_count(trainer):
    config = ReplayConfig(replay_preset="presets/half", replay_max_age=None)
    with trl_replay.attached(trainer, config, replay_evictor="heap") as session:
        expected = {"replay_max_fraction": 0.5, "replay_max_age": None, "replay_evictor": "heap"}
        assert in_force(session.config) == expected
    assert config.replay_evictor == "prompt_balanced", "the user's object is not changed"


@pytest.mark.parametrize("name", SETTINGS)
def test_48_a_default_that_was_given_in_yaml_or_as_a_flag_is_not_overridden(trainer, tmp_path, name):
    written = {"replay_max_fraction": "1.0", "replay_max_age": "null", "replay_evictor": "prompt_balanced"}[name]
    path = tmp_path / "replay.yaml"
    path.write_text(f"replay_preset: presets/half\n{name}: {written}\n")
    sources = [["--config", str(path)]]
    if written != "null":  # no flag says None
        sources.append(["--replay_preset", "presets/half", f"--{name}", written])
    for source in sources:
        (config,) = TrlParser(ReplayConfig).parse_args_and_config(source)
        with trl_replay.attached(trainer, config) as session:
            assert in_force(session.config) == {**SETTINGS, name: DEFAULTS[name]}


def test_48_a_preset_that_turns_replay_off_takes_effect(trainer):
    session = trl_replay.attach(trainer, replay_preset="presets/off")
    assert not session.enabled
    assert "_compute_loss" not in trainer.__dict__
    trl_replay.detach(trainer)


@pytest.mark.parametrize("name", ["", ".", "..", "n" * 256, "\0" * 86, "é" * 50, "one/two", "/", "a/../../b"])
def test_51_and_71_a_plugin_name_that_names_no_folder_is_refused(name):
    with pytest.raises(PluginError, match="The plugin name"):
        trl_replay.register(plugin_class(presets=lambda: PRESETS)(), name)
