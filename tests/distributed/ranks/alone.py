"""One of two ranks that run through the cases of test_ranks_alone.py; results as JSON in a folder.

In most cases one rank does something that the other does not.
"""

import contextlib
import gc
import os
import weakref
from unittest import mock

import torch
from one_rank import own
from scripted import build
from support import Act, Spy, plugin_class

import trl_replay
from trl_replay import compat
from trl_replay.extras.files.session_files import Rollouts

RANK = int(os.environ["RANK"])
BRIEF = 6
"""`ddp_timeout` of the cases in which one rank waits for the other in vain: these run beside each other. Not less,
since the machine may be busy: what both ranks take part in must be done in time."""
TIMEOUT = 40
"""Seconds that a collective waits: not less, since the machine may be busy. A rank that waits in one of the trainer's
ends when the other one leaves the case: with its process, its connections close."""
SCOPES = ("process", "gathered")
OWN_NUMBERS = (("scaling", "gathered"), ("rounding", "gathered"), ("scaling", "process"))
"""Plugins with numbers of each rank, and who shares a buffer; of the last two, nobody minds."""
TEACHER = [{"prompt": "1+1=", "completion": completion, "reward": float(completion == "2")} for completion in "2345"]


def often(update, group, rank):
    """On every rank something to store and something to fill, all the time."""
    return (group + update) % 2


ITERATIONS = {"num_iterations": 3, "max_steps": 6}


def lopsided(plan, context):
    """Edits the plan on one rank."""
    if RANK == 1 and context.update >= 2:
        plan.advantages[0, 0] += 0.5


trl_replay.register(plugin_class(plan=lopsided)(), "lopsided")
for name, share in {"scaling": 1e-3, "rounding": 1e-8}.items():  # of the advantages of all rows, on one rank
    shaped = plugin_class(advantages=lambda groups, by=1.0 + share * RANK: groups.advantages * by)
    trl_replay.register(shaped(), name)


class Odd(Spy):
    """A trainer whose second batch has a key that nobody knows, on one rank."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if RANK == 1 and len(self.scored) == 2:
            batch["found_by_a_tool"] = torch.zeros(len(inputs))
        return batch


class Case:
    """One run of six updates on both ranks.

    Args:
        folder: Where this rank's trainer writes.
        attach: Ranks that attach.
        settings: Of the trainer.
        replay: Of the session.
    """

    def __init__(self, folder, attach=(0, 1), settings=None, **replay):
        defaults = {"rank": RANK, "max_steps": 5, "ddp_timeout": TIMEOUT}
        settings = {**defaults, **(settings or {})}
        rows = settings.pop("rows", 8)
        live = settings.pop("live", often)
        self.trainer = build(folder, rows, 4, live, **settings)
        self.session = None
        if RANK in attach:
            self.session = trl_replay.attach(self.trainer, **{"replay_start": 0, "replay_buffer_size": 8, **replay})
        self.callbacks = []

    def at(self, update, act, ranks=(0,)):
        """On these ranks, `act` is called after an update."""
        if RANK in ranks:
            callback = Act({update: act})
            self.callbacks.append(callback)
            self.trainer.add_callback(callback)
        return self

    def train(self, resume=None):
        """Trains, and says how it went."""
        self.trainer.train(resume_from_checkpoint=resume)
        return {"returned": [callback.returned for callback in self.callbacks]}


def cases(launched):
    folder = own(launched)

    def case(attach=(0, 1), brief=False, settings=None, **replay):
        waits = {"ddp_timeout": BRIEF} if brief else {}
        return Case(folder, attach, {**waits, **(settings or {})}, **replay)

    yield "clear on one", lambda: clearing(case(replay_scope="gathered"))
    yield "detach on both", lambda: detaching(case(replay_scope="gathered"))
    yield "a plan edited on one", lambda: case(replay_scope="gathered", replay_plugins=["lopsided"]).train()
    for plugin, scope in OWN_NUMBERS:
        settings = {"replay_scope": scope, "replay_plugins": [plugin]}
        yield f"{plugin}, {scope}", lambda s=settings: case(**s).train()
    yield "attach on one", lambda: case(attach=(0,), brief=True).train()
    yield "off on one", lambda: case(use_replay=RANK == 0).train()
    yield "no buffer on one", lambda: case(replay_buffer_size=8 - 8 * RANK).train()
    yield "add on one", lambda: adding(case(brief=True, replay_scope="gathered"))
    yield (
        "add too many",
        lambda: adding_too_many(case(replay_scope="process", replay_buffer_size=1, replay_evictor="reservoir")),
    )
    yield "add other rows", lambda: adding(case(replay_scope="gathered"), ranks=(0, 1), differ=True)
    yield "add fails on one", lambda: failing(case())
    for iterations in ("same", "replay"):
        name = f"composing fails on one, {iterations}"
        yield name, lambda i=iterations: composing(case(settings=ITERATIONS, replay_iterations=i))
    yield (
        "training again after composing failed on one",
        lambda: training_again(case(settings=ITERATIONS, replay_scope="process")),
    )
    yield "a batch key on one", lambda: case(settings={"trainer_class": Odd}).train()
    yield "save on one", lambda: saving(case(brief=True))
    yield "save on both", lambda: saving(case(), ranks=(0, 1))
    yield "resume from a checkpoint on one", lambda: continuing(case(brief=True), folder)
    yield "export on one", lambda: exporting(case(replay_scope="gathered"), folder)
    for scope in ("stock", *SCOPES):
        settings = {"attach": ()} if scope == "stock" else {"replay_scope": scope}
        yield f"outlived, {scope}", lambda s=settings: outlived([case(**s)])


def clearing(case):
    return case.at(3, case.session.buffer.clear).train()


def detaching(case):
    return case.at(3, lambda: trl_replay.detach(case.trainer), (0, 1)).train()


def adding(case, ranks=(0,), differ=False):
    rows = TEACHER
    if differ and RANK == 1:
        rows = [*TEACHER, *({**row, "prompt": "3-1="} for row in TEACHER)]
    return case.at(2, lambda: case.session.add(rows), ranks).train()


def adding_too_many(case):
    """Each buffer keeps another group of a file. `forwards` is the number of those that compute log-probs."""
    forwards = []
    rows = [{**row, "prompt": f"{number}-1="} for number in range(6) for row in TEACHER]

    def add():
        with mock.patch.object(compat, "forward_logps", side_effect=compat.forward_logps) as computed:
            case.session.add(rows)
        forwards.append(computed.call_count)
        return case.session.buffer.table.row_logp.ravel().tolist()

    result = case.at(2, add, (0, 1)).train()
    return {**result, "forwards": forwards[0]}


def failing(case):
    """What is done with a file's rows once the trainer has scored them fails on one rank."""

    def check(rollouts, batch):
        if RANK == 1:
            raise torch.OutOfMemoryError("no memory on this rank")

    with mock.patch.object(Rollouts, "check", check):
        return adding(case, ranks=(0, 1))


def composing(case):
    """A batch can't be composed on one rank."""
    stock = case.session.step.tap.expect

    def expect(*args):
        if RANK == 1 and case.session.update == 3:
            raise torch.OutOfMemoryError("no memory on this rank")
        return stock(*args)

    case.session.step.tap.expect = expect
    return case.train()


def training_again(case):
    stock = case.session.step.tap.expect
    with contextlib.suppress(torch.OutOfMemoryError, trl_replay.SeamError):
        composing(case)
    case.session.step.tap.expect = stock
    return case.train()


def saving(case, ranks=(0,)):
    def save():
        case.trainer.control.should_save = True

    return case.at(3, save, ranks).train()


def continuing(case, folder):
    """From what the case "save on both" left."""
    return case.train(str(folder / "checkpoint-3") if RANK == 0 else None)


def exporting(case, folder):
    return case.at(3, lambda: str(case.session.export(folder / "out.parquet").name)).train()


def outlived(cases):
    """Lists what is still alive when the trainer is gone and only the session is left."""
    case = cases.pop()
    result = case.train()
    if case.session is not None:
        trl_replay.detach(case.trainer)
    session, trainer = case.session, case.trainer
    kept = {"model": trainer.model, "optimizer": trainer.optimizer, "accelerator": trainer.accelerator}
    references = {name: weakref.ref(value) for name, value in kept.items()}
    del case, trainer, kept
    gc.collect()
    alive = [name for name, reference in references.items() if reference() is not None]
    return {**result, "alive": alive, "left": 0 if session is None else len(session.buffer.held())}
