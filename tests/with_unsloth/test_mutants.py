"""Damages what lies between Unsloth's loss and the tap, one change at a time: the comparison by hand must notice."""

from functools import partial

import pytest
import torch
from real_unsloth import follow_scored, trainer_of
from scenarios import follow
from trl_replay_unsloth import layout
from trl_replay_unsloth import loss as unsloth
from trl_replay_unsloth.contract import UNSLOTH_LEFT_PAD, LeftPacked

from trl_replay.compat import OLD_LOGPS
from trl_replay.loss.tap import Tap

Patch = pytest.MonkeyPatch
EXCLUDED, ITERATED = "excluded, grpo, accumulation", "dr_grpo, two iterations"


def shift(patch, name):
    stock = getattr(LeftPacked, name)
    patch.setattr(LeftPacked, name, lambda self, *given: stock(self, *given).roll(1, dims=1))


def packs_off_by_one(patch):
    shift(patch, "pack")


def unpacks_off_by_one(patch):
    shift(patch, "unpack")


def as_trl_has_them(patch):
    """Old log-probs are given as in TRL, `(b, C)`: Unsloth's loss then takes M for 0."""
    patch.setattr(LeftPacked, "pack", lambda self, values, width: values)


def completions_first(patch):
    """What is packed begins where the completion of the row with the most padding does."""

    def pack(self, values, width):
        return torch.nn.functional.pad(values, (0, width - values.size(1)))

    patch.setattr(LeftPacked, "pack", pack)


def gradients_are_not_scaled(patch):
    patch.setattr(unsloth.ScaledGradient, "apply", lambda values, factor: values)


def gradients_are_scaled_twice(patch):
    scale = unsloth.ScaledGradient.apply
    patch.setattr(unsloth.ScaledGradient, "apply", lambda values, factor: scale(values, factor * factor))


def stored_log_probs_are_ignored(patch):
    patch.setattr("trl_replay.loss.supply.Supply.put_into", lambda self, micro, logps: torch.zeros_like(logps).bool())


def advantages_are_not_weighed(patch):
    """The correction's weights do not reach the loss."""
    patch.setattr("trl_replay.loss.supply._signal", lambda advantages, *others: advantages)


def silent_rows_train(patch):
    patch.setattr("trl_replay.loss.supply.MicroBatch.silence", lambda self, rows, logps: None)


def references_stay_packed(patch):
    """What Unsloth scored goes on with its columns cut off at the completions' width."""

    def as_trl(trainer, batch):
        width = batch["completion_ids"].size(1)
        cut = {key: value[:, :width].clone() for key, value in unsloth._packable(batch).items()}
        return {key: value for key, value in {**batch, **cut}.items() if key != UNSLOTH_LEFT_PAD}

    patch.setattr(unsloth, "as_trl", as_trl)


def old_ones_of_the_batch_are_lost(patch):
    """Of rows with old log-probs in the batch, the loss gets the present ones."""
    logps = Tap.logps

    def tapped(self, micro, result):
        micro.batch.pop(OLD_LOGPS, None)
        return logps(self, micro, result)

    patch.setattr(Tap, "logps", tapped)


SCORED = "what Unsloth scored"
MUTANTS = {
    "packs off by one": (packs_off_by_one, "dapo"),
    "unpacks off by one": (unpacks_off_by_one, "dapo"),
    "as TRL has them": (as_trl_has_them, ITERATED),
    "completions first": (completions_first, "dapo"),
    "gradients are not scaled": (gradients_are_not_scaled, EXCLUDED),
    "gradients are scaled twice": (gradients_are_scaled_twice, EXCLUDED),
    "stored log-probs are ignored": (stored_log_probs_are_ignored, "dapo"),
    "weights are lost": (advantages_are_not_weighed, "half of token weights: truncated, beta"),
    "silent rows train": (silent_rows_train, "excluded, dapo, beta"),
    "references stay packed": (references_stay_packed, SCORED),
    "old log-probs of the batch are lost": (old_ones_of_the_batch_are_lost, ITERATED),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(tmp_path, monkeypatch, name):
    """By the comparison alone: the probe at attach is left out."""
    damage, combination = MUTANTS[name]
    monkeypatch.setattr(layout, "check_layout", lambda trainer: None)
    damage(monkeypatch)
    check = (
        partial(follow_scored, tmp_path)
        if combination == SCORED
        else partial(follow, tmp_path, combination, trainer_of)
    )
    with pytest.raises((AssertionError, RuntimeError, KeyError)) as noticed:
        check()
    print(f"{name}: {type(noticed.value).__name__}: {str(noticed.value)[:160]}")
