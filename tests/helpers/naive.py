"""What replay must decide, by a list of groups and settings: who enters, is drawn and leaves, and which rows train.

No decision of the product is read but the draws of a strategy that draws at random.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import compress, cycle
from math import prod
from typing import Any

import advantages_by_hand
import numpy as np
import pytest
from generating import assert_same_row
from replaying import Watch, counted_tokens, original

from trl_replay.base.validation import Named
from trl_replay.data.counters import COUNTERS
from trl_replay.session import Session

SIZE, SLOTS = 4, 3
COUNTED = {*COUNTERS} - {"items", "items_delta", "surplus", "size", "tasks", "bytes"}
SUMMED = ("stored", "evicted", "refused", "retired", "failed_rows", "lost")
LATEST = ("size", "bytes", "tasks", "rollouts", "replay_ratio")
"""Keys of which a log entry has the sum of its batches, and the last value."""
ALWAYS = 10**9
SOLVED = "its prompt is solved (replay_retire_passes)"
RULE_CHANGED, BYTES_REACHED = "Another reward rule than the present one", "replay_max_bytes is reached with"
REPEATED = "This run generates one batch"
"""How warnings begin."""
UNTRAINED = "a group counted as dead though its rewards differ: no row with an advantage trains a token"
TAKEN_AWAY = (
    "a group trains nothing: its rows are masked, silent, or of advantage 0 by trl_replay_plan of the plugin 'mine'"
)
UNMIXED = "a stored row can't be mixed: its rewards are not known, or not of the functions that scored fresh ones"
SCORES = {
    "advantage_std": lambda rewards, advantages, update: np.abs(advantages).sum() * std(rewards),
    "reward_std": lambda rewards, advantages, update: std(rewards),
    "mean_reward": lambda rewards, advantages, update: np.nanmean(rewards),
    "recency": lambda rewards, advantages, update: update + 1.0,
    "constant": lambda rewards, advantages, update: 1.0,
}


def std(rewards: Any) -> float:
    scored = rewards[~np.isnan(rewards)]
    return float(np.std(scored, ddof=1)) if len(scored) > 1 else 0.0


def one_for_all(advantages: Any, trains: Any) -> Any:
    """Groups whose rows that train have the same advantage, and not 0."""
    most, least = np.where(trains, advantages, -9).max(axis=1), np.where(trains, advantages, 9).min(axis=1)
    return (most == least) & (np.abs(most) > 1e-3)


def shaped(advantages: Any, update: int) -> Any:
    """What a plugin makes of the advantages of three groups: at odd updates the second one is dead, and the third one
    never is."""
    factors, added = np.array([[2.0, 0.0], [1.0 - update % 2, 0.0], [2.0, 0.4]])[: len(advantages)].T
    return advantages * factors[:, None] + added[:, None]


def dropping(table: Any, context: Any) -> Any:
    """An evictor that keeps two entries a prompt."""
    return np.where(table.newer < 2, table.score, -np.inf)


dropping.drops = True  # type: ignore[attr-defined]
DROPPING = f"{__name__}:dropping"


@dataclass
class Entry:
    """A stored group; what the table has of it; rewards of each row by each function, and the one that counts."""

    serial: int
    prompt: int
    columns: dict[str, Any]
    update: int
    rewards: Any
    total: Any
    trains: Any
    score: float
    pictured: bool
    uses: int = 0


class Naive:
    """Follows a training batch by batch: compares what happened with what had to happen, and tells the watch which
    rows train and with which advantages.

    Args:
        session: That of the training.
        watch: Of it.
        script: Rewards of each function, batch by batch.
        replay: The settings of replay.
        plugin: What it edits: "advantages", "plan", or nothing.
        prompts: The numbers of those of a batch; of several batches, which come in turn.
    """

    def __init__(
        self,
        session: Session,
        watch: Watch,
        script: Any,
        replay: dict[str, Any],
        plugin: str = "",
        prompts: Any = ((0, 1, 2),),
    ) -> None:
        self.session, self.watch, self.plugin = session, watch, plugin
        self.script = np.array(script, float)  # (functions, batches, slots, size)
        trainer = session.trainer
        self.weights, self.policy = self.rule()
        self.policies = []  # per step, by which rule its advantages are
        self.replay = replay
        self.refill = Named.read(replay["replay_refill"]).arguments if "replay_refill" in replay else {}
        self.turns = cycle(np.array(prompts))
        self.prompts, self.solved = [], set()  # of the last batch that was generated
        self.as_trl = plugin != "advantages"  # advantages are those of TRL's rule
        self.entries, self.waiting = [], None  # which is a list once a batch was collected
        self.trained = []  # per step, (rows,) advantages of the fresh rows as the plugin left them
        self.masked = []  # per step, (rows,) fresh rows that the plugin masks
        self.failed = []  # per step, (rows,) those that no function has scored, which are masked once stored
        self.factors = []  # per step, (rows,) what the plugin multiplies advantages by in the plan
        self.counts = dict.fromkeys(COUNTED, 0)
        self.told, self.logged = dict(self.counts), {}  # when last logged; by update, what each batch adds to the log
        self.lowest, self.highest = np.inf, -np.inf  # of all rewards
        self.calls = self.batches = self.rounds = 0
        self.reasons = Counter()  # why less was replayed
        self.ended = Counter(replay_max_age=0, replay_max_uses=0)  # entries that a limit has ended
        self.longest = trainer.max_completion_length
        self.scored = []  # per call of the reward functions, what scoring returned
        self.costs, extend = {}, session.buffer.extend  # bytes of each group, by serial
        session.buffer.extend = lambda groups, new, *others: (
            self.costs.update({one.serial: one.nbytes for one in new}) or extend(groups, new, *others)
        )
        self.warned, self.iterations = Counter(), []
        to_cpu = session.step.judge.to_cpu
        session.step.judge.to_cpu = lambda batch: to_cpu(self.scored.append(batch) or batch)
        self.pass_rate, self.seen, self.live, self.seen_at_live, self.has_begun = None, 0, 0, 0, False
        watch.after_step = self.advance
        watch.advantages = self.advantages
        watch.is_all_wrong = lambda row: not self.is_redrawn and self.is_all_wrong(row // SIZE)
        watch.without_kl = {*range(0, SLOTS * SIZE, SIZE)} if plugin == "plan" else set()

    def same(self, what: str, found: Any, expected: Any) -> None:
        assert found == expected, f"batch {len(self.trained) - 1}: {what} {found}, by hand {expected}"

    def setting(self, name: str, default: Any = None) -> Any:
        return self.replay.get(f"replay_{name}", default)

    def rule(self) -> tuple[Any, Any]:
        """The weights of the reward functions, and all that advantages are made by."""
        trainer = self.session.trainer
        weights = trainer.reward_weights
        rule = weights.tolist(), trainer.scale_rewards, trainer.multi_objective_aggregation
        return weights.double().numpy(), rule

    def change_limits(self) -> None:
        """Groups leave that another rule has scored, or that are longer than completions may be now."""
        waiting, (weights, policy) = self.waiting or [], self.rule()
        if policy != self.policy:
            self.weights, self.policy = weights, policy
            self.lowest, self.highest = np.inf, -np.inf
            self.counts["retired"] += len(self.entries)
            self.note(len(self.entries), "an entry left: another reward rule scored it")
            self.refuse(len(waiting), "another reward rule scored it")
            self.entries, waiting = [], []
            self.warned[RULE_CHANGED] += 1
        longest = self.session.trainer.max_completion_length
        if longest < self.longest:
            fits = [[max(one.columns["row_length"]) <= longest for one in kept] for kept in (self.entries, waiting)]
            gone = sum(map(len, fits)) - sum(map(sum, fits))
            self.note(gone, f"an entry was dropped: a completion is longer than max_completion_length={longest}")
            self.entries, waiting = (
                [*compress(kept, fit)] for kept, fit in zip((self.entries, waiting), fits, strict=True)
            )
        self.longest = longest
        self.waiting = None if self.waiting is None else waiting

    def advance(self, generated: bool) -> None:
        """A batch was composed: for a generation batch, or for a further iteration."""
        watch, update = self.watch, self.watch.updates[-1]
        self.change_limits()
        if generated or self.setting("iterations"):
            self.iterations.append(0 if generated else self.iterations[-1] + 1)
        if generated:
            self.look()
            self.policies.append(self.policy)
        else:
            for kept in (self.trained, self.masked, self.failed, self.policies):
                kept.append(kept[watch.generated])
        self.settle(update, self.solved if generated else set())
        self.check_draws(update, generated)
        self.is_redrawn = not generated and bool(self.drawn)
        self.check_table()
        if generated:
            self.collect(update)
        if generated or self.drawn:
            halved = [self.plugin == "plan" and (generated or slot in self.filled) for slot in range(SLOTS)]
            factors = np.repeat(np.where(halved, 0.5, 1.0), SIZE).reshape(SLOTS, SIZE)
            factors[0] *= not (halved[0] and update % 3 == 2)
            factors[1, 0] *= not (halved[1] and update % 3 == 1)
            self.factors.append(factors.ravel())
            watch.out.append(self.flags(update, generated))
        else:
            for kept in (watch.out, self.factors):
                kept.append(kept[watch.generated])
        self.logged.setdefault(update, []).append(self.log(update, generated))

    def log(self, update: int, generated: bool) -> dict[str, float]:
        """What a batch adds to the log, by key."""
        if not generated:
            return {"redrawn_fraction": len(self.filled) / SLOTS} if self.setting("iterations") else {}
        now = {name: count - self.told[name] for name, count in self.counts.items()}
        self.told = dict(self.counts)
        rows, self.batches = SLOTS * SIZE, self.batches + 1
        masks = [self.watch.steps[-1][1][key] for key in ("prompt_mask", "completion_mask")]
        of_groups = {"dead_fraction_after": "dead_after", "replaced_fraction": "replaced"}
        of_rows = {"replaced_rows_fraction": "rows", "masked_rows_fraction": "muted"}
        of_generated = ("dead", "all_wrong", "all_right", "untrained")
        found = {
            **{key: now[name] / SLOTS for key, name in of_groups.items()},
            **{key: now[name] / rows for key, name in of_rows.items()},
            **{f"{name}_fraction": now[name] / now["generated"] for name in of_generated},
            **{f"{name}_fraction": now[f"at_{name}"] / now["generated"] for name in ("lowest", "highest")},
            **{name: now[name] for name in ("stored", "evicted", "retired", "refused", "lost")},
            **{f"{name}_mean": now[name] / now["entries"] for name in ("age", "uses", "score") if now["entries"]},
            "failed_rows": now["failed"], "size": len(self.entries), "bytes": self.bytes_of(self.entries),
            "padding": 1 - sum(mask.sum() for mask in masks) / sum(mask.numel() for mask in masks),
            "tasks": len({entry.prompt for entry in self.entries}), "rollouts": self.counts["generated"] * SIZE,
        }  # fmt: skip
        if self.setting("reward"):
            found[f"judged_by/{self.setting('reward')}"] = 1.0
        if self.refill:
            found |= {"rounds": self.rounds, "refilled_fraction": now["refilled"] / SLOTS}
        if self.setting("iterations") and self.batches > 1:
            found["replay_ratio"] = update / (self.batches - 1)
        return found | self.log_functions()

    def log_functions(self) -> dict[str, float]:
        """For each of several functions, the share of groups that it rewards alike, and of those otherwise live."""
        found, live = {}, [std(total) > 1e-4 for total in np.nansum(self.rewards * self.weights, axis=2)]
        for number, name in enumerate(self.session.trainer.reward_func_names if len(self.weights) > 1 else []):
            of_one = self.rewards[..., number]
            groups = [slot for slot in range(SLOTS) if not np.isnan(of_one[slot]).all()]
            alike = [np.nanmax(of_one[slot]) - np.nanmin(of_one[slot]) < 1e-4 for slot in groups]
            if groups:
                both = [one and live[slot] for one, slot in zip(alike, groups, strict=True)]
                found |= {f"dead_fraction/{name}": np.mean(alike), f"live_without/{name}": np.mean(both)}
        return found

    def in_log(self, updates: Any) -> dict[str, float]:
        """What an entry of the log must have of these updates."""
        found: dict[str, list[float]] = {}
        logs = self.session.trainer.logs
        for values in (one for update in updates for one in (*self.logged.get(update, []), logs[update].metrics())):
            for key, value in values.items():
                found.setdefault(key, []).append(value)
        return {
            f"replay/{key}": values[-1] if key in LATEST else sum(values) / (key in SUMMED or len(values))
            for key, values in found.items()
        }

    def look(self) -> None:
        """Judges the fresh groups, and those that are generated again in the slots of dead ones."""
        self.prompts, self.solved, self.judged = next(self.turns), set(), []
        held, again, self.rounds = self.judge([*range(SLOTS)]), self.refill, 0
        for _ in range(again.get("rounds", 0)):
            slots = np.flatnonzero(held["dead"])
            if SLOTS - len(slots) >= again.get("until", 1.0) * SLOTS - 1e-9:
                break
            found = self.judge(slots)
            self.rounds += 1
            live = ~found["dead"]
            for name, values in found.items():
                held[name][slots[live]] = values[live]
            self.counts["refilled"] += int(live.sum())
        for total, scored, dead in self.judged:
            for name, at in (("at_lowest", total < self.lowest + 1e-4), ("at_highest", total > self.highest - 1e-4)):
                self.counts[name] += int((dead & (at | ~scored).all(axis=1) & scored.any(axis=1)).sum())
        if np.ptp(held["source"][..., 0]) and (self.policy[1] == "batch" or self.policy[2] == "normalize_then_sum"):
            batch = held["rewards"].astype(np.float32).tolist()  # as they travel
            advantages = np.array([advantages_by_hand.advantages(group, batch, *self.policy) for group in batch])
            held |= self.shape(advantages, held["total"], held["trains"])
        for row, (call, source) in enumerate(held["source"].reshape(-1, 2).tolist()):
            found, scored = (
                original(batch, of, self.watch.pad)
                for batch, of in ((self.watch.steps[-1][0], row), (self.scored[call], source))
            )
            assert_same_row({**found, "advantage": 0.0}, {**scored, "advantage": 0.0})
        for name in ("rewards", "total", "trains", "own", "dead"):
            setattr(self, name, held[name])
        for kept, name in ((self.trained, "own"), (self.masked, "masked"), (self.failed, "failed")):
            kept.append(held[name].ravel())

    def judge(self, slots: Any) -> dict[str, Any]:
        """Counts what the next call of the reward functions gives for groups of these slots, and returns it by group,
        with the calls and the rows of their batches."""
        call, count = self.calls, len(slots)
        batch, script = self.scored[call], self.script[:, min(call, self.script.shape[1] - 1)]
        self.calls += 1
        rewards = script[:, :count].transpose(1, 2, 0).copy()  # (slots, size, functions)
        total = np.where(np.isnan(rewards).all(2), np.nan, np.nansum(rewards * self.weights, axis=2))
        if self.setting("reward"):
            total = rewards[..., 0]
        advantages = batch["advantages"].double().numpy().reshape(count * SIZE, -1)
        mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).numpy()
        trains = mask.any(axis=1).reshape(count, SIZE)
        if advantages.shape[1] == mask.shape[1] > 1:  # one a token: their mean size stands for them
            signs = np.where((advantages * mask).sum(axis=1) < 0, -1, 1)
            advantages = signs * (np.abs(advantages) * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
            self.watch.advantages = None
            self.as_trl = False
        found = self.shape(advantages.reshape(count, SIZE), total, trains)
        live, scored, passes = int((~found["dead"]).sum()), ~np.isnan(total), self.passes(total)
        self.counts["generated"] += count
        self.counts["dead"] += count - live
        self.counts["all_wrong"] += int((scored.any(axis=1) & ~passes.any(axis=1)).sum())
        self.counts["all_right"] += int((scored.any(axis=1) & (passes | ~scored).all(axis=1)).sum())
        self.counts["failed"] += int((~scored).sum())
        self.lowest, self.highest = np.nanmin([self.lowest, *total.flat]), np.nanmax([self.highest, *total.flat])
        self.judged.append((total.copy(), scored, found["dead"].copy()))
        unlike = np.array([std(of_one) > 1e-4 for of_one in total])
        self.counts["untrained"] += int((found["dead"] & unlike & ~(trains & ~found["masked"]).all(axis=1)).sum())
        self.solved |= {*self.prompts[slots][passes.sum(axis=1) >= self.setting("retire_passes", ALWAYS)].tolist()}
        if scored.any():
            rate = passes.sum() / scored.sum()
            self.pass_rate = rate if self.pass_rate is None else self.pass_rate * 31 / 32 + rate / 32
            self.seen += count
            self.live += live
            self.seen_at_live = self.seen if live else self.seen_at_live
        source = np.stack([np.full(count * SIZE, call), np.arange(count * SIZE)], axis=1).reshape(count, SIZE, 2)
        failed = ~scored & scored.any(axis=1, keepdims=True)
        return {"rewards": rewards, "total": total, "trains": trains, "failed": failed, "source": source, **found}

    def shape(self, advantages: Any, total: Any, trains: Any) -> dict[str, Any]:
        """What the plugin makes of groups' advantages, which rows it masks, and which groups are dead then."""
        masked = np.isnan(advantages)
        own = advantages = np.where(masked, 0.0, advantages)
        if self.plugin == "advantages":
            masked[:, -1] |= self.plugin_masks(self.watch.updates[-1])
            own = np.where(masked, 0.0, shaped(own, self.watch.updates[-1]) if not self.setting("mixer") else own * 2)
        trains = trains & ~masked
        dead = (self.as_trl & (np.ptp(own, axis=1) < 1e-4)) | ~((np.abs(own) > 1e-4) & trains).any(axis=1)
        if self.setting("reward"):
            alike = np.ptp(total, axis=1) == 0
            if self.plugin == "advantages":
                alike &= ~one_for_all(own, trains) | one_for_all(advantages, trains)
            dead |= alike
        return {"own": own, "masked": masked, "dead": dead}

    def plugin_masks(self, update: int) -> bool:
        """Whether the plugin masks a row of each group; not where rows are mixed."""
        return update % 2 == 1 and not self.setting("mixer")

    def passes(self, total: Any) -> Any:
        """Which rows pass, `(slots, size)`."""
        return total >= self.setting("pass_reward")

    def settle(self, update: int, solved: set[int]) -> None:
        """Entries leave whose prompt is solved or whose time is over, and the last batch's groups enter."""
        left = [entry for entry in self.entries if entry.prompt not in solved]
        self.counts["retired"] += len(self.entries) - len(left)
        self.note(len(self.entries) - len(left), "an entry left: its prompt was solved (replay_retire_passes)")
        for entry in left:
            self.ended.update(self.limits_of(entry, update))
        left = [entry for entry in left if not self.limits_of(entry, update)]
        new = [entry for entry in self.waiting or [] if entry.prompt not in solved]
        self.refuse(len(self.waiting or []) - len(new), SOLVED)
        small = [entry for entry in new if self.fits([entry])]
        self.refuse(len(new) - len(small), "it alone is larger than replay_max_bytes")
        new = small
        self.waiting = None
        there = left + new
        over = max(len(there) - self.setting("buffer_size"), 0)
        held = set(self.session.buffer)
        if self.setting("evictor") == "reservoir":
            kept = [entry for entry in there if entry.serial in held]
            fewer = len(there) - over - len(kept)  # by their bytes
            if "replay_max_bytes" in self.replay and fewer > 0:
                self.warned[BYTES_REACHED], fewer = 1, 0
            self.same("too few stay:", fewer, 0)
            self.same("bytes fit:", self.fits(kept), True)
        else:
            ranked = sorted(there, key=lambda entry: self.rank(entry, there))
            dropped = sum(self.newer(entry, there) > 1 for entry in there if self.setting("evictor") == DROPPING)
            kept = ranked[max(over, dropped) :]
            while not self.fits(kept):
                self.warned[BYTES_REACHED] = 1
                kept = kept[1:]
            kept.sort(key=lambda one: one.serial)
        over = len(there) - len(kept)
        self.same("stored are", sorted(held), [entry.serial for entry in kept])
        for one in (*(entry.serial for entry in there), "1"):
            self.same(f"{one!r} in the buffer is", one in self.session.buffer, one in held)
        stored = sum(entry.serial in held for entry in new)
        self.counts["stored"] += stored
        self.counts["evicted"] += over - (len(new) - stored)
        evictor = self.setting("evictor")
        self.note(len(new) - stored, f"the buffer was full, and the evictor {evictor} ranked a new group lowest")
        self.entries = kept

    def reasons_to_hold(self, entry: Entry, update: int) -> list[str]:
        """Why an entry can't be replayed in the batch at hand."""
        blind = entry.pictured and self.watch.steps[-1][0].get("pixel_values") is None
        held = ["too new"] * (entry.update >= update) + ["has images, the batch none"] * blind
        return held + self.limits_of(entry, update)

    def limits_of(self, entry: Entry, update: int) -> list[str]:
        """Limits by which an entry is replayed no more."""
        aged = update - entry.update > self.setting("max_age", ALWAYS)
        used = entry.uses >= self.setting("max_uses", ALWAYS)
        return ["replay_max_age"] * aged + ["replay_max_uses"] * used

    def fits(self, kept: list[Entry]) -> bool:
        """Whether so many bytes may be kept (`replay_max_bytes`)."""
        return self.bytes_of(kept) <= self.setting("max_bytes", np.inf)

    def bytes_of(self, kept: list[Entry]) -> int:
        table = self.session.buffer.table
        columns = [getattr(table, name) for name in table.names if name not in ("peers", "newer")]
        beside = 168 + 2 * 4 + sum(column.itemsize * prod(column.shape[1:]) for column in columns)
        return sum(self.costs[one.serial] + beside for one in kept)

    def refuse(self, count: int, reason: str) -> None:
        self.counts["refused"] += count
        self.note(count, f"a group was refused: {reason}")

    def note(self, count: int, reason: str) -> None:
        self.reasons.update({reason: count} if count else {})

    def check_table(self) -> None:
        """Each entry's score and number of uses before this batch, its age, and the entries of its prompt."""
        table = self.session.buffer.table
        assert not table.score.flags.writeable
        rows = table.rows_of([entry.serial for entry in self.entries])
        self.same("generated at", table.update[rows].tolist(), [entry.update for entry in self.entries])
        self.same("used", table.uses[rows].tolist(), [entry.uses for entry in self.entries])
        prompts, serials = np.array([(entry.prompt, entry.serial) for entry in self.entries]).reshape(-1, 2).T
        same = prompts[:, None] == prompts
        self.same("of one prompt are", table.peers[rows].tolist(), same.sum(axis=1).tolist())
        newer = (same & (serials > serials[:, None])).sum(axis=1)
        self.same("newer ones of it are", table.newer[rows].tolist(), newer.tolist())
        for name in self.entries[0].columns if self.entries else ():
            expected = np.array([entry.columns[name] for entry in self.entries], float)
            np.testing.assert_allclose(getattr(table, name)[rows], expected, rtol=1e-4, atol=1e-4, err_msg=name)

    @staticmethod
    def newer(entry: Entry, there: list[Entry]) -> int:
        """How many are newer of its prompt."""
        return sum(other.prompt == entry.prompt and other.serial > entry.serial for other in there)

    def rank(self, entry: Entry, there: list[Entry]) -> Any:
        newer, score = self.newer(entry, there), round(entry.score, 4)
        of_evictor = {
            "heap": (score,), "fifo": (), "prompt_balanced": (-newer, score), DROPPING: (newer < 2, score),
        }  # fmt: skip
        return (*of_evictor[self.setting("evictor")], entry.serial)

    def replaceable(self) -> list[int]:
        """Slots that may be filled, in order."""
        by_deviation = sorted(range(SLOTS), key=lambda slot: (not self.dead[slot], self.deviations()[slot]))
        selector, _, share = self.setting("selector", "zero_std").partition("(share=")
        slots = [slot for slot in range(SLOTS) if self.dead[slot]]
        if selector == "always":
            slots = by_deviation[: int(float(share[:-1]) * SLOTS + 1e-9)]
        if self.setting("kl") == "all_wrong":
            slots = [slot for slot in slots if not self.is_all_wrong(slot)]
        return slots

    def deviations(self) -> list[float]:
        return [round(std(rewards), 6) for rewards in self.total]

    def is_all_wrong(self, slot: int) -> bool:
        """Tells whether it is a dead group in which no row passes, and some row was scored."""
        scored = ~np.isnan(self.total[slot])
        return bool(self.dead[slot] and scored.any() and not self.passes(self.total)[slot].any())

    def waits(self, update: int) -> bool:
        """Whether nothing may be drawn yet (`replay_start`)."""
        start = self.setting("start")
        if not isinstance(start, str):
            return update < start
        if start != "adaptive":
            return self.pass_rate < float(start[10:-1])
        is_early = update < self.session.trainer.state.max_steps // 4 and not self.has_begun
        few = 0 < self.counts["stored"] < self.setting("buffer_size") // 4
        sparse = 0 < self.live < 0.1 * max(self.seen, 40)
        still_come = (self.seen - self.seen_at_live) * self.live <= 4 * max(self.seen_at_live, 40)
        return is_early and few and sparse and still_come

    def check_draws(self, update: int, generated: bool) -> None:
        """What was put into which slots is what had to be."""
        taken = self.watch.taken[-1] if generated or self.composed_anew() else {}
        found: dict[int, list[tuple[int, int, int]]] = {}  # slot → row, serial, row of the entry
        for row, (serial, source) in sorted(taken.items()):
            found.setdefault(row // SIZE, []).append((row % SIZE, serial, source))
        slots = self.replaceable() if generated else [*range(SLOTS)]
        most = 0 if self.waits(update) else int(self.setting("max_fraction", 1.0) * SLOTS + 1e-9)
        held = [self.reasons_to_hold(entry, update) for entry in self.entries]
        eligible = [entry for entry, reasons in zip(self.entries, held, strict=True) if not reasons]
        if generated:
            self.note_choice(slots, most)
        wanted = min(len(slots), most)
        if wanted:
            self.note_shortage(slots, wanted, len(eligible), {reason for reasons in held for reason in reasons})
        self.drawn = {serial for rows in found.values() for _, serial, _ in rows}
        if self.setting("mixer"):
            self.check_rows(found, slots if wanted else [], most, eligible)
        else:
            count = min(len(slots), most, len(eligible))
            drawn = [found[slot][0][1] for slot in slots if slot in found]
            self.same("filled slots are", [*found], sorted(slots[:count]))
            for rows in found.values():
                self.same("rows of a group are", rows, [(row, rows[0][1], row) for row in range(SIZE)])
            self.check_sampler(drawn, eligible)
            self.watch.chances = self.chances(eligible)
        self.same("different groups are", len(self.drawn), len(found))
        self.has_begun |= bool(self.drawn)
        if not found and not generated and self.session.trainer.num_iterations == 6:
            self.warned[REPEATED] = 1
        for entry in self.entries:
            is_drawn = entry.serial in self.drawn
            if is_drawn and generated:
                added = {"entries": 1, "age": update - entry.update, "uses": entry.uses + 1, "score": entry.score}
                self.counts |= {name: self.counts[name] + value for name, value in added.items()}
            entry.uses += is_drawn
        self.counts["replaced" if generated else "iterated"] += len(found)
        self.counts["rows"] += len(taken) * generated
        self.counts["groups"] += SLOTS * generated
        self.filled = found

    def note_choice(self, slots: list[int], most: int) -> None:
        """Why fewer slots are filled than there are groups."""
        start = self.setting("start")
        limit = "replay_max_fraction"
        if not most and self.setting("max_fraction", 1.0) > 0.3:
            told = {0: "", 2: "", "adaptive": "='adaptive' (sparse rewards, too few entries yet)"}
            limit = f"replay_start{told.get(start, f'={start!r}')}"
        if len(slots) > most:
            self.note(1, f"{limit} allows {most} of {SLOTS} groups")
        elif not slots and self.setting("kl") == "all_wrong" and any(map(self.is_all_wrong, range(SLOTS))):
            kept = "all-wrong groups stay: replay_kl='all_wrong' trains their KL term"
            self.note(1, f"{kept}, and no other group was replaceable")
        elif not slots:
            self.note(1, "no group was dead: nothing to replace")

    def note_shortage(self, slots: list[int], wanted: int, eligible: int, held: set[str]) -> None:
        """Why fewer entries are drawn than there are slots."""
        if not self.entries:
            never = "" if self.counts["stored"] else ": no live group has been stored yet"
            self.note(1, f"the buffer was empty{never}")
            return
        left = " left a slot as it was that a stored group could have filled"
        self.note(min(len(slots), eligible) - min(wanted, eligible), f"replay_max_fraction{left}")
        room = self.setting("buffer_size") - len(self.entries)
        for limit, count in self.ended.most_common(1):
            self.note(min(max(wanted - eligible, 0), count, room), f"{limit}{left}")
        if not eligible or (eligible < wanted and not self.setting("mixer")):
            told = f" (held back: {', '.join(sorted(held))})" if held else ""
            self.note(1, f"the buffer held fewer eligible groups than slots{told}")

    def composed_anew(self) -> bool:
        """Whether a further iteration has a batch of its own."""
        return self.watch.steps[-1][1] is not self.watch.steps[self.watch.generated][1]

    def chances(self, eligible: list[Entry]) -> dict[int, float]:
        """How likely each entry is drawn, beside the least likely one."""
        peers = Counter(one.prompt for one in self.entries if self.setting("sampler") == "prompt_balanced")
        weights = {one.serial: max(one.score, 0.0) / max(peers[one.prompt], 1) for one in eligible}
        least = min((weight for weight in weights.values() if weight > 0), default=np.inf)
        return {serial: max(weight / least, 1.0) for serial, weight in weights.items()}

    def check_sampler(self, drawn: list[int], eligible: list[Entry]) -> None:
        sampler = self.setting("sampler")
        by_serial = {entry.serial: entry for entry in eligible}
        self.same("not eligible are", set(drawn) - by_serial.keys(), set())
        if sampler == "least_used":
            uses = sorted(entry.uses for entry in eligible)
            self.same("drawn are uses", sorted(by_serial[serial].uses for serial in drawn), uses[: len(drawn)])
        elif sampler == "proportional":
            signs = sorted((entry.score > 0 for entry in eligible), reverse=True)
            self.same("scores above 0 are", [by_serial[serial].score > 0 for serial in drawn], signs[: len(drawn)])
        elif sampler in ("newest", "top"):
            key = {"newest": lambda one: -one.serial, "top": lambda one: (-round(one.score, 4), -one.serial)}[sampler]
            self.same("drawn are", drawn, [entry.serial for entry in sorted(eligible, key=key)][: len(drawn)])

    def check_rows(self, found: Any, slots: list[int], most: int, eligible: list[Entry]) -> None:
        """The best rows of an entry of the slot's prompt take the places of the worst fresh ones, if not better."""
        by = self.setting("sampler").partition("'")[2][:-2]
        count = int(self.setting("mixer").partition("=")[2][:-1])
        key = {"newest": lambda one: -one.serial, "score": lambda one: (-round(one.score, 4), -one.serial)}
        expected: dict[int, list[tuple[int, int, int]]] = {}
        empty, wanted, drawn = [], min(len(slots), most), set()
        for slot in slots:
            fitting = [one for one in eligible if one.prompt == self.prompts[slot] and one.serial not in drawn]
            if by == "uniform":
                fitting = [entry for entry in fitting if slot in found and entry.serial == found[slot][0][1]]
            if not fitting:
                empty.append(slot)
                continue
            entry = min(fitting, key=key.get(by, key["newest"]))
            drawn.add(entry.serial)
            scored_by = [~np.isnan(rewards).all(axis=0) for rewards in (entry.rewards, self.rewards[slot])]
            same_functions = self.setting("advantages") == "stored" or np.array_equal(*scored_by)
            rows = self.injected(entry, slot, count)
            if not same_functions:
                self.note(len(rows), UNMIXED)
            if not rows or not same_functions:
                self.note(1, "the mixer took no stored row for a slot")
            elif self.would_be_dead(entry, slot, rows):
                what = "the stored rows alone" if self.setting("advantages") == "split" else "a mixed group"
                self.note(1, f"{what} would have been dead")
            elif len(expected) < most:
                expected[slot] = rows
        for slot in empty[: max(wanted - len(drawn), 0)] if eligible else []:
            is_there = any(entry.prompt == self.prompts[slot] for entry in eligible)
            further = "a slot's prompt has no further group: each is replayed once a batch"
            self.note(1, further if is_there else "no group of a slot's prompt can be replayed")
        if by == "uniform":
            expected = {slot: rows for slot, rows in expected.items() if slot in found}
        self.same("rows beside fresh ones are", found, dict(sorted(expected.items())))

    def injected(self, entry: Entry, slot: int, count: int) -> list[tuple[int, int, int]]:
        stored = np.where(entry.trains, entry.total, -np.inf)
        fresh = self.total[slot]
        pairs = zip(np.argsort(-stored, kind="stable")[:count], np.argsort(fresh, kind="stable")[:count], strict=True)
        taken = [(int(to), int(of)) for of, to in pairs if stored[of] > -np.inf and stored[of] >= fresh[to]]
        return sorted((to, entry.serial, of) for to, of in taken)

    def would_be_dead(self, entry: Entry, slot: int, rows: list[tuple[int, int, int]]) -> bool:
        mode, born = self.setting("advantages"), self.watch.origin[entry.serial]
        mixed, trains, own = self.rewards[slot].copy(), self.trains[slot].copy(), self.own[slot] * ~self.dead[slot]
        for to, _, of in rows:
            mixed[to], trains[to] = entry.rewards[of], entry.trains[of]
            own[to] = self.trained[born[0]][born[1] * SIZE + of]
        if mode == "stored":
            return not (trains & (np.abs(own) > 1e-3)).any()
        among = [to for to, _, _ in rows] if mode == "split" else range(SIZE)
        if self.policy[2] == "normalize_then_sum":
            values = advantages_by_hand.normalized_sums(mixed[among], self.weights)
        else:
            values = np.nansum(mixed[among] * self.weights, axis=1)
        alike = self.setting("reward") and np.ptp(mixed[among, 0]) == 0
        return bool(alike or np.ptp(values) < 1e-3 or not trains[among].any())

    def collect(self, update: int) -> None:
        """The live groups of the batch wait, unless their log-probs stay unknown or their prompt is solved."""
        watch, step = self.watch, len(self.watch.steps) - 1
        known = "old_per_token_logps" in watch.steps[-1][0] or self.setting("record") == "forward"
        seen = [slot for slot in range(SLOTS) if not self.dead[slot] and (known or slot not in self.filled)]
        slots = [slot for slot in seen if self.prompts[slot] not in self.solved]
        self.refuse(len(seen) - len(slots), SOLVED)
        self.counts["lost"] += sum(not self.dead[slot] and slot in self.filled and not known for slot in range(SLOTS))
        serials = sorted(serial for serial, (born, _) in watch.origin.items() if born == step)
        self.same("groups to be stored are", [watch.origin[serial][1] for serial in serials], slots)
        score = SCORES[self.setting("scorer", "advantage_std")]
        out = (self.masked[-1] | self.failed[-1]).reshape(SLOTS, SIZE)
        self.waiting = []
        for serial, slot in zip(serials, slots, strict=True):
            total, trains = self.total[slot], self.trains[slot] & ~out[slot]
            value = float(score(total, self.own[slot], update))
            columns, prompt = {**self.columns(slot, out[slot]), "score": value}, int(self.prompts[slot])
            pictured = "images" in original(watch.steps[-1][0], slot * SIZE, watch.pad)
            entry = Entry(serial, prompt, columns, update, self.rewards[slot], total, trains, value, pictured)
            self.waiting.append(entry)

    def columns(self, slot: int, masked: Any) -> dict[str, Any]:
        """What the table must have of a group of the last batch, in which these rows are masked."""
        watch, total = self.watch, self.total[slot]
        places = range(slot * SIZE, (slot + 1) * SIZE)
        rows = [original(watch.steps[-1][0], row, watch.pad) for row in places]
        logps = [watch.policy[-1][place][row["mask"]].double() for place, row in zip(places, rows, strict=True)]
        items = np.array([counted_tokens(row) for row in rows])
        scored = total[~np.isnan(total)]
        return {
            "row_rewards": self.rewards[slot], "row_reward": total, "row_advantage": self.own[slot],
            "row_length": [len(row["ids"]) for row in rows], "row_items": items, "row_masked": masked,
            "row_logp": [float(one.mean()) for one in logps], "items": items[~masked].sum(), "origin": 0, "owner": 0,
            "tokens": sum(map(len, logps)),
            "reward_mean": scored.mean() if len(scored) else 0.0, "reward_std": std(total),
        }  # fmt: skip

    def flags(self, update: int, generated: bool) -> tuple[list[bool], list[bool]]:
        """Rows that are silent, and rows that are in no denominator: those of which none is left stay there."""
        watch, unfilled = self.watch, self.setting("unfilled", "keep")
        masked, silent = np.zeros((SLOTS, SIZE), bool), np.zeros((SLOTS, SIZE), bool)
        for row in range(SLOTS * SIZE):
            slot, place = divmod(row, SIZE)
            taken = watch.taken[-1].get(row)
            if taken is not None:
                born, source = watch.source(*taken)
                masked[slot, place] = self.masked[born][source] or self.failed[born][source]
            else:
                masked[slot, place] = self.masked[-1][row] or not generated
        before = masked.all(axis=1)
        if self.plugin == "plan":
            masked[:, 1] |= update % 2 == 1
            silent[:, 2] = True
        empty = [slot for slot in range(SLOTS) if generated and self.dead[slot] and slot not in self.filled]
        masked[empty] |= unfilled == "exclude"
        silent[empty] |= unfilled == "mask"
        whole = masked.all(axis=1)
        self.counts["excluded"] += int(whole.sum()) * generated
        self.counts["masked"] += int(masked[~whole].sum()) * generated
        mute, stays = masked | silent, np.isin(np.arange(SLOTS), empty)
        nothing = mute.all(axis=1)
        if self.plugin == "plan":
            is_zero = (watch.steps[-1][1]["advantages"] == 0).numpy().reshape(SLOTS, SIZE)  # no rounding error is
            zeroed = (self.factors[-1] == 0).reshape(SLOTS, SIZE).any(axis=1)
            nothing |= zeroed & (mute | is_zero).all(axis=1)
        if generated:
            self.counts["muted"] += int(mute[~stays].sum())
            self.counts["dead_after"] += int((nothing | stays).sum())
        else:
            stays = ~np.isin(np.arange(SLOTS), [*self.filled])
        self.note(int((nothing & ~before & ~stays).sum()), TAKEN_AWAY)
        left = not masked.all()
        return (masked | silent).ravel().tolist(), (masked & left).ravel().tolist()

    def advantages(self, step: int) -> Any:
        """`(rows,)`: those of a composed batch."""
        watch, mode = self.watch, self.setting("advantages")
        if self.setting("mixer"):
            policy = self.policies[step]
            found = advantages_by_hand.mixed_advantages(watch, step, mode, *policy).nan_to_num().numpy()
            found = found * (2 if self.plugin == "advantages" else 1)
        else:
            found = self.trained[step].copy()
            for row, stored in watch.taken[step].items():
                born, source = watch.source(*stored)
                found[row] = self.trained[born][source]
        return found * self.factors[step]

    def finish(self) -> None:
        """After training: the last groups have entered, and all is counted."""
        self.settle(self.session.trainer.state.global_step, set())
        self.check_table()
        counters = self.session.totals.counters
        for name, count in self.counts.items():
            self.same(f"counted {name} are", counters[name], pytest.approx(count, rel=1e-4))
        if "uniform" in str(self.setting("sampler")) and self.setting("mixer"):
            return  # what was drawn is not known where it was not taken
        reasons = self.reasons + Counter({UNTRAINED: self.counts["untrained"]})
        for reason in reasons.keys() | self.session.totals.reasons.keys():
            self.same(f"counted {reason!r} are", self.session.totals.reasons[reason], reasons[reason])
