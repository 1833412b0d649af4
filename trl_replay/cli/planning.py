"""`trl-replay plan`: what a buffer takes on so many ranks, before anything runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import TYPE_CHECKING

from ..sizes import counted, format_bytes
from .command import Command, add_json_option, positive
from .tables import make_console, make_table

if TYPE_CHECKING:
    from ..report.capacity import Needs, Run

COLUMNS = (
    "scope",
    "groups in all",
    "filled in, batches",
    "memory a rank",
    "received a rank and step",
    "of it columns, agree",
    "checkpoint, in all",
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, default=1, help="processes")
    parser.add_argument("--prompts", type=positive, default=8, help="groups of a generation batch, on all processes")
    parser.add_argument("--generations", type=positive, default=8, help="completions of a group")
    parser.add_argument("--tokens", type=positive, default=1024, help="mean tokens of a completion")
    parser.add_argument("--prompt-tokens", type=positive, default=256, help="tokens of a prompt")
    parser.add_argument("--size", type=positive, default=64, help="replay_buffer_size")
    parser.add_argument("--live", type=float, default=0.3, help="share of live groups, from 0 to 1")
    parser.add_argument("--reference", action="store_true", help="with a reference model (beta is not 0)")
    parser.add_argument("--logps-dtype", choices=("float32", "bfloat16"), default="float32", help="replay_logps_dtype")
    add_json_option(parser)


def _run(options: argparse.Namespace) -> int:
    from ..report.capacity import Run, as_dict, needs

    run = Run(**{fact.name: getattr(options, fact.name) for fact in fields(Run)})
    planned = as_dict(run)
    if options.json:
        print(json.dumps(planned, indent=2))
        return 0
    sizes = planned["bytes of a group"]
    console = make_console()
    batch = f"{run.prompts} x {run.generations} completions of {run.tokens} tokens"
    title = f"{counted(run.ranks, 'rank')}, {batch}: a stored group takes {format_bytes(sizes['held'])}"
    console.print(make_table(title, COLUMNS, [_row(each) for each in needs(run)]))
    for words in _advice(run):
        console.print(f"- {words}", markup=False)
    return 0


def _row(scope: Needs) -> list[str]:
    return [
        scope.scope,
        f"{scope.groups:,}",
        f"{scope.batches:.1f}",
        format_bytes(scope.memory),
        format_bytes(scope.traffic),
        f"{format_bytes(scope.columns)}, {format_bytes(scope.agreement)}",
        format_bytes(scope.checkpoint),
    ]


def _advice(run: Run) -> list[str]:
    """What the table does not say."""
    words = [
        "memory is main memory; with replay_storage='disk' it is on each node's disk, and with 'device' on the GPU",
        "replay_buffer_size counts groups per process, with replay_scope='gathered' in all",
    ]
    if run.straddles:
        words.append("groups lie on several processes: replay_scope='process' is refused, take another one")
    elif run.prompts // run.ranks < 4:
        here = counted(run.prompts // run.ranks, "group")
        words.append(f"a process has {here} a batch: with replay_scope='process' little is stored where it is needed")
    return words


PLAN = Command("plan", "what a buffer takes on so many processes: memory, traffic, disk, by scope", _add_options, _run)
