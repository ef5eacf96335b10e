"""What processes of a test's run show each other on ZMQ, as if a manager had given it to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.transport.control import Peer, Role
from streamrl.transport.credentials import CurveKeys, Shown, Verifier, credential, permit
from streamrl.transport.push_pull import GroupPusher
from streamrl.types import TrajectoryGroup

KEYS: dict[Role, bytes] = {"model_worker": b"k" * 32, "controller": b"m" * 32}
"""Receiver → what it knows senders by."""


def shown_by(
    role: Role, index: int, *, to: Role, number: int = 1, keys: CurveKeys | None = None, key: bytes | None = None
) -> Shown:
    """What the process shows that joined as number `number`; `key`: of another run."""
    curve_key = keys.public if keys is not None else ""
    text = credential(key or KEYS[to], role=role, index=index, number=number, curve_key=curve_key)
    return Shown(text, keys)


def verifier_of(receiver: Role, *, encrypted: bool = False) -> Verifier:
    return Verifier(receiver, key=KEYS[receiver], encrypted=encrypted)


def permit_for(seq: int, name: str = "rollout/0") -> str:
    """What shows that `seq` was leased to `name`."""
    return permit(KEYS["model_worker"], seq=seq, name=name)


def peer_at(address: str, *, curve_key: str = "") -> Peer:
    return Peer("model_worker", 0, address, curve_key)


class LeasedPusher(GroupPusher):
    """A pusher of `worker` to whom every group was leased that it pushes."""

    def __init__(self, *, worker: str = "rollout/0", endpoints: Sequence[str], **settings: Any) -> None:
        role, _, index = worker.partition("/")
        shown = shown_by(role, int(index), to="model_worker")  # type: ignore[arg-type]
        super().__init__(worker=worker, heads=[peer_at(endpoint) for endpoint in endpoints], shown=shown, **settings)
        self._name = worker

    async def push(self, group: TrajectoryGroup, *, permit: str = "") -> None:
        group = msgspec.structs.replace(group, worker=self._name)
        await super().push(group, permit=permit or permit_for(group.seq, self._name))
