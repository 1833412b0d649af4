"""The settings of ReplayConfig as flags and from YAML, without importing TrlParser, which takes seconds."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from ..errors import ConfigurationError
from ..setup.config import ReplayConfig

HINTS = get_type_hints(ReplayConfig)
"""The types of all settings."""
BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""As TrlParser takes them."""


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and a flag for each setting, spelled with underscores or dashes."""
    parser.add_argument("--config", dest="file", type=Path, help="YAML file with settings; flags override it")
    group = parser.add_argument_group("settings")
    for field in fields(ReplayConfig):
        dashed = field.name.replace("_", "-")
        group.add_argument(
            f"--{field.name}",
            f"--{dashed}",
            dest=field.name,
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help=field.metadata["help"],
            **_values_taken(_kinds(HINTS[field.name])),
        )


def _values_taken(kinds: tuple[Any, ...]) -> Mapping[str, Any]:
    if list[str] in kinds:
        return {"nargs": "+"}
    if bool in kinds:
        return {"nargs": "?", "const": "true"}
    return {}


def given_settings(options: argparse.Namespace, source: str) -> dict[str, Any]:
    """Return the checked settings of the file and the flags; flags override.

    Args:
        options: What `add_settings` had parsed, with `unknown`: what no flag took.
        source (`str`): Is named if a setting does not exist.

    Raises:
        ConfigurationError: In the words of [`ReplayConfig`].
    """
    settings = _from_file(options.file) if options.file else {}
    for name, hint in HINTS.items():
        if hasattr(options, name):
            settings[name] = _typed(getattr(options, name), hint)
    for word in options.unknown:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            settings[name.replace("-", "_")] = None
    ReplayConfig().with_settings(settings, source)
    return settings


def _from_file(path: Path) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        raise ConfigurationError(f"--config {path} can't be used: there is no such file.")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigurationError(f"{path} has no settings: write lines such as 'replay_buffer_size: 64'.")
    unknown = {name: value for name, value in found.items() if name not in HINTS}
    others = [name for name in unknown if "replay" not in name and not difflib.get_close_matches(name, HINTS, n=1)]
    if others:
        raise ConfigurationError(
            f"{path} has settings that are not replay's: {', '.join(others)}. Give the script's own file after --, "
            "and replay's settings before it, in a file of their own or as flags."
        )
    if unknown:
        ReplayConfig().with_settings(unknown, str(path))  # raises, and says what there is
    return {name: _typed(value, HINTS[name]) for name, value in found.items()}


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the types that a setting may have."""
    kinds = get_args(hint)
    return kinds if NoneType in kinds else (hint,)


def _typed(value: Any, hint: Any) -> Any:
    """Convert text to the setting's type; text that can't be converted stays, and the setting's check rejects it."""
    if not isinstance(value, str):
        return value
    kinds = _kinds(hint)
    if value.lower() in ("none", "null") and NoneType in kinds:
        return None
    if value.lower() in BOOLS and bool in kinds:
        return BOOLS[value.lower()]
    for number in (int, float):
        if number in kinds:
            try:
                return number(value)
            except ValueError:
                continue
    return value
