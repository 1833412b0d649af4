"""One rank of a launch with sharded parameters: FSDP2, or DeepSpeed ZeRO; `parallel.py fsdp2|zero2|zero3 FOLDER`."""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1"
)

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from ending import end
from scripted import build, mixed, run, write

SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp2": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
    },
    "zero2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "zero3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
}
AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


def let_accelerate_shard_on_the_cpu() -> None:
    """accelerate 1.15 silently uses DDP where FSDP is asked for on CPUs; torch itself can do FSDP2 there."""
    init = AcceleratorState.__init__

    def with_cpu(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_cpu


def main(mode: str, folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    let_accelerate_shard_on_the_cpu()
    settings = SETTINGS[mode]
    if "deepspeed" in settings:
        settings["deepspeed"] |= {"zero_allow_untested_optimizer": True, **dict.fromkeys(AUTO, "auto")}
    for scope, capacity in (("gathered", 4), ("sharded", 2)):
        trainer = build(folder / f"trainer{rank}", 6, 4, mixed, rank=rank, max_steps=6, **settings)
        with contextlib.redirect_stdout(io.StringIO()):
            result = run(trainer, compared=True, replay_scope=scope, replay_buffer_size=capacity, replay_seed=3)
        result["model"] = type(trainer.model_wrapped).__name__
        write(result, folder / f"{scope}.{rank}.json")
    generating = build(folder / f"trainer{rank}", 6, 4, mixed, rank=rank, max_steps=2, **settings)
    script, generating.rollout_func = generating.reward_funcs[0], None  # the stock generation, on sharded parameters
    script.update = 0
    with contextlib.redirect_stdout(io.StringIO()):
        result = run(generating, replay_scope="gathered")
    write(result, folder / f"generating.{rank}.json")
    end()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
