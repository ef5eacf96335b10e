"""What a call of the manager costs its processor, by who parses the HTTP around it.

    python benchmarks/bench_http.py [--quick]

Four servers with the same handler, which decodes an `Admit` and encodes an `AdmitReply`, each on uvloop in a process
of its own: the manager's own (`streamrl/transport/http.py`, over httptools: llhttp, in C), the same protocol parsed by
hand and by h11 (both Python), and aiohttp's web server (llhttp in C under a general framework). They are called by 16
keep-alive connections, at 5,000 calls a second whether they keep up or not, and as fast as they go. Nothing here
depends on the network. Processor time for each call is comparable also on a machine that has other work; latencies are
not.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import msgspec
import psutil
import uvloop
from aiohttp import web
from common import write_results
from manager_load import Connection
from rich.console import Console
from rich.table import Table

from streamrl.transport.control import Admission, Admit, AdmitReply
from streamrl.transport.http import Answer, Call, HttpServer

CONNECTIONS = 16
RATE = 5000.0
REPLY = AdmitReply(admissions=[Admission(seq=123456, gserver="http://10.0.0.17:31234")], policy_version=42, stop=False)
_admit = msgspec.json.Decoder(Admit)
_encode = msgspec.json.encode


def reply_to(body: bytes) -> bytes:
    """The work that all servers share."""
    assert _admit.decode(body).count == 1
    return _encode(REPLY)


class _Parsed(asyncio.Protocol):
    """A connection whose requests somebody else parses; answers in a task, as the manager's own server does."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.path = ""
        self.headers: dict[str, str] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.WriteTransport = transport  # type: ignore[assignment]

    def requested(self) -> None:
        """All of a request is there."""
        call = Call("POST", self.path, self.headers)
        call.body = bytes(self.body)
        self.body.clear()
        self.headers = {}
        self.running = asyncio.get_running_loop().create_task(self._answer(call))

    async def _answer(self, call: Call) -> None:
        self.answer(Answer(reply_to(call.body)))

    def answer(self, answer: Answer) -> None:
        self.transport.write(answer.encode(keep_alive=True))


class ByHand(_Parsed):
    """As little as a call needs, in Python: what the manager did before."""

    def __init__(self) -> None:
        super().__init__()
        self._received = bytearray()

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        line, *lines = self._received[:end].decode("latin-1").split("\r\n")
        _, self.path, _ = line.split(" ")
        for text in lines:
            name, colon, value = text.partition(":")
            if not colon or name != name.strip():
                raise ValueError(text)
            self.headers[name.lower()] = value.strip()
        begin = end + 4
        length = int(self.headers.get("content-length", "0"))
        if len(self._received) >= begin + length:
            self.body += self._received[begin : begin + length]
            del self._received[: begin + length]
            self.requested()


class ByH11(_Parsed):
    def __init__(self) -> None:
        super().__init__()
        self._connection = h11.Connection(h11.SERVER)

    def data_received(self, data: bytes) -> None:
        self._connection.receive_data(data)
        while True:
            event = self._connection.next_event()
            if isinstance(event, h11.Request):
                self.path = event.target.decode("latin-1")
                self.headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in event.headers}
            elif isinstance(event, h11.Data):
                self.body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.requested()
                return
            else:
                return

    def answer(self, answer: Answer) -> None:
        headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body)))]
        send = self._connection.send
        head = send(h11.Response(status_code=answer.status, headers=headers, reason=HTTPStatus(answer.status).phrase))
        body, end = send(h11.Data(data=answer.body)), send(h11.EndOfMessage())
        self.transport.write((head or b"") + (body or b"") + (end or b""))
        self._connection.start_next_cycle()


async def own(ready: Callable[[int], None]) -> None:
    async def handle(call: Call) -> Answer:
        return Answer(reply_to(call.body))

    server = HttpServer(handle, refuse=lambda status, text: Answer(text.encode(), status=status), most_body_bytes=2**20)
    ready((await server.listen("127.0.0.1", 0))[1])
    await asyncio.Event().wait()


async def parsed(protocol: type[_Parsed], ready: Callable[[int], None]) -> None:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    ready(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


async def by_aiohttp(ready: Callable[[int], None]) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=reply_to(await request.read()), content_type="application/json")

    app = web.Application()
    app.router.add_post("/admit", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready(runner.addresses[0][1])
    await asyncio.Event().wait()


SERVERS: dict[str, Callable[[Callable[[int], None]], Any]] = {
    "own": own,
    "by hand": lambda ready: parsed(ByHand, ready),
    "h11": lambda ready: parsed(ByH11, ready),
    "aiohttp": by_aiohttp,
}


def serve(name: str, port: Any) -> None:
    """One server, in a process of its own."""
    uvloop.run(SERVERS[name](port.send))


async def load(port: int, process: psutil.Process, *, rate: float | None, seconds: float) -> dict[str, float]:
    """Calls at `rate` a second, or as fast as they are answered."""
    loop = asyncio.get_running_loop()
    free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
    for _ in range(CONNECTIONS):
        _, connection = await loop.create_connection(lambda: Connection("127.0.0.1", "none"), "127.0.0.1", port)
        free.put_nowait(connection)
    latencies: list[float] = []

    async def one(due: float) -> None:
        connection = await free.get()
        assert msgspec.json.decode(await connection.post("/admit", Admit(worker=3, count=1)), type=AdmitReply) == REPLY
        free.put_nowait(connection)
        latencies.append(time.monotonic() - due)

    async def again(until: float) -> None:
        while time.monotonic() < until:
            await one(time.monotonic())

    await asyncio.gather(*(again(time.monotonic() + 0.3) for _ in range(CONNECTIONS)))
    latencies.clear()
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    if rate is None:
        await asyncio.gather(*(again(began + seconds) for _ in range(CONNECTIONS)))
    else:
        calls: set[asyncio.Task[None]] = set()
        made = 0
        while (now := time.monotonic()) < began + seconds:
            while made < (now - began) * rate:
                task = asyncio.create_task(one(began + made / rate))
                calls.add(task)
                task.add_done_callback(calls.discard)
                made += 1
            await asyncio.sleep(0.001)
        await asyncio.gather(*calls)
    spent = time.monotonic() - began
    cpu = sum(process.cpu_times()[:2]) - before
    while not free.empty():
        free.get_nowait().transport.close()
    return {
        "calls_per_second": len(latencies) / spent,
        "cpu_us_per_call": 1e6 * cpu / len(latencies),
        "p50_ms": 1e3 * statistics.median(latencies),
        "p99_ms": 1e3 * statistics.quantiles(latencies, n=100)[98],
    }


def measure(name: str, *, rate: float | None, seconds: float) -> dict[str, float]:
    """One server under one load."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    server = context.Process(target=serve, args=(name, theirs), daemon=True)
    server.start()
    try:
        return uvloop.run(load(mine.recv(), psutil.Process(server.pid), rate=rate, seconds=seconds))
    finally:
        server.kill()
        server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="Processor time of a call of the manager, by HTTP server.")
    parser.add_argument("--quick", action="store_true", help="one round of 2 s each, in place of three of 5 s")
    quick = parser.parse_args().quick
    rounds, seconds = (1, 2.0) if quick else (3, 5.0)
    rows: list[dict[str, Any]] = []
    for kind, rate in (("fixed rate", RATE), ("as fast as it can", None)):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
        for _ in range(rounds):  # in turn, so that what else the machine does meets all of them
            for name in SERVERS:
                found[name].append(measure(name, rate=rate, seconds=seconds))
        base = statistics.median(run["cpu_us_per_call"] for run in found["own"])
        for name, runs in found.items():
            row = {figure: round(statistics.median(run[figure] for run in runs), 3) for figure in runs[0]}
            rows.append({"load": kind, "server": name, "cpu_of_own": round(row["cpu_us_per_call"] / base, 2)} | row)
    table = Table(
        title=f"A call of the manager, over {CONNECTIONS} connections; fixed rate: {RATE:,.0f} calls a second"
    )
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console = Console()
    console.print(table)
    settings = {"connections": CONNECTIONS, "rate": RATE, "rounds": rounds, "seconds": seconds}
    console.print(f"written to {write_results('bench_http', settings, rows)}")


if __name__ == "__main__":
    main()
