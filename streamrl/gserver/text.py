"""Text to tokens and back, with the checkpoint's `tokenizer.json` alone."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from streamrl.errors import ModelError
from streamrl.gserver.engine import Refused


class Text:
    """The tokenizer of the served model."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing more precise
            raise ModelError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`; raises `Refused` when it has characters that the tokenizer does not know."""
        try:
            tokens: list[int] = self._tokenizer.encode(text).ids
        except Exception as error:  # as above
            raise Refused(f"the text cannot be tokenized: {error}") from error
        return tokens

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `tokens`; those without text are skipped."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text
