"""TRL's asynchronous trainer, for tests that ask for it: not every release ships it."""

import pytest


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """A tiny model on disk."""
    from queued import make_policy

    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def queued(policy, tmp_path, monkeypatch):
    """Makes trainers whose workers play a script, attached; `folder` is a name."""
    from queued import Queued, stand_in

    stand_in(monkeypatch)
    return lambda *groups, folder="run", **settings: Queued(tmp_path / folder, policy, *groups, **settings)
