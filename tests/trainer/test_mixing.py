"""Stored rows beside fresh ones in a group: rows, advantages, token counts and losses, all written down by hand."""

import math

import numpy as np
import pictures
import pytest
from datasets import concatenate_datasets
from methods import INJECTED, SCRIPT
from scenarios import Scenario, follow, train
from support import DEAD, HALF, LIVE, Rewards, plugin, shaping

import trl_replay
from trl_replay.errors import ResultError
from trl_replay.testing import make_trainer


def test_rows_of_several_entries_and_rows_of_any_prompt_meet_in_one_group(tmp_path):
    def several(table, count, context):
        drawn = np.full((count, 2), -1)
        rows = context.rng.permutation(len(table))[: 2 * count]
        drawn.ravel()[: len(rows)] = rows
        return drawn

    def scattered(table, drawn, slots, context):
        taken = np.full((len(drawn), 4), -1)
        for slot, entries in enumerate(drawn):
            known = [entry * 4 + row for entry in np.flatnonzero(entries >= 0) for row in range(4)]
            rows = context.rng.permutation(known)[:3]
            taken[slot, context.rng.permutation(4)[: len(rows)]] = rows
        return taken

    given = {"replay_sampler": several, "replay_mixer": scattered}
    scenario = Scenario({"max_steps": 8}, {**INJECTED, "replay_advantages": "stored", **given})
    trainer, session = follow(tmp_path, scenario)
    entries = [
        {taken[row][0] for row in taken if row // 4 == slot} for taken in trainer.watch.taken for slot in range(3)
    ]
    assert max(map(len, entries)) == 2, "two entries gave rows to one slot"
    assert session.totals.counters["entries"] > session.totals.counters["replaced"]


def of_pictures(folder, rows, rewards, **settings):
    return pictures.make_trainer(folder, pictures.qwen2_vl(), concatenate_datasets([rows] * 8), rewards, **settings)


def test_57_pictures_with_one_question_are_prompts_of_their_own(tmp_path):
    first = pictures.dataset((1,)).select([0, 3])  # "1", once with one picture and once with another
    prompts = []

    def noting(groups, context):
        prompts.append(groups.prompt.tolist())
        return []

    trainer = of_pictures(tmp_path, first, Rewards([LIVE, HALF]), max_steps=2, per_device_train_batch_size=8)
    train(trainer, replaced=0, replay_selector=noting, replay_record="loss")
    assert prompts[0] == prompts[1], "the same prompts in every batch"
    assert len(set(prompts[0])) == 2


def test_163_auto_takes_the_forward_where_live_groups_may_be_displaced_and_says_so(tmp_path):
    def records(folder, **settings):
        trainer = make_trainer(tmp_path / folder, Rewards(*SCRIPT))
        session = trl_replay.attach(trainer, **{**INJECTED, "replay_record": "auto", **settings})
        return bool(session.components.forwards_to_record)

    with pytest.warns(UserWarning, match="adds one forward without gradients"):
        assert records("live")
    assert not records("dead", replay_selector="zero_std")
    whole = {"replay_mixer": "whole", "replay_advantages": "stored"}
    with pytest.warns(UserWarning, match="may choose live groups, .* so that they are stored"):
        assert records("whole", **whole)


def test_a_plugin_that_chooses_the_groups_is_named(tmp_path):
    with pytest.warns(UserWarning, match="The plugin 'mine' may choose live groups"):
        train(tmp_path, *SCRIPT, hooks={"select": lambda groups: None}, max_steps=2)


@pytest.mark.parametrize(
    "rule", [{"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}], ids=str
)
@pytest.mark.parametrize("mode", ["joint", "split"])
@pytest.mark.parametrize("others", [DEAD, [0.1, 0.1, 0.1, 0.101]], ids=["dead", "nearly dead"])
def test_72_in_a_dead_batch_stored_rows_have_the_deviation_of_what_is_trained_on(tmp_path, others, mode, rule):
    """A batch has N rows, so that no advantage by TRL's rule is larger than the root of N."""
    settings = {**INJECTED, "replay_advantages": mode, "max_steps": 6, **rule}
    run = train(tmp_path, [LIVE] * 3, [others] * 3, **settings)
    assert run.counters["rows"] > 6
    largest = max(float(batch["advantages"].abs().max()) for _, batch in run.steps)
    assert largest <= math.sqrt(2 * 12), "rows of the batch, and those of its slots"


DOUBLING = {"trainer_class": shaping(lambda advantages: advantages * 2), "max_steps": 6}


def test_advantages_that_trls_rules_do_not_explain_are_not_computed_anew(tmp_path):
    with pytest.raises(trl_replay.SeamError, match="Use replay_advantages='stored', or shape them in a plugin"):
        train(tmp_path, *SCRIPT, **INJECTED, **DOUBLING)
    assert train(tmp_path, *SCRIPT, **INJECTED, **DOUBLING, replay_advantages="stored").counters["rows"] > 0


def test_an_advantages_hook_sees_mixed_groups_that_are_computed_and_no_others(tmp_path):
    calls = [[] for _ in range(4)]

    def first_whole(table, drawn, slots, context):
        rows = np.tile([0, -1, -1, -1], (len(drawn), 1))
        rows[0] = [0, 1, 2, 3]
        return rows

    def noting(groups, context):
        calls[context.update].append(len(groups))

    mixing = {**INJECTED, "replay_advantages": "auto", "replay_mixer": first_whole}
    with plugin(advantages=noting):
        _, session = follow(tmp_path, Scenario({}, {**mixing, "replay_plugins": "mine"}))
    assert calls[0] == [3]
    assert session.totals.counters["replaced"] > 3
    assert all(sizes[0] == 3 and (len(sizes) == 1 or 0 < sizes[1] < 3) for sizes in calls)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda groups: groups.reward > 0, "bool values.*numbers of shape"),
        (lambda groups: groups.advantages * 1e38, r"an advantage of .*e\+38.*at most 1e\+09"),
        (lambda groups: groups.advantages / 0.0, "an advantage of inf"),
        (lambda groups: groups.advantages[:, :1], r"float64 values of shape \(3, 1\)"),
        (lambda groups: np.ma.masked_less(groups.advantages, 0), r"np\.ma.*NaN"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_71_advantages_that_cannot_be_trained_on_are_refused(tmp_path, given, words):
    with pytest.raises(ResultError, match=f"Plugin 'mine'.*trl_replay_advantages.*{words}"):
        train(tmp_path, *SCRIPT, hooks={"advantages": given}, max_steps=2, replay_buffer_size=0)


def test_71_a_masked_array_in_which_nothing_is_masked_is_taken(tmp_path):
    hooks = {"advantages": lambda groups: np.ma.masked_array(groups.advantages)}
    assert train(tmp_path, *SCRIPT, hooks=hooks, max_steps=2).session.totals.batches == 2


def test_a_dry_run_beside_a_trainer_that_shapes_advantages_goes_on(tmp_path):
    run = train(tmp_path, *SCRIPT, replaced=0, **DOUBLING, **INJECTED, replay_dry_run=True)
    assert run.session.totals.batches == 6


def test_rows_of_another_prompt_are_left_out_of_a_baseline_and_counted(tmp_path):
    def deceiving(table, count, context):
        return np.arange(min(count, len(table)))[::-1]

    deceiving.same_prompt = True
    mixing = {**INJECTED, "replay_advantages": "auto", "replay_sampler": deceiving}
    trainer, session = follow(tmp_path, Scenario({"max_steps": 6}, mixing))
    watch = trainer.watch
    for taken in watch.taken:
        for row, (serial, _) in taken.items():
            assert watch.origin[serial][1] == row // 4, "the script's prompts are those of the slots"
    assert "a stored row of another prompt can't share the slot's baseline" in session.explain()
