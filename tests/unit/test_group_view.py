"""From row columns and rewards to the view of groups, and which groups are dead; by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import PAD, make_batch

from trl_replay.batch.group_view import (
    advantage_noise,
    bessel_std,
    blank,
    describe,
    view,
    weighted_rewards,
    with_environments,
)
from trl_replay.compat import RewardSetup
from trl_replay.fields import FieldTable

EPS = 8 * float(np.finfo(np.float32).eps)


def setup(scale: str = "group", aggregation: str = "sum_then_normalize", *weights: float) -> RewardSetup:
    return RewardSetup(np.array(weights or [1.0]), scale, aggregation)


def test_rows_are_described_by_their_real_tokens() -> None:
    batch = make_batch([[(2, 3), (2, 1), (2, 2)], [(4, 2)] * 3], ["tool_mask"], 0, [True, True])
    batch["completion_mask"][1] = 0  # truncated: its tokens are there, and none is trained on
    columns = describe(batch, 6, np.array([7, 7, 7, 9, 9, 9]), FieldTable(PAD))
    assert columns["row"].tolist() == [6, 7, 8, 9, 10, 11]
    assert columns["lengths"].tolist() == [3, 1, 2, 2, 2, 2]
    trained = (batch["completion_mask"] * batch["tool_mask"]).sum(dim=1)
    assert columns["trainable"].tolist() == trained.tolist()
    assert columns["advantages"].tolist() == batch["advantages"].double().tolist()
    assert columns["images"].tolist() == [-1] * 6
    assert columns["prompt"].tolist() == [7, 7, 7, 9, 9, 9]
    assert all(column.dtype.itemsize == 8 for column in columns.values())


class Vault:
    """An environment that says which task it has."""

    def __init__(self, task: Any) -> None:
        self.task_id = task


def test_a_rows_task_is_its_dataset_rows_with_its_environments_or_the_prompt_that_that_made() -> None:
    batch = make_batch([[(2, 1)] * 3, [(4, 1)] * 3], [], 0, [True, True])
    keys = np.full(6, 7)
    fields = FieldTable(PAD)
    assert with_environments(keys, [], batch, fields) is keys
    told = with_environments(keys, [Vault(1), Vault(lambda: 1), Vault(2), *[Vault(None)] * 3], batch, fields).tolist()
    assert told[0] == told[1] != told[2]
    assert told[3] == told[4] == told[5], "one prompt"
    assert len(set(told)) == 3
    wider = {key: torch.nn.functional.pad(batch[key], (2, 0)) for key in ("prompt_ids", "prompt_mask")}
    silent = [object()] * 6
    shown = with_environments(keys, silent, batch, fields)
    assert shown.tolist() == with_environments(keys, silent, {**batch, **wider}, fields).tolist()
    assert shown[0] != shown[3], "another prompt"
    assert shown[3] == told[3]
    assert shown[0] != with_environments(keys + 1, silent, batch, fields)[0], "another dataset row"


def test_blank_columns_hold_nothing_but_their_rows() -> None:
    columns = blank(4, 2)
    assert columns.pop("row").tolist() == [4, 5]
    assert not any(column.any() for column in columns.values())


def shared(rows: list[int], advantages: list[float]) -> dict[str, Any]:
    columns = blank(rows[0], len(rows)) | {"row": np.array(rows), "advantages": np.array(advantages)}
    columns["prompt"] = np.array(rows) * 10
    columns["lengths"], columns["trainable"], columns["items"] = (np.array(rows) + shift for shift in (1, 2, 3))
    return columns


def test_a_process_sees_its_own_groups_of_all_that_were_scored() -> None:
    rewards = np.array([[9.0], [9.0], [1.0], [0.0], [0.5], [0.5]])
    groups = view(shared([2, 3, 4, 5], [1.0, -1.0, 0.0, 0.0]), torch.from_numpy(rewards), setup(), 2, 7)
    assert groups.rewards[:, :, 0].tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert groups.dead.tolist() == [False, True]
    assert groups.advantages.tolist() == [[1.0, -1.0], [0.0, 0.0]]
    assert groups.prompt.tolist() == [20, 40]
    assert groups.update.tolist() == [7, 7]
    assert groups.lengths.tolist() == [[3, 4], [5, 6]]
    assert groups.trainable.tolist() == [[4, 5], [6, 7]]
    assert groups.counted.tolist() == [[5, 6], [7, 8]]


@pytest.mark.parametrize(("eighths", "dead"), [(0.9, True), (2.0, False)])
def test_trls_own_advantages_of_equal_rewards_are_dead_and_others_than_its_own_are_not(
    eighths: float, dead: bool
) -> None:
    """One rounding error of a mean is an eighth of the noise; what is further off somebody has shaped."""
    rewards = np.full((4, 1), 0.75)
    noise = float(advantage_noise(rewards.reshape(1, 4, 1), setup())[0])
    assert noise == pytest.approx(EPS * 0.75 / 1e-4)
    columns = shared([0, 1, 2, 3], [0.0, 0.0, eighths * noise / 8, 0.0])
    assert view(columns, torch.from_numpy(rewards), setup(), 4, 0).dead.tolist() == [dead]


def test_only_rows_with_a_trained_token_make_a_group_live() -> None:
    rewards = np.array([[1.0], [0.5], [0.0], [0.5]] * 3)
    advantages = np.tile(rewards[:4, 0] - 0.5, 3) / (np.std(rewards[:4], ddof=1) + 1e-4)
    columns = {
        **shared(list(range(12)), advantages.tolist()),
        "trainable": np.array([0, 3, 0, 3, 0, 0, 1, 0] + [0] * 4),
    }
    assert view(columns, torch.from_numpy(rewards), setup(), 4, 0).dead.tolist() == [True, False, True]
    shaped = {**columns, "advantages": 2 * advantages}
    assert view(shaped, torch.from_numpy(rewards), setup(), 4, 0).dead.tolist() == [True, False, True]


def test_the_noise_grows_with_rewards_and_their_weights_and_falls_with_their_deviation() -> None:
    rewards = np.array([[[2.0, -1.0], [2.0, 3.0]], [[1.0, np.nan], [0.0, 0.0]]])
    weighted = setup("none", "sum_then_normalize", 1.0, -2.0)
    np.testing.assert_allclose(advantage_noise(rewards, weighted), [EPS * 8.0, EPS * 1.0])
    sums = [[4.0, -4.0], [1.0, 0.0]]
    deviations = [np.std(row, ddof=1) for row in sums]
    by_group = advantage_noise(rewards, setup("group", "sum_then_normalize", 1.0, -2.0))
    np.testing.assert_allclose(by_group, [EPS * 8.0 / (deviations[0] + 1e-4), EPS / (deviations[1] + 1e-4)])
    of_all = np.std([4.0, -4.0, 1.0, 0.0], ddof=1) + 1e-4
    by_batch = advantage_noise(rewards, setup("batch", "sum_then_normalize", 1.0, -2.0))
    np.testing.assert_allclose(by_batch, [EPS * 8.0 / of_all, EPS / of_all])


def test_functions_that_are_normalized_first_have_the_noise_of_each_and_of_their_sum() -> None:
    rewards = np.array([[[1.0, 5.0], [0.0, 5.0]], [[1.0, 2.0], [0.0, 0.0]]])
    std = np.array([[np.sqrt(0.5), 0.0], [np.sqrt(0.5), np.sqrt(2.0)]]) + 1e-4
    normalized = np.array([[[0.5, 0.0], [-0.5, 0.0]], [[0.5, 1.0], [-0.5, -1.0]]]) / std[:, None]
    errors = EPS * np.array([[1.0, 5.0], [1.0, 2.0]]) / std
    errors[1] += 2 * normalized[1].max(axis=0) * 1e-4 / std[1]  # two functions that vary may cancel out
    sums = normalized.sum(axis=2)
    expected = (errors.sum(axis=1) + EPS * np.abs(sums).max(axis=1)) / (np.std(sums, ddof=1) + 1e-4)
    found = advantage_noise(rewards, setup("group", "normalize_then_sum", 1.0, 1.0))
    np.testing.assert_allclose(found, expected)


def test_deviations_and_sums_leave_out_what_no_function_scored() -> None:
    values = np.array([[1.0, np.nan, 4.0], [2.0, np.nan, np.nan], [np.nan] * 3])
    np.testing.assert_allclose(bessel_std(values), [np.std([1.0, 4.0], ddof=1), 0.0, 0.0])
    rewards = np.array([[[1.0, np.nan], [np.nan, np.nan], [2.0, 3.0]]])
    np.testing.assert_array_equal(weighted_rewards(rewards, np.array([2.0, 10.0])), [[2.0, np.nan, 34.0]])
