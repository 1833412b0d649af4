"""Replay for TRL's AsyncGRPOTrainer: what its queue hands out, through the real trainer with a scripted worker."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from queue import Empty, Queue
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from queued import DEAD, LIVE, SIZE, Script, make_async_trainer, make_policy, right, samples_of, stand_in, watch
from transformers import Qwen2ForCausalLM, TrainerCallback

import trl_replay
from trl_replay import compat
from trl_replay.testing import make_trainer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: Any) -> Any:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: Any) -> None:
    stand_in(monkeypatch)


def every_second_dead(number: int, version: int) -> list[Any]:
    return samples_of(number, DEAD if number % 2 else LIVE, version)


def all_live(number: int, version: int) -> list[Any]:
    return samples_of(number, LIVE, version)


def handed_out(session: Any) -> list[Any]:
    """Notes every sample that the queue gives."""
    given: list[Any] = []
    stock = session.queue.get

    def get(*args: Any, **kwargs: Any) -> Any:
        given.append(stock(*args, **kwargs))
        return given[-1]

    session.queue.get = get
    return given


def same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        one[1] == other[1] and all(torch.equal(one[0][key], other[0][key]) for key in one[0])
        for one, other in zip(first, second, strict=True)
    )


@pytest.mark.parametrize(
    ("script", "settings"),
    [
        (all_live, {"replay_start": 1000}),
        (all_live, {"replay_buffer_size": 1, "replay_max_fraction": 0.0}),
        (every_second_dead, {"replay_dry_run": True, "replay_start": None}),
        (every_second_dead, {"use_replay": False}),
    ],
)
def test_with_nothing_to_replay_training_is_stock_bit_for_bit(
    policy: Any, tmp_path: Any, script: Any, settings: Any
) -> None:
    runs = []
    for attached in (False, True):
        trainer = make_async_trainer(tmp_path, policy, Script(script))
        if attached:
            trl_replay.attach(trainer, **settings)
        runs.append(watch(trainer))
        trainer.train()
    assert len(runs[0]) == 6
    assert same(*runs)


def test_dead_groups_are_dropped_told_as_done_and_replaced_by_stored_ones(policy: Any, tmp_path: Any) -> None:
    worker = Script(every_second_dead)
    trainer = make_async_trainer(tmp_path, policy, worker)
    session = trl_replay.attach(trainer, replay_start=None)
    given = handed_out(session)
    trainer.train()
    fresh = [sample for sample in given if sample.group_id >= 0]
    replayed = [sample for sample in given if sample.group_id < 0]
    assert {sample.group_id % 2 for sample in fresh} == {0}, "no dead group passes"
    assert [sample.group_id for sample in fresh] == sorted(sample.group_id for sample in fresh)
    counts = np.unique([sample.group_id for sample in fresh], return_counts=True)[1]
    assert set(counts[:-1]) == {4}, "none is lost, none comes twice"
    assert replayed
    assert len({sample.group_id for sample in replayed}) * 4 - len(replayed) < 4
    assert {1, 3, 5} <= compat.trained_groups(trainer), "dropped groups are done"
    assert min(compat.trained_groups(trainer)) >= 0, "replayed ones count in no epoch"
    assert session.totals.counters["dead"] == session.queue.dropped
    assert f"{session.queue.dropped} dead groups dropped" in session.explain()
    originals = {tuple(sample.input_ids.tolist()): sample for sample in fresh}
    for sample in replayed:
        original = originals[tuple(sample.input_ids.tolist())]
        assert np.array_equal(sample.old_log_probs, original.old_log_probs)
        assert np.array_equal(sample.completion_mask, original.completion_mask)
        assert sample.advantage == original.advantage
        assert sample.metrics == {}, "rewards that TRL logs are of fresh samples"
    assert session.metrics["replay/dead_fraction"] == 0.5
    assert trainer.state.log_history[-2]["replay/size"] == session.buffer.table.serial.size


def test_without_a_buffer_dead_groups_are_dropped_alone(policy: Any, tmp_path: Any) -> None:
    trainer = make_async_trainer(tmp_path, policy, Script(every_second_dead))
    session = trl_replay.attach(trainer, replay_buffer_size=0, replay_unfilled="exclude")
    given = handed_out(session)
    trainer.train()
    assert {sample.group_id % 2 for sample in given} == {0}
    assert {1, 3, 5} <= compat.trained_groups(trainer)


def by_hand(model: Any, samples: list[Any], low: float, high: float) -> torch.Tensor:
    """The trainer's loss over the samples of a micro-batch, one forward a sample."""
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids)[None]
        logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        chosen = logps.gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.from_numpy(sample.completion_mask[1:]).bool()
        ratio = (chosen - torch.from_numpy(sample.old_log_probs[1:])).exp()[mask]
        total = total - torch.min(ratio * sample.advantage, ratio.clamp(1 - low, 1 + high) * sample.advantage).sum()
        tokens += int(mask.sum())
    return total / tokens


def test_a_warm_start_replays_the_groups_of_another_run_as_they_were(policy: Any, tmp_path: Any) -> None:
    """In its first step already."""
    before = make_async_trainer(tmp_path / "a", policy, Script(every_second_dead))
    stored = trl_replay.attach(before, replay_start=None)
    given = handed_out(stored)
    before.train()
    path = stored.export(tmp_path / "groups.parquet")
    originals = {tuple(sample.input_ids.tolist()): sample for sample in given}

    trainer = make_async_trainer(
        tmp_path / "b", policy, Script(lambda number, version: samples_of(100 + number, DEAD, version)), max_steps=3
    )
    session = trl_replay.attach(trainer, replay_warm_start=str(path))
    again = handed_out(session)
    trainer.train()
    assert len(session.buffer) == len(stored.buffer) > 0
    replayed = [sample for sample in again if sample.group_id < 0]
    assert len(replayed) >= 12, "no group of its own was live"
    for sample in replayed:
        original = originals[tuple(sample.input_ids.tolist())]
        assert np.array_equal(sample.old_log_probs, original.old_log_probs)
        assert np.array_equal(sample.completion_mask, original.completion_mask)
        assert sample.advantage == pytest.approx(original.advantage)
    assert session.add(path) == len(stored.buffer)


def test_115_a_warm_start_trains_no_row_that_the_synchronous_run_left_out(policy: Any, tmp_path: Any) -> None:
    """Its truncated completions, and a row that the file masks."""

    def scored(completions: list[Any], **_: Any) -> list[float]:
        return [float(row % SIZE == 0) + 0.1 * (row % 3) for row in range(len(completions))]

    scored.__name__ = right.__name__
    model = Qwen2ForCausalLM.from_pretrained(policy.path)
    before = make_trainer(tmp_path / "a", scored, max_steps=8, mask_truncated_completions=True, model=model)
    stored = trl_replay.attach(before, replay_start=None)
    before.train()
    path = stored.export(tmp_path / "groups.parquet")
    rows = parquet.read_table(path).to_pylist()
    truncated = [row for row in rows if row["completion_mask"] and not any(row["completion_mask"])]
    assert truncated, "some are truncated"
    trained = [row for row in rows if row not in truncated]
    masked = next(row for other, row in itertools.pairwise(trained) if row["group"] == other["group"])
    masked["masked"] = True
    left_out = {(*row["prompt_ids"], *row["completion_ids"]) for row in (*truncated, masked)}

    worker = Script(lambda number, version: samples_of(100 + number, DEAD, version))
    trainer = make_async_trainer(tmp_path / "b", policy, worker)
    session = trl_replay.attach(trainer, replay_start=None)
    given = handed_out(session)
    assert session.add(rows) == len(stored.buffer)
    trainer.train()
    replayed = [tuple(sample.input_ids.tolist()) for sample in given if sample.group_id < 0]
    assert len(replayed) > SIZE
    assert not left_out & set(replayed)


def test_179_a_warm_start_cuts_no_group_of_forked_completions_into_groups_of_other_baselines(
    policy: Any, tmp_path: Any
) -> None:
    def forked(number: int, version: int) -> list[Any]:
        return samples_of(number, DEAD if number % 2 else LIVE, version, forks=1 + 2 * (number % 4 == 0))

    before = make_async_trainer(tmp_path / "a", policy, Script(forked))
    stored = trl_replay.attach(before, replay_start=None)
    before.train()
    sizes = [len(stored.entry(serial).masked) for serial in stored.buffer]
    assert set(sizes) == {SIZE, SIZE + 2}
    path = stored.export(tmp_path / "groups.parquet")
    trainer = make_async_trainer(tmp_path / "b", policy, Script(all_live))
    session = trl_replay.attach(trainer)
    assert session.add(path) == sizes.count(SIZE)
    assert session.totals.counters["refused"] == sizes.count(SIZE + 2)
    assert any("forked conversations" in reason for reason in session.totals.reasons)


def test_115_a_files_advantages_of_tokens_are_refused(policy: Any, tmp_path: Any) -> None:
    """A sample of TRL's has one advantage."""
    rows = [
        {
            "prompt": "1=", "completion": "ab", "prompt_ids": [5, 6], "completion_ids": [7, 8 + row], "reward": row,
            "old_per_token_logps": [-1.0, -2.0], "advantages": [row - 1.5, 1.0],
        }
        for row in range(SIZE)
    ]  # fmt: skip
    trainer = make_async_trainer(tmp_path, policy, Script(all_live))
    session = trl_replay.attach(trainer)
    assert session.add(rows) == 0
    assert any("its tokens have advantages of their own" in reason for reason in session.totals.reasons)


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_loss_of_replayed_samples_by_hand_value_and_gradient(policy: Any, tmp_path: Any, weight: float) -> None:
    trainer = make_async_trainer(tmp_path, policy, Script(every_second_dead), max_grad_norm=0.0, max_steps=5)
    session = trl_replay.attach(trainer, replay_start=None, replay_weight=weight)
    given = handed_out(session)
    losses: list[Any] = []
    begins = [0]

    class Compare(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            count = compat.step_samples(trainer)
            samples = given[begins[-1] : begins[-1] + count]
            begins.append(begins[-1] + count)
            plain = Qwen2ForCausalLM.from_pretrained(policy.path, attn_implementation="eager")
            plain.load_state_dict(model.state_dict())
            loss = by_hand(plain, samples, trainer.epsilon_low, trainer.epsilon_high)
            loss.backward()
            grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-3, atol=1e-5)
            losses.append((float(loss.detach()), any(sample.group_id < 0 for sample in samples)))

    trainer.add_callback(Compare())
    seen = watch(trainer)
    trainer.train()
    assert [value for value, _ in losses] == pytest.approx([loss for _, loss in seen], rel=1e-4)
    assert any(replayed for _, replayed in losses), "some of it was replayed"
    stored = {tuple(one.input_ids.tolist()): one.advantage for one in given if one.group_id >= 0}
    for sample in given:
        if sample.group_id < 0:
            assert sample.advantage == pytest.approx(weight * stored[tuple(sample.input_ids.tolist())])


def test_replayed_samples_are_of_the_present_version_whatever_staleness_allows(policy: Any, tmp_path: Any) -> None:
    trainer = make_async_trainer(tmp_path, policy, Script(every_second_dead), max_staleness=1)
    session = trl_replay.attach(trainer, replay_start=None)
    versions: list[Any] = []
    stock = session.queue.get

    def get(*args: Any, **kwargs: Any) -> Any:
        sample = stock(*args, **kwargs)
        versions.append((sample.group_id, trainer.model_version - sample.model_version))
        return sample

    session.queue.get = get
    trainer.train()
    assert {behind for number, behind in versions if number < 0} == {0}
    assert not any("dropped_stale" in key for entry in trainer.state.log_history for key in entry)


def test_limits_on_age_uses_and_fraction_hold(policy: Any, tmp_path: Any) -> None:
    for settings, most in (({"replay_max_uses": 1}, None), ({"replay_max_age": 1}, None), ({}, 0.25)):
        trainer = make_async_trainer(tmp_path, policy, Script(every_second_dead), max_steps=8)
        fraction = {} if most is None else {"replay_max_fraction": most}
        session = trl_replay.attach(trainer, replay_start=None, **settings, **fraction)
        ages: list[int] = []
        draw = session.queue._take

        def take(entry: Any, *args: Any, session: Any = session, ages: Any = ages, draw: Any = draw) -> Any:
            ages.append(int(session.update - session.buffer.table.update[entry]))
            return draw(entry, *args)

        session.queue._take = take
        trainer.train()
        counters = session.totals.counters
        assert counters["replaced"] > 0
        assert session.buffer.table.uses.max(initial=0) <= settings.get("replay_max_uses", 99)
        assert max(ages) <= settings.get("replay_max_age", 99)
        assert min(ages) >= 1
        assert counters["replaced"] <= (most or 1.0) * counters["generated"]


def test_116_no_entry_is_replayed_again_before_its_samples_are_trained_on(policy: Any, tmp_path: Any) -> None:
    def live_at_first(number: int, version: int) -> list[Any]:
        return samples_of(number, LIVE if number < 2 else DEAD, version)

    trainer = make_async_trainer(tmp_path, policy, Script(live_at_first), max_steps=4, gradient_accumulation_steps=2)
    session = trl_replay.attach(trainer, replay_start=None)
    stock = session.queue.get
    copies: list[int] = []

    def get(*args: Any, **kwargs: Any) -> Any:
        sample = stock(*args, **kwargs)
        waiting = [handed.sample.input_ids.tobytes() for handed in (*session.queue._given, *session.queue._line)]
        copies.append(waiting.count(sample.input_ids.tobytes()))
        return sample

    session.queue.get = get
    trainer.train()
    assert session.totals.counters["replaced"] > 2
    assert set(copies) == {1}


def test_while_the_queue_is_empty_stored_groups_are_replayed_within_limits(policy: Any, tmp_path: Any) -> None:
    """The worker stalls for good after eight groups: half of max_staleness is replayed, then the trainer waits."""

    def stalls(number: int, version: int) -> list[Any] | None:
        return all_live(number, version) if number < 8 else None

    worker = Script(stalls)
    trainer = make_async_trainer(tmp_path, policy, worker, max_steps=50, max_staleness=6)
    session = trl_replay.attach(trainer, replay_start=None)
    given = handed_out(session)
    waits: list[int] = []
    stock = worker.check_health

    def check(stale_after_s: float) -> None:
        stock(stale_after_s)
        waits.append(len(given))
        if waits.count(waits[-1]) > 1:  # the second time that nothing came in between
            raise RuntimeError("the worker hangs")

    worker.check_health = check
    trainer_get = session.queue.get
    session.queue.get = lambda *args, **kwargs: trainer_get(timeout=0.2)
    with pytest.raises(RuntimeError, match="the worker hangs"):
        trainer.train()
    assert session.queue.waited > 0
    assert 2 * (trainer.model_version - session.queue._arrived_at) <= 6, "samples on their way do not get stale"
    assert f"{session.queue.waited} groups replayed while" in session.explain()


def test_slow_prompts_do_not_starve(policy: Any, tmp_path: Any) -> None:
    """Every third group takes long: ten times nothing comes before it does. All of them are trained on."""
    patience: dict[int, int] = {}
    begun: dict[int, int] = {}

    def slowly(number: int, version: int) -> list[Any] | None:
        begun.setdefault(number, version)
        patience[number] = patience.get(number, 0) + 1
        if number % 3 == 2 and patience[number] < 10:
            return None
        return samples_of(number, LIVE, begun[number])

    trainer = make_async_trainer(tmp_path, policy, Script(slowly), max_steps=20, max_staleness=4)
    session = trl_replay.attach(trainer, replay_start=None)
    given = handed_out(session)
    trainer.train()
    assert session.queue.waited > 3
    fresh = sorted({sample.group_id for sample in given if sample.group_id >= 0})
    assert fresh == list(range(len(fresh)))
    assert not any("sample/dropped_stale_total" in entry for entry in trainer.state.log_history)
    assert session.totals.counters["replaced"] <= session.totals.counters["generated"]


def test_a_dead_worker_is_told_at_once_and_not_replayed_over(policy: Any, tmp_path: Any) -> None:
    def dies(number: int, version: int) -> list[Any] | None:
        if number < 6:
            return all_live(number, version)
        worker.failure = RuntimeError("the worker has died")
        return None

    worker = Script(dies)
    trainer = make_async_trainer(tmp_path, policy, worker, max_steps=50)
    session = trl_replay.attach(trainer, replay_start=None)
    with pytest.raises(RuntimeError, match="the worker has died"):
        trainer.train()
    assert session.queue.waited == 0


def test_where_nothing_is_live_training_goes_on(policy: Any, tmp_path: Any) -> None:
    trainer = make_async_trainer(tmp_path, policy, Script(lambda number, version: samples_of(number, DEAD, version)))
    session = trl_replay.attach(trainer, replay_start=None)
    trainer.train()
    assert trainer.state.global_step == 6
    assert "a dead group passed" in session.explain()


def test_epochs_end_as_in_stock_though_dead_groups_are_dropped(policy: Any, tmp_path: Any) -> None:
    worker = Script(every_second_dead)
    trainer = make_async_trainer(tmp_path, policy, worker, max_steps=-1, num_train_epochs=2)
    trl_replay.attach(trainer, replay_start=None)
    trainer.train()
    trained = compat.trained_groups(trainer)
    assert len(trained) >= 16, "two epochs of eight prompts"
    assert trained == set(range(max(trained) + 1)), "without a gap"


def test_a_forked_conversation_gives_several_rows_of_one_group(policy: Any, tmp_path: Any) -> None:
    worker = Script(lambda number, version: samples_of(number, DEAD if number % 2 else LIVE, version, forks=3))
    trainer = make_async_trainer(tmp_path, policy, worker, max_steps=8)
    session = trl_replay.attach(trainer, replay_start=None)
    given = handed_out(session)
    trainer.train()
    serial = next(iter(session.buffer))
    entry = session.entry(serial)
    assert len(entry.completions) == 6
    assert entry.columns["row_reward"] == [1.0, 0.0, 0.0, 0.0], "a row of the table is a completion"
    sizes = np.unique([sample.group_id for sample in given if sample.group_id < 0], return_counts=True)[1]
    assert set(sizes[1:]) == {6}, "it is replayed whole"
    assert {sample.group_id % 2 for sample in given if sample.group_id >= 0} == {0}
    assert session.export(tmp_path / "groups.parquet").is_file()


def test_groups_whose_samples_come_in_turns_are_put_together_by_id(policy: Any, tmp_path: Any) -> None:
    def in_turns(number: int, version: int) -> list[Any]:
        first, second = (samples_of(2 * number + odd, DEAD if odd else LIVE, version) for odd in (0, 1))
        return [sample for pair in zip(first, second, strict=True) for sample in pair]

    trainer = make_async_trainer(tmp_path, policy, Script(in_turns))
    session = trl_replay.attach(trainer, replay_start=None)
    given = handed_out(session)
    trainer.train()
    assert {sample.group_id % 2 for sample in given if sample.group_id >= 0} == {0}
    assert session.totals.counters["stored"] > 2
    assert session.totals.counters["dead"] == session.queue.dropped > 2


def test_a_late_sample_passes_and_a_group_is_not_waited_for(policy: Any, tmp_path: Any) -> None:
    pieces = [samples_of(0, LIVE)[:4], samples_of(0, LIVE, forks=2)[1:2], samples_of(1, LIVE)]
    trainer = make_async_trainer(tmp_path, policy, worker := Script(lambda *_: None))
    session = trl_replay.attach(trainer, replay_start=None)
    worker.waiting += pieces[0]
    given = [session.queue.get(timeout=0.01) for _ in range(4)]
    with pytest.raises(Empty):
        session.queue.get(timeout=0.01)
    assert len(session.buffer) == 1, "the group is complete with its last sample: nothing else was there"
    worker.waiting += pieces[1] + pieces[2]
    given += [session.queue.get(timeout=0.01) for _ in range(5)]
    assert [sample.group_id for sample in given] == [0] * 5 + [1] * 4


def test_96_what_a_success_is_becomes_known(policy: Any, tmp_path: Any) -> None:
    trainer = make_async_trainer(tmp_path, policy, Script(every_second_dead), max_steps=12)
    session = trl_replay.attach(trainer, replay_start=None, replay_retire_passes=1)
    trainer.train()
    assert session.components.success.values == [0.0, 1.0]
    assert session.metrics["replay/lowest_fraction"] == session.metrics["replay/all_wrong_fraction"] == 0.5
    assert session.totals.counters["refused"] > 0, "a prompt with a success is solved"


def test_advice_goes_by_what_is_logged(policy: Any, tmp_path: Any) -> None:
    def solved(number: int, version: int) -> list[Any]:
        return samples_of(number, LIVE if number % 4 == 0 else (1.0,) * 4, version)

    trainer = make_async_trainer(tmp_path, policy, Script(solved), max_steps=20)
    session = trl_replay.attach(trainer, replay_start=None)
    trainer.train()
    assert session.metrics["replay/highest_fraction"] > 0.5
    assert "harder prompts" in session.explain()


@pytest.mark.parametrize("budget", [0, -1])
def test_97_samples_on_their_way_are_kept_whatever_turns_the_budget_off(
    policy: Any, tmp_path: Any, budget: int
) -> None:
    trainer = make_async_trainer(tmp_path, policy, Script(all_live), token_budget=budget)
    session = trl_replay.attach(trainer, replay_start=None)
    for _ in range(3):
        session.queue.get(timeout=0.01)
    assert len(session.queue.state_dict()["samples"]) == 3
    trl_replay.detach(trainer)
    for _ in range(3):
        session.queue.get(timeout=0.01)
    assert len(session.queue._given) == 3, "after detach nothing is kept"


def test_rows_that_a_group_lacks_have_not_failed(policy: Any, tmp_path: Any) -> None:
    trainer = make_async_trainer(tmp_path, policy, Script(lambda number, version: all_live(number, version)[:3]))
    session = trl_replay.attach(trainer, replay_start=None)
    trainer.train()
    assert session.totals.counters["failed"] == 0


def test_161_rows_of_rollouts_that_failed_are_stored_masked_and_not_replayed(policy: Any, tmp_path: Any) -> None:
    """TRL's worker sends them, with advantage 0."""

    def failing(number: int, version: int) -> list[Any]:
        samples = samples_of(number, LIVE if number % 2 == 0 else DEAD, version)
        if number % 2 == 0:
            samples[1] = replace(samples[1], advantage=0.0, metrics={"reward": np.nan, "rewards/right": np.nan})
        return samples

    trainer = make_async_trainer(tmp_path, policy, Script(failing), max_steps=4)
    session = trl_replay.attach(trainer, replay_start=None)
    out = handed_out(session)
    trainer.train()
    table = session.buffer.table
    assert len(table)
    assert table.row_masked.tolist() == [[False, True, False, False]] * len(table)
    assert (table.items == table.row_items[:, [0, 2, 3]].sum(axis=1)).all(), "a masked row counts nowhere"
    replayed = [sample for sample in out if sample.group_id < 0]
    assert len(replayed) == 3 * session.totals.counters["replaced"] > 0


@pytest.mark.parametrize("failed", [0, 2], ids=["the forked one", "another one"])
def test_177_no_row_of_a_failed_rollout_is_replayed_or_exported_as_trained_where_a_completion_is_forked(
    policy: Any, tmp_path: Any, failed: int
) -> None:
    """Its tokens would count in the loss's denominator."""

    def failing(number: int, version: int) -> list[Any]:
        samples = samples_of(number, (0.0, 1.0, 0.0, 0.0) if number % 2 == 0 else DEAD, version, forks=2)
        nothing = {"reward": np.nan, "rewards/right": np.nan}
        return [
            replace(sample, advantage=0.0, metrics=nothing)
            if number % 2 == 0 and sample.completion[0]["content"] == f"{number}/{failed}"
            else sample
            for sample in samples
        ]

    trainer = make_async_trainer(tmp_path, policy, Script(failing))
    session = trl_replay.attach(trainer, replay_start=None)
    out = handed_out(session)
    trainer.train()
    replayed = [sample for sample in out if sample.group_id < 0]
    rows = 3 if failed == 0 else 4
    assert len(replayed) == rows * session.totals.counters["replaced"] > 0
    assert all(sample.advantage for sample in replayed)
    masked = session.entry(next(iter(session.buffer))).masked
    assert masked == ([True, True, False, False, False] if failed == 0 else [False, False, False, True, False])


def test_93_a_dead_group_that_never_completes_holds_nothing_up(policy: Any, tmp_path: Any) -> None:
    """The worker always has the next group."""

    def lacking(number: int, version: int) -> list[Any]:
        return every_second_dead(number, version)[: 3 if number == 1 else None]

    trainer = make_async_trainer(tmp_path, policy, worker := Script(lacking))
    trl_replay.attach(trainer, replay_start=None)
    trainer.train()
    assert worker.next < 40


def test_94_a_group_that_a_pause_cuts_passes_undecided(policy: Any, tmp_path: Any) -> None:
    """What passed undecided goes on to pass: a part of a group is neither judged nor stored."""
    trainer = make_async_trainer(tmp_path, policy, worker := Script(lambda *_: None))
    session = trl_replay.attach(trainer, replay_start=None)
    worker.waiting += samples_of(0, LIVE)
    session.pause()
    given = [session.queue.get(timeout=0.01)]
    session.resume()
    given += [session.queue.get(timeout=0.01) for _ in range(3)]
    with pytest.raises(Empty):
        session.queue.get(timeout=0.01)
    assert [sample.group_id for sample in given] == [0] * 4
    assert (len(session.buffer), session.queue.dropped) == (0, 0)


def test_123_a_group_that_is_open_when_a_pause_begins_is_neither_judged_nor_dropped(
    policy: Any, tmp_path: Any
) -> None:
    trainer = make_async_trainer(tmp_path, policy, worker := Script(lambda *_: None))
    session = trl_replay.attach(trainer, replay_start=None)
    samples = samples_of(0, DEAD)
    worker.waiting += samples[:2]
    for _ in range(2):
        session.queue._receive(0.0)
    session.pause()
    given = [session.queue.get(timeout=0.01) for _ in range(2)]
    with pytest.raises(Empty):
        session.queue.get(timeout=0.01)
    worker.waiting += samples[2:]
    given += [session.queue.get(timeout=0.01) for _ in range(2)]
    assert [id(sample) for sample in given] == [id(sample) for sample in samples]
    assert session.queue.dropped == session.totals.counters["dead"] == 0
    assert 0 not in compat.trained_groups(trainer)


def test_123_samples_that_an_interrupted_run_had_fetched_are_forgotten_when_training_begins_again(
    policy: Any, tmp_path: Any
) -> None:
    class Interrupt(TrainerCallback):
        def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    trainer = make_async_trainer(tmp_path, policy, Script(all_live))
    session = trl_replay.attach(trainer, replay_start=None)
    trainer.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    left = [handed.sample for handed in session.queue._given]
    assert left
    trainer.remove_callback(Interrupt)
    waiting: list[bool] = []

    class Note(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            waiting.append(any(handed.sample is one for handed in session.queue._given for one in left))

    trainer.add_callback(Note())
    trainer.train()
    assert waiting
    assert not any(waiting)


@pytest.mark.parametrize("forks", [1, 3])
def test_95_a_group_whose_samples_come_with_gaps_is_judged_whole(policy: Any, tmp_path: Any, forks: int) -> None:
    """TRL's worker sleeps for 0.1 s where its queue is full; the last sample alone shows that the group is live."""
    worker = Script(lambda *_: None)
    worker.reward_func_names = ["right", "accuracy"]
    worker.rollout_buffer = queue = Queue()
    trainer = make_async_trainer(tmp_path, policy, worker)
    session = trl_replay.attach(trainer, replay_start=None, replay_reward="accuracy")
    samples = samples_of(0, (0.1, 0.2, 0.3, 1.4), forks=forks, accuracy=(0.0, 0.0, 0.0, 1.0))
    for sample in samples[:-1]:
        queue.put(sample)
    late = threading.Timer(0.12, queue.put, samples[-1:])
    late.start()
    given = [session.queue.get(timeout=5.0) for _ in samples]
    assert [id(sample) for sample in given] == [id(sample) for sample in samples]
    with pytest.raises(Empty):
        session.queue.get(timeout=0.01)
    assert len(session.buffer) == 1
    assert session.entry(next(iter(session.buffer))).columns["row_rewards"][3][1] == 1.0


def test_a_group_is_dead_by_the_reward_that_counts(policy: Any, tmp_path: Any) -> None:
    def shaped(number: int, version: int) -> list[Any]:
        correct = (1.0, 0.0, 1.0, 0.0) if number % 2 else (1.0,) * 4
        return samples_of(number, LIVE, version, correct=correct)

    worker = Script(shaped)
    worker.reward_func_names = ["right", "correct"]
    trainer = make_async_trainer(tmp_path, policy, worker)
    session = trl_replay.attach(trainer, replay_start=None, replay_reward="correct")
    given = handed_out(session)
    trainer.train()
    assert {sample.group_id % 2 for sample in given if sample.group_id >= 0} == {1}
    assert session.totals.counters["dead"] > 2


class Maze:
    """An environment that owns its reward."""

    def reset(self) -> None: ...
    def get_reward(self) -> float:
        return 0.0


class Shop:
    """An environment that reward functions score."""

    def reset(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Maze", {"environment_factory": Maze}),
        ("Maze", {"environment_factory": lambda: Maze()}),
        ("Maze", {"environment_factory": {"shop": Shop, "maze": Maze, "other": Maze}}),
        ("harness_reward", {"harness_session_factory": None}),
    ],
)
def test_121_rewards_that_environments_own_count_beside_those_of_functions(
    policy: Any, tmp_path: Any, name: str, settings: Any
) -> None:
    """As TRL's own worker tells them."""

    class AsyncRolloutWorker(Script):
        """Of the name of TRL's, with its settings."""

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            del self.reward_func_names
            self._loop_kwargs = {"reward_funcs": [right], "dataset_start_index": 0, **settings}

    def solved(number: int, version: int) -> list[Any]:
        return samples_of(number, LIVE, version, **{name: LIVE if number % 2 else DEAD})

    trainer = make_async_trainer(tmp_path, policy, AsyncRolloutWorker(solved))
    session = trl_replay.attach(trainer, replay_start=None, replay_reward=name)
    given = handed_out(session)
    trainer.train()
    assert session.trainer.reward_func_names == ["right", name]
    assert {sample.group_id % 2 for sample in given if sample.group_id >= 0} == {1}
    assert session.buffer.table.row_rewards[0].tolist() == [[1.0, 1.0]] + [[0.0, 0.0]] * 3


def test_rewards_of_any_size_are_dead_where_they_are_equal(policy: Any, tmp_path: Any) -> None:
    for reward in (0.7, 100.1, 1e6 / 3):
        trainer = make_async_trainer(tmp_path, policy, worker := Script(lambda *_: None))
        session = trl_replay.attach(trainer)
        worker.waiting += samples_of(0, (reward,) * 4) + samples_of(1, (reward, reward, reward, reward + 0.1))
        assert session.queue.get(timeout=0.01).group_id == 1
        trl_replay.detach(trainer)


def test_per_weighs_advantages_by_the_chance_of_being_drawn(policy: Any, tmp_path: Any) -> None:
    def uneven(number: int, version: int) -> list[Any]:
        live = (1.0, 0.0, 0.0, 0.0) if number % 4 else (1.0, 1.0, 0.0, 0.0)
        return samples_of(number, DEAD if number % 2 else live, version)

    trainer = make_async_trainer(tmp_path, policy, Script(uneven), max_steps=10)
    session = trl_replay.attach(
        trainer, replay_start=None, replay_sampler="proportional", replay_correction="per",
        replay_correction_kwargs={"beta": 1.0}, replay_scorer="advantage_std",
    )  # fmt: skip
    given = handed_out(session)
    trainer.train()
    stored = {tuple(sample.input_ids.tolist()): sample.advantage for sample in given if sample.group_id >= 0}
    shares = [one.advantage / stored[tuple(one.input_ids.tolist())] for one in given if one.group_id < 0]
    assert max(shares) <= 1.0 + 1e-6
    assert min(shares) < 0.999


def test_a_paused_session_lets_all_pass_and_detach_gives_the_queue_back(policy: Any, tmp_path: Any) -> None:
    stock = make_async_trainer(tmp_path, policy, Script(every_second_dead))
    plain = watch(stock)
    stock.train()
    for leave in (lambda trainer, session: session.pause(), lambda trainer, session: trl_replay.detach(trainer)):
        worker = Script(every_second_dead)
        trainer = make_async_trainer(tmp_path, policy, worker)
        session = trl_replay.attach(trainer, replay_start=None)
        leave(trainer, session)
        seen = watch(trainer)
        trainer.train()
        assert same(plain, seen)
        assert len(session.buffer) == 0
        if session.detached:
            assert trainer.rollout_queue is worker


def test_detach_in_the_midst_of_training_lets_the_rest_pass(policy: Any, tmp_path: Any) -> None:
    class Leave(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == 3:
                trl_replay.detach(trainer)

    worker = Script(every_second_dead)
    trainer = make_async_trainer(tmp_path, policy, worker, max_steps=8)
    session = trl_replay.attach(trainer, replay_start=None)
    given = handed_out(session)
    trainer.add_callback(Leave())
    trainer.train()
    assert trainer.state.global_step == 8
    assert any(sample.group_id % 2 for sample in given if sample.group_id > 8), "dead ones pass from then on"


def test_hooks_of_plugins_are_called(policy: Any, tmp_path: Any) -> None:
    called: list[str] = []

    class Plugin:
        @trl_replay.hookimpl
        def trl_replay_admitted(self, table: Any, rows: Any) -> None:
            called.append("admitted")

        @trl_replay.hookimpl
        def trl_replay_eligible(self, table: Any, context: Any) -> Any:
            called.append("eligible")
            return {"never": np.ones(len(table), bool)}

        @trl_replay.hookimpl
        def trl_replay_metrics(self, context: Any) -> dict[str, float]:
            return {"replay/mine": 3.0}

    trl_replay.register(Plugin(), "async_test")
    trainer = make_async_trainer(tmp_path, policy, Script(every_second_dead))
    session = trl_replay.attach(trainer, replay_start=None, replay_plugins=["async_test"])
    trainer.train()
    assert {"admitted", "eligible"} <= set(called)
    assert session.totals.counters["replaced"] == 0
    assert "never" in session.explain()
    assert session.metrics["replay/mine"] == 3.0
