"""Tiny vision-language models, processors and datasets, built in code."""

from __future__ import annotations

from typing import Any

import torch
from releases import SAMPLES_IMAGE_TOKENS
from replaying import build
from tools import of_characters

from trl_replay.testing import CHARACTERS

SPECIAL = ["<pad>", "<eos>", "<unk>", "<image>", "<begin>", "<end>", "<video>"]
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}{{ IMAGE }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def make_tokenizer():
    """The character tokenizer of `trl_replay.testing`, with tokens for images."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer = of_characters([*SPECIAL, *CHARACTERS])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left",
        extra_special_tokens={
            "image_token": "<image>", "video_token": "<video>", "start_image_token": "<begin>",
            "end_image_token": "<end>", "context_image_token": "<image>",
        },
    )  # fmt: skip


def lenient(processor: type) -> type:
    """The processor without a video processor, which needs torchvision, that takes None for a row without images."""

    class Lenient(processor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, given: Any) -> Any:
            return None if name == "video_processor" else super().check_argument_for_proper_class(name, given)

        def __call__(self, images=None, **kwargs):
            return super().__call__(images=images and [one or [] for one in images], **kwargs)

    return Lenient


def text_settings(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
    }  # fmt: skip


def qwen2_vl() -> tuple[Any, Any]:
    """Entries are patches: `image_grid_thw`, `mm_token_type_ids`."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer()
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112})
    processor = lenient(Qwen2VLProcessor)(
        images, tokenizer, chat_template=TEMPLATE.replace("IMAGE", "'<begin><image><end>'")
    )
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config={
                **text_settings(tokenizer),
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
            },
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2},
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
            vision_start_token_id=tokenizer.convert_tokens_to_ids("<begin>"),
            vision_end_token_id=tokenizer.convert_tokens_to_ids("<end>"),
        )
    )
    return model, processor


def internvl() -> tuple[Any, Any]:
    """Entries are tiles: `num_tiles`, where some image has more than one."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokenizer = make_tokenizer()

    class Lenient(GotOcr2ImageProcessorPil):
        def __call__(self, images, *args, **kwargs):
            return super().__call__([one or [] for one in images], *args, **kwargs)

    images = Lenient(size={"height": 28, "width": 28}, min_patches=1, max_patches=3)
    processor = lenient(InternVLProcessor)(
        images, tokenizer, image_seq_length=1, chat_template=TEMPLATE.replace("IMAGE", "'<image>'")
    )
    torch.manual_seed(0)
    model = InternVLForConditionalGeneration(
        InternVLConfig(
            text_config={"model_type": "qwen2", **text_settings(tokenizer)},
            vision_config={
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                "image_size": [28, 28], "patch_size": [14, 14],
            },
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            image_seq_length=1,
            downsample_ratio=0.5,
        )
    )  # fmt: skip
    return model, processor


def llava() -> tuple[Any, Any]:
    """Entries are images."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = make_tokenizer()
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = lenient(LlavaProcessor)(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "'<image>'"),
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={"model_type": "qwen2", **text_settings(tokenizer)},
            vision_config={
                "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": 4, "image_size": 28, "patch_size": 14, "projection_dim": 32,
            },
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        )
    )  # fmt: skip
    return model, processor


def dataset(counts: tuple[int, ...]) -> Any:
    """Conversations with these numbers of images, of different sizes and colors; repeated."""
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature
    from PIL import Image

    rows = []
    for number in range(8 * len(counts)):
        count = counts[number % len(counts)]
        pictures = [
            Image.new("RGB", (28 * (1 + (number + which) % 3), 28), (number * 37 % 256, which * 90, 80))
            for which in range(count)
        ]
        text = "12="[: 1 + number % 3] * (1 + number // 3 % 2)
        rows.append({"prompt": [{"role": "user", "content": text}], "images": pictures})
    message = {"role": Value("string"), "content": Value("string")}
    return Dataset.from_list(rows, features=Features({"prompt": List(message), "images": List(ImageFeature())}))


def make_trainer(folder: Any, made: tuple[Any, Any], rows: Any, rewards: Any, **settings: Any) -> Any:
    """A trainer of one of these models, on a dataset or on conversations with these numbers of images."""
    model, processor = made
    if SAMPLES_IMAGE_TOKENS:
        settings["generation_kwargs"] = {"suppress_tokens": [model.config.image_token_id]}
    arguments = {"train_dataset": dataset(rows) if isinstance(rows, tuple) else rows}
    return build(folder, rewards, tokenizer=processor, model=model, arguments=arguments, **settings)
