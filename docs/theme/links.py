"""Extend what mkdocs does to our pages.

Links that leave docs/ lead to the repository, or to the page that is
made from their file, and pictures from outside come along: so the same Markdown leads somewhere on a site that shows
the repository and on the one that mkdocs builds. A setting's name is a link to it, wherever it stands. Names in tables
may break after an underscore, a dot, and the like.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import generated
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
PICTURES = "pictures"
SETTINGS = "reference/settings"
STRATEGIES = "reference/strategies.md"
LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )((?:\.\./)+[^)#\s]+)", re.MULTILINE)
MENTION = re.compile(r"<(a|h[1-6]|pre)\b.*?</\1>|<code>(use_replay|replay_\w+)[^<]*</code>", re.DOTALL)
UNREAD = re.compile(r"\[<code>\w+</code>\]")
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
NAME = re.compile(r"(?<=<code>)[^<]+(?=</code>)")


def on_config(config: Any) -> Any:
    """Adds a page for each preset to the navigation, below the methods."""
    (methods,) = [section["Methods"] for section in config.nav if "Methods" in section]
    methods += [{Path(page).stem: page} for page in generated.method_pages()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each preset, and the benchmarks' pictures."""
    for page, text in generated.method_pages().items():
        files.append(File.generated(config, page, content=text))
    for path in sorted(ROOT.glob("benchmarks/results/*.png")):
        files.append(File.generated(config, f"{PICTURES}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turns the links of a page that leave docs/.

    Raises:
        PluginError: One of them leads nowhere.
    """
    here = ROOT / "docs" / page.file.src_uri
    sources = generated.sources()

    def turned(link: re.Match[str]) -> str:
        path = (here.parent / link[2]).resolve()
        if not path.exists():
            raise PluginError(f"docs/{page.file.src_uri}: {link[2]} does not exist")
        if path.is_relative_to(ROOT / "docs"):
            return link[0]
        if path in sources and not page.file.src_uri.startswith("api/"):
            return link[1] + get_relative_url(sources[path], page.file.src_uri)
        if path.suffix == ".png":
            return link[1] + get_relative_url(f"{PICTURES}/{path.name}", page.file.src_uri)
        kind = "tree" if path.is_dir() else "blob"
        return f"{link[1]}{config.repo_url.rstrip('/')}/{kind}/main/{path.relative_to(ROOT).as_posix()}"

    if page.file.src_uri == STRATEGIES:
        markdown = _with_anchors(markdown)
    return LINK.sub(turned, markdown)


def _with_anchors(markdown: str) -> str:
    """Tables of strategies with an anchor for each: `evictor-heap`."""

    def anchored(section: re.Match[str]) -> str:
        kind = section[1].lower()
        return re.sub(r"^\| (?=\**`(\w+)`)", rf'| <span id="{kind}-\1"></span>', section[0], flags=re.MULTILINE)

    return re.sub(r"^## (\w+?)s?\n(?:(?!## ).*\n)+", anchored, markdown, flags=re.MULTILINE)


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Links the settings, and marks where a name in a table's cell may break.

    Raises:
        PluginError: A reference is no link: Python's Markdown reads [`name`][name], not [`name`] alone.
    """
    if unread := UNREAD.search(html):
        raise PluginError(f"docs/{page.file.src_uri}: {unread[0]} is no link")
    place = get_relative_url(f"{SETTINGS}.html", page.url)

    def linked(mention: re.Match[str]) -> str:
        if mention[2] not in generated.SETTINGS:
            return mention[0]
        return f'<a class="setting" href="{place}#{mention[2]}">{mention[0]}</a>'

    def breakable(name: re.Match[str]) -> str:
        return re.sub(r"(?<=\w)([_./=:,]|, )(?=\w|&quot;)", r"\1<wbr>", name[0])

    return CELL.sub(lambda cell: NAME.sub(breakable, cell[0]), MENTION.sub(linked, html))
