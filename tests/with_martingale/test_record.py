"""Martingale records by itself with which weights each token was sampled and trained on, and its log-probs then: what
replay logs of ages and ratios is what stands in that record."""

import sys
from collections import defaultdict

import pytest
from martingale.diagnostics.staleness import Bucket, attribute, decompose, scored_tokens
from martingale.integrations.trl import MartingaleRecorder, build_trainer_class
from support import DEAD, HALF, LIVE, WINDOW, Rewards

import trl_replay
from trl_replay.testing import make_tokenizer, make_trainer

SPARSE = [DEAD, DEAD, DEAD], [LIVE, DEAD, HALF], [DEAD, LIVE, DEAD]


@trl_replay.hookimpl
def trl_replay_fields():
    yield trl_replay.FieldSpec("martingale_row_id", layout="row")


@pytest.fixture(params=[{}, WINDOW], ids=["a batch at once", "in micro-batches"])
def trained(request, tmp_path, plug):
    """A trainer after 40 updates with replay, 480 completions."""
    plug(sys.modules[__name__], "martingale")
    flight = MartingaleRecorder(str(tmp_path / "record"), tokenizer=make_tokenizer())

    def recorded(**given):
        return build_trainer_class()(flight_recorder=flight, halt_on_error=False, **given)

    settings = {"max_steps": 40, "logging_steps": 1, **request.param}
    trainer = make_trainer(tmp_path, Rewards(*SPARSE), trainer_class=recorded, **settings)
    session = trl_replay.attach(trainer, replay_plugins=["martingale"])
    trainer.train()
    assert session.totals.counters["replaced"] > 40
    return trainer


def test_its_lags_and_effective_sample_sizes_are_those_that_replay_logs(trained, capsys):
    record = trained.flight_recorder.recorder.ledger
    stale, ages = defaultdict(lambda: Bucket(0)), defaultdict(dict)
    for token in scored_tokens(record):
        if token.lag:
            stale[token.train_step].add(token)
            ages[token.train_step][token.sequence_digest] = token.lag
    logged = [entry for entry in trained.state.log_history if "replay/age_mean" in entry]
    assert [entry["step"] - 1 for entry in logged] == sorted(stale), "steps without replay have no stale token"
    for entry in logged:
        step = entry["step"] - 1
        found = stale[step].summary()["float_informational"]
        assert entry["replay/age_mean"] == pytest.approx(sum(ages[step].values()) / len(ages[step]))
        assert entry["replay/ess"] == pytest.approx(found["ess_fraction"])
        assert entry["replay/ratio_mean"] == pytest.approx(found["ratio_mean"])
    share = attribute(decompose(record))["float_informational"]["staleness_share"]
    rows = {name: trained.flight_recorder.stats[name] for name in ("sequences", "unmatched_rows", "nan_rows")}
    with capsys.disabled():
        print(f"{rows}, {len(logged)} updates with replay, staleness {share:.5f} of what is off-policy")
    assert rows == {"sequences": 480, "unmatched_rows": 0, "nan_rows": 0}
    assert share >= 0.997


def test_it_notices_that_a_batch_of_dead_groups_trains_nothing(trained):
    """Its alarm would end the run."""
    errors = [(alarm.kind, alarm.step) for alarm in trained.martingale_monitor.alarms if alarm.level == "error"]
    assert errors == [("weights_unchanged", 2)]
