"""The commands of the benchmarks run, in small; what they found is in tests/docs/test_figures.py."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from support import LIVE, Rewards

from trl_replay.testing import make_model, make_tokenizer, make_trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a benchmark by name."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def written(benchmark, tmp_path, monkeypatch, capsys):
    """Starts a study, then again with its results in place of its ledger: what stands there is not repeated. Gives the
    ledger as it was, and what was printed."""
    runs = benchmark("runs")
    monkeypatch.setattr(runs.os, "nice", lambda more: 19)
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results")
    runs.RESULTS.mkdir()

    def written(study, name):
        path = tmp_path / name
        assert study.main(["--out", str(tmp_path)]) == 0
        done = study.STUDY.finished(path)
        assert study.main(["--collect", "--out", str(tmp_path)]) == 0
        path.unlink()
        assert study.main(["--out", str(tmp_path)]) == study.main(["--table", "--out", str(tmp_path)]) == 0
        assert not path.exists()
        return done, capsys.readouterr().out

    return written


COMMANDS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef main(" in path.read_text())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_starts_and_tells_its_options(benchmark, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        benchmark(name).main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_the_gpu_benchmark_runs_on_a_cpu_in_small(benchmark, monkeypatch, capsys):
    gpu = benchmark("gpu")
    monkeypatch.setattr(gpu, "SMALL", gpu.Size(hidden=16, layers=1, tokens=6, steps=1, long=2))
    assert gpu.main(["--small"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["costs"]["forwards added"] == 0
    assert found["costs"]["groups replaced"] == 0.5
    for clock in ("synchronised", "free running"):
        assert 0 < found["costs"][clock]["time in the seam, ms"] < found["costs"][clock]["step with replay, ms"]


def test_a_task_of_the_methods_benchmark_trains_and_stops_at_its_completions(benchmark, monkeypatch):
    toys, papers = benchmark("toys"), benchmark("papers")
    job = toys.Job("grades", "popo", 1e-3, 0, 192, papers.settings_of("popo"), {"num_iterations": 2})
    untaught = make_model(make_tokenizer(), benchmark("vaults").HIDDEN_SIZE).state_dict()
    monkeypatch.setattr(benchmark("vaults"), "taught", lambda vault, seed: untaught)
    record = toys.perform(job)
    assert 192 <= record["rollouts"] <= 256
    assert record["updates"] == record["rollouts"] / 64 * 2
    assert 0 <= record["final_reward"] < 1
    assert json.loads(job.key)[1]["replay_plugins"] == ["popo"]


def test_a_run_of_the_study_is_written_once_and_not_repeated(benchmark, written, monkeypatch):
    study, example = benchmark("when_it_pays"), benchmark("smollm2_reasoning")

    def tiny(folder):
        tokenizer = make_tokenizer()
        make_model(tokenizer).save_pretrained(folder)
        return None, tokenizer

    def rows(count, seed):
        return [{"prompt": f"{number % 8}+1=", "answer": str(number % 8 + 1)} for number in range(count)]

    monkeypatch.setattr(example, "smollm2", tiny)
    task = study.Task(rows, 2, 2, 4, rates=(1e-5, 1e-4, 1e-3), every=1, accuracy_every=2)
    monkeypatch.setattr(study, "TASKS", {"sums": task})
    monkeypatch.setattr(study, "PILOTED", ["stock", "imitation", "dynamic sampling"])
    monkeypatch.setattr(study, "ARMS", {arm: study.ARMS[arm] for arm in study.PILOTED})
    monkeypatch.setattr(study, "ADDED", {})
    monkeypatch.setattr(study, "SEEDS", {"sums": (0,)})
    done, printed = written(study, "when_it_pays.jsonl")
    assert {run.seed for run in done} == {study.PILOT, 0}
    assert all(lines[-1]["rollouts"] == task.rollouts == 64 for lines in done.values())
    reported = next(number for number, run in enumerate(done) if run.seed == 0)
    assert {run.seed for run in [*done][reported:]} == {0}, "the pilots come first"
    assert "| sums | imitation |" in printed


def test_a_run_of_long_answers_is_written_once_and_each_arm_gets_a_row(benchmark, written, monkeypatch):
    long = benchmark("long_answers")
    untaught = make_model(make_tokenizer(), 48, seed=5).state_dict()
    monkeypatch.setattr(long, "taught", lambda length: untaught)
    task = long.study.Task(long.prompts, 3, 2, long.KEYS, every=1, accuracy_every=2)
    monkeypatch.setattr(long, "TASKS", {"12": task})
    monkeypatch.setattr(
        long, "QUEUE", [long.Run("12", arm, 3e-4, seed) for seed in long.SEEDS for arm in long.PLANNED]
    )
    done, printed = written(long, "long_answers.jsonl")
    assert {run.arm for run in done} == set(long.PLANNED)
    assert all(f"| {arm} | – | 0.0" in printed for arm in long.PLANNED)


def test_the_taught_form_is_an_answer_whose_code_alone_counts(benchmark):
    long = benchmark("long_answers")
    texts = [long.answer(long.random.Random(number), 12, 3) for number in range(2000)]
    assert all(10 <= len(text.partition("*")[0]) <= 12 for text in texts)
    right = [long.is_right(text, long.right(3)) for text in texts]
    assert sum(right) / len(right) == pytest.approx(long.RIGHT, abs=0.02)
    assert not long.is_right(long.right(3), long.right(3))
    assert sum(long.habits(3)) == pytest.approx(1)


def test_prompts_that_run_once_have_the_log_probs_gradients_and_likeliest_tokens_of_the_model(benchmark, tmp_path):
    shared = benchmark("shared_prompts")
    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, Rewards([LIVE]))
    model, tokenizer = trainer.model, trainer.processing_class
    tokenizer.padding_side = "left"
    both = tokenizer(["12+3="] * 3 + ["7+8="] * 2 + ["12+3="], padding=True, return_tensors="pt")
    prompts, prompt_mask = both["input_ids"], both["attention_mask"]
    assert not prompt_mask.all()
    eos, pad = torch.tensor(trainer.eos_token_ids), tokenizer.pad_token_id
    likeliest = shared.sampled(model.eval(), prompts, prompt_mask, 5, eos, pad, torch.ones(6, dtype=torch.bool))
    wanted = model.generate(
        input_ids=prompts, attention_mask=prompt_mask, max_new_tokens=5, do_sample=False, pad_token_id=pad
    )
    torch.testing.assert_close(likeliest, wanted)
    ids = torch.cat([prompts, torch.randint(3, 12, (6, 4))], dim=1)
    mask = torch.cat([prompt_mask, torch.tensor([4, 3, 1, 4, 2, 4])[:, None].gt(torch.arange(4)).long()], dim=1)
    weights = torch.randn(6, 4)
    found = []
    for _ in range(2):
        logps, entropies, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 4, compute_entropy=True)
        model.zero_grad()
        (logps * weights * mask[:, -4:]).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        found.append(((logps * mask[:, -4:]).detach(), (entropies * mask[:, -4:]).detach(), gradients))
        shared.share_prompts(trainer)
    assert "generate" in vars(model)
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_benchmark_of_long_completions_runs_in_small(benchmark, monkeypatch, capsys):
    long, measured = benchmark("long"), []
    monkeypatch.setattr(long, "in_a_process", lambda *case: measured.append(long.measure(*case)) or measured[-1])
    assert long.main(["--quick"]) == 0
    assert [found["case"] for found in measured] == ["stock", "replay"]
    assert 0 < measured[1]["seam, ms"] < measured[1]["step, ms"]
    assert capsys.readouterr().out.splitlines() == long.table({"cases": measured})


def test_every_arm_of_updates_a_batch_trains(benchmark, tmp_path, monkeypatch):
    study, ratio, example = (benchmark(name) for name in ("when_it_pays", "updates_per_batch", "smollm2_reasoning"))
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(example, "smollm2", lambda folder: (None, tokenizer))
    monkeypatch.setattr(study, "AT_THE_START", {"sums": {"sampled": 0.0}})
    monkeypatch.setattr(study, "measured", lambda *_: {"sampled": 0.5})
    rows = [{"prompt": f"{number % 8}+1=", "answer": "1"} for number in range(64)]
    task = study.Task(lambda *_: rows, 1, 3, 4, every=3, accuracy_every=3)
    monkeypatch.setattr(study, "is_right", lambda text, answer: text < "3")
    path = tmp_path / "ledger.jsonl"
    for name, arm in ratio.ARMS.items():
        study.perform(study.Run("sums", name, 1e-4, 0), task, arm, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["arm"] for line in lines if line["batch"] == 3] == list(ratio.ARMS)
    replays = {line["arm"]: line.get("replay/replay_ratio") for line in lines if line["batch"] == 3}
    assert replays["preset, 4 updates"] > replays["sample_efficient"] > 1
    assert replays["stock, 4 updates"] is None
