"""Checkpoints of two ranks on two machines, whose folders lie on disks of their own, or on one that they share.

One launch runs through all cases (ranks/nodes.py).
"""

from functools import partial

import pytest
from launches import Launches

SCOPES = ("process", "gathered")
EVERY = ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """The results of two ranks on two machines in a case."""
    return partial(Launches("nodes", tmp_path_factory.mktemp("nodes"), local_ranks=(0, 0)), 2)


@pytest.mark.parametrize("scope", SCOPES)
def test_44_a_checkpoint_is_written_again_where_each_rank_has_a_folder_of_its_own(nodes, scope):
    """The rank that the trainer lets save clears its own folder only."""
    for case in ("first", "again"):
        for rank, found in enumerate(nodes(f"{scope}, {case}")):
            assert found["update"] == 6
            assert found["folders"] == {name: [f"rank-{rank:05d}"] for name in EVERY}


@pytest.mark.parametrize("scope", SCOPES)
def test_44_payload_is_rotated_where_the_trainer_rotates_nothing(nodes, scope):
    """Of a folder that the trainer itself never rotates, ours leaves when its checkpoint has left elsewhere."""
    saving, other = nodes(f"{scope}, rotated")
    assert list(saving["folders"]) == ["checkpoint-6"]
    held = [name for name, parts in other["folders"].items() if parts]
    soon = held == ["checkpoint-6"]  # the other machine's rank was the first to remove its checkpoint
    assert soon or held == ["checkpoint-4", "checkpoint-6"], "at most one more than the trainer keeps"
    assert list(other["folders"]) == EVERY, "what the trainer wrote stays, as in stock"


@pytest.mark.parametrize("scope", SCOPES)
def test_63_a_copy_under_another_name_is_not_rotated(nodes, scope):
    """By ours, that is: where the trainer rotates, it takes all that is called `checkpoint-`."""
    _, other = nodes(f"{scope}, kept")
    assert other["folders"]["checkpoint-best-6"] == ["rank-00001"]


@pytest.mark.parametrize("scope", SCOPES)
def test_44_a_folder_that_all_ranks_share_is_rotated_by_the_trainer_alone(nodes, scope):
    both = ["rank-00000", "rank-00001"]
    for found in nodes(f"{scope}, shared"):
        assert found["folders"] == {"checkpoint-6": both}
    for found in nodes(f"{scope}, shared again"):
        assert found["folders"] == {"checkpoint-4": both, "checkpoint-6": both}


@pytest.mark.parametrize("scope", SCOPES)
def test_44_with_save_on_each_node_every_machine_saves_rotates_and_resumes(nodes, scope):
    for rank, found in enumerate(nodes(f"{scope}, each")):
        assert found["folders"] == {"checkpoint-6": [f"rank-{rank:05d}"]}
    for found in nodes(f"{scope}, each resumed"):
        assert found["resumed"].endswith("checkpoint-6")
        assert found["update"] == 8
        assert found["size"] > 0
