"""Which of the package's files one batch passes, traced: those that the table of the step names, and not too many."""

import re
import sys
import tomllib
from pathlib import Path

from support import DEAD, HALF, LIVE, Rewards
from transformers import TrainerCallback

import trl_replay
from trl_replay.testing import make_trainer

ROOT = Path(__file__).parents[2]
PACKAGE = Path(trl_replay.__file__).parent


class Traced(TrainerCallback):
    """Notes the files of the functions called in the step after `update` updates."""

    def __init__(self, update):
        self.update = update
        self.files = set()

    def note(self, frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.files.add(path.relative_to(PACKAGE).as_posix())

    def on_step_begin(self, args, state, control, **kwargs):
        sys.setprofile(self.note if state.global_step == self.update else None)

    def on_step_end(self, args, state, control, **kwargs):
        sys.setprofile(None)


def test_a_batch_passes_the_files_of_the_table_and_no_more_than_allowed(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD]), max_steps=4)
    session = trl_replay.attach(trainer, replay_start=0)
    traced = Traced(2)
    trainer.add_callback(traced)
    trainer.train()
    assert session.totals.counters["replaced"] > 0
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| verb |")[2].partition("\n\n")[0]
    read = re.findall(r"^\d+\. `(\S+\.py)`", page, re.MULTILINE)
    assert 10 <= len(read) <= 14
    assert {name for name in read if not name.startswith("extras/files/")} <= traced.files
    assert all((PACKAGE / name).is_file() for name in read)
    named = set(re.findall(r"`(\w+/\w+\.py)`", table)) - {"generation/rounds.py", "strategies/treatments.py"}
    assert named
    assert named <= traced.files, "without dynamic sampling and plugins, a batch passes all of them"
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["trl_replay"]["ceilings"]
    assert len(traced.files) <= allowed["files_of_a_batch"]
