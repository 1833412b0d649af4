"""An estimate in words, for a terminal's table, and as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from ..sizes import counted, format_bytes
from .estimate import Estimate, Period
from .page import document

HEAD = ("steps", "dead groups", "all wrong", "all right")


def facts(found: Estimate) -> list[tuple[str, str]]:
    """The figures of the whole run, each with its name."""
    rows = [("dead groups", _percent(found.dead)), ("most that filling them gives", _bound(found.bound))]
    if found.completion_tokens is not None:
        tokens = f"{found.completion_tokens:.0f}"
        rows.append(("mean tokens of a completion", tokens))
    if found.group_bytes is not None and found.buffer_bytes is not None:
        group = format_bytes(found.group_bytes)
        buffer = format_bytes(found.buffer_bytes)
        rows.append((f"a stored group of {counted(found.num_generations, 'completion')}", group))
        rows.append(("the whole buffer, where it is held", buffer))
        rows.append(
            ("both are estimates", f"with prompts of {found.prompt_tokens:.0f} tokens: upper ones for shorter")
        )
    rows.append(("replay_scope", found.scope))
    return rows


def _bound(bound: float | None) -> str:
    if bound is None:
        return "none: every group was dead"
    return f"{bound:.2f} times the live groups a batch"


def course(found: Estimate) -> list[list[str]]:
    """The parts of the run, a row each, under `HEAD`."""
    return [_row(period) for period in found.periods]


def write_page(found: Estimate, path: str | Path) -> Path:
    """Writes the page and returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _page(found)
    path.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    return path


def _page(found: Estimate) -> str:
    title = escape(f"What replay could do for {found.source}")
    figures = [_line("td", fact) for fact in facts(found)]
    periods = [_line("td", period) for period in course(found)]
    advice = [_element("li", escape(words)) for words in found.advice]
    sections = [
        f"<h1>{title}</h1>",
        _section("Figures", _table(figures)),
        _section("Over the run", _table([_line("th", HEAD), *periods])),
        _section("What to set", _element("ul", "".join(advice))),
    ]
    return document(title, "".join(sections))


def _section(title: str, content: str) -> str:
    return f'<section class="wide"><h2>{title}</h2>{content}</section>'


def _table(lines: list[str]) -> str:
    table = _element("table", "".join(lines))
    return f'<div class="scroll">{table}</div>'


def _line(tag: str, texts: Iterable[str]) -> str:
    """A line of a table, its cells made of the `tag`."""
    cells = [_element(tag, escape(text)) for text in texts]
    return _element("tr", "".join(cells))


def _element(tag: str, content: str) -> str:
    return f"<{tag}>{content}</{tag}>"


def _row(period: Period) -> list[str]:
    steps = str(period.first)
    if period.last != period.first:
        steps += f" to {period.last}"
    return [steps, _percent(period.dead), _percent(period.all_wrong), _percent(period.all_right)]


def _percent(share: float | None) -> str:
    if share is None:
        return "not told (needs log_completions=True)"
    return f"{share:.0%}"
