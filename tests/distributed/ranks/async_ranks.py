"""One of two ranks that train with AsyncGRPOTrainer: the cases of test_async_ranks.py; results as JSON."""

import os
from functools import partial

import pytest
import torch.distributed as dist
from queued import Policy, Script, all_dead, every_second_dead, make_async_trainer, make_policy, stand_in, watch

import trl_replay
from trl_replay.testing import make_tokenizer

RANK = int(os.environ["RANK"])
TIMEOUT = 120
"""Seconds that a collective waits: the machine may be busy."""


def trained(folder, replay, resume=0, **settings):
    patch = pytest.MonkeyPatch()
    stand_in(patch)
    model = folder / "model"
    if RANK == 0 and not model.exists():
        make_policy(model)
    dist.barrier()
    policy = Policy(str(model), make_tokenizer())
    script = Script(all_dead if replay and "replay_warm_start" in replay else every_second_dead)
    trainer = make_async_trainer(folder / "run", policy, script, **settings)
    session = None if replay is None else trl_replay.attach(trainer, **replay)
    seen = watch(trainer)
    trainer.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{resume}") if resume else None)
    weights = [float(parameter.detach().double().sum()) for parameter in trainer.model.parameters()]
    result = {"losses": [loss for _, loss in seen], "weights": weights}
    if session is not None:
        session.export(folder / "groups.parquet")
        result |= {
            "update": session.update,
            "size": len(session.buffer),
            "counters": dict(session.totals.counters),
            "explains": session.explain(),
        }
    return result


def cases(launched):
    folder = launched / "cases"
    replays = {"replay_start": None}
    yield "stock", partial(trained, folder / "stock", None)
    yield "idle", partial(trained, folder / "idle", {**replays, "replay_dry_run": True})
    yield "replay", partial(trained, folder / "replay", replays)
    saves = {"save_strategy": "steps", "save_steps": 3}
    yield "saves", partial(trained, folder / "saves", replays, **saves)
    yield "resumes", partial(trained, folder / "saves", replays, 3, max_steps=8)
    warm = {"replay_warm_start": str(folder / "replay" / "groups.parquet")}
    yield "warms", partial(trained, folder / "warms", warm)
    torn = folder / "torn.jsonl"
    torn.write_text('{"prompt": "1="}')
    yield "warms from a torn file", partial(trained, folder / "torn", {"replay_warm_start": str(torn)})
    yield "differs", partial(trained, folder / "differs", {"replay_max_age": 3 + RANK})
