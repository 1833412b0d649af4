"""Two ranks with settings of their own: each difference that matters is told on both, before the first batch is
trained on, with the setting and both values. One launch goes through the cases (ranks/settings_ranks.py)."""

import re

import pytest
from settings_ranks import ALIKE, CASES

VALUES = {
    "replay_weight": ("1", "0.5"),
    "replay_correction, of arguments": ("'truncated(cap=1.0)'", "'truncated(cap=2.0)'"),
    "replay_scope": ("'gathered'", "'process'"),
    "replay_max_bytes": ("None", "1000000000"),
    "replay_refill, of a share": ("0.9", "0.5"),
    "replay_warm_start": ("None", "a file"),
    "replay_plugins, another release": ("['released (released 1.0: ", "['released (released 2.0: "),
    "replay_plugins, of arguments": ("(by=1.0)", "(by=2.0)"),
    "replay_scorer, another release": ("'released/even (released 1.0)'", "'released/even (released 2.0)'"),
    "batch keys of plugins": ("extra_0", "extra_1"),
    "seed": ("42", "7"),
    "seed, process, prompts chosen": ("1", "2"),
    "trl_replay": ("0.1", "0.0.9"),
    "num_iterations": ("1", "2"),
    "reward functions and weights": ("[['scripted', 1]]", "[['scripted', 0.5]]"),
}


@pytest.mark.parametrize("case", CASES)
def test_69_and_75_a_setting_that_differs_is_told_on_all_ranks_with_both_values(launches, case):
    name = re.escape(case.partition(",")[0])
    first, second = map(re.escape, VALUES[case])
    ranks = launches(2, case)
    told = [rank["text"] for rank in ranks]
    for rank, text in zip(ranks, told, strict=True):
        assert rank["type"] == "ConfigurationError", text
        assert re.search(f"{name}[^;]* is .*{first}.* on rank 0 and .*{second}.* on rank 1", text), text
        differences = 2 if case == "replay_scorer, another release" else 1  # its plugin's, too
        assert text.count(" on rank 0 and ") == differences, f"nothing else differs: {text}"
        assert rank["updates"] == 0, "nothing was trained"
    assert told[0] == told[1]


@pytest.mark.parametrize("case", ALIKE)
def test_69_what_may_differ_does(launches, case):
    for rank in launches(2, case):
        assert rank["type"] == "", rank["text"]
        assert rank["updates"] == 2
