"""Who is who on the sockets of the run: what a member shows there, and how a receiver knows it.

The manager gives each process that joins a *credential* for each kind of receiver that its role may speak to. It names
the process, counts the joins of the run, and carries the process's CURVE key and a keyed BLAKE2b (RFC 7693) over all of
that, with a key which only the manager and those receivers have. It is the beginning of the routing ids of the
process's sockets, so every message comes with it, and nobody can take over a connection whose credential he does not
know. With a group's lease the worker is given a *permit* for its sequence number in the same way.

Invariant: of all processes that ever had one name, only the one that joined last is heard by a receiver which has heard
it once. A name is never believed by itself.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import blake2b
from typing import get_args

from streamrl.transport.control import Role

HEARS: Mapping[Role, frozenset[Role]] = {
    "model_worker": frozenset({"rollout"}),
    "master": frozenset({"model_worker", "rollout"}),
}
"""Receiver → who may speak to it over ZMQ: groups to the model workers, replies and notices to the master."""
MAC_BYTES = 16
LONGEST_ID = 255
"""Bytes of a routing id, as ZMQ has it."""
LONGEST_INDEX = 9
"""Digits of the number of a process within its role."""
REMEMBERED = 65536
"""Routing ids that a receiver remembers as verified."""


def credential(key: bytes, *, role: Role, index: int, number: int, curve_key: str) -> str:
    """Return the credential for receivers that verify with `key`; `number` counts the joins of the run."""
    claim = f"{role}/{index} {number} {curve_key or '-'}"
    return f"{claim} {_mac(key, claim.encode()).hex()}"


def permit(key: bytes, *, seq: int, name: str) -> str:
    """Return what `name` shows with the group `seq`, which was leased to it."""
    return _mac(key, b"permit %d %s" % (seq, name.encode())).hex()


def permits(key: bytes, shown: str, *, seq: int, name: str) -> bool:
    """Whether `shown` is the permit of `name` for `seq`."""
    return hmac.compare_digest(permit(key, seq=seq, name=name).encode(), shown.encode())


def _mac(key: bytes, content: bytes) -> bytes:
    return blake2b(content, key=key, digest_size=MAC_BYTES).digest()


class Sender:
    """A process that has shown its credential."""

    __slots__ = ("curve_key", "index", "name", "number", "role", "superseded")

    def __init__(self, role: Role, index: int, *, number: int, curve_key: str) -> None:
        self.role: Role = role
        self.index = index
        self.name = f"{role}/{index}"
        self.number = number
        self.curve_key = curve_key
        self.superseded = False
        """Whether a process that joined later under the same name was heard."""


class Stranger(Exception):
    """Who sent a message is nobody who may; the text says why, and whom he claimed to be."""


class Verifier:
    """Tells a receiver who sends. It knows nobody until it was given its `key`."""

    def __init__(self, receiver: Role, *, key: bytes = b"", encrypted: bool = False) -> None:
        """`receiver`: the role of the process that receives; `encrypted`: whether its socket is one of CURVE, so that
        each message tells the key of the connection that it came by."""
        self.key = key
        self._heard_roles = HEARS[receiver]
        self._encrypted = encrypted
        self._known: dict[bytes, Sender] = {}
        self._latest: dict[str, Sender] = {}

    def sender(self, routing_id: bytes, *, user: str = "") -> Sender:
        """Return who sends by `routing_id`, over a connection whose CURVE key is `user`; raises `Stranger`."""
        found = self._known.get(routing_id)
        if found is None:
            found = self._read(routing_id)
            latest = self._latest.get(found.name)
            if latest is None or found.number > latest.number:
                if latest is not None:
                    latest.superseded = True
                self._latest[found.name] = found
            elif found.number == latest.number:
                found = latest
            else:
                found.superseded = True
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[routing_id] = found
        if found.superseded:
            raise Stranger(f"a process that was {found.name}: another one has taken its place")
        if self._encrypted and user != found.curve_key:
            raise Stranger(f"somebody with the credential of {found.name}, but not with its key")
        return found

    def permits(self, sender: Sender, seq: int, shown: str) -> bool:
        """Whether `seq` was leased to `sender`, as `shown` is to prove."""
        return permits(self.key, shown, seq=seq, name=sender.name)

    def _read(self, routing_id: bytes) -> Sender:
        claim, _, rest = routing_id.rpartition(b" ")  # the rest tells one socket of a process from another
        claim, _, mac = claim.rpartition(b" ")
        who = printable(routing_id)
        if not rest or not mac or not self.key:
            raise Stranger(f"{who}, who shows no credential")
        if not hmac.compare_digest(_mac(self.key, claim).hex().encode(), mac):
            raise Stranger(f"{who}, whose credential is not of this run, or not for this socket")
        name, number, curve_key = claim.decode().split(" ")
        role, _, index = name.partition("/")
        for known in get_args(Role):
            if role == known and known in self._heard_roles:
                return Sender(known, int(index), number=int(number), curve_key="" if curve_key == "-" else curve_key)
        raise Stranger(f"{name}, who has nothing to say here")


def routing_id(shown: str, *, link: str) -> bytes:
    """Return the routing id of a socket of the process with the credential `shown`; `link` tells its sockets apart."""
    return f"{shown} {link}".encode()


def printable(routing_id: bytes) -> str:
    """Return, for a log, whom the owner of `routing_id` claims to be: without the rest, which is a secret."""
    if routing_id[:1] == b"\0":  # ZMQ's own, of one that gave none
        return "somebody without a name"
    claimed = routing_id.split(b" ", 1)[0][:40].decode("ascii", "backslashreplace")
    return f"somebody who says that he is {claimed!r}"
