"""Which of transformers' causal language models change a row's log-probs with the padding before it, and whether the
trial at attach sees that.

    python benchmarks/architectures.py           # every name, each in a process of its own; five minutes of a core
    python benchmarks/architectures.py gpt2 rwkv # these

A tiny random model of each kind scores a row alone and behind pad tokens, in single precision: that is the truth, and
no code of trl_replay's is in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import torch
import transformers
from isolated import isolated
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from trl_replay.setup.preflight import try_model
from trl_replay.testing import make_tokenizer

PADDING, LENGTH, DIFFERS = 3, 68, 1e-3
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "lru_width"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "attention_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_value_heads", "multi_query_group_num"), 4),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "d_kv"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_d_ssm"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group", "moe_k"), 2),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "index_topk", "attention_window_size"), 16),
    "q_lora_rank": 32, "kv_lora_rank": 32, "index_n_heads": 32, "index_head_dim": 16, "rope_dim": 16,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "context_length": 256, "max_seq_len": 256,
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 16, "first_k_dense_replace": 1,
}  # fmt: skip
"""Numbers that a tiny configuration takes, where it has the name."""
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}
OWN: dict[str, dict[str, Any]] = {
    "bamba": MAMBA, "granitemoehybrid": MAMBA, "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8}, "nemotron": {"num_key_value_heads": 4},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "kimi_linear": {"num_experts_per_token": 2},
}  # fmt: skip
"""What a configuration needs besides."""


def main() -> int:
    """Prints a table, and how many names the trial is wrong about; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=sorted(NAMES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: isolated(tried, name) for name in options.names}
    for name, result in found.items():
        print(f"{name}: {result}", flush=True)
    known = {name: result for name, result in found.items() if isinstance(result, tuple)}
    wrong = [name for name, (far, reads) in known.items() if (far > DIFFERS) != reads]
    print(f"\n{len(known)} of {len(found)} could be built and tried; the trial is wrong on {wrong or 'none'}\n")
    print(table(found))
    return 1 if wrong else 0


def table(found: dict[str, Any]) -> str:
    """The names by what the padding does to them, as Markdown."""
    rows: dict[str, list[str]] = defaultdict(list)
    for name, result in found.items():
        if not isinstance(result, tuple):
            rows["not tried: no tiny model of this name could be built or run"].append(name)
        elif result[0] > DIFFERS:
            rows["change with the padding (in nats)"].append(f"{name} ({result[0]:.2g})")
        else:
            rows["do not"].append(name)
    lines = [f"| {what}: {len(names)} | {', '.join(names)} |" for what, names in sorted(rows.items())]
    head = f"| Tiny models of transformers {transformers.__version__} whose log-probs | |\n|---|---|"
    return "\n".join([head, *lines])


def tried(name: str) -> tuple[float, bool]:
    """How far log-probs move, in nats, and what the trial says."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    model = tiny(name)
    return moved(model), says(model)


def tiny(name: str) -> Any:
    """A random model of this kind, large enough for every part of it to act."""
    config = transformers.CONFIG_MAPPING[name]()
    shrink(config, len(make_tokenizer()))
    for key, value in OWN.get(name, {}).items():
        setattr(config, key, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def shrink(config: Any, vocabulary: int) -> None:
    layers = 4
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value, vocabulary)
        elif key in SIZES and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, key, min(value, SIZES[key]) if value > 0 else value)
        elif key in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            setattr(config, key, (kinds * layers)[:layers])
        elif key in ("sliding_window", "index_topk"):
            setattr(config, key, value and 16)
    for key, token in {"vocab_size": vocabulary, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}.items():
        if hasattr(config, key):
            with contextlib.suppress(Exception):
                setattr(config, key, token)
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True


@torch.no_grad()
def moved(model: Any) -> float:
    """The most that a token's log-prob differs by, alone and behind padding."""
    row = torch.randint(3, len(make_tokenizer()), (LENGTH,), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([torch.zeros(PADDING, dtype=torch.long), row])
    found = []
    for ids in (row, padded):
        mask = torch.ones_like(ids)
        mask[: len(ids) - LENGTH] = 0
        logits = model(input_ids=ids[None], attention_mask=mask[None], use_cache=False).logits
        spread = logits[0, -LENGTH:].float().log_softmax(dim=-1)
        found.append(spread[:-1].gather(1, row[1:, None]))
    return float((found[0] - found[1]).abs().max())


def says(model: Any) -> bool:
    """What attach's trial says of it."""
    plain = {"is_deepspeed_enabled": False, "is_fsdp_enabled": False, "temperature": 1.0, "model": model}
    accelerator = SimpleNamespace(autocast=contextlib.nullcontext, mixed_precision="no")
    args = SimpleNamespace(max_completion_length=64)
    trial = try_model(SimpleNamespace(**plain, accelerator=accelerator, args=args, processing_class=make_tokenizer()))
    if trial.failed:
        raise RuntimeError(f"the trial could not be made: {trial.failed}")
    return trial.reads_padding


if __name__ == "__main__":
    sys.exit(main())
