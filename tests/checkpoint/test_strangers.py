"""Checkpoints that somebody else made: nothing outside of their folder is read, nothing waits, nothing inflates."""

import json
import os
import shutil
import struct

import pytest
from resuming import resume, rewrite
from safetensors.torch import load_file, save_file

import trl_replay
from trl_replay import CheckpointError
from trl_replay.checkpoint import format as saved

KINDS = ["a pipe", "a device"]


def put(path, kind):
    """A file without an end, or whose reader waits for a writer."""
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


def attest(rank):
    """Make the checksums those of the files."""
    rewrite(rank, lambda told: told.update(files={name: saved._checksum(rank / name) for name in told["files"]}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["state.json", "table.safetensors", "payload-00000.safetensors"])
def test_167_what_is_no_regular_file_is_not_read(copied, tmp_path, name, kind):
    put(copied / "trl_replay" / "rank-00000" / name, kind)
    assert trl_replay.last_complete_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match=rf"rank-00000.*{name} is no regular file"):
        resume(tmp_path, copied)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["trainer_state.json", "notes.json", "more.safetensors", "rng_state.pth"])
def test_167_a_checkpoint_with_what_is_no_regular_file_beside_ours_is_not_whole(copied, tmp_path, name, kind):
    put(copied / name, kind)
    assert trl_replay.last_complete_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    "name", ["/dev/zero", "../../../outside.safetensors", "payload-/../../../outside.safetensors"]
)
def test_167_names_that_lead_out_of_the_folder_are_refused(copied, tmp_path, name):
    rank = copied / "trl_replay" / "rank-00000"
    shutil.copy(rank / "payload-00000.safetensors", tmp_path / "outside.safetensors")
    (rank / "payload-").mkdir()
    whole = saved._checksum(tmp_path / "outside.safetensors")
    rewrite(rank, lambda told: told["files"].update({name: whole}))
    with pytest.raises(CheckpointError, match=f"{name}' is no name of a file in"):
        resume(tmp_path, copied)
    assert trl_replay.last_complete_checkpoint(tmp_path) is None


def test_167_a_table_that_no_checksum_vouches_for_is_refused(copied, tmp_path):
    rewrite(copied / "trl_replay" / "rank-00000", lambda told: told["files"].pop("table.safetensors"))
    with pytest.raises(CheckpointError, match=r"KeyError.*table\.safetensors"):
        resume(tmp_path, copied)


@pytest.mark.parametrize("folders", [5, [5], None])
def test_167_an_identity_that_names_no_folders_is_none(copied, tmp_path, folders):
    """What lies in our folder is then another run's, as that of a run that went on without replay."""
    state = json.loads((copied / "trainer_state.json").read_text())
    state["stateful_callbacks"]["trl_replay"]["attributes"]["folders"] = folders
    (copied / "trainer_state.json").write_text(json.dumps(state))
    assert trl_replay.last_complete_checkpoint(tmp_path) == str(copied)
    with pytest.raises(CheckpointError, match="does not belong to the rest of the checkpoint"):
        resume(tmp_path, copied)


def test_167_a_payload_that_claims_more_than_its_file_holds_is_refused(copied, tmp_path):
    path = copied / "trl_replay" / "rank-00000" / "payload-00000.safetensors"
    huge = json.dumps({"0/completion_ids": {"dtype": "I32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(huge)) + huge)
    attest(path.parent)
    with pytest.raises(CheckpointError, match=r"payload-00000.*SafetensorError"):
        resume(tmp_path, copied)


def test_167_a_group_lies_in_its_file_as_it_is(copied):
    """Its tensors, and a text of keys and lengths: nothing is packed, so nothing inflates."""
    path = copied / "trl_replay" / "rank-00000" / "payload-00000.safetensors"
    (states,) = saved.read_all(copied)
    groups = dict(states.payload())
    tensors = load_file(path)
    assert sum(tensor.nbytes for name, tensor in tensors.items() if name.partition("/")[2]) == sum(
        tensor.nbytes for group in groups.values() for tensor in group.tensors.values()
    )
    assert {name.partition("/")[0] for name in tensors} == set(map(str, groups))


def test_167_a_group_that_lacks_its_description_is_refused(copied, tmp_path):
    path = copied / "trl_replay" / "rank-00000" / "payload-00000.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name.partition("/")[2]}, path)
    attest(path.parent)
    with pytest.raises(CheckpointError, match=r"payload-00000.*KeyError"):
        resume(tmp_path, copied)
