"""One rank of a launch: one prompt with several tasks, by scope and layout, resumed, and with environments."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from datasets import Dataset
from ending import end
from following import crossed, follow
from methods import INJECTED
from replaying import build as build_with
from scripted import Script, build, mixed
from support import Spy, weights_hash
from tools import tool_tokenizer

from trl_replay.testing import make_model

RANK = int(os.environ.get("RANK", 0))
LAYOUTS = {"whole": (8, 4), "straddling": (6, 4)}
SCOPES = ("gathered", "sharded")
ROWS = [{"prompt": "1=", "label": label} for label in "abcde"]
REPLAY = {**INJECTED, "replay_buffer_size": 12, "replay_seed": 3}


def shown(trainer: Any, session: Any, followed: Any) -> dict[str, Any]:
    """What a run showed on this rank."""
    table = session.buffer.table
    return {
        "pairs": len(followed.pairs),
        "crossed": crossed(followed),
        "tasks": table.prompt.tolist(),
        "labels": [followed.born[serial] for serial in table.serial.tolist()],
        "metric": session.metrics["replay/tasks"],
        "weights": weights_hash(trainer),
    }


def trained(folder: Path, scope: str, layout: str, resume: bool = False, born: Any = None) -> tuple[Any, Any]:
    """Eight updates, or the last four of them."""
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "rank": RANK}
    trainer = build(folder, *LAYOUTS[layout], mixed, **settings)
    trainer.train_dataset = Dataset.from_list(ROWS * 32)
    checkpoint = None
    if resume:
        trainer.reward_funcs[0].update = 3  # as if the script had been read so far
        checkpoint = str(folder / "checkpoint-4")
    session, followed = follow(trainer, checkpoint, born, replay_scope=scope, **REPLAY)
    return shown(trainer, session, followed), followed.born


class Riddle:
    """One riddle a group, wherever its rows lie."""

    resets = 0
    first = 0

    def reset(self, **columns: Any) -> str:
        self.secret = (Riddle.first + Riddle.resets % 6) // 4 + 3 * (Riddle.resets // 6 % 2)
        Riddle.resets += 1
        return f" {self.secret}"


def riddled(folder: Path) -> dict[str, Any]:
    """Environments of groups that straddle the ranks."""
    rows, size = LAYOUTS["straddling"]
    Riddle.first = RANK * rows
    tokenizer = tool_tokenizer()
    script = Script(mixed, rows, size, RANK)

    def rewards(completions: Any, **columns: Any) -> list[float]:
        script.update += 1
        return script([str(completion) for completion in completions])

    trainer = build_with(
        folder, rewards, (), tokenizer, make_model(tokenizer, max_position_embeddings=256), Spy, max_steps=8,
        per_device_train_batch_size=rows, num_generations=size,
        arguments={"environment_factory": Riddle, "train_dataset": None},
    )  # fmt: skip
    return shown(trainer, *follow(trainer, replay_scope="sharded", **REPLAY))


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scope in SCOPES:
            for layout in LAYOUTS:
                name = f"{scope} {layout}"
                found[name], born = trained(folder / name, scope, layout)
                found[f"{name} resumed"], _ = trained(folder / name, scope, layout, True, born)
        found["environments"] = riddled(folder / "environments")
    (folder / f"results.{RANK}.json").write_text(json.dumps(found))
    end()


if __name__ == "__main__":
    main()
