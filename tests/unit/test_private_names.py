"""Private names of TRL's stand in compat.py, each with its reason, and nowhere else in the package."""

import ast
from pathlib import Path

import pytest

import trl_replay
from trl_replay import compat

PACKAGE = Path(trl_replay.__file__).parent
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "compat.py"]
NAMES = {name for name in (*compat.SEAM, *compat.ATTRIBUTES) if name.startswith("_")}
NAMES |= {compat.BUFFERED, compat.LIGER_LOSS, compat.REFERENCE_SYNC}
OWNERS = ("trainer", "model", "accelerator", "callback_handler")
"""What the objects of TRL and of the libraries beneath it are called here."""


def private_names(tree):
    """Lists where a syntax tree names something private, as `line: what`; parts of f-strings do not count."""
    texts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if (node.attr in NAMES and owner != "self") or (private and owner in OWNERS):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and node.value in NAMES and node not in texts:
            yield f"{node.lineno}: {node.value!r}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_module_names_nothing_private_of_trls(path):
    found = list(private_names(ast.parse(path.read_text(encoding="utf-8"))))
    assert not found, f"{path.relative_to(PACKAGE)} names what belongs into compat.py: {found}"


@pytest.mark.parametrize("code", ["self.trainer._logs", "owner._metrics", 'getattr(trainer, "_buffered_inputs")'])
def test_a_private_name_is_found_however_it_is_written(code):
    assert list(private_names(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["self._metrics", "trainer.__dict__", "trainer.model.training", "session._trainer()", "f'{p}_metrics'"]
)
def test_names_of_our_own_are_none_of_trls(code):
    assert not list(private_names(ast.parse(code)))


def test_only_compat_asks_which_release_is_installed():
    """Differences between releases are handled in one place."""
    asking = [path.name for path in MODULES if 'version("trl")' in path.read_text(encoding="utf-8")]
    assert asking == []
