"""Losses as people write them: bit-identical to stock while nothing is replayed, right by hand or refused while it is.

`make test` trains those of `FEW`, `make compat` all (`TRL_REPLAY_ALL_LOSSES=1`).
"""

import contextlib
import os
import re

import pytest
from support import DEAD, HALF, LIVE, Rewards, weights_hash
from users_losses import CASES, WEIGHT, stored_errors, watched

import trl_replay
from trl_replay.testing import make_trainer

FEW = (
    "shaped_in_a_copy", "shaped_in_the_batch", "reordered_known_keys_in_the_batch", "rows_of_no_advantage_dropped",
    "halves", "forward_before_on_flipped_rows", "whole_loss_that_with_a_teacher_first", "skipped_without_advantages",
    "scaled_with_rows_left_out", "a_patch_with_wraps_on_the_class", "rebuilt_around_the_loss",
    "log_probs_by_two_forwards", "whole_loss_that_of_its_own", "whole_loss_that_asks_whether_it_has_old",
    "whole_loss_that_reads_advantages_again_for_nothing", "whole_loss_that_reads_advantages_first_later",
    "whole_loss_that_reads_old_first_later", "whole_loss_that_shapes_before", "term_in_a_helper", "term_of_a_copy",
    "term_around_the_loss", "term_around_the_loss_in_a_helper", "term_around_the_loss_in_a_method",
    "asks_whether_the_batch_has_old",
)  # fmt: skip
SCRIPT = ([LIVE, HALF, DEAD], [DEAD, LIVE, DEAD], [DEAD] * 3)
CHOSEN = CASES if os.environ.get("TRL_REPLAY_ALL_LOSSES") else FEW
SETTINGS = {
    "dapo": ({"loss_type": "dapo"}, {"replay_max_fraction": 0.0}),
    "grpo with a reference, two iterations": (
        {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2},
        {"replay_dry_run": True},
    ),
}
"""Arguments of the trainer, and of replay where nothing shall be replayed."""
REFUSED = {
    "reordered_known_keys_in_the_batch": "other rows than its batch has, or in another order",
    "a_patch_with_wraps_on_the_class": "did not use 'old_per_token_logps'",
    "a_patch_of_trls_class": "did not use 'old_per_token_logps'",
    "rebuilt_around_the_loss": "has lost 'trl_replay_rows'",
    "by_the_type_of_itself": r"super\(type\(self\), self\)",
    "whole_loss_that_in_a_copy": "did not use 'old_per_token_logps'",
    "whole_loss_that_reads_advantages_first_later": "did not use 'advantages'",
    "whole_loss_that_reads_old_first_later": "did not use 'old_per_token_logps'",
    "whole_loss_that_reads_advantages_again_for_nothing": "did not use 'advantages'",
    "whole_loss_that_shapes_after": "changed 'advantages' of its batch",
    "whole_loss_in_a_helper": "in _compute_loss itself",
}
"""The others train right."""
ASK_FOR_OLD = (
    "rebuilt_from_known_keys", "widened_in_a_copy", "term_in_a_helper", "term_of_a_copy", "term_around_the_loss",
    "term_around_the_loss_in_a_helper", "term_around_the_loss_in_a_method", "asks_whether_the_batch_has_old",
)  # fmt: skip
"""They read old log-probs around the loss, if only to hand them on: without any in the batch, they are refused."""


def trained(folder, name, setting, compares=False, **replay):
    """A trainer of the case after 4 updates, its session, and how it was refused."""
    arguments = {"max_steps": 4, "seed": 3, "max_completion_length": 8, **SETTINGS[setting][0]}
    if name.startswith("whole_loss"):
        arguments["beta"] = 0.0
    trainer = make_trainer(folder, Rewards(*SCRIPT), trainer_class=watched(CASES[name]), **arguments)
    trainer.compares = compares
    session = trl_replay.attach(trainer, replay_start=0, **replay) if replay else None
    refused = ""
    with getattr(trainer, "patch", contextlib.nullcontext)():
        try:
            trainer.train()
        except trl_replay.SeamError as error:
            assert session is not None
            refused = str(error)
    return trainer, session, refused


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CHOSEN)
def test_187_a_users_loss_trains_as_stock_while_nothing_is_replayed(tmp_path, name, setting):
    trainer, session, refused = trained(tmp_path / "idle", name, setting, **SETTINGS[setting][1])
    if not refused:
        stock, _, _ = trained(tmp_path / "stock", name, setting)
        assert weights_hash(trainer) == weights_hash(stock)
    assert max(stored_errors(session, trainer.book), default=0) < 1e-4, "log-probs of the model that generated"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CHOSEN)
def test_187_a_users_loss_is_right_by_hand_with_replayed_rows_or_refused(tmp_path, name, setting):
    replay = {"replay_weight": WEIGHT}
    if name == "scaled_with_rows_left_out":
        if setting == "dapo":
            pytest.skip("dapo's denominator is the batch's: no factor")
        replay |= {"replay_unfilled": "exclude", "replay_max_fraction": 0.4}
    trainer, session, refused = trained(tmp_path, name, setting, compares=True, **replay)
    words = REFUSED.get(name, "reads 'old_per_token_logps'" if name in ASK_FOR_OLD and setting == "dapo" else "")
    if words:
        assert re.search(words, refused), refused
    else:
        assert refused == ""
        assert sum(rows for rows, _, _ in trainer.compared) > 0
    for rows, loss, gradient in trainer.compared:
        assert loss < 1e-4, f"with {rows} replayed rows"
        assert gradient < 2e-3, f"with {rows} replayed rows"
    assert max(stored_errors(session, trainer.book), default=0) < 1e-4
