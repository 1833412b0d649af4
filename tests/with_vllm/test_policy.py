"""vLLM samples from the policy of each update: in single precision its log-probs are the policy's own."""

import torch
from generating import PROMPTS, Coins, watched
from real_vllm import Followed, count_syncs, rows_of
from replaying import replay
from resuming import digits
from support import DEAD, HALF, LIVE, Rewards, record, replayed, weights_hash

import trl_replay

ENGINE = {"dtype": "float32"}
SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])


def test_weights_are_synced_once_an_update_and_vllm_reports_the_policys_log_probs(tmp_path, engine):
    trainer = engine.trainer(tmp_path, Rewards(*SCRIPT), trainer_class=Followed, learning_rate=3e-2)
    syncs = count_syncs(trainer)
    replay(trainer)
    assert syncs == [0, 1, 2, 3, 4]
    trainer.check_policy()


def test_lora_weights_are_merged_for_vllm_and_taken_apart_again(tmp_path, engine):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    settings = {"arguments": {"peft_config": adapter}, "trainer_class": Followed, "learning_rate": 3e-2}
    trainer = engine.trainer(tmp_path, Rewards(*SCRIPT), **settings)
    base = trainer.model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    before = base.detach().clone()
    replay(trainer)
    trainer.check_policy()
    torch.testing.assert_close(base, before, rtol=0, atol=1e-5)


def test_dynamic_sampling_generates_several_times_with_one_sync(tmp_path, engine):
    coins = Coins(0.5)
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    trainer = engine.trainer(tmp_path, coins, rows, trainer_class=Followed, learning_rate=3e-2)
    syncs = count_syncs(trainer)
    _, session, watch = watched(trainer, coins, 2, replay_buffer_size=0)
    assert syncs == list(range(len(watch.steps)))
    assert len(trainer.near) > len(watch.steps)
    assert session.totals.counters["refilled"] > 0
    trainer.check_policy()


def test_further_iterations_replay_without_another_sync(tmp_path, engine):
    trainer = engine.trainer(tmp_path, Rewards(*SCRIPT), num_iterations=3, max_steps=9)
    syncs = count_syncs(trainer)
    session, _ = replay(trainer, replay_iterations="replay", replay_start=0)
    assert session.totals.counters["iterated"] > 4
    assert syncs == [0, 3, 6]


def test_a_resumed_run_samples_with_its_weights_and_replays_what_was_stored(tmp_path, engine):
    settings = {"learning_rate": 3e-2, "save_strategy": "steps", "save_steps": 3, "trainer_class": Followed}
    first = engine.trainer(tmp_path, Rewards([LIVE, HALF, LIVE]), max_steps=3, **settings)
    trl_replay.attach(first)
    first.train()
    kept = {key_of(row): row for batch in first.scored for row in rows_of(batch)}

    second = engine.trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), max_steps=6, **settings)
    steps = record(trl_replay.attach(second))
    syncs = count_syncs(second)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert syncs == [3, 4, 5]
    second.check_policy()
    assert min(second.far) > 1e-2, "the first generation of the resumed run has the checkpoint's weights"
    for _, after in steps:
        assert replayed([(after, after)]) == [3], "of dead groups alone, stored ones have taken every slot"
        for row in rows_of(after):
            stored = kept[key_of(row)]
            for key in ("old_per_token_logps", "importance_sampling_ratio"):
                assert torch.equal(row[key], stored[key]), key


def test_with_nothing_to_replay_training_is_stocks_bit_for_bit(tmp_path, engine):
    ends = []
    for attached in (False, True):
        trainer = engine.trainer(tmp_path, Rewards([LIVE, HALF, LIVE]), learning_rate=3e-2)
        if attached:
            trl_replay.attach(trainer)
        trainer.train()
        ends.append(weights_hash(trainer))
    assert ends[0] == ends[1]


def test_a_run_that_resumes_ends_as_one_that_was_never_interrupted(tmp_path, engine):
    """On a CPU vLLM samples with torch's generator, whose state the checkpoint has."""
    ends = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        settings = {"learning_rate": 3e-2, "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
        trainer = engine.trainer(tmp_path, digits, **settings)
        session = trl_replay.attach(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert session.totals.counters["replaced"] > 0
        ends.append(weights_hash(trainer))
    assert ends[0] == ends[1]


def key_of(row):
    """The identity of a sampled row: its tokens and what vLLM said of them."""
    return (*row["prompt"].tolist(), *row["ids"].tolist(), *row["sampling_per_token_logps"].tolist())
