"""The keys and credentials of a test's run on ZMQ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.transport.control import Credential, Peer, Role
from streamrl.transport.credentials import ReceiverKeys
from streamrl.transport.push_pull import GroupPusher
from streamrl.transport.secret import Secret
from streamrl.types import TrajectoryGroup

SECRET = Secret("s" * 64, origin="the tests")
OTHER_SECRET = Secret("o" * 64, origin="the tests")
"""The secret of another run."""


def keys_of(receiver: Role, *, secret: Secret = SECRET) -> ReceiverKeys:
    return ReceiverKeys.derive(secret, receiver)


def credential_of(role: Role, index: int, *, to: Role, number: int = 1, secret: Secret = SECRET) -> Credential:
    """The credential of a process that joined as number `number`, for receivers of role `to`."""
    return keys_of(to, secret=secret).credential(role, index, number=number)


def permit_for(seq: int, name: str = "rollout/0") -> str:
    return keys_of("model_worker").permit(seq, name)


def peer_at(address: str) -> Peer:
    return Peer("model_worker", 0, address)


class LeasedPusher(GroupPusher):
    """A pusher of `worker`, with permits for all groups."""

    def __init__(self, *, worker: str = "rollout/0", endpoints: Sequence[str], **settings: Any) -> None:
        role, _, index = worker.partition("/")
        credential = credential_of(role, int(index), to="model_worker")  # type: ignore[arg-type]
        heads = [peer_at(endpoint) for endpoint in endpoints]
        super().__init__(worker=worker, heads=heads, credential=credential, **settings)
        self._name = worker

    async def push(self, group: TrajectoryGroup, *, permit: str = "") -> None:
        group = msgspec.structs.replace(group, worker=self._name)
        await super().push(group, permit=permit or permit_for(group.seq, self._name))
