"""Damages the code on purpose, one change at a time, and lists what no test noticed: `make mutants`.

    python tests/mutants.py                          # the named ones, and a sample of the others
    python tests/mutants.py loss/tap.py --sample 0   # every change to one module
    python tests/mutants.py --named                  # only those that went unnoticed once
    python tests/mutants.py 'step/*.py' --alone --limit 900  # what any settings notice by themselves

Each change is made in a copy of the package that is imported in the place of this one. The test files that are named
after the module run first, then a broad one; the first failure ends them. What runs is forked from this process: so
torch and TRL are imported once.
"""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1"
)

import argparse
import ast
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trl_replay"
TESTS = ROOT / "tests"
MODULES = (
    "generation/*.py", "loss/*.py", "step/*.py", "distributed/*.py", "buffer/*.py", "batch/compose.py",
    "trainer/attachment.py", "trainer/seam.py", "session.py", "data/plan.py", "strategies/treatments.py",
)  # fmt: skip
"""What `make mutants` damages."""
BROAD = "trainer/test_any_settings.py"
"""What runs for every module, after the files that are named after it."""
ALSO = {
    "batch/compose.py": ("unit/test_groups_as_tensors.py", "unit/test_candidates.py"),
    "generation/prompts.py": ("trainer/test_generation_prompts.py", "distributed/test_generation_ranks.py"),
    "generation/rounds.py": ("trainer/test_generation_rounds.py", "trainer/test_dead_groups.py"),
    "strategies/policies.py": (
        "unit/test_evictors.py",
        "unit/test_samplers.py",
        "unit/test_scorers.py",
        "unit/test_mixers.py",
    ),
    "strategies/treatments.py": ("trainer/test_plan_hook.py",),
    "data/plan.py": ("trainer/test_plan_hook.py", "trainer/test_mixing.py"),
    "step/decisions.py": (
        "trainer/test_step_decisions.py",
        "trainer/test_silent_rows.py",
        "trainer/test_buffer_limits.py",
        "trainer/test_success.py",
        "trainer/test_replay_iterations.py",
        "trainer/test_mixing.py",
    ),
    "distributed/communicator.py": (
        "unit/test_groups_as_tensors.py",
        "distributed/test_mixing_ranks.py",
        "trainer/test_buffer_limits.py",
        "trainer/test_generation_rounds.py",
        "distributed/test_generation_ranks.py",
    ),
    "batch/groups.py": ("unit/test_group_view.py", "unit/test_candidates.py", "trainer/test_dead_groups.py"),
    "buffer/replay_buffer.py": (
        "unit/test_evictors.py",
        "trainer/test_buffer_limits.py",
        "trainer/test_step_decisions.py",
        "unit/test_replay_buffer.py",
        "unit/test_store.py",
        "unit/test_rate_limiter.py",
    ),
    "loss/supply.py": (
        "trainer/test_loss_bounds.py",
        "trainer/test_loss_tap.py",
        "trainer/test_replay_iterations.py",
        "trainer/test_fresh_metrics.py",
        "trainer/test_loss_corrections.py",
        "trainer/test_token_advantages.py",
    ),
    "session.py": ("trainer/test_session.py", "trainer/test_device_waits.py"),
    "step/step.py": ("trainer/test_session.py", "trainer/test_replay_iterations.py", "trainer/test_mixing.py"),
    "loss/tap.py": (
        "trainer/test_subclasses.py",
        "trainer/test_users_losses.py",
        "trainer/test_attachment.py",
        "trainer/test_loss_corrections.py",
        "trainer/test_replay_iterations.py",
    ),
    "extras/files/session_files.py": ("trainer/test_offline_rollouts.py",),
    "trainer/seam.py": ("trainer/test_attachment.py",),
}
"""Test files with other names."""


NOT_RUN = (4, 5, 70)
"""Pytest's status where it was called in a wrong way or found no test, and where it could not be imported."""


class Named(NamedTuple):
    """A change that no test noticed once. The old text must stand in the module exactly once."""

    name: str
    module: str
    old: str
    new: str


NAMED = (
    Named(
        "what a trainer made of rows from elsewhere is not compared with them", "extras/files/session_files.py",
        "        if as_many and all(", "        if as_many or all(",
    ),
    Named(
        "nothing retires entries when a batch settles", "buffer/replay_buffer.py",
        "self._store.forget(np.flatnonzero(np.logical_or.reduce([*spent.values()])))", "pass",
    ),
    Named(
        "trim forgets the capacity where bytes are too many", "buffer/replay_buffer.py",
        "if costs is not None and costs[leave].sum() < over:", "if costs is not None and over > 0:",
    ),
    Named(
        "the tap does not forget", "loss/tap.py",
        """what is recorded already stays.\"""
        self._candidates = {}""", """what is recorded already stays.\"""
        pass""",
    ),
    Named(
        "the class stays after the loss", "loss/tap.py",
        """        finally:
            object.__setattr__(trainer, "__class__", before)""", """        finally:
            pass""",
    ),
    Named(
        "an override that calls super() is taken for the loss", "loss/tap.py",
        "if LOGPS in names[base] and LOSS not in names[base]", "if True",
    ),
    Named(
        "the tap writes into the user's batch", "loss/tap.py",
        "            batch = dict(inputs)", "            batch = inputs",
    ),
    Named(
        "a loss that reads its advantages too early is not seen", "loss/tap.py",
        "lost += [ADVANTAGES] if gradient is None else []", "lost += []",
    ),
    Named(
        "rows of another order are taken for the batch's", "loss/tap.py",
        "and torch.equal(own[:, :width], given.completions[:, :width].to(own.device))", "and True",
    ),
    Named(
        "rows of an earlier generation batch are not refused", "loss/supply.py",
        "if min(numbers) < 0 or max(numbers) >= len(self.placed.lengths):", "if False:",
    ),
    Named(
        "nobody looks at what a correction gave", "session.py",
        "self.components.errors.check_due()", "pass",
    ),
    Named(
        "a resumed rate limiter has drawn nothing", "buffer/replay_buffer.py",
        '"inserted", "drawn", "seen"', '"inserted", "seen"',
    ),
    Named(
        "a tool's tokens count in sums of log-probs", "batch/compose.py",
        'MASKS = ("completion_mask", "tool_mask")', 'MASKS = ("completion_mask",)',
    ),
    Named(
        "masked rows count as tokens of the batch", "step/decisions.py",
        "np.where(plan.masked, 0, plan.column(", "np.where(plan.masked & False, 0, plan.column(",
    ),
    Named(
        "rows of two prompts share a baseline", "step/decisions.py",
        "!= mixed.groups.prompt[:, None]) & anew", "!= mixed.groups.prompt[:, None]) & False",
    ),
    Named(
        "rows of a mixed group keep their own advantages", "step/step.py",
        "changed = rows.of_here(plan.advantages != own)", "changed = rows.of_here(plan.advantages != own) & False",
    ),
    Named(
        "an owner sends rows that are not taken", "distributed/communicator.py",
        "if rows == list(range(", "if True or rows == list(range(",
    ),
    Named(
        "a slot that would be dead is filled all the same", "step/decisions.py",
        "np.flatnonzero(some & ~dead)", "np.flatnonzero(some)",
    ),
    Named(
        "masked rows stay in the loss's denominator", "step/step.py",
        "np.where(plan.masked & leaves_out, EXCLUDED, 0)", "np.where(plan.masked & False, EXCLUDED, 0)",
    ),
)  # fmt: skip


class Mutant(NamedTuple):
    """One change to one module."""

    module: str
    what: str
    source: str


# changes of the syntax tree

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
FUNCTIONS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
NO_CODE = ("annotation", "returns", "decorator_list", "bases")
"""Fields of the tree in which nothing is changed."""
NO_MATTER = ("strict", "stacklevel")
"""Arguments of calls that no test can notice, or needs to."""

Change = tuple[ast.AST, str, Callable[[], None]]
"""Where, what, and how to make it."""


def changes(node: ast.AST) -> Iterator[Change]:
    """Every change in the tree below a node, always in the same order."""
    yield from of_node(node)
    for name, value in ast.iter_fields(node):
        if name in NO_CODE:
            continue
        children = value if isinstance(value, list) else [value]
        for number, child in enumerate(children):
            if not isinstance(child, ast.AST) or ignored(child):
                continue
            yield from of_place(child, replacing(node, name, number if isinstance(value, list) else None))
            if not is_negative_number(child):  # which has lost its sign already
                yield from changes(child)


def ignored(node: ast.AST) -> bool:
    """Imports, texts, errors and what only type checkers see."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Raise | ast.Assert):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.keyword):
        return node.arg in NO_MATTER
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn")


def is_negative_number(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)


def replacing(parent: ast.AST, field: str, number: int | None) -> Callable[[ast.AST], None]:
    def replace(new: ast.AST) -> None:
        if number is None:
            setattr(parent, field, new)
        else:
            getattr(parent, field)[number] = new

    return replace


def of_node(node: ast.AST) -> Iterator[Change]:
    """Changes of a node's own fields."""
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            new = COMPARISONS[type(operator)]()
            yield node, f"{word(operator)} → {word(new)}", lambda n=number, o=new: node.ops.__setitem__(n, o)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        new_operator = OPERATORS[type(node.op)]()
        yield node, f"{word(node.op)} → {word(new_operator)}", lambda: setattr(node, "op", new_operator)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, f"{word(node.op)} → {word(other)}", lambda: setattr(node, "op", other)
    elif isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name) and called.id in FUNCTIONS:
            yield node, f"{called.id} → {FUNCTIONS[called.id]}", lambda: setattr(called, "id", FUNCTIONS[called.id])
        elif isinstance(called, ast.Attribute) and called.attr in FUNCTIONS:
            new_name = FUNCTIONS[called.attr]
            yield node, f"{called.attr} → {new_name}", lambda: setattr(called, "attr", new_name)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        test = node.test
        yield node, "condition negated", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), test))
    elif isinstance(node, ast.comprehension):
        for number, test in enumerate(node.ifs):
            negated = ast.UnaryOp(ast.Not(), test)
            yield test, "condition negated", lambda n=number, o=negated: node.ifs.__setitem__(n, o)


def of_place(node: ast.AST, replace: Callable[[ast.AST], None]) -> Iterator[Change]:
    """Changes that put something else in a node's place."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value: Any = (not node.value) if isinstance(node.value, bool) else node.value + 1
        if value == node.value:  # a large float
            return
        yield node, f"{node.value!r} → {value!r}", lambda: replace(ast.Constant(value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.USub):
        yield node, f"{word(node.op)} dropped", lambda: replace(node.operand)
    elif dropped(node):
        yield node, "statement dropped", lambda: replace(ast.Pass())


def dropped(node: ast.AST) -> bool:
    """Tells whether it is a statement without which the rest still runs."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign | ast.Continue | ast.Break)


def word(operator: ast.AST) -> str:
    return type(operator).__name__


# what to damage


def named_mutants() -> list[Mutant]:
    """Those of `NAMED`.

    Raises:
        SystemExit: The text of one is no longer there; names it.
    """
    found = []
    for name, module, old, new in NAMED:
        source = (PACKAGE / module).read_text()
        if source.count(old) != 1:
            raise SystemExit(f"{name}: {module} holds its text {source.count(old)} times, not once:\n{old}")
        found.append(Mutant(module, name, source.replace(old, new)))
    return found


def mutants_of(module: str) -> Iterator[Mutant]:
    """Every change to a module."""
    source = (PACKAGE / module).read_text()
    lines = source.splitlines()
    for number in range(len(list(changes(ast.parse(source))))):
        tree = ast.parse(source)
        node, what, change = list(changes(tree))[number]
        line = getattr(node, "lineno", 0)
        change()
        ast.fix_missing_locations(tree)
        yield Mutant(module, f"line {line}, {what}: {lines[line - 1].strip()}", ast.unparse(tree))


def modules(patterns: list[str]) -> list[str]:
    """The modules that the patterns stand for, in order."""
    found = [path for pattern in patterns for path in sorted(PACKAGE.glob(pattern))]
    if not found:
        raise SystemExit(f"no module is {' or '.join(patterns)}")
    return [path.relative_to(PACKAGE).as_posix() for path in found if path.name != "__init__.py"]


def stages(module: str) -> list[list[str]]:
    """Test files for a module: those without training that are named after it, those with, and the broad one."""
    path = Path(module)
    names = (f"test_{path.stem}.py", f"test_{path.parent.name}_{path.stem}.py")
    unit = [TESTS / "unit" / name for name in names]
    trained = [TESTS / "trainer" / name for name in names]
    for name in ALSO.get(module, ()):
        (unit if name.startswith("unit/") else trained).append(TESTS / name)
    found = [[str(path) for path in paths if path.exists()] for paths in (unit, trained)]
    return [files for files in (*found, [str(TESTS / BROAD)]) if files]


# running tests


def import_what_takes_long():
    """Before anything is forked; nothing of ours, which each fork imports from its own copy."""
    import datasets  # noqa: F401
    import pytest  # noqa: F401
    import torch
    from trl import GRPOTrainer, TrlParser  # noqa: F401

    torch.set_num_threads(1)
    assert "trl_replay" not in sys.modules


def start(folder: Path, files: list[str]) -> int:
    """The id of a new process that runs test files on the package in a folder, and ends with pytest's status."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    status = 70
    try:
        os.setpgrp()
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(ROOT)
        sys.path.insert(0, str(folder))
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=--import-mode=importlib"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # some plugins came with TRL
        status = int(pytest.main([*options, f"--basetemp={folder / 'tmp'}", *files]))
        sys.stdout.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def finished(process: int, seconds: float) -> int | None:
    """Its status; None if it was still running after so many seconds, and then it is ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def noticed(mutant: Mutant | None, files: list[list[str]], limit: float) -> bool:
    """Tells whether some test fails, or never ends, on a copy of the package with the change; None: without any.

    Raises:
        SystemExit: The tests could not be run.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        folder = Path(scratch)
        shutil.copytree(PACKAGE, folder / "trl_replay", ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            (folder / "trl_replay" / mutant.module).write_text(mutant.source)
        for stage in files:
            status = finished(start(folder, stage), limit)
            if status in NOT_RUN:
                raise SystemExit(f"pytest ended with {status}:\n{(folder / 'output.txt').read_text()[-3000:]}")
            if status != 0:
                if mutant is None:
                    raise SystemExit((folder / "output.txt").read_text()[-6000:])
                return True
    return False


def main() -> int:
    """Prints a line for each change that no test noticed; 0 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(MODULES), help="modules of trl_replay, or patterns")
    parser.add_argument("--named", action="store_true", help="only the changes that went unnoticed once")
    parser.add_argument("--sample", type=int, default=60, help="how many others are tried; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    parser.add_argument("--minutes", type=float, default=10, help="no further one is started after this time")
    parser.add_argument("--limit", type=float, default=180, help="seconds after which tests count as hanging")
    parser.add_argument("--alone", action="store_true", help=f"run {BROAD} and nothing else")
    parser.add_argument("--list", action="store_true", help="print what would be tried")
    options = parser.parse_args()
    began = time.monotonic()
    chosen = modules(options.modules)
    tried = [mutant for mutant in named_mutants() if options.named or mutant.module in chosen]
    if not options.named:
        others = [mutant for module in chosen for mutant in mutants_of(module)]
        random.Random(options.seed).shuffle(others)
        tried += others[: options.sample or None]
    if options.list:
        print(*(f"{mutant.module}: {mutant.what}" for mutant in tried), sep="\n")
        return 0
    import_what_takes_long()
    files = {mutant.module: stages(mutant.module)[-1:] if options.alone else stages(mutant.module) for mutant in tried}
    needed = sorted({file for module_stages in files.values() for stage in module_stages for file in stage})
    noticed(None, [needed], limit=10 * options.limit)  # without any change they must pass
    survivors, left = [], 0
    for number, mutant in enumerate(tried):
        if time.monotonic() - began > 60 * options.minutes:
            left = len(tried) - number
            break
        if not noticed(mutant, files[mutant.module], options.limit):
            survivors.append(mutant)
            print(f"SURVIVED {mutant.module}: {mutant.what}", flush=True)
    count = len(tried) - left
    print(f"{count - len(survivors)} of {count} changes were noticed, in {time.monotonic() - began:.0f} s", end="")
    print(f"; for {left} there was no time" if left else "")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
