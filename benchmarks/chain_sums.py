"""Runs of SmolLM2-135M-Instruct on reasoning-gym's chain_sum, which were made before the study, at one learning rate.

150 batches of 4 groups of 8 completions; `sample_efficient` makes two updates a batch. Accuracy is that of greedy
answers to 200 questions that no run trained on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BATCHES = 150
RATE = 1e-5
PILOTS = 100
"""The first seed of a pilot, which is not reported."""
ARMS = ("stock", "defaults", "sample_efficient")

Records = list[dict[str, Any]]


def finished(path: Path) -> dict[str, dict[int, Records]]:
    """The reported runs of a ledger that came to their end, by arm and seed. A batch that was made again, after a run
    was cut off, counts once."""
    found: dict[tuple[str, float, int], dict[int, dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        batches = found.setdefault((record["arm"], record["rate"], record["seed"]), {})
        batches[record["batch"]] = batches.get(record["batch"], {}) | record
    arms: dict[str, dict[int, Records]] = {arm: {} for arm in ARMS}
    for (arm, rate, seed), batches in sorted(found.items()):
        if arm in ARMS and rate == RATE and seed < PILOTS and max(batches) >= BATCHES:
            arms[arm][seed] = [batches[number] for number in sorted(batches)]
    return arms


def last_accuracies(runs: dict[int, Records]) -> dict[int, float]:
    """The accuracy at the end of each seed's run."""
    return {seed: [record["accuracy"] for record in runs[seed] if "accuracy" in record][-1] for seed in runs}
