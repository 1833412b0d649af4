"""Costs of replay: forwards, time in the step, bytes held, and time in a large buffer.

    python benchmarks/overhead.py            # about 15 minutes on one core, nearly all of it for the time in the step
    python benchmarks/overhead.py --tables   # only large buffers: two minutes
    python benchmarks/overhead.py --bytes    # only what a stored token takes: ten seconds
    python benchmarks/overhead.py --quick    # a tiny model and few steps: its share of the step means nothing
    python benchmarks/overhead.py --counts   # what a step asks of a device, and calls: a minute
    python benchmarks/overhead.py --json

Where cpprb (Apache-2.0, `pip install --no-deps cpprb`) is installed, its prioritized buffer adds, samples and updates
as many entries as a large buffer does in the same run.

One process, one thread, on the CPU; times are CPU times of that process, so that other jobs disturb them less.
Completions are scripted (random letters, always full length), so that steps have the same shape in every run; half of
the groups are dead, so that every step stores and replays.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import wraps
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from trl_replay import Group, Session, attach, compat
from trl_replay.buffer.replay_buffer import Store
from trl_replay.serialization.groups import pack
from trl_replay.testing import make_model, make_tokenizer, make_trainer
from trl_replay.trainer.callback import ReplayCallback

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import waits

GROUPS, GENERATIONS, TOKENS = 8, 8, 128
PROMPTS = [f"{number}+{number * 37 % 1000}=" for number in range(100, 140)]
VOCABULARY = 151_000
WARM_UP = 4
SIZES = (1_000, 10_000, 100_000, 1_000_000)
CALLBACKS = ("on_optimizer_step", "on_step_end", "on_train_end")


@dataclass(frozen=True)
class Check:
    """One figure and the most it may be."""

    name: str
    value: float
    most: float
    unit: str
    detail: str

    @property
    def met(self) -> bool:
        """Tells whether the target is kept."""
        return self.value <= self.most


def timed(function: Callable[..., Any], clock: Counter[str], name: str) -> Callable[..., Any]:
    """`function`, whose time is added to `clock[name]`."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            clock[name] += time.process_time() - started

    return run


def scripted_trainer(clock: Counter[str]) -> type:
    """A subclass of the stock trainer that scripts completions; `clock` gets the time of the stock methods."""

    def generate(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        shape = (len(prompt_ids), self.args.max_completion_length)
        return torch.randint(20, len(self.processing_class), shape).tolist(), None

    methods = {name: timed(getattr(GRPOTrainer, name), clock, name) for name in compat.SEAM}
    methods["_generate_single_turn"] = timed(generate, clock, "generation")
    return type("ScriptedTrainer", (GRPOTrainer,), methods)


class Steps(TrainerCallback):
    """After each step, how much every part of the clock has advanced, and the wall time as "step"."""

    def __init__(self, clock: Counter[str]) -> None:
        self.clock = clock
        self.steps: list[dict[str, float]] = []
        self.last = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Keeps one step and starts the next."""
        now = time.process_time()
        self.steps.append({**self.clock, "step": now - self.last})
        self.clock.clear()
        self.last = now


def half_dead(completions: list[str], **_: Any) -> list[float]:
    """Rewards that make every second group dead."""
    return [float(row % 2 and row // GENERATIONS % 2) for row in range(len(completions))]


def run(
    replay: dict[str, Any] | None,
    steps: int,
    hidden: int,
    layers: int,
    tokens: int,
    groups: int = GROUPS,
    **settings: Any,
) -> dict[str, Any]:
    """Trains on scripted completions, with replay settings or stock (None).

    Returns:
        `steps`: each step's clock; `forwards`: of the policy and of the reference model; `session` or None.
    """
    clock: Counter[str] = Counter()
    model = make_model(make_tokenizer(), hidden, layers, intermediate_size=3 * hidden)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            half_dead,
            PROMPTS,
            scripted_trainer(clock),
            model,
            per_device_train_batch_size=groups * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=tokens,
            max_steps=steps,
            learning_rate=1e-5,
            gradient_checkpointing=False,
            **settings,
        )
        trainer.remove_callback(PrinterCallback)
        session = None if replay is None else attach(trainer, **replay)
        forwards = {"policy": 0, "reference": 0}
        for name, module in (("policy", trainer.model), ("reference", trainer.ref_model)):
            if module is not None:
                module.register_forward_hook(lambda *_, name=name: forwards.update({name: forwards[name] + 1}))
        if session:
            for name in ("settle", "_fill_slots"):
                setattr(session.step.decisions, name, timed(getattr(session.step.decisions, name), clock, name))
            for name in compat.SEAM:
                seam = trainer.__dict__[name]
                seam._around = timed(seam._around, clock, f"seam{name}")
            callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, ReplayCallback))
            for name in CALLBACKS:
                setattr(callback, name, timed(getattr(callback, name), clock, "seam_callback"))
            if session.buffer.capacity in SIZES:
                trainer.add_callback(Fill(session))
        watch = Steps(clock)
        trainer.add_callback(watch)
        with redirect_stdout(StringIO()):
            trainer.train()
    return {"steps": watch.steps, "forwards": forwards, "session": session, "parameters": model.num_parameters()}


def seam_time(step: dict[str, float]) -> float:
    """Time in the seam's functions and callbacks, less the stock methods that they call."""
    around = sum(step.get(f"seam{name}", 0.0) - step.get(name, 0.0) for name in compat.SEAM)
    return around + step.get("seam_callback", 0.0)


def forwards() -> list[Check]:
    """Forwards that replay adds to the same run, without and with a reference model."""
    checks = []
    for beta in (0.0, 0.04):
        stock, replay = (run(on, 6, 32, 2, 8, beta=beta)["forwards"] for on in (None, {}))
        added = sum(replay.values()) - sum(stock.values())
        detail = f"6 steps, stock {stock['policy']} + {stock['reference']} (policy + reference)"
        checks.append(Check(f"forwards added, beta={beta}", added, 0, "", detail))
    return checks


def bytes_held(tokens: int, count: int = 10_000) -> tuple[Store, list[Check]]:
    """A buffer of so many groups, of rows of so many random tokens; the bytes of a token that are told, and by how
    many times of what is told the process has grown. In a process that has freed much before, it grows by less."""
    rng, store = np.random.default_rng(0), Store(count, size=GENERATIONS)
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 10, np.int32)
    gc.collect()
    before = psutil.Process().memory_info().rss
    for serials in np.arange(count).reshape(-1, 4):
        store.append({"serial": serials}, rng)
        for serial in serials.tolist():
            tensors = {
                "prompt_ids": prompt,
                "completion_ids": rng.integers(0, VOCABULARY, GENERATIONS * tokens, np.int32),
                "advantages": rng.random(GENERATIONS, np.float32),
                "old_per_token_logps": rng.random(GENERATIONS * tokens, np.float32),
                "trl_replay_rewards": rng.random((GENERATIONS, 1), np.float32),
            }
            lengths = np.array([len(prompt)]), np.full(GENERATIONS, tokens)
            group = Group(
                {key: torch.from_numpy(array) for key, array in tensors.items()}, frozenset(tensors), *lengths
            )
            store.receive({serial: pack(group)})
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    held = f"{count:,} groups of {GENERATIONS} rows of {tokens} tokens, ids below {VOCABULARY:,}"
    told = store.nbytes / count / (len(prompt) + GENERATIONS * tokens)
    return store, [
        Check(f"bytes told a token at {tokens}", told, 8.4 if tokens >= 50 else 15, "", held),
        Check(f"the process's growth / bytes told at {tokens}", grown / store.nbytes, 1.2, "", held),
    ]


def step_share(quick: bool) -> list[Check]:
    """The seam's share of a stock step without generation."""
    shape = (64, 2) if quick else (320, 8)
    count = 12 if quick else 50
    stock = run(None, WARM_UP + count, *shape, TOKENS)
    replay = run({}, WARM_UP + count, *shape, TOKENS)
    plain = statistics.median(step["step"] - step["generation"] for step in stock["steps"][WARM_UP:])
    seam = statistics.median(seam_time(step) for step in replay["steps"][WARM_UP:])
    whole = statistics.median(step["step"] - step["generation"] for step in replay["steps"][WARM_UP:])
    metrics = replay["session"].metrics
    detail = (
        f"{seam * 1e3:.1f} ms of {plain * 1e3:.0f} ms stock ({whole * 1e3:.0f} ms with replay), "
        f"{replay['parameters'] / 1e6:.1f} M parameters, {GROUPS} x {GENERATIONS} x {TOKENS} tokens, medians of "
        f"{count}, {metrics['replay/replaced_fraction']:.0%} of the groups replaced"
    )
    return [Check("time in the seam / stock step without generation", 100 * seam / plain, 2, "%", detail)]


class Fill(TrainerCallback):
    """Fills the buffer after the second step, with entries like the first that training has stored."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tiles the first row: other serials, scores of a few levels, as binary rewards give, and 40 prompts, those
        of the run among them."""
        if state.global_step != 2:
            return
        buffer, rng = self.session.buffer, np.random.default_rng(0)
        count = buffer.capacity - len(buffer)
        columns = {name: np.repeat(getattr(buffer.table, name)[:1], count, axis=0) for name in buffer.table.names}
        prompts = np.unique(np.concatenate([buffer.table.prompt, rng.integers(2**62, size=len(PROMPTS))]))
        columns |= {"serial": np.arange(-count, 0), "score": rng.integers(1, 5, count).astype(float)}
        columns["prompt"] = rng.choice(prompts[-len(PROMPTS) :], count)
        buffer._store.append(columns, rng)
        for held in (buffer._store._payload, buffer._store._kind_of):
            held[-count:] = held[:1] * count  # one object: the time of large tables is measured, not main memory


ROWS = {"replay_sampler": "same_prompt", "replay_mixer": "inject", "replay_advantages": "joint"}
"""Single rows of the slot's own prompt, instead of whole groups."""


def settle_and_sample(size: int, count: int = 50, settings: Mapping[str, Any] = MappingProxyType({})) -> Check:
    """The session's own settle, sample and mix, with 8 newcomers and 8 slots a step in a full buffer."""
    groups = 16  # half of them dead
    done = run({"replay_buffer_size": size, **settings}, 3 + count, 32, 2, 8, groups)
    times = [1e3 * (step["settle"] + step["_fill_slots"]) for step in done["steps"][3:]]
    assert len(done["session"].buffer) == size
    detail = f"8 newcomers and 8 draws a step in a full buffer, median of {count}; slowest {max(times):.2f} ms"
    what = "settle + sample + mix" + (" (rows)" if settings else "")
    return Check(f"{what} at {size:,} entries", statistics.median(times), 3 + size / 10_000, "ms", detail)


def measured(act: Callable[[], Any], count: int = 50) -> float:
    """Median milliseconds of the process in `act`."""
    times = []
    for _ in range(count):
        started = time.process_time()
        act()
        times.append(1e3 * (time.process_time() - started))
    return statistics.median(times)


def peer(size: int) -> float | None:
    """Milliseconds in which cpprb's segment trees take 8 entries, draw 8 and change the priorities of these: no
    groups, prompts, limits or columns. None where it is not installed."""
    try:
        import cpprb
    except ImportError:
        return None
    rng = np.random.default_rng(0)
    buffer = cpprb.PrioritizedReplayBuffer(size, {"serial": {"dtype": np.int64}})
    buffer.add(serial=np.arange(size), priorities=0.1 + rng.random(size))

    def step() -> None:
        buffer.add(serial=np.arange(8), priorities=0.1 + rng.random(8))
        drawn = buffer.sample(8)
        buffer.update_priorities(drawn["indexes"], 0.1 + rng.random(8))

    return measured(step)


def tables(sizes: Sequence[int] = SIZES, count: int = 50) -> list[Check]:
    """Time in buffers of these sizes, and in cpprb's."""
    checks = [settle_and_sample(size, count) for size in sizes]
    for size in sizes:
        other = peer(size)
        if other is not None:
            detail = "adds 8, draws 8, updates 8, in C++; no limits, prompts, groups or columns"
            checks.append(Check(f"cpprb's prioritized buffer at {size:,} entries", other, 3, "ms", detail))
    return checks


def size_table(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of what `--tables --json` wrote, a row for each size, as Markdown."""
    found = {check["name"]: check["value"] for check in checks}
    lines = [
        "| entries | settle + sample + mix | times that at 1,000 | cpprb: add, draw, update |",
        "|---|---|---|---|",
    ]
    for size in SIZES:
        value = found[f"settle + sample + mix at {size:,} entries"]
        ratio = value / found[f"settle + sample + mix at {SIZES[0]:,} entries"]
        other = found[f"cpprb's prioritized buffer at {size:,} entries"]
        lines.append(f"| {size:,} | {value:.1f} ms | {ratio:.1f} | {other:.2f} ms |")
    return lines


COUNTED = (waits.WAIT, waits.LOSS, waits.UP, waits.PINNED, waits.CALL)
"""What `--counts` counts on a pretended device, in order."""


class Counts(TrainerCallback):
    """What each step has done to a device: replay's code, and the trainer's."""

    def __init__(self, device: waits.Device) -> None:
        self.device = device
        self.steps: list[tuple[Counter[str], Counter[str]]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Starts a step."""
        self.device.update += 1
        waits.OURS.clear()
        waits.THEIRS.clear()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Keeps it."""
        own = Counter({what: waits.ours(what) for what in (*COUNTED, waits.BEFORE)})
        self.steps.append((own, Counter(waits.THEIRS)))


def counted_steps(reward: Callable[..., Any], settings: Mapping[str, Any] | None, calls: bool) -> tuple[float, ...]:
    """A step's counts on a pretended device, or of calls in Python and C: replay's, or stock's without settings."""

    def generate(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        shape = (len(prompt_ids), self.args.max_completion_length)
        return torch.randint(20, len(self.processing_class), shape).tolist(), None

    trainer_class = type("Scripted", (GRPOTrainer if calls else waits.OnDevice,), {"_generate_single_turn": generate})
    replay = {name: value for name, value in (settings or {}).items() if name.startswith("replay_")}
    own = {name: value for name, value in (settings or {}).items() if name not in replay}
    count, warm, device = 16, 8, waits.Device()
    each, counter = Counts(device), waits.Calls()
    before = waits.transfer.mark, waits.transfer.pinned
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        trainer = make_trainer(
            folder,
            reward,
            PROMPTS,
            trainer_class,
            make_model(make_tokenizer(), 32, 2, intermediate_size=96),
            per_device_train_batch_size=GROUPS * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=16,
            max_steps=count,
            learning_rate=1e-5,
            gradient_checkpointing=False,
            **own,
        )
        trainer.remove_callback(PrinterCallback)
        if settings is not None:
            attach(trainer, **replay)
        if calls:
            trainer.add_callback(Profile(counter, warm))
            trainer.train()
            return ((counter.theirs if settings is None else counter.ours) / (count - warm),)
        trainer.add_callback(each)
        device.install(setattr)
        try:
            trainer.train()
        finally:
            waits.transfer.mark, waits.transfer.pinned = before
    steps = [theirs if settings is None else ours for ours, theirs in each.steps[warm:]]
    return tuple(statistics.fmean(step[what] for step in steps) for what in (*COUNTED, waits.BEFORE))


class Profile(TrainerCallback):
    """Counts calls from a step on."""

    def __init__(self, counter: waits.Calls, first: int) -> None:
        self.counter, self.first = counter, first

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts, and stops at the end of training."""
        if state.global_step == self.first:
            self.counter.__enter__()
        if state.global_step == state.max_steps:
            self.counter.__exit__()


def all_live(completions: list[str], **_: Any) -> list[float]:
    """Rewards that leave no group dead."""
    return [float(row % 2) for row in range(len(completions))]


def counts() -> Table:
    """What a step does, with stock beside it: acting, idle, and an update of the preset `sample_efficient`."""
    efficient = {"num_iterations": 2, "beta": 0.1, "replay_preset": "sample_efficient"}
    runs: dict[str, tuple[Callable[..., Any], Mapping[str, Any] | None]] = {
        "stock": (half_dead, None),
        "acting": (half_dead, {}),
        "idle": (all_live, {}),
        "sample_efficient, an update": (half_dead, efficient),
    }
    table = Table(title=f"a step on a pretended device, {GROUPS} groups of {GENERATIONS} rows")
    for column in ("", *runs):
        table.add_column(column)
    columns = [counted_steps(*run, False) + counted_steps(*run, True) for run in runs.values()]
    names = (*COUNTED, waits.BEFORE, "calls in Python and C")
    for name, *numbers in zip(names, *columns, strict=True):
        table.add_row(name, *(f"{number:,.1f}" for number in numbers))
    return table


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and returns 0 whether or not the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="only the time in large buffers")
    parser.add_argument("--bytes", action="store_true", help="only the bytes of a token, told and in the process")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--counts", action="store_true", help="only what a step asks of a device, and calls")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
    if options.counts:
        Console(width=None if sys.stdout.isatty() else 140).print(counts())
        return 0
    bytes_held(7, 400)  # what torch and NumPy take at first is no buffer's
    kept, held = zip(*(bytes_held(tokens) for tokens in (7, 50)), strict=True)
    checks = [*itertools.chain(*held)]
    del kept
    if not options.bytes:
        checks += [*tables(), settle_and_sample(100_000, settings=ROWS)]
    if not (options.bytes or options.tables):
        checks += [*forwards(), *step_share(options.quick)]
    if options.json:
        rows = [{**vars(check), "met": check.met} for check in checks]
        print(json.dumps({"quick": options.quick, "checks": rows}, indent=1))
        return 0
    table = Table(title="overhead" + (" (QUICK: the share of the step means nothing)" if options.quick else ""))
    for column in ("what", "value", "target", "", "how"):
        table.add_column(column)
    for check in checks:
        verdict = "PASS" if check.met else "MISSED"
        unit = f" {check.unit}" if check.unit else ""
        table.add_row(check.name, f"{check.value:.2f}{unit}", f"≤ {check.most}{unit}", verdict, check.detail)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
