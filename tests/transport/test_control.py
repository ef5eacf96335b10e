"""The client of the manager, membership, and typed calls, against small servers that misbehave."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from streamrl.errors import DeadlineExceeded, PeerError, PeerLost, StreamRLError, WireError
from streamrl.transport import http
from streamrl.transport.control import client as control_client
from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.groups import Admission, Admit, AdmitReply
from streamrl.transport.control.members import Done, HeartbeatReply, Register, RegisterReply
from streamrl.transport.membership import Membership

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REGISTER = Register(role="rollout", index=0, address="", config_digest="d", pid=1, host="h")


@asynccontextmanager
async def server(handler: Handler, *, port: int = 0) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.05, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


def answer(content: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status)


def hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def call(url: str, *, timeout: float = 2.0) -> Done:
    async with aiohttp.ClientSession() as session:
        return await http.call(session, "POST", url + "/it", Done(), Done, timeout=timeout, peer="the peer")


async def test_a_refusal_carries_status_and_message() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return answer(http.ErrorReply(http.ErrorDetail("no room")), status=409)

    async with server(refuse) as url:
        with pytest.raises(PeerError, match=r"the peer answered 409 to POST .*/it: no room") as refusal:
            await call(url)
        assert refusal.value.status == 409


@pytest.mark.parametrize("body", [b"plain words", b'{"error": {"message": "\xff"}}', b"\xff", b""])
async def test_a_refusal_in_another_form_is_quoted(body: bytes) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(body=body, status=500)

    async with server(refuse) as url:
        with pytest.raises(PeerError, match="answered 500"):
            await call(url)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"[" * 5000])
async def test_an_answer_of_another_type_is_a_wire_error(body: bytes) -> None:
    async def nonsense(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with server(nonsense) as url:
        with pytest.raises(WireError, match="something else than a Done"):
            await call(url)


async def test_a_peer_that_hangs_up_is_lost() -> None:
    async def gone(request: web.Request) -> web.Response:
        return hang_up(request)

    async with server(gone) as url:
        with pytest.raises(PeerLost, match="the peer cannot be reached"):
            await call(url)
    with pytest.raises(PeerLost, match="the peer cannot be reached"):
        await call(url)


async def test_a_peer_that_does_not_answer_passes_the_deadline() -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with server(silent) as url:
        with pytest.raises(DeadlineExceeded, match=r"the peer did not answer POST .*/it within 0.1 s"):
            await call(url, timeout=0.1)


async def test_registering_waits_for_the_manager_to_start(unused_tcp_port: int) -> None:
    async def accept(request: web.Request) -> web.Response:
        return answer(RegisterReply(policy_version=3, heartbeat_seconds=1.0))

    client = ControlClient(f"http://127.0.0.1:{unused_tcp_port}")
    joining = asyncio.create_task(client.register(REGISTER, patience=10.0))
    done, _ = await asyncio.wait({joining}, timeout=0.1)
    assert not done
    async with server(accept, port=unused_tcp_port):
        assert (await asyncio.wait_for(joining, 2.0)).policy_version == 3
    await client.close()


async def test_registering_gives_up_in_the_end(unused_tcp_port: int) -> None:
    client = ControlClient(f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(PeerLost, match="is the manager running there"):
        await client.register(REGISTER, patience=0.1)
    await client.close()


async def test_an_admission_whose_connection_broke_is_asked_for_under_the_same_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_client, "ADMIT_RETRY_SECONDS", (0.0, 0.0))
    asked: list[Admit] = []

    async def lossy(request: web.Request) -> web.Response:
        asked.append(msgspec.json.decode(await request.read(), type=Admit))
        if len(asked) <= 5:
            return hang_up(request)
        return answer(AdmitReply(admissions=[Admission(5, "http://g")], policy_version=0, stop=False))

    async with server(lossy) as url:
        client = ControlClient(url)
        with pytest.raises(PeerLost):
            await client.admit(Admit(worker=0, count=2))
        reply = await client.admit(Admit(worker=0, count=2))
        await client.admit(Admit(worker=0, count=2))
        await client.close()
    assert [admission.seq for admission in reply.admissions] == [5]
    tickets = [message.ticket for message in asked]
    assert set(tickets[:6]) == {tickets[0]}
    assert tickets[0] != ""
    assert len(tickets) == 7
    assert tickets[6] != tickets[0]


class FakeManager:
    """Answers registrations and heartbeats, and lets a test await them."""

    def __init__(self) -> None:
        self.registrations = 0
        self.beats: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.reply = HeartbeatReply(stop=False, policy_version=1, known=True)
        self.down = False

    async def handle(self, request: web.Request) -> web.Response:
        if self.down:
            return hang_up(request)
        body = msgspec.json.decode(await request.read())
        if request.path == "/register":
            self.registrations += 1
            return answer(RegisterReply(policy_version=0, heartbeat_seconds=0.02))
        self.beats.put_nowait(body)
        return answer(self.reply)

    async def beat(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.beats.get(), 2.0)


@asynccontextmanager
async def joined(manager: FakeManager, **options: Any) -> AsyncIterator[Membership]:
    async with server(manager.handle) as url:
        client = ControlClient(url)
        membership = Membership(client, role="rollout", index=2, address="", config_digest="d", **options)
        await membership.join(patience=1.0)
        try:
            yield membership
        finally:
            await membership.leave()
            await client.close()


async def stopped(membership: Membership) -> None:
    await asyncio.wait_for(membership.stopping.wait(), 2.0)


async def test_a_member_beats_with_what_it_can_tell() -> None:
    manager = FakeManager()
    stats = {"tokens_total": 5.0, "mean": math.nan, "most": math.inf}
    async with joined(manager, stats=lambda: stats) as membership:
        membership.waiting_for = "room"
        beat = await manager.beat()
        assert beat == {
            "role": "rollout",
            "index": 2,
            "stats": {"tokens_total": 5.0},
            "waiting_for": "room",
            "error": "",
        }
        await manager.beat()
        assert membership.policy_version == 1
    assert membership.lost is None


async def test_a_member_stops_when_it_is_told() -> None:
    manager = FakeManager()
    async with joined(manager) as membership:
        manager.reply = HeartbeatReply(stop=True, policy_version=1, known=True)
        await stopped(membership)
        assert membership.lost is None


async def test_a_member_that_is_not_known_registers_again() -> None:
    manager = FakeManager()
    manager.reply = HeartbeatReply(stop=False, policy_version=0, known=False)
    async with joined(manager):
        await manager.beat()
        await manager.beat()
        assert manager.registrations >= 2


async def test_a_member_survives_a_short_silence_of_the_manager() -> None:
    manager = FakeManager()
    async with joined(manager, patience=30.0) as membership:
        await manager.beat()
        manager.down = True
        await asyncio.sleep(0.1)
        manager.down = False
        while not manager.beats.empty():
            manager.beats.get_nowait()
        await manager.beat()
        assert not membership.stopping.is_set()


async def test_a_member_leaves_a_manager_that_stays_silent() -> None:
    manager = FakeManager()
    async with joined(manager, patience=0.1) as membership:
        manager.down = True
        await stopped(membership)
        assert isinstance(membership.lost, PeerLost)
        assert "rollout/2: the manager has been silent" in str(membership.lost)


async def test_a_heartbeat_that_fails_of_a_bug_is_not_silent() -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("no such counter")

    async with joined(FakeManager(), stats=broken) as membership:
        await stopped(membership)
        assert isinstance(membership.lost, StreamRLError)
        assert "RuntimeError: no such counter" in str(membership.lost)


async def test_failing_tells_the_manager_if_it_can_be_told() -> None:
    manager = FakeManager()
    async with joined(manager) as membership:
        await manager.beat()
        await membership.fail(ValueError("bad row"))
        beats = [manager.beats.get_nowait() for _ in range(manager.beats.qsize())]
        assert beats[-1]["error"] == "rollout/2: ValueError: bad row"
        manager.down = True
        await membership.fail(ValueError("again"))
