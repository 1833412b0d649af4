"""Puts llms.txt on the site: the pages for language models, as https://llmstxt.org describes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Add the list of pages, with links to their Markdown in the repository."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "llms.txt", content=llms(config)))
    return files


def llms(config: Any) -> str:
    """The text of llms.txt: name, summary, and a section for each part of the navigation."""
    raw = config["repo_url"].replace("github.com", "raw.githubusercontent.com")
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section in config["nav"]:
        ((title, pages),) = section.items()
        lines += ["", f"## {title}", ""]
        for name, path in _pages(pages):
            outside = path.startswith("https://")
            if outside or (DOCS / path).is_file():  # else it is made when the site is built
                link = path if outside else f"{raw}/main/docs/{path}"
                lines.append(f"- [{name}]({link}){_about(path)}")
    return "\n".join(lines) + "\n"


def _pages(entries: Any) -> Iterator[tuple[str, str]]:
    """Titles and paths, those of nested sections in their place."""
    for entry in entries:
        ((name, inside),) = entry.items()
        if isinstance(inside, str):
            yield name, inside
        else:
            yield from _pages(inside)


def _about(path: str) -> str:
    """The first sentence of a page."""
    file = DOCS / path
    if not (path.endswith(".md") and file.is_file()):  # a notebook, or outside
        return ""
    prose = re.search(r"^# .*\n\n([A-Z`][^\n]*(?:\n[^\n]+)*)", file.read_text(), re.MULTILINE)
    if prose is None:
        return ""
    text = re.sub(r"\[([^\]]+)\](\([^)]*\))?", r"\1", " ".join(prose[1].split()))
    return ": " + re.split(r"(?<=[.:])\s", text)[0].rstrip(":.") + "."
