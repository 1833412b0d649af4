"""The corrections of papers in the trainer's loss, which equals one computed by hand.

Each has the form of one of trl_replay's own, which goes through every loss type there; here each goes through two.
What the masks give is also computed by hand in test_corrections.py, and so is m2po's, which is over all rows.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from bounded import check_bounds
from corrected import MASKS, OF_TOKENS, PAPERS, PAPERS_TOKEN_WEIGHTS, TWO_LOSSES, allowed
from credit import CREDITED, Credit, followed
from replaying import build, check_batches, check_losses, iterate_corrected, replayed_signal, train_corrected
from support import DEAD, LIVE, LOSSES, Rewards

import trl_replay
from trl_replay.base.validation import Named
from trl_replay.registry import registry
from trl_replay.testing import CorrectionContract, make_trainer


def test_every_correction_is_computed_by_hand() -> None:
    known = {spec.name for plugin, spec in registry().strategies("correction") if plugin.name == "papers"}
    assert known == {*PAPERS, "m2po"}


@pytest.mark.parametrize(("correction", "loss", "level", "beta"), allowed(PAPERS, [0.1], TWO_LOSSES))
def test_the_trainers_loss_is_the_one_computed_by_hand(
    tmp_path: Any, correction: str, loss: str, level: str, beta: float
) -> None:
    settings = {"loss_type": loss, "importance_sampling_level": level, "beta": beta}
    trainer, session = train_corrected(tmp_path, correction, **settings)
    assert session.totals.counters["replaced"] == 4
    if correction in MASKS:
        kept = replayed_signal(trainer).ne(0)
        assert 0 < int(kept.sum()) < len(kept), "the limits are such that some is masked and some is not"


@pytest.mark.parametrize("correction", MASKS)
def test_a_mask_that_keeps_nothing_leaves_the_fresh_rows_alone(tmp_path: Any, correction: str) -> None:
    """All but the rows of a positive advantage, which a veto never takes out, and the trigger of `suffix_veto`."""
    limits = {"threshold": 1e-30} if correction == "k3_mask" else {"low": 1e5, "high": 1e6}
    vetoes = ("veto_negative", "suffix_veto")
    replay = {"replay_correction": str(Named(correction, limits))}
    trainer, _ = train_corrected(tmp_path, correction, replay, by_hand=False, beta=0.1)
    signal = replayed_signal(trainer)
    assert len(signal) > 16
    assert bool((signal < 0).any()) == (correction == "suffix_veto")
    assert bool((signal > 0).any()) == (correction in vetoes)
    gated = [log.get("replay/gated_fraction", 0.0) for log in trainer.state.log_history if "replay/ess" in log]
    assert gated, "the share of rows of which nothing is left"
    if correction in vetoes:
        assert all(0 < share < 1 if correction == "veto_negative" else share == 0 for share in gated)
    else:
        assert set(gated) == {1}


@pytest.mark.parametrize(("correction", "level"), [*((name, "token") for name in PAPERS), ("geo_mask", "sequence")])
def test_loss_and_gradient_of_every_iteration_are_those_by_hand_with(
    tmp_path: Any, correction: str, level: str
) -> None:
    iterate_corrected(tmp_path, correction, level)


@pytest.mark.parametrize("correction", ["veto_negative", "suffix_veto"])
def test_a_veto_goes_by_the_sign_of_each_tokens_advantage(tmp_path: Any, correction: str) -> None:
    settings = {"max_steps": 4, "learning_rate": 5e-2, "max_completion_length": 5}
    trainer = build(tmp_path, Rewards(*CREDITED), trainer_class=Credit, **settings)
    trainer.gradients, trainer.correction = True, correction
    chosen = {"replay_correction": str(Named(correction, MASKS[correction]))}
    session, watch = followed(trainer, **chosen)
    check_batches(watch)
    check_losses(trainer)
    assert session.totals.counters["replaced"] > 0


@pytest.mark.parametrize("loss", LOSSES)
def test_37_no_log_probs_of_replayed_tokens_give_a_ruinous_loss_or_gradient(tmp_path: Any, loss: str) -> None:
    check_bounds(tmp_path, [*PAPERS, "m2po"], loss, "token", bias_correction=True)


@pytest.mark.parametrize("correction", [*PAPERS, "m2po"])
@pytest.mark.parametrize("test", [test for test in vars(CorrectionContract) if test.startswith("test_")])
def test_every_correction_keeps_its_contract(correction: str, test: str) -> None:
    strategy = registry().resolve("correction", correction).make()
    suite = type("Suite", (CorrectionContract,), {"strategy": staticmethod(strategy)})
    getattr(suite(), test)()


NAN, INF = float("nan"), float("inf")
BAD_ARGUMENTS = [
    ("geo_mask", "low", [0]),
    ("geo_mask", "high", [0.5]),
    ("k3_mask", "threshold", [0, NAN]),
    ("icepop", "low", ["0.5"]),
    ("icepop", "high", [0.5]),
    ("outlier_mask", "high", [INF]),
    ("outlier_mask", "low", [-1e-4]),
    ("veto_negative", "low", [None]),
    ("veto_negative", "high", [0.1]),
    ("suffix_veto", "high", [0.05]),  # below `low`
    ("m2po", "threshold", [-1]),
    ("decoupled", "cap", [True]),
    ("shaped", "gamma", [0.0]),
    ("gipo", "sigma", [0]),
]


@pytest.mark.parametrize(
    ("name", "argument", "value"), [(*row, value) for *row, values in BAD_ARGUMENTS for value in values]
)
def test_a_bad_argument_is_named_with_its_correction_and_the_remedy(name: str, argument: str, value: Any) -> None:
    named = re.escape(f"{name}: {argument}={value!r}")
    with pytest.raises(trl_replay.ConfigurationError, match=rf"{named}( and high=\S+)? can't be used: give "):
        registry().resolve("correction", name, {argument: value}).make()


@pytest.mark.parametrize("correction", sorted(PAPERS_TOKEN_WEIGHTS))
def test_token_weights_are_refused_by_name_where_they_are_not_exact(tmp_path: Any, correction: str) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]), importance_sampling_level="sequence")
    with pytest.raises(trl_replay.ConfigurationError, match=f"replay_correction='{correction}' weighs single tokens"):
        trl_replay.attach(trainer, replay_correction=correction)
    rest = sorted({*PAPERS, "m2po"} - OF_TOKENS)
    for name in rest:
        with trl_replay.attached(trainer, replay_correction=name):
            pass
    assert len(rest) == 4
