"""Costs of replay where completions are long: groups of 16, 32,768 tokens each.

    python benchmarks/long.py            # ten minutes on one core
    python benchmarks/long.py --tokens 8192
    python benchmarks/long.py --quick    # 128 tokens: what it says of time and of the process's memory means nothing
    python benchmarks/long.py --json

Two groups a batch, one dead and one live, so that every step stores a group and replays one; four rows a micro-batch.
Completions are scripted, some shorter than others, the longest of each group of full length. The model is an
embedding, one layer and a head, without attention: its cost is linear in the length, and as small beside replay's as
a model's can be.

Every case runs in a process of its own, on one core: stock, and replay. Times are CPU times of that process. Its peak
is that of the steps after the first two, as Linux counts it (VmHWM), with an allocator that gives large blocks back at
once. A further run counts what the seam allocates.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import torch
from allocations import CALLBACKS, Allocations, batch_bytes
from overhead import PROMPTS, Steps, seam_time, timed
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from trl import GRPOTrainer

from trl_replay import attach, compat
from trl_replay.testing import make_tokenizer, make_trainer
from trl_replay.trainer.callback import ReplayCallback

GROUPS, GENERATIONS, MICRO_BATCH = 2, 16, 4
TOKENS, STEPS = 32_768, 6
CAPACITY = 4
WARM_UP = 2
"""Steps until a group has been stored and replayed."""
CASES = ("stock", "replay", "replay, counted")
RESULTS = Path(__file__).parent / "results" / "long.json"


class Config(PretrainedConfig):
    """Of the model without attention."""

    model_type = "without_attention"

    def __init__(self, vocab_size: int = 64, hidden_size: int = 32, **kwargs: Any) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        super().__init__(**kwargs)


class Backbone(PreTrainedModel):
    """An embedding and one layer: what a position holds depends on its own token alone."""

    config_class = Config
    base_model_prefix = "model"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        """As transformers asks for it."""
        return self.embed_tokens

    def forward(self, input_ids: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
        """`(b, T)` tokens to `(b, T, hidden)`."""
        hidden = self.embed_tokens(input_ids)
        return BaseModelOutputWithPast(last_hidden_state=hidden + torch.tanh(self.layer(hidden)))


class WithoutAttention(PreTrainedModel, GenerationMixin):
    """A causal language model whose cost is linear in the length."""

    config_class = Config
    base_model_prefix = "model"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = Backbone(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        """As transformers asks for it."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> torch.nn.Module:
        """As TRL asks for it."""
        return self.lm_head

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, logits_to_keep: int = 0, **_: Any
    ) -> CausalLMOutputWithPast:
        """`(b, T)` tokens to the logits of the last positions; 0: of all."""
        hidden = self.model(input_ids).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, -logits_to_keep:]))


def make_long_model(seed: int = 0) -> WithoutAttention:
    """The model, for the tokenizer of `trl_replay.testing`."""
    tokenizer = make_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        return WithoutAttention(Config(len(tokenizer), **ids))


def generate(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
    """In the place of generation: random letters, between half and all of the tokens; the first of a group has all."""
    full = self.args.max_completion_length
    lengths = torch.randint(full // 2, full + 1, (len(prompt_ids),))
    lengths[:: self.num_generations] = full
    letters = len(self.processing_class)
    return [torch.randint(20, letters, (length,)).tolist() for length in lengths.tolist()], None


def second_group_live(completions: list[str], **_: Any) -> list[float]:
    """Rewards that make every first group dead."""
    return [float(row % 2 and row // GENERATIONS % 2) for row in range(len(completions))]


class Watch(TrainerCallback):
    """Per step, what the seam allocated."""

    def __init__(self, allocations: Allocations) -> None:
        self.allocations = allocations
        self.steps: list[dict[str, Any]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Keeps one step's counts and starts the next."""
        found = self.allocations
        self.steps.append({"allocated": found.allocated, "most": found.most, "lines": dict(found.lines)})
        found.begin()


class PeakFromHere(TrainerCallback):
    """The process's peak begins anew when replay is under way."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the warm-up, VmHWM starts at what is resident."""
        if state.global_step == WARM_UP:
            Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Bytes of memory that this process had at most."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def measure(case: str, tokens: int, steps: int) -> dict[str, Any]:
    """One case, in this process.

    Returns:
        Medians per step, over those after the warm-up, and what the buffer holds at the end.
    """
    clock: Counter[str] = Counter()
    allocations = Allocations() if case.endswith("counted") else None
    if allocations is not None:
        made = allocations.trainer_class(_generate_single_turn=generate)
    else:
        methods = {name: timed(getattr(GRPOTrainer, name), clock, name) for name in compat.SEAM}
        methods["_generate_single_turn"] = timed(generate, clock, "generation")
        made = type("ScriptedTrainer", (GRPOTrainer,), methods)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            second_group_live,
            PROMPTS,
            made,
            make_long_model(),
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=GROUPS * GENERATIONS // MICRO_BATCH,
            num_generations=GENERATIONS,
            max_completion_length=tokens,
            max_steps=steps,
            learning_rate=1e-5,
            gradient_checkpointing=False,
        )
        trainer.remove_callback(PrinterCallback)
        session = None
        if case != "stock":
            session = attach(trainer, replay_buffer_size=CAPACITY)
        if allocations is not None:
            allocations.watch(trainer)
            watch = Watch(allocations)
        elif session is not None:
            for name in compat.SEAM:
                seam = trainer.__dict__[name]
                seam._around = timed(seam._around, clock, f"seam{name}")
            callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, ReplayCallback))
            for name in CALLBACKS:
                setattr(callback, name, timed(getattr(callback, name), clock, "seam_callback"))
        times = Steps(clock)
        trainer.add_callback(times if allocations is None else watch)
        trainer.add_callback(PeakFromHere())
        with redirect_stdout(StringIO()), allocations or nullcontext():
            trainer.train()
        found: dict[str, Any] = {"case": case, "tokens": tokens, "steps": steps - WARM_UP}
        found["batch, bytes"] = batch = sum(batch_bytes(micro) for micro in trainer._buffered_inputs)
        if session is not None:
            found |= _held(session)
        if allocations is not None:
            return found | _copies(watch.steps[WARM_UP:], batch)
        after = times.steps[WARM_UP:]
        found["step, ms"] = 1e3 * statistics.median(step["step"] - step["generation"] for step in after)
        if session is not None:
            found["seam, ms"] = 1e3 * statistics.median(seam_time(step) for step in after)
        return found | {"peak, bytes": peak()}


def _held(session: Any) -> dict[str, Any]:
    buffer = session.buffer
    stored = [buffer.load(serial) for serial in buffer.table.serial.tolist()]
    tokens = sum(int(group.completion_lengths.sum() + group.prompt_lengths.sum()) for group in stored)
    return {
        "groups held": len(buffer),
        "bytes held": buffer.nbytes,
        "bytes a stored token": buffer.nbytes / tokens,
        "replayed": session.metrics["replay/replaced_fraction"],
    }


def _copies(steps: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Memory that the seam allocates, as multiples of the batch, in the step where it is most."""
    worst = max(steps, key=lambda step: step["allocated"])
    lines = Counter(worst["lines"]).most_common(5)
    return {
        "allocated / batch": worst["allocated"] / batch,
        "most at a time / batch": max(step["most"] for step in steps) / batch,
        "largest": [{"line": line, "/ batch": count / batch} for line, count in lines],
    }


def in_a_process(case: str, tokens: int, steps: int) -> dict[str, Any]:
    """`measure`, where nothing else has used memory.

    Raises:
        RuntimeError: With the end of what the process wrote.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TRIM_THRESHOLD_": str(1 << 18)}
    command = [sys.executable, __file__, "--case", case, "--tokens", str(tokens), "--steps", str(steps)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: dict[str, Any]) -> list[str]:
    """Costs of replay, as Markdown."""
    cases = {found["case"]: found for found in results["cases"]}
    stock = cases["stock"]
    batch = cases["replay"]["batch, bytes"]
    rows = ["| | stock | replay |", "|---|---|---|"]

    def add(what: str, tell: Callable[[dict[str, Any], dict[str, Any]], str], of_stock: str = "–") -> None:
        told = tell(cases["replay"], cases["replay, counted"])
        rows.append(f"| {what} | {of_stock} | {told} |")

    def above(found: dict[str, Any]) -> float:
        return float(found["peak, bytes"] - stock["peak, bytes"])

    add("a step without generation", lambda found, _: f"{found['step, ms']:,.0f} ms", f"{stock['step, ms']:,.0f} ms")
    add("in the seam", lambda found, _: f"{found['seam, ms']:.0f} ms")
    most = megabytes(stock["peak, bytes"])
    add("most memory of the process", lambda found, _: megabytes(found["peak, bytes"]), most)
    add("more than stock", lambda found, _: f"{megabytes(above(found))} ({above(found) / batch:.1f} batches)")
    add("the groups in the buffer", lambda found, _: f"{found['groups held']}, {megabytes(found['bytes held'])}")
    add("a stored token", lambda found, _: f"{found['bytes a stored token']:.2f} bytes")
    add("allocated in the seam, a step", lambda _, copies: f"{copies['allocated / batch']:.1f} batches")
    add("of it at a time", lambda _, copies: f"{copies['most at a time / batch']:.1f} batches")
    return rows


def megabytes(count: float) -> str:
    """In decimal megabytes."""
    return f"{count / 1e6:,.0f} MB"


def lines_table(results: dict[str, Any]) -> list[str]:
    """The lines that allocate most, as Markdown."""
    rows = ["| line | × batch |", "|---|---|"]
    for found in results["cases"]:
        for part in found.get("largest", ()):
            rows.append(f"| `{part['line']}` | {part['/ batch']:.2f} |")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--quick", action="store_true", help="128 tokens and few steps")
    parser.add_argument("--case", choices=CASES, help="only this one, in this process")
    parser.add_argument("--out", type=Path, help="where results are written; without it, and in full, beside this")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    if options.case:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
        print(json.dumps(measure(options.case, options.tokens, options.steps)))
        return 0
    tokens, steps = (128, WARM_UP + 2) if options.quick else (options.tokens, options.steps)
    cases = [in_a_process(case, tokens, steps) for case in CASES]
    results = {"quick": options.quick, "tokens": tokens, "group": GENERATIONS, "cases": cases}
    in_full = not options.quick and tokens == TOKENS
    out = options.out or (RESULTS if in_full else None)
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        print("\n".join([*table(results), "", *lines_table(results)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
