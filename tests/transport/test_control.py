"""The client of the manager, membership, and typed calls, against small servers that misbehave."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from streamrl.config import Config
from streamrl.errors import DeadlineExceeded, EssentialFailed, PeerError, PeerLost, WireError
from streamrl.essential import ends_with_its_work
from streamrl.records.timeline import CHILDREN_SECONDS, PROCESSOR_SECONDS, FrequentFailure
from streamrl.transport import http
from streamrl.transport import manager_client as control_client
from streamrl.transport.collective import closed_after_forming, closing_is_possible
from streamrl.transport.control import (
    Admission,
    Admit,
    AdmitReply,
    AskRoute,
    Done,
    FinishRun,
    HeartbeatReply,
    HeldOutResult,
    InFlight,
    InFlightReply,
    Peer,
    PublishBegin,
    PublishBeginReply,
    PublishCommit,
    PublishReply,
    Register,
    RegisterReply,
    Reject,
    RouteReply,
    Snapshot,
    Topology,
)
from streamrl.transport.manager_client import ControlClient
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


async def call(url: str, *, timeout: float) -> Done:
    async with aiohttp.ClientSession() as session:
        return await http.call(session, url + "/it", Done(), Done, timeout=timeout, peer="the peer")


def replying(body: bytes, *, status: int = 200) -> Handler:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    return reply


async def hanging_up(request: web.Request) -> web.Response:
    return hang_up(request)


async def silent(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


NO_ROOM = msgspec.json.encode(http.ErrorReply(http.ErrorDetail("no room")))


@pytest.mark.parametrize(
    ("handler", "error", "says"),
    [
        (replying(NO_ROOM, status=409), PeerError, r"the peer answered 409 to POST .*/it: no room"),
        (replying(b"plain words", status=500), PeerError, "answered 500"),
        (replying(b'{"error": {"message": "\xff"}}', status=500), PeerError, "answered 500"),
        (replying(b"\xff", status=500), PeerError, "answered 500"),
        (replying(b"", status=500), PeerError, "answered 500"),
        *((replying(body), WireError, "else than a Done") for body in (b"", b"{", b"[1]", b"null", b"[" * 5000)),
        (hanging_up, PeerLost, "the peer cannot be reached"),
        (silent, DeadlineExceeded, r"the peer did not answer POST .*/it within 0.1 s"),
    ],
)
async def test_every_way_in_which_a_call_fails(handler: Handler, error: type[Exception], says: str) -> None:
    async with server(handler) as url:
        with pytest.raises(error, match=says):
            await call(url, timeout=0.1 if handler is silent else 20.0)
    with pytest.raises(PeerLost, match="the peer cannot be reached"):
        await call(url, timeout=20.0)


async def test_registering_waits_for_the_manager_to_start(unused_tcp_port: int) -> None:
    async def accept(request: web.Request) -> web.Response:
        return answer(RegisterReply(policy_version=3, heartbeat_seconds=1.0))

    client = ControlClient(f"http://127.0.0.1:{unused_tcp_port}")
    joining = asyncio.create_task(client.register(REGISTER, patience=10.0))
    done, _ = await asyncio.wait({joining}, timeout=0.1)
    assert not done
    async with server(accept, port=unused_tcp_port):
        assert (await asyncio.wait_for(joining, 30)).policy_version == 3
    await client.close()


async def test_registering_gives_up_in_the_end(unused_tcp_port: int) -> None:
    client = ControlClient(f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(PeerLost, match="is it running there"):
        await client.register(REGISTER, patience=0.1)
    await client.close()


@pytest.mark.skipif(not closing_is_possible(), reason="no socket can be made deaf on this machine")
async def test_a_manager_that_answers_nothing_is_told_of_with_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that drops what it does not let through."""
    monkeypatch.setattr(control_client, "CONNECT_SECONDS", 0.2)
    with closed_after_forming():
        deaf = socket.create_server(("127.0.0.1", 0))
    with deaf:
        port = deaf.getsockname()[1]
        client = ControlClient(f"http://127.0.0.1:{port}")
        with pytest.raises(PeerLost, match=f"no reply; .* a firewall drop packets to port {port}"):
            await client.register(REGISTER, patience=0.1)
        await client.close()


async def test_an_admission_whose_connection_broke_is_asked_for_under_the_same_ticket() -> None:
    asked: list[Admit] = []

    async def lossy(request: web.Request) -> web.Response:
        asked.append(msgspec.json.decode(await request.read(), type=Admit))
        if len(asked) <= 2:
            return hang_up(request)
        return answer(AdmitReply(admissions=[Admission(5, "http://g")], policy_version=0, stop=False))

    async with server(lossy) as url, ControlClient(url) as client:
        reply = await client.admit(Admit(worker=0, count=2))
        await client.admit(Admit(worker=0, count=2))
    assert [admission.seq for admission in reply.admissions] == [5]
    first, again, third, other = [message.ticket for message in asked]
    assert first == again == third != ""
    assert other != first


REJECT = Reject(worker=0, seq=1, reason="no")
CALLS: dict[str, Callable[[ControlClient], Awaitable[object]]] = {
    "/finish_run": lambda client: client.finish_run(FinishRun(error="it died")),
    "/reject": lambda client: client.reject(REJECT),
    "/in_flight": lambda client: client.in_flight(InFlight(worker=0, groups=[])),
    "/route": lambda client: client.route(AskRoute(worker=0, seq=1, failed="http://g")),
    "/evaluation": lambda client: client.held_out_result(HeldOutResult(0, "id", 0, [1.0], [3])),
    "/topology": lambda client: client.topology("controller", 1, patience=5.0),
    "/publish/begin": lambda client: client.publish_begin(PublishBegin(version=1, weights=Snapshot("v1")), timeout=5.0),
    "/publish/commit": lambda client: client.publish_commit(PublishCommit(version=1, group_name="group"), timeout=5.0),
}
REPLIES: dict[str, msgspec.Struct] = {
    "/in_flight": InFlightReply(pause_seconds=0.02),
    "/route": RouteReply(gserver="http://h"),
    "/topology": Topology([Peer("controller", 0, "tcp://c")]),
    "/publish/begin": PublishBeginReply(group_name="group", world_size=2),
    "/publish/commit": PublishReply(done=True, error="", pause_seconds=0.0, evicted=[]),
}


class Troubled:
    """A manager that fails at the first calls."""

    def __init__(self, *, failures: int) -> None:
        self.calls: list[str] = []
        self.failures = failures

    async def handle(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        if len(self.calls) <= self.failures:
            return answer(http.ErrorReply(http.ErrorDetail("a bug")), status=500)
        return answer(REPLIES.get(f"{request.method} {request.path}") or REPLIES.get(request.path, Done()))


@pytest.mark.parametrize("path", CALLS)
async def test_a_lost_call_is_made_again_and_the_log_says_which(path: str, caplog: pytest.LogCaptureFixture) -> None:
    manager = Troubled(failures=2)
    async with server(manager.handle) as url, ControlClient(url) as client:
        await CALLS[path](client)
    assert manager.calls == [path.removeprefix("GET ")] * 3
    assert path in caplog.text
    assert "is tried again for 120 s: the manager answered 500" in caplog.text


async def test_a_call_that_goes_on_failing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "PATIENCE_SECONDS", 0.3)
    manager = Troubled(failures=1000)
    async with server(manager.handle) as url, ControlClient(url) as client:
        with pytest.raises(PeerError, match=r"POST /reject: the manager answered 500 .*tried again for 0 s"):
            await client.reject(REJECT)
        assert len(manager.calls) > 2
        manager.calls.clear()
        with pytest.raises(PeerError):
            await client.status()
    assert manager.calls == ["/status"], "who looks at the run wants an answer now"


@pytest.mark.parametrize(("status", "calls"), [(400, 1), (401, 1), (409, 2)])
async def test_a_refusal_is_final_unless_it_is_about_the_moment(status: int, calls: int) -> None:
    asked = 0

    async def refuse_once(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 1:
            return answer(http.ErrorReply(http.ErrorDetail("not registered")), status=status)
        return answer(Done())

    async with server(refuse_once) as url, ControlClient(url) as client:
        final = pytest.raises(PeerError, match=str(status)) if calls == 1 else nullcontext()
        with final:
            await client.reject(REJECT)
    assert asked == calls


class FakeManager:
    """Answers registrations and heartbeats, and lets a test await them."""

    def __init__(self) -> None:
        self.registrations = 0
        self.beats: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.reply = HeartbeatReply(stop=False, policy_version=1, known=True)
        self.down = False
        self.lost_replies = 0
        """How many heartbeats are received and not replied to, as if the network were interrupted."""

    async def handle(self, request: web.Request) -> web.Response:
        if self.down:
            return hang_up(request)
        body = msgspec.json.decode(await request.read())
        if request.path == "/heartbeat" and self.lost_replies:
            self.lost_replies -= 1
            await asyncio.Event().wait()
        if request.path == "/register":
            self.registrations += 1
            return answer(RegisterReply(policy_version=0, heartbeat_seconds=0.02))
        self.beats.put_nowait(body)
        return answer(self.reply)

    async def beat(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.beats.get(), 30)


@asynccontextmanager
async def joined(manager: FakeManager, **options: Any) -> AsyncIterator[Membership]:
    async with server(manager.handle) as url:
        client = ControlClient(url)
        membership = Membership(client, role="rollout", index=2, address="", config=Config(), **options)
        await membership.join(patience=1.0)
        try:
            yield membership
        finally:
            await membership.leave()
            await client.close()


async def stopped(membership: Membership) -> None:
    await asyncio.wait_for(membership.stopping.wait(), 30)


async def test_a_member_beats_with_what_it_can_tell() -> None:
    manager = FakeManager()
    stats = {"tokens_total": 5.0, "mean": math.nan, "most": math.inf}
    failure = FrequentFailure("KeyError: 'a'", 3, "row 1")
    async with joined(manager, stats=lambda: stats, failure=lambda: failure) as membership:
        membership.waiting_for = "room"
        beat = await manager.beat()
        assert beat == {
            "role": "rollout",
            "index": 2,
            "stats": {"tokens_total": 5.0}
            | {name: beat["stats"][name] for name in (PROCESSOR_SECONDS, CHILDREN_SECONDS)},
            "waiting_for": "room",
            "error": "",
            "failure": {"error": "KeyError: 'a'", "count": 3, "example": "row 1"},
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
    async with joined(manager) as membership:
        await manager.beat()
        manager.down = True
        await asyncio.sleep(0.1)
        manager.down = False
        while not manager.beats.empty():
            manager.beats.get_nowait()
        await manager.beat()
        assert not membership.stopping.is_set()


async def test_a_heartbeat_without_a_reply_is_soon_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over another connection: the old one may take as long again as the network was interrupted."""
    monkeypatch.setattr(control_client, "HEARTBEAT_SECONDS", 0.1)
    manager = FakeManager()
    manager.lost_replies = 2
    async with joined(manager) as membership:
        async with asyncio.timeout(10):
            await manager.beat()
        assert not membership.stopping.is_set()


async def test_a_member_leaves_a_manager_that_stays_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.transport.membership.PATIENCE_SECONDS", 0.1)
    manager = FakeManager()
    async with joined(manager) as membership:
        manager.down = True
        await stopped(membership)
        assert isinstance(membership.lost, PeerLost)
        assert str(membership.lost).startswith(
            "rollout/2 has lost the manager: the heartbeat of rollout/2: the manager "
        )


async def test_a_heartbeat_that_fails_of_a_bug_ends_the_process_and_the_manager_hears_why() -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("no such counter")

    manager = FakeManager()
    with pytest.raises(EssentialFailed, match="heartbeat of rollout/2 failed: RuntimeError: no such counter"):
        async with ends_with_its_work(), joined(manager, stats=broken):
            await asyncio.sleep(5.0)
    assert (await manager.beat())["error"].startswith("rollout/2: EssentialFailed: heartbeat of rollout/2 failed")


async def test_failing_tells_the_manager_if_it_can_be_told() -> None:
    manager = FakeManager()
    async with joined(manager) as membership:
        await manager.beat()
        await membership.fail(ValueError("bad row"))
        beats = [manager.beats.get_nowait() for _ in range(manager.beats.qsize())]
        assert beats[-1]["error"] == "rollout/2: ValueError: bad row"
        manager.down = True
        await membership.fail(ValueError("again"))
