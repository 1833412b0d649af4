"""The README keeps up with the code."""

from __future__ import annotations

import re
from pathlib import Path

from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.registry import registry
from trl_replay.testing import make_trainer


def test_the_readmes_plugin_works_as_it_stands(tmp_path, monkeypatch):
    """The very code of the README becomes an installed distribution's module, and trains."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    module = re.search(r"```python\n# my_replay\.py\n(.*?)```", readme, re.DOTALL)[1]
    entry_points = re.search(r"\[project\.entry-points\.trl_replay\]\n(.*?)\n```", readme, re.DOTALL)[1]
    (tmp_path / "my_replay.py").write_text(module)
    info = tmp_path / "my_replay-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-replay\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[trl_replay]\n{entry_points.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(tmp_path)
    setting = re.search(r'Then `(replay_evictor)="([^"]+)"`', readme)
    trainer = make_trainer(tmp_path / "out", Rewards([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE]))
    try:
        with trl_replay.attached(trainer, **{setting[1]: setting[2]}, replay_buffer_size=3) as session:
            trainer.train()
    finally:
        if "mine" in registry().plugins:
            trl_replay.unregister("mine")
    assert session.plugins == ["mine"]
    assert session.totals.counters["evicted"] > 0


def test_the_readme_names_every_built_in_strategy_and_setting():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for plugin, spec in registry().strategies():
        if plugin.name == "builtin":
            assert f"`{spec.name}`" in readme, f"the README does not name {spec.name}"
