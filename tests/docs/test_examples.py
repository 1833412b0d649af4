"""Each example in a process of its own, without a network.

One imports everything by itself, as users have it; the others are forked from a process that has done so.

`smollm2_reasoning.py` runs here with `--smoke`, a tiny model and made-up sums: a step of the real one takes half a
minute, and its packages are not installed for tests.
"""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from forked import check, launch
from started import started

from trl_replay import ReplayConfig
from trl_replay.testing import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]


QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


LIMIT = 300
"""Seconds after which an example counts as hanging."""


def run(example, *arguments, cwd):
    done = started(sys.executable, str(ROOT / "examples" / example), *map(str, arguments), cwd=cwd, **QUIET)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def fork(example, *arguments, cwd):
    launched = launch(ROOT / "examples" / example, *arguments, limit=LIMIT, cwd=cwd, environment=QUIET)
    check(launched)
    return launched[0].stdout


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A folder with everything that grpo_replay.py needs: model, data and a reward function."""
    folder = tmp_path_factory.mktemp("local")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer).save_pretrained(folder / "model")
    rows = [json.dumps({"prompt": f"{number}+{number}="}) for number in range(20)]
    (folder / "sums.jsonl").write_text("\n".join(rows))
    (folder / "my_rewards.py").write_text(
        "calls = 0\n\n\n"
        "def every_other_batch(completions, **_):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return [float(calls % 2 and row % 2) for row in range(len(completions))]\n"
    )
    return folder


def train(local, *arguments, start=fork):
    return start(
        "grpo_replay.py", "--config", ROOT / "examples" / "grpo_replay.yaml",
        "--model_name_or_path", "model", "--dataset_name", "sums.jsonl",
        "--reward_funcs", "my_rewards.every_other_batch", "--output_dir", "run",
        "--max_steps", 4, "--gradient_accumulation_steps", 2, "--max_completion_length", 4,
        "--use_cpu", "true", "--bf16", "false", "--report_to", "none", *arguments,
        cwd=local,
    )  # fmt: skip


def test_grpo_replay_trains_replays_and_saves_from_yaml_and_flags(local):
    out = train(local, "--replay_evictor", "fifo", start=run)
    assert "replay: 2 of 64 groups, 0 of 4 replaced, 4 drawn in further updates;" in out
    assert (local / "run" / "model.safetensors").exists()


def test_grpo_replay_is_stock_with_use_replay_false(local):
    out = train(local, "--use_replay", "false")
    assert "Model saved" in out
    assert "replay/size" not in out
    assert "replaced" not in out


def test_grpo_replays_yaml_leaves_a_preset_free_and_refuses_what_is_misspelt(local, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("grpo_replay")
    parser = example.TrlParser((example.GRPOScriptArguments, example.GRPOConfig, example.ModelConfig, ReplayConfig))
    yaml = ROOT / "examples" / "grpo_replay.yaml"
    given = ["--config", str(yaml), "--replay_preset", "sample_efficient", "--use_cpu", "true", "--bf16", "false"]
    *_, config = parser.parse_args_and_config(given)
    preset = config.with_preset()
    assert (preset.replay_correction, preset.replay_start) == ("topr", 0)
    (local / "misspelt.yaml").write_text(yaml.read_text() + "replay_bufer_size: 8\n")
    misspelt = ["--config", str(local / "misspelt.yaml"), "--use_cpu", "true", "--bf16", "false"]
    with pytest.raises(ValueError, match="replay_bufer_size"):
        parser.parse_args_and_config(misspelt)


def test_grpo_replay_finds_rewards_and_data_and_says_what_it_can_not_find(local, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(local)
    example = importlib.import_module("grpo_replay")
    assert example.find_reward("think_format_reward").__module__.startswith("trl.rewards")
    assert example.find_reward("my_rewards.every_other_batch")(["a", "b"]) == [0.0, 1.0]
    with pytest.raises(ValueError, match="accuracy_reward"):
        example.find_reward("acuracy_reward")
    (local / "sums.txt").touch()
    for name, words in ((None, "Give dataset_name"), ("sums.txt", "ends in '.txt'")):
        with pytest.raises(ValueError, match=words):
            example.find_dataset(example.GRPOScriptArguments(dataset_name=name))


def test_agent_replay_trains_both_arms(tmp_path):
    out = fork("agent_replay.py", "--batches", 2, cwd=tmp_path).splitlines()
    assert "replay: 2 generation batches, 12 groups" in out[1]
    assert [line.split(":")[0] for line in out] == ["seed 0, stock", "seed 0, preset", "stock", "preset"]


def test_second_run_trains_twice_on_what_the_first_run_exported(tmp_path):
    out = fork("second_run.py", "--updates", 6, cwd=tmp_path)
    table = [line.split() for line in out.splitlines()]
    assert [row[-3:-1] for row in table[1:]] == [["384", "6"], ["64", "6"], ["64", "6"]]


def test_products_trains_stock_and_the_preset_for_as_many_passes(local):
    out = fork("products.py", "--model", "model", "--passes", 2, "--seeds", 3, cwd=local)
    told = [line.split() for line in out.splitlines() if line.startswith("seed 3 ")]
    assert [(line[2], len(line[3:])) for line in told] == [("stock", 2), ("preset", 2)]


def test_products_pays_for_a_product_of_two_factors_above_1(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    is_product = importlib.import_module("products").is_product
    right = ["3 * 4", " 2*6.", "6 * 2\n14 = 2 * 7"]
    wrong = ["1 * 12", "3 * 5", "3 * 4 = 12", "12", "3 * 4 * 1", "3 *\n4"]
    assert is_product(right + wrong, [12] * 9) == [1.0] * 3 + [0.0] * 6


def test_smollm2_reasoning_prints_every_step_of_a_smoke_run(tmp_path):
    out = fork("smollm2_reasoning.py", "--smoke", "--steps", 6, "--cache", tmp_path / "cache", cwd=tmp_path)
    lines = [line for line in out.splitlines() if not line.startswith("replay: buffer")]
    assert lines[0].split() == [
        "step", "reward", "dead", "after", "replaced", "stored", "age", "ratio", "ess", "seconds",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:7]] == ["1", "2", "3", "4", "5", "6"]
    assert "replaced" in "".join(lines[7:])


def test_smollm2_reasoning_names_the_same_packages_wherever_one_is_missing(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("smollm2_reasoning")
    lines = re.findall(r"^ +(pip install .*)$", example.__doc__, re.MULTILINE)
    assert example.MISSING.format("gguf").endswith(f": {' && '.join(lines)}")
    make = (ROOT / "Makefile").read_text()
    assert lines[1] in make


def test_warm_start_trains_with_and_without_a_teacher(tmp_path):
    assert "right answers in the last 10 updates:\n" in fork("warm_start.py", "--out", tmp_path / "out", cwd=tmp_path)


def test_policies_prints_a_row_of_each_and_is_what_a_page_shows(tmp_path):
    out = fork("policies.py", "--updates", 4, "--seeds", 0, cwd=tmp_path)
    head, *rows = (line.split() for line in out.splitlines()[-5:])
    assert head == ["policy", "seed", "0", "median"]
    assert [row[0] for row in rows] == ["stock", "defaults", "priorities", "reservoir"]
    assert all(0 <= float(end) < 0.5 for row in rows for end in row[1:])
    source = " ".join((ROOT / "examples" / "policies.py").read_text().split())
    (shown,) = re.findall(r"^```py\n(POLICIES.*?)^```", (ROOT / "docs" / "files.md").read_text(), re.M | re.S)
    assert all(" ".join(part.split()) in source for part in shown.split("# …"))


def test_gsm8k_replay_trains_what_is_missing_once_and_prints_completions_to_stocks_accuracy(local):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(local / "chat")
    make_model(tokenizer).save_pretrained(local / "chat")
    for split in ("train", "test"):
        questions = [{"question": f"{n} + 1?", "answer": f"One more.\n#### {n + 1}"} for n in range(8)]
        (local / f"{split}.jsonl").write_text("\n".join(map(json.dumps, questions)))
    arguments = (
        "--model", "chat", "--data", ".", "--no-vllm", "--seeds", 0, "--batches", 2, "--every", 1, "--prompts", 2,
        "--group", 4, "--rows", 8, "--tokens", 4, "--questions", 4,
    )  # fmt: skip
    told = fork("gsm8k_replay.py", *arguments, cwd=local).splitlines()
    lines = [json.loads(line) for line in (local / "gsm8k.jsonl").read_text().splitlines()]
    runs = {(line["arm"], line["rate"], line["seed"]) for line in lines}
    assert len(runs) == 9, "three arms: two pilots and a seed each"
    assert [line["completions"] for line in lines[:3]] == [0, 8, 16]
    assert [line.split(" | ")[0] for line in told[-2:]] == ["| stock, 2 updates", "| preset"]
    fork("gsm8k_replay.py", *arguments, cwd=local)
    assert len((local / "gsm8k.jsonl").read_text().splitlines()) == len(lines)


def test_gsm8k_replay_reads_the_number_behind_the_mark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    accuracy = importlib.import_module("gsm8k_replay").accuracy
    texts = ["so\n#### 1,200", "#### 1200.00", "#### $-7.50", "1200", "#### none"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert accuracy(completions, ["1200", "1,200", "-7.5", "1200", "1200"]) == [1, 1, 1, 0, 0]
