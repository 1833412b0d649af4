"""What reward functions of reasoning-gym, TRL, and math-verify pay, and so what replay can infer from their values.

    pip install --no-deps reasoning-gym==0.1.25     # and what its data sets import; see real_model.py
    python benchmarks/rewards.py                    # three minutes of a core
    python benchmarks/rewards.py --write            # and the table of benchmarks/reports/rewards.md

Of each data set, `ENTRIES` entries score their own answer, an empty one, nonsense, and other entries' answers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from isolated import isolated

PAGE = Path(__file__).parent / "reports" / "rewards.md"
BEGIN, END = "<!-- from benchmarks/rewards.py -->", "<!-- end of benchmarks/rewards.py -->"
ENTRIES, NONSENSE = 40, "xq zv"
NEARLY_ALL = 0.9


def scores_of(name: str) -> dict[str, Any]:
    """The scores of a data set's answers by kind: `own`, `empty`, `nonsense`, and `other`."""
    import reasoning_gym

    entries = list(reasoning_gym.create_dataset(name, size=ENTRIES, seed=0))
    score = reasoning_gym.create_dataset(name, size=ENTRIES, seed=0).score_answer
    found: dict[str, Any] = {"own": [], "empty": [], "nonsense": [], "other": [], "raised": 0}
    for number, entry in enumerate(entries):
        others = [one["answer"] for one in entries if one["answer"] != entry["answer"]]
        tried = {"own": entry["answer"], "empty": "", "nonsense": NONSENSE}
        if others:
            tried["other"] = others[number % len(others)]
        for kind, answer in tried.items():
            try:
                found[kind].append(float(score(answer, entry)))
            except Exception:
                found["raised"] += 1
    return found


def kinds_of(found: dict[str, Any]) -> list[str]:
    """What is to be known of a data set's rewards."""
    wrong = found["empty"] + found["nonsense"] + found["other"]
    kinds = ["only 0 and 1" if set(wrong + found["own"]) <= {0.0, 1.0} else "other values, too"]
    if len(set(wrong) - {1.0}) > 2:
        kinds.append("three values or more among wrong answers")
    if max(found["nonsense"] + found["empty"], default=0.0) > 0:
        kinds.append("nonsense or nothing is paid for")
    other = found["other"]
    if other and sum(value >= 0.85 for value in other) >= NEARLY_ALL * len(other):
        kinds.append("another entry's answer gets 0.85 or more")
    if found["own"] and sum(found["own"]) < len(found["own"]) / 2:
        kinds.append("its own answer gets 0 on half of the entries or more")
    if found["raised"]:
        kinds.append("raises on some answers")
    return kinds


def others() -> dict[str, str]:
    """What functions that take completions pay: TRL's own, one of which asks math-verify."""
    from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward

    def chats(*texts: str) -> list[Any]:
        return [[{"role": "assistant", "content": text}] for text in texts]

    def verified(solution: str = "$12$") -> list[float | None]:
        answers = chats("\\boxed{12}", "\\boxed{13}", NONSENSE, "")
        return accuracy_reward(completions=answers, solution=[solution] * 4)  # type: ignore[no-any-return]

    async def awaited() -> list[float | None]:
        return verified()

    with ThreadPoolExecutor(1) as pool:
        everywhere = [verified(), pool.submit(verified).result(), asyncio.run(awaited())]
    soft = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10)
    lengths = soft(completion_ids=[[0] * length for length in (5, 12, 15, 25)])
    return {
        "`trl.rewards.accuracy_reward` (math-verify): right, wrong, nonsense, nothing; main thread, another, "
        "awaited": "; ".join(map(str, everywhere)),
        "the same, where the solution is no mathematics": str(verified("no mathematics")),
        "`trl.rewards.think_format_reward`: in the format, not": str(
            think_format_reward(completions=chats("<think>\na\n</think>\n12", "12"))
        ),
        "`trl.rewards.get_soft_overlong_punishment`: 5, 12, 15, 25 of 20 tokens": str(lengths),
    }


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/reports/rewards.md")
    options = parser.parse_args()
    sys.modules.setdefault("pycosat", ModuleType("pycosat"))  # imported for its zebra puzzles alone
    from reasoning_gym.factory import DATASETS

    rows: dict[str, list[str]] = defaultdict(list)
    for name in sorted(DATASETS):
        found = isolated(scores_of, name)
        for kind in kinds_of(found) if isinstance(found, dict) else [f"not tried: {found.partition(':')[0]}"]:
            rows[kind].append(name)
    head = f"| reasoning-gym {version('reasoning-gym')}, {len(DATASETS)} data sets, {ENTRIES} entries each | |"
    lines = [head, "|---|---|"]
    lines += [
        f"| {kind}: {len(names)} | {', '.join(names) if len(names) <= 20 else '…'} |"
        for kind, names in sorted(rows.items(), key=lambda row: -len(row[1]))
    ]
    lines += [f"| {what} | {values} |" for what, values in others().items()]
    told = "\n".join(lines)
    print(told)
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{told}\n\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
