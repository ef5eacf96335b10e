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


class PublishBegin(msgspec.Struct, frozen=True):
    """The publisher has weights of `version` ready, in these buckets, sent in this order."""

    version: int
    buckets: list[list[TensorSpec]]
    master_address: str
    """Host of rank 0's store for a new weight group."""
    master_port: int
    backend: Literal["gloo", "nccl"]
    group_name: str
    """Name of the weight group that the publisher has now; empty: none."""


class PublishBeginReply(msgspec.Struct, frozen=True):
    group_name: str
    """The group to broadcast in. If it is not the one that the publisher has, it must form it now,
    as rank 0 of `world_size`, on the address that it gave."""
    world_size: int
    """Publisher and gservers."""


class PublishCommit(msgspec.Struct, frozen=True):
    """The publisher sent every bucket (or failed to: `error`)."""

    version: int
    group_name: str
    error: str = ""


class PublishReply(msgspec.Struct, frozen=True):
    done: bool
    """False: the update was rolled back; begin again (the group may have changed)."""
    error: str
    """Why not."""
    pause_seconds: float
    """Longest pause of generation on any gserver."""
    evicted: list[int]
    """gservers that were lost in this update."""
