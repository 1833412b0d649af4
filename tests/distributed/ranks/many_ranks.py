"""One rank of a launch of many: the cases of test_many_ranks.py; results as JSON.

Every case has a process and a process group of its own, since in some of them a rank is killed or the others end with
their time-out. The key-value store of them all is kept by the process that starts the cases, as torchrun keeps it.
"""

import os
import signal
import time

from one_rank import own
from patterns import LOST, PATTERNS, SLOW, modelless, play, random_pattern
from scripted import build, run, uneven

from trl_replay.strategies.policies import advantage_std

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TIMEOUT = 120
"""Seconds that a collective waits where nobody is to be late: the machine may be busy."""
BRIEF = 10
"""The same where one rank comes later than that, or not at all."""
LATE = 3
"""Seconds by which it then is later than the others wait."""
UPDATES = 6
LAYOUTS = {"whole": (4, 2), "straddling": (3, 4)}
"""Rows of a process, and of a group."""
FAILS_AT = 2
"""The first update at which every scorer is asked: `uneven` has made live groups by then."""


class Acting:
    """A scorer that does something on some ranks at one update, before `agree`."""

    def __init__(self, act, *ranks):
        self.act, self.ranks = act, ranks

    def __call__(self, groups, context):
        if RANK in self.ranks and context.update == FAILS_AT:
            self.act()
        return advantage_std(groups, context)


def no_luck():
    raise ZeroDivisionError(f"no luck on rank {RANK}")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def trained(folder, layout, scope, timeout=TIMEOUT, **replay):
    rows, size = LAYOUTS[layout]
    trainer = build(folder, rows, size, uneven, rank=RANK, max_steps=UPDATES, ddp_timeout=timeout)
    return run(trainer, replay_scope=scope, **{"replay_buffer_size": 6, **replay})


def unattached(folder):
    """Replay is attached on all ranks but one."""
    if RANK != LOST:
        return trained(folder, "straddling", "gathered", BRIEF)
    build(folder, *LAYOUTS["straddling"], uneven, rank=RANK, max_steps=UPDATES, ddp_timeout=BRIEF).train()
    return {}


def patterns(folder):
    """Random patterns, one after the other on the same ranks."""
    trainer = modelless(folder)
    return {"patterns": [play(trainer, random_pattern(number, WORLD), RANK) for number in range(PATTERNS)]}


def cases(launched):
    """Name, time-out of the process group where it is another, and what to do."""
    folder = own(launched)
    yield "process whole", lambda: trained(folder, "whole", "process")
    late = Acting(lambda: time.sleep(1), SLOW)
    yield "gathered, one is late", lambda: trained(folder, "straddling", "gathered", replay_scorer=late)
    yield "gathered straddling", lambda: trained(folder, "straddling", "gathered")
    yield "patterns", lambda: patterns(folder)
    raising = Acting(no_luck, SLOW, LOST)
    yield "two raise", lambda: trained(folder, "straddling", "gathered", replay_scorer=raising)
    yield "one is not attached", BRIEF, lambda: unattached(folder)
    later = Acting(lambda: time.sleep(BRIEF + LATE), SLOW)
    yield "one is too late", BRIEF, lambda: trained(folder, "straddling", "gathered", BRIEF, replay_scorer=later)
    killed = Acting(die, LOST)
    yield "one is killed", lambda: trained(folder, "straddling", "gathered", replay_scorer=killed)
