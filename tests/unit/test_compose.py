"""Cut and compose: what comes out is what went in, for any lengths, keys and slots."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batches import EXTRA, KEYS, PAD, SIZE, make_batch, place, rows_of
from hypothesis import given, settings

from trl_replay import BatchError, ConfigurationError, FieldSpec
from trl_replay.base.files import in_json
from trl_replay.batch.compose import compose, cut, join, row_lengths
from trl_replay.data.types import FieldTable

lengths = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7)), min_size=SIZE, max_size=SIZE), min_size=2, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(
    source=lengths,
    target=lengths,
    keys=st.lists(st.sampled_from(KEYS), unique=True),
    multiple=st.sampled_from([None, 4]),
    shared=st.booleans(),
    seed=st.integers(0, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    masked=st.sets(st.integers(0, SIZE - 1)),
)
def test_any_group_comes_out_of_any_batch_as_it_went_in(source, target, keys, multiple, shared, seed, dtype, masked):
    """Rows of a masked completion keep their tokens, and numbers of two bytes their type."""
    fields = FieldTable(PAD, extra=EXTRA).exact()
    stored = make_batch(source, keys, seed, [shared] * len(source))
    batch = make_batch(target, keys, seed + 1, [shared] * len(target))
    stored["completion_mask"][sorted(masked)] = 0
    for each in (stored, batch):
        if "old_per_token_logps" in keys:
            each["old_per_token_logps"] = each["old_per_token_logps"].to(dtype)
    before = {key: value.clone() for key, value in batch.items()}
    groups = cut(stored, fields, [rows_of(slot) for slot in range(len(source))])
    placements = [place(slot, groups[slot % len(groups)]) for slot in range(0, len(target), 2)]
    composed = compose(batch, fields, placements, multiple)

    assert list(composed) == list(batch)
    for key, value in before.items():
        assert torch.equal(batch[key], value), f"{key} of the given batch was written to"
        assert composed[key].dtype == value.dtype
    for placed in placements:
        again = cut(composed, fields, [placed.rows])[0]
        assert again.keys == placed.group.keys
        assert again.prompt_lengths.tolist() == placed.group.prompt_lengths.tolist()
        assert again.completion_lengths.tolist() == placed.group.completion_lengths.tolist()
        assert set(again.tensors) == set(placed.group.tensors)
        for key, tensor in placed.group.tensors.items():
            assert torch.equal(again.tensors[key], tensor), f"{key} changed on the way"
    for slot in range(1, len(target), 2):
        kept, fresh = (cut(b, fields, [rows_of(slot)])[0] for b in (composed, batch))
        assert all(torch.equal(kept.tensors[key], fresh.tensors[key]) for key in fresh.tensors)
    if multiple:
        for key in ("prompt_ids", "completion_ids"):
            assert composed[key].size(1) == batch[key].size(1) or composed[key].size(1) % multiple == 0


def test_a_stored_group_shares_nothing_with_its_batch_and_holds_no_padding():
    fields = FieldTable(PAD)
    batch = make_batch([[(2, 5), (2, 1), (2, 3)], [(6, 2)] * 3], ["old_per_token_logps"], 0, [True, True])
    group = cut(batch, fields, [rows_of(0)])[0]
    assert group.tensors["prompt_ids"].numel() == 2, "a shared prompt is kept once"
    assert group.tensors["completion_ids"].numel() == group.tensors["old_per_token_logps"].numel() == 9
    assert "completion_mask" not in group.tensors, "a mask of ones takes no room"
    assert "completion_mask" in group.keys
    pointers = {value.untyped_storage().data_ptr() for value in batch.values()}
    assert all(tensor.untyped_storage().data_ptr() not in pointers for tensor in group.tensors.values())


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9))
def test_lengths_reach_from_the_first_prompt_token_and_to_the_last_completion_token(seed, rows, prompt, completion):
    generator = np.random.default_rng(seed)
    prompt_mask = generator.integers(0, 2, (rows, prompt))
    mask = generator.integers(0, 2, (rows, completion))
    ids = generator.choice([PAD, 7], (rows, completion))
    mask[generator.random(rows) < 0.3] = 0  # the tokens tell the length
    batch = {
        "prompt_mask": torch.from_numpy(prompt_mask),
        "completion_mask": torch.from_numpy(mask),
        "completion_ids": torch.from_numpy(ids),
    }
    prompts, completions = row_lengths(batch, PAD)
    for row in range(rows):
        real = mask[row] if mask[row].any() else ids[row] != PAD
        places = np.flatnonzero(real)
        assert completions[row] == (places[-1] + 1 if len(places) else 0)
        places = np.flatnonzero(prompt_mask[row])
        assert prompts[row] == (prompt - places[0] if len(places) else 0)


def test_8_a_sequence_level_ratio_is_told_by_configuration_and_not_by_width():
    batch = make_batch([[(2, 1), (2, 1), (2, 1)]], ["importance_sampling_ratio"], 0, [True])
    wide = make_batch([[(2, 5), (2, 5), (2, 5)]], [], 1, [True])
    wide["importance_sampling_ratio"] = torch.ones(3, 1)
    group = cut(batch, FieldTable(PAD, sequence_level_ratio=True), [rows_of(0)])[0]
    composed = compose(wide, FieldTable(PAD, sequence_level_ratio=True), [place(0, group)])
    assert composed["importance_sampling_ratio"].shape == (3, 1)
    assert torch.equal(composed["importance_sampling_ratio"], batch["importance_sampling_ratio"])


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_a_value_a_row_may_be_implied_too(shape):
    fields = FieldTable(PAD, extra=[FieldSpec("flag", "row", implied=1)])
    batch = make_batch([[(2, 5), (2, 3), (2, 4)]] * 2, [], 0, [True, True])
    batch["flag"] = torch.ones(2 * SIZE, *shape)
    batch["flag"][SIZE] = 0
    implied, told = cut(batch, fields, [rows_of(0), rows_of(1)])
    assert "flag" in implied.keys - set(implied.tensors)
    assert torch.equal(told.tensors["flag"], batch["flag"][rows_of(1)])
    composed = compose(batch, fields, [place(1, implied), place(0, told)])
    assert torch.equal(composed["flag"], batch["flag"].roll(SIZE, 0))
    assert torch.equal(join([implied, told], fields).tensors["flag"], batch["flag"])


BROKEN = [
    ({"mystery": torch.zeros(3, 4)}, r"'mystery' \(shape \(3, 4\)\)"),
    ({"pixel_values": torch.zeros(3, 4)}, r"'pixel_values'.*images"),
    ({"advantages": torch.zeros(3, 4)}, r"'advantages' has shape \(3, 4\)"),
    ({"old_per_token_logps": torch.zeros(3, 9)}, r"requires \(3, 5\)"),
    ({"old_per_token_logps": torch.zeros(3, 5, dtype=torch.complex64)}, "is complex, which no file can hold"),
    ({"num_items_in_batch": torch.zeros(3)}, r"'num_items_in_batch' has shape \(3,\)"),
]


@pytest.mark.parametrize(("changed", "words"), BROKEN)
def test_a_batch_that_can_not_be_kept_whole_is_an_error_in_words(changed, words):
    batch = {**make_batch([[(2, 5), (2, 3), (2, 4)]], [], 0, [True]), **changed}
    with pytest.raises(BatchError, match=words):
        cut(batch, FieldTable(PAD), [rows_of(0)])


def lacks_a_key(batch, group):
    batch["ref_per_token_logps"] = batch["completion_ids"] * 1.0


def lacks_tokens(batch, group):
    del group.tensors["completion_ids"]


def holds_too_much(batch, group):
    group.completion_lengths[0] -= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lacks_a_key, "lacks 'ref_per_token_logps'"),
        (lacks_tokens, "lacks 'completion_ids'"),
        (holds_too_much, "hold 12 values of 'completion_ids' where their lengths tell 11"),
    ],
)
def test_167_a_group_that_does_not_fit_is_never_composed(change, words):
    """Padding would stand in the place of tokens, or those of the next group, silently."""
    batch = make_batch([[(2, 5), (2, 3), (2, 4)]], [], 0, [True])
    (group,) = cut(batch, FieldTable(PAD), [rows_of(0)])
    change(batch, group)
    with pytest.raises(BatchError, match=words):
        compose(batch, FieldTable(PAD), [place(0, group)])


def test_a_dtype_that_there_is_not_is_refused():
    with pytest.raises(ConfigurationError, match=r"FieldSpec\('flag'\): dtype 'flaot32' is none of float64"):
        FieldSpec("flag", "row", dtype="flaot32")


def test_a_set_is_told_alike_on_every_process():
    assert in_json({"b", "a", "c"}) == ["a", "b", "c"]
