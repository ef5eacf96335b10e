"""The publisher's two ends of a weight update."""

from __future__ import annotations

from typing import Literal

import msgspec


class TensorSpec(msgspec.Struct, frozen=True):
    name: str
    """Hugging Face parameter name."""
    dtype: str
    """`float32` or `bfloat16`."""
    shape: list[int]


class Broadcast(msgspec.Struct, frozen=True, tag="broadcast"):
    """Weights that rank 0 of a weight group sends, in this order."""

    buckets: list[list[TensorSpec]]
    """What a gserver receives in one call, in a broadcast each."""
    master_address: str
    """Host of rank 0's store for a new weight group."""
    master_port: int
    backend: Literal["gloo", "nccl"]
    group_name: str
    """Name of the weight group that the publisher has now; empty: none."""


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Weights that lie in a folder, as safetensors."""

    folder: str
    host: str = ""
    """The only host that can read it; empty: every host has the folder."""

    def readable_on(self, host: str) -> bool:
        return self.host in ("", host)


class PublishBegin(msgspec.Struct, frozen=True):
    """The publisher has weights of `version` ready."""

    version: int
    weights: Broadcast | Snapshot
    again: bool = False
    """The version that is served already, for those gservers alone that came too late for it."""


class PublishBeginReply(msgspec.Struct, frozen=True):
    group_name: str
    """Names the update for the commit, and is the group to broadcast in: if it is not the one that the publisher
    has, it must form it now, as rank 0 of `world_size`, on the address that it gave."""
    world_size: int
    """Publisher and ranks of gservers; 1: no gserver lacks this version, there is nothing to do or to commit."""


class PublishCommit(msgspec.Struct, frozen=True):
    """The publisher has brought everything (or failed to: `error`)."""

    version: int
    group_name: str
    error: str = ""
    checksums: dict[str, str] = {}
    """Name → `checksum.tensor_sums` of each weight as it was trained; empty: nothing is compared."""


class Wanted(msgspec.Struct, frozen=True):
    """Which gservers wait for weights that nobody but the publisher can send."""

    version: int
    """What the others serve."""
    gservers: list[str]
    serving: int
    """How many serve."""


class PublishReply(msgspec.Struct, frozen=True):
    done: bool
    """False: the update was rolled back; begin again (the group may have changed)."""
    error: str
    """Why not."""
    pause_seconds: float
    """Longest pause of generation on any gserver."""
    evicted: list[int]
    """gservers that were lost in this update."""
