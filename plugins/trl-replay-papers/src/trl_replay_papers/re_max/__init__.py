"""Re:Max: imitation of other prompts' stored successes beside fresh rows with MaxRL's advantages (remax-rl 0.1.1).

`re_max` is the plugin.
"""

from __future__ import annotations

from collections.abc import Iterator

from trl_replay import Preset, hookimpl

from ..cards import text_of
from ..maxrl import MaxRL
from ..re_dr import SETTINGS


class ReMax(MaxRL):
    """MaxRL's advantages, and a preset of its own. The argument is that of [`MaxRL`]."""

    @hookimpl
    def trl_replay_presets(self) -> Iterator[Preset]:
        """The preset."""
        yield Preset("re_max", SETTINGS, "imitation of stored successes beside MaxRL's advantages", text_of("re_max"))


re_max = ReMax()
