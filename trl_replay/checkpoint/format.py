"""A session on disk: one folder a rank with JSON and safetensors, every file with its checksum, no pickle.

checkpoint-12/trl_replay/rank-00000/
    state.json                  counters, generators, what the run was like, and the checksums of the other files
    table.safetensors           the table's columns; of ranks that have the same, in the first one's folder
    payload-00000.safetensors   packed groups, one after the other, up to `SHARD_BYTES` a file
    prompts.safetensors         the prompts generated for, where something is generated again
    plugins/<name>/             what plugins wrote
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from ..base.files import named_in, regular
from ..data.rewards import RewardRule
from ..data.types import Ints, Packed
from ..errors import CheckpointError, MismatchError
from ..protocols import Columns
from ..serialization.groups import GROUPS, INDEX, from_tensors, to_tensors
from .discovery import FOLDER

FORMAT = 6
STATE, TABLE, PROMPTS, PLUGINS = ("state.json", "table.safetensors", "prompts.safetensors", "plugins")
SHARD_BYTES = 64 << 20

FOREIGN = "{} does not belong to the rest of the checkpoint: another run has written over one of them. "
REMEDY = "Resume from another checkpoint: trl_replay.last_complete_checkpoint(output_dir) finds the newest whole one."


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts about a run on which stored groups depend.

    Attributes:
        tokenizer (`str`): A hash of what each token id stands for.
        vocabulary (`int`): Token ids that the model knows.
        num_generations (`int`): Rows of a group.
        scope (`str`): `replay_scope`.
        task_columns (`list[str]`, *optional*): `replay_task_columns`.
        ratios (`str`, *optional*): vLLM's mode, of which the shape of its ratios depends; None without them.
        processes (`int`): Number of ranks.
        rows (`int`): Rows of each rank's generation batch.
    """

    tokenizer: str
    vocabulary: int
    num_generations: int
    scope: str
    task_columns: list[str] | None
    ratios: str | None
    processes: int
    rows: int

    @property
    def layout(self) -> tuple[int, int]:
        """Number of ranks, and of rows on each."""
        return self.processes, self.rows


def plain(value: Any, owner: str) -> Any:
    """The same in values that JSON brings back as they were: lists for tuples, Python's numbers for NumPy's.

    Raises:
        CheckpointError: There are none; names the strategy that gave the value.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _not_plain(owner, f"the key {key!r}")
        return {key: plain(part, owner) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, owner) for part in value]
    if isinstance(value, np.generic):
        return plain(value.item(), owner)
    if value is None or isinstance(value, str | int | float):
        return value
    raise _not_plain(owner, repr(value))


def _not_plain(owner: str, given: str) -> CheckpointError:
    return CheckpointError(
        f"The {owner}'s state_dict() gives {given}, which JSON can't bring back: give mappings with texts as keys, "
        "lists, texts, numbers, True, False and None."
    )


@dataclass(slots=True)
class RankState:
    """One rank's session, without payload.

    Attributes:
        identity ([`Identity`]): What the run was like.
        save_id (`str`): Tells this saving from all others; the trainer's own files carry it too.
        rank (`int`): This rank.
        session (`dict[str, Any]`): Counters, generators and what else JSON holds.
        columns (`dict[str, NDArray]`): The table's.
        keysets (`list[frozenset[str]]`): What the column `keys` counts in.
        beside (`list[str]`): Files of the trainer's that belong to the checkpoint, though it does not wait for them.
        prompts (`dict[str, NDArray]`, *optional*): Columns of the prompts generated for.
        files (`dict[Path, str]`): Where the payload that it holds is, with the checksums of these files' indices.
    """

    identity: Identity
    save_id: str
    rank: int
    session: dict[str, Any]
    columns: dict[str, NDArray[Any]]
    keysets: list[frozenset[str]]
    beside: list[str] = field(default_factory=list)
    prompts: dict[str, NDArray[Any]] | None = None
    files: dict[Path, str] = field(default_factory=dict)

    def without_groups(self, rule: RewardRule) -> RankState:
        """This state without entries and candidates, for another reward rule."""
        columns = {name: column[:0] for name, column in self.columns.items()}
        columns["row_rewards"] = columns["row_rewards"][..., :1].repeat(len(rule.functions), axis=-1)
        session = {**self.session, "reward_rule": rule}
        return replace(self, session=session, columns=columns, files={})

    def payload(self, wanted: Container[int] | None = None) -> Iterator[tuple[int, Packed]]:
        """`(serial, packed group)` of the payload that this rank held, verified: of all, or of the `wanted` serials,
        whose bytes alone are read then."""
        for path, checksum in self.files.items():
            with _blaming(path), safe_open(path, framework="pt") as file:
                index, block = file.get_tensor(INDEX), file.get_slice(GROUPS)
                _compare(path, _hash_of(index), checksum)
                yield from from_tensors(index, block, block.get_shape()[0], wanted)


def rank_folder(folder: Path, rank: int) -> Path:
    """The folder of one rank."""
    return folder / f"rank-{rank:05d}"


def write(
    folder: Path,
    saved: RankState,
    tables: Sequence[str],
    payload: Iterable[tuple[int, Packed]],
    plugins: Callable[[Path], None],
) -> None:
    """Write one rank's folder, which is there; `state.json` comes last. A table that several ranks have alike is
    written once a disk, by the first of those that have a folder there.

    Args:
        folder (`Path`): The checkpoint's `trl_replay`.
        saved ([`RankState`]): What to write.
        tables (`Sequence[str]`): Of each rank, the hash of its table.
        payload (`Iterable`): `(serial, packed group)`, asked for one after the other.
        plugins (`Callable`): Lets plugins write into the folder that it is given.
    """
    mine = rank_folder(folder, saved.rank)
    own = tables[saved.rank]
    writer = next(rank for rank in ranks_in(folder) if tables[rank] == own)
    if writer == saved.rank:
        save_arrays({name: np.ascontiguousarray(column) for name, column in saved.columns.items()}, mine / TABLE)
    for number, groups in enumerate(_shards(payload)):
        save_file(to_tensors(groups), mine / f"payload-{number:05d}.safetensors")
    if saved.prompts is not None:
        save_arrays(saved.prompts, mine / PROMPTS)
    plugins(mine / PLUGINS)
    files = sorted(path for path in mine.rglob("*") if path.is_file() and path.name != TABLE)
    content = {
        "identity": asdict(saved.identity),
        "save_id": saved.save_id,
        "rank": saved.rank,
        "session": saved.session,
        "keysets": [sorted(keys) for keys in saved.keysets],
        "beside": saved.beside,
        "table": [rank_folder(folder, writer).name, own],
        "files": {path.relative_to(mine).as_posix(): _checksum(path) for path in files},
    }
    text = {"format": FORMAT, "checksum": _digest(content), "content": content}
    (mine / STATE).write_text(json.dumps(text, indent=1) + "\n")


def read(folder: Path, rank: int, tables: dict[Path, Any] | None = None) -> RankState:
    """Read and verify one rank's folder, and where its payload is; payload is neither loaded nor verified.

    Args:
        folder (`Path`): The checkpoint's `trl_replay`.
        rank (`int`): Whose.
        tables (`dict`, *optional*): Tables that were read already, by file: what this one reads goes there, too.

    Raises:
        MismatchError: Another format version wrote it.
        CheckpointError: A file is missing, or not what was written.
    """
    mine = rank_folder(folder, rank)
    with _blaming(mine):
        content = _content(mine / STATE)
        files = {name: named_in(mine, name) for name in content["files"]}
        payload = {path: content["files"][name] for name, path in files.items() if name.startswith("payload-")}
        for name, path in files.items():
            if path not in payload:
                _compare(path, _checksum(path), content["files"][name])
            regular(path).stat()
        table = named_in(folder, content["table"][0]) / TABLE
        tables = {} if tables is None else tables
        if table not in tables:
            tables[table] = load_arrays(regular(table))
        found, told = hash_of_table(tables[table]), content["table"][1]
        if table.parent != mine and found != told:
            raise MismatchError(FOREIGN.format(mine) + REMEDY)
        _compare(table, found, told)
        return RankState(
            identity=Identity(**content["identity"]),
            save_id=content["save_id"],
            rank=content["rank"],
            session=content["session"],
            columns=dict(tables[table]),
            keysets=[frozenset(keys) for keys in content["keysets"]],
            beside=content["beside"],
            prompts=load_arrays(files[PROMPTS]) if PROMPTS in files else None,
            files=payload,
        )


def scope_in(folder: Path) -> str:
    """The `replay_scope` of whoever wrote a checkpoint; empty if no rank's folder tells."""
    for rank in ranks_in(folder):
        with suppress(CheckpointError), _blaming(folder):
            return str(_content(rank_folder(folder, rank) / STATE)["identity"]["scope"])
    return ""


def read_all(checkpoint: str | Path) -> list[RankState]:
    """Read what all ranks wrote into a checkpoint.

    Raises:
        CheckpointError: They wrote nothing, or it is damaged.
    """
    folder = Path(checkpoint) / FOLDER
    states = [read(folder, rank) for rank in ranks_in(folder)]
    if not states:
        raise CheckpointError(
            f"{checkpoint} holds no replay buffer: give a checkpoint of a run with replay, or its folder."
        )
    return states


def ranks_in(folder: Path) -> list[int]:
    """Ranks that have a folder, ascending."""
    folders = [path for path in folder.glob("rank-*") if path.is_dir()]
    numbers = [path.name.removeprefix("rank-") for path in folders]
    return sorted(int(number) for number in numbers if number.isdecimal())


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Whatever damaged files make a reader raise becomes an error that names the folder."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of safetensors, json, NumPy or ours: a damaged file may say anything
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} can't be read: {reason}. {REMEDY}") from error


def _content(path: Path) -> dict[str, Any]:
    text = json.loads(regular(path).read_text())
    version = text["format"]
    if version != FORMAT:
        raise MismatchError(
            f"{path} has the format version {version!r}; this release reads version {FORMAT}. Use the release of "
            "trl_replay that wrote it."
        )
    _compare(path, _digest(text["content"]), text["checksum"])
    content: dict[str, Any] = text["content"]
    return content


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _compare(path: Path, found: str, saved: str) -> None:
    if found != saved:
        raise CheckpointError(f"{path} is not what was saved: its checksum differs. {REMEDY}")


def _checksum(path: Path) -> str:
    """A hash of a file; of payload, whose groups have checksums of their own, of its index."""
    if path.name.startswith("payload-"):
        with safe_open(path, framework="pt") as opened:
            return _hash_of(opened.get_tensor(INDEX))
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of(index: torch.Tensor) -> str:
    return hashlib.sha256(index.numpy().tobytes()).hexdigest()


def hash_of_table(columns: Mapping[str, NDArray[Any]]) -> str:
    """A hash of columns, the same in a process that has them as in one that reads them."""
    hashed = hashlib.sha256()
    for name in sorted(columns):
        column = columns[name]
        hashed.update(f"{name} {column.dtype.str} {column.shape}".encode() + column.tobytes())
    return hashed.hexdigest()


def _shards(payload: Iterable[tuple[int, Packed]]) -> Iterator[dict[int, Packed]]:
    """Groups in portions that fit into memory beside everything else."""
    shard: dict[int, Packed] = {}
    nbytes = 0
    for serial, packed in payload:
        shard[serial] = packed
        nbytes += len(packed.data)
        if nbytes >= SHARD_BYTES:
            yield shard
            shard, nbytes = {}, 0
    if shard:
        yield shard


@dataclass(frozen=True, slots=True)
class TargetRank:
    """The part of everything that a rank gets.

    Attributes:
        one_buffer (`bool`): Whether all ranks share it.
        rank (`int`): This rank.
        ranks (`int`): How many there are now.
    """

    one_buffer: bool
    rank: int
    ranks: int

    def owner(self, number: int) -> int:
        """The rank that gets the entry with this number."""
        return number % self.ranks


@dataclass(slots=True)
class RankShare:
    """Everything that a rank gets.

    Attributes:
        columns (`dict[str, NDArray]`): The table's.
        keysets (`list[frozenset[str]]`): What the column `keys` counts in.
        payload (`Callable`): Yields `(serial, packed group)` of a set of serials.
        next_serial (`int`): Of the next fresh group.
    """

    columns: Columns
    keysets: list[frozenset[str]]
    payload: Callable[[set[int]], Iterator[tuple[int, Packed]]]
    next_serial: int


def reshard(states: Sequence[RankState], target: TargetRank) -> RankShare:
    """Deal entries in the order of their generation to the ranks in turn, the same way on every rank."""
    if target.one_buffer:
        return _reshard_one_buffer(states, target)
    return _reshard_private_buffers(states, target)


def _reshard_private_buffers(states: Sequence[RankState], target: TargetRank) -> RankShare:
    """Buffers that each rank had alone: serial numbers were each one's own, and new ones are given, in the order of
    generation."""
    columns, keysets = _concatenated(states)
    lengths = [len(state.columns["serial"]) for state in states]
    source = np.repeat(np.arange(len(states)), lengths)
    order = np.lexsort((columns["serial"], source, columns["update"]))
    columns = {name: column[order] for name, column in columns.items()}
    former_rank = source[order].tolist()
    former_serial = columns["serial"].tolist()
    count = len(former_rank)
    columns["serial"] = np.arange(count)
    columns["owner"] = _owners(count, target)
    mine = columns["owner"] == target.rank
    dealt = np.flatnonzero(mine).tolist()

    def payload(wanted: set[int]) -> Iterator[tuple[int, Packed]]:
        for number, state in enumerate(states):
            here = {former_serial[new]: new for new in dealt if new in wanted and former_rank[new] == number}
            for serial, packed in state.payload(here):
                yield here[serial], packed

    columns = {name: column[mine] for name, column in columns.items()}
    return RankShare(columns, keysets, payload, count)


def _reshard_one_buffer(states: Sequence[RankState], target: TargetRank) -> RankShare:
    """One buffer of which every rank had the table: serial numbers stay."""
    columns, keysets = _concatenated(states[:1])
    serials = columns["serial"]
    columns["owner"] = _owners(len(serials), target)
    mine = set(serials[columns["owner"] == target.rank].tolist())

    def payload(wanted: set[int]) -> Iterator[tuple[int, Packed]]:
        for state in states:
            yield from state.payload(wanted & mine)

    next_serial = max(state.session["serial"] for state in states)
    return RankShare(columns, keysets, payload, next_serial)


def _concatenated(states: Sequence[RankState]) -> tuple[Columns, list[frozenset[str]]]:
    """The columns that all states have, one state after the other, and the sets of keys that `keys` counts in."""
    keysets = list(dict.fromkeys(keys for state in states for keys in state.keysets))
    names = set.intersection(*(set(state.columns) for state in states))
    columns = {}
    for name in sorted(names):
        columns[name] = np.concatenate([state.columns[name] for state in states])
    renumbered = []
    for state in states:
        numbers = [keysets.index(keys) for keys in state.keysets]
        in_common = np.array(numbers, np.int64)
        renumbered.append(in_common[state.columns["keys"]])
    columns["keys"] = np.concatenate(renumbered)
    return columns, keysets


def _owners(count: int, target: TargetRank) -> Ints:
    owners = [target.owner(number) for number in range(count)]
    return np.array(owners, np.int64)
