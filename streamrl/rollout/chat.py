"""Chat messages to tokens and back.

Invariant: sampled tokens are never decoded and tokenized again. A further turn is appended as the tokens that the chat
template puts between the end of an answer and the beginning of the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from streamrl.errors import ConfigError, DataError
from streamrl.models import load_tokenizer

Message = dict[str, Any]
"""A chat message in the form of chat templates: `role`, `content`, and perhaps `tool_calls`, `tool_call_id`."""

_ANSWER_MARK = "\u241fanswer\u241f"


class Tokenizer(Protocol):
    """The used part of the interface of Hugging Face tokenizers."""

    chat_template: Any
    all_special_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def save_pretrained(self, save_directory: Path) -> Any: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> Any: ...


class ChatTokenizer:
    """A tokenizer together with its chat template."""

    def __init__(self, tokenizer: Tokenizer, *, chat_template: str | None = None) -> None:
        """`chat_template` replaces the tokenizer's own; raises `ConfigError` if there is neither."""
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template; set model.chat_template, for example "
                "\"{% for m in messages %}{{ m['content'] }}{% endfor %}\" for a model that was not trained on chats"
            )
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer itself, with the chat template."""
        return self._tokenizer

    @classmethod
    def load(cls, model_dir: Path, *, chat_template: str | None = None) -> ChatTokenizer:
        """Load the tokenizer of the checkpoint folder `model_dir` (a second or more). Raises `ModelError`."""
        return cls(load_tokenizer(model_dir), chat_template=chat_template)

    def save(self, folder: Path) -> None:
        """Write the tokenizer, with its chat template, into `folder`."""
        self._tokenizer.save_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, adding no special ones; raises `DataError` if the tokenizer cannot encode it."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # the tokenizers library raises nothing more precise
            lacking = self._first_without_token(text)
            if lacking is None:
                raise DataError(f"the model's tokenizer cannot encode {text!r}: {error}") from error
            raise DataError(
                f"the model's tokenizer has no token for {lacking!r} in {text!r:.200}; "
                "a model from scratch has the tokens of model.scratch.alphabet and model.scratch.words"
            ) from error

    @cached_property
    def lacks_characters(self) -> bool:
        """Whether some texts cannot be encoded by the tokenizer."""
        try:
            self.encode(_ANSWER_MARK)
        except DataError:
            return True
        return False

    def _first_without_token(self, text: str) -> str | None:
        """Return the first piece of `text` that has no token, for a tokenizer with one token for each piece."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or backend.pre_tokenizer is None:
            return None
        pieces = backend.pre_tokenizer.pre_tokenize_str(text)
        return next((piece for piece, _ in pieces if backend.token_to_id(piece) is None), None)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return the tokens of a conversation up to the model's next answer; the model may call `tools` (JSON schemas).

        Raises `DataError` if the chat template refuses the conversation.
        """
        return self.encode(self.render_text(messages, tools))

    def next_turn(
        self, output_ids: Sequence[int], messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens to append after the sampled `output_ids` so that the model answers `messages`.

        The template closes an answer with its end-of-turn token; it is left out if the model sampled it itself. Raises
        `ConfigError` for a template that does not show assistant messages.
        """
        opening = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER_MARK}]
        _, mark, tail = self.render_text([*opening, *messages], tools).rpartition(_ANSWER_MARK)
        if not mark:
            raise ConfigError("the chat template does not show assistant messages: it cannot serve several turns")
        token_ids = self.encode(tail)
        if token_ids and output_ids and token_ids[0] == output_ids[-1] and token_ids[0] in self._special:
            del token_ids[0]
        return token_ids

    def retokenized(self, token_ids: Sequence[int]) -> list[int]:
        """Return the result of decoding `token_ids`, including special tokens, and tokenizing the text again."""
        return self.encode(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, answering: bool = True
    ) -> str:
        """Return a conversation as text; with `answering`, up to the model's next answer.

        Raises `DataError` if the chat template refuses it, or fails because a value in it has an unexpected type.
        """
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=answering
                )
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the chat template refuses a conversation of {roles}: {error}") from error
