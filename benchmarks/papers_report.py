"""Tables of benchmarks/papers.py for reports/papers.md, and the line of each card that says what was measured.

python benchmarks/papers_report.py            # prints the tables of benchmarks/results/papers.json
python benchmarks/papers_report.py --write    # puts them into benchmarks/reports/papers.md and the cards
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "papers.json"
EVIDENCE = ROOT / "benchmarks" / "reports" / "papers.md"
CARDS = {
    "trl-replay-papers": ROOT / "plugins" / "trl-replay-papers" / "src" / "trl_replay_papers",
    "trl-replay-curricula": ROOT / "plugins" / "trl-replay-curricula" / "src" / "trl_replay_curricula" / "cards",
}
TASKS = ("lock", "vault", "addition", "grades")
KEPT = ("task", "arm", "learning_rate", "seed", "budget", "training", "final_reward", "reached", "accuracy")
"""Of a run's record, what tables need."""
MEASURED = ("replay/age_mean", "replay/drift_mean")

Run = dict[str, Any]


def compact(run: Run) -> Run:
    """A run's record with what tables need."""
    kept = {name: run[name] for name in KEPT if name in run}
    return {**kept, "replay": {name: run["replay"][name] for name in MEASURED if name in run["replay"]}}


def score(run: Run) -> float:
    """The figure that compares runs: greedy accuracy on addition, else the mean reward of the last completions."""
    return float(run["accuracy"] if run["task"] == "addition" else run["final_reward"])


def cell(runs: Sequence[Run]) -> str:
    """Median and range of the seeds."""
    scores = [score(run) for run in runs]
    if not scores:
        return ""
    if len(scores) == 1:
        return f"{scores[0]:.2f}"
    return f"{np.median(scores):.2f} ({min(scores):.2f}–{max(scores):.2f})"


def to_quarter(runs: Sequence[Run]) -> str:
    """Completions until the lock's reward was 0.25, and how many seeds got there; a run that did not counts whole."""
    there = sum(run["reached"] is not None for run in runs)
    median = np.median([run["reached"] or run["budget"] for run in runs])
    return f"{median:,.0f} ({there} of {len(runs)})"


def arms_of(runs: Sequence[Run]) -> list[str]:
    """In the order in which they were run."""
    return list(dict.fromkeys(run["arm"] for run in runs))


def arms_table(runs: Sequence[Run]) -> list[str]:
    """One row an arm, one column a task."""
    lines = [
        "| | rates: lock, addition, grades | lock: completions to 0.25 | lock | vault | addition: accuracy | grades |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in arms_of(runs):
        of = {task: [run for run in runs if run["arm"] == arm and run["task"] == task] for task in TASKS}
        rates = [f"{of[task][0]['learning_rate']:.0e}" for task in ("lock", "addition", "grades") if of[task]]
        quarter = to_quarter(of["lock"]) if of["lock"] else ""
        cells = [arm, ", ".join(rates), quarter, *(cell(of[task]) for task in TASKS)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def age_table(runs: Sequence[Run]) -> list[str]:
    """One row a task, number of iterations and rate, one column an age."""
    ages = arms_of(runs)
    names = [age.replace("max_age=", "").replace("None", "any") for age in ages]
    head = [f"age ≤ {name}" if name != "any" else "any age" for name in names]
    lines = [
        f"| task | iterations | rate | {' | '.join(head)} | mean age | drift, mean |",
        f"|{'---|' * (len(ages) + 5)}",
    ]
    rows = dict.fromkeys((run["task"], run["training"].get("num_iterations", 1), run["learning_rate"]) for run in runs)
    for task, iterations, rate in rows:
        cells = [task, str(iterations), f"{rate:.0e}"]
        row = {}
        for run in runs:
            same = (run["task"], run["training"].get("num_iterations", 1), run["learning_rate"])
            if same == (task, iterations, rate):
                row[run["arm"]] = run
        cells += [f"{score(row[age]):.2f}" if age in row else "" for age in ages]
        whole = row.get("max_age=None", {}).get("replay", {})
        cells += [f"{whole[name]:.2f}" if name in whole else "" for name in MEASURED]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def tables(results: dict[str, Any]) -> dict[str, list[str]]:
    """By question, Markdown."""
    made = {}
    for question, runs in results["answers"].items():
        made[question] = age_table(runs) if question == "age" else arms_table(runs)
    return made


def measured(results: dict[str, Any], name: str) -> str:
    """A method card's sentence on what was measured."""
    runs = [run for question in ("methods", "presets") for run in results["answers"].get(question, [])]
    stock = [run for run in runs if run["arm"] == "stock"]
    own = [run for run in runs if run["arm"] == name]
    if not own:
        return "Not measured."
    parts = []
    for task in TASKS:
        of = [[score(run) for run in group if run["task"] == task] for group in (own, stock)]
        if all(of):
            what = "accuracy" if task == "addition" else "final reward"
            parts.append(f"{task}: {what} {np.median(of[0]):.2f}, stock {np.median(of[1]):.2f}")
    chosen = "its own best rate" if name in results["chosen"] else "the rate of the defaults"
    seeds = len({run["seed"] for run in own})
    return f"{'; '.join(parts).capitalize()} (medians of {seeds} seeds at {chosen}, `benchmarks/papers.py`)."


def summarize(answers: dict[str, list[Run]], chosen: dict[str, dict[str, float]], out: Path, quick: bool) -> None:
    """Writes papers.json into `out` and prints the tables."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    compacted = {question: [compact(run) for run in runs] for question, runs in answers.items()}
    results = {"quick": quick, "commit": commit.stdout.strip(), "chosen": chosen, "answers": compacted}
    (out / "papers.json").write_text(json.dumps(results, indent=1) + "\n")
    show(results)


def show(results: dict[str, Any]) -> None:
    """Prints the tables."""
    for question, lines in tables(results).items():
        print(f"\n{question}:\n")
        print("\n".join(lines))


def write(results: dict[str, Any]) -> None:
    """Puts the tables into the documentation, and what was measured into the cards."""
    text = EVIDENCE.read_text()
    for question, lines in tables(results).items():
        begin, end = f"<!-- papers: {question} -->\n", f"\n<!-- end of {question} -->"
        before, found, rest = text.partition(begin)
        _, also_found, after = rest.partition(end)
        if not (found and also_found):
            raise SystemExit(f"{EVIDENCE.name} has no place for the table of {question!r}: {begin}{end}")
        text = f"{before}{begin}\n{chr(10).join(lines)}\n{end}{after}"
    EVIDENCE.write_text(text)
    for folder in CARDS.values():
        for path in sorted([*folder.glob("*/card.md"), *folder.glob("*.md")]):
            name = path.parent.name if path.name == "card.md" else path.stem
            card = path.read_text()
            section = f"## Measured here\n\n{textwrap.fill(measured(results, name), 119)}\n\n## Source"
            path.write_text(
                re.sub(r"## Measured here\n.*?## Source", lambda _, section=section: section, card, flags=re.DOTALL)
            )


def main(arguments: list[str] | None = None) -> int:
    """Prints or writes what benchmarks/results/papers.json holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the documentation and the cards")
    options = parser.parse_args(arguments)
    results = json.loads(RESULTS.read_text())
    show(results)
    if options.write:
        write(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
