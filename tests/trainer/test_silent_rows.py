"""Rows and groups that train no token, and masks in mixed groups."""

from functools import partial

import numpy as np
import pytest
from methods import EVERY_GROUP, SAME_PROMPT
from scenarios import train
from support import DEAD, HALF, rollout_of, tokens_of_replayed, truncating

from trl_replay.loss.supply import ROWS, SILENT

ALL_DEAD = [DEAD, DEAD, DEAD]
ALL_HALF = [HALF, HALF, HALF]
INJECT = {"replay_mixer": "inject", "replay_advantages": "joint", **EVERY_GROUP, **SAME_PROMPT}
truncated = partial(train, mask_truncated_completions=True, rollout=truncating(), max_steps=3)


def rows(*chosen):
    """A mixer that does not look at what the rows train."""

    def mixer(table, drawn, slots, context):
        return np.tile(chosen, (len(drawn), 1))

    return mixer


FIRST = rows(0, -1, -1, -1)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"replay_mixer": FIRST}, "The mixer 'rows.<locals>.mixer'"),
        ({"hooks": {"mix": FIRST}}, "Plugin 'mine' (registered in this process), in trl_replay_mix,"),
    ],
)
def test_62_a_mixer_that_chooses_such_a_row_is_named_and_the_fresh_row_stays(tmp_path, settings, name):
    run = truncated(tmp_path, ALL_HALF, ALL_DEAD, replaced=0, **{**INJECT, **settings})
    assert tokens_of_replayed(run.steps) == []
    assert run.reasons[f"{name} chose a stored row that trains nothing: the fresh row stays"] == 6


def longest_masked(groups):
    shaped = groups.advantages.copy()
    shaped[np.arange(len(groups)), groups.lengths.argmax(axis=1)] = np.nan
    return shaped


@pytest.mark.parametrize(("stored", "longest"), [(1, 3), (9, 1)])
def test_65_a_hook_decides_again_which_rows_of_a_mixed_group_are_masked(tmp_path, stored, longest):
    """Of the fresh rows the last is the longest, and masked; a stored one may be longer."""
    lengths = [[first + row for row in range(4)] * 3 for first in (stored, 2)]
    run = truncated(
        tmp_path, [[0.0, 2.0, 0.0, 1.0]] * 3, [[0.0, 0.0, 1.0, 3.0]] * 3, rollout=rollout_of(*lengths), max_steps=2,
        scale_rewards="none", hooks={"advantages": longest_masked}, **{**INJECT, "replay_mixer": rows(-1, 1, -1, -1)},
    )  # fmt: skip
    _, after = run.steps[1]
    after_rows = after[ROWS].view(3, 4, 2)
    assert (after_rows[:, :, 0] < 0).tolist() == [[False, True, False, False]] * 3
    masked = (after_rows[:, :, 1] & SILENT).bool()
    assert masked.tolist() == [[row == longest for row in range(4)]] * 3
    trained_tokens = after["completion_mask"][~masked.flatten()].sum()
    assert int(after["num_items_in_batch"]) == int(trained_tokens)
    joint = np.array([0.0, 2.0, 1.0, 3.0]) - 1.5  # over all rows, as TRL's own before the hook
    joint[longest] = 0.0
    np.testing.assert_allclose(after["advantages"].view(3, 4).numpy(), [joint] * 3, atol=1e-6)
    assert run.session.metrics["replay/masked_rows_fraction"] == 0.25
