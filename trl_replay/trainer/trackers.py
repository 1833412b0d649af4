"""Replay's settings in the run configuration of experiment trackers, beside the trainer's own, and alarms as alerts.

transformers' callbacks write the trainer's arguments and the model's configuration there when training begins. What
they have set up is used, through each tracker's public interface, and nothing of the trainer is changed.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Settings: TypeAlias = Mapping[str, Any]
LONGEST_PARAMETER = 250
"""Characters of a value that every release of MLflow takes."""
TEXT_TAG = "replay/settings"
"""TensorBoard's place for the settings, beside transformers' own `args` and `model_config`."""


def write_settings(settings: Settings, callbacks: Sequence[Any]) -> None:
    """Write the settings to the trackers of these trainer callbacks, and warn of one that refuses. Call it on the
    main process, when they have begun their runs.

    Args:
        settings (`Mapping`): The settings in force, by name.
        callbacks (`Sequence`): The trainer's.
    """
    _tell(_WRITERS, settings, "Replay's settings are not in the run configuration of", callbacks)


def alert(alarms: Mapping[str, str], callbacks: Sequence[Any]) -> None:
    """Send alarms, texts by their names, to those trackers of these trainer callbacks that alert."""
    _tell(_ALERTS, alarms, "An alarm did not reach", callbacks)


def _tell(of_name: Mapping[str, Callable[[Any, Any], None]], what: Any, failed: str, callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        for name in {base.__name__ for base in type(callback).__mro__} & of_name.keys():
            try:
                of_name[name](callback, what)
            except Exception as error:  # a tracker may raise anything; training goes on without its note
                warnings.warn(f"{failed} {name}'s tracker: {type(error).__name__}: {error}", stacklevel=2)


def _to_wandb(callback: Any, settings: Settings) -> None:
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.config.update(dict(settings), allow_val_change=True)


def _to_trackio(callback: Any, settings: Settings) -> None:
    trackio = sys.modules.get("trackio")
    if trackio is not None:
        trackio.config.update(dict(settings), allow_val_change=True)


def _to_tensorboard(callback: Any, settings: Settings) -> None:
    if callback.tb_writer is not None:
        callback.tb_writer.add_text(TEXT_TAG, json.dumps(settings, indent=2))


def _to_mlflow(callback: Any, settings: Settings) -> None:
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.log_params({name: str(value)[:LONGEST_PARAMETER] for name, value in settings.items()})


_WRITERS: dict[str, Callable[[Any, Settings], None]] = {
    "WandbCallback": _to_wandb,
    "TrackioCallback": _to_trackio,
    "TensorBoardCallback": _to_tensorboard,
    "MLflowCallback": _to_mlflow,
}
"""By the name of transformers' callback."""


def _alert_by(find: Callable[[], Any]) -> Callable[[Any, Mapping[str, str]], None]:
    def alert(callback: Any, alarms: Mapping[str, str]) -> None:
        send = getattr(find(), "alert", None)  # no run, or a release that has none
        if send is not None:
            for name, text in alarms.items():
                send(title=f"replay: {name}", text=text)

    return alert


_ALERTS: dict[str, Callable[[Any, Mapping[str, str]], None]] = {
    "WandbCallback": _alert_by(lambda: getattr(sys.modules.get("wandb"), "run", None)),
    "TrackioCallback": _alert_by(lambda: sys.modules.get("trackio")),
}
"""By the name of transformers' callback: those of trackers that can alert."""
