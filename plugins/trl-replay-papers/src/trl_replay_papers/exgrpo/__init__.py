"""ExGRPO: prompts that are partly solved come again, with the stored success that the policy was surest of
(arXiv 2510.02245).

`exgrpo` is the plugin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import (
    ConfigurationError,
    Context,
    Groups,
    InputsContext,
    MixerSpec,
    Preset,
    PromptTable,
    ReplayConfig,
    ScorerSpec,
    Table,
    hookimpl,
    reaches,
)

from ..arguments import finite
from ..cards import text_of

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Row: TypeAlias = dict[str, Any]

SETTINGS: dict[str, Any] = {
    "replay_buffer_size": 1024,
    "replay_scorer": "exgrpo/half_solved",
    "replay_evictor": "prompt_balanced",
    "replay_sampler": "same_prompt",
    "replay_mixer": "exgrpo/surest",
    "replay_advantages": "joint",
    "replay_selector": "always(share=1.0)",
    "replay_record": "forward",
    "replay_correction": "shaped(gamma=0.1)",
    "replay_start": "pass_rate(0.35)",
}


class ExGRPO:
    """Asks partly solved prompts again, in half of each batch, and puts one of their successes beside the fresh rows.

    Args:
        share (`float`, *optional*, defaults to `0.5`): Of a batch's prompts, those that may be asked again; a fraction
            of a prompt is rounded up or down at random.
        pass_reward (`float`, *optional*, defaults to `0.5`): The least weighted reward of a success.
    """

    needs_success = True

    def __init__(self, share: float = 0.5, pass_reward: float = 0.5) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigurationError(f"ExGRPO: share={share!r} can't be used: give a number from 0 to 1.")
        self.share = share
        self.pass_reward = finite("ExGRPO", "pass_reward", pass_reward)

    def half_solved(self, groups: Groups, context: Context) -> Floats:
        """exp(−(k − 4)² / 2) where k in eight passed; NaN, so that it is not stored, where none or all did. A row that
        trains nothing did not."""
        solved = (reaches(groups.reward, self.pass_reward) & groups.trains).mean(axis=1)
        worth = np.exp(-((8 * solved - 4) ** 2) / 2)
        return np.where((solved > 0) & (solved < 1), worth, np.nan)

    def surest(self, table: Table, drawn: Ints, slots: Groups, context: Context) -> Ints:
        """The success with the highest mean log-prob takes the slot's last row."""
        count, size = slots.advantages.shape
        passed = reaches(table.row_reward, self.pass_reward) & table.row_trains
        passed = passed[drawn[:, 0]] & (drawn[:, :1] >= 0)
        logp = np.where(passed, table.row_logp[drawn[:, 0]], -np.inf)
        taken = np.full((count, size), -1)
        taken[:, -1] = np.where(passed.any(axis=1), logp.argmax(axis=1), -1)
        return taken

    @hookimpl
    def trl_replay_preflight(self, trainer: Any, config: ReplayConfig) -> Iterator[str]:
        """The preset names strategies of the plugin `exgrpo`, which would ask prompts again beside another one."""
        names = [config.replay_preset, config.replay_scorer, config.replay_mixer, *config.plugins]
        uses_default = any(isinstance(name, str) and name.partition("/")[0] == "exgrpo" for name in names)
        made_anew = bool(config.plugins.get("exgrpo"))
        if self is not exgrpo and uses_default and not made_anew:
            yield (
                "An ExGRPO of your own and the plugin 'exgrpo' would both ask prompts again: instead of your own, "
                "give its arguments, replay_plugins=['exgrpo(share=…)']."
            )

    @hookimpl
    def trl_replay_inputs(self, groups_of_rows: Sequence[Row], context: InputsContext) -> list[Row] | None:
        """The batch's prompts, with partly solved ones in the places of up to a share of them."""
        prompts = context.prompts
        if prompts is None or context.round or not len(context.table):
            return None
        worth = self._chances(prompts, context.table)
        present = {context.key(row) for row in groups_of_rows}
        worth[np.isin(prompts.key, list(present))] = 0.0
        count = min(int(self.share * len(groups_of_rows) + context.rng.random()), int((worth > 0).sum()))
        if not count:
            return None
        keys = context.rng.choice(prompts.key, count, replace=False, p=worth / worth.sum())
        chosen = list(groups_of_rows)
        for place, row in enumerate(context.prompt_rows(keys.tolist())):
            chosen[len(chosen) - 1 - place] = row
        return chosen

    def _chances(self, prompts: PromptTable, table: Table) -> Floats:
        """Chances of prompts to be asked again, `(len(prompts),)`, up to a factor: by the number k of eight that
        passed last, exp(−(k − 4)² / 2), shared by all prompts of that k; 0 where no success is stored."""
        solved = prompts.pass_rate
        worth = np.exp(-((8 * solved - 4) ** 2) / 2)
        worth[~((solved > 0) & (solved < 1) & np.isin(prompts.prompt, table.prompt))] = 0.0  # NaN: not known
        _, bucket = np.unique(solved, return_inverse=True)
        sizes = np.bincount(bucket, weights=worth > 0)
        return np.asarray(worth / np.maximum(sizes[bucket], 1))

    @hookimpl
    def trl_replay_strategies(self) -> Iterator[ScorerSpec | MixerSpec]:
        """The scorer and the mixer."""
        yield ScorerSpec("half_solved", lambda: self.half_solved, "nearness to four of eight solved")
        yield MixerSpec("surest", lambda: self.surest, "the success of highest mean log-prob for one row")

    @hookimpl
    def trl_replay_presets(self) -> Iterator[Preset]:
        """The preset."""
        yield Preset(
            "exgrpo",
            SETTINGS,
            "partly solved prompts again, with their surest success beside fresh rows",
            text_of("exgrpo"),
        )


exgrpo = ExGRPO()
