"""Any settings together: batches, losses and gradients are those by hand, and decisions those of a naive list.

Every value of a setting is in equally many runs, and two values of different settings meet as often as any others.
"""

import math
import random
import warnings
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import torch
import transformers
from corrected import FAR, MASKED, NARROW, PER, PROXIMAL, SHIFTED, TOPR_BY_TOKEN
from log_by_hand import LossLog
from naive import BYTES_REACHED, DROPPING, REPEATED, RULE_CHANGED, SIZE, Naive, shaped
from releases import TRL, Version
from replaying import Checked, check_batches, check_losses, watched
from scenarios import KL, gate, made
from support import DEAD, HALF, LIVE, LOSSES, Act, Rewards, masked_rollout, plugin
from trl import GRPOTrainer
from users_losses import backwards, both, giving, rows_of, teacher, trimmed_in_a_copy

import trl_replay
from trl_replay.checkpoint import saving
from trl_replay.data.plan import EMPTY

RIGHT, MOST, FAILED = [1.0] * 4, [1.0, 1.0, 1.0, 0.0], [1.0, None, 0.75, 0.0]
MIDDLE = [1.0, 0.5, 0.0, 0.5]
"""The rows that end where others are truncated have an advantage of 0."""
TWO_UPDATES = {"per_device_train_batch_size": 6, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
ACCUMULATED = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
SEVERAL = {"reward_weights": [1.0, 0.5]}
BONUS, CONTROL, BOTH, EXPERTS = {}, {}, {}, {}
if Version("1.7.0") <= TRL:
    EXPERTS = {"experts": "Qwen2Moe", "router_aux_loss_coef": 0.5}
if Version("1.10.0") <= TRL:
    BONUS = {"entropy_coef": 0.05}
    BOTH = {**BONUS, "top_entropy_quantile": 0.386}
    CONTROL = {**BOTH, "use_adaptive_entropy": True, "entropy_target": 3.6, "entropy_coef_delta": 0.02}
PICTURED = {"images": (2, 1, 1, 3, 1, 2)}
SPARSELY = {"images": (2, 0, 1, 0, 0, 0)}
AGAIN = {"replay_refill": "same(rounds=1)"}
ROWS = {"replay_selector": "always(share=1.0)"}
EVERY = {**ROWS, "replay_record": "forward"}
WEIGHTED = ("proportional", "prompt_balanced")
AXES = {
    "loss": LOSSES,
    "level": ["token", "token", "sequence"],
    "beta": [{}, {"replay_kl": "all"}, {"replay_kl": "fresh"}, {"replay_kl": "all_wrong"}],
    "layout": [
        {}, {"num_iterations": 2, "max_steps": 12}, ACCUMULATED, {**TWO_UPDATES, "max_steps": 13},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 3,
         "max_steps": 11},
    ],
    "kind": [
        {}, {"replay_selector": "always(share=0.7)", "replay_record": "loss"}, {"replay_iterations": "replay"},
        {**ROWS, "replay_record": "forward", "replay_advantages": "joint"},
        {}, EVERY, {"replay_iterations": "replay"},
        {**ROWS, "replay_record": "loss", "replay_advantages": "split"},
        {"replay_advantages": "stored"}, {**ROWS, "replay_record": "forward", "replay_advantages": "auto"},
    ],
    "scale": ["group", "batch", "none"],
    "functions": [{}, {}, SEVERAL, {**SEVERAL, "multi_objective_aggregation": "normalize_then_sum"}],
    "completions": [
        {}, {}, {"truncating": True}, {"rollout": masked_rollout}, {"max_completion_length": 1},
        {"sampled": "token_truncate"}, {"sampled": "sequence_mask", "off_policy_mask_threshold": 0.02},
    ],
    "correction": [
        "ratio", "truncated", "topr", "imitation", "sequence_mask", "none", MASKED, PROXIMAL, SHIFTED, FAR,
        TOPR_BY_TOKEN, PER, NARROW,
    ],
    "weight": [{}, {}, {"replay_weight": 0.5}, {"replay_max_weight": 1.02},
               {"replay_weight": 0.8, "replay_max_weight": 0.7}],
    "unfilled": ["keep", "mask", "exclude"],
    "plugin": ["", "", "advantages", "plan"],
    "sampler": ["uniform", "newest", "top", "least_used", "proportional", "prompt_balanced"],
    "size": [2, 3, 4, 64],
    "scorer": ["advantage_std", "reward_std", "mean_reward", "recency", "constant"],
    "evictor": ["heap", "fifo", "prompt_balanced", "reservoir", DROPPING],
    "fraction": [1.0, 0.67, 0.34],
    "rows": [2, 1, 3],
    "counting": [{}, {"replay_reward": "scripted"}],
    "age": [{}, {}, {"replay_max_age": 4}],
    "uses": [{}, {}, {"replay_max_uses": 1}, {"replay_max_uses": 2}],
    "bytes": [{}, {}, {"replay_max_bytes": 1800}],
    "change": ["", "", "reward_weights", "max_completion_length"],
    "start": [0, 0, 2, "pass_rate(0.4)", "adaptive"],
    "saved": [{}, {"save_strategy": "steps", "save_steps": 6}],
    "solved": [{}, {}, {}, {"replay_retire_passes": 3}],
    "rewards": [0.0, 0.0, 100.1, -0.25],
    "prompts": [[[0, 1, 2]], [[0, 1, 2], [3, 4, 5]], [[0, 1, 2]], [[0, 1, 0], [2, 0, 1]]],
    "logging": [1, 1, 3],
    "refill": [{}, {}, {}, {"replay_refill": "same(rounds=2, until=0.6)"}, AGAIN],
    "class": [
        "GRPOTrainer", "GRPOTrainer", "Copied", "Reordered", "Trimmed", "Masking", "Column", "Rescoring",
    ],
    "trainer": [{}, {}, {}, {"pad_to_multiple_of": 8}, {"lora": True}, {"tokens": True}, PICTURED, SPARSELY, EXPERTS],
    "other": [
        {}, {"temperature": 0.7}, {"top_entropy_quantile": 0.55}, BONUS, BOTH,
        CONTROL, {"off_policy_mask_threshold": 0.02},
        {"use_bias_correction_kl": False}, {"delta": 1.5, "epsilon_high": 0.4}, {"learning_rate": 0.04},
    ],
}  # fmt: skip
"""Quantiles lie between two tokens' entropies: where they fall on one, its last bit decides whether it trains."""
PROMPTS = ("1=", "12=", "123+4=", "7=", "89=", "5+6=")
"""Of two batches: the longest ones are not equally long."""
TEXTLESS = {"beta": {}, "completions": {}, "class": "GRPOTrainer", "saved": {}}
TOGETHER = (
    ("correction", PROXIMAL, {"class": "Reordered", "layout": {"num_iterations": 2, "max_steps": 12}}),
    ("other", BONUS, {"unfilled": "exclude", "layout": ACCUMULATED, "loss": "grpo"} if BONUS else {}),
    ("correction", PER, {"scorer": "mean_reward", "rewards": -0.25}),
    ("correction", NARROW, {"kind": EVERY, "layout": {"num_iterations": 2, "max_steps": 14}}),
    ("class", "Trimmed", {"completions": {"truncating": True}}),
    ("trainer", PICTURED, TEXTLESS),
    ("trainer", SPARSELY, {**TEXTLESS, "prompts": [[0, 1, 2], [3, 4, 5]], "layout": {}, "refill": AGAIN}),
    ("trainer", EXPERTS, {"beta": {}} if EXPERTS else {}),
)
"""An axis, one of its values, and values of others without which that is not seen, or that it can't have."""
SINGLE = ("scorer", "evictor", "sampler", "correction", "unfilled", "start")
RUNS = 36


def covering(axes, runs):
    """For each run a value of each axis: each equally often, and its pairs with those of the others evenly, too."""
    chance, found = random.Random(0), [{} for _ in range(runs)]
    for name, values in axes.items():
        pairs, left = Counter(), [runs // len(values)] * len(values)
        for number in chance.sample(range(len(values)), runs % len(values)):
            left[number] += 1
        for run in chance.sample(found, runs):
            met = {
                number: sum(pairs[number, other] for other in run.items())
                for number in range(len(values))
                if left[number]
            }
            number = min(met, key=lambda number: (met[number] / left[number], chance.random()))
            pairs.update((number, other) for other in run.items())
            left[number] -= 1
            run[name] = number
    return [{name: axes[name][number] for name, number in run.items()} for run in found]


def settings_of(chosen):
    """Those of the trainer and of replay, where they go together; and what a plugin edits."""
    for name, value, others in TOGETHER:
        chosen |= others if chosen[name] == value else {}
    level = "sequence" if chosen["loss"] == "luspo" else chosen["level"]
    training = {
        "loss_type": chosen["loss"], "importance_sampling_level": level, "scale_rewards": chosen["scale"],
        "max_steps": 9, "logging_steps": chosen["logging"], "beta": 0.1 if chosen["beta"] else 0.0,
        **chosen["layout"], **chosen["functions"], **chosen["completions"], **chosen["trainer"], **chosen["other"],
        **chosen["saved"],
    }  # fmt: skip
    replay = {
        **chosen["kind"], **chosen["weight"], **chosen["age"], **chosen["uses"], **chosen["solved"], **chosen["beta"],
        **chosen["refill"], **chosen["bytes"],
        **(chosen["counting"] if "reward_weights" in chosen["functions"] else {}),
        **{f"replay_{name}": chosen[name] for name in SINGLE},
        "replay_buffer_size": 64 if chosen["start"] == "adaptive" else chosen["size"],
        "replay_max_fraction": chosen["fraction"], "replay_pass_reward": 0.5,
    }  # fmt: skip
    if "images" in training:
        replay = {"replay_record": "forward", **replay}
        replay |= {"replay_max_bytes": 500_000} if "replay_max_bytes" in replay else {}
    edits = chosen["plugin"]
    replay["replay_pass_reward"] += chosen["rewards"]
    if chosen["class"] in OWN and "tokens" not in training:
        training["trainer_class"] = type("Own", (Checked, OWN[chosen["class"]]), {})
    if chosen["loss"] == "luspo" and Version("1.14.0") > TRL:  # its mean held padding, where a term has all tokens
        training["beta"] = 0.0
        replay.pop("replay_kl", None)
        training = {
            key: value for key, value in training.items() if key not in ("tokens", "top_entropy_quantile", "sampled")
        }
    numbers = [number for batch in chosen["prompts"] for number in batch]
    training["rows"] = [{"prompt": str(number) if "images" in training else PROMPTS[number]} for number in numbers]
    if chosen["completions"] or len({*chosen["prompts"][0]}) < 3:
        training.pop("top_entropy_quantile", None)  # several tokens have the same entropy
    if "tokens" in training:
        edits = ""
        training.pop("multi_objective_aggregation", None)
    if ("tokens" in training or chosen["class"] == "Masking") and replay.get("replay_advantages"):
        replay["replay_advantages"] = "stored"  # TRL's rules explain no others
    if replay.get("replay_advantages") == "split":
        replay |= {"replay_kl": "fresh"} if replay.get("replay_kl") == "all_wrong" else {}
        replay.pop("replay_retire_passes", None)  # or hardly a group was left
        replay["replay_buffer_size"] = 64
    if "replay_iterations" in replay:
        training["num_iterations"] = 3
        training["max_steps"] = 17 if training.get("steps_per_generation") == 2 else 12
        if training.get("steps_per_generation") in (1, 3):
            training |= ACCUMULATED
            del training["steps_per_generation"]
        elif chosen["start"] == 2 and "steps_per_generation" not in training:
            training |= {"num_iterations": 6, "max_steps": 6}  # one batch is all that is generated
    elif replay["replay_buffer_size"] == 64 and replay["replay_correction"] != FAR:
        training["max_steps"] += 6
    if training.get("num_iterations") == 3 and training.get("steps_per_generation") == 2:
        replay.pop("replay_max_age", None)  # less than between two generations
    if "replay_advantages" in replay:
        by = {"top": "score", "uniform": "uniform"}.get(chosen["sampler"], "newest")
        rows = max(chosen["rows"], 2) if replay["replay_advantages"] == "split" else chosen["rows"]
        replay |= {"replay_sampler": f"same_prompt(by={by!r})", "replay_mixer": f"inject(rows={rows})"}
    elif replay["replay_correction"] == PER and replay["replay_sampler"] not in WEIGHTED:
        replay["replay_sampler"] = "prompt_balanced"
    if replay["replay_correction"] == PER and "replay_mixer" in replay:
        replay["replay_correction"] = "ratio"
    if replay.get("replay_kl") == "all_wrong":
        replay |= {"replay_unfilled": "keep", "replay_start": 0}
        replay.pop("replay_retire_passes", None)
    if "images" in training and Version("1.14.0") > TRL:
        replay.pop("replay_refill", None)  # which divides no round of fewer rows
    own = "tokens" in training or chosen["class"] == "Masking"
    over_batch = chosen["scale"] == "batch" or "multi_objective_aggregation" in training
    if replay.get("replay_kl") == "all_wrong" or (own and over_batch):
        replay.pop("replay_refill", None)
    by_token = level == "token" or chosen["loss"] == "cispo"
    if chosen["correction"] in ("truncated", MASKED, PROXIMAL, TOPR_BY_TOKEN) and not by_token:
        replay["replay_correction"] = FAR
    if replay["replay_correction"] == FAR and chosen["loss"] == "sapo":  # whose gate has no digits at a ratio of 20
        replay["replay_correction"] = SHIFTED
    tells_signs = "tokens" not in training and "multi_objective_aggregation" not in training  # of a row's advantage
    if ("tokens" in training and level == "sequence") or (chosen["correction"] == "imitation" and not tells_signs):
        replay["replay_correction"] = "ratio"
    return training, replay, edits


def rewards_of(run, training, replay, edits):
    """A script for each function."""
    chance, least = random.Random(run), replay["replay_pass_reward"] - 0.5
    groups = [DEAD, DEAD, DEAD, LIVE, HALF, RIGHT, MOST, MIDDLE]
    groups += (
        [] if {"replay_mixer", "replay_reward", "replay_refill"} & replay.keys() or edits else [FAILED, [None] * 4]
    )
    script = [[LIVE, HALF, HALF], [RIGHT, DEAD, LIVE]]
    script += [[chance.choice(groups) for _ in range(3)] for _ in range(20)]
    script = [[[None if one is None else one + least for one in group] for group in batch] for batch in script]
    if "reward_weights" not in training:
        return [script]
    others = [[0.2, 0.0, 0.4, 0.0], DEAD, [None] * 4, [0.2, None, 0.0, 0.0]]
    return [script, [[chance.choice(others) for _ in range(3)] for _ in script]]


def double(groups, context):
    given = shaped(groups.advantages, context.update)
    given[:, -1] = np.nan if context.update % 2 else given[:, -1]
    return given


def double_all(groups):
    return groups.advantages * 2


def serials(table, rows):
    if "mine" not in table.names:
        table.add_column("mine", np.int64, fill=-1)
    table.mine[rows] = table.serial[rows]


def edit(plan, context):
    edited.append(context.iteration)
    plan.advantages = np.where(plan.entry == EMPTY, 1.0, 0.5) * plan.advantages
    for slot, rows in ((0, slice(None)), (1, 0)):
        if context.iteration == 0 or (plan.entry[slot] != EMPTY).any():
            plan.advantages[slot, rows] *= context.update % 3 != 2 - slot
    plan.masked[:, 1] |= context.update % 2 == 1
    plan.silent[:, 2] = True
    plan.kl[:, 0] = False


edited = []
"""The iterations of which plans were edited."""
LOSS = GRPOTrainer._compute_loss
COPY = FunctionType(LOSS.__code__, LOSS.__globals__, closure=LOSS.__closure__)


@contextmanager
def frozen(model):
    """As an adapter that is off."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad = False
    yield
    for parameter in trained:
        parameter.requires_grad = True


class Copied(GRPOTrainer):
    """Word by word TRL's loss, after it has asked for other log-probs; it leaves a note in the batch."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        ids, mask = both(inputs)
        with torch.no_grad():
            self._get_per_token_logps_and_entropies(teacher(self), ids, mask, inputs["completion_ids"].size(1))
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        assert inputs.pop("note") == 1
        return loss

    def _compute_loss(self, model, inputs):
        ids, mask = both(inputs)
        if self.state.global_step % 2:
            assert inputs["advantages"].isfinite().all(), "read early, and once more by TRL's"
        asked = ((teacher(self), ids), (model, ids.flip(0)), (model, ids[:, 1:]), (model, ids.flip(1)))
        for one, of in asked:
            width = inputs["completion_ids"].size(1)
            self._get_per_token_logps_and_entropies(one, of, mask[:, : of.size(1)], width)
        for freeze in (torch.no_grad, partial(frozen, model)):
            with freeze():
                self._get_per_token_logps_and_entropies(model, ids, mask, width)
        loss = COPY(self, model, inputs)
        inputs["note"] = 1
        self._get_per_token_logps_and_entropies(model, ids, mask, width)
        return loss


class Reordered(GRPOTrainer):
    """Gives every other loss of TRL's a copy of the batch, with rows in another order."""

    turns = 0

    def _compute_loss(self, model, inputs):
        self.turns += 1
        self.get_high_entropy_mask(torch.ones(1, 2), torch.ones(1, 2), 0.5)  # of no batch
        if self.turns % 2:
            return super()._compute_loss(model, inputs)
        return super()._compute_loss(model, rows_of(inputs, backwards(inputs)))


class Masking(GRPOTrainer):
    """Masks a row of each group, but for every other update."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.state.global_step % 2:
            batch["advantages"][1::4] = torch.nan
        return batch


class Column(GRPOTrainer):
    """Has its advantages in a column."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return {**batch, "advantages": batch["advantages"].unsqueeze(1)}


class Rescoring(GRPOTrainer):
    """Scores some rows, and all of them by other rewards, before what counts."""

    nested = False

    def _calculate_rewards(self, inputs, *columns):
        if not self.nested:
            self.nested = True
            held = [(one.batches, one.calls) for one in self.reward_funcs]
            for rows in (slice(SIZE), slice(None)):
                for one, (batches, calls) in zip(self.reward_funcs, held, strict=True):
                    one.batches = ([[7.0, 1.0, 2.0, 5.0], *batches[min(calls, len(batches) - 1)][1:]],)
                self._calculate_rewards(inputs[rows], *(column[rows] for column in columns))
            for one, before in zip(self.reward_funcs, held, strict=True):
                one.batches, one.calls = before
            self.nested = False
        return super()._calculate_rewards(inputs, *columns)


OWN = {
    "Rescoring": Rescoring,
    "Masking": Masking,
    "Column": Column,
    "Copied": Copied,
    "Reordered": Reordered,
    "Trimmed": giving(trimmed_in_a_copy)(GRPOTrainer),
}


def is_no_wider_than_needed(before, after, pad, multiple):
    """A batch grows as far as its longest row needs, up to a multiple."""
    for key, left in (("prompt_ids", True), ("completion_ids", False)):  # where padding stands
        held = (after[key] != pad).any(dim=0)
        held = int((held.flip(0) if left else held).nonzero().max()) + 1
        grown = after[key].size(1)
        assert grown in (before[key].size(1), math.ceil(held / multiple) * multiple)


class ReadBack(transformers.TrainerCallback):
    """Goes on with what a checkpoint keeps, for which the last candidates have settled."""

    def __init__(self, session, naive):
        self.session, self.naive = session, naive

    def on_save(self, args, state, control, **kwargs):
        if state.global_step % args.save_steps:
            return  # training ends in the midst of a generation batch, and its groups are in no checkpoint
        if self.naive.waiting is not None:
            self.naive.finish()
        self.session.buffer.clear()
        self.session.totals.counters.clear()
        limiter = self.session.buffer.policy.limiter
        limiter.load_state_dict(dict.fromkeys(limiter.state_dict(), 0))
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        saving.load(self.session, self.session.trainer, nullcontext, str(folder))


CHANGES = {"reward_weights": torch.tensor([1.0, 0.25]), "max_completion_length": 3}
NOTHING_LEFT = "Of the rows replayed in 8 updates"
WARNINGS = (RULE_CHANGED, BYTES_REACHED, REPEATED, NOTHING_LEFT)


MEASURED = {"replay/seconds"}
BY_SIGN = {f"replay/{key}" for key in ("weight_positive", "weight_negative", "clip_ratio", "fresh_clip_ratio")}
"""Functions that cancel out leave advantages of rounding errors, of either sign."""


def check_log(trainer, naive):
    """Each entry of the log has what is known by hand of its updates."""
    begin, unknown = 0, MEASURED
    if trainer.multi_objective_aggregation == "normalize_then_sum":
        unknown = MEASURED | BY_SIGN
    for entry in trainer.state.log_history:
        found = {key: value for key, value in entry.items() if key.startswith("replay/")}
        expected = naive.in_log(range(begin, entry["step"]))
        begin = entry["step"]
        odd = (found.keys() ^ expected.keys()) - unknown
        assert not odd, f"{odd} at step {begin}"
        for key, value in expected.items():
            if key in unknown:
                continue
            assert math.isclose(found[key], value, rel_tol=1e-3, abs_tol=1e-5), (
                f"{key} at step {begin} is {found[key]}, by hand {value}"
            )


@pytest.mark.usefixtures("all_metrics")
@pytest.mark.parametrize("run", range(RUNS))
def test_1_and_2_and_3_and_4_and_6_and_13_and_14_and_15_and_18_and_21_and_25_and_27_and_32_and_35_any_settings(
    tmp_path, run
):
    chosen = covering(AXES, RUNS)[run]
    training, replay, edits = settings_of(chosen)
    script = rewards_of(run, training, replay, edits)
    names = ["scripted", "other"][: len(script)]
    functions = [Rewards(*batches, name=name) for batches, name in zip(script, names, strict=True)]
    trainer = made(tmp_path, training, functions)
    trainer.correction = replay["replay_correction"]
    trainer.gate = gate(replay, training["importance_sampling_level"])
    trainer.gradients, made_of = True, type(trainer)
    trainer.logs = defaultdict(lambda: LossLog(trainer, replay))
    hooks = {
        "": {},
        "plan": {"plan": edit, "admitted": serials},
        "advantages": {"advantages": double_all if "replay_mixer" in replay else double, "admitted": serials},
    }
    edited.clear()
    with plugin(**hooks[edits]) if edits else nullcontext():
        session = trl_replay.attach(trainer, **replay, replay_plugins=["mine"] if edits else None)
        watch = watched(trainer, session)
        watch.counts_kl = KL[replay.get("replay_kl", "all")]
        naive = Naive(session, watch, script, replay, edits, chosen["prompts"])
        trainer.add_callback(ReadBack(session, naive))
        name = chosen["change"]
        if name and (name != "reward_weights" or len(script) > 1):
            trainer.add_callback(Act({4: lambda: setattr(trainer, name, CHANGES[name])}))
        with warnings.catch_warnings(record=True) as told:
            for begin in WARNINGS:
                warnings.filterwarnings("always", begin)
            trainer.train()
    assert type(trainer) is made_of
    check_batches(watch)
    if not training.get("entropy_coef"):  # whose value is logged over all tokens, whatever its gradient is
        check_losses(trainer, replays=False)
    assert max(trainer.gradient_errors) < 1e-3
    for number, (before, after) in enumerate(watch.steps):
        assert int(after["num_items_in_batch"]) == (watch.items(number) or before["num_items_in_batch"])
        is_no_wider_than_needed(before, after, watch.pad, training.get("pad_to_multiple_of") or 1)
    naive.finish()
    shares = [log.metrics().get("gated_fraction") for log in trainer.logs.values()]
    shares = [share for share in shares if share is not None]
    naive.warned[NOTHING_LEFT] = int(any(sum(shares[end - 8 : end]) > 7.6 for end in range(8, len(shares) + 1)))
    assert Counter(begin for begin in WARNINGS for one in told if begin in str(one.message)) == naive.warned
    check_log(trainer, naive)
    assert edited == (naive.iterations if edits == "plan" else [])
    if edits:
        assert session.buffer.table.mine.tolist() == session.buffer.table.serial.tolist()
    assert naive.counts["replaced"] + naive.counts["iterated"] + naive.counts["refilled"] > 0
