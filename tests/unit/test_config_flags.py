"""ReplayConfig beside GRPOConfig: from YAML and from flags."""

import dataclasses

import pytest
from trl import GRPOConfig, TrlParser

import trl_replay
from trl_replay import ReplayConfig


def parse(*flags, config=None, tmp_path=None):
    arguments = ["--output_dir", "out", "--use_cpu", "--bf16", "false", *flags]
    if config is not None:
        path = tmp_path / "config.yaml"
        path.write_text(config)
        arguments += ["--config", str(path)]
    _, replay = TrlParser((GRPOConfig, ReplayConfig)).parse_args_and_config(arguments)
    return replay


def test_no_field_collides_with_grpo_config():
    ours = {spec.name for spec in dataclasses.fields(ReplayConfig)}
    theirs = {spec.name for spec in dataclasses.fields(GRPOConfig)}
    assert not ours & theirs
    assert "config" not in ours, "TrlParser keeps that name for itself"


def test_flags_reach_every_kind_of_field():
    replay = parse(
        "--replay_buffer_size", "8", "--replay-evictor", "fifo", "--replay_max_age", "5",
        "--replay_max_fraction", "0.5",
        "--replay_plugins", "one", "two(high=1)", "--replay_sampler", "prompt_balanced(alpha=0.5)", "--no_use_replay",
    )  # fmt: skip
    assert (replay.replay_buffer_size, replay.replay_evictor, replay.replay_max_age) == (8, "fifo", 5)
    assert (replay.replay_max_fraction, replay.plugins) == (0.5, {"one": {}, "two": {"high": 1}})
    assert replay.strategy("sampler") == ("prompt_balanced", {"alpha": 0.5})
    assert replay.use_replay is False


def test_yaml_reaches_the_same_fields_and_flags_win(tmp_path):
    text = """
use_replay: false
replay_buffer_size: 8
replay_sampler: prompt_balanced(alpha=0.5)
replay_plugins: one(high=0.25)
replay_evictor: somebody/elses
"""
    replay = parse("--replay_buffer_size", "9", config=text, tmp_path=tmp_path)
    assert replay.use_replay is False
    assert replay.replay_buffer_size == 9
    assert replay.strategy("sampler") == ("prompt_balanced", {"alpha": 0.5})
    assert replay.plugins == {"one": {"high": 0.25}}, "a lone plugin name is wrapped"
    assert replay.replay_evictor == "somebody/elses", "third parties' names are strings as any other"


def test_the_start_can_be_given_on_the_command_line_and_in_yaml(tmp_path):
    parser = TrlParser(ReplayConfig)
    assert parser.parse_args_and_config(["--replay_start", "40"])[0].replay_start == 40
    assert parser.parse_args_and_config(["--replay_start", "adaptive"])[0].replay_start == "adaptive"
    for written, start in (("adaptive", "adaptive"), ("10", 10), ("'10'", 10), ("null", None)):
        (tmp_path / "run.yaml").write_text(f"replay_start: {written}\n")
        assert parser.parse_args_and_config(["--config", str(tmp_path / "run.yaml")])[0].replay_start == start


@pytest.mark.parametrize("setting", ["replay_plugins", "replay_task_columns"])
def test_80_a_presets_list_fills_what_no_flag_and_no_line_gave(setting):
    preset = trl_replay.Preset("bundle", {setting: ["label"]}, "")
    functions = {"trl_replay_presets": staticmethod(trl_replay.hookimpl(lambda: [preset]))}
    trl_replay.register(type("Plugin", (), functions)(), "mine")
    try:
        left = parse("--replay_preset", "mine/bundle").with_preset()
        given = parse("--replay_preset", "mine/bundle", f"--{setting}", "other").with_preset()
    finally:
        trl_replay.unregister("mine")
    assert getattr(left, setting) == ["label"]
    assert getattr(given, setting) == ["other"]
