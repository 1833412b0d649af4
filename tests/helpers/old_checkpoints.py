"""The checkpoints in tests/data, read without any code of trl_replay's, and compared with a session that took them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file

from trl_replay.testing import make_model, make_tokenizer, make_trainer

DATA = Path(__file__).parents[1] / "data"
PROCESS, SHARDED = DATA / "process" / "checkpoint-8", DATA / "sharded" / "checkpoint-9"
SETTINGS = {"replay_buffer_size": 5, "replay_start": 0, "replay_max_log_ratio": 8.0}
"""What both were written with."""
LENGTHS = ("#prompt_lengths", "#completion_lengths")
RENAMED = {"mass": "remaining_signal"}


def digits(completions: list[str], **_: Any) -> list[float]:
    return [float(text[:1] in set("012")) for text in completions]


def build(folder: Path, **settings: Any) -> Any:
    """The trainer that wrote them; of two processes each has six rows."""
    model = make_model(make_tokenizer(), hidden_size=16, layers=1)
    return make_trainer(folder, digits, model=model, **{"max_steps": 12, **settings})


def copied(checkpoint: Path, folder: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(checkpoint, folder / checkpoint.name))


class Written:
    """What one rank wrote."""

    def __init__(self, checkpoint: Path, rank: int) -> None:
        folder = checkpoint / "trl_replay" / f"rank-{rank:05d}"
        content = json.loads((folder / "state.json").read_text())["content"]
        self.session: dict[str, Any] = content["session"]
        self.pending: list[dict[str, Any]] = content["noted"]["candidates"]
        self.keysets: list[list[str]] = content["keysets"]
        self.columns = load_arrays(folder / "table.safetensors")
        self.candidates = load_file(folder / "candidates.safetensors")
        self.payload: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in load_file(folder / "payload-00000.safetensors").items():
            serial, _, key = name.partition("/")
            self.payload.setdefault(int(serial), {})[key] = tensor


def check_group(group: Any, written: dict[str, torch.Tensor]) -> None:
    """A group has the written tensors and lengths, and no others."""
    assert set(group.tensors) | set(LENGTHS) == set(written)
    for key, tensor in group.tensors.items():
        assert tensor.dtype == written[key].dtype
        assert torch.equal(tensor, written[key]), key
    assert group.prompt_lengths.tolist() == written[LENGTHS[0]].tolist()
    assert group.completion_lengths.tolist() == written[LENGTHS[1]].tolist()


def check_session(session: Any, written: Written) -> None:
    """Everything that one rank wrote has come back on the same rank."""
    check_numbers(session, written)
    carry, told = session.carry, written.session
    assert carry.serial == told["serial"]
    size = session.components.num_generations
    places = {serial: list(range(slot * size, (slot + 1) * size)) for slot, serial in told["drawn"]}
    assert carry.drawn == places, "then whole groups alone were drawn"
    measured = session.tap.stats.columns(len(told["measured"]["seen"]))
    assert {name: column.tolist() for name, column in measured.items()} == {
        RENAMED.get(name, name): column for name, column in told["measured"].items()
    }
    assert any(told["measured"]["seen"]), "some replayed rows had been trained on"
    check_table(session, written.columns)
    keysets = session.buffer.state_dict()["keysets"]
    assert [sorted(keysets[number]) for number in session.buffer.table.keys.tolist()] == [
        written.keysets[number] for number in written.columns["keys"].tolist()
    ]
    assert session.buffer.held() == [s for s in written.columns["serial"].tolist() if s in written.payload]
    for serial, tensors in written.payload.items():
        check_group(session.buffer.load(serial), tensors)
    check_candidates(session, written)


def check_numbers(session: Any, written: Written, own: bool = True) -> None:
    """Counters, generators and metrics; `own`: those of the process, too, and not only what all share."""
    told, components = written.session, session.components
    assert (session.update, session.tap.verified) == (told["update"], told["verified"])
    assert components.rng.bit_generator.state == told["generators"]["shared"]
    assert (components.local_rng.bit_generator.state == told["generators"]["local"]) == own
    assert (session.carry.collected_at, session.carry.unfinished) == (told["noted_at"], told["pending"])
    assert session.metrics == told["metrics"]
    assert session.totals.batches == told["totals"]["batches"]
    counters = {name: count for name, count in session.totals.counters.items() if name in told["totals"]["counters"]}
    assert counters == told["totals"]["counters"]
    limits = dict(components.rate_limiter.state_dict())
    limits = {name: value for name, value in limits.items() if value or name in told["strategies"]["allowance"]}
    assert limits == told["strategies"]["allowance"], "what was not known then is as in a new one"


def check_table(session: Any, columns: dict[str, Any], entries: int | None = None) -> None:
    """All written columns, of the first `entries` rows."""
    for name, column in columns.items():
        np.testing.assert_array_equal(getattr(session.buffer.table, name)[:entries], column, err_msg=name)


def check_candidates(session: Any, written: Written) -> None:
    pending = session.carry.pending_groups
    for name in ("advantages", "rewards", "prompt", "step", "dead", "trainable", "lengths", "items"):
        np.testing.assert_array_equal(getattr(pending.groups, name), written.candidates[name].numpy(), err_msg=name)
    assert len(pending.candidates) == len(written.pending) > 0
    for candidate, told in zip(pending.candidates, written.pending, strict=True):
        assert (candidate.serial, candidate.slot, candidate.update) == (told["serial"], told["slot"], told["update"])
        assert candidate.rows == slice(*told["rows"])
        assert sorted(candidate.keys) == told["holds"]
        start = f"{candidate.serial}/"
        tensors = {name[len(start) :]: value for name, value in written.candidates.items() if name.startswith(start)}
        assert (candidate.group is None) == (not tensors)
        if candidate.group is not None:
            check_group(candidate.group, tensors)
        records = [written.candidates[f"{candidate.serial}@{row}"] for row in range(len(told["records"]))]
        assert all(torch.equal(one, other) for one, other in zip(candidate.records, records, strict=True))
