"""Scripted rewards, and a trainer that shows what its loss saw. Everything else is the stock trainer."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

import trl_replay
from trl_replay.batch.compose import loss_mask
from trl_replay.data.types import Batch
from trl_replay.loss.supply import ROWS
from trl_replay.loss.tap import Tap
from trl_replay.session import Session

DEAD = [0.0, 0.0, 0.0, 0.0]
LIVE = [1.0, 0.0, 0.0, 0.0]
HALF = [1.0, 1.0, 0.0, 0.0]
LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "vespo", "sapo", "luspo"]


WINDOW = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 6}
"""Two micro-batches an update."""


class Rewards:
    """A reward function that gives each generation batch its scripted rewards, and the last script's from then on; a
    further round of a batch gets as many as it has rows."""

    def __init__(self, *batches: Sequence[Sequence[float | None]], name: str = "scripted") -> None:
        self.batches = batches
        self.calls = 0
        self.completions: list[list[str]] = []
        self.__name__ = name

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        batch = self.batches[min(self.calls, len(self.batches) - 1)]
        self.calls += 1
        self.completions.append(list(completions))
        flat = [reward for group in batch for reward in group]
        assert len(flat) >= len(completions), f"scripted {len(flat)} rewards for {len(completions)} completions"
        return flat[: len(completions)]


class Read(dict[str, Any]):
    """What a loss has read, as it was at its end."""

    @property
    def rows(self) -> torch.Tensor:
        """`(b, 2)`: its row ids."""
        rows: torch.Tensor = self[ROWS]
        return rows


_reading: dict[int, Any] = {}


def read_by(trainer: Any, inputs: Any) -> Read:
    """What the last loss of a trainer has read, where replay gave it another mapping than `inputs`."""
    seam = trainer.__dict__.get("_compute_loss")
    return Read(inputs if seam is None else _reading.pop(id(seam.session.step.tap), inputs))


def _noted(part: Callable[..., Any]) -> Callable[..., Any]:
    def noting(tap: Tap, make: Any, model: Any, inputs: Any, is_stock: bool) -> Any:
        def noted(batch):
            _reading[id(tap)] = batch
            return make(batch)

        return part(tap, noted, model, inputs, is_stock)

    return noting


Tap.part = _noted(Tap.part)  # type: ignore[method-assign]  # tests look at what the inner loss has read


class Spy(GRPOTrainer):
    """The stock trainer, which keeps what scoring returned, what the loss was given, and the log-probs it computed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scored: list[Batch] = []
        self.losses: list[dict[str, Any]] = []
        self.in_loss = False

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.scored.append(batch)
        return batch

    def _compute_loss(self, model, inputs):
        self.in_loss = True
        self.losses.append({"training": self.model.training, "inputs": inputs})
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.in_loss = False
        self.losses[-1] |= {"loss": loss.detach().clone(), "inputs": read_by(self, inputs)}
        return loss

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self.in_loss:
            self.losses[-1]["logps"] = result[0].detach().clone()
        return result


def scoring(change: Callable[[Batch], Any], base: type = Spy) -> type:
    """A trainer that makes something else of the batch that scoring returns."""

    class Scoring(base):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs):
            return change(super()._generate_and_score_completions(inputs))

    return Scoring


def shaping(shape: Callable[[torch.Tensor], torch.Tensor], base: type = Spy) -> type:
    """A trainer that shapes advantages by itself, as TRL's rules do not."""
    return scoring(lambda batch: {**batch, "advantages": shape(batch["advantages"])}, base)


COLUMN = shaping(lambda advantages: advantages.unsqueeze(1))
"""A trainer whose batches have one advantage a row, in a column."""


def plugin_class(**hooks: Callable[..., Any]) -> type:
    """A plugin with these functions, which take no `self`."""
    marked = {hook: f if hasattr(f, "trl_replay_impl") else trl_replay.hookimpl(f) for hook, f in hooks.items()}
    return type("Plugin", (), {f"trl_replay_{hook}": staticmethod(function) for hook, function in marked.items()})


@contextmanager
def plugin(name: str = "mine", **hooks: Callable[..., Any]) -> Iterator[str]:
    """A registered plugin with these functions."""
    trl_replay.register(plugin_class(**hooks)(), name)
    try:
        yield name
    finally:
        trl_replay.unregister(name)


class Act(TrainerCallback):
    """Does something after updates, `{update: function}`, and keeps what the last one returned."""

    def __init__(self, actions: dict[int, Callable[[], Any]]) -> None:
        self.actions = actions
        self.returned: Any = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.actions:
            self.returned = self.actions[state.global_step]()


def record(session: Session) -> list[tuple[Batch, Batch]]:
    """From now on, every `(batch in, batch out)` of the session's step."""
    steps: list[tuple[Batch, Batch]] = []
    step = session.step.take

    def recording(batch: Batch, score: Any = None) -> Batch:
        out = step(batch, score)
        steps.append((batch, out))
        return out

    session.step.take = recording  # type: ignore[method-assign]
    return steps


def replayed(steps: Sequence[tuple[Batch, Batch]], size: int = 4) -> list[int]:
    """Of each recorded step, how many groups were replayed."""
    return [int((after[ROWS][:, 0] < 0).sum()) // size for _, after in steps]


def tokens_of_replayed(steps: Sequence[tuple[Batch, Batch]]) -> list[int]:
    """Trained tokens of every row that was replayed."""
    return [
        int(count)
        for _, after in steps
        for count, row in zip(loss_mask(after).sum(dim=1), after[ROWS][:, 0], strict=True)
        if row < 0
    ]


class Interrupt(TrainerCallback):
    """Stops training inside a window, after a number of substeps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_substep_end(self, args, state, control, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Forwards(TrainerCallback):
    """Counts a model's forwards, with and without gradients; as a callback, from the beginning of training."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.counts: Counter[str] = Counter()
        model.register_forward_hook(self)

    def on_train_begin(self, *given, **named):
        self.counts.clear()

    def __call__(self, module, inputs, output):
        self.counts["grad" if torch.is_grad_enabled() else "no grad"] += 1


def logged(trainer: Any, key: str) -> list[float]:
    """The values in the trainer's log under `key`, in order."""
    return [log[key] for log in trainer.state.log_history if key in log]


def rolled_out(prompts: list[str], trainer: Any, ids: list[list[int]]) -> dict[str, Any]:
    """What a rollout function returns of completions: the sampler gave each token a log-prob of -1."""
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [[-1.0] * len(row) for row in ids]}


def masked_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of different lengths; the middle token of each comes from a tool; one sampling log-prob a token."""
    tokenizer = trainer.processing_class
    texts = ["ab*cd"[: 3 + (row + trainer.state.global_step) % 3] for row in range(len(prompts))]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return {
        **rolled_out(prompts, trainer, ids),
        "logprobs": [[-0.5 - position / 8 for position in range(len(row))] for row in ids],
        "env_mask": [[int(position != 1) for position in range(len(row))] for row in ids],
    }


def truncating(rows: tuple[int, ...] = (0, 2), slots: tuple[int, ...] = (0, 1, 2)) -> Callable[..., dict[str, Any]]:
    """A rollout function for three groups of 4 whose completions do not end in these rows of these groups."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        completions = []
        for number in range(len(prompts)):
            slot, row = divmod(number, 4)
            ids = tokenizer("abcdef"[: 2 + row])["input_ids"]
            is_cut = slot % 3 in slots and row in rows
            completions.append(ids if is_cut else [*ids, tokenizer.eos_token_id])
        return rolled_out(prompts, trainer, completions)

    return rollout


def rollout_of(*lengths: list[int], ends: bool = True) -> Callable[..., dict[str, Any]]:
    """A rollout function whose rows have these numbers of tokens, batch by batch, and end unless not `ends`."""
    batches = iter(lengths)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        end = [tokenizer.eos_token_id] * ends
        ids = [[*tokenizer("abcdefghijklmnop"[:length])["input_ids"], *end] for length in next(batches)]
        return rolled_out(prompts, trainer, ids)

    return rollout


def weights_hash(trainer: Any) -> str:
    """A hash of all parameters, bit for bit."""
    digest = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
