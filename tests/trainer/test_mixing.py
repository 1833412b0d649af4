"""Stored rows beside fresh ones in a group: rows, advantages, token counts and losses, all written down by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pictures
import pytest
import torch
from advantages_by_hand import mixed_advantages
from datasets import concatenate_datasets
from image_rows import assert_same_images, by_row
from methods import INJECTED as MIXED
from replaying import Checked, Watch, build, check_batches, check_losses
from support import DEAD, HALF, LIVE, Rewards, masked_rollout

import trl_replay
from trl_replay.step.mixing import shaped
from trl_replay.testing import make_groups, make_trainer

MOST = [1.0, 1.0, 1.0, 0.0]
SCRIPT = ([LIVE, HALF, MOST], [DEAD, LIVE, HALF], [HALF, DEAD, LIVE], [LIVE, MOST, DEAD])
OTHER = (
    [[0.5, 0.1, 0.2, 0.9], [0.3, 0.3, 0.1, 0.0], [0.2, 0.8, 0.7, 0.1]],
    [[0.1, 0.2, 0.3, 0.4], [0.9, 0.1, 0.5, 0.5], [0.0, 0.4, 0.4, 0.2]],
)


def watched(
    trainer: Any,
    mode: str = "auto",
    weights: Any = (1.0,),
    scale: str = "group",
    aggregation: str = "sum_then_normalize",
    **settings: Any,
) -> tuple[Any, Watch]:
    """Trains with stored rows beside fresh ones, and checks rows, advantages and losses against those by hand."""
    session = trl_replay.attach(trainer, **{**MIXED, "replay_advantages": mode, **settings})
    watch = Watch(session, trainer.num_generations, trainer._tokenizer.pad_token_id)
    watch.advantages = lambda step: mixed_advantages(watch, step, mode, weights, scale, aggregation)
    trainer.watch, trainer.compared = watch, []
    trainer.train()
    check_batches(watch)
    check_losses(trainer)
    assert partly(watch) > 1
    return session, watch


def checked(folder: Any, rewards: Any = None, **settings: Any) -> Any:
    settings = {"max_steps": 6, "trainer_class": Checked, "gradient_checkpointing": False, **settings}
    return make_trainer(folder, rewards or Rewards(*SCRIPT), **settings)


def partly(watch: Watch) -> int:
    """The number of groups with fresh and stored rows."""
    return sum(
        0 < sum(row // watch.size == slot for row in taken) < watch.size
        for taken in watch.taken
        for slot in {row // watch.size for row in taken}
    )


@pytest.mark.parametrize("mode", ["auto", "stored", "joint", "split"])
def test_rows_advantages_and_loss_are_those_by_hand_with(tmp_path: Any, mode: str) -> None:
    """With every loss type: in the table of test_gradients_by_hand.py."""
    session, watch = watched(checked(tmp_path), mode)
    assert partly(watch) > 3
    assert session.totals.counters["lost"] == 0, "the forward shows every row's log-probs"
    assert session.totals.counters["stored"] > 8, "live groups are stored though their rows are displaced"


@pytest.mark.parametrize("mode", ["joint", "split"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_advantages_follow_trls_rules_with(tmp_path: Any, aggregation: str, scale: str, mode: str) -> None:
    first, second = Rewards(*SCRIPT), Rewards(*OTHER)
    second.__name__ = "other"
    trainer = checked(
        tmp_path, [first, second], loss_type="grpo", reward_weights=[1.0, 0.7], scale_rewards=scale,
        multi_objective_aggregation=aggregation,
    )  # fmt: skip
    watched(trainer, mode, (1.0, 0.7), scale, aggregation)


def every_second(table: Any, drawn: Any, slots: Any, context: Any) -> Any:
    """A mixer: the first two rows of the drawn entry, in every second slot."""
    taken = np.full((len(drawn), 4), -1)
    taken[context.update % 2 :: 2, :2] = [0, 1]
    return taken


@pytest.mark.parametrize(
    "settings",
    [{"replay_max_fraction": 0.34}, {"replay_mixer": every_second, "replay_mixer_kwargs": None}],
    ids=["a limit", "a mixer"],
)
@pytest.mark.parametrize(
    "rule", [{"scale": "batch"}, {"aggregation": "normalize_then_sum"}], ids=lambda rule: "".join(rule)
)
@pytest.mark.parametrize("mode", ["joint", "split"])
def test_74_slots_that_stay_fresh_count_once_in_the_deviation_of_the_batch(
    tmp_path: Any, mode: str, rule: dict[str, str], settings: dict[str, Any]
) -> None:
    names = {"scale": "scale_rewards", "aggregation": "multi_objective_aggregation"}
    trainer = checked(tmp_path, max_steps=8, **{names[name]: value for name, value in rule.items()})
    watched(trainer, mode, **rule, **settings)


def test_a_slot_whose_mixed_group_would_be_dead_stays_fresh(tmp_path: Any) -> None:
    def failures_only(table: Any, drawn: Any, slots: Any, context: Any) -> Any:
        return np.tile([-1, 1, 2, -1], (len(drawn), 1))

    trainer = make_trainer(tmp_path, Rewards([LIVE, LIVE, LIVE], [DEAD, DEAD, DEAD]), max_steps=2)
    settings = {**MIXED, "replay_mixer": failures_only, "replay_mixer_kwargs": None, "replay_advantages": "joint"}
    session = trl_replay.attach(trainer, **settings)
    trainer.train()
    assert len(session.buffer) == 3
    assert session.totals.reasons["a mixed group would have been dead"] == 3
    assert session.totals.counters["rows"] == session.totals.counters["replaced"] == 0


def test_rows_of_several_entries_and_rows_of_any_prompt_meet_in_one_group(tmp_path: Any) -> None:
    def several(table: Any, count: int, context: Any) -> Any:
        drawn = np.full((count, 2), -1)
        rows = context.rng.permutation(len(table))[: 2 * count]
        drawn.ravel()[: len(rows)] = rows
        return drawn

    def scattered(table: Any, drawn: Any, slots: Any, context: Any) -> Any:
        taken = np.full((len(drawn), 4), -1)
        for slot, entries in enumerate(drawn):
            known = [entry * 4 + row for entry in np.flatnonzero(entries >= 0) for row in range(4)]
            rows = context.rng.permutation(known)[:3]
            taken[slot, context.rng.permutation(4)[: len(rows)]] = rows
        return taken

    settings = {"replay_mixer_kwargs": None, "replay_sampler": several, "replay_mixer": scattered}
    session, watch = watched(checked(tmp_path, max_steps=8), "stored", **settings)
    entries = [{taken[row][0] for row in taken if row // 4 == slot} for taken in watch.taken for slot in range(3)]
    assert max(map(len, entries)) == 2, "two entries gave rows to one slot"
    assert session.totals.counters["entries"] > session.totals.counters["replaced"]


def test_rows_are_mixed_with_their_images(tmp_path: Any) -> None:
    model, processor = pictures.qwen2_vl()
    rows = pictures.dataset((1, 2, 1)).select(range(3))  # the same three questions in every batch
    trainer = build(
        tmp_path,
        Rewards(*SCRIPT),
        tokenizer=processor,
        model=model,
        max_steps=6,
        arguments={"train_dataset": concatenate_datasets([rows] * 8)},
        generation_kwargs={"suppress_tokens": [model.config.image_token_id]},
    )
    trainer.independent = False
    _, watch = watched(trainer, replay_record="loss", replay_selector="zero_std", replay_selector_kwargs=None)
    for step, (before, after) in enumerate(watch.steps):
        found, fresh = by_row(after), by_row(before)
        for row in range(12):
            taken = watch.taken[step].get(row)
            expected = fresh[row]
            if taken is not None:
                when, source = watch.source(*taken)
                expected = by_row(watch.steps[when][0])[source]
            assert_same_images(found[row], expected)


def test_57_pictures_with_one_question_are_prompts_of_their_own(tmp_path: Any) -> None:
    model, processor = pictures.qwen2_vl()
    first = pictures.dataset((1,)).select([0, 3])  # "1", once with one picture and once with another
    prompts = []

    def noting(groups: Any, context: Any) -> Any:
        prompts.append(groups.prompt.tolist())
        return []

    trainer = build(
        tmp_path,
        Rewards([LIVE, HALF]),
        tokenizer=processor,
        model=model,
        max_steps=2,
        per_device_train_batch_size=8,
        arguments={"train_dataset": concatenate_datasets([first] * 8)},
        generation_kwargs={"suppress_tokens": [model.config.image_token_id]},
    )
    trainer.watch = None
    trl_replay.attach(trainer, replay_selector=noting, replay_record="loss")
    trainer.train()
    assert prompts[0] == prompts[1], "the same prompts in every batch"
    assert len(set(prompts[0])) == 2


def test_rows_are_mixed_with_their_tool_masks(tmp_path: Any) -> None:
    trainer = build(tmp_path, Rewards(*SCRIPT), max_steps=6, arguments={"rollout_func": masked_rollout})
    watched(trainer, "joint")


def test_163_auto_takes_the_forward_where_live_groups_may_be_displaced_and_says_so(tmp_path: Any) -> None:
    def records(folder: str, **settings: Any) -> bool:
        trainer = make_trainer(tmp_path / folder, Rewards(*SCRIPT))
        session = trl_replay.attach(trainer, **{**MIXED, "replay_record": "auto", **settings})
        return bool(session.components.forwards_to_record)

    with pytest.warns(UserWarning, match="adds one forward without gradients"):
        assert records("live")
    assert not records("dead", replay_selector="zero_std", replay_selector_kwargs=None)
    whole = {"replay_mixer": "whole", "replay_mixer_kwargs": None, "replay_advantages": "stored"}
    with pytest.warns(UserWarning, match="may choose live groups, .* so that they are stored"):
        assert records("whole", **whole)


def test_a_plugin_that_chooses_the_groups_is_named(tmp_path: Any, plug: Any) -> None:
    class Chooses:
        @trl_replay.hookimpl
        def trl_replay_select(self, groups: Any) -> None:
            """Leaves it to the selector."""

    name = plug(Chooses())
    with pytest.warns(UserWarning, match=f"The plugin '{name}' may choose live groups"):
        trl_replay.attach(make_trainer(tmp_path, Rewards(*SCRIPT)), replay_plugins=[name])


def test_163_a_selector_of_live_groups_starves_no_buffer(tmp_path: Any) -> None:
    """Whole groups take the places of live ones, which are stored all the same."""
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=6)
    with pytest.warns(UserWarning, match="adds one forward"):
        session = trl_replay.attach(
            trainer, replay_selector="always", replay_selector_kwargs={"share": 1.0}, replay_start=0
        )
    trainer.train()
    assert session.totals.counters["replaced"] > 6, "live groups, too"
    assert session.totals.counters["stored"] == 2 * 6
    assert session.totals.counters["lost"] == 0


def test_without_the_forward_displaced_live_groups_are_lost_and_counted(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=6)
    session = trl_replay.attach(trainer, **{**MIXED, "replay_record": "loss"})
    trainer.train()
    assert session.totals.counters["lost"] > 2
    assert any(entry.get("replay/lost") for entry in trainer.state.log_history)


@pytest.mark.parametrize(
    "rule", [{"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}], ids=str
)
@pytest.mark.parametrize("mode", ["auto", "joint", "split"])
@pytest.mark.parametrize("others", [DEAD, [0.1, 0.1, 0.1, 0.101]], ids=["dead", "nearly dead"])
def test_72_in_a_dead_batch_stored_rows_have_the_deviation_of_what_is_trained_on(
    tmp_path: Any, others: list[float], mode: str, rule: dict[str, Any]
) -> None:
    """A batch has N rows, so that no advantage by TRL's rule is larger than the root of N."""
    settings = {**MIXED, "replay_mixer_kwargs": {"rows": 2}, "replay_advantages": mode}
    trainer = make_trainer(tmp_path, Rewards([LIVE] * 3, [others] * 3), max_steps=6, **rule)
    session = trl_replay.attach(trainer, **settings)
    watch = Watch(session, 4, trainer._tokenizer.pad_token_id)
    trainer.train()
    assert session.totals.counters["rows"] > 6
    largest = max(float(batch["advantages"].abs().max()) for _, batch in watch.steps)
    assert largest <= math.sqrt(2 * 12), "rows of the batch, and those of its slots"


class Shaping(Checked):
    """A trainer that shapes advantages by itself, as TRL's rules do not."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        return {**batch, "advantages": batch["advantages"] * 2}


def test_advantages_that_trls_rules_do_not_explain_are_not_computed_anew(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path / "joint", Rewards(*SCRIPT), max_steps=6, trainer_class=Shaping)
    trainer.watch = None
    trl_replay.attach(trainer, **MIXED)
    with pytest.raises(trl_replay.SeamError, match="Use replay_advantages='stored', or shape them in a plugin"):
        trainer.train()
    trainer = make_trainer(tmp_path / "stored", Rewards(*SCRIPT), max_steps=6, trainer_class=Shaping)
    trainer.watch = None
    session = trl_replay.attach(trainer, **{**MIXED, "replay_advantages": "stored"})
    trainer.train()
    assert session.totals.counters["rows"] > 0


def test_corrections_and_gates_see_stored_rows_only(tmp_path: Any) -> None:
    seen = []

    def noting(rows: Any, context: Any) -> Any:
        seen.append(len(rows.ages))
        assert (rows.ages > 0).all()
        return trl_replay.Corrected(rows.behavior_logps)

    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=6)
    session = trl_replay.attach(trainer, **MIXED, replay_correction=noting)
    trainer.train()
    assert sum(seen) == session.totals.counters["rows"] > 0


def shaping_by(given: Callable[[Any, Any], Any]) -> Any:
    """A plugin that gives these advantages."""

    class Plugin:
        @trl_replay.hookimpl
        def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
            return given(groups, context)

    return Plugin()


def test_an_advantages_hook_sees_mixed_groups_that_are_computed_and_no_others(tmp_path: Any, plug: Any) -> None:
    calls: list[list[int]] = [[] for _ in range(4)]

    def first_whole(table: Any, drawn: Any, slots: Any, context: Any) -> Any:
        rows = np.tile([0, -1, -1, -1], (len(drawn), 1))
        rows[0] = [0, 1, 2, 3]
        return rows

    name = plug(shaping_by(lambda groups, context: calls[context.update].append(len(groups))))
    mixer = {"replay_mixer": first_whole, "replay_mixer_kwargs": None, "replay_plugins": [name]}
    session, _ = watched(checked(tmp_path, max_steps=4), **mixer)
    assert calls[0] == [3]
    assert session.totals.counters["replaced"] > 3
    assert all(sizes[0] == 3 and (len(sizes) == 1 or 0 < sizes[1] < 3) for sizes in calls)


def test_a_hook_reads_the_reward_of_a_file_that_does_not_name_its_functions(tmp_path: Any, plug: Any) -> None:
    seen = []

    def reading(groups: Any, context: Any) -> Any:
        seen.append(groups.reward)
        return groups.reward - groups.reward.mean(axis=1, keepdims=True)

    rows = [
        {"prompt": prompt, "completion": text, "reward": 2 * float(text == "a")}
        for prompt in ("1=", "12=", "123+4=")
        for text in "abcd"
    ]
    trainer = make_trainer(tmp_path, Rewards([DEAD] * 3), max_steps=2, reward_weights=[0.5])
    session = trl_replay.attach(trainer, **{**MIXED, "replay_plugins": [plug(shaping_by(reading))]})
    session.add(rows)
    trainer.train()
    assert session.totals.counters["rows"] > 0
    assert seen[-1].max() == 2.0, "the file's reward, as it is"
    assert session.metrics["replay/masked_rows_fraction"] == 0.0


def test_dead_mixed_groups_are_told_by_the_batchs_deviation(tmp_path: Any) -> None:
    from trl_replay import compat
    from trl_replay.batch.group_view import AdvantageRule, view

    setup = compat.RewardSetup(np.ones(1), "batch", "sum_then_normalize")
    scored = torch.tensor([[50.0], [60.0], [50.0], [60.0], [5.0], [5.001], [5.0], [5.0]])
    advantages = compat.advantages(scored, setup, 4).double().numpy()
    ones = np.ones(8, np.int64)
    columns = {"row": np.arange(8), "advantages": advantages, "lengths": ones, "trainable": ones, "items": ones}
    columns["prompt"] = ones
    fresh = view(columns, scored, setup, 4, 0)
    rule = AdvantageRule(columns, scored, setup, 4)
    rewards = scored.double().numpy().reshape(2, 4, 1)
    for group in (0, 1):
        everything = np.ones((1, 4), bool)
        _, dead = rule(rewards[[group]], rewards[[group], :, 0], everything, everything, join=True)
        assert dead.tolist() == fresh.dead[[group]].tolist(), "alone as in its batch"


def first_masked(groups: Any, context: Any) -> Any:
    shaped = groups.advantages.copy()
    shaped[:, 0] = np.nan
    return shaped


def test_masked_stored_rows_are_no_matter_of_corrections_gates_or_figures(tmp_path: Any, plug: Any) -> None:
    tokens = []

    def noting(rows: Any, context: Any) -> Any:
        tokens.extend(rows.mask.sum(dim=1).tolist())
        return trl_replay.Corrected(rows.behavior_logps)

    trainer = make_trainer(tmp_path, Rewards([HALF, DEAD, HALF]), max_steps=4)
    name = plug(shaping_by(first_masked))
    session = trl_replay.attach(trainer, replay_plugins=[name], replay_correction=noting, replay_start=0)
    trainer.train()
    assert session.totals.counters["replaced"] > 0
    assert tokens.count(0) == session.totals.counters["replaced"], "one row of each group"


@pytest.mark.parametrize("given", [0.0, 2.0])
def test_134_a_masked_row_stays_masked_whatever_a_hook_gives_it(given: float) -> None:
    groups = make_groups([[1.0, 0.0, 0.0, 1.0]])
    once = shaped(groups, np.array([[np.nan, -0.5, -0.5, 1.0]]))
    again = shaped(once, np.array([[given, -0.5, -0.5, 1.0]]))
    assert again.masked.tolist() == [[True, False, False, False]]
    assert again.advantages[0, 0] == 0.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda groups, _: groups.reward > 0, "bool values.*numbers of shape"),
        (lambda groups, _: groups.advantages * 1e38, r"an advantage of .*e\+38.*at most 1e\+09"),
        (lambda groups, _: groups.advantages / 0.0, "an advantage of inf"),
        (lambda groups, _: groups.advantages[:, :1], r"float64 values of shape \(3, 1\)"),
        (lambda groups, _: np.ma.masked_less(groups.advantages, 0), r"np\.ma.*NaN"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_71_advantages_that_cannot_be_trained_on_are_refused(tmp_path: Any, plug: Any, given: Any, words: str) -> None:
    name = plug(shaping_by(given))
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    trl_replay.attach(trainer, replay_plugins=[name], replay_buffer_size=0)
    with pytest.raises(trl_replay.ResultError, match=f"Plugin '{name}'.*trl_replay_advantages.*{words}"):
        trainer.train()


def test_71_a_masked_array_in_which_nothing_is_masked_is_taken(tmp_path: Any, plug: Any) -> None:
    name = plug(shaping_by(lambda groups, _: np.ma.masked_array(groups.advantages)))
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    session = trl_replay.attach(trainer, replay_plugins=[name])
    trainer.train()
    assert session.totals.batches == 2


def test_a_dry_run_beside_a_trainer_that_shapes_advantages_goes_on(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=5, trainer_class=Shaping)
    trainer.watch = None
    session = trl_replay.attach(trainer, **MIXED, replay_dry_run=True)
    trainer.train()
    assert session.totals.batches == 5


def test_rows_of_another_prompt_are_left_out_of_a_baseline_and_counted(tmp_path: Any) -> None:
    def deceiving(table: Any, count: int, context: Any) -> Any:
        return np.arange(min(count, len(table)))[::-1]

    deceiving.same_prompt = True  # type: ignore[attr-defined]
    session, watch = watched(checked(tmp_path), replay_sampler=deceiving, replay_sampler_kwargs=None)
    for taken in watch.taken:
        for row, (serial, _) in taken.items():
            assert watch.origin[serial][1] == row // 4, "the script's prompts are those of the slots"
    assert "a stored row of another prompt can't share the slot's baseline" in session.explain()
