"""Does replay hold its gain on answers of 12 to 128 tokens, and with which correction? A tiny model on a CPU.

Twelve prompts come again. An answer is up to M letters of free thought, `*`, and two letters that are right or wrong.
Thoughts have no part in the reward: tasks of different M differ in length alone. Before RL, the model is taught the
form, and a random taste for wrong codes; the right one gets 6 %. Arms, rates, seeds, and their order are those of
plans/long_answers.md.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import alone  # noqa: F401
import completions
import lock
import numpy as np
import torch
import when_it_pays as study
from learning_rates import best_of, ends
from runs import Done, Run, Study
from transformers import PrinterCallback

import trl_replay
from trl_replay.testing import make_model, make_tokenizer

KEYS, THOUGHTS, LETTERS, RIGHT = 12, "abcdefgh", "uvwx", 0.06
CODES = [one + other for one in LETTERS for other in LETTERS]
PROMPT = 3
"""Tokens of a prompt."""
FAILURES = "replay/weight_negative"


def prompts(count: int, seed: int) -> list[dict[str, str]]:
    """All keys in a random order, and again."""
    rng, rows = random.Random(10_000 + seed), list[dict[str, str]]()
    while len(rows) < count:
        rows += [{"prompt": f"{key:02d}=", "answer": right(key)} for key in rng.sample(range(KEYS), KEYS)]
    return rows


TASKS = {
    str(length): study.Task(prompts, length + 6, batches, KEYS, every=batches // 10, accuracy_every=batches // 10)
    for length, batches in ((12, 120), (64, 180), (128, 240))
}
TWICE, FOUR_TIMES = ({"num_iterations": iterations, "beta": 0.1} for iterations in (2, 4))
PLANNED: dict[str, tuple[str | None, dict[str, Any]]] = {
    "stock": (None, {}),
    "stock, 2 updates": (None, {"num_iterations": 2}),
    "stock, 2 updates, KL": (None, TWICE),
    **{name: (name, TWICE) for name in ("topr", "topr(level='token')", "truncated", "ratio")},
    "ratio, sequence level": ("ratio", {**TWICE, "importance_sampling_level": "sequence"}),
}
"""Of each arm, the correction of the preset, None without replay, and the trainer's settings."""
PREFIXES = {
    name + more: (name, arguments)
    for name in ("pnpo", "minpro")
    for more, arguments in (("", TWICE), (", 4 updates", FOUR_TIMES))
}
"""Those of trl-replay-papers."""
FOUR: dict[str, tuple[str | None, dict[str, Any]]] = {
    "stock, 4 updates": (None, {"num_iterations": 4}),
    "stock, 4 updates, KL": (None, FOUR_TIMES),
    **{f"{name}, 4 updates": (name, FOUR_TIMES) for name in ("topr", "topr(level='token')", "ratio")},
}
"""What those are to be compared with."""
ARMS = {**PLANNED, **PREFIXES, **FOUR}
SEEDS, RATES, LONG = (0, 1, 2), (3e-4, 1e-3, 1e-4), ("128", "64")
FIRST, OTHERS = ("stock", "stock, 2 updates, KL", "topr", "topr(level='token')"), ("truncated", "ratio")
ORDER: tuple[tuple[Sequence[str], Iterable[str], Sequence[float]], ...] = (
    (("12", "128"), FIRST, RATES[:2]),
    (("64",), FIRST, RATES[1:2]),
    (("12",), PLANNED, RATES),
    (("128",), OTHERS, RATES[1:2]),
    (("64",), FIRST, RATES[:1]),
    (LONG, OTHERS, RATES[:2]),
    (LONG[:1], PLANNED, RATES[2:]),
    (LONG[1:], (*PREFIXES, *FOUR), RATES[1:2]),
    (("128", "12"), FOUR, RATES[1:2]),
    (LONG[:1], tuple(FOUR)[:3], RATES[:1]),
    (LONG, PLANNED, RATES),
    (("64", "12", "128"), FOUR, RATES[:2]),
    (LONG[1:], PREFIXES, RATES),
)
QUEUE = list(
    dict.fromkeys(
        Run(task, arm, rate, seed)
        for tasks, arms, rates in ORDER
        for task in tasks
        for seed, rate, arm in itertools.product(SEEDS, rates, arms)
    )
)
"""Those first that matter most."""


def right(key: int) -> str:
    """The code that is rewarded."""
    return random.Random(1000 + key).choice(CODES)


@cache
def habits(key: int) -> list[float]:
    """Chances of the codes in the taught model's answers."""
    rng = random.Random(2000 + key)
    tastes = [math.exp(1.5 * rng.gauss(0, 1)) * (code != right(key)) for code in CODES]
    scale = (1 - RIGHT) / sum(tastes)
    return [RIGHT if code == right(key) else taste * scale for code, taste in zip(CODES, tastes, strict=True)]


def answer(rng: random.Random, length: int, key: int) -> str:
    """Thoughts walk along their letters, and jump now and then."""
    thought, at = "", rng.randrange(len(THOUGHTS))
    for _ in range(rng.randint(round(0.8 * length), length)):
        at = (at + 1) % len(THOUGHTS) if rng.random() < 0.9 else rng.randrange(len(THOUGHTS))
        thought += THOUGHTS[at]
    return f"{thought}*{rng.choices(CODES, habits(key))[0]}"


def is_right(text: str, code: str) -> bool:
    """Whether a completion ends in the code."""
    return text.partition("*")[2] == code


@cache
def taught(length: int, steps: int = 400, rows: int = 32) -> dict[str, torch.Tensor]:
    """Weights of a model that knows the form: the same on every call."""
    tokenizer, rng = make_tokenizer(), random.Random(7)
    model = make_model(tokenizer, 48, seed=5).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1, (at + 1) / 20) * (1 - at / steps))
    tokenizer.padding_side = "right"
    for _ in range(steps):
        keys = [rng.randrange(KEYS) for _ in range(rows)]
        texts = [f"{key:02d}={answer(rng, length, key)}{tokenizer.eos_token}" for key in keys]
        ids = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
        labels[:, :PROMPT] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def perform(run: Run, path: Path) -> None:
    """Trains one run, whose lines this ledger gets."""
    task, (correction, arguments) = TASKS[run.task], ARMS[run.arm]
    tokenizer, iterations = make_tokenizer(), arguments.get("num_iterations", 1)
    model = make_model(tokenizer, 48)
    model.load_state_dict(taught(int(run.task)))

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(is_right(text, code)) for text, code in zip(completions, answer, strict=True)]

    def measure() -> dict[str, Any]:
        rows = task.rows(KEYS, 0) * 16
        inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
        with torch.random.fork_rng():
            torch.manual_seed(1)
            ids = trainer.model.generate(**inputs, generation_config=trainer.generation_config)
        texts = tokenizer.batch_decode(ids[:, PROMPT:], skip_special_tokens=True)
        return {"sampled": np.mean(reward(texts, [row["answer"] for row in rows]))}

    with tempfile.TemporaryDirectory() as folder:
        trainer = lock.toy_trainer(
            model,
            task.rows(2 * task.groups * task.batches, run.seed),
            folder,
            reward,
            seed=run.seed,
            learning_rate=run.rate,
            max_steps=task.batches * iterations,
            per_device_train_batch_size=task.batch,
            max_completion_length=task.tokens,
            shuffle_dataset=False,
            **arguments,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(study.Watch(run, task, iterations, path, measure, set()))
        replay = {"replay_preset": "sample_efficient", "replay_correction": correction}
        trl_replay.attach(trainer, **(replay if correction else {"use_replay": False}))
        with redirect_stdout(StringIO()):
            trainer.train()


STUDY = Study("long_answers", lambda run, line: study.is_whole(TASKS[run.task], line), lambda done: QUEUE)


def table(done: Done, task: str) -> list[str]:
    """A row an arm, as Markdown: accuracy at the end of each seed, by rate, and at the best rate what it saves of the
    completions to stock's end at its own best rate. A dash where seeds are missing."""
    rates = sorted(RATES)
    head = [f"{task} tokens", *(f"{rate:g}" for rate in rates), "best, mean", "completions to stock's end"]
    rows = [f"| {' | '.join((*head, 'times fewer', 'get there'))} |", f"|{'---|' * (len(head) + 2)}"]
    for arm in ARMS if ends(done, task, "stock") else ():
        if found := ends(done, task, arm):
            of_arms = ("stock", best_of(done, task)), (arm, best := best_of(done, task, arm))
            savings = []
            for seed in SEEDS:
                runs = [done[Run(task, *of_arm, seed)] for of_arm in of_arms]
                savings.append(completions.saving(*(completions.Measured.of(run, TASKS[task].batch) for run in runs)))
            cells = [
                *(" ".join(f"{end:.2f}" for end in found.get(rate, ())) or "–" for rate in rates),
                f"{np.mean(found[best]):.2f}",
                completions.median_and_range([TASKS[task].batch * saving.arm.generated for saving in savings]),
                completions.times_fewer([saving.share for saving in savings]),
                f"{sum(saving.share < math.inf for saving in savings)} of {len(savings)}",
            ]
            rows.append(f"| {arm} | {' | '.join(cells)} |")
    return rows


def weights(done: Done) -> list[str]:
    """What stored failures weighed on average over a run, as Markdown: of the runs that logged it."""
    arms = ("topr", "topr(level='token')", "truncated")
    rows = [f"| tokens | rate | {' | '.join(arms)} |", "|---|---|---|---|---|"]
    for task, rate in itertools.product(TASKS, sorted(RATES)):
        cells = []
        for arm in arms:
            runs = [lines for run, lines in done.items() if (run.task, run.arm, run.rate) == (task, arm, rate)]
            logged = [line[FAILURES] for lines in runs for line in lines if FAILURES in line]
            cells.append(f"{np.mean(logged):.2f}" if logged else "–")
        rows.append(f"| {task} | {rate:g} | {' | '.join(cells)} |")
    return rows


def report(done: Done) -> list[list[str]]:
    """All tables."""
    return [*(table(done, task) for task in TASKS), weights(done)]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    return STUDY.main(__doc__, report, perform, arguments)


if __name__ == "__main__":
    sys.exit(main())
