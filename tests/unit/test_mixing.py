"""Any assignment of stored rows to rows of slots: what is composed holds just those, on any number of processes."""

import hypothesis.strategies as st
import numpy as np
import torch
from batches import EXTRA, KEYS, PAD, SIZE, make_batch
from hypothesis import given, settings

from trl_replay.batch.compose import compose, cut, take_rows
from trl_replay.batch.groups import blank
from trl_replay.data.types import NONE, FieldTable
from trl_replay.distributed.communicator import Decision, SharedRows
from trl_replay.step.decisions import planned
from trl_replay.testing import make_groups, make_table

FIELDS = FieldTable(PAD, extra=EXTRA)
GROUPS = 4
LENGTHS = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=SIZE, max_size=SIZE),
    min_size=GROUPS,
    max_size=GROUPS,
)


@st.composite
def assignments(draw):
    """Entries drawn for each slot, `(n, k)`, and the stored row that takes each of its rows, `(n, G)`."""
    entries = draw(st.permutations(range(2 * GROUPS)))
    drawn = np.array(entries).reshape(GROUPS, 2)
    chosen = np.full((GROUPS, SIZE), NONE)
    for slot in range(GROUPS):
        rows = draw(st.permutations(range(2 * SIZE)))[:SIZE]
        for row in draw(st.sets(st.integers(0, SIZE - 1))):
            chosen[slot, row] = rows[row]
    return drawn, chosen


def table_of(count):
    rows = np.zeros((count, SIZE))
    columns = {"row_rewards": rows[:, :, None], "row_advantage": rows + 1.0, "row_logp": rows, "row_items": rows}
    table = type(make_table([])).empty(SIZE)
    table.append({"serial": np.arange(100, 100 + count), "update": np.zeros(count), **columns}, count)
    return table


def row_of(batch, row):
    (group,) = cut(batch, FIELDS, [slice(row, row + 1)])
    return group


def assert_same_row(found, expected):
    assert found.completion_lengths.tolist() == expected.completion_lengths.tolist()
    assert found.prompt_lengths.tolist() == expected.prompt_lengths.tolist()
    assert set(found.tensors) == set(expected.tensors)
    for key, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[key], tensor), key


@settings(deadline=None, database=None)
@given(
    LENGTHS, LENGTHS, LENGTHS, st.lists(st.sampled_from(KEYS), unique=True), assignments(), st.sampled_from([1, 2, 6])
)
def test_the_batch_holds_the_stored_rows_that_were_chosen_and_the_fresh_ones_elsewhere(
    fresh, first, second, keys, assignment, ranks
):
    batch = make_batch(fresh, keys, 0, [True] * GROUPS)
    batches = [
        make_batch(lengths, keys, seed, [True, False, True, False]) for seed, lengths in ((1, first), (2, second))
    ]
    everything = [slice(slot * SIZE, (slot + 1) * SIZE) for slot in range(GROUPS)]
    stored = [group for one in batches for group in cut(one, FIELDS, everything)]
    drawn, chosen = assignment
    view = make_groups([[0.0] * SIZE] * GROUPS)
    table = table_of(len(stored))
    mixed = planned(view, table, drawn, chosen, "stored")
    mixed.plan.entry = np.where(mixed.plan.stored, mixed.of_entries(mixed.used), NONE)
    decision = Decision(plan=mixed.plan)
    payload = {
        int(table.serial[entry]): take_rows(stored[entry], mixed.plan.source.flat[places].tolist(), FIELDS)
        for entry, places in mixed.plan.drawn()
    }
    rows = GROUPS * SIZE
    here = rows // ranks  # of six processes each has two rows of a group of three
    for rank in range(ranks):
        layout = SharedRows(blank(0, rows), blank(rank * here, here), SIZE)
        part = {key: value[rank * here : (rank + 1) * here] if value.dim() else value for key, value in batch.items()}
        composed = compose(part, FIELDS, layout.placements(decision, table, 1, payload))
        for row in range(here):
            slot, place = divmod(rank * here + row, SIZE)
            number = int(chosen[slot, place])
            if number == NONE:
                expected = row_of(part, row)
            else:
                entry = int(drawn[slot, number // SIZE])
                source = batches[entry // GROUPS]
                expected = row_of(source, entry % GROUPS * SIZE + number % SIZE)
            assert_same_row(row_of(composed, row), expected)
