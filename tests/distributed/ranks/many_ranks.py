"""One rank of a launch of many: random patterns, one after the other; results as JSON."""

import os

from one_rank import own, rank
from patterns import PATTERNS, modelless, play, random_pattern


def played(folder):
    trainer, ranks = modelless(folder), int(os.environ["WORLD_SIZE"])
    return {"patterns": [play(trainer, random_pattern(number, ranks), rank()) for number in range(PATTERNS)]}


def cases(launched):
    yield "patterns", lambda: played(own(launched))
