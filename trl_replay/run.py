"""`trl-replay run script.py`: runs a training script in this process, with replay attached to its trainers.

As a module, behind a launcher: `accelerate launch -m trl_replay.run --replay_preset sample_efficient train.py`.
Neither torch nor transformers is imported before the script does: what it sets for them first has its effect.
"""

from __future__ import annotations

import functools
import mmap
import os
import runpy
import sys
import types
import warnings
import weakref
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml

from .setup.config import ReplayConfig

NAME = "trl-replay run"
SUMMARY = "a training script in this process, with replay attached to its trainers"
EXAMPLE = "accelerate launch -m trl_replay.run train.py"
GROUPS = {
    "where to begin": "preset buffer_size reward pass_reward dry_run plugins",
    "what is stored": "scorer evictor max_bytes start retire_passes task_columns scope record",
    "what is replayed": "sampler selector mixer max_age max_uses max_fraction iterations",
    "how it is trained on": "correction max_weight advantages kl weight",
    "dead groups that nothing fills": "unfilled refill",
    "groups from files": "warm_start warm_start_short warm_start_rescore",
}
INSTEAD = (
    f"put what starts Python in front, as in {EXAMPLE}; for trl grpo: accelerate launch -m trl_replay.run "
    "-m trl.scripts.grpo"
)


def main(arguments: list[str]) -> None:
    """Run a script or a module as Python does, and end as it ends.

    Raises:
        SystemExit: A setting can't be used; or the script ended well, but no trainer of TRL's has trained.
    """
    config, options = _parse(arguments)
    sys.argv = [options.script, *options.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if options.module else os.path.dirname(os.path.realpath(options.script))
    attaching = Attaching(config)
    sys.meta_path.insert(0, attaching)
    try:
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            _run_file(os.path.abspath(options.script))
    except SystemExit as ended:
        if ended.code:
            raise
    attaching.judge(options.script)


class Attaching:
    """Waits for the import of transformers' trainer, and puts a `train` on it that attaches first.

    Args:
        config ([`ReplayConfig`]): The settings. A trainer that the script attaches to keeps its own.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.process = os.getpid()
        self.trained = mmap.mmap(-1, 2)  # in this process, in a forked one: memory that they share

    def find_spec(self, name: str, path: Any, *_: Any) -> Any:
        """Return the spec of transformers' trainer, whose module is wrapped once it is imported."""
        spec: Any = PathFinder.find_spec(name, path) if name == "transformers.trainer" else None
        if spec:
            execute = spec.loader.exec_module

            def execute_and_wrap(module: Any) -> None:
                execute(module)
                self.wrap(module.Trainer)

            spec.loader.exec_module = execute_and_wrap
        return spec

    def wrap(self, trainer_class: Any) -> None:
        """Whatever a subclass of TRL's trainer does to `train`, it comes to that of transformers'."""
        stock = trainer_class.train

        @functools.wraps(stock)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if any(base.__name__.endswith("GRPOTrainer") for base in type(trainer).__mro__):
                self.attach(trainer)
            return stock(trainer, *args, **kwargs)

        trainer_class.train = train

    def attach(self, trainer: Any) -> None:
        """Attach, unless the script did, or has detached since."""
        from .trainer.attachment import attach, is_attached

        if trainer in self.seen:
            return
        if is_attached(trainer):
            warnings.warn(f"The script attaches by itself: its settings hold, not those of {NAME}.", stacklevel=3)
        else:
            attach(trainer, self.config)
        self.seen.add(trainer)
        self.trained[os.getpid() != self.process] = 1

    def judge(self, script: str) -> None:
        """End with an error if no trainer has trained with replay, as far as this process can know."""
        here, forked = self.trained[:2]
        if forked > here:
            warnings.warn(f"{script} trained with replay in a forked process, which may have failed.", stacklevel=2)
        elif not here and os.getpid() == self.process:  # a fork that comes here is not the script
            sys.exit(
                f"{NAME}: {script} ended without replay: no GRPOTrainer of TRL's trained in this process. "
                f"If it starts other processes that train, {INSTEAD}"
            )


def _run_file(path: str) -> None:
    """As `runpy.run_path` does, which would change `sys.argv[0]`."""
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    module.__file__ = path
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(module))


def parser() -> Any:
    """The parser of settings, as TrlParser takes them, and of the script with what is its own."""
    from trl import TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> Any:
            if "required: script" in message or "Truthy" in message:
                message = f"{message.rstrip('.')}. Put -- before the script where a list or a bare flag precedes it"
            super().error(message)

    made = Parser(
        ReplayConfig,
        prog=NAME,
        usage=f"{NAME} [--replay_… VALUE]… [--config FILE] [-m] SCRIPT …",
        description=SUMMARY,
        allow_abbrev=False,
    )
    _group(made)
    made.add_argument("--config", metavar="FILE", help="YAML file with settings; flags override it")
    made.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    made.add_argument("script", help=f"behind a launcher: {EXAMPLE}")
    made.add_argument("arguments", nargs="...", help="the script's own").required = False
    return made


def _group(made: Any) -> None:
    """Show settings in groups, by what they are about."""
    actions = {action.dest: action for action in made._actions if action.dest.startswith("replay_")}
    for group in made._action_groups:
        group._group_actions = [action for action in group._group_actions if action.dest not in actions]
    for title, names in GROUPS.items():
        made.add_argument_group(title)._group_actions = [actions[f"replay_{name}"] for name in names.split()]


def _parse(given: list[str]) -> Any:
    """Settings from flags and `--config`, and what to run."""
    made, source, unknown = parser(), NAME, []
    try:
        if path := made.parse_known_args(given)[0].config:
            source += f" --config {path}"
            with open(path, "rb") as file:
                settings = yaml.safe_load(file)
            if not isinstance(settings, dict):
                raise ValueError(f"{path} has no settings: write lines such as 'replay_buffer_size: 64'")
            unknown = made.set_defaults_with_config(**settings)[::2]
        config, options, words = made.parse_args_into_dataclasses(given, True, look_for_args_file=False)
        names = [word.lstrip("-").split("=")[0] for word in unknown + words]
        config.with_settings(dict.fromkeys(names), source)
    except (RuntimeError, OSError, TypeError, ValueError, yaml.YAMLError) as error:
        made.error(str(error))
    if not (options.module or os.path.isfile(options.script)):
        made.error(f"there is no script {options.script!r}: write {NAME} train.py, and {INSTEAD}")
    return config, options


if __name__ == "__main__":
    main(sys.argv[1:])
