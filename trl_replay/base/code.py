"""Tells the code of two functions apart, in another process too."""

from __future__ import annotations

import dis
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

PLAIN = (int, float, complex, str, bytes, bool, type(None))


def code_of(function: Any) -> str:
    """A hash of a callable's code, of the functions of its module that it calls, and of the constants that it uses.
    The state of an object, other modules, and comments do not count. Equal for one release of Python only, which it
    names."""
    hashed = hashlib.blake2b(digest_size=12)
    for part in _parts(function, set()):
        hashed.update(part.encode() + b"\0")
    return f"{sys.version_info.major}.{sys.version_info.minor}:{hashed.hexdigest()}"


def differs(then: str, now: str) -> bool:
    """Tell whether two hashes of one release of Python differ."""
    return then != now and then.partition(":")[0] == now.partition(":")[0]


def _parts(value: Any, seen: set[FunctionType]) -> Iterator[str]:
    """What tells a value apart; `seen` functions are not gone through again."""
    if isinstance(value, partial):
        yield from _parts((value.func, *value.args, *sorted(value.keywords.items())), seen)
    elif isinstance(value, MethodType):
        yield from _parts(value.__func__, seen)
    elif isinstance(value, FunctionType):
        if value not in seen:
            seen.add(value)
            yield from _parts_of_function(value, seen)
    elif isinstance(value, re.Pattern):
        yield repr((value.pattern, value.flags))
    elif isinstance(value, tuple | frozenset):
        for part in value if isinstance(value, tuple) else sorted(value, key=repr):  # the order is each process's own
            yield from _parts(part, seen)
    elif isinstance(value, PLAIN):
        yield repr(value)
    elif not isinstance(value, type | CodeType):
        yield type(value).__qualname__
        call = inspect.getattr_static(type(value), "__call__", None)
        if isinstance(call, FunctionType) and call.__module__ == type(value).__module__:
            yield from _parts(call, seen)


def _parts_of_function(function: FunctionType, seen: set[FunctionType]) -> Iterator[str]:
    used, written = set[str](), set[str]()
    for code in _nested(function.__code__):
        yield repr((code.co_code, code.co_names, code.co_varnames))
        yield from _parts(code.co_consts, seen)
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL":
                used.add(instruction.argval)
            elif instruction.opname in ("STORE_GLOBAL", "STORE_DEREF"):
                written.add(instruction.argval)
    yield from _parts(function.__defaults__, seen)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name not in written:
            with suppress(ValueError):  # empty yet
                yield from _parts(cell.cell_contents, seen)
    for name in sorted(used - written):
        value = function.__globals__.get(name)
        if isinstance(value, (*PLAIN, tuple, re.Pattern)) or getattr(value, "__module__", "") == function.__module__:
            yield from _parts(value, seen)


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
