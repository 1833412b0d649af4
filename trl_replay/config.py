"""The settings: one dataclass that stands beside GRPOConfig in Python, YAML and on the command line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, TypeGuard

from .errors import ConfigurationError
from .sizes import parse_size
from .specs import Kind

STRATEGY_KINDS: tuple[Kind, ...] = ("scorer", "evictor", "sampler", "selector", "scope", "storage", "correction")


def _help(text: str) -> dict[str, str]:
    return {"help": text}


def _kwargs_help(kind: str) -> dict[str, str]:
    return _help(f"Keyword arguments of the {kind}: a mapping, or on the command line a JSON string.")


@dataclass
class ReplayConfig:
    """Settings of a replay session. Use it beside `GRPOConfig` in `TrlParser`, or pass its fields to `attach`.

    Args:
        use_replay (`bool`, *optional*, defaults to `True`):
            Whether to replay at all. `False` leaves the trainer exactly as TRL made it.
        replay_buffer_size (`int`, *optional*, defaults to `64`):
            Groups (of `num_generations` completions) that the buffer keeps: each process's own (`process`), each
            process's part of the common one (`sharded`), or the one that all processes have (`gathered`). `0` leaves
            the trainer as it is.
        replay_max_bytes (`int` or `str`, *optional*):
            Bytes that the buffer keeps, per process, table and payload together: `"512MB"`, `"2GiB"`. Whichever of
            `replay_buffer_size` and this is reached first evicts. No limit if not set.
        replay_logps_dtype (`str`, *optional*, defaults to `"float32"`):
            How stored log-probs are kept: `"float32"`, or `"bfloat16"` in half the room, which rounds each by up to
            0.4 %: see docs/checkpoints.md for what that does to importance ratios.
        replay_scorer (`str`, *optional*, defaults to `"advantage_std"`):
            What a group is worth: decides eviction by `heap` and drawing by `proportional`.
        replay_evictor (`str`, *optional*, defaults to `"heap"`):
            Which entries leave a full buffer.
        replay_sampler (`str`, *optional*, defaults to `"proportional"`):
            Which entries are replayed.
        replay_selector (`str`, *optional*, defaults to `"zero_std"`):
            Which fresh groups may be replaced.
        replay_scope (`str`, *optional*, defaults to `"process"`):
            Which processes share a buffer: none (`process`), or all, with every group on each of them (`gathered`) or
            on one of them (`sharded`).
        replay_storage (`str`, *optional*, defaults to `"cpu"`):
            Where the tokens and log-probs are kept.
        replay_correction (`str`, *optional*, defaults to `"ratio"`):
            How the loss accounts for replayed rows being off-policy.
        replay_min_size (`int`, *optional*, defaults to `1`):
            Entries that the buffer must hold before anything is replayed.
        replay_max_age (`int`, *optional*):
            Oldest age, in optimizer updates since generation, at which an entry is replayed. No limit if not set.
        replay_max_uses (`int`, *optional*):
            How often one entry is replayed. No limit if not set.
        replay_max_fraction (`float`, *optional*, defaults to `1.0`):
            Largest share of a generation batch's groups that replay may fill.
        replay_cooldown (`int`, *optional*):
            Updates that must pass between two uses of one entry. None if not set.
        replay_half_life (`float`, *optional*):
            Updates in which an entry's score falls to half, for eviction and drawing. Scores stay as they are if not
            set.
        replay_weight (`float`, *optional*, defaults to `1.0`):
            Weight of replayed rows in the policy loss, on top of the correction's.
        replay_dry_run (`bool`, *optional*, defaults to `False`):
            Decide and measure everything but exchange nothing: training is bit-identical to stock.
        replay_seed (`int`, *optional*):
            Seed of the private generator. The trainer's seed, plus the rank for scope `process`, if not set.
        replay_plugins (`list[str]`, *optional*):
            Plugins whose hooks take part, by entry-point name. A plugin whose strategy or preset is named takes part
            anyway.
        replay_on_mismatch (`str`, *optional*, defaults to `"refuse"`):
            What to do on resuming from a checkpoint whose buffer is damaged or does not fit: `"refuse"` raises,
            `"empty"` warns and goes on with an empty buffer.
        replay_warm_start (`str`, *optional*):
            A Parquet or JSONL file that fills the buffer when training begins: what `session.export` wrote, or prompt,
            completion and reward of any origin. Not read again when training resumes from a checkpoint.
        replay_warm_start_short (`str`, *optional*, defaults to `"refuse"`):
            What to do with a group of fewer than `num_generations` rows in that file: `"refuse"`, or `"resample"`,
            which fills it up with rows of its own, drawn with equal chances.
        replay_preset (`str`, *optional*):
            A plugin's bundle of settings, for all fields that are left at their defaults.
    """

    use_replay: bool = field(
        default=True, metadata=_help("Whether to replay. False leaves the trainer as TRL made it.")
    )
    replay_buffer_size: int = field(
        default=64,
        metadata=_help("Groups of num_generations completions that the buffer keeps, per process; gathered: in all."),
    )
    replay_max_bytes: int | str | None = field(
        default=None, metadata=_help("Bytes that the buffer keeps, per process, for example 512MB.")
    )
    replay_logps_dtype: str = field(default="float32", metadata=_help("How log-probs are kept: float32 or bfloat16."))
    replay_scorer: str = field(default="advantage_std", metadata=_help("What a group is worth."))
    replay_scorer_kwargs: dict[str, Any] | str | None = field(default=None, metadata=_kwargs_help("scorer"))
    replay_evictor: str = field(default="heap", metadata=_help("Which entries leave a full buffer."))
    replay_evictor_kwargs: dict[str, Any] | str | None = field(default=None, metadata=_kwargs_help("evictor"))
    replay_sampler: str = field(default="proportional", metadata=_help("Which entries are replayed."))
    replay_sampler_kwargs: dict[str, Any] | str | None = field(default=None, metadata=_kwargs_help("sampler"))
    replay_selector: str = field(default="zero_std", metadata=_help("Which fresh groups may be replaced."))
    replay_selector_kwargs: dict[str, Any] | str | None = field(default=None, metadata=_kwargs_help("selector"))
    replay_scope: str = field(default="process", metadata=_help("Which processes share a buffer."))
    replay_scope_kwargs: dict[str, Any] | str | None = field(default=None, metadata=_kwargs_help("scope"))
    replay_storage: str = field(default="cpu", metadata=_help("Where the tokens and log-probs are kept."))
    replay_storage_kwargs: dict[str, Any] | str | None = field(default=None, metadata=_kwargs_help("storage"))
    replay_correction: str = field(default="ratio", metadata=_help("How the loss corrects for replayed rows' policy."))
    replay_correction_kwargs: dict[str, Any] | str | None = field(default=None, metadata=_kwargs_help("correction"))
    replay_min_size: int = field(
        default=1, metadata=_help("Entries that the buffer must hold before anything is replayed.")
    )
    replay_max_age: int | None = field(
        default=None, metadata=_help("Oldest age, in optimizer updates, at which an entry is replayed.")
    )
    replay_max_uses: int | None = field(default=None, metadata=_help("How often one entry is replayed."))
    replay_max_fraction: float = field(
        default=1.0, metadata=_help("Largest share of a generation batch's groups that replay may fill.")
    )
    replay_cooldown: int | None = field(
        default=None, metadata=_help("Updates that must pass between two uses of one entry.")
    )
    replay_half_life: float | None = field(
        default=None, metadata=_help("Updates in which an entry's score falls to half, for eviction and drawing.")
    )
    replay_weight: float = field(
        default=1.0, metadata=_help("Weight of replayed rows in the policy loss, on top of the correction's.")
    )
    replay_dry_run: bool = field(
        default=False, metadata=_help("Decide and measure everything but exchange nothing: training stays stock's.")
    )
    replay_seed: int | None = field(
        default=None, metadata=_help("Seed of the private generator; the trainer's seed if not set.")
    )
    replay_plugins: list[str] | None = field(
        default=None, metadata=_help("Plugins whose hooks take part, by entry-point name.")
    )
    replay_on_mismatch: str = field(
        default="refuse", metadata=_help("A checkpoint's buffer that does not fit: refuse, or go on empty.")
    )
    replay_warm_start: str | None = field(
        default=None, metadata=_help("A Parquet or JSONL file that fills the buffer when training begins.")
    )
    replay_warm_start_short: str = field(
        default="refuse", metadata=_help("Its groups of too few rows: refuse, or resample rows of their own.")
    )
    replay_preset: str | None = field(
        default=None, metadata=_help("A plugin's bundle of settings, for all fields left at their defaults.")
    )

    def __post_init__(self) -> None:
        for kind in STRATEGY_KINDS:
            self._parse_kwargs(f"replay_{kind}_kwargs")
            name = getattr(self, f"replay_{kind}")
            if name is None or name == "":
                raise _error(f"replay_{kind}", name, f"name a {kind}; `trl-replay list` shows all")
        if isinstance(self.replay_plugins, str):
            self.replay_plugins = [self.replay_plugins]
        plugins = self.replay_plugins
        if plugins is not None and not (
            isinstance(plugins, list | tuple) and all(isinstance(p, str) for p in plugins)
        ):
            raise _error("replay_plugins", plugins, "leave it out or give a list of plugin names")
        if self.replay_preset is not None and not isinstance(self.replay_preset, str):
            raise _error("replay_preset", self.replay_preset, "leave it out or give the name of a preset")
        self._require_int("replay_buffer_size", 0)
        self._require_int("replay_min_size", 1)
        self._require_int("replay_max_age", 1, optional=True)
        self._require_int("replay_max_uses", 1, optional=True)
        self._require_int("replay_seed", 0, optional=True)
        self._require_int("replay_cooldown", 1, optional=True)
        for name in ("use_replay", "replay_dry_run"):
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "give true or false")
        half_life = self.replay_half_life
        if half_life is not None and not (_is_number(half_life) and 0 < half_life < float("inf")):
            raise _error("replay_half_life", half_life, "leave it out or give a number of updates above 0")
        if not (_is_number(self.replay_weight) and 0 <= self.replay_weight < float("inf")):
            raise _error("replay_weight", self.replay_weight, "give a finite number of at least 0")
        if self.replay_warm_start_short not in ("refuse", "resample"):
            raise _error("replay_warm_start_short", self.replay_warm_start_short, "give 'refuse' or 'resample'")
        if self.replay_max_bytes is not None and parse_size(self.replay_max_bytes) is None:
            raise _error("replay_max_bytes", self.replay_max_bytes, "leave it out or give bytes, '512MB' or '2GiB'")
        if self.replay_logps_dtype not in ("float32", "bfloat16"):
            raise _error("replay_logps_dtype", self.replay_logps_dtype, "give 'float32' or 'bfloat16'")
        if self.replay_on_mismatch not in ("refuse", "empty"):
            raise _error("replay_on_mismatch", self.replay_on_mismatch, "give 'refuse' or 'empty'")
        fraction = self.replay_max_fraction
        if not (_is_number(fraction) and 0 <= fraction <= 1):
            raise _error("replay_max_fraction", fraction, "give a share between 0 and 1")
        if 0 < self.replay_buffer_size < self.replay_min_size:
            raise _error(
                "replay_min_size",
                self.replay_min_size,
                f"a buffer of replay_buffer_size={self.replay_buffer_size} groups never gets there; lower it",
            )

    def kwargs_of(self, kind: str) -> dict[str, Any]:
        """The keyword arguments given for a kind of strategy."""
        return dict(getattr(self, f"replay_{kind}_kwargs") or {})

    def with_settings(self, settings: Mapping[str, Any], source: str) -> ReplayConfig:
        """A validated copy with some fields set; `source` is named if one of them does not exist."""
        known = [spec.name for spec in fields(self)]
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigurationError(
                    f"{source} has no setting {name!r}.{hint} The settings are: {', '.join(known)}."
                )
        return replace(self, **settings)

    def with_defaults(self, settings: Mapping[str, Any], source: str) -> ReplayConfig:
        """A validated copy where `settings` (a preset's) fill the fields that still have their defaults."""
        fresh = ReplayConfig()
        unset = {
            name: value
            for name, value in settings.items()
            if not hasattr(fresh, name) or getattr(self, name) == getattr(fresh, name)
        }
        for kind in STRATEGY_KINDS:  # a preset's arguments are for the preset's strategy
            name = f"replay_{kind}"
            if name in settings and name not in unset:
                unset.pop(f"{name}_kwargs", None)
        return self.with_settings(unset, source)

    def _parse_kwargs(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise _error(name, value, f"give a JSON object such as '{{\"key\": 1}}' ({error})") from None
        if value is not None and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
            raise _error(name, value, "give a mapping from argument names to values, or the same as a JSON object")
        setattr(self, name, value)

    def _require_int(self, name: str, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            either = "leave it out or " if optional else ""
            raise _error(name, value, f"{either}give a whole number of at least {least}")


def _error(name: str, value: object, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"{name}={value!r} can't be used: {remedy}.")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)
