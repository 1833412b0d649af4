"""Set-up for all tests: one torch thread and no network.

Nothing heavy is imported here: most of tests/unit needs neither torch nor TRL.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.metadata
import json
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
gc.disable()  # until everything is imported: importing leaves little garbage, and looking for it takes seconds
atexit.register(gc.freeze)  # nor is any looked for when the process ends


def keep_metadata():
    """Reads the metadata of each installed distribution once: a trainer asks for that of all of them, several times.

    Only of what is installed: tests that put distributions elsewhere change them.
    """
    installed, read = sysconfig.get_path("purelib"), importlib.metadata.PathDistribution.read_text
    kept = functools.cache(lambda path, filename: read(importlib.metadata.PathDistribution(path), filename))

    def read_text(self: Any, filename: str) -> str | None:
        return kept(self._path, filename) if str(self._path.parent) == installed else read(self, filename)

    importlib.metadata.PathDistribution.read_text = read_text
    importlib.metadata.email.message_from_string = functools.cache(importlib.metadata.email.message_from_string)


def keep_entry_points():
    """Goes through the entry points of what is installed only where that has changed: each session looks for new ones,
    and each plugin that a test registers, among those of all distributions."""
    kept = functools.cache(lambda changed, group: importlib.metadata.entry_points(group=group))

    def entry_points(group: str) -> Any:
        folders = [folder for folder in sys.path if os.path.isdir(folder or ".")]
        return kept(tuple((folder, os.stat(folder or ".").st_mtime_ns) for folder in folders), group)

    sys.modules["trl_replay.registry"].entry_points = entry_points


def keep_hooks():
    """Looks at each hook specification once: every session has seven managers of hooks that read all of them."""
    manager = sys.modules["pluggy"].PluginManager
    specifications = sys.modules["trl_replay.hookspecs"]
    plain = manager(specifications.PROJECT)
    of_specification, of_plugin = manager.parse_hookspec_opts, manager.parse_hookimpl_opts
    kept = functools.cache(functools.partial(of_specification, plain))

    def parse_hookspec_opts(self: Any, owner: Any, name: str) -> Any:
        ours = owner is specifications.RegistryHooks or owner is specifications.SessionHooks
        return kept(owner, name) if ours else of_specification(self, owner, name)

    def parse_hookimpl_opts(self: Any, plugin: Any, name: str) -> Any:
        return None if name.startswith("__") else of_plugin(self, plugin, name)  # no hook has such a name

    manager.parse_hookspec_opts, manager.parse_hookimpl_opts = parse_hookspec_opts, parse_hookimpl_opts


def forget_stacks():
    """Every trainer seeds accelerators that are not there: torch keeps that for later, with the stack it came from."""
    for name in ("torch.cuda", "torch.mtia", "torch.xpu"):
        if hasattr(sys.modules.get(name), "_queued_calls"):
            sys.modules[name].traceback = types.SimpleNamespace(**{**vars(traceback), "format_stack": list})


GENERATES = "TRL_REPLAY_TESTS_GENERATE"
"""In the environment, which ranks inherit, while a test is marked `generates`."""
SAMPLED = ("input_ids", "attention_mask", "generation_config", "disable_compile")
"""What TRL hands to a model that shall generate text."""


def sample_at_random():
    """Has the tiny random model complete prompts by any token, much as it samples them, but without its layers, which
    are a fifth of a test's training. Tests that look at generation, or learn by it, are marked `generates`."""
    torch, model = sys.modules["torch"], sys.modules["transformers"].Qwen2ForCausalLM
    real = model.generate

    def generate(self, *given, **named):
        is_tiny = self.config.vocab_size < 100 and self.config.num_hidden_layers <= 2
        if GENERATES in os.environ or given or not is_tiny or not named.keys() <= set(SAMPLED):
            return real(self, *given, **named)
        prompts, config = named["input_ids"], named["generation_config"]
        shape = len(prompts), config.max_new_tokens
        drawn = torch.randint(1, self.config.vocab_size, shape, device=prompts.device)
        is_end = torch.isin(drawn, torch.tensor(config.eos_token_id, device=prompts.device))
        is_after = is_end.cumsum(dim=1) > is_end.long()
        drawn = drawn.masked_fill(is_after, config.pad_token_id)
        return torch.cat([prompts, drawn[:, : int((~is_after).sum(dim=1).max())]], dim=1)

    model.generate = generate


@pytest.fixture(autouse=True)
def _generation(request: pytest.FixtureRequest) -> Iterator[None]:
    is_others = request.path.parent.name.startswith("with_")  # vLLM and Unsloth have generation of their own
    if is_others or request.node.get_closest_marker("generates"):
        os.environ[GENERATES] = "1"
    yield
    os.environ.pop(GENERATES, None)


def pytest_collection_finish():
    """Every test module is imported by now, and with them torch and TRL, where any test needs them."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
        forget_stacks()
    if "accelerate" in sys.modules:  # each trainer asks a dozen times, and reads the packages' metadata for it
        imports = sys.modules["accelerate.utils.imports"]
        imports._is_package_available = functools.cache(imports._is_package_available)
        sys.modules["accelerate.utils.memory"].gc = types.SimpleNamespace(collect=int)  # at each training's end
    if "transformers" in sys.modules:
        sample_at_random()
    keep_metadata()
    if "trl_replay.registry" in sys.modules:
        keep_entry_points()
        keep_hooks()
    gc.enable()
    gc.collect()
    gc.freeze()  # a trainer collects garbage when training ends: what the imports left need not be walked each time
    if "forked" in sys.modules:
        sys.modules["forked"].prepare()


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `trl-replay WORD…`; returns what it printed, or its error where it `fails`."""
    from trl_replay.cli.commands import main

    def said(*words: Any, fails: bool = False) -> str:
        capsys.readouterr()
        assert (main([str(word) for word in words]) != 0) == fails
        return capsys.readouterr()[fails]

    return said


@pytest.fixture
def all_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has every metric, as `session.metrics` does; of its own accord it has ten."""
    from trl_replay import reporting

    monkeypatch.setattr(reporting, "is_logged", lambda *given: True)
    monkeypatch.setattr(reporting, "drop_zeros", lambda averaged: None)


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of a trainer's log: `count` steps with these values, after those of `entries`."""

    def write(values: dict[str, Any], count: int = 1, entries: Sequence[Any] = (), name: str = "log.json") -> Path:
        log = [*entries, *({"step": step, **values} for step in range(len(entries) + 1, len(entries) + count + 1))]
        (tmp_path / name).write_text(json.dumps(log))
        return tmp_path / name

    return write


@pytest.fixture
def plug() -> Iterator[Callable[..., str]]:
    """Registers plugins until the test ends; returns the name of each."""
    import trl_replay

    names: list[str] = []

    def register(plugin: Any, name: str = "") -> str:
        names.append(name or f"plugin{len(names)}")
        trl_replay.register(plugin, names[-1])
        return names[-1]

    yield register
    for name in names:
        trl_replay.unregister(name)
