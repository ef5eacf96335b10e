"""What the gservers say of one response under the weights that they serve, for the trainer to compare with its own."""

from __future__ import annotations

import msgspec


class Compare(msgspec.Struct, frozen=True):
    """Have every gserver that serves `version` score a response."""

    version: int
    tokens: list[int]
    """Prompt and response."""
    start: int
    """The first token, above 0, whose log-probability is wanted; those of all after it are, too."""


class Scores(msgspec.Struct, frozen=True):
    """One gserver's answer, or why there is none."""

    gserver: str
    """Its name, for example `gserver/0`."""
    logprobs: list[float] = []
    """Of the tokens from `start` on, at temperature 1, in nats."""
    seconds: float = 0.0
    """From the question to the answer, the wait for a place included."""
    computed: int = 0
    """Tokens that were computed for it, which others may use: those that it had in its cache are not counted."""
    problem: str = ""


class Compared(msgspec.Struct, frozen=True):
    scores: list[Scores]
    """By index of the gserver."""
