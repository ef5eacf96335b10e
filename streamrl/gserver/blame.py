"""Which gservers an update failed because of: a pure decision on what was seen of each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

Who = TypeVar("Who")


class Seen(Enum):
    """What was seen of one gserver while an update went on."""

    FINE = "fine"
    """It did its part, or was at it when another failed."""
    LATE = "late"
    """It did not answer a call of the update in time, yet answers otherwise."""
    REFUSED = "refused"
    """It answered with a failure, or with nonsense."""
    LOST = "lost"
    """It does not answer at all."""


def culprits(seen: Mapping[Who, Seen], *, publisher_failed: bool) -> set[Who]:
    """Whom to leave out of the next attempt.

    A broadcast fails for everyone when one rank is gone, so a failure counts against a gserver only
    if nobody is lost and others did not fail in the same way: what befell all came from outside.
    """
    lost = {who for who, what in seen.items() if what is Seen.LOST}
    if lost or publisher_failed:
        return lost
    for kind in (Seen.REFUSED, Seen.LATE):
        guilty = {who for who, what in seen.items() if what is kind}
        if guilty and len(guilty) < len(seen):
            return guilty
    return set()
