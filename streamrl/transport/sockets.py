"""The ZMQ sockets of the run: `ServerSocket` at a receiver, `ClientSocket` at a sender.

Both authenticate the sender, and carry messages over a session (`session.py`), so each message is processed once.
Addresses begin with `curve://` if the receiver encrypts its connections, else with `tcp://`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from streamrl.errors import UNDECODABLE, ConfigError, PeerLost, WireError
from streamrl.records.logs import RateLimitedLog
from streamrl.transport.addresses import LOOPBACK, Reach, address_of, host_of, url_of
from streamrl.transport.control import Credential
from streamrl.transport.credentials import Identity, ReceiverKeys, UnknownSender, Verifier, claimed_name
from streamrl.transport.session import COPIED_BELOW, Frame, MessageSession, Packet, Rejection

log = logging.getLogger(__name__)

CURVE = "curve"
"""Scheme of the address of an encrypted socket."""
LINGER_MS = 500
"""How long a closed socket tries to send its remaining messages, in milliseconds."""
QUEUED_MESSAGES = 10_000
"""Messages that wait for a slow sender to read them; further ones are lost, and sent again by their session."""
_ZAP_DOMAIN = "streamrl"
_NOW = int(zmq.NOBLOCK)
_NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

_encoder = msgspec.msgpack.Encoder()
_packets = msgspec.msgpack.Decoder(Packet)
_replies = msgspec.msgpack.Decoder(Packet | Rejection)


class Connection:
    """A server's connection to one socket of a sender."""

    def __init__(self, sender: Identity, transmit: Callable[[Packet], bool]) -> None:
        """`transmit` returns whether the connection still exists."""
        self.sender = sender
        self.ended_at: float | None = None
        """When sending failed first, because the connection has ended; None if it is connected."""
        self._transmit = transmit
        self.session = MessageSession(self._send)

    def _send(self, packet: Packet, _: Sequence[Frame]) -> None:
        if not self._transmit(packet) and self.ended_at is None:
            self.ended_at = time.monotonic()


class Arrival(NamedTuple):
    """A packet that has arrived at a server socket."""

    connection: Connection
    message: msgspec.Raw | None
    """The message that is to be processed now; None if there is none, as in a beat."""
    frames: list[memoryview]
    """The frames of the message; none if they exceed a limit."""
    excess: str
    """Why `frames` was dropped; empty if it was not."""


class _KeyCheck:
    """Accepts the one key that the senders of a receiver share (libzmq's ZAP, https://rfc.zeromq.org/spec/27)."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._warnings = RateLimitedLog(log)

    def callback(self, domain: str, key: bytes) -> bool:
        if key != self._key:
            self._warnings.warning("refused an encrypted connection: its key is not of this run, or for another socket")
        return key == self._key


class ServerSocket:
    """Listens, and accepts messages only from senders with a credential. Belongs to one thread at a time."""

    def __init__(
        self,
        keys: ReceiverKeys,
        *,
        reach: Reach = LOOPBACK,
        encrypted: bool = False,
        most_packet_bytes: int,
        most_frames: int = 0,
        most_bytes: int = 0,
    ) -> None:
        """`most_packet_bytes`: limit of a packet; `most_frames`, `most_bytes`: limits of the frames that follow it,
        together. Raises `ConfigError` if `reach.local` has no address.
        """
        self._verifier = Verifier(keys)
        self._most_packet_bytes, self._most_frames, self._most_bytes = most_packet_bytes, most_frames, most_bytes
        self._rejected = RateLimitedLog(log)
        self._connections: dict[bytes, Connection] = {}
        self._readable: Readable | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.set(zmq.ROUTER_HANDOVER, 1)  # a sender that reconnects replaces its dead connection
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # sending without a connection is an error
        self.socket.set(zmq.MAXMSGSIZE, max(most_bytes, most_packet_bytes))
        self.socket.set(zmq.SNDHWM, QUEUED_MESSAGES)
        self.socket.set(zmq.LINGER, LINGER_MS)
        _keep_alive(self.socket)
        if encrypted:
            self._encrypt(keys)
        try:
            port = _bind(self.socket, reach.local)
        except BaseException:
            self.close()
            raise
        self.endpoint = url_of(reach.announced, port, scheme=CURVE if encrypted else "tcp")

    async def arrived(self) -> None:
        """Wait until packets may have arrived, on the running event loop."""
        if self._readable is None:
            self._readable = Readable(self.socket)
        await self._readable.wait()

    def receive(self) -> Arrival | None:
        """Return the next packet of a known sender; None if none has arrived. Reject the packets of others."""
        while True:
            try:
                route = self.socket.recv(_NOW)  # always followed by at least one frame
            except zmq.Again:
                return None
            first, frames, excess = self._frames()
            try:
                connection = self._connection(route)
                packet = self._packet(first)
            except UnknownSender as unknown:
                self._rejected.warning("refused a message of %s", unknown)
                self._send(route, Rejection(f"messages of {unknown} are refused"))
            except Exception as error:  # tolerance point: no message may end the receiver, whichever error it causes
                self._rejected.warning("refused a message of %s that is no packet: %s", claimed_name(route), error)
            else:
                connection.ended_at = None
                is_due = connection.session.receive(packet)
                return Arrival(connection, packet.message if is_due else None, frames, excess)

    def close(self) -> None:
        """Close the socket; it may be closed already."""
        if self._readable is not None:
            self._readable.close()
            self._readable = None
        self.socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _connection(self, route: bytes) -> Connection:
        """Return the connection with this routing id. Raises `UnknownSender`."""
        found = self._connections.get(route)
        if found is None:
            sender = self._verifier.sender(route)  # a later process of the same name supersedes the earlier ones
            self._connections = {r: known for r, known in self._connections.items() if not known.sender.superseded}
            found = self._connections[route] = Connection(sender, lambda packet: self._send(route, packet))
        return found

    def _packet(self, content: memoryview) -> Packet:
        if len(content) > self._most_packet_bytes:
            raise WireError(f"{len(content)} bytes, more than {self._most_packet_bytes}")
        return _packets.decode(content)

    def _encrypt(self, keys: ReceiverKeys) -> None:
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.configure_curve_callback(_ZAP_DOMAIN, _KeyCheck(keys.senders.public))
        self._authenticator.start()
        self.socket.set(zmq.CURVE_SERVER, 1)
        self.socket.set(zmq.CURVE_SECRETKEY, keys.own.secret)
        self.socket.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN.encode())

    def _frames(self) -> tuple[memoryview, list[memoryview], str]:
        """Return the first frame of a message, and the others, or a text if they are too large.

        ZMQ's own limit counts each frame alone. Frames beyond the limit are freed as they are read."""
        first = self.socket.recv(_NOW, copy=False)  # parts of a message arrive together
        more, count, size = first.more, 0, 0
        frames: list[memoryview] = []
        while more:
            frame = self.socket.recv(_NOW, copy=False)
            count, size, more = count + 1, size + len(frame), frame.more
            if count <= self._most_frames and size <= self._most_bytes:
                frames.append(frame.buffer)
            else:
                frames.clear()
        if count <= self._most_frames and size <= self._most_bytes:
            return first.buffer, frames, ""
        return first.buffer, [], f"{count} frames of {size} bytes, more than {self._most_frames} or {self._most_bytes}"

    def _send(self, route: bytes, packet: Packet | Rejection) -> bool:
        """Send a packet; return False if the connection has ended."""
        try:
            self.socket.send_multipart([route, _encoder.encode(packet)], _NOW)
        except zmq.Again:  # the sender does not read
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            if self._readable is not None:
                self._readable.look_again()
        return True


class ClientSocket:
    """A connection to one server socket, used on one event loop."""

    def __init__(self, address: str, credential: Credential) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.SNDHWM, 0)  # the session's owner limits the messages under way
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, LINGER_MS)
        self.socket.set(zmq.ROUTING_ID, f"{credential.text} {uuid.uuid4().hex[:8]}".encode())
        _keep_alive(self.socket)
        if urlsplit(address).scheme == CURVE:
            key = credential.sender_key.encode()
            self.socket.set(zmq.CURVE_SERVERKEY, credential.receiver_key.encode())
            self.socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(key))
            self.socket.set(zmq.CURVE_SECRETKEY, key)
        with suppress(OSError):  # ZMQ resolves the address again itself
            self.socket.set(zmq.IPV6, ":" in address_of(host_of(address)))
        self.socket.connect(urlsplit(address)._replace(scheme="tcp").geturl())
        self._address = address
        self._refused = RateLimitedLog(log)
        self._readable = Readable(self.socket)
        self._packer = FramePacker()
        self.session = MessageSession(self._transmit)
        self.heard_at = -math.inf
        """When the last packet of the server arrived; -inf if none has."""

    async def arrived(self) -> None:
        """Wait until packets may have arrived."""
        await self._readable.wait()

    def messages(self) -> Iterator[msgspec.Raw]:
        """Yield the messages that have arrived. Raises `PeerLost` if the server rejects this process."""
        while True:
            try:
                content = self.socket.recv(_NOW)
            except zmq.Again:
                return
            try:
                reply = _replies.decode(content)
            except UNDECODABLE as error:
                log.error("a packet from %s cannot be decoded: %s", self._address, error)
                continue
            if isinstance(reply, Rejection):
                raise PeerLost(reply.reason)
            self.heard_at = time.monotonic()
            if self.session.receive(reply):
                yield reply.message

    def _transmit(self, packet: Packet, frames: Sequence[Frame]) -> None:
        if self.socket.closed:
            return
        parts = [_encoder.encode(packet), *self._packer.pack(frames)]
        try:
            for part in parts[:-1]:
                self.socket.send(part, _NOW_MORE, copy=len(part) < COPIED_BELOW)
            self.socket.send(parts[-1], _NOW, copy=len(parts[-1]) < COPIED_BELOW)
        except zmq.Again:  # ZMQ has given the connection up
            self._refused.warning(
                "%s refuses encrypted connections of this process: look at the log there", self._address
            )
        self._readable.look_again()

    def close(self) -> None:
        """Close the connection; remaining messages are sent for `LINGER_MS`."""
        if not self.socket.closed:
            self._readable.close()
            self.socket.close()


class FramePacker:
    """Packs small frames into one, in memory that it reuses: a frame costs more than copying its content."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(COPIED_BELOW))

    def pack(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Return the frames; small ones are merged into one frame that is valid until the next call."""
        if not frames or sum(map(len, frames)) >= COPIED_BELOW:
            return frames
        end = 0
        for frame in frames:
            start, end = end, end + len(frame)
            self._memory[start:end] = frame
        return [self._memory[:end]]


class Readable:
    """An event on the running loop: messages may have arrived at a socket.

    ZMQ reports only changes, and a call that sends may consume the report: call `look_again` after sending."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._event = asyncio.Event()
        self._event.set()
        self._loop.add_reader(self._descriptor, self._event.set)

    async def wait(self) -> None:
        """Wait until messages may have arrived since the last call."""
        await self._event.wait()
        self._event.clear()

    def look_again(self) -> None:
        """Note that messages may have arrived."""
        self._event.set()

    def close(self) -> None:
        """Stop watching the socket."""
        self._loop.remove_reader(self._descriptor)


def _bind(endpoint: zmq.Socket[Any], host: str) -> int:
    """Listen at a free port of `host`; return the port. A name is resolved by `address_of`, as by the processes that
    connect to it."""
    try:
        address = host if ":" in host else address_of(host)
    except OSError as error:
        raise ConfigError(f"{host} stands for no address ({error.strerror}): give the address itself") from error
    endpoint.set(zmq.IPV6, ":" in address)
    endpoint.bind(url_of(address, 0, scheme="tcp"))
    bound = urlsplit(endpoint.get_string(zmq.LAST_ENDPOINT).rstrip("\0")).port
    assert bound is not None
    return bound


def _keep_alive(endpoint: zmq.Socket[Any]) -> None:
    """Have `endpoint` notice within about a minute when the other machine disappears without closing."""
    endpoint.set(zmq.TCP_KEEPALIVE, 1)
    endpoint.set(zmq.TCP_KEEPALIVE_IDLE, 30)
    endpoint.set(zmq.TCP_KEEPALIVE_INTVL, 10)
    endpoint.set(zmq.TCP_KEEPALIVE_CNT, 3)
