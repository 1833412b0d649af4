"""ReplayConfig beside GRPOConfig: in Python, from YAML and from flags."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from trl import GRPOConfig, TrlParser

import trl_replay
from trl_replay import ConfigurationError, ReplayConfig


def parse(*flags: str, config: str | None = None, tmp_path: Any = None) -> ReplayConfig:
    arguments = ["--output_dir", "out", "--use_cpu", "--bf16", "false", *flags]
    if config is not None:
        path = tmp_path / "config.yaml"
        path.write_text(config)
        arguments += ["--config", str(path)]
    _, replay = TrlParser((GRPOConfig, ReplayConfig)).parse_args_and_config(arguments)
    return replay


def test_no_field_collides_with_grpo_config() -> None:
    ours = {spec.name for spec in dataclasses.fields(ReplayConfig)}
    theirs = {spec.name for spec in dataclasses.fields(GRPOConfig)}
    assert not ours & theirs
    assert "config" not in ours, "TrlParser keeps that name for itself"


def test_flags_reach_every_kind_of_field() -> None:
    replay = parse(
        "--replay_buffer_size", "8", "--replay-evictor", "fifo", "--replay_max_age", "5",
        "--replay_max_fraction", "0.5",
        "--replay_plugins", "one", "two", "--replay_sampler_kwargs", '{"alpha": 0.5}', "--no_use_replay",
    )  # fmt: skip
    assert (replay.replay_buffer_size, replay.replay_evictor, replay.replay_max_age) == (8, "fifo", 5)
    assert (replay.replay_max_fraction, replay.replay_plugins) == (0.5, ["one", "two"])
    assert replay.replay_sampler_kwargs == {"alpha": 0.5}
    assert replay.use_replay is False


def test_yaml_reaches_the_same_fields_and_flags_win(tmp_path: Any) -> None:
    text = """
use_replay: false
replay_buffer_size: 8
replay_sampler_kwargs:
  alpha: 0.5
replay_plugins: one
replay_evictor: somebody/elses
"""
    replay = parse("--replay_buffer_size", "9", config=text, tmp_path=tmp_path)
    assert replay.use_replay is False
    assert replay.replay_buffer_size == 9
    assert replay.replay_sampler_kwargs == {"alpha": 0.5}
    assert replay.replay_plugins == ["one"], "a lone plugin name is wrapped"
    assert replay.replay_evictor == "somebody/elses", "third parties' names are strings as any other"


def test_an_unknown_yaml_key_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="replay_bufer"):
        parse(config="replay_bufer: 3\n", tmp_path=tmp_path)


def test_help_lists_every_field(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        TrlParser((GRPOConfig, ReplayConfig)).parse_args_and_config(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{spec.name}" in text for spec in dataclasses.fields(ReplayConfig))


def test_every_field_is_documented() -> None:
    for spec in dataclasses.fields(ReplayConfig):
        assert spec.metadata["help"]
        assert spec.name.endswith("_kwargs") or f"{spec.name} (`" in (ReplayConfig.__doc__ or ""), spec.name


BAD: list[tuple[dict[str, Any], str]] = [
    ({"replay_sampler_kwargs": "{alpha: 1}"}, "replay_sampler_kwargs='{alpha: 1}'"),
    ({"replay_sampler_kwargs": "[1]"}, "replay_sampler_kwargs"),
    ({"replay_evictor": ""}, "replay_evictor=''"),
    ({"replay_max_age": 0}, "replay_max_age=0"),
    ({"replay_max_uses": 1.5}, "replay_max_uses=1.5"),
    ({"replay_min_size": 0}, "replay_min_size=0"),
    ({"replay_buffer_size": True}, "replay_buffer_size=True"),
    ({"replay_seed": -1}, "replay_seed=-1"),
    ({"replay_max_fraction": float("nan")}, "replay_max_fraction=nan"),
    ({"use_replay": "no"}, "use_replay='no'"),
]


@pytest.mark.parametrize(("settings", "words"), BAD)
def test_a_bad_value_names_setting_value_and_remedy(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ReplayConfig(**settings)
    assert words in str(caught.value)
    assert ": " in str(caught.value), "a remedy follows"


@settings(deadline=None)
@given(
    st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=5), max_size=4)
)
def test_json_kwargs_mean_the_same_as_a_mapping(kwargs: dict[str, Any]) -> None:
    import json

    assert ReplayConfig(replay_scorer_kwargs=json.dumps(kwargs)).kwargs_of("scorer") == kwargs


def test_a_preset_fills_what_is_left_at_its_default() -> None:
    config = ReplayConfig(replay_evictor="fifo")
    filled = config.with_defaults({"replay_evictor": "reservoir", "replay_max_age": 4}, "a preset")
    assert (filled.replay_evictor, filled.replay_max_age) == ("fifo", 4)
    with pytest.raises(ConfigurationError, match=r"a preset has no setting 'replay_max_agee'\. Did you mean"):
        config.with_defaults({"replay_max_agee": 4}, "a preset")


def test_the_config_imports_neither_torch_nor_trl() -> None:
    import subprocess

    code = (
        "import sys, trl_replay; trl_replay.ReplayConfig(); sys.exit('torch' in sys.modules or 'trl' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("old", "new"), [("draw", "weighted_sample"), ("last_whole_checkpoint", "last_complete_checkpoint")]
)
def test_a_renamed_public_name_still_works_and_warns(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"trl_replay.{old} is now trl_replay.{new}"):
        assert getattr(trl_replay, old) is getattr(trl_replay, new)
