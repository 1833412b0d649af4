"""Launches of the ranks of a test file, which are in a module of that name."""

import pytest


@pytest.fixture(scope="module")
def launches(request, tmp_path_factory):
    """The results of every rank of so many, by case."""
    from launches import Launches

    module = request.module.__name__.rpartition("test_")[2]
    return Launches(module, tmp_path_factory.mktemp(module))
