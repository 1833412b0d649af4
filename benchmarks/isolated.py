"""Runs a function in a process of its own, which may hang, exhaust its memory, or die."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
from collections.abc import Callable
from typing import Any

LIMIT_S, LIMIT_BYTES = 60, 6 << 30


def isolated(function: Callable[[str], Any], name: str) -> Any:
    """What `function` returns for `name`; a text that says why there is nothing."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def send() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            sender.send(function(name))
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:160])

    process = context.Process(target=send)
    process.start()
    sender.close()
    result: Any = f"took more than {LIMIT_S} s, or died"
    with contextlib.suppress(EOFError):
        if receiver.poll(LIMIT_S):
            result = receiver.recv()
    process.kill()
    process.join()
    return result
