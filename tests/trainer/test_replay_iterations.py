"""Iterations 2 … num_iterations on groups drawn anew (`replay_iterations`), and whose KL term counts (`replay_kl`)."""

import pytest
import resuming
from replaying import ITERATED as SCRIPT
from replaying import ITERATING as REPLAY
from replaying import Checked, build, check_losses, watched
from scenarios import KL, train
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.errors import RefusedError
from trl_replay.testing import make_trainer

pytestmark = pytest.mark.usefixtures("all_metrics")


RIGHT = [1.0, 1.0, 1.0, 1.0]
REFERRED = ([LIVE, HALF, LIVE], [DEAD, RIGHT, LIVE], [RIGHT, HALF, DEAD])


def referred(folder, **settings):
    """A trainer with a reference model."""
    defaults = {"beta": 0.3, "num_iterations": 2, "max_steps": 10, "trainer_class": Checked}
    return make_trainer(folder, Rewards(*REFERRED), **{**defaults, **settings})


def test_the_preset_sample_efficient_needs_two_settings_of_the_trainer_and_trains(tmp_path):
    trainer = build(tmp_path, Rewards(*SCRIPT))
    with pytest.raises(
        RefusedError, match=r"(?s)beta=0: set beta=0.1.*to copy: GRPOConfig\(beta=0.1, num_iterations=2\)"
    ):
        trl_replay.attach(trainer, replay_preset="sample_efficient")
    trainer = referred(tmp_path, loss_type="grpo", num_iterations=3, max_steps=9)
    session = trl_replay.attach(trainer, replay_preset="sample_efficient")
    trainer.correction = "topr"
    watched(trainer, session).counts_kl = KL["all_wrong"]
    trainer.train()
    check_losses(trainer)
    assert session.totals.counters["iterated"] > 0


def batches_drawn(session):
    """From now on, the batch of each further iteration."""
    drawn = []
    iterate = session.step.iterate
    session.step.iterate = lambda template: drawn.append(iterate(template)) or drawn[-1]
    return drawn


@pytest.mark.parametrize(
    "evaluation", [{}, {"eval_strategy": "steps", "eval_steps": 1, "eval_prompts": ["1=", "12="]}]
)
def test_an_iteration_begins_once_also_where_the_trainer_evaluates(tmp_path, evaluation):
    trainer = make_trainer(tmp_path, resuming.digits, num_iterations=3, max_steps=9, **evaluation)
    drawn = batches_drawn(trl_replay.attach(trainer, **REPLAY))
    trainer.train()
    assert len(drawn) == 6


@pytest.mark.parametrize("at", [4, 5, 6])
def test_where_replay_ends_in_the_midst_of_iterations_training_goes_on(tmp_path, at):
    def end(session):
        trl_replay.detach(session.trainer)

    run = train(tmp_path, *SCRIPT, at={at: end}, num_iterations=3, max_steps=12, **REPLAY)
    assert run.trainer.state.global_step == 12
    assert run.counters["iterated"] > 0
    assert "_prepare_inputs" not in run.trainer.__dict__


@pytest.mark.parametrize(
    ("trainer", "settings", "words"),
    [
        (
            {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
            {},
            "does not divide steps_per_generation=1",
        ),
        (
            {"num_iterations": 2},
            {"replay_mixer": "inject", "replay_sampler": "same_prompt"},
            "use replay_mixer='whole'",
        ),
        ({"num_iterations": 2}, {"replay_buffer_size": 0, "replay_unfilled": "mask"}, "replay_buffer_size=0"),
        (
            {"num_iterations": 2, "beta": 0.1},
            {"replay_kl": "all_wrong", "replay_refill": "new(rounds=2)"},
            "replay_kl='all_wrong'.*replay_refill='new.*leave that out",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_at_attach(tmp_path, trainer, settings, words):
    made = make_trainer(tmp_path, Rewards(*SCRIPT), **trainer)
    with pytest.raises(RefusedError, match=words):
        trl_replay.attach(made, **{**REPLAY, **settings})
