"""Method cards of the presets: what a method does, when to use it, and what of it is faithful."""

from __future__ import annotations

from pathlib import Path


def card(name: str) -> str:
    """The card of a preset, as Markdown."""
    return (Path(__file__).parent / f"{name}.md").read_text(encoding="utf-8")
