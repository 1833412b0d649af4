"""Words of what was removed, which nothing may mention but the changelog, and an error that names the new way."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REMOVED = {
    "autoattach": "`trl_replay.attach`, or `trl-replay run` for a script",
    "sitecustomize": "`trl_replay.run` runs the script in its own process",
    r"trl-replay run [^\n`]*-- (python|accelerate|torchrun|trl)\b": "`accelerate launch -m trl_replay.run train.py`",
    "judged? (anew|again)|rejudg": "groups of another reward rule leave",
    "corrections_of_papers|sampler_order|ordered_?source": "the core names no plugin, and new prompts are random",
    r"[`\"']sharded[`\"']|scope[ =]sharded": "`gathered`",
    r"replay_[a-z]+_kwargs": '`replay_sampler="proportional(alpha=0.5)"`, or `replay_plugins=["greso(target=0.4)"]`',
    "start_pass_rate": '`replay_start="pass_rate(0.35)"`',
    "replay_refill_(rounds|prompts|until)": '`replay_refill="new(rounds=2, until=0.8)"`, or `"same(rounds=2)"`',
    "warm_start_columns": "rename columns with `datasets`",
    "replay_seed": "`seed` of `GRPOConfig`",
    "replay_logps_dtype": "nothing: log-probs are stored as float32",
    r"trl-replay estimate|[\"']estimate[\"']|extras\.(advice|report)": "`trl-replay report`",
    r"trl-replay report[^\n`]*--(out|level)\b": "`trl-replay report A B --html page.html`",
    r"[`\"']task/\w+": "`trl_replay_task` of an export names the dataset's row",
    r"TrainerLog|reward_metrics": "nothing: each further round logs as TRL does",
    "row_other_reward": "each row has the rewards of the trainer's functions",
}
"""By pattern, in any case: what to write instead. Add a line where a name, a setting, or a command is removed."""
CONFIG = "trl_replay/setup/config.py"
ERRORS = {
    r"[`\"']sharded[`\"']|scope[ =]sharded": {"trl_replay/registry.py", "tests/trainer/test_mistakes.py"},
    r"replay_[a-z]+_kwargs": {"tests/trainer/test_mistakes.py"},
    "start_pass_rate": {CONFIG, "tests/trainer/test_mistakes.py"},
    "replay_refill_(rounds|prompts|until)": {CONFIG},
    "warm_start_columns": {CONFIG},
    "replay_seed": {CONFIG, "tests/trainer/test_mistakes.py"},
    "replay_logps_dtype": {CONFIG},
}
"""By pattern: files with an error that is for those who still use it, and names the new way."""
FOLDERS = (".agents", "benchmarks", "docs", "examples", "plugins", "tests", "trl_replay")
KINDS = {".ipynb", ".md", ".py", ".toml", ".txt", ".yaml", ".yml", ""}
HISTORY = {"CHANGELOG.md", Path(__file__).relative_to(ROOT).as_posix()}


def texts():
    """Pages, settings, skills, notebooks, examples, code, and tests."""
    for path in [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]:
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and path.suffix in KINDS and name not in HISTORY and not path.name.startswith("."):
            yield name, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("pattern", REMOVED)
def test_nothing_speaks_of_what_was_removed(pattern):
    found = re.compile(pattern, re.IGNORECASE)
    named = {name for name, text in texts() if found.search(text)} - ERRORS.get(pattern, set())
    assert not named, f"{sorted(named)}: write {REMOVED[pattern]}"


def test_the_texts_are_all_kinds_that_a_user_reads():
    names = {name for name, _ in texts()}
    skill = ".agents/skills/trl-replay/SKILL.md"
    assert names >= {"README.md", "AGENTS.md", "Makefile", "pyproject.toml", "docs/running.md", skill}
    assert "docs/first_run.ipynb" in names
