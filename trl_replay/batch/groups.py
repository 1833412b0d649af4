"""Groups of a batch: their view of TRL's columns and rewards, which are dead, and the candidates that wait for
log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .. import compat
from ..base.progress import Copies, begin
from ..compat import IS_RATIO, OLD_LOGPS, SAMPLING_LOGPS, STD_EPSILON
from ..data.counters import Tally
from ..data.rewards import (
    NOISE,
    are_equal,
    bessel_std,
    have_equal_rewards,
    mean_of_scored,
    reward_noise,
    reward_sizes,
    weighted_rewards,
)
from ..data.success import Success
from ..data.tasks import encoded, hashed
from ..data.types import ADVANTAGES, STORED_REWARDS, Batch, Bools, FieldTable, Floats, Group, Groups, Ints, Packed
from ..errors import BatchError, SeamError
from ..serialization.groups import pack
from .compose import MASKS, image_bytes, images_per_row, loss_mask, row_lengths, trained_tokens

FLOAT32_EPS = float(np.finfo(np.float32).eps)
RELATIVE_TOLERANCE = 1e-5
"""Largest distance of TRL's own advantages of live groups from ours, as a share of them."""
TINY, OUTLIER = 1e-6, 1e3
"""Shaped advantages of the first share of the batch's largest, or less, are 0: float32 noise is a tenth of it. What is
above the second times the usual size counts no further, or one such group would make nothing of all others."""
WHOLE_COLUMNS = ("lengths", "trainable", "items", "images", "prompt", "recorded", "nbytes", "changed")
"""Columns of whole numbers, shared by scopes."""
TOLD_ITEMS = "told_items"
"""Column of `num_items_in_batch`, which all processes know."""


def describe(batch: Batch, first_row: int, tasks: Ints, fields: FieldTable) -> dict[str, NDArray[Any]]:
    """Return this process's columns that scopes share, `(B,)` each, on the CPU: 8 bytes per value.

    Args:
        batch (`dict`): As TRL returns it, its texts on the CPU.
        first_row (`int`): Index of the first row among the rows of all processes.
        tasks (`(B,)` int64): What each row was generated for.
        fields ([`FieldTable`]): The batch keys that are known, and the pad token.
    """
    advantages = _of_rows(batch, fields).numpy()
    rows = np.arange(first_row, first_row + len(advantages))
    _, lengths = row_lengths(batch, fields.pad_token_id)
    trainable = loss_mask(batch).ne(0).numpy().sum(axis=1)
    items = compat.counted_items(batch, lengths, trainable)
    told = batch.get("num_items_in_batch", items.sum())
    if np.isinf(advantages).any():
        raise BatchError(
            "In a row, some trained tokens have finite advantages and others do not: to mask the row, set NaN for "
            "all of its tokens."
        )
    return {
        "row": rows,
        "advantages": advantages,
        "lengths": lengths,
        "trainable": trainable,
        "items": items,
        TOLD_ITEMS: np.full(len(rows), int(told)),
        "images": images_per_row(batch),
        "prompt": tasks,
    }


def _of_rows(batch: Batch, fields: FieldTable) -> torch.Tensor:
    """Return each row's advantage, `(B,)` float64, NaN if it masks the row. For per-token advantages: the mean of
    their sizes over trained tokens with the sign of their sum, so that +1 and -1 don't cancel; inf if only some are
    finite."""
    advantages: torch.Tensor = batch[ADVANTAGES].detach().double()
    if not fields.has_token_advantages(batch):
        return advantages.view(-1)
    trained = loss_mask(batch).ne(0)
    kept = advantages.masked_fill(~trained, 0.0)
    means = kept.abs().sum(dim=1) / trained.sum(dim=1).clamp(min=1)
    signed = torch.where(kept.sum(dim=1) < 0, -means, means)
    unknown = advantages.isnan()
    whole = (unknown | ~trained).all(dim=1)
    partly = ~whole & ~advantages.isfinite().all(dim=1)
    return signed.masked_fill(partly, torch.inf).masked_fill(whole & unknown.any(dim=1), torch.nan)


def with_environments(keys: Ints, environments: Sequence[Any], batch: Batch, fields: FieldTable) -> Ints:
    """Return each row's task, `(B,)`: its dataset row and, with an environment, that one's `task_id` or else its
    prompt and images.

    Args:
        keys (`(B,)` int64): Of the dataset rows.
        environments (`Sequence`): One a row, or none at all.
        batch (`dict`): As TRL returns it, its texts on the CPU.
        fields ([`FieldTable`]): The batch keys that are known.

    Raises:
        SeamError: A `task_id` is an object without content.
    """
    if not environments:
        return keys
    told = [compat.task_id(environment) for environment in environments]
    if None in told:
        told = [shown if known is None else known for known, shown in zip(told, _prompts(batch, fields), strict=True)]
    try:
        found = [hashed(encoded(parts)) for parts in zip(keys.tolist(), told, strict=True)]
    except TypeError as error:
        raise SeamError(
            f"An environment's task_id can't tell tasks apart: {error}. Use a text, a number, or a list of these."
        ) from error
    return np.array(found, np.int64)


def _prompts(batch: Batch, fields: FieldTable) -> list[dict[str, Any]]:
    """Return each row's prompt as the model saw it: tokens without padding, and images."""
    rows = zip(batch["prompt_ids"], batch["prompt_mask"].ne(0), image_bytes(batch, fields), strict=True)
    return [{"tokens": ids[mask].numpy(), "images": images} for ids, mask, images in rows]


def blank(first_row: int, count: int) -> dict[str, NDArray[Any]]:
    """Return blank columns of `count` rows for a scope to share."""
    columns: dict[str, NDArray[Any]] = {
        "row": np.arange(first_row, first_row + count),
        "advantages": np.zeros(count),
        "logps": np.zeros(count),
    }
    for name in WHOLE_COLUMNS:
        columns[name] = np.zeros(count, np.int64)
    return columns


def view(
    rows: Mapping[str, NDArray[Any]],
    scored: torch.Tensor,
    setup: compat.RewardSetup,
    size: int,
    update: int,
    counting: int | None = None,
    success: Success | None = None,
) -> Groups:
    """Return the fresh groups that a scope shares.

    Args:
        rows (`Mapping[str, NDArray]`): The columns of `describe`, of all rows shared.
        scored (`(rows of all processes, functions)`): Raw rewards, NaN where None.
        setup ([`RewardSetup`]): How TRL made advantages of them.
        size (`int`): Rows of a group.
        update (`int`): Updates done so far.
        counting (`int`, *optional*): The reward function by which groups are dead; by TRL's advantages without one.
        success ([`Success`], *optional*): Takes note of the rewards of all processes.
    """
    own, expected, rewards, noise = trls_own(rows, scored, setup, size)
    sums, sizes = weighted_rewards(rewards, setup.weights), reward_sizes(rewards, setup.weights)
    if success is not None:
        of_counting = sums if counting is None else rewards[..., counting]
        success.note(of_counting, sizes if counting is None else np.abs(of_counting))
    shared = rows["row"][::size] // size
    given = rows["advantages"].reshape(-1, size)  # (groups shared, size)
    masked = np.isnan(given)
    advantages = np.where(masked, 0.0, given)
    trainable = rows["trainable"].reshape(-1, size)
    trains = (trainable > 0) & ~masked
    if setup.aggregation == "normalize_then_sum":
        noise = advantage_noise(rewards, setup)
    equal = differ_by_noise(advantages, np.ones_like(trains), trains, noise[shared])
    errors = (NOISE * sizes.max(axis=1))[shared]
    same_rewards = are_equal(sums[shared], errors)
    nothing = teach_nothing(advantages, trains, least_size(advantages, expected[~same_rewards]))
    nothing |= same_rewards & teach_nothing(advantages, trains, errors)
    groups = Groups(
        rewards=rewards[shared],
        reward_weights=setup.weights,
        advantages=advantages,
        lengths=rows["lengths"].reshape(-1, size),
        trainable=trainable,
        items=rows["items"].reshape(-1, size),
        dead=np.where(own, equal, nothing),
        update=np.full(len(advantages), update, np.int64),
        prompt=rows["prompt"][::size],
        masked=masked,
        counting=counting,
    )
    return groups if counting is None else replace(groups, dead=groups.dead | groups.alike)


def dead_by_function(scored: torch.Tensor, names: Sequence[str], weights: Floats, size: int) -> dict[str, float]:
    """Return the metrics `replay/dead_fraction/NAME` and `replay/live_without/NAME`: per reward function, the share of
    groups with equal rewards, and of those among them whose sum differs.

    Rows and groups that it did not score do not count. With one function there are no such metrics.

    Args:
        scored (`(rows of all processes, functions)`): Raw rewards, NaN where None.
        names (`Sequence[str]`): Of the functions, as TRL logs them.
        weights (`(functions,)`): In the sum.
        size (`int`): Rows of a group.
    """
    if len(names) == 1:
        return {}
    rewards = _by_group(scored.double(), size)
    live = ~have_equal_rewards(rewards, weights)
    shares = {}
    for number, name in enumerate(names):
        of_function = rewards[..., [number]]
        scored_groups = ~np.isnan(of_function).all(axis=(1, 2))
        if scored_groups.any():
            alike = have_equal_rewards(of_function[scored_groups], np.ones(1))
            shares[f"replay/dead_fraction/{name}"] = float(alike.mean())
            shares[f"replay/live_without/{name}"] = float((alike & live[scored_groups]).mean())
    return shares


def teach_nothing(advantages: Floats, trains: Bools, least: Floats | float) -> Bools:
    """Return a mask of dead groups, `(n,)`: those in which no row that `trains`, `(n, G)`, has an advantage above
    `least`."""
    sizes = np.where(trains, np.abs(advantages), 0.0)
    return np.asarray(sizes.max(axis=1, initial=0.0) <= least)


def least_size(advantages: Floats, live: Floats) -> float:
    """Return the size up to which a batch's shaped advantages are 0.

    Args:
        advantages (`(n, G)`): Those of the batch.
        live (`(m, G)`): Those of groups that are surely live, before they were shaped.
    """
    largest = float(np.abs(advantages).max(initial=0.0))
    sizes = np.abs(live).max(axis=1, initial=0.0)
    if sizes.any():
        ordered = np.sort(sizes[sizes > 0])
        largest = min(largest, OUTLIER * float(ordered[(len(ordered) - 1) // 2]))
    return TINY * largest


def differ_by_noise(advantages: Floats, members: Bools, trains: Bools, noise: Floats) -> Bools:
    """Return a mask of dead groups with TRL's own advantages, `(n,)`: those whose `members` differ by at most `noise`,
    or without a row that `trains`."""
    lowest = np.where(members, advantages, np.inf).min(axis=1)
    highest = np.where(members, advantages, -np.inf).max(axis=1)
    return np.asarray(highest - lowest <= noise) | teach_nothing(advantages, trains, noise / 2)


def rewards_of_batch(
    calls: Sequence[torch.Tensor], rows: Mapping[str, NDArray[Any]], setup: compat.RewardSetup, size: int, count: int
) -> torch.Tensor:
    """Return the batch's rewards, `(rows of all processes, functions)`, among all that were computed while it was
    scored.

    Args:
        calls (`Sequence[torch.Tensor]`): What each call returned.
        rows (`Mapping[str, NDArray]`): The columns of `describe`, of all rows shared.
        setup ([`RewardSetup`]): How TRL made advantages of them.
        size (`int`): Rows of a group.
        count (`int`): Rows of all processes.

    Raises:
        SeamError: There are none, or it can't be told which they are.
    """
    if not calls:
        raise SeamError(
            f"{compat.SCORE} did not call {compat.REWARDS}, so the rewards of the batch are unknown. Call it with "
            "super() in an override of scoring."
        )
    if len(calls) == 1:
        return calls[0]
    fitting: list[torch.Tensor] = []
    for scored in calls:
        if len(scored) != count:
            continue
        own, *_ = trls_own(rows, scored, setup, size)
        if not own.all():
            continue
        if not any(torch.allclose(scored, other, rtol=0.0, atol=0.0, equal_nan=True) for other in fitting):
            fitting.append(scored)
    if len(fitting) != 1:
        raise SeamError(
            f"{compat.SCORE} called {compat.REWARDS} {len(calls)} times for one batch, and the batch's advantages "
            f"match {len(fitting)} of the results, so the rewards of its rows are unknown. Replay does not support a "
            "trainer that scores several times and merges the results (dynamic sampling): score once per batch, or "
            "detach."
        )
    return fitting[0]


def trls_own(
    rows: Mapping[str, NDArray[Any]], scored: torch.Tensor, setup: compat.RewardSetup, size: int
) -> tuple[Bools, Floats, Floats, Floats]:
    """Return a mask of the shared groups whose advantages are TRL's own for these rewards, `(n,)`; what these are,
    `(n, size)`; and of all groups the rewards, `(groups, size, functions)`, and what float noise makes of equal ones,
    errors that all rows share included, `(groups,)`.

    They may differ by one rounding error of a mean, since the same operations on another device may round otherwise.
    """
    shared = rows["row"][::size] // size
    advantages = rows["advantages"].reshape(-1, size)
    computed = compat.advantages(scored.detach(), setup, size)
    expected = computed.numpy().astype(np.float64).reshape(-1, size)[shared]
    rewards = _by_group(scored.double(), size)
    noise = advantage_noise(rewards, setup, of_level=True)
    tolerance = noise[shared, None] * (FLOAT32_EPS / NOISE) + RELATIVE_TOLERANCE * np.abs(expected)
    own = np.asarray((np.abs(advantages - expected) <= tolerance).all(axis=1))
    return own, expected, rewards, noise


@dataclass(frozen=True, slots=True)
class AdvantageFormula:
    """TRL's rule that computes advantages from rewards, for one generation batch.

    Attributes:
        rows (`Mapping[str, NDArray]`): The columns of `describe`, of all rows shared.
        scored (`(rows of all processes, functions)`): The batch's raw rewards, NaN where None.
        setup ([`RewardSetup`]): TRL's normalization.
        size (`int`): Rows of a group.
        of_tokens (`bool`): Whether each token has its own advantage.
    """

    rows: Mapping[str, NDArray[Any]]
    scored: torch.Tensor
    setup: compat.RewardSetup
    size: int
    of_tokens: bool = False

    @property
    def explains_batch(self) -> bool:
        """Whether this rule yields the batch's advantages from its rewards."""
        if self.of_tokens:
            return False
        own, *_ = trls_own(self.rows, self.scored, self.setup, self.size)
        return bool(own.all())

    @property
    def spans_batch(self) -> bool:
        """Whether a row's advantage depends on the rewards of all groups."""
        return self.takes_functions_apart or self.setup.scale == "batch"

    @property
    def takes_functions_apart(self) -> bool:
        """Whether the rule needs each function's rewards, not only their weighted sum."""
        return self.setup.aggregation == "normalize_then_sum"

    def __call__(
        self, rewards: Floats, totals: Floats, members: Bools, trains: Bools, join: bool
    ) -> tuple[Floats, Bools]:
        """Compute advantages of newly assembled groups.

        Args:
            rewards (`(n, G, functions)`): Raw rewards, NaN where None.
            totals (`(n, G)`): Their weighted sums; rows of a file that does not name its functions have these alone.
            members (`(n, G)` bool): Rows that count.
            trains (`(n, G)` bool): Those of them that have a trained token.
            join (`bool`): Whether these groups count beside the fresh batch where TRL takes a mean or deviation over
                the whole batch. Those of a dead batch alone would be 0.

        Returns:
            `(n, G)` advantages, 0 for the others, and which groups are dead, `(n,)`.
        """
        setup = self.setup
        within = self.scored.detach().double().cpu()
        if not self.takes_functions_apart:
            rewards = totals[:, :, None]
            sums = weighted_rewards(within.numpy(), setup.weights)
            within = torch.from_numpy(sums[:, None])
            setup = replace(setup, weights=np.ones(1))
        if compat.counts_unscored():
            rewards = np.where(np.isnan(rewards).all(axis=2, keepdims=True), 0.0, rewards)
            within = torch.where(within.isnan().all(dim=1, keepdim=True), 0.0, within)
        counted = np.where(members[:, :, None], rewards, np.nan).astype(np.float64)
        flat = torch.from_numpy(counted.reshape(-1, counted.shape[2]))
        batch = torch.cat([flat, within])
        computed = compat.advantages(flat, setup, self.size, batch if join else within).numpy()
        advantages = np.where(members, computed.reshape(members.shape), 0.0)
        advantages = advantages.astype(np.float32).astype(np.float64)  # as they are trained on
        with np.errstate(invalid="ignore"):
            noise = advantage_noise(_by_group(batch, self.size), setup)[: len(counted)]
        return advantages, differ_by_noise(advantages, members, trains, noise)


def _by_group(scored: torch.Tensor, size: int) -> Floats:
    """Return rewards, float64 on the CPU, as `(groups, size, functions)`."""
    rewards = scored.numpy()
    return np.asarray(rewards.reshape(-1, size, rewards.shape[1]))


def advantage_noise(rewards: Floats, setup: compat.RewardSetup, of_level: bool = False) -> Floats:
    """Return the largest difference that float noise makes between advantages of a group with equal rewards, `(n,)`.

    TRL subtracts means in float32 and divides by a standard deviation plus `STD_EPSILON`, so that rounding errors of
    1e-8 grow up to 10,000 times: eight rewards of 0.7 give advantages of 6e-4, eight of 100.1 give 0.07.

    Args:
        rewards (`(n, G, functions)`): Raw rewards, NaN where None, of all groups that TRL scaled together.
        setup ([`RewardSetup`]): TRL's normalization.
        of_level (`bool`): Whether errors count that all rows of a group share.
    """
    if setup.aggregation == "normalize_then_sum":
        return _noise_of_normalized(rewards, setup.weights, of_level)
    error = reward_noise(rewards, setup.weights)
    if setup.scale == "none":
        return error
    sums = weighted_rewards(rewards, setup.weights)  # (n, G)
    if setup.scale == "batch":  # one deviation for all groups
        sums = sums.reshape(1, -1)
    divisor = bessel_std(sums) + STD_EPSILON
    return np.asarray(error / divisor)


def _noise_of_normalized(rewards: Floats, weights: Floats, of_level: bool) -> Floats:
    """Return the noise if TRL divides each function's rewards by their deviation, and the sum by that of the batch.

    Of a function that gives all rows of a group the same number, all have the same error: it keeps none apart. Rows
    without any reward do not count: they are no member of the group, or train nothing.
    """
    largest = np.nan_to_num(np.abs(rewards * weights)).max(axis=1)  # (n, functions)
    std = bessel_std(rewards)
    divisor = std + STD_EPSILON
    centered = rewards - mean_of_scored(rewards)[:, None]
    normalized = centered / divisor[:, None] * weights  # (n, G, functions)
    errors = NOISE * largest / divisor
    if not of_level:
        equal = rewards == np.fmax.reduce(rewards, axis=1, keepdims=True)
        errors = np.where((equal | np.isnan(rewards).all(axis=2, keepdims=True)).all(axis=1), 0.0, errors)
    # functions that cancel out do so up to STD_EPSILON's share in their divisors, on both sides of the mean
    varying = (std > NOISE * largest).sum(axis=1, keepdims=True)
    steepest = np.nan_to_num(np.abs(normalized)).max(axis=1)
    errors += (varying > 1) * 2 * steepest * STD_EPSILON / divisor
    # (n, G); TRL divides them by their deviation over the whole batch
    sums = np.nansum(normalized, axis=2)
    error = errors.sum(axis=1) + NOISE * np.abs(sums).max(axis=1)
    batch_std = bessel_std(sums.reshape(1, -1))
    return np.asarray(error / (batch_std + STD_EPSILON))


def fill_missing(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace in place what vLLM could not score (NaN): the sampler is taken to agree with the policy there, as TRL
    does. Return the same."""
    sampling = tensors.get(SAMPLING_LOGPS)
    if sampling is not None:
        policy = tensors[OLD_LOGPS].to(sampling)
        tensors[SAMPLING_LOGPS] = torch.where(sampling.isnan(), policy, sampling)
    ratio = tensors.get(IS_RATIO)
    if ratio is not None:
        tensors[IS_RATIO] = ratio.nan_to_num(nan=1.0)
    return tensors


def with_rewards(group: Group, rewards: Floats) -> Group:
    """The group with the raw rewards of its rows beside TRL's tensors.

    Args:
        group ([`Group`]): Without them.
        rewards (`(rows or more, functions)` or `(rows or more,)`): From the group's first row on.
    """
    rows = len(group.completion_lengths)
    kept = torch.from_numpy(rewards[:rows].astype(np.float32))
    return Group({**group.tensors, STORED_REWARDS: kept}, group.keys, group.prompt_lengths, group.completion_lengths)


def trainable_sums(groups: Sequence[Group]) -> Floats:
    """The summed behavior log-probs of each row's trainable tokens, of groups on the CPU, one after the other; those
    of masked tokens do not matter."""
    kept = []
    for group in groups:
        logps = group.tensors[OLD_LOGPS]
        has_masks = not group.tensors.keys().isdisjoint(MASKS)
        kept.append((torch.where(trained_tokens(group), logps, 0.0) if has_masks else logps).numpy())
    lengths = np.concatenate([group.completion_lengths for group in groups])
    values = np.concatenate([*kept, np.zeros(1)])  # one more: a row at the end may be empty
    return np.where(lengths > 0, np.add.reduceat(values, lengths.cumsum() - lengths), 0.0)


LONGER = "a completion is longer than max_completion_length"


class Block:
    """Log-probs of one forward, `(rows, C)`, on their way to the CPU while the model trains.

    Args:
        logps (`torch.Tensor`): On the training device; nothing changes them.
    """

    def __init__(self, logps: torch.Tensor) -> None:
        self._logps = logps
        self._copies: Copies[int] | None = None
        self._rows: NDArray[np.float32] | None = None
        with suppress(Exception):  # it happens again in `rows`, for all ranks to hear
            self._begin()

    def _begin(self) -> Copies[int]:
        if self._copies is None:
            self._copies = begin({0: self._logps})
            del self._logps
        return self._copies

    def rows(self) -> NDArray[np.float32]:
        """They, on the CPU."""
        if self._rows is None:
            self._rows = self._begin().wait()[0].float().numpy()
        return self._rows


class Recorded(NamedTuple):
    """One row of a block."""

    block: Block
    place: int


@dataclass(slots=True)
class Candidate:
    """This process's rows of a fresh live group.

    Attributes:
        serial (`int`): Its serial number.
        slot (`int`): Its index among the fresh groups that the scope shared.
        group ([`Group`], *optional*): The payload of the rows that this process has; None if it has none.
            `old_per_token_logps` is added at `complete`, where stock did not supply it.
        keys (`frozenset[str]`): Batch keys that it can restore, `pixel_values` for all that concern images.
        rows (`slice`): These rows in the process's batch.
        update (`int`): Updates done at generation.
        records (`list[Recorded]`): Per local row, its log-probs; None until its forward ran.
        images ([`Copies`], *optional*): Its images on their way to the CPU, while the model trains.
    """

    serial: int
    slot: int
    group: Group | None
    keys: frozenset[str]
    rows: slice
    update: int
    records: list[Recorded | None] = field(default_factory=list)
    images: Copies[str] | None = None
    _packed: Packed | None = None

    @property
    def waits(self) -> bool:
        """Tell whether rows here still need log-probs."""
        return self.group is not None and OLD_LOGPS not in self.group.tensors

    def complete(self) -> bool:
        """Fill in the recorded log-probs; False if any local row's are missing."""
        if self.group is None or not self.waits:
            return True
        lengths = self.group.completion_lengths.tolist()
        records = [record for record in self.records if record is not None]
        if len(records) < len(lengths):
            return False
        logps = np.full(sum(lengths), np.nan, np.float32)  # the loss may leave out a row's end
        end = 0
        for (block, place), length in zip(records, lengths, strict=True):
            row = block.rows()[place, :length]
            logps[end : end + len(row)] = row
            end += length
        recorded = torch.from_numpy(logps)
        if np.isnan(logps).any():
            recorded = torch.where(trained_tokens(self.group), recorded, recorded.nan_to_num(0.0))
        tensors = fill_missing({**self.group.tensors, OLD_LOGPS: recorded})
        group = self.group
        self.group = Group(tensors, group.keys | {OLD_LOGPS}, group.prompt_lengths, group.completion_lengths)
        self.records, self._packed = [], None
        return True

    def payload(self) -> Packed | None:
        """The rows that this process has, once complete: to be stored."""
        if self.group is None or self._packed is not None:
            return self._packed
        images = {} if self.images is None else self.images.wait()
        self._packed = pack(replace(self.group, tensors=self.group.tensors | images))
        return self._packed


@dataclass(frozen=True, slots=True)
class PendingGroups:
    """The candidates of one generation batch, the same ones on all processes that share the buffer.

    Attributes:
        groups ([`Groups`]): All fresh groups of that batch.
        candidates (`list[Candidate]`): By ascending serial.
    """

    groups: Groups
    candidates: list[Candidate]

    def up_to(self, longest: float) -> tuple[PendingGroups, int]:
        """These, without groups that have a longer completion, and the number of those."""
        fitting = [one for one in self.candidates if self.groups.lengths[one.slot].max() <= longest]
        return replace(self, candidates=fitting), len(self.candidates) - len(fitting)

    def describe(self, count: int) -> dict[str, NDArray[Any]]:
        """Complete the candidates whose log-probs are all recorded, and describe all for scopes, as 8-byte columns
        over this process's `count` rows.

        `recorded` is 1 where a row's log-probs are known, `logps` the sum over its trainable tokens, and `nbytes`,
        which stands at the first local row of a candidate, the bytes of its local rows.
        """
        recorded = np.zeros(count, np.int64)
        logps = np.zeros(count)
        nbytes = np.zeros(count, np.int64)
        if any(candidate.rows.stop > count for candidate in self.candidates):  # batches are smaller now
            return {"recorded": recorded, "logps": logps, "nbytes": nbytes}
        complete = [candidate for candidate in self.candidates if candidate.complete()]
        groups = []
        rows: list[int] = []
        for candidate in complete:
            payload = candidate.payload()
            if candidate.group is None or payload is None:
                continue
            groups.append(candidate.group)
            rows += range(candidate.rows.start, candidate.rows.stop)
            nbytes[candidate.rows.start] = len(payload.data)
        if groups:
            recorded[rows] = 1
            logps[rows] = trainable_sums(groups)
        return {"recorded": recorded, "logps": logps, "nbytes": nbytes}

    def admissible(self, columns: Mapping[str, NDArray[Any]], tally: Tally) -> tuple[list[Candidate], Groups | None]:
        """The candidates that can be replayed correctly, and their view with log-probs; the others are counted.

        Args:
            columns (`Mapping[str, NDArray]`): Those of `describe`, as shared, over all rows.
            tally ([`Tally`]): Counts what is refused.

        Returns:
            `(usable, groups)`; `groups` is None if there are none.
        """
        if len(columns["recorded"]) != self.groups.advantages.size:  # a training was interrupted
            tally.refuse(len(self.candidates), "batches have another size since it was generated")
            return [], None
        size = self.groups.advantages.shape[1]
        slots = np.array([candidate.slot for candidate in self.candidates], np.int64)
        recorded = columns["recorded"].reshape(-1, size)
        complete = recorded[slots].all(axis=1)
        logps = columns["logps"].reshape(-1, size)
        chosen = np.flatnonzero(complete)
        tally.refuse(len(slots) - len(chosen), "a row's first forward was missing or came after an update")
        if len(chosen) == 0:
            return [], None
        usable = [self.candidates[row] for row in chosen]
        return usable, self.groups.take(slots[chosen], logps[slots[chosen]])


def serials_of(pending: PendingGroups | None) -> list[int]:
    """The serial numbers of candidates, if there are any."""
    return [] if pending is None else [candidate.serial for candidate in pending.candidates]
