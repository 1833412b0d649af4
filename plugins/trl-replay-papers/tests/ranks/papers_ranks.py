"""One rank of the launch of tests/test_presets.py: every preset in turn, results as JSON."""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
os.environ["OMP_NUM_THREADS"] = "1"

import contextlib
import gc
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)
REPOSITORY = Path(__file__).parents[4]
sys.path[:0] = [str(REPOSITORY / "tests" / folder) for folder in ("helpers", "distributed/ranks")]

from ending import end
from resuming import differences, everything, train


def identical(folder: Path, **settings: Any) -> dict[str, Any]:
    """In which respects a run that resumes from the second of four updates differs from the one that wrote it."""
    whole = everything(*train(folder, **settings))
    resumed = everything(*train(folder, resume=str(folder / "checkpoint-2"), **settings))
    return {
        "differences": differences(whole, resumed),
        "replaced": whole["totals"][1]["replaced"],
        "weights": whole["weights"],
    }


def main(folder: Path) -> None:
    gc.freeze()
    results = {}
    for name, settings in json.loads((folder / "runs.json").read_text()).items():
        with contextlib.redirect_stdout(io.StringIO()):
            results[name] = identical(folder / name, **settings)
    (folder / f"results-{os.environ['RANK']}.json").write_text(json.dumps(results))
    end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
