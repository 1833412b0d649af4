"""Checkpoints that somebody else made: nothing outside of their folder is read, nothing waits, nothing inflates."""

import json
import os
import shutil
import struct

import pytest
import torch
from resuming import resume, rewrite
from safetensors.torch import load_file, save_file

import trl_replay
from trl_replay import CheckpointError
from trl_replay.checkpoint import format as saved
from trl_replay.serialization.groups import INDEX

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


def test_167_groups_lie_in_their_file_as_they_are(copied):
    """Their tensors, and a text of keys and lengths: nothing is compressed, so nothing inflates."""
    path = copied / "trl_replay" / "rank-00000" / "payload-00000.safetensors"
    (states,) = saved.read_all(copied)
    groups = dict(states.payload())
    tensors = load_file(path)
    _, described, _ = json.loads(tensors.pop(INDEX).numpy().tobytes())
    assert sum(tensor.nbytes for tensor in tensors.values()) == sum(
        tensor.nbytes for group in groups.values() for tensor in group.tensors.values()
    )
    assert {number for number, *_ in described} == set(groups)


BLOCK, AGAIN = "0/advantages", "99/advantages"
OF_NUMBERS = ("a group without rows", "rows of a group that is none", "rows of one group twice")


def claim(index, what):
    """Make an index claim what its blocks do not hold."""
    keysets, described, blocks = index
    _, lengths = blocks[BLOCK]
    numbers = [number for number, *_ in described]
    if what in OF_NUMBERS:
        blocks[BLOCK][0] = numbers
    if what == "a row too many":
        lengths[-1] += 1
    elif what == "a row too few":
        lengths[0] -= 1
    elif what == "rows before the beginning":
        lengths[:2] = [lengths[0] + 99, lengths[1] - 99]
    elif what == "more rows than numbers count":
        lengths[0] = 2**70
    elif what == "a group without rows":
        numbers.append(numbers[-1] + 1)
    elif what == "rows of a group that is none":
        numbers[0] = 999
    elif what == "rows of one group twice":
        numbers[1] = numbers[0]
    elif what == "a group twice":
        described.append(described[0])
    elif what == "a group more":
        described.append([max(numbers) + 1, *described[0][1:]])
    elif what == "a key twice":
        blocks[AGAIN] = blocks[BLOCK]
    elif what == "a block that is none":
        blocks["100/advantages"] = blocks.pop(BLOCK)
    elif what == "keys that are none":
        described[0][1] = len(keysets)
    else:
        described[0][2] = what


@pytest.mark.parametrize("what", [
    *OF_NUMBERS, "a row too many", "a row too few", "rows before the beginning", "more rows than numbers count",
    "a group twice", "a group more", "a key twice", "a block that is none", "keys that are none", "no length", None,
])  # fmt: skip
def test_70_an_index_that_claims_what_its_blocks_do_not_hold_is_refused(copied, tmp_path, what):
    path = copied / "trl_replay" / "rank-00000" / "payload-00000.safetensors"
    tensors = load_file(path)
    assert BLOCK in tensors
    index = json.loads(tensors[INDEX].numpy().tobytes())
    claim(index, what)
    text = bytearray(json.dumps(index).encode())
    save_file({**tensors, AGAIN: tensors[BLOCK].clone(), INDEX: torch.frombuffer(text, dtype=torch.uint8)}, path)
    attest(path.parent)
    with pytest.raises(CheckpointError, match=r"payload-00000.*can't be read"):
        resume(tmp_path, copied)


@pytest.mark.parametrize("text", [b"", b"{}", b"[[], []]", b"null", b"\xff", b"[" * 100_000])
def test_70_an_index_that_is_none_is_refused(copied, tmp_path, text):
    path = copied / "trl_replay" / "rank-00000" / "payload-00000.safetensors"
    tensor = torch.tensor(list(text), dtype=torch.uint8)
    save_file({**load_file(path), INDEX: tensor}, path)
    attest(path.parent)
    with pytest.raises(CheckpointError, match=r"payload-00000.*can't be read"):
        resume(tmp_path, copied)


@pytest.mark.parametrize("name", [INDEX, BLOCK])
def test_167_a_file_that_lacks_its_index_or_a_block_is_refused(copied, tmp_path, name):
    path = copied / "trl_replay" / "rank-00000" / "payload-00000.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    attest(path.parent)
    with pytest.raises(CheckpointError, match=rf"payload-00000.*does not contain tensor {name}"):
        resume(tmp_path, copied)
