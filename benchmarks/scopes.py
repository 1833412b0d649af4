"""Costs of the scopes: bytes received per rank and step, seconds, and memory.

    python benchmarks/scopes.py                # 2 and 4 processes on this machine: about 2 minutes
    python benchmarks/scopes.py --json out.json --ranks 2

Synthetic groups of 8 completions go through the scopes' own verbs, as the session calls them, under torchrun with
gloo. Half of each rank's fresh groups are live (admitted in the next step), half are dead (filled). Completion lengths
are uniform between half and all of the given length; a prompt has 32 tokens.

* payload: bytes that `admit` and `fetch` brought to a rank, headers and size announcements included
* bound: the tensors' bytes that had to come (gathered: admitted groups born elsewhere; sharded: drawn ones owned
  elsewhere)
* gather_object: the same groups pickled: the longest rank's bytes times the number of other ranks
* columns, agree: bytes of `share` and `agree`, which don't depend on lengths

A line passes if payload ≤ 1.1 × bound. The worst rank counts.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZE, PROMPT = 8, 32
LIMIT = 1.1
GRID = [(groups, length) for groups in (4, 16) for length in (8, 32, 128, 1024)]
SCOPES = ("process", "gathered", "sharded")


def make_group(rng: np.random.Generator, length: int) -> Any:
    """A group as `cut` makes it: ids, log-probs and advantages; masks are implied."""
    import torch

    from trl_replay.fields import FieldTable
    from trl_replay.types import Group

    lengths = rng.integers(max(length // 2, 1), length + 1, SIZE)
    tokens = int(lengths.sum())
    tensors = {
        "prompt_ids": torch.from_numpy(rng.integers(0, 50_000, PROMPT).astype(np.int32)),
        "completion_ids": torch.from_numpy(rng.integers(0, 50_000, tokens).astype(np.int32)),
        "advantages": torch.from_numpy(rng.normal(size=SIZE).astype(np.float32)),
        "old_per_token_logps": torch.from_numpy(rng.normal(size=tokens).astype(np.float32)),
    }
    keys = frozenset(name for name in FieldTable(0).names if name != "num_items_in_batch")
    return Group(tensors, keys, np.array([PROMPT]), lengths)


def total(groups: list[Any]) -> int:
    """Bytes of the groups' tensors, without which they would not be the groups."""
    return sum(tensor.nbytes for group in groups for tensor in group.tensors.values())


class Step:
    """One generation batch after the other through a scope and a buffer, without a model."""

    def __init__(self, accelerator: Any, scope: str, groups: int, length: int, capacity: int) -> None:
        from trl_replay.buffer.replay_buffer import Limits, ReplayBuffer
        from trl_replay.strategies import scopes

        made = {"process": scopes.ProcessScope, "gathered": scopes.GatheredScope, "sharded": scopes.ShardedScope}
        self.scope = made[scope](accelerator)
        self.name, self.shared = scope, scope != "process"
        self.groups, self.length = groups, length
        self.capacity = capacity * (accelerator.num_processes if scope == "sharded" else 1)
        self.buffer = ReplayBuffer(self.capacity, Limits())
        self.own = np.random.default_rng([accelerator.process_index, 1])
        self.common = np.random.default_rng(2)
        self.serial, self.update = 0, 0
        self.seconds: Counter[str] = Counter()
        self.bound: int = 0
        self.moved: list[Any] = []

    def __call__(self) -> None:
        """Settles half of this rank's groups and fills the other half, with the payload's bound noted."""
        from trl_replay.batch.group_view import blank
        from trl_replay.decision import Sampled, Taken
        from trl_replay.distributed.agreement import decision_message, packed_bits
        from trl_replay.distributed.row_layout import RowLayout
        from trl_replay.serialization.wire import packed_size

        rank, ranks, live = self.scope.rank, self.scope.ranks, self.groups // 2
        mine = [make_group(self.own, self.length) for _ in range(live)]
        count = self.groups * SIZE
        local = blank(rank * count, count)
        for slot, group in enumerate(mine):
            local["nbytes"][slot * SIZE] = packed_size(group)
        rows = RowLayout(self.timed("share", self.scope.share, local), local, SIZE)

        slots = [
            owner * self.groups + number for owner in range(ranks if self.shared else 1) for number in range(live)
        ]
        serials = list(range(self.serial, self.serial + len(slots)))
        self.serial, self.update = self.serial + len(slots), self.update + 1
        eligible = len(self.buffer)
        columns = {
            "serial": np.array(serials),
            "step": np.full(len(serials), self.update),
            "score": self.common.random(len(serials)),
        }
        stored = set(self.buffer.offer(columns, lambda table: table.serial, self.common)[0])
        kept = [(serial, slot) for serial, slot in zip(serials, slots, strict=True) if serial in stored]
        held = dict(
            zip([s for s, slot in zip(serials, slots, strict=True) if rows.local(slot)[0].stop], mine, strict=True)
        )
        dead = [slot + live for slot in slots]
        drawn = (
            self.common.choice(len(self.buffer), min(len(dead), len(self.buffer)), replace=False) if eligible else []
        )
        drawn = np.asarray(drawn, np.int64)
        everything = np.arange(SIZE)
        draw = Sampled(
            [
                Taken(slot, int(self.buffer.table.serial[row]), int(row), 1, 1.0, everything, everything)
                for slot, row in zip(dead, drawn, strict=False)
            ]
        )
        vector = decision_message(rows.count).pack(filled=packed_bits(rows.filled(draw)))
        self.timed("agree", self.scope.agree, np.append(0, vector), "")
        arrivals = rows.arrivals([serial for serial, _ in kept], [slot for _, slot in kept], ranks)
        parts = self.timed("admit", self.scope.admit, self.buffer.table, arrivals, held)
        self.buffer.receive({serial: held_parts[0] for serial, held_parts in parts.items()})
        requests = rows.requests(draw, self.buffer.table.owner)
        found = self.timed("fetch", self.scope.fetch, requests, self.buffer.load)
        needed = [found[r.serial] for r in requests if rank in r.ranks and r.owner != rank]
        born_elsewhere = [held_parts[0] for serial, held_parts in parts.items() if serial not in held]
        self.bound += {"process": 0, "gathered": total(born_elsewhere), "sharded": total(needed)}[self.name]
        # what this rank would have given to gather_object
        drawn_here = [self.buffer.load(r.serial) for r in requests if r.owner == rank]
        admitted = [group for serial, group in held.items() if serial in stored]
        self.moved += {"process": [], "gathered": admitted, "sharded": drawn_here}[self.name]

    def timed(self, verb: str, function: Any, *arguments: Any) -> Any:
        """Calls a verb and adds up its seconds."""
        begin = time.perf_counter()
        result = function(*arguments)
        self.seconds[verb] += time.perf_counter() - begin
        return result


def work(folder: Path, steps: int, warm: int = 3) -> None:
    """One rank: every line of the grid, then memory; writes its results."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    traffic = []
    for scope in SCOPES[1:]:
        for groups, length in GRID:
            step = Step(accelerator, scope, groups, length, capacity=4 * groups)
            for number in range(warm + steps):
                if number == warm:
                    step.seconds.clear()
                    step.scope.received.update(dict.fromkeys(step.scope.received, 0))
                    step.bound, step.moved = 0, []
                dist.barrier()
                step()
            pickled = len(pickle.dumps(step.moved))
            dist.barrier()
            begin = time.perf_counter()
            everything: list[Any] = [None] * accelerator.num_processes
            dist.all_gather_object(everything, step.moved)
            traffic.append(
                {
                    "scope": scope,
                    "groups": groups,
                    "length": length,
                    "bytes": {verb: count / steps for verb, count in step.scope.received.items()},
                    "bound": step.bound / steps,
                    "pickled": pickled / steps,
                    "gather_object_seconds": (time.perf_counter() - begin) / steps,
                    "seconds": {verb: value / steps for verb, value in step.seconds.items()},
                }
            )
    memory = []
    for scope in SCOPES:
        step = Step(accelerator, scope, 16, 128, capacity=64)
        while len(step.buffer) < step.capacity:
            step()
        memory.append({"scope": scope, "entries": len(step.buffer), "bytes": step.buffer.nbytes,
                       "payload": step.buffer.nbytes - len(step.buffer) * step.buffer.table.row_bytes})  # fmt: skip
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps({"traffic": traffic, "memory": memory}))
    dist.destroy_process_group()


def launch(ranks: int, steps: int) -> list[dict[str, Any]]:
    """Every rank's results."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        subprocess.run([*launcher, __file__, "--worker", folder, "--steps", str(steps)], check=True)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def worst(results: list[dict[str, Any]], ranks: int) -> Iterator[dict[str, Any]]:
    """One record a line: of all ranks the one with the largest payload / bound; seconds of the slowest."""
    for lines in zip(*(result["traffic"] for result in results), strict=True):
        payloads = [line["bytes"]["admit"] + line["bytes"]["fetch"] for line in lines]
        ratios = [
            payload / line["bound"] if line["bound"] else 0.0 for payload, line in zip(payloads, lines, strict=True)
        ]
        number = int(np.argmax(ratios))
        line = lines[number]
        yield {
            "ranks": ranks,
            **{name: line[name] for name in ("scope", "groups", "length", "bound")},
            "gather_object": max(one["pickled"] for one in lines) * (ranks - 1),  # it pads to the longest
            "payload": payloads[number],
            "ratio": ratios[number],
            "passed": ratios[number] <= LIMIT,
            "columns": line["bytes"]["share"],
            "agree": line["bytes"]["agree"],
            "milliseconds": {verb: 1e3 * max(one["seconds"][verb] for one in lines) for verb in line["seconds"]},
            "gather_object_milliseconds": 1e3 * max(one["gather_object_seconds"] for one in lines),
        }


def show(lines: list[dict[str, Any]], memory: list[dict[str, Any]]) -> None:
    """Both tables."""
    print("bytes received per rank and step; groups of 8 completions; milliseconds of the slowest rank\n")
    print("ranks scope     groups length     payload       bound payload/bound        gather_object  columns  agree"
          "    ms (gather_object's)")  # fmt: skip
    for line in lines:
        verdict = f"{line['ratio']:.3f} {'PASS' if line['passed'] else 'MISSED'}" if line["bound"] else "-"
        spent = sum(line["milliseconds"].values())
        print(
            f"{line['ranks']:5} {line['scope']:9} {line['groups']:6} {line['length']:6} {line['payload']:11,.0f} "
            f"{line['bound']:11,.0f} {verdict:>13} {line['gather_object']:20,.0f} {line['columns']:8,.0f} "
            f"{line['agree']:6,.0f} {spent:8.2f} ({line['gather_object_milliseconds']:.2f})"
        )
    print("\nmemory: replay_buffer_size=64, full, groups of 8 × 64 to 128 tokens\n")
    print("ranks scope     entries (all ranks together)   MB on the fullest rank   payload bytes per entry and rank")
    for line in memory:
        print(f"{line['ranks']:5} {line['scope']:9} {line['entries']:28} {line['bytes'] / 1e6:24.2f} "
              f"{line['per_entry']:34,.0f}")  # fmt: skip


def main() -> int:
    """Runs all launches and prints the tables; 1 if a line of 8 × 128 tokens or more missed the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of processes, separated by commas")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each line")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.steps)
        return 0
    lines, memory = [], []
    for ranks in map(int, options.ranks.split(",")):
        results = launch(ranks, options.steps)
        lines += worst(results, ranks)
        for held in zip(*(result["memory"] for result in results), strict=True):
            together = sum(one["entries"] for one in held) if held[0]["scope"] == "process" else held[0]["entries"]
            memory.append(
                {
                    "ranks": ranks,
                    "scope": held[0]["scope"],
                    "entries": together,
                    "bytes": max(one["bytes"] for one in held),
                    "per_entry": np.mean([one["payload"] for one in held]) / together,
                }
            )
    show(lines, memory)
    if options.json:
        options.json.write_text(json.dumps({"steps": options.steps, "traffic": lines, "memory": memory}, indent=1))
    return int(any(line["bound"] and not line["passed"] for line in lines if line["length"] >= 128))


if __name__ == "__main__":
    sys.exit(main())
