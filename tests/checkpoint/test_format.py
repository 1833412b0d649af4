"""The files of a checkpoint: whatever happens to their bytes, our error or what was saved."""

import shutil

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from resuming import build, differences, resume, rewrite, state, train

import trl_replay
from trl_replay import CheckpointError
from trl_replay.checkpoint.saving import RankPart
from trl_replay.errors import MismatchError

EXAMPLES = 250


FILES = ("state.json", "table.safetensors", "payload-00000.safetensors")


class Resumable:
    """A checkpoint, a session that can read it, and the state that it holds."""

    def __init__(self, folder):
        _, _ = train(folder, max_steps=6)
        self.source = folder / "checkpoint-6" / "trl_replay"
        self.copy = folder / "copy" / "trl_replay"
        self.copy.parent.mkdir()
        shutil.copy(self.source.parent / "trainer_state.json", self.copy.parent)
        self.trainer = build(folder)
        self.session = trl_replay.attach(self.trainer, replay_buffer_size=5)
        self.fresh()
        self.load()
        self.expected = state(self.session)

    def fresh(self):
        """A copy of the files, whole."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.source, self.copy)
        return self.copy / "rank-00000"

    def load(self):
        part = RankPart(self.session)
        part.apply(part.read(self.copy), self.copy)


@pytest.fixture(scope="module")
def resumable(tmp_path_factory):
    return Resumable(tmp_path_factory.mktemp("damaged"))


def damaged(data, kind, place, length, filling):
    """`data` with something done to it at `place`, a share of its length."""
    at = min(int(place * len(data)), len(data) - 1)
    if kind == "cut":
        return data[:at]
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (1 << length % 8)]) + data[at + 1 :]
    if kind == "overwrite":
        return data[:at] + filling + data[at + len(filling) :]
    if kind == "insert":
        return data[:at] + filling + data[at:]
    if kind == "drop":
        return data[:at] + data[at + length :]
    return filling


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(FILES),
    kind=st.sampled_from(["cut", "flip", "overwrite", "insert", "drop", "replace"]),
    place=st.one_of(st.floats(0, 1), st.floats(0, 0.05)),
    length=st.integers(1, 64),
    filling=st.one_of(st.binary(max_size=64), st.just(b"cos\nsystem\n(S'exit 1'\ntR."), st.just(b'{"a": 1}')),
)
def test_damaged_bytes_give_our_error_or_exactly_what_was_saved(resumable, name, kind, place, length, filling):
    path = resumable.fresh() / name
    path.write_bytes(damaged(path.read_bytes(), kind, place, length, filling))
    try:
        resumable.load()
    except CheckpointError:
        return
    assert not differences(resumable.expected, state(resumable.session))


def test_a_pickle_in_the_place_of_a_file_is_not_run(resumable, tmp_path):
    target = tmp_path / "run"
    code = f"cos\nsystem\n(S'touch {target}'\ntR.".encode()
    for name in FILES:
        (resumable.fresh() / name).write_bytes(code)
        with pytest.raises(CheckpointError):
            resumable.load()
    assert not target.exists()


def test_another_format_version_is_refused_with_both_values_and_what_goes_on(tmp_path, copied):
    path = copied / "trl_replay" / "rank-00000" / "state.json"
    path.write_text(path.read_text().replace('"format": 6', '"format": 3'))
    words = r"format version 3; this release reads version 6\. Use the release.*remove the folder .*trl_replay"
    with pytest.raises(MismatchError, match=words):
        resume(tmp_path, copied)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path, copied, name):
    (copied / "trl_replay" / "rank-00000" / name).unlink()
    with pytest.raises(CheckpointError, match=f"rank-00000.*No such file.*{name}"):
        resume(tmp_path, copied)


def test_a_file_whose_checksum_differs_is_named(tmp_path, copied):
    path = copied / "trl_replay" / "rank-00000" / "payload-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"payload-00000.safetensors is not what was saved: its checksum"):
        resume(tmp_path, copied)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["a folder", "a link to nowhere", "a link to itself"])
def test_what_stands_in_a_files_place_is_an_error_that_names_it(copied, tmp_path, name, kind):
    path = copied / "trl_replay" / "rank-00000" / name
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere" if kind == "a link to nowhere" else path)
    with pytest.raises(CheckpointError, match="rank-00000"):
        resume(tmp_path, copied)


@pytest.mark.parametrize("update", [-5, 2, 1.5, None])
def test_71_a_checkpoint_whose_updates_cant_be_is_refused(tmp_path, copied, update):
    """Its checksum is right; entries of updates to come would have negative ages."""
    rewrite(copied / "trl_replay" / "rank-00000", lambda content: content["session"].update(update=update))
    with pytest.raises(CheckpointError, match=rf"checkpoint-6.*update {update}"):
        resume(tmp_path, copied)
