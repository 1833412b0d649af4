"""Many ranks: what a step decides and receives on 64, 256 and 1,024 of them, and what real ones do.

    python benchmarks/ranks.py            # simulated ranks, and 2, 4 and 8 real ones: about 8 minutes on two cores
    python benchmarks/ranks.py --real 16  # the cases of tests/distributed/test_many_ranks.py on 16, with 50 patterns
    python benchmarks/ranks.py --quick    # small: shows that it runs

Simulated: one process is one rank of many. It does what a step does with the columns of all rows, by the package's own
code (benchmarks/simulated_rank.py); of payload it counts bytes. Groups of 16 completions of 1,500 to 4,500 tokens,
prompts of 256, 30 % of the groups live; replay's defaults, buffers full: 64 groups a rank, with `gathered` as many as
a batch has. Seconds are CPU time of one step, the median of some.

* share, agree: bytes that a rank receives
* payload: `admit` and `fetch`, on average over all ranks; the limit is the bytes of the tensors that had to come
* plan: what benchmarks/capacity.py says of all traffic, as a multiple of what was counted

Compared: real processes with gloo play patterns of live and dead groups through real sessions, without a model; the
simulation of each rank must receive the same number of bytes in each verb and step.

Results go to benchmarks/results/ranks.json; docs/evidence-processes.md shows them.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]

import forked
from capacity import Run, needs
from patterns import LOST, SLOW, Pattern, modelless, play, random_pattern, wrong
from simulated_rank import MadeUp, Played, SimulatedRank

from trl_replay.sizes import format_bytes

RESULTS = ROOT / "benchmarks" / "results" / "ranks.json"
CASES = ROOT / "tests" / "distributed" / "ranks" / "many_ranks.py"
SCOPES = ("process", "gathered", "sharded")
VERBS = ("share", "agree", "admit", "fetch")
PARTS = ("share", "look", "settle", "fill", "agree", "admit", "fetch", "place", "collect")
RANKS, GROUPS_A_RANK = (64, 256, 1024), (2, 8)
SIZE, LIVE, TOKENS, PROMPT_TOKENS, CAPACITY = 16, 0.3, 3000, 256, 64
WARM_UP, STEPS = 2, 7
REAL_RANKS, UPDATES = (2, 4, 8), 10
POINTER = 8
"""Bytes of an element of a list."""
MARKS = len(VERBS) * 50
"""Bytes of the marks that a rank leaves in a step."""
LIMIT = 540
"""Seconds after which a launch of real ranks counts as hanging."""


def simulate(ranks: int, groups: int, scope: str, steps: int = STEPS, tokens: int = TOKENS) -> dict[str, Any]:
    """One rank of so many, with so many groups a batch on each."""
    capacity = ranks * groups if scope == "gathered" else CAPACITY
    source = MadeUp(ranks, groups, SIZE, LIVE, tokens, PROMPT_TOKENS)
    rank = SimulatedRank(
        source, ranks // 2, replay_scope=scope, replay_buffer_size=capacity, replay_start=0, replay_seed=1
    )
    rank.fill()
    for _ in range(WARM_UP):
        rank.step()
    before, moved, bound = rank.received, rank.moved, rank.bound
    rank.seconds.clear()
    tallies = [rank.step().tally for _ in range(steps)]
    received = {verb: (rank.received[verb] - before[verb]) / steps for verb in VERBS}
    run = Run(ranks, ranks * groups, SIZE, tokens, PROMPT_TOKENS, capacity, LIVE)
    planned = {each.scope: each.traffic for each in needs(run)}[scope]
    payload = (rank.moved - moved) / steps
    return {
        "ranks": ranks,
        "groups a rank": groups,
        "scope": scope,
        "entries": len(rank.buffer),
        "table bytes": len(rank.buffer) * rank.buffer.table.row_bytes,
        "stored": statistics.mean(tally.stored for tally in tallies),
        "replaced": statistics.mean(tally.replaced for tally in tallies),
        "received": received,
        "payload": payload,
        "bound": (rank.bound - bound) / steps,
        "planned / counted": planned / (received["share"] + received["agree"] + payload),
        "milliseconds": {part: 1e3 * statistics.median(seconds[part] for seconds in rank.seconds) for part in PARTS}
        | {"all": 1e3 * statistics.median(sum(seconds.values()) for seconds in rank.seconds)},
    }


def patterns_of(ranks: int, updates: int) -> list[Pattern]:
    """Cases of real ranks: every scope, whole groups and straddling ones."""
    layouts = [(scope, 16) for scope in SCOPES] + [(scope, 12) for scope in SCOPES[1:]]
    settings = {"replay_buffer_size": 8, "replay_start": 0, "replay_seed": 3, "replay_unfilled": "keep"}
    return [
        Pattern(number, ranks, rows, 8, updates, LIVE, 128, {**settings, "replay_scope": scope})
        for number, (scope, rows) in enumerate(layouts)
    ]


def compare(ranks: int, updates: int = UPDATES) -> list[dict[str, Any]]:
    """Bytes that real ranks received in each verb, and what the simulations of these ranks did: all steps together."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(__file__), folder, ranks, "--worker", folder, "--updates", updates)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    lines = []
    for number, pattern in enumerate(patterns_of(ranks, updates)):
        received, simulated = dict.fromkeys(VERBS, 0), dict.fromkeys(VERBS, 0)
        differing, average = 0, 0.0
        for rank in range(ranks):
            alone = SimulatedRank(Played(pattern), rank, **pattern.settings)
            for step in found[rank][number]["steps"]:
                alone.step()
                differing += alone.received != step["received"]
            for verb in VERBS:
                received[verb] += step["received"][verb]
                simulated[verb] += alone.received[verb]
            average += alone.moved
        lines.append(
            {
                "ranks": ranks,
                "scope": pattern.settings["replay_scope"],
                "straddling": pattern.straddles,
                "steps": pattern.updates,
                "wrong": list(wrong(pattern, [each[number] for each in found])),
                "received": received,
                "simulated": simulated,
                "steps that differ": differing,
                "payload by the average": average,
            }
        )
    return lines


def work(folder: Path, updates: int) -> None:
    """One real rank."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer = modelless(folder / f"trainer{rank}")
    played = [play(trainer, pattern, rank) for pattern in patterns_of(ranks, updates)]
    (folder / f"{rank}.json").write_text(json.dumps(played))
    torch.distributed.barrier()  # whose store ends with rank 0
    os._exit(0)


def run(script: Path, folder: str, ranks: int, *arguments: Any) -> None:
    """Runs a script on as many processes."""
    forked.prepare()
    forked.check(forked.launch(script, *arguments, limit=LIMIT, local_ranks=tuple(range(ranks))))


def real(ranks: int, patterns: int) -> dict[str, Any]:
    """The cases of the suite on as many ranks: how each ended on every rank, and all that is wrong."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run(CASES, folder, ranks, folder, patterns)
        cases = sorted({path.name.split(".")[0] for path in Path(folder).glob("*.0.json")})
        found = {
            case: [json.loads(Path(folder, f"{case}.{rank}.json").read_text()) for rank in range(ranks)]
            for case in cases
        }
    played = found["patterns"]
    made = [random_pattern(number, ranks) for number in range(patterns)]
    problems = [
        f"pattern {number}: {problem}"
        for number, pattern in enumerate(made)
        for problem in wrong(pattern, [rank["patterns"][number] for rank in played])
    ]
    for case in ("gathered, one is late", "sharded straddling"):
        if any((rank["hashes"], rank["drawn"]) != (found[case][0]["hashes"], found[case][0]["drawn"])
               for rank in found[case]):  # fmt: skip
            problems.append(f"{case}: the ranks' tables or draws differ")
    problems += unnamed(found)
    return {
        "ranks": ranks,
        "patterns": patterns,
        "replaced in the patterns": sum(each["counters"]["replaced"] for each in played[0]["patterns"]),
        "seconds": round(time.monotonic() - began),
        "wrong": problems,
        "cases": {case: endings(results) for case, results in found.items()},
    }


def unnamed(found: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Cases that came to another end than they must, and ranks that do not say because of whom."""
    for case, words, silent in (
        ("process whole", [], ()),
        ("gathered, one is late", [], ()),
        ("sharded straddling", [], ()),
        ("patterns", [], ()),
        ("two raise", [f"rank {SLOW}: HookError", f"rank {LOST}: HookError"], ()),
        ("one is not attached", [f"rank {LOST} did not come to it"], (LOST,)),
        ("one is too late", [""], ()),
        ("one is killed", [""], ()),
    ):
        for rank, ended in enumerate(found[case]):
            told = " ".join([ended.get("text", ""), *ended.get("notes", [])])
            if bool(ended["type"]) != bool(words):
                yield f"{case}: rank {rank} ended with {ended['type'] or 'no error'}: {told}"
            elif rank not in silent and not all(each in told for each in words):
                yield f"{case}: rank {rank} does not name the cause: {told}"


def endings(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The end of a case: the ranks that ended alike together, with the longest time and one's words."""
    together: dict[str, dict[str, Any]] = {}
    for rank, found in enumerate(results):
        words = " | ".join([found.get("text", ""), *found.get("notes", [])])
        one = together.setdefault(found["type"], {"ranks": [], "type": found["type"], "seconds": 0.0, "words": words})
        one["ranks"].append(rank)
        one["seconds"] = round(max(one["seconds"], found.get("seconds", 0.0)), 1)
    return list(together.values())


def traffic(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Bytes that a rank receives in a step, as a Markdown table."""
    names = ("ranks", "groups a rank", "scope", "`share`", "`agree`", "payload", "limit")
    yield f"| {' | '.join(names)} | payload / limit | all / limit | plan |"
    yield f"|{'---|' * (len(names) + 3)}"
    for line in lines:
        numbers = line["received"]["share"] + line["received"]["agree"]
        payload, bound = line["payload"], line["bound"]
        ratios = [f"{payload / bound:.4f}", f"{(numbers + payload) / bound:.3f}"] if bound else ["–", "–"]
        cells = [
            f"{line['ranks']:,}",
            str(line["groups a rank"]),
            f"`{line['scope']}`",
            *(
                format_bytes(size) if size else "–"
                for size in (*(line["received"][verb] for verb in VERBS[:2]), payload, bound)
            ),
            *ratios,
            f"{line['planned / counted']:.2f}",
        ]
        yield f"| {' | '.join(cells)} |"


def decisions(lines: list[dict[str, Any]]) -> Iterator[str]:
    """CPU time of a step on each rank, as a Markdown table."""
    yield f"| groups of a batch | entries | scope | all, ms | {' | '.join(PARTS)} |"
    yield f"|---|---|---|---|{'---|' * len(PARTS)}"
    for line in lines:
        spent = line["milliseconds"]
        cells = [
            f"{line['ranks'] * line['groups a rank']:,}",
            f"{line['entries']:,}",
            f"`{line['scope']}`",
            f"{spent['all']:,.0f}",
            *(f"{spent[part]:,.0f}" for part in PARTS),
        ]
        yield f"| {' | '.join(cells)} |"


def growth(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Quantities that grow with the ranks, and what they took, as a Markdown table."""
    most = max(line["groups a rank"] for line in lines)
    shown = [line for line in lines if line["scope"] == "sharded" and line["groups a rank"] == most]
    heads = [f"{line['ranks']:,} ranks" for line in shown]
    yield f"| | grows with | {' | '.join(heads)} |"
    yield f"|---|---|{'---|' * len(shown)}"
    for name, cause, measured in GROWING:
        yield f"| {name} | {cause} | {' | '.join(measured(line) for line in shown)} |"


def spent(line: dict[str, Any], *parts: str) -> str:
    """CPU time of some parts of a step."""
    return f"{sum(line['milliseconds'][part] for part in parts):,.1f} ms"


def told(line: dict[str, Any], verb: str) -> str:
    """Bytes and CPU time of a verb."""
    return f"{format_bytes(line['received'][verb])}, {spent(line, verb)}"


GROWING: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("columns of all rows (`share`)", "rows", lambda line: told(line, "share")),
    ("`agree`, with the hash of the decisions", "ranks, sampled groups", lambda line: told(line, "agree")),
    ("finding dead groups", "rows", lambda line: spent(line, "look")),
    ("settling: scores, eviction", "live groups", lambda line: spent(line, "settle")),
    ("selecting, sampling, mixing", "dead groups, entries", lambda line: spent(line, "fill")),
    (
        "routing (`admit`, `fetch`)",
        "admitted groups × ranks, sampled groups",
        lambda line: spent(line, "admit", "fetch"),
    ),
    ("this rank's rows and candidates", "sampled, live groups", lambda line: spent(line, "place", "collect")),
    ("the buffer's table, on every rank", "entries", lambda line: format_bytes(line["table bytes"])),
    ("the column of TRL's completions table", "rows", lambda line: format_bytes(POINTER * rows_of(line))),
    ("positions, written to one process", "ranks", lambda line: format_bytes(MARKS * line["ranks"])),
)
"""What, with what it grows, and its measured cost."""


def rows_of(line: dict[str, Any]) -> int:
    """Rows of a batch, on all ranks."""
    return int(line["ranks"] * line["groups a rank"] * SIZE)


def real_endings(found: dict[str, Any]) -> Iterator[str]:
    """Ends of the suite's cases on many real ranks, as a Markdown table."""
    yield "| case | ranks | end | after, s |"
    yield "|---|---|---|---|"
    for case, ended in found["cases"].items():
        for one in ended:
            yield f"| {case} | {len(one['ranks'])} | {one['type'] or 'no error'} | {one['seconds']} |"


def comparison(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Bytes that real ranks received, and the simulated ones."""
    yield "| ranks | scope | groups | verb | received | simulated | ratio |"
    yield "|---|---|---|---|---|---|---|"
    for line in lines:
        for verb in VERBS:
            received, simulated = line["received"][verb], line["simulated"][verb]
            if received or simulated:
                layout = "straddling" if line["straddling"] else "whole"
                ratio = f"{simulated / received:.4f}" if received else "–"
                yield (
                    f"| {line['ranks']} | `{line['scope']}` | {layout} | `{verb}` | {received:,} | {simulated:,} "
                    f"| {ratio} |"
                )


def failed(results: dict[str, Any]) -> list[str]:
    """Lists what is not as it must be."""
    compared = results.get("compared", [])
    told = [f"{line['ranks']} ranks, {line['scope']}: {problem}" for line in compared for problem in line["wrong"]]
    told += [
        f"{line['ranks']} ranks, {line['scope']}: {line['steps that differ']} steps differ from the simulation"
        for line in compared
        if line["steps that differ"]
    ]
    told += [
        f"{line['ranks']} ranks, {line['scope']}: the average rank's payload is not that of all"
        for line in compared
        if abs(line["payload by the average"] - line["received"]["admit"] - line["received"]["fetch"]) > 0.5
    ]
    return told + [problem for found in results.get("real", {}).values() for problem in found["wrong"]]


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes JSON; 1 where real ranks differ from each other or from the simulation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few simulated ranks, and two real ones")
    parser.add_argument("--real", type=int, metavar="RANKS", help="only the suite's cases, on so many processes")
    parser.add_argument("--patterns", type=int, default=50, help="random patterns with --real")
    parser.add_argument("--out", type=Path, help="the JSON to write: benchmarks/results/ranks.json if not --quick")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--updates", type=int, default=UPDATES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker, options.updates)
    path = options.out or (None if options.quick else RESULTS)
    results = json.loads(path.read_text()) if path is not None and path.exists() else {}
    if options.real:
        found = real(options.real, options.patterns)
        results.setdefault("real", {})[str(options.real)] = found
        print(*real_endings(found), "", sep="\n")
        print(f"{found['patterns']} patterns, {found['replaced in the patterns']:g} groups replaced")
    else:
        grid = [(ranks, groups) for ranks in RANKS for groups in GROUPS_A_RANK]
        steps = 1 if options.quick else STEPS
        results["simulated"] = []
        for ranks, groups in [(8, 2)] if options.quick else grid:
            results["simulated"] += [simulate(ranks, groups, scope, steps) for scope in SCOPES]
        if options.quick:
            results["compared"] = compare(REAL_RANKS[0], updates=4)
        else:
            results["compared"] = [line for ranks in REAL_RANKS for line in compare(ranks)]
        for table in (
            *(table(results["simulated"]) for table in (traffic, decisions, growth)),
            comparison(results["compared"]),
        ):
            print(*table, "", sep="\n")
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")
    problems = failed(results)
    print(*problems, sep="\n", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
