"""Checkpoints that somebody else made: nothing outside of their folder is read, nothing waits, nothing inflates."""

import json
import os
import shutil
import struct
from contextlib import suppress

import pytest
import torch
from resuming import resume, rewrite
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import trl_replay
from trl_replay import CheckpointError
from trl_replay.checkpoint import format as saved
from trl_replay.serialization.groups import GROUPS, INDEX

KINDS = ["a pipe", "a device"]
PAYLOAD = "trl_replay/rank-00000/payload-00000.safetensors"


def put(path, kind):
    """A file without an end, or whose reader waits for a writer."""
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


def attest(rank):
    """Make the checksums those of the files."""
    with suppress(SafetensorError):
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
    rewrite(copied / "trl_replay" / "rank-00000", lambda told: told.pop("table"))
    with pytest.raises(CheckpointError, match=r"KeyError.*table"):
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
    path = copied / PAYLOAD
    huge = json.dumps({GROUPS: {"dtype": "U8", "shape": [2**42], "data_offsets": [0, 2**42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(huge)) + huge)
    attest(path.parent)
    with pytest.raises(CheckpointError, match=r"payload-00000.*SafetensorError"):
        resume(tmp_path, copied)


def test_167_groups_lie_in_their_file_as_they_are(copied):
    """Their bytes, and a text of keys and sizes: nothing is compressed, so nothing inflates."""
    path = copied / PAYLOAD
    (states,) = saved.read_all(copied)
    groups = dict(states.payload())
    tensors = load_file(path)
    assert tensors.keys() == {INDEX, GROUPS}
    assert tensors[GROUPS].numpy().tobytes() == b"".join(groups[number].data for number in sorted(groups))


def claim(index, what):
    """Make an index claim what its bytes do not hold."""
    kinds, told = index
    _, _, rows, tensors = kinds[0]
    named = {tensor[0]: tensor for tensor in tensors}
    ids, advantages = named["completion_ids"], named["advantages"]
    if what == "a byte too many":
        told[-1][2] += 1
    elif what == "bytes before the beginning":
        told[0][2] -= 999_999
        told[1][2] += 999_999
    elif what == "a group twice":
        told[1][0] = told[0][0]
    elif what == "a kind that is none":
        told[0][1] = len(kinds)
    elif what == "a key twice":
        tensors.append(list(ids))
    elif what == "a tensor more":
        tensors.append(["more", *ids[1:]])
    elif what == "a row more":
        kinds[0][2] = rows + 1
    elif what == "wider numbers":
        ids[3] = 9
    elif what == "another shape":
        advantages[2] = [2]
    elif what == "half a dimension":
        advantages[2] = [0.5]
    elif what == "another dtype":
        advantages[1] = "torch.float64"
    elif what in ("torch.load", "os.system"):
        advantages[1] = what
    elif what == "no key":
        ids[0] = ["completion_ids"]
    else:
        kinds[0][1] = what


@pytest.mark.parametrize("what", [
    "a byte too many", "bytes before the beginning", "a group twice", "a kind that is none", "a key twice",
    "a tensor more", "a row more", "wider numbers", "another shape", "half a dimension", "another dtype",
    "torch.load", "os.system", "no key", "no length", None, 2**70,
])  # fmt: skip
def test_70_an_index_that_claims_what_its_bytes_do_not_hold_is_refused(copied, tmp_path, what):
    path = copied / PAYLOAD
    tensors = load_file(path)
    index = json.loads(tensors[INDEX].numpy().tobytes())
    claim(index, what)
    text = bytearray(json.dumps(index).encode())
    save_file({**tensors, INDEX: torch.frombuffer(text, dtype=torch.uint8)}, path)
    attest(path.parent)
    with pytest.raises(CheckpointError, match=r"payload-00000.*can't be read"):
        resume(tmp_path, copied)


@pytest.mark.parametrize("change", [lambda told: told[:0], lambda told: [[str(told[0][0]), *told[0][1:]], *told[1:]]])
def test_70_entries_whose_tokens_no_file_holds_are_refused(copied, tmp_path, change):
    path = copied / PAYLOAD
    tensors = load_file(path)
    kinds, told = json.loads(tensors[INDEX].numpy().tobytes())
    told = change(told)
    text = torch.tensor(list(json.dumps([kinds, told]).encode()), dtype=torch.uint8)
    save_file({INDEX: text, GROUPS: tensors[GROUPS][: sum(count for _, _, count, _ in told)]}, path)
    attest(path.parent)
    with pytest.raises(CheckpointError, match="of which no file holds the tokens"):
        resume(tmp_path, copied)


@pytest.mark.parametrize("text", [b"", b"{}", b"[[], []]", b"null", b"\xff", b"[" * 100_000])
def test_70_an_index_that_is_none_is_refused(copied, tmp_path, text):
    path = copied / PAYLOAD
    tensor = torch.tensor(list(text), dtype=torch.uint8)
    save_file({**load_file(path), INDEX: tensor}, path)
    attest(path.parent)
    with pytest.raises(CheckpointError, match=r"payload-00000.*can't be read"):
        resume(tmp_path, copied)


@pytest.mark.parametrize("name", [INDEX, GROUPS])
def test_167_a_file_that_lacks_its_index_or_its_groups_is_refused(copied, tmp_path, name):
    path = copied / PAYLOAD
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    attest(path.parent)
    with pytest.raises(CheckpointError, match=rf"payload-00000.*does not contain tensor {name}"):
        resume(tmp_path, copied)
