"""Costs of replay where completions are long: groups of 16, 32,768 tokens each.

    python benchmarks/long.py            # writes benchmarks/results/long.json, and prints its table: ten minutes
    python benchmarks/long.py --quick    # 128 tokens: shows that it runs; its figures mean nothing

Two groups a batch, one dead and one live, so that every step stores a group and replays one; four rows a micro-batch.
Completions are scripted, some shorter than others, the longest of each group of full length. The model is an
embedding, one layer and a head, without attention: its cost is linear in the length, and as small beside replay's as
a model's can be.

Each case runs in a process of its own, on one core: stock, and replay. Times are CPU times of that process. Its peak
is that of the steps after the first two, as Linux counts it (VmHWM), with an allocator that gives large blocks back at
once. What the seam allocates is tested in tests/trainer/test_long_completions.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from overhead import Clock, in_the_seam, train, without_generation
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, TrainerCallback
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from trl_replay.testing import make_tokenizer

GROUPS, GENERATIONS, MICRO_BATCH = 2, 16, 4
TOKENS, QUICK, STEPS = 32_768, 128, 6
CAPACITY = 4
WARM_UP = 2
"""Steps until a group has been stored and replayed."""
CASES: dict[str, dict[str, Any] | None] = {"stock": None, "replay": {"replay_buffer_size": CAPACITY}}
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


class PeakFromHere(TrainerCallback):
    """The process's peak begins anew when replay is under way."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the warm-up, VmHWM starts at what is resident."""
        if state.global_step == WARM_UP:
            Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Bytes of memory that this process had at most."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def measure(case: str, quick: bool) -> dict[str, Any]:
    """One case, in this process: medians per step, over those after the warm-up, and what the buffer holds at the
    end."""
    clock, tokens, steps = Clock(), QUICK if quick else TOKENS, STEPS - 2 * quick
    trainer, session, _ = train(
        make_long_model(),
        CASES[case],
        clock,
        generate,
        [PeakFromHere()],
        GENERATIONS,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=GROUPS * GENERATIONS // MICRO_BATCH,
        max_completion_length=tokens,
        max_steps=steps,
    )
    found = {
        "case": case,
        "tokens": tokens,
        "steps": steps - WARM_UP,
        "batch, bytes": sum(
            value.nbytes for batch in trainer._buffered_inputs for value in batch.values() if torch.is_tensor(value)
        ),
        "step, ms": clock.median(without_generation, WARM_UP),
        "peak, bytes": peak(),
    }
    if session is None:
        return found
    buffer = session.buffer
    stored = [buffer.load(serial) for serial in buffer.table.serial.tolist()]
    return found | {
        "seam, ms": clock.median(in_the_seam, WARM_UP),
        "groups held": len(buffer),
        "bytes held": buffer.nbytes,
        "bytes a stored token": buffer.nbytes
        / sum(int(group.completion_lengths.sum() + group.prompt_lengths.sum()) for group in stored),
        "replayed": session.metrics["replay/replaced_fraction"],
    }


def in_a_process(case: str, quick: bool) -> dict[str, Any]:
    """`measure`, where nothing else has used memory."""
    settings = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TRIM_THRESHOLD_": str(1 << 18)}
    command = [sys.executable, __file__, "--case", case, *["--quick"] * quick]
    done = subprocess.run(command, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: dict[str, Any]) -> list[str]:
    """Costs of replay, as Markdown."""
    cases = {found["case"]: found for found in results["cases"]}
    stock, replay = cases["stock"], cases["replay"]
    above = replay["peak, bytes"] - stock["peak, bytes"]
    rows = {
        "a step without generation": [f"{found['step, ms']:,.0f} ms" for found in (stock, replay)],
        "in the seam": ["–", f"{replay['seam, ms']:.0f} ms"],
        "most memory of the process": [megabytes(found["peak, bytes"]) for found in (stock, replay)],
        "more than stock": ["–", f"{megabytes(above)} ({above / replay['batch, bytes']:.1f} batches)"],
        "the groups in the buffer": ["–", f"{replay['groups held']}, {megabytes(replay['bytes held'])}"],
        "a stored token": ["–", f"{replay['bytes a stored token']:.2f} bytes"],
    }
    lines = [f"| {what} | {' | '.join(cells)} |" for what, cells in rows.items()]
    return ["| | stock | replay |", "|---|---|---|", *lines]


def megabytes(count: float) -> str:
    """In decimal megabytes."""
    return f"{count / 1e6:,.0f} MB"


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 tokens and few steps; writes nothing")
    parser.add_argument("--case", choices=CASES, help="only this one, in this process")
    options = parser.parse_args(arguments)
    if options.case:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
        print(json.dumps(measure(options.case, options.quick)))
        return 0
    results = {"tokens": TOKENS, "group": GENERATIONS, "cases": [in_a_process(case, options.quick) for case in CASES]}
    if not options.quick:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
