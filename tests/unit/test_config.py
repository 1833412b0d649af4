"""ReplayConfig in Python: what it checks, and what it says."""

import dataclasses
import math
import re
from keyword import iskeyword

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from trl_replay import ConfigurationError, ReplayConfig
from trl_replay.base.validation import Named


def test_every_field_is_documented():
    for spec in dataclasses.fields(ReplayConfig):
        assert spec.metadata["help"].endswith((".", ").")), spec.name
        assert "%" not in spec.metadata["help"], "argparse formats help texts"


BAD = {
    "use_replay": ["no"],
    "replay_buffer_size": [True],
    "replay_max_bytes": ["much", "-5MB", 0, "5 XB", True, 1.5],
    "replay_evictor": [""],
    "replay_sampler": ["uniform(a", "uniform(1)", "uniform(a=b)", "uniform()()", "(a=1)", [1]],
    "replay_preset": [3],
    "replay_refill": [2, "other", "new(rounds=0)", "new(2)", "new(round=1)", "new(until=0)"],
    "replay_plugins": [[1], 3],
    "replay_start": [-1, "soon", 0.5, "pass_rate(1.5)", "pass_rate(.)", "pass_rate"],
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
    st.dictionaries(
        st.from_regex(r"[a-z]{1,5}", fullmatch=True).filter(lambda name: not iskeyword(name)),
        st.none() | st.booleans() | st.integers() | st.text(),
        max_size=4,
    )
)
def test_arguments_come_back_from_their_text(arguments):
    config = ReplayConfig(replay_scorer=str(Named("a_module:scorer", arguments)))
    assert config.strategy("scorer") == ("a_module:scorer", arguments)


def test_values_may_be_written_as_in_yaml():
    config = ReplayConfig(replay_scorer="a_module:scorer (on=true, off=false, of=[null, -inf], by='false')")
    given = {"on": True, "off": False, "of": [None, -math.inf], "by": "false"}
    assert config.strategy("scorer") == ("a_module:scorer", given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"replay_sampler": "proportionl"}, "Did you mean 'proportional'?"),
        ({"replay_sampler": "prompt_balanced(alpa=1)"}, "has no argument 'alpa'. Did you mean 'alpha'?"),
        ({"replay_evictor": "fifo(by=1)"}, "It takes no arguments."),
    ],
)
def test_names_and_arguments_are_looked_up_when_the_configuration_is_made(given, words):
    with pytest.raises(ConfigurationError) as caught:
        ReplayConfig(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["to_come/sampler", "a_module:sampler"])
def test_what_may_be_registered_or_imported_later_is_looked_up_by_attach(name):
    config = ReplayConfig(replay_sampler=f"{name}(any=1)")
    assert config.strategy("sampler") == (name, {"any": 1})


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


@pytest.mark.parametrize(
    ("written", "read"),
    [(None, ("new", 0, 1.0)), ("same", ("same", 1, 1.0)), ("new(rounds=2, until=0.8)", ("new", 2, 0.8))],
)
def test_plugins_read_dynamic_sampling_from_the_configuration(written, read):
    assert ReplayConfig(replay_refill=written).refill == read
