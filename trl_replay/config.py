"""The settings: one dataclass that stands beside GRPOConfig in Python, YAML and on the command line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .errors import ConfigurationError
from .plain import in_json
from .registry import registry
from .sizes import parse_bytes
from .specs import Kind
from .validation import ADAPTIVE, AUTO, STRATEGY_KINDS, unusable, validate


class _DefaultText(str):
    """A text that nobody gave. argparse asks for `str` of a default, and must get this very object."""

    def __str__(self) -> str:
        return self


class _DefaultInt(int):
    """A whole number that nobody gave."""


class _DefaultFloat(float):
    """A number that nobody gave."""


class _DefaultNone:
    """None that nobody gave."""

    def __repr__(self) -> str:
        return "None"


_MARKS: dict[type, Any] = {str: _DefaultText, int: _DefaultInt, float: _DefaultFloat}
_PLAIN: dict[type, Any] = {_DefaultText: str.__str__, _DefaultInt: int, _DefaultFloat: float}


def _unless_given(default: Any) -> Any:
    """A default that is told from the same value written down by the user: in Python, in YAML, as a flag.

    A config object holds plain values: the mark is gone once `ReplayConfig` knows what was given. (True and false
    can't be marked: there a value that equals the default counts as not given.)
    """
    if default is None:
        return _DefaultNone()
    return _MARKS[type(default)](default)


def _setting(default: Any, text: str) -> Any:
    """A field with its help text."""
    marked = default if isinstance(default, bool) else _unless_given(default)
    return field(default=marked, metadata={"help": text})


def _list_setting(text: str) -> Any:
    """A field of a list, None if not given: the argument parser reads a list's default from a factory alone."""
    return field(default_factory=_DefaultNone, metadata={"help": text})


def _arguments(kind: str) -> Any:
    return _setting(None, f"Keyword arguments of the {kind}: a mapping, or on the command line a JSON string.")


@dataclass
class ReplayConfig:
    """Settings of a replay session. Use it beside `GRPOConfig` in `TrlParser`, or pass its fields to `attach`.

    Args:
        use_replay (`bool`, *optional*, defaults to `True`):
            Whether to replay at all. `False` leaves the trainer exactly as TRL made it.
        replay_buffer_size (`int`, *optional*, defaults to `64`):
            Groups (of `num_generations` completions) that the buffer keeps: each process's own (`process`), each
            process's part of the common one (`sharded`), or the one that all processes have (`gathered`). With `0`
            nothing is stored; what needs no buffer goes on working (`replay_refill_rounds`, `replay_unfilled`, a
            plugin that shapes advantages or chooses prompts), and without any of these the trainer is left as it is.
        replay_max_bytes (`int` or `str`, *optional*):
            Bytes that the buffer keeps, per process, table and payload together: `"512MB"`, `"2GiB"`. Whichever of
            `replay_buffer_size` and this is reached first evicts. No limit if not set.
        replay_logps_dtype (`str`, *optional*, defaults to `"float32"`):
            How stored log-probs are kept: `"float32"`, or `"bfloat16"` in half the room, which rounds each by up to
            0.4 %: see docs/checkpoints.md for what that does to importance ratios.
        replay_scorer (`str`, *optional*, defaults to `"advantage_std"`):
            What a group is worth: decides eviction by `heap`, drawing by `proportional`, and both beside prompts by
            `prompt_balanced`.
        replay_evictor (`str`, *optional*, defaults to `"prompt_balanced"`):
            Which entries leave a full buffer.
        replay_sampler (`str`, *optional*, defaults to `"prompt_balanced"`):
            Which entries are replayed.
        replay_selector (`str`, *optional*, defaults to `"zero_std"`):
            Which fresh groups may be replaced.
        replay_mixer (`str`, *optional*, defaults to `"whole"`):
            Which rows of a slot stored rows take: all (`whole`), or some beside the slot's own (`inject`).
        replay_scope (`str`, *optional*, defaults to `"auto"`):
            Which processes share a buffer: none (`process`), or all, with every group on each of them (`gathered`) or
            on one of them (`sharded`). `"auto"` is `process` on one process and where each process has whole groups
            and at least four of them a batch, else `sharded`; `session.explain()` says which and why. A checkpoint's
            scope is kept.
        replay_correction (`str`, *optional*, defaults to `"ratio"`):
            How the loss accounts for replayed rows being off-policy.
        replay_max_age (`int`, *optional*):
            Oldest age, in optimizer updates since generation, at which an entry is replayed. No limit if not set.
        replay_max_uses (`int`, *optional*):
            How often one entry is replayed. No limit if not set.
        replay_max_fraction (`float`, *optional*, defaults to `1.0`):
            Largest share of a generation batch's groups that replay may fill.
        replay_start (`int` or `str`, *optional*, defaults to `"adaptive"`):
            Updates that must be done before anything is replayed; the buffer fills from the beginning. `"adaptive"`
            waits where rewards are sparse (fewer than four live groups so far, or fewer than one in ten), from the
            first update on: until 16 groups were stored, or a quarter of the buffer's size if that is less, as long
            as live groups keep coming, and for a quarter of the run at most. Once it has begun it does not wait
            again, and after a warm start not at all. `None` or `0` waits for nothing.
        replay_start_pass_rate (`float`, *optional*):
            Nothing is replayed before the running share of completions that pass has reached this (averaged over about
            32 batches). No such limit if not set.
        replay_task_columns (`list[str]`, *optional*):
            Columns of the dataset that tell tasks apart beside prompt and images: rows with one prompt and another
            label, tests or seed are other tasks, and none takes completions of the other. All columns if not set. With
            `[]` (on the command line `""`) the prompt alone.
        replay_reward (`str`, *optional*):
            Name of the reward function that counts, as TRL logs it. Whether a group is dead, its priority, and whether
            a completion passes go by its rewards; advantages stay TRL's. A group that it does not score is judged by
            the weighted sum, which counts if this is not set.
        replay_pass_reward (`float`, *optional*, defaults to `0.5`):
            A completion passes with a weighted reward of at least this.
        replay_retire_passes (`int`, *optional*):
            A prompt is solved when this many completions of a fresh group pass: its entries leave, and groups as good
            as that are not stored. Never if not set.
        replay_max_weight (`float`, *optional*):
            Largest factor on a replayed token's policy term: the importance ratio before the loss's clipping times all
            weights. If not set, only the ratio has a limit, of 20.
        replay_advantages (`str`, *optional*, defaults to `"auto"`):
            Advantages of a slot with stored rows: `"stored"` (each row keeps its own), `"joint"` (computed anew over
            all rows of the mixed group), `"split"` (over its fresh and its stored rows apart), or `"auto"`: stored
            where a slot is taken whole, else joint.
        replay_record (`str`, *optional*, defaults to `"auto"`):
            Where log-probs of fresh groups come from: `"loss"`, which never sees rows that are replaced, or
            `"forward"`, one forward without gradients a batch, so that live groups can be mixed into and stored too.
            `"auto"`: the forward where stored rows are mixed into live groups.
        replay_unfilled (`str`, *optional*, defaults to `"keep"`):
            What becomes of dead groups that nothing fills: `"keep"` leaves them as stock has them; `"mask"` takes
            their KL and entropy gradient; `"exclude"` takes them out of the loss's denominator too; `"intra_batch"`
            puts copies of the same batch's live groups in their place.
        replay_kl (`str`, *optional*, defaults to `"all"`):
            Rows whose KL term counts (`beta` ≠ 0): `"all"`, `"fresh"` (none of the replayed ones, which then store no
            reference log-probs), or `"all_wrong"`: fresh rows of groups that are dead and in which no row passes.
            These groups are never replaced.
        replay_iterations (`str`, *optional*, defaults to `"same"`):
            What iterations 2 … `num_iterations` train on: the `"same"` batch again, or with `"replay"` groups drawn
            anew from the buffer at each iteration, without generating.
        replay_refill_rounds (`int`, *optional*, defaults to `0`):
            Dynamic sampling: for slots of dead groups, completions are generated again at most so many times, for as
            many groups as are needed. Then the buffer fills what is left, and then `replay_unfilled` decides.
        replay_refill_prompts (`str`, *optional*, defaults to `"new"`):
            What is generated for then: `"new"` prompts of the dataset, which come in a random order of their own and
            none twice before all came; or the `"same"` ones once more.
        replay_refill_until (`float`, *optional*, defaults to `1.0`):
            Share of live groups at which no further round is begun.
        replay_weight (`float`, *optional*, defaults to `1.0`):
            Weight of replayed rows in the policy loss, on top of the correction's.
        replay_dry_run (`bool`, *optional*, defaults to `False`):
            Decide and measure everything but exchange nothing: training is bit-identical to stock.
        replay_seed (`int`, *optional*):
            Seed of the private generator. The trainer's seed, plus the rank for scope `process`, if not set.
        replay_plugins (`list[str]`, *optional*):
            Plugins whose hooks take part, by entry-point name. A plugin whose strategy or preset is named takes part
            anyway.
        replay_plugins_kwargs (`dict[str, dict[str, Any]]`, *optional*):
            By the name of a plugin that takes part, the keyword arguments that it is made with for this run, instead
            of its own; on the command line as a JSON string. `trl-replay list NAME` shows what it takes.
        replay_on_mismatch (`str`, *optional*, defaults to `"refuse"`):
            What to do on resuming from a checkpoint whose buffer is damaged, does not fit or can't be restored:
            `"refuse"` raises, `"empty"` warns and goes on with an empty buffer.
        replay_warm_start (`str`, *optional*):
            A Parquet or JSONL file that fills the buffer when training begins: what `session.export` wrote, or prompt,
            completion and reward of any origin. Not read again when training resumes from a checkpoint.
        replay_warm_start_short (`str`, *optional*, defaults to `"refuse"`):
            What to do with a group of fewer than `num_generations` rows in that file: `"refuse"`, or `"resample"`,
            which fills it up with rows of its own, drawn with equal chances.
        replay_preset (`str`, *optional*):
            A plugin's bundle of settings, for all fields that are left at their defaults.
    """

    use_replay: bool = _setting(True, "Whether to replay. False leaves the trainer as TRL made it.")
    replay_buffer_size: int = _setting(
        64, "Groups of num_generations completions that the buffer keeps, per process; gathered: in all."
    )
    replay_max_bytes: int | str | None = _setting(None, "Bytes that the buffer keeps, per process, for example 512MB.")
    replay_logps_dtype: str = _setting("float32", "How log-probs are kept: float32 or bfloat16.")
    replay_scorer: str = _setting("advantage_std", "What a group is worth.")
    replay_scorer_kwargs: dict[str, Any] | str | None = _arguments("scorer")
    replay_evictor: str = _setting("prompt_balanced", "Which entries leave a full buffer.")
    replay_evictor_kwargs: dict[str, Any] | str | None = _arguments("evictor")
    replay_sampler: str = _setting("prompt_balanced", "Which entries are replayed.")
    replay_sampler_kwargs: dict[str, Any] | str | None = _arguments("sampler")
    replay_selector: str = _setting("zero_std", "Which fresh groups may be replaced.")
    replay_selector_kwargs: dict[str, Any] | str | None = _arguments("selector")
    replay_mixer: str = _setting("whole", "Which rows of a slot stored rows take.")
    replay_mixer_kwargs: dict[str, Any] | str | None = _arguments("mixer")
    replay_scope: str = _setting(AUTO, "Which processes share a buffer.")
    replay_scope_kwargs: dict[str, Any] | str | None = _arguments("scope")
    replay_correction: str = _setting("ratio", "How the loss corrects for replayed rows' policy.")
    replay_correction_kwargs: dict[str, Any] | str | None = _arguments("correction")
    replay_max_age: int | None = _setting(None, "Oldest age, in optimizer updates, at which an entry is replayed.")
    replay_max_uses: int | None = _setting(None, "How often one entry is replayed.")
    replay_max_fraction: float = _setting(1.0, "Largest share of a generation batch's groups that replay may fill.")
    replay_start: int | str | None = _setting(
        ADAPTIVE, "Updates before anything is replayed; adaptive waits at first where rewards are sparse."
    )
    replay_start_pass_rate: float | None = _setting(
        None, "Running share of passing completions before anything is replayed."
    )
    replay_task_columns: list[str] | None = _list_setting(
        "Columns that tell tasks apart beside the prompt; all if not set."
    )
    replay_reward: str | None = _setting(
        None, "Reward function whose values decide which groups are dead; the weighted sum if not set."
    )
    replay_pass_reward: float = _setting(0.5, "A completion passes with a reward of at least this.")
    replay_retire_passes: int | None = _setting(
        None, "Passing completions of a fresh group at which its prompt's entries leave."
    )
    replay_max_weight: float | None = _setting(None, "Largest factor on a replayed token's policy term.")
    replay_advantages: str = _setting("auto", "Advantages of a slot with stored rows: auto, stored, joint or split.")
    replay_record: str = _setting("auto", "Where fresh groups' log-probs come from: auto, loss or forward.")
    replay_kl: str = _setting("all", "Rows whose KL term counts: all, fresh or all_wrong.")
    replay_iterations: str = _setting("same", "What iterations 2 to num_iterations train on: same or replay.")
    replay_unfilled: str = _setting("keep", "Dead groups that nothing fills: keep, mask, exclude or intra_batch.")
    replay_refill_rounds: int = _setting(
        0, "Rounds in which completions are generated again for dead groups, at most."
    )
    replay_refill_prompts: str = _setting("new", "What is generated for again: new prompts, or the same ones.")
    replay_refill_until: float = _setting(1.0, "Share of live groups at which nothing more is generated again.")
    replay_weight: float = _setting(1.0, "Weight of replayed rows in the policy loss, on top of the correction's.")
    replay_dry_run: bool = _setting(
        False, "Decide and measure everything but exchange nothing: training stays stock's."
    )
    replay_seed: int | None = _setting(None, "Seed of the private generator; the trainer's seed if not set.")
    replay_plugins: list[str] | None = _list_setting("Plugins whose hooks take part, by entry-point name.")
    replay_plugins_kwargs: dict[str, Any] | str | None = _setting(
        None, "By a plugin's name, its keyword arguments: a mapping, or on the command line a JSON string."
    )
    replay_on_mismatch: str = _setting("refuse", "A checkpoint's buffer that does not fit: refuse, or go on empty.")
    replay_warm_start: str | None = _setting(
        None, "A Parquet or JSONL file that fills the buffer when training begins."
    )
    replay_warm_start_short: str = _setting(
        "refuse", "Its groups of too few rows: refuse, or resample rows of their own."
    )
    replay_preset: str | None = _setting(None, "A plugin's bundle of settings, for all fields left at their defaults.")

    def __post_init__(self) -> None:
        self._given = {spec.name for spec in fields(self) if not self._take_plain(spec.name)}
        for kind in STRATEGY_KINDS:
            self._parse_kwargs(f"replay_{kind}_kwargs")
        self._parse_kwargs("replay_plugins_kwargs")
        if isinstance(self.replay_plugins, str):
            self.replay_plugins = [self.replay_plugins]
        if self.replay_task_columns in ("", [""]):  # as the command line gives no column
            self.replay_task_columns = []
        if isinstance(self.replay_start, str) and self.replay_start.isdecimal():  # as the command line gives it
            self.replay_start = int(self.replay_start)
        validate({spec.name: getattr(self, spec.name) for spec in fields(self)})
        self.max_bytes = parse_bytes(self.replay_max_bytes)
        for kind in STRATEGY_KINDS:
            self._refuse_unknown_name(kind)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("replay") and name not in self.__dataclass_fields__:
            self._refuse_unknown([name], "ReplayConfig")
        if "_in_force" in vars(self):
            raise ConfigurationError(
                f"{name}={value!r} can't be set: they are in force since attach. Call detach, and attach again."
            )
        super().__setattr__(name, value)

    def in_force(self) -> ReplayConfig:
        """Itself, from now on to read only."""
        self._in_force = True
        return self

    def _refuse_unknown_name(self, kind: Kind) -> None:
        """Refuses a strategy that nothing offers, and arguments that it does not take: before a model is loaded for
        nothing.

        What a plugin (`plugin/name`) or a module (`module:name`) has is looked up by `attach`: it may be registered
        later. Beside a preset, the arguments may be for the strategy that the preset names.
        """
        name = getattr(self, f"replay_{kind}")
        arguments = self.kwargs_of(kind)
        if not isinstance(name, str) or "/" in name or ":" in name:
            return
        if arguments or name != getattr(ReplayConfig, f"replay_{kind}"):
            registry().resolve(kind, name, arguments if self.replay_preset is None else {})

    def _take_plain(self, name: str) -> bool:
        """Puts a plain value in the place of a marked default; False if the user gave the value."""
        value = getattr(self, name)
        if isinstance(value, _DefaultNone):
            setattr(self, name, None)
            return True
        plain = _PLAIN.get(type(value))
        if plain is not None:
            setattr(self, name, plain(value))
            return True
        is_default = value == type(self).__dataclass_fields__[name].default
        return isinstance(value, bool) and is_default

    def to_dict(self) -> dict[str, Any]:
        """Every setting by name, as JSON can hold it: a strategy that is an object as its own name."""
        return {spec.name: in_json(getattr(self, spec.name)) for spec in fields(self)}

    def kwargs_of(self, kind: str) -> dict[str, Any]:
        """The keyword arguments given for a kind of strategy."""
        return dict(getattr(self, f"replay_{kind}_kwargs") or {})

    def with_settings(self, settings: Mapping[str, Any], source: str) -> ReplayConfig:
        """A validated copy with some fields set; `source` is named if one of them does not exist."""
        config = self._with(settings, source)
        config._given = self._given | set(settings)
        return config

    def with_preset(self) -> ReplayConfig:
        """The same with the settings of the preset, if one is named."""
        if self.replay_preset is None:
            return self
        _, preset = registry().preset(self.replay_preset)
        return self.with_defaults(preset.settings, f"The preset {self.replay_preset!r}")

    def with_defaults(self, settings: Mapping[str, Any], source: str) -> ReplayConfig:
        """A validated copy where `settings` (a preset's) fill the fields that nobody gave."""
        unset = {name: value for name, value in settings.items() if name not in self._given}
        for kind in STRATEGY_KINDS:  # a preset's arguments are for the preset's strategy
            name = f"replay_{kind}"
            if name in settings and name not in unset:
                unset.pop(f"{name}_kwargs", None)
        config = self._with(unset, source)
        config._given = self._given
        return config

    def _with(self, settings: Mapping[str, Any], source: str) -> ReplayConfig:
        self._refuse_unknown(settings, source)
        return replace(self, **settings)

    def _refuse_unknown(self, names: Iterable[str], source: str) -> None:
        known = [spec.name for spec in fields(self)]
        for name in names:
            if name in known:
                continue
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            hint = hint or f" The settings are: {', '.join(known)}."
            raise ConfigurationError(f"{source} has no setting {name!r}.{hint}")

    def _parse_kwargs(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, str):
            return
        try:
            setattr(self, name, json.loads(value))
        except json.JSONDecodeError as error:
            raise unusable(name, value, f"give a JSON object such as '{{\"key\": 1}}' ({error})") from None
