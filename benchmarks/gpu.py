"""Costs and correctness of replay on a GPU: one command of under ten minutes, without a network.

    python benchmarks/gpu.py            # writes benchmarks/results/gpu.json
    python benchmarks/gpu.py --costs    # only the costs, with memory over 60 steps: two minutes
    python benchmarks/gpu.py --small    # a tiny model on a CPU: shows that it runs; its figures mean nothing

A random model of about 100 M parameters in bf16 with gradient checkpointing, 8 groups of 8 completions of 512 tokens,
half of the groups dead, so that every step stores and replays. Completions are scripted, so that all runs have the
same shapes. Measured: forwards that replay adds; the seam's share of a step, with the device synchronised before and
after it, and without; peak memory over 200 steps with replay and without; whether training with a buffer that changes
nothing is bit-identical to stock's.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products of matrices that come out the same every time

import argparse
import gc
import hashlib
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import wraps
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

from trl_replay import attach, compat
from trl_replay.testing import make_model, make_tokenizer, make_trainer

RESULTS = Path(__file__).parent / "results" / "gpu.json"
WARM_UP = 4
ROWS_A_PROMPT = 8


@dataclass(frozen=True)
class Size:
    """Sizes of everything."""

    hidden: int
    layers: int
    tokens: int
    steps: int  # of the runs that are timed
    long: int  # of the runs whose memory is looked at


LARGE = Size(hidden=768, layers=12, tokens=512, steps=30, long=200)
SMALL = Size(hidden=32, layers=2, tokens=12, steps=6, long=6)


def half_dead(completions: list[str], **_: Any) -> list[float]:
    """Rewards that make every second group dead."""
    return [float(row % 2 and row // ROWS_A_PROMPT % 2) for row in range(len(completions))]


def all_live(completions: list[str], **_: Any) -> list[float]:
    """Rewards with which nothing is replaced."""
    return [float(row % 2) for row in range(len(completions))]


class Clock:
    """Wall time by name; with `waits` the device has finished before each measurement begins and ends."""

    def __init__(self, waits: bool) -> None:
        self.waits = waits and torch.cuda.is_available()
        self.spent: Counter[str] = Counter()
        self.steps: list[Counter[str]] = []

    def now(self) -> float:
        """The time, once the device has done what it was given."""
        if self.waits:
            torch.cuda.synchronize()
        return time.perf_counter()

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


class Steps(TrainerCallback):
    """Keeps what each step took."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.began = clock.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """One step is over."""
        now = self.clock.now()
        self.clock.steps.append(self.clock.spent + Counter({"step": now - self.began}))
        self.clock.spent = Counter()
        self.began = now


def scripted(clock: Clock) -> type:
    """The stock trainer with completions of random letters, always of full length."""

    def generate(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        shape = (len(prompt_ids), self.args.max_completion_length)
        return torch.randint(20, len(self.processing_class), shape).tolist(), None

    methods = {name: clock.timed(getattr(GRPOTrainer, name), name) for name in compat.SEAM}
    methods["_generate_single_turn"] = generate
    return type("ScriptedTrainer", (GRPOTrainer,), methods)


def train(
    size: Size,
    steps: int,
    replay: dict[str, Any] | None,
    rewards: Callable[..., list[float]] = half_dead,
    waits: bool = False,
    attention: str = "sdpa",
) -> dict[str, Any]:
    """Trains with settings of replay, or stock (None)."""
    on_gpu = torch.cuda.is_available()
    clock = Clock(waits)
    tokenizer = make_tokenizer()
    shape = {"intermediate_size": 4 * size.hidden, "max_position_embeddings": size.tokens + 16}
    model = make_model(tokenizer, size.hidden, size.layers, **shape).to(torch.bfloat16)
    model.set_attn_implementation(attention)
    prompts = [f"{number}+{number * 37 % 1000}=" for number in range(100, 140)]
    gc.collect()  # the last run's trainer, which has references in circles
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        trainer = make_trainer(
            folder,
            rewards,
            prompts,
            scripted(clock),
            model,
            per_device_train_batch_size=8 * ROWS_A_PROMPT,
            num_generations=ROWS_A_PROMPT,
            max_completion_length=size.tokens,
            max_steps=steps,
            learning_rate=1e-6,
            gradient_checkpointing=True,
            bf16=True,
            use_cpu=not on_gpu,
        )
        trainer.remove_callback(PrinterCallback)
        session = None if replay is None else attach(trainer, **replay)
        forwards: Counter[str] = Counter()
        trainer.model.register_forward_hook(lambda *_: forwards.update(policy=1))
        if session is not None:
            for name in compat.SEAM:
                seam = trainer.__dict__[name]
                seam._around = clock.timed(seam._around, f"seam{name}")
        trainer.add_callback(Steps(clock))
        trainer.train()
    digest = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {
        "forwards": forwards["policy"],
        "peak": torch.cuda.max_memory_allocated() if on_gpu else None,
        "weights": digest.hexdigest(),
        "parameters": model.num_parameters(),
        "steps": clock.steps[WARM_UP:] or clock.steps,
        "metrics": {} if session is None else dict(session.metrics),
    }


def seam(step: Counter[str]) -> float:
    """Seconds in the seam, less those in the stock methods that it calls."""
    return sum(step[f"seam{name}"] - step[name] for name in compat.SEAM)


def costs(size: Size) -> dict[str, Any]:
    """Forwards, time in the seam, and peak memory."""
    found: dict[str, Any] = {}
    for waits in (True, False):
        stock = train(size, WARM_UP + size.steps, None, waits=waits)
        replay = train(size, WARM_UP + size.steps, {}, waits=waits)
        step = statistics.median(each["step"] for each in stock["steps"])
        inside = statistics.median(map(seam, replay["steps"]))
        found["synchronised" if waits else "free running"] = {
            "stock step, ms": 1e3 * step,
            "step with replay, ms": 1e3 * statistics.median(each["step"] for each in replay["steps"]),
            "time in the seam, ms": 1e3 * inside,
            "share of a stock step": inside / step,
        }
        found["forwards added"] = replay["forwards"] - stock["forwards"]
        found["groups replaced"] = replay["metrics"]["replay/replaced_fraction"]
        found["parameters"] = stock["parameters"]
    peaks = {name: train(size, size.long, settings)["peak"] for name, settings in (("stock", None), ("replay", {}))}
    found["peak memory, bytes"] = {**peaks, "steps": size.long}
    return found


def idle(size: Size) -> dict[str, bool]:
    """Tells whether weights are bit-identical to stock's where replay changes nothing. Fused attention would differ
    from one run of stock to the next."""
    steps = min(size.steps, 8)

    def weights(replay: dict[str, Any] | None, rewards: Callable[..., list[float]]) -> str:
        return str(train(size, steps, replay, rewards, attention="eager")["weights"])

    stock, dead = weights(None, all_live), weights(None, half_dead)
    return {
        "stock repeats itself": stock == weights(None, all_live),
        "nothing to replace": stock == weights({}, all_live),
        "dry run": dead == weights({"replay_dry_run": True}, half_dead),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes JSON; fails where training that nothing should change was changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, on a CPU if there is no GPU")
    parser.add_argument("--costs", action="store_true", help="measure costs alone, with fewer steps for memory")
    parser.add_argument("--out", type=Path, help="the JSON to write: benchmarks/results/gpu.json if not --small")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        print("There is no CUDA device here: `--small` shows on a CPU that the benchmark runs.", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
    size = SMALL if options.small else LARGE
    began = time.perf_counter()
    results = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "small": options.small,
    }
    same: dict[str, bool] = {}
    if options.costs:
        results["costs"] = costs(replace(size, long=min(size.long, 60)))
    else:
        same = idle(size)
        results |= {"idle training is bit-identical": same, "costs": costs(size)}
    results["seconds"] = round(time.perf_counter() - began, 1)
    text = json.dumps(results, indent=1)
    print(text)
    path = options.out or (None if options.small else RESULTS)
    if path is not None:
        path.write_text(text + "\n")
    return 0 if all(same.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
