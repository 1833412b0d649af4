# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-replay"]
#
# [tool.uv.sources]
# trl-replay = { path = ".." }  # a clone: there is no release yet
# ///
"""An agent with a tool, several turns, and a reward at the end: stock GRPO and the preset, one after the other.

    python examples/agent_replay.py                   # one seed: some minutes on two cores
    python examples/agent_replay.py --seeds 0 1 2     # what docs/agents.md says

A safe opens if its dial is turned to the right two letters, one in each turn. The environment owns the data (`reset`
chooses a safe), the tool (`turn`), and the reward (`get_reward`): 1 if the safe is open at the end, else 0. Before RL
the model is taught to turn the dial twice, to letters at random, so that one rollout in 144 opens its safe, and nearly
all groups fail. The same 6 safes come again in each batch. The model, its tokenizer, and its chat template are made
here: nothing is downloaded.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import argparse
import random
import re
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from trl_replay import attached
from trl_replay.testing import make_model

SAFES = 6
LETTERS = "abcdefghijkl"
TURNS = 2
GENERATIONS = 8
PROMPT = "Safe "
HEARD = "click"
LAST = 20
"""Batches whose mean reward is the final one."""
UPDATES = {"stock": 1, "preset": 2}
"""Of each batch, by arm: the preset's second one trains on stored groups."""
OPEN, CLOSE, END = '<tool_call>{"name": "turn", "arguments": {"letter": "', '"}}</tool_call>', "<end>"
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "tool" -%}<tool_response>{{ message.content }}</tool_response>
{%- else -%}{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
{%- if message.role == "assistant" -%}<end>{%- endif -%}
{%- endif -%}
{%- endfor -%}"""


class AgentTokenizer(PreTrainedTokenizerFast):
    """One token for each character, and one for each part of a tool call."""

    def parse_response(self, response: Any, **context: Any) -> dict[str, Any]:
        """Returns the message that a completion's tokens are."""
        text = self.decode(response).removesuffix(END)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        call = re.fullmatch(re.escape(OPEN) + "(.)" + re.escape(CLOSE), text)
        if call:
            function = {"name": "turn", "arguments": {"letter": call[1]}}
            message |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}
        return message


def make_tokenizer() -> AgentTokenizer:
    """A new tokenizer, with the chat template."""
    words = ["<pad>", END, OPEN, CLOSE, "<tool_response>", "</tool_response>"]
    characters = [chr(number) for number in range(32, 127)]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*words, *characters])}, " "))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    tokenizer = AgentTokenizer(tokenizer_object=backend, pad_token="<pad>", eos_token=END, padding_side="left")
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = "parse_response"  # tells TRL that it can parse tool calls
    return tokenizer


def environment(seed: int) -> type:
    """The class of a seed's environments; TRL makes one for each rollout of a batch, and resets it."""
    rng = random.Random(seed)
    codes = ["".join(rng.choice(LETTERS) for _ in range(TURNS)) for _ in range(SAFES)]

    class Safe:
        """A safe with a dial."""

        resets = 0

        def reset(self, **row: Any) -> str:
            """Takes the group's safe; returns what is added to the prompt."""
            self.task_id = Safe.resets // GENERATIONS % SAFES
            Safe.resets += 1
            self._turned = ""
            return str(self.task_id)

        def turn(self, letter: str) -> str:
            """Turns the dial.

            Args:
                letter: Where to.

            Returns:
                What is heard.
            """
            self._turned += letter
            return HEARD

        def get_reward(self) -> float:
            """1 if it is open."""
            return float(self._turned == codes[self.task_id])

    return Safe


def taught(tokenizer: AgentTokenizer, seed: int, steps: int = 100, rows: int = 64) -> Any:
    """A model that turns any safe's dial to letters at random."""
    model = make_model(tokenizer, 64, seed=seed, max_position_embeddings=128)
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    model.train()
    for _ in range(steps):
        said = [[f"{OPEN}{rng.choice(LETTERS)}{CLOSE}{END}" for _ in range(TURNS)] + [f".{END}"] for _ in range(rows)]
        rollouts = [f"<tool_response>{HEARD}</tool_response>".join(turns) for turns in said]
        ids = torch.tensor(
            tokenizer([f"{PROMPT}{rng.randrange(SAFES)}{rollout}" for rollout in rollouts])["input_ids"]
        )
        labels = ids.clone()
        labels[:, : len(PROMPT) + 1] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def make_trainer(model: str, tokenizer: AgentTokenizer, seed: int, batches: int, folder: str, arm: str) -> Any:
    """A stock `trl.GRPOTrainer` with environments: 6 groups of 8 rollouts a batch."""
    row = {"prompt": [{"role": "user", "content": PROMPT}]}
    return GRPOTrainer(
        model=model,
        args=GRPOConfig(
            output_dir=folder,
            seed=seed,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            max_steps=batches * UPDATES[arm],
            num_iterations=UPDATES[arm],
            beta=0.1 if arm == "preset" else 0.0,
            num_generations=GENERATIONS,
            per_device_train_batch_size=SAFES * GENERATIONS,
            max_completion_length=64,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([row] * SAFES * batches),
        processing_class=tokenizer,
        environment_factory=environment(seed),
    )


def train(trainer: Any, arm: str) -> tuple[list[float], str]:
    """Trains; returns each batch's mean reward, and what the session tells."""
    trainer.remove_callback(PrinterCallback)
    settings = {"replay_preset": "sample_efficient"} if arm == "preset" else {"use_replay": False}
    with attached(trainer, **settings) as session, redirect_stdout(StringIO()):
        trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    return rewards, next(line for line in session.explain().splitlines() if line.startswith("replay"))


def main() -> None:
    """Trains both arms on each seed, and prints the final rewards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--batches", type=int, default=200)
    chosen = parser.parse_args()
    final: dict[str, list[float]] = {arm: [] for arm in UPDATES}
    for seed in chosen.seeds:
        tokenizer = make_tokenizer()
        with tempfile.TemporaryDirectory() as model:
            taught(tokenizer, seed).save_pretrained(model)
            tokenizer.save_pretrained(model)
            for arm, rewards_of_arm in final.items():
                with tempfile.TemporaryDirectory() as folder:
                    trainer = make_trainer(model, tokenizer, seed, chosen.batches, folder, arm)
                    rewards, told = train(trainer, arm)
                rewards_of_arm.append(float(np.mean(rewards[-LAST:])))
                print(f"seed {seed}, {arm}: final reward {rewards_of_arm[-1]:.2f}; {told}", flush=True)
    for arm, rewards_of_arm in final.items():
        each = " ".join(f"{reward:.2f}" for reward in rewards_of_arm)
        print(f"{arm}: mean final reward {np.mean(rewards_of_arm):.2f} ({each})")


if __name__ == "__main__":
    main()
