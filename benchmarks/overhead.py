"""Costs of replay on a CPU: forwards, time in the step, and bytes held.

    python benchmarks/overhead.py > benchmarks/results/overhead.json    # ten minutes on one core, for the time
    python benchmarks/overhead.py --bytes    # only what a stored token takes: ten seconds

One process, one thread; times are CPU times of that process, so that other jobs disturb them less. Completions are
scripted (random letters, always full length), so that steps have the same shape in every run; half of the groups are
dead, so that every step stores and replays.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import wraps
from io import StringIO
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from trl_replay import Group, Session, attach, compat
from trl_replay.buffer.replay_buffer import Store
from trl_replay.serialization.groups import pack
from trl_replay.testing import make_model, make_tokenizer, make_trainer
from trl_replay.trainer.callback import ReplayCallback

GROUPS, GENERATIONS, TOKENS = 8, 8, 128
PROMPTS = [f"{number}+{number * 37 % 1000}=" for number in range(100, 140)]
VOCABULARY = 151_000
WARM_UP = 4
CALLBACKS = ("on_optimizer_step", "on_step_end", "on_train_end")


class Check(NamedTuple):
    """One figure."""

    name: str
    value: float
    detail: str


class Clock:
    """Time by name, in each step."""

    def __init__(self, now: Callable[[], float] = time.process_time) -> None:
        self.now = now
        self.spent: Counter[str] = Counter()
        self.steps: list[Counter[str]] = []

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`function`, whose time is added to `name`."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            began = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[name] += self.now() - began

        return run

    def median(self, part: Callable[[Counter[str]], float], warm_up: int = WARM_UP) -> float:
        """Milliseconds of a part of the steps after the warm-up."""
        return 1e3 * statistics.median(map(part, self.steps[warm_up:]))


class Steps(TrainerCallback):
    """Keeps what each step took, as a whole in "step"."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.began = clock, clock.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """One step is over."""
        now = self.clock.now()
        self.clock.steps.append(self.clock.spent + Counter(step=now - self.began))
        self.clock.spent, self.began = Counter(), now


def without_generation(step: Counter[str]) -> float:
    """Time of a step, but for its scripted generation."""
    return step["step"] - step["generation"]


def in_the_seam(step: Counter[str]) -> float:
    """Time in the seam's functions and callbacks, less the stock methods that they call."""
    return step["callbacks"] + sum(step[f"seam{name}"] - step[name] for name in compat.SEAM)


def of_full_length(trainer: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
    """In the place of generation: random letters."""
    shape = (len(prompt_ids), trainer.args.max_completion_length)
    return torch.randint(20, len(trainer.processing_class), shape).tolist(), None


def half_dead(size: int) -> Callable[..., list[float]]:
    """Rewards that make every second group of this size dead."""
    return lambda completions, **_: [float(row % 2 and row // size % 2) for row in range(len(completions))]


class Trained(NamedTuple):
    """What is left of a run."""

    trainer: Any
    session: Session | None
    forwards: int
    """Of the policy and of the reference model."""


def train(
    model: Any,
    replay: dict[str, Any] | None,
    clock: Clock,
    generate: Callable[..., Any] = of_full_length,
    callbacks: Iterable[TrainerCallback] = (),
    size: int = GENERATIONS,
    **settings: Any,
) -> Trained:
    """Trains on scripted completions, with settings of replay or stock (None); the clock gets what each step took."""
    methods = {name: clock.timed(getattr(GRPOTrainer, name), name) for name in compat.SEAM}
    methods["_generate_single_turn"] = clock.timed(generate, "generation")
    forwards: list[Any] = []
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        trainer_class = type("ScriptedTrainer", (GRPOTrainer,), methods)
        settings = {"per_device_train_batch_size": GROUPS * size, "learning_rate": 1e-5, **settings}
        trainer = make_trainer(
            folder, half_dead(size), PROMPTS, trainer_class, model, num_generations=size, **settings
        )
        trainer.remove_callback(PrinterCallback)
        session = None if replay is None else attach(trainer, **replay)
        for module in filter(None, (trainer.model, trainer.ref_model)):
            module.register_forward_hook(lambda *_: forwards.append(None))
        if session:
            for name in compat.SEAM:
                seam = trainer.__dict__[name]
                seam._around = clock.timed(seam._around, f"seam{name}")
            callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, ReplayCallback))
            for name in CALLBACKS:
                setattr(callback, name, clock.timed(getattr(callback, name), "callbacks"))
        for one in (Steps(clock), *callbacks):
            trainer.add_callback(one)
        trainer.train()
    return Trained(trainer, session, len(forwards))


def forwards() -> list[Check]:
    """Forwards that replay adds to the same run, without and with a reference model."""
    checks = []
    for beta in (0.0, 0.04):
        settings = {"max_steps": 6, "max_completion_length": 8, "beta": beta}
        stock, replay = (train(make_model(make_tokenizer()), on, Clock(), **settings) for on in (None, {}))
        detail = f"6 steps, stock {stock.forwards}"
        checks.append(Check(f"forwards added, beta={beta}", replay.forwards - stock.forwards, detail))
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
        Check(f"bytes told a token at {tokens}", told, held),
        Check(f"the process's growth / bytes told at {tokens}", grown / store.nbytes, held),
    ]


def step_share(hidden: int = 320, layers: int = 8, count: int = 50) -> list[Check]:
    """The seam's share of a stock step without generation, in percent."""
    stock, replay = Clock(), Clock()
    for settings, clock in ((None, stock), ({}, replay)):
        model = make_model(make_tokenizer(), hidden, layers, intermediate_size=3 * hidden)
        done = train(model, settings, clock, max_steps=WARM_UP + count, max_completion_length=TOKENS)
    assert done.session is not None
    plain, seam = stock.median(without_generation), replay.median(in_the_seam)
    detail = (
        f"{seam:.1f} ms of {plain:.0f} ms stock ({replay.median(without_generation):.0f} ms with replay), "
        f"{model.num_parameters() / 1e6:.1f} M parameters, {GROUPS} x {GENERATIONS} x {TOKENS} tokens, medians of "
        f"{count}, {done.session.metrics['replay/replaced_fraction']:.0%} of the groups replaced"
    )
    return [Check("time in the seam / stock step without generation", 100 * seam / plain, detail)]


def main(arguments: list[str] | None = None) -> int:
    """Measures, and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true", help="only the bytes of a token, told and in the process")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
    bytes_held(7, 400)  # what torch and NumPy take at first is no buffer's
    (kept, short), (_, long) = bytes_held(7), bytes_held(50)
    checks = [*short, *long]
    del kept  # until here, as the process grows by less where much was freed
    if not options.bytes:
        checks += [*forwards(), *step_share()]
    print(json.dumps({"checks": [check._asdict() for check in checks]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
