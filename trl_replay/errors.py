"""Every error that trl_replay raises on purpose, and the question after a name that does not exist.

ReplayError
├── ConfigurationError (ValueError)    a setting can't be used: names the setting, its value and the remedy
│   └── UnknownNameError               a strategy, plugin or preset name that nothing provides
├── AttachError (RuntimeError)         attach() or detach() refused; the trainer is as it was
│   ├── ContractError                  this trainer or TRL release lacks what the seam needs
│   └── RefusedError                   a preflight check, built in or a plugin's, gave reasons to refuse
├── PluginError (RuntimeError)         a plugin could not be loaded, or two claim one name
│   ├── HookError                      a plugin's hook raised: names plugin, distribution, hook and update
│   └── ResultError                    a strategy returned something that its contract does not allow
├── CheckpointError (RuntimeError)      a checkpoint's replay files are damaged, missing, or can't be written
│   └── MismatchError                  they were made with other settings: names both values
├── BatchError (ValueError)            a batch holds something that can't be stored or replayed correctly
└── SeamError (RuntimeError)           training went around the seam; going on would be silently wrong
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ReplayError(Exception):
    """Base class of every error raised by trl_replay."""


class ConfigurationError(ReplayError, ValueError):
    """A setting has an invalid value."""


class UnknownNameError(ConfigurationError):
    """A name that no installed plugin provides."""


class AttachError(ReplayError, RuntimeError):
    """`attach` or `detach` failed and changed nothing."""


class ContractError(AttachError):
    """The trainer or the installed TRL lacks something that replay relies on."""


class RefusedError(AttachError):
    """Preflight checks found reasons not to attach; the message lists all of them."""

    def __str__(self) -> str:
        (reasons,) = self.args
        return "\n- ".join(["Replay was not attached:", *reasons])


class PluginError(ReplayError, RuntimeError):
    """A plugin could not be loaded or conflicts with another."""


class HookError(PluginError):
    """A plugin's hook raised an exception (kept as `__cause__`)."""


class ResultError(PluginError):
    """A strategy or hook returned a value outside its contract."""


class CheckpointError(ReplayError, RuntimeError):
    """The replay files of a checkpoint can't be read or written."""


class MismatchError(CheckpointError):
    """The replay files of a checkpoint do not match this run; the message names both values."""


class BatchError(ReplayError, ValueError):
    """A batch can't be cut into groups or composed without loss."""


class SeamError(ReplayError, RuntimeError):
    """The trainer did not call the wrapped methods as expected."""


def nearest(name: str, known: Sequence[str]) -> str:
    """Ask whether the most similar of the known names was meant, after a space; empty if none is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
