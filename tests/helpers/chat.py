"""Chat models in small: one whose turns end with a token of their own, and which gets one in front of every text; and
one that calls a tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from releases import TRL, Version
from replaying import build
from support import DEAD, LIVE, Rewards, Spy
from tools import of_characters, tool_tokenizer

import trl_replay
from trl_replay.testing import CHARACTERS, make_model

TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<turn>' + m['role'] + ' ' + m['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant ' }}{% endif %}"
)
ENDS_WHOLE = TEMPLATE.replace("{% endif %}", "{% else %}<eos>{% endif %}")
"""As Phi's: a conversation that goes on in no answer ends with a token of its own."""
SAID = "' + ('<think>said ' if m['role'] == 'assistant' else ' ') + m['content']"
NAMES_CHANNEL = TEMPLATE.replace(" ' + m['content']", SAID).replace("<turn>assistant '", "<turn>assistant'")
"""As that of gpt-oss: special tokens stand between what asks for an answer and the answer."""
QUESTION = [{"role": "user", "content": "1="}]
KNOWS_ENDS = Version("1.14") <= TRL
"""TRL stops at every token that the model's generation config names."""


def chat_tokenizer():
    """A character tokenizer whose `eos_token` is not what its template ends a turn with."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>", "<bos>", "<turn>", "<end>", "<think>"]
    made = of_characters([*special, *CHARACTERS, "\n"])
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 3)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<bos>",
        padding_side="left", additional_special_tokens=special[4:],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat_trainer(
    folder: Path, ends: bool = True, prompt: Any = QUESTION, template: str = TEMPLATE, **settings: Any
) -> Any:
    """A trainer whose dataset is `prompt`, and whose rewards are 0; `ends`: its model stops at the end of a turn."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    if ends and not KNOWS_ENDS:
        tokenizer.eos_token = "<end>"
    model = make_model(tokenizer)
    if ends and KNOWS_ENDS:
        model.generation_config.eos_token_id = [1, 5]
    settings = {"max_steps": 3, **settings}
    return build(folder, Rewards([DEAD] * 3), [{"prompt": prompt}], tokenizer, model, Spy, **settings)


def attached(trainer, **settings):
    """A session that keeps its trainer alive."""
    session: Any = trl_replay.attach(trainer, **settings)
    session.its_trainer = trainer
    return session


def stored(session: Any, serial: int = 0, key: str = "completion_ids") -> list[str]:
    """The rows of a stored group, as tokens joined."""
    group = session.buffer.load(serial)
    lengths = group.prompt_lengths if key == "prompt_ids" else group.completion_lengths
    convert = session.trainer.processing_class.convert_ids_to_tokens
    return ["".join(convert(row.tolist())) for row in group.tensors[key].split(lengths.tolist())]


CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call><|im_end|>'


def lookup(key: str) -> str:
    """Looks something up.

    Args:
        key: What.

    Returns:
        What it found.
    """
    return key * 3


class Speaker(Spy):
    """Its model says what the script has for each turn."""

    script: Sequence[Sequence[str]] = ()

    def _generate_single_turn(self, prompt_ids, *given, **named):
        turn = self.script[self.turn]
        self.turn += 1
        return [self.processing_class(text)["input_ids"] for text in turn[: len(prompt_ids)]], None


def tool_trainer(folder: Path, reward: Any = None, **settings: Any) -> Any:
    tokenizer = tool_tokenizer()
    model = make_model(tokenizer, max_position_embeddings=2048)
    defaults = {"max_steps": 1, "per_device_train_batch_size": 4, "max_completion_length": 400}
    trainer = build(
        folder, reward or Rewards([LIVE]), [{"prompt": QUESTION}], tokenizer, model, Speaker,
        arguments={"tools": [lookup]}, **{**defaults, **settings},
    )  # fmt: skip
    trainer.turn = 0
    trainer.script = [[f"<think>\nhm\n</think>\n\n{CALL}"] * 4, [f"{row}<|im_end|>" for row in range(4)]]
    return trainer


class Room:
    """An environment with a tool, and a text of its own."""

    def reset(self, **columns):
        return " It is dark."

    def look(self):
        """Looks around.

        Returns:
            What is there.
        """
        return "a door"


def room_trainer(folder: Path) -> Any:
    tokenizer = tool_tokenizer()
    model, arguments = make_model(tokenizer, max_position_embeddings=2048), {"environment_factory": Room}
    return build(folder, Rewards([DEAD]), [{"prompt": QUESTION}], tokenizer, model, Spy, arguments=arguments)
