"""Memory of a session, measured in processes of their own."""

import json
from pathlib import Path

from forked import check, launch

SCRIPT = Path(__file__).parents[1] / "helpers" / "memory.py"


def measured(case, folder):
    check(launch(SCRIPT, case, folder, limit=120))
    return json.loads((folder / "result.json").read_text())


def test_memory_is_given_back_after_detach(tmp_path):
    found = measured("detaching", tmp_path)
    assert min(found["groups"]) > 0
    assert found["alive"] == [], "nothing of a detached session is held"
    sizes = found["sizes"]
    assert sizes[-1] - sizes[1] < 4 << 20, f"anonymous memory grew: {sizes}"
