"""A combination lock: stock GRPO and replay train side by side on a task of sparse rewards.

    python examples/combination_lock.py        # about 90 s on two cores: progress, a table, and a picture in out/demo

Each of 8 keys opens with one of 256 two-letter codes. Before RL the model is briefly taught to answer with uniformly
random codes, so that one sample in 256 is right and about 97 % of the groups of 8 are dead. A seed stands for a lock
of its own: codes, model, data order and completions; arms are compared on the same seeds.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import multiprocessing
import queue
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_replay import attached
from trl_replay.testing import make_model, make_tokenizer

KEYS = 8
LETTERS = "abcdefghijklmnop"


def codes(seed: int) -> dict[str, str]:
    """The code that opens each key."""
    rng = random.Random(seed)
    code_of = {}
    for key in range(KEYS):
        first = rng.choice(LETTERS)
        code_of[str(key)] = first + rng.choice(LETTERS)
    return code_of


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right code, else 0."""
    return [float(completion == code) for completion, code in zip(completions, answer, strict=True)]


THRESHOLD = 0.25
WINDOW = 50


@dataclass(slots=True)
class Record:
    """One training run, step by step.

    Attributes:
        arm (`str`): Its name in tables.
        seed (`int`): The trainer's seed.
        learning_rate (`float`): Constant over the run.
        settings (`dict`, *optional*): Of [`ReplayConfig`]; None is stock.
        reward (`list[float]`): Mean reward of each step's generated completions, replayed ones not counted.
        dead (`list[float]`): Share of dead groups among the generated ones.
        dead_after (`list[float]`): Share of dead groups among those trained on.
        means (`dict[str, float]`): Mean of each `replay/*` metric over the steps that have it.
        rollouts (`int`): Completions generated.
        rollouts_at (`list[int]`): The same at the end of each step.
        tokens (`int`): Tokens of prompts and completions generated.
        seconds (`float`): Of `trainer.train()`.
        explanation (`str`): `session.explain()`; empty for stock.
    """

    arm: str
    seed: int
    learning_rate: float
    settings: dict[str, Any] | None
    reward: list[float] = field(default_factory=list)
    dead: list[float] = field(default_factory=list)
    dead_after: list[float] = field(default_factory=list)
    means: dict[str, float] = field(default_factory=dict)
    rollouts: int = 0
    rollouts_at: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    explanation: str = ""

    def final(self, steps: int) -> float:
        """Mean reward of the last `steps` steps."""
        return float(np.mean(self.reward[-steps:]))

    def reached(self, threshold: float = THRESHOLD, window: int = WINDOW) -> int | None:
        """Completions generated up to the end of the first `window` steps in a row whose mean reward is at least
        `threshold`; None if there are none."""
        if len(self.reward) < window:
            return None
        weights = np.full(window, 1 / window)
        means = np.convolve(self.reward, weights, mode="valid")
        hits = np.flatnonzero(means >= threshold - 1e-9)
        if len(hits) == 0:
            return None
        last = int(hits[0]) + window - 1
        return self.rollouts_at[last]

    def curve(self, window: int = WINDOW) -> list[float]:
        """Mean reward of each `window` steps, one after the other."""
        means = []
        for start in range(0, len(self.reward), window):
            values = self.reward[start : start + window]
            means.append(float(np.mean(values)))
        return means

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


class Watch(TrainerCallback):
    """Copies each step's log into a record and calls `on_window` every `window` steps."""

    def __init__(self, record: Record, on_window: Callable[[Record], None] | None, window: int) -> None:
        self.record = record
        self.on_window = on_window
        self.window = window
        self.metrics: dict[str, list[float]] = {}
        self.stdout = sys.stdout

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **kwargs: Any) -> None:
        """One step's values."""
        if "reward" not in logs:
            return  # the summary at the end of training
        record = self.record
        dead = logs["frac_reward_zero_std"]
        record.reward.append(logs["reward"])
        record.dead.append(dead)
        record.dead_after.append(logs.get("replay/dead_fraction_after", dead))
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        generated = record.rollouts + rows * args.world_size
        record.rollouts = int(logs.get("replay/rollouts", generated))  # what is generated again counts, too
        record.rollouts_at.append(record.rollouts)
        record.tokens = int(logs["num_tokens"])
        for key, value in logs.items():
            if key.startswith("replay/"):
                self.metrics.setdefault(key, []).append(value)
        if self.on_window and len(record.reward) % self.window == 0:
            with redirect_stdout(self.stdout):
                self.on_window(record)


def train(
    trainer: Any, record: Record, on_window: Callable[[Record], None] | None = None, window: int = WINDOW
) -> Record:
    """Trains with `record.settings`, fills in the record and returns it.

    Args:
        trainer (`trl.GRPOTrainer`): With `logging_steps=1` and one generation batch an update.
        record ([`Record`]): Arm, seed, learning rate and settings.
        on_window (`Callable`, *optional*): Called with the record every `window` steps.
        window (`int`, *optional*, defaults to `50`): Steps between two calls.
    """
    watch = Watch(record, on_window, window)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    settings = {"use_replay": False} if record.settings is None else record.settings
    started = time.perf_counter()
    with attached(trainer, **settings) as session, redirect_stdout(StringIO()):
        trainer.train()  # prints its summary, which is kept and not shown
    record.seconds = time.perf_counter() - started
    record.means = {key: float(np.mean(values)) for key, values in watch.metrics.items()}
    record.explanation = session.explain() if session.enabled else ""
    return record


GROUPS = 8
GENERATIONS = 8
HIDDEN_SIZE = 64
LEARNING_RATES = {"stock": 5e-4, "replay": 5e-4}
"""Each arm's best of the grid in benchmarks/learning.py, by final reward on seeds that are not shown."""


@cache
def taught(seed: int, steps: int = 300, rows: int = 256) -> Mapping[str, torch.Tensor]:
    """Weights of a model that answers every key with a uniformly random code: the same on every call.

    Args:
        seed (`int`): Of the model and of the examples.
        steps (`int`, *optional*, defaults to `300`): Supervised updates.
        rows (`int`, *optional*, defaults to `256`): Random examples in each.
    """
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, HIDDEN_SIZE, seed=seed)

    def ids_of(tokens: Iterable[str]) -> torch.Tensor:
        return torch.tensor(tokenizer.convert_tokens_to_ids(list(tokens)))

    keys = ids_of("0123456789"[:KEYS])
    letters = ids_of(LETTERS)
    sign = ids_of("=").expand(rows)
    end = ids_of([tokenizer.eos_token]).expand(rows)
    generator = torch.Generator().manual_seed(seed)

    def draw(among: torch.Tensor) -> torch.Tensor:
        chosen = torch.randint(len(among), (rows,), generator=generator)
        return among[chosen]

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        answers = [draw(keys), sign, draw(letters), draw(letters), end]
        batch = torch.stack(answers, dim=1)
        labels = batch.clone()
        labels[:, :2] = -100  # the question
        loss = model(input_ids=batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def make_trainer(seed: int, learning_rate: float, steps: int, output_dir: str, **settings: Any) -> Any:
    """A stock `trl.GRPOTrainer` on the lock: 8 groups of 8 completions of at most 3 tokens an update.

    Launched on several processes, these share the 8 groups. Further settings are those of `GRPOConfig`.
    """
    model = make_model(make_tokenizer(), HIDDEN_SIZE)
    model.load_state_dict(taught(seed))
    rows = [{"prompt": f"{key}=", "answer": code} for key, code in codes(seed).items()]
    return toy_trainer(
        model,
        rows * 2000,
        output_dir,
        seed=seed,
        learning_rate=learning_rate,
        max_steps=steps,
        max_completion_length=3,
        **settings,
    )


def toy_trainer(
    model: Any,
    rows: list[dict[str, str]],
    output_dir: str,
    rewards: Callable[..., list[float]] = reward,
    **settings: Any,
) -> Any:
    """A stock `trl.GRPOTrainer` of 8 groups of 8 completions an update, whose reward is 1 for the right answer.

    Args:
        model (`PreTrainedModel`): It reads what `make_tokenizer` writes.
        rows (`list[dict]`): With `prompt` and `answer`.
        output_dir (`str`): Where the trainer writes.
        rewards (`Callable`, *optional*): Another reward function, of `completions` and `answer`.
        **settings: Of `GRPOConfig`: what the task is about.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    plain: dict[str, Any] = {
        "output_dir": output_dir,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": GROUPS * GENERATIONS // processes,
        "num_generations": GENERATIONS,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(**{**plain, **settings}),
        train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(),
    )


def run(
    arm: str,
    seed: int,
    learning_rate: float,
    steps: int,
    settings: dict[str, Any] | None = None,
    on_window: Callable[[Record], None] | None = None,
    window: int = 50,
) -> Record:
    """Trains one arm on the lock.

    Args:
        arm (`str`): Its name in tables.
        seed (`int`): Of the lock and of the trainer.
        learning_rate (`float`): Constant.
        steps (`int`): Updates, each of 64 completions.
        settings (`dict`, *optional*): Of [`ReplayConfig`]; None is stock.
        on_window (`Callable`, *optional*): Called with the record so far every `window` steps.
        window (`int`, *optional*, defaults to `50`): Steps between two calls.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(seed, learning_rate, steps, folder)
        record = Record(arm, seed, learning_rate, settings)
        return train(trainer, record, on_window, window)


ARMS: dict[str, dict[str, Any] | None] = {"stock": None, "replay": {}}
STEPS = 10
"""Updates between two pieces of news, over which they average."""
PAUSE = 1.0
"""Seconds without news after which the listener is called all the same."""

_inbox: Any = None  # in a process that trains: where its news go


@dataclass(frozen=True, slots=True)
class News:
    """How one run gets on.

    Attributes:
        arm (`str`): The arm's name.
        seed (`int`): The run's seed.
        done (`int`): Updates so far.
        reward (`float`): Mean reward of the last few updates.
        dead (`float`): Share of dead groups among those that they generated.
        dead_after (`float`): Share of dead groups among those that they trained on.
    """

    arm: str
    seed: int
    done: int
    reward: float
    dead: float
    dead_after: float


def train_arms(seeds: Sequence[int], steps: int, listen: Callable[[News | None], None]) -> list[Record]:
    """Trains every arm on every seed, the arms side by side.

    Args:
        seeds (`Sequence[int]`): One run of each arm a seed, one after the other.
        steps (`int`): Updates a run.
        listen (`Callable`): Gets the news, and None where there are none for a while.

    Returns:
        `list[Record]`: Arm by arm, in the order of the seeds.
    """
    context = multiprocessing.get_context("spawn")
    inbox = context.Queue()
    with ProcessPoolExecutor(len(ARMS), context, _send_to, (inbox,)) as pool:
        futures = [pool.submit(train_arm, arm, seeds, steps) for arm in ARMS]
        while not all(future.done() for future in futures):
            try:
                listen(inbox.get(timeout=PAUSE))
            except queue.Empty:
                listen(None)
        return [record for future in futures for record in future.result()]


def _send_to(inbox: Any) -> None:
    """The first thing that a process does: before torch is imported, which starts as many threads as it may."""
    global _inbox
    _inbox = inbox
    os.environ["OMP_NUM_THREADS"] = "1"


def train_arm(arm: str, seeds: Sequence[int], steps: int) -> list[Record]:
    """Trains one arm on every seed, in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rate = LEARNING_RATES[arm]
    return [run(arm, seed, rate, steps, ARMS[arm], partial(_report, seed), STEPS) for seed in seeds]


def _report(seed: int, record: Record) -> None:
    dead = float(np.mean(record.dead[-STEPS:]))
    after = float(np.mean(record.dead_after[-STEPS:]))
    _inbox.put(News(record.arm, seed, len(record.reward), record.final(STEPS), dead, after))


LABELS = {"stock": "stock GRPO", "replay": "with replay"}
COLORS = {"stock": "#666666", "replay": "#0b6bcb"}
EVERY = 8.0
"""Seconds between two lines of progress in a file or a pipe."""
START, TEACHING, UPDATE = 15.0, 8.0, 0.04
"""Seconds that a run takes on two free cores: to begin with, for each seed, and for each update."""


def show(steps: int, seeds: Sequence[int], out: Path) -> int:
    """Trains every arm on every seed, prints a table, and writes demo.json and demo.png into `out`; returns 0."""
    started = time.monotonic()
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else 120)
    console.print(
        f"A combination lock: {KEYS} keys, each opens with one of {len(LETTERS) ** 2} codes. The model "
        "is first taught to answer with uniformly random codes, so that nearly every group of completions is all "
        "wrong."
    )
    expected = START + len(seeds) * (TEACHING + steps * UPDATE)
    console.print(
        f"Stock GRPO and replay train side by side, each in a process with one thread: about {_rounded(expected)} s "
        "on two free cores."
    )
    picture = _has_matplotlib()
    if not picture:
        console.print(
            "No picture: matplotlib is not installed. Get it with: pip install 'trl-replay[demo]'", markup=False
        )
    with (Bars if terminal else Lines)(console, steps, seeds) as progress:
        records = train_arms(seeds, steps, progress.hear)
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "demo.json"]
    figures = [record.as_dict() for record in records]
    written[0].write_text(json.dumps(figures) + "\n")
    console.print(summary(records))
    console.print(
        f"Seeds {', '.join(map(str, seeds))}, each a lock of its own and the same for both arms; so few show a "
        "difference and do not measure it. Each arm runs at the rate that was its best on other seeds. "
        "benchmarks/learning.py has the fair comparison: longer runs, more seeds, rates chosen by a protocol."
    )
    if picture:
        written.append(out / "demo.png")
        draw(records, written[-1])
    console.print(f"written: {', '.join(map(str, written))} after {time.monotonic() - started:.0f} s")
    return 0


def _rounded(seconds: float) -> int:
    """To ten seconds: more would be pretence."""
    return max(int(round(seconds, -1)), 10)


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


class Bars:
    """A bar for each run, for a terminal."""

    def __init__(self, console: Console, steps: int, seeds: Sequence[int]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=console,
            redirect_stdout=False,
        )
        self._rows: dict[tuple[str, int], TaskID] = {}
        for arm in ARMS:
            for seed in seeds:
                name = f"{LABELS[arm]}, seed {seed}"
                self._rows[arm, seed] = self._progress.add_task(name, total=steps, shown="", start=False)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def hear(self, news: News | None) -> None:
        """Moves the run's bar."""
        if news is None:
            return
        row = self._rows[news.arm, news.seed]
        self._progress.start_task(row)
        shown = f"reward {news.reward:.2f}  dead groups {news.dead:4.0%} → {news.dead_after:4.0%}"
        self._progress.update(row, completed=news.done, shown=shown)


class Lines:
    """A line every few seconds, for a file or a pipe."""

    def __init__(self, console: Console, steps: int, seeds: Sequence[int]) -> None:
        self._console = console
        self._steps = steps
        self._started = self._last = time.monotonic()
        self._shown = dict.fromkeys(ARMS, "getting ready")

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is left open."""

    def hear(self, news: News | None) -> None:
        """Keeps what is new, and prints a line when one is due."""
        if news is not None:
            self._shown[news.arm] = (
                f"seed {news.seed}, update {news.done} of {self._steps}, reward {news.reward:.2f}, "
                f"dead {news.dead:.0%} → {news.dead_after:.0%}"
            )
        now = time.monotonic()
        if now - self._last < EVERY:
            return
        self._last = now
        runs = [f"{LABELS[arm]}: {shown}" for arm, shown in self._shown.items()]
        print(f"{now - self._started:4.0f} s  {'; '.join(runs)}", file=self._console.file, flush=True)


def by_arm(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each arm, arms in the order of their first record."""
    arms: dict[str, list[Record]] = {}
    for record in records:
        arms.setdefault(record.arm, []).append(record)
    return arms


def summary(records: Sequence[Record]) -> Table:
    """One row an arm: the mean over its seeds, and in brackets each seed's value."""
    steps = len(records[0].reward)
    rollouts = records[0].rollouts
    title = f"{steps} updates and {rollouts:,} rollouts a run; means over seeds, in brackets each seed's"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in (
        "rate",
        f"reward, last {WINDOW} updates",
        f"rollouts until {THRESHOLD}",
        "dead groups generated",
        "trained on",
        "seconds",
    ):
        table.add_column(column, justify="right")
    for arm, runs in by_arm(records).items():
        table.add_row(LABELS[arm], *_cells(runs))
    return table


def _cells(runs: Sequence[Record]) -> list[str]:
    """An arm's row of the table."""
    finals = [run.final(WINDOW) for run in runs]
    each_final = [f"{final:.2f}" for final in finals]
    each_reached = [_reached(run) for run in runs]
    dead = np.mean([run.dead for run in runs])
    dead_after = np.mean([run.dead_after for run in runs])
    seconds = np.mean([run.seconds for run in runs])
    return [
        f"{runs[0].learning_rate:.0e}",
        f"{np.mean(finals):.2f} ({', '.join(each_final)})",
        f"({'; '.join(each_reached)})",
        f"{dead:.0%}",
        f"{dead_after:.0%}",
        f"{seconds:.0f}",
    ]


def _reached(run: Record) -> str:
    count = run.reached()
    return f"{count:,}" if count else "not"


def draw(records: Sequence[Record], path: Path) -> None:
    """Reward, and dead groups among those trained on, over the rollouts generated; seeds thin, their mean thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (reward, dead) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for arm, runs in by_arm(records).items():
        label = f"{LABELS[arm]}, lr {runs[0].learning_rate:.0e}"
        for axis, name in ((reward, "reward"), (dead, "dead_after")):
            curves = np.array([_smooth(getattr(run, name)) for run in runs])  # (seeds, steps)
            steps = curves.shape[1]
            rollouts = np.linspace(0, runs[0].rollouts, steps + 1)[1:]
            color = COLORS[arm]
            axis.plot(rollouts, curves.T, color=color, alpha=0.3, linewidth=0.8)
            mean = curves.mean(axis=0)
            axis.plot(rollouts, mean, color=color, linewidth=2, label=label)
            axis.set_xlabel("rollouts generated")
            axis.set_ylim(0, 1)
    reward.set_title("mean reward of the generated completions")
    dead.set_title("share of dead groups trained on")
    reward.legend(frameon=False, title="thin: each seed; thick: their mean")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _smooth(values: Sequence[float], width: int = 20) -> list[float]:
    """Each value averaged with the up to `width - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(float(np.mean(window)))
    return means


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="updates a run, each of 64 completions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run of each arm a seed")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of the picture and the figures")
    options = parser.parse_args()
    return show(options.steps, options.seeds, options.out)


if __name__ == "__main__":
    sys.exit(main())
