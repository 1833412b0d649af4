"""Settings that can't be used with AsyncGRPOTrainer, and trainers of another shape: refused before training."""

import pytest
from queued import Script, all_live, make_async_trainer, stand_in
from teacher import rows
from trl_replay_async import compat as asynchronous

import trl_replay
from trl_replay import compat
from trl_replay.errors import ContractError


@pytest.fixture
def trainer(policy, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return make_async_trainer(tmp_path, policy, Script(all_live))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"replay_mixer": "inject", "replay_sampler": "same_prompt"}, r"replay_mixer='inject'.*replay_mixer='whole'"),
        ({"replay_advantages": "joint"}, r"replay_advantages='joint'.*'stored'"),
        ({"replay_refill": "new(rounds=2)"}, r"replay_refill='new.*leave it out"),
        ({"replay_iterations": "replay"}, r"replay_iterations='replay'.*'same'"),
        ({"replay_kl": "fresh"}, r"replay_kl='fresh'.*'all'"),
        ({"replay_record": "forward"}, r"replay_record='forward'.*'auto'"),
        ({"replay_unfilled": "mask"}, r"replay_unfilled='mask'.*'exclude'"),
        ({"replay_max_weight": 2.0}, r"replay_max_weight=2.0.*leave it out"),
        ({"replay_task_columns": ["level"]}, r"replay_task_columns=\['level'\].*use \[\]"),
        ({"replay_correction": "truncated"}, r"replay_correction='truncated'.*replay_correction='ratio'"),
        ({"replay_selector": "always"}, r"replay_selector='always'.*'zero_std'"),
        ({"replay_scope": "gathered"}, r"replay_scope='gathered'.*'auto'"),
        ({"replay_retire_passes": 9}, r"replay_retire_passes=9.*lower it"),
        ({"replay_reward": "nobody"}, r"replay_reward='nobody' names none"),
    ],
)
def test_a_setting_that_a_queue_can_not_do_is_refused(trainer, settings, says):
    before = trainer.rollout_queue
    with pytest.raises(trl_replay.ReplayError, match=says):
        trl_replay.attach(trainer, **settings)
    assert trainer.rollout_queue is before
    trl_replay.attach(trainer)  # nothing is left of it


def test_groups_without_log_probs_are_refused_before_training(trainer):
    session = trl_replay.attach(trainer)
    with pytest.raises(trl_replay.ReplayError, match=r"lack log-probs.*session\.export\(\)"):
        session.add(rows())
    assert len(session.buffer) == 0


@pytest.mark.parametrize("hook", ["inputs", "advantages", "select", "mix", "correct", "plan"])
def test_a_plugin_whose_hook_nothing_would_call_is_refused_by_name(trainer, plug, hook):
    name = plug(type("Plugin", (), {f"trl_replay_{hook}": trl_replay.hookimpl(lambda self: None)})())
    with pytest.raises(trl_replay.ReplayError, match=rf"the plugin '{name}' has trl_replay_{hook}.*leave it out"):
        trl_replay.attach(trainer, replay_plugins=[name])


def test_178_a_plugin_for_the_other_trainer_is_refused_before_its_own_check_reads_this_one(trainer, plug):
    """Whose settings it lacks: an AttributeError would name no remedy."""

    class Filters:
        @trl_replay.hookimpl
        def trl_replay_preflight(self, trainer, config):
            return [] if trainer.args.scale_rewards == "group" else ["it needs groups"]

        @trl_replay.hookimpl
        def trl_replay_advantages(self, context): ...

    name = plug(Filters())
    with pytest.raises(trl_replay.ReplayError, match=rf"'{name}' has trl_replay_advantages.*leave it out"):
        trl_replay.attach(trainer, replay_plugins=[name])


def test_a_trainer_of_another_shape_is_refused_with_its_release(trainer, monkeypatch):
    monkeypatch.delattr(trainer, "_trained_groups")
    with pytest.raises(ContractError, match=r"of TRL .* can't be attached to: .*_trained_groups"):
        trl_replay.attach(trainer)
    monkeypatch.undo()
    sample = type("Sample", (), {"__dataclass_fields__": dict.fromkeys(asynchronous.OF_SAMPLE[:-1])})
    monkeypatch.setattr(asynchronous, "rollout_sample", lambda: sample)
    with pytest.raises(ContractError, match="its samples have no 'metrics'"):
        trl_replay.attach(trainer)


def test_a_release_that_was_not_tested_is_refused(trainer, monkeypatch):
    monkeypatch.setattr(compat, "version", lambda _: "1.15.0")
    monkeypatch.setattr(asynchronous, "version", lambda _: "1.15.0")
    with pytest.raises(ContractError, match=r"TRL 1\.15\.0 .* whose AsyncGRPOTrainer .*>=1\.16"):
        trl_replay.attach(trainer)
    monkeypatch.setenv(compat.UNTESTED_VARIABLE, "1")
    trl_replay.attach(trainer)


def test_attaching_in_the_midst_of_training_is_refused(trainer):
    trainer.is_in_train = True
    with pytest.raises(trl_replay.AttachError, match="before train"):
        trl_replay.attach(trainer)
