"""Strings that end a response, looked for as its tokens come.

The embedded engine does so in what it samples, and the rollout worker where it puts a response together. Whoever shows
a text that grows keeps back what may be the beginning of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Takes token ids and returns their text."""

TAIL_MARGIN = 4
"""Tokens that are looked at for a stop string, besides one for each of its bytes."""


class StopStrings:
    """The strings of one request or run."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = strings
        self._decode = decode
        # Bytes, not characters: a tokenizer may spell one that it has no token for with up to four.
        self.reach = max(len(string.encode()) for string in strings) + TAIL_MARGIN if strings else 0
        """Tokens that a string may lie across, at most."""

    def and_also(self, strings: Sequence[str]) -> StopStrings:
        """Return these and `strings`."""
        return StopStrings([*self._strings, *strings], self._decode)

    def at_the_end(self, tokens: Sequence[int]) -> str | None:
        """Return the first of the strings that is in the text of the last `reach` of `tokens`, if one is."""
        if not self._strings:
            return None
        tail = self._decode(list(tokens[-self.reach :]))
        return next((string for string in self._strings if string in tail), None)


def without_begun(text: str, *words: str) -> str:
    """Return `text` without the end that may be the beginning of one of `words`."""
    return text[: len(text) - max((_begun(text, word) for word in words), default=0)]


def _begun(text: str, word: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `word`."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:n])), 0)


def before_stop(text: str, stop: str) -> str:
    """Return what is before the last `stop` in `text`; all of it where there is none."""
    before, found, _ = text.rpartition(stop) if stop else ("", "", "")
    return before if found else text
