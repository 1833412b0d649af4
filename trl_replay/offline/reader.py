"""Reads rows made elsewhere (Parquet, JSONL, or mappings) and puts them together to groups of token ids."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import compat
from ..counters import Tally
from ..errors import ReplayError
from ..session import Session
from ..types import Floats
from .export import PORTION
from .schema import TOKENS, Row, array, checked, compact, has_images, is_nan, reward_columns

FINGERPRINT = "trl_replay_tokenizer"


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
        tokens (`dict[str, list[NDArray]]`): Token-level fields that the file has for every row, by batch key.
    """

    prompt_ids: list[NDArray[np.int32]]
    completion_ids: list[NDArray[np.int32]]
    rewards: Floats
    weights: Floats
    named: bool
    advantages: Floats | None
    tokens: dict[str, list[NDArray[np.float32]]] = field(default_factory=dict)


def read_groups(session: Session, source: Any, incomplete: str, tally: Tally) -> list[OfflineGroup]:
    """The groups of a file or of rows, each with the trainer's number of rows.

    Rows belong together by the column `group` where there is one, and else by their prompt; a group of more rows than
    `num_generations` gives several. Token ids and log-probs count only if the file's tokenizer is this one.

    Raises:
        ReplayError: The source can't be read, or a row lacks what is needed: names the row.
    """
    rows, fingerprint = _read(source)
    same_tokenizer = fingerprint in (
        None,
        compat.tokenizer_fingerprint(session.trainer),
    )
    size, rng = (
        session.components.num_generations,
        np.random.default_rng(session.trainer.args.seed),
    )
    vocabulary, gathered = (
        compat.vocabulary_size(session.trainer),
        dict[str, list[Row]](),
    )
    for number, row in enumerate(rows):
        row = checked(row, f"Row {number} of {source_name(source)}", vocabulary)
        key = row["group"] if row.get("group") is not None else row["prompt"]
        gathered.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(row)
    groups = []
    for members in gathered.values():
        if any(map(has_images, members)):
            tally.refuse(1, "it has images, and its file does not hold them")
            continue
        whole = len(members) // size * size
        parts = [members[start : start + size] for start in range(0, whole, size)]
        rest = members[whole:]
        if rest and incomplete == "resample":
            parts.append(
                [
                    *rest,
                    *(rest[index] for index in rng.integers(len(rest), size=size - len(rest))),
                ]
            )
        elif rest:
            tally.refuse(
                1,
                f"it has fewer rows in {source_name(source)} than num_generations={size}",
            )
        groups += [_group(session, part, same_tokenizer) for part in parts]
    return _fitting(session, groups, source_name(source), tally)


def _fitting(
    session: Session,
    groups: Sequence[OfflineGroup],
    source: str,
    tally: Tally,
) -> list[OfflineGroup]:
    """The groups whose rows are no longer than this trainer's may be. One warning tells of all others."""
    trainer = session.trainer
    longest_completion = trainer.max_completion_length or math.inf
    positions = compat.positions(trainer) or math.inf
    fitting: list[OfflineGroup] = []
    completions: list[int] = []
    rows: list[int] = []
    for group in groups:
        lengths = [len(ids) for ids in group.completion_ids]
        prompts = [len(ids) for ids in group.prompt_ids]
        completion = max(lengths)
        row = max(map(sum, zip(prompts, lengths, strict=True)))
        if completion > longest_completion:
            completions.append(completion)
        elif row > positions:
            rows.append(row)
        else:
            fitting.append(group)
    reasons: list[str] = []
    if completions:
        reasons.append(
            f"a completion is longer than max_completion_length={longest_completion}: "
            f"the longest has {max(completions)} tokens"
        )
        tally.refuse(len(completions), reasons[-1])
    if rows:
        reasons.append(
            f"a prompt with its completion is longer than the model's {positions} positions: "
            f"the longest has {max(rows)} tokens"
        )
        tally.refuse(len(rows), reasons[-1])
    if reasons and trainer.accelerator.is_main_process:
        warnings.warn(
            f"{len(completions) + len(rows)} of the {len(groups)} groups of {source} were refused: "
            f"{'; '.join(reasons)}. All rows of a batch are padded to its longest one, so that replaying such a group "
            "would make every row of its batch that long.",
            stacklevel=2,
        )
    return fitting


def _read(source: Any) -> tuple[Iterable[Any], str | None]:
    """The rows, and the fingerprint of the tokenizer that made their ids, where it is known."""
    if not isinstance(source, str | Path):
        return source, None
    path = Path(source)
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            file = parquet.ParquetFile(path)
            told = (file.schema_arrow.metadata or {}).get(FINGERPRINT.encode())
            rows = [compact(row) for batch in file.iter_batches(PORTION) for row in batch.to_pylist()]
            return rows, told.decode() if told else None
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()], None
    except Exception as error:  # of pyarrow, json or the system
        raise ReplayError(f"{path} can't be read: {type(error).__name__}: {error}") from error
    raise ReplayError(f"{path} can't be read: give a path that ends in .parquet or .jsonl.")


def source_name(source: Any) -> str:
    """What an error calls a source."""
    return str(source) if isinstance(source, str | Path) else "the rows given"


def _group(session: Session, rows: Sequence[Row], same_tokenizer: bool) -> OfflineGroup:
    trainer, with_ids = (
        session.trainer,
        same_tokenizer and all(_has_ids(row) for row in rows),
    )
    if with_ids:
        prompts, completions = (
            [array(row[key], np.int32) for row in rows] for key in ("prompt_ids", "completion_ids")
        )
    else:
        prompts = [array(_prompt_ids(trainer, row["prompt"]), np.int32) for row in rows]
        completions = [array(_completion_ids(trainer, row["completion"]), np.int32) for row in rows]
    if not all(map(len, prompts)) or not all(map(len, completions)):
        raise ReplayError(f"A row with the prompt {rows[0]['prompt']!r} has no tokens.")
    tokens = {
        key: [array(row[key], np.float32) for row in rows]
        for key in TOKENS
        if with_ids and all(row.get(key) is not None for row in rows)
    }
    rewards, weights, named = _rewards(session, rows)
    told = [row.get("advantage") for row in rows]
    advantages = None if any(value is None for value in told) else np.array(told, dtype=np.float64)
    return OfflineGroup(prompts, completions, rewards, weights, named, advantages, tokens)


def _has_ids(row: Row) -> bool:
    return row.get("prompt_ids") is not None and row.get("completion_ids") is not None


def _rewards(session: Session, rows: Sequence[Row]) -> tuple[Floats, Floats, bool]:
    """`(G, functions)` rewards, `(functions,)` weights, and whether they are of the trainer's functions.

    Of these where the file names them all; else the column `reward`, or other functions at weight 1.
    """
    names = reward_columns(session.trainer.reward_func_names)
    named = all(name in row for row in rows for name in names)
    values = _columns(rows, names) if named else np.full((len(rows), 0), np.nan)
    whole = all(row.get("reward") is not None and not is_nan(row["reward"]) for row in rows)
    if named and not (whole and np.isnan(values).all()):
        return values, compat.reward_setup(session.trainer).weights, True
    others = ["reward"] if whole else sorted({name for row in rows for name in row if name.startswith("reward/")})
    return _columns(rows, others), np.ones(len(others)), False


def _columns(rows: Sequence[Row], names: Sequence[str]) -> Floats:
    """`(G, names)`; NaN for None."""
    return np.array(
        [[np.nan if row.get(name) is None else row[name] for name in names] for row in rows],
        np.float64,
    )


def _prompt_ids(trainer: Any, prompt: Any) -> list[int]:
    """A text, or messages in the trainer's chat template."""
    if isinstance(prompt, str):
        return list(compat.tokenizer(trainer)(prompt)["input_ids"])
    told = compat.tokenizer(trainer).apply_chat_template(
        list(prompt),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return list(told["input_ids"])


def _completion_ids(trainer: Any, completion: Any) -> list[int]:
    """A text, or messages of which the last one counts; the end token follows where there is room for it."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    ids = list(compat.tokenizer(trainer)(text, add_special_tokens=False)["input_ids"])
    longest, end = (
        trainer.max_completion_length,
        compat.tokenizer(trainer).eos_token_id,
    )
    return ids if ids[-1:] == [end] or (longest is not None and len(ids) >= longest) else [*ids, end]
