"""POPO: which groups are replayed, by hand."""

from __future__ import annotations

from typing import Any

from methods import SIZE
from support import DEAD, HALF, LIVE, Rewards, Spy

import trl_replay
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, HALF, LIVE], [DEAD, DEAD, DEAD], [LIVE, DEAD, HALF], [DEAD, LIVE, DEAD], [DEAD, DEAD, DEAD])


def newest(live: list[tuple[int, int]], count: int, room: int) -> list[tuple[int, int]]:
    """Of live groups in the order of generation, the newest that a buffer of so much room still has."""
    return live[-room:][::-1][:count]


def test_popo_fills_every_dead_slot_with_the_newest_live_groups(tmp_path: Any) -> None:
    from replaying import Watch

    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=5, trainer_class=Spy)
    session = trl_replay.attach(trainer, replay_preset="popo", replay_buffer_size=4)
    watch = Watch(session, SIZE, trainer._tokenizer.pad_token_id)
    trainer.train()
    live: list[tuple[int, int]] = []
    filled = 0
    for step, rewards in enumerate(SCRIPT):
        dead = [slot for slot in range(3) if rewards[slot] == DEAD]
        taken = watch.taken[step]
        slots = sorted({row // SIZE for row in taken})
        origins = [watch.origin[taken[slot * SIZE][0]] for slot in slots]
        assert set(slots) <= set(dead)
        assert sorted(origins) == sorted(newest(live, len(dead), room=4))
        for slot in slots:
            assert [taken[slot * SIZE + row][1] for row in range(SIZE)] == list(range(SIZE)), "whole groups"
        filled += len(slots)
        live += [(step, slot) for slot in range(3) if slot not in dead]
    assert filled == 3 + 1 + 2 + 3
    assert session.config.replay_correction == "decoupled"
