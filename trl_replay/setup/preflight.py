"""Checks that a session fits its trainer: reasons to refuse, and warnings, before anything is patched."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .. import compat
from ..base.files import counted, format_bytes
from ..buffer.replay_buffer import slots_within
from ..errors import RefusedError
from ..loss.supply import Noise
from ..strategies.policies import ALWAYS_SHARE
from ..strategies.scopes import Scope
from .settings import Components, Settings

LONG_ANSWER, UPDATES = 64, 4
"""Tokens from which on the preset was measured to gain with so many updates a batch alone."""
ON_LONG_ANSWERS = (
    f"For answers of {LONG_ANSWER} tokens or more, set num_iterations={UPDATES}: with two, the preset gained nothing."
)
PROMPT, TOKENS, PADDING = 4, 64, 3
"""Of the made-up row; pad tokens before it."""
RISES = 3.0
"""So many times the difference that neighbors make is more than rounding."""
LEAST, LEAST_IN_HALF_PRECISION = 1e-4, 0.25
"""Mean differences, in nats, below which padding is not told from rounding: in bfloat16, that of Gemma 3 270M is 0.11,
and in single precision 1e-5."""
NAMES = ("wpe", "embed_positions", "position_embeddings")
"""Modules of learned positions, in the models of transformers."""


class Trial(NamedTuple):
    """What was found.

    Attributes:
        noise ([`Noise`], *optional*): What log-probs differ by at equal weights; None where it was not tried.
        reads_padding (`bool`): Whether the model reads where in its row a token stands, or the pad tokens before it.
        failed (`str`): What came in between.
        remedy (`str`): What turns dropout off, if there is any.
    """

    noise: Noise | None
    reads_padding: bool
    failed: str = ""
    remedy: str = ""


def try_model(trainer: Any, runs_model: bool = False) -> Trial:
    """Score a made-up row alone, among others, and behind padding; with dropout, twice.

    A model that can't be tried, that an engine runs (DeepSpeed, FSDP, or that of a layout that `runs_model`), or that
    a forward in eval mode would change (quantized, on a CPU), is judged by the names of its modules. The model and the
    global generators are as before.
    """
    model = trainer.model
    named = any(name.endswith(NAMES) for name, _ in model.named_modules())
    packs_weights = getattr(model, "is_quantized", False) and model.device.type == "cpu"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or runs_model or packs_weights:
        return Trial(None, named)
    try:
        return _tried(trainer, model)
    except Exception as error:  # models of any kind: what can't be tried here may train all the same
        return Trial(None, named, f"a made-up row fails with {type(error).__name__}: {error}".rstrip("."))


def _tried(trainer: Any, model: Any) -> Trial:
    row, other, pad = _made_up(trainer, model)
    with torch.no_grad(), trainer.accelerator.autocast(), _as_before(model):
        model.eval()
        alone = _Scored(trainer, [row])
        targets = alone.draw()

        def moved(alone: _Scored) -> tuple[torch.Tensor, torch.Tensor]:
            among, behind = _Scored(trainer, [row, other[PADDING:]]), _Scored(trainer, [pad + row, other], PADDING)
            here = alone.logps(targets)
            return among.logps(targets) - here, behind.logps(targets) - here

        neighbors, padding = moved(alone)
        both = torch.cat([neighbors, padding])
        single = model.dtype == torch.float32 and not hasattr(model, "_original_forward")  # which autocasts by itself
        if single and compat.autocasts(trainer):  # without, rounding hides less
            with torch.autocast(model.device.type, enabled=False):
                neighbors, padding = moved(_Scored(trainer, [row]))
        dropout = torch.zeros(1)
        remedy = _without_dropout(model)
        if remedy:
            model.train()
            both = dropout = _Scored(trainer, [row]).logps(targets) - _Scored(trainer, [row]).logps(targets)
    least = LEAST if single else LEAST_IN_HALF_PRECISION
    most = max(least, RISES * float(neighbors.abs().mean()))
    reads = float(padding.abs().mean()) > most
    size, length = both.abs(), trainer.args.max_completion_length or TOKENS
    noise = Noise(float(size.mean()), float(size.max()), length, float(dropout.abs().mean()))
    return Trial(noise, reads, remedy=remedy)


class _Scored:
    """A forward of rows of one width, the first of which is the made-up one behind some padding."""

    def __init__(self, trainer: Any, rows: list[list[int]], padding: int = 0) -> None:
        model = trainer.model
        ids = torch.tensor(rows, device=model.device)
        real = torch.ones_like(ids)
        real[0, :padding] = 0
        out = model(input_ids=ids, attention_mask=real, use_cache=False)
        self._spread = (out.logits[0, padding:].float() / trainer.temperature).log_softmax(dim=-1)

    def draw(self) -> torch.Tensor:
        """Tokens as the model would sample them, `(T,)`: the log-probs of others are of no concern."""
        chances = self._spread[PROMPT:].exp().cpu()
        return torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(0)).to(self._spread.device)[:, 0]

    def logps(self, targets: torch.Tensor) -> torch.Tensor:
        """Their log-probs, `(T,)`."""
        taken: torch.Tensor = self._spread[PROMPT:].gather(1, targets[:, None])[:, 0].cpu()
        return taken


def _made_up(trainer: Any, model: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the row, a longer one beside it, and pad tokens, the same at each call."""
    tokenizer = compat.tokenizer(trainer)
    special = {*tokenizer.all_special_ids, tokenizer.pad_token_id}
    known = [token for token in range(compat.vocabulary_size(trainer)) if token not in special]
    places = getattr(model.config, "max_position_embeddings", None) or math.inf
    length = int(min(PROMPT + TOKENS, places - PADDING))
    drawn = torch.randint(len(known), (2 * length + PADDING,), generator=torch.Generator().manual_seed(0))
    tokens = [known[number] for number in drawn.tolist()]
    return tokens[:length], tokens[length:], [tokenizer.pad_token_id] * PADDING


def _without_dropout(model: Any) -> str:
    """Say how to turn off what a training forward may drop; nothing if that is nothing."""
    modules = any(getattr(module, "p", 0) for module in model.modules() if "Dropout" in type(module).__name__)
    config = model.config.to_dict() if hasattr(model, "config") else {}
    named = {name: 0.0 for name, value in config.items() if "drop" in name and isinstance(value, float) and value > 0}
    remedies = ["disable_dropout=True in GRPOConfig (LoRA's included)"] if modules else []
    remedies += [f"{named} in the model's config (model_init_kwargs)"] if named else []
    return " and ".join(remedies)


@contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """Leave the modes of modules and the generators as they are now."""
    training = [(module, module.training) for module in model.modules()]
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            yield
    finally:
        for module, trains in training:
            module.training = trains


TOKEN_BYTES = 7
"""Of a stored completion token at least: its id, and its log-prob."""
REMEDY = re.compile(r"\bset ((?!replay_)[a-z_]+=[\w.]+)")
"""A setting of the trainer in a reason."""


def preflight(trainer: Any, settings: Settings, components: Components) -> None:
    """Refuse with all reasons at once: our own and those of the plugins that take part.

    Raises:
        RefusedError: There is at least one reason.
    """
    reasons = [
        *compat.liger_problems(trainer),
        *compat.reference_problems(trainer, settings.config.replay_kl if components.buffer.capacity else ""),
        *_misfits(trainer, settings, components.scope),
    ]
    reasons += _baselines_over_two_prompts(settings, components)
    reasons += _without_effect_on_kl(trainer, settings)
    if settings.iterates:
        reasons += _without_iterations(trainer, settings, components)
    reasons += components.dialect.untested(trainer)
    refuse(reasons, trainer, settings, components)


def refuse(reasons: list[str], trainer: Any, settings: Settings, components: Components, ask: bool = True) -> None:
    """Refuse with these reasons and those of the plugins that take part, if they are to be asked.

    Raises:
        RefusedError: There is at least one reason.
    """
    for result in () if not ask else components.hooks.call("preflight", 0, trainer=trainer, config=settings.config):
        reasons += [str(reason) for reason in result]
    if reasons:
        told = " ".join(reasons)
        raise RefusedError([*reasons, *_of_the_preset(settings, told), *_to_copy(told)])


def _of_the_preset(settings: Settings, reasons: str) -> Iterator[str]:
    """Yield which of the settings in reasons come from the preset, and not from the user."""
    preset = settings.config.replay_preset
    names = [name for name in settings.config.of_preset() if f"{name}=" in reasons]
    if names:
        yield (
            f"of these, replay_preset={preset!r} sets {', '.join(names)}: `trl-replay list {preset}` tells what it "
            "needs"
        )


def _to_copy(reasons: str) -> Iterator[str]:
    """Yield the trainer's settings that are the remedies of reasons, as a line to copy."""
    found = dict.fromkeys(REMEDY.findall(reasons))
    if found:
        yield f"to copy: GRPOConfig({', '.join(found)})"


def retires_never(settings: Settings, size: int) -> Iterator[str]:
    """Yield why `replay_retire_passes` can't be used with groups of this size."""
    passes = settings.config.replay_retire_passes or 0
    if passes > size:
        yield (
            f"replay_retire_passes={passes} is more than a group has completions (num_generations={size}), so that no "
            "prompt would ever count as solved: lower it"
        )


def _misfits(trainer: Any, settings: Settings, scope: Scope) -> Iterator[str]:
    """Settings that don't fit the trainer's numbers."""
    config = settings.config
    rows = compat.local_rows(trainer)
    size = trainer.num_generations
    if not scope.one_buffer and rows % size:
        yield (
            f"each process scores {rows} rows (per_device_train_batch_size × steps_per_generation), no multiple of "
            f"num_generations={size}, so that groups straddle processes and replay_scope={config.replay_scope!r} "
            "can't store them: change one of the three, or use replay_scope='gathered', which puts such "
            "groups together"
        )
    generations = trainer.args.steps_per_generation * trainer.num_iterations
    dataset = trainer.train_dataset
    known = getattr(dataset, "column_names", None) or []  # a stream need not know them
    dropped = sorted(set(settings.task_columns or []) & set(compat.unused_columns(trainer, known)))
    if dropped:
        yield (
            f"replay_task_columns={settings.task_columns!r} must be columns of the rows that the trainer gets, and "
            f"remove_unused_columns=True takes {', '.join(map(repr, dropped))} out: set remove_unused_columns=False"
        )
    if known and not set(settings.task_columns or []) <= set(known):
        yield (
            f"replay_task_columns={settings.task_columns!r} must be columns of the trainer's dataset: it has "
            f"{', '.join(map(repr, known))}"
        )
    refill = config.refill
    if refill.rounds and refill.prompts == "new" and compat.streams(dataset):
        yield (
            f"replay_refill={config.replay_refill!r} draws prompts by their numbers, and this trainer's dataset is a "
            f"stream ({type(dataset).__name__}), which has none: use 'same(rounds={refill.rounds})', or a dataset "
            "with a length"
        )
    for name in ("loss_type", "importance_sampling_level"):
        of_trainer, of_args = getattr(trainer, name, None), getattr(trainer.args, name, None)
        if of_trainer is not None and of_trainer != of_args:
            yield (
                f"the trainer's {name} is {of_trainer!r}, and its args have {of_args!r}: replay's denominators and "
                "weights go by the latter. Set it in GRPOConfig"
            )
    window = generations / trainer.args.gradient_accumulation_steps
    max_age = config.replay_max_age
    if max_age is not None and max_age < window:
        yield (
            f"replay_max_age={max_age} is less than the {window:g} updates between two generations, "
            "so that every entry is too old when it is first offered: raise it, or generate more often"
        )
    yield from retires_never(settings, size)


def _without_effect_on_kl(trainer: Any, settings: Settings) -> Iterator[str]:
    """Yield what `replay_kl` does not go with."""
    config = settings.config
    name = f"replay_kl={config.replay_kl!r}"
    if config.replay_kl == "all":
        return
    if not trainer.beta:
        yield f"{name} needs a KL term, and this trainer has beta=0: set beta=0.1, or replay_kl='all'"
    if config.replay_kl == "all_wrong" and config.replay_unfilled != "keep":
        yield (
            f"{name} keeps the KL term of all-wrong groups, and replay_unfilled={config.replay_unfilled!r} takes "
            "it away: use replay_unfilled='keep'"
        )
    if config.replay_kl == "all_wrong" and config.replay_refill:
        yield (
            f"{name} keeps all-wrong groups for their KL term, and replay_refill={config.replay_refill!r} generates "
            "them again: leave that out, or use another replay_kl"
        )


def _without_iterations(trainer: Any, settings: Settings, components: Components) -> Iterator[str]:
    """Yield what `replay_iterations="replay"` does not go with."""
    config = settings.config
    name = "replay_iterations='replay'"
    args = trainer.args
    if trainer.num_iterations < 2:
        yield f"{name} draws groups for iterations 2 and up, and num_iterations=1: set num_iterations=2 or more"
    if args.steps_per_generation % args.gradient_accumulation_steps:
        yield (
            f"{name} needs whole updates in every iteration, and gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps} does not divide steps_per_generation={args.steps_per_generation}"
        )
    if components.mixes_rows:
        yield f"{name} trains on whole stored groups: use replay_mixer='whole'"
    if not config.replay_buffer_size:
        yield f"{name} draws from the buffer, and replay_buffer_size=0: set a size"


def _baselines_over_two_prompts(settings: Settings, components: Components) -> Iterator[str]:
    """Advantages are computed over rows of one prompt only: the sampler must see to that."""
    config = settings.config
    setting = config.replay_advantages
    sampler = settings.label("sampler")
    computes = setting in ("joint", "split") or (setting == "auto" and components.mixes_rows)
    if not computes or components.buffer.policy.draws_same_prompt or not config.replay_buffer_size:
        return
    yield (
        f"replay_advantages={setting!r} computes the advantages of mixed groups anew, for which all rows must have "
        f"the same prompt, and replay_sampler={sampler!r} does not say that it draws so (an attribute "
        "same_prompt = True): use replay_sampler='same_prompt', or replay_advantages='stored'"
    )


def _of_the_model(trial: Trial) -> Iterator[str]:
    """Yield what was found of it, or why nothing was."""
    if trial.reads_padding:
        yield (
            "The model has learned absolute positions, or reads the padding before a prompt, and TRL pads prompts on "
            "the left without position ids: the log-probs of a row change with the width of its batch, so that "
            "replay's importance ratios are only approximate. Prompts of one length, or a model with rotary "
            "positions, avoid this."
        )
    if trial.failed:
        yield (
            f"The model could not be tried at attach: {trial.failed}. What rounding and padding do to replayed rows' "
            "importance ratios is not known; check that its log-probs do not depend on the padding before a prompt."
        )
    noise = trial.noise
    if noise is not None and noise.dropout:
        share = noise.dropout / noise.token_mean
        yield (
            f"Dropout is on in the loss's forward: at equal weights it moves a token's log-prob by "
            f"{noise.dropout:.2g} nats in the mean, {share:.0%} of what replay's importance ratios show as staleness. "
            f"Set {trial.remedy}."
        )


def misgivings(trainer: Any, settings: Settings, components: Components, trial: Trial) -> Iterator[str]:
    """Yield what the user should know of this trainer, though it can be trained."""
    yield from _of_the_model(trial)
    yield from _useless(trainer, settings, components)
    if settings.config.replay_preset == "second_run":
        yield from _generates_again(trainer, settings)
    few = trainer.num_iterations < UPDATES and (trainer.max_completion_length or 0) >= LONG_ANSWER
    if settings.config.replay_preset == "sample_efficient" and few:
        yield f"replay_preset='sample_efficient' has num_iterations={trainer.num_iterations}. {ON_LONG_ANSWERS}"
    if (
        components.forwards_to_record
        and settings.config.replay_record == "auto"
        and trainer.accelerator.is_main_process
    ):
        yield (
            f"{_chooser(settings)} may choose live groups, whose log-probs the loss then never shows: "
            "replay_record='auto' adds one forward without gradients to every generation batch, so that they are "
            "stored. Set replay_record='forward' to agree, or 'loss' to store none of them."
        )


def _chooser(settings: Settings) -> str:
    """Name who chooses the groups that may be replaced."""
    names = [plugin.name for plugin in settings.plugins if "trl_replay_select" in plugin.hooks]
    return f"The plugin {names[0]!r}" if names else f"The selector {settings.label('selector')}"


def _generates_again(trainer: Any, settings: Settings) -> Iterator[str]:
    """Yield why a second run would not train on the completions of a file alone."""
    if settings.config.replay_warm_start is None:
        yield (
            "replay_preset='second_run' trains on the completions of a file, and replay_warm_start is not set: name "
            "the file, or call session.add(...) before training begins."
        )
    steps, iterations = trainer.args.max_steps, trainer.num_iterations
    updates = iterations * trainer.args.steps_per_generation // trainer.args.gradient_accumulation_steps
    if steps <= 0 or updates < steps:
        length = f"max_steps={steps}" if steps > 0 else f"num_train_epochs={trainer.args.num_train_epochs:g}"
        yield (
            f"replay_preset='second_run' generates one batch, and num_iterations={iterations} with {length} generates "
            f"another after every {counted(updates, 'update')}: set num_iterations and max_steps both to the number "
            "of updates."
        )


def _useless(trainer: Any, settings: Settings, components: Components) -> Iterator[str]:
    """Yield the limits under which nothing would be replayed."""
    config = settings.config
    start, steps = config.replay_start, trainer.args.max_steps
    if isinstance(start, int) and 0 < steps <= start:
        yield f"replay_start={start} is not before the end (max_steps={steps}): nothing would be replayed. Lower it."
    ranks = components.processes if components.scope.one_buffer else 1
    groups = max(compat.local_rows(trainer) * ranks // trainer.num_generations, 1)
    selector = settings.strategies["selector"]
    chosen = selector.arguments.get("share", ALWAYS_SHARE)
    if selector.label == "always" and not slots_within(chosen, groups):
        yield (
            f"replay_selector='always' (share={chosen:g}) selects none of the {counted(groups, 'group')} of a batch: "
            f"nothing would be replayed. Set replay_selector='always(share={math.ceil(100 / groups) / 100:g})' or "
            "more."
        )
    share = config.replay_max_fraction
    if 0 < share < 1 and not slots_within(share, groups):
        yield (
            f"replay_max_fraction={share} allows none of the {counted(groups, 'group')} of a batch: nothing would be "
            f"replayed. Set it to {math.ceil(100 / groups) / 100:g} or more."
        )
    length = trainer.args.max_completion_length
    if config.max_bytes is None or length is None:
        return
    least = components.buffer.table.row_bytes + trainer.num_generations * length * TOKEN_BYTES
    if config.max_bytes < least:
        yield (
            f"replay_max_bytes={config.replay_max_bytes!r} has no room for a group of "
            f"{trainer.num_generations} completions of max_completion_length={length}, which takes "
            f"{format_bytes(least)}: such groups will not be stored. Raise it; bytes may have a unit, as in '512MB'."
        )
