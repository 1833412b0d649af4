"""Methods of papers as presets of trl_replay, each in a folder with its card. Imports neither torch nor trl.

`METHODS` names them all. The plugin of a method has the method's name; `greso` and `bapo` are those of the
distribution trl-replay-curricula.
"""

from __future__ import annotations

from .cards import Card, parsed, text_of

__all__ = ["METHODS", "NEED_A_FILE", "WITHOUT_MEMORY", "Card", "card", "text_of"]

METHODS = (
    "popo",
    "popo_stale",
    "adv_per",
    "fresh_per",
    "dots_rr",
    "fair_er",
    "m2po",
    "asymre",
    "oapl",
    "repo",
    "exgrpo",
    "arpo",
    "rlep",
    "luffy",
    "re_dr",
    "re_max",
    "dapo",
    "bapo",
    "greso",
    "gfpo",
    "ragen2",
    "rl_zvp",
    "sign_advantage",
    "maxrl",
    "rloo",
    "filter",
)
"""Every method, the names of its preset."""
NEED_A_FILE = ("rlep", "luffy")
"""Those that replay groups of another run, which `replay_warm_start` names."""
WITHOUT_MEMORY = ("dapo", "greso", "gfpo", "ragen2", "rl_zvp", "sign_advantage", "maxrl", "rloo", "filter")
"""Those that store nothing."""


def card(name: str) -> Card:
    """The method card of a preset."""
    return parsed(text_of(name))
