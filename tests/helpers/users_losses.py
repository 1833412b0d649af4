"""Losses as people write them on GRPOTrainer, and GRPO by hand to hold them against.

A case makes a class of a base. On TRL's GRPOTrainer it is what is trained; on `ByHand`, whose `_compute_loss` is GRPO
row by row from forwards of the plain model, it is what must come out.
"""

from __future__ import annotations

import contextlib
import functools
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from loss_by_hand import Row, differentiable_loss
from replaying import flat_gradient
from torch.nn import functional
from trl import GRPOTrainer

from trl_replay.loss.supply import EXCLUDED, ROWS
from trl_replay.testing import make_model, make_tokenizer

WEIGHT = 0.25
"""Of all replayed rows."""
KEYS = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch",
    "old_per_token_logps", "ref_per_token_logps",
)  # fmt: skip
"""What a loss knows that was written for stock."""
OLD = "old_per_token_logps"
Case = Callable[[Any], Any]
CASES: dict[str, Case] = {}


def case(make: Case) -> Case:
    CASES[make.__name__] = make
    return make


def tensors(inputs: Any, change: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """A copy of a batch, with its tensors changed."""
    is_changed = {key: torch.is_tensor(value) and value.dim() > 0 for key, value in inputs.items()}
    return {key: change(key, value) if is_changed[key] else value for key, value in inputs.items()}


def rows_of(inputs: Any, rows: Any) -> dict[str, Any]:
    """A copy with these of its rows, of all keys that have as many."""
    count = len(inputs["prompt_ids"])
    return tensors(inputs, lambda key, value: value[rows] if len(value) == count else value)


def backwards(inputs: Any) -> torch.Tensor:
    return torch.arange(len(inputs["prompt_ids"]) - 1, -1, -1)


def both(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of prompts with completions."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)


def ask(self, model, ids, mask, inputs):
    width = inputs["completion_ids"].size(1)
    return self._get_per_token_logps_and_entropies(model, ids, mask, width, compute_entropy=True)


def sft(model: Any) -> torch.Tensor:
    """A term of another objective."""
    ids = torch.arange(3, 13).repeat(4, 1)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


_teachers: list[Any] = []


def teacher(trainer):
    """Another model, with the head that TRL gives its own."""
    if not _teachers:
        import inspect

        _teachers.append(make_model(make_tokenizer(), seed=1))
        with contextlib.suppress(ImportError):
            from trl.trainer.utils import add_fused_lm_head

            takes = inspect.signature(add_fused_lm_head).parameters
            outputs = {"outputs": ("log_probs", "entropy")} if "outputs" in takes else {}
            add_fused_lm_head(_teachers[0], temperature=trainer.temperature, **outputs)
    return _teachers[0]


# What is given to the loss: a copy, or the batch, changed


def scaled(inputs: Any, factor: float = 0.5) -> dict[str, Any]:
    return {**inputs, "advantages": inputs["advantages"] * factor}


def shaped_in_the_batch(self, inputs):
    inputs["advantages"] = inputs["advantages"] * 0.5
    return inputs


def masked(self, inputs):
    mask = inputs["completion_mask"].clone()
    mask[:, 0] = 0
    return {**inputs, "tool_mask": mask}


def trimmed_in_a_copy(self, inputs):
    width, most = inputs["completion_mask"].size(1), max(int(inputs["completion_mask"].sum(1).max()), 1)

    def cut(key: str, value: Any) -> Any:
        return (
            value[:, :most] if value.dim() == 2 and value.size(1) == width and not key.startswith("prompt") else value
        )

    return tensors(inputs, cut)


def widened_in_a_copy(self, inputs):
    wide = ("completion_ids", "completion_mask", OLD, "ref_per_token_logps")
    return {**inputs, **{key: functional.pad(inputs[key], (0, 3)) for key in wide if inputs.get(key) is not None}}


def reordered_known_keys_in_the_batch(self, inputs):
    inputs.update(rows_of(rebuilt_from_known_keys(self, inputs), backwards(inputs)))
    return inputs


def rebuilt_from_known_keys(self, inputs):
    return {key: inputs[key] for key in KEYS if inputs.get(key) is not None}


def rows_of_no_advantage_dropped(self, inputs):
    keep = inputs["advantages"] != 0
    keep[0] |= not keep.any()
    return rows_of(inputs, keep)


GIVEN: dict[str, Callable[[Any, Any], Any]] = {
    "shaped_in_a_copy": lambda self, inputs: {**inputs, "advantages": inputs["advantages"] * 0.5 + 0.1},
    "user_dict": lambda self, inputs: UserDict(inputs),
    **{
        make.__name__: make
        for make in (
            shaped_in_the_batch, masked, trimmed_in_a_copy, widened_in_a_copy,
            reordered_known_keys_in_the_batch, rebuilt_from_known_keys, rows_of_no_advantage_dropped,
        )
    },
}  # fmt: skip


def giving(change: Callable[[Any, Any], Any]) -> Case:
    def make(base):
        class Giving(base):  # type: ignore[misc]
            def _compute_loss(self, model, inputs):
                return super()._compute_loss(model, change(self, inputs))

        return Giving

    return make


CASES |= {name: giving(change) for name, change in GIVEN.items()}


# What stands around the loss


def forward_before_on_flipped_rows(self, model, inputs, loss):
    ids, mask = both(inputs)
    term = ask(self, model, ids.flip(0), mask.flip(0), inputs)[0].mean()
    return loss(model, inputs) + 0.01 * term


def halves(self, model, inputs, loss):
    middle = len(inputs["prompt_ids"]) // 2
    return sum(loss(model, rows_of(inputs, part)) for part in (slice(0, middle), slice(middle, None)))


def skipped_without_advantages(self, model, inputs, loss):
    if not inputs["advantages"].any():
        return sum(parameter.sum() for parameter in model.parameters()) * 0.0
    return loss(model, inputs)


AROUND: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "named_arguments": lambda self, model, inputs, loss: loss(inputs=inputs, model=model),
    **{
        make.__name__: make
        for make in (
            forward_before_on_flipped_rows, halves, skipped_without_advantages,
        )
    },
}  # fmt: skip


def around(loss: Callable[[Any, Any, Any, Any], Any]) -> Case:
    def make(base):
        class Around(base):  # type: ignore[misc]
            def _compute_loss(self, model, inputs):
                return loss(self, model, inputs, super()._compute_loss)

        return Around

    return make


CASES |= {name: around(loss) for name, loss in AROUND.items()}


@case
def scaled_with_rows_left_out(base):
    class LeftOut(around(lambda self, model, inputs, loss: loss(model, inputs) + sft(model))(base)):  # type: ignore[misc]
        leaves_out = True

    return LeftOut


# How the class comes to its loss


@case
def a_patch_with_wraps_on_the_class(base):
    class Patched(base):  # type: ignore[misc]
        pass

    original = base._compute_loss

    @functools.wraps(original)
    def patched(self, model, inputs):
        return original(self, model, scaled(inputs))

    Patched._compute_loss = patched
    return Patched


@case
def a_patch_of_trls_class(base):
    class Patched(base):  # type: ignore[misc]
        pass

    stock = base._compute_loss

    def patched(self, model, inputs):
        return stock(self, model, scaled(inputs))

    @contextlib.contextmanager
    def patch() -> Iterator[None]:
        base._compute_loss = patched
        try:
            yield
        finally:
            base._compute_loss = stock

    Patched.patch = staticmethod(patch)
    return Patched


@case
def rebuilt_around_the_loss(base):
    class Outside(base):  # type: ignore[misc]
        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(model, rebuilt_from_known_keys(self, inputs), *args, **kwargs)

    return Outside


@case
def log_probs_by_two_forwards(base):
    """The method's override asks itself for another model's first."""

    class Twice(base):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            if model is not teacher(self):
                self.gap = self._get_per_token_logps_and_entropies(teacher(self), *args, **kwargs)[0]
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    return Twice


@case
def by_the_type_of_itself(base):
    class Itself(base):  # type: ignore[misc]
        def _compute_loss(self, model, inputs):
            return super(type(self), self)._compute_loss(model, inputs)

    return Itself


# Losses that call no other, and terms of such beside TRL's


def own(inputs: Any, logps: Any, old: Any, advantages: Any) -> torch.Tensor:
    """GRPO with DAPO's denominator in the micro-batch."""
    ratio, mask, signal = (logps - old).exp(), inputs["completion_mask"], advantages[:, None]
    clipped = torch.min(ratio * signal, ratio.clamp(0.8, 1.2) * signal)
    return -(clipped * mask).sum() / mask.sum()


def old_of(batch: Any, logps: torch.Tensor) -> torch.Tensor:
    old = batch.get(OLD)
    return logps.detach() if old is None else old


def logps_of(self: Any, model: Any, inputs: Any) -> torch.Tensor:
    """Not how the class of a whole loss asks, whose own code must name the method."""
    return ask(self, model, *both(inputs), inputs)[0]


def term(self: Any, model: Any, inputs: Any) -> torch.Tensor:
    """Without old log-probs, by TRL's idiom, it is on-policy."""
    logps = logps_of(self, model, inputs)
    return 0.5 * own(inputs, logps, old_of(inputs, logps), inputs["advantages"])


def term_of_a_copy(self, model, inputs, loss):
    batch = {**inputs}
    has_old = batch.get("old_per_token_logps") is not None
    return loss(model, inputs) + (term(self, model, batch) if has_old else 0.0)


def asks_whether_the_batch_has_old(self, model, inputs, loss):
    self.has_old = OLD in inputs
    return loss(model, inputs)


CASES["term_in_a_helper"] = around(lambda self, model, inputs, loss: loss(model, inputs) + term(self, model, inputs))
CASES |= {loss.__name__: around(loss) for loss in (term_of_a_copy, asks_whether_the_batch_has_old)}


@case
def term_around_the_loss(base):
    class Outside(base):  # type: ignore[misc]
        def compute_loss(self, model, inputs, *args, **kwargs):
            has_old = inputs.get("old_per_token_logps") is not None
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss + term(self, model, inputs) if has_old else loss

    return Outside


@case
def term_around_the_loss_in_a_helper(base):
    class Helped(base):  # type: ignore[misc]
        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(model, inputs, *args, **kwargs) + term(self, model, inputs)

    return Helped


@case
def term_around_the_loss_in_a_method(base):
    class Own(base):  # type: ignore[misc]
        @staticmethod
        def old(batch, logps):
            return batch.get("old_per_token_logps", logps.detach())

        def own_term(self, model, inputs):
            logps = logps_of(self, model, inputs)
            return 0.5 * own(inputs, logps, self.old(inputs, logps), inputs["advantages"])

        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(model, inputs, *args, **kwargs) + self.own_term(model, inputs)

    return Own


def whole(loss: Callable[..., Any]) -> Case:
    """A class whose loss calls no other."""

    def make(base):
        class Whole(base):  # type: ignore[misc]
            by_hand = True

            def _compute_loss(self, model, inputs):
                def logps(batch=inputs, asked=model):
                    width = batch["completion_ids"].size(1)
                    return self._get_per_token_logps_and_entropies(asked, *both(batch), width)[0]

                return loss(self, inputs, logps)

        return Whole

    return make


def of_its_own(self, inputs, logps):
    new = logps()
    return own(inputs, new, old_of(inputs, new), inputs["advantages"])


def asks_whether_it_has_old(self, inputs, logps):
    """The batch of the first loss has none, as stock's."""
    new = logps()
    return own(inputs, new, inputs[OLD] if OLD in inputs else new.detach(), inputs["advantages"])


def in_a_copy(self, inputs, logps):
    return of_its_own(self, {**inputs}, logps)


def with_a_teacher_first(self, inputs, logps):
    self.gap = float(logps(asked=teacher(self)).detach().mean())
    return of_its_own(self, inputs, logps)


def reads_advantages_first(self, inputs, logps):
    advantages = inputs["advantages"]
    new = logps()
    return own(inputs, new, old_of(inputs, new), advantages)


def reads_advantages_first_later(self, inputs, logps):
    read = reads_advantages_first if self.state.global_step >= 3 else of_its_own
    return read(self, inputs, logps)


def reads_old_first_later(self, inputs, logps):
    old = inputs.get(OLD) if self.state.global_step >= 3 else None
    new = logps()
    if self.state.global_step < 3:
        old = inputs.get(OLD)
    return own(inputs, new, new.detach() if old is None else old, inputs["advantages"])


def reads_advantages_again_for_nothing(self, inputs, logps):
    value = reads_advantages_first(self, inputs, logps)
    self.mean = float(inputs["advantages"].detach().mean())
    return value


def shapes_before(self, inputs, logps):
    """Persists in the batch that a second iteration trains on, in stock."""
    inputs["advantages"] = inputs["advantages"] * 0.5
    return of_its_own(self, inputs, logps)


def shapes_after(self, inputs, logps):
    new = logps()
    inputs["advantages"] = inputs["advantages"] * 0.5
    return own(inputs, new, old_of(inputs, new), inputs["advantages"])


WHOLE = {
    f"whole_loss_that_{loss.__name__}": whole(loss)
    for loss in (
        of_its_own, asks_whether_it_has_old, in_a_copy, with_a_teacher_first, reads_advantages_first_later,
        reads_old_first_later, reads_advantages_again_for_nothing, shapes_before, shapes_after,
    )
}  # fmt: skip
CASES |= WHOLE


@case
def whole_loss_decorated(base):
    made = whole(of_its_own)(base)
    undecorated = made._compute_loss
    made._compute_loss = functools.wraps(undecorated)(lambda *args, **kwargs: undecorated(*args, **kwargs))
    return made


@case
def whole_loss_in_a_helper(base):
    class Helper(base):  # type: ignore[misc]
        by_hand = True

        def _compute_loss(self, model, inputs):
            return self.mine(model, inputs)

        def mine(self, model, batch):
            return of_its_own(self, batch, lambda: logps_of(self, model, batch))

    return Helper


# By hand


def alone(model: Any, key: tuple[tuple[int, ...], tuple[int, ...]], gradients: bool = True) -> torch.Tensor:
    """Log-probs, `(n,)`, of a completion from a forward of its row alone."""
    prompt, completion = key
    ids = torch.tensor([[*prompt, *completion]])
    with torch.set_grad_enabled(gradients):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def key_of(trainer: Any, batch: Any, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    prompt = tuple(batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist())
    ids, pad = batch["completion_ids"][row].tolist(), trainer._tokenizer.pad_token_id
    while ids and ids[-1] == pad:
        ids.pop()
    return prompt, tuple(ids)


class ByHand(GRPOTrainer):
    """GRPO's loss, row by row. Of rows that are not in `fresh`, the ratio is to the log-probs in `book`, and the
    advantage has the weight `WEIGHT`."""

    leaves_out = False  # rows that are in no denominator

    def logps_by_hand(self, inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs and those that the ratio is taken to, `(b, C)`, and advantages with their weights, `(b,)`."""
        width = inputs["completion_ids"].size(1)
        given = inputs.get(OLD)
        logps, old, advantages = [], [], inputs["advantages"].clone()
        for row in range(len(inputs["completion_ids"])):
            key = key_of(self, inputs, row)
            logps.append(_wide(alone(self.model, key), width))
            if key in self.fresh:
                old.append(logps[-1].detach() if given is None else given[row])
            else:
                old.append(_wide(self.book[key], width))
                advantages[row] = advantages[row] * WEIGHT
                self.replayed_rows += 1
        return torch.stack(logps), torch.stack(old), advantages

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if model is self.model and getattr(self, "by_hand", False) and getattr(self, "now", None) is not None:
            return (self.now,)
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def whole_by_hand(self, model, inputs):
        """A loss of its own, on a batch in which its values by hand stand from the start."""
        self.now, old, advantages = self.logps_by_hand(inputs)
        return type(self)._compute_loss(self, model, {**inputs, OLD: old, "advantages": advantages})

    def _compute_loss(self, model, inputs):
        trained = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        rows = []
        for number, (logps, old, advantage) in enumerate(zip(*self.logps_by_hand(inputs), strict=True)):
            mask, reference = trained[number], None
            if self.beta:
                reference = _wide(alone(self.ref_model, key_of(self, inputs, number), False), len(mask))[mask]
            if not (self.leaves_out and ROWS in inputs and inputs[ROWS][number, 1] & EXCLUDED):
                rows.append(Row(logps[mask], old[mask], advantage, ref=reference))
        items = inputs["num_items_in_batch"] / self.accelerator.num_processes
        return differentiable_loss(self, rows, items, count=len(rows) or 1)


def _wide(row: torch.Tensor, width: int) -> torch.Tensor:
    return functional.pad(row, (0, width - len(row)))


def watched(make: Case) -> type:
    """The case on GRPOTrainer, which computes each training loss and its gradient again by hand if it `compares`."""
    hand, on_trl = make(ByHand), make(GRPOTrainer)

    class Watched(on_trl):  # type: ignore[misc]
        compares = False

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.book: dict[Any, torch.Tensor] = {}
            self.fresh: set[Any] = set()
            self.compared: list[tuple[int, float, float]] = []

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            if self.model.training:
                keys = [key_of(self, batch, row) for row in range(len(batch["prompt_ids"]))]
                self.fresh = set(keys)
                self.book |= {key: alone(self.model, key, False) for key in keys}
            return batch

        def compute_loss(self, model, inputs, *args, **kwargs):
            given = {key: value.clone() if torch.is_tensor(value) else value for key, value in inputs.items()}
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if self.compares and self.model.training:
                self.compared.append(self.compare(model, given, loss, args, kwargs))
            return loss

        def compare(self, model: Any, given: Any, loss: Any, args: Any, kwargs: Any) -> tuple[int, float, float]:
            """Replayed rows, how far the loss is off, and its gradient, relative to the longer of the two."""
            other: Any = object.__new__(hand)
            other.__dict__ |= {
                key: value for key, value in vars(self).items() if type(value).__name__ != "SeamFunction"
            }
            other.replayed_rows = 0
            with getattr(hand, "patch", contextlib.nullcontext)():
                if "compute_loss" in vars(hand):
                    right = hand.compute_loss(other, model, given, *args, **kwargs)
                elif getattr(hand, "by_hand", False):
                    right = other.whole_by_hand(model, given)
                else:
                    right = other._compute_loss(model, given)
            parameters = [one for one in self.model.parameters() if one.requires_grad]
            gradients = [flat_gradient(value, parameters) for value in (loss, right)]
            off = float((gradients[0] - gradients[1]).norm())
            size = max(*(float(gradient.norm()) for gradient in gradients), 1e-6)
            return other.replayed_rows, abs(float(loss.detach()) - float(right.detach())), off / size

    return Watched


def stored_errors(session: Any, book: Mapping[Any, torch.Tensor]) -> list[float]:
    """Of each stored row, how far its log-probs are from those of the model that generated it."""
    found = []
    for serial in session.buffer:
        group = session.buffer.load(serial)
        lengths = group.completion_lengths.tolist()
        prompt = tuple(torch.split(group.tensors["prompt_ids"], group.prompt_lengths.tolist())[0].tolist())
        ids = torch.split(group.tensors["completion_ids"], lengths)
        for of_row, logps in zip(ids, torch.split(group.tensors[OLD].float(), lengths), strict=True):
            found.append(float((book[prompt, tuple(of_row.tolist())] - logps).abs().max()))
    return found
