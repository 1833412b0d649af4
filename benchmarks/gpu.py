"""Costs of replay on a GPU: two minutes, without a network.

    python benchmarks/gpu.py > benchmarks/results/gpu.json
    python benchmarks/gpu.py --small    # a tiny model on a CPU: shows that it runs; its figures mean nothing

A random model of about 100 M parameters in bf16 with gradient checkpointing, 8 groups of 8 completions of 512 tokens,
half of the groups dead, so that every step stores and replays. Completions are scripted, so that all runs have the
same shapes. Measured: forwards that replay adds; the seam's share of a step, with the device synchronised before and
after it, and without; peak memory with replay and without.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from typing import Any, NamedTuple

import torch
from overhead import WARM_UP, Clock, Trained, in_the_seam, train

from trl_replay.testing import make_model, make_tokenizer


class Size(NamedTuple):
    """Sizes of everything."""

    hidden: int
    layers: int
    tokens: int
    steps: int
    """Of the runs that are timed."""
    long: int
    """Of the runs whose memory is looked at."""


LARGE = Size(hidden=768, layers=12, tokens=512, steps=30, long=60)
SMALL = Size(hidden=32, layers=2, tokens=12, steps=6, long=6)


def finished() -> float:
    """The time, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def trained(size: Size, steps: int, replay: dict[str, Any] | None, clock: Clock) -> Trained:
    """Trains with settings of replay, or stock (None)."""
    shape = {"intermediate_size": 4 * size.hidden, "max_position_embeddings": size.tokens + 16}
    model = make_model(make_tokenizer(), size.hidden, size.layers, **shape).to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    gc.collect()  # the last run's trainer, which has references in circles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return train(
        model,
        replay,
        clock,
        max_steps=steps,
        max_completion_length=size.tokens,
        learning_rate=1e-6,
        gradient_checkpointing=True,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
    )


def costs(size: Size) -> dict[str, Any]:
    """Forwards, time in the seam, and peak memory."""
    found: dict[str, Any] = {}
    for name, now in (("synchronised", finished), ("free running", time.perf_counter)):
        clocks = Clock(now), Clock(now)
        stock, replay = (
            trained(size, WARM_UP + size.steps, on, clock) for on, clock in zip((None, {}), clocks, strict=True)
        )
        step, with_replay = (clock.median(lambda step: step["step"]) for clock in clocks)
        inside = clocks[1].median(in_the_seam)
        found[name] = {
            "stock step, ms": step,
            "step with replay, ms": with_replay,
            "time in the seam, ms": inside,
            "share of a stock step": inside / step,
        }
        assert replay.session is not None
        found["forwards added"] = replay.forwards - stock.forwards
        found["groups replaced"] = replay.session.metrics["replay/replaced_fraction"]
        found["parameters"] = stock.trainer.model.num_parameters()
        del stock, replay
    peaks: dict[str, int] = {"steps": size.long}
    for name, settings in (("stock", None), ("replay", {})):
        trained(size, size.long, settings, Clock())
        peaks[name] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return found | {"peak memory, bytes": peaks}


def main(arguments: list[str] | None = None) -> int:
    """Measures, and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, on a CPU if there is no GPU")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        print("There is no CUDA device here: `--small` shows on a CPU that the benchmark runs.", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
    results = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "small": options.small,
        "costs": costs(SMALL if options.small else LARGE),
    }
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
