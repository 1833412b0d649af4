"""Curricula for trl_replay: which prompts to generate for, by what is known of them. Imports neither torch nor trl.

Three plugins, each found through an entry point of its own:

* `skip_solved` passes over prompts whose completions all passed, until so many updates later
* `greso` passes over prompts by chance, the likelier the longer they taught nothing (arXiv 2506.02177)
* `bapo` tries prompts again that hardly ever passed (arXiv 2602.20722)

`replay_plugins=["greso"]` takes one with its defaults, and `replay_plugins=["greso(target=0.5)"]` with other
arguments.
"""

from __future__ import annotations

from .cards import card
from .retrying import Bapo
from .skipping import Greso, SkipSolved

__all__ = ["Bapo", "Greso", "SkipSolved", "bapo", "card", "greso", "skip_solved"]

skip_solved = SkipSolved()
greso = Greso()
bapo = Bapo()
