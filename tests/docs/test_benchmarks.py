"""The benchmarks of methods, of a GPU, of many ranks and of a real model: in small, or from made-up records."""

from __future__ import annotations

import importlib
import json
import math
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEAD, HALF, LIVE, Rewards, Spy, weights_hash

import trl_replay
from trl_replay.testing import make_model, make_tokenizer, make_trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark by name."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_the_gpu_benchmark_runs_on_a_cpu_in_small(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    gpu = benchmark("gpu")
    monkeypatch.setattr(gpu, "WARM_UP", 1)
    monkeypatch.setattr(gpu, "SMALL", gpu.Size(hidden=16, layers=1, tokens=6, steps=3, long=2, lock=2, addition=1))
    addition, lock = benchmark("addition"), benchmark("trl_replay.demo.lock")
    untaught = make_model(make_tokenizer(), addition.HIDDEN_SIZE).state_dict()
    monkeypatch.setattr(addition, "taught", lambda: untaught)
    untaught_lock = make_model(make_tokenizer(), lock.HIDDEN_SIZE).state_dict()
    monkeypatch.setattr(lock, "taught", lambda seed: untaught_lock)
    monkeypatch.setattr(gpu.torch, "use_deterministic_algorithms", lambda *_, **__: None)  # for this process's others
    assert gpu.main(["--small", "--out", str(tmp_path / "gpu.json")]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert found["idle training is bit-identical"] == dict.fromkeys(
        ("stock repeats itself", "nothing to replace", "dry run"), True
    )
    assert found["costs"]["forwards added"] == 0
    assert found["costs"]["groups replaced"] == 0.5
    for clock in ("synchronised", "free running"):
        assert 0 < found["costs"][clock]["time in the seam, ms"] < found["costs"][clock]["step with replay, ms"]
    assert {task: set(arms) for task, arms in found["learning"].items()} == {
        "lock": {"stock", "defaults"},
        "addition": {"stock", "defaults"},
    }


def test_a_task_of_the_methods_benchmark_trains_and_stops_at_its_completions(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    papers = benchmark("papers")
    job = papers.Job("grades", "popo", 1e-3, 0, 192, papers.settings_of("popo"), {"num_iterations": 2})
    untaught = make_model(make_tokenizer(), benchmark("vaults").HIDDEN_SIZE).state_dict()
    monkeypatch.setattr(benchmark("vaults"), "taught", lambda vault, seed: untaught)
    record = papers.perform(job)
    assert 192 <= record["rollouts"] <= 256
    assert record["updates"] == record["rollouts"] / 64, "one record a generation batch, not one an update"
    assert 0 <= record["final_reward"] < 1
    assert json.loads(job.key)[1]["replay_plugins"] == ["popo"]


def test_all_arms_of_the_methods_benchmark_are_methods_of_the_distribution(benchmark: Any) -> None:
    from trl_replay_papers import METHODS

    papers = benchmark("papers")
    arms = {preset for preset in papers.METHODS.values() if preset} | {*papers.OTHER_PRESETS, *papers.UNMEASURED}
    assert arms == set(METHODS)
    assert papers.settings_of("stock") is None
    assert papers.settings_of("defaults") == {}


def made_up(papers: Any, job: Any) -> dict[str, Any]:
    """The record of a run that does best at 1e-3 on unreported seeds, and at 3e-4 on the others."""
    aim = 1e-3 if job.seed >= 100 else 3e-4
    reward = 1 / (1 + abs(math.log(job.learning_rate / aim)))
    extra = {"accuracy": reward / 2} if job.task == "addition" else {}
    return {
        **asdict(job), "final_reward": reward, "reached": None, "rollouts": job.budget, "updates": 9,
        "tokens": 9, "seconds": 1.0, "dead": 0.9, "dead_after": 0.1, "curve": [],
        "replay": {"replay/age_mean": 2.0, "replay/drift_mean": 0.25}, **extra,
    }  # fmt: skip


class Made:
    """A ledger that makes its records up."""

    def __init__(self, papers: Any) -> None:
        self.papers = papers
        self.jobs: list[Any] = []

    def run(self, jobs: Any, processes: int) -> list[dict[str, Any]]:
        jobs = list(jobs)
        self.jobs += jobs
        return [made_up(self.papers, job) for job in jobs]


def test_rates_are_chosen_by_unreported_seeds_and_tables_tell_medians(
    benchmark: Any, tmp_path: Path, capsys: Any
) -> None:
    papers, report = benchmark("papers"), benchmark("papers_report")
    ledger = Made(papers)
    run = papers.Benchmark(ledger, 1, papers.TASKS, papers.SEEDS)
    answers = {question: papers.QUESTIONS[question](run) for question in papers.QUESTIONS}
    assert run.chosen["popo"] == {"lock": 1e-3, "addition": 1e-4, "grades": 1e-3}
    assert {job.learning_rate for job in ledger.jobs if job.task == "vault"} == {1e-3}, "the lock's choice"
    reported = [record for record in answers["methods"] if record["arm"] == "popo"]
    assert sorted({record["seed"] for record in reported}) == [0, 1, 2]
    report.summarize(answers, run.chosen, tmp_path, quick=True)
    shown = capsys.readouterr().out
    assert "| popo | 1e-03, 1e-04, 1e-03 | 32,000 (0 of 3) | 0.45 (0.45–0.45)" in shown
    assert "| lock | 1 | 3e-04 |" in shown
    results = json.loads((tmp_path / "papers.json").read_text())
    assert "Lock: final reward 0.45, stock 0.45" in report.measured(results, "popo")
    taught = {job.seed: job.settings["replay_warm_start"] for job in ledger.jobs if job.arm == "rlep"}
    assert len(set(taught.values())) == len(taught), "a file for each seed: its task has other answers"


@pytest.mark.parametrize(
    ("curve", "final", "expected"),
    [
        ([0.1, 0.5, 0.4], 0.4, False),
        ([0.1, 0.5, 0.2], 0.2, True),
        ([0.1, 0.2, 0.2, 0.9], 0.2, False),  # one lucky batch, left over
        ([0.04, 0.0, 0.0], 0.0, False),  # it never learned
    ],
)
def test_a_run_collapses_that_learned_and_lost_more_than_half_of_it(
    benchmark: Any, curve: list[float], final: float, expected: bool
) -> None:
    report = benchmark("efficiency_report")
    run = {"updates": 5 * 76, "training": {"num_iterations": 5}, "curve": curve, "final_reward": final}
    assert report.collapsed(run) is expected


def test_the_real_models_table_tells_when_an_arm_had_what_stock_has_at_its_end(benchmark: Any, tmp_path: Path) -> None:
    real, report = benchmark("real_model"), benchmark("real_model_report")
    path = tmp_path / "batches.jsonl"
    lines = []
    for arm, seed, batches, slope in (
        ("stock", 0, 150, 1.0),
        ("stock", 1, 150, 1.0),
        ("stock", real.PILOTS, 150, 0.5),
        ("defaults", 0, 150, 2.0),
        ("defaults", 1, 150, 1.6),
        ("sample_efficient", 0, 149, 3.0),
    ):
        of_run = {"arm": arm, "rate": real.ARMS[arm].rate, "seed": seed}
        lines.append({**of_run, "batch": 0, "accuracy": 0.1})
        for batch in range(1, batches + 1):
            shown = {"reward": slope * batch / 300, "frac_reward_zero_std": 0.75}
            if arm != "stock":
                shown["replay/dead_fraction_after"] = 0.25
            lines.append({**of_run, "batch": batch, **shown})
        lines.append({**of_run, "batch": batches, "accuracy": slope / 4})
    lines.append({**lines[5], "reward": 0.0})  # made again after a run was cut off: the last one counts
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = real.records_of(path)
    assert [len(records) for records in found.values()] == [151, 151, 151, 151, 151, 150]
    arms = report.finished(found)
    shown_runs = {arm: list(runs) for arm, runs in arms.items()}
    assert shown_runs == {"stock": [0, 1], "defaults": [0, 1]}, "neither pilots nor what is not at its end"
    _, _, stock, defaults = report.table(arms)
    # the last 25 of stock's batches have a mean reward of 0.46, and so have the 25 up to the defaults' 81st and 99th
    assert stock.split(" | ")[1:7] == [
        "4,800 (4,800, 4,800)", "0.46 (0.46–0.46)", "–", "0.250 (0.250–0.250)", "–", "75 % → 75 %",
    ]  # fmt: skip
    assert defaults.split(" | ")[1:7] == [
        "3,168 (2,592, 3,168)", "0.83 (0.74–0.92)", "+0.368 ± 0.092", "0.450 (0.400–0.500)", "+0.200 ± 0.050",
        "75 % → 25 %",
    ]  # fmt: skip
    report.draw(arms, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_run_of_the_study_is_written_once_and_not_repeated(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    study, example = benchmark("when_it_pays"), benchmark("smollm2_reasoning")

    def tiny(folder: Path) -> tuple[Any, Any]:
        tokenizer = make_tokenizer()
        make_model(tokenizer).save_pretrained(folder)
        return None, tokenizer

    def rows(count: int, seed: int) -> list[dict[str, str]]:
        return [{"prompt": f"{number % 8}+1=", "answer": str(number % 8 + 1)} for number in range(count)]

    monkeypatch.setattr(example, "smollm2", tiny)
    monkeypatch.setattr(study.os, "nice", lambda more: 19)
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results.jsonl")
    task = study.Task(rows, 2, 2, 4, rates=(1e-5, 1e-4, 1e-3), every=1, accuracy_every=2)
    monkeypatch.setattr(study, "TASKS", {"sums": task})
    monkeypatch.setattr(study, "PILOTED", ["stock", "imitation", "dynamic sampling"])
    monkeypatch.setattr(study, "ARMS", {arm: study.ARMS[arm] for arm in study.PILOTED})
    monkeypatch.setattr(study, "SEEDS", {"sums": (0,)})
    assert study.main(["--pilots", "--out", str(tmp_path)]) == 0
    assert study.main(["--out", str(tmp_path)]) == 0
    path = tmp_path / "when_it_pays.jsonl"
    done = study.finished(path)
    assert [(run.arm, run.rate, run.seed) for run in done][:4] == [
        *[(arm, 1e-4, study.PILOT) for arm in study.ARMS], ("stock", 1e-5, study.PILOT),
    ]  # fmt: skip
    assert {run.seed for run in done} == {study.PILOT, 0}
    for run, lines in done.items():
        again = run.arm == "dynamic sampling"  # twice as many completions a batch, as all groups are dead
        assert [line["batch"] for line in lines] == ([0, 1] if again else [0, 1, 2])
        assert ["sampled" in line for line in lines] == ([True, True] if again else [True, False, True])
        assert lines[-1]["rollouts"] == study.TASKS["sums"].rollouts == 64
    assert {"sampled", "greedy", "pass_at_8", "cpu", "commit", "trl", "found"} <= done[next(iter(done))][-1].keys()
    before = path.read_text()
    path.write_text(before + json.dumps({**json.loads(before.splitlines()[0]), "seed": 7}) + "\n")
    assert study.main(["--table", "--out", str(tmp_path)]) == 0
    assert study.finished(path).keys() == done.keys(), "a run that is not at its end is none"
    path.rename(study.RESULTS)
    with (tmp_path / f"{next(iter(done)).name}.claim").open("w"):
        assert study.main(["--pilots", "--out", str(tmp_path)]) == 0
    assert not path.exists(), "what stands in benchmarks/results is not repeated"
    assert "| sums | imitation |" in capsys.readouterr().out


def test_prompts_that_run_once_have_the_log_probs_gradients_and_likeliest_tokens_of_the_model(
    benchmark: Any, tmp_path: Path
) -> None:
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


def test_a_drawn_token_has_its_probability(benchmark: Any) -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0])
    drawn = benchmark("shared_prompts")._drawn(logits.expand(100_000, 4)).bincount(minlength=4) / 100_000
    torch.testing.assert_close(drawn, logits.softmax(-1), atol=5e-3, rtol=0)


def measurements(study: Any, ends: dict[tuple[str, str, float, int], float], **besides: Any) -> str:
    """A ledger in which each run ends with this sampled accuracy."""
    same = {"greedy": 0.5, "pass_at_8": 0.5, "found": ["a", "b"], "answers_right": ["b"], "cpu": 60, **besides}
    lines = []
    for (task, arm, rate, seed), sampled in ends.items():
        run = {"task": task, "arm": arm, "rate": rate, "seed": seed}
        batches = study.TASKS[task].batches
        lines += [{**run, "batch": 0, "sampled": 0.0, **same}, {**run, "batch": batches, "sampled": sampled, **same}]
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def study(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    study = benchmark("when_it_pays")
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results.jsonl")
    return study


def test_arms_are_compared_seed_by_seed_and_across_tasks(study: Any) -> None:
    ends = {("topics", "stock", 1e-5, 0): 0.5, ("topics", "stock", 1e-5, 1): 0.4, ("french", "stock", 1e-5, 0): 0.2}
    ends |= {("topics", "topr", 2e-5, 0): 0.6, ("topics", "topr", 2e-5, 1): 0.7, ("french", "topr", 2e-5, 0): 0.1}
    study.RESULTS.write_text(measurements(study, ends))
    rows = study.across(study.finished())
    assert "| topr minus stock | +0.200 ± 0.100 | −0.100 | – | – | +0.050 |" in rows
    study.RESULTS.write_text(
        measurements(study, {**ends, ("french", "stock", 1e-5, 1): 0.2, ("french", "topr", 2e-5, 1): 0.2})
    )
    # of the mean of two tasks: half of the root of 0.1² + 0.05²
    assert "| topr minus stock | +0.200 ± 0.100 | −0.050 ± 0.050 | – | – | +0.075 ± 0.056 |" in study.across(
        study.finished()
    )
    assert "| imitation minus stock | – | – | – | – | – |" in rows


def test_mixed_groups_and_pass_at_8_are_told_over_time(study: Any) -> None:
    lines = []
    for arm, seed, shift in (("stock", 0, 0.0), ("stock", 1, 0.1), ("stock", 100, 0.3), ("dynamic sampling", 0, 0.2)):
        run = {"task": "products", "arm": arm, "rate": 1e-5, "seed": seed}
        for batch in (0, 48, 96, 144, 192):
            of_window = {} if batch == 0 else {"frac_reward_zero_std": 0.5 + shift + batch / 1920}
            measured = {"sampled": 0.1, "pass_at_8": 0.2 + shift}
            lines.append({**run, "batch": batch, "rollouts": 16 * batch, **of_window, **measured})
    study.RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert study.over_time(study.finished(), "products") == [
        "| products | to 48 | to 96 | to 144 | to 192 |",
        "|---|---|---|---|---|",
        "| stock | 0.42, 0.25 | 0.40, 0.25 | 0.38, 0.25 | 0.35, 0.25 |",
    ], "means over the seeds; no pilots, and no arm whose batches are not those of stock"
    assert study.over_time(study.finished(), "sums") == []


def test_an_added_arm_has_no_pilots_and_runs_at_its_own_rate(study: Any) -> None:
    path = study.RESULTS
    assert not any(run.arm == "stock at 4e-5" for run in study.queue(path, True, ("topics", "french")))
    path.write_text(measurements(study, {("topics", "stock", 8e-5, 100): 0.5, ("french", "stock", 2e-5, 100): 0.5}))
    seed_0 = [run for run in study.queue(path, False, ("topics", "french")) if run.seed == 0]
    assert seed_0 == [
        study.Run("topics", "stock", 8e-5, 0),
        study.Run("topics", "stock at 4e-5", 4e-5, 0),
        study.Run("french", "stock", 2e-5, 0),
        study.Run("french", "stock, 2 updates, KL", 4e-5, 0),
    ]


def test_a_pilot_is_added_where_the_best_rate_is_at_an_end(study: Any) -> None:
    pilots = {("products", "topr", rate, 100): value for rate, value in ((1e-6, 0.1), (3e-6, 0.1), (1e-5, 0.1))}
    study.RESULTS.write_text(measurements(study, pilots))
    assert study.chosen_rates(study.finished()) == {("products", "topr"): 3e-6}, "of equals the middle"
    assert study.further_pilot(study.finished(), "products", "topr") is None
    study.RESULTS.write_text(measurements(study, {**pilots, ("products", "topr", 1e-5, 100): 0.2}))
    added = study.further_pilot(study.finished(), "products", "topr")
    assert added == study.Run("products", "topr", 3e-5, 100)
    later = {**pilots, ("products", "topr", 1e-5, 100): 0.2, ("products", "topr", 3e-5, 100): 0.1}
    study.RESULTS.write_text(measurements(study, later))
    assert study.further_pilot(study.finished(), "products", "topr") is None
    study.RESULTS.write_text(measurements(study, {("topics", "topr", 5e-6, 100): 0.2}))
    assert study.further_pilot(study.finished(), "topics", "topr") is None, "not before all three are there"


def test_an_arm_stops_that_is_behind_on_both_tasks_after_two_seeds(study: Any) -> None:
    behind = {("topics", "stock"): 0.6, ("topics", "topr"): 0.5, ("french", "stock"): 0.6, ("french", "topr"): 0.4}
    ends = {(*key, 1e-5, seed): value + seed / 100 for key, value in behind.items() for seed in (0, 1)}
    study.RESULTS.write_text(measurements(study, ends))
    assert study.is_stopped(study.finished(), "topr")
    assert not study.is_stopped(study.finished(), "defaults")
    study.RESULTS.write_text(measurements(study, {**ends, ("french", "topr", 1e-5, 1): 0.7}))
    assert not study.is_stopped(study.finished(), "topr")
    assert "| topics | topr | 1e-05 | 2 | −0.100 ± 0.000 | – | 0.51 |" in "\n".join(study.table(study.finished()))


def test_dynamic_sampling_ends_where_it_has_generated_as_much_as_the_others(study: Any) -> None:
    run = study.Run("topics", "dynamic sampling", 1e-5, 0)
    lines = [{"batch": batch, "rollouts": 50 * batch} for batch in (0, 20, 40, 60, 80)]
    assert study.end(run, lines)["batch"] == 40, "2,560 completions are stock's"
    study.RESULTS.write_text(measurements(study, {("topics", "dynamic sampling", 1e-5, 0): 0.5}))
    assert study.finished() == {}, "lines without rollouts can't be compared"


def test_a_run_of_the_study_that_another_process_holds_is_left_to_it(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [study.Run("topics", arm, 1e-5, 0) for arm in ("stock", "topr")]
    performed: list[Any] = []
    monkeypatch.setattr(study, "queue", lambda path, pilots, tasks: iter(runs))
    monkeypatch.setattr(study, "perform", lambda run, *_: performed.append(run))
    monkeypatch.setattr(study.os, "nice", lambda more: 19)
    with (tmp_path / f"{runs[0].name}.claim").open("w") as claim:
        study.fcntl.flock(claim, study.fcntl.LOCK_EX)
        assert study.main(["--out", str(tmp_path)]) == 0
    assert performed == runs[1:]
    assert study.main(["--out", str(tmp_path)]) == 0
    assert performed == [runs[1], *runs], "what a process left behind that died is free"


def test_the_study_sees_which_stored_tokens_would_be_clipped_and_changes_nothing(study: Any, tmp_path: Path) -> None:
    seen: dict[str, list[float]] = defaultdict(list)
    weights = []
    for watched in (False, True):
        trainer = make_trainer(
            tmp_path, Rewards([LIVE, HALF, LIVE], [DEAD] * 3), max_steps=3, learning_rate=3e-2, trainer_class=Spy
        )
        if watched:
            trl_replay.register(study.ClipShares(seen), "clip_shares")
        try:
            trl_replay.attach(trainer, replay_start=0, replay_plugins=["clip_shares"] if watched else None)
            trainer.train()
        finally:
            if watched:
                trl_replay.unregister("clip_shares")
        weights.append(weights_hash(trainer))
    assert weights[0] == weights[1]
    expected: dict[str, list[float]] = {"clipped_right": [], "clipped_wrong": []}
    for loss in trainer.losses[1:]:
        inputs = loss["inputs"]
        ratio = (loss["logps"] - inputs["old_per_token_logps"]).exp()
        mask, positive = inputs["completion_mask"].bool(), inputs["advantages"][:, None] > 0
        expected["clipped_right"].append(float((ratio > 1.2)[mask & positive].float().mean()))
        expected["clipped_wrong"].append(float((ratio < 0.8)[mask & ~positive].float().mean()))
    assert seen.keys() == expected.keys()
    assert all(seen[name] == pytest.approx(shares) for name, shares in expected.items())
    assert 0 < sum(seen["clipped_wrong"]) < 2


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (" chien\nEnglish: cat", "chien", True),
        ("chat", "chien", False),
        ("12", "12", True),
        (" 3 * 4.", "*12", True),
        *((wrong, "*12", False) for wrong in ("12", "1 * 12", "2 * 6 * 1", "-3 * -4", "3 * 5")),
    ],
)
def test_an_answer_of_the_study_is_the_first_line_alone(benchmark: Any, text: str, answer: str, right: bool) -> None:
    assert benchmark("when_it_pays").is_right(text, answer) == right


def test_the_studys_held_out_topics_are_of_other_sentences(benchmark: Any) -> None:
    study = benchmark("when_it_pays")
    task = study.TASKS["topics"]
    held_out = {row["prompt"] for row in task.rows(task.held_out, study.HELD_OUT_SEED)}
    trained_on = {row["prompt"] for row in task.rows(2 * task.groups * task.batches, 0)}
    assert len(held_out) == 200
    assert not held_out & trained_on


def test_the_benchmark_of_long_completions_runs_in_small(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    long = benchmark("long")
    monkeypatch.setattr(long, "in_a_process", long.measure)
    assert long.main(["--quick", "--out", str(tmp_path / "long.json")]) == 0
    found = json.loads((tmp_path / "long.json").read_text())
    assert found["quick"]
    cases = {case["case"]: case for case in found["cases"]}
    assert tuple(cases) == long.CASES
    timed, counted = cases["replay"], cases["replay, counted"]
    assert timed["replayed"] == counted["replayed"] == 0.5
    assert 0 < timed["seam, ms"] < timed["step, ms"]
    assert timed["bytes held"] > 0
    assert 1 < counted["most at a time / batch"] < counted["allocated / batch"]
    largest = [part["/ batch"] for part in counted["largest"]]
    assert len(largest) == 5
    assert largest == sorted(largest, reverse=True)
    assert sum(largest) < counted["allocated / batch"]
    assert all(".py:" in part["line"] for part in counted["largest"])
    assert "seam, ms" not in cases["stock"]
    shown = capsys.readouterr().out
    assert "\n".join(long.table(found)) in shown
    assert "\n".join(long.lines_table(found)) in shown


def test_updates_a_batch_are_run_in_the_order_of_the_plan(
    benchmark: Any, study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratio = benchmark("updates_per_batch")
    monkeypatch.setattr(ratio, "RESULTS", tmp_path / "ratio.jsonl")
    arm, path = "preset, 4 updates", tmp_path / "running.jsonl"
    first = [run for run in ratio.left(path) if run.arm == arm and run.task not in ratio.LISTS]
    rates = [("french", 2e-5), ("french", 1e-5), ("products", 5e-6), ("products", 3e-6)]
    assert first == [study.Run(task, arm, rate, study.PILOT) for task, rate in rates], "no seed before both pilots"
    assert ratio.left(path)[:4] == first
    assert not any("uses" in run.arm for run in ratio.left(path)), "not before their rate is known"
    assert not ratio.exists(study.Arm({"replay_preset": "sample_efficient", "replay_correction": "no_such"}))
    ends = {("french", arm, 2e-5, study.PILOT): 0.4, ("french", arm, 1e-5, study.PILOT): 0.5}
    path.write_text(measurements(study, {**ends, ("french", arm, 1e-5, 0): 0.5}))
    pilots = {("french", "stock", 4e-5, study.PILOT): 0.4, ("french", "stock", 2e-5, study.PILOT): 0.3}
    study.RESULTS.write_text(measurements(study, {**pilots, ("french", "stock", 4e-5, 2): 0.3}))
    left = ratio.left(path)
    left = [run for run in left if run.seed != study.PILOT]
    assert left[:3] == [study.Run("french", "stock", 4e-5, seed) for seed in (0, 1, 2)], "what the study ran, again"
    assert left[3:5] == [study.Run("french", arm, 1e-5, 1), study.Run("french", arm, 1e-5, 2)]
    uses = [(run.arm[19:], run.rate, run.seed) for run in left if run.arm.endswith("uses")]
    assert uses == [(f"{uses} uses", 1e-5, seed) for uses in (4, 12) for seed in (0, 1, 2)]
    assert len(set(left)) == len(left), "the curve repeats none"


def test_a_list_of_prompts_comes_again_and_others_are_held_out(benchmark: Any) -> None:
    study, ratio = benchmark("when_it_pays"), benchmark("updates_per_batch")
    for task in ratio.LISTS.values():
        listed = {row["prompt"] for row in task.listed()}
        rows = task.rows(task.groups * task.batches, 0)
        assert len(listed) == 48
        assert all({row["prompt"] for row in rows[at : at + 48]} == listed for at in range(0, len(rows), 48))
        assert len(rows) == 16 * 48
        held_out = {row["prompt"] for row in task.rows(task.held_out, study.HELD_OUT_SEED)}
        assert len(held_out) == 100
        assert not held_out & listed


def test_every_arm_of_updates_a_batch_trains(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert ratio.exists(arm), f"{name} needs the plugins of this repository"
        study.perform(study.Run("sums", name, 1e-4, 0), task, arm, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["arm"] for line in lines if line["batch"] == 3] == list(ratio.ARMS)
    replays = {line["arm"]: line.get("replay/replay_ratio") for line in lines if line["batch"] == 3}
    assert replays["preset, 4 updates"] == replays["preset, 4 updates, 4 uses"] > replays["sample_efficient"] > 1
    assert replays["stock, 4 updates"] is None
