"""A tokenizer for trainers with tools and environments."""

from __future__ import annotations


def of_characters(tokens):
    """A backend that takes texts apart into characters, which these tokens have."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return made


def tool_tokenizer():
    """A character tokenizer with Qwen3's chat template, whose tool calls TRL can parse.

    Each of the template's long texts on tools is one token: prompts are a third as long.
    """
    import re
    import string
    from importlib.resources import files

    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    template = (files("trl") / "chat_templates" / "qwen3.jinja").read_text()
    texts = [
        text.encode().decode("unicode_escape") for text in re.findall(r'{{- "(.{99,}?)(?:<.im_end.*)?" }}', template)
    ]
    special = ["<pad>", "<|im_end|>", "<unk>", "<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>",
               "</tool_response>", "<think>", "</think>"]  # fmt: skip
    tokenizer = of_characters([*special, *dict.fromkeys(string.printable), *texts])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special[:4]])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in [*special[4:], *texts]])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>", padding_side="left"
    )
    made.chat_template = template
    return made
