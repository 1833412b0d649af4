"""docs/write-repo.md: its plugin does what the page says, in a real trainer."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from installed import install
from support import DEAD, HALF, LIVE, Rewards, record

import trl_replay
from trl_replay.errors import RefusedError
from trl_replay.loss.supply import ROWS
from trl_replay.testing import make_trainer

PAGE = (Path(__file__).parents[2] / "docs" / "write-repo.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
(PLUGIN,) = (block for block in BLOCKS if block.startswith("# my_repo.py\n"))
(SUITE,) = (block for block in BLOCKS if "class TestVaried" in block)
PACKAGE = tomllib.loads(re.search(r"^```toml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)[1])
REWARDS = ([LIVE, HALF, DEAD], [HALF, LIVE, LIVE], [DEAD, LIVE, HALF], [LIVE, [1.0, 1.0, 1.0, 0.0], HALF], [HALF] * 3)
SIZE, FRESH = 4, 2


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """The plugin and its packaging exactly as the page has them, found by entry point; the preset's name."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "my_repo.py").write_text(PLUGIN)
    ((name, module),) = PACKAGE["project"]["entry-points"]["trl_replay"].items()
    install(folder, "my-repo", f"{name} = {module}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr("trl_replay.registry._registry", None)  # as in a process that begins after the installation
        yield re.search(r'replay_preset="(\w+/\w+)"', PAGE)[1]


def normalized(rewards):
    """TRL's advantages of rows that share a baseline, with `scale_rewards="group"`."""
    rewards = np.asarray(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)


def test_the_plugin_is_as_short_as_the_page_says():
    lines = [line for line in PLUGIN.splitlines() if line.strip() and not line.startswith("#")]
    assert f"has {len(lines)} lines" in PAGE
    assert len(lines) <= 25


def test_its_mixer_keeps_the_contract_that_the_page_tests():
    names = {}
    exec(PLUGIN, names)
    exec(SUITE, names)
    suite = names["TestVaried"]()
    for name in dir(suite):
        if name.startswith("test_"):
            getattr(names["TestVaried"](), name)()


def test_the_plugin_replays_rows_of_the_same_prompt_with_split_advantages(repo, tmp_path):
    rewards = Rewards(*REWARDS)
    trainer = make_trainer(tmp_path / "out", rewards, max_steps=8)
    with trl_replay.attached(trainer, replay_preset=repo) as session:
        steps = record(session)
        trainer.train()
        assert session.plugins == ["my_repo"]
        replayed = 0
        for number, (_, composed) in enumerate(steps):
            scripted = REWARDS[min(number, len(REWARDS) - 1)]
            stored = composed[ROWS][:, 0].numpy().reshape(-1, SIZE) < 0
            advantages = composed["advantages"].numpy().reshape(-1, SIZE)
            prompts = composed["prompt_ids"].reshape(len(scripted), SIZE, -1)
            assert (prompts == prompts[:, :1]).all(), "a row of another prompt in a group"
            for slot in np.flatnonzero(stored.any(axis=1)):
                assert stored[slot].tolist() == [False, False, True, True]
                fresh = normalized(scripted[slot][:FRESH])
                np.testing.assert_allclose(advantages[slot, :FRESH], fresh, atol=1e-5)
                np.testing.assert_allclose(advantages[slot, FRESH:], normalized([0, 1]), atol=1e-5)
                replayed += 1
        assert replayed == session.totals.counters["replaced"] > len(steps)
        assert session.totals.counters["lost"] == 0, "replay_record='forward' stores what is mixed into"


def test_what_the_page_looks_at_is_there(repo, tmp_path, capsys):
    trainer = make_trainer(tmp_path / "out", Rewards(*REWARDS), max_steps=8)
    attaching, *looking = [block for block in BLOCKS if block not in (PLUGIN, SUITE)]
    namespace = {"trl_replay": trl_replay, "trainer": trainer}
    exec(attaching, namespace)
    assert trl_replay.detach(trainer) is None
    namespace["session"] = trl_replay.attach(trainer, replay_preset=repo)
    trainer.train()
    for block in looking:
        exec(block, namespace)
    printed = capsys.readouterr().out
    for words in (
        " replaced",
        "x the mixer took no stored row for a slot",
        "x no group of a slot's prompt can be replayed",
    ):
        assert words in printed
        assert words in PAGE
    assert re.search(r"^ 1\.00  '", printed, re.MULTILINE), "a row of the entry with its reward"
    trl_replay.detach(trainer)


def test_a_sampler_that_promises_no_prompt_stops_before_training(repo, tmp_path):
    trainer = make_trainer(tmp_path / "out", Rewards([LIVE] * 3))
    with pytest.raises(RefusedError, match="the same prompt"):
        trl_replay.attach(trainer, replay_preset=repo, replay_sampler="uniform")
