"""Strings that end a response, where a character takes more than one token."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from streamrl.stop_strings import StopStrings


@pytest.fixture(scope="module")
def bytes_alone() -> Tokenizer:
    """A tokenizer with a token for each byte, and no other."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("stop", ["end", "fünf", "終わりです", "🙂🙃🙂🙃"])
def test_a_string_is_found_with_its_last_token_though_each_byte_is_one(stop: str, bytes_alone: Tokenizer) -> None:
    tokens = bytes_alone.encode(f"so it goes: {stop}").ids
    strings = StopStrings([stop], bytes_alone.decode)
    assert [strings.at_the_end(tokens[:end]) for end in range(1, len(tokens))] == [None] * (len(tokens) - 1)
    assert strings.at_the_end(tokens) == stop
