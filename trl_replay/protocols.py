"""The strategies' interfaces: what a scorer, evictor, sampler, selector, mixer, correction and scope must
implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray

from .data.prompt_table import PromptTable
from .data.table import Table
from .data.types import Context, Corrected, Entry, Floats, Group, Groups, Ints, ReplayedRows

Columns: TypeAlias = dict[str, NDArray[Any]]
"""Row columns by name, all of 8-byte items and of one length."""
Load: TypeAlias = Callable[[int], Group]
"""Gives a fresh copy of the payload with this serial number."""


class Scorer(Protocol):
    """Computes the priority of a group."""

    def __call__(self, groups: Groups, context: Context) -> NDArray[Any]:
        """Return the priority of each group, `(n,)`. A group with a non-finite score is rejected."""


class Evictor(Protocol):
    """Decides which entries leave a full buffer."""

    def __call__(self, table: Table, context: Context) -> NDArray[Any]:
        """Return the keep rank of each entry, `(len(table),)`. Over capacity the lowest are evicted, older ones first
        among equals. With an attribute `drops = True` it is called whenever groups settle, and all entries of rank
        -inf are evicted."""


class Sampler(Protocol):
    """Decides which entries are replayed."""

    def __call__(self, table: Table, count: int, context: Context) -> NDArray[Any]:
        """Return distinct row indices of `table`, which holds only the eligible entries: one per slot, up to `count`,
        with -1 where a slot stays fresh; or `(count, k)`, up to k entries per slot. `context.slots` describes the
        slots. A sampler that draws only entries of a slot's own prompt has the attribute `same_prompt`."""


class Selector(Protocol):
    """Decides which fresh groups may be replaced."""

    def __call__(self, groups: Groups, context: Context) -> NDArray[Any]:
        """Return distinct indices of the fresh groups that may be replaced, most replaceable first."""


class Mixer(Protocol):
    """Decides which stored rows replace which rows of a slot."""

    def __call__(self, table: Table, drawn: Ints, slots: Groups, context: Context) -> NDArray[Any]:
        """Return the stored row that replaces each row of each slot.

        Args:
            table ([`Table`]): The eligible entries.
            drawn (`(n, k)` int64): Rows of `table` that the sampler drew for each slot; -1 where there is none.
            slots ([`Groups`]): The `n` fresh groups.
            context ([`Context`]): Whatever else may be known.

        Returns:
            `(n, G)` int64: `e * G + r` for row `r` of the slot's entry `e`, each at most once a slot; -1 where the
            fresh row stays.
        """


class Correction(Protocol):
    """Decides how the loss accounts for rows that an older policy generated."""

    def __call__(self, rows: ReplayedRows, context: Context) -> Corrected:
        """Return old log-probs and weights for replayed rows. Runs inside the loss; must not run the model."""


@runtime_checkable
class Stateful(Protocol):
    """A strategy with running state that a resumed run must restore; other strategies do not need these methods."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state, of values that JSON can hold."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""


class Agreement(NamedTuple):
    """What all ranks know after [`Scope.agree`]."""

    vectors: Floats
    """`(ranks, width)`: every rank's vector."""
    errors: list[str]
    """Every rank's error text; empty where it had none."""


class Arrival(NamedTuple):
    """An admitted group whose rows were generated on one or several ranks."""

    serial: int
    """The entry's serial number."""
    sizes: Ints
    """`(ranks,)` bytes of each rank's rows; 0 where it has none."""


class Request(NamedTuple):
    """A drawn group, and the ranks that need it."""

    serial: int
    """The entry's serial number."""
    owner: int
    """The rank that holds the payload."""
    ranks: tuple[int, ...]
    """Ranks on which the slot has rows."""


class SessionFiles(Protocol):
    """What a session does with files (see `trl_replay.extras.files.session_files`)."""

    def warm_start(self) -> None:
        """Fill the buffer from `replay_warm_start`, once in the life of a run."""

    def add(self, source: Any, incomplete: str, rescore: bool) -> int:
        """Add groups made elsewhere; return their number."""

    def entry(self, serial: int) -> Entry:
        """Read an entry of the buffer."""

    def export(self, path: str | Path) -> Path:
        """Write what this process holds to a Parquet file; return its path."""


class SessionLike(Protocol):
    """What hooks may use of a session (see `trl_replay.Session`)."""

    @property
    def trainer(self) -> Any:
        """The trainer that the session is attached to."""

    @property
    def config(self) -> Any:
        """The [`ReplayConfig`] in force."""

    @property
    def buffer(self) -> Any:
        """The [`ReplayBuffer`]: `len(buffer)`, `buffer.table`, `buffer.capacity`, `buffer.nbytes`."""

    @property
    def update(self) -> int:
        """Optimizer updates since attach."""

    @property
    def prompts(self) -> PromptTable | None:
        """The `context.prompts` of every hook of this session."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last generation batch's metrics."""

    def explain(self) -> str:
        """Describe what was replayed so far and, if little or nothing was, why."""


class AttachedSession(SessionLike, Protocol):
    """What the seam, its callback, and checkpoints do with a session, of whatever kind of trainer."""

    enabled: bool
    detached: bool
    components: Any
    roll_call: Any
    reporting: Any

    @property
    def seam(self) -> Sequence[str]:
        """Names of the trainer's methods that are wrapped."""

    @property
    def scoring(self) -> bool:
        """Whether the trainer is scoring a batch."""

    def put_on(self, trainer: Any) -> None:
        """Put on the trainer what stands beside the wrapped methods."""

    def take_off(self, trainer: Any) -> None:
        """Take it off again."""

    def notify(self, hook: str) -> None:
        """Call the plugins' `trl_replay_attached` or `trl_replay_detached`."""

    def mark_detached(self) -> None:
        """Hear that `detach` was called."""

    def begin_training(self, updates: int) -> None:
        """Hear that training of so many updates begins."""

    def before_update(self) -> None:
        """Hear that the optimizer is about to make an update."""

    def updated(self) -> None:
        """Hear that the optimizer has made an update."""

    def log_ratios(self) -> None:
        """Hear that an update has ended, before the trainer logs it."""

    def finish(self) -> None:
        """Hear that training has ended."""

    def settle(self) -> None:
        """Hear that a checkpoint is about to be written: nothing may wait."""

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which a checkpoint is written."""

    def state_dict(self) -> dict[str, Any]:
        """Return what JSON can hold, and `prompts` (columns of those generated for)."""

    def load_state_dict(self, state: Mapping[str, Any], of_ranks: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Take it."""

    def forget_pending(self) -> None:
        """Forget candidates."""
