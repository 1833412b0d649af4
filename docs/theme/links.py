"""Extend what mkdocs does to our pages.

The page of methods is made of their cards. Links that leave docs/ lead to the repository, and pictures from outside
come along: so the same Markdown leads somewhere on a site that shows the repository and on the one that mkdocs builds.
Names in tables may break after an underscore, a dot, and the like.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
PICTURES = "pictures"
LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )((?:\.\./)+[^)#\s]+)", re.MULTILINE)
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
NAME = re.compile(r"(?<=<code>)[^<]+(?=</code>)")


def on_files(files: Files, config: Any) -> Files:
    """Add the page of methods, and the benchmarks' pictures."""
    sys.path[:0] = [str(ROOT), *map(str, ROOT.glob("plugins/*/src"))]  # mkdocs takes back what a hook's module adds
    from trl_replay_papers.__main__ import page

    files.append(File.generated(config, "papers.md", content=page()))
    for path in sorted(ROOT.glob("benchmarks/results/*.png")):
        files.append(File.generated(config, f"{PICTURES}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turns the links of a page that leave docs/.

    Raises:
        PluginError: One of them leads nowhere.
    """
    here = ROOT / "docs" / page.file.src_uri

    def turned(link: re.Match[str]) -> str:
        path = (here.parent / link[2]).resolve()
        if not path.exists():
            raise PluginError(f"docs/{page.file.src_uri}: {link[2]} does not exist")
        if path.is_relative_to(ROOT / "docs"):
            return link[0]
        if path.suffix == ".png":
            return link[1] + get_relative_url(f"{PICTURES}/{path.name}", page.file.src_uri)
        kind = "tree" if path.is_dir() else "blob"
        return f"{link[1]}{config.repo_url.rstrip('/')}/{kind}/main/{path.relative_to(ROOT).as_posix()}"

    return LINK.sub(turned, markdown)


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Marks where a name in a table's cell may break."""

    def breakable(name: re.Match[str]) -> str:
        return re.sub(r"(?<=\w)([_./=:,]|, )(?=\w|&quot;)", r"\1<wbr>", name[0])

    return CELL.sub(lambda cell: NAME.sub(breakable, cell[0]), html)
