"""Docstrings as TRL writes them, in the words that the API pages are made from.

``name (`int`, *optional*, defaults to `64`):`` becomes ``name (int, optional):``, [`Session`] a link, an example with
prompts and a drawing in lines a block of code.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

PACKAGE = "trl_replay"
MARK = "setting"
INTERFACES = f"{PACKAGE}.protocols"
ENTRY = re.compile(r"^( +)([*\w]+) \((.*?)\):(?= |$)", re.MULTILINE)
"""An argument or attribute with its type."""
REFERENCE = re.compile(r"\[`([\w.]+)`\](?![\[(])")
PROMPTED = re.compile(r"^(?:(?:>>>|\.\.\.).*\n?)+", re.MULTILINE)
DRAWING = re.compile(r"^(?:.+\n)?(?:.*[├└│].*\n?)+", re.MULTILINE)


class Docstrings(Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """One object, its docstring read."""
        _show_plain_default(obj)
        if obj.docstring:
            obj.docstring.value = rewritten(obj.docstring.value, obj)


def _show_plain_default(obj: Object) -> None:
    """Show `int = 64` for `Annotated[int, Checked(…)] = setting(64, …)`."""
    if not obj.is_class:
        return
    for parameter in obj.parameters:
        if getattr(parameter.annotation, "canonical_path", "") == "typing.Annotated":
            parameter.annotation = parameter.annotation.slice.elements[0]
        if str(getattr(parameter.default, "function", "")) == MARK:
            parameter.default = parameter.default.arguments[0]


def rewritten(text: str, obj: Object) -> str:
    """The docstring of `obj` in Markdown and in the form of a Google docstring."""
    text = ENTRY.sub(lambda found: f"{found[1]}{found[2]} ({_type(found[3])}):", text)
    text = re.sub(r"^( +)\[`(\w+)`\]: ", r"\1\2: ", text, flags=re.MULTILINE)  # what a function returns
    text = REFERENCE.sub(lambda found: _link(found[1], obj), text)
    text = PROMPTED.sub(lambda found: _code("python", re.sub(r"^.{3} ?", "", found[0], flags=re.MULTILINE)), text)
    return DRAWING.sub(lambda found: _code("text", found[0]), text)


def _type(words: str) -> str:
    """A type without markup and default; a shape in brackets, because parentheses end a type."""
    words = re.sub(r", defaults to .*", "", words)
    words = re.sub(r"[`*]|\[(?=`)|(?<=`)\]", "", words)
    return re.sub(r"\(([^()]*?),?\)", r"[\1]", words)


def _link(name: str, obj: Object) -> str:
    """A link to what the API pages show; for anything else the name."""
    first = name.partition(".")[0]
    package = obj.package
    if first in (package.exports or ()):
        return f"[`{name}`][{PACKAGE}.{name}]"
    if first in package["protocols"].members:
        return f"[`{name}`][{INTERFACES}.{name}]"
    return f"`{name}`"


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"
