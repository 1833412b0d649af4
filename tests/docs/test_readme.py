"""The README is short, its code trains, and it leads to the documentation."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_readme_is_short_and_opens_with_what_is_won_how_to_begin_and_how_to_ask():
    assert README.count("\n") < 220
    first = " ".join(" ".join(README.splitlines()[:130]).split())
    asked = [
        first.index(part)
        for part in ("fewer completions", "products.png", "attach(", "trl-replay report", "completions.png")
    ]
    assert asked == sorted(asked)
    columns = [line.count("|") - 1 for line in README.splitlines() if line.startswith("|")]
    assert max(columns) <= 4, "a table as wide belongs to the evidence"


def test_its_script_trains_with_replay(tmp_path):
    """With a model, prompts, and a reward made here, and for four updates."""
    from datasets import Dataset

    from trl_replay.testing import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    (script,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert max(map(len, script.splitlines())) <= 42, "a phone shows no more"
    ours = f"num_generations=4, max_steps=4, use_cpu=True, report_to='none', output_dir={str(tmp_path / 'out')!r},"
    script = script.replace("Qwen/Qwen2.5-0.5B", str(tmp_path / "model")).replace("beta=0.1,", f"beta=0.1, {ours}", 1)
    names = {
        "your_reward": lambda completions, **_: [float(number % 2) for number, _ in enumerate(completions)],
        "your_prompts": Dataset.from_list([{"prompt": f"{number}+1="} for number in range(8)]),
    }
    exec(script, names)
    assert names["trainer"].state.global_step == 4
    assert names["trainer"].model is not None
    assert any("replay/replaced_fraction" in entry for entry in names["trainer"].state.log_history)


def test_every_page_of_the_documentation_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    pages -= {page for page in pages if page.startswith("outreach/")}  # drafts, which the site leaves out
    assert [page for page in pages if not re.search(rf": {re.escape(page)}$", navigation, re.MULTILINE)] == []


def test_what_pages_say_of_installing_works_today():
    """Once a version is released, `pip install trl-replay` does, and clones need not be mentioned."""
    released = re.search(r"^## \[?\d", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    wrong = "no release yet|pip install (plugins/|\\.)" if released else "pip install '?trl-replay"
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.ipynb"), *ROOT.glob("plugins/*/*.md")]
    drafts = ROOT / "docs" / "outreach"  # sent after the release
    assert [page.name for page in pages if page.parent != drafts and re.search(wrong, page.read_text())] == []
