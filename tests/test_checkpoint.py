"""Checkpoints: resuming is bit-identical to the run that never stopped, wherever stock's own resume is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from resuming import LAYOUTS, PAIRS, build, differences, everything, state, train

import trl_replay


def last(folder: Path) -> str:
    found = trl_replay.last_whole_checkpoint(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(("evictor", "sampler", "scope", "layout"), PAIRS)
def test_resuming_is_bit_identical_to_the_run_that_never_stopped(
    tmp_path: Path, evictor: str, sampler: str, scope: str, layout: str
) -> None:
    settings = {"replay_evictor": evictor, "replay_sampler": sampler, "replay_scope": scope, **LAYOUTS[layout]}
    whole = everything(*train(tmp_path / "whole", **settings))
    assert whole["totals"][1]["replaced"] > 0, "something was replayed"
    train(tmp_path / "cut", **{**settings, "max_steps": 4})
    resumed = everything(*train(tmp_path / "cut", resume=last(tmp_path / "cut"), **settings))
    assert not differences(whole, resumed)
