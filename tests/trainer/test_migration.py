"""The example of TRL's former documentation for its replay trainer, with only the trainer's lines changed."""

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import trl_replay
from trl_replay.testing import make_model, make_tokenizer


def test_26_the_documented_example_trains_and_replays(tmp_path):
    torch.manual_seed(1)
    dataset = Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(5) for b in range(4)])

    # Guarantee that some rewards have 0 std
    def custom_reward_func(completions, **kwargs):
        if torch.rand(1).item() < 0.25:
            return [0.0] * len(completions)  # simulate some zero-std groups
        return torch.rand(len(completions)).tolist()

    tokenizer = make_tokenizer()
    training_args = GRPOConfig(
        output_dir=str(tmp_path),
        learning_rate=1e-4,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=make_model(tokenizer),
        reward_funcs=[custom_reward_func],
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    session = trl_replay.attach(trainer, replay_buffer_size=8)

    previous_trainable_params = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()

    assert trainer.state.log_history[-1]["train_loss"] is not None
    for name, parameter in previous_trainable_params.items():
        assert not torch.equal(parameter, trainer.model.get_parameter(name)), f"{name} has not changed"
    assert session.buffer.capacity == len(session.buffer) == 8, "replay_buffer_size counts groups"
    assert session.totals.counters["replaced"] > 0
