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

import numpy as np
import torch
from advantages_by_hand import mixed_advantages
from corrected import CORRECTIONS, MASKED, PROXIMAL, SHIFTED, TWO_LOSSES, allowed
from credit import Credit
from generating import PROMPTS, Coins, check_rounds
from idle import LAYOUTS
from loss_by_hand import reference_loss
from methods import EVERY_GROUP, INJECTED, MOST, SAME_PROMPT
from methods import SCRIPT as LIVELY
from replaying import ITERATED, ITERATING, build, check_batches, check_losses, loadable_model, watched
from support import (
    DEAD,
    HALF,
    LIVE,
    LOSSES,
    WINDOW,
    Act,
    Rewards,
    logged,
    masked_rollout,
    plugin,
    record,
    replayed,
    truncating,
)

import trl_replay
from trl_replay.base.validation import Named
from trl_replay.data.types import Batch
from trl_replay.session import Session
from trl_replay.testing import make_trainer


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
    """Settings of the trainer and of replay; rewards batch by batch where they are not those that fit, by the name of
    their function if there are several; and whether losses are compared, and not gradients alone."""

    training: dict[str, Any]
    replay: dict[str, Any]
    rewards: Any = None
    losses: bool = True


SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD], [MOST, DEAD, DEAD])
ACCUMULATED = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
MEANS_OVER_ROWS = ("grpo", "dr_grpo", "sapo", "luspo")
SEQUENCE = {"importance_sampling_level": "sequence"}
ONE_ROW = {**INJECTED, "replay_mixer": "inject(rows=1)"}
REFILLED = {"replay_refill": "new(rounds=2)"}
EXCLUDED = {"replay_unfilled": "exclude", "replay_max_fraction": 0.4}


def correction(name: str, **settings: Any) -> dict[str, Any]:
    return {"replay_correction": name, **settings}


PER = correction("per(beta=0.5, final_beta=0.5)", replay_sampler="proportional")
"""Scores are sum |A| × std: 1.5 with one or three of four right, 2 with two, which so weigh (4/3)^-0.5."""


def of_loss(loss: str) -> dict[str, str]:
    """Its settings: LUSPO's loss is that of sequences."""
    return {"loss_type": loss, "importance_sampling_level": "sequence" if loss == "luspo" else "token"}


ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # whole groups
    "dapo": ({}, {}),
    "grpo, beta": ({"loss_type": "grpo", "beta": 0.1}, {}),
    "bnpo, accumulation": ({"loss_type": "bnpo", **ACCUMULATED}, {}),
    "dr_grpo, two iterations": ({"loss_type": "dr_grpo", "num_iterations": 2}, {}),
    "cispo, sequence level": ({"loss_type": "cispo", "epsilon_high": 5.0, **SEQUENCE}, {}),
    "luspo, sequence level, beta": ({"loss_type": "luspo", "beta": 0.1, **SEQUENCE}, {}),
    "vespo": ({"loss_type": "vespo"}, {}),
    "sapo, high-entropy tokens": ({"loss_type": "sapo", "top_entropy_quantile": 0.5}, {}),
    "two-sided clipping, two updates a batch": (
        {"delta": 1.5, "epsilon_high": 0.4, "steps_per_generation": 2, "gradient_accumulation_steps": 1,
         "per_device_train_batch_size": 6}, {},
    ),
    "three iterations over an accumulated window": ({"num_iterations": 3, "max_steps": 9, **ACCUMULATED}, {}),
    "more accumulation than generations": ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, {}),
    "generation not in step with accumulation": (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 3,
         "max_steps": 8}, {},
    ),
    "padding to a multiple": ({"pad_to_multiple_of": 8}, {}),
    "KL not multiplied by the ratio": ({"beta": 0.1, "use_bias_correction_kl": False}, {}),
    "rewards not scaled": ({"scale_rewards": "none"}, {}),
    "the off-policy mask": ({"off_policy_mask_threshold": 1e-3, "loss_type": "grpo"}, {}),
    "truncated completions masked, beta": ({"mask_truncated_completions": True, "beta": 0.1}, {}),
    "LoRA, beta": ({"lora": True, "beta": 0.1}, {}),
    "LoRA, sequence level, accumulation": ({"lora": True, **SEQUENCE, **ACCUMULATED}, {}),
    "a learning rate that drives ratios to their bounds, beta": ({"learning_rate": 0.3, "beta": 0.1}, {}),
    "the same at sequence level": ({"learning_rate": 0.3, "beta": 0.1, "loss_type": "grpo", **SEQUENCE}, {}),
    # what else becomes of dead groups
    "excluded, grpo, accumulation": ({"loss_type": "grpo", **ACCUMULATED}, EXCLUDED),
    "excluded, bnpo": ({"loss_type": "bnpo"}, EXCLUDED),
    "excluded, dapo, beta": ({"beta": 0.1}, EXCLUDED),
    "masked, luspo": ({"loss_type": "luspo", **SEQUENCE}, {**EXCLUDED, "replay_unfilled": "mask"}),
    "generated again": ({"loss_type": "grpo", "beta": 0.1}, REFILLED),
    "generated again, rewards scaled by batch": ({"scale_rewards": "batch"}, REFILLED),
    "generated again and mixed": ({"loss_type": "dr_grpo"}, {**REFILLED, **ONE_ROW, "replay_advantages": "joint"}),
    # corrections and gates
    "half of token weights: truncated, beta": ({"beta": 0.1}, correction("truncated", replay_weight=0.5)),
    "token weights: a mask, grpo, high-entropy tokens": (
        {"loss_type": "grpo", "top_entropy_quantile": 0.6}, correction(MASKED),
    ),
    "token weights: truncated, LoRA": ({"lora": True, "loss_type": "dr_grpo"}, correction("truncated")),
    "token weights: of the proximal policy, cispo, sequence level": (
        {"loss_type": "cispo", **SEQUENCE}, correction(PROXIMAL),
    ),
    "row weights: topr, the off-policy mask": (
        {"off_policy_mask_threshold": 0.02, "loss_type": "grpo", "learning_rate": 5e-2}, correction("topr"),
    ),
    "row weights: topr, sequence level": ({"loss_type": "grpo", **SEQUENCE}, correction("topr")),
    "row weights: sequence_mask, vespo": ({"loss_type": "vespo"}, correction("sequence_mask")),
    "shifted advantages, two iterations, beta": (
        {"num_iterations": 2, "max_steps": 6, "beta": 0.1}, correction(SHIFTED),
    ),
    "shifted advantages, the off-policy mask, half weight": (
        {"off_policy_mask_threshold": 0.02, "loss_type": "grpo", "learning_rate": 5e-2},
        correction(SHIFTED, replay_weight=0.5),
    ),
    "shifted advantages, sequence level, accumulation": (
        {"loss_type": "grpo", **SEQUENCE, **ACCUMULATED}, correction(SHIFTED),
    ),
    "half weight, sapo, beta": ({"loss_type": "sapo", "beta": 0.1}, {"replay_weight": 0.5}),
    "half weight, the same micro-batch twice": (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2}, {"replay_weight": 0.5},
    ),
    "capped weights, accumulation": ({**ACCUMULATED}, {"replay_weight": 0.5, "replay_max_weight": 0.45}),
    "entropy bonus": ({"entropy_coef": 0.05}, {}),
    # rows
    "rows: joint, grpo, beta": ({"loss_type": "grpo", "beta": 0.1}, {**INJECTED, "replay_advantages": "joint"}),
    "rows: split, bnpo, accumulation": (
        {"loss_type": "bnpo", **ACCUMULATED}, {**INJECTED, "replay_advantages": "split"},
    ),
    "rows: stored, any prompt, vespo": (
        {"loss_type": "vespo"},
        {"replay_mixer": "inject(rows=3)", "replay_advantages": "stored", **EVERY_GROUP},
    ),
    "rows: joint, excluded, rewards scaled by batch": (
        {"scale_rewards": "batch"}, {**ONE_ROW, "replay_unfilled": "exclude", "replay_advantages": "joint"},
    ),
    "rows: joint, LoRA, token weights": (
        {"lora": True, "scale_rewards": "none"}, {**INJECTED, **correction("truncated"), "replay_advantages": "joint"},
    ),
    "rows: joint, shifted advantages": (
        {"loss_type": "dr_grpo"}, {**INJECTED, **correction(SHIFTED), "replay_advantages": "joint"},
    ),
    "rows: joint, two iterations, half weight": (
        {"num_iterations": 2, "max_steps": 6}, {**ONE_ROW, "replay_weight": 0.5, "replay_advantages": "joint"},
    ),
    "rows: joint, cispo, sequence level": (
        {"loss_type": "cispo", **SEQUENCE}, {**INJECTED, "replay_advantages": "joint"},
    ),
    "rows: split, sapo, two updates a batch": (
        {"loss_type": "sapo", "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1,
         "steps_per_generation": 2, "max_steps": 8}, {**INJECTED, "replay_advantages": "split"},
    ),
    "rows: joint, truncated completions masked": (
        {"truncating": True, "loss_type": "grpo"}, {**INJECTED, "replay_advantages": "joint"},
    ),
    "rows into dead groups alone, recorded by the loss": (
        {}, {**SAME_PROMPT, "replay_mixer": "inject", "replay_record": "loss", "replay_advantages": "joint"},
    ),
}  # fmt: skip
COMBINATIONS = {name: Scenario(*row) for name, row in ROWS.items()}
UNFILLED = {
    f"{choice} of dead groups, {loss}": Scenario(
        {"loss_type": loss, "beta": 0.3}, {"replay_unfilled": choice, "replay_max_fraction": 0.34},
        ([LIVE, DEAD, HALF], [DEAD, DEAD, DEAD], [DEAD, LIVE, DEAD]),
    )
    for choice in ("mask", "exclude")
    for loss in LOSSES
}  # fmt: skip
FORMS = {
    "ratio": [],  # the behavior log-probs
    "sequence_mask": ["per"],  # and a weight for each row
    MASKED: [],  # and a weight for each token
    "topr": ["none", "imitation"],  # the current log-probs and a weight for each row
    "truncated": [PROXIMAL],  # and a weight for each token
}
"""Of each form the correction that goes through every loss, and those that go through two."""
OTHERS = [other for others in FORMS.values() for other in others]
THREE = {"max_steps": 3}
CORRECTED = {
    f"{name}, {loss}, {level} level, beta={beta}": Scenario(
        {"loss_type": loss, "importance_sampling_level": level, "beta": beta, **THREE},
        PER if name == "per" else correction(name, replay_sampler="newest"),
        ([LIVE, HALF, MOST], [DEAD, LIVE, DEAD]),
    )
    for name, loss, level, beta in (
        *allowed([*FORMS], [0.1]), *allowed([*FORMS], [0.0], TWO_LOSSES), *allowed(OTHERS, [0.1], TWO_LOSSES)
    )
}  # fmt: skip
CAPPED = {
    f"capped: {name}, {loss}, {level} level": Scenario(
        {"loss_type": loss, "importance_sampling_level": level, "beta": 0.1, **THREE},
        correction(name, replay_sampler="newest", replay_weight=0.99, replay_max_weight=1.02),
        ([LIVE, HALF, MOST], [DEAD, LIVE, DEAD]),
    )
    for name, loss, level, _ in (*allowed(["ratio"], [0.1]), *allowed(["truncated", "topr"], [0.1], TWO_LOSSES))
}
AGAIN = {"num_iterations": 3, "max_steps": 9}
TWO_UPDATES = {**WINDOW, "gradient_accumulation_steps": 1}
FURTHER = {
    **{f"further iterations, {loss}": Scenario({**AGAIN, **of_loss(loss)}, ITERATING) for loss in LOSSES},
    **{
        f"further iterations, {loss}, {name}": Scenario(
            {**AGAIN, "max_steps": 14, **of_loss(loss), **layout}, ITERATING
        )
        for name, layout, losses in (("accumulation", WINDOW, LOSSES), ("two updates", TWO_UPDATES, MEANS_OVER_ROWS))
        for loss in losses
    },
    **{
        f"further iterations, {name}, {level} level": Scenario(
            {**AGAIN, "loss_type": "grpo", "importance_sampling_level": level},
            {**ITERATING, **(PER if name == "per" else correction(name))},
        )
        for name, _, level, _ in allowed([*CORRECTIONS, MASKED, PROXIMAL, "per"], [0.0], ["grpo"])
    },
    "further iterations, LoRA, beta": Scenario({**AGAIN, "lora": True, "beta": 0.1}, ITERATING),
}
KL: dict[str, Any] = {
    "all": None,
    "fresh": lambda replayed, wrong: not replayed,
    "all_wrong": lambda replayed, wrong: wrong and not replayed,
}
"""Of a row: is it replayed, is its group all wrong; does its KL term count."""
RIGHT = [1.0, 1.0, 1.0, 1.0]
REFERRED = ([LIVE, HALF, LIVE], [DEAD, RIGHT, LIVE], [RIGHT, HALF, DEAD])
OF_REFERENCE = {
    f"the KL term of {kl} rows, {loss}, {iterations} iterations": Scenario(
        {"beta": 0.3, "num_iterations": 2, "max_steps": 10, "loss_type": loss},
        {"replay_kl": kl, "replay_iterations": iterations, **EVERY_GROUP, "replay_selector": "always(share=0.7)",
         "replay_record": "loss"},
        REFERRED,
    )
    for kl in KL
    for loss, iterations in (("dapo", "same"), ("grpo", "replay"), ("bnpo", "replay"), ("grpo", "same"))
}  # fmt: skip
ENTROPY = {
    f"the entropy bonus, {loss}, {quantile}, {name}": Scenario(
        {**AGAIN, **of_loss(loss), "entropy_coef": 0.5, "top_entropy_quantile": quantile, "learning_rate": 1e-2},
        {"replay_max_fraction": 0.34, **settings},
        ITERATED,
        losses=False,
    )
    for name, settings, losses in (
        ("further iterations", ITERATING, LOSSES[::2]), ("dead groups", {"replay_unfilled": "exclude"}, LOSSES[1::2])
    )
    for loss, quantile in (*((loss, 1.0) for loss in losses), ("grpo", 0.37), ("dapo", 0.37))
}  # fmt: skip
OTHER = (
    [[0.5, 0.1, 0.2, 0.9], [0.3, 0.3, 0.1, 0.0], [0.2, 0.8, 0.7, 0.1]],
    [[0.1, 0.2, 0.3, 0.4], [0.9, 0.1, 0.5, 0.5], [0.0, 0.4, 0.4, 0.2]],
)
RULES = [
    {"scale_rewards": scale, "multi_objective_aggregation": aggregation}
    for scale in ("group", "batch", "none")
    for aggregation in ("sum_then_normalize", "normalize_then_sum")
]


def every_second(table, drawn, slots, context):
    """A mixer: the first two rows of the drawn entry, in every second slot."""
    taken = np.full((len(drawn), 4), -1)
    taken[context.update % 2 :: 2, :2] = [0, 1]
    return taken


MIXED = {
    **{
        f"rows: {mode}": Scenario({"max_steps": 6}, {**INJECTED, "replay_advantages": mode})
        for mode in ("auto", "stored", "joint", "split")
    },
    **{
        f"rows: {mode}, two functions, {', '.join(rule.values())}": Scenario(
            {"max_steps": 6, "loss_type": "grpo", "reward_weights": [1.0, 0.7], **rule},
            {**INJECTED, "replay_advantages": mode}, {"scripted": LIVELY, "other": OTHER},
        )
        for mode in ("joint", "split")
        for rule in RULES
    },
    **{
        f"rows: {mode}, slots that stay fresh by {name}, {', '.join(rule.values())}": Scenario(
            {"max_steps": 8, **rule}, {**INJECTED, "replay_advantages": mode, **settings}
        )
        for mode in ("joint", "split")
        for rule in RULES[1:3]
        for name, settings in (
            ("a limit", {"replay_max_fraction": 0.34}),
            ("a mixer", {"replay_mixer": every_second}),
        )
    },
    "rows: joint, masks of tools": Scenario(
        {"max_steps": 6, "rollout": masked_rollout}, {**INJECTED, "replay_advantages": "joint"}
    ),
}  # fmt: skip
OF_ROUNDS: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "thirds of a batch": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
    "truncated completions masked": {"mask_truncated_completions": True},
    "padded to multiples": {"pad_to_multiple_of": 8},
    "a rollout function": {"rollout": masked_rollout},
}
GENERATED_AGAIN = {
    f"generated again, {name}": Scenario(
        {**layout, "max_steps": 6, "rows": [{"prompt": prompt} for prompt in PROMPTS]},
        {**REFILLED, "replay_buffer_size": 0},
    )
    for name, layout in OF_ROUNDS.items()
}  # fmt: skip
OTHERS_OF_TOKENS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo, sequence level": ({"loss_type": "grpo", **SEQUENCE}, {}),
    "cispo": ({"loss_type": "cispo"}, {}),
    "rows": (
        {}, {"replay_mixer": "inject(rows=3)", "replay_advantages": "stored",
             "replay_sampler": "uniform"},
    ),
    "topr": ({"learning_rate": 5e-2}, correction("topr")),
    "shifted": ({"learning_rate": 5e-2}, correction(SHIFTED)),
}  # fmt: skip
OF_TOKENS = {
    f"an advantage for each token: {name}": Scenario({**training, "tokens": True}, replay)
    for name, (training, replay) in {
        **OTHERS_OF_TOKENS,
        **{
        name: ROWS[name]
        for name in (
            "dapo", "grpo, beta", "bnpo, accumulation", "dr_grpo, two iterations", "luspo, sequence level, beta",
            "vespo", "sapo, high-entropy tokens", "two-sided clipping, two updates a batch",
            "excluded, grpo, accumulation", "generated again", "half of token weights: truncated, beta",
            "half weight, sapo, beta",
        )},
    }.items()
}  # fmt: skip
SCENARIOS = {
    **COMBINATIONS, **OF_TOKENS, **UNFILLED, **CORRECTED, **CAPPED, **FURTHER, **OF_REFERENCE, **ENTROPY, **MIXED,
    **GENERATED_AGAIN,
}  # fmt: skip


def gate(replay: dict[str, Any], level: str) -> Callable[..., torch.Tensor]:
    """The weights by hand that `replay_weight` and `replay_max_weight` leave of a row's."""
    cap = replay.get("replay_max_weight", math.inf)

    def gated(new: torch.Tensor, behavior: torch.Tensor, old: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        weights = weights * replay.get("replay_weight", 1.0)
        logs = (new - old).double()
        total = weights * (logs if level == "token" else logs.mean()).exp()
        return weights * torch.where(total > cap, cap / total, 1.0)

    return gated


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
    if settings.pop("truncating", False):
        settings |= {"mask_truncated_completions": True, "max_completion_length": 12}
        arguments["rollout_func"] = truncating()
    if "rollout" in settings:
        arguments["rollout_func"] = settings.pop("rollout")
    if settings.pop("tokens", False):
        settings["trainer_class"] = Credit
    return make(folder, rewards, arguments=arguments, **settings)


def rewards_of(case: Scenario) -> Any:
    """Those of a scenario."""
    if "replay_refill" in case.replay:
        return Coins(0.4)
    if isinstance(case.rewards, dict):
        return [Rewards(*script, name=name) for name, script in case.rewards.items()]
    fitting = ITERATED if "replay_iterations" in case.replay else LIVELY if "replay_mixer" in case.replay else SCRIPT
    return Rewards(*(case.rewards or fitting))


def follow(folder: Any, name: str | Scenario, make: Callable[..., Any] = build, **settings: Any) -> tuple[Any, Any]:
    """Trains a scenario, and compares every batch, loss and gradient; returns the trainer and the session.

    Args:
        folder: For the trainer's files.
        name: Of the scenario, or one that is not in the table.
        make: Makes the trainer: `build`, or as it.
        settings: Of the trainer, on top of the scenario's.
    """
    case = SCENARIOS[name] if isinstance(name, str) else name
    rewards = rewards_of(case)
    trainer = made(folder, {**case.training, **settings}, rewards, make)
    trainer.alone = isinstance(name, str) and name in COMBINATIONS
    session = compared(trainer, case.replay, losses=case.losses)
    watch, rounds = trainer.watch, session.config.refill.rounds
    if make is not build:
        return trainer, session  # Unsloth's trainer counts tokens by itself
    if rounds and trainer.scale_rewards == "group" and not isinstance(trainer, Credit):
        check_rounds(trainer, rewards, watch, rounds)
    for number, (_, after) in enumerate(watch.steps):
        assert int(after["num_items_in_batch"]) == watch.items(number), "tokens of the rows that count"
    return trainer, session


def compared(
    trainer: Any, replay: dict[str, Any], gradients: bool = True, batches: bool = True, losses: bool = True
) -> Session:
    """Trains with replay, and compares every loss, gradient and batch with those by hand, unless not asked to: batches
    that hold copies, which are neither fresh rows nor an entry's, are not."""
    args, generates = trainer.args, "replay_refill" in replay
    means = args.loss_type in MEANS_OVER_ROWS and args.steps_per_generation > 1
    iterates = replay.get("replay_iterations") == "replay"
    together = means and iterates
    trainer.correction = Named.read(replay.get("replay_correction", "ratio")).name
    trainer.gate = gate(replay, args.importance_sampling_level)
    trainer.gradients = gradients and not together
    session = trl_replay.attach(trainer, **{"replay_start": 0, **replay})
    watch = watched(trainer, session)
    watch.counts_kl = KL[replay.get("replay_kl", "all")]
    mode = replay.get("replay_advantages")
    if mode and not isinstance(trainer, Credit):
        rules = trainer.reward_weights.tolist(), trainer.scale_rewards, trainer.multi_objective_aggregation
        watch.advantages = lambda step: mixed_advantages(watch, step, mode, *rules)
    trainer.train()
    if watch.counts_kl is None and batches:
        check_batches(watch)
    if together:
        check_together(trainer)
    elif losses:
        check_losses(trainer, replays=batches and not generates)
    assert len(trainer.gradient_errors) == len(trainer.compared) * trainer.gradients
    assert all(error < 1e-3 for error in trainer.gradient_errors)
    if not batches:
        return session
    counts = session.totals.counters
    assert counts["iterated" if iterates else "refilled" if generates else "rows" if mode else "replaced"] > 0
    assert counts["rows"] < watch.size * counts["replaced"] or not mode, "stored rows stand beside fresh ones"
    return session


def check_together(trainer):
    """A mean over rows is scaled by the rows of the whole iteration: its two micro-batches are compared together."""
    updates = 2 / trainer.args.gradient_accumulation_steps
    assert any(replayed for _, _, replayed in trainer.compared)
    for first in range(0, len(trainer.compared) - 1, 2):
        found = sum(loss for loss, _, _ in trainer.compared[first : first + 2])
        both = trainer.by_hand[first] + trainer.by_hand[first + 1]
        expected = reference_loss(trainer, both, whole=True) * updates if both else 0.0
        assert math.isclose(found, expected, rel_tol=2e-4, abs_tol=2e-5), first
