"""What model workers do before or after a model function call, inside the same request.

Because a request reaches all its workers in the order that they share, hooks may communicate.
"""

from __future__ import annotations

import msgspec

from streamrl.trainer.redistributor import Step


class DataTransfer(msgspec.Struct, frozen=True, tag=True):
    """Bring arrays to where the call needs them; the master adds this one by itself."""

    plan: list[Step]


class ParamRealloc(msgspec.Struct, frozen=True, tag=True):
    """Give one role's weights to another, whatever layouts and backends the two have."""

    source: str
    target: str
    every: int = 1
    """Only after each so many policy versions."""
    share: float = 1.0
    """How much of the source is taken: `target ← (1 - share) · target + share · source`."""


class Offload(msgspec.Struct, frozen=True, tag=True):
    """Move an idle role to the CPU; it comes back by itself when it is called."""

    role: str


Hook = DataTransfer | ParamRealloc | Offload
