"""One rank of a launch of tests/distributed/test_idle_ranks.py: settings with which replay must change nothing."""

import itertools
from functools import partial

from accelerate.state import PartialState
from idle import OTHERS, PLUGINS, Stock
from one_rank import own, rank
from resuming import SCOPES

import trl_replay
from trl_replay.testing import make_model, make_tokenizer


def saved(folder):
    """A model that the trainer can load for the reference: only the first rank writes it."""
    if rank() == 0:
        make_model(make_tokenizer()).save_pretrained(folder)
    PartialState().wait_for_everyone()
    return folder


def idle(stock, folder, name, scope):
    differences, session = stock.differences(folder, name, max_steps=3, replay_scope=scope)
    return {"differences": differences, "size": len(session.buffer)}


def cases(launched):
    """Each name with one scope, and each scope with many names."""
    for plugin, make in PLUGINS.items():
        trl_replay.register(make(), plugin)
    stock, folder = Stock(saved(launched / "model")), own(launched)
    for name, scope in zip(OTHERS, itertools.cycle(SCOPES)):
        yield name, partial(idle, stock, folder, name, scope)
