"""The methods of papers, what they give on four tasks, and what of it holds, for benchmarks/reports/papers.md.

    python benchmarks/papers.py                               # all of it: hours on one core
    python benchmarks/papers.py --questions methods age       # some of it
    python benchmarks/papers.py --quick                       # shows that it runs; its figures mean nothing

Tasks: the combination lock (8 prompts), the vault (10,000 prompts, none of which comes twice), both with rewards of 0
and 1 and 3 % of the groups live at first; addition (a third live); and grades (1,000 prompts, rewards of 0, 1/3, 2/3
and 1, most groups live). Every run of a task ends when it has generated the same number of completions.

Questions:
    methods   POPO, its stale ablation, no correction, DAPO's refill, filtering, RL-ZVP and sign advantages beside
              stock and the defaults. For each, the learning rate is chosen from a grid by final reward on seeds that
              are not reported: on the lock for both sparse tasks, on each of the others for itself.
    presets   every other preset of trl-replay-papers, each at rates of its own, chosen likewise
    age       replay_max_age x learning rate x num_iterations, on the lock and on addition
    defaults  one setting of the defaults changed, at the rates of the defaults, on all four tasks
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from toys import Benchmark, Job, Record, Settings, Task, parser_of

SEEDS = (0, 1, 2)
TASKS = {
    "lock": Task(32_000, (3e-4, 5e-4, 1e-3), (100, 101)),
    "vault": Task(32_000, (), rates_from="lock"),
    "addition": Task(12_800, (3e-5, 1e-4), (100,)),
    "grades": Task(9_600, (3e-4, 1e-3), (100,)),
}
METHODS = ("stock", "defaults", "popo", "popo_stale", "no correction", "dapo", "filter", "rl_zvp", "sign_advantage")
"""Arms of the first question."""
OTHER_PRESETS = (
    "adv_per",
    "fresh_per",
    "dots_rr",
    "m2po",
    "ragen2",
    "repo",
    "exgrpo",
    "arpo",
    "gfpo",
    "greso",
    "bapo",
    "fair_er",
    "rlep",
    "luffy",
)
TAUGHT = ("rlep", "luffy")
"""They replay rows of a file: here the right answers to the first 4,096 prompts."""
TRAINING: dict[str, dict[str, Any]] = {"fair_er": {"num_iterations": 2}}
"""Settings of `GRPOConfig` that an arm has besides."""
TEACHER = "out/papers/teacher {} {}.jsonl"
"""Of a task and a seed."""
AGES = (1, 3, 10, 30, None)
AGE_RATES = {"lock": (3e-4, 5e-4, 1e-3), "addition": (3e-5, 1e-4, 3e-4)}
VARIANTS: dict[str, dict[str, Any]] = {
    "weight=0.5": {"replay_weight": 0.5},
    "max_fraction=0.5": {"replay_max_fraction": 0.5},
    "buffer_size=16": {"replay_buffer_size": 16},
    "buffer_size=256": {"replay_buffer_size": 256},
    "start=0": {"replay_start": 0},
}


def settings_of(arm: str) -> Settings:
    """An arm's settings, a preset's spelt out: a preset that changes makes other runs."""
    if arm == "stock":
        return None
    if arm == "defaults":
        return {}
    if arm == "no correction":
        return {"replay_correction": "none"}
    if arm in VARIANTS:
        return VARIANTS[arm]
    from trl_replay.registry import registry

    plugin, preset = registry().preset(arm)
    return {"replay_plugins": [plugin.name], **preset.settings}


def with_file(arm: str, task: str, seed: int) -> tuple[Settings, dict[str, Any]]:
    """An arm's settings, with the file of the task and seed where it replays one, and those of the trainer."""
    settings = settings_of(arm)
    if arm in TAUGHT:
        of_file = {"replay_warm_start": TEACHER.format(task, seed), "replay_warm_start_short": "resample"}
        settings = {**(settings or {}), **of_file}
    return settings, TRAINING.get(arm, {})


def age(benchmark: Benchmark) -> list[Record]:
    """One seed that nothing else reports. At less than a batch's updates, a group is too old when first offered."""
    jobs = [
        Job(
            task,
            f"max_age={most}",
            rate,
            100,
            benchmark.tasks[task].budget,
            {} if most is None else {"replay_max_age": most},
            {} if iterations == 1 else {"num_iterations": iterations},
        )
        for task, rates in AGE_RATES.items()
        for iterations in (1, 2)
        for rate in rates
        for most in AGES
        if most is None or most >= iterations
    ]
    return benchmark.run(jobs)


QUESTIONS: dict[str, Callable[[Benchmark], list[Record]]] = {
    "methods": lambda benchmark: benchmark.at_chosen_rates(METHODS),
    "age": age,
    "defaults": lambda benchmark: benchmark.at_chosen_rates(VARIANTS, chosen_by="defaults"),
    "presets": lambda benchmark: benchmark.at_chosen_rates(OTHER_PRESETS),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parser_of(__doc__, "papers", QUESTIONS).parse_args(arguments)
    benchmark = Benchmark(TASKS, SEEDS, with_file, options)
    answers = {question: QUESTIONS[question](benchmark) for question in options.questions}

    from papers_report import summarize

    summarize(answers, benchmark.chosen, options.out, options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
