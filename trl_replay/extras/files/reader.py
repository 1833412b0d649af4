"""Rows made elsewhere, checked and combined into groups of token ids."""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import compat
from ...base.sizes import counted
from ...data.counters import Tally
from ...data.fields import ADVANTAGES
from ...data.rewards import weighted_rewards
from ...data.tasks import Tasks
from ...data.types import Bools, Floats
from ...errors import ReplayError
from .file_tasks import TASK, UNKNOWN, FileTasks
from .logged import LoggedPrompts
from .schema import FINGERPRINT, MASKS, TOKENS, Row, checked, has_images, lacks_reward, reward_columns
from .sources import Source, read_sources, source_name
from .tokens import EMPTY, FAILED, SEVERAL, RowError, Tokens, has_turns


@dataclass(frozen=True, slots=True)
class Reading:
    """What to read, and how.

    Attributes:
        source (`Any`): Paths, or rows.
        incomplete (`str`): What becomes of groups of too few rows.
        columns (`Mapping[str, str]`): By names in the source, the names that they stand for.
        rescore (`bool`): Whether rows that have a reward are scored anew.
    """

    source: Any
    incomplete: str
    columns: Mapping[str, str]
    rescore: bool = False

    @property
    def name(self) -> str:
        """The source's name in errors."""
        return source_name(self.source)


@dataclass(frozen=True, slots=True)
class Member:
    """One row of a group.

    Attributes:
        label (`str`): What an error calls it.
        row (`Mapping`): As read.
        tasks ([`FileTasks`]): Of its file.
        task (`int`): As in the table; `UNKNOWN` if the file does not say.
        prompt_ids, completion_ids (`NDArray`): The file's, or made of its texts.
        tokens (`dict[str, NDArray]`): Token-level fields, by batch key.
    """

    label: str
    row: Row
    tasks: FileTasks
    task: int
    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    tokens: dict[str, NDArray[np.float32]]


@dataclass(slots=True)
class Gathered:
    """Rows that belong together.

    Attributes:
        members (`list[Member]`): Those that can be used.
        lacks (`bool`): Whether others were refused.
    """

    members: list[Member] = field(default_factory=list)
    lacks: bool = False


@dataclass(frozen=True, slots=True)
class OfflineGroup:
    """`G` completions of one prompt.

    Attributes:
        prompt_ids (`list[NDArray]`): Of each row.
        completion_ids (`list[NDArray]`): Of each row.
        rewards (`(G, functions)`): Raw rewards, NaN for None.
        weights (`(functions,)`): The trainer's weight of each; 1 where they are not the trainer's functions.
        named (`bool`): Whether they are.
        advantages (`(G,)`, *optional*): The file's.
        masked (`(G,)` bool): Rows that train nothing, as the file says.
        task (`int`): What it was generated for, as in the table; `UNKNOWN` if the file does not say.
        tokens (`dict[str, list[NDArray]]`): Token-level fields that the file has for every row, by batch key.
        unscored (`Sequence[Member]`): Its rows, if the trainer's functions are to score them; their rewards are NaN.
    """

    prompt_ids: list[NDArray[np.int32]]
    completion_ids: list[NDArray[np.int32]]
    rewards: Floats
    weights: Floats
    named: bool
    advantages: Floats | None
    masked: Bools
    task: int
    tokens: dict[str, list[NDArray[np.float32]]] = field(default_factory=dict)
    unscored: Sequence[Member] = ()

    @property
    def is_shaped(self) -> bool:
        """Tell whether equal advantages of its rows may still train."""
        return bool(self.masked.any()) or ADVANTAGES in self.tokens


def read_groups(trainer: Any, tasks: Tasks, reading: Reading, tally: Tally) -> list[OfflineGroup]:
    """The groups of files or of rows, each with the trainer's number of rows.

    Rows belong together by the column `group` of their file where there is one, and else by their task; a group of
    more rows than `num_generations` gives several. Token ids and log-probs count only if the file's tokenizer is this
    one.

    Raises:
        ReplayError: The source can't be read, or a row lacks what is needed: names the row.
    """
    name = reading.name
    tokens = Tokens(trainer)
    sources = read_sources(reading.source, reading.columns, trainer.reward_func_names)
    logged = LoggedPrompts(trainer, tasks, tokens)
    gathered = _gathered(trainer, tasks, sources, tokens, logged, tally)
    members = [member for one in gathered for member in one.members]
    size = trainer.num_generations
    rng = np.random.default_rng(trainer.args.seed)
    groups: list[OfflineGroup] = []
    sorted_by_reward = 0
    for one in gathered:
        cut = [
            _group(trainer, tokens, *part, reading.rescore)
            for part in _parts(size, one, name, reading.incomplete, tally, rng)
        ]
        sorted_by_reward += _is_sorted(cut)
        groups += cut
    if trainer.accelerator.is_main_process:
        _warn_of_order(sorted_by_reward, name)
        _warn_of_other_functions(trainer, members, groups, name)
        _warn_of_plain_texts(trainer, tokens, logged, members, name)
        _warn_of_ends(trainer, tokens, members)
    return _fitting(trainer, groups, name, tally)


def _warn_of_order(prompts: int, source: str) -> None:
    """Warn of so many prompts whose rows are sorted by reward."""
    if prompts:
        warnings.warn(
            f"In {source}, {counted(prompts, 'prompt')} of different rewards gave only groups of equal ones, which "
            "teach nothing: neighboring rows make a group, and these are sorted by reward. Shuffle the rows, or "
            "number the groups in a column `group`.",
            stacklevel=3,
        )


def _warn_of_ends(trainer: Any, tokens: Tokens, members: Sequence[Member]) -> None:
    """Warn of messages whose end, by the chat template, is none for this trainer."""
    said = any(not _has_ids(member.row) and _is_messages(member.row) for member in members)
    if said and not tokens.ends_turns:
        tokenizer = compat.tokenizer(trainer)
        stops = tokenizer.convert_ids_to_tokens(compat.stop_ids(trainer))
        warnings.warn(
            f"The chat template ends an answer with {tokenizer.decode(tokens.ending)!r}, and this trainer's model "
            f"goes on after it: it stops at {', '.join(map(repr, stops))}. Add that token to eos_token_id of the "
            "model's generation_config before the trainer is made (TRL 1.14 and later), or make it the tokenizer's "
            "eos_token.",
            stacklevel=3,
        )


def _is_messages(row: Row) -> bool:
    return not isinstance(row["prompt"], str) or not isinstance(row["completion"], str)


def _warn_of_plain_texts(
    trainer: Any, tokens: Tokens, logged: LoggedPrompts, members: Sequence[Member], source: str
) -> None:
    """Warn of texts that lack the chat template of the dataset's prompts."""
    dataset = trainer.train_dataset
    texts = [member for member in members if isinstance(member.row["prompt"], str) and not _has_ids(member.row)]
    if not texts or compat.streams(dataset) or compat.has_environments(trainer) or not len(dataset):
        return
    lacking = any(logged.lacks_template(member.prompt_ids.tolist()) for member in texts)
    messages = dataset[0].get("prompt")
    if not lacking and isinstance(messages, list):
        ending = tokens.prompt(messages)[-1]
        lacking = all(member.prompt_ids[-1] != ending for member in texts)
    if lacking:
        form = "messages" if isinstance(messages, list) else "texts in one"
        warnings.warn(
            f"Prompts in {source} are texts without a chat template, and those of the dataset are {form}: the model "
            "never gets such prompts. Give them as the dataset has them.",
            stacklevel=3,
        )


def _warn_of_other_functions(
    trainer: Any, members: Sequence[Member], groups: Sequence[OfflineGroup], source: str
) -> None:
    """Warn of advantages that were made from rewards of other functions than the trainer has."""
    if all(group.advantages is None for group in groups):
        return
    rows = [member.row for member in members]
    trained = set(reward_columns(trainer.reward_func_names))
    scored = {name for row in rows for name, value in row.items() if value is not None}
    counted_in = {name for name in scored if name.startswith("reward/")}
    others = sorted(counted_in - trained)
    lacking = sorted(trained - {name for row in rows for name in row})
    if counted_in and (others or lacking):
        words = [f"with {name}" for name in others] + [f"without {name}" for name in lacking]
        warnings.warn(
            f"The advantages in {source} are of other reward functions than the trainer's ({', '.join(words)}), and "
            "are used as they are. To have them computed from its functions, drop the column `advantage`.",
            stacklevel=3,
        )


def _is_sorted(groups: Sequence[OfflineGroup]) -> bool:
    """Tell whether a prompt's rewards differ between groups, and in none of them."""
    rewards = [weighted_rewards(group.rewards, group.weights) for group in groups]
    known = [of_group[~np.isnan(of_group)] for of_group in rewards if not np.isnan(of_group).all()]
    alike = all((of_group == of_group[0]).all() for of_group in known) and not any(one.is_shaped for one in groups)
    return alike and len({float(of_group[0]) for of_group in known}) > 1


def _gathered(
    trainer: Any, tasks: Tasks, sources: Sequence[Source], tokens: Tokens, logged: LoggedPrompts, tally: Tally
) -> list[Gathered]:
    """Rows that belong together, if all of them can be used. A row that the trainer could not have made is counted,
    and left out."""
    vocabulary = compat.vocabulary_size(trainer)
    gathered: dict[str, Gathered] = defaultdict(Gathered)
    tasks_of: dict[str, FileTasks] = {}
    for index, source in enumerate(sources):
        metadata = json.dumps(source.metadata, sort_keys=True)
        if metadata not in tasks_of:
            tasks_of[metadata] = FileTasks(trainer, tasks, source.metadata)
        of_file = tasks_of[metadata]
        same_tokenizer = source.metadata.get(FINGERPRINT) in (None, compat.tokenizer_fingerprint(trainer))
        for number, given in enumerate(source.rows):
            label = f"Row {number} of {source.name}"
            row = checked(given, label, vocabulary)
            one = Gathered()
            try:
                by_ids = same_tokenizer and _has_ids(row)
                row = row if by_ids and not source.logged else logged.restored(row, source.logged)
                task, group = of_file.of(row), row.get("group")
                key = [task, row["prompt"]] if group is None else [f"file {index}", group]
                one = gathered[json.dumps(key, sort_keys=True, default=str)]
                _refuse_failed(row, trainer)
                prompt, completion, fields = _token_ids(row, tokens, same_tokenizer)
            except RowError as reason:
                one.lacks = True
                tally.note(1, f"a row was refused: {reason}")
                continue
            if not len(prompt) or not len(completion):
                raise ReplayError(f"{label}, with the prompt {row['prompt']!r}, has no tokens.")
            if group is not None and one.members:
                _refuse_another_task(row, one.members[0].row, label)
            one.members.append(Member(label, row, of_file, task, prompt, completion, fields))
    return list(gathered.values())


def _refuse_failed(row: Row, trainer: Any) -> None:
    """Refuse a row of a rollout that gave nothing, or failed: its reward is none of the model's.

    Raises:
        RowError: It is one.
    """
    completion = row["completion"]
    if completion is None or (not isinstance(completion, str) and not len(completion)):
        raise RowError(EMPTY)
    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    if row.get("error") and "error" not in columns:
        raise RowError(FAILED)


def _refuse_another_task(row: Row, first: Row, label: str) -> None:
    """Refuse a row of another task or prompt than the first one of its group.

    Raises:
        ReplayError: Names both.
    """
    advice = "Number groups apart, or give files by their paths: each then has groups of its own."
    if row.get(TASK) != first.get(TASK):
        raise ReplayError(
            f"{label} is of another task ({TASK}) than another row of its group {row['group']!r}: rewards of two "
            f"tasks have no baseline in common. {advice}"
        )
    if row["prompt"] != first["prompt"] and not row.get(TASK):
        raise ReplayError(
            f"{label} has the prompt {row['prompt']!r}, and another row of its group {row['group']!r} has "
            f"{first['prompt']!r}: rewards of two prompts have no baseline in common. {advice}"
        )


def _token_ids(
    row: Row, tokens: Tokens, same_tokenizer: bool
) -> tuple[NDArray[np.int32], NDArray[np.int32], dict[str, NDArray[np.float32]]]:
    """Token ids of prompt and completion, those of the file or made of its texts, and token-level fields.

    Raises:
        RowError: The trainer could not have made it.
    """
    fields: dict[str, NDArray[np.float32]] = {}
    if same_tokenizer and _has_ids(row):
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        fields = {name: np.asarray(row[name]).astype(np.float32) for name in TOKENS if row.get(name) is not None}
        if not any(name in fields for name in MASKS) and has_turns(row["completion"]):
            raise RowError(SEVERAL)
        _move_mask(fields)
    else:
        prompt = tokens.prompt(row["prompt"])
        cut_off = bool(row.get("is_truncated"))
        completion, tool_mask = tokens.completion(row["prompt"], prompt, row["completion"], cut_off)
        if tool_mask is not None:
            fields["tool_mask"] = np.array(tool_mask, np.float32)
    return np.asarray(prompt).astype(np.int32), np.asarray(completion).astype(np.int32), fields


def _move_mask(fields: dict[str, NDArray[np.float32]]) -> None:
    """Make a tool mask of a completion mask that leaves out some tokens: they count in no loss, but the model has
    seen them. (TRL's own is all ones, or all zeros.)"""
    mask = fields.get("completion_mask")
    if mask is not None and mask.any() and not mask.all():
        del fields["completion_mask"]
        fields["tool_mask"] = fields.get("tool_mask", 1.0) * mask


def _parts(
    size: int, gathered: Gathered, source: str, incomplete: str, tally: Tally, rng: np.random.Generator
) -> Iterator[tuple[list[Member], bool]]:
    """Parts of `size` rows, and whether they are a whole group of the file. What is left over is refused, or filled up
    with rows of its own."""
    members = gathered.members
    if any(has_images(member.row) for member in members):
        tally.refuse(1, "it has images, and its file does not hold them")
        return
    if any(member.row.get("forked") for member in members):
        tally.refuse(1, "completions of it have several rows (forked conversations), and here each has one")
        return
    whole = len(members) // size * size
    for start in range(0, whole, size):
        yield members[start : start + size], len(members) == size and not gathered.lacks
    rest = members[whole:]
    if rest and incomplete == "resample":
        drawn = rng.integers(len(rest), size=size - len(rest))
        yield rest + [rest[index] for index in drawn], False
    elif rest:
        reason = f"it has fewer rows in {source} than num_generations={size}"
        tally.refuse(1, f"{reason} ('resample' in replay_warm_start_short fills it up)")


def _fitting(trainer: Any, groups: Sequence[OfflineGroup], source: str, tally: Tally) -> list[OfflineGroup]:
    """The groups whose rows are no longer than this trainer's may be. One warning tells of all others."""
    limit = trainer.max_completion_length
    positions = compat.positions(trainer)
    fitting = list(groups)
    reasons: list[str] = []
    for most, length, fault in (
        (limit, _longest_completion, f"a completion is longer than max_completion_length={limit}"),
        (positions, _longest_row, f"a prompt with its completion is longer than the model's {positions} positions"),
    ):
        if most is None:
            continue
        refused = [group for group in fitting if length(group) > most]
        if refused:
            fitting = [group for group in fitting if length(group) <= most]
            reason = f"{fault}: the longest has {max(map(length, refused))} tokens"
            tally.refuse(len(refused), reason)
            reasons.append(reason)
    if reasons and trainer.accelerator.is_main_process:
        warnings.warn(
            f"{len(groups) - len(fitting)} of the {len(groups)} groups of {source} were refused: "
            f"{'; '.join(reasons)}. All rows of a batch are padded to its longest one, so that replaying such a group "
            "would make every row of its batch that long.",
            stacklevel=2,
        )
    return fitting


def _longest_completion(group: OfflineGroup) -> int:
    return max(map(len, group.completion_ids))


def _longest_row(group: OfflineGroup) -> int:
    """Tokens of the longest prompt with its completion."""
    pairs = zip(group.prompt_ids, group.completion_ids, strict=True)
    return max(len(prompt) + len(completion) for prompt, completion in pairs)


def _group(trainer: Any, tokens: Tokens, members: Sequence[Member], is_whole: bool, rescore: bool) -> OfflineGroup:
    rows = [member.row for member in members]
    unscored = rescore or any(map(lacks_reward, rows))
    if unscored:  # rewards of two origins have no baseline in common
        names = reward_columns(trainer.reward_func_names)
        rows = [{**row, **dict.fromkeys(names), "reward": None, "advantage": None} for row in rows]
    rewards, weights, named = _rewards(trainer, rows)
    of_rows = {member.task for member in members}
    fields = _token_fields(members)
    if unscored:
        fields.pop(ADVANTAGES, None)
    if compat.cuts_off(trainer):
        _mask_cut_off(fields, tokens, members)
    return OfflineGroup(
        prompt_ids=[member.prompt_ids for member in members],
        completion_ids=[member.completion_ids for member in members],
        rewards=rewards,
        weights=weights,
        named=named,
        advantages=_advantages(rows) if is_whole else None,
        masked=np.array([bool(row.get("masked")) for row in rows]),
        task=of_rows.pop() if len(of_rows) == 1 else UNKNOWN,
        tokens=fields,
        unscored=members if unscored else (),
    )


def _mask_cut_off(fields: dict[str, list[NDArray[np.float32]]], tokens: Tokens, members: Sequence[Member]) -> None:
    """Mask completions without an end, as TRL does with `mask_truncated_completions`."""
    cut_off = [tokens.is_cut_off(member.completion_ids) for member in members]
    if any(cut_off):
        masks = fields.get("completion_mask") or [_ones(member) for member in members]
        fields["completion_mask"] = [mask * (not cut) for mask, cut in zip(masks, cut_off, strict=True)]


def _has_ids(row: Row) -> bool:
    return row.get("prompt_ids") is not None and row.get("completion_ids") is not None


def _token_fields(members: Sequence[Member]) -> dict[str, list[NDArray[np.float32]]]:
    """Return the token-level fields that every row has, and masks that any has."""
    fields: dict[str, list[NDArray[np.float32]]] = {}
    for name in TOKENS:
        has = [name in member.tokens for member in members]
        if all(has) or (name in MASKS and any(has)):
            fields[name] = [member.tokens.get(name, _ones(member)) for member in members]
    return fields


def _ones(member: Member) -> NDArray[np.float32]:
    return np.ones(len(member.completion_ids), np.float32)


def _advantages(rows: Sequence[Row]) -> Floats | None:
    """`(G,)`, if every row has one."""
    advantages = [row.get("advantage") for row in rows]
    if any(value is None for value in advantages):
        return None
    return np.array(advantages, np.float64)


def _rewards(trainer: Any, rows: Sequence[Row]) -> tuple[Floats, Floats, bool]:
    """`(G, functions)` rewards, `(functions,)` weights, and whether they are of the trainer's functions.

    Of these where the file names them all; else the column `reward`, or other functions at weight 1.
    """
    total = _columns(rows, ["reward"])
    has_total = not np.isnan(total).all()
    names = reward_columns(trainer.reward_func_names)
    if all(name in row for row in rows for name in names):
        rewards = _columns(rows, names)
        if not (has_total and np.isnan(rewards).all()):
            return rewards, compat.reward_setup(trainer).weights, True
    if has_total:
        return total, np.ones(1), False
    present = {name for row in rows for name in row}
    others = sorted(name for name in present if name.startswith("reward/"))
    return _columns(rows, others), np.ones(len(others)), False


def _columns(rows: Sequence[Row], names: Sequence[str]) -> Floats:
    """`(G, names)`; NaN for None."""
    return np.array([[row.get(name) for name in names] for row in rows], np.float64)
