"""Authentication on the ZMQ sockets of the run, and API keys for HTTP. Keys are derived from the run's secret.

The controller gives each joining process a *credential* for each kind of receiver that its role may send to: the
process's name, the number of its join, and a keyed BLAKE2b (RFC 7693) over both. Only processes with the run's secret
have the key of the hash. The credential is the prefix of the routing ids of the process's sockets, so every message
carries it. With a group's lease the worker receives a *permit* for the sequence number, made in the same way.

Off the loopback address the sockets are encrypted by CURVE (https://rfc.zeromq.org/spec/26). Receivers of one kind
share a key pair, and so do their senders: a client without the senders' key is disconnected before it can send.

Invariant: of all processes that ever had one name, a receiver accepts only the one that joined last, once it has
received a message from it. A name alone proves nothing.

API keys are sent as `Authorization: Bearer KEY`. A user may set one; a configuration names only the environment
variable that holds it, so that no key is in a file, a log or a fingerprint.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple, get_args

import msgspec
import zmq
from zmq.utils import z85

from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.transport.control import Credential, Role
from streamrl.transport.secret import LEAST_CHARACTERS, Secret, is_usable

MAY_SEND_TO: Mapping[Role, frozenset[Role]] = {
    "model_worker": frozenset({"rollout"}),
    "controller": frozenset({"model_worker", "rollout"}),
}
"""Receiver → roles that may send to it: groups to the model workers, replies and notices to the controller."""
MAC_BYTES = 16
LONGEST_INDEX = 9
"""Digits of the number of a process within its role."""


class CurveKeys(NamedTuple):
    """A key pair, in Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def derive(cls, secret: Secret, purpose: str) -> CurveKeys:
        """Return the key pair of the run for one purpose."""
        key: bytes = z85.encode(secret.key(purpose))
        return cls(zmq.curve_public(key), key)


class ReceiverKeys(NamedTuple):
    """The keys of the receivers of one role."""

    role: Role
    verification: bytes
    """Key of the hashes in credentials and permits."""
    own: CurveKeys
    senders: CurveKeys

    @classmethod
    def derive(cls, secret: Secret, role: Role) -> ReceiverKeys:
        """Return the keys of the run's receivers of `role`."""
        return cls(
            role,
            secret.key(f"credentials for {role}"),
            CurveKeys.derive(secret, f"curve of {role}"),
            CurveKeys.derive(secret, f"curve of senders to {role}"),
        )

    def credential(self, role: Role, index: int, *, number: int) -> Credential:
        """Return the credential of a process; `number` counts the joins of the run."""
        claim = f"{role}/{index} {number}"
        text = f"{claim} {self._mac(claim.encode()).hex()}"
        return Credential(text, sender_key=self.senders.secret.decode(), receiver_key=self.own.public.decode())

    def permit(self, seq: int, name: str) -> str:
        """Return the permit that `name` sends with the group `seq`, which was leased to it."""
        return self._mac(b"permit %d %s" % (seq, name.encode())).hex()

    def permits(self, seq: int, name: str, permit: str) -> bool:
        """Whether `permit` is the permit of `name` for `seq`."""
        return hmac.compare_digest(self.permit(seq, name).encode(), permit.encode())

    def belongs(self, claim: bytes, mac: bytes) -> bool:
        """Whether `mac` is the hexadecimal hash of `claim`. The comparison takes constant time."""
        return hmac.compare_digest(self._mac(claim).hex().encode(), mac)

    def _mac(self, content: bytes) -> bytes:
        return blake2b(content, key=self.verification, digest_size=MAC_BYTES).digest()


class Identity(msgspec.Struct, eq=False):
    """A process with a valid credential."""

    role: Role
    index: int
    number: int
    superseded: bool = False
    """Whether a message came from a process that joined later under the same name."""
    name: str = ""

    def __post_init__(self) -> None:
        self.name = f"{self.role}/{self.index}"


class UnknownSender(Exception):
    """A message came from a sender that may not send it; the text has the reason and the claimed name."""


class Verifier:
    """Identifies the senders of messages by their routing ids."""

    def __init__(self, keys: ReceiverKeys) -> None:
        self._keys = keys
        self._roles = MAY_SEND_TO[keys.role]
        self._latest: dict[str, Identity] = {}

    def sender(self, routing_id: bytes) -> Identity:
        """Return the sender with `routing_id`.

        Raises `UnknownSender` if the credential is missing, invalid, superseded, or not valid for this receiver."""
        found = self._latest_of(self._read(routing_id))
        if found.superseded:
            raise UnknownSender(f"a process that was {found.name}: another process has taken its place")
        return found

    def _latest_of(self, identity: Identity) -> Identity:
        """Return the known identity that equals `identity`, or `identity`, superseded if a later one is known."""
        latest = self._latest.get(identity.name)
        if latest is not None and identity.number == latest.number:
            return latest
        if latest is None or identity.number > latest.number:
            self._latest[identity.name] = identity
            if latest is not None:
                latest.superseded = True
        else:
            identity.superseded = True
        return identity

    def _read(self, routing_id: bytes) -> Identity:
        claim, _, link = routing_id.rpartition(b" ")  # the link distinguishes the sockets of a process
        claim, _, mac = claim.rpartition(b" ")
        claimed = claimed_name(routing_id)
        if not link or not mac:
            raise UnknownSender(f"{claimed} without a credential")
        if not self._keys.belongs(claim, mac):
            raise UnknownSender(f"{claimed} with a credential of another run, or for another receiver")
        name, number = claim.decode().split(" ")
        role, _, index = name.partition("/")
        for known in get_args(Role):
            if role == known and known in self._roles:
                return Identity(known, int(index), int(number))
        raise UnknownSender(f"{name}, which may not send to a {self._keys.role}")


def claimed_name(routing_id: bytes) -> str:
    """Return, for a log, the name that `routing_id` claims, without its secret part."""
    if routing_id[:1] == b"\0":  # generated by ZMQ for a client that set none
        return "a sender without a name"
    claimed = routing_id.split(b" ", 1)[0][:40].decode("ascii", "backslashreplace")
    return f"a sender with the name {claimed!r}"


# --- API keys ---

HEADER = "Authorization"


def read_key(variable: str, *, setting: str) -> str:
    """Return the key in the environment variable `variable`, which `setting` names; empty if `variable` is empty.

    Raises `ConfigError` if the variable holds no valid key.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not is_usable(key):
        raise ConfigError(
            f'{setting} = "{variable}": that environment variable holds no key '
            f"(at least {LEAST_CHARACTERS} printable characters without spaces); "
            f'set it in every process of the run, for example export {variable}="$(openssl rand -hex 32)"'
        )
    return key


def generation_key(config: Config, secret: Secret) -> str:
    """Return the key that the run's gservers require for generation: from `gserver.api_key_env`, or else derived from
    the run's secret. Raises as `read_key` does."""
    return _gserver_key(config, secret, "generation")


def control_key(config: Config, secret: Secret, index: int) -> str:
    """Return the key that gserver `index` requires for calls that change it; only the manager makes such calls.

    Raises as `read_key` does."""
    return _gserver_key(config, secret, f"control of gserver/{index}")


def _gserver_key(config: Config, secret: Secret, purpose: str) -> str:
    named = read_key(config.gserver.api_key_env, setting="gserver.api_key_env")
    return named or secret.key(purpose).hex()


class GserverKeys(NamedTuple):
    """Keys that one gserver requires of its callers; an empty key admits every caller."""

    generation: str = ""
    """For generation requests and status: rollout workers have it."""
    control: str = ""
    """For calls that change the gserver: the manager has it."""

    @classmethod
    def of(cls, config: Config, secret: Secret, index: int) -> GserverKeys:
        """Return the keys of gserver `index`. Raises as `read_key` does."""
        return cls(generation_key(config, secret), control_key(config, secret, index))


def bearer(key: str) -> dict[str, str]:
    """Return the HTTP headers with `key`; no headers if it is empty."""
    return {HEADER: f"Bearer {key}"} if key else {}


def admits(key: str, shown: str | None) -> bool:
    """Whether the header value `shown` contains `key`. The comparison takes constant time."""
    return not key or hmac.compare_digest((shown or "").encode(errors="replace"), f"Bearer {key}".encode())
