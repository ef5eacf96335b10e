"""Authentication and authorization of the manager's callers, and the credentials that members receive on joining.

The owner of the run presents a key derived from the run's secret and may make every call; a process joins with the
same key. From then on it presents the token that it was given, which permits the calls of its role, in its own name.
Owns the keys that are derived from the secret; `http.py` has the table of permissions. Invariant: the
identity in a call's body is accepted only if it agrees with the presented key or token.
"""

from __future__ import annotations

import hmac
import secrets

import msgspec

from streamrl.errors import PeerError
from streamrl.gserver.manager.registry import Member, Registry
from streamrl.records.lineage import Lineage
from streamrl.transport.control import RegisterReply
from streamrl.transport.credentials import MAY_SEND_TO, ReceiverKeys
from streamrl.transport.secret import Secret

OWNER = "the run's owner"
"""The caller that presents the key derived from the run's secret."""


class Access:
    """Identifies callers by the key or token that they present."""

    def __init__(self, secret: Secret, registry: Registry, *, gserver_key: str) -> None:
        """`gserver_key`: the key that gservers require for generation requests."""
        self._shown = secret.shown.encode()
        self._registry = registry
        self._gserver_key = gserver_key
        self.lineage = ""
        """Random identifier of this lineage of the run, also unique across earlier controllers; not secret."""
        self._lineages: list[Lineage] = []
        self.begin_lineage([])
        self.receivers = {receiver: ReceiverKeys.derive(secret, receiver) for receiver in MAY_SEND_TO}
        """The keys of receivers on ZMQ, by role."""

    def grant(self, member: Member, *, policy_version: int, heartbeat_seconds: float) -> RegisterReply:
        """Return the reply to a process that has joined: only the data that its role needs."""
        return RegisterReply(
            policy_version=policy_version,
            heartbeat_seconds=heartbeat_seconds,
            token=member.token,
            credentials={
                receiver: self.receivers[receiver].credential(member.role, member.index, number=member.number)
                for receiver, senders in MAY_SEND_TO.items()
                if member.role in senders
            },
            lineage=self.lineage,
            lineages=self._lineages if member.role == "rollout" else [],
            gserver_key=self._gserver_key if member.role == "rollout" else "",
        )

    def begin_lineage(self, lineages: list[Lineage]) -> None:
        """Begin another lineage, the last of the run's `lineages`."""
        self.lineage = secrets.token_hex(8)
        self._lineages = lineages

    def permit(self, seq: int, worker: str) -> str:
        """Return the permit that `worker` presents with the group `seq`, which it is given."""
        return self.receivers["model_worker"].permit(seq, worker)

    def caller(self, authorization: str) -> Member | str | None:
        """Return the caller that the header `authorization` identifies: a member, the `OWNER`, or None if unknown."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        member = self._registry.with_token(token)
        if member is not None:
            return member
        return OWNER if hmac.compare_digest(token.encode(errors="replace"), self._shown) else None


def check_speaker(member: Member, message: msgspec.Struct) -> None:
    """Raise `PeerError` (403) if `message` names another sender than `member`, which sent it.

    A message names its sender in `worker`, the index of a rollout worker, or in `role` and `index`."""
    said = member.name
    if hasattr(message, "worker"):
        said = f"rollout/{message.worker}"
    elif hasattr(message, "role") and hasattr(message, "index"):
        said = f"{message.role}/{message.index}"
    if said != member.name:
        who = f"{member.name} (process {member.pid} on {member.host})"
        raise PeerError(f"{who} speaks in the name of {said}", status=403)
