"""The drift canary: reads TRL's source, without importing it, and says in words what the seam could no longer rely on.

`make canary` points it at every release in range, a test at the installed one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from trl_replay import compat
from trl_replay.data.types import FIELDS

TRAINER = Path("trainer") / "grpo_trainer.py"
CALLBACKS = Path("trainer") / "callbacks.py"
CLASS = "GRPOTrainer"
PREPARE = "_prepare_inputs"
OUTER_LOSS = "compute_loss"
REQUIRED_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")
HELPERS = ("split_pixel_values_by_grid", "shuffle_sequence_dict", "split_tensor_dict", "unsplit_pixel_values_by_grid")
"""What TRL does with a scored batch, in this order; the id tensor and image fields have to survive it."""
CALLS = ((PREPARE, compat.SCORE, 1), (compat.SCORE, compat.REWARDS, 4), (OUTER_LOSS, compat.LOSS, 2))
"""The callers of the wrapped methods, and their numbers of arguments."""
INHERITED = frozenset({"accelerator", "callback_handler", "_get_output_dir", compat.LOAD})
"""What may come from `transformers.Trainer`: TRL overrides `LOAD` from 1.8 on."""
NEEDED = (compat.OLD_LOGPS, "advantages")
WRITTEN = (*NEEDED, compat.REF_LOGPS, compat.SAMPLING_LOGPS)
"""What the tap writes for the loss."""
Methods: TypeAlias = dict[str, ast.FunctionDef]


def installed() -> Path | None:
    """The folder of the TRL that `import trl` would take; None if there is none."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def drift(folder: Path) -> list[str]:
    """Lists what a TRL's source lacks of what the seam relies on; empty if nothing is missing.

    Args:
        folder (`Path`): The package's folder, the one that holds `trainer/grpo_trainer.py`.
    """
    path = folder / TRAINER
    if not path.exists():
        return [f"{TRAINER} does not exist"]
    trainer = _class(path, CLASS)
    if trainer is None:
        return [f"{TRAINER} has no class {CLASS}"]
    methods = {node.name: node for node in trainer.body if isinstance(node, ast.FunctionDef)}
    return [
        *_signatures(methods),
        *_callers(methods),
        *_loss_paths(methods),
        *_helpers(methods),
        *_order(methods),
        *_keys(methods),
        *_items(methods),
        *_attributes(trainer),
        *_reference_sync(folder),
    ]


def _class(path: Path, name: str) -> ast.ClassDef | None:
    """A class of a module; None if it has none of that name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return next((node for node in classes if node.name == name), None)


def _signatures(methods: Methods) -> Iterator[str]:
    for name, expected in compat.SEAM.items():
        if name in methods:
            yield from _signature(methods[name], expected)
        elif name not in INHERITED:
            yield f"{CLASS} has no method {name} any more"


def _signature(method: ast.FunctionDef, expected: tuple[str, ...]) -> Iterator[str]:
    arguments = method.args
    named = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
    parameters = tuple(named[1:])  # without self
    if not compat.accepts(parameters, arguments.vararg is not None, expected):
        yield f"{method.name} takes ({', '.join(parameters)}) where it took ({', '.join(expected)})"


def _callers(methods: Methods) -> Iterator[str]:
    """The callers of the wrapped methods, and their numbers of arguments."""
    for caller, name, count in CALLS:
        if caller not in methods:
            yield f"{CLASS} has no method {caller} any more, which called {name}"
            continue
        if name not in methods:
            continue
        calls = _calls(methods[caller], name)
        if not calls:
            yield f"{caller} does not call self.{name} any more"
        for call in calls:
            given = len(call.args) + len(call.keywords)
            if given != count:
                yield f"{caller} calls {name} with {given} arguments, not {count}"


def _loss_paths(methods: Methods) -> Iterator[str]:
    """Tells whether the outer loss calls any loss but those that are known, directly or through a redirection."""
    if OUTER_LOSS not in methods:
        return
    known = (compat.LOSS, compat.LIGER_LOSS)
    for call in _self_calls(methods[OUTER_LOSS]):
        reached = {_name_of_self(node) or "" for node in (call.func, *call.args)}
        for name in sorted(name for name in reached if "loss" in name and name not in known):
            yield f"{OUTER_LOSS} has a loss path of its own: {name}"


def _helpers(methods: Methods) -> Iterator[str]:
    """Tells whether a scored batch is shuffled and split as it was."""
    if PREPARE not in methods:
        return
    calls = [node.func for node in ast.walk(methods[PREPARE]) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    missing = [name for name in HELPERS if name not in called]
    if missing:
        yield f"{PREPARE} does not call {', '.join(missing)} any more: a scored batch is split some other way"


def _order(methods: Methods) -> Iterator[str]:
    """The loss itself computes log-probs, once, and reads all that the tap writes after it."""
    loss = methods.get(compat.LOSS)
    if loss is None or compat.LOGPS not in methods:
        return
    calls = [call.lineno for call in _calls(loss, compat.LOGPS)]
    if len(calls) != 1:
        yield f"{compat.LOSS} calls {compat.LOGPS} {len(calls)} times: the tap goes by the only call"
    for key in WRITTEN:
        reads = _reads(loss, key)
        if not reads and key in NEEDED:
            yield f"{compat.LOSS} does not read {key!r} any more: replayed rows would train without it"
        if calls and reads and min(reads) < min(calls):
            yield f"{compat.LOSS} reads {key!r} before it calls {compat.LOGPS}: the tap would write too late"


def _keys(methods: Methods) -> Iterator[str]:
    """The keys that the scoring step returns."""
    score = methods.get(compat.SCORE)
    if score is None:
        return
    keys = _returned_keys(score)
    known = {spec.name for spec in FIELDS}
    for key in REQUIRED_KEYS:
        if key not in keys:
            yield f"{compat.SCORE} does not return {key!r} any more"
    for key in keys:
        if key not in known:
            yield f"{compat.SCORE} returns a new key: {key!r}"
    if keys and keys[0] != REQUIRED_KEYS[0]:
        yield f"{compat.SCORE} returns {keys[0]!r} first, not {REQUIRED_KEYS[0]!r}"


def _returned_keys(function: ast.FunctionDef) -> list[str]:
    """The keys of the dictionary that a function returns by name, each once: those of `name = {"key": …}`, and then
    those of `name["key"] = …`."""
    nodes = [*ast.walk(function)]
    returned = {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Return) and node.value}
    literal, added = [], []
    for node in nodes:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) in returned:
                added.append(target.slice)
            elif isinstance(node.value, ast.Dict) and ast.unparse(target) in returned:
                literal += node.value.keys
    return list(dict.fromkeys(str(key.value) for key in [*literal, *added] if isinstance(key, ast.Constant)))


def _items(methods: Methods) -> Iterator[str]:
    """The tokens that `num_items_in_batch` counts: completion lengths before 1.9, the loss mask from then on."""
    score = methods.get(compat.SCORE)
    if score is None:
        return
    for node in ast.walk(score):
        if isinstance(node, ast.Assign) and "num_items_in_batch" in map(ast.unparse, node.targets):
            names = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
            if "loss_mask" not in names:
                yield f"num_items_in_batch counts something else: {ast.unparse(node.value)}"


def _attributes(trainer: ast.ClassDef) -> Iterator[str]:
    """Tells whether the trainer still has the attributes that are read."""
    mentioned = {node.attr for node in ast.walk(trainer) if isinstance(node, ast.Attribute)}
    for name, reason in compat.ATTRIBUTES.items():
        if name not in mentioned and name not in INHERITED:
            yield f"{CLASS} has no attribute {name!r} any more ({reason})"


def _reference_sync(folder: Path) -> Iterator[str]:
    """What syncs the reference model."""
    path = folder / CALLBACKS
    if not path.exists() or _class(path, compat.REFERENCE_SYNC) is None:
        yield f"{CALLBACKS} has no {compat.REFERENCE_SYNC} any more"


def _calls(function: ast.FunctionDef, name: str) -> list[ast.Call]:
    """Calls of `self.name` inside `function`."""
    return [call for call in _self_calls(function) if _name_of_self(call.func) == name]


def _self_calls(function: ast.FunctionDef) -> list[ast.Call]:
    """Calls of methods of `self` inside `function`."""
    return [node for node in ast.walk(function) if isinstance(node, ast.Call) and _name_of_self(node.func)]


def _name_of_self(node: ast.expr) -> str | None:
    """`x` of `self.x`; None for any other expression."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return None
    return node.attr if node.value.id == "self" else None


def _reads(function: ast.FunctionDef, key: str) -> list[int]:
    """Lines of `function` with `x["key"]` or `x.get("key", …)`."""
    lines = []
    for node in ast.walk(function):
        read: ast.expr | None = None
        if isinstance(node, ast.Subscript):
            read = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            read = next(iter(node.args), None)
        if isinstance(read, ast.Constant) and read.value == key:
            lines.append(node.lineno)
    return lines
