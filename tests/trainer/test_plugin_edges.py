"""Failure 69 of docs/known-failures.md: plugins that end, skip or mask what they may not; updates that can't be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resuming import train
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay import CheckpointError, HookError, PluginError, ResultError, UnknownNameError, hookimpl
from trl_replay.registry import Registry
from trl_replay.testing import make_trainer


@contextmanager
def registered(plugin: Any) -> Iterator[None]:
    trl_replay.register(plugin, "edge")
    try:
        yield
    finally:
        trl_replay.unregister("edge")


def run(folder: Path, plugin: Any, **settings: Any) -> Any:
    """Trains with a plugin."""
    trainer = make_trainer(folder, Rewards([LIVE, HALF, DEAD]), max_steps=3)
    with registered(plugin):
        session = trl_replay.attach(trainer, replay_plugins="edge", replay_start=0, **settings)
        trainer.train()
    return session


class NeverYields:
    @hookimpl(wrapper=True)
    def trl_replay_score(self, groups: Any, context: Any) -> Any:
        if len(groups) < 0:
            yield
        return np.ones(len(groups))


class YieldsTwice:
    @hookimpl(wrapper=True)
    def trl_replay_score(self, groups: Any, context: Any) -> Any:
        yield
        result = yield
        return result


class Doubles:
    @hookimpl(wrapper=True)
    def trl_replay_score(self, groups: Any, context: Any) -> Any:
        scores = yield
        return 2 * scores


class Rescues:
    """Catches what the hook raises below it."""

    @hookimpl(wrapper=True)
    def trl_replay_score(self, groups: Any, context: Any) -> Any:
        try:
            yield
        except HookError:
            return np.full(len(groups), 3.0)
        raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("plugin", "reason"), [(NeverYields(), "did not"), (YieldsTwice(), "twice")])
def test_71_a_wrapper_that_does_not_yield_once_is_named(tmp_path: Path, plugin: Any, reason: str) -> None:
    with pytest.raises(HookError, match=f"Plugin 'edge'.*failed in trl_replay_score.*must yield once.*{reason}"):
        run(tmp_path, plugin)


def test_71_a_wrapper_gets_what_is_returned_and_what_is_raised_below_it(tmp_path: Path) -> None:
    plain = run(tmp_path, Doubles(), replay_scorer=lambda groups, context: np.full(len(groups), 2.0))
    assert set(plain.buffer.table.first_score) == {4.0}

    def fails(groups: Any, context: Any) -> Any:
        raise ValueError("no score")

    rescued = run(tmp_path, Rescues(), replay_scorer=fails)
    assert set(rescued.buffer.table.first_score) == {3.0}


def test_71_a_row_without_a_prompt_is_told_with_the_plugins_name(tmp_path: Path) -> None:
    class Promptless:
        @hookimpl
        def trl_replay_inputs(self, groups_of_rows: Any, context: Any) -> Any:
            return [{"question": "1+1="} for _ in groups_of_rows]

    with pytest.raises(ResultError, match=r"Plugin 'edge'.*trl_replay_inputs.*without a 'prompt'"):
        run(tmp_path, Promptless())


def test_71_masked_values_are_refused_with_the_remedy(tmp_path: Path) -> None:
    class Masks:
        @hookimpl
        def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
            return np.ma.masked_less(groups.advantages, 0)

    with pytest.raises(ResultError, match=r"Plugin 'edge'.*trl_replay_advantages.*np\.ma.*NaN"):
        run(tmp_path, Masks())


def test_71_a_masked_array_in_which_nothing_is_masked_is_taken(tmp_path: Path) -> None:
    class MasksNothing:
        @hookimpl
        def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
            return np.ma.masked_array(groups.advantages)

    assert run(tmp_path, MasksNothing()).totals.batches == 3


@pytest.mark.parametrize("name", ["one/two", "/", "a/../../b"])
def test_71_a_plugin_name_with_a_slash_is_refused(name: str) -> None:
    """`plugin/strategy` names a plugin's strategy."""
    with pytest.raises(PluginError, match=r"The plugin name .* holds a slash"):
        trl_replay.register(NeverYields(), name)


@pytest.mark.parametrize("update", [-5, 2, 1.5, None])
def test_71_a_checkpoint_whose_updates_cant_be_is_refused(tmp_path: Path, update: Any) -> None:
    """Its checksum is right; entries of updates to come would have negative ages."""
    train(tmp_path, max_steps=6)
    path = tmp_path / "checkpoint-6" / "trl_replay" / "rank-00000" / "state.json"
    text = json.loads(path.read_text())
    text["content"]["session"]["update"] = update
    text["checksum"] = hashlib.sha256(json.dumps(text["content"], sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(text))
    with pytest.raises(CheckpointError, match=rf"checkpoint-6.*update {update}"):
        train(tmp_path, resume=str(tmp_path / "checkpoint-6"))


@pytest.mark.parametrize("status", ["0", "3", "'bye'"])
def test_71_a_plugin_that_exits_when_it_is_imported_is_a_broken_plugin(
    tmp_path: Path, monkeypatch: Any, status: str
) -> None:
    (tmp_path / "leaves_at_once.py").write_text(f"import sys\nsys.exit({status})\n")
    info = tmp_path / "leaves-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leaves\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trl_replay]\nleaves = leaves_at_once\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry()
    with pytest.warns(RuntimeWarning, match=r"'leaves' from leaves 1\.0 was not loaded: SystemExit"):
        registry.discover()
    with pytest.raises(PluginError, match=r"leaves 1\.0.*SystemExit"):
        registry.plugin("leaves", "replay_plugins")
    with pytest.raises(UnknownNameError, match=r"leaves_at_once:score.*SystemExit"):
        registry.resolve("scorer", "leaves_at_once:score")
