"""Runs scripts in processes that start with torch and TRL imported, as each rank of a launch needs them.

When the tests have been collected, everything is imported and nothing has run yet: `prepare` forks a process off that
stays so, and that forks again for every launch. A process that has to import for itself takes six seconds longer.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np

_nursery: socket.socket | None = None


def prepare():
    """Imports what ranks need, and forks the process off that forks all others, once; it ends with this one."""
    global _nursery
    if _nursery is not None:
        return
    import torch
    from trl import GRPOTrainer  # noqa: F401

    import trl_replay.trainer.attachment  # noqa: F401

    torch.set_num_threads(1)
    _nursery, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = _fork()
    if process == 0:
        _nursery.close()
        gc.freeze()  # each training collects garbage, and need not walk what the imports left
        try:
            _serve(its)
        finally:
            os._exit(0)
    its.close()
    atexit.register(_end, _nursery, process)


def _end(nursery: socket.socket, process: int) -> None:
    nursery.close()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)  # what its processes took counts as what this one took


def launch(
    script: Path | str,
    *arguments: Any,
    limit: float,
    local_ranks: tuple[int, ...] = (),
    cwd: Path | str = ".",
    environment: dict[str, str] | None = None,
    together: bool = True,
) -> list[subprocess.CompletedProcess[str]]:
    """Runs `script ARGUMENTS` on one process, or on one for each rank; returns how each one ended.

    Args:
        script: A Python file; it runs as `__main__`.
        arguments: Its command line.
        limit: Seconds after which a launch that still runs is killed.
        local_ranks: Of each rank, the number on its machine; empty for a process that is no rank.
        cwd: Where it runs.
        environment: Variables, beside those of this process.
        together: Whether the others are killed when one fails, as torchrun does it.
    """
    assert _nursery is not None, "tests/conftest.py calls prepare()"
    command = [str(script), *map(str, arguments)]
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, tempfile.TemporaryDirectory() as folder:
        request = {
            "command": command,
            "cwd": str(Path(cwd).absolute()),
            "environments": _environments({**os.environ, **(environment or {})}, local_ranks),
            "limit": limit,
            "together": together,
            "folder": folder,
        }
        with its:
            socket.send_fds(_nursery, [json.dumps(request).encode()], [its.fileno()])
        statuses = json.loads(ours.recv(1 << 16) or "null")
        assert statuses is not None, "the process that keeps the launch ended"
        output = [[_written(Path(folder, f"{stream}.{rank}")) for stream in (1, 2)] for rank in range(len(statuses))]
    return [
        subprocess.CompletedProcess(command, status, *streams)
        for status, streams in zip(statuses, output, strict=True)
    ]


def _written(path: Path) -> str:
    """The output of a process; it may have been killed before it opened the file."""
    return path.read_text() if path.exists() else ""


def check(launched: list[subprocess.CompletedProcess[str]]) -> None:
    """Every process of a launch ended well."""
    told = [f"rank {rank}: {done.stdout[-500:]}\n{done.stderr[-3000:]}" for rank, done in enumerate(launched)]
    assert all(done.returncode in (0, -signal.SIGKILL) for done in launched), "\n".join(told)
    assert not any(done.returncode for done in launched), f"over its limit: {[done.stderr for done in launched]}"


def _environments(common: dict[str, str], local_ranks: tuple[int, ...]) -> list[dict[str, str]]:
    """Of each process, its variables."""
    if not local_ranks:
        return [common]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(local_ranks))}
    return [
        {**common, **address, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        for rank, local_rank in enumerate(local_ranks)
    ]


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none of theirs is needed in the child
        return os.fork()


def _serve(requests: socket.socket) -> None:
    """Forks a keeper for every launch, until nobody is left to ask."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 1)
        if not request:
            break
        if _fork() == 0:
            requests.close()
            try:
                _keep(json.loads(request), socket.socket(fileno=descriptors[0]))
            finally:
                os._exit(0)
        os.close(descriptors[0])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # keepers of earlier launches
                pass
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _keep(request: dict[str, Any], asker: socket.socket) -> None:
    """Starts the processes of a launch, waits for them, and answers with their statuses."""
    running = {_start(request, rank): rank for rank in range(len(request["environments"]))}
    statuses = [0] * len(running)
    end = time.monotonic() + request["limit"]
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            statuses[running.pop(process)] = os.waitstatus_to_exitcode(status)
        gone = not process and bool(select.select([asker], [], [], 0.005)[0])
        failed = request["together"] and any(statuses)
        if gone or failed or time.monotonic() > end:
            for other in running:
                os.kill(other, signal.SIGKILL)
    asker.send(json.dumps(statuses).encode())


def _start(request: dict[str, Any], rank: int) -> int:
    process = _fork()
    if process:
        return process
    status = 1
    try:
        _become(request, rank)
        runpy.run_path(request["command"][0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become(request: dict[str, Any], rank: int) -> None:
    """Makes of this process what a new one would find itself to be."""
    for stream in (0, 1, 2):
        path = os.path.join(request["folder"], f"{stream}.{rank}") if stream else os.devnull
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, stream)
        os.close(opened)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environments"][rank])
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # to be found anew, by the variables
    sys.argv = request["command"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    warnings.resetwarnings()
    import torch

    random.seed()  # from the system's randomness: ranks that draw from a global generator draw differently
    np.random.seed()
    torch.seed()
