"""docs/choosing.md keeps up with the code: every setting has an example that can be used."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import trl_replay
from trl_replay.registry import registry

CHOOSING = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text()


@pytest.fixture(autouse=True)
def _a_file_to_start_from(tmp_path, monkeypatch):
    """The one that the examples of `replay_warm_start` name."""
    (tmp_path / "groups.parquet").touch()
    monkeypatch.chdir(tmp_path)


def settings_in(text):
    """Every `replay_name=value` (or use_replay) between backticks, with its value."""
    found = re.findall(r"`((?:use_replay|replay_\w+))=([^`]+)`", text)
    return [(name, ast.literal_eval(value)) for name, value in found]


def test_every_setting_has_an_example_that_can_be_used():
    section = re.search(r"^## Every setting, with an example\n(.*?)^## ", CHOOSING, re.MULTILINE | re.DOTALL)[1]
    examples = dict(settings_in(section))
    assert set(examples) == {field.name for field in dataclasses.fields(trl_replay.ReplayConfig)}
    defaults = trl_replay.ReplayConfig()
    for name, value in examples.items():
        assert getattr(trl_replay.ReplayConfig(**{name: value}), name) == value
        assert value != getattr(defaults, name), f"the example of {name} is its default"


def test_every_setting_of_the_decision_table_can_be_used():
    section = re.search(r"^## A decision table\n(.*?)^## ", CHOOSING, re.MULTILINE | re.DOTALL)[1]
    examples = settings_in(section)
    assert len(examples) > 10
    for name, value in examples:
        trl_replay.ReplayConfig(**{name: value})


def test_the_page_on_choosing_names_every_correction():
    for plugin, spec in registry().strategies():
        if plugin.name == "builtin" and isinstance(spec, trl_replay.CorrectionSpec):
            assert f"| `{spec.name}` |" in CHOOSING
