"""Generation batches of any number of ranks, made up without a model: who has live groups when, and how long they are.

What a rank gets is a batch as TRL lays it out, whose completions tell where they were made; so it can be seen of each
row that comes out of a session whether it is the right one.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trl_replay import attach, compat, detach
from trl_replay.loss.supply import ROWS
from trl_replay.testing import make_trainer

PROMPTS = 5
"""Different prompts of a run."""
PROMPT_TOKENS = 3
MARKS = 2
"""Tokens at the beginning of a completion that tell its update and its row among those of all ranks."""
TOKENS = 6
"""Of the longest completion."""
PATTERN_UPDATES = 4
"""Generation batches of a random pattern."""
PATTERNS = 12
SETUP = compat.RewardSetup(np.ones(1), "group", "sum_then_normalize")


def random_of(*parts: Any) -> np.random.Generator:
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


@dataclass(frozen=True)
class Pattern:
    """The completions of all ranks in a run.

    Attributes:
        seed: Everything is drawn from it.
        ranks: Processes.
        rows: Rows of each.
        size: Rows of a group; groups straddle ranks where it does not divide `rows`.
        updates: Generation batches.
        settings: Of replay.
    """

    seed: int
    ranks: int
    rows: int
    size: int
    updates: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def straddles(self) -> bool:
        return self.rows % self.size != 0

    @property
    def groups(self) -> int:
        """Of a batch, on all ranks."""
        return self.ranks * self.rows // self.size

    def live_groups(self, update: int) -> np.ndarray:
        """`(groups,)` bool: a random share, on some of the ranks only."""
        random = random_of("live", self.seed, update)
        rate = random.choice([0.0, 0.2, 0.5, 1.0])
        ranks = random.random(self.ranks) < random.choice([0.3, 1.0])  # the others have dead groups only
        first_rank = np.arange(self.groups) * self.size // self.rows
        return (random.random(self.groups) < rate) & ranks[first_rank]

    def rewards(self, update: int) -> np.ndarray:
        """`(rows of all ranks,)`: between one and all but one of a live group's rows get a 1."""
        random = random_of("rewards", self.seed, update)
        passes = random.integers(1, self.size, self.groups) * self.live_groups(update)
        return (np.arange(self.size) < passes[:, None]).astype(float).ravel()

    def lengths(self, update: int) -> np.ndarray:
        """`(rows of all ranks,)` completion tokens."""
        return random_of("lengths", self.seed, update).integers(MARKS, TOKENS + 1, self.ranks * self.rows)

    def scored(self, update: int) -> torch.Tensor:
        """`(rows of all ranks, 1)`: what TRL's reward functions give."""
        return torch.tensor(self.rewards(update), dtype=torch.float32)[:, None]

    def prompts(self, update: int, rank: int) -> np.ndarray:
        """`(rows,)`: which prompt each of a rank's rows has."""
        groups = np.arange(rank * self.rows, (rank + 1) * self.rows) // self.size
        return random_of("prompts", self.seed, update).integers(0, PROMPTS, self.groups)[groups]

    def inputs(self, update: int, rank: int) -> list[dict[str, str]]:
        """The dataset rows that a rank generates for."""
        return [{"prompt": f"{prompt}="} for prompt in self.prompts(update, rank).tolist()]

    def batch(self, update: int, rank: int) -> dict[str, torch.Tensor]:
        """The batch that TRL's scoring would return on a rank, old log-probs included."""
        here = slice(rank * self.rows, (rank + 1) * self.rows)
        lengths = self.lengths(update)
        mask = np.arange(lengths[here].max()) < lengths[here, None]
        prompts = self.prompts(update, rank)
        prompt_mask = np.arange(PROMPT_TOKENS)[::-1] <= (prompts % PROMPT_TOKENS)[:, None]
        random = random_of("tokens", self.seed, update, rank)
        ids = random.integers(1, 9, mask.shape)
        ids[:, 0] = 1 + update
        ids[:, 1] = 1 + np.arange(here.start, here.stop)
        made = {
            "prompt_ids": (10 + prompts)[:, None] * prompt_mask,
            "prompt_mask": prompt_mask.astype(np.int64),
            "completion_ids": ids * mask,
            "completion_mask": mask.astype(np.int64),
            "old_per_token_logps": (random.normal(size=mask.shape) * mask).astype(np.float32),
            "num_items_in_batch": np.array(lengths.sum()),
        }
        batch = {key: torch.from_numpy(np.asarray(value)) for key, value in made.items()}
        batch["advantages"] = compat.advantages(self.scored(update), SETUP, self.size)[here]
        return batch


def random_pattern(number: int, ranks: int) -> Pattern:
    """Layout, liveness, scope, capacity and strategies at random."""
    random = random_of("pattern", number, ranks)
    size = int(random.choice([2, 4, 8]))  # each divides the rows of 8 ranks, and of 16
    scope = str(random.choice(["process", "gathered"]))
    rows = size * int(random.integers(1, 3)) if scope == "process" else int(random.integers(1, 8))
    settings = {
        "replay_scope": scope,
        "replay_buffer_size": int(random.integers(1, 12)),
        "replay_start": 0,
        "replay_sampler": str(
            random.choice(["proportional", "prompt_balanced", "uniform", "top", "newest", "least_used"])
        ),
        "replay_evictor": str(random.choice(["heap", "prompt_balanced", "fifo", "reservoir"])),
        "replay_unfilled": str(random.choice(["keep", "mask"])),
        "replay_max_uses": [None, 1, 2][random.integers(3)],
        "replay_max_age": [None, 2][random.integers(2)],
    }
    return Pattern(number, ranks, rows, size, PATTERN_UPDATES, settings=settings)


def play(trainer: Any, pattern: Pattern, rank: int) -> dict[str, Any]:
    """Takes a pattern through a session on this rank, with real collectives and no model; returns what it showed."""
    trainer.args.per_device_train_batch_size = pattern.rows
    trainer.args.steps_per_generation = 1
    trainer.num_generations = pattern.size
    session = attach(trainer, **pattern.settings)
    session.step.handshake.verified = True  # as it is after the first loss
    steps = []
    fetch, drawn = session.scope.fetch, []

    def fetching(requests, load):
        drawn.append([request.serial for request in requests])
        return fetch(requests, load)

    session.scope.fetch = fetching
    for update in range(pattern.updates):
        session.step.judge.rewards = [pattern.scored(update)]
        session.step.begin(pattern.inputs(update, rank))
        out = session.step.take(pattern.batch(update, rank))
        session.step.judge.rewards = None
        session.step.handshake.awaited = False  # as after its loss
        session.updated()
        steps.append(
            {
                "made": (out["completion_ids"][:, :MARKS] - 1).tolist(),
                "lengths": out["completion_mask"].sum(dim=1).tolist(),
                "replayed": (out[ROWS][:, 0] < 0).tolist(),
                "advantages": out["advantages"].tolist(),
                "items": int(out["num_items_in_batch"]),
                "table": table_hash(session.buffer.table, leave_owners=pattern.settings["replay_scope"] != "gathered"),
            }
        )
    session.finish()
    detach(trainer)
    return {
        "steps": steps,
        "drawn": drawn,
        "counters": dict(session.totals.of_all_ranks),
        "table": table_hash(session.buffer.table, leave_owners=pattern.settings["replay_scope"] != "gathered"),
        "size": len(session.buffer),
    }


def table_hash(table: Any, leave_owners: bool) -> str:
    digest = hashlib.sha256()
    for name in table.names:
        if not (leave_owners and name == "owner"):
            digest.update(np.ascontiguousarray(getattr(table, name)).tobytes())
    return digest.hexdigest()


def modelless(folder: Path) -> Any:
    """A trainer to attach to, with a model that is never asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_trainer(folder, lambda completions, **_: [0.0] * len(completions), num_generations=4)


def wrong(pattern: Pattern, ranks: list[dict[str, Any]]) -> Iterator[str]:
    """All that is not as it should be in what the ranks of a pattern showed."""
    shares = pattern.settings["replay_scope"] != "process"
    for rank in ranks[1:] if shares else ():
        for name in ("table", "drawn", "size"):
            if rank[name] != ranks[0][name]:
                yield f"the ranks' {name} differ at the end"
    if any(rank["counters"] != ranks[0]["counters"] for rank in ranks):
        yield "the ranks' counters differ"
    advantages: dict[tuple[int, int], float] = {}
    for update in range(pattern.updates):
        steps = [rank["steps"][update] for rank in ranks]
        if shares and len({step["table"] for step in steps}) > 1:
            yield f"update {update}: the ranks' tables differ"
        trained = sum(sum(step["lengths"]) for step in steps)
        if any(step["items"] != trained for step in steps):
            yield f"update {update}: {[step['items'] for step in steps]} items are counted, {trained} are trained"
        yield from _wrong_rows(pattern, update, steps, advantages)


def _wrong_rows(
    pattern: Pattern, update: int, steps: list[dict[str, Any]], advantages: dict[tuple[int, int], float]
) -> Iterator[str]:
    """Lists what is wrong with the rows of one batch; notes the advantages of its fresh ones for those to come."""
    here = f"update {update}"
    made = [tuple(row) for step in steps for row in step["made"]]
    replayed = [flag for step in steps for flag in step["replayed"]]
    trained = [value for step in steps for value in step["advantages"]]
    lengths = [value for step in steps for value in step["lengths"]]
    own = compat.advantages(pattern.scored(update), SETUP, pattern.size).tolist()
    advantages |= {(update, row): value for row, value in enumerate(own)}
    live = pattern.live_groups(update)
    seen = set()
    for group in range(pattern.groups):
        rows = range(group * pattern.size, (group + 1) * pattern.size)
        flags = {replayed[row] for row in rows}
        when, first = made[rows[0]]
        origin = [(when, first + place) for place in range(pattern.size)]
        if len(flags) > 1 or [made[row] for row in rows] != origin or first % pattern.size:
            yield f"{here}: slot {group} holds parts of groups: {[made[row] for row in rows]}"
            continue
        if flags == {True}:
            if when >= update or live[group] or (when, first) in seen:
                yield f"{here}: slot {group} was filled with {(when, first)}"
            if pattern.settings["replay_scope"] == "process" and first // pattern.rows != rows[0] // pattern.rows:
                yield f"{here}: slot {group} was filled with another rank's group"
            seen.add((when, first))
        elif (when, first) != (update, rows[0]):
            yield f"{here}: slot {group} holds {(when, first)}, which was not replayed"
        if [trained[row] for row in rows] != [advantages[key] for key in origin]:
            yield f"{here}: slot {group} trains with advantages that are not its rows'"
        expected = pattern.lengths(when)[first : first + pattern.size].tolist()
        if [lengths[row] for row in rows] != expected:
            yield f"{here}: slot {group} has completions of {[lengths[row] for row in rows]} tokens, not {expected}"
