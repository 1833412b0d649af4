"""Refusals while a session's parts are put together, before anything is patched."""

import pytest
from packaging.version import Version
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.errors import RefusedError
from trl_replay.testing import make_trainer


def test_17_groups_that_straddle_processes_are_refused_with_the_numbers(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    monkeypatch.setattr(trainer.args, "per_device_train_batch_size", 6)
    with pytest.raises(RefusedError, match=r"6 rows .* num_generations=4"):
        trl_replay.attach(trainer)


SCRIPT = ([LIVE, HALF, DEAD], [DEAD, DEAD, DEAD])


def test_an_age_limit_below_the_generation_interval_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), num_iterations=2)
    with pytest.raises(RefusedError, match="replay_max_age=1 is less than the 2 updates"):
        trl_replay.attach(trainer, replay_max_age=1)


@pytest.mark.parametrize(("release", "refuses"), [("1.13.0", True), ("1.14.0", False)])
def test_the_liger_loss_up_to_trl_1_13_is_refused_with_the_release_and_the_remedies(
    tmp_path, monkeypatch, release, refuses
):
    monkeypatch.setattr("trl_replay.compat.installed", lambda: Version(release))
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    trainer.use_liger_kernel = True
    before = dict(trainer.__dict__)
    if not refuses:
        trl_replay.attach(trainer)
        return
    told = f"use_liger_kernel=True makes TRL {release} .*install TRL 1.14 or newer, or set use_liger_kernel=False"
    with pytest.raises(RefusedError, match=told):
        trl_replay.attach(trainer)
    assert trainer.__dict__ == before
    trainer.use_liger_kernel = False
    trl_replay.attach(trainer)


def test_per_refuses_a_plugin_that_draws_in_the_samplers_place(tmp_path):
    draws = {"sample": lambda table, count, context: list(range(count))}
    with pytest.raises(trl_replay.ConfigurationError, match="the plugin 'mine' may draw in its place"):
        train(tmp_path, *SCRIPT, hooks=draws, replay_correction="per", replay_sampler="uniform")


@pytest.mark.parametrize(("tokens", "updates", "told"), [(64, 2, 1), (63, 2, 0), (64, 4, 0)])
def test_the_preset_tells_of_long_answers_from_the_length_that_was_measured(tmp_path, recwarn, tokens, updates, told):
    settings = {"beta": 0.1, "num_iterations": updates, "max_completion_length": tokens}
    trainer = make_trainer(tmp_path, lambda completions, **_: [0.0] * len(completions), **settings)
    trl_replay.attach(trainer, replay_preset="sample_efficient")
    assert sum("set num_iterations=4" in str(each.message) for each in recwarn) == told
