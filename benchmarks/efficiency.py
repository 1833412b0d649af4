"""Compares corrections, buffers and numbers of updates a completion at the same number of completions.

    python benchmarks/efficiency.py --jobs 2          # all of it: hours
    python benchmarks/efficiency.py --arms "defaults;sample_efficient" --tasks lock,vault
    python benchmarks/efficiency.py --question parts --tasks lock,vault    # the preset without one of its parts
    python benchmarks/efficiency.py --question sums   # several reward functions, and which of them counts
    python benchmarks/efficiency.py --quick           # shows that it runs; its figures mean nothing

Tasks: those of benchmarks/papers.py; the wide lock (1,000 prompts); long, whose right answers are 18 letters; and
digits, addition with a grade for each digit (dense). sum is the lock with a format and a length term beside accuracy,
by which it is told. Every arm has a learning rate of its own on each task, chosen by
final reward on seeds that are not reported; on the sparse tasks that which it chose on the lock. Records are appended
to runs.jsonl in --out, so that an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import budget
import papers  # sets the threads before torch is imported
from learning import Ledger, Settings

SEEDS = (0, 1, 2, 3, 4)
SEEDS_OF_PARTS = SEEDS[:3]
PARTS = ("lock", "vault")
"""On which tasks the preset is run without its parts."""
TASKS = {
    "lock": papers.Task(32_000, (3e-4, 5e-4, 1e-3), (100, 101)),
    "wide lock": papers.Task(32_000, (), rates_from="lock"),
    "vault": papers.Task(32_000, (), rates_from="lock"),
    "addition": papers.Task(12_800, (1e-5, 3e-5, 1e-4), (100,)),
    "grades": papers.Task(9_600, (1e-4, 3e-4, 1e-3), (100,)),
    "long": papers.Task(32_000, (), rates_from="lock"),
    "digits": papers.Task(9_600, (), rates_from="addition"),
    "sum": papers.Task(32_000, (3e-4, 5e-4, 1e-3), (100, 101)),
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
ARMS_OF = {"arms": ARMS, "parts": LEFT_OUT, "sums": SUMS}


def formatted(completions: list[str], **_: Any) -> list[float]:
    """1 for two letters."""
    return [float(len(text) == 2 and text.isalpha()) for text in completions]


def length(completions: list[str], **_: Any) -> list[float]:
    """Up to 0.1 for a short text: letters later in the alphabet are longer."""
    return [0.1 - sum(map("abcdefghijklmnop".find, text)) / 300 for text in completions]


def make_trainer(job: papers.Job, folder: str) -> Any:
    """The task's trainer, with more updates than the completions can last for."""
    steps = (job.budget // papers.COMPLETIONS_A_BATCH + 1) * job.training.get("num_iterations", 1)
    if job.task == "digits":
        import addition
        import vaults

        rewards = vaults.share_of_letters
        return addition.make_trainer(job.seed, job.learning_rate, steps, folder, rewards, **job.training)
    if job.task == "sum":
        import lock

        rewards = [formatted, lock.reward, length]
        return lock.make_trainer(job.seed, job.learning_rate, steps, folder, rewards=rewards, **job.training)
    if job.task in ("wide lock", "long"):
        import vaults

        vault = vaults.WIDE_LOCK if job.task == "wide lock" else vaults.LONG
        return vaults.make_trainer(vault, job.seed, job.learning_rate, steps, folder, **job.training)
    return papers.make_trainer(job, folder)


def perform(job: papers.Job) -> dict[str, Any]:
    """Runs one job in this process and returns its record."""
    result, record = budget.trained(job, make_trainer)
    return {
        **result,
        "reached_three_quarters": budget.reached(record.reward, record.rollouts_at, 0.75),
        "updates": len(record.reward) * job.training.get("num_iterations", 1),
        "curve": [round(value, 4) for value in record.curve(25)],
        "replay": {name: round(value, 5) for name, value in record.means.items()},
    }


class Benchmark(papers.Benchmark):
    """Runs each arm with settings of the trainer's besides."""

    def jobs(self, task: str, arm: str, rate: float, seeds: Any, **training: Any) -> list[papers.Job]:
        """One for each seed."""
        settings, more = (ARMS | LEFT_OUT | SUMS)[arm]
        budget = self.tasks[task].budget
        return [papers.Job(task, arm, rate, seed, budget, settings, {**more, **training}) for seed in seeds]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = papers.parser_of(__doc__, "out/efficiency", TASKS)
    parser.add_argument("--arms", default="", help="which arms, by semicolons; all of the question's if not given")
    parser.add_argument("--question", choices=ARMS_OF, default="arms", help="what is compared")
    options = parser.parse_args(arguments)
    sums = options.question == "sums"
    tasks = papers.tasks_of("sum" if sums else options.tasks, {n: t for n, t in TASKS.items() if sums == (n == "sum")})
    parts = options.question == "parts"
    seeds = SEEDS_OF_PARTS if parts else SEEDS
    if options.quick:
        tasks = {name: papers.Task(640, (3e-4,), (100,)) for name in tasks}
        seeds = SEEDS[:1]
    options.out.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(Ledger(options.out / "runs.jsonl", perform), options.jobs, tasks, seeds)

    from efficiency_report import table

    records: list[dict[str, Any]] = []
    of_question = ARMS_OF[options.question]
    for arm in options.arms.split(";") if options.arms else of_question:
        records += benchmark.at_chosen_rates([arm], "sample_efficient" if parts else "")
        (options.out / "table.md").write_text("\n".join(table(records, of_question)) + "\n")
    print("\n".join(table(records, of_question)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
