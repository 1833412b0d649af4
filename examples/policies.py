# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-replay"]
#
# [tool.uv.sources]
# trl-replay = { path = ".." }  # a clone: there is no release yet
# ///
"""Policies of the buffer, each on three seeds, in one table: the reward over the last quarter of the run.

    python examples/policies.py

For yours, make your own trainer from the seed. Here it is the trainer of `make demo`: a tiny model on sparse rewards,
built in code. To the reward at which stock ends, what did a policy take?

    trl-replay report out/policies/stock-seed* out/policies/reservoir-seed*
"""

import argparse
from statistics import mean, median

from transformers import PrinterCallback

from trl_replay import attached
from trl_replay.demo import make_trainer

POLICIES = {
    "stock": {"use_replay": False},
    "defaults": {},
    "priorities": {"replay_evictor": "heap", "replay_sampler": "proportional"},
    "reservoir": {"replay_evictor": "reservoir", "replay_sampler": "uniform"},
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=300, help="of each run, with 64 completions")
    parser.add_argument("--out", default="out/policies")
    options = parser.parse_args()
    table = []
    for policy, settings in POLICIES.items():
        ends = []
        for seed in options.seeds:
            trainer = make_trainer(seed, 5e-4, options.updates, f"{options.out}/{policy}-seed{seed}")
            trainer.remove_callback(PrinterCallback)
            with attached(trainer, **settings):
                trainer.train()
            trainer.save_state()
            ends.append(mean(entry["reward"] for entry in trainer.state.log_history[-options.updates // 4 - 1 : -1]))
        table.append((policy, *(f"{end:.2f}" for end in (*ends, median(ends)))))
    for row in (("policy", *(f"seed {seed}" for seed in options.seeds), "median"), *table):
        print("".join(f"{cell:12}" for cell in row))


if __name__ == "__main__":
    main()
