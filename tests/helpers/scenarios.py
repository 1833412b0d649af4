"""One table of scenarios, in which every loss and gradient is compared with those written down by hand.

And how to train with scripted rewards where something else is looked at.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pictures
import torch
import transformers
from advantages_by_hand import mixed_advantages
from corrected import FAR, MASKED, SHIFTED
from credit import Credit
from generating import PROMPTS, Coins, check_rounds
from methods import EVERY_GROUP, INJECTED, MOST
from methods import SCRIPT as LIVELY
from releases import CLIPPED_RATIOS, SAMPLES_IMAGE_TOKENS
from replaying import build, check_batches, check_losses, loadable_model, watched
from sampling import LENGTHS, StandIn
from support import DEAD, HALF, LIVE, Act, Rewards, logged, plugin, record, replayed, truncating

import trl_replay
from trl_replay.base.validation import Named
from trl_replay.data.types import Batch
from trl_replay.session import Session
from trl_replay.testing import make_tokenizer, make_trainer


@dataclass
class Run:
    """A training that has ended, and what its session's step was given and returned."""

    trainer: Any
    session: Session
    steps: list[tuple[Batch, Batch]]

    @property
    def counters(self):
        return self.session.totals.counters

    @property
    def reasons(self):
        return self.session.totals.reasons

    @property
    def table(self):
        return self.session.buffer.table

    @property
    def replayed(self) -> list[int]:
        return replayed(self.steps, self.trainer.num_generations)

    def logged(self, key: str) -> list[float]:
        return logged(self.trainer, key)


def train(
    made: Any,
    *script: Sequence[Any],
    replaced: int | None = None,
    hooks: dict[str, Callable[..., Any]] | None = None,
    rollout: Callable[..., Any] | None = None,
    file: Any = None,
    at: dict[int, Callable[[Session], Any]] | None = None,
    resume: Any = None,
    **settings: Any,
) -> Run:
    """Trains with scripted rewards, and sees to it that groups were replayed.

    Args:
        made: A folder for the files of a new trainer, or a trainer.
        *script: Rewards of one function, batch by batch; `rewards` among the settings takes their place.
        replaced: So many groups and no other number; None is any number but 0.
        hooks: Functions of the plugin `mine`.
        rollout: The trainer's rollout function.
        file: Rows that are added before training.
        at: By update, what is done with the session after it; 0 is before training.
        resume: A checkpoint.
        **settings: Of replay, which starts at once, and of the trainer.
    """
    replay = {name: settings.pop(name) for name in list(settings) if name.startswith(("replay_", "use_replay"))}
    if "replay_preset" not in replay:
        replay = {"replay_start": 0, **replay}
    if isinstance(made, Path):
        made = make_trainer(made, settings.pop("rewards", None) or Rewards(*script), **settings)
        made.rollout_func = rollout
    else:
        assert not settings.keys() - {"prompts"}, "settings of a trainer that is there"
    with contextlib.ExitStack() as stack:
        if hooks:
            replay["replay_plugins"] = stack.enter_context(plugin(**hooks))
        session = trl_replay.attach(made, **replay)
        steps = record(session)
        if file is not None:
            assert session.add(file) > 0
        if at:
            at.get(0, lambda session: None)(session)
            made.add_callback(Act({update: (lambda act=act: act(session)) for update, act in at.items()}))
        made.train(resume_from_checkpoint=resume)
    found = session.totals.counters["replaced"]
    assert found == replaced if replaced is not None else found > 0, session.explain()
    return Run(made, session, steps)


class Scenario(NamedTuple):
    """Settings of the trainer and of replay; rewards batch by batch where they are not those that fit."""

    training: dict[str, Any]
    replay: dict[str, Any]
    rewards: Any = None


SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD], [MOST, DEAD, DEAD])
ACCUMULATED = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
SEQUENCE = {"importance_sampling_level": "sequence"}
ONE_ROW = {**INJECTED, "replay_mixer": "inject(rows=1)"}
REFILLED = {"replay_refill": "new(rounds=2)"}
EXCLUDED = {"replay_unfilled": "exclude", "replay_max_fraction": 0.4}


def correction(name: str, **settings: Any) -> dict[str, Any]:
    return {"replay_correction": name, **settings}


ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # whole groups
    "dapo": ({}, {}),
    "dr_grpo, two iterations": ({"loss_type": "dr_grpo", "num_iterations": 2}, {}),
    "luspo, sequence level, beta": ({"loss_type": "luspo", "beta": 0.1, **SEQUENCE}, {}),
    "sapo": ({"loss_type": "sapo"}, {}),
    "two-sided clipping, two updates a batch": (
        {"delta": 1.5, "epsilon_high": 0.4, "steps_per_generation": 2, "gradient_accumulation_steps": 1,
         "per_device_train_batch_size": 6}, {},
    ),
    "truncated completions masked, beta": ({"mask_truncated_completions": True, "beta": 0.1}, {}),
    "LoRA, beta": ({"lora": True, "beta": 0.1}, {}),
    # what else becomes of dead groups
    "excluded, grpo, accumulation": ({"loss_type": "grpo", **ACCUMULATED}, EXCLUDED),
    "excluded, dapo, beta": ({"beta": 0.1}, EXCLUDED),
    "generated again and mixed": ({"loss_type": "dr_grpo"}, {**REFILLED, **ONE_ROW, "replay_advantages": "joint"}),
    # corrections and gates
    "half of token weights: truncated, beta": ({"beta": 0.1}, correction("truncated", replay_weight=0.5)),
    "token weights: a mask, grpo": ({"loss_type": "grpo"}, correction(MASKED)),
    "shifted advantages, sequence level, accumulation": (
        {"loss_type": "grpo", **SEQUENCE, **ACCUMULATED}, correction(SHIFTED),
    ),
    "ratios at both bounds, vespo, beta": ({"loss_type": "vespo", "beta": 0.1}, correction(FAR)),
    "capped weights, accumulation": ({**ACCUMULATED}, {"replay_weight": 0.5, "replay_max_weight": 0.45}),
    # rows
    "rows: split, bnpo, accumulation": (
        {"loss_type": "bnpo", **ACCUMULATED}, {**INJECTED, "replay_advantages": "split"},
    ),
    "rows: stored, any prompt, vespo": (
        {"loss_type": "vespo"},
        {"replay_mixer": "inject(rows=3)", "replay_advantages": "stored", **EVERY_GROUP},
    ),
}  # fmt: skip
COMBINATIONS = {name: Scenario(*row) for name, row in ROWS.items()}
KL: dict[str, Any] = {
    "all": None,
    "fresh": lambda replayed, wrong: not replayed,
    "all_wrong": lambda replayed, wrong: wrong and not replayed,
}
"""Of a row: is it replayed, is its group all wrong; does its KL term count."""
GENERATED_AGAIN = Scenario(
    {"max_steps": 6, "rows": [{"prompt": prompt} for prompt in PROMPTS]}, {**REFILLED, "replay_buffer_size": 0}
)


def gate(replay: dict[str, Any], level: str) -> Callable[..., torch.Tensor]:
    """The weights by hand that `replay_weight` and `replay_max_weight` leave of a row's."""
    cap = replay.get("replay_max_weight", math.inf)

    def gated(new: torch.Tensor, behavior: torch.Tensor, old: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        weights = weights * replay.get("replay_weight", 1.0)
        logs = (new - old).double()
        total = weights * (logs if level == "token" else logs.mean()).exp()
        return weights * torch.where(total > cap, cap / total, 1.0)

    return gated


def experts(family: str) -> Any:
    """A tiny mixture of experts."""
    shape = pictures.text_settings(make_tokenizer())
    if family == "Qwen2Moe":
        shape |= {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    else:
        shape |= {"num_local_experts": 4}
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**shape))


def made(folder: Any, settings: dict[str, Any], rewards: Any, make: Callable[..., Any] = build) -> Any:
    """The trainer of a scenario."""
    settings = {"max_steps": 4, "learning_rate": 2e-2, "max_completion_length": 5, **settings}
    arguments: dict[str, Any] = {}
    if settings.pop("lora", False):
        from peft import LoraConfig

        targets = ["q_proj", "v_proj", "down_proj"]
        arguments["peft_config"] = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    elif settings.get("beta"):
        settings["model"] = loadable_model(folder)
    if "experts" in settings:
        settings["model"] = experts(settings.pop("experts"))
    counts = settings.pop("images", ())
    if counts:
        settings["model"], settings["tokenizer"] = pictures.qwen2_vl()
        numbers = [int(row["prompt"]) for row in settings.pop("rows")]
        arguments["train_dataset"] = pictures.dataset(counts).select(numbers * 16)
        if SAMPLES_IMAGE_TOKENS:
            settings["generation_kwargs"] = {"suppress_tokens": [settings["model"].config.image_token_id]}
    if settings.pop("truncating", False):
        settings |= {"mask_truncated_completions": True, "max_completion_length": 12}
        arguments["rollout_func"] = truncating()
    if "rollout" in settings:
        arguments["rollout_func"] = settings.pop("rollout")
    if settings.pop("tokens", False):
        settings["trainer_class"] = Credit
    sampled = settings.pop("sampled", "")
    if sampled:
        settings |= {"vllm_importance_sampling_mode": sampled, "max_completion_length": 6, **CLIPPED_RATIOS}
    trainer = make(folder, rewards, arguments=arguments, **settings)
    if sampled:
        StandIn(trainer, LENGTHS)
    return trainer


def rewards_of(case: Scenario) -> Any:
    """Those of a scenario."""
    if "replay_refill" in case.replay:
        return Coins(0.4)
    fitting = LIVELY if "replay_mixer" in case.replay else SCRIPT
    return Rewards(*(case.rewards or fitting))


def follow(folder: Any, name: str | Scenario, make: Callable[..., Any] = build, **settings: Any) -> tuple[Any, Any]:
    """Trains a scenario, and compares every batch, loss and gradient; returns the trainer and the session.

    Args:
        folder: For the trainer's files.
        name: Of the scenario, or one that is not in the table.
        make: Makes the trainer: `build`, or as it.
        settings: Of the trainer, on top of the scenario's.
    """
    case = COMBINATIONS[name] if isinstance(name, str) else name
    rewards = rewards_of(case)
    trainer = made(folder, {**case.training, **settings}, rewards, make)
    trainer.alone = isinstance(name, str) and name in COMBINATIONS
    session = compared(trainer, case.replay)
    watch, rounds = trainer.watch, session.config.refill.rounds
    if make is not build:
        return trainer, session  # Unsloth's trainer counts tokens by itself
    if rounds and trainer.scale_rewards == "group" and not isinstance(trainer, Credit):
        check_rounds(trainer, rewards, watch, rounds)
    for number, (_, after) in enumerate(watch.steps):
        assert int(after["num_items_in_batch"]) == watch.items(number), "tokens of the rows that count"
    return trainer, session


def compared(trainer: Any, replay: dict[str, Any], gradients: bool = True) -> Session:
    """Trains with replay, and compares every loss, gradient and batch with those by hand, unless not asked to."""
    generates = "replay_refill" in replay
    trainer.correction = Named.read(replay.get("replay_correction", "ratio")).name
    trainer.gate = gate(replay, trainer.args.importance_sampling_level)
    trainer.gradients = gradients
    session = trl_replay.attach(trainer, **{"replay_start": 0, **replay})
    watch = watched(trainer, session)
    mode = replay.get("replay_advantages")
    if mode and not isinstance(trainer, Credit):
        rules = trainer.reward_weights.tolist(), trainer.scale_rewards, trainer.multi_objective_aggregation
        watch.advantages = lambda step: mixed_advantages(watch, step, mode, *rules)
    trainer.train()
    check_batches(watch)
    check_losses(trainer, replays=not generates)
    assert len(trainer.gradient_errors) == len(trainer.compared) * trainer.gradients
    assert all(error < 1e-3 for error in trainer.gradient_errors)
    counts = session.totals.counters
    assert counts["refilled" if generates else "rows" if mode else "replaced"] > 0
    assert counts["rows"] < watch.size * counts["replaced"] or not mode, "stored rows stand beside fresh ones"
    return session
