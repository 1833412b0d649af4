"""One rank of a launch of many: the cases of test_many_ranks.py, and of `benchmarks/ranks.py --real`; results as JSON.

Every case has a process and a process group of its own, since in some of them a rank is killed or the others end with
their time-out. The key-value store of them all is kept by the process that starts the cases, as torchrun keeps it.
"""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1"
)

import contextlib
import faulthandler
import io
import json
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

import torch
import torch.distributed as dist
from patterns import LOST, SLOW, modelless, play, random_pattern
from scripted import build, run, uneven

from trl_replay import ReplayError
from trl_replay.strategies.scorers import advantage_std

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TIMEOUT = 120
"""Seconds that a collective waits where nobody is to be late: the machine may be busy."""
BRIEF = 8
"""The same where one rank comes later than that, or not at all."""
LATE = 5
"""Seconds by which it then is later than the others wait."""
LIMIT = 400
"""Seconds after which a case counts as hanging, and the launch ends."""
UPDATES = 6
LAYOUTS = {"whole": (4, 2), "straddling": (3, 4)}
"""Rows of a process, and of a group."""
FAILS_AT = 2
"""The first update at which every scorer is asked: `uneven` has made live groups by then."""


class Acting:
    """A scorer that does something on some ranks at one update, before `agree`."""

    def __init__(self, act: Callable[[], Any], *ranks: int) -> None:
        self.act, self.ranks = act, ranks

    def __call__(self, groups: Any, context: Any) -> Any:
        if RANK in self.ranks and context.update == FAILS_AT:
            self.act()
        return advantage_std(groups, context)


def no_luck() -> None:
    raise ZeroDivisionError(f"no luck on rank {RANK}")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def trained(folder: Path, layout: str, scope: str, timeout: int = TIMEOUT, **replay: Any) -> dict[str, Any]:
    rows, size = LAYOUTS[layout]
    trainer = build(folder, rows, size, uneven, rank=RANK, max_steps=UPDATES, ddp_timeout=timeout)
    return run(trainer, replay_scope=scope, **{"replay_buffer_size": 6, "replay_seed": 3, **replay})


def unattached(folder: Path) -> dict[str, Any]:
    """Replay is attached on all ranks but one."""
    if RANK != LOST:
        return trained(folder, "straddling", "sharded", BRIEF)
    build(folder, *LAYOUTS["straddling"], uneven, rank=RANK, max_steps=UPDATES, ddp_timeout=BRIEF).train()
    return {}


def patterns(folder: Path, count: int) -> dict[str, Any]:
    """Random patterns, one after the other on the same ranks."""
    trainer = modelless(folder)
    return {"patterns": [play(trainer, random_pattern(number, WORLD), RANK) for number in range(count)]}


def cases(folder: Path, count: int) -> Iterator[tuple[str, int, Callable[[], dict[str, Any]]]]:
    """Name, time-out of the process group, and what to do."""
    yield "process whole", TIMEOUT, lambda: trained(folder, "whole", "process")
    late = Acting(lambda: time.sleep(1), SLOW)
    yield "gathered, one is late", TIMEOUT, lambda: trained(folder, "straddling", "gathered", replay_scorer=late)
    yield "sharded straddling", TIMEOUT, lambda: trained(folder, "straddling", "sharded")
    yield "patterns", TIMEOUT, lambda: patterns(folder, count)
    raising = Acting(no_luck, SLOW, LOST)
    yield "two raise", TIMEOUT, lambda: trained(folder, "straddling", "sharded", replay_scorer=raising)
    yield "one is not attached", BRIEF, lambda: unattached(folder)
    later = Acting(lambda: time.sleep(BRIEF + LATE), SLOW)
    yield "one is too late", BRIEF, lambda: trained(folder, "straddling", "sharded", BRIEF, replay_scorer=later)
    killed = Acting(die, LOST)
    yield "one is killed", TIMEOUT, lambda: trained(folder, "straddling", "gathered", replay_scorer=killed)


def outcome(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `call` returned or raised, and how long it took."""
    began = time.monotonic()
    result: dict[str, Any] = {"type": "", "text": "", "notes": [], "ours": False}
    try:
        result |= call()
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        ours = isinstance(error, ReplayError)
        result |= {"type": type(error).__name__, "text": str(error), "notes": notes, "ours": ours}
    return {**result, "seconds": time.monotonic() - began, "cpu": time.process_time()}


def perform(folder: Path, name: str, timeout: int, case: Callable[[], dict[str, Any]], store: dist.Store) -> None:
    """Runs a case and writes what it finds."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=RANK, world_size=WORLD, timeout=timedelta(seconds=timeout)
    )
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outcome(case)
    found.pop("gradients", None)
    (folder / f"{name}.{RANK}.json").write_text(json.dumps(found))


def main(folder: Path, count: int, wanted: list[str]) -> None:
    """The cases of these names, or all, each in a process that ends without tearing its process group down.

    Destroying a gloo group whose peer left can wait for ever for a thread that waits for the interpreter's lock.
    """
    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"])
    kept = dist.TCPStore("127.0.0.1", port, is_master=RANK == 0, wait_for_workers=False)
    for name, timeout, case in cases(folder / f"trainer{RANK}", count):
        if wanted and name not in wanted:
            continue
        child = os.fork()
        if child == 0:
            status = 1
            try:
                perform(folder, name, timeout, case, dist.TCPStore("127.0.0.1", port, is_master=False))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            (folder / f"{name}.{RANK}.json").write_text(json.dumps({"type": "killed"}))
        elif status:
            sys.exit(f"case {name!r} ended with {status}")
    kept.set(f"done/{RANK}", "1")
    if RANK == 0:  # the store ends with it
        kept.wait([f"done/{rank}" for rank in range(WORLD)], timedelta(seconds=LIMIT))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
