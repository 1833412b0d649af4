"""One rank of a launch: dead groups generated again, by scope and layout; results as JSON."""

import os
import warnings

from one_rank import own, rank
from patterns import random_of
from scripted import texts
from support import Spy, plugin, weights_hash

import trl_replay
from trl_replay.testing import make_trainer

PROMPTS = [f"{a}{b}=" for a in range(10) for b in range(10)]
ROUNDS = 2
CASES = {
    "process": {"rows": 8, "replay_scope": "process", "max_steps": 6},
    "gathered": {"rows": 8, "replay_scope": "gathered", "max_steps": 6, "replay_refill": f"same(rounds={ROUNDS})"},
    "batch": {"rows": 8, "replay_scope": "process", "max_steps": 6, "scale_rewards": "batch"},
    "straddling": {"rows": 6, "replay_scope": "gathered", "max_steps": 6},
    "straddling, scaled": {"rows": 6, "replay_scope": "gathered", "max_steps": 6, "scale_rewards": "batch"},
    "no buffer": {"rows": 8, "replay_scope": "process", "replay_buffer_size": 0, "max_steps": 6},
}
THREE = {
    "many": {"rows": 8, "replay_scope": "process", "max_steps": 34, "replay_buffer_size": 0},
    "straddling": {"rows": 4, "size": 3, "replay_scope": "gathered", "max_steps": 6},
}
"""On three ranks; of uneven needs a hundred patterns, one after each generation."""
SIZE = 4


def successes(call, group, rank, size):
    """The number of a group's rows that get a reward: each rank has its own chance of a live group."""
    chance = (0.7, 0.3, 0.1)[rank]
    random = random_of("successes", call, group)
    return int(random.integers(1, size)) if random.random() < chance else int(random.choice([0, size]))


class Script:
    """Completions and rewards of one rank, call by call."""

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size
        self.calls = []
        self.__name__ = "scripted"

    def rollout(self, prompts, trainer):
        tokenizer = trainer.processing_class
        first = self.rank * len(prompts)
        ids = []
        for row in range(first, first + len(prompts)):
            random = random_of("text", len(self.calls), row)
            ids.append(random.integers(16, 42, random.integers(2, 5)).tolist())
        told = [tokenizer.decode(row) for row in ids]
        self.calls.append({"texts": [f"{prompt}>{text}" for prompt, text in zip(prompts, told, strict=True)]})
        encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": encoded, "completion_ids": ids, "logprobs": None}

    def __call__(self, completions, **_):
        call = len(self.calls) - 1
        rewards = []
        for row in range(self.rank * len(completions), (self.rank + 1) * len(completions)):
            group, place = divmod(row, self.size)
            owner = group * self.size // len(completions)
            rewards.append(float(place < successes(call, group, owner, self.size)))
        self.calls[-1]["rewards"] = rewards
        return rewards


def build(folder, rank, rows, size=SIZE, **settings):
    script = Script(rank, size)
    defaults = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "ddp_timeout": 120}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(
            folder, script, PROMPTS, Spy, per_device_train_batch_size=rows, num_generations=size,
            gradient_checkpointing=False, **{**defaults, **settings},
        )  # fmt: skip
    trainer.rollout_func = script.rollout
    return trainer, script


def trained(folder, rank, **settings):
    """The record of a training on this rank: every call, and every batch that was made of them."""
    replay = {name: settings.pop(name) for name in list(settings) if name.startswith("replay_")}
    trainer, script = build(folder, rank, **settings)
    session = trl_replay.attach(
        trainer, **{"replay_refill": f"new(rounds={ROUNDS})", "replay_max_fraction": 0.0, **replay}
    )
    steps = []
    step = session.step.take

    def watched(batch, score):
        out = step(batch, score)
        tokenizer = trainer.processing_class
        steps.append(
            {
                "calls": len(script.calls),
                "texts": texts(out, tokenizer),
                "advantages": out["advantages"].tolist(),
                "items": int(out["num_items_in_batch"]),
                "tokens": int(out["completion_mask"].sum()),
                "rounds": session.metrics["replay/rounds"],
                "refilled": session.metrics["replay/refilled_fraction"],
                "rollouts": session.metrics["replay/rollouts"],
                "table": list(trainer._logs["completion"]),
            }
        )
        return out

    session.step.take = watched
    trainer.train()
    assert session.step.rounds is not None
    return {
        "calls": script.calls,
        "steps": steps,
        "weights": weights_hash(trainer),
        "tries": int(session.step.rounds.table.tries.sum()),
        "size": len(session.buffer),
    }


def differing(folder, rank):
    """A training in which rank 1 asks for prompts of its own."""

    def inputs(groups_of_rows, context):
        other = rank == 1 and context.update == 1
        return [{"prompt": "9999="}] * len(groups_of_rows) if other else None

    with plugin(inputs=inputs) as name:
        trainer, _ = build(folder, rank, 6, max_steps=4)
        trl_replay.attach(trainer, replay_refill="new(rounds=1)", replay_scope="gathered", replay_plugins=name)
        trainer.train()


def cases(launched):
    folder, two = own(launched), os.environ["WORLD_SIZE"] == "2"
    for name, settings in (CASES if two else THREE).items():
        yield name, lambda s=settings: trained(folder, rank(), **s)
    if two:
        yield "differs", lambda: differing(folder, rank())
