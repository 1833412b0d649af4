"""Failures 52 to 56 of docs/known-failures.md: what a second attack found, on one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import DEAD, HALF, LIVE, Rewards, Spy

import trl_replay
from trl_replay import ConfigurationError, Corrected, ReplayError, ResultError, hookimpl
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE], [LIVE, DEAD, DEAD])


class Detaching:
    """Detaches in one hook, once something was stored."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.trainer: Any = None

    def _in(self, hook: str, context: Any) -> None:
        if hook == self.hook and context.update == 2 and self.trainer is not None:
            trl_replay.detach(self.trainer)

    @hookimpl
    def trl_replay_select(self, groups: Any, context: Any) -> None:
        self._in("select", context)

    @hookimpl
    def trl_replay_sample(self, table: Any, count: int, context: Any) -> None:
        self._in("sample", context)

    @hookimpl
    def trl_replay_rank(self, table: Any, context: Any) -> None:
        self._in("rank", context)

    @hookimpl(wrapper=True)
    def trl_replay_compose(self, batch: Any, placements: Any, context: Any) -> Any:
        composed = yield
        self._in("compose", context)
        return composed

    @hookimpl
    def trl_replay_metrics(self, context: Any) -> dict[str, float]:
        self._in("metrics", context)
        return {}


@pytest.fixture
def plugged() -> Any:
    """Registers plugins for a test."""
    names: list[str] = []

    def plug(plugin: Any) -> str:
        names.append(f"attack{len(names)}")
        trl_replay.register(plugin, names[-1])
        return names[-1]

    yield plug
    for name in names:
        trl_replay.unregister(name)


@pytest.mark.parametrize("hook", ["select", "sample", "rank", "compose", "metrics"])
def test_52_detach_inside_a_hook_trains_on_the_trainers_own_batch(
    tmp_path: Path, plugged: Callable[[Any], str], hook: str
) -> None:
    plugin = Detaching(hook)
    plugin.trainer = make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=Spy, max_steps=4)
    trl_replay.attach(plugin.trainer, replay_plugins=[plugged(plugin)], replay_start=0, replay_buffer_size=1)
    plugin.trainer.train()
    assert "_compute_loss" not in plugin.trainer.__dict__, "it was detached"
    for loss in plugin.trainer.losses[2:]:
        assert "trl_replay_rows" not in loss["inputs"]
        assert loss["inputs"]["completion_ids"] is not None
    scored = plugin.trainer.scored[2]
    trained = plugin.trainer.losses[2]["inputs"]
    assert sorted(scored["advantages"].tolist()) == sorted(trained["advantages"].tolist()), "no row was exchanged"


def test_52_detach_inside_a_reward_function_ends_in_peace(tmp_path: Path) -> None:
    scripted = Rewards(*SCRIPT)

    def rewards(completions: list[str], **kwargs: Any) -> list[Any]:
        if scripted.calls == 2:
            trl_replay.detach(trainer)
        return scripted(completions, **kwargs)

    trainer = make_trainer(tmp_path, rewards, max_steps=4)
    trl_replay.attach(trainer, replay_start=0)
    trainer.train()
    assert trainer.state.global_step == 4


class InPlace:
    @hookimpl
    def trl_replay_compose(self, batch: Any, placements: Any, context: Any) -> Any:
        for placed in placements:
            batch["advantages"][placed.rows] = placed.group.tensors["advantages"][placed.part]
        return batch


class Meddling:
    """Changes one key of a fresh row, or of a replayed one."""

    def __init__(self, key: str, replayed: bool) -> None:
        self.key = key
        self.replayed = replayed

    @hookimpl(wrapper=True)
    def trl_replay_compose(self, batch: Any, placements: Any, context: Any) -> Any:
        composed = yield
        placed = {row for each in placements for row in range(each.start, each.start + each.count)}
        row = next(row for row in range(12) if (row in placed) == self.replayed)
        changed = composed[self.key].clone()
        changed[row] += 1
        return {**composed, self.key: changed}


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (InPlace(), "the batch itself"),
        (Meddling("advantages", replayed=False), "'advantages' with changed values of fresh rows"),
        (Meddling("prompt_ids", replayed=False), "'prompt_ids' with changed values of fresh rows"),
        (Meddling("completion_mask", replayed=False), "'completion_mask' with changed values of fresh rows"),
        (Meddling("advantages", replayed=True), "without the group placed there"),
    ],
)
def test_53_a_compose_hook_leaves_fresh_rows_and_the_batch_as_they_are(
    tmp_path: Path, plugged: Callable[[Any], str], plugin: Any, words: str
) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3)
    trl_replay.attach(trainer, replay_plugins=[plugged(plugin)], replay_start=0)
    with pytest.raises(ResultError, match=words):
        trainer.train()


class Writing:
    """Writes into what a selector is given."""

    @hookimpl
    def trl_replay_select(self, groups: Any, context: Any) -> None:
        groups.rewards[:] = 777.0


def test_54_what_scorers_and_selectors_see_can_only_be_read(tmp_path: Path, plugged: Callable[[Any], str]) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    trl_replay.attach(trainer, replay_plugins=[plugged(Writing())])
    with pytest.raises(trl_replay.HookError, match="read-only"):
        trainer.train()


class Unmasking:
    """Empties the mask by which its own result is checked."""

    @hookimpl
    def trl_replay_correct(self, rows: Any, context: Any) -> Corrected:
        rows.mask[:] = False
        return Corrected(torch.full_like(rows.logps, float("nan")))


class Heavy:
    """Weights that float64 holds and float32 does not."""

    @hookimpl
    def trl_replay_correct(self, rows: Any, context: Any) -> Corrected:
        return Corrected(rows.behavior_logps, torch.full((len(rows.ages),), 1e300, dtype=torch.float64))


@pytest.mark.parametrize(
    ("plugin", "words"), [(Unmasking(), "old_logps that are not finite"), (Heavy(), "finite weights")]
)
def test_54_a_correction_is_checked_by_what_it_was_given_and_in_the_type_that_is_applied(
    tmp_path: Path, plugged: Callable[[Any], str], plugin: Any, words: str
) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3)
    trl_replay.attach(trainer, replay_plugins=[plugged(plugin)], replay_start=0)
    with pytest.raises(ResultError, match=words):
        trainer.train()


@pytest.mark.parametrize(
    "settings",
    [
        {"replay_weight": 1e39},
        {"replay_max_weight": 1e39},
        {"replay_samples_per_insert": 1e308},
        {"replay_correction": "truncated", "replay_correction_kwargs": {"cap": 1e300}},
        {"replay_correction": "shaped", "replay_correction_kwargs": {"gamma": 1e300}},
    ],
)
def test_55_numbers_that_no_weight_can_be_are_refused_at_attach(tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    with pytest.raises(ConfigurationError, match=r"can't be used: .*give a number"):
        trl_replay.attach(trainer, **settings)


def row(text: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": "1=", "completion": text, **columns}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row(text, reward=1e-300 * (text == "2")) for text in "2345"], "its rewards do not differ"),
        (
            [
                row(
                    text,
                    reward=float(text == "2"),
                    prompt_ids=[4],
                    completion_ids=[6],
                    old_per_token_logps=[-1.0],
                    tool_mask=[0],
                )
                for text in "2345"
            ],
            "it has no trainable token",
        ),
    ],
)
def test_55_groups_from_files_that_teach_nothing_are_refused_and_counted(
    tmp_path: Path, rows: list[dict[str, Any]], reason: str
) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    session = trl_replay.attach(trainer)
    assert session.buffer.add(rows) == 0
    assert any(reason in told for told in session.totals.reasons)


@pytest.mark.parametrize("source", [None, 5])
def test_55_a_source_that_holds_no_rows_is_named(tmp_path: Path, source: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    session = trl_replay.attach(trainer)
    with pytest.raises(ReplayError, match=f"{source!r} can't be read: give a path, or rows"):
        session.buffer.add(source)
    with pytest.raises(ReplayError, match="which is no number"):
        session.buffer.add([row("2", reward=10**400)])


def test_56_a_storage_folder_that_was_deleted_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", Rewards(*SCRIPT), max_steps=4)
    session = trl_replay.attach(
        trainer, replay_storage="disk", replay_storage_kwargs={"folder": str(tmp_path / "payload")}, replay_start=0
    )
    trainer.args.max_steps = 1
    trainer.train()
    for folder in (tmp_path / "payload").glob("trl_replay-*/0"):
        shutil.rmtree(folder)
    trainer.args.max_steps = 4
    with pytest.raises(ReplayError, match="is gone: something else has deleted"):
        trainer.train()
    session.buffer.clear()
    assert session.buffer.nbytes == 0


def test_56_a_column_of_objects_is_refused_when_it_is_added(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    session = trl_replay.attach(trainer)
    with pytest.raises(ConfigurationError, match="is no type of numbers"):
        session.buffer.table.add_column("mine", dtype=object)
    session.buffer.table.add_column("mine", dtype=np.int32)


def test_54_groups_stay_readable_when_they_are_replaced() -> None:
    from trl_replay.testing import make_groups

    groups = make_groups([[1.0, 0.0], [0.0, 0.0]])
    assert replace(groups, update=np.array([1, 2])).update.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        groups.advantages[0] = 1.0
