"""One rank of a launch of tests/distributed/test_engines.py: one engine, every case in turn, results as JSON.

`engines.py FOLDER ddp|fsdp2|zero2|zero3`, started by `accelerate launch` with that engine's file of
examples/accelerate, or with a rank's variables for DDP.
"""

import contextlib
import hashlib
import importlib
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, gather_object
from loss_by_hand import Row, reference_loss
from one_rank import end, quiet, write
from replaying import build as build_from
from resuming import differences, state
from scripted import build, mixed, run
from support import Forwards, Spy
from torch.distributed.tensor import DTensor

import trl_replay
from trl_replay.loss.supply import ROWS
from trl_replay.testing import make_model, make_tokenizer
from trl_replay.trainer import attachment

RANK = int(os.environ.get("RANK", 0))
ROWS_OF = {"process": 8, "gathered": 6}
"""Rows of a rank, in groups of 4: where that is allowed, one group has its rows on both ranks."""
CAPACITY = {"process": 4, "gathered": 2}
SAVED, LAST = 4, 6
"""The update after which a checkpoint is written, and the last one."""
OPTIMIZER = {"optim": "adamw_torch", "adam_epsilon": 1.0, "learning_rate": 0.3}
"""It has a state, and with this epsilon its updates do not magnify rounding errors of small gradients."""

TEACHER = [
    {"prompt": prompt, "completion": completion, "reward": float(completion == "2")}
    for prompt in ("1+1=", "3-1=", "2*1=")
    for completion in "2345"
]

WHERE = ("prompt", "completion")


def let_accelerate_shard_on_the_cpu():
    """accelerate 1.15 silently uses DDP where FSDP is asked for on CPUs; torch itself can do FSDP2 there."""
    init = AcceleratorState.__init__

    def with_cpu(self, *args, fsdp_plugin=None, **kwargs):
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_cpu


def let_deepspeed_compile_nothing():
    """On CPUs it compiles collectives through shared memory before it begins, for minutes: gloo does what is needed.
    And it gives an optimizer that nobody uses to `torch.compile`, which imports for seconds."""
    torch.compile = lambda function, **_: function
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def plain_model(adapter):
    """The model that is trained, before anything shards it."""
    model = make_model(make_tokenizer())
    if adapter:
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model


def gather(model, whole):
    """Puts the weights of a sharded model, which all ranks gather together, into a plain one."""
    weights = dict(model.named_parameters())
    with torch.no_grad(), gathered(list(weights.values())):
        shards = {name: weight.to_local() for name, weight in weights.items() if isinstance(weight, DTensor)}
        if shards:  # FSDP2 cuts each along its rows
            ranks = gather_object([shards])
            weights |= {name: torch.cat([rank[name] for rank in ranks]) for name in shards}
        for name, parameter in whole.named_parameters():
            parameter.copy_(weights[name])


@contextlib.contextmanager
def gathered(parameters):
    """Within it, what ZeRO 3 has sharded is whole."""
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            yield
    else:
        yield


def key_of(batch, row):
    """The token ids of one row, without padding."""
    prompt, completion = (batch[f"{side}_ids"][row][batch[f"{side}_mask"][row].bool()] for side in WHERE)
    return tuple(prompt.tolist()), tuple(completion.tolist())


class Whole(Spy):
    """The stock trainer, which computes each training loss a second time: by hand, from the whole weights.

    Attributes:
        whole: A plain model that has the weights with which the present batch was generated.
        born: Of every row so far, on any rank: its update, its log-probs under the policy that made it, and its
            advantage then.
        compared: `(the engine's loss, the one by hand, rows that were replayed, their largest log ratio)`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.whole = plain_model(adapter=hasattr(self.model, "peft_config"))
        self.born = {}
        self.compared = []

    def _generate_and_score_completions(self, inputs):
        gather(self.model, self.whole)
        batch = super()._generate_and_score_completions(inputs)
        keys = [key_of(batch, row) for row in range(len(batch["advantages"]))]
        update, advantages = self.state.global_step, batch["advantages"].tolist()
        made = zip(keys, self.logps_of(keys), advantages, strict=True)
        mine = [(key, (update, logps.tolist(), advantage)) for key, logps, advantage in made]
        for key, birth in gather_object(mine):
            assert key not in self.born or self.born[key][0] < 0, "the script repeats a completion"
            self.born.setdefault(key, birth)  # a file's rows have theirs
        return batch

    def logps_of(self, keys):
        """Of each completion its tokens' log-probs, `(T,)`, from the plain model; nothing stands before a prompt."""
        rows = [torch.tensor([*prompt, *completion]) for prompt, completion in keys]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.no_grad():
            logps = self.whole(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        chosen = logps.gather(2, ids[:, 1:, None])[..., 0]
        return [
            chosen[row, len(prompt) - 1 : len(prompt) + len(completion) - 1]
            for row, (prompt, completion) in enumerate(keys)
        ]

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        keys = [key_of(inputs, row) for row in range(len(inputs["completion_ids"]))]
        rows = []
        for key, new in zip(keys, self.logps_of(keys), strict=True):
            _, old, advantage = self.born[key]
            rows.append(Row(new.double(), torch.tensor(old).double(), advantage))
        ranks = self.accelerator.num_processes
        items = sum(gather_object([len(completion) for _, completion in keys])) / ranks
        marks = (inputs[ROWS][:, 0] < 0).tolist() if ROWS in inputs else [False] * len(rows)
        moved = [float((row.new - row.old).abs().max()) for row, mark in zip(rows, marks, strict=True) if mark]
        by_hand = reference_loss(self, rows, items)
        self.compared.append((float(loss.detach()), by_hand, len(moved), max(moved, default=0.0)))
        return loss


def flat(model):
    """All weights of a plain model, one after the other."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def weights_hash(model):
    return hashlib.sha256(flat(model).tobytes()).hexdigest()


class Cases:
    """Runs with one engine."""

    def __init__(self, folder):
        self.folder = folder

    def trainer(self, case, rows, adapter=False, live=mixed, **settings):
        model = {"model": plain_model(adapter)} if adapter else {}
        trainer = build(
            self.folder / case, rows, 4, live, rank=RANK,
            **{"max_steps": LAST, "trainer_class": Whole, **OPTIMIZER, **model, **settings},
        )  # fmt: skip
        self.forwards = Forwards(trainer.model)
        trainer.add_callback(self.forwards)
        return trainer

    def run(self, case, trainer, resume=None, **replay):
        """Trains with replay, and keeps what the tests look at."""
        result = quiet(lambda: run(trainer, compared=case in ROWS_OF, resume=resume, **replay))
        gather(trainer.model, trainer.whole)
        np.save(self.folder / f"{case}.{RANK}.weights.npy", flat(trainer.whole))
        result |= {
            "engine": engine_of(trainer),
            "forwards": dict(self.forwards.counts),
            "compared": trainer.compared,
            "weights": weights_hash(trainer.whole),
        }
        write(result, self.folder, case)
        return result

    def whole_and_resumed(self, case, rows, adapter=False, **replay):
        """A run that writes a checkpoint, and one that goes on from it."""
        saves = {"save_strategy": "steps", "save_steps": SAVED}
        found, born = [], {}
        for name, checkpoint in ((case, None), (f"{case} resumed", str(self.folder / case / f"checkpoint-{SAVED}"))):
            trainer = self.trainer(case, rows, adapter, **saves)
            trainer.born = {key: birth for key, birth in born.items() if birth[0] < SAVED}
            trainer.reward_funcs[0].update = SAVED - 1 if checkpoint else -1
            result = self.run(name, trainer, checkpoint, **replay)
            born = trainer.born
            found.append({"weights": result["weights"], **state(attachment._sessions[trainer])})
        write({"differences": differences(*found)}, self.folder, f"{case} in all")

    def without_replay(self, case):
        """The stock trainer."""
        trainer = self.generating(case, live=all_live)
        trainer.train()
        gather(trainer.model, trainer.whole)
        write({"weights": weights_hash(trainer.whole), "forwards": dict(self.forwards.counts)}, self.folder, case)

    def generating(self, case, live):
        """A trainer with the stock generation, on parameters as the engine keeps them."""
        trainer = self.trainer(case, 8, live=live, max_steps=3)
        script, trainer.rollout_func = trainer.reward_funcs[0], None
        script.update = 0
        return trainer

    def added_early(self, case):
        """Groups without log-probs are added before anything trains, to a trainer that has loaded its model itself."""
        path = self.folder / "model"
        if RANK == 0:
            make_model(make_tokenizer()).save_pretrained(path)
        PartialState().wait_for_everyone()
        trainer = build_from(self.folder / case, nothing, model=str(path), trainer_class=Spy)
        session = trl_replay.attach(trainer, replay_scope="gathered")
        try:
            told = str(session.add(TEACHER))
        except trl_replay.ReplayError as error:
            told = str(error)
        write({"told": told}, self.folder, case)

    def warmed(self, case):
        """Nothing but groups of a file is replayed; the trainer computes their log-probs."""
        path = self.folder / f"teacher.{RANK}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in TEACHER))
        trainer = self.trainer(case, 6, live=all_dead, max_steps=3)
        tokenizer = trainer.processing_class
        deviation = torch.tensor([1.0, 0, 0, 0]).std() + 1e-4
        for row in TEACHER:
            prompt, text = (tuple(tokenizer(row[side])["input_ids"]) for side in WHERE)
            key = (prompt, (*text, tokenizer.eos_token_id))
            (logps,) = trainer.logps_of([key])
            trainer.born[key] = (-1, logps.tolist(), float((row["reward"] - 0.25) / deviation))
        self.run(case, trainer, replay_scope="gathered", replay_warm_start=str(path), replay_start=0)


def nothing(completions, **_):
    return [0.0] * len(completions)


def all_live(update, group, rank):
    return 1


def all_dead(update, group, rank):
    return 0


def engine_of(trainer):
    """The object that has the weights during training, and how."""
    model, wrapped = trainer.model, trainer.model_wrapped
    name = type(wrapped).__name__
    if hasattr(wrapped, "zero_optimization_stage"):
        return f"{name}, stage {wrapped.zero_optimization_stage()}"
    here = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
    part = sum(weight.numel() for weight in here) / sum(weight.numel() for weight in model.parameters())
    return f"{name}, {part:.0%} of the weights on a rank"


def main(engine, folder):
    if "forked" not in sys.modules:  # a fork of the tests' process has what makes trainers quick
        sys.path.insert(0, str(Path(__file__).parents[2]))
        import conftest

        conftest.pytest_collection_finish()
    if engine == "fsdp2":
        let_accelerate_shard_on_the_cpu()
    if engine.startswith("zero"):
        let_deepspeed_compile_nothing()
    cases = Cases(folder)
    for scope, rows in ROWS_OF.items():
        cases.whole_and_resumed(scope, rows, replay_scope=scope, replay_buffer_size=CAPACITY[scope])
    shared = {"replay_scope": "gathered", "replay_buffer_size": 2}
    cases.whole_and_resumed("adapter", 6, adapter=True, **shared)
    cases.run("forward", cases.trainer("forward", 6), replay_record="forward", **shared)
    cases.warmed("warm start")
    cases.added_early("added early")
    cases.without_replay("stock")
    cases.run("idle", cases.generating("idle", live=all_live), **shared)
    cases.run("generating", cases.generating("generating", live=mixed), **shared)
    end()


if __name__ == "__main__":
    main(sys.argv[2], Path(sys.argv[1]))
