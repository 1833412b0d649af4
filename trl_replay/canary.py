"""The drift canary: reads TRL's source, without importing it, and says in words what the seam could no longer rely on.

`trl-replay check` runs it on the installed TRL. Point `drift` at any other: a checkout's `trl` folder or an unpacked
wheel's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from . import compat
from .fields import FIELDS

TRAINER = Path("trainer") / "grpo_trainer.py"
CALLBACKS = Path("trainer") / "callbacks.py"
CLASS = "GRPOTrainer"
PREPARE = "_prepare_inputs"
OUTER_LOSS = "compute_loss"
REQUIRED_KEYS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "advantages",
    "num_items_in_batch",
)
HELPERS = (
    "split_pixel_values_by_grid",
    "shuffle_sequence_dict",
    "split_tensor_dict",
    "unsplit_pixel_values_by_grid",
)
"""What TRL does with a scored batch, in this order; the id tensor and image fields have to survive it."""


def installed() -> Path | None:
    """The folder of the TRL that `import trl` would take; None if there is none."""
    spec = find_spec("trl")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def drift(folder: Path) -> list[str]:
    """What a TRL's source lacks of what the seam relies on, a sentence each; empty if nothing is missing.

    Args:
        folder (`Path`): The package's folder, the one that holds `trainer/grpo_trainer.py`.
    """
    path = folder / TRAINER
    if not path.exists():
        return [f"{TRAINER} does not exist"]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    trainer = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == CLASS),
        None,
    )
    if trainer is None:
        return [f"{TRAINER} has no class {CLASS}"]
    methods = {node.name: node for node in trainer.body if isinstance(node, ast.FunctionDef)}
    found = [
        *_signatures(methods),
        *_callers(methods),
        *_order(methods),
        *_keys(methods),
        *_items(methods),
    ]
    assigned = {node.attr for node in ast.walk(trainer) if isinstance(node, ast.Attribute)}
    found += [
        f"{CLASS} has no attribute {name!r} any more ({reason})"
        for name, reason in compat.ATTRIBUTES.items()
        if name not in assigned and name not in compat.INHERITED
    ]
    return found + _reference_sync(folder)


def _signatures(methods: dict[str, ast.FunctionDef]) -> Iterator[str]:
    for name, expected in compat.SEAM.items():
        if name not in methods:
            if name not in compat.INHERITED:
                yield f"{CLASS} has no method {name} any more"
            continue
        arguments = methods[name].args
        named = tuple(argument.arg for argument in [*arguments.posonlyargs, *arguments.args])[1:]
        if not compat.accepts(named, arguments.vararg is not None, expected):
            yield f"{name} takes ({', '.join(named)}) where it took ({', '.join(expected)})"


def _callers(methods: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Who calls the wrapped methods, and with how many arguments."""
    for caller, name, count in (
        (PREPARE, compat.SCORE, 1),
        (compat.SCORE, compat.REWARDS, 4),
        (OUTER_LOSS, compat.LOSS, 2),
    ):
        if caller not in methods or name not in methods:
            if caller not in methods:
                yield f"{CLASS} has no method {caller} any more, which called {name}"
            continue
        calls = _calls(methods[caller], name)
        if not calls:
            yield f"{caller} does not call self.{name} any more"
        for call in calls:
            if len(call.args) + len(call.keywords) != count:
                yield f"{caller} calls {name} with {len(call.args) + len(call.keywords)} arguments, not {count}"
    if OUTER_LOSS in methods:
        for call in _self_calls(methods[OUTER_LOSS]):
            paths = {name for name in _loss_paths(call) if name not in (compat.LOSS, compat.OTHER_LOSS)}
            for name in sorted(paths):
                yield f"{OUTER_LOSS} has a loss path of its own: {name}"
    if PREPARE in methods:
        order = [name for name in _names_called(methods[PREPARE]) if name in HELPERS]
        if [name for name in HELPERS if name in order] != list(HELPERS):
            missing = ", ".join(name for name in HELPERS if name not in order)
            yield f"{PREPARE} does not call {missing} any more: a scored batch is split some other way"


def _order(methods: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """The loss computes log-probs before it reads the old ones."""
    loss = methods.get(compat.LOSS)
    if loss is None or compat.LOGPS not in methods:
        return
    calls = [call.lineno for call in _calls(loss, compat.LOGPS)]
    reads = [node.lineno for node in ast.walk(loss) if isinstance(node, ast.expr) and _reads(node, compat.OLD_LOGPS)]
    if not calls:
        yield f"{compat.LOSS} does not call {compat.LOGPS} any more: the tap would see nothing"
    if not reads:
        yield f"{compat.LOSS} does not read {compat.OLD_LOGPS!r} any more: replayed rows would train with a ratio of 1"
    if calls and reads and min(reads) < min(calls):
        yield f"{compat.LOSS} reads {compat.OLD_LOGPS!r} before it calls {compat.LOGPS}: the tap would write too late"


def _keys(methods: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Which keys the scoring step returns."""
    score = methods.get(compat.SCORE)
    if score is None:
        return
    values = [node.value for node in ast.walk(score) if isinstance(node, ast.Return)]
    returned = {value.id for value in values if isinstance(value, ast.Name)}
    keys: list[str] = []
    for node in ast.walk(score):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            name = target.value if isinstance(target, ast.Subscript) else target
            if not isinstance(name, ast.Name) or name.id not in returned:
                continue
            if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                keys.append(str(target.slice.value))
            elif isinstance(node.value, ast.Dict):
                keys = [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)] + keys
    known = {spec.name for spec in FIELDS}
    for key in REQUIRED_KEYS:
        if key not in keys:
            yield f"{compat.SCORE} does not return {key!r} any more"
    for key in dict.fromkeys(keys):
        if key not in known:
            yield f"{compat.SCORE} returns a new key: {key!r}"
    if keys and keys[0] != REQUIRED_KEYS[0]:
        yield f"{compat.SCORE} returns {keys[0]!r} first, not {REQUIRED_KEYS[0]!r}"


def _items(methods: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """What `num_items_in_batch` counts: completion lengths before 1.9, the loss mask from then on."""
    score = methods.get(compat.SCORE)
    for node in ast.walk(score) if score is not None else ():
        if not isinstance(node, ast.Assign) or "num_items_in_batch" not in map(ast.unparse, node.targets):
            continue
        if "loss_mask" not in {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}:
            yield f"num_items_in_batch counts something else: {ast.unparse(node.value)}"


def _reference_sync(folder: Path) -> list[str]:
    """When the reference model is synced."""
    path = folder / CALLBACKS
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    found = next((node for node in classes if node.name == compat.REFERENCE_SYNC), None)
    if found is None:
        return [f"{CALLBACKS} has no {compat.REFERENCE_SYNC} any more"]
    test = "state.global_step % args.ref_model_sync_steps == 0"
    if test not in ast.unparse(found):
        return [f"{compat.REFERENCE_SYNC} does not sync when {test} any more"]
    return []


def _calls(function: ast.FunctionDef, name: str) -> list[ast.Call]:
    """Calls of `self.name` inside `function`."""
    return [call for call in _self_calls(function) if isinstance(call.func, ast.Attribute) and call.func.attr == name]


def _self_calls(function: ast.FunctionDef) -> list[ast.Call]:
    """Calls of methods of `self` inside `function`."""
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
    ]


def _loss_paths(call: ast.Call) -> set[str]:
    """Methods of `self` with "loss" in their names that a call reaches, directly or through a redirection."""
    reached = [call.func, *call.args]
    names = {node.attr for node in reached if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    return {name for name in names if "loss" in name}


def _names_called(function: ast.FunctionDef) -> list[str]:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [called.id for called in calls if isinstance(called, ast.Name)]


def _reads(node: ast.expr, key: str) -> bool:
    """Whether `node` is `x["key"]` or `x.get("key", …)`."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == key
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value == key
    )
