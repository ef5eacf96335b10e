"""A manager reduced to what a rollout worker sees of it: real HTTP, and replies that a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from streamrl.records.lineage import Lineage
from streamrl.transport.control import (
    Admission,
    Admit,
    AdmitReply,
    AskRoute,
    Done,
    FailRun,
    Heartbeat,
    HeartbeatReply,
    InFlight,
    InFlightReply,
    Keep,
    KeepReply,
    Peer,
    Register,
    RegisterReply,
    Reject,
    RouteReply,
    Topology,
)
from tests.credentials import credential_of, permit_for


class Manager:
    def __init__(self, *, heads: list[str], gserver: str) -> None:
        self.url = ""
        self.gserver = gserver
        self.heads = heads
        self.stop = False
        self.policy_version = 0
        """What heartbeats are answered with."""
        self.asked: list[int] = []
        """`count` of each call of /admit."""
        self.rejected: dict[int, str] = {}
        self.heartbeats: list[Heartbeat] = []
        self.failed: list[FailRun] = []
        self.registered: list[Register] = []
        self.reroute: Callable[[AskRoute], str] = lambda message: self.gserver
        self.lineage = "first"
        self.lineages: list[Lineage] = []
        self.kept: list[set[int]] = []
        """The groups in hand that the worker reported, each time that the run went back."""
        self.refused: set[int] = set()
        """Groups that the worker may not keep."""
        self._seqs: list[int] = []
        self._changed = asyncio.Condition()

    @property
    def errors(self) -> list[str]:
        """What the worker gave as its reasons to give up."""
        return [heartbeat.error for heartbeat in self.heartbeats if heartbeat.error]

    async def give(self, seqs: Iterable[int]) -> None:
        """Let `seqs` be admitted."""
        async with self._changed:
            self._seqs.extend(seqs)
            self._changed.notify_all()

    async def go_back(self, lineage: Lineage) -> None:
        """Begin `lineage`, and wait until the worker has asked which groups it may keep."""
        self.lineages = [*self.lineages, lineage]
        self.lineage = str(lineage.number)
        asked = len(self.kept)
        await self.until(lambda: len(self.kept) > asked)

    async def end(self) -> None:
        """The run is over."""
        async with self._changed:
            self.stop = True
            self._changed.notify_all()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that a call to the manager brings about."""
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(reached)

    async def register(self, message: Register) -> msgspec.Struct:
        self.registered.append(message)
        return RegisterReply(
            policy_version=0,
            heartbeat_seconds=0.05,
            lineage=self.lineage,
            lineages=self.lineages,
            credentials={"model_worker": credential_of(message.role, message.index, to="model_worker")},
        )

    async def heartbeat(self, message: Heartbeat) -> msgspec.Struct:
        async with self._changed:
            self.heartbeats.append(message)
            self._changed.notify_all()
        return HeartbeatReply(stop=self.stop, policy_version=self.policy_version, known=True, lineage=self.lineage)

    async def keep(self, message: Keep) -> msgspec.Struct:
        async with self._changed:
            self.kept.append({group.seq for group in message.groups})
            self._changed.notify_all()
        return KeepReply(kept=sorted(self.kept[-1] - self.refused), policy_version=self.policy_version)

    async def admit(self, message: Admit) -> msgspec.Struct:
        self.asked.append(message.count)
        async with self._changed:
            await self._changed.wait_for(lambda: self._seqs or self.stop)
            given, self._seqs = self._seqs[: message.count], self._seqs[message.count :]
        admissions = [Admission(seq, self.gserver, permit_for(seq, f"rollout/{message.worker}")) for seq in given]
        return AdmitReply(admissions=admissions, policy_version=0, stop=self.stop)

    async def route(self, message: AskRoute) -> msgspec.Struct:
        return RouteReply(gserver=self.reroute(message))

    async def in_flight(self, message: InFlight) -> msgspec.Struct:
        return InFlightReply(pause_seconds=0.02)

    async def fail_run(self, message: FailRun) -> msgspec.Struct:
        self.failed.append(message)
        return Done()

    async def reject(self, message: Reject) -> msgspec.Struct:
        async with self._changed:
            self.rejected[message.seq] = message.reason
            self._changed.notify_all()
        return Done()


@asynccontextmanager
async def managing(*, heads: list[str], gserver: str) -> AsyncIterator[Manager]:
    manager = Manager(heads=heads, gserver=gserver)
    app = web.Application()

    def add(path: str, message: type[msgspec.Struct], answer: Callable[..., object]) -> None:
        async def handle(request: web.Request) -> web.Response:
            reply = await answer(msgspec.json.decode(await request.read(), type=message))  # type: ignore[misc]
            return web.Response(body=msgspec.json.encode(reply))

        app.router.add_post(path, handle)

    async def topology(request: web.Request) -> web.Response:
        peers = [Peer("model_worker", i, head) for i, head in enumerate(manager.heads)]
        return web.Response(body=msgspec.json.encode(Topology(peers)))

    add("/register", Register, manager.register)
    add("/heartbeat", Heartbeat, manager.heartbeat)
    add("/admit", Admit, manager.admit)
    add("/keep", Keep, manager.keep)
    add("/route", AskRoute, manager.route)
    add("/in_flight", InFlight, manager.in_flight)
    add("/reject", Reject, manager.reject)
    add("/fail_run", FailRun, manager.fail_run)
    app.router.add_get("/topology", topology)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    manager.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield manager
    finally:
        await runner.cleanup()
