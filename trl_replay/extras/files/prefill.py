"""Fills the buffer with groups made elsewhere: read, grouped, tokenised, offered, and given log-probs if they stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import broadcast, tqdm
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from ... import compat
from ...batch.compose import cut, loss_mask
from ...batch.group_view import describe
from ...batch.stored import fill_missing, trainable_sums, with_rewards
from ...buffer import Newcomer
from ...data.counters import Tally
from ...data.fields import ADVANTAGES, STORED_REWARD, STORED_REWARDS, FieldTable
from ...data.rewards import have_equal_rewards, weighted_rewards
from ...data.tasks import encoded, hashed, own
from ...data.types import FROM_FILE, FROM_POLICY, Batch, Floats, Group, Groups
from ...distributed.all_ranks import run_on_all_ranks
from ...errors import ReplayError
from ...setup.components import Components
from .export import PORTION
from .file_tasks import AMBIGUOUS, UNKNOWN
from .reader import OfflineGroup, Reading, read_groups
from .schema import reward_columns
from .scoring import scored

Result = TypeVar("Result")


@dataclass(slots=True)
class ReadGroup:
    """A group as it is offered to the buffer.

    Attributes:
        offline ([`OfflineGroup`]): As it was read.
        advantages (`(G,)`): Of its rows.
        group ([`Group`]): The payload, with zeros for log-probs that are computed only if it stays.
        view ([`Groups`]): What the scorer sees; NaN for these log-probs.
        rewards (`(G, functions)`): Of the trainer's functions; NaN where the file does not name them.
    """

    offline: OfflineGroup
    advantages: Floats
    group: Group
    view: Groups
    rewards: Floats


class Offered(NamedTuple):
    """What became of the groups that one process offered: the serials of those that stayed, by their numbers among the
    newcomers, and how many found no room."""

    stayed: dict[int, int]
    without_room: int


class Intake:
    """Take groups from elsewhere into one session's buffer.

    Args:
        trainer (`trl.GRPOTrainer`): Whose groups they shall be.
        components ([`Components`]): The buffer, who shares it, and what its rows are like.
        may_be_alike (`bool`): Whether groups whose rewards do not differ can be used.
        offers (`bool`): Whether this process's own buffer is offered groups.
    """

    def __init__(self, trainer: Any, components: Components, may_be_alike: bool, offers: bool) -> None:
        self._trainer = trainer
        self._buffer = components.buffer
        self._fields = components.fields
        self._size = components.num_generations
        self._tasks = components.tasks
        self._one_buffer = components.scope.one_buffer
        self._rank = int(trainer.accelerator.process_index)
        self._ranks = components.processes
        self._may_be_alike = may_be_alike
        self._offers = offers

    def add(self, reading: Reading) -> int:
        """Add the groups of files or rows; return how many are in the buffer now that were not before."""
        tally = Tally()
        groups, advantages = self._read(reading, tally)
        newcomers: list[ReadGroup] = []
        self._run(lambda: newcomers.extend(map(self._newcomer, groups, advantages)))
        before = set(self._buffer)
        undo = self._buffer.remember()
        try:
            offered = self._run(lambda: self._offer(newcomers, tally))
            self._complete(newcomers, offered, tally)
        except BaseException:
            undo()
            raise
        self._warn_of_room(offered, len(newcomers), reading.name)
        self._buffer.totals.add(tally, batches=0)
        return len(set(self._buffer) - before)

    def _warn_of_room(self, offered: Sequence[Offered], count: int, source: str) -> None:
        """Warn, once, of groups for which the buffer has no room."""
        buffers = offered[:1] if self._one_buffer else offered
        without = sum(of_rank.without_room for of_rank in buffers)
        if without and self._rank == 0:
            room = self._buffer.capacity * len(buffers)
            warnings.warn(
                f"{without} of the {count} groups of {source} found no room in the buffer, which holds {room}: those "
                "with the lowest keep ranks are left out. Raise replay_buffer_size (and replay_max_bytes, if set).",
                stacklevel=3,
            )

    def _run(self, action: Callable[[], Result]) -> list[Result]:
        """Do it on all processes that decide together."""
        results = run_on_all_ranks(action, ReplayError, alone=self._ranks == 1)
        return cast(list[Result], results)  # of a process that failed there is none: then all have raised

    def _read(self, reading: Reading, tally: Tally) -> tuple[list[OfflineGroup], list[Floats]]:
        """The groups that can be used, and their advantages; the same ones on all processes.

        A group whose rewards do not differ can be used where its rows stand beside fresh ones, with advantages of all.

        Raises:
            ReplayError: A process can't read them, or reads others.
        """
        groups: list[OfflineGroup] = []
        advantages: list[Floats] = []
        computes_logps = compat.computes_logps(self._trainer)
        awaits_its_engine = compat.awaits_its_engine(self._trainer)

        whole: list[OfflineGroup] = []

        rule = compat.reward_rule(self._trainer)

        def read() -> tuple[int, list[str]]:
            whole.extend(read_groups(self._trainer, self._tasks, reading, tally))
            return _digest(whole), self._buffer.rule_changes(rule)

        found = self._run(read)
        self._buffer.score_by(rule, found[0][1] or None, tally, tells=self._rank == 0)
        if len({digest for digest, _ in found}) > 1:
            raise ReplayError(
                f"The processes read different groups from {reading.name}: give all of them the same file or rows. "
                "Nothing was added."
            )
        whole = scored(self._trainer, whole, reading.name, self._ranks)

        def choose() -> None:
            for group, of_group in zip(whole, self._advantages(whole, reading.name), strict=True):
                with np.errstate(over="ignore"):
                    stored = of_group.astype(np.float32)  # as it will be trained on
                trained = stored[~group.masked]
                if ADVANTAGES in group.tokens and not computes_logps:
                    tally.refuse(1, "its tokens have advantages of their own, and a sample of this trainer has one")
                elif not np.isfinite(stored).all():
                    tally.refuse(1, "an advantage is not finite")
                elif not len(trained):
                    tally.refuse(1, "all of its rows are masked")
                elif not self._may_be_alike and _is_alike(group, self._buffer.table.counting):
                    tally.refuse(1, "its rewards do not differ (replay_reward)")
                elif not self._may_be_alike and not (trained if group.is_shaped else trained - trained[0]).any():
                    tally.refuse(1, "its rewards do not differ")
                else:
                    if group.task == UNKNOWN:
                        tally.reasons[f"a group of a file counts as a task of its own: {AMBIGUOUS}"] += 1
                        group = replace(group, task=own(self._buffer.serial, len(groups)))
                    groups.append(group)
                    advantages.append(of_group)
            lack_logps = any(compat.OLD_LOGPS not in group.tokens for group in groups)
            if lack_logps and not computes_logps:
                raise ReplayError(
                    f"Groups of {reading.name} have no log-probs, and an asynchronous trainer computes none "
                    "outside its loss: give a file that session.export() wrote of a run with this tokenizer."
                )
            if lack_logps and awaits_its_engine:
                raise ReplayError(
                    "The groups have no log-probs, and with DeepSpeed's ZeRO 3 the model can compute none before "
                    "training begins: give their file as replay_warm_start, which is read then, or add them in a "
                    "callback's on_train_begin."
                )

        self._run(choose)
        return groups, advantages

    def _offer(self, newcomers: Sequence[ReadGroup], tally: Tally) -> Offered:
        """Offer groups to the buffer, or this process's share of them to its own."""
        rank, ranks = self._rank, self._ranks
        numbers = range(len(newcomers)) if self._one_buffer else range(rank, len(newcomers), ranks)
        if not (numbers and self._offers):
            return Offered({}, 0)
        offered = [newcomers[number] for number in numbers]
        self._buffer.table.reward_weights = compat.reward_setup(self._trainer).weights
        serials = self._buffer.take_serials(len(offered))
        told = [
            Newcomer(
                serial,
                one.group.nbytes,
                one.group.keys,
                number % ranks if self._one_buffer else rank,
                rewards=one.rewards,
            )
            for number, serial, one in zip(numbers, serials, offered, strict=True)
        ]
        refused = tally.refused
        kept = self._buffer.extend(Groups.concatenate(_alike([one.view for one in offered])), told, tally)
        without_room = len(offered) - len(kept) - round(tally.refused - refused)
        tally.note(without_room, "a group of a file found no room (replay_buffer_size)")
        stayed = {number: serial for number, serial in zip(numbers, serials, strict=True) if serial in kept}
        return Offered(stayed, without_room)

    def _complete(self, newcomers: Sequence[ReadGroup], offered: Sequence[Offered], tally: Tally) -> None:
        """Compute the log-probs of the groups that stayed on any process, on all of them alike, and put away the
        payload of those that live on this one."""
        own = offered[self._rank].stayed
        needed = sorted({number for of_rank in offered for number in of_rank.stayed})
        quiet = not needed or self._trainer.args.disable_tqdm
        with tqdm(total=len(needed), desc="Log-probs of a file's groups", unit="group", disable=quiet) as bar:
            for start in range(0, len(needed), PORTION):
                numbers = needed[start : start + PORTION]
                batches = self._computed([newcomers[number] for number in numbers], bar)

                def receive(numbers: Sequence[int] = numbers, batches: Sequence[Batch] = batches) -> None:
                    for number, batch in zip(numbers, batches, strict=True):
                        if number in own:
                            self._receive(newcomers[number], own[number], batch, tally)

                self._run(receive)

    def _receive(self, newcomer: ReadGroup, serial: int, batch: Batch, tally: Tally) -> None:
        """Put away a group that stayed, now with its log-probs; take it back if one of them is not finite."""
        buffer = self._buffer
        group = self._payload(newcomer.offline, batch)
        if buffer.fill_logps(serial, _logps(group), newcomer.view.trainable[0], tally):
            (row,) = buffer.table.rows_of([serial])
            if buffer.table.owner[row] == self._rank:
                buffer.receive({serial: group})

    def _computed(self, newcomers: Sequence[ReadGroup], bar: Any) -> list[Batch]:
        """A batch of each group, with log-probs, and the same bits on all processes."""
        batches: list[Batch] = []

        def compute() -> None:
            for newcomer in newcomers:
                batch = self._batch(newcomer.offline, newcomer.advantages)
                batches.append(_with_logps(self._trainer, batch))
                bar.update()

        self._run(compute)
        if self._ranks > 1:
            _broadcast(batches)
        return batches

    def _newcomer(self, offline: OfflineGroup, advantages: Floats) -> ReadGroup:
        """A group as it is offered, before any log-prob is computed."""
        size = self._size
        fields = self._fields
        batch = _with_blank_logps(self._trainer, self._batch(offline, advantages))
        group = self._payload(offline, batch)
        columns = describe(batch, 0, np.full(size, offline.task), fields)
        has_logps = compat.OLD_LOGPS in offline.tokens
        origin = FROM_FILE if has_logps else FROM_POLICY
        logps = _logps(group) if has_logps else np.full(size, np.nan)
        view = Groups(
            rewards=offline.rewards[None],
            reward_weights=offline.weights,
            advantages=columns["advantages"][None],
            lengths=columns["lengths"][None],
            trainable=columns["trainable"][None],
            items=columns["items"][None],
            dead=np.zeros(1, bool),
            update=np.array([self._buffer.clock.update - 1]),  # so that it is old enough for the next batch
            prompt=columns["prompt"][:1],
            behavior_logps=logps[None],
            masked=offline.masked[None],
            origin=np.array([origin]),
            counting=self._buffer.table.counting if offline.named else None,
        )
        functions = len(self._trainer.reward_func_names)
        rewards = offline.rewards if offline.named else np.full((size, functions), np.nan)
        return ReadGroup(offline, advantages, group, view, rewards)

    def _payload(self, offline: OfflineGroup, batch: Batch) -> Group:
        """Return what the buffer keeps of one group: through the same cutting as a batch of TRL's."""
        fields = self._fields
        size = self._size
        (group,) = cut(_as_sampled(self._trainer, batch, fields), fields, [slice(0, size)])
        fill_missing(group.tensors)
        if "tool_mask" not in batch:  # a mask of ones takes no room, and lets runs with tools take the group
            group = replace(group, keys=group.keys | {"tool_mask"})
        if offline.named:
            return with_rewards(group, offline.rewards, STORED_REWARDS)
        total = weighted_rewards(offline.rewards, offline.weights)
        return with_rewards(group, total, STORED_REWARD)

    def _batch(self, offline: OfflineGroup, advantages: Floats) -> Batch:
        """A batch of one group, padded as TRL pads."""
        device = self._trainer.accelerator.device
        fields = self._fields
        pad = fields.pad_token_id
        prompts = offline.prompt_ids
        completions = offline.completion_ids
        prompt_mask = [np.ones_like(row) for row in prompts]
        completion_mask = [np.ones_like(row) for row in completions]
        batch: Batch = {
            "prompt_ids": _padded(prompts, pad, torch.int64, side="left"),
            "prompt_mask": _padded(prompt_mask, 0, torch.int64, side="left"),
            "completion_ids": _padded(completions, pad, torch.int64),
            "completion_mask": _padded(completion_mask, 0, torch.int64),
            "advantages": torch.tensor(advantages, dtype=torch.float32),
        }
        for key, rows in offline.tokens.items():
            spec = fields.spec(key)
            is_float = spec.dtype in (None, "float32")
            dtype = torch.float32 if is_float else torch.int64
            batch[key] = _padded(rows, fields.pad_value(spec), dtype)
        return {key: value.to(device) for key, value in batch.items()}

    def _advantages(self, groups: Sequence[OfflineGroup], source: str) -> list[Floats]:
        """The file's advantages; where it has none, those that the trainer's rule gives its rewards.

        A row that no function scored, or that is masked, does not count, and gets 0. Where the rule takes a mean or a
        deviation over a batch, it is that of all groups of the file.

        Raises:
            ReplayError: The rule needs each function's reward, and the file has only a sum.
        """
        if not groups:
            return []
        setup = compat.reward_setup(self._trainer)
        functions = len(setup.weights)
        if setup.aggregation == "normalize_then_sum" and functions > 1:
            if any(not group.named and not _has_advantages(group) for group in groups):
                columns = ", ".join(map(repr, reward_columns(self._trainer.reward_func_names)))
                raise ReplayError(
                    "multi_objective_aggregation='normalize_then_sum' normalizes the rewards of each function, and "
                    f"groups of {source} have only a sum: give the columns {columns}, or 'advantage'."
                )
            rewards = np.stack([_each_reward(group, functions) for group in groups])
        else:
            rewards = np.stack([_counted_rewards(group) for group in groups])[:, :, None]
            setup = replace(setup, weights=np.ones(1))
        rows = torch.from_numpy(rewards.reshape(-1, rewards.shape[-1]))  # (groups * G, functions)
        computed = compat.advantages(rows, setup, rewards.shape[1], within=rows).view(len(groups), -1).numpy()
        advantages = []
        for group, of_group in zip(groups, computed, strict=True):
            given = of_group if group.advantages is None else group.advantages
            if ADVANTAGES in group.tokens:
                given = np.array([np.abs(row).mean() for row in group.tokens[ADVANTAGES]])
            advantages.append(np.where(group.masked, 0.0, given))
        return advantages


def _is_alike(group: OfflineGroup, counting: int | None) -> bool:
    """Tell whether the reward that counts is the same for all rows that it scores."""
    if counting is None or not group.named or group.is_shaped:
        return False
    values = group.rewards[None, :, [counting]]
    return bool(have_equal_rewards(values, np.ones(1))[0]) and not np.isnan(values).all()


def _digest(groups: Sequence[OfflineGroup]) -> int:
    """Tell the groups that one process read from those of another."""
    digests = []
    for group in groups:
        rows = [group.prompt_ids, group.completion_ids, group.tokens, group.rewards, group.advantages, group.masked]
        digests.append(encoded([*rows, max(group.task, UNKNOWN)]))
    return hashed(*digests)


def _logps(group: Group) -> Floats:
    """`(G,)`: summed log-probs of the trainable tokens; NaN where one of the policy's or the sampler's is not
    finite."""
    sums = [trainable_sums(group, key) for key in (compat.OLD_LOGPS, compat.SAMPLING_LOGPS) if key in group.tensors]
    finite = torch.stack(sums).isfinite().all(dim=0)
    logps: Floats = torch.where(finite, sums[0], torch.nan).cpu().numpy()
    return logps


def _alike(views: Sequence[Groups]) -> Sequence[Groups]:
    """The views as they are if all have the same reward functions, and else each with its one total."""
    first = views[0].reward_weights
    if all(np.array_equal(view.reward_weights, first) for view in views):
        return views
    totals: list[Groups] = []
    for view in views:
        reward = view.reward[:, :, None]
        totals.append(replace(view, rewards=reward, reward_weights=np.ones(1), counting=None))
    return totals


def _with_logps(trainer: Any, batch: Batch) -> Batch:
    """The batch with the policy's log-probs where the file has none, and the reference model's."""
    training = trainer.model.training
    trainer.model.eval()
    try:
        batch = compat.with_old_logps(trainer, batch)
        return compat.with_reference_logps(trainer, batch)
    finally:
        trainer.model.train(training)


def _broadcast(batches: Sequence[Batch]) -> None:
    """Give all processes the first one's log-probs."""
    for batch in batches:
        for key in (compat.OLD_LOGPS, compat.REF_LOGPS):
            if key in batch:
                batch[key] = broadcast(batch[key].contiguous())


def _with_blank_logps(trainer: Any, batch: Batch) -> Batch:
    """The batch with zeros for the log-probs that [`_with_logps`] would compute."""
    blank = torch.zeros(batch["completion_ids"].shape, device=batch["completion_ids"].device)
    blanks = {compat.OLD_LOGPS: batch.get(compat.OLD_LOGPS, blank)}
    if trainer.beta:
        blanks[compat.REF_LOGPS] = blank
    others = {key: value for key, value in batch.items() if key != compat.REF_LOGPS}
    return others | blanks


def _as_sampled(trainer: Any, batch: Batch, fields: FieldTable) -> Batch:
    """The batch with the keys that this trainer's batches have on account of its sampler, which is taken to agree
    with the policy where the file does not tell its log-probs.

    Raises:
        ReplayError: The file has ratios of tokens without these, and the trainer's are of sequences.
    """
    batch = dict(batch)
    corrects = compat.corrects_sampler(trainer)
    of_sequences = fields.spec(compat.IS_RATIO).layout == "row"
    of_tokens = batch.pop(compat.IS_RATIO, None) if of_sequences else None
    if corrects and of_tokens is not None and compat.SAMPLING_LOGPS not in batch:
        raise ReplayError(
            f"The file has {compat.IS_RATIO!r} of tokens, and vllm_importance_sampling_mode="
            f"{trainer.vllm_importance_sampling_mode!r} needs ratios of sequences: give {compat.SAMPLING_LOGPS!r} in "
            "their place, of which they are computed."
        )
    if compat.keeps_sampler(trainer):
        batch.setdefault(compat.SAMPLING_LOGPS, batch[compat.OLD_LOGPS])
    if corrects and compat.IS_RATIO not in batch:
        logps, sampling_logps = batch[compat.OLD_LOGPS], batch[compat.SAMPLING_LOGPS]
        batch[compat.IS_RATIO] = compat.sampler_ratio(trainer, logps, sampling_logps, loss_mask(batch).bool())
    return batch


def _padded(rows: Sequence[NDArray[Any]], value: float, dtype: torch.dtype, side: str = "right") -> torch.Tensor:
    """`(rows, longest row)`, filled up with `value` on the right, or on the left."""
    tensors = [torch.from_numpy(row).to(dtype) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def _counted_rewards(group: OfflineGroup) -> Floats:
    """`(G,)`: weighted rewards; NaN for masked rows."""
    return np.where(group.masked, np.nan, weighted_rewards(group.rewards, group.weights))


def _each_reward(group: OfflineGroup, functions: int) -> Floats:
    """`(G, functions)`: rewards; NaN for masked rows, and for all of a group that names no function."""
    if not group.named:
        return np.full((len(group.masked), functions), np.nan)
    return np.where(group.masked[:, None], np.nan, group.rewards)


def _has_advantages(group: OfflineGroup) -> bool:
    return group.advantages is not None or ADVANTAGES in group.tokens
