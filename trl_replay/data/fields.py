"""Fields of TRL's batch: for each key, how it is cut into groups, padded and merged. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import BatchError, ConfigurationError

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
        f"values. Declare it from a plugin: `trl_replay_fields` yielding FieldSpec({key!r}, layout=...), with one of "
        f"the layouts {', '.join(LAYOUTS)}; or set use_replay=False for this run."
    )
