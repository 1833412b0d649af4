"""An estimate in words, for a terminal's table, and as one HTML page that needs nothing else."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ..sizes import format_bytes
from .estimate import Estimate, Period
from .page import POLICY, STYLE

HEAD = ("steps", "dead groups", "all wrong", "all right")


def facts(found: Estimate) -> list[tuple[str, str]]:
    """The figures of the whole run, each with its name."""
    bound = "none: every group was dead" if found.bound is None else f"{found.bound:.2f} times the live groups a batch"
    rows = [("dead groups", _percent(found.dead)), ("most that filling them gives", bound)]
    if found.completion_tokens is not None:
        rows.append(("mean tokens of a completion", f"{found.completion_tokens:.0f}"))
    if found.group_bytes is not None and found.buffer_bytes is not None:
        rows.append(("a stored group", format_bytes(found.group_bytes)))
        rows.append(("the whole buffer, where it is held", format_bytes(found.buffer_bytes)))
    rows.append(("replay_scope", found.scope))
    return rows


def course(found: Estimate) -> list[list[str]]:
    """The parts of the run, a row each, under `HEAD`."""
    return [_row(period) for period in found.periods]


def write_page(found: Estimate, path: str | Path) -> Path:
    """Writes the page and returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    title = escape(f"What replay could do for {found.source}")
    advice = "".join(f"<li>{escape(words)}</li>" for words in found.advice)
    figures = _table((), [list(fact) for fact in facts(found)])
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{POLICY}<title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><main>'
        f"<h1>{title}</h1><section><h2>Figures</h2>{figures}</section>"
        f'<section class="wide"><h2>Over the run</h2>{_table(HEAD, course(found))}</section>'
        f'<section class="wide"><h2>What to set</h2><ul>{advice}</ul></section></main></body></html>\n'
    )
    path.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    return path


def _row(period: Period) -> list[str]:
    steps = f"{period.first}" if period.first == period.last else f"{period.first} to {period.last}"
    return [steps, _percent(period.dead), _percent(period.all_wrong), _percent(period.all_right)]


def _percent(share: float | None) -> str:
    return "not told" if share is None else f"{share:.0%}"


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = ["".join(f"<th>{escape(words)}</th>" for words in head)] if head else []
    for row in rows:
        lines.append("".join(f"<td>{escape(words)}</td>" for words in row))
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'
