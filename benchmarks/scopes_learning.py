"""Does a buffer across two processes learn like one process with the same global batch?

    python benchmarks/scopes_learning.py                     # about 25 minutes on two cores
    python benchmarks/scopes_learning.py --steps 60 --seeds 0,1 --out out/quick     # shows that it runs

Runs examples/combination_lock.py: the combination lock with one process, and on two with each scope. An update has
64 completions and 64 groups are kept over all processes everywhere. A seed is a lock of its own (codes, model, data
order and completions), so arms are compared seed by seed. The final reward is the mean of the last 100 steps' rewards.
Records go to replay.jsonl in --out, results to scopes_learning.json; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLE = Path(__file__).parents[1] / "examples" / "combination_lock.py"
ARMS = {
    "one process": (1, "gathered"),
    "process": (2, "process"),
    "gathered": (2, "gathered"),
    "sharded": (2, "sharded"),
}
LAST = 100
CURVE = 50  # steps in a point of the curve


def run(processes: int, scope: str, seeds: list[int], steps: int, out: Path) -> None:
    """One launch that appends each seed's record to replay.jsonl in `out`."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    )
    command = [sys.executable, *launcher, str(EXAMPLE), "--arm", "replay", "--scope", scope, "--steps", str(steps)]
    subprocess.run([*command, "--seeds", *map(str, seeds), "--out", str(out)], check=True)


def records(path: Path, steps: int) -> dict[tuple[int, str, int], dict[str, Any]]:
    """Runs of this length by (processes, scope, seed)."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(line["processes"], line["scope"], line["seed"]): line for line in lines if len(line["reward"]) == steps}


def summarize(runs: dict[tuple[int, str, int], dict[str, Any]], seeds: list[int]) -> dict[str, Any]:
    """Per arm the final rewards, and the paired difference to one process with its standard error."""
    last = {arm: [float(np.mean(runs[(*key, seed)]["reward"][-LAST:])) for seed in seeds] for arm, key in ARMS.items()}
    summary = {}
    for arm, key in ARMS.items():
        differences = np.subtract(last[arm], last["one process"])
        rewards = np.mean([runs[(*key, seed)]["reward"] for seed in seeds], axis=0)
        summary[arm] = {
            "final": last[arm],
            "mean": float(np.mean(last[arm])),
            "difference": float(differences.mean()),
            "standard_error": float(differences.std(ddof=1) / np.sqrt(len(seeds))) if len(seeds) > 1 else None,
            "curve": [round(float(rewards[at : at + CURVE].mean()), 4) for at in range(0, len(rewards), CURVE)],
            "dead_after": float(np.mean([np.mean(runs[(*key, seed)]["dead_after"]) for seed in seeds])),
            "seconds": float(np.mean([runs[(*key, seed)]["seconds"] for seed in seeds])),
        }
    return summary


def main() -> int:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/scopes_learning"))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    options = parser.parse_args()
    seeds = list(map(int, options.seeds.split(",")))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "replay.jsonl"
    for processes, scope in ARMS.values():
        missing = [seed for seed in seeds if (processes, scope, seed) not in records(path, options.steps)]
        if missing:
            run(processes, scope, missing, options.steps, options.out)
    summary = summarize(records(path, options.steps), seeds)
    print(
        f"\nfinal reward (last {LAST} of {options.steps} steps), {len(seeds)} seeds; difference to one process, paired"
    )
    for arm, values in summary.items():
        error = values["standard_error"]
        spread = f" ± {error:.3f}" if error is not None else ""
        print(f"{arm:12} {values['mean']:.3f}   {values['difference']:+.3f}{spread}   curve {values['curve']}")
    result = {"steps": options.steps, "seeds": seeds, "last": LAST, "arms": summary}
    (options.out / "scopes_learning.json").write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
