"""Look at the site and at a report in a real browser: `make site-check`.

Every page of out/site and a `trl-replay report` of two tiny runs are opened in headless Chromium, through its DevTools
protocol: no page is wider than a window of 1280, 390, or 330 pixels, none logs an error, and the search finds what
people look for. Links are those that `make docs` has checked. Pictures of some pages are in out/site-check.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tornado.websocket import websocket_connect

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out"
SITE = OUT / "site"
PICTURES = OUT / "site-check"
REPORT = PICTURES / "report.html"
WIDTHS = (1280, 390, 330)
HEIGHT = 900
WORDS = ("wandb", "curriculum", "dynamic sampling", "all wrong")
SHOWN = ("index.html", "methods.html", "methods/popo.html", "reference/settings.html", "reference/strategies.html")
REMOTE = "https://api.github.com/"
"""What the theme asks for the repository's stars, of no use without a network."""
PATIENCE = 60
"""Seconds for a browser to start, a page to load, or a search to answer."""
INSTALL = "There is no chromium. Install it (Debian: apt-get update && apt-get install -y chromium), or set CHROMIUM."
RUNS = """
import sys
from trl_replay import attach
from trl_replay.testing import make_trainer
for seed, folder in enumerate(sys.argv[1:]):
    trainer = make_trainer(folder, lambda completions, **_: [float(len(text) % 3 == 0) for text in completions],
                           max_steps=12, save_strategy="steps", save_steps=12, logging_steps=1, seed=seed)
    attach(trainer)
    trainer.train()
"""
WIDEST = """(() => {
    const page = document.scrollingElement
    if (page.scrollWidth <= window.innerWidth) return null
    const scrolls = each => each && each !== page && each !== document.body &&
        (getComputedStyle(each).overflowX !== "visible" || scrolls(each.parentElement))
    const wide = [...document.body.querySelectorAll("*")]
        .filter(each => each.getBoundingClientRect().right > window.innerWidth + 1 && !scrolls(each.parentElement))
        .map(each => `${each.tagName.toLowerCase()}.${each.className} ${each.textContent.trim().slice(0, 40)}`)
    return `${page.scrollWidth} pixels: ${wide.slice(0, 3).join("; ")}`
})()"""
FOUND = "document.querySelectorAll('.md-search-result__item').length"


class Tab:
    """A tab of the browser: calls of the DevTools protocol, and what the page logs as an error."""

    def __init__(self, connection):
        self._connection = connection
        self._calls = 0
        self.errors: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        self._calls += 1
        await self._connection.write_message(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while (message := await self._next()).get("id") != self._calls:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        while (await self._next()).get("method") != "Page.loadEventFired":
            pass

    async def evaluate(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    async def resize(self, width: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=False
        )

    async def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))

    async def _next(self) -> dict[str, Any]:
        text = await asyncio.wait_for(self._connection.read_message(), PATIENCE)
        if text is None:
            raise RuntimeError("the browser is gone")
        message: dict[str, Any] = json.loads(text)
        if error := _error(message.get("method"), message.get("params", {})):
            self.errors.append(error)
        return message


def _error(event: str | None, told: dict[str, Any]) -> str | None:
    """The error that an event tells of."""
    if event == "Runtime.exceptionThrown":
        return str(told["exceptionDetails"].get("exception", {}).get("description", told["exceptionDetails"]["text"]))
    if event == "Log.entryAdded" and told["entry"]["level"] == "error":
        url = str(told["entry"].get("url", ""))
        return None if url.startswith(REMOTE) else f"{told['entry']['text']} {url}"
    if event == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
        return " ".join(str(each.get("value", each.get("description"))) for each in told["args"])
    return None


@contextmanager
def browser() -> Iterator[str]:
    """Headless Chromium; the address of its first tab."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit(INSTALL)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command = [program, *options, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield _tab_of(Path(profile) / "DevToolsActivePort")
        finally:
            process.terminate()
            process.wait()


def _tab_of(told: Path) -> str:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if told.is_file() and (lines := told.read_text().split()):
            with urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                if tabs := [tab for tab in json.load(answer) if tab["type"] == "page"]:
                    return str(tabs[0]["webSocketDebuggerUrl"])
        time.sleep(0.2)
    sys.exit("chromium did not start")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder as a web site; its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def make_report():
    """A report of two tiny runs."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [str(Path(folder) / name) for name in ("first", "second")]
        for command in (["-c", RUNS, *runs], ["-m", "trl_replay", "report", *runs, "--html", str(REPORT)]):
            done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"There is no report:\n{done.stderr}")


async def problems(tab: Tab, address: str) -> list[str]:
    """Lists what is wrong with the pages."""
    for domain in ("Page", "Runtime", "Log"):
        await tab.call(f"{domain}.enable")
    found: list[str] = []
    pages = [page for page in sorted(SITE.rglob("*.html")) if page != SITE / "404.html"]  # which needs a domain
    for path in [*pages, REPORT]:
        url = address + path.relative_to(OUT).as_posix()
        found += [f"{path.relative_to(OUT)}: {problem}" for problem in await of_page(tab, url, path)]
    missed = [f"the search does not find {word!r}" for word in WORDS if not await finds(tab, address, word)]
    return found + missed


async def of_page(tab: Tab, url: str, path: Path) -> list[str]:
    """Lists what is wrong with a page by itself: its errors, and where it is too wide."""
    tab.errors.clear()
    await tab.resize(WIDTHS[0])
    await tab.open(url)
    found = []
    for width in WIDTHS:
        await tab.resize(width)
        if widest := await tab.evaluate(WIDEST):
            found.append(f"too wide for {width} pixels: {widest}")
        if path == REPORT or path.relative_to(SITE).as_posix() in SHOWN:
            await tab.picture(PICTURES / f"{path.stem}-{width}.png")
    return found + tab.errors


async def finds(tab: Tab, address: str, word: str) -> bool:
    """Tells whether the search has a result."""
    await tab.open(f"{address}site/index.html?q={word.replace(' ', '+')}")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if await tab.evaluate(FOUND):
            return True
        await asyncio.sleep(0.2)
    return False


async def main() -> int:
    with browser() as tab, served(OUT) as address:
        make_report()
        found = await problems(Tab(await websocket_connect(tab, max_message_size=2**28)), address)
    print("\n".join(found) or f"every page fits {', '.join(map(str, WIDTHS))} pixels")
    return bool(found)


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    sys.exit(asyncio.run(main()))
