"""Methods of papers, each a plugin of at most 25 lines: which rows meet, and what they train with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from advantages_by_hand import mixed_advantages
from methods import METHODS, Spread
from replaying import Checked, Watch, check_batches, check_losses
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.loss.micro_batch import EXCLUDED, MASKED, ROWS
from trl_replay.testing import make_trainer

SIZE = 4
MOST = [1.0, 1.0, 1.0, 0.0]
SCRIPT = ([LIVE, HALF, MOST], [DEAD, LIVE, HALF], [HALF, DEAD, LIVE], [LIVE, MOST, DEAD])


@pytest.fixture(autouse=True)
def plugins() -> Iterator[dict[str, Any]]:
    made = {name: method() for name, method in METHODS.items()}
    for name, plugin in made.items():
        trl_replay.register(plugin, name)
    yield made
    for name in made:
        trl_replay.unregister(name)


def train(tmp_path: Any, mode: str | None, replay: dict[str, Any], **training: Any) -> tuple[Any, Watch]:
    """Trains a method. Rows, tokens, masks and the loss are checked against those by hand, and, where stored rows
    stand beside fresh ones, the advantages of the mode."""
    scale = training.get("scale_rewards", "group")
    training = {"max_steps": 8, "trainer_class": Checked, **training}
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), **training)
    session = trl_replay.attach(trainer, **replay)
    watch = Watch(session, SIZE, trainer._tokenizer.pad_token_id)
    if mode is not None:
        watch.advantages = lambda step: mixed_advantages(watch, step, mode, (1.0,), scale, "sum_then_normalize")
    trainer.watch, trainer.compared = watch, []
    trainer.train()
    check_batches(watch)
    check_losses(trainer)
    return session, watch


def mixed_slots(watch: Watch) -> Iterator[tuple[int, int, dict[int, tuple[int, int]]]]:
    """Step, slot, and which stored row (as serial and row) stands in which of its rows."""
    for step, taken in enumerate(watch.taken):
        for slot in sorted({row // SIZE for row in taken}):
            yield step, slot, {row % SIZE: stored for row, stored in taken.items() if row // SIZE == slot}


def fresh(watch: Watch, step: int, slot: int) -> list[float]:
    return watch.rewards[step][slot * SIZE : (slot + 1) * SIZE, 0].tolist()


def stored(watch: Watch, serial: int, row: int) -> float:
    step, source = watch.source(serial, row)
    return float(watch.rewards[step][source, 0])


def same_prompt(watch: Watch, step: int, slot: int, serial: int) -> bool:
    """The script's prompts are the same three in every batch."""
    return watch.origin[serial][1] == slot and watch.origin[serial][0] < step


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_at_most_25_lines(name: str) -> None:
    source = inspect.getsource(METHODS[name]) + (inspect.getsource(Spread) if name == "repo" else "")
    assert len([line for line in source.splitlines() if line.strip()]) <= 25


def test_repo_puts_cached_rows_of_most_variance_into_groups_and_normalises_each_kind_apart(tmp_path: Any) -> None:
    session, watch = train(tmp_path, "split", {"replay_preset": "repo"})
    found = list(mixed_slots(watch))
    assert len(found) > 4
    for step, slot, rows in found:
        assert sorted(rows) == [2, 3], "the last two rows"
        serials = {serial for serial, _ in rows.values()}
        assert all(same_prompt(watch, step, slot, serial) for serial in serials)
        newest = sorted(
            (s for s, (when, where) in watch.origin.items() if where == slot and when < step), reverse=True
        )
        cached = [stored(watch, serial, row) for serial in newest[:2] for row in range(SIZE)]
        assert [stored(watch, *rows[place]) for place in (2, 3)] == [min(cached), max(cached)]
    assert session.totals.counters["lost"] == 0


def test_rlep_mixes_two_successes_of_a_pool_that_never_changes(tmp_path: Any) -> None:
    session, watch = train(tmp_path, "joint", {"replay_preset": "rlep", "replay_buffer_size": 3})
    assert sorted(session.buffer) == [0, 1, 2], "the first groups stay for ever"
    for step, slot, rows in mixed_slots(watch):
        ((serial, _),) = {(serial, 0) for serial, _ in rows.values()}
        assert same_prompt(watch, step, slot, serial)
        assert all(stored(watch, *one) == 1.0 for one in rows.values()), "successes only"
        pool = sum(stored(watch, serial, row) for row in range(SIZE))
        assert len(rows) == min(2, pool)
        others = [reward for row, reward in enumerate(fresh(watch, step, slot)) if row not in rows]
        assert max(fresh(watch, step, slot)[row] for row in rows) <= min(others), "for the worst rows"


def test_arpo_puts_one_success_where_all_failed_and_nowhere_else(tmp_path: Any) -> None:
    _, watch = train(tmp_path, "joint", {"replay_preset": "arpo"})
    found = {(step, slot): rows for step, slot, rows in mixed_slots(watch)}
    assert len(found) > 3
    for (step, slot), rows in found.items():
        assert fresh(watch, step, slot) == DEAD
        ((serial, row),) = rows.values()
        assert stored(watch, serial, row) == 1.0
        assert same_prompt(watch, step, slot, serial)
    for step, (_, after) in enumerate(watch.steps):
        for slot in range(3):
            if fresh(watch, step, slot) == DEAD and (step, slot) in found:
                advantages = after["advantages"][slot * SIZE : (slot + 1) * SIZE]
                assert float(advantages.max()) == pytest.approx(0.75 / (0.5 + 1e-4)), "one success of four"


def test_exgrpo_mixes_in_the_correct_row_that_the_policy_was_surest_of(tmp_path: Any) -> None:
    settings = {"replay_preset": "exgrpo"}
    session, watch = train(tmp_path, "joint", settings, scale_rewards="none", loss_type="dr_grpo")
    found = list(mixed_slots(watch))
    assert len(found) > 4
    for step, slot, rows in found:
        (place,) = rows
        serial, row = rows[place]
        assert place == SIZE - 1, "seven fresh rows and one stored one, here three and one"
        assert same_prompt(watch, step, slot, serial)
        correct = [other for other in range(SIZE) if stored(watch, serial, other) == 1.0]
        means = {other: mean_logp(watch, serial, other) for other in correct}
        assert means[row] == pytest.approx(max(means.values()), abs=1e-5)
    passes = [sum(stored(watch, serial, row) for row in range(SIZE)) for serial in session.buffer]
    assert set(passes) <= {1.0, 2.0, 3.0}, "solved and unsolved groups are not stored"


def mean_logp(watch: Watch, serial: int, row: int) -> float:
    step, source = watch.source(serial, row)
    return float(watch.policy[step][source].mean())


class ShortestByHand:
    """GFPO's formula: the two shortest rows of each group, normalised between themselves."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def kept(self, step: int, slot: int) -> list[int]:
        lengths = self.watch.steps[step][0]["completion_mask"].sum(dim=1).tolist()
        rows = range(slot * SIZE, (slot + 1) * SIZE)
        return sorted(rows, key=lambda row: (lengths[row], row))[:2]

    def fresh(self, step: int) -> list[float]:
        advantages = [0.0] * 12
        for slot in range(3):
            kept = self.kept(step, slot)
            values = [float(self.watch.rewards[step][row, 0]) for row in kept]
            spread = abs(values[0] - values[1]) / np.sqrt(2)
            for row, value in zip(kept, values, strict=True):
                advantages[row] = (value - sum(values) / 2) / (spread + 1e-4)
        return advantages

    def advantages(self, step: int) -> torch.Tensor:
        found = self.fresh(step)
        for row, stored_row in self.watch.taken[step].items():
            origin, source = self.watch.source(*stored_row)
            found[row] = self.fresh(origin)[source]
        return torch.tensor(found)

    def left_out(self, step: int) -> list[bool]:
        found = []
        for row in range(12):
            origin, source = step, row
            if row in self.watch.taken[step]:
                origin, source = self.watch.source(*self.watch.taken[step][row])
            found.append(source not in self.kept(origin, source // SIZE))
        return found


@pytest.mark.parametrize("loss", ["dapo", "grpo", "bnpo", "dr_grpo", "cispo"])
def test_gfpo_trains_the_shortest_rows_normalised_among_themselves(tmp_path: Any, loss: str) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=6, trainer_class=Checked, loss_type=loss)
    session = trl_replay.attach(trainer, replay_plugins=["gfpo"], replay_start=0)
    watch = Watch(session, SIZE, trainer._tokenizer.pad_token_id)
    by_hand = ShortestByHand(watch)
    watch.advantages = by_hand.advantages
    trainer.watch, trainer.compared = watch, []
    trainer.train()
    check_batches(watch)
    check_losses(trainer)
    for step, (_, after) in enumerate(watch.steps):
        flags = after[ROWS][:, 1] & (MASKED | EXCLUDED)
        assert flags.bool().tolist() == by_hand.left_out(step)
        assert set(flags.tolist()) == {0, MASKED | EXCLUDED}
        tokens = after["completion_mask"].sum(dim=1)[~flags.bool()]
        assert int(after["num_items_in_batch"]) == int(tokens.sum()), "masked rows are no tokens of the batch"
    table = session.buffer.table
    assert (table.row_masked.sum(axis=1) == 2).all()
    assert (table.row_advantage[table.row_masked] == 0).all()
    assert session.metrics["replay/masked_rows_fraction"] == pytest.approx(0.5)


def test_a_running_z_score_needs_no_buffer(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=4, trainer_class=Checked)
    session = trl_replay.attach(trainer, replay_plugins=["zscore"], replay_buffer_size=0)
    assert session.enabled
    watch = Watch(session, SIZE, trainer._tokenizer.pad_token_id)
    trainer.watch, trainer.compared = watch, []
    trainer.train()
    seen: list[float] = []
    for step, (before, after) in enumerate(watch.steps):
        rewards = watch.rewards[step][:, 0].tolist()
        if not seen:
            assert torch.equal(after["advantages"], before["advantages"]), "TRL's own, bit for bit"
        else:
            mean = sum(seen) / len(seen)
            spread = np.sqrt(sum((value - mean) ** 2 for value in seen) / len(seen))
            expected = torch.tensor([(reward - mean) / (spread + 1e-4) for reward in rewards], dtype=torch.float32)
            torch.testing.assert_close(after["advantages"], expected, rtol=1e-5, atol=1e-6)
        seen += rewards
    assert session.metrics["replay/dead_fraction"] == 0.0, "equal advantages that are not 0 teach something"
    assert len(session.buffer) == 0
    assert session.totals.counters["stored"] == 0
