"""Data types passed between the trainer's batch, the buffer and the strategies. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import BatchError, ConfigurationError
from .prompt_table import PromptTable
from .rewards import bessel_std, have_equal_rewards, mean_of_scored, reward_sizes, weighted_rewards
from .table import Table

if TYPE_CHECKING:
    import torch


Layout = Literal["prompt", "completion", "sequence", "row", "scalar", "count", "image", "tile", "pixels"]
LAYOUTS: tuple[Layout, ...] = ("prompt", "completion", "sequence", "row", "scalar", "image", "tile")
"""Layouts that a plugin may declare; `"count"` (a list of numbers, one a row) and `"pixels"` are TRL's own."""
IMAGE_LAYOUTS = frozenset({"count", "image", "tile", "pixels"})
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
PIXELS = "pixel_values"
"""The key that every batch with images holds. It stands for all image keys where entries are compared with a batch."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """How one key of the batch is cut, padded, and stored.

    Args:
        name (`str`): The key.
        layout (`str`): `"prompt"` `(B, P)` left-padded; `"completion"` `(B, C)` right-padded; `"sequence"`
            `(B, P + C)`, prompt and completion side by side; `"row"` `(B, …)`, one value a row that is never padded;
            `"scalar"` 0-d, not stored; `"image"` and `"tile"`, one entry for each of a row's `num_images` or
            `num_tiles`.
        pad (`float` or `"pad_token"`): What fills padded positions.
        dtype (`str`, *optional*): Name of the torch dtype to store, where a smaller one than the batch's loses
            nothing.
        implied (`int`, *optional*): A value that takes no room: a group whose real positions all hold it stores
            nothing.
    """

    name: str
    layout: Layout
    pad: float | Literal["pad_token"] = 0
    dtype: str | None = None
    implied: int | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS and self.layout not in IMAGE_LAYOUTS:
            raise ConfigurationError(
                f"FieldSpec({self.name!r}): layout {self.layout!r} is none of {', '.join(LAYOUTS)}."
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigurationError(f"FieldSpec({self.name!r}): dtype {self.dtype!r} is none of {', '.join(DTYPES)}.")


STORED_REWARDS = "trl_replay_rewards"
"""Stored beside TRL's keys: each row's raw rewards, one a function. No batch has it."""
ADVANTAGES = "advantages"
TOKEN_ADVANTAGES = "trl_replay_token_advantages"
"""Among the keys of a stored group, no batch has it: its advantages are one a token."""

FIELDS: tuple[FieldSpec, ...] = (
    FieldSpec("prompt_ids", "prompt", pad="pad_token", dtype="int32"),
    FieldSpec("prompt_mask", "prompt", pad=0, dtype="int8", implied=1),
    FieldSpec("completion_ids", "completion", pad="pad_token", dtype="int32"),
    FieldSpec("completion_mask", "completion", pad=0, dtype="int8", implied=1),
    FieldSpec(ADVANTAGES, "row"),
    FieldSpec("num_items_in_batch", "scalar"),
    FieldSpec("old_per_token_logps", "completion", pad=0.0, dtype="float32"),
    FieldSpec("ref_per_token_logps", "completion", pad=0.0, dtype="float32"),
    FieldSpec("sampling_per_token_logps", "completion", pad=0.0, dtype="float32"),
    FieldSpec("importance_sampling_ratio", "completion", pad=1.0, dtype="float32"),
    FieldSpec("tool_mask", "completion", pad=1, dtype="int8", implied=1),
    FieldSpec("token_type_ids", "sequence", pad=0, dtype="int8", implied=0),
    FieldSpec("mm_token_type_ids", "sequence", pad=0, dtype="int8", implied=0),
    FieldSpec("num_images", "count"),
    FieldSpec("num_tiles", "count"),
    FieldSpec("image_grid_thw", "image"),
    FieldSpec("image_position_ids", "image", pad=-1),
    FieldSpec("image_sizes", "image"),
    FieldSpec("spatial_shapes", "tile"),
    FieldSpec(PIXELS, "pixels"),
    FieldSpec("pixel_attention_mask", "pixels"),
    FieldSpec(STORED_REWARDS, "row"),
    FieldSpec(TOKEN_ADVANTAGES, "scalar"),
)
LOGPS_KEYS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
"""Fields of log-probs, stored as float32."""

TOKEN_TYPES = frozenset({"token_type_ids", "mm_token_type_ids"})
"""Keys that TRL adds to batches with images only; 0 is text."""


class FieldTable:
    """The fields of one session: TRL's for this trainer, and those that plugins declare."""

    def __init__(self, pad_token_id: int, sequence_level_ratio: bool = False, extra: Iterable[FieldSpec] = ()) -> None:
        fields = {spec.name: spec for spec in FIELDS}
        if sequence_level_ratio:  # (B, 1) by configuration; never told by width: a completion may have length 1
            ratio = fields["importance_sampling_ratio"]
            fields[ratio.name] = replace(ratio, layout="row")
        for spec in extra:
            if spec.name in fields and fields[spec.name] != spec:
                raise ConfigurationError(f"The batch key {spec.name!r} is declared twice, in different ways.")
            fields[spec.name] = spec
        self.pad_token_id = pad_token_id
        self._fields = fields
        self._gives_token_advantages: list[bool] = []  # of the first batch wider than one token; copies share it

    def exact(self) -> FieldTable:
        """Return the same fields with log-probs in the batch's dtype, for copies that are not stored."""
        table = copy(self)
        table._fields = dict(self._fields)
        for name in LOGPS_KEYS:
            table._fields[name] = replace(self._fields[name], dtype=None)
        return table

    @property
    def names(self) -> list[str]:
        """All batch keys, in the same order on every process."""
        return list(self._fields)

    def spec(self, key: str) -> FieldSpec:
        """The spec of a known key."""
        return self._fields[key]

    def spec_in(self, keys: Set[str], key: str) -> FieldSpec:
        """The spec of a known key in a stored group with these keys."""
        spec = self._fields[key]
        return of_tokens(spec) if key == ADVANTAGES and TOKEN_ADVANTAGES in keys else spec

    def is_image(self, key: str) -> bool:
        """Whether the layout of a key is that of images."""
        return key in self._fields and self._fields[key].layout in IMAGE_LAYOUTS

    def stored_keys(self, batch: Mapping[str, Any]) -> frozenset[str]:
        """Return the batch keys that a stored group must be able to restore, without those of images, which some
        groups lack."""
        keys = set()
        for key, spec in self.of(batch).items():
            if spec.layout != "scalar" and not self.is_image(key):
                keys.add(key)
        return frozenset(keys - TOKEN_TYPES)

    def pad_value(self, spec: FieldSpec) -> float:
        """The number that fills padded positions of this field."""
        return self.pad_token_id if spec.pad == "pad_token" else spec.pad

    def has_token_advantages(self, batch: Mapping[str, Any]) -> bool:
        """Whether the batch has per-token advantages, `(B, C)`, instead of one per row, `(B,)` or `(B, 1)`.

        The first batch that is wider than one token decides it for all: of one token, both look alike.
        """
        advantages = batch.get(ADVANTAGES)
        if advantages is None or len(advantages.shape) == 1:
            return False
        width = batch["completion_ids"].shape[1]
        if width > 1 and not self._gives_token_advantages:
            self._gives_token_advantages.append(advantages.shape[1] == width)
        return self._gives_token_advantages == [True]

    def of(self, batch: Mapping[str, Any]) -> dict[str, FieldSpec]:
        """Return the spec of every key of `batch` whose value is not None.

        Raises:
            BatchError: For the first key that nothing declares.
        """
        specs = {}
        for key, value in batch.items():
            if key not in self._fields:
                raise BatchError(_unknown(key, value))
            if value is not None:
                specs[key] = self._fields[key]
        if self.has_token_advantages(batch):
            specs[ADVANTAGES] = of_tokens(specs[ADVANTAGES])
        return specs


def of_tokens(spec: FieldSpec) -> FieldSpec:
    """Return the spec of a field with one value per completion token."""
    return replace(spec, layout="completion")


def _unknown(key: str, value: Any) -> str:
    described = f"type {type(value).__name__}"
    if hasattr(value, "shape"):
        described = f"shape {tuple(value.shape)}"
    return (
        f"The batch holds {key!r} ({described}), which trl_replay does not know; dropping it would train on the wrong "
        f"values. Set use_replay=False for this run, or declare it from a plugin: `trl_replay_fields` yielding "
        f"FieldSpec({key!r}, layout=...), with one of the layouts {', '.join(LAYOUTS)}, and name the plugin in "
        "`replay_plugins`."
    )


Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
Batch: TypeAlias = dict[str, Any]
"""The result of TRL's scoring step: row-aligned tensors by name, `prompt_ids` first."""
LOG_RATIO_LIMIT = 20.0
"""Log ratios are kept within ± this before they are exponentiated, as TRL does for its sequence ratios: the square of
what comes out is finite."""


@dataclass(frozen=True, slots=True)
class Groups:
    """A read-only, row-level view of `n` groups of `G` completions, as scorers and selectors see it. Never has tokens.

    Attributes:
        rewards (`(n, G, functions)` float64): Raw reward of each function, NaN where it returned None.
        reward_weights (`(functions,)` float64): The trainer's weight of each function.
        advantages (`(n, G)` float64): Those of the batch: TRL's own, or what the trainer made of them. Where each
            token has its own, the mean of their sizes over the row's trained tokens, with the sign of their sum.
        lengths (`(n, G)` int64): Completion tokens of each row.
        trainable (`(n, G)` int64): Completion tokens that the loss trains on (masks applied).
        dead (`(n,)` bool): Whether a group's advantages teach nothing: TRL's own do not differ beyond float noise, or
            those that the trainer or a plugin shaped are all next to 0; or no row that has one trains a token.
        update (`(n,)` int64): Optimizer updates done when the group was generated.
        prompt (`(n,)` int64): The key of the group's task, a hash.
        behavior_logps (`(n, G)` float64, *optional*): Summed log-probs of the trainable tokens under the policy that
            generated them. None until they are known (a selector sees fresh groups). NaN where a file has none: they
            are computed only for groups that stay in the buffer.
        items (`(n, G)` int64): What each row adds to `num_items_in_batch` unless it is masked. Its `trainable` tokens,
            where it is not given.
        masked (`(n, G)` bool): Rows that train nothing and count nowhere, because the trainer's or a plugin's
            advantage for them was NaN; their `advantages` are 0. No row, where it is not given.
        counting (`int`, *optional*): The reward function that counts (`replay_reward`); None for the weighted sum.
        origin (`(n,)` int64): 0 for a group generated here, 1 or 2 for one of a file, as in the table's column. 0,
            where it is not given.
    """

    rewards: Floats
    reward_weights: Floats
    advantages: Floats
    lengths: Ints
    trainable: Ints
    dead: Bools
    update: Ints
    prompt: Ints
    behavior_logps: Floats | None = None
    items: Ints = None  # type: ignore[assignment]  # an array from `__post_init__` on
    masked: Bools = None  # type: ignore[assignment]  # likewise
    origin: Ints = None  # type: ignore[assignment]  # likewise
    counting: int | None = None
    _known: dict[str, Floats] = field(default_factory=dict, init=False, repr=False, compare=False)  # what was computed

    def __post_init__(self) -> None:
        if self.items is None:
            object.__setattr__(self, "items", self.trainable)
        if self.masked is None:
            object.__setattr__(self, "masked", np.zeros(self.advantages.shape, bool))
        if self.origin is None:
            object.__setattr__(self, "origin", np.zeros(len(self.advantages), np.int64))
        for name in ARRAYS:
            array = getattr(self, name)
            if array is not None and array.flags.writeable:
                to_read = array.view()
                to_read.flags.writeable = False
                object.__setattr__(self, name, to_read)

    def __len__(self) -> int:
        return len(self.dead)

    @property
    def trains(self) -> Bools:
        """Whether a row has a trained token and is not masked, `(n, G)`."""
        return (self.trainable > 0) & ~self.masked

    @property
    def counted(self) -> Ints:
        """Tokens of each row that count in `num_items_in_batch`, `(n, G)`."""
        return np.where(self.masked, 0, self.items)

    @property
    def reward(self) -> Floats:
        """The reward that counts, `(n, G)`: that of the function that `replay_reward` names, otherwise the weighted
        sum.

        NaN for a row that it does not score.
        """
        return self.total if self.counting is None else self.rewards[..., self.counting]

    @property
    def reward_size(self) -> Floats:
        """What rounding errors of `reward` grow with, `(n, G)`."""
        if self.counting is None:
            return reward_sizes(self.rewards, self.reward_weights)
        return np.nan_to_num(np.abs(self.reward))

    @property
    def total(self) -> Floats:
        """Weighted sum of the reward functions, `(n, G)`; NaN for a row that no function scored."""
        if "total" not in self._known:
            self._known["total"] = weighted_rewards(self.rewards, self.reward_weights)
            self._known["total"].flags.writeable = False
        return self._known["total"]

    @property
    def unscored(self) -> Bools:
        """Rows whose `reward` is unknown, `(n, G)`."""
        return np.isnan(self.reward)

    @property
    def failed(self) -> Bools:
        """Rows without any reward, `(n, G)`: failed rollouts, which are no wrong answers."""
        return np.isnan(self.total)

    @property
    def equal_rewards(self) -> Bools:
        """Groups whose `reward` differs by no more than float noise, `(n,)`; unscored rows do not count."""
        if self.counting is None:
            return have_equal_rewards(self.rewards, self.reward_weights)
        return have_equal_rewards(self.reward[..., None], np.ones(1))

    @property
    def alike(self) -> Bools:
        """Groups whose rewards of the function that counts are equal, `(n,)`, whatever their advantages; the sum
        decides for groups that it does not score. None without such a function."""
        if self.counting is None:
            return np.zeros(len(self), bool)
        return self.equal_rewards & ~self.unscored.all(axis=1)

    @property
    def reward_mean(self) -> Floats:
        """Mean `reward` of the scored rows, `(n,)`; for a group without any, that of the weighted sum, or 0."""
        return mean_of_scored(self.reward_or_total)

    @property
    def reward_std(self) -> Floats:
        """Standard deviation of `reward` (Bessel-corrected, as in TRL), `(n,)`; for a group without scored rows, that
        of the weighted sum; 0 with fewer than two scored rows."""
        return bessel_std(self.reward_or_total)

    @property
    def reward_or_total(self) -> Floats:
        """`reward`, or the weighted sum in groups that the function that counts does not score, `(n, G)`."""
        return np.where(self.unscored.all(axis=1, keepdims=True), self.total, self.reward)

    def take(self, rows: Sequence[int] | Ints, behavior_logps: Floats | None = None) -> Groups:
        """Return the groups at `rows`, with other behavior log-probs if given."""
        index = np.asarray(rows, dtype=np.int64)
        taken: dict[str, Any] = {name: getattr(self, name)[index] for name in OF_GROUPS}
        for array in taken.values():
            array.flags.writeable = False
        if behavior_logps is None and self.behavior_logps is not None:
            behavior_logps = self.behavior_logps[index]
        groups = Groups(
            **taken, reward_weights=self.reward_weights, behavior_logps=behavior_logps, counting=self.counting
        )
        groups._known.update({name: values[index] for name, values in self._known.items()})
        return groups

    @staticmethod
    def concatenate(parts: Sequence[Groups]) -> Groups:
        """Concatenate the groups of all `parts` (at least one); either all or none have behavior log-probs."""
        joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in OF_GROUPS}
        if parts[0].behavior_logps is not None:
            joined["behavior_logps"] = np.concatenate([part.behavior_logps for part in parts])
        return replace(parts[0], **joined)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry to look at: rows in their order, texts decoded.

    Attributes:
        serial (`int`): Its serial number.
        prompts (`list[str]`): Of each row, special tokens included.
        completions (`list[str]`): Of each row, without special tokens.
        rewards (`dict[str, list[float]]`): Per reward function each row's reward, NaN where it returned None; under
            `"reward"` those of a file that does not name its functions.
        advantages (`list[float]`): As they were trained on.
        masked (`list[bool]`): Rows that train nothing.
        logps (`list[list[float]]`): Of each row, the log-prob of every completion token under the policy that
            generated it.
        columns (`dict[str, Any]`): Its row of the table: numbers, and of row columns lists.
    """

    serial: int
    prompts: list[str]
    completions: list[str]
    rewards: dict[str, list[float]]
    advantages: list[float]
    masked: list[bool]
    logps: list[list[float]]
    columns: dict[str, Any]


FROM_FILE, FROM_POLICY = 1, 2
"""Values of the table's column `origin`: whose log-probs a group made elsewhere has; 0 is a group generated here."""
OF_GROUPS = ("rewards", "advantages", "lengths", "trainable", "dead", "update", "prompt", "items", "masked", "origin")
"""Fields of [`Groups`] with one part a group."""
ARRAYS = (*OF_GROUPS, "reward_weights", "behavior_logps")


@dataclass(frozen=True, slots=True)
class Context:
    """What a strategy knows besides its input.

    Attributes:
        update (`int`): Optimizer updates that this session has counted so far.
        rng (`numpy.random.Generator`): The session's private generator. Sampled from this one and from no other.
        capacity (`int`): Groups that the buffer may hold.
        num_generations (`int`): Rows of a group.
        table ([`Table`]): The buffer's metadata as it stands, every entry included.
        metrics (`Mapping[str, float]`): The metrics of the last generation batch.
        slots ([`Groups`], *optional*): While a sampler or mixer runs: the fresh groups that may be filled, in the
            selector's order.
        prompts ([`PromptTable`], *optional*): The prompts generated for so far, of all processes that share a buffer.
            None where nothing is generated again and no plugin has `trl_replay_inputs`.
        fresh ([`Groups`], *optional*): In `trl_replay_metrics`: the groups that were generated for this batch, as they
            would train, those that were replaced included.
        iteration (`int`): In `trl_replay_plan`: 0 for the generation batch, `k` for its further iteration `k`.
    """

    update: int
    rng: np.random.Generator
    capacity: int
    num_generations: int
    table: Table
    metrics: Mapping[str, float] = field(default_factory=dict)
    slots: Groups | None = None
    prompts: PromptTable | None = None
    fresh: Groups | None = None
    iteration: int = 0
    noted: Counter[str] = field(default_factory=Counter, repr=False)

    def note(self, reason: str, count: int = 1) -> None:
        """Count a reason why less was replayed; `explain()` lists those of this process."""
        if count:
            self.noted[reason] += int(count)


Row: TypeAlias = dict[str, Any]
"""One row of the trainer's dataset, as its collator gives it."""


@dataclass(frozen=True, slots=True)
class InputsContext(Context):
    """What `trl_replay_inputs` knows. Its `rng` is seeded with the seed, the batch, the round and the first group, so
    that two processes with rows of one group draw alike.

    Attributes:
        prompts ([`PromptTable`]): The prompts generated for so far.
        round (`int`): 0 for a batch's first generation, then the round of generating again.
        batch (`int`): Generation batches begun, this one included.
        key (`Callable[[Row], int]`): Tells tasks apart: a hash of a row's raw prompt, images, and task columns.
        new_prompts (`Callable[[int, Callable | None], list[Row]]`): So many rows of the trainer's dataset in a random
            order, each row once before any comes again. Prompts of this batch are passed over, and rows for which the
            function `skip=` is true. At most 8 rows for each that is asked for, and 64 more, are looked at; where
            these have too few others, it gives what it passed over. Rows that were looked at are spent, used or not.
        prompt_rows (`Callable[[Sequence[int]], list[Row]]`): The dataset's rows with these keys, in their order,
            without those that can't be found. The first call reads the whole dataset; a stream raises.
    """

    round: int = 0
    batch: int = 0
    key: Callable[[Row], int] = field(kw_only=True)
    new_prompts: Callable[..., list[Row]] = field(kw_only=True)
    prompt_rows: Callable[[Sequence[int]], list[Row]] = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Group:
    """One group as it is stored: unpadded copies of the row tensors of `G` completions.

    Attributes:
        tensors (`dict[str, torch.Tensor]`): Per batch key, the real values of all rows in row order, flat; tensors
            of the layout `"row"` keep their `(G, …)` shape. A prompt shared by all rows is kept once.
        keys (`frozenset[str]`): Batch keys that the group can restore, those included whose values are all implied
            (a mask of ones) and take no room.
        prompt_lengths (`(G,)` or `(1,)` int64): Prompt tokens of each row; one number where the prompt is shared.
        completion_lengths (`(G,)` int64): Completion tokens of each row.
    """

    tensors: dict[str, torch.Tensor]
    keys: frozenset[str]
    prompt_lengths: Ints
    completion_lengths: Ints

    @property
    def advantages(self) -> Sequence[torch.Tensor]:
        """Advantages of each row, `()`, or `(tokens,)` if per token."""
        stored = self.tensors[ADVANTAGES]
        if TOKEN_ADVANTAGES in self.keys:
            lengths = self.completion_lengths.tolist()
            return stored.split(lengths)  # type: ignore[no-any-return, no-untyped-call]
        return stored.view(len(self.completion_lengths)).unbind()


class GroupKind(NamedTuple):
    """What describes the bytes of a packed group. Few kinds describe many groups."""

    keys: frozenset[str]
    """Those of the group."""
    prompts: int
    """Its prompt lengths: 1 if they are shared."""
    rows: int
    """Its rows."""
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]
    """Of each tensor its key, its torch dtype, its shape without the first dimension, and the bytes of a number."""


class Packed(NamedTuple):
    """A group as bytes, in memory and in files: see `serialization.groups`."""

    kind: GroupKind
    data: bytes
    """Prompt lengths, completion lengths, and tensors' first dimensions, 4 bytes each; their numbers; 8 zeros."""


NONE = -1
"""No entry in what a sampler draws, no stored row in what a mixer chooses, and the serial number of what comes from no
buffer."""
LARGEST_ADVANTAGE = 1e9
"""Largest reward or advantage: a gradient's norm sums squares, and in float32 those of numbers above 1e19 are
infinite."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Stored rows of one entry that replace adjacent rows of one slot on this process: usually a whole group."""

    slot: int
    """Index of the replaced group among the groups that the scope shares."""
    group: Group
    """A fresh copy of the payload: the rows of the entry that are replayed, in the order of the rows they take."""
    serial: int
    """The entry's serial number; -1 for a group of a further round, which is no entry."""
    age: int
    """Updates since the group was generated."""
    start: int
    """First row of this process's batch to be replaced."""
    first: int = 0
    """Row of the group that goes there; the following rows follow it."""
    count: int = 0
    """Number of rows."""
    priority: float = 1.0
    """The group's chance of being drawn, relative to that of the least likely eligible entry."""

    @property
    def rows(self) -> slice:
        """The rows of this process's batch that are replaced."""
        return slice(self.start, self.start + self.count)

    @property
    def part(self) -> slice:
        """The rows of the group that are placed."""
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class ReplayedRows:
    """The replayed rows of one micro-batch as a correction sees them inside the loss: `R` rows, `C` positions.

    Attributes:
        logps (`(R, C)`): Log-probs under the policy being trained, detached.
        behavior_logps (`(R, C)`): Log-probs under the policy that generated the tokens; equal to `logps` where
            `mask` is 0.
        proximal_logps (`(R, C)`): Log-probs under the policy of the row's first training forward since it was drawn.
        mask (`(R, C)` bool): Tokens that the loss trains on.
        advantages (`(R,)` or `(R, C)`): Those of the batch: one a row, or one a token where the trainer gives them so.
        ages (`(R,)` int64): Updates since generation.
        priorities (`(R,)`, *optional*): The chance that the row's group had of being drawn first, relative to that of
            the least likely eligible entry. None: all had the same.
    """

    logps: torch.Tensor
    behavior_logps: torch.Tensor
    proximal_logps: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    ages: torch.Tensor
    priorities: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Corrected:
    """A correction's decision about [`ReplayedRows`].

    Attributes:
        old_logps (`(R, C)`): What the loss shall take as the old log-probs.
        weights (`(R,)` or `(R, C)`, *optional*): Non-negative loss weight of each row or token. None means 1.
        shift (`(R,)`, *optional*): Added to each row's advantages, with either sign, before the weights multiply them.
            No weight can move an advantage of 0. None means 0.
    """

    old_logps: torch.Tensor
    weights: torch.Tensor | None = None
    shift: torch.Tensor | None = None
