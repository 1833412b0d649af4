"""Memory of a session, measured in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forked import check, launch

SCRIPT = Path(__file__).parents[1] / "helpers" / "memory.py"


def measured(case: str, folder: Path) -> dict[str, Any]:
    check(launch(SCRIPT, case, folder, limit=120))
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_memory_is_given_back_after_detach(tmp_path: Path) -> None:
    found = measured("detaching", tmp_path)
    assert min(found["groups"]) > 0
    assert found["alive"] == [], "nothing of a detached session is held"
    sizes = found["sizes"]
    assert sizes[-1] - sizes[1] < 4 << 20, f"anonymous memory grew: {sizes}"
