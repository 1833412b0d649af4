"""Rows of a dataset: keys of their prompts, an order without repetition, and copies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_replay import SeamError
from trl_replay.data.tasks import Tasks
from trl_replay.generation.prompts import Dataset, PromptSource, repeated

prompt_key = Tasks([]).key


def dataset(count, of=None):
    """`count` rows with as many prompts, or with only `of`."""
    rows = [{"prompt": f"{number % (of or count)}=", "number": number} for number in range(count)]
    return Dataset(lambda: (rows, lambda batch: batch), prompt_key)


def numbers(rows):
    return [row["number"] for row in rows]


# new prompts


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 4), st.lists(st.integers(1, 5), max_size=12), st.integers(0, 3))
def test_every_row_of_a_part_comes_once_before_any_comes_again(count, parts, takes, seed):
    sources = [PromptSource(dataset(count), seed, part, parts) for part in range(parts)]
    for source in sources:
        given_out = []
        for take in takes:
            rows = numbers(source.take(take))
            assert len(rows) == take
            assert len(set(rows)) == min(take, len(set(rows)))
            given_out += rows
        fit = [rows for rows in takes if rows <= count // parts]
        if len(fit) == len(takes) and count >= parts:
            part = len(source._numbers)
            first = given_out[:part]
            assert len(set(first)) == len(first)


def test_prompts_of_the_batch_are_passed_over_while_there_are_others():
    source = PromptSource(dataset(20), seed=0)
    present = {prompt_key({"prompt": f"{number}="}) for number in range(15)}
    assert set(numbers(source.take(5, present))) == set(range(15, 20))
    everything = {prompt_key({"prompt": f"{number}="}) for number in range(20)}
    assert len(source.take(3, everything)) == 3, "there are no others"


def test_rows_that_are_not_wanted_come_only_where_there_are_no_others():
    source = PromptSource(dataset(20), seed=0)
    found = numbers(source.take(8, skip=lambda row: row["number"] >= 10))
    assert max(found) < 10
    assert len(set(found)) == 8
    assert len(source.take(4, skip=lambda row: True)) == 4


def test_a_stream_says_that_it_gives_no_new_prompts():
    stream = Dataset(lambda: (iter([{"prompt": "1="}]), lambda batch: batch), prompt_key)
    with pytest.raises(SeamError, match=r"is a stream \(list_iterator\).*no new prompts.*dataset with a length"):
        PromptSource(stream, seed=0).take(1)


def test_a_dataset_that_repeats_a_few_prompts_is_not_searched_to_its_end():
    rows = dataset(100_000, of=2)
    looked_at = []
    row = rows.row
    rows.row = lambda number: looked_at.append(number) or row(number)
    present = {prompt_key({"prompt": f"{number}="}) for number in range(2)}
    assert len(PromptSource(rows, seed=0).take(4, present)) == 4
    assert len(looked_at) < 200


def test_its_state_goes_on_where_it_was_and_begins_anew_with_another_number_of_parts():
    source = PromptSource(dataset(9), seed=2)
    source.take(4)
    state = source.state_dict()
    expected = numbers(source.take(5))
    again = PromptSource(dataset(9), seed=2)
    again.load_state_dict(state)
    assert numbers(again.take(5)) == expected
    for other in (PromptSource(dataset(9), 2, 0, 3), PromptSource(dataset(11), 2)):
        other.load_state_dict(state)
        assert (other.position, other.order) == (0, 1)


# rows


def test_a_collator_that_gives_no_rows_is_named_with_the_remedy():
    rows = Dataset(lambda: ([{"prompt": "1="}], lambda batch: {"prompt": ["1="]}), prompt_key)
    with pytest.raises(SeamError, match=r"data_collator returns a dict .* replay_refill='same"):
        rows.row(0)


def test_every_repetition_is_a_copy():
    row = {"prompt": [{"role": "user", "content": "1="}]}
    copies = repeated([row], 3)
    copies[0]["prompt"][0]["content"] = "changed"
    assert [one["prompt"][0]["content"] for one in (row, *copies)] == ["1=", "changed", "1=", "1="]
