"""How many prompt tokens are computed before the next decode step, and of which requests. Pure.

A slot that waits for its prompt makes no tokens, and a long prompt holds up all that make some. So the more slots
are free, the more prompt tokens may come between two decode steps; and a long prompt is cut.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

CHUNK_TOKENS = 256
"""Least budget of a step; prompts that need no more are not cut."""


class Need(msgspec.Struct, frozen=True):
    """What is left to compute of one waiting request."""

    tokens: int
    whole: bool = False
    """It has to be computed at once."""


def budget(*, free: int, slots: int, most: int) -> int:
    """Prompt tokens until the next decode step: the share of `most` that `free` is of `slots`, but a chunk at least."""
    return max(CHUNK_TOKENS, most * free // slots)


def shares(needs: Iterable[Need], *, tokens: int) -> list[int]:
    """How many of `tokens` each of the first requests gets, in their order; the others wait for a later step.

    Only the last share may be less than its request needs. `tokens` are exceeded only by a first request that has to
    be computed whole. `needs` is read no further than necessary.
    """
    given: list[int] = []
    left = tokens
    for need in needs:
        fits = need.tokens <= left
        if not fits and given and (need.whole or need.tokens <= CHUNK_TOKENS):
            break
        share = need.tokens if fits or need.whole else left
        given.append(share)
        left -= share
        if left <= 0:
            break
    return given
