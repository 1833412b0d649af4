"""Every preset: it trains, writes a checkpoint, and resumes as if it had not stopped, on one process and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import check, launch
from one_rank import read
from replaying import Watch
from resuming import interrupted, train
from support import DEAD, HALF, Rewards, Spy
from trl_replay_papers import METHODS, NEED_A_FILE, WITHOUT_MEMORY, card
from trl_replay_papers.cards import SECTIONS, parsed, text_of
from trl_replay_papers.exgrpo import ExGRPO
from trl_replay_papers.rl_zvp import RlZvp
from trl_replay_papers.sign_advantage import SignAdvantage

import trl_replay
from trl_replay import ConfigurationError, hookimpl
from trl_replay.base.validation import Named
from trl_replay.cli import main
from trl_replay.errors import RefusedError
from trl_replay.registry import registry
from trl_replay.testing import make_trainer

FOLDER = Path(trl_replay.__file__).parents[1]
LIMIT = 300
"""Seconds after which a launch counts as hanging."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: Any) -> str:
    """A file of groups, for the methods that replay what another run wrote."""
    folder = tmp_path_factory.mktemp("pool")
    _, session = train(folder, max_steps=6, save_strategy="no", replay_buffer_size=20, seed=5)
    return str(session.export(folder / "pool.parquet"))


SHORT: dict[str, dict[str, Any]] = {
    "adv_per": {"replay_start": 1},
    "asymre": {"num_iterations": 2, "max_steps": 8},
    "oapl": {"num_iterations": 2, "max_steps": 8},
    "popo_stale": {"replay_sampler": "popo_stale/oldest(least_age=2)"},
    "exgrpo": {"replay_start": "pass_rate(0.01)"},
    "fair_er": {"num_iterations": 2, "max_steps": 8},
    "dapo": {"replay_refill": "new(rounds=2)"},
    "re_dr": {"scale_rewards": "none"},
    "greso": {"replay_refill": "new(rounds=2)"},
}
"""What would not begin within six updates, generates much, or needs a setting of the trainer."""


def settings_of(name: str, pool: str) -> dict[str, Any]:
    """Of a run of six updates."""
    settings = {"replay_preset": name, "max_steps": 6, **SHORT.get(name, {})}
    settings["replay_buffer_size"] = 0 if name in WITHOUT_MEMORY else 20
    return {**settings, "replay_warm_start": pool} if name in NEED_A_FILE else settings


@pytest.mark.parametrize("name", METHODS)
def test_a_preset_trains_and_resumes_bit_identically(name: str, pool: str, tmp_path: Path) -> None:
    whole, differences = interrupted(tmp_path, **settings_of(name, pool))
    assert not differences
    counters = whole["totals"][1]
    assert counters["stored"] == 0 if name in WITHOUT_MEMORY else counters["replaced"] + counters["iterated"] > 0


def test_every_preset_trains_and_resumes_on_two_processes(pool: str, tmp_path: Path) -> None:
    shorter = {"replay_scope": "gathered", "max_steps": 4}
    runs = {name: {**settings_of(name, pool), **shorter} for name in METHODS}
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    check(launch(Path(__file__).parent / "ranks" / "papers_ranks.py", tmp_path, limit=LIMIT, local_ranks=(0, 1)))
    for name in METHODS:
        ranks = [read(tmp_path / f"{name}.{rank}.json") for rank in (0, 1)]
        for found in ranks:
            assert found["differences"] == [], name
            assert found["replaced"] or name in WITHOUT_MEMORY, name
        assert ranks[0]["weights"] == ranks[1]["weights"], name


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("exgrpo", {"share": 0.25}),
        ("gfpo", {"keep": 3, "by": "efficiency"}),
        ("ragen2", {"p": 0.8}),
        ("rl_zvp", {"alpha": 0.05}),
        ("sign_advantage", {"pass_reward": 1.0}),
    ],
)
def test_a_preset_whose_plugin_gets_other_arguments_trains_and_resumes(
    name: str, arguments: dict[str, Any], pool: str, tmp_path: Path
) -> None:
    _, differences = interrupted(tmp_path, **settings_of(name, pool), replay_plugins=[str(Named(name, arguments))])
    assert not differences


class MasksTheSecondRow:
    """A plugin that lets one row of each group train nothing."""

    @hookimpl
    def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
        return np.where(np.arange(groups.advantages.shape[1]) == 1, np.nan, groups.advantages)


@pytest.mark.parametrize("name", ["arpo", "exgrpo", "repo", "adv_per"])
def test_rows_that_another_plugin_masks_are_not_taken(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards([HALF] * 3, [HALF] * 3, [DEAD] * 3), max_steps=6, trainer_class=Spy)
    trl_replay.register(MasksTheSecondRow(), "masks_the_second_row")
    try:
        settings = {"replay_preset": name, **SHORT.get(name, {}), "replay_plugins": ["masks_the_second_row"]}
        if name == "repo":
            settings["replay_mixer"] = "repo/cached(by='random')"
        session = trl_replay.attach(trainer, **settings)
        watch = Watch(session, 4, trainer._tokenizer.pad_token_id)
        trainer.train()
    finally:
        trl_replay.unregister("masks_the_second_row")
    taken = [row for step in watch.taken for _, row in step.values()]
    assert taken
    assert 1 not in taken


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replay_preset": "arpo", "replay_selector": "arpo/failed(std='low')"}, "failed: std='low' can't be used"),
        ({"replay_preset": "arpo", "replay_selector": "arpo/failed(mean=None)"}, "failed: mean=None can't be used"),
        ({"replay_preset": "arpo", "replay_mixer": "arpo/one_success(reward='1')"}, "reward='1' can't be used"),
        ({"replay_preset": "rlep", "replay_mixer": "rlep/successes(reward=inf)"}, "reward=inf can't be used"),
        ({"replay_preset": "pop"}, "Did you mean 'popo'"),
    ],
)
def test_a_setting_that_can_not_be_used_is_named(
    settings: dict[str, Any], text: str, pool: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, lambda completions, **_: [0.0] * len(completions))
    with pytest.raises(ConfigurationError, match=text):
        trl_replay.attach(trainer, replay_warm_start=pool, **settings)


@pytest.mark.parametrize("method", [ExGRPO, RlZvp, SignAdvantage])
@pytest.mark.parametrize("value", [np.nan, "1", None])
def test_a_pass_reward_that_is_no_number_is_named(method: Any, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{method.__name__}: pass_reward={value!r} can't be used"):
        method(pass_reward=value)


@pytest.mark.parametrize("name", NEED_A_FILE)
def test_a_preset_that_replays_another_runs_groups_asks_for_the_file(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, lambda completions, **_: [0.0] * len(completions))
    with pytest.raises(RefusedError, match=f"{name}.*replay_warm_start"):
        trl_replay.attach(trainer, replay_preset=name)


@pytest.mark.parametrize("name", METHODS)
def test_a_card_has_all_its_sections_and_its_preset_is_on_offer(name: str, capsys: Any) -> None:
    found = card(name)
    assert found.name == name
    assert all(found.sections[section] for section in SECTIONS)
    assert "<!--" not in found.sections["Measured here"]
    plugin, preset = registry().preset(name)
    assert plugin.name == name, "the plain name means the method's own plugin"
    assert main(["list", name]) == 0
    shown = capsys.readouterr().out
    assert preset.summary in shown
    assert text_of(name).strip() in shown


def test_there_is_a_card_for_every_method_and_no_other() -> None:
    own = (FOLDER / "plugins" / "trl-replay-papers" / "src" / "trl_replay_papers").glob("*/card.md")
    curricula = (FOLDER / "plugins" / "trl-replay-curricula" / "src" / "trl_replay_curricula" / "cards").glob("*.md")
    names = [*(path.parent.name for path in own), *(path.stem for path in curricula)]
    assert sorted(names) == sorted(METHODS)


def test_a_card_without_its_form_is_told_what_is_missing() -> None:
    text = text_of("popo")
    with pytest.raises(ValueError, match="begins with"):
        parsed(text[1:])
    with pytest.raises(ValueError, match="has the headings"):
        parsed(text.replace("## Faithful", "## True"))
    with pytest.raises(ValueError, match="has the level 'planets'"):
        parsed(text.replace("\nLevel: groups", "\nLevel: planets"))
