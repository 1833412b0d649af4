"""The settings as one dataclass, used next to GRPOConfig in Python, YAML and on the command line."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from ..base.files import in_json, parse_bytes
from ..base.validation import (
    ADAPTIVE,
    AUTO,
    STRATEGY_KINDS,
    Check,
    Named,
    Refill,
    choice,
    function_name,
    names,
    number,
    optional,
    plugins,
    preset_name,
    readable_files,
    refill,
    refuse_without_effect,
    require,
    share,
    size_in_bytes,
    start,
    strategy,
    true_or_false,
    whole,
)
from ..errors import ConfigurationError, nearest
from ..registry import registry
from ..specs import Kind
from ..strategies.scopes import SCOPES


class _DefaultText(str):
    """A marked default text. argparse calls `str` on a default, and must get this very object."""

    def __str__(self) -> str:
        return self


class _DefaultInt(int):
    """A marked default integer."""


class _DefaultFloat(float):
    """A marked default float."""


class _DefaultNone:
    """A marked default None."""

    def __repr__(self) -> str:
        return "None"


_MARKS: dict[type, Any] = {str: _DefaultText, int: _DefaultInt, float: _DefaultFloat}
_PLAIN: dict[type, Any] = {_DefaultText: str.__str__, _DefaultInt: int, _DefaultFloat: float}


def setting(default: Any, text: str) -> Any:
    """Declare a setting: its default and its help.

    A default is told from the same value given in Python, in YAML or as a flag, so that a preset fills only what
    nobody gave. `ReplayConfig` puts plain values in the place of marked ones. (True and false can't be marked: there
    a value that equals the default counts as not given.)
    """
    metadata = {"help": " ".join(text.split())}
    if default is None:  # of a list, transformers' parser passes only a factory's default on
        return field(default_factory=_DefaultNone, metadata=metadata)
    return field(default=_MARKS.get(type(default), bool)(default), metadata=metadata)


@dataclass(frozen=True, slots=True)
class Checked:
    """How a setting is checked and compared between ranks.

    Attributes:
        check (`Callable`): Returns what to give instead of a wrong value.
        ranks (`str`): `"equal"`, or `"own"` where ranks may have different values: what a preset sets is compared, and
            bytes are where they must be equal.
    """

    check: Check
    ranks: str = "equal"


C = TypeVar("C")
WEIGHTS = "a number above 0, at most 1,000,000; replay_dry_run=True measures and trains on nothing stored"


def _with_remedies(made: type[C]) -> type[C]:
    """The constructor tells what to write instead of a setting that there is not, as `attach` does."""
    config: Any = made
    init = config.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        config._refuse_unknown(settings, config.__name__)
        init(self, *args, **settings)

    config.__init__ = checked
    return made


@_with_remedies
@dataclass
class ReplayConfig:
    """Settings of a replay session. Use it next to `GRPOConfig` in `TrlParser`, or pass its fields to `attach`.

    Every field is described where it is declared, in `--help`, and in docs/reference/settings.md.
    """

    _argument_group_name = "settings of replay"  # in TrlParser's `--help`

    use_replay: Annotated[bool, Checked(true_or_false)] = setting(
        True, """Whether to replay at all. `False` leaves the trainer exactly as TRL made it."""
    )
    replay_buffer_size: Annotated[int, Checked(whole(0))] = setting(
        64,
        """Number of groups (of `num_generations` completions) that the buffer keeps per process (with `gathered`, on
        average). `0` stores nothing; settings that need no buffer still work.""",
    )
    replay_max_bytes: Annotated[int | str | None, Checked(optional(size_in_bytes), ranks="own")] = setting(
        None,
        """Limit on the buffer's memory, per process (with `gathered`, on average): `"512MB"`, `"2GiB"`. Groups are
        evicted when it or `replay_buffer_size` is reached.""",
    )
    replay_scorer: Annotated[str, Checked(strategy("scorer"))] = setting(
        "advantage_std",
        """Priority of a stored group, by which `heap` evicts, `proportional` samples, and `prompt_balanced` does both
        per prompt. Arguments stand in parentheses: `"pass_rate(target=0.5)"`; `trl-replay list NAME` shows them.""",
    )
    replay_evictor: Annotated[str, Checked(strategy("evictor"))] = setting(
        "prompt_balanced", """Which stored groups leave a full buffer."""
    )
    replay_sampler: Annotated[str, Checked(strategy("sampler"))] = setting(
        "prompt_balanced", """Which stored groups are drawn for replay."""
    )
    replay_selector: Annotated[str, Checked(strategy("selector"))] = setting(
        "zero_std", """Which fresh groups may be replaced; by default dead groups, whose advantages are all equal."""
    )
    replay_mixer: Annotated[str, Checked(strategy("mixer"))] = setting(
        "whole", """Whether stored rows replace a whole group (`whole`) or some of its rows (`inject`)."""
    )
    replay_scope: Annotated[str, Checked(choice(AUTO, *SCOPES))] = setting(
        AUTO,
        """Which processes share a buffer: none (`process`), or all (`gathered`), each group stored on one of them.
        `"auto"` is `process` on one process, or if each has at least four whole groups per batch, otherwise
        `gathered`. A resumed run keeps its checkpoint's.""",
    )
    replay_correction: Annotated[str, Checked(strategy("correction"))] = setting(
        "ratio", """Off-policy correction: how the loss accounts for an older policy's rows."""
    )
    replay_max_age: Annotated[int | None, Checked(optional(whole(1)))] = setting(
        None, """Maximum age of a replayed group, in optimizer updates since it was generated."""
    )
    replay_max_uses: Annotated[int | None, Checked(optional(whole(1)))] = setting(
        None, """Maximum number of replays of a stored group."""
    )
    replay_max_fraction: Annotated[float, Checked(share)] = setting(
        1.0, """Maximum fraction of a generation batch's groups that replay may replace."""
    )
    replay_start: Annotated[int | str | None, Checked(start)] = setting(
        ADAPTIVE,
        """Number of optimizer updates before replay starts; the buffer fills from the beginning. `"adaptive"` waits
        for 16 stored groups while fewer than four groups, or one in ten, are live (docs/by-symptom.md).
        `"pass_rate(0.35)"` waits until this fraction of completions passes, as a running average over about 32
        batches. `None` or `0` does not wait.""",
    )
    replay_task_columns: Annotated[list[str] | None, Checked(optional(names("column")))] = setting(
        None,
        """Columns of the dataset that, with prompt and images, identify a task. Tasks never exchange completions. All
        columns if not set; with `[]` (on the command line `""`) only the prompt.""",
    )
    replay_reward: Annotated[str | None, Checked(optional(function_name))] = setting(
        None,
        """Reward function, by its name in TRL's log, that decides whether a group is dead, its priority, and whether a
        completion passes. The weighted sum of all if not set, and for groups that it does not score.""",
    )
    replay_pass_reward: Annotated[float | None, Checked(optional(number("a finite number")))] = setting(
        None,
        """Minimum reward of a completion that passes. If not set, the higher one of two values passes; with more, what
        passes is unknown, and `replay_kl="all_wrong"` uses the lowest reward seen.""",
    )
    replay_retire_passes: Annotated[int | None, Checked(optional(whole(1)))] = setting(
        None,
        """Number of passing completions in a fresh group that make its prompt solved: its groups leave the buffer, and
        such groups are not stored.""",
    )
    replay_max_weight: Annotated[
        float | None, Checked(optional(number("a number above 0, at most 1,000,000", most=1000000.0, above=0.0)))
    ] = setting(
        None,
        """Upper bound on a replayed token's importance ratio (before clipping) times all weights. If not set, only the
        ratio is bounded, by 20.""",
    )
    replay_advantages: Annotated[str, Checked(choice("auto", "stored", "joint", "split"))] = setting(
        "auto",
        """Advantages of a group with replaced rows: `"stored"` (each row keeps its own), `"joint"` (recomputed over
        all rows), `"split"` (over fresh and stored rows separately), or `"auto"`: stored if the whole group is
        replaced, otherwise joint.""",
    )
    replay_record: Annotated[str, Checked(choice("auto", "loss", "forward"))] = setting(
        "auto",
        """Source of fresh groups' log-probs: `"loss"`, which never sees replaced rows; `"forward"`, one more forward
        pass per batch, so that live groups that lose rows can be stored too; `"auto"`: the extra pass if the
        selector may choose live groups.""",
    )
    replay_kl: Annotated[str, Checked(choice("all", "fresh", "all_wrong"))] = setting(
        "all",
        """Rows whose KL term counts (`beta` ≠ 0): `"all"`, `"fresh"` (not replayed ones), or `"all_wrong"`: fresh rows
        of dead groups in which no row passes, which are then never replaced.""",
    )
    replay_iterations: Annotated[str, Checked(choice("same", "replay"))] = setting(
        "same",
        """Batch of iterations 2 to `num_iterations`: the `"same"` one again, or with `"replay"` groups newly drawn
        from the buffer.""",
    )
    replay_unfilled: Annotated[str, Checked(choice("keep", "mask", "exclude"))] = setting(
        "keep",
        """Treatment of dead groups that replay does not replace: `"keep"` trains them as TRL does; `"mask"` removes
        their KL and entropy gradient; `"exclude"` also removes them from the loss's denominator.""",
    )
    replay_refill: Annotated[str | None, Checked(optional(refill))] = setting(
        None,
        """Dynamic sampling: rounds that generate groups for dead ones. `"new(rounds=2)"` runs at most two a batch with
        other prompts of the dataset; `"same(rounds=2)"` tries the same prompts again. With `"new(rounds=2,
        until=0.8)"`, this fraction of live groups is enough. The buffer fills what remains.""",
    )
    replay_weight: Annotated[float, Checked(number(WEIGHTS, above=0.0, most=1e6))] = setting(
        1.0, """Weight of replayed rows in the policy loss, multiplied with the correction's."""
    )
    replay_dry_run: Annotated[bool, Checked(true_or_false)] = setting(
        False, """Whether to make and log every decision but replace nothing: training is bit-identical to TRL's."""
    )
    replay_plugins: Annotated[list[str] | None, Checked(optional(plugins))] = setting(
        None,
        """Plugins whose hooks are called, by name: `"greso(target=0.4)"`. A plugin whose strategy or preset is
        named is called anyway.""",
    )
    replay_warm_start: Annotated[list[str] | None, Checked(optional(readable_files))] = setting(
        None,
        """Files that fill the buffer when training begins: what `datasets.load_dataset` reads, with the columns
        `prompt`, `completion`, and `reward`, or what `session.export` wrote. A path, a folder, or a
        list. Not read again on resuming.""",
    )
    replay_warm_start_short: Annotated[str, Checked(choice("refuse", "resample"))] = setting(
        "refuse",
        """Groups of fewer than `num_generations` rows in the warm-start file: `"refuse"` leaves them out; `"resample"`
        completes them with draws from their own rows.""",
    )
    replay_warm_start_rescore: Annotated[bool, Checked(true_or_false)] = setting(
        False, """Whether the trainer's reward functions score all rows of the warm-start files."""
    )
    replay_preset: Annotated[str | None, Checked(optional(preset_name), ranks="own")] = setting(
        None, """A named bundle of settings; your own settings override it. `trl-replay list` shows all."""
    )

    def __post_init__(self) -> None:
        self._given = {spec.name for spec in fields(self) if not self._take_plain(spec.name)}
        if isinstance(self.replay_plugins, str):
            self.replay_plugins = [self.replay_plugins]
        if self.replay_task_columns in ("", [""]):  # as the command line gives no column
            self.replay_task_columns = []
        if isinstance(self.replay_start, str) and self.replay_start.isdecimal():  # as the command line gives it
            self.replay_start = int(self.replay_start)
        for name, rule in CHECKED.items():
            require(name, getattr(self, name), rule.check)
        if self.replay_preset is None:
            refuse_without_effect(vars(self), self._given)
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
        """Make this config read-only and return it."""
        self._in_force = True
        return self

    def _refuse_unknown_name(self, kind: Kind) -> None:
        """Refuse an unknown strategy or argument before a model is loaded.

        What a plugin (`plugin/name`) or a module (`module:name`) has is looked up by `attach`: it may be registered
        later.
        """
        value = getattr(self, f"replay_{kind}")
        if isinstance(value, str) and value != getattr(ReplayConfig, f"replay_{kind}"):
            name, arguments = Named.read(value)
            if "/" not in name and ":" not in name:
                registry().resolve(kind, name, arguments)

    def _take_plain(self, name: str) -> bool:
        """Replace a marked default by its plain value; return False if the user gave the value."""
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
        """Return every setting by name, as values for JSON; an object strategy by its name."""
        return {spec.name: in_json(getattr(self, spec.name)) for spec in fields(self)}

    def strategy(self, kind: str) -> tuple[Any, Mapping[str, Any]]:
        """Return a strategy's name, or in Python the strategy itself, and the arguments given for it."""
        value = getattr(self, f"replay_{kind}")
        return Named.read(value) if isinstance(value, str) else (value, {})

    @property
    def plugins(self) -> dict[str, Mapping[str, Any]]:
        """Names of the plugins that are called, with their arguments."""
        return dict(map(Named.read, self.replay_plugins or []))

    @property
    def refill(self) -> Refill:
        """Dynamic sampling in force; with 0 rounds if it is off."""
        return Refill.read(self.replay_refill)

    def with_settings(self, settings: Mapping[str, Any], source: str) -> ReplayConfig:
        """Return a validated copy with some fields set; errors name `source`."""
        config = self._with(settings, source)
        config._given = self._given | set(settings)
        return config

    def with_preset(self) -> ReplayConfig:
        """Return a copy with the settings of the preset, if one is named."""
        if self.replay_preset is None:
            return self
        _, preset = registry().preset(self.replay_preset)
        merged = self.with_defaults(preset.settings, f"The preset {self.replay_preset!r}")
        refuse_without_effect(vars(merged), self._given)
        return merged

    def of_preset(self) -> list[str]:
        """Names of the settings that the preset fills."""
        if self.replay_preset is None:
            return []
        _, preset = registry().preset(self.replay_preset)
        return [name for name in preset.settings if name not in self._given]

    def with_defaults(self, settings: Mapping[str, Any], source: str) -> ReplayConfig:
        """Return a validated copy where `settings` (a preset's) fill the fields that nobody gave."""
        unset = {name: value for name, value in settings.items() if name not in self._given}
        config = self._with(unset, source)
        config._given = self._given
        return config

    def _with(self, settings: Mapping[str, Any], source: str) -> ReplayConfig:
        self._refuse_unknown(settings, source)
        return replace(self, **settings)

    @classmethod
    def _refuse_unknown(cls, names: Iterable[str], source: str) -> None:
        known = [spec.name for spec in fields(cls)]
        for name in names:
            if name in known:
                continue
            hint = nearest(name, known) or f" The settings are: {', '.join(known)}."
            raise ConfigurationError(f"{source} has no setting {name!r}.{hint}")


CHECKED: dict[str, Checked] = {
    name: get_args(hint)[1] for name, hint in get_type_hints(ReplayConfig, include_extras=True).items()
}
"""The rule of each setting. (A field's metadata can't hold it: transformers' parser hands that to argparse.)"""
