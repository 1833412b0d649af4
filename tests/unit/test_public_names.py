"""Public names of `import trl_replay`."""

import importlib
import re
from pathlib import Path

import pytest

import trl_replay

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api" / "session.md"


def test_every_public_name_can_be_imported_and_is_listed():
    assert len(set(trl_replay.__all__)) == len(trl_replay.__all__)
    for name in trl_replay.__all__:
        assert getattr(trl_replay, name) is not None
    modules = {module.name for module in importlib.resources.files("trl_replay").iterdir()}
    public = {
        name
        for name in dir(trl_replay)
        if not name.startswith("_") and f"{name}.py" not in modules and name not in modules
    }
    assert public - {"annotations", "TYPE_CHECKING", "Any"} == set(trl_replay.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        trl_replay.no_such_name  # noqa: B018


def test_a_session_documents_no_more_than_25_names_and_the_step_is_one_of_them():
    attributes = re.findall(r"^        (\w+) \(", trl_replay.Session.__doc__, flags=re.MULTILINE)
    methods = re.findall(r"^        - (\w+)$", PAGE.read_text(), flags=re.MULTILINE)
    assert "step" in attributes
    assert all(hasattr(trl_replay.Session, name) for name in methods)
    assert len({*attributes, *methods}) <= 25
