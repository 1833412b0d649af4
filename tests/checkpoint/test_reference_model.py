"""The reference model, which the trainer does not save: resuming starts with the first one. Found by an attack."""

import copy
from contextlib import nullcontext

import pytest
import torch
from support import DEAD, LIVE, At, Rewards, Spy, record
from trl.trainer.grpo_trainer import use_adapter

import trl_replay
from trl_replay.batch import candidates
from trl_replay.testing import make_model, make_tokenizer, make_trainer

STALE = "its reference log-probs are another reference model's"
ALTERNATING = [[LIVE, DEAD, DEAD], [DEAD, LIVE, DEAD]] * 4


@pytest.fixture
def initial(tmp_path):
    """Makes trainers that start, each time anew, with the same policy and reference."""
    model = make_model(make_tokenizer())
    model.save_pretrained(tmp_path / "initial")

    def make(steps, **settings):
        defaults = {
            "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 1.0,
            "save_strategy": "steps", "save_steps": 5,
        }  # fmt: skip
        return make_trainer(
            tmp_path / "run", Rewards(*ALTERNATING), model=type(model).from_pretrained(tmp_path / "initial"),
            max_steps=steps, **{"trainer_class": Spy, **defaults, **settings},
        )  # fmt: skip

    return make


def furthest(trainer, steps):
    """Replayed rows, and how far their reference log-probs are from those of the trainer's own reference model."""
    gaps = []
    for _, out in steps:
        replayed = out["trl_replay_rows"][:, 0] < 0
        if not replayed.any():
            continue
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
        mask = torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1)
        width = out["completion_ids"].size(1)
        adapter = nullcontext() if trainer.ref_model is not None else use_adapter(trainer.model, "ref")
        with torch.no_grad(), adapter:
            model = trainer.ref_model if trainer.ref_model is not None else trainer.model
            now = trainer._get_per_token_logps_and_entropies(model, ids, mask, width)[0]
        off = (now - out["ref_per_token_logps"]).abs() * out["completion_mask"]
        gaps += off[replayed].amax(dim=1).tolist()
    return len(gaps), max(gaps, default=0.0)


def load(trainer):
    trainer.ref_model.load_state_dict(trainer.model.state_dict())


def write_data(trainer):
    """As TRL's own sync does, which torch's count of changes does not see."""
    for own, taken in zip(trainer.ref_model.parameters(), trainer.model.parameters(), strict=True):
        own.data.copy_(taken.data)


def put_another(trainer):
    trainer.ref_model = copy.deepcopy(trainer.model).eval()


def copy_adapter(trainer):
    weights = dict(trainer.model.named_parameters())
    for name, own in weights.items():
        if ".ref." in name:
            own.data.copy_(weights[name.replace(".ref.", ".default.")].data)


class WithAdapter(Spy):
    """A trainer that goes on with an adapter, of which TRL makes a copy to be the reference."""

    def __init__(self, model, **given):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        super().__init__(get_peft_model(model, config), **given)


@pytest.mark.parametrize("reset", [load, write_data, put_another, copy_adapter], ids=lambda one: one.__name__)
def test_159_entries_leave_when_a_callback_resets_the_reference(initial, reset):
    trainer_class = WithAdapter if reset is copy_adapter else Spy
    settings = {"sync_ref_model": False, "save_strategy": "no", "learning_rate": 3e-2}
    trainer = initial(8, trainer_class=trainer_class, **settings)
    trainer.add_callback(At(5, lambda: reset(trainer)))
    session = trl_replay.attach(trainer, replay_start=0)
    steps = record(session)
    trainer.train()
    assert furthest(trainer, steps[:5])[1] > 0.02, "the reference has changed"
    count, gap = furthest(trainer, steps[5:])
    assert count > 0, "groups generated since are replayed"
    assert gap < 1e-4, "with the log-probs of the reference that there is"
    assert session.totals.reasons[f"an entry was dropped: {candidates.STALE}"] > 0
    assert STALE in session.explain()


def resumed(trainer, checkpoint):
    session = trl_replay.attach(trainer, replay_start=0)
    steps = record(session)
    trainer.train(resume_from_checkpoint=checkpoint)
    return session, steps


@pytest.mark.parametrize("sync", [3, 100], ids=["synced", "not synced"])
def test_39_entries_of_a_synced_reference_leave_when_training_resumes_with_the_first_one_and_others_stay(
    initial, tmp_path, sync
):
    """The trainer does not save its reference model: it resumes with the one that it was made with."""
    first = initial(5, ref_model_sync_steps=sync)
    session = trl_replay.attach(first, replay_start=0)
    first.train()
    stored = len(session.buffer)
    assert stored > 0, "made since the sync in update 3"
    again = initial(8, ref_model_sync_steps=100)
    session, steps = resumed(again, str(tmp_path / "run" / "checkpoint-5"))
    count, gap = furthest(again, steps)
    assert count > 0, "groups of the resumed run are replayed"
    assert gap < 1e-4, "with the log-probs of its own reference"
    dropped = sum(times for reason, times in session.totals.reasons.items() if STALE in reason)
    assert dropped >= stored if sync == 3 else dropped == 0
    assert (STALE in session.explain()) == (sync == 3)


def test_39_a_run_that_was_resumed_without_a_sync_keeps_its_entries_when_it_is_resumed_again(initial, tmp_path):
    first = initial(5)
    trl_replay.attach(first)
    first.train()
    second = initial(10, ref_model_sync_steps=100)
    session, _ = resumed(second, str(tmp_path / "run" / "checkpoint-5"))
    stored = len(session.buffer)
    third = initial(12, ref_model_sync_steps=100)
    session, steps = resumed(third, str(tmp_path / "run" / "checkpoint-10"))
    assert len(session.buffer) >= stored > 0
    assert furthest(third, steps)[1] < 1e-4


def test_39_in_the_same_process_entries_stay_as_long_as_the_reference_does(initial, tmp_path):
    trainer = initial(5)
    session = trl_replay.attach(trainer, replay_start=0)
    trainer.train()
    stored = session.buffer.table.serial.tolist()
    trainer.args.max_steps = 6
    steps = record(session)
    trainer.ref_model_sync_steps = trainer.args.ref_model_sync_steps = 100
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert set(stored) <= set(session.buffer.table.serial.tolist()), "it is the reference that made their log-probs"
    assert furthest(trainer, steps)[1] < 1e-4


def test_39_a_reference_that_was_synced_before_attach_is_known(initial, tmp_path):
    first = initial(4, save_strategy="no")
    first.train()
    first.args.max_steps = 2
    first.args.save_strategy = "steps"
    first.args.save_steps = 2
    session = trl_replay.attach(first, replay_start=0)
    first.train()
    assert len(session.buffer) > 0
    again = initial(4, ref_model_sync_steps=100)
    session, steps = resumed(again, str(tmp_path / "run" / "checkpoint-2"))
    assert STALE in session.explain()
    assert furthest(again, steps)[1] < 1e-4
