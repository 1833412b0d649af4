"""Tests with vLLM itself, which `make vllm` installs beside `.venv`: elsewhere they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of this folder."""
    if find_spec("vllm") is None:
        for item in items:
            if "with_vllm" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: `make vllm` runs this"))


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM in this process, with what the test module sets in `ENGINE`."""
    from real_vllm import Engine

    with pytest.MonkeyPatch.context() as patch:
        yield Engine(tmp_path_factory.mktemp("vllm"), patch, **request.module.ENGINE)
