"""Buffers across processes: several ranks, deliberately uneven, against each other and against one.

Each number of processes is launched once, as forks (ranks/scopes.py), and runs through all cases.
"""

import numpy as np
import pytest
from launches import (
    assert_same_gradients,
    assert_same_training,
    check_batches_of_all,
    check_groups,
    check_one_table,
    everywhere,
)
from one_rank import told
from scripted import LIMITS, build, mixed, run

WORLDS = (2, 4)
LAYOUTS = {2: ((8, 4), (6, 4)), 4: ((4, 4), (5, 4), (2, 8))}
NAMES = ("whole", "straddling", "one group on all")
SHARED = [(world, "gathered", layout) for world in WORLDS for layout in NAMES[: len(LAYOUTS[world])]]
ALL = [*SHARED, *((world, "process", "whole") for world in WORLDS)]
STEPS = 7


def size_of(world, layout):
    return LAYOUTS[world][NAMES.index(layout)][1]


@pytest.mark.parametrize(("world", "scope", "layout"), SHARED)
def test_all_ranks_have_the_same_table_after_every_step(launches, world, scope, layout):
    check_one_table(launches(world, f"{scope} {layout}"))


@pytest.mark.parametrize(
    ("case", "scope", "capacity", "words"),
    [
        ("few groups", "gathered", 6, "each process has 2 groups a batch, fewer than 4"),
        ("groups enough", "process", 3, "each process has 4 groups a batch, and all of their rows"),
    ],
)
def test_the_default_chooses_the_scope_by_how_groups_lie_and_says_so(launches, case, scope, capacity, words):
    for rank in launches(2, f"auto, {case}"):
        assert rank["scope"] == scope
        assert rank["capacity"] == capacity
        assert f"scope {scope}, chosen by replay_scope='auto': {words}" in rank["explained"]
        assert "; 3 groups a process, 6 in all" in rank["explained"]


@pytest.mark.parametrize("scope", ["process", "gathered"])
def test_ranks_that_share_a_buffer_wait_for_more_entries_together(launches, scope):
    """Rewards are sparse: a quarter of 12 updates. Of private buffers the other rank's stays empty."""
    ranks = launches(2, f"waiting {scope}")
    filled = [[any(step["replayed"]) for step in rank["steps"]] for rank in ranks]
    assert [any(places) for places in zip(*filled, strict=True)] == [False] * 3 + [True] * 9
    assert ranks[0]["size"] == 1
    assert ranks[1]["size"] == int(scope != "process")
    assert len(ranks[0]["values"]) == 2
    assert ranks[0]["values"] == ranks[1]["values"], "each hears of the rewards of all"


@pytest.mark.parametrize("ranks", ["rank 0", "rank 1"])
@pytest.mark.parametrize("scope", ["process", "gathered"])
def test_the_reward_rule_of_the_first_rank_of_a_buffer_counts(launches, scope, ranks):
    """Of private buffers each rank's own."""
    for rank, found in enumerate(launches(2, f"a rule of {ranks}, {scope}")):
        changes = ranks == f"rank {rank if scope == 'process' else 0}"
        assert (found["left"] > 0) == changes
        assert (found["oldest"] >= 3) == changes


@pytest.mark.parametrize("ranks", ["rank 0", "rank 1"])
@pytest.mark.parametrize("scope", ["process", "gathered"])
def test_where_training_resumes_the_rule_of_rank_0_counts_for_all(launches, scope, ranks):
    changes = ranks == "rank 0"
    for found in launches(2, f"resumed under a rule of {ranks}, {scope}"):
        assert (found["left"] > 0) == changes
        assert (found["oldest"] >= 2) == changes
        assert found["files"] == (0 if changes else 1 if scope == "process" else 2), "a file is read once"


@pytest.mark.parametrize(("world", "scope", "layout"), ALL)
def test_30_no_ranks_numbers_of_dead_and_live_groups_make_anyone_wait(launches, world, scope, layout):
    ranks = launches(world, f"{scope} {layout}")
    size = size_of(world, layout)
    assert all(len(rank["steps"]) == STEPS for rank in ranks), "every rank came to the end"
    live = [np.ptp(np.reshape(everywhere(ranks, step, "advantages_in"), (-1, size)), axis=1) > 0.1
            for step in range(STEPS)]  # fmt: skip
    assert not live[0].any(), "all dead, nothing stored, on every rank"
    assert live[2].all(), "all live, nothing to fill, on every rank"
    if layout != "one group on all":
        assert live[1].any(), "one rank all dead, another all live"
        assert not live[1].all()
        assert (live[1] == ~live[3]).all(), "and the other way round"


@pytest.mark.parametrize(("world", "scope", "layout"), ALL)
def test_17_replayed_rows_are_one_stored_group_whole_and_in_order_wherever_it_was_born(launches, world, scope, layout):
    replayed, traveled = check_groups(launches(world, f"{scope} {layout}"), size_of(world, layout))
    assert replayed >= (1 if layout == "one group on all" else 3)
    if scope == "process":
        assert traveled == 0
    elif layout != "one group on all":
        assert traveled > 0, "some dead group was filled with one that was generated elsewhere"


@pytest.mark.parametrize(("world", "scope", "layout"), ALL)
def test_16_every_rank_counts_the_tokens_of_the_final_batch(launches, world, scope, layout):
    ranks = launches(world, f"{scope} {layout}")
    check_batches_of_all(ranks)
    last = everywhere(ranks, STEPS - 1, "replayed")
    for rank in ranks:
        assert set(rank["logged"].values()) == {len(last)}, "every column of the logged table has every row"


@pytest.mark.parametrize(("world", "scope", "layout"), ALL)
def test_replayed_rows_carry_the_log_probs_of_the_policy_that_made_them(launches, world, scope, layout):
    ranks = launches(world, f"{scope} {layout}")
    made = {text: sums[0] for rank in ranks for text, sums in rank["behavior"]["fresh"].items()}
    replayed = [(text, value) for rank in ranks for text, sums in rank["behavior"]["replayed"].items()
                for value in sums]  # fmt: skip
    assert replayed
    for text, value in replayed:
        assert value == pytest.approx(made[text], abs=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_17_a_process_with_straddling_groups_is_refused_with_the_numbers(launches, world):
    rows, size = LAYOUTS[world][1]
    for rank in launches(world, "process straddling"):
        assert rank["type"] == "RefusedError"
        assert f"scores {rows} rows" in rank["text"]
        assert f"num_generations={size}" in rank["text"]
        assert "'gathered'" in rank["text"], "the remedy"


@pytest.mark.parametrize("world", WORLDS)
def test_a_gathered_buffer_holds_each_group_once_and_its_owners_stay_balanced(launches, world):
    for layout in NAMES[: len(LAYOUTS[world])]:
        ranks = launches(world, f"gathered {layout}")
        for number, rank in enumerate(ranks):
            owners = zip(rank["entries"], rank["entry_owners"], strict=True)
            assert rank["held"] == [serial for serial, owner in owners if owner == number]
            assert rank["entry_owners"] == ranks[0]["entry_owners"]
        for counts in ranks[0]["owners"]:
            assert max(counts) - min(counts) <= 8 + 1, "slack, and what eviction took since"
    assert launches(world, "gathered whole")[0]["size"] > 6, "capacity grows with the ranks"


@pytest.mark.parametrize("world", WORLDS)
def test_metrics_are_the_same_on_all_ranks_where_they_say_so(launches, world):
    local = {"replay/seconds", "replay/padding"}
    local |= {"replay/ratio_mean", "replay/ess", "replay/drift_mean", "replay/clip_ratio"}
    local |= {"replay/gated_fraction", "replay/fresh_kl", "replay/fresh_entropy", "replay/fresh_clip_ratio"}
    for scope in ("process", "gathered"):
        ranks = launches(world, f"{scope} whole")
        metrics = [{key: value for key, value in rank["metrics"].items() if key not in local} for rank in ranks]
        assert all(one == metrics[0] for one in metrics)
        whole = sum(rank["size"] for rank in ranks) if scope == "process" else ranks[0]["size"]
        assert metrics[0]["replay/size"] <= whole <= metrics[0]["replay/size"] + 4 * world


@pytest.mark.parametrize("limits", [{}, LIMITS], ids=["", "limits "])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_two_ranks_do_what_one_process_does_with_the_same_global_batch(launches, tmp_path, loss_type, limits):
    """With everything that looks at how replay went, and excluded groups, too."""
    ranks = launches(2, f"{'limits ' if limits else ''}{loss_type}")
    trainer = build(tmp_path, 16, 4, mixed, max_steps=6, loss_type=loss_type)
    one = run(trainer, compared=True, **limits, replay_scope="gathered", replay_buffer_size=4)
    assert ranks[0]["drawn"] == one["drawn"], "the same serials for the same slots"
    assert sum(map(len, one["drawn"])) > (3 if limits else 5)
    assert (one["counters"]["excluded"] > 3) == bool(limits)
    for name in ("retired", "excluded", "masked", "items_delta"):
        assert [rank["counters"][name] for rank in ranks] == [one["counters"][name]] * 2, name
    assert_same_training(ranks, one)
    assert_same_gradients(ranks, one)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a scorer", "trl_replay_score"),
        ("a correction", "trl_replay_correct"),
        ("a metrics hook", "'a_metrics_hook' (registered in this process) failed in trl_replay_metrics"),
        ("a metrics hook in the last step", "'a_metrics_hook_in_the_last_step'"),
        ("an advantages hook", "'an_advantages_hook' (registered in this process) failed in trl_replay_advantages"),
        ("a mix hook", "'a_mix_hook' (registered in this process) failed in trl_replay_mix"),
        ("an inputs hook", "'an_inputs_hook' (registered in this process) failed in trl_replay_inputs"),
        ("a group that can't be loaded", "no memory to load"),
        ("a group that can't be kept", "no memory to receive"),
    ],
)
def test_an_error_on_rank_1_is_raised_by_all_ranks_in_words_that_name_it(launches, case, words):
    for rank in launches(2, case):
        assert rank["type"], rank["text"]
        assert "rank 1: " in told(rank)
        assert words in told(rank)
        assert "no memory" in words or "ZeroDivisionError: no luck on this rank" in told(rank)


def test_ranks_that_decide_differently_stop_instead_of_sending_payload_astray(launches):
    for rank in launches(2, "a scorer that differs"):
        assert rank["type"] == "SeamError"
        assert "decided differently" in rank["text"]


def test_a_correction_may_draw_as_often_as_its_ranks_rows_need(launches):
    first, second = launches(2, "a correction that draws")
    assert first["hashes"] == second["hashes"]
    assert first["counters"]["replaced"] > 5
