"""Replay for TRL's AsyncGRPOTrainer: what its queue hands out, through the real trainer with a scripted worker."""

import itertools
import threading
from dataclasses import replace
from queue import Queue

import numpy as np
import pytest
import torch
from pyarrow import parquet
from queued import (
    DEAD,
    LIVE,
    SIZE,
    Script,
    all_dead,
    all_live,
    every_second_dead,
    make_async_trainer,
    nothing,
    right,
    samples_of,
    watch,
)
from support import Act, plugin_class
from teacher import IDS, rows
from transformers import Qwen2ForCausalLM, TrainerCallback
from trl_replay_async import compat as asynchronous
from users_losses import alone

import trl_replay
from trl_replay import ReplayError
from trl_replay.buffer.replay_buffer import OTHER_RULE
from trl_replay.testing import make_trainer


def same(first, second):
    return len(first) == len(second) and all(
        one[1] == other[1] and all(torch.equal(one[0][key], other[0][key]) for key in one[0])
        for one, other in zip(first, second, strict=True)
    )


@pytest.fixture
def stock(queued, policy, tmp_path):
    """What a stock trainer trains on, by its script."""

    def run(script):
        trainer = make_async_trainer(tmp_path, policy, Script(script))
        seen = watch(trainer)
        trainer.train()
        return seen

    return run


@pytest.mark.parametrize(
    ("script", "settings"),
    [
        (all_live, {"replay_start": 1000}),
        (all_live, {"replay_buffer_size": 1, "replay_max_fraction": 0.0}),
        (every_second_dead, {"replay_dry_run": True, "replay_start": None}),
        (every_second_dead, {"use_replay": False}),
    ],
)
def test_with_nothing_to_replay_training_is_stock_bit_for_bit(policy, tmp_path, stock, script, settings):
    trainer = make_async_trainer(tmp_path, policy, Script(script))
    trl_replay.attach(trainer, **settings)
    seen = watch(trainer)
    trainer.train()
    assert len(seen) == 6
    assert same(stock(script), seen)


def check_as_they_were(run, before):
    """Replayed samples are those of a run before, which may be the same."""
    originals = {tuple(sample.input_ids.tolist()): sample for sample in before.fresh}
    for sample in run.replayed:
        original = originals[tuple(sample.input_ids.tolist())]
        assert np.array_equal(sample.old_log_probs, original.old_log_probs)
        assert np.array_equal(sample.completion_mask, original.completion_mask)
        same = run is before
        assert sample.advantage == (original.advantage if same else pytest.approx(original.advantage))
        assert sample.metrics == {}, "rewards that TRL logs are of fresh samples"


def test_dead_groups_are_dropped_told_as_done_and_replaced_by_stored_ones(queued):
    run = queued().train()
    session = run.session
    assert run.halves == {0}, "no dead group passes"
    numbers = [sample.group_id for sample in run.fresh]
    assert numbers == sorted(numbers)
    counts = np.unique(numbers, return_counts=True)[1]
    assert set(counts[:-1]) == {4}, "none is lost, none comes twice"
    assert run.replayed
    assert len({sample.group_id for sample in run.replayed}) * 4 - len(run.replayed) < 4
    assert {1, 3, 5} <= asynchronous.trained_groups(run.trainer), "dropped groups are done"
    assert min(asynchronous.trained_groups(run.trainer)) >= 0, "replayed ones count in no epoch"
    assert run.counters["dead"] == run.queue.dropped
    assert f"{run.queue.dropped} dead groups dropped" in session.explain()
    check_as_they_were(run, run)
    assert session.metrics["replay/dead_fraction"] == 0.5
    assert run.trainer.state.log_history[-2]["replay/size"] == session.buffer.table.serial.size


def test_without_a_buffer_dead_groups_are_dropped_alone(queued):
    run = queued(replay_buffer_size=0, replay_unfilled="exclude").train()
    assert {sample.group_id % 2 for sample in run.given} == {0}
    assert {1, 3, 5} <= asynchronous.trained_groups(run.trainer)


def by_hand(model, samples, low, high):
    """The trainer's loss over the samples of a micro-batch, one forward a sample."""
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        mask = sample.completion_mask == 1
        chosen = alone(model, (sample.input_ids[~mask].tolist(), sample.input_ids[mask].tolist()))
        ratio = (chosen - torch.from_numpy(sample.old_log_probs[mask])).exp()
        total = total - torch.min(ratio * sample.advantage, ratio.clamp(1 - low, 1 + high) * sample.advantage).sum()
        tokens += len(chosen)
    return total / tokens


def test_a_warm_start_replays_the_groups_of_another_run_as_they_were(queued, tmp_path):
    """In its first step already."""
    before = queued(folder="a").train()
    path = before.session.export(tmp_path / "groups.parquet")
    run = queued(all_dead, folder="b", max_steps=3, replay_warm_start=str(path)).train()
    assert len(run.session.buffer) == len(before.session.buffer) > 0
    assert len(run.replayed) >= 12, "no group of its own was live"
    check_as_they_were(run, before)
    assert run.session.add(path) == len(before.session.buffer)


def test_115_a_warm_start_trains_no_row_that_the_synchronous_run_left_out(queued, policy, tmp_path):
    """Its truncated completions, and a row that the file masks."""

    def scored(completions, **_):
        return [float(row % SIZE == 0) + 0.1 * (row % 3) for row in range(len(completions))]

    scored.__name__ = right.__name__
    model = Qwen2ForCausalLM.from_pretrained(policy.path)
    before = make_trainer(tmp_path / "a", scored, max_steps=8, mask_truncated_completions=True, model=model)
    stored = trl_replay.attach(before, replay_start=None)
    before.train()
    rows = parquet.read_table(stored.export(tmp_path / "groups.parquet")).to_pylist()
    truncated = [row for row in rows if row["completion_mask"] and not any(row["completion_mask"])]
    assert truncated, "some are truncated"
    trained = [row for row in rows if row not in truncated]
    masked = next(row for other, row in itertools.pairwise(trained) if row["group"] == other["group"])
    masked["masked"] = True
    left_out = {(*row["prompt_ids"], *row["completion_ids"]) for row in (*truncated, masked)}

    run = queued(all_dead)
    assert run.session.add(rows) == len(stored.buffer)
    run.train()
    assert len(run.replayed) > SIZE
    assert not left_out & {tuple(sample.input_ids.tolist()) for sample in run.replayed}


def test_179_a_warm_start_cuts_no_group_of_forked_completions_into_groups_of_other_baselines(queued, tmp_path):
    def forked(number, version):
        return samples_of(number, DEAD if number % 2 else LIVE, version, forks=1 + 2 * (number % 4 == 0))

    stored = queued(forked, folder="a").train().session
    sizes = [len(stored.entry(serial).masked) for serial in stored.buffer]
    assert set(sizes) == {SIZE, SIZE + 2}
    run = queued(all_live)
    assert run.session.add(stored.export(tmp_path / "groups.parquet")) == sizes.count(SIZE)
    assert run.counters["refused"] == sizes.count(SIZE + 2)
    assert any("forked conversations" in reason for reason in run.session.totals.reasons)


def test_115_a_files_advantages_of_tokens_are_refused(queued):
    """A sample of TRL's has one advantage."""
    session = queued(all_live).session
    for made in (rows(**IDS, advantages=[0.5, 1.0]), rows(**IDS, advantages=[0.5, 1.0], advantage=1.0)):
        with pytest.raises(ReplayError, match="Rows of the rows given lack log-probs or advantages"):
            session.add(made)


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_loss_of_replayed_samples_by_hand_value_and_gradient(queued, policy, weight):
    run = queued(max_grad_norm=0.0, max_steps=5, replay_weight=weight)
    trainer, losses, begins = run.trainer, [], [0]

    class Compare(TrainerCallback):
        def on_pre_optimizer_step(self, *_, model, **__):
            count = asynchronous.step_samples(trainer)
            samples = run.given[begins[-1] : begins[-1] + count]
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
    run.train()
    assert [value for value, _ in losses] == pytest.approx([loss for _, loss in seen], rel=1e-4)
    assert any(replayed for _, replayed in losses), "some of it was replayed"
    stored = {tuple(one.input_ids.tolist()): one.advantage for one in run.fresh}
    for sample in run.replayed:
        assert sample.advantage == pytest.approx(weight * stored[tuple(sample.input_ids.tolist())])


@pytest.mark.parametrize("limit", [{"replay_max_uses": 1}, {"replay_max_age": 1}, {"replay_max_fraction": 0.25}])
def test_limits_on_age_uses_and_fraction_hold(queued, limit):
    run = queued(max_steps=8, **limit)
    table, take, ages = run.session.buffer.table, run.queue._take, []

    def taking(entry, *args):
        ages.append(int(run.session.update - table.update[entry]))
        return take(entry, *args)

    run.queue._take = taking
    run.train()
    assert run.counters["replaced"] > 0
    assert table.uses.max(initial=0) <= limit.get("replay_max_uses", 99)
    assert 1 <= min(ages) <= max(ages) <= limit.get("replay_max_age", 99)
    assert run.counters["replaced"] <= limit.get("replay_max_fraction", 1.0) * run.counters["generated"]


def test_116_no_entry_is_replayed_again_before_its_samples_are_trained_on(queued):
    def live_at_first(number, version):
        return samples_of(number, LIVE if number < 2 else DEAD, version)

    run = queued(live_at_first, max_steps=4, gradient_accumulation_steps=2)
    get, copies = run.queue.get, []

    def counting(*args, **kwargs):
        sample = get(*args, **kwargs)
        waiting = [handed.sample.input_ids.tobytes() for handed in (*run.queue._given, *run.queue._line)]
        copies.append(waiting.count(sample.input_ids.tobytes()))
        return sample

    run.queue.get = counting
    run.train()
    assert run.counters["replaced"] > 2
    assert set(copies) == {1}


def test_while_the_queue_is_empty_stored_groups_are_replayed_within_limits(queued):
    """The worker stalls for good after eight groups: half of max_staleness is replayed, then the trainer waits."""

    class Stalls(Script):
        waits = ()

        def check_health(self, stale_after_s):
            self.waits = (*self.waits, len(run.given))
            if self.waits.count(self.waits[-1]) > 1:  # the second time that nothing came in between
                raise RuntimeError("the worker hangs")

    worker = Stalls(lambda number, version: all_live(number, version) if number < 8 else None)
    run = queued(worker, max_steps=50, max_staleness=6)
    get = run.queue.get
    run.queue.get = lambda *_, **__: get(timeout=0.2)
    with pytest.raises(RuntimeError, match="the worker hangs"):
        run.train()
    assert run.queue.waited > 0
    assert 2 * (run.trainer.model_version - run.queue._arrived_at) <= 6, "samples on their way do not get stale"
    assert f"{run.queue.waited} groups replayed while" in run.session.explain()


def test_slow_prompts_do_not_starve(queued):
    """Every third group takes long: ten times nothing comes before it does. All of them are trained on."""
    patience, begun = {}, {}

    def slowly(number, version):
        begun.setdefault(number, version)
        patience[number] = patience.get(number, 0) + 1
        if number % 3 == 2 and patience[number] < 10:
            return None
        return samples_of(number, LIVE, begun[number])

    run = queued(slowly, max_steps=20, max_staleness=4).train()
    assert run.queue.waited > 3
    fresh = sorted({sample.group_id for sample in run.fresh})
    assert fresh == list(range(len(fresh)))
    assert not any("sample/dropped_stale_total" in entry for entry in run.trainer.state.log_history)
    assert run.counters["replaced"] <= run.counters["generated"]


def test_a_dead_worker_is_told_at_once_and_not_replayed_over(queued):
    def dies(number, version):
        if number < 6:
            return all_live(number, version)
        run.worker.failure = RuntimeError("the worker has died")
        return None

    run = queued(dies, max_steps=50)
    with pytest.raises(RuntimeError, match="the worker has died"):
        run.train()
    assert run.queue.waited == 0


def test_where_nothing_is_live_training_goes_on(queued):
    run = queued(all_dead).train()
    assert run.trainer.state.global_step == 6
    assert "a dead group passed" in run.session.explain()


def test_epochs_end_as_in_stock_though_dead_groups_are_dropped(queued):
    trained = asynchronous.trained_groups(queued(max_steps=-1, num_train_epochs=2).train().trainer)
    assert len(trained) >= 16, "two epochs of eight prompts"
    assert trained == set(range(max(trained) + 1)), "without a gap"


def test_a_forked_conversation_gives_several_rows_of_one_group(queued, tmp_path):
    def forked(number, version):
        return samples_of(number, DEAD if number % 2 else LIVE, version, forks=3)

    run = queued(forked, max_steps=8).train()
    entry = run.session.entry(next(iter(run.session.buffer)))
    assert len(entry.completions) == 6
    assert entry.columns["row_reward"] == [1.0, 0.0, 0.0, 0.0], "a row of the table is a completion"
    sizes = np.unique([sample.group_id for sample in run.replayed], return_counts=True)[1]
    assert set(sizes[1:]) == {6}, "it is replayed whole"
    assert run.halves == {0}
    assert run.session.export(tmp_path / "groups.parquet").is_file()


def test_groups_whose_samples_come_in_turns_are_put_together_by_id(queued):
    def in_turns(number, version):
        first, second = (samples_of(2 * number + odd, DEAD if odd else LIVE, version) for odd in (0, 1))
        return [sample for pair in zip(first, second, strict=True) for sample in pair]

    run = queued(in_turns).train()
    assert run.halves == {0}
    assert run.counters["stored"] > 2
    assert run.counters["dead"] == run.queue.dropped > 2


def test_a_late_sample_passes_and_a_group_is_not_waited_for(queued):
    run = queued(nothing)
    run.worker.waiting += samples_of(0, LIVE)
    run.get(4)
    run.ends()
    assert len(run.session.buffer) == 1, "the group is complete with its last sample: nothing else was there"
    run.worker.waiting += samples_of(0, LIVE, forks=2)[1:2] + samples_of(1, LIVE)
    run.get(5)
    assert [sample.group_id for sample in run.given] == [0] * 5 + [1] * 4


def test_96_what_a_success_is_becomes_known(queued):
    run = queued(max_steps=12, replay_retire_passes=1).train()
    assert run.session.components.success.values == [0.0, 1.0]
    metrics = run.session.metrics
    assert metrics["replay/lowest_fraction"] == metrics["replay/all_wrong_fraction"] == 0.5
    assert run.counters["refused"] > 0, "a prompt with a success is solved"


@pytest.mark.parametrize("budget", [0, -1])
def test_97_samples_on_their_way_are_kept_whatever_turns_the_budget_off(queued, budget):
    run = queued(all_live, token_budget=budget)
    run.get(3)
    assert len(run.queue.state_dict()["samples"]) == 3
    trl_replay.detach(run.trainer)
    run.get(3)
    assert len(run.queue._given) == 3, "after detach nothing is kept"


def test_rows_that_a_group_lacks_have_not_failed(queued):
    run = queued(lambda number, version: all_live(number, version)[:3]).train()
    assert run.counters["failed"] == 0


FAILED = {"advantage": 0.0, "metrics": {"reward": np.nan, "rewards/right": np.nan}}
"""What TRL's worker sends of a rollout that failed."""


@pytest.mark.parametrize(
    ("forks", "failed", "masked"),
    [
        (1, 2, [False, False, True, False]),
        (2, 0, [True, True, False, False, False]),
        (2, 2, [False, False, False, True, False]),
    ],
    ids=["no fork", "the forked one", "another one"],
)
def test_161_and_177_no_row_of_a_failed_rollout_is_replayed_or_exported_as_trained(queued, forks, failed, masked):
    """Its tokens would count in the loss's denominator."""

    def failing(number, version):
        samples = samples_of(number, DEAD if number % 2 else (0.0, 1.0, 0.0, 0.0), version, forks=forks)
        told = f"{2 * (number // 2)}/{failed}"
        return [replace(one, **FAILED) if one.completion[0]["content"] == told else one for one in samples]

    run = queued(failing, max_steps=4).train()
    assert len(run.replayed) == masked.count(False) * run.counters["replaced"] > 0
    assert all(sample.advantage for sample in run.replayed)
    assert run.session.entry(next(iter(run.session.buffer))).masked == masked
    table = run.session.buffer.table
    assert (table.items == (table.row_items * ~table.row_masked).sum(axis=1)).all(), "a masked row counts nowhere"


def test_93_a_dead_group_that_never_completes_holds_nothing_up(queued):
    """The worker always has the next group."""
    run = queued(lambda number, version: every_second_dead(number, version)[: 3 if number == 1 else None]).train()
    assert run.worker.next < 40


def test_123_samples_that_an_interrupted_run_had_fetched_are_forgotten_when_training_begins_again(queued):
    run, waiting, left = queued(all_live), [], []

    class Note(TrainerCallback):
        def on_step_begin(self, _args, state, _control, **_):
            if not left and state.global_step == 2:
                left.extend(handed.sample for handed in run.queue._given)
                raise KeyboardInterrupt
            if left:
                waiting.append(any(handed.sample is one for handed in run.queue._given for one in left))

    run.trainer.add_callback(Note())
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert left
    run.train()
    assert waiting
    assert not any(waiting)


@pytest.mark.parametrize("forks", [1, 3])
def test_95_a_group_whose_samples_come_with_gaps_is_judged_whole(queued, forks):
    """TRL's worker sleeps for 0.1 s where its queue is full; the last sample alone shows that the group is live."""
    worker = Script(nothing)
    worker.reward_func_names = ["right", "accuracy"]
    worker.rollout_buffer = queue = Queue()
    run = queued(worker, replay_reward="accuracy")
    samples = samples_of(0, (0.1, 0.2, 0.3, 1.4), forks=forks, accuracy=(0.0, 0.0, 0.0, 1.0))
    for sample in samples[:-1]:
        queue.put(sample)
    late = threading.Timer(0.12, queue.put, samples[-1:])
    late.start()
    given = [run.queue.get(timeout=5.0) for _ in samples]
    assert [id(sample) for sample in given] == [id(sample) for sample in samples]
    run.ends()
    assert len(run.session.buffer) == 1
    assert run.session.entry(next(iter(run.session.buffer))).columns["row_rewards"][3][1] == 1.0


class Maze:
    """An environment that owns its reward."""

    def reset(self): ...
    def get_reward(self):
        return 0.0


class Shop:
    """An environment that reward functions score."""

    def reset(self): ...


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Maze", {"environment_factory": Maze}),
        ("Maze", {"environment_factory": lambda: Maze()}),
        ("Maze", {"environment_factory": {"shop": Shop, "maze": Maze, "other": Maze}}),
        ("harness_reward", {"harness_session_factory": None}),
    ],
)
def test_121_rewards_that_environments_own_count_beside_those_of_functions(queued, name, settings):
    """As TRL's own worker tells them."""

    class AsyncRolloutWorker(Script):
        """Of the name of TRL's, with its settings."""

        def __init__(self, *given):
            super().__init__(*given)
            del self.reward_func_names
            self._loop_kwargs = {"reward_funcs": [right], "dataset_start_index": 0, **settings}

    def solved(number, version):
        return samples_of(number, LIVE, version, **{name: LIVE if number % 2 else DEAD})

    run = queued(AsyncRolloutWorker(solved), replay_reward=name).train()
    assert run.session.trainer.reward_func_names == ["right", name]
    assert run.halves == {1}
    assert run.session.buffer.table.row_rewards[0].tolist() == [[1.0, 1.0]] + [[0.0, 0.0]] * 3


@pytest.mark.parametrize("reward", [0.7, 100.1, 1e6 / 3])
def test_rewards_of_any_size_are_dead_where_they_are_equal(queued, reward):
    run = queued(nothing)
    run.worker.waiting += samples_of(0, (reward,) * 4) + samples_of(1, (reward, reward, reward, reward + 0.1))
    assert run.get(1)[0].group_id == 1


def test_per_weighs_advantages_by_the_chance_of_being_drawn(queued):
    def uneven(number, version):
        live = (1.0, 0.0, 0.0, 0.0) if number % 4 else (1.0, 1.0, 0.0, 0.0)
        return samples_of(number, DEAD if number % 2 else live, version)

    run = queued(
        uneven, max_steps=10, replay_sampler="proportional", replay_correction="per(beta=1.0)",
        replay_scorer="advantage_std",
    ).train()  # fmt: skip
    stored = {tuple(sample.input_ids.tolist()): sample.advantage for sample in run.fresh}
    shares = [one.advantage / stored[tuple(one.input_ids.tolist())] for one in run.replayed]
    assert max(shares) <= 1.0 + 1e-6
    assert min(shares) < 0.999


def test_detach_gives_the_queue_back(queued, stock):
    run = queued()
    trl_replay.detach(run.trainer)
    assert run.trainer.rollout_queue is run.worker
    seen = watch(run.trainer)
    run.train()
    assert same(stock(every_second_dead), seen)
    assert len(run.session.buffer) == 0


def test_hooks_of_plugins_are_called(queued, plug):
    called = []

    hooks = {
        "admitted": lambda table, rows: called.append("admitted"),
        "eligible": lambda table: {"never": np.ones(len(table), bool)},
        "metrics": lambda: {"replay/mine": 3.0},
    }
    run = queued(replay_plugins=[plug(plugin_class(**hooks)())]).train()
    assert called
    assert run.counters["replaced"] == 0
    assert "never" in run.session.explain()
    assert run.session.metrics["replay/mine"] == 3.0


def stricter(**_):
    return [1.0]


def test_groups_that_another_reward_rule_of_the_worker_scored_leave_the_queue_and_the_buffer(queued):
    worker = Script(every_second_dead)
    worker.reward_funcs = [right]
    run = queued(worker, max_steps=8)
    before = []

    def change():
        worker.reward_funcs[0] = stricter
        before.extend(tuple(sample.input_ids.tolist()) for sample in run.given)
        return len(run.given)

    at = Act({4: change})
    run.trainer.add_callback(at)
    with pytest.warns(UserWarning, match="the source of 'right'"):
        run.train()
    buffer = run.session.buffer
    assert run.session.totals.reasons[f"an entry left: {OTHER_RULE}"] > 0
    assert buffer.table.serial.min() >= buffer.scored_from > 0
    later = {tuple(sample.input_ids.tolist()) for sample in run.given[at.returned :]}
    assert run.replayed
    assert not later & set(before), "what is given later was given by no earlier rule"


def test_188_clear_forgets_open_groups_and_replayed_samples_that_wait(queued):
    run, samples = queued(nothing), samples_of(0, LIVE)
    run.worker.waiting += samples[:2]
    for _ in range(2):
        run.queue._receive(0.0)
    run.session.clear()
    run.worker.waiting += samples[2:]
    run.get(4)
    run.ends()
    assert [id(sample) for sample in run.given] == [id(sample) for sample in samples], "they pass"
    assert len(run.session.buffer) == 0, "and are not stored"
