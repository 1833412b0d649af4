"""Token ids of a file's texts and messages, as the trainer makes those of its own prompts and completions."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ... import compat
from ...errors import ReplayError
from .file_tasks import RowError

QUESTION = {"role": "user", "content": "question"}
ANSWER = "trl-replay-answer"
"""What stands for an answer where only the template around it counts."""
WORDS = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "tool_calls", "function_call")
"""Keys of a message whose values are words of the model, too: only the chat template knows how it says them."""
UNSAID = re.compile(r"\A\s*<(\w+)>\s*</\1>\s*")
"""An empty block of reasoning, which templates put before an answer without any: the model never said it."""
GOES_ON = "its text goes on after the end of a turn"
BEGINS = "its messages do not begin with the assistant's"
SEVERAL = "it has several turns, and no tool_mask tells which of its completion_ids the model said"
EMPTY = "it has no completion"
FAILED = "its rollout failed (error)"
TWICE = "two of the assistant's messages follow each other"


class Completion(NamedTuple):
    """Token ids, and which of them the model said; None if all."""

    ids: list[int]
    tool_mask: list[int] | None


class Tokens:
    """Makes token ids of prompts and completions.

    Args:
        trainer (`trl.GRPOTrainer`): Its tokenizer, chat template, and end tokens count.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._tokenizer = compat.tokenizer(trainer)
        self._stops = frozenset(compat.stop_ids(trainer))
        self._special = frozenset(self._tokenizer.all_special_ids)
        self._added = frozenset(self._tokenizer.get_added_vocab().values())
        self._most = trainer.max_completion_length
        self._last: tuple[str, list[int]] = "", []

    def prompt(self, prompt: Any) -> list[int]:
        """Return the ids of a text, or of messages in the trainer's chat template.

        Raises:
            ReplayError: An environment adds what the file does not tell.
        """
        key = json.dumps(prompt, default=str)
        if self._last[0] != key:  # rows of a prompt often lie next to each other
            self._last = key, self._of_prompt(prompt)
        return self._last[1]

    def _of_prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._begun_once(prompt)
        if compat.has_environments(self._trainer):
            raise ReplayError(
                "The prompts of this file are messages, and environments add their tools and words to those of the "
                "run: give the prompt's text as the model gets it, or prompt_ids and completion_ids."
            )
        return compat.templated(self._trainer, cleaned(prompt))

    def completion(self, prompt: Any, prompt_ids: Sequence[int], completion: Any, cut_off: bool = False) -> Completion:
        """Return the ids of a text or of messages, with an end where there is room for it, and it was not `cut_off`.

        Raises:
            RowError: The trainer could not have made it.
        """
        opening = self._opening
        in_turns = not isinstance(prompt, str) or (opening and list(prompt_ids[-len(opening) :]) == opening)
        end = self.ending if in_turns else [self._tokenizer.eos_token_id]
        if isinstance(completion, str):
            ids = self._begun(prompt_ids, self._of_text(completion))
            made = Completion(self._one_turn(ids), None)
        else:
            made = self._of_messages(prompt_ids, cleaned(completion), end)
        return made if cut_off else self._fitting(made, end)

    @cached_property
    def ending(self) -> list[int]:
        """What the chat template puts after an answer, as far as the model says it; the tokenizer's end token where
        there is no template, or it puts nothing."""
        _, after = self._around
        return self._up_to_end(self._of_text(after)) or [self._tokenizer.eos_token_id]

    @property
    def ends_turns(self) -> bool:
        """Tell whether generation stops where the chat template ends a turn."""
        return self.ending[-1] in self._stops

    @cached_property
    def _opening(self) -> list[int]:
        """The ids of what the chat template puts before an answer that is to come."""
        try:
            asked = compat.rendered(self._trainer, [QUESTION], False)
            opened = compat.rendered(self._trainer, [QUESTION], True)
        except Exception:  # no template, or one that wants other messages
            return []
        if opened.startswith(asked):
            return self._of_text(opened.removeprefix(asked))
        return self._of_text(opened.rpartition(QUESTION["content"])[2])  # a template that ends a whole conversation

    @cached_property
    def _around(self) -> tuple[str, str]:
        """What the chat template puts between its opening and an answer, and after that."""
        try:
            opened = compat.rendered(self._trainer, [QUESTION], True)
            text = compat.rendered(self._trainer, [QUESTION, {"role": "assistant", "content": ANSWER}], False)
        except Exception:  # as above
            return "", ""
        before, said, after = text.rpartition(ANSWER)
        heading = UNSAID.sub("", before.removeprefix(opened)) if before.startswith(opened) else ""
        return (heading, after) if said else ("", "")

    @cached_property
    def _heading(self) -> list[int]:
        """The ids of what the chat template puts between its opening and an answer, if these are special ones: no text
        can hold them."""
        ids = self._of_text(self._around[0])
        return ids if self._special.intersection(ids) else []

    def _of_text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)

    def _begun_once(self, text: str) -> list[int]:
        """Return a prompt's ids as the trainer makes them, but tokens that the tokenizer puts in front of a text only
        where the text does not begin with them itself, as one in a chat template does."""
        whole: list[int] = list(self._tokenizer(text)["input_ids"])
        plain = self._of_text(text)
        starts = range(len(whole) - len(plain) + 1)
        start = next((start for start in starts if whole[start : start + len(plain)] == plain), 0)
        return whole[start:] if start and plain[:start] == whole[:start] else whole

    def _begun(self, prompt_ids: Sequence[int], ids: list[int]) -> list[int]:
        """Return a completion's ids without what its prompt ends with: a template may open the reasoning."""
        if not ids or ids[0] not in self._added:
            return ids
        lengths = range(min(len(prompt_ids), len(ids)), 0, -1)
        repeated = next((length for length in lengths if list(prompt_ids[-length:]) == ids[:length]), 0)
        return ids[repeated:]

    def _one_turn(self, ids: list[int]) -> list[int]:
        """Return the ids up to the first end of a turn, where nothing but white space follows it."""
        stops = [place for place, token in enumerate(ids) if token in self._stops]
        if not stops:
            return ids
        rest = [token for token in ids[stops[0] + 1 :] if token not in self._stops]
        if self._tokenizer.decode(rest).strip():
            raise RowError(GOES_ON)
        return ids[: stops[0] + 1]

    def _up_to_end(self, ids: list[int]) -> list[int]:
        """Return the ids up to the first one that ends a turn; for a template whose end is none of the trainer's, up
        to the last special one."""
        stops = [place for place, token in enumerate(ids) if token in self._stops]
        special = [place for place, token in enumerate(ids) if token in self._special]
        return ids[: (stops[:1] or special[-1:] or [-1])[0] + 1]

    def _closed(self, ids: list[int], end: Sequence[int]) -> list[int]:
        """Return the ids with an end, unless they have one: of the trainer's, or of the template's for such a turn."""
        has_end = ids[-1:] and (ids[-1] in self._stops | self._special or ids[-len(end) :] == list(end))
        return ids if has_end else [*ids, *end]

    def _fitting(self, made: Completion, end: Sequence[int]) -> Completion:
        """Return a completion with an end, if there is room for it."""
        closed = self._closed(made.ids, end)
        if self._most is not None and len(closed) > self._most:
            return made
        added = len(closed) - len(made.ids)
        return Completion(closed, made.tool_mask and [*made.tool_mask, *[1] * added])

    def _of_messages(self, prompt_ids: Sequence[int], messages: Sequence[Any], end: list[int]) -> Completion:
        """Build the turns of a conversation as the trainer builds its own: what tools, users, and environments say in
        between is not trained on; after the last answer it is left out."""
        turns = [(said, list(run)) for said, run in itertools.groupby(messages, _is_models)]
        if not turns or not turns[0][0]:
            raise RowError(BEGINS)
        if not turns[-1][0]:
            turns.pop()
        ids: list[int] = []
        mask: list[int] = []
        for number, (said, run) in enumerate(turns):
            if said and len(run) > 1:
                raise RowError(TWICE)
            last = number == len(turns) - 1
            if said:
                turn = self._model_turn([*prompt_ids, *ids], run[0], end)
                turn = turn if last else self._closed(turn, end)
            else:
                turn = self._between(run, end)
            ids += turn
            mask += [int(said)] * len(turn)
        return Completion(ids, mask if len(turns) > 1 else None)

    def _model_turn(self, before: Sequence[int], message: Mapping[str, Any], end: list[int]) -> list[int]:
        """Return the ids of one message of the model: its text as it is or, with reasoning or calls of tools beside
        it, what the chat template makes of them."""
        if not any(message.get(name) for name in WORDS):
            return self._one_turn([*self._heading, *self._begun(before, self._of_text(_text(message)))])
        try:
            text = compat.rendered(self._trainer, [QUESTION, message], False)
            opened = compat.rendered(self._trainer, [QUESTION], True)
        except Exception as error:
            raise RowError(f"the chat template can't say it ({type(error).__name__}: {error})") from error
        if not text.startswith(opened):
            raise RowError("the chat template begins such an answer in another way than it asks for one")
        said = UNSAID.sub("", text.removeprefix(opened))
        for name, words in _words(message):
            if words.strip() not in said:
                raise RowError(f"the chat template leaves out its {name}")
        ids = self._of_text(said)
        ended = ids if self._stops.intersection(ids) else self._up_to_end(ids)
        rest = self._tokenizer.decode(ids[len(ended) :])
        return self._one_turn(ids if rest.strip() else ended)  # a template may put no end after such a turn

    def _between(self, messages: Sequence[Any], end: list[int]) -> list[int]:
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
        if ANSWER not in text:
            raise RowError("the chat template leaves out an earlier turn")
        _, _, after = text.partition(ANSWER)
        ids = self._of_text(after)
        if ids[: len(end)] != end:
            raise RowError("the chat template ends an earlier turn in another way than the last one")
        return ids[len(end) :]


def cleaned(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates know: without keys that are None (files with columns have all
    keys of all messages, and all arguments of all calls), calls of tools as mappings, and names of tools where only
    the number of a call is given.

    Raises:
        RowError: A call of a tool can't be read.
    """
    made: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    called: list[str] = []  # and not answered so far
    for message in messages:
        kept = _filled(message)
        if kept.get("tool_calls") is not None and len(kept["tool_calls"]):
            kept["tool_calls"] = list(map(_call, kept["tool_calls"]))
            names |= {call.get("id"): call["function"]["name"] for call in kept["tool_calls"]}
            called = [call["function"]["name"] for call in kept["tool_calls"]]
        else:
            kept.pop("tool_calls", None)
        if kept.get("role") == "tool":
            in_turn = called.pop(0) if called else None
            name = names.get(kept["tool_call_id"]) if "tool_call_id" in kept else in_turn
            kept |= {"name": name} if name is not None and "name" not in kept else {}
        kept.setdefault("content", "")
        made.append(kept)
    return made


def has_turns(completion: Any) -> bool:
    """Tell whether somebody else than the model speaks in a completion."""
    return not isinstance(completion, str) and not all(map(_is_models, completion))


def _filled(value: Any) -> Any:
    """Return a value without the keys of its mappings that are None."""
    if isinstance(value, Mapping):
        return {name: _filled(held) for name, held in value.items() if held is not None}
    return [_filled(held) for held in value] if isinstance(value, list) else value


def _call(given: Any) -> dict[str, Any]:
    """Return a call of a tool as TRL has it: `{"type": "function", "function": {"name": …, "arguments": {…}}}`.

    Files hold calls and arguments as JSON, too, and calls without the outer mapping.
    """
    try:
        call = dict(json.loads(given) if isinstance(given, str) else given)
        function = dict(call.get("function") or call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        function = {"name": function["name"], "arguments": dict(arguments or {})}
    except (TypeError, ValueError, KeyError) as error:
        raise RowError(f"a call of a tool can't be read ({type(error).__name__}: {error})") from error
    named = {"id": call["id"]} if call.get("id") is not None else {}
    return {**named, "type": "function", "function": function}


def _is_models(message: Mapping[str, Any]) -> bool:
    return bool(message.get("role", "assistant") == "assistant")


def _text(message: Mapping[str, Any]) -> str:
    """Return a message's text.

    Raises:
        RowError: It holds something else.
    """
    content = message["content"]
    if isinstance(content, str):
        return content
    parts = list(content)
    if any(not isinstance(part, Mapping) or not isinstance(part.get("text"), str) for part in parts):
        raise RowError("a message holds more than text")
    return "".join(part["text"] for part in parts)


def _words(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield all that the model said in a message, with its key."""
    yield "content", _text(message)
    for name in WORDS:
        value = message.get(name)
        if name == "tool_calls":
            yield from ((name, call["function"]["name"]) for call in value or ())
        elif value:
            yield name, value if isinstance(value, str) else json.dumps(value)
