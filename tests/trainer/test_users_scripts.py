"""Scripts in the forms that users write: replay acts in each.

Those with environments are in test_environments.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial, update_wrapper

import pytest
import yaml
from datasets import Dataset
from replaying import build
from tools import tool_tokenizer
from trl import GRPOConfig, GRPOTrainer, TrlParser

import trl_replay
from trl_replay import ReplayConfig
from trl_replay.testing import make_model, make_tokenizer, make_trainer

STEPS = 16


def correctness(completions, **_):
    """One completion in ten or so begins with the answer."""
    return [2.0 * text.startswith(tuple("1234")) for text in completions]


def whole_number(completions, **_):
    return [0.5 * text.strip().isdigit() for text in completions]


def strict_format(completions, **_):
    return [0.5 * bool(re.fullmatch(r"\d+=\d+", text)) for text in completions]


def soft_format(completions, **_):
    return [0.5 * bool(re.search(r"\d", text)) for text in completions]


def count_marks(completions, **_):
    """Ever another value, as of tags counted and length taken off."""
    return [0.125 * text.count("=") - 0.001 * sum(map(ord, text)) for text in completions]


GIST = [correctness, whole_number, strict_format, soft_format, count_marks]


def gist(folder):
    """GSM8K: five functions, summed."""
    return make_trainer(folder, GIST, max_steps=STEPS)


def notebook(folder):
    """Messages for prompts and completions, a format and an accuracy, each 0 or 1."""

    def format_reward(completions, **_):
        return [float(len(messages[0]["content"]) > 2) for messages in completions]

    def accuracy_reward(completions, solution, **_):
        answers = [messages[0]["content"] for messages in completions]
        return [float(answer[:1] in wanted) for answer, wanted in zip(answers, solution, strict=True)]

    tokenizer = tool_tokenizer()
    rows = [{"prompt": [{"role": "user", "content": text}], "solution": "0123456789abcdef"} for text in "xyz"]
    model = make_model(tokenizer, max_position_embeddings=2048)
    return build(folder, [format_reward, accuracy_reward], rows, tokenizer, model, GRPOTrainer, max_steps=STEPS)


@dataclass
class ScriptArguments:
    """Of a script of its own."""

    reward_funcs: list[str] = field(default_factory=lambda: ["accuracy"])


def within(completions, most, **_):
    return [float(len(text) <= most) / len(text or "-") for text in completions]


def registry(scale):
    """Functions by name: one that another makes, and one whose arguments are given."""

    def cosine_scaled_reward(completions, **_):
        return [scale * text.startswith(tuple("1234")) for text in completions]

    return {"accuracy": cosine_scaled_reward, "length": update_wrapper(partial(within, most=4), within)}


def recipe(folder):
    """A YAML of three dataclasses, and rewards by name from a registry, with weights."""
    settings = {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 12, "num_generations": 4,
        "max_completion_length": 6, "learning_rate": 1e-2, "max_steps": STEPS, "report_to": "none",
        "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "reward_funcs": ["accuracy", "length"], "reward_weights": [0.8, 0.2], "replay_reward": "cosine_scaled_reward",
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    parser = TrlParser((ScriptArguments, GRPOConfig, ReplayConfig))
    script, training, replay = parser.parse_args_and_config(["--config", str(folder / "recipe.yaml")])
    functions = [registry(2.0)[name] for name in script.reward_funcs]
    tokenizer, dataset = make_tokenizer(), Dataset.from_list([{"prompt": "1="}, {"prompt": "2="}] * 64)
    trainer = GRPOTrainer(
        model=make_model(tokenizer), reward_funcs=functions, args=training, train_dataset=dataset,
        processing_class=tokenizer,
    )  # fmt: skip
    return trainer, replay


class Scoring(GRPOTrainer):
    """Overrides scoring to log a number of its own, and adds a bonus to what functions gave."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self._metrics["train"]["own/longest"].append(float(output["completion_mask"].sum(dim=1).max()))
        return output

    def _calculate_rewards(self, *given, **named):
        return super()._calculate_rewards(*given, **named) + 1.0


def subclass(folder):
    return make_trainer(folder, correctness, trainer_class=Scoring, max_steps=STEPS)


ACTS = {
    "five functions, the one that counts named": (gist, {"replay_reward": "correctness"}),
    "five functions, near-ties": (gist, {"replay_selector": "low_std(threshold=0.2)", "replay_record": "forward"}),
    "messages": (notebook, {}),
    "a recipe of three dataclasses": (recipe, {}),
    "a subclass that scores": (subclass, {}),
}


@pytest.mark.parametrize("form", ACTS)
def test_replay_acts(tmp_path, form):
    make, settings = ACTS[form]
    made = make(tmp_path)
    trainer, config = made if isinstance(made, tuple) else (made, ReplayConfig())
    session = trl_replay.attach(trainer, config, **{"replay_start": 2, **settings})
    trainer.train()
    assert session.totals.counters["replaced"] > 0, session.explain()
