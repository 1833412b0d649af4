"""One rank of a launch: runs the cases, writes the results of each as JSON, and ends."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from trl_replay import ReplayError

LIMIT = 400
"""Seconds after which a case that has a process of its own counts as hanging, and the launch ends."""
STUCK = 100
"""Seconds after which such a case says where it is."""
Case = Callable[[], Any]


def rank() -> int:
    """Of this process; no constant, since launches are forks of a process that has imported this."""
    return int(os.environ["RANK"])


def write(result: Any, folder: Path, name: str) -> None:
    """The results of a case; its gradients are a file of their own, since a million numbers are slow to print."""
    path = folder / f"{name}.{rank()}.json"
    if "gradients" in result:
        np.save(path.with_suffix(".npy"), np.array(result["gradients"]))
        result = {**result, "gradients": []}
    path.write_text(json.dumps(result))


class Result(dict[str, Any]):
    """What came of a case on a rank: what is not there was not reached."""

    def __missing__(self, key: str) -> Any:
        raise AssertionError(f"no {key!r}: {self.get('type')}: {self.get('text')}")


def read(path: Path) -> Result:
    result = Result(json.loads(path.read_text()))
    gradients = path.with_suffix(".npy")
    if gradients.exists():
        result["gradients"] = np.load(gradients)
    return result


def own(folder: Path) -> Path:
    """The folder of this rank in a launch's."""
    return folder / f"trainer{rank()}"


def quiet(case: Case) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return case()


def outcome(case: Case) -> dict[str, Any]:
    """The result of a case or its error, and how long it took."""
    began = time.monotonic()
    result: dict[str, Any] = {"type": "", "text": "", "notes": [], "ours": False}
    try:
        found = case()
        result |= found if isinstance(found, dict) else {}
    except Exception as error:
        notes, ours = getattr(error, "__notes__", []), isinstance(error, ReplayError)
        result |= {"type": type(error).__name__, "text": str(error), "notes": notes, "ours": ours}
    return {**result, "seconds": time.monotonic() - began}


def told(result: dict[str, Any]) -> str:
    """All words of an error."""
    return "\n".join([result["text"], *result["notes"]])


def perform(folder: Path, cases: Iterable[tuple[str, Case]]) -> NoReturn:
    """Runs cases in turn."""
    torch.set_num_threads(1)
    gc.freeze()  # each training collects garbage, and need not walk what the imports left
    for name, case in cases:
        write(quiet(lambda case=case: outcome(case)), folder, name)
    end()


def end() -> NoReturn:
    """Ends this process, whose results are all written, without tearing down the interpreter.

    gloo's worker threads hold tensors for a moment after their last collective. Where one lets go of its tensor while
    Python is being finalised, it asks for the interpreter's lock and the process aborts ("terminate called without an
    active exception": pytorch/pytorch#179291), in about one of 20 launches of four processes.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def perform_apart(folder: Path, cases: Iterable[tuple[str, Case]], wanted: Sequence[str], timeout: int) -> NoReturn:
    """Runs the cases of these names, or "all but" these, or all: in a process and a process group of its own, each.

    So one that breaks does not spoil the next. A collective waits for `timeout` seconds. The store of all groups is
    kept by a process of its own: its server is a thread, and what is forked beside such a thread may wait for ever for
    a lock that it held. Nobody destroys a group: with gloo, where a peer has left, that can wait for ever for a thread
    that waits for the interpreter's lock.
    """
    torch.set_num_threads(1)
    keeper = _keep_store() if rank() == 0 else 0
    for name, case in cases:
        if wanted and (name in wanted) == (wanted[0] == "all but"):
            continue
        child = os.fork()
        if child == 0:
            _one(folder, name, timeout, case)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"case {name!r} ended with {status}")
    _store().set(f"done/{rank()}", "1")
    if keeper:
        os.waitpid(keeper, 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _store(**options: Any) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False, **options)


def _keep_store() -> int:
    """A process that keeps the store of all ranks until they are done, or until this one has ended."""
    parent = os.getpid()
    keeper = os.fork()
    if keeper:
        return keeper
    try:
        kept = _store(is_master=True)
        done = [f"done/{number}" for number in range(int(os.environ["WORLD_SIZE"]))]
        while os.getppid() == parent and not kept.check(done):
            time.sleep(0.1)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _one(folder: Path, name: str, timeout: int, case: Case) -> NoReturn:
    status = 1
    try:
        signal.alarm(LIMIT)
        faulthandler.dump_traceback_later(STUCK)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(name, _store()),
            rank=rank(),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=timeout),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = quiet(lambda: outcome(case))
        found.pop("gradients", None)
        write(found, folder, name)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
