"""AsyncGRPOTrainer on the combination lock: stock, dropping dead groups alone, and replay.

    python benchmarks/asynchronous.py        # minutes on two cores; writes benchmarks/results/asynchronous.json

TRL's own trainer on a CPU, with one kernel written densely. A scripted worker generates from the trainer's own
weights, a group for each key at a time; the times between them are drawn from the seed (exponential, 60 ms on
average). A run ends when the mean reward of the last 400 generated groups is 0.25, or after 48,000 completions. All
arms have the same learning rate, the demo's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from queue import Empty
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers")]
RESULTS = ROOT / "benchmarks" / "results" / "asynchronous.json"
ARMS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "drop only": {"replay_buffer_size": 0, "replay_unfilled": "exclude"},
    "replay": {},
}
SEEDS = (0, 1, 2)
BUDGET, WINDOW, THRESHOLD = 48_000, 400, 0.25
BETWEEN = 0.06
"""Mean seconds between two arrivals of a group for each key."""
LEARNING_RATE = 5e-4


def run(arm: str, seed: int) -> dict[str, Any]:
    """Train one arm; return its numbers."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    import numpy as np
    import pytest
    import queued
    import torch
    from lock import GENERATIONS, HIDDEN_SIZE, codes, taught
    from transformers import TrainerCallback
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    import trl_replay
    from trl_replay.testing import make_model, make_tokenizer

    torch.set_num_threads(1)
    queued.stand_in(pytest.MonkeyPatch())
    tokenizer = make_tokenizer()
    policy = make_model(tokenizer, HIDDEN_SIZE)
    policy.load_state_dict(taught(seed))
    folder = tempfile.mkdtemp()
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    locks = list(codes(seed).items())
    prompts = torch.tensor([tokenizer.convert_tokens_to_ids([key, "="]) for key, _ in locks])
    wanted = [tokenizer.convert_tokens_to_ids(list(code)) for _, code in locks]
    end = tokenizer.eos_token_id

    class Worker(queued.Script):
        """Generates a group for each key whenever the next ones are due."""

        def __init__(self) -> None:
            super().__init__(lambda *_: None)
            self.rng = np.random.default_rng(seed)
            self.generator = torch.Generator().manual_seed(seed)
            self.due = time.monotonic()
            self.rewards: list[float] = []

        def update_model_version(self, version: int) -> None:
            super().update_model_version(version)
            weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
            policy.load_state_dict(weights)

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if not self.waiting:
                left = self.due - time.monotonic()
                if timeout is not None and left > timeout:
                    time.sleep(timeout)
                    raise Empty
                time.sleep(max(left, 0.0))
                self.due = time.monotonic() + self.rng.exponential(BETWEEN)
                self.generate()
            return self.waiting.pop(0)

        @torch.no_grad()
        def generate(self) -> None:
            ids = prompts.repeat_interleave(GENERATIONS, 0)
            logps = torch.zeros(ids.shape)
            for _ in range(3):
                scores = policy(input_ids=ids).logits[:, -1].log_softmax(-1)
                drawn = torch.multinomial(scores.exp(), 1, generator=self.generator)
                ids, logps = torch.cat([ids, drawn], 1), torch.cat([logps, scores.gather(1, drawn)], 1)
            for key, code in enumerate(wanted):
                rows = []
                for row in range(key * GENERATIONS, (key + 1) * GENERATIONS):
                    completion = ids[row, 2:].tolist()
                    length = completion.index(end) + 1 if end in completion else 3
                    rows.append((row, 2 + length, float(completion[:length] == [*code, end])))
                rewards = [reward for *_, reward in rows]
                self.rewards.append(float(np.mean(rewards)))
                for (row, length, reward), advantage in zip(rows, queued.advantages_of(rewards), strict=True):
                    tokens = ids[row, :length].numpy()
                    mask = np.array([0, 0] + [1] * (length - 2))
                    told = [{"role": "assistant", "content": tokenizer.decode(tokens[2:])}]
                    asked = [{"role": "user", "content": str(key)}]
                    metrics = {"reward": reward, "rewards/right": reward}
                    old, now = logps[row, :length].numpy(), time.time()
                    told_of = (float(advantage), self.version, self.next, metrics, now)
                    self.waiting.append(RolloutSample(asked, told, tokens, mask, old, *told_of))
                self.next += 1

    worker = Worker()
    batch = len(locks) * GENERATIONS
    trainer = queued.make_async_trainer(
        Path(folder) / "run", queued.Policy(folder, tokenizer), worker, max_steps=100_000, num_generations=GENERATIONS,
        per_device_train_batch_size=batch, token_budget=0, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        max_completion_length=3, seed=seed,
    )  # fmt: skip
    settings = ARMS[arm]
    session = None if settings is None else trl_replay.attach(trainer, **settings)
    counts = {"trained": 0, "dead": 0}
    stock = type(trainer).compute_loss

    def count(model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        trains = inputs["token_index"] >= 0
        segments, advantages = inputs["segment_id"][trains], inputs["advantages"][trains]
        sizes = torch.zeros(int(segments.max()) + 1).index_add_(0, segments, advantages.abs())
        counts["trained"] += len(sizes)
        counts["dead"] += int((sizes < 1e-6).sum())
        return stock(trainer, model, inputs, *given, **named)

    trainer.compute_loss = count

    class Stop(TrainerCallback):
        reached = False

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            last = worker.rewards[-WINDOW:]
            self.reached = len(last) == WINDOW and float(np.mean(last)) >= THRESHOLD
            control.should_training_stop = self.reached or worker.next * GENERATIONS >= BUDGET

    stop = Stop()
    trainer.add_callback(stop)
    began = time.monotonic()
    trainer.train()
    waits = [entry["perf/rollout_wait_s"] for entry in trainer.state.log_history if "perf/rollout_wait_s" in entry]
    return {
        "arm": arm,
        "seed": seed,
        "reached": stop.reached,
        "steps": trainer.state.global_step,
        "generated": worker.next * GENERATIONS,
        "dead share": counts["dead"] / counts["trained"],
        "waited, s": sum(waits),
        "seconds": time.monotonic() - began,
        "reward at last": float(np.mean(worker.rewards[-WINDOW:])),
        "explanation": "" if session is None else session.explain(),
    }


def table(results: dict[str, Any]) -> list[str]:
    """The arms side by side, as Markdown: each seed's number."""
    rows = [
        "| | optimizer steps to 0.25 | generated samples to 0.25 | dead among trained samples | the trainer waits |",
        "|---|---|---|---|---|",
    ]
    for arm in ARMS:
        runs = [found for found in results["runs"] if found["arm"] == arm]

        def of(tell: Any, runs: Any = runs) -> str:
            return ", ".join(tell(found) for found in runs)

        steps = of(lambda found: f"{found['steps']:,}" if found["reached"] else "–")
        generated = of(lambda found: f"{found['generated']:,}" if found["reached"] else "–")
        dead = of(lambda found: f"{found['dead share']:.0%}")
        waits = of(lambda found: f"{found['waited, s']:.0f} of {found['seconds']:.0f} s")
        rows.append(f"| {arm} | {steps} | {generated} | {dead} | {waits} |")
    return rows


def main() -> None:
    """Run all arms on all seeds, each in a process of its own, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=len(ARMS))
    arguments = parser.parse_args()
    jobs = [(arm, seed) for seed in SEEDS for arm in ARMS]
    with multiprocessing.get_context("spawn").Pool(arguments.processes, maxtasksperchild=1) as pool:
        runs = pool.starmap(run, jobs, chunksize=1)
    results = {"budget": BUDGET, "learning rate": LEARNING_RATE, "between": BETWEEN, "runs": runs}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
