"""Authentication on the sockets of the run: the credentials of members, and their verification by receivers.

The manager gives each joining process a *credential* for each kind of receiver that its role may send to. The
credential contains the process's name, the number of its join, its CURVE key, and a keyed BLAKE2b (RFC 7693) over all
of these. Only the manager and those receivers have the key of the hash. The credential is the prefix of the routing ids
of the process's sockets, so every message carries it, and no process can take over a connection without knowing its
credential. With a group's lease the worker receives a *permit* for the sequence number, made in the same way.

Invariant: of all processes that ever had one name, a receiver accepts only the one that joined last, once it has
received a message from it. A name alone proves nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple, get_args
from urllib.parse import urlsplit

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from streamrl.errors import ConfigError, StreamRLError, WireError
from streamrl.transport.addresses import address_of, host_of, url_of
from streamrl.transport.control import Role
from streamrl.transport.seldom import Seldom

log = logging.getLogger(__name__)

HEARS: Mapping[Role, frozenset[Role]] = {
    "model_worker": frozenset({"rollout"}),
    "controller": frozenset({"model_worker", "rollout"}),
}
"""Receiver → roles that may send to it over ZMQ: groups to the model workers, replies and notices to the controller."""
MAC_BYTES = 16
ZAP_DOMAIN = b"streamrl"
ASK_SECONDS = 5.0
"""Timeout for the manager's reply to whether a key belongs to a member."""
LONGEST_INDEX = 9
"""Digits of the number of a process within its role."""
REMEMBERED = 65536
"""Routing ids that a receiver remembers as verified."""


def credential(key: bytes, *, role: Role, index: int, number: int, curve_key: str) -> str:
    """Return the credential for receivers that verify with `key`; `number` counts the joins of the run."""
    claim = f"{role}/{index} {number} {curve_key or '-'}"
    return f"{claim} {_mac(key, claim.encode()).hex()}"


def permit(key: bytes, *, seq: int, name: str) -> str:
    """Return the permit that `name` sends with the group `seq`, which was leased to it."""
    return _mac(key, b"permit %d %s" % (seq, name.encode())).hex()


def permits(key: bytes, shown: str, *, seq: int, name: str) -> bool:
    """Whether `shown` is the permit of `name` for `seq`."""
    return hmac.compare_digest(permit(key, seq=seq, name=name).encode(), shown.encode())


def _mac(key: bytes, content: bytes) -> bytes:
    return blake2b(content, key=key, digest_size=MAC_BYTES).digest()


class CurveKeys(NamedTuple):
    """A process's own key pair for encrypted sockets (CurveZMQ, https://rfc.zeromq.org/spec/26). It exists only in the
    memory of the process."""

    public: str
    """In Z85, as other processes receive it."""
    secret: bytes

    @classmethod
    def make(cls) -> CurveKeys:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret)


class Shown(NamedTuple):
    """Credential and keys that the sockets of a process present to receivers of one role."""

    credential: str
    keys: CurveKeys | None = None
    """Required if a receiver's socket is encrypted."""


def encrypt_server(endpoint: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Have `endpoint`, before it is bound, accept only encrypted connections with keys that a `Doorkeeper` accepts."""
    endpoint.set(zmq.CURVE_SERVER, 1)
    endpoint.set(zmq.CURVE_SECRETKEY, keys.secret)
    endpoint.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def bind(endpoint: zmq.Socket[Any], host: str, port: int = 0) -> int:
    """Have `endpoint` listen at `port` of `host` (0: any free port); return the port.

    A name is resolved by `address_of`, as by the processes that connect to it. Raises `ConfigError` if it has no
    address.
    """
    try:
        address = host if ":" in host else address_of(host)
    except OSError as error:
        raise ConfigError(f"{host} stands for no address ({error.strerror}): give the address itself") from error
    endpoint.set(zmq.IPV6, ":" in address)
    endpoint.bind(url_of(address, port, scheme="tcp"))
    bound = urlsplit(endpoint.get_string(zmq.LAST_ENDPOINT).rstrip("\0")).port
    assert bound is not None
    return bound


def connect(endpoint: zmq.Socket[Any], address: str, *, curve_key: str, shown: Shown, link: str) -> None:
    """Connect `endpoint` to the receiver at `address`, with the CURVE key `curve_key` if its socket is encrypted.

    `link` distinguishes the sockets of the process. Raises `WireError` if the receiver is encrypted and `shown` has no
    keys.
    """
    endpoint.set(zmq.ROUTING_ID, f"{shown.credential} {link}".encode())
    if curve_key:
        if shown.keys is None:
            raise WireError(f"the socket at {address} is encrypted, and this process has no keys for that")
        endpoint.set(zmq.CURVE_SERVERKEY, curve_key.encode())
        endpoint.set(zmq.CURVE_PUBLICKEY, shown.keys.public.encode())
        endpoint.set(zmq.CURVE_SECRETKEY, shown.keys.secret)
    with suppress(OSError):  # ZMQ resolves the address again itself
        endpoint.set(zmq.IPV6, ":" in address_of(host_of(address)))
    endpoint.connect(address)


def user_of(frame: zmq.Frame) -> str:
    """Return the CURVE key (Z85) of the encrypted connection on which `frame` arrived; empty if it has none."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class _Zap(AsyncioAuthenticator):
    tries_again = False
    """Whether a connection that is rejected now may try again (300), instead of being rejected for good (400)."""

    def _send_zap_reply(self, request_id: bytes, status_code: bytes, *rest: Any) -> None:
        code = b"300" if self.tries_again and status_code == b"400" else status_code
        self.tries_again = False
        super()._send_zap_reply(request_id, code, *rest)


class Doorkeeper:
    """Lets only clients whose keys `is_member` accepts into the encrypted sockets of a context (libzmq's ZAP,
    https://rfc.zeromq.org/spec/27). Other clients are disconnected before they can send anything."""

    def __init__(self, context: zmq.Context[Any], is_member: Callable[[str], Awaitable[bool]]) -> None:
        self._is_member = is_member
        self._zap = _Zap(context)
        self._zap.configure_curve_callback(domain=ZAP_DOMAIN.decode(), credentials_provider=self)
        self._seldom = Seldom(log)

    def start(self) -> None:
        """Call with the event loop running."""
        self._zap.start()

    def stop(self) -> None:
        self._zap.stop()

    async def callback(self, domain: str, key: bytes) -> bool:
        """Whether `key` (Z85) may connect; called by pyzmq for each connection."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                known = await self._is_member(key.decode())
        except (StreamRLError, TimeoutError) as error:
            self._seldom.warning("it cannot be found out whose a key is: %s", error)
            self._zap.tries_again = True
            return False
        if not known:
            self._seldom.warning("refused a connection with a key that is no member's")
        return known


class Identity:
    """A process that has shown its credential."""

    __slots__ = ("curve_key", "index", "name", "number", "role", "superseded")

    def __init__(self, role: Role, index: int, *, number: int, curve_key: str) -> None:
        self.role: Role = role
        self.index = index
        self.name = f"{role}/{index}"
        self.number = number
        self.curve_key = curve_key
        self.superseded = False
        """Whether a message came from a process that joined later under the same name."""


class Stranger(Exception):
    """A message came from a sender that may not send it; the text has the reason and the claimed name."""


class Verifier:
    """Identifies the senders of messages for a receiver. It accepts no sender until its `key` is set."""

    def __init__(self, receiver: Role, *, key: bytes = b"", encrypted: bool = False) -> None:
        """`receiver`: the role of the receiving process; `encrypted`: whether its socket uses CURVE, so that each
        message comes with the key of its connection."""
        self.key = key
        self._heard_roles = HEARS[receiver]
        self._encrypted = encrypted
        self._known: dict[bytes, Identity] = {}
        self._latest: dict[str, Identity] = {}

    def sender(self, routing_id: bytes, *, user: str = "") -> Identity:
        """Return the sender with `routing_id` on a connection with the CURVE key `user`.

        Raises `Stranger` if the credential is missing, invalid, superseded, or not valid for this key or receiver."""
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

    def permits(self, sender: Identity, seq: int, shown: str) -> bool:
        """Whether `shown` proves that `seq` was leased to `sender`."""
        return permits(self.key, shown, seq=seq, name=sender.name)

    def _read(self, routing_id: bytes) -> Identity:
        claim, _, rest = routing_id.rpartition(b" ")  # the rest distinguishes the sockets of a process
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
                return Identity(known, int(index), number=int(number), curve_key="" if curve_key == "-" else curve_key)
        raise Stranger(f"{name}, who has nothing to say here")


def printable(routing_id: bytes) -> str:
    """Return, for a log, the name that `routing_id` claims, without its secret part."""
    if routing_id[:1] == b"\0":  # generated by ZMQ for a client that set none
        return "somebody without a name"
    claimed = routing_id.split(b" ", 1)[0][:40].decode("ascii", "backslashreplace")
    return f"somebody who says that he is {claimed!r}"
