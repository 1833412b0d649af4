"""Token ids of a file's texts and messages, as the trainer makes those of its own prompts and completions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from ... import compat
from ...errors import ReplayError

QUESTION = {"role": "user", "content": "question"}
ANSWER = "trl-replay-answer"
"""What stands for an answer where only the template around it counts."""
WORDS = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "tool_calls", "function_call")
"""Keys of a message whose values are words of the model, too: only the chat template knows how it says them."""
UNSAID = re.compile(r"\A\s*<(\w+)>\s*</\1>\s*")
"""An empty block of reasoning, which templates put before an answer without any: the model never said it."""


class RowError(ValueError):
    """Why the trainer could not have made a row. It counts; nothing is raised to the user."""


class Completion(NamedTuple):
    """Token ids, and 1 for those that the model said."""

    ids: list[int]
    mask: list[int]


class Tokens:
    """Makes token ids of prompts and completions.

    Args:
        trainer (`trl.GRPOTrainer`): Its tokenizer, chat template, and end tokens count.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._tokenizer = compat.tokenizer(trainer)
        self._stops = frozenset(compat.stop_ids(trainer))
        self._added = frozenset(self._tokenizer.get_added_vocab().values())

    def prompt(self, prompt: Any) -> list[int]:
        """Return the ids of a text, or of messages in the trainer's chat template.

        Raises:
            ReplayError: An environment adds what the file does not tell.
        """
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        if compat.has_environments(self._trainer):
            raise ReplayError(
                "The prompts of this file are messages, and environments add their tools and words to those of the "
                "run: give the prompt's text as the model gets it, or prompt_ids and completion_ids."
            )
        return compat.templated(self._trainer, cleaned(prompt))

    def completion(self, prompt: Any, prompt_ids: Sequence[int], completion: Any, cut_off: bool = False) -> Completion:
        """Return the ids of a text, or of messages that are `cleaned`, with an end where there is room for it, and it
        was not `cut_off`.

        Raises:
            RowError: The trainer could not have made it.
        """
        if isinstance(completion, str):
            ids = self._one_turn(self._begun(prompt_ids, self._of_text(completion)))
            mask = [1] * len(ids)
        else:
            ids, mask = self._of_messages(prompt_ids, completion)
        most = self._trainer.max_completion_length
        if cut_off or self._stops.intersection(ids[-1:]) or (most is not None and len(ids) >= most):
            return Completion(ids, mask)
        end = self._tokenizer.eos_token_id if isinstance(prompt, str) else self._ending
        return Completion([*ids, end], [*mask, 1])

    @cached_property
    def _ending(self) -> int:
        """The token at which the chat template ends an answer; the tokenizer's end token, where there is no template,
        or the model goes on at its."""
        after = ""
        with suppress(RowError):
            _, _, after = self._said({"role": "assistant", "content": ANSWER}).partition(ANSWER)
        ends = [token for token in self._of_text(after) if token in self._stops]
        return int([*ends, self._tokenizer.eos_token_id][0])

    def _of_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _begun(self, prompt_ids: Sequence[int], ids: list[int]) -> list[int]:
        """Return a completion's ids without what its prompt ends with: a template may open the reasoning."""
        if not ids or ids[0] not in self._added:
            return ids
        lengths = range(min(len(prompt_ids), len(ids)), 0, -1)
        return ids[next((length for length in lengths if list(prompt_ids[-length:]) == ids[:length]), 0) :]

    def _one_turn(self, ids: list[int]) -> list[int]:
        """Return the ids up to the first end of a turn, where no words follow it."""
        end = next((place + 1 for place, token in enumerate(ids) if token in self._stops), len(ids))
        if self._tokenizer.decode(ids[end:], skip_special_tokens=True).strip():
            raise RowError("its text goes on after the end of a turn")
        return ids[:end]

    def _of_messages(self, prompt_ids: Sequence[int], messages: Sequence[Any]) -> Completion:
        """Build the turns of a conversation as the trainer builds its own: what tools, users, and environments say in
        between is not trained on; after the last answer it is left out. The last turn has no end."""
        turns = [(role == "assistant", list(run)) for role, run in itertools.groupby(messages, _role)]
        if not turns[-1][0]:
            turns.pop()
        if not turns or not turns[0][0]:
            raise RowError("its messages do not begin with the assistant's")
        ids: list[int] = []
        mask: list[int] = []
        for number, (said, run) in enumerate(turns):
            if said and len(run) > 1:
                raise RowError("two of the assistant's messages follow each other")
            turn = self._model_turn([*prompt_ids, *ids], run[0]) if said else self._between(run)
            turn += [self._ending] if said and number < len(turns) - 1 else []
            ids += turn
            mask += [int(said)] * len(turn)
        return Completion(ids, mask)

    def _model_turn(self, before: Sequence[int], message: Mapping[str, Any]) -> list[int]:
        """Return the ids of one message of the model, without an end: its text as it is or, with reasoning, calls of
        tools, or a channel beside it, what the chat template makes of them."""
        text = _text(message["content"])
        said = self._said({**message, "content": ANSWER if text else ""})
        heading, _, _ = said.partition(ANSWER)
        is_plain = not any(message.get(name) for name in WORDS)
        if is_plain and not {*self._tokenizer.all_special_ids}.intersection(self._of_text(heading)):
            said = text
        ids = self._one_turn(self._begun(before, self._of_text(said.replace(ANSWER, text))))
        has_end = not self._stops.isdisjoint(ids[-1:])
        if said is not text and not has_end:
            raise RowError("the chat template ends it with no token at which the model stops")
        return ids[:-1] if has_end else ids

    def _said(self, message: Mapping[str, Any]) -> str:
        """Return what the chat template makes of a message of the model, after what asks for it.

        Raises:
            RowError: It can't, or leaves something out.
        """
        try:
            text = compat.rendered(self._trainer, [QUESTION, message], False)
            opened = compat.rendered(self._trainer, [QUESTION], True)
        except Exception as error:
            raise RowError(f"the chat template can't say it ({type(error).__name__}: {error})") from error
        if not text.startswith(opened) and any(message.get(name) for name in WORDS):
            raise RowError("the chat template begins such an answer in another way than it asks for one")
        for name in WORDS:
            value = message.get(name) or ()
            words = [value] if isinstance(value, str) else [call["function"]["name"] for call in value]
            if any(word.strip() not in text for word in words):
                raise RowError(f"the chat template leaves out its {name}")
        return UNSAID.sub("", text.removeprefix(opened)) if text.startswith(opened) else ANSWER

    def _between(self, messages: Sequence[Any]) -> list[int]:
        """Return the ids of what stands between two turns of the model, the beginning of the second one included."""
        try:
            if all(message["role"] == "tool" for message in messages):
                return compat.tool_suffix(self._trainer, messages)
            answer = {"role": "assistant", "content": ANSWER}
            text = compat.rendered(self._trainer, [QUESTION, answer, *messages], True)
        except Exception as error:
            raise RowError(
                f"the chat template can't say what is between two turns ({type(error).__name__}: {error})"
            ) from error
        _, _, after = text.partition(ANSWER)
        ids = self._of_text(after)
        if ids[:1] != [self._ending]:
            raise RowError("the chat template ends an earlier turn in another way than the last one")
        return ids[1:]


def cleaned(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages without keys that are None: files with columns have all keys of all messages, and all arguments
    of all calls.

    Raises:
        RowError: A message says nothing, or a call of a tool is not as TRL has it.
    """
    made = [_filled(message) for message in messages]
    for message in made:
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = calls
        elif "content" not in message:
            raise RowError("a message says nothing")
        message.setdefault("content", "")
        for call in calls or ():
            if not isinstance(call, Mapping) or not isinstance(call.get("function", {}).get("arguments"), Mapping):
                raise RowError(
                    'a call of a tool is not {"type": "function", "function": {"name": …, "arguments": {…}}}: parse '
                    "arguments that are text (json.loads)"
                )
    return made


def _filled(value: Any) -> Any:
    """Return a value without the keys of its mappings that are None."""
    if isinstance(value, Mapping):
        return {name: _filled(held) for name, held in value.items() if held is not None}
    return [_filled(held) for held in value] if isinstance(value, list) else value


def _role(message: Mapping[str, Any]) -> str:
    return str(message["role"])


def _text(content: Any) -> str:
    """Return the text of a message.

    Raises:
        RowError: It holds something else.
    """
    if isinstance(content, str):
        return content
    if any(not isinstance(part.get("text"), str) for part in content):
        raise RowError("a message holds more than text")
    return "".join(part["text"] for part in content)
