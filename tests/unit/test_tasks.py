"""Keys of dataset rows: by their content and nothing else, and what is told of columns."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trl_replay import ConfigurationError
from trl_replay.tasks import Tasks, encoded, hashed, own, settled


def key(**columns: Any) -> int:
    return Tasks().key({"prompt": "1=", **columns})


# equal and different


def test_a_key_is_of_prompt_images_and_every_other_column() -> None:
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


def test_the_order_of_columns_does_not_matter() -> None:
    row = {"prompt": "1=", "answer": "2", "seed": 3}
    assert Tasks().key(row) == Tasks().key(dict(reversed(row.items())))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (float("nan"), np.float64(-np.nan)),
        (np.arange(3), [0, 1, 2]),
        (np.array([[0.5], [1.5]]), [[0.5], [1.5]]),
        (torch.tensor([1.0, 2.0]), (1.0, 2.0)),
        ([1, "a"], (1, "a")),
        ({"a": 1, "b": [{"c": 2.0}]}, {"b": [{"c": 2.0}], "a": 1}),
        (datetime.date(2024, 1, 2), datetime.date(2024, 1, 2)),
    ],
)
def test_equal_are(one: Any, other: Any) -> None:
    assert encoded(one) == encoded(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        (0.0, -0.0),
        (0.1, 0.1 + 2**-56),
        ("1", 1),
        ("", None),
        ("a", b"a"),
        ([], {}),
        ([], [[]]),
        ([["a"], "b"], [["a", "b"]]),
        (["ab"], ["a", "b"]),
        ({"a": 1}, [["a", 1]]),
        ([1, 2], ["1", "2"]),
        (datetime.date(2024, 1, 2), datetime.datetime(2024, 1, 2)),
        (Image.new("L", (2, 1)), Image.new("L", (1, 2))),
    ],
)
def test_different_are(one: Any, other: Any) -> None:
    assert encoded(one) != encoded(other)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_what_json_brings_back_is_equal(value: Any) -> None:
    assert encoded(json.loads(json.dumps(value))) == encoded(value)


@given(VALUES, VALUES)
def test_two_values_are_equal_where_their_texts_are(one: Any, other: Any) -> None:
    def text(value: Any) -> str:
        return json.dumps(value, sort_keys=True)

    assert (encoded(one) == encoded(other)) == (text(one) == text(other))


def test_a_key_is_the_same_in_another_process() -> None:
    row = {"prompt": "1=", "tests": {"b": [1.5, None], "a": "text"}, "seed": 3}
    code = f"from trl_replay.tasks import Tasks; print(Tasks().key({row!r}))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert int(found.stdout) == Tasks().key(row)


# which columns


def test_chosen_columns_alone_count_beside_the_prompt() -> None:
    tasks = Tasks(["answer"])
    rows = [{"prompt": "1=", "answer": answer, "index": index} for index, answer in enumerate("aab")]
    first, second, third = map(tasks.key, rows)
    assert first == second != third
    alone = Tasks([])
    assert len({alone.key(row) for row in rows}) == 1
    assert alone.key(rows[0]) != alone.key({"prompt": "2="})
    assert alone.key({"prompt": "1=", "image": Image.new("L", (1, 1))}) != alone.key(rows[0])


def test_a_row_without_a_chosen_column_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"replay_task_columns=\['answr'\].*no column 'answr'.*'prompt', 'a'"):
        Tasks(["answr"]).key({"prompt": "1=", "a": 1})


def test_a_column_without_content_is_left_out_and_named_once() -> None:
    tasks = Tasks()
    with pytest.warns(UserWarning, match="column 'judge' can't be told by its content .it holds a object.") as told:
        keys = {tasks.key({"prompt": "1=", "judge": [object()]}) for _ in range(3)}
    assert len(told) == 1
    assert keys == {key()}


def test_a_prompt_without_content_is_like_no_other() -> None:
    tasks = Tasks()
    with pytest.warns(UserWarning, match="column 'image' .* no two groups count as one task"):
        assert tasks.key({"prompt": "1=", "image": object()}) != tasks.key({"prompt": "1=", "image": object()})


def test_columns_that_split_a_prompt_are_named_once() -> None:
    tasks = Tasks()
    tasks.key({"prompt": "1=", "answer": "1", "index": 0, "level": 1})
    tasks.key({"prompt": "2=", "answer": "1", "index": 1, "level": 1})
    with pytest.warns(UserWarning, match=r"one prompt differ in 'index', 'level'.*replay_task_columns"):
        tasks.key({"prompt": "2=", "answer": "1", "index": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tasks.key({"prompt": "1=", "answer": "2", "index": 3})
        quiet = Tasks(warns=False)
        chosen = Tasks(["index"])
        nameless = Tasks()
        for index in range(2):
            quiet.key({"prompt": "1=", "index": index})
            chosen.key({"prompt": "1=", "index": index})
            nameless.key({"environment": "vault", "index": index})


# groups


def test_rows_of_a_group_have_one_key_on_every_process() -> None:
    rows = [{"prompt": prompt} for prompt in "aaaabbbbcccc"]
    whole = Tasks()
    whole.begin(rows, 0, 4)
    assert len(set(whole.of_rows.tolist())) == 3
    parts = []
    for first in (0, 6):
        part = Tasks()
        part.begin(rows[first : first + 6], first, 4)
        parts += part.of_rows.tolist()
    assert parts == whole.of_rows.tolist()


def test_a_group_whose_rows_differ_is_a_task_of_its_own() -> None:
    tasks = np.array([5, 5, 5, 6, 7, 7])
    rows = np.arange(6) + 12
    first = settled(tasks, rows, 2, 3, 1)
    assert first[[0, 1, 4, 5]].tolist() == [5, 5, 7, 7]
    assert first[2] == first[3] < 0
    assert settled(tasks, rows, 2, 3, 1).tolist() == first.tolist(), "on every process"
    others = [settled(tasks, rows, 2, 3, 2), settled(tasks, rows, 2, 4, 1), settled(tasks, rows + 2, 2, 3, 1)]
    assert len({int(each[2]) for each in (first, *others)}) == 4
    assert settled(tasks[:5], rows[:5], 2, 3, 1).tolist() == tasks[:5].tolist(), "no whole groups"


def test_hashes_have_63_bits_and_those_of_single_groups_the_sign() -> None:
    assert all(0 <= hashed(bytes([number])) < 2**63 for number in range(200))
    assert all(-(2**63) <= own(number) < 0 for number in range(200))
    assert hashed(b"ab") != hashed(b"a", b"b")
