"""Keys of dataset rows: by their content and nothing else, and what is told of columns."""

import datetime
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trl_replay.data.tasks import Tasks, encoded, task_of_group


def key(**columns):
    return Tasks().key({"prompt": "1=", **columns})


# equal and different


def test_a_key_is_of_prompt_images_and_every_other_column():
    red, blue = (Image.new("RGB", (2, 2), color) for color in ((255, 0, 0), (0, 0, 255)))
    plain = key()
    assert 0 < plain < 2**63
    others = [key(answer="1"), key(answer="2"), key(label="1"), key(image=red), key(image=blue), key(images=[red])]
    others += [key(images=[red, blue]), key(images=[blue, red]), key(tests=["a", "b"]), key(tests=["b", "a"])]
    assert len({plain, *others}) == 11
    assert plain == key(answer=None), "a column that a file does not have is None elsewhere"
    assert key(image=red) == key(image=red.copy())
    messages = [{"role": "user", "content": "1="}]
    assert Tasks().key({"prompt": messages}) == Tasks().key({"prompt": [{"content": "1=", "role": "user"}]}) != plain


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float32(0.5), 0.5),
        (np.str_("text"), "text"),
        (float("nan"), np.float64(-np.nan)),
        (np.arange(3), [0, 1, 2]),
        (torch.tensor([1.0, 2.0]), (1.0, 2.0)),
        ({"a": 1, "b": [{"c": 2.0}]}, {"b": [{"c": 2.0}], "a": 1}),
        (datetime.date(2024, 1, 2), datetime.date(2024, 1, 2)),
    ],
)
def test_equal_are(one, other):
    assert encoded(one) == encoded(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        ("a", b"a"),
        ([["a"], "b"], [["a", "b"]]),
        (["ab"], ["a", "b"]),
        ({"a": 1}, [["a", 1]]),
        (datetime.date(2024, 1, 2), datetime.datetime(2024, 1, 2)),
        (Image.new("L", (2, 1)), Image.new("L", (1, 2))),
    ],
)
def test_different_are(one, other):
    assert encoded(one) != encoded(other)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_what_json_brings_back_is_equal(value):
    assert encoded(json.loads(json.dumps(value))) == encoded(value)


@given(VALUES, VALUES)
def test_two_values_are_equal_where_their_texts_are(one, other):
    def text(value):
        return json.dumps(value, sort_keys=True)

    assert (encoded(one) == encoded(other)) == (text(one) == text(other))


def test_a_key_is_the_same_in_another_process():
    row = {"prompt": "1=", "tests": {"b": [1.5, None], "a": "text"}, "seed": 3}
    code = f"from trl_replay.data.tasks import Tasks; print(Tasks().key({row!r}))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert int(found.stdout) == Tasks().key(row)


# which columns


def test_a_column_without_content_is_left_out_and_named_once():
    tasks = Tasks()
    with pytest.warns(
        UserWarning, match="column 'judge' can't be compared by its content .it holds a object."
    ) as told:
        keys = {tasks.key({"prompt": "1=", "judge": [object()]}) for _ in range(3)}
    assert len(told) == 1
    assert keys == {key()}


def test_a_prompt_without_content_is_like_no_other():
    tasks = Tasks()
    with pytest.warns(UserWarning, match="column 'image' .* no two groups count as one task"):
        assert tasks.key({"prompt": "1=", "image": object()}) != tasks.key({"prompt": "1=", "image": object()})


@pytest.mark.parametrize(
    ("tasks", "row"),
    [
        (Tasks(["index"]), {"prompt": "1="}),
        (Tasks(warns=False), {"prompt": "1="}),
        (Tasks(), {"environment": "vault"}),
    ],
    ids=["columns are chosen", "another process warns", "there is no prompt"],
)
def test_nobody_is_told_of_columns_that_split_a_prompt_where(tasks, row):
    assert tasks.key({**row, "index": 0}) != tasks.key({**row, "index": 1})  # warnings are errors here


# groups


def test_a_group_whose_rows_differ_is_a_task_of_its_own():
    tasks = np.array([5, 5, 5, 6, 7, 7])
    rows = np.arange(6) + 12
    first = task_of_group(tasks, rows, 2, 3, 1)
    assert first[[0, 1, 4, 5]].tolist() == [5, 5, 7, 7]
    assert first[2] == first[3] < 0
    assert task_of_group(tasks, rows, 2, 3, 1).tolist() == first.tolist(), "on every process"
    others = [
        task_of_group(tasks, rows, 2, 3, 2),
        task_of_group(tasks, rows, 2, 4, 1),
        task_of_group(tasks, rows + 2, 2, 3, 1),
    ]
    assert len({int(each[2]) for each in (first, *others)}) == 4
    assert task_of_group(tasks[:5], rows[:5], 2, 3, 1).tolist() == tasks[:5].tolist(), "no whole groups"
