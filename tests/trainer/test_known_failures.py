"""How replay for GRPO has failed before, by number; each through a real GRPOTrainer with 3 groups or more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import DEAD, HALF, LIVE, Rewards, Spy, masked_rollout, real_tokens, record, rows_of

import trl_replay
from trl_replay.loss.tap import ROWS
from trl_replay.testing import make_trainer

ALL_DEAD = [DEAD, DEAD, DEAD]
THIRD = [0.0, 0.0, 1.0, 0.0]


def train(trainer: Any, **settings: Any) -> tuple[Any, list[Any]]:
    session = trl_replay.attach(trainer, **settings)
    steps = record(session)
    trainer.train()
    return session, steps


def replayed_slots(out: Any, size: int = 4) -> list[int]:
    ids = out[ROWS][:, 0].view(-1, size)
    return [slot for slot in range(len(ids)) if bool((ids[slot] < 0).all())]


def test_1_exactly_the_live_groups_enter_and_exactly_the_dead_ones_leave(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([DEAD, LIVE, HALF], [LIVE, DEAD, DEAD]), max_steps=2)
    session, ((first, _), (before, after)) = train(trainer, replay_sampler="newest")
    assert replayed_slots(after) == [1, 2]
    assert session.buffer.table.serial.tolist() == [0, 1, 2], "two live groups, then one"
    for slot, source in ((1, 2), (2, 1)):  # newest first
        assert real_tokens(after, slot) == real_tokens(first, source), "all tokens are those of one stored group"
        torch.testing.assert_close(after["advantages"].view(3, 4)[slot], first["advantages"].view(3, 4)[source])
    for key, value in rows_of(before, 0).items():
        width = value.size(1) if value.ndim > 1 else 0
        kept = after[key][:4]
        kept = kept[:, -width:] if key.startswith("prompt") else kept[:, :width] if width else kept
        torch.testing.assert_close(kept, value, msg=f"{key} of the live group changed")


@pytest.mark.parametrize("evictor", ["heap", "fifo", "reservoir", "weighted_reservoir"])
def test_2_equal_scores_are_fine_under_every_evictor(tmp_path: Any, evictor: str) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, LIVE, DEAD]), max_steps=5)
    session, _ = train(trainer, replay_buffer_size=3, replay_evictor=evictor, replay_scorer="constant")
    assert len(session.buffer) == 3
    assert session.totals.counters["evicted"] > 0


def test_3_an_empty_buffer_leaves_the_batch_and_the_training_as_they_are(tmp_path: Any) -> None:
    """That no weight differs is in test_idle.py."""
    session, steps = train(make_trainer(tmp_path, Rewards(ALL_DEAD, ALL_DEAD, [LIVE, LIVE, HALF]), max_steps=3))
    for before, after in steps:
        assert all(after[key] is value for key, value in before.items()), "the tensors are the same objects"
        assert set(after) - set(before) == {ROWS}
    assert "the buffer was empty" in session.explain()


@pytest.mark.parametrize("order", [("123+456=", "1="), ("1=", "123+456=")])
def test_4_left_padded_prompts_survive_in_wider_and_narrower_batches(tmp_path: Any, order: tuple[str, str]) -> None:
    prompts = [order[0], "12=", order[0], order[1], "2=", order[1]]
    trainer = make_trainer(tmp_path, Rewards([DEAD, LIVE, LIVE], ALL_DEAD), prompts=prompts, max_steps=2)
    _, ((first, _), (_, after)) = train(trainer, replay_sampler="newest")
    for slot, source in ((0, 2), (1, 1)):
        assert real_tokens(after, slot) == real_tokens(first, source)
    mask = after["prompt_mask"]
    assert bool((mask.diff(dim=1) >= 0).all()), "prompts are padded on the left"
    pads = after["prompt_ids"][mask == 0]
    assert bool((pads == trainer.processing_class.pad_token_id).all())


class Scores:
    """A scorer that gives scripted scores, in order."""

    def __init__(self, *scores: float) -> None:
        self.scores = list(scores)

    def __call__(self, groups: Any, context: Any) -> Any:
        return np.array([self.scores.pop(0) for _ in range(len(groups))])


@pytest.mark.parametrize("sampler", ["proportional", "uniform", "top", "newest"])
def test_5_odd_scores_neither_raise_nor_repeat_nor_block(tmp_path: Any, sampler: str) -> None:
    scorer = Scores(0.0, -1.0, float("nan"), float("inf"), 0.0, 2.0, *([1.0] * 20))
    script = Rewards([LIVE, LIVE, LIVE], [LIVE, HALF, LIVE], ALL_DEAD, ALL_DEAD, [LIVE, DEAD, DEAD])
    trainer = make_trainer(tmp_path, script, max_steps=6)
    session, steps = train(trainer, replay_scorer=scorer, replay_sampler=sampler, replay_buffer_size=4)
    assert session.totals.counters["refused"] == 2, "NaN and infinity are refused and counted"
    assert np.isfinite(session.buffer.table.score).all()
    for _, after in steps[2:]:
        drawn = [str(real_tokens(after, slot)) for slot in replayed_slots(after)]
        assert drawn, "what is stored is replayed"
        assert len(set(drawn)) == len(drawn), "no group twice in one batch"


def test_6_replayed_rows_have_their_true_ratio_and_fresh_rows_exactly_one(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE]), max_steps=3, trainer_class=Spy, learning_rate=3e-2
    )
    session, _ = train(trainer)
    stored = {}
    for loss in trainer.losses:
        inputs, logps = loss["inputs"], loss["logps"]
        ids = inputs.rows[:, 0]
        mask = inputs["completion_mask"].bool()
        for row in range(len(ids)):
            tokens = str((inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist(),
                          inputs["completion_ids"][row][mask[row]].tolist()))  # fmt: skip
            if ids[row] >= 0:
                old = inputs.get("old_per_token_logps")
                assert old is None or torch.equal(old[row], logps[row]), "a fresh row's ratio is exactly 1"
                stored.setdefault(tokens, logps[row][mask[row]])
            else:
                torch.testing.assert_close(
                    inputs["old_per_token_logps"][row][mask[row]], stored[tokens], rtol=0, atol=0
                )
                assert not torch.allclose(logps[row][mask[row]], stored[tokens], atol=1e-3), "the policy has moved"
    assert session.totals.counters["replaced"] == 4
    assert session.metrics["replay/ratio_mean"] != 1.0


def test_7_a_key_more_or_less_than_when_stored_never_crashes_and_never_drops_a_key(tmp_path: Any) -> None:
    script = Rewards([LIVE, DEAD, LIVE], [DEAD, DEAD, LIVE])
    trainer = make_trainer(tmp_path, script, max_steps=2, beta=0.1)
    session, _ = train(trainer)
    beta, reference = trainer.beta, trainer.ref_model
    trainer.beta = 0.0  # stored with reference log-probs, now without
    script.calls = 1
    steps = record(session)
    trainer.train()
    assert all(replayed_slots(after) for _, after in steps)
    assert all("ref_per_token_logps" not in after for _, after in steps)
    session.buffer.clear()
    script.calls = 0
    trainer.train()  # stored without
    trainer.beta, trainer.ref_model = beta, reference
    script.calls = 1
    steps = record(session)
    trainer.train()
    assert replayed_slots(steps[0][1]) == [], "what lacks a tensor of this configuration is not eligible"
    assert "lacks a tensor" in session.explain()
    assert replayed_slots(steps[1][1]), "a group stored with it is"
    assert all("ref_per_token_logps" in after for _, after in steps)


def test_10_eval_batches_pass_through_and_never_enter_the_buffer(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, DEAD, DEAD]), max_steps=2, trainer_class=Spy, eval_prompts=["1=", "2=", "3="],
        per_device_eval_batch_size=12,
    )  # fmt: skip
    session, steps = train(trainer)
    before = session.buffer.table.serial.tolist()
    given = []
    prepare = Spy._prepare_inputs
    try:
        Spy._prepare_inputs = lambda self, batch: given.append(prepare(self, batch)) or given[-1]
        trainer.evaluate()
    finally:
        Spy._prepare_inputs = prepare
    assert given, "eval batches were scored"
    assert all(batch is scored for batch, scored in zip(given, trainer.scored[-len(given) :], strict=True))
    assert session.buffer.table.serial.tolist() == before
    assert len(steps) == 2, "the step ran for the training batches only"


def test_11_entries_are_copies_and_hold_few_bytes(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD], ALL_DEAD), max_steps=4)
    session = trl_replay.attach(trainer, replay_start=0)
    steps = record(session)
    step, outs = session.step, []

    def vandal(batch: Any, *others: Any) -> Any:
        out = step(batch, *others)
        copy = {key: value.clone() for key, value in out.items()}
        outs.append(copy)
        for value in list(batch.values()) + list(out.values()):
            value.zero_()
        return copy

    session.step = vandal
    trainer.train()
    expected = real_tokens(outs[0], 0)
    assert len(steps) == 4
    for out in outs[1:]:
        (slot,) = replayed_slots(out)
        assert real_tokens(out, slot) == expected, "the stored group did not change with the batches"
    tokens = sum(len(p) for p, _ in expected[:1]) + sum(len(c) for _, c in expected)
    payload = session.buffer.storage.nbytes
    assert payload <= 8 * tokens + 128, f"{payload} bytes of payload for {tokens} tokens"


def test_12_an_entry_replayed_a_hundred_times_does_not_grow(tmp_path: Any) -> None:
    prompts = ["1=", "2=", "3=", *(["123+456=", "12=", "1="] * 40)]
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, DEAD, DEAD], ALL_DEAD), prompts=prompts, max_steps=101, learning_rate=1e-5
    )
    session, steps = train(trainer, replay_start=0)
    assert session.buffer.table.uses.tolist() == [100]
    first = real_tokens(steps[0][0], 0)
    assert all(real_tokens(after, replayed_slots(after)[0]) == first for _, after in steps[1:])
    fresh = make_trainer(tmp_path / "fresh", Rewards([LIVE, DEAD, DEAD], ALL_DEAD), prompts=prompts, max_steps=1)
    assert session.buffer.nbytes == train(fresh)[0].buffer.nbytes


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_13_stored_advantages_are_trls_own(tmp_path: Any, aggregation: str, scale: str) -> None:
    functions = [
        Rewards([[1, 0, None, 0.5], LIVE, DEAD], ALL_DEAD),
        Rewards([[0.2, None, None, 0.1], DEAD, DEAD], ALL_DEAD),
    ]
    functions[1].__name__ = "second"
    trainer = make_trainer(
        tmp_path, functions, max_steps=2, multi_objective_aggregation=aggregation, scale_rewards=scale,
        reward_weights=[1.0, 2.0],
    )  # fmt: skip
    session, ((first, _), (_, after)) = train(trainer, replay_sampler="newest")
    assert len(session.buffer) == 2
    advantages = first["advantages"].view(3, 4)
    assert torch.equal(after["advantages"].view(3, 4)[:2], advantages[[1, 0]])


def test_14_and_15_tool_masks_and_sampling_logps_come_out_as_they_went_in(tmp_path: Any) -> None:
    from datasets import Dataset
    from trl import GRPOConfig

    from trl_replay.testing import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    trainer = Spy(
        model=make_model(tokenizer),
        reward_funcs=Rewards([LIVE, DEAD, HALF], ALL_DEAD),
        args=GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=12, num_generations=4, max_completion_length=6,
            max_steps=3, report_to="none", use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
            learning_rate=1e-2,
        ),
        train_dataset=Dataset.from_list([{"prompt": "1="}, {"prompt": "12="}, {"prompt": "123="}] * 8),
        processing_class=tokenizer,
        rollout_func=masked_rollout,
    )  # fmt: skip
    _, ((first, _), *later) = train(trainer, replay_sampler="newest")
    assert {"tool_mask", "sampling_per_token_logps"} <= set(first)
    for before, after in later:
        assert list(after) == [*before, ROWS], "keys in = keys out, in their order"
        for slot, source in ((0, 2), (1, 0)):
            mask = first["completion_mask"].view(3, 4, -1)[source].bool()
            width = mask.size(1)
            for key, pad in (("tool_mask", 1), ("sampling_per_token_logps", 0.0)):
                got, want = after[key].view(3, 4, -1)[slot], first[key].view(3, 4, -1)[source]
                assert torch.equal(got[:, :width][mask], want[mask])
                after_mask = after["completion_mask"].view(3, 4, -1)[slot].bool()
                assert bool((got[~after_mask] == pad).all()), f"{key} is padded with {pad}"
        trained = (after["completion_mask"] * after["tool_mask"]).sum()
        assert int(after["num_items_in_batch"]) == int(trained)


def test_16_the_token_count_follows_the_exchange(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD]), max_steps=6)
    _, steps = train(trainer)
    changed = 0
    for before, after in steps:
        assert int(after["num_items_in_batch"]) == int(after["completion_mask"].sum())
        assert after["num_items_in_batch"].dtype == before["num_items_in_batch"].dtype
        changed += int(after["num_items_in_batch"] != before["num_items_in_batch"])
    assert changed, "some exchange changed the count"


@pytest.mark.parametrize("tools", [False, True])
def test_16_the_token_count_keeps_the_meaning_that_this_release_gives_it(tmp_path: Any, tools: bool) -> None:
    """Before TRL 1.9 truncated rows count although the loss leaves them out; tokens of tools never do."""
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD]), max_steps=6, mask_truncated_completions=not tools,
        max_completion_length=12,
    )  # fmt: skip
    if tools:
        trainer.rollout_func = masked_rollout
    _, steps = train(trainer)
    meanings = {"lengths": [], "trained": []}
    for before, after in steps:
        for batch in (before, after):
            mask, ids = batch["completion_mask"], batch["completion_ids"]  # a truncated row does not end with padding
            held = ids.ne(trainer._tokenizer.pad_token_id).flip(1).cummax(1).values.flip(1)
            real = torch.where(mask.any(dim=1, keepdim=True), mask, held.long())
            tool = batch.get("tool_mask", torch.ones_like(real))
            counts = {"lengths": real * tool, "trained": batch["completion_mask"] * tool}
            for name, count in counts.items():
                meanings[name].append((batch is before, int(count.sum()), int(batch["num_items_in_batch"])))
    held_by_stock = [name for name, seen in meanings.items() if all(a == b for stock, a, b in seen if stock)]
    assert held_by_stock, meanings
    for name in held_by_stock:
        assert all(count == items for _, count, items in meanings[name]), f"the exchanged batch counts {name} too"


def test_18_a_group_without_a_trainable_token_is_not_stored(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, LIVE, LIVE]), max_steps=4, mask_truncated_completions=True,
                           max_completion_length=1)  # fmt: skip
    session, steps = train(trainer)
    truncated = [
        bool((before["completion_mask"].view(3, 4) == 0).all(dim=1)[slot]) for before, _ in steps for slot in range(3)
    ]
    assert any(truncated)
    assert len(session.buffer) == truncated.count(False)
    assert bool((session.buffer.table.tokens > 0).all())
    assert "no row with an advantage trains a token" in session.explain()


NOISE_CASES = [
    ({}, [[0.7] * 8, [100.1] * 8, [0.7] * 7 + [0.6]], [True, True, False]),
    ({"scale_rewards": "batch"}, [[0.7] * 8, [100.1] * 8, [100.1] * 7 + [100.0]], [True, True, False]),
    ({"scale_rewards": "none"}, [[0.7] * 8, [100.1] * 8, [100.1] * 7 + [100.099]], [True, True, False]),
    ({"scale_rewards": "none"}, [[1e-3] * 8, [0.0] * 8, [1e-5] + [0.0] * 7], [True, True, False]),
]


@pytest.mark.parametrize(("settings", "rewards", "dead"), NOISE_CASES)
def test_20_deadness_is_per_group_and_tolerates_float_noise(
    tmp_path: Any, settings: dict[str, Any], rewards: Any, dead: list[bool]
) -> None:
    trainer = make_trainer(tmp_path, Rewards(rewards), max_steps=1, num_generations=8, **settings)
    session, _ = train(trainer)
    assert session.metrics["replay/dead_fraction"] == sum(dead) / 3
    assert len(session.buffer) == dead.count(False)


def test_20_with_normalize_then_sum_deadness_follows_the_advantages_and_not_the_sum(tmp_path: Any) -> None:
    first = Rewards([[1, 0, 1, 0], [2, 0, 2, 0], DEAD, LIVE])
    second = Rewards([[0, 3, 0, 3], [0, 1, 0, 1], DEAD, DEAD])
    second.__name__ = "second"
    for weights, live in (([1.0, 1.0], [3]), ([1.0, 2.0], [0, 1, 3])):
        trainer = make_trainer(
            tmp_path, [first, second], prompts=["1=", "2=", "3=", "4="], max_steps=1, per_device_train_batch_size=16,
            multi_objective_aggregation="normalize_then_sum", reward_weights=weights,
        )  # fmt: skip
        session, ((before, _),) = train(trainer)
        stored = [slot for slot in range(4) if slot in live]
        assert len(session.buffer) == len(stored), f"weights {weights}: {before['advantages'].view(4, 4)}"


def test_21_nothing_is_replayed_in_the_update_that_made_it(tmp_path: Any) -> None:
    script = Rewards([LIVE, DEAD, DEAD])
    trainer = make_trainer(tmp_path, script, max_steps=3, gradient_accumulation_steps=4, steps_per_generation=1)
    session, steps = train(trainer)
    assert len(steps) == 12, "four generation batches an update"
    for number, (_, after) in enumerate(steps):
        groups = [str(real_tokens(after, slot)) for slot in range(3)]
        assert len(set(groups)) == 3, "no group twice in one batch"
        if number < 4:
            assert replayed_slots(after) == []
    assert any(replayed_slots(after) for _, after in steps)
    assert session.metrics["replay/age_mean"] >= 1


def test_23_the_global_generators_are_left_alone(tmp_path: Any) -> None:
    script = [[LIVE, DEAD, DEAD], ALL_DEAD]
    texts = []
    for attach in (False, True):
        rewards = Rewards(*script)
        trainer = make_trainer(tmp_path, rewards, max_steps=4, learning_rate=0.0)
        if attach:
            session, _ = train(trainer)
            assert session.totals.counters["replaced"] > 0
        else:
            trainer.train()
        texts.append(rewards.completions)
    assert texts[0] == texts[1], "with a learning rate of 0, replay changes no completion"


def test_25_the_log_tells_generated_and_trained_apart(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, HALF], ALL_DEAD), max_steps=2)
    train(trainer)
    last = [entry for entry in trainer.state.log_history if "replay/size" in entry][-1]
    assert last["frac_reward_zero_std"] == 1.0, "stock's keys describe what was generated"
    assert last["reward"] == 0.0
    assert last["replay/dead_fraction"] == 1.0
    assert last["replay/dead_fraction_after"] == pytest.approx(1 / 3)
    assert last["replay/replaced_fraction"] == pytest.approx(2 / 3)
    assert last["replay/age_mean"] == last["replay/uses_mean"] == 1.0
    assert 0 < last["replay/ess"] <= 1
    assert all(np.isfinite(value) for key, value in last.items() if key.startswith("replay/"))


def test_26_capacity_counts_groups(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, THIRD]), max_steps=3)
    session, _ = train(trainer, replay_buffer_size=5)
    assert session.buffer.capacity == len(session.buffer) == 5
    assert session.buffer.table.tokens.min() >= 4, "each entry holds the tokens of four rows"


def scripted_lengths(lengths: list[list[int]]) -> Any:
    """A rollout function whose rows have scripted completion lengths, per batch."""
    calls = {"count": 0}

    def run(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        rows = lengths[min(calls["count"], len(lengths) - 1)]
        calls["count"] += 1
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [tokenizer("abcdefghijkl"[:length])["input_ids"] for length in rows],
            "logprobs": None,
        }

    return run


@pytest.mark.parametrize("multiple", [None, 4])
def test_27_longer_replayed_rows_widen_the_batch_and_nothing_is_cut(tmp_path: Any, multiple: int | None) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([DEAD, LIVE, HALF], ALL_DEAD), prompts=["123+456=", "12345678=", "1=", "1=", "2=", "3="],
        max_steps=2, pad_to_multiple_of=multiple,
    )  # fmt: skip
    trainer.rollout_func = scripted_lengths([[3] * 4 + [9, 2, 5, 1] + [7] * 4, [2] * 12])
    _, ((first, _), (before, after)) = train(trainer, replay_sampler="newest")
    for slot, source in ((0, 2), (1, 1)):
        assert real_tokens(after, slot) == real_tokens(first, source)
    assert real_tokens(after, 2) == real_tokens(before, 2)
    assert after["completion_ids"].size(1) == (12 if multiple else 9) > before["completion_ids"].size(1)
    assert after["prompt_ids"].size(1) == (12 if multiple else 9) > before["prompt_ids"].size(1)


class WithKey(Spy):
    """A trainer whose scoring step adds keys to the batch."""

    added: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        return {**batch, **{key: make(batch) for key, make in self.added.items()}}


def test_28_ratios_are_padded_with_one_and_unknown_keys_are_an_error(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, DEAD, DEAD], ALL_DEAD), max_steps=2, trainer_class=WithKey,
        vllm_importance_sampling_mode="token_truncate",
    )  # fmt: skip
    trainer.rollout_func = scripted_lengths([[2, 5, 3, 1] + [2] * 8, [7] * 12])
    trainer.added = {"importance_sampling_ratio": lambda batch: batch["completion_ids"] * 0.01}
    _, ((first, _), (_, after)) = train(trainer)
    (slot,) = replayed_slots(after)
    ratio, stored = after["importance_sampling_ratio"].view(3, 4, -1)[slot], first["importance_sampling_ratio"][:4]
    mask = first["completion_mask"][:4].bool()
    assert torch.equal(ratio[:, :5][mask], stored[mask])
    assert bool((ratio[after["completion_mask"].view(3, 4, -1)[slot] == 0] == 1).all())

    trainer = make_trainer(tmp_path, Rewards(ALL_DEAD), max_steps=1, trainer_class=WithKey)
    trainer.added = {"turn_rewards": lambda batch: batch["completion_ids"] * 1.0}
    trl_replay.attach(trainer)
    with pytest.raises(trl_replay.BatchError, match=r"'turn_rewards' \(shape \(12, \d\)\).*trl_replay_fields"):
        trainer.train()


class AroundTheTap(Spy):
    """A trainer whose loss computes log-probs some other way."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return model(input_ids=ids).logits.float().mean()


class ReadsTooEarly(Spy):
    """A trainer whose loss reads the old log-probs before it computes the new ones."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        early = dict(inputs)
        return super()._compute_loss(model, early)


class AroundTheLoss(Spy):
    """A trainer that does not call `_compute_loss`."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return model(input_ids=ids).logits.float().mean()


@pytest.mark.parametrize(
    ("trainer_class", "words"),
    [
        (AroundTheTap, "never called _get_per_token_logps_and_entropies"),
        (ReadsTooEarly, "did not read 'old_per_token_logps'"),
        (AroundTheLoss, "goes around the seam"),
    ],
)
def test_29_training_around_the_seam_is_an_error_before_anything_is_replayed(
    tmp_path: Any, trainer_class: type, words: str
) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]), max_steps=4, trainer_class=trainer_class)
    session = trl_replay.attach(trainer)
    with pytest.raises(trl_replay.SeamError, match=words):
        trainer.train()
    assert session.totals.counters["replaced"] == 0


@pytest.mark.parametrize("settings", [{"replay_buffer_size": 0}, {"use_replay": False}])
def test_31_no_room_or_no_replay_trains_as_stock(tmp_path: Any, settings: dict[str, Any]) -> None:
    """That no weight differs is in test_idle.py."""
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, HALF], ALL_DEAD))
    before = dict(trainer.__dict__)
    session = trl_replay.attach(trainer, **settings)
    assert trainer.__dict__ == before, "nothing is patched"
    trainer.train()
    assert not session.enabled
    assert len(session.buffer) == 0
    trl_replay.detach(trainer)


def test_32_behavior_logps_are_those_of_storing_time(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, DEAD, DEAD], ALL_DEAD), max_steps=5, trainer_class=Spy, learning_rate=5e-2
    )
    session, _ = train(trainer, replay_start=0)
    supplied, new = [], []
    for loss in trainer.losses[1:]:
        inputs = loss["inputs"]
        rows = inputs.rows[:, 0] < 0
        mask = inputs["completion_mask"][rows].bool()
        order = (-inputs.rows[rows, 0]).argsort()
        width = mask.size(1)
        for target, values in ((supplied, inputs["old_per_token_logps"]), (new, loss["logps"])):
            target.append((values[rows] * mask)[order][:, :width].sum(dim=1))
    for later in supplied[1:]:
        torch.testing.assert_close(later, supplied[0], rtol=0, atol=1e-6)
    assert not torch.allclose(new[-1], new[0], atol=1e-2), "while the policy moved"
    assert session.metrics["replay/age_mean"] == 4


def test_34_of_equal_scores_the_newest_stay(tmp_path: Any) -> None:
    groups = 50
    trainer = make_trainer(
        tmp_path, Rewards([LIVE] * groups), prompts=["1=", "2=", "3=", "4=", "5="], max_steps=4, learning_rate=0.0,
        per_device_train_batch_size=4 * groups, max_completion_length=2,
    )  # fmt: skip
    session, _ = train(trainer, replay_evictor="heap", replay_scorer="constant")
    assert sorted(session.buffer.table.serial.tolist()) == list(range(200 - 64, 200))


def test_35_the_buffered_micro_batch_is_never_written_to(tmp_path: Any) -> None:
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2}
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD]), max_steps=5, trainer_class=Spy, **settings
    )

    class Halving:
        def __call__(self, rows: Any, context: Any) -> Any:
            return trl_replay.Corrected(rows.behavior_logps, weights=torch.full_like(rows.advantages, 0.5))

    session, steps = train(trainer, replay_correction=Halving())
    assert session.totals.counters["replaced"] > 0
    assert len(trainer.losses) == 10, "each batch reaches the loss twice"
    for first, second, (_, after) in zip(trainer.losses[::2], trainer.losses[1::2], steps, strict=True):
        torch.testing.assert_close(first["inputs"]["advantages"], second["inputs"]["advantages"], rtol=0, atol=0)
        replayed = first["inputs"].rows[:, 0] < 0
        total = after["advantages"].abs().sum() - 0.5 * sum(
            float(after["advantages"].view(3, 4)[slot].abs().sum()) for slot in replayed_slots(after)
        )
        assert float(first["inputs"]["advantages"].abs().sum()) == pytest.approx(float(total), rel=1e-5)
        assert int(replayed.sum()) == 4 * len(replayed_slots(after))
        assert "old_per_token_logps" not in after


def test_36_a_second_train_out_of_phase_drops_late_candidates_and_keeps_ages_right(tmp_path: Any) -> None:
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 6}
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=4, trainer_class=Spy, **settings)
    session = trl_replay.attach(trainer)
    trainer.train()
    assert session.update == 4
    interrupt = Interrupt()
    trainer.add_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupt)
    assert trainer._step % 2 == 0 or session.update == 4
    steps = record(session)
    trainer.train()
    assert session.update == 8, "the session counts its own updates; global_step started again"
    for _, after in steps:
        for slot in replayed_slots(after):
            assert after["advantages"].view(3, 4)[slot].abs().sum() > 0
    assert session.metrics["replay/age_mean"] > 0
    ages = session.update - session.buffer.table.update
    assert bool((ages >= 0).all())
