"""DOTS + RR: which groups are stored, and how much of a batch is replayed, by hand."""

from __future__ import annotations

from typing import Any

from methods import SIZE
from support import DEAD, HALF, LIVE, Rewards, Spy

import trl_replay
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, HALF, DEAD, LIVE], [LIVE, LIVE, LIVE, HALF], [LIVE, DEAD, HALF, DEAD], [DEAD, DEAD, DEAD, LIVE])


def test_half_of_a_batch_is_replayed_live_groups_included(tmp_path: Any) -> None:
    from replaying import Watch

    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=4, trainer_class=Spy, per_device_train_batch_size=16)
    session = trl_replay.attach(trainer, replay_preset="dots_rr", replay_buffer_size=6)
    watch = Watch(session, SIZE, trainer._tokenizer.pad_token_id)
    trainer.train()
    live: list[tuple[int, int]] = []
    for step, rewards in enumerate(SCRIPT):
        taken = watch.taken[step]
        slots = {row // SIZE for row in taken}
        dead = {slot for slot in range(4) if rewards[slot] == DEAD}
        assert len(slots) == (2 if step else 0), "half, once something is stored"
        assert not step or slots <= dead or dead <= slots, "dead ones first"
        origins = {watch.origin[serial] for serial, _ in taken.values()}
        assert origins <= set(live[-6:]), "of the last live groups, those that were replaced included"
        live += [(step, slot) for slot in range(4) if slot not in dead]
    assert session.totals.counters["lost"] == 0
