"""Sockets of the run: they hear only processes that joined it, and no bytes end a server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from streamrl.errors import PeerLost
from streamrl.transport.addresses import LOOPBACK, LOOPBACK_IPV6, Reach
from streamrl.transport.control import Credential
from streamrl.transport.session import COPIED_BELOW, Packet, Rejection
from streamrl.transport.sockets import Arrival, ClientSocket, ServerSocket
from tests.credentials import OTHER_SECRET, credential_of, keys_of
from tests.ipv6 import IPV6

PACKET_BYTES, FRAMES, BYTES = 1000, 8, 1 << 20
DEADLINE = 10.0
OWN = credential_of("rollout", 0, to="model_worker")


@contextmanager
def serving(**options: Any) -> Iterator[ServerSocket]:
    """A receiver of groups."""
    limits = {"most_packet_bytes": PACKET_BYTES, "most_frames": FRAMES, "most_bytes": BYTES}
    with closing(ServerSocket(keys_of("model_worker"), **limits, **options)) as server:
        yield server


def connected(server: ServerSocket, credential: Credential = OWN) -> closing[ClientSocket]:
    return closing(ClientSocket(server.endpoint, credential))


@contextmanager
def raw(server: ServerSocket, routing_id: bytes | None) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        if routing_id is not None:
            dealer.set(zmq.ROUTING_ID, routing_id)
        dealer.set(zmq.LINGER, 0)
        dealer.connect(server.endpoint)
        yield dealer


async def heard(server: ServerSocket, *, seconds: float = DEADLINE) -> Arrival:
    """The next arrival with a message."""
    async with asyncio.timeout(seconds):
        while True:
            while (arrival := server.receive()) is not None:
                if arrival.message is not None:
                    return arrival
            await server.arrived()


async def replied(client: ClientSocket, server: ServerSocket) -> int:
    """The next message that the server sends to `client`."""
    async with asyncio.timeout(DEADLINE):
        while True:
            server.receive()
            for message in client.messages():
                return msgspec.msgpack.decode(message, type=int)
            await asyncio.sleep(0.01)


def number(value: int) -> bytes:
    return msgspec.msgpack.encode(value)


def packet(value: int) -> bytes:
    return msgspec.msgpack.encode(Packet(1, 0, 0, None, msgspec.Raw(number(value))))


@pytest.mark.parametrize(
    ("reach", "encrypted"),
    [
        (LOOPBACK, False),
        (LOOPBACK, True),
        pytest.param(LOOPBACK_IPV6, False, marks=IPV6),
        pytest.param(Reach(announced="::1", local="::"), False, marks=IPV6),
    ],
)
async def test_messages_arrive_with_their_frames_and_are_replied_to(reach: Reach, encrypted: bool) -> None:
    with serving(reach=reach, encrypted=encrypted) as server, connected(server) as client:
        assert server.endpoint.startswith("curve://" if encrypted else "tcp://")
        client.session.send(number(1), [b"small", b"frames"])
        client.session.send(number(2), [b"a", bytes(COPIED_BELOW)])
        for value, frames in ((1, [b"smallframes"]), (2, [b"a", bytes(COPIED_BELOW)])):
            arrival = await heard(server)
            assert arrival.message == msgspec.Raw(number(value))
            assert [bytes(frame) for frame in arrival.frames] == frames
            assert arrival.connection.sender.name == "rollout/0"
        arrival.connection.session.send(number(3))
        assert await replied(client, server) == 3


def route(credential: Credential, link: str = " raw") -> bytes:
    return f"{credential.text}{link}".encode()


@pytest.mark.parametrize(
    ("routing_id", "says"),
    [
        (None, "a sender without a name without a credential"),
        (b"rollout/0", "'rollout/0' without a credential"),
        (b"rollout/0 1 " + b"0" * 32 + b" raw", "'rollout/0' with a credential of another run"),
        (route(credential_of("rollout", 0, to="model_worker", secret=OTHER_SECRET)), "of another run"),
        (route(credential_of("rollout", 0, to="controller")), "or for another receiver"),
        (route(credential_of("gserver", 0, to="model_worker")), "gserver/0, which may not send to a model_worker"),
        (route(OWN, link=""), "of another run"),
    ],
)
async def test_a_forged_sender_is_refused_by_name(
    routing_id: bytes | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as server, raw(server, routing_id) as stray, connected(server) as client:
        stray.send(packet(1))
        async with asyncio.timeout(DEADLINE):
            while not stray.poll(0):
                assert server.receive() is None
                await asyncio.sleep(0.01)
        rejection = msgspec.msgpack.decode(stray.recv(), type=Rejection)
        assert says in rejection.reason
        assert says in caplog.text
        assert b"0" * 32 not in rejection.reason.encode(), "the secret part is not quoted"
        client.session.send(number(2))
        assert (await heard(server)).message == msgspec.Raw(number(2))


async def test_of_the_processes_with_one_name_the_last_that_joined_is_heard() -> None:
    later = credential_of("rollout", 0, to="model_worker", number=2)
    with serving() as server, connected(server) as first, connected(server, later) as second:
        for client in (first, second):
            client.session.send(number(1))
            arrival = await heard(server)
        first.session.send(number(2))
        with pytest.raises(PeerLost, match="a process that was rollout/0: another process has taken its place"):
            await replied(first, server)
        second.session.send(number(3))
        assert await heard(server) == (arrival.connection, msgspec.Raw(number(3)), [], "")


async def test_an_encrypted_server_hears_only_those_with_the_key_of_its_senders(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = credential_of("rollout", 0, to="controller")
    with serving(encrypted=True) as server:
        plain = ClientSocket(server.endpoint.replace("curve://", "tcp://"), OWN)
        wrong = [msgspec.structs.replace(OWN, **{key: getattr(other, key)}) for key in ("sender_key", "receiver_key")]
        strangers = [plain, *(ClientSocket(server.endpoint, credential) for credential in wrong)]
        for stranger in strangers:
            stranger.session.send(number(1))
        with pytest.raises(TimeoutError):
            await heard(server, seconds=1.0)
        assert "its key is not of this run" in caplog.text
        with connected(server) as client:
            client.session.send(number(2))
            assert (await heard(server)).message == msgspec.Raw(number(2))
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize(("frames", "size"), [(40, 2**16), (1000, 1), (5, 2**18 + 2**16)])
async def test_the_limit_of_frames_is_one_of_the_whole_message(frames: int, size: int) -> None:
    """ZMQ's own limit counts each frame alone."""
    with serving() as server, raw(server, route(OWN)) as peer:
        peer.send_multipart([packet(1), *[bytes(size)] * frames])
        arrival = await heard(server)
        assert arrival.frames == []
        assert arrival.excess == f"{frames} frames of {frames * size} bytes, more than {FRAMES} or {BYTES}"


async def test_peers_that_do_not_speak_the_protocol_do_no_harm() -> None:
    with serving() as server, raw(server, route(OWN, " greedy")) as greedy, connected(server) as client:
        port = int(server.endpoint.rpartition(":")[2])
        for words in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40):
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as stranger:
                stranger.sendall(words)
        with zmq.Context.instance().socket(zmq.REQ) as asking:
            asking.set(zmq.LINGER, 0)
            asking.connect(server.endpoint)
            asking.send(b"hello?")
            greedy.send(bytes(PACKET_BYTES + 1))
            greedy.send(bytes(2 * BYTES))  # over the limit of a frame: the connection is cut
            client.session.send(number(1))
            arrival = await heard(server)
        assert (arrival.message, arrival.connection.sender.name) == (msgspec.Raw(number(1)), "rollout/0")
