"""Two ranks with settings of their own: each difference that matters is told on both, before the first batch is
trained on, with the setting and both values. One launch goes through the cases (ranks/settings_ranks.py)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ranks"))

from settings_ranks import ALIKE, CASES
from two_ranks import run_two_ranks

SCRIPT = Path(__file__).parent / "ranks" / "settings_ranks.py"
LIMIT = 400
"""Seconds after which the launch counts as hanging."""
VALUES = {
    "replay_weight": ("1.0", "0.5"),
    "replay_unfilled": ("'keep'", "'mask'"),
    "replay_correction": ("'ratio'", "'truncated'"),
    "replay_correction_kwargs": ("{'cap': 1.0}", "{'cap': 2.0}"),
    "replay_max_weight": ("None", "2.0"),
    "replay_logps_dtype": ("'float32'", "'bfloat16'"),
    "replay_buffer_size": ("8", "9"),
    "replay_scope": ("'gathered'", "'process'"),
    "replay_scope_kwargs": ("{'patience': 1}", "{'patience': 2}"),
    "replay_max_bytes": ("None", "1000000000"),
    "replay_refill_rounds": ("0", "2"),
    "replay_refill_until": ("1.0", "0.5"),
    "replay_warm_start": ("None", "a file"),
    "replay_plugins": ("[]", "['shaping (registered in this process)']"),
    "replay_plugins, of prompts": ("[]", "['prompts (registered in this process)']"),
    "replay_plugins, another release": ("['released (released 1.0)']", "['released (released 2.0)']"),
    "replay_plugins_kwargs": ("{'shaping': {'by': 1.0}}", "{'shaping': {'by': 2.0}}"),
    "replay_scorer, another release": ("'released/even (released 1.0)'", "'released/even (released 2.0)'"),
    "batch keys of plugins": ("extra_0", "extra_1"),
    "replay_seed": ("1", "2"),
    "replay_seed, process, prompts chosen": ("1", "2"),
    "replay_seed, the trainer's": ("42", "7"),
    "trl_replay": ("0.1", "0.0.9"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any) -> list[Any]:
    return run_two_ranks(SCRIPT, tmp_path_factory.mktemp("settings"), LIMIT)


@pytest.mark.parametrize("case", CASES)
def test_69_a_setting_that_differs_is_told_on_all_ranks_with_both_values(results: list[Any], case: str) -> None:
    name = re.escape(case.partition(",")[0])
    first, second = map(re.escape, VALUES[case])
    told = [rank[case]["text"] for rank in results]
    for rank, text in zip(results, told, strict=True):
        assert rank[case]["type"] == "ConfigurationError", text
        assert re.search(f"{name}[^;]* is .*{first}.* on rank 0 and .*{second}.* on rank 1", text), text
        differences = 2 if case == "replay_scorer, another release" else 1  # its plugin's, too
        assert text.count(" on rank 0 and ") == differences, f"nothing else differs: {text}"
        assert rank[case]["updates"] == 0, "nothing was trained"
    assert told[0] == told[1]


@pytest.mark.parametrize("case", ALIKE)
def test_69_what_may_differ_does(results: list[Any], case: str) -> None:
    for rank in results:
        assert rank[case]["type"] == "", rank[case]["text"]
        assert rank[case]["updates"] == 2
