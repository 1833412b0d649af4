"""Checks that a session fits an asynchronous trainer: settings that a queue can't do, with reason and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...setup.components import Components
from ...setup.preflight import refuse, retires_never
from ...setup.settings import Settings
from ...strategies.scopes import SCOPES

WITHIN_THE_LOSS = "reads log-probs of the policy that is trained, which are not known where samples are handed out"
CORRECTIONS = ("ratio", "per")
"""Corrections that need no log-probs of the present policy: the loss's own ratio, and weights of rows by priority."""
HOOKS = {
    "trl_replay_inputs": "the rollout worker chooses prompts by itself",
    "trl_replay_advantages": "the rollout worker computes advantages before samples are queued",
    "trl_replay_select": "dead groups are dropped as they arrive, before there is a batch to select from",
    "trl_replay_mix": "stored groups are replayed whole",
    "trl_replay_correct": f"it {WITHIN_THE_LOSS}",
    "trl_replay_plan": "there is no batch to plan: samples are handed out one by one",
}
"""Hooks that nothing would call."""


def queue_preflight(trainer: Any, settings: Settings, components: Components) -> None:
    """Refuse with all reasons at once. Plugins are asked for theirs if there is none of our own: one made for the
    other trainer reads what this one lacks.

    Raises:
        RefusedError: There is at least one reason.
    """
    reasons = [*_of_settings(settings), *_of_strategies(settings, components), *_of_plugins(settings)]
    reasons += retires_never(settings, components.num_generations)
    refuse(reasons, trainer, settings, components, ask=not reasons)


def _of_plugins(settings: Settings) -> Iterator[str]:
    for plugin in settings.plugins:
        for hook, reason in HOOKS.items():
            if hook in plugin.hooks:
                yield f"the plugin {plugin.name!r} has {hook}, and {reason}: leave it out of replay_plugins"


def _of_settings(settings: Settings) -> Iterator[str]:
    config = settings.config
    known: dict[str, tuple[Any, tuple[Any, ...], str]] = {
        "replay_advantages": (
            config.replay_advantages,
            ("auto", "stored"),
            "computes advantages of mixed groups, and stored groups are replayed whole here: use 'stored'",
        ),
        "replay_refill": (
            config.replay_refill,
            (None,),
            (
                "generates again, and the rollout worker goes on by itself: dropping dead groups is dynamic sampling "
                "here; leave it out"
            ),
        ),
        "replay_iterations": (
            config.replay_iterations,
            ("same",),
            "draws groups for further iterations, and this trainer trains on each sample once: use 'same'",
        ),
        "replay_kl": (
            config.replay_kl,
            ("all",),
            "chooses rows whose KL term counts, and this trainer's loss has none: use 'all'",
        ),
        "replay_record": (
            config.replay_record,
            ("auto", "loss"),
            "computes log-probs, and samples carry those of the policy that generated them: use 'auto'",
        ),
        "replay_unfilled": (
            config.replay_unfilled,
            ("keep", "exclude"),
            "treats dead groups of a batch, and here they are dropped as with 'exclude': use that, or leave it out",
        ),
        "replay_max_weight": (config.replay_max_weight, (None,), f"{WITHIN_THE_LOSS}: leave it out"),
        "replay_task_columns": (
            config.replay_task_columns,
            (None, []),
            (
                "tells tasks apart by columns of the dataset, and samples carry their prompt alone: use [], or leave "
                "it out"
            ),
        ),
    }
    for name, (value, usable, reason) in known.items():
        if value not in usable:
            yield f"{name}={value!r} {reason}"


def _of_strategies(settings: Settings, components: Components) -> Iterator[str]:
    if components.mixes_rows:
        yield (
            f"replay_mixer={settings.label('mixer')!r} puts stored rows beside fresh ones, and a group's samples are "
            "handed out one by one: use replay_mixer='whole'"
        )
    if settings.label("selector") != "zero_std":
        yield (
            f"replay_selector={settings.label('selector')!r} chooses among the groups of a batch, and samples are "
            "handed out one by one: use replay_selector='zero_std'"
        )
    if settings.label("correction") not in CORRECTIONS:
        yield (
            f"replay_correction={settings.label('correction')!r} {WITHIN_THE_LOSS}: use "
            f"{' or '.join(f'replay_correction={name!r}' for name in CORRECTIONS)}"
        )
    scope = settings.label("scope")
    if scope != "process" and scope in SCOPES:
        yield (
            f"replay_scope={scope!r} shares groups among processes, and the main process alone reads the queue: use "
            "replay_scope='auto'"
        )
