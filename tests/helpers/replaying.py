"""Checks replay through a real trainer: what was stored is what comes back, and the loss is the one written by hand.

The rows of the loss by hand are those of the batches that scoring returned, not those that replay composed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from corrected import ARGUMENTS, SHIFTS, Gate, sampling_weight, weights_by_hand
from image_rows import assert_same_images, by_row
from log_by_hand import EntropyControl, LossLog
from loss_by_hand import Row, differentiable_loss, entropy_threshold, forward, forward_alone, setting
from releases import COUNTS_TRUNCATED
from support import DEAD, HALF, LIVE, Rewards, Spy

import trl_replay
from trl_replay.base.validation import Named
from trl_replay.data.types import Batch
from trl_replay.loss.supply import EXCLUDED, ROWS, SILENT
from trl_replay.session import Session
from trl_replay.testing import make_model, make_tokenizer

OF_IMAGES = {"pixel_values", "image_grid_thw", "image_sizes", "num_images", "mm_token_type_ids"}
NUMBER = "row_number"
"""A batch key of tests: which row of the batch that is trained on a row of a micro-batch is."""
PER_TOKEN = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "tool_mask")


LARGEST = math.log(20.0)
"""Of a log ratio, and of what multiplies the gradient of a KL term."""


class Checked(Spy):
    """The stock trainer, which computes every training loss a second time with `differentiable_loss`."""

    watch: Watch | None = None
    independent = True  # compute log-probs by a forward of the plain model, not from what the trainer computed
    gradients = False  # compare gradients too
    alone = True  # for them, compute log-probs by a forward of every row alone, without padding
    reference_kind: str | None = None  # where a subclass has another loss
    correction = "ratio"  # its name in `weights_by_hand`
    gate: Gate | None = None
    logs: Mapping[int, LossLog] | None = None  # by update, what the log must have of its losses
    compared: list[tuple[float, float | None, int]]  # found, by hand (None: nobody can tell), replayed rows

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.by_hand: list[list[Row]] = []  # of every training loss, the rows that count
        self.gradient_errors: list[float] = []
        self.control = EntropyControl(self.args)
        self.proximal: dict[int, torch.Tensor] = {}  # by identity, log-probs of a replayed row's first forward
        self.expected: torch.Tensor

    def _compute_loss(self, model, inputs):
        self.applied_entropy_coef = self.control.applied()
        loss = super()._compute_loss(model, inputs)
        self.follow(inputs, loss)
        return loss

    def follow(self, inputs: Any, loss: torch.Tensor) -> None:
        """Computes a training loss by hand, and notes both."""
        inputs = self.losses[-1]["inputs"]
        if self.watch is not None and self.model.training:
            rows = self.watch.rows(inputs, self.losses[-1]["logps"])
            self.complete(rows, inputs)
            by_hand, beside = [], []
            logps, entropies, aux = self.forward_by_hand(rows, inputs)
            silent, excluded = self.watch.left_out()
            identities = inputs.rows[:, 0].tolist()
            for row, of_row, entropy, identity, number in zip(
                rows, logps, entropies, identities, inputs[NUMBER].tolist(), strict=True
            ):
                one = self.as_trained(as_row(row, of_row, entropy), identity, silent[number])
                if not excluded[number]:
                    by_hand.append(one)
                else:
                    beside.append(one.entropy)
            count = len(inputs.rows) * (1 - sum(excluded) / len(excluded))
            expected = differentiable_loss(self, by_hand, self.watch.items(), aux, count=count, beside=beside)
            threshold = entropy_threshold(self.args, by_hand, beside) or 0.0
            if self.control.adapts:
                trained = [entropy[row["mask"]] for row, entropy in zip(rows, entropies, strict=True)]
                trained = [entropy[entropy >= threshold] for entropy in trained]
                self.control.note(trained, identities, self.accelerator.sync_gradients)
            unsure = math.isnan(threshold)
            if unsure and self.control.adapts:
                self.control.mean, self.control.coefficient = self._last_world_entropy, self.entropy_coef
            self.expected = loss if unsure else expected
            replayed = int((inputs.rows[:, 0] < 0).sum())
            self.compared.append((float(loss.detach()), None if unsure else float(expected.detach()), replayed))
            self.by_hand.append(by_hand)

    def forward_by_hand(self, rows: list[dict[str, Any]], inputs: Any) -> tuple[list[Any], list[Any], Any]:
        """Log-probs and entropies of the rows' completions, and the routers' auxiliary loss."""
        if self.gradients and self.alone:
            aux = forward(self, rows, inputs, gradients=True)[2] if setting(self, "aux_loss_enabled") else 0.0
            return *forward_alone(self, rows, gradients=True), aux
        if self.independent:
            return forward(self, rows, inputs, gradients=self.gradients)
        logps = [self.losses[-1]["logps"][number, : len(row["ids"])] for number, row in enumerate(rows)]
        return logps, [None] * len(rows), 0.0

    def as_trained(self, row: Row, identity: int, masked: bool) -> Row:
        """The row with what the correction, the gates, the bounds and masks make of it."""
        behavior, advantage, given, kept = row.old, row.advantage, None, None
        if identity < 0 and len(row.new):
            new = row.new.detach()
            proximal = self.proximal.setdefault(identity, new)
            chance = self.watch.chances.get(self.watch.placed[identity][0], 1.0) if self.watch is not None else 1.0
            drawn = sampling_weight(chance, self.state.global_step)
            row.old, row.weights = weights_by_hand(self.correction, new, behavior, row.advantage, proximal, drawn)
            if self.correction in SHIFTS:
                row.advantage = row.advantage + SHIFTS[self.correction](new - behavior)
            told = behavior if row.sampling is None else row.sampling
            row.sampling = torch.where(told.isnan(), behavior, told)  # where vLLM could not tell
            kept, given = bound(self, row, new), row.weights
            if self.gate is not None:
                row.weights = self.gate(new, behavior, row.old, row.weights)
        log = None if self.logs is None else self.logs[self.state.global_step]
        if log is not None and identity < 0:
            log.replayed(row, behavior, advantage, given, kept, masked)
        elif log is not None:
            log.fresh(row)
        if masked:
            row.weights = torch.zeros_like(row.new.detach())
        if row.weights is not None and row.entropy is not None:
            row.entropy = torch.where(row.weights != 0, row.entropy, row.entropy.detach())
        return row

    def compare_gradients(self, loss: torch.Tensor) -> None:
        """Notes how far the gradient of what is trained on is from that by hand, as a share of the larger one."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        found, expected = flat_gradient(loss, parameters), flat_gradient(self.expected, parameters)
        size = max(float(found.norm()), float(expected.norm()), 1e-2)
        self.gradient_errors.append(float((found - expected).norm()) / size)

    def complete(self, rows: list[dict[str, Any]], inputs: Any) -> None:
        """A place for a subclass to add something to the rows of its loss."""


def flat_gradient(loss: torch.Tensor, parameters: list[Any]) -> torch.Tensor:
    if not loss.requires_grad:
        return torch.zeros(sum(parameter.numel() for parameter in parameters))
    parts = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def bound(trainer: Any, row: Row, new: torch.Tensor) -> torch.Tensor | None:
    """Moves a replayed row's old log-probs to where no ratio is above 20, and drops KL terms of larger gradients.
    Returns of which tokens they stay; None without any."""
    sums = trainer.args.loss_type == "vespo"
    by_token = trainer.args.importance_sampling_level == "token"
    logs = new - row.old
    weighs_kl = trainer.beta and setting(trainer.args, "use_bias_correction_kl")
    bounded = logs.clamp(-20.0, LARGEST if (weighs_kl if sums else by_token) else 20.0)
    if not (by_token or sums):
        bounded = bounded - (bounded.mean() - LARGEST).clamp(min=0.0)
    row.old = torch.where(bounded != logs, new - bounded, row.old)
    if row.ref is None:
        return None
    gap = row.ref - new
    size = gap.clamp(min=0.0)
    if setting(trainer.args, "use_bias_correction_kl"):
        size = size + (bounded if by_token else bounded.mean())
    kept = (gap <= 20.0) & (size <= LARGEST + 1e-5)
    row.ref = torch.where(kept, torch.maximum(row.ref, new - 20.0), new)
    return kept


def as_row(row: dict[str, Any], logps: torch.Tensor, entropy: torch.Tensor | None) -> Row:
    """The result of `original` for a row, without the tokens that the loss leaves out."""
    mask = row["mask"]

    def trained(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[mask]

    ratio = row.get("importance_sampling_ratio")
    if ratio is not None:
        ratio = ratio.double().nan_to_num(nan=1.0)
        ratio = ratio if row["ratio_width"] == 1 else ratio[mask]
    return Row(
        new=logps.double()[mask],
        old=row["old_per_token_logps"].double()[mask],
        advantage=row["advantage"][mask] if torch.is_tensor(row["advantage"]) else row["advantage"],
        ref=trained(row.get("ref_per_token_logps")),
        entropy=trained(entropy),
        sampling=trained(row.get("sampling_per_token_logps")),
        sampler_ratio=ratio,
    )


class Watch:
    """Follows every group from the batch that scoring returned to the loss."""

    def __init__(self, session: Session, size: int, pad: int) -> None:
        self.steps: list[tuple[Batch, Batch]] = []
        self.size = size
        self.pad = pad
        self.origin: dict[int, tuple[int, int]] = {}  # serial → (step, slot)
        self.placed: dict[int, tuple[int, int, int]] = {}  # id of a replayed row → (serial, row, row of the batch)
        self.trainer: Any = None
        self.taken: list[dict[int, tuple[int, int]]] = []  # per step, row of the batch → (serial, row)
        self.rewards: list[torch.Tensor] = []  # per step, (rows, functions)
        self.policy: list[list[torch.Tensor]] = []  # per step and row, log-probs by the policy that generated it
        self.first: dict[tuple[int, int], torch.Tensor] = {}  # (serial, row) → log-probs of its first forward
        self.advantages: Callable[[int], torch.Tensor] | None = None  # by step, those that should be trained on
        self.generated = 0  # the step that generated the batch at hand
        self.iterations = 0
        self.counts_kl: Callable[[bool, bool], bool] | None = None  # of a row: is it replayed, is its group all wrong
        self.without_kl: set[int] = set()  # rows of every batch whose KL term does not count either
        self.follows = isinstance(session.trainer, Checked)
        self.out: list[tuple[list[bool], list[bool]]] = []  # per step, which rows are silent and excluded: by hand
        self.updates: list[int] = []  # per step, updates done
        self.after_step: Callable[[bool], None] = lambda generated: None  # called when a batch was composed
        self.chances: dict[int, float] = {}  # of entries that may be drawn now, by serial, beside the least likely one
        self._session = session
        step, expect, move = session.step.take, session.step.tap.expect, session.step.communicator.move
        sources: dict[int, list[int]] = {}

        complete: list[Batch] = []  # the batch at hand, with the groups that were generated again
        fresh_batch = session.step._scored

        def watched_fresh(generated, *others):
            fresh = fresh_batch(generated, *others)
            batch = fresh.batch
            batch = {**batch, "advantages": generated.batch["advantages"]}
            complete[:] = [batch]
            self.rewards.append(generated.scored.clone())
            rows = [original(batch, row, pad) for row in range(len(batch["advantages"]))]
            if self.follows and session.trainer.gradients and session.trainer.alone:
                self.policy.append(forward_alone(session.trainer, rows)[0])
            elif session.components.forwards_to_record:
                self.policy.append(forward(session.trainer, rows, batch)[0])
            return fresh

        def watched_step(batch: Batch, score: Any = None) -> Batch:
            out = step(batch, score)
            self.generated = len(self.steps)
            self.steps.append((complete[0], out))
            self.updates.append(session.trainer.state.global_step)
            self.after_step(True)
            return self.numbered(out)

        session.step._scored = watched_fresh  # type: ignore[method-assign]

        def watched_move(rows, decision):
            sources.clear()
            drawn = {int(session.buffer.table.serial[entry]): rows for entry, rows in decision.plan.drawn()}
            sources.update({serial: decision.plan.source.flat[rows].tolist() for serial, rows in drawn.items()})
            return move(rows, decision)

        def watched_expect(flags: torch.Tensor, candidates: Any, placements: Any, *others: Any) -> torch.Tensor:
            ids = expect(flags, candidates, placements, *others)
            pending = session.step.carry.pending  # none in further iterations
            for candidate in () if pending is None else pending.candidates:
                self.origin[candidate.serial] = (len(self.steps), candidate.slot)
            taken = {}
            for placed in placements:
                for row in range(placed.count):
                    target = placed.start + row
                    source = sources[placed.serial][placed.first + row]
                    self.placed[int(ids[target, 0])] = (placed.serial, source, target)
                    getattr(session.trainer, "proximal", {}).pop(int(ids[target, 0]), None)
                    taken[target] = (placed.serial, source)
            self.taken.append(taken)
            return ids

        iterate = session.step.iterate

        def watched_iterate(template: Any) -> Batch | None:
            """A further iteration counts as a step of its own, of the same fresh batch."""
            out = iterate(template)
            composed = self.generated
            before = self.steps[composed][0]
            if out is None:
                self.steps.append((before, self.steps[composed][1]))
                self.taken.append(self.taken[composed])
            else:
                self.steps.append((before, out))
            self.updates.append(session.trainer.state.global_step)
            for kept in (self.policy, self.rewards):
                if kept:
                    kept.append(kept[composed])
            self.iterations += 1
            self.after_step(False)
            return None if out is None else self.numbered(out)

        session.step.iterate = watched_iterate  # type: ignore[method-assign]
        loss = session.step.tap.loss

        def watched_loss(stock: Any, inputs: Any, **how: Any) -> torch.Tensor:
            """The loss that is trained on: rows left out of the denominator scale what the trainer computed."""
            scaled = loss(stock, inputs, **how)
            compared = session.trainer.compared if self.follows else []
            if compared and session.trainer.model.training:
                compared[-1] = (float(scaled.detach()), *compared[-1][1:])
                if session.trainer.gradients:
                    session.trainer.compare_gradients(scaled)
            return scaled

        session.step.tap.loss = watched_loss  # type: ignore[method-assign]
        session.step.take = watched_step  # type: ignore[method-assign]
        session.step.tap.expect = watched_expect  # type: ignore[method-assign]
        session.step.communicator.move = watched_move  # type: ignore[method-assign]

    @staticmethod
    def numbered(batch: Batch) -> Batch:
        """The batch with the number of each row."""
        return {**batch, NUMBER: torch.arange(len(batch["prompt_ids"]))}

    def left_out(self, step: int = -1) -> tuple[list[bool], list[bool]]:
        """Which rows of a batch are silent, and which are in no denominator: by hand, or as the batch says."""
        if self.out:
            return self.out[step]
        flags = self.steps[step][1][ROWS][:, 1]
        return (flags & SILENT).bool().tolist(), (flags & EXCLUDED).bool().tolist()

    @property
    def slots(self) -> list[list[tuple[int, int]]]:
        """Per step, (slot, serial) of what was put in."""
        return [
            list(dict.fromkeys((target // self.size, serial) for target, (serial, _) in taken.items()))
            for taken in self.taken
        ]

    def source(self, serial: int, row: int) -> tuple[int, int]:
        """The step and the row of its batch in which a stored row was generated."""
        step, slot = self.origin[serial]
        return step, slot * self.size + row

    def items(self, step: int = -1) -> int:
        """Trainable tokens of the batch that is trained on: as scoring returned them, with the exchanged rows'."""
        before, _ = self.steps[step]
        rows = [original(before, row, self.pad) for row in range(len(before["advantages"]))]
        for target, stored in self.taken[step].items():
            origin, source = self.source(*stored)
            rows[target] = original(self.steps[origin][0], source, self.pad)
        _, excluded = self.left_out(step)
        if not all(excluded):
            rows = [row for row, is_out in zip(rows, excluded, strict=True) if not is_out]
        return sum(map(counted_tokens, rows))

    def is_all_wrong(self, row: int) -> bool:
        """Tells whether no row passes in the fresh group whose place a row of the batch takes."""
        rewards = self.rewards[-1].nansum(dim=1).view(-1, self.size)
        return bool((rewards[row // self.size] < 0.5).all())

    def rows(self, micro: Any, logps: torch.Tensor) -> list[dict[str, Any]]:
        """The rows of a micro-batch; replayed ones from the batch that they were generated in."""
        rows = []
        places = micro[NUMBER].tolist()
        for number, identity in enumerate(micro.rows[:, 0].tolist()):
            if identity >= 0:
                row = self.as_composed(original(micro, number, self.pad), places[number])
                fresh = logps[number, : len(row["ids"])]
                if identity > 0:
                    self.first.setdefault(divmod(identity - 1, self.size), fresh)
                if "old_per_token_logps" not in self.steps[-1][0]:
                    row["old_per_token_logps"] = fresh
            else:
                serial, part, target = self.placed[identity]
                step, source = self.source(serial, part)
                row = original(self.steps[step][0], source, self.pad)
                if self.policy:
                    row["old_per_token_logps"] = self.policy[step][source]
                elif "old_per_token_logps" not in self.steps[step][0]:
                    row["old_per_token_logps"] = self.first[serial, part]
                if self.advantages is not None:
                    row["advantage"] = float(self.advantages(len(self.steps) - 1)[target])
            counts_kl = self.counts_kl is None or self.counts_kl(identity < 0, self.is_all_wrong(places[number]))
            if "ref_per_token_logps" in row and (places[number] in self.without_kl or not counts_kl):
                row["ref_per_token_logps"] = logps[number, : len(row["ids"])]
            rows.append(row)
        return rows

    def as_composed(self, row: dict[str, Any], place: int) -> dict[str, Any]:
        """A fresh row of a micro-batch with what its batch has: of rows that train nothing, the loss reads other
        values."""
        composed, count = original(self.steps[-1][1], place, self.pad), len(row["ids"])
        known = [key for key in ("advantage", "old_per_token_logps", "ref_per_token_logps") if key in composed]
        return row | {key: composed[key][:count] if torch.is_tensor(composed[key]) else composed[key] for key in known}


def counted_tokens(row: dict[str, Any]) -> int:
    """Tokens of a row in `num_items_in_batch`."""
    return int((torch.ones_like(row["ids"]) * row.get("tool_mask", 1) if COUNTS_TRUNCATED else row["mask"]).sum())


def tokens_of(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    return row["prompt"].tolist(), row["ids"].tolist()


def original(batch: Batch, row: int, pad: int) -> dict[str, Any]:
    """One row without padding: prompt, ids, the loss's mask, and all that belongs to it."""
    ids, mask = batch["completion_ids"][row], batch["completion_mask"][row]
    real = mask.ne(0) if mask.any() else ids.ne(pad)
    length = int(real.nonzero().max()) + 1 if real.any() else 0
    advantage = batch["advantages"][row].detach()
    found: dict[str, Any] = {
        "prompt": batch["prompt_ids"][row][batch["prompt_mask"][row].bool()],
        "ids": ids[:length],
        "attention": mask[:length],
        "advantage": float(advantage) if advantage.numel() == 1 else advantage[:length],
    }
    if batch.get("pixel_values") is not None and batch["num_images"][row]:
        found["images"] = by_row(batch)[row]
        if "mm_token_type_ids" in batch:
            mask = batch["prompt_mask"][row].bool()
            found["types"] = batch["mm_token_type_ids"][row, : len(mask)][mask]
    for key in PER_TOKEN:
        if batch.get(key) is not None and key in batch:
            found[key] = dict.__getitem__(batch, key)[row, :length]
    found["mask"] = (found["attention"] * found.get("tool_mask", 1)).bool()
    if "importance_sampling_ratio" in batch:
        ratio = batch["importance_sampling_ratio"][row]
        found["importance_sampling_ratio"] = ratio[:length]
        found["ratio_width"] = len(ratio)
    return found


def build(
    output_dir: Any,
    rewards: Any,
    rows: Sequence[dict[str, Any]] = ({"prompt": "1="}, {"prompt": "12="}, {"prompt": "123+4="}),
    tokenizer: Any = None,
    model: Any = None,
    trainer_class: type = Checked,
    config_class: type | None = None,
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """As `make_trainer`, with a dataset, a tokenizer, a config class and other arguments of the trainer's own."""
    from datasets import Dataset
    from trl import GRPOConfig

    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 12, "num_generations": 4, "max_completion_length": 6, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "max_steps": 5, "logging_steps": 1, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "shuffle_dataset": False, "bf16": False,
        "gradient_checkpointing": False,  # which computes the same twice, within the layers
    }  # fmt: skip
    tokenizer = tokenizer if tokenizer is not None else make_tokenizer()
    return trainer_class(
        model=model if model is not None else make_model(tokenizer),
        reward_funcs=rewards,
        args=(config_class or GRPOConfig)(output_dir=str(output_dir), **{**defaults, **settings}),
        processing_class=tokenizer,
        **{"train_dataset": Dataset.from_list(list(rows) * 16), **(arguments or {})},
    )


def watched(trainer: Any, session: Session) -> Watch:
    """From now on every batch and loss is compared with the one by hand."""
    watch = Watch(session, trainer.num_generations, trainer._tokenizer.pad_token_id)
    trainer.watch, trainer.compared = watch, []
    return watch


def replay(trainer: Any, **settings: Any) -> tuple[Session, Watch]:
    """Attaches, trains and checks everything; at least one group must have been replayed."""
    session = trl_replay.attach(trainer, **settings)
    watch = watched(trainer, session)
    trainer.train()
    assert session.totals.counters["replaced"] > 0, f"nothing was replayed: {session.explain()}"
    check_batches(watch)
    check_losses(trainer)
    return session, watch


CORRECTED = ([LIVE, HALF, [1, 1, 1, 0.0]], [DEAD, LIVE, DEAD])
"""Rewards of `train_corrected`."""
kept: list[Path] = []


def loadable_model(folder: Path) -> Any:
    """The tiny model, whose first weights TRL can load for the reference model: they are written only once."""
    model = make_model(make_tokenizer())
    if not kept:
        model.save_pretrained(folder / "initial_model")
        kept.append(folder / "initial_model")
    model.config._name_or_path = str(kept[0])
    return model


def train_corrected(
    folder: Path,
    correction: str,
    chosen: dict[str, Any] | None = None,
    gate: Gate | None = None,
    by_hand: bool = True,
    **settings: Any,
) -> tuple[Any, Session]:
    """Trains with a correction, and checks everything as `replay` does unless not `by_hand`.

    Args:
        folder: For the trainer's files.
        correction: Its name.
        chosen: Further settings of replay.
        gate: What these make of the correction's weights, by hand.
        by_hand: Whether `weights_by_hand` knows what the correction gives with these settings.
        settings: Of the trainer.
    """
    settings = {"max_steps": 3, "learning_rate": 2e-2, "max_completion_length": 5, **settings}
    if settings.get("beta"):
        settings["model"] = loadable_model(folder)
    trainer = build(folder, Rewards(*CORRECTED), **settings)
    trainer.correction, trainer.gate = correction, gate
    named = str(Named(correction, ARGUMENTS.get(correction) or {}))
    replayed = {"replay_correction": named, "replay_sampler": "newest", **(chosen or {})}
    if by_hand:
        return trainer, replay(trainer, **replayed)[0]
    session = trl_replay.attach(trainer, **replayed)
    trainer.train()
    return trainer, session


def replayed_signal(trainer: Any) -> torch.Tensor:
    """The weighted advantage of every replayed token that was trained on; without weights none of them is 0."""
    signals = []
    for loss in trainer.losses:
        replayed = loss["inputs"].rows[:, 0] < 0
        mask = loss["inputs"]["completion_mask"].bool()
        signal = loss["inputs"]["advantages"].view(12, -1).expand_as(mask)
        signals.append(signal[replayed][mask[replayed]])
    return torch.cat(signals)


ITERATED = ([LIVE, HALF, DEAD], [DEAD, LIVE, DEAD], [HALF, DEAD, DEAD], [DEAD, DEAD, DEAD])
"""Rewards of `iterate_corrected`."""
ITERATING = {"replay_iterations": "replay", "replay_start": 0}


def iterate_corrected(folder: Path, correction: str, level: str) -> None:
    """Trains with a correction and three iterations, and compares every loss and gradient with those by hand."""
    settings = {"loss_type": "grpo", "importance_sampling_level": level, "learning_rate": 2e-2}
    trainer = build(folder, Rewards(*ITERATED), num_iterations=3, max_steps=9, **settings)
    trainer.gradients, trainer.correction = True, correction
    chosen = {"replay_correction": str(Named(correction, ARGUMENTS.get(correction) or {}))}
    session, _ = replay(trainer, **chosen, **ITERATING)
    assert session.totals.counters["iterated"] > 4
    assert len(trainer.gradient_errors) == len(trainer.compared) > 6


def check_batches(watch: Watch) -> None:
    """Keys in = keys out, in their order; each replayed row is the row that scoring returned, all keys together."""
    some = {key for before, _ in watch.steps for key in before} & {"num_tiles"}  # which TRL leaves out where all are 1
    for number, (before, after) in enumerate(watch.steps):
        bare = some | (before.keys() & OF_IMAGES if "pixel_values" not in after else set())
        assert [key for key in after if key not in some] == [key for key in [*before, ROWS] if key not in bare], (
            "keys in = keys out"
        )
        by_hand = None if watch.advantages is None else watch.advantages(number)
        for row in range(len(before["advantages"])):
            found = original(after, row, watch.pad)
            taken = watch.taken[number].get(row)
            if taken is None:
                stored = original(before, row, watch.pad)
            else:
                step, source = watch.source(*taken)
                assert step < number
                stored = original(watch.steps[step][0], source, watch.pad)
            assert ("images" in found) == ("images" in stored)
            for key, value in stored.items():
                if key == "ratio_width" or (key == "advantage" and by_hand is not None):
                    continue
                if key == "images":
                    assert_same_images(found[key], value)
                    continue
                if taken is None:
                    assert_identical(found[key], value, key)
                elif key in found:
                    compare(f"{key} of a replayed row", found[key], value, stored)
            if by_hand is not None:
                expected = float(by_hand[row])
                assert math.isclose(found["advantage"], expected, rel_tol=1e-4, abs_tol=1e-6), (
                    f"row {row} of batch {number}, stored {taken}: {found['advantage']}, by hand {expected}"
                )


def compare(what: str, found: Any, stored: Any, row: dict[str, Any]) -> None:
    """Bit for bit; where the sampler gave no log-prob (NaN), something finite has taken its place."""
    if torch.is_tensor(stored) and stored.dtype.is_floating_point:
        missing = stored.isnan()
        assert bool(found.isfinite().all()), f"{what} is not finite"
        found, stored = found[~missing], stored[~missing]
    assert_identical(found, stored, f"{what} changed")


def assert_identical(found: Any, expected: Any, message: str) -> None:
    """Bit for bit, NaN included; what `assert_close` looks at takes longer than to see that nothing differs."""
    if torch.is_tensor(found) and torch.is_tensor(expected):
        same = found.dtype == expected.dtype and torch.equal(found, expected)
    else:
        same = type(found) is type(expected) and found == expected
    if not same:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=message)


def check_losses(trainer: Any, replays: bool = True) -> None:
    """The trainer's losses are those of the reference, also where rows were replayed."""
    rounded = trainer.losses[0]["logps"].dtype == torch.bfloat16  # up to TRL 1.14, with weights in bfloat16
    rtol = 1e-2 if rounded else 2e-4
    assert trainer.compared
    if replays:
        assert any(replayed for _, _, replayed in trainer.compared), "no replayed row reached the loss"
    assert sum(expected is not None for _, expected, _ in trainer.compared) > len(trainer.compared) / 2
    for number, (found, expected, replayed) in enumerate(trainer.compared):
        if expected is None:
            continue
        assert math.isfinite(found)
        assert math.isclose(found, expected, rel_tol=rtol, abs_tol=2e-5), (
            f"loss {number} with {replayed} replayed rows is {found}, by hand {expected}"
        )
    for number, error in enumerate(getattr(trainer, "gradient_errors", [])):
        assert error < 1e-4, f"the gradient of loss {number} is off by {error:.1e} of its norm"
