"""ReplayConfig in Python: what it checks, and what it says."""

import dataclasses
import json
import re
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from trl_replay import ConfigurationError, ReplayConfig


def test_every_field_is_documented():
    for spec in dataclasses.fields(ReplayConfig):
        assert spec.metadata["help"].endswith((".", ").")), spec.name
        assert "%" not in spec.metadata["help"], "argparse formats help texts"


BAD = {
    "use_replay": ["no"],
    "replay_buffer_size": [True],
    "replay_max_bytes": ["much", "-5MB", "0", 0, "5 XB", True, 1.5, "MB", ""],
    "replay_evictor": [""],
    "replay_sampler_kwargs": ["{alpha: 1}", [1]],
    "replay_preset": [3],
    "replay_plugins": [[1], 3],
    "replay_seed": [-1],
    "replay_start": [-1, "soon", 0.5],
    "replay_start_pass_rate": [1.5],
    "replay_pass_reward": [float("nan")],
    "replay_retire_passes": [0],
    "replay_max_age": [0],
    "replay_max_uses": [1.5],
    "replay_max_fraction": [float("nan")],
    "replay_max_weight": [float("inf")],
    "replay_weight": [-0.5, 0.0, True],
    "replay_unfilled": ["drop", None],
    "replay_dry_run": ["yes"],
    "replay_warm_start_short": ["drop"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_named_with_its_setting_and_a_remedy(name, value):
    with pytest.raises(ConfigurationError) as caught:
        ReplayConfig(**{name: value})
    assert re.match(rf"{name}={re.escape(repr(value))} can't be used: \w+", str(caught.value))


@settings(deadline=None)
@given(
    st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=5), max_size=4)
)
def test_json_kwargs_mean_the_same_as_a_mapping(kwargs):
    config = ReplayConfig(replay_scorer="a_module:scorer", replay_scorer_kwargs=json.dumps(kwargs))
    assert config.kwargs_of("scorer") == kwargs


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"replay_sampler": "proportionl"}, "Did you mean 'proportional'?"),
        ({"replay_sampler_kwargs": {"alpa": 1}}, "has no argument 'alpa'. Did you mean 'alpha'?"),
        ({"replay_evictor": "fifo", "replay_evictor_kwargs": {"by": 1}}, "It takes no arguments."),
    ],
)
def test_names_and_arguments_are_looked_up_when_the_configuration_is_made(given, words):
    with pytest.raises(ConfigurationError) as caught:
        ReplayConfig(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["to_come/sampler", "a_module:sampler"])
def test_what_may_be_registered_or_imported_later_is_looked_up_by_attach(name):
    config = ReplayConfig(replay_sampler=name, replay_sampler_kwargs={"any": 1})
    assert config.replay_sampler == name


def test_a_preset_fills_what_is_left_at_its_default():
    config = ReplayConfig(replay_evictor="fifo")
    filled = config.with_defaults({"replay_evictor": "reservoir", "replay_max_age": 4}, "a preset")
    assert (filled.replay_evictor, filled.replay_max_age) == ("fifo", 4)
    with pytest.raises(ConfigurationError, match=r"a preset has no setting 'replay_max_agee'\. Did you mean"):
        config.with_defaults({"replay_max_agee": 4}, "a preset")


def test_the_nearest_setting_stands_alone_and_without_one_all_are_listed():
    with pytest.raises(ConfigurationError, match=r"Did you mean 'replay_max_age'\?$"):
        ReplayConfig().with_settings({"replay_max_agee": 4}, "attach()")
    with pytest.raises(ConfigurationError, match=r"The settings are: use_replay, .*replay_preset\.$"):
        ReplayConfig().with_settings({"zzz": 4}, "attach()")


def test_a_preset_may_set_the_rounds_that_other_settings_are_about():
    config = ReplayConfig(replay_refill_prompts="same", replay_preset="mine/again")
    filled = config.with_defaults({"replay_refill_rounds": 2}, "a preset")
    assert (filled.replay_refill_rounds, filled.replay_refill_prompts) == (2, "same")


def test_the_config_imports_neither_torch_nor_trl():

    code = (
        "import sys, trl_replay; trl_replay.ReplayConfig(); sys.exit('torch' in sys.modules or 'trl' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
