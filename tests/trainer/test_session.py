"""A session in the user's hands: clear, and what it tells."""

import pytest
import torch
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards
from transformers import TrainerCallback

import trl_replay
from trl_replay.data.counters import Tally, Totals
from trl_replay.errors import RefusedError
from trl_replay.testing import make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE])


@pytest.fixture
def trainer(tmp_path):
    return make_trainer(tmp_path, Rewards(*SCRIPT))


def test_a_loop_of_ones_own_is_told_that_replay_has_seen_no_update(tmp_path):
    def go(updates, hears):
        trainer = make_trainer(tmp_path, Rewards(*[[LIVE, DEAD, HALF]] * 4), max_steps=updates)
        session = trl_replay.attach(trainer, replay_start=0)
        optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        for _, batch in zip(range(updates), trainer.get_train_dataloader(), strict=False):
            trainer.training_step(trainer.model, batch, None)
            optimizer.step()
            optimizer.zero_grad()
            trainer.state.global_step += 1
            if hears:
                session.updated()
        return session

    with pytest.warns(UserWarning, match=r"replay has seen no update: .* call session\.updated\(\)"):
        assert go(3, hears=False).totals.counters["replaced"] == 0
    assert go(3, hears=True).totals.counters["replaced"] > 0


def test_the_summary_says_why_nothing_was_replayed(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), max_steps=2)
    session = trl_replay.attach(trainer)
    assert "no generation batch" in session.explain()
    trainer.train()
    told = session.explain()
    assert "6 groups, 6 dead (100%), 0 replaced" in told
    assert "nothing was replayed:" in told
    assert "x the buffer was empty: no live group has been stored yet" in told


@pytest.mark.parametrize("rows", [8, 16])
def test_130_after_an_interrupted_training_batches_may_have_another_size(tmp_path, rows):
    def rewards(completions, **_):
        return [1.0, 0.0, 0.0, 0.0] * (len(completions) // 4)

    class Stop(TrainerCallback):
        def on_step_end(self, *_, **__):
            raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, rewards, max_steps=2)
    session = trl_replay.attach(trainer)
    trainer.add_callback(Stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Stop)
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = trainer.args.generation_batch_size = rows
    trainer.train()
    assert "3 x a group was refused: batches have another size since it was generated" in session.explain()
    assert len(session.buffer) == 2 * rows // 4


def test_the_summary_of_one_rank_of_several_tells_what_all_did_together():
    totals = Totals()
    everywhere = {"groups": 6, "generated": 6, "dead": 3, "replaced": 2}
    totals.add(Tally(groups=3, generated=3, dead=2, replaced=1), of_all_ranks=everywhere)
    told = totals.explain(4, rank=1, ranks=2)
    assert "replay on rank 1 of 2: 1 generation batches, 3 groups, 2 dead (67%), 1 replaced" in told
    assert "all ranks together: 6 groups, 3 dead (50%), 2 replaced" in told
    assert "all ranks" not in totals.explain(4)


def test_before_the_first_batch_explain_tells_why(tmp_path):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    session = trl_replay.attach(trainer)
    with pytest.warns(UserWarning, match="No group of the rows given was added"):
        session.add([{"prompt": "1=", "completion": "2", "reward": 1.0}])
    told = session.explain()
    assert "was trainer.train() called?" in told
    assert "1 x a group was refused: it has fewer rows" in told


def test_without_a_buffer_groups_that_are_left_out_count_as_none_that_were_trained_on(tmp_path):
    settings = {"max_steps": 2, "replay_buffer_size": 0, "replay_unfilled": "exclude"}
    session = train(tmp_path, [LIVE, DEAD, DEAD], replaced=0, **settings).session
    assert "100% of the groups trained on were live" in session.explain()


def test_a_refusal_names_what_the_preset_sets(trainer):
    with pytest.raises(RefusedError, match="replay_preset='sample_efficient' sets replay_iterations"):
        trl_replay.attach(trainer, replay_preset="sample_efficient")
