"""Generating again on two and three processes: what each slot holds, by hand, and that nobody waits for anybody."""

import numpy as np
import pytest
from generation_ranks import CASES, ROUNDS, SIZE, THREE
from one_rank import told

RUNS = [(world, name, case) for world, cases in {2: CASES, 3: THREE}.items() for name, case in cases.items()]


def is_dead(rewards):
    return len(set(rewards)) == 1


def groups_of(call, ranks, key, size):
    """The rows of all ranks in a call, by group."""
    together = [value for rank in ranks for value in rank["calls"][call][key]]
    return [together[start : start + size] for start in range(0, len(together), size)]


def held_by_hand(first, last, ranks, size, straddles, same=False):
    """Of every slot of all ranks, the call and the group that it must hold after the calls `first` to `last`; of the
    `same` prompts each takes its own slot."""
    rewards = {call: groups_of(call, ranks, "rewards", size) for call in range(first, last)}
    held = [(first, slot) for slot in range(len(rewards[first]))]
    for call in range(first + 1, last):
        parts = [range(len(held))] if straddles else np.array_split(np.arange(len(held)), len(ranks))
        sources = (
            [range(len(rewards[call]))] if straddles else np.array_split(np.arange(len(rewards[call])), len(ranks))
        )
        for slots, groups in zip(parts, sources, strict=True):
            dead = [int(slot) for slot in slots if is_dead(rewards[held[slot][0]][held[slot][1]])]
            live = [int(group) for group in groups if not is_dead(rewards[call][group])]
            pairs = list(zip(dead, live, strict=False))
            if straddles:
                pairs = [(slot, slot) for slot in dead if slot in live]
            elif same and dead:
                of_slots = {dead[place % len(dead)]: int(group) for place, group in reversed([*enumerate(groups)])
                            if group in live}  # fmt: skip
                pairs = list(of_slots.items())
            for slot, group in pairs:
                held[slot] = (call, group)
    return held


def advantages_by_hand(rewards, scale):
    rows = np.array(rewards)
    centered = rows - rows.mean(axis=1, keepdims=True)
    deviation = rows.std(ddof=1) if scale == "batch" else rows.std(axis=1, ddof=1, keepdims=True)
    return np.asarray((centered / (deviation + 1e-4)).ravel())


@pytest.mark.parametrize(
    ("world", "name", "settings"), RUNS, ids=[f"{world} ranks, {name}" for world, name, _ in RUNS]
)
def test_every_slot_holds_what_it_must_on_every_rank(launches, world, name, settings):
    ranks = launches(world, name)
    size = settings.get("size", SIZE)
    straddles = settings["rows"] % size != 0
    assert len({len(rank["calls"]) for rank in ranks}) == 1
    begin = 0
    rollouts = refilled = rounds = 0
    for number in range(len(ranks[0]["steps"])):
        steps = [rank["steps"][number] for rank in ranks]
        end = steps[0]["calls"]
        for call in range(begin, end):
            assert len({len(rank["calls"][call]["texts"]) for rank in ranks}) == 1, "as many rows on each"
            rollouts += world * len(ranks[0]["calls"][call]["texts"])
        same = settings.get("replay_refill", "new").startswith("same")
        held = held_by_hand(begin, end, ranks, size, straddles, same)
        texts = [text for step in steps for text in step["texts"]]
        completions = {call: groups_of(call, ranks, "texts", size) for call in range(begin, end)}
        assert texts == [text for call, group in held for text in completions[call][group]]
        rewards = {call: groups_of(call, ranks, "rewards", size) for call in range(begin, end)}
        expected = advantages_by_hand(
            [rewards[call][group] for call, group in held], settings.get("scale_rewards", "")
        )
        found = [value for step in steps for value in step["advantages"]]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert {step["items"] for step in steps} == {sum(step["tokens"] for step in steps)}
        assert {step["rounds"] for step in steps} == {end - begin - 1}
        assert {step["rollouts"] for step in steps} == {rollouts}
        share = np.mean([call > begin for call, _ in held])
        assert [step["refilled"] for step in steps] == pytest.approx([share] * world)
        assert len({tuple(step["table"]) for step in steps}) == 1, "one table of completions, on every rank"
        live = all(not is_dead(rewards[call][group]) for call, group in held)
        assert live or end - begin - 1 == ROUNDS
        refilled += int(share > 0)
        rounds = max(rounds, end - begin - 1)
        begin = end
    assert refilled > 1
    assert rounds == ROUNDS
    assert len({rank["weights"] for rank in ranks}) == 1
    own = settings["replay_scope"] == "process"
    assert sum(rank["tries"] for rank in ranks) == rollouts * (1 if own else world)


def test_prompts_that_one_rank_chooses_of_its_own_end_all_with_the_cause(launches):
    for rank in launches(2, "differs"):
        assert "Group 1 of the batch has rows on rank 0 and rank 1" in told(rank)
        assert "trl_replay_inputs" in told(rank)
