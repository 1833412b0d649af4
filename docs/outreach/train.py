"""An ordinary GRPO script without a word of replay: a tiny model and a sparse reward."""

from trl_replay.testing import make_trainer


def begins_with_a_digit(completions, **columns):
    """One for a completion that begins with 0 to 4."""
    return [float(text[:1] in set("01234")) for text in completions]


trainer = make_trainer(
    "out", begins_with_a_digit, max_steps=40, save_strategy="steps", save_steps=40, num_generations=4
)
trainer.train()
logs = [log for log in trainer.state.log_history if "frac_reward_zero_std" in log]
print("dead groups as TRL logs them:", round(sum(log["frac_reward_zero_std"] for log in logs) / len(logs), 2))
for key in ("replay/dead_fraction", "replay/dead_fraction_after", "replay/rollouts"):
    if key in logs[-1]:
        print(key, round(sum(log[key] for log in logs) / len(logs), 2))
