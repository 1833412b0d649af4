"""docs/by-symptom.md and the pages that it leads to keep up with the code: every example can be used."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from generating import PROMPTS, Coins
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.loss.supply import ROWS
from trl_replay.testing import make_trainer

DOCS = Path(__file__).parents[2] / "docs"
CHOOSING = (DOCS / "by-symptom.md").read_text()
OTHERS = "".join((DOCS / name).read_text() for name in ("dynamic-sampling.md", "replayed-groups.md"))
EXAMPLES = re.findall(r"^```python\n(.*?)^```", OTHERS, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _a_file_to_start_from(tmp_path, monkeypatch):
    """The one that the examples of `replay_warm_start` name."""
    (tmp_path / "groups.parquet").touch()
    monkeypatch.chdir(tmp_path)


def settings_in(text):
    """Every `replay_name=value` (or use_replay) between backticks, with its value."""
    found = re.findall(r"`((?:use_replay|replay_\w+))=([^`]+)`", text)
    return [(name, ast.literal_eval(value)) for name, value in found]


def test_every_setting_of_the_decision_table_can_be_used():
    section = re.search(r"^### A decision table\n(.*?)^### ", CHOOSING, re.MULTILINE | re.DOTALL)[1]
    examples = settings_in(section)
    assert len(examples) > 5
    for name, value in examples:
        trl_replay.ReplayConfig(**{name: value})


@pytest.mark.parametrize("example", [example for example in EXAMPLES if "replay_refill" in example])
def test_what_generates_again_attaches_and_trains_as_it_stands(tmp_path, example):
    rewards = Coins(0.5)
    namespace = {"trainer": make_trainer(tmp_path, rewards, PROMPTS), "trl_replay": trl_replay}
    exec(example, namespace)
    namespace["trainer"].train()
    session = namespace["session"]
    assert session.totals.counters["refilled"] > 0
    assert bool(session.buffer.capacity) == ("replay_buffer_size=0" not in example)


def test_the_plugin_with_advantages_of_its_own_shapes_them_without_a_buffer(tmp_path):
    """The two shortest rows of each group are trained on, normalized among themselves; the others are masked."""
    (example,) = [example for example in EXAMPLES if "trl_replay_advantages" in example]
    trainer = make_trainer(tmp_path / "out", Rewards([LIVE, HALF, DEAD]), max_steps=2)
    namespace = {"trainer": trainer}
    trained = []
    try:
        exec(example, namespace)
        session = namespace["session"]
        step = session.step.take
        session.step.take = lambda *batch: trained.append(step(*batch)) or trained[-1]
        trainer.train()
    finally:
        trl_replay.detach(trainer)
        trl_replay.unregister("shortest")
    for batch in trained:
        masked = (batch[ROWS][:, 1].numpy() > 1).reshape(-1, 4)
        advantages = batch["advantages"].numpy().reshape(-1, 4)
        lengths = batch["completion_mask"].sum(dim=1).numpy().reshape(-1, 4)
        assert masked.sum(axis=1).tolist() == [2, 2, 2]
        assert (advantages[masked] == 0).all()
        for group, left_out in zip(lengths, masked, strict=True):
            assert group[~left_out].max() <= group[left_out].min()
        np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-6)
    assert len(session.buffer) == 0
    assert session.enabled
