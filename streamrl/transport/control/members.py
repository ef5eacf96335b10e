"""Who takes part in a run: registration, heartbeats, addresses, the end."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["gserver", "rollout", "evaluator", "master", "model_worker"]


class Register(msgspec.Struct, frozen=True):
    role: Role
    index: int
    """Number within its role, from 0."""
    address: str
    """gserver: HTTP URL; model_worker: ZMQ endpoint of its stream; master: ZMQ endpoint for its
    workers; rollout: empty."""
    config_digest: str
    pid: int
    host: str


class RegisterReply(msgspec.Struct, frozen=True):
    policy_version: int
    heartbeat_seconds: float


class Heartbeat(msgspec.Struct, frozen=True):
    role: Role
    index: int
    stats: dict[str, float]
    """Gauges and counters of the process; names ending in `_total` only grow."""
    waiting_for: str = ""
    """What the process waits for, if it does: shown to the user."""
    error: str = ""
    """Set when the process has to give up: the run stops with this message."""


class HeartbeatReply(msgspec.Struct, frozen=True):
    stop: bool
    """The run is over: finish what is at hand and leave."""
    policy_version: int
    known: bool
    """False: the manager does not know (any more) who calls; register again."""
    leave: bool = False
    """The run goes on without this process: finish what is at hand, and leave."""
    unanswering: list[str] = []
    """To those who generate: addresses of gservers from which no answer is to be expected. What they were asked for is
    to go on elsewhere."""


class SilentProcess(msgspec.Struct, frozen=True):
    role: Role
    index: int
    pid: int
    host: str


class Silence(msgspec.Struct, frozen=True):
    """Who of the run is silent now."""

    changes: int
    """How often that has changed so far."""
    processes: list[SilentProcess]
    over: bool
    """The run is over: it does not matter any more."""


class AskPlace(msgspec.Struct, frozen=True):
    """A process that joins a running run asks which number it may have."""

    role: Role
    config_digest: str


class Place(msgspec.Struct, frozen=True):
    index: int


class Drain(msgspec.Struct, frozen=True):
    """This process shall finish what it has, and leave; the run goes on."""

    role: Role
    index: int


class Leave(msgspec.Struct, frozen=True):
    """This process has left."""

    role: Role
    index: int
    pid: int


class Peer(msgspec.Struct, frozen=True):
    role: Role
    index: int
    address: str


class Topology(msgspec.Struct, frozen=True):
    complete: bool
    """Whether as many as asked for are registered."""
    peers: list[Peer]
    """By index."""


class FinishRun(msgspec.Struct, frozen=True):
    reason: str
    error: str = ""
    """Not empty: the run failed."""


class Done(msgspec.Struct, frozen=True):
    """The call was carried out."""
