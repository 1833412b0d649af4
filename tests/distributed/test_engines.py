"""Replay with sharded parameters: FSDP2 and DeepSpeed's ZeRO, and DDP beside them.

Each engine is launched once, on two processes, by `accelerate launch` with our own configuration file for it, and runs
through all cases (ranks/engines.py). DDP needs no file, and runs as forks.
"""

import importlib.machinery
import itertools
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from engines import LAST, OPTIMIZER, ROWS_OF, SAVED
from forked import check, launch
from launches import LIMIT, RANKS, Launches, assert_same_training
from scripted import build, mixed, run
from started import quickly, started

ROOT = Path(__file__).parents[2]
DEEPSPEED = Path(os.environ.get("TRL_REPLAY_ENGINES") or Path(sys.prefix, "engines"))
"""DeepSpeed has a folder of its own, which `make test` makes: accelerate imports it wherever it finds it."""
ENGINES = {
    "ddp": "DistributedDataParallel, 100% of the weights on a rank",
    "fsdp2": "FSDPQwen2ForCausalLM, 50% of the weights on a rank",
    "zero2": "DeepSpeedEngine, stage 2",
    "zero3": "DeepSpeedEngine, stage 3",
}
SCOPES = tuple(ROWS_OF)
CELLS = list(itertools.product(ENGINES, SCOPES))


class Engine(Launches):
    """The launch of one engine on two processes."""

    def __init__(self, engine, folder):
        super().__init__("engines", folder)
        self.engine, self.script = engine, RANKS / "engines.py"

    def start(self, ranks, folder):
        if self.engine == "ddp":
            return check(launch(self.script, folder, self.engine, limit=LIMIT, local_ranks=(0, 1)))
        command = [
            sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch",
            "--config_file", str(ROOT / "examples" / "accelerate" / f"{self.engine}.yaml"),
            "--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0",
            str(self.script), str(folder), self.engine,
        ]  # fmt: skip
        path = quickly(*[DEEPSPEED] * self.engine.startswith("zero"))
        return check([started(*command, cwd=folder, PYTHONPATH=path)])


class Engines:
    """The results of every rank of an engine for a case, in rank order."""

    def __init__(self, folder):
        self.folder = folder
        self.of = {engine: Engine(engine, folder / engine) for engine in ENGINES}

    def __call__(self, engine, case):
        places = [str(DEEPSPEED), *sys.path]
        if engine.startswith("zero") and not importlib.machinery.PathFinder.find_spec("deepspeed", places):
            pytest.skip(f"deepspeed is neither installed nor in {DEEPSPEED}: `make test` puts it into .venv/engines")
        (self.folder / engine).mkdir(exist_ok=True)
        return self.of[engine](2, case)

    def differences(self, engine, case):
        """Of every rank, in what a run that was resumed differs from one that was not."""
        return [rank["differences"] for rank in self(engine, f"{case} in all")]

    def weights(self, engine, case):
        """All weights at the end."""
        self(engine, case)
        return np.load(self.folder / engine / "2" / f"{case}.0.weights.npy")


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    return Engines(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The same script on one process, which has all rows."""
    trainer = build(tmp_path_factory.mktemp("one"), 12, 4, mixed, max_steps=LAST, **OPTIMIZER)
    found = run(trainer, compared=True, replay_scope="gathered", replay_buffer_size=4)
    parameters = [parameter.detach().flatten().numpy() for parameter in trainer.model.parameters()]
    return {**found, "weights": np.concatenate(parameters)}


def check_by_hand(ranks):
    """Every loss is the one by hand, and replayed rows of another policy were in some."""
    losses = [loss for rank in ranks for loss in rank["compared"]]
    for number, (found, by_hand, replayed, _) in enumerate(losses):
        wanted = pytest.approx(by_hand, rel=2e-5, abs=2e-6)
        assert found == wanted, f"loss {number} with {replayed} replayed rows is {found}, by hand {by_hand}"
    assert sum(replayed for _, _, replayed, _ in losses) >= 8
    assert max(ratio for _, _, _, ratio in losses) > 1e-2, "with a ratio of 1, a wrong one would not show"


def replayed(ranks):
    return sum(sum(step["replayed"]) for rank in ranks for step in rank["steps"])


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_this_engine_that_has_the_weights(launches, engine):
    for scope in SCOPES:
        assert [rank["engine"] for rank in launches(engine, scope)] == [ENGINES[engine]] * 2


@pytest.mark.parametrize(("engine", "scope"), CELLS)
def test_an_engine_trains_and_replays_as_one_process_does(launches, one, engine, scope):
    """Private buffers are not those of one process: there, as another engine does."""
    ranks = launches(engine, scope)
    assert replayed(ranks) > 24
    assert ranks[0]["weights"] == ranks[1]["weights"], "bit for bit"
    weights = launches.weights(engine, scope)
    if scope == "process":
        other = "fsdp2" if engine == "ddp" else "ddp"
        for rank, same in zip(ranks, launches(other, scope), strict=True):
            assert_same_training([rank], same)
        expected, wanted = launches(other, scope)[0]["gradients"], launches.weights(other, scope)
    else:
        assert ranks[0]["drawn"] == ranks[1]["drawn"] == one["drawn"], "the same serials for the same slots"
        assert_same_training(ranks, one)
        expected, wanted = one["gradients"], one["weights"]
    np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-5)
    if not engine.startswith("zero"):  # which keeps gradients elsewhere
        for gradient, by_one in zip(ranks[0]["gradients"], expected, strict=True):
            assert np.linalg.norm(gradient - by_one) < 1e-5 * np.linalg.norm(by_one)


@pytest.mark.parametrize(("engine", "scope"), CELLS)
def test_resuming_is_bit_identical_with_an_engine(launches, engine, scope):
    """Whole weights, table, payload, generators and counters, of every rank."""
    resumed = launches(engine, f"{scope} resumed")
    assert launches.differences(engine, scope) == [[], []]
    assert [len(rank["steps"]) for rank in resumed] == [LAST - SAVED] * 2
    assert replayed(resumed) > 0, "of what the checkpoint held"


@pytest.mark.parametrize(("engine", "scope"), CELLS)
def test_an_engines_loss_of_replayed_rows_is_the_one_by_hand(launches, engine, scope):
    """From log-probs of the whole weights in a plain model, of each row without padding; after resuming, too."""
    check_by_hand(launches(engine, scope))
    check_by_hand(launches(engine, f"{scope} resumed"))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_on_an_engine_trains_replays_and_resumes(launches, engine):
    check_by_hand(launches(engine, "adapter"))
    check_by_hand(launches(engine, "adapter resumed"))
    assert launches.differences(engine, "adapter") == [[], []]
    trained, others = launches.weights(engine, "adapter"), launches.weights("ddp", "adapter")
    np.testing.assert_allclose(trained, others, rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forward_that_records_is_one_a_batch_on_every_rank_of_an_engine(launches, engine):
    ranks = launches(engine, "forward")
    assert [rank["forwards"] for rank in ranks] == [{"grad": LAST, "no grad": LAST}] * 2
    assert [rank["forwards"] for rank in launches(engine, "gathered")] == [{"grad": LAST}] * 2, "and none without it"
    check_by_hand(ranks)
    plain = launches.weights(engine, "gathered")
    np.testing.assert_allclose(launches.weights(engine, "forward"), plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_warm_starts_forwards_are_the_same_on_every_rank_of_an_engine(launches, engine):
    """Three groups of a file without log-probs, which are all that can be replayed, in two pieces of a batch each."""
    ranks = launches(engine, "warm start")
    assert [rank["forwards"] for rank in ranks] == [{"grad": 3, "no grad": 2}] * 2
    check_by_hand(ranks)


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_added_before_an_engine_can_make_a_forward_are_refused_with_the_remedy(launches, engine):
    """ZeRO 3 shards a model when it is loaded, and puts it together for a forward only once training has begun."""
    for rank in launches(engine, "added early"):
        if engine == "zero3":
            assert "replay_warm_start" in rank["told"]
        else:
            assert rank["told"] == "3", "groups"


@pytest.mark.parametrize("engine", ENGINES)
def test_with_nothing_to_replay_an_engine_trains_bit_for_bit_as_without(launches, engine):
    """Generation by the trainer on the engine's parameters, weights and numbers of forwards."""
    stock, idle = launches(engine, "stock"), launches(engine, "idle")
    assert replayed(idle) == 0
    assert idle[0]["counters"]["stored"] > 0
    for rank, without in zip(idle, stock, strict=True):
        assert rank["weights"] == without["weights"]
        assert rank["forwards"] == without["forwards"]


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_that_the_trainer_generates_on_an_engine_are_replayed(launches, engine):
    ranks = launches(engine, "generating")
    assert ranks[0]["hashes"] == ranks[1]["hashes"], "the same table on both ranks"
    check_by_hand(ranks)


def test_every_configuration_file_is_launched_and_named_on_the_page():
    files = {path.stem for path in (ROOT / "examples" / "accelerate").glob("*.yaml")}
    assert files == set(ENGINES) - {"ddp"}
    page = (ROOT / "docs" / "processes.md").read_text()
    assert set(re.findall(r"examples/accelerate/(\w+)\.yaml", page)) == files
