"""The figures in the documentation are those of the results beside it."""

import importlib
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RESULTS, REPORTS = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "reports"
RUN_OF_PRODUCTS = re.compile(r"^seed (\d) (stock|preset) ([\d ]+)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def words_of(page):
    """A page's text in one line."""
    return " ".join((ROOT / page).read_text().split())


def results_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def efficiency():
    return [json.loads(line) for line in (RESULTS / "efficiency.jsonl").read_text().splitlines()]


def of_study(study):
    return study.report(study.STUDY.finished())


def of_updates(ratio):
    to_the_goal, *others = of_study(ratio)
    return [to_the_goal[2:], *others]


def of_rates(rates):
    return rates.report(rates.finished())[:3]


def of_what_tells(report):
    return [report.table(report.dots()), report.study.by_rate(report.study.STUDY.finished(), "topics")]


TABLES = [
    # reports or pages, benchmark, and what makes tables of its results, each a list of lines
    ("learning", "learning", lambda learning: [learning.overview(results_of("learning"))]),
    ("papers", "papers_report", lambda report: report.tables(results_of("papers")).values()),
    ("costs", "long", lambda bench: [bench.table(results_of("long"))]),
    ("efficiency preset docs/several-rewards", "efficiency_report",
     lambda report: report.tables(efficiency())),
    ("when_it_pays", "when_it_pays", lambda study: [study.to_the_goal(study.STUDY.finished())]),
    ("when_it_pays", "when_it_pays_report", of_what_tells),
    ("updates_per_batch", "updates_per_batch", of_updates),
    ("updates_per_batch", "learning_rates", of_rates),
    ("updates_per_batch", "second_model", lambda second: [second.table(second.STUDY.finished())]),
    ("long_answers", "long_answers", of_study),
    ("long_answers", "log_ratios", lambda drift: [rows for _, rows in drift.tables(drift.ledger())]),
    ("second_runs", "second_runs", lambda second: [second.table(second.STUDY.finished())]),
]  # fmt: skip


@pytest.mark.parametrize(("pages", "benchmark", "tables"), TABLES)
def test_what_a_benchmark_found_is_what_a_page_says(pages, benchmark, tables):
    made = list(tables(importlib.import_module(benchmark)))
    assert made
    folders = {True: ROOT, False: REPORTS}
    texts = [(folders["/" in page] / f"{page}.md").read_text() for page in pages.split()]
    for table in made:
        told = "\n".join(table)
        assert any(told in text for text in texts), f"{pages} lacks this table, which benchmarks/{benchmark}.py prints"


def test_no_results_are_of_a_quick_run():
    assert not [path.stem for path in RESULTS.glob("*.json") if results_of(path.stem).get("quick")]


def test_the_gain_on_addition_is_told_late_and_early():
    accuracies = {"stock": {}, "defaults": {}}
    for record in efficiency():
        if record["task"] == "addition" and record["arm"] in accuracies and record["seed"] < 5:
            assert record["budget"] == 12_800
            accuracies[record["arm"]][record["seed"]] = record["accuracy"]
    early = importlib.import_module("completions").paired(accuracies["defaults"], accuracies["stock"])
    found = results_of("learning")["tasks"]["addition"]
    late = importlib.import_module("learning").gain(results_of("learning"))
    assert found["runs"][0]["rollouts"] == 32_000
    page = (REPORTS / "learning.md").read_text()
    assert f"**{late}**" in page
    assert f"after 12,800 completions it is {early}" in page


def test_the_page_tells_of_the_seeds_on_the_lock_that_end_low():
    runs = results_of("learning")["tasks"]["lock"]["runs"]
    ends = sorted(run["curve"][-1] for run in runs if run["arm"] == "corrected")
    told = f"two with replay end at {ends[0]:.2f} and {ends[1]:.2f}"
    assert told in (ROOT / "docs" / "evidence.md").read_text()
    assert ends[2] > 0.99


def test_the_demo_trains_at_the_rates_that_the_benchmark_chose():
    from trl_replay.demo import LEARNING_RATE

    chosen = results_of("learning")["tasks"]["lock"]["chosen"]
    assert chosen["stock"] == chosen["corrected"] == LEARNING_RATE


def test_the_cards_say_what_was_measured_of_their_methods():
    from trl_replay_papers import METHODS, card

    report, results = importlib.import_module("papers_report"), results_of("papers")
    for name in METHODS:
        told = " ".join(card(name).sections["Measured here"].split())
        assert told == report.measured(results, name), "python benchmarks/papers_report.py --write"


def test_what_is_said_of_long_completions_was_measured_at_their_length():
    long, results = importlib.import_module("long"), results_of("long")
    assert (results["tokens"], results["group"]) == (long.TOKENS, long.GENERATIONS)


def test_what_replay_costs_on_a_gpu_is_what_the_pages_say():
    measured = results_of("gpu")["costs"]
    waiting, more = measured["synchronised"], []
    for timed in (waiting, measured["free running"]):
        more.append(timed["step with replay, ms"] - timed["stock step, ms"])
    page = words_of("benchmarks/reports/costs.md")
    step, inside = waiting["stock step, ms"], waiting["time in the seam, ms"]
    share = f"{inside / step:.0%}".replace("%", " %")
    assert f"takes {step:.0f} ms, and {inside:.0f} ms are spent in the seam, **{share}**" in page
    assert [round(each, -1) for each in more] == [30, 40]
    assert measured["forwards added"] == 0
    readme, evidence = map(words_of, ("README.md", "docs/evidence.md"))
    shares = [f"{ms / step:.0%}".removesuffix("%") for ms in more]
    assert f"took 30 to 40 ms longer, {shares[0]} to {shares[1]} % of {step:.0f} ms" in evidence
    checks = {check["name"]: check["detail"] for check in results_of("overhead")["checks"]}
    found = re.search(
        r"of (\d+) ms stock \((\d+) ms with replay\)", checks["time in the seam / stock step without generation"]
    )
    assert found
    on_cpu = f"{int(found[2]) / int(found[1]) - 1:.0%}".removesuffix("%")
    assert f"a step without generation took {on_cpu} % longer" in evidence
    stock, replay, *_ = results_of("long")["cases"]
    most, least = f"{replay['step, ms'] / stock['step, ms'] - 1:.0%}"[:-1], f"{replay['bytes a stored token']:.1f}"
    assert f"{most} % longer at 32,768 tokens" in evidence
    assert f"The buffer holds {least} bytes per stored token of answers of 32,768 tokens" in evidence
    assert f"| {on_cpu} to {most} % (CPU), {shares[0]} to {shares[1]} % (H200) longer;" in readme


def test_what_tells_beforehand_whether_replay_pays_is_what_the_page_says():
    report = importlib.import_module("when_it_pays_report")
    page = (ROOT / "docs" / "when-replay-pays.md").read_text()
    assert report.verdict(report.dots()) in " ".join(page.split())


def test_what_the_readme_says_of_the_preset_was_measured():
    rates = importlib.import_module("learning_rates")
    study, page = rates.study, (REPORTS / "when_it_pays.md").read_text()
    readme, done = " ".join(page.split()), study.STUDY.finished()
    assert "\n".join(rates.headline()) in page
    savings = {name: [rates.completions.saving(*pair) for pair in pairs] for name, (_, pairs) in rates.shown().items()}
    shares = {name: [saving.share for saving in of_name] for name, of_name in savings.items()}
    times = {name: f"{1 / np.median(of_name):.1f}" for name, of_name in shares.items()}
    passes = {task: study.TASKS[task].batches * study.TASKS[task].groups for task in study.AGAIN}
    assert (
        f"**{times['products, CPU']} to {times['products, GPU']} times fewer completions** on a list of 24 prompts "
        f"({passes['products'] // 24} passes); 1.1 to 1.6 in three runs of an example * {times['french, CPU']} times "
        f"fewer on a list of 40 ({passes['french'] // 40} passes) on a CPU; on a GPU, it got there on "
        f"{np.isfinite(shares['french, GPU']).sum()} of 3 seeds"
    ) in readme
    lead = words_of("README.md")
    assert f"(measured: {passes['products'] // 24} and {passes['french'] // 40})" in lead
    told = f"On French words, stock needed {times['french, CPU']} times as many on a CPU; on a GPU, the preset saved"
    assert f"{told} none." in lead
    everything = [share for of_name in shares.values() for share in of_name]
    assert f"Over all {len(everything)} pairs of seeds, the median is {1 / np.median(everything):.1f}." in readme
    ratio = rates.updates_per_batch
    at_tuned = [
        f"{1 / np.median([saving.share for saving in of_french]):.1f}"
        for of_french in (
            study.savings_of(done, "french")["sample_efficient"],
            ratio.savings_of(ratio.STUDY.finished(), "french"),
        )
    ]
    assert f"the saving on *french* is {at_tuned[0]} on a CPU, and {at_tuned[1]} on a GPU" in readme
    tuned = study.chosen_rates(done)
    bests = rates.best_of(rates.finished(), "french"), rates.best_of(ratio.STUDY.finished(), "french")
    assert bests == (tuned["french", "stock"] / 2,) * 2
    assert study.ADDED["topics", study.GOALS["topics"]] == tuned["topics", "stock"] / 2
    assert rates.best_of(rates.finished(), "products") == tuned["products", "stock"]
    alone = [saving for task in study.AGAIN for saving in study.savings_of(done, task)["stock, 2 updates"]]
    control, of_rates = "stock, 2 updates, KL", rates.finished()
    pairs = rates.paired(of_rates, "products", rates.best_of(of_rates, "products", control), control)
    matched = [rates.completions.saving(*pair) for pair in pairs]
    with_kl = [*study.savings_of(done, "french")["stock, 2 updates, KL"], *matched]
    assert np.isinf([saving.share for saving in (*alone, *with_kl)]).all()
    there = [
        (sum(np.isfinite(saving.share) for saving in found), len(found))
        for arm in ("stock, 2 updates", "sample_efficient")
        for found in (
            [saving for task in study.AGAIN for saving in study.savings_of(done, task)[arm]],
            [saving for task in study.AGAIN for saving in ratio.savings_of(ratio.STUDY.finished(), task, arm)],
        )
    ]
    assert (
        "{0} of {1} on a CPU and {2} of {3} on a GPU; with `beta=0.1` as well, 0 of {8} on a CPU; with the preset, "
        "{4} of {5} (of *french*, five seeds) and {6} of {7}.".format(*itertools.chain(*there), len(with_kl))
    ) in readme


def test_what_pages_say_of_long_answers_was_measured():
    """And the advice begins at the shortest length at which two updates gained nothing, and four did."""
    long, drift = importlib.import_module("long_answers"), importlib.import_module("log_ratios")
    done, page = long.STUDY.finished(), words_of("docs/evidence.md")

    def best(task, arm):
        return np.mean(long.ends(done, task, arm)[long.best_of(done, task, arm)])

    def both(arm):
        return best("128", arm), best("64", arm)

    told = (
        "**With four updates a batch, the preset ends at {:.2f} at 128 tokens, and at {:.2f} at 64**; stock at {:.2f} "
        "and {:.2f}, four updates alone at {:.2f} and {:.2f}, and with a KL term at {:.2f} and {:.2f}."
    )
    arms = ("topr, 4 updates", "stock", "stock, 4 updates", "stock, 4 updates, KL")
    assert told.format(*itertools.chain(*map(both, arms))) in page
    told = (
        "it gains nothing there**: {:.2f} and {:.2f}. With `topr(level='token')` {:.2f} and {:.2f}; two updates alone "
    )
    told += "{:.2f} and {:.2f}."
    assert told.format(*itertools.chain(*map(both, ("topr", "topr(level='token')", "stock, 2 updates")))) in page
    of_12 = (best("12", arm) for arm in ("topr", "topr(level='token')", "stock"))
    assert "At 12 tokens: {:.2f}, by token {:.2f}, stock {:.2f}.".format(*of_12) in page
    readme = words_of("README.md")
    at_128 = best("128", "topr, 4 updates"), best("128", "stock")
    assert "of 128 tokens, four updates reached {:.2f} and stock {:.2f}, for".format(*at_128) in readme
    for task in ("64", "128"):
        assert best(task, "topr") < best(task, "stock") < best(task, "topr, 4 updates")
    of_model = [line for line in drift.ledger() if (line["model"], line["rate"]) == (drift.SMOLLM2, 1e-5)]
    once = {
        line["tokens"]: np.mean(np.minimum(np.exp(line["sums"]), 1))
        for line in drift.pooled(of_model)
        if (line["update"], line["set"]) == (1, "used, A = -1")
    }
    assert f"weighs {once[16]:.2f} with `topr` at 16 tokens, and {once[256]:.0e} at 256 (SmolLM2-135M, 1e-05)" in page


def test_what_pages_say_of_the_second_model_was_measured():
    second = importlib.import_module("second_model")
    done = second.STUDY.finished()
    stock, preset, seeds = second.compared(done)
    readme, evidence = map(words_of, ("README.md", "docs/evidence.md"))
    told = f"Gemma 3 270M: stock {stock:.2f}, preset {preset:.2f} ({seeds} seeds; a lower learning rate"
    assert f"{told} might help stock)." in readme
    assert f"{stock:.2f} with stock at the best of three rates, {preset:.2f} with the preset at one" in evidence
    rates = {run.rate for run in done if run.arm == "stock" and run.seed == second.PILOT}
    assert len(rates) == 3
    assert {run.rate for run in done if run.arm == "stock" and run.seed in second.SEEDS} == {min(rates)}
    of_arms = {arm: second.ends(done, arm) for arm in second.ARMS}
    assert min(of_arms["sample_efficient"].values()) > max(of_arms["stock"].values()), (
        "as the report says of each seed"
    )


def test_the_readme_tells_each_arm_at_the_best_of_its_rates():
    rates = importlib.import_module("learning_rates")
    done, lead = rates.finished(), words_of("README.md")
    assert all(part in lead for part in rates.on_products(done).split(" … "))
    stock = np.mean(rates.ends(done, "products", "stock")[rates.best_of(done, "products")])
    alone = {
        arm: [np.mean(of) for of in rates.ends(done, "products", arm).values()]
        for arm in ("stock, 2 updates", "stock, 2 updates, KL")
    }
    assert max(itertools.chain(*alone.values())) < stock

    of_preset = rates.against_best(done, "products")[3e-6]
    fewer = rates.completions.times_fewer([one.share for one in of_preset])[:3]
    runs = [done[rates.Run("products", "stock", 3e-6, seed)] for seed in rates.updates_per_batch.SEEDS]
    tuned = rates.ends(done, "products", "sample_efficient")[3e-6]
    assert re.search(rf"\(stock: {stock:.2f}\) \| .* \| {np.mean(tuned):.2f} \|", lead)
    assert f"To its final accuracy, stock needed {fewer} times the preset's completions (median)." in lead
    handed_in = (ROOT / "docs" / "trl-integration.md").read_text()
    assert f"accuracy ended at {np.mean(tuned):.2f}, and TRL's alone at {stock:.2f}" in handed_in
    dead = np.mean([line["frac_reward_zero_std"] for lines in runs for line in lines[1:]])
    assert f"(SmolLM2, below: {dead:.2f})" in lead

    low, high = (np.mean(of) for of in rates.ends(done, "french", "stock, 2 updates").values())
    of_topics, _, _ = rates.control(rates.study.STUDY.finished(), "topics").partition(",")
    evidence = words_of("docs/evidence.md")
    least, *_, most = sorted(alone["stock, 2 updates"])
    assert f"on *products* at {least:.2f} to {most:.2f}, at 1e-06, 2e-06, and 3e-06" in evidence
    assert (
        "with `beta=0.1` at {:.2f} and {:.2f}, at 3e-06 and 1e-05".format(*alone["stock, 2 updates, KL"]) in evidence
    )
    assert f"On *topics*, where prompts are new, they end at {of_topics}: above the preset" in evidence
    assert f"on *french* at {low:.2f} at 1e-05 and {high:.2f} at 2e-05" in evidence


def test_what_pages_say_of_generation_that_pays_was_measured():
    rates = importlib.import_module("learning_rates")
    passes = rates.study.ARMS["sample_efficient"].passes
    savings = {name: [rates.completions.saving(*pair) for pair in pairs] for name, (_, pairs) in rates.shown().items()}
    least = {name: rates.completions.break_even(of_name, passes) for name, of_name in savings.items()}
    at_five = {
        name: rates.completions.middle([saving.hours(passes, 5) for saving in of_name])
        for name, of_name in savings.items()
    }
    assert np.isinf(least["french, GPU"])
    cpu, gpu = rates.finished(), rates.updates_per_batch.STUDY.finished()
    took = {
        (device, task): np.median(
            [
                line["replay/generation_passes"]
                for run, lines in done.items()
                if (run.task, run.arm) == (task, "sample_efficient")
                for line in lines
                if "replay/generation_passes" in line
            ]
        )
        for device, done, task in (("CPU", cpu, "french"), ("CPU", cpu, "products"), ("GPU", gpu, "products"))
    }
    assert round(took["CPU", "french"]) == round(took["CPU", "products"]) == 1
    of_gpu = took["GPU", "products"]
    assert f"less at {of_gpu / (of_gpu + 1):.0%}".replace("%", " %") in words_of("README.md")
    pages = ("benchmarks/reports/when_it_pays.md", "docs/when-replay-pays.md")
    readme, pays = map(words_of, pages)
    assert (
        f"saves time above {least['products, GPU']:.1f} on *products* on the GPU, {least['products, CPU']:.1f} on a "
        f"CPU, and {least['french, CPU']:.1f} on *french* on a CPU; never on *french* on the GPU. In our runs, it was "
        f"about 1 on a CPU, and {took['GPU', 'products']:.1f} on the GPU. Training on a batch takes {passes:.1f} "
        f"times as long"
    ) in readme
    lead = words_of("README.md")
    most, some = (f"{least[f'{task}, CPU'] / (least[f'{task}, CPU'] + 1):.0%}"[:2] for task in ("french", "products"))
    assert f"most of their time generating (over {most} %, we estimate; [find yours]" in lead
    assert f"{some} % at {least['products, CPU']:.1f}, {most} % at {least['french, CPU']:.1f}." in pays
    assert f"| {passes:.1f} times as long (computed) |" in lead
    assert f"for {passes + 2:.1f} times the update time" in lead
    assert (
        f"more than {least['products, CPU']:.1f} training passes over it on *products* ({least['products, GPU']:.1f} "
        f"on the GPU), and {least['french, CPU']:.1f} on *french*"
    ) in pays
    assert (
        f"At five, the preset takes {at_five['products, CPU']:.2f} and {at_five['french, CPU']:.2f} of stock's hours. "
        f"In these runs, generation took about 1 training pass on a CPU, and {took['GPU', 'products']:.1f} on the GPU."
    ) in pays


def test_what_pages_say_of_seconds_was_measured():
    rates = importlib.import_module("learning_rates")
    tuned = rates.updates_per_batch.studied()["products", "sample_efficient"]
    on_cpu, on_gpu = (
        rates.in_seconds(done, "products", tuned).split(", ")
        for done in (rates.finished(), rates.updates_per_batch.STUDY.finished())
    )
    pays, report = (words_of(page) for page in ("docs/when-replay-pays.md", "benchmarks/reports/when_it_pays.md"))
    assert f"{on_gpu[1]} of stock's time on a GPU, {on_cpu[1]} on a CPU (medians)" in report
    lead = words_of("README.md")
    less = [f"{1 - float(one[1]):.0%}".replace("%", " %") for one in (on_cpu, on_gpu)]
    assert f"| {less[0]} less where stock generated for 50 % of its time, {less[1]} less at 72 %; over 72 %," in lead
    by_seed = f"{on_cpu[0]} to {on_cpu[2]} and {on_gpu[0]} to {on_gpu[2]}"
    assert f"it took {on_cpu[1]} and {on_gpu[1]} of stock's seconds on *products* (by seed, {by_seed})" in pays


def test_what_the_readme_says_of_the_defaults_was_measured():
    report = importlib.import_module("when_it_pays_report")
    readme = words_of("benchmarks/reports/when_it_pays.md")
    of_defaults = {dot.task: dot for dot in report.dots() if dot.arm == "defaults"}
    stuck = sorted(dot.gain for dot in of_defaults.values() if dot.unsolved >= report.STUCK)
    assert len(stuck) == 4
    assert stuck[0] < 0.05
    assert (
        f"on three of four toy tasks like this, it raised the mean reward by {stuck[1]:.2f} to {stuck[-1]:.2f}"
        in readme
    )
    assert [dot.saves for dot in of_defaults.values() if dot.is_real] == [False] * 4
    assert "On none of four tasks did that save completions on every seed" in readme
    assert "on 3 of 4 stuck toy tasks, higher |" in (ROOT / "README.md").read_text()


def test_the_run_that_the_readme_asks_about_is_one_of_stock_on_products(said):
    """A log that `when_it_pays.py` keeps of stock at its rate; not one of the runs that are drawn."""
    printed = " ".join(said("report", RESULTS / "products_stock_log.jsonl").split())
    block = (ROOT / "README.md").read_text().partition("$ trl-replay report out")[2].partition("```")[0]
    for part in re.split(r"\[…\]|│", " ".join(block.split())):
        assert part.strip() in printed


def test_what_pages_say_of_learning_rates_was_measured():
    rates = importlib.import_module("learning_rates")
    done = rates.finished()
    pages = ("benchmarks/reports/when_it_pays.md", "docs/evidence.md")
    readme, evidence = map(words_of, pages)
    for task in rates.TASKS:
        assert rates.told(done, task) in evidence
        rate = rates.ends(done, task, "stock")
        assert f"{max(rate) / min(rate):.0f}-fold range on *{task}*, it ends {rates.ranges(done, task)}" in readme
        assert f"{rates.above(done, task)} rates on *{task}*" in readme


def test_what_pages_say_of_stock_at_its_best_rate_was_measured():
    rates = importlib.import_module("learning_rates")
    tuned = rates.study.chosen_rates(rates.study.STUDY.finished())
    savings = rates.against_best(rates.finished(), "french")[tuned["french", "sample_efficient"]]
    times = rates.completions.times_fewer([saving.share for saving in savings])
    evidence, pays = (words_of(page) for page in ("docs/evidence.md", "docs/when-replay-pays.md"))
    assert f"Of its end at that rate, the preset saves {times.replace(' (', ' times (')}" in evidence
    assert f"and {times.replace(' (', ' on *french* (')}. That is against stock at the best rate" in pays


def test_the_page_tells_on_how_many_seeds_of_the_study_the_reward_fell():
    study = importlib.import_module("when_it_pays")
    ends = {"stock": {}, "stock at 4e-5": {}}
    for run, lines in study.STUDY.finished().items():
        if run.task == "topics" and run.arm in ends and run.seed != study.PILOT:
            ends[run.arm][run.seed] = lines[-1]["reward"] / max(line["reward"] for line in lines[1:])
    fallen = {arm: [seed for seed, share in shares.items() if share < 0.5] for arm, shares in ends.items()}
    assert fallen == {"stock": [2], "stock at 4e-5": []}
    page = words_of("docs/when-replay-pays.md")
    assert f"On one of {len(ends['stock'])} seeds" in page


def test_what_pages_say_of_the_example_products_is_what_it_printed():
    readme, page = ((ROOT / name).read_text() for name in ("benchmarks/reports/when_it_pays.md", "examples/README.md"))
    runs = {(seed, arm): [*map(int, shares.split())] for seed, arm, shares in RUN_OF_PRODUCTS.findall(page)}
    assert len(runs) == 6
    first = []
    for seed in "012":
        stock, preset = runs[seed, "stock"], runs[seed, "preset"]
        assert len(stock) == len(preset) == 8
        assert preset[-1] > stock[-1]
        assert max(stock[:-1]) < stock[-1], "stock is at its end in the last pass alone"
        first.append(next(number for number, share in enumerate(preset, 1) if share >= stock[-1]))
    told = f"{first[0]}, {first[1]}, and {first[2]}"
    assert f"; {8 / max(first):.1f} to {8 / min(first):.1f} in three runs of an example" in readme
    assert f"reaches stock's last pass in pass {told} instead of 8" in " ".join(page.split())
    assert f"at stock's end after {told} of 8 passes" in " ".join(readme.split())
