"""Tells the code and the state of two functions apart, in another process too."""

from __future__ import annotations

import dis
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

PLAIN = (int, float, complex, str, bytes, bool, type(None))
LOCALS = {*dis.haslocal, *dis.hasfree}
REMEMBERED = 4096
"""Code objects that are not read again."""


class Names(NamedTuple):
    """What is read of a code object once, that of nested functions included."""

    digest: str
    globals: tuple[str, ...]
    """Names of its module that it reads and never writes."""
    cells: frozenset[str]
    """Variables of the functions around it that it writes."""
    attributes: frozenset[str]
    """Attributes that it writes, of whatever object."""


def code_of(function: Any) -> str:
    """A hash of a callable's code, of the functions of its module that it calls, of the constants that it uses, and of
    numbers and texts among its attributes. Docstrings, comments, names of local variables, and what this code itself
    writes do not count; other state and other modules are not seen. Equal for one release of Python only, which it
    names."""
    walk = _Walk()
    is_object = not isinstance(function, FunctionType | MethodType | partial | type)
    if is_object and not hasattr(function, "named_parameters"):  # a model calls its own functions, and changes itself
        function = getattr(function, "__call__", function)  # noqa: B004
    walk.add(function)
    walk.add_attributes()
    digest = hashlib.blake2b("\0".join(walk.parts).encode(errors="surrogatepass"), digest_size=12).hexdigest()
    return f"{sys.version_info.major}.{sys.version_info.minor}:{digest}"


def differs(then: str, now: str) -> bool:
    """Tell whether two hashes of one release of Python differ."""
    return then != now and then.partition(":")[0] == now.partition(":")[0]


class _Walk:
    """Collects what tells a callable apart.

    Attributes:
        parts (`list[str]`): This.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._seen: set[FunctionType] = set()
        self._owners: list[Any] = []
        self._written: set[str] = set()

    def add(self, value: Any) -> None:
        """Add a value, and what it is made of."""
        if isinstance(value, PLAIN):
            self.parts.append(repr(value))
        elif isinstance(value, FunctionType):
            if value not in self._seen:
                self._seen.add(value)
                self._add_function(value)
        elif isinstance(value, partial):
            self.add((value.func, *value.args, *sorted(value.keywords.items())))
        elif isinstance(value, MethodType):
            self.add(value.__func__)
            self._owners.append(value.__self__)
        elif isinstance(value, re.Pattern):
            self.parts.append(repr((value.pattern, value.flags)))
        elif isinstance(value, tuple | frozenset):
            for part in value if isinstance(value, tuple) else sorted(value, key=repr):  # each process has its order
                self.add(part)
        elif not isinstance(value, type | CodeType):
            self.parts.append(type(value).__qualname__)
            call = inspect.getattr_static(type(value), "__call__", None)
            if isinstance(call, FunctionType) and call.__module__ == type(value).__module__:
                self.add(MethodType(call, value))

    def _add_function(self, function: FunctionType) -> None:
        names = names_of(function.__code__)
        self.parts.append(names.digest)
        self._written |= names.attributes
        self._owners.append(function)
        self.add(function.__defaults__ or ())
        self.add(tuple(sorted((function.__kwdefaults__ or {}).items())))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name not in names.cells:
                with suppress(ValueError):  # empty yet
                    self.add(cell.cell_contents)
        for name in names.globals:
            value = function.__globals__.get(name)
            if (
                isinstance(value, (*PLAIN, tuple, re.Pattern))
                or getattr(value, "__module__", "") == function.__module__
            ):
                self.add(value)

    def add_attributes(self) -> None:
        """Add numbers and texts that are set on the callables, or on their classes, by other code than theirs."""
        for owner in self._owners:
            classes = () if isinstance(owner, FunctionType) else type(owner).__mro__[:-1]
            held: dict[str, Any] = {}
            for of_class in reversed(classes):
                held |= vars(of_class)
                self._written |= _written_by(of_class)
            held |= getattr(owner, "__dict__", {})
            for name, value in sorted(held.items()):
                if isinstance(value, PLAIN) and name not in self._written and not name.startswith("__"):
                    self.parts.append(repr((name, value)))


@lru_cache(REMEMBERED)
def names_of(code: CodeType) -> Names:
    """Read a code object."""
    used, written, cells, attributes = set[str](), set[str](), set[str](), set[str]()
    targets = {"STORE_GLOBAL": written, "STORE_DEREF": cells, "STORE_ATTR": attributes, "LOAD_GLOBAL": used}
    hashed = hashlib.blake2b(digest_size=12)
    for nested in _nested(code):
        for part in _instructions(nested):
            hashed.update(part.encode(errors="surrogatepass") + b"\0")
        for step in dis.get_instructions(nested):
            targets.get(step.opname, set()).add(step.argval)
    return Names(hashed.hexdigest(), tuple(sorted(used - written)), frozenset(cells), frozenset(attributes))


def _instructions(code: CodeType) -> Iterator[str]:
    """What a code object does: its parameters by name, for they are columns of the dataset, and other local variables
    by the order in which they appear."""
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = {name: name for name in parameters}
    yield repr((parameters, code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)))
    yield repr(code.co_exceptiontable)
    for step in dis.get_instructions(code):
        if step.opname == "MAKE_CELL":  # in the order of names
            continue
        value = step.argval
        if step.opcode in LOCALS:
            variables = value if isinstance(value, tuple) else (value,)
            value = tuple(known.setdefault(name, str(len(known))) for name in variables)
        yield f"{step.opname} {_text_of(value)}"


def _text_of(constant: Any) -> str:
    """A constant as text, the same in every process."""
    if isinstance(constant, CodeType):
        return "code"
    if isinstance(constant, frozenset):
        return f"frozenset{sorted(map(_text_of, constant))}"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_text_of, constant))})"
    return repr(constant)


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _written_by(owner: type) -> frozenset[str]:
    """Attributes that the methods of a class write, once an object is made."""
    methods = [
        method for name, method in vars(owner).items() if name != "__init__" and isinstance(method, FunctionType)
    ]
    return frozenset[str]().union(*(names_of(method.__code__).attributes for method in methods))
