"""How long something took, for timelines."""

from __future__ import annotations

import msgspec


class Span(msgspec.Struct, frozen=True):
    """What one MFC took."""

    name: str
    begin: float
    """Seconds since the epoch."""
    end: float
    compute_seconds: float = 0.0
    """Of that, computing on the slowest worker."""
