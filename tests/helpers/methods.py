"""Methods of papers as plugins of a few lines each, from documented API only. Rows replace others where the paper
appends them: adapted."""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_replay import EvictorSpec, MixerSpec, Preset, SelectorSpec, hookimpl

EVERY_GROUP = {"replay_selector": "always", "replay_selector_kwargs": {"share": 1.0}, "replay_record": "forward"}
SAME_PROMPT = {"replay_sampler": "same_prompt", "replay_start": 0}
INJECTED = {"replay_mixer": "inject", "replay_mixer_kwargs": {"rows": 2}, **EVERY_GROUP, **SAME_PROMPT}
"""Two stored rows of the same prompt into every group, live ones included."""


class RePO:
    """Rows cached for a prompt, of most variance, beside the fresh ones, each kind normalised apart (2506.09340)."""

    @hookimpl
    def trl_replay_strategies(self) -> Any:
        yield MixerSpec("spread", lambda rows=2, cached=8: Spread(rows, cached), "best and worst, for the last fresh")

    @hookimpl
    def trl_replay_presets(self) -> Any:
        settings = {"replay_sampler_kwargs": {"entries": 2}, "replay_mixer": "repo/spread"}
        split = {"replay_advantages": "split"}
        yield Preset("repo", {**EVERY_GROUP, **SAME_PROMPT, **settings, **split}, "cached rows of most variance")


class Spread:
    def __init__(self, rows: int, cached: int) -> None:
        self.rows, self.cached = rows, cached

    def __call__(self, table: Any, drawn: Any, slots: Any, context: Any) -> Any:
        taken = np.full(slots.advantages.shape, -1)
        rewards = np.where(drawn[:, :, None] >= 0, table.row_reward[drawn], -np.inf).reshape(len(drawn), -1)
        full = np.isfinite(rewards).sum(axis=1) >= self.cached
        order = np.argsort(-rewards[full], axis=1, kind="stable")
        taken[full, -self.rows :] = np.roll(order, self.rows // 2, axis=1)[:, : self.rows]  # the worst, then the best
        return taken


class RLEP:
    """Two successes of a pool that never changes, normalised with the fresh rows (2507.07451)."""

    @hookimpl
    def trl_replay_strategies(self) -> Any:
        yield EvictorSpec("first", lambda: lambda table, context: -table.serial, "what came first stays")
        yield MixerSpec("successes", lambda: self.mix, "two successes for the two worst rows")

    def mix(self, table: Any, drawn: Any, slots: Any, context: Any) -> Any:
        taken = np.full(slots.advantages.shape, -1)
        for slot, entry in enumerate(drawn[:, 0]):
            pool = context.rng.permutation(np.flatnonzero(table.row_reward[entry] > 0.5))[:2]
            worst = np.argsort(slots.reward[slot], kind="stable")[: len(pool)]
            taken[slot, worst] = pool
        return taken

    @hookimpl
    def trl_replay_presets(self) -> Any:
        settings = {"replay_evictor": "rlep/first", "replay_mixer": "rlep/successes", "replay_advantages": "joint"}
        by = {"replay_sampler_kwargs": {"by": "uniform"}}
        yield Preset("rlep", {**EVERY_GROUP, **SAME_PROMPT, **settings, **by}, "successes of a pool, joint advantages")


class ARPO:
    """One stored success where a whole group failed (2505.16282)."""

    @hookimpl
    def trl_replay_strategies(self) -> Any:
        yield SelectorSpec("failed", lambda: self.failed, "groups of little spread and a low mean")
        yield MixerSpec("success", lambda: self.mix, "one success for one row")

    def failed(self, groups: Any, context: Any) -> Any:
        return np.flatnonzero((groups.reward_std < 0.05) & (groups.reward_mean < 0.2))

    def mix(self, table: Any, drawn: Any, slots: Any, context: Any) -> Any:
        taken = np.full(slots.advantages.shape, -1)
        for slot, entry in enumerate(drawn[:, 0]):
            successes = np.flatnonzero(table.row_reward[entry] > 0.1)
            taken[slot, context.rng.integers(taken.shape[1])] = context.rng.choice(successes)
        return taken

    @hookimpl
    def trl_replay_presets(self) -> Any:
        settings = {"replay_selector": "arpo/failed", "replay_mixer": "arpo/success", "replay_evictor": "fifo"}
        settings |= {"replay_record": "loss"}  # groups that failed are never stored
        by = {"replay_sampler_kwargs": {"by": "uniform"}}
        yield Preset("arpo", {**SAME_PROMPT, **settings, **by}, "a success where all failed")


class ExGRPO:
    """One correct row of a prompt that is partly solved: the one the policy was surest of (2510.02245, row mix)."""

    @hookimpl
    def trl_replay_strategies(self) -> Any:
        yield MixerSpec("surest", lambda: self.mix, "the correct row of highest mean log-prob")

    def mix(self, table: Any, drawn: Any, slots: Any, context: Any) -> Any:
        correct = table.row_reward[drawn[:, 0]] > 0.5
        surest = np.where(correct, table.row_logp[drawn[:, 0]], -np.inf).argmax(axis=1)
        taken = np.full(slots.advantages.shape, -1)
        taken[:, -1] = np.where(correct.any(axis=1), surest, -1)
        return taken

    @hookimpl
    def trl_replay_score(self, groups: Any, context: Any) -> Any:
        solved = (groups.reward > 0.5).mean(axis=1)
        return np.where((solved > 0) & (solved < 1), np.exp(-8 * (solved - 0.5) ** 2), np.nan)

    @hookimpl
    def trl_replay_presets(self) -> Any:
        settings = {"replay_mixer": "exgrpo/surest", "replay_advantages": "joint", "replay_retire_passes": 4}
        by = {"replay_sampler_kwargs": {"by": "score"}}
        yield Preset("exgrpo", {**EVERY_GROUP, **SAME_PROMPT, **settings, **by}, "the surest correct row")


class GFPO:
    """The shortest k of G rows train, normalised among themselves (TRL's own until 1.13)."""

    def __init__(self, keep: int = 2) -> None:
        self.keep = keep

    @hookimpl
    def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
        shortest = np.argsort(groups.lengths, axis=1, kind="stable")[:, : self.keep]
        kept = np.take_along_axis(groups.reward, shortest, axis=1)
        centred = kept - kept.mean(axis=1, keepdims=True)
        shaped = np.full(groups.advantages.shape, np.nan)
        np.put_along_axis(shaped, shortest, centred / (kept.std(axis=1, ddof=1, keepdims=True) + 1e-4), axis=1)
        return shaped


class ZScore:
    """Rewards against the mean and deviation of all rewards of earlier batches (trl#7291)."""

    def __init__(self) -> None:
        self.count, self.sum, self.squares = 0.0, 0.0, 0.0

    @hookimpl
    def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
        if not self.count:
            return None
        mean = self.sum / self.count
        return (groups.reward - mean) / (np.sqrt(max(self.squares / self.count - mean**2, 0.0)) + 1e-4)

    @hookimpl
    def trl_replay_select(self, groups: Any, context: Any) -> None:
        self.count += groups.reward.size
        self.sum += groups.reward.sum()
        self.squares += (groups.reward**2).sum()


METHODS = {"repo": RePO, "rlep": RLEP, "arpo": ARPO, "exgrpo": ExGRPO, "gfpo": GFPO, "zscore": ZScore}
