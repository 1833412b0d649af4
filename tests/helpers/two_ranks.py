"""Launches a script on two ranks without torchrun, which would end both when one ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_two_ranks(script: Path, folder: Path, limit: float, local_ranks: tuple[int, int] = (0, 1)) -> list[Any]:
    """Runs `script FOLDER`; returns what each rank wrote to `results.RANK.json` there.

    Args:
        script: What to run.
        folder: Where results and logs go.
        limit: Seconds after which the launch counts as hanging.
        local_ranks: Of each rank, the number on its machine; (0, 0) stands for two machines.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    processes = []
    for rank, local_rank in enumerate(local_ranks):
        environment = {**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        with (folder / f"log.{rank}").open("w") as log:
            command = [sys.executable, str(script), str(folder)]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(processes):
            assert process.wait(limit) == 0, (folder / f"log.{rank}").read_text()[-6000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"results.{rank}.json").read_text()) for rank in range(2)]
