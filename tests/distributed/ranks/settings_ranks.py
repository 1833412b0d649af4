"""One of two ranks that attach with settings of their own, case by case; what came of it as JSON in a folder."""

import contextlib
import tempfile
from functools import partial
from pathlib import Path

from one_rank import outcome, own, rank
from scripted import build
from support import plugin_class

import trl_replay
from trl_replay import FieldSpec
from trl_replay.registry import registry

GROUPS = Path(tempfile.gettempdir()) / "groups.jsonl"
GROUPS.touch()

CASES = {
    "replay_weight": ({}, {"replay_weight": 0.5}),
    "replay_correction, of arguments": tuple({"replay_correction": f"truncated(cap={cap!r})"} for cap in (1.0, 2.0)),
    "replay_scope": ({}, {"replay_scope": "process"}),
    "replay_max_bytes": ({}, {"replay_max_bytes": "1GB"}),
    "replay_refill, of a share": tuple({"replay_refill": f"new(until={until})"} for until in (0.9, 0.5)),
    "replay_warm_start": ({}, {"replay_warm_start": str(GROUPS)}),
    "replay_plugins, another release": ({"replay_plugins": ["released"]}, {"replay_plugins": ["released"]}),
    "replay_plugins, of arguments": tuple({"replay_plugins": [f"shaping(by={by!r})"]} for by in (1.0, 2.0)),
    "replay_scorer, another release": ({"replay_scorer": "released/even"}, {"replay_scorer": "released/even"}),
    "batch keys of plugins": ({"replay_plugins": ["keys"]}, {"replay_plugins": ["keys"]}),
    "seed": ({}, {"seed": 7}),
    "seed, process, prompts chosen": tuple(
        {"replay_scope": "process", "replay_refill": "new(rounds=1)", "seed": seed} for seed in (1, 2)
    ),
    "trl_replay": ({}, {"version": "0.0.9"}),
    "num_iterations": ({}, {"num_iterations": 2}),
    "reward functions and weights": ({}, {"reward_weights": [0.5]}),
}
"""What each rank attaches with; a case is called like the setting that differs."""
ALIKE = {
    "seeds of private buffers": tuple({"replay_scope": "process", "seed": seed} for seed in (1, 2)),
    "bytes of private buffers": tuple({"replay_scope": "process", "replay_max_bytes": size} for size in (None, "1GB")),
    "a whole number as a float": ({"replay_weight": 1}, {"replay_weight": 1.0}),
    "functions": tuple({"replay_evictor": lambda table, context: table.serial} for _ in range(2)),
}
"""What may differ, or does not differ in what is done."""

OF_TRAINER = ("seed", "num_iterations", "reward_weights")


class Shaping:
    """Advantages times a number."""

    def __init__(self, by=1.0):
        self.by = by

    @trl_replay.hookimpl
    def trl_replay_advantages(self, groups, context):
        return groups.advantages * self.by


class Released:
    @trl_replay.hookimpl
    def trl_replay_strategies(self):
        yield trl_replay.ScorerSpec("even", lambda: lambda groups, context: groups.reward_mean, "the same")

    @trl_replay.hookimpl
    def trl_replay_detached(self, session):
        pass


def register():
    """The same plugins on both ranks, one of them in two releases."""
    trl_replay.register(Shaping(), "shaping")
    keys = plugin_class(fields=lambda: [FieldSpec(f"extra_{rank()}", layout="row")])
    trl_replay.register(keys(), "keys")
    registry().add(Released(), "released", f"released {rank() + 1}.0")


def attempt(folder, version=trl_replay.__version__, **settings):
    """Attaches and trains for two updates."""
    trainer_settings = {name: settings.pop(name) for name in OF_TRAINER if name in settings}
    trainer = build(folder, 8, 4, lambda update, group, rank: group % 2, rank=rank(), max_steps=2, **trainer_settings)
    settings = {"replay_buffer_size": 8, "replay_start": 0, "replay_scope": "gathered", **settings}
    with mine(version):
        trl_replay.attach(trainer, **settings)
        found = outcome(trainer.train)
    trl_replay.detach(trainer)
    return {**found, "updates": trainer.state.global_step}


@contextlib.contextmanager
def mine(version):
    """A release of trl_replay."""
    before = trl_replay.__version__
    trl_replay.__version__ = version
    try:
        yield
    finally:
        trl_replay.__version__ = before


def cases(folder):
    register()
    for name, by_rank in {**CASES, **ALIKE}.items():
        yield name, partial(attempt, own(folder) / name.replace(" ", "_"), **by_rank[rank()])
