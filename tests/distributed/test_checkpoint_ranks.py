"""Checkpoints of several processes: each number of them is launched once, and runs through all cases.

As forks: torchrun itself is in tests/trainer/test_run.py.
"""

import re
import shutil
from pathlib import Path

import pytest
from launches import Launches
from one_rank import told
from resuming import SCOPES, group_hash, last, restored, runs_on_ranks, train

from trl_replay import last_complete_checkpoint
from trl_replay.checkpoint import format as saved
from trl_replay.extras.files.export import of_checkpoint, write
from trl_replay.serialization.groups import unpack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def launches(folder, tmp_path_factory):
    """The results of every rank of each number of processes, by case; three processes leave checkpoints for two."""
    for scope in SCOPES:
        train(folder / f"{scope} of 1", replay_scope=scope, replay_buffer_size=50, max_steps=4, save_steps=4)
    launches = Launches("resuming_ranks", tmp_path_factory.mktemp("results"), folder)
    for ranks in (3, 2):
        launches.begin(ranks)
    return launches


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in (2, 3) for name, _ in runs_on_ranks(ranks)])
def test_resuming_is_bit_identical_on_every_rank_where_stock_is(launches, ranks, name):
    """Three processes add gradients in an order that depends on how long DDP has been running: stock differs too."""
    found = launches(ranks, name)
    for rank, stock in zip(found, launches(ranks, "stock"), strict=True):
        assert stock["same"] or ranks == 3
        assert not (stock["same"] and rank["differences"])
    assert sum(rank["replaced"] for rank in found) > 0


def payload_of(checkpoint):
    """Hashes of all groups of a checkpoint."""
    hashes = set()
    for rank in saved.ranks_in(checkpoint / "trl_replay"):
        state = saved.read(checkpoint / "trl_replay", rank)
        hashes |= {group_hash(unpack(packed)) for _, packed in state.payload()}
    return hashes


def check_dealt(scope, everything, ranks, updates):
    """Nothing is lost, and everything is where its scope wants it."""
    held = [set(rank["payload"].values()) for rank in ranks]
    assert set.union(*held) == everything
    assert all(rank["update"] == updates for rank in ranks), "training went on"
    assert all(rank.get("together") == ranks[0].get("together") for rank in ranks), "known failure 82"
    assert sum(map(len, held)) == len(everything), "each group is on one rank"
    assert max(map(len, held)) - min(map(len, held)) <= 2, "and the ranks have equally many"
    columns = [rank["columns"] for rank in ranks]
    tables = [list(zip(table["serial"], table["update"], table["score"], strict=True)) for table in columns]
    if scope == "process":
        assert [len(table) for table in tables] == [len(part) for part in held]
    else:
        assert all(table == tables[0] for table in tables), "the table is the same on all ranks"
    if scope == "gathered":
        for number, rank in enumerate(ranks):
            table = columns[number]
            mine = {s for s, owner in zip(table["serial"], table["owner"], strict=True) if owner == number}
            assert mine == {int(serial) for serial in rank["payload"]}
    assert all(len(set(table["serial"])) == len(table["serial"]) for table in columns)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("source", "target"), [(1, 2), (3, 2), (1, 3)])
def test_another_number_of_processes_deals_everything_anew(launches, folder, scope, source, target):
    ranks = launches(target, f"{scope} of {source}")
    check_dealt(scope, payload_of(folder / f"{scope} of {source}" / "checkpoint-4"), ranks, updates=6)


@pytest.mark.parametrize("scope", SCOPES)
def test_who_names_no_scope_goes_on_with_the_checkpoints(launches, folder, scope):
    ranks = launches(2, f"auto, {scope} of 1")
    check_dealt(scope, payload_of(folder / f"{scope} of 1" / "checkpoint-4"), ranks, updates=6)
    named = launches(2, f"{scope} of 1")
    assert [rank["payload"] for rank in ranks] == [rank["payload"] for rank in named]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("source", [2, 3])
@pytest.mark.parametrize("named", [True, False])
def test_one_process_takes_over_from_several(launches, folder, scope, source, named):
    checkpoint = folder / f"{scope} of {source}" / "checkpoint-4"
    settings = {"replay_scope": scope} if named else {}
    found = restored(folder / "one", str(checkpoint), **settings, replay_buffer_size=90)
    check_dealt(scope, payload_of(checkpoint), [found], updates=4)
    _, session = train(
        folder / "one", resume=str(checkpoint), replay_scope=scope, replay_buffer_size=90, max_steps=6,
        save_strategy="no",
    )  # fmt: skip
    assert session.update == 6


def test_damage_on_one_rank_is_told_by_all(launches):
    for rank in launches(2, "refused"):
        assert rank["type"] == "CheckpointError"
        assert "checksum differs" in rank["text"]


def test_61_one_ranks_files_of_another_run_are_told_by_all(launches):
    for rank in launches(2, "mixed"):
        assert rank["ours"]
        assert "does not belong to the rest of the checkpoint" in rank["text"]


@pytest.mark.parametrize("scope", SCOPES)
def test_67_what_one_rank_cant_apply_all_ranks_tell(launches, scope):
    for rank in launches(2, f"unapplied, {scope}"):
        assert re.search(r"checkpoint-2.*evictor.*Versioned.*not on this rank.*remove the folder", rank["text"])


def test_a_failure_to_save_on_one_rank_stops_all_and_leaves_no_whole_checkpoint(launches, folder):
    for rank in launches(2, "unsaved"):
        assert rank["ours"]
        assert "no room" in told(rank)
    assert last_complete_checkpoint(folder / "unsaved") is None


def test_124_what_failed_on_one_rank_stops_all_before_the_next_checkpoint(launches, folder):
    for rank in launches(2, "kept"):
        assert rank["ours"]
        assert "no metric on this rank" in told(rank)
    assert last(folder / "kept").endswith("checkpoint-2")


def test_133_with_batches_of_another_size_each_rank_goes_on_in_its_own_part_of_the_prompts(launches):
    ranks = launches(2, "positions")
    for rank in ranks:
        assert [rank["now"][name] for name in ("order", "position")] == [
            rank["then"][name] for name in ("order", "position")
        ]
    assert [rank["then"]["parts"] for rank in ranks] == [2, 2], "each has its own part"


def test_a_checkpoint_that_lacks_the_generators_of_a_rank_is_not_whole(launches, folder, tmp_path):
    """The trainer does not wait for the other ranks before it writes the file that marks a checkpoint whole."""
    copy = Path(shutil.copytree(folder / "process of 2" / "checkpoint-4", tmp_path / "checkpoint-4"))
    assert last_complete_checkpoint(tmp_path) == str(copy)
    (copy / "rng_state_1.pth").unlink()
    assert last_complete_checkpoint(tmp_path) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_63_a_checkpoint_that_lacks_all_files_of_a_rank_is_not_whole(launches, folder, tmp_path, rank):
    copy = Path(shutil.copytree(folder / "process of 2" / "checkpoint-4", tmp_path / "checkpoint-4"))
    shutil.rmtree(copy / "trl_replay" / f"rank-0000{rank}")
    assert last_complete_checkpoint(tmp_path) is None


@pytest.mark.parametrize("scope", SCOPES)
def test_what_all_ranks_export_all_ranks_take_back(launches, folder, scope):
    ranks = launches(2, f"files {scope}")
    names = {rank["path"] for rank in ranks}
    one_each = {f"{scope}-00000-of-00002.parquet", f"{scope}-00001-of-00002.parquet"}
    assert names == one_each
    held, taken = ([set(rank[key]) for rank in ranks] for key in ("held", "taken"))
    assert set.union(*held) == set.union(*taken)
    assert not taken[0] & taken[1], "each group is on one rank"
    assert abs(len(taken[0]) - len(taken[1])) <= 2


@pytest.mark.parametrize("scope", SCOPES)
def test_groups_made_elsewhere_are_dealt_to_the_ranks_and_replayed(launches, scope):
    """Three groups without log-probs, which all ranks must compute alike."""
    ranks = launches(2, f"files {scope}")
    taught = [rank["taught"] for rank in ranks]
    if scope == "process":
        assert sorted(len(part) for part in taught) == [1, 2]
    else:
        assert ranks[0]["table"] == ranks[1]["table"]
        assert len(ranks[0]["table"]) == 3
    if scope == "gathered":
        assert sorted([*taught[0], *taught[1]], key=int) == [str(serial) for serial in ranks[0]["table"]]
    assert sum(rank["replaced"] for rank in ranks) > 0


def test_each_rank_scores_its_part_of_a_files_rows_and_all_have_the_rewards(launches):
    ranks = launches(2, "scored")
    first, second = (dict.fromkeys(text[0] for text in rank["seen"]) for rank in ranks)
    assert (list(first), list(second)) == (["1", "2", "3", "7"], ["4", "5", "6", "7"]), "of 12 rows each at most"
    assert ranks[0]["rewards"] == ranks[1]["rewards"]
    for group, rewards in enumerate(ranks[0]["rewards"], 1):
        assert rewards == pytest.approx([2 / group, 3 / group, 4 / group, 5 / group])


@pytest.mark.parametrize("scope", SCOPES)
def test_the_export_sees_every_entry_of_all_ranks_once(launches, folder, tmp_path, scope):
    checkpoint = folder / f"{scope} of 2" / "checkpoint-4"
    states = [saved.read(checkpoint / "trl_replay", rank) for rank in (0, 1)]
    expected = sum(len(list(state.payload())) for state in states)
    assert expected > 0
    assert write(tmp_path / "out.parquet", of_checkpoint(checkpoint)) == 4 * expected
