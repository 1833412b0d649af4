"""Trains 25 fixed configurations and prints a digest of each run: weights, buffer table, logged metrics.

    python tests/digests.py                 # all of them, a line each
    python tests/digests.py images gathered  # some

Run it before and after a change that must not change any number, and compare the lines. Columns and metric keys that
a later release adds do not enter a digest, nor do the bytes of such columns: they are counted in the last column.
"""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1"
)

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(next(Path(__file__).resolve().parent.rglob("pictures.py")).parent))
import pictures

import trl_replay
from trl_replay import reporting
from trl_replay.testing import make_trainer

STEPS = 16
TIMED = {"replay/seconds"}
COLUMNS = (
    "serial", "update", "score", "tag", "uses", "reward_mean", "reward_std",
    "tokens", "items", "prompt", "peers", "newer", "origin", "keys", "owner",
)  # fmt: skip
METRICS = (
    "size", "bytes", "stored", "evicted", "refused", "retired", "dead_fraction", "dead_fraction_after",
    "replaced_fraction", "age_mean", "uses_mean", "score_mean", "padding", "ratio_mean", "ess", "drift_mean",
    "gated_fraction", "capped_fraction",
)  # fmt: skip
STOCK_METRICS = (
    "loss", "grad_norm", "learning_rate", "num_tokens", "completions/mean_length", "completions/clipped_ratio",
    "rewards/digits/mean", "rewards/digits/std", "reward", "reward_std", "frac_reward_zero_std", "entropy", "kl",
    "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max",
    "clip_ratio/region_mean", "step", "epoch",
)  # fmt: skip
"""What is logged of a run, timings left out."""

TWO_UPDATES = {"per_device_train_batch_size": 6, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
ACCUMULATION = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
TWO_RANKS = {"per_device_train_batch_size": 8, "num_generations": 4}
STRADDLING = {"per_device_train_batch_size": 6, "num_generations": 4}
ALWAYS = {"replay_record": "forward", "replay_selector": "always(share=0.7)"}
REFERENCE = {"beta": 0.1, "num_iterations": 2, "replay_start": 0}
MIXED = {"replay_mixer": "inject", "replay_sampler": "same_prompt", "replay_start": 0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "two iterations": {"loss_type": "grpo", "num_iterations": 2, "replay_start": None},
    "accumulation": {"loss_type": "bnpo", **ACCUMULATION, "replay_start": None, "replay_unfilled": "exclude"},
    "two updates": {"loss_type": "dr_grpo", **TWO_UPDATES, "replay_start": 0, "replay_max_uses": 2},
    "token weights": {"loss_type": "cispo", "replay_start": 0, "replay_correction": "truncated"},
    "sequence level": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "replay_start": 0,
        "replay_correction": "sequence_mask",
        "replay_unfilled": "mask",
    },
    "reference model": {"beta": 0.1, "replay_start": 0, "replay_correction": "per", "replay_max_weight": 3.0},
    "heap": {"replay_start": 0, "replay_evictor": "heap", "replay_sampler": "proportional"},
    "images": {"replay_start": 0, "replay_correction": "decoupled"},
    "process": {
        **TWO_RANKS,
        "replay_scope": "process",
        "replay_start": 0,
        "replay_evictor": "reservoir",
        "replay_sampler": "uniform",
    },
    "gathered": {**STRADDLING, "replay_start": 0, "replay_scope": "gathered", "replay_retire_passes": 4},
    "gathered, whole": {**TWO_RANKS, "replay_start": 0, "replay_scope": "gathered", "replay_unfilled": "exclude"},
    "kl of all": {**REFERENCE, "replay_unfilled": "exclude"},
    "kl of fresh": {**REFERENCE, "replay_kl": "fresh"},
    "kl of wrong": {**REFERENCE, "replay_kl": "all_wrong", **ALWAYS},
    "kl and masks": {**REFERENCE, "replay_kl": "fresh", "replay_unfilled": "mask", "replay_max_fraction": 0.4},
    "masks": {"replay_start": 0, "replay_plugins": ["mask_short"], "replay_unfilled": "exclude"},
    "joint": {"scale_rewards": "batch", **MIXED, "replay_advantages": "joint"},
    "split": {
        "scale_rewards": "batch",
        **MIXED,
        **ALWAYS,
        "replay_mixer": "inject(rows=3)",
        "replay_advantages": "split",
    },
    "more rounds": {"replay_start": 0, "replay_refill": "new(rounds=2)", "replay_unfilled": "mask"},
    "iterations": {"num_iterations": 3, "max_steps": 24, "replay_start": 0, "replay_iterations": "replay"},
    "dry run": {"replay_start": 0, "replay_dry_run": True, "replay_unfilled": "exclude"},
    "token advantages": {"trainer_class": "tokens", "replay_start": 0, "replay_unfilled": "exclude"},
    "forward": {"replay_start": 0, **ALWAYS},
    "straddling": {**STRADDLING, "replay_start": 0, "replay_scope": "gathered", **MIXED, "replay_unfilled": "exclude"},
}
ON_TWO_PROCESSES = ("process", "gathered", "gathered, whole", "straddling")


def digits(completions: list[Any], **_: Any) -> list[float]:
    """Rewards that depend on nothing but the text: at the start most groups of four are dead."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(text[:1] in set("012")) for text in texts]


class MaskShort:
    """A plugin that masks rows, by what all processes know of them."""

    @trl_replay.hookimpl
    def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
        return np.where(groups.lengths % 3 == 1, np.nan, groups.advantages)


def token_trainer() -> type:
    """A trainer that gives each token an advantage of its own."""
    from trl import GRPOTrainer

    class TokenTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            of_tokens = torch.linspace(0.5, 1.5, batch["completion_ids"].size(1))
            return {**batch, "advantages": batch["advantages"].unsqueeze(1) * of_tokens}

    return TokenTrainer


def train(name: str, folder: Path) -> tuple[Any, Any]:
    """Trains one configuration; returns trainer and session."""
    settings = {"max_steps": STEPS, **CONFIGURATIONS[name]}
    if "replay_plugins" in settings:
        trl_replay.register(MaskShort(), "mask_short")
    if "trainer_class" in settings:
        settings["trainer_class"] = token_trainer()
    replay = {key: settings.pop(key) for key in list(settings) if key.startswith("replay_")}
    trainer = picture_trainer(folder, settings) if name == "images" else make_trainer(folder, digits, **settings)
    session = trl_replay.attach(trainer, **{"replay_buffer_size": 5, **replay})
    trainer.train()
    return trainer, session


def picture_trainer(folder: Path, settings: dict[str, Any]) -> Any:
    """A tiny vision-language model on prompts with two, one and no images."""
    from trl import GRPOConfig, GRPOTrainer

    model, processor = pictures.qwen2_vl()
    return GRPOTrainer(
        model=model,
        reward_funcs=digits,
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=12,
            num_generations=4,
            max_completion_length=6,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            shuffle_dataset=False,
            bf16=False,
            generation_kwargs={"suppress_tokens": [model.config.image_token_id]},
            **settings,
        ),
        processing_class=processor,
        train_dataset=pictures.dataset((2, 1, 0)),
    )


def digest(parts: Iterable[bytes]) -> str:
    """A short hash of some bytes."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()[:12]


def summary(trainer: Any, session: Any) -> dict[str, Any]:
    """The three digests of a run, and what stands beside them."""
    parameters = sorted(trainer.model.named_parameters(), key=lambda named: named[0])
    weights = [tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for _, tensor in parameters]
    table = session.buffer.table
    columns = [_bytes_of(name, getattr(table, name)) for name in COLUMNS]
    wanted = {*STOCK_METRICS, *(f"replay/{name}" for name in METRICS)}
    added = sum(getattr(table, name)[:1].nbytes for name in set(table.names) - set(COLUMNS)) if len(table) else 0
    if session.config.replay_scope != "process":
        added *= session.components.processes  # one buffer, whose table every process holds
    history = [{key: entry[key] for key in sorted(wanted & entry.keys())} for entry in trainer.state.log_history]
    for entry in history:
        if "replay/bytes" in entry:
            entry["replay/bytes"] -= added * entry["replay/size"]
    logged = {key for entry in trainer.state.log_history for key in entry if key.startswith("replay/")}
    return {
        "weights": digest(weights),
        "table": digest(columns),
        "metrics": digest([json.dumps(history, sort_keys=True).encode()]),
        "replaced": int(session.totals.counters["replaced"]),
        "new": len(set(table.names) - set(COLUMNS)) + len(logged - wanted - TIMED),
    }


def _bytes_of(name: str, column: np.ndarray) -> bytes:
    """The values of a table that enter its digest. Prompts are hashes, of which only equality counts: each is told by
    where it first stands."""
    if name == "prompt":
        _, first, of_row = np.unique(column, return_index=True, return_inverse=True)
        column = first[of_row]
    return np.ascontiguousarray(column).tobytes()


def run(name: str, folder: Path) -> dict[str, Any]:
    """One configuration in this process, or on the two processes of a launch of its own."""
    if name not in ON_TWO_PROCESSES:
        return quietly(name, folder)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, __file__, "--rank", name, str(folder)], check=True, capture_output=True)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    both = {key: digest([ranks[0][key].encode(), ranks[1][key].encode()]) for key in ("weights", "table", "metrics")}
    return {**ranks[0], **both}


def quietly(name: str, folder: Path) -> dict[str, Any]:
    """One configuration in this process, without its output."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        reporting.is_logged = lambda *given: True  # the log has all metrics
        reporting.drop_zeros = lambda averaged: None
        return summary(*train(name, folder))


def rank(name: str, folder: Path) -> None:
    """One rank of a launch."""
    number = os.environ["RANK"]
    found = quietly(name, folder / f"trainer{number}")
    (folder / f"{number}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads can abort an interpreter that is being torn down: pytorch/pytorch#179291


def main(names: list[str]) -> None:
    print(f"{'configuration':16} {'weights':12} {'table':12} {'metrics':12} {'replaced':>8} {'new':>4}")
    for name in names or CONFIGURATIONS:
        with tempfile.TemporaryDirectory() as folder:
            found = run(name, Path(folder))
        print(
            f"{name:16} {found['weights']} {found['table']} {found['metrics']} {found['replaced']:8} {found['new']:4}",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1:])
