"""Public names of `import trl_replay`."""

import importlib

import pytest

import trl_replay


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
