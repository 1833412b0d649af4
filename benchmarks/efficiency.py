"""Compares corrections, buffers and numbers of updates a completion at the same number of completions.

    python benchmarks/efficiency.py --jobs 2              # all of it: hours
    python benchmarks/efficiency.py --questions parts     # the preset without one of its parts
    python benchmarks/efficiency.py --questions sums      # several reward functions, and which of them counts
    python benchmarks/efficiency.py --quick               # shows that it runs; its figures mean nothing

Tasks: those of benchmarks/papers.py; the wide lock (1,000 prompts); long, whose right answers are 18 letters; and
digits, addition with a grade for each digit (dense). sum is the lock with a format and a length term beside accuracy,
by which it is told. On the sparse tasks, an arm's learning rate is that which it chose on the lock.
"""

from __future__ import annotations

import sys
from typing import Any

from toys import Benchmark, Settings, Task, parser_of

SEEDS = (0, 1, 2, 3, 4)
SEEDS_OF_PARTS = SEEDS[:3]
PARTS = ("lock", "vault")
"""On which tasks the preset is run without its parts."""
TASKS = {
    "lock": Task(32_000, (3e-4, 5e-4, 1e-3), (100, 101)),
    "wide lock": Task(32_000, (), rates_from="lock"),
    "vault": Task(32_000, (), rates_from="lock"),
    "addition": Task(12_800, (1e-5, 3e-5, 1e-4), (100,)),
    "grades": Task(9_600, (1e-4, 3e-4, 1e-3), (100,)),
    "long": Task(32_000, (), rates_from="lock"),
    "digits": Task(9_600, (), rates_from="addition"),
    "sum": Task(32_000, (3e-4, 5e-4, 1e-3), (100, 101)),
}
TOPR = {"replay_correction": "topr"}
FIVE = {"num_iterations": 5}
ARMS: dict[str, tuple[Settings, dict[str, Any]]] = {
    "stock": (None, {}),
    "stock, 5 iterations": (None, FIVE),
    "defaults": ({}, {}),
    "sample_efficient": ({"replay_preset": "sample_efficient"}, {**FIVE, "beta": 2.0}),
    "topr, start=0": ({**TOPR, "replay_start": 0}, {}),
    "topr": (TOPR, {}),
    "truncated": ({"replay_correction": "truncated"}, {}),
    "sequence_mask": ({"replay_correction": "sequence_mask"}, {}),
    "buffer_size=256": ({"replay_buffer_size": 256}, {}),
    "refill_rounds=1": ({"replay_refill": "new(rounds=1)"}, {}),
    "topr, refill_rounds=1": ({**TOPR, "replay_refill": "new(rounds=1)"}, {}),
}
PRESET = {"replay_preset": "sample_efficient"}
ANCHOR = {"beta": 2.0}
LEFT_OUT: dict[str, tuple[Settings, dict[str, Any]]] = {
    "sample_efficient": (PRESET, {**FIVE, **ANCHOR}),
    "ratio for topr": ({**PRESET, "replay_correction": "ratio"}, {**FIVE, **ANCHOR}),
    "2 iterations": (PRESET, {"num_iterations": 2, **ANCHOR}),
    "4 iterations": (PRESET, {"num_iterations": 4, **ANCHOR}),
    "4 iterations, least_used": ({**PRESET, "replay_sampler": "least_used"}, {"num_iterations": 4, **ANCHOR}),
    "the same batch again": ({**PRESET, "replay_iterations": "same"}, {**FIVE, **ANCHOR}),
    "no anchor": ({**PRESET, "replay_kl": "all"}, FIVE),
    "no balance": ({**PRESET, "replay_sampler": "uniform", "replay_evictor": "fifo"}, {**FIVE, **ANCHOR}),
    "age at most 5": ({**PRESET, "replay_max_age": 5}, {**FIVE, **ANCHOR}),
}
"""The preset, and what is left of it without one of its parts, at the preset's own rate."""
SUMS: dict[str, tuple[Settings, dict[str, Any]]] = {
    "stock": (None, {}),
    "defaults": ({}, {}),
    "replay_reward": ({"replay_reward": "reward"}, {}),
    "low_std": ({"replay_selector": "low_std", "replay_record": "loss"}, {}),  # as it was measured
}
"""Ways to replay where the sum of the reward functions is hardly ever equal over a group."""
QUESTIONS: dict[str, dict[str, Any]] = {
    "arms": {"arms": ARMS, "tasks": [task for task in TASKS if task != "sum"]},
    "parts": {"arms": LEFT_OUT, "tasks": PARTS, "seeds": SEEDS_OF_PARTS, "chosen_by": "sample_efficient"},
    "sums": {"arms": SUMS, "tasks": ["sum"]},
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parser_of(__doc__, "efficiency", QUESTIONS).parse_args(arguments)
    benchmark = Benchmark(TASKS, SEEDS, lambda arm, *_: (ARMS | LEFT_OUT | SUMS)[arm], options)
    for question in options.questions:
        benchmark.at_chosen_rates(**QUESTIONS[question])

    from efficiency_report import tables

    print("\n\n".join("\n".join(rows) for rows in tables([*benchmark.ledger.records.values()])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
