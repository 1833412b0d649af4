"""Launches of the ranks of a test file, which are in a module of that name."""

import pytest
from launches import Launches  # with it, `forked`: tests/conftest.py prepares that once tests are collected


@pytest.fixture(scope="module")
def launches(request, tmp_path_factory):
    """The results of every rank of so many, by case."""
    module = request.module.__name__.rpartition("test_")[2]
    return Launches(module, tmp_path_factory.mktemp(module))
