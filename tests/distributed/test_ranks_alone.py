"""One rank does what the other does not, and nobody may wait forever. Found by an attack.

A launch of two ranks runs through the cases (ranks/alone.py), each with a process group of its own. Beside it, each of
the cases in which one rank waits in vain for the other has a launch to itself: there is little to compute.
"""

import pytest
from launches import side_by_side

SCOPES = ("process", "gathered")
SEAM = [
    "_calculate_rewards", "_compute_loss", "_generate_and_score_completions", "_get_per_token_logps_and_entropies",
    "_load_optimizer_and_scheduler", "_save_checkpoint",
]  # fmt: skip
SOON = 5.5
"""Seconds: the cases in which a rank waits in vain are at least that long."""

IN_VAIN = (("attach on one",), ("add on one",), ("save on one",), ("save on both", "resume from a checkpoint on one"))
"""The last of these resumes from what another saved."""


@pytest.fixture(scope="module")
def of(tmp_path_factory):
    """The results of both ranks in a case."""
    return side_by_side("alone", tmp_path_factory.mktemp("alone"), 2, *IN_VAIN)


TOLD = {
    "clear on one": ("SeamError", "decided differently"),
    "a plan edited on one": ("SeamError", "decided differently"),
    "scaling, gathered": ("SeamError", "give its rows different advantages"),
    "detach on both": ("AttachError", "detach between trainings"),
    "add other rows": ("ReplayError", "The processes read different groups"),
    "add fails on one": ("ReplayError", "rank 1: OutOfMemoryError: no memory on this rank"),
}
"""What one rank does of its own, and what both are told of it."""


@pytest.mark.parametrize("case", TOLD)
def test_43_what_one_rank_does_of_its_own_all_are_told_at_the_next_batch(of, case):
    kind, words = TOLD[case]
    for rank in of(case):
        assert rank["type"] == kind, rank["text"]
        assert words in rank["text"]


@pytest.mark.parametrize("case", ["rounding, gathered", "scaling, process"])
def test_164_advantages_may_differ_in_their_last_bits_and_where_no_buffer_is_shared(of, case):
    for rank in of(case):
        assert rank["type"] == "", rank["text"]


@pytest.mark.parametrize("iterations", ["same", "replay"])
def test_77_a_batch_that_one_rank_cannot_compose_is_told_to_all_before_the_next_collective(of, iterations):
    waiting, failing = of(f"composing fails on one, {iterations}")
    assert failing["type"] == "OutOfMemoryError"
    assert waiting["type"] == "SeamError"
    assert "rank 1: OutOfMemoryError: no memory on this rank" in waiting["text"]


def test_125_a_batch_that_one_rank_could_not_compose_is_no_false_alarm_in_the_next_training(of):
    for rank in of("training again after composing failed on one"):
        assert rank["type"] == "", rank["text"]


def test_131_a_batch_key_that_nobody_knows_is_told_to_all(of):
    for rank in of("a batch key on one"):
        assert rank["ours"], rank["text"]
        assert "found_by_a_tool" in rank["text"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("attach on one", "Replay waits on rank 0 with training: rank 1 did not reach it"),
        ("add on one", "Replay waits on rank 0 with adding groups to its buffer: rank 1 did not reach it"),
        ("save on one", "Replay waits on rank 0 with a checkpoint: rank 1 did not reach it"),
        ("resume from a checkpoint on one", "Replay waits on rank 0 with resuming from a checkpoint: rank 1 did not"),
    ],
)
def test_43_a_rank_that_calls_alone_waits_no_longer_than_the_timeout_and_names_the_other(of, case, words):
    alone, other = of(case)
    assert alone["type"] == "SeamError", alone["text"]
    assert words in alone["text"]
    assert alone["seconds"] > SOON
    if "resuming" in words:
        assert "Replay waits on rank 1 with training: rank 0 did not reach it" in other["text"]
    else:
        assert other["type"] not in ("", "SeamError"), "the other one waits in a collective of the trainer's"


@pytest.mark.parametrize(
    ("case", "words"), [("off on one", "use_replay is True"), ("no buffer on one", "replay_buffer_size is 8")]
)
def test_69_a_rank_on_which_replay_is_off_is_not_waited_for(of, case, words):
    on, off = of(case)
    assert on["type"] == "ConfigurationError", on["text"]
    assert f"{words} on rank 0 and " in on["text"]
    assert off["type"] not in ("", "ConfigurationError"), "a collective of the trainer's"


def test_ranks_with_buffers_of_their_own_compute_the_log_probs_of_all_groups_that_stay(of):
    ranks = of("add too many")
    for rank in ranks:
        assert rank["type"] == "", rank["text"]
        (logps,) = rank["returned"]
        assert len(logps) == 4
        assert all(logp < 0 for logp in logps)
    assert ranks[0]["forwards"] == ranks[1]["forwards"] <= 2


def test_43_export_on_one_rank_needs_no_other(of):
    ranks = of("export on one")
    assert [rank["type"] for rank in ranks] == ["", ""]
    assert ranks[0]["returned"] == ["out-00000-of-00002.parquet"]


@pytest.mark.parametrize("scope", SCOPES)
def test_45_a_session_of_two_processes_keeps_no_model_alive_that_stock_would_free(of, scope):
    for rank, stock in zip(of(f"outlived, {scope}"), of("outlived, stock"), strict=True):
        assert rank["type"] == "", rank["text"]
        assert rank["alive"] == stock["alive"]
        assert "model" not in rank["alive"]
        assert rank["left"] > 0, "what is stored can be read"
