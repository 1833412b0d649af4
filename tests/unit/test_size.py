"""Every room of the code has a ceiling, so that what is added is paid for by what is taken away."""

import ast
import io
import sys
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
CEILINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["trl_replay"]["ceilings"]
TOTAL = 320_400
"""Of all rooms together. It stands here and not beside them, so that raising a room is not enough."""
HOW = (
    'Take as much out elsewhere, with a line in the changelog\'s "Removed", or lower what is added: CONTRIBUTING.md, '
    '"When not to add". The ceilings stand in pyproject.toml, [tool.trl_replay.ceilings].'
)


@cache
def code_tokens(source):
    """Tokens of a module but for comments, docstrings, brackets, commas, and layout."""
    documentation = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    return sum(
        token.type not in LEFT_OUT and token.start[0] not in documentation and token.string not in ",()[]{}"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def rooms() -> dict[str, list[Path]]:
    """Files of each room: a folder or module of the package, a plugin, tests, benchmarks, examples, docs."""
    found: dict[str, list[Path]] = {}
    for path in sorted(ROOT.glob("*/**/*.py")):
        parts = path.relative_to(ROOT).parts
        if parts[0] in ("trl_replay", "plugins", "tests", "benchmarks", "examples", "docs"):
            found.setdefault("/".join(parts[: 1 + (parts[0] in ("trl_replay", "plugins"))]), []).append(path)
    return found


@cache
def sizes() -> dict[str, int]:
    """Code tokens of each room: not asked for before a test runs, since counting takes seconds."""
    counted = {
        room: sum(code_tokens(path.read_text(encoding="utf-8")) for path in paths) for room, paths in rooms().items()
    }
    return {room: size for room, size in counted.items() if size}


def test_tokens_are_counted_without_comments_docstrings_and_layout():
    source = 'def f(a, b):  # adds\n    """Add."""\n    return a + b\n'
    assert code_tokens(source) == len(["def", "f", "a", "b", ":", "return", "a", "+", "b"])


@pytest.mark.parametrize("room", sorted({*CEILINGS["rooms"], *rooms()}))
def test_a_room_is_no_larger_than_its_ceiling(room):
    assert room in CEILINGS["rooms"] or not sizes().get(room), f"{room} is new, and has no ceiling. {HOW}"
    assert sizes().get(room) or room not in CEILINGS["rooms"], f"{room} is gone: take its ceiling away"
    size, ceiling = sizes().get(room, 0), CEILINGS["rooms"].get(room, 0)
    assert size <= ceiling, f"{room} has {size} code tokens. {HOW}"


@pytest.mark.parametrize("room", CEILINGS["rooms"])
def test_a_ceiling_leaves_little_slack(room):
    """At most 2 percent, or 60 tokens of a small room: what was taken away stays away."""
    slack = CEILINGS["rooms"][room] - sizes().get(room, 0)
    assert slack <= max(0.02 * sizes().get(room, 0), 60), f"lower the ceiling of {room} to {sizes().get(room, 0)}"


def test_all_rooms_together_are_no_larger_than_the_total():
    assert sum(CEILINGS["rooms"].values()) <= TOTAL


def test_there_are_no_more_modules_settings_and_files_of_a_batch_than_allowed():
    from trl_replay.setup.config import ReplayConfig

    modules = [path for path in (ROOT / "trl_replay").rglob("*.py") if code_tokens(path.read_text(encoding="utf-8"))]
    settings = ReplayConfig.__dataclass_fields__
    assert len(modules) <= CEILINGS["modules"], HOW
    assert len(settings) <= CEILINGS["settings"], HOW


if __name__ == "__main__":  # writes today's sizes as ceilings, for a commit that lowers them
    sys.stdout.write("".join(f'"{room}" = {size + 25}\n' for room, size in sizes().items()))
