"""What is done before or after a model function call.

Workers' hooks are carried out inside the call's request. Because a request reaches all its workers in
the order that they share, hooks may communicate. The master's follow the step that the call belongs to.
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
    """Once for each so many policy versions: after the training step that completes them, or, as a hook of another
    call, at the first of its calls since."""
    share: float = 1.0
    """How much of the source is taken: `target ← (1 - share) · target + share · source`."""


class Offload(msgspec.Struct, frozen=True, tag=True):
    """Move an idle role to the CPU; it comes back by itself when it is called, saved or published.

    The actor stays where it is while its weights are being published: the call then waits for the publication.
    """

    role: str


class SaveHook(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint, besides those that the configuration asks for."""

    every: int = 1
    """After each so many policy versions."""


class EvaluateHook(msgspec.Struct, frozen=True, tag=True):
    """Try the policy on held-out prompts, besides when the configuration says so; needs the section [evaluation]."""

    every: int = 1
    """After each so many policy versions."""


Hook = DataTransfer | ParamRealloc | Offload
"""Of workers."""
MasterHook = SaveHook | EvaluateHook
