"""Strings that end a response, detected as its tokens arrive.

The embedded engine checks the tokens that it samples, and the rollout worker checks the response that it assembles.
Code that displays growing text holds back a possible beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Takes token ids and returns their text."""

TAIL_MARGIN = 4
"""Tokens that are checked for a stop string, in addition to one for each of its bytes."""


class StopStrings:
    """The stop strings of one request or run."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = strings
        self._decode = decode
        # Bytes, not characters: a tokenizer may spell a character without a token with up to four tokens.
        self.reach = max(len(string.encode()) for string in strings) + TAIL_MARGIN if strings else 0
        """Maximum number of tokens that a string spans."""

    def and_also(self, strings: Sequence[str]) -> StopStrings:
        """Return these strings together with `strings`."""
        return StopStrings([*self._strings, *strings], self._decode)

    def at_the_end(self, tokens: Sequence[int]) -> str | None:
        """Return the first of the strings in the text of the last `reach` of `tokens`; None if there is none."""
        if not self._strings:
            return None
        tail = self._decode(list(tokens[-self.reach :]))
        return next((string for string in self._strings if string in tail), None)


def without_begun(text: str, *words: str) -> str:
    """Return `text` without an end that may be the beginning of one of `words`."""
    return text[: len(text) - max((_begun(text, word) for word in words), default=0)]


def _begun(text: str, word: str) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of `word`."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:n])), 0)


def before_stop(text: str, stop: str) -> str:
    """Return the part of `text` before the last `stop`; all of it if there is no `stop`."""
    before, found, _ = text.rpartition(stop) if stop else ("", "", "")
    return before if found else text
