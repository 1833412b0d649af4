"""The README is short, its code trains, and it leads to the documentation."""

import re
from pathlib import Path
from statistics import median
from types import ModuleType

import yaml
from support import DEAD, LIVE, Rewards

import trl_replay
from trl_replay.cli.commands import main
from trl_replay.strategies.scopes import SCOPES
from trl_replay.testing import make_trainer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_readme_is_short_and_opens_with_how_to_begin_what_is_won_and_what_can_be_mixed():
    assert len(README.split()) <= 900, "as wc counts words, bars of tables included"
    first = " ".join(README.split())
    parts = ("pip install", "make demo", "+attach(", "(orange: of 2)", "trl-replay report",
             "replay_evictor", "entry point", "Why trust it")  # fmt: skip
    asked = [first.index(part) for part in parts]
    assert asked == sorted(asked)
    columns = [line.count("|") - 1 for line in README.splitlines() if line.startswith("|")]
    assert max(columns) <= 4, "a table as wide belongs to the evidence"
    (script,) = re.findall(r"^```diff\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^\+", script, re.MULTILINE)) == 5


def test_what_it_mixes_by_name_attaches_in_python_and_yaml(tmp_path, plug, capsys):
    """And its plugin of ten lines is one."""
    mixed, mine = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (file,) = re.findall(r"^```yaml\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]))
    names = {"attach": trl_replay.attach, "trainer": trainer}
    exec(mixed, names)
    trl_replay.detach(trainer)
    given = yaml.safe_load(file)
    module = ModuleType("mine")
    exec(mine, vars(module))
    plug(module, "mine")
    with trl_replay.attached(trainer, **{**given, "replay_evictor": "mine/most_used"}) as session:
        assert session.config.replay_sampler == given["replay_sampler"]
    assert all(f'{name}="{value}"' in mixed for name, value in given.items())
    main(["list"])
    listed = {*SCOPES, *re.findall(r"[\w]+", capsys.readouterr().out)}
    for row in re.findall(r"^\| `replay_\w+` \| .* \| (.*) \|$", README, re.MULTILINE):
        assert set(re.findall(r"`(\w+)`", row)) <= listed


def test_its_script_trains_with_replay(tmp_path):
    """With a model, prompts, and a reward made here, and for four updates."""
    from datasets import Dataset

    from trl_replay.testing import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    (shown,) = re.findall(r"^```diff\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    before, after = map(int, re.findall(r"^[-+] +max_steps=(\d+),", shown, re.MULTILINE))
    assert after == 2 * before, "a batch takes two steps"
    script = re.sub(r"^(-.*\n|.)", "", shown, flags=re.MULTILINE)
    assert max(map(len, script.splitlines())) <= 50, "a phone shows hardly more"
    ours = f"num_generations=4, use_cpu=True, report_to='none', output_dir={str(tmp_path / 'out')!r},"
    script = re.sub(r"max_steps=\d+,", "max_steps=4,", script.replace("beta=0.1,", f"beta=0.1, {ours}", 1))
    script = script.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tmp_path / "model"))
    names = {
        "your_reward": lambda completions, **_: [float(number % 2) for number, _ in enumerate(completions)],
        "your_prompts": Dataset.from_list([{"prompt": f"{number}+1="} for number in range(8)]),
    }
    exec(script, names)
    assert names["trainer"].state.global_step == 4
    assert names["trainer"].model is not None
    assert any("replay/replaced_fraction" in entry for entry in names["trainer"].state.log_history)


def test_what_pages_say_of_installing_works_today():
    """Once a version is released, `pip install trl-replay` does, and clones need not be mentioned."""
    released = re.search(r"^## \[?\d", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    wrong = "no release yet|pip install (plugins/|\\.)" if released else "pip install '?trl-replay"
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.ipynb"), *ROOT.glob("plugins/*/*.md")]
    assert [page.name for page in pages if re.search(wrong, page.read_text())] == []


def test_what_it_says_of_examples_is_what_these_printed():
    page, readme = (ROOT / "examples" / "README.md").read_text(), " ".join(README.split())
    ends = {arm: re.findall(rf"^seed \d {arm} .* (\d+)$", page, re.MULTILINE) for arm in ("stock", "preset")}
    stock, preset = (median(map(int, ends[arm])) for arm in ("stock", "preset"))
    assert f"(other learning rates): stock 0.{stock}, preset 0.{preset}." in readme
    assert f"at the end, {stock} % right with stock, {preset} % with the preset (medians of 3 seeds)" in page
