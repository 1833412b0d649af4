"""Replay for GRPO: puts groups worth learning from in the place of dead ones, on the stock `trl.GRPOTrainer`.

Importing this package imports neither torch nor trl, so that plugins are cheap to discover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .checkpoint.discovery import last_complete_checkpoint
from .data.plan import Plan
from .data.prompt_table import PromptTable
from .data.rewards import reaches
from .data.table import Table, weighted_sample
from .data.types import Context, Corrected, Entry, FieldSpec, Group, Groups, InputsContext, ReplayedRows
from .errors import AttachError, BatchError, CheckpointError, ConfigurationError, PluginError, ReplayError, SeamError
from .hookspecs import hookimpl
from .registry import register, unregister
from .setup.config import ReplayConfig
from .specs import CorrectionSpec, EvictorSpec, MixerSpec, Preset, SamplerSpec, ScorerSpec, SelectorSpec
from .strategies.policies import WeightedSampler

if TYPE_CHECKING:
    from .buffer.replay_buffer import ReplayBuffer
    from .session import Session
    from .trainer.attachment import attach, attached, detach

__version__ = "0.1.0"

_LAZY = {
    "attach": "trainer.attachment",
    "attached": "trainer.attachment",
    "detach": "trainer.attachment",
    "ReplayBuffer": "buffer.replay_buffer",
    "Session": "session",
}


__all__ = [
    "AttachError",
    "BatchError",
    "CheckpointError",
    "ConfigurationError",
    "Context",
    "Corrected",
    "CorrectionSpec",
    "Entry",
    "EvictorSpec",
    "FieldSpec",
    "Group",
    "Groups",
    "InputsContext",
    "MixerSpec",
    "Plan",
    "PluginError",
    "Preset",
    "PromptTable",
    "ReplayBuffer",
    "ReplayConfig",
    "ReplayError",
    "ReplayedRows",
    "SamplerSpec",
    "ScorerSpec",
    "SeamError",
    "SelectorSpec",
    "Session",
    "Table",
    "WeightedSampler",
    "attach",
    "attached",
    "detach",
    "hookimpl",
    "last_complete_checkpoint",
    "reaches",
    "register",
    "unregister",
    "weighted_sample",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
