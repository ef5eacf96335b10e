"""Simulated gservers and rollout workers that load a manager, in a process of their own.

A call has to cost little here, compared with its cost in the manager, so requests are written and answers read without
an HTTP library. Nothing is generated: a group is "in flight" from its admission until the trainer takes it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from common import percentile

from streamrl.transport.control import (
    Admit,
    AdmitReply,
    GroupInFlight,
    Heartbeat,
    InFlight,
    Register,
    RegisterReply,
    Role,
)
from streamrl.transport.generation import ModelInfo, Outcome, ServerInfo
from streamrl.transport.secret import of_run_at

encode = msgspec.json.encode
TAKE_SECONDS = 0.01
"""Between two reports of requests that have ended."""
TICK_SECONDS = 0.001


class Connection(asyncio.Protocol):
    """One keep-alive connection: one call at a time."""

    def __init__(self, host: str, key: str) -> None:
        self._host = host
        self._key = key
        self._buffer = b""
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) >= length and self._answer is not None and not self._answer.done():
            if not head.startswith(b"HTTP/1.1 200"):
                self._answer.set_exception(RuntimeError(self._buffer[:500].decode()))
            else:
                self._answer.set_result(body[:length])
            self._buffer = b""

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionError("the manager closed the connection"))

    async def post(self, path: str, message: msgspec.Struct) -> bytes:
        body = encode(message)
        shown = f"Host: {self._host}\r\nAuthorization: Bearer {self._key}"
        head = f"POST {path} HTTP/1.1\r\n{shown}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(head.encode() + body)
        return await self._answer


class Load:
    """Everyone but the manager. `lifetime_groups`: how many groups are in flight before the oldest is taken."""

    def __init__(self, host: str, port: int, digest: str, *, workers: int, gservers: int, heartbeat: float) -> None:
        self._host, self._port, self._digest = host, port, digest
        secret = of_run_at(f"http://{host}:{port}")
        assert secret is not None, "the manager has left it"
        self._shown = secret.shown
        self._workers, self._gservers, self._heartbeat = workers, gservers, heartbeat
        self._connections: list[Connection] = []  # by worker
        self._in_flight: deque[tuple[int, int]] = deque()  # worker, seq
        self._decoder = msgspec.json.Decoder(AdmitReply)
        self.latencies: list[float] = []
        self.calls = 0
        self.admitted = 0
        self.waited = 0

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        self._owner = await self.connect()
        self._beats = await self.connect()
        self._ends = await self.connect()
        async with SimulatedGservers(self._gservers, slots=1_000_000) as url:
            for index in range(self._gservers):
                await self._register("gserver", index, f"{url}/{index}")
            for worker in range(self._workers):
                token = await self._register("rollout", worker)
                self._connections.append(await self.connect(token))
            beating = asyncio.create_task(self._beat())
            try:
                yield
            finally:
                beating.cancel()

    async def connect(self, key: str = "") -> Connection:
        """`key`: what it shows; empty: what the run's owner does."""
        loop = asyncio.get_running_loop()
        shown = key or self._shown
        _, connection = await loop.create_connection(lambda: Connection(self._host, shown), self._host, self._port)
        return connection

    async def _register(self, role: Role, index: int, address: str = "") -> str:
        message = Register(role, index, address, self._digest, os.getpid(), "bench")
        reply = await self._owner.post("/register", message)
        return msgspec.json.decode(reply, type=RegisterReply).token

    async def _beat(self) -> None:
        """Every member in turn, evenly over the interval, as independent processes would."""
        members: list[tuple[Role, int]] = [("gserver", i) for i in range(self._gservers)]
        members += [("rollout", i) for i in range(self._workers)]
        began, sent = time.monotonic(), 0
        while True:
            due = int((time.monotonic() - began) / self._heartbeat * len(members))
            while sent < due:
                role, index = members[sent % len(members)]
                stats = {"running": 8.0, "queued": 0.0, "tokens_generated_total": 100.0 * sent}
                stats |= {"busy_seconds_total": 1.0 * sent, "slot_seconds_total": 8.0 * sent}
                await self._beats.post("/heartbeat", Heartbeat(role, index, stats if role == "gserver" else {}))
                self.calls += 1
                sent += 1
            await asyncio.sleep(0.005)

    async def admit(self, worker: int, due: Sequence[float]) -> None:
        """Have a group admitted for each time in `due`, from which its latency counts, by one call of `worker`."""
        body = await self._connections[worker].post("/admit", Admit(worker=worker, count=len(due)))
        admissions = self._decoder.decode(body).admissions
        assert len(admissions) == len(due), "there is room for all"
        now = time.monotonic()
        self.latencies += [now - since for since in due]
        self.calls += 1
        self._in_flight.extend((worker, admission.seq) for admission in admissions)
        self.admitted += len(admissions)

    async def take_down_to(self, groups: int) -> None:
        """End the requests of the oldest groups, so that `groups` are in flight."""
        ended = [self._in_flight.popleft() for _ in range(max(0, len(self._in_flight) - groups))]
        if not ended:
            return
        by_worker: dict[int, list[GroupInFlight]] = {}
        for worker, seq in ended:
            by_worker.setdefault(worker, []).append(GroupInFlight(seq, 0, 0))
        for worker, changes in by_worker.items():
            await self._ends.post("/in_flight", InFlight(worker, changes))
            self.calls += 1

    async def _take_on(self, groups: int) -> None:
        while True:
            await self.take_down_to(groups)
            await asyncio.sleep(TAKE_SECONDS)

    async def fill(self, groups: int) -> None:
        """Have `groups` in flight."""
        if groups:
            await self.admit(0, [time.monotonic()] * groups)

    async def at_full_speed(self, groups: int, seconds: float) -> None:
        """As many admissions as the workers can ask for one by one, with `groups` in flight."""
        end = time.monotonic() + seconds
        if groups == 1:
            while time.monotonic() < end:
                await self.admit(0, [time.monotonic()])
                await self.take_down_to(0)
            return

        async def ask(worker: int) -> None:
            while time.monotonic() < end:
                await self.admit(worker, [time.monotonic()])

        taking = asyncio.create_task(self._take_on(groups))
        await asyncio.gather(*map(ask, range(self._workers)))
        taking.cancel()

    async def at_rate(self, groups: int, rate: float, seconds: float, *, one_by_one: bool) -> None:
        """`rate` admissions a second, dealt to the workers in turn, with `groups` in flight.

        A worker asks as real ones do: by one call at a time, for all groups that it can start by then. `one_by_one`:
        each group is asked for by a call of its own.
        """
        due: list[deque[float]] = [deque() for _ in range(self._workers)]
        more = [asyncio.Event() for _ in range(self._workers)]

        async def ask(worker: int) -> None:
            while True:
                await more[worker].wait()
                count = 1 if one_by_one else len(due[worker])
                await self.admit(worker, [due[worker].popleft() for _ in range(count)])
                if not due[worker]:
                    more[worker].clear()

        asking = [asyncio.create_task(ask(worker)) for worker in range(self._workers)]
        asking.append(asyncio.create_task(self._take_on(groups)))
        began, issued = time.monotonic(), 0
        while (now := time.monotonic() - began) < seconds or any(due):
            while issued < int(min(now, seconds) * rate):
                worker = issued % self._workers
                due[worker].append(began + issued / rate)
                more[worker].set()
                issued += 1
            await asyncio.sleep(TICK_SECONDS)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


class SimulatedGservers:
    """One server that replies for all gservers: gserver n is at URL/n. No weights move."""

    def __init__(self, count: int, *, slots: int) -> None:
        """`slots`: requests that each gserver runs together."""
        self._slots = slots
        self._labels = ["default"] * count
        self.calls: Counter[str] = Counter()

    async def __aenter__(self) -> str:
        """Listen on the loopback address; return the URL."""
        self._runner = web.ServerRunner(web.Server(self._answer, access_log=None))
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096).start()
        return "http://127.0.0.1:{1}".format(*self._runner.addresses[0][:2])

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        _, number, path = request.path.split("/", 2)
        self.calls[path] += 1
        body = await request.read()
        reply: msgspec.Struct = Outcome(success=True)
        if path == "server_info":
            reply = ServerInfo(engine="simulated", staged_weight_update=True, max_running_requests=self._slots)
        elif path == "model_info":
            reply = ModelInfo(model_path="simulated", weight_version=self._labels[int(number)])
        elif path == "update_weights_from_disk":
            self._labels[int(number)] = json.loads(body).get("weight_version") or self._labels[int(number)]
        return web.Response(body=msgspec.json.encode(reply), content_type="application/json")


def figures(
    latencies: Sequence[float], calls: int, *, seconds: float, manager_cpu: float, load_cpu: float
) -> dict[str, float]:
    """The figures of one measurement of `seconds`; `latencies`: of its admissions, in seconds."""
    return {
        "admissions_per_second": round(len(latencies) / seconds, 1),
        "calls_per_second": round(calls / seconds, 1),
        "p50_ms": round(1e3 * percentile(latencies, 0.5), 3),
        "p99_ms": round(1e3 * percentile(latencies, 0.99), 3),
        "manager_cpu_share": round(manager_cpu / seconds, 3),
        "manager_cpu_us_per_call": round(1e6 * manager_cpu / calls, 1),
        "load_cpu_share": round(load_cpu / seconds, 3),
    }
