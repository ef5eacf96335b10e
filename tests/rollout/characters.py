"""A tokenizer of single characters that speaks ChatML, small enough to be made in a test."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from streamrl.rollout.chat import ChatTokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<unk>", "<|im_start|>", "<|im_end|>", *string.printable[:95], "\n"]
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )


def make_chat(template: str | None = TEMPLATE) -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer(template))


def save_tokenizer(folder: Path) -> Path:
    make_tokenizer().save_pretrained(folder)
    return folder
