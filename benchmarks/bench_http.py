"""Processor time of a call of the controller, by the HTTP server around the same handler.

    python benchmarks/bench_http.py [--quick]

The controller's own server (`streamrl/transport/http.py`) and aiohttp's web server have the same handler, which decodes
an `Admit` and encodes an `AdmitReply`, each on uvloop in a process of its own. They are called by 16 keep-alive
connections, at 5,000 calls a second whether they keep up or not, and as fast as they go. Nothing here depends on the
network. Processor time for each call is comparable also on a machine that has other work; latencies are not.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop
from aiohttp import web
from common import Row, cpu_seconds, parser_of, percentile, report
from manager_load import Connection

from streamrl.transport.control import Admission, Admit, AdmitReply
from streamrl.transport.http import Answer, Call, HttpServer

CONNECTIONS = 16
RATE = 5000.0
REPLY = AdmitReply(admissions=[Admission(seq=123456, gserver="http://10.0.0.17:31234")], policy_version=42, stop=False)
_admit = msgspec.json.Decoder(Admit)
_encode = msgspec.json.encode


def reply_to(body: bytes) -> bytes:
    """The handler of all servers."""
    assert _admit.decode(body).count == 1
    return _encode(REPLY)


async def own(ready: Callable[[int], None]) -> None:
    async def handle(call: Call) -> Answer:
        return Answer(reply_to(call.body))

    server = HttpServer(handle, refuse=lambda status, text: Answer(text.encode(), status=status), most_body_bytes=2**20)
    ready((await server.listen("127.0.0.1", 0))[1])
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
    "aiohttp": by_aiohttp,
}


def serve(name: str, port: Any) -> None:
    """One server, in a process of its own."""
    uvloop.run(SERVERS[name](port.send))


async def load(port: int, pid: int, *, rate: float | None, seconds: float) -> dict[str, float]:
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
    before, began = cpu_seconds(pid), time.monotonic()
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
    cpu = cpu_seconds(pid) - before
    while not free.empty():
        free.get_nowait().transport.close()
    return {
        "calls_per_second": len(latencies) / spent,
        "cpu_us_per_call": 1e6 * cpu / len(latencies),
        "p50_ms": 1e3 * percentile(latencies, 0.5),
        "p99_ms": 1e3 * percentile(latencies, 0.99),
    }


def measure(name: str, *, rate: float | None, seconds: float) -> dict[str, float]:
    """One server under one load."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    server = context.Process(target=serve, args=(name, theirs), daemon=True)
    server.start()
    try:
        return uvloop.run(load(mine.recv(), server.pid or 0, rate=rate, seconds=seconds))
    finally:
        server.kill()
        server.join()


def main() -> None:
    quick = parser_of(__doc__, quick="one round of 2 s each, in place of three of 5 s").parse_args().quick
    rounds, seconds = (1, 2.0) if quick else (3, 5.0)
    rows: list[Row] = []
    for kind, rate in (("fixed rate", RATE), ("as fast as it can", None)):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
        for _ in range(rounds):  # in turns: other load of the machine disturbs all of them
            for name in SERVERS:
                found[name].append(measure(name, rate=rate, seconds=seconds))
        base = statistics.median(run["cpu_us_per_call"] for run in found["own"])
        for name, runs in found.items():
            row = {figure: round(statistics.median(run[figure] for run in runs), 3) for figure in runs[0]}
            rows.append({"load": kind, "server": name, "cpu_of_own": round(row["cpu_us_per_call"] / base, 2)} | row)
    settings = {"connections": CONNECTIONS, "rate": RATE, "rounds": rounds, "seconds": seconds}
    report("bench_http", settings | {"quick": quick}, rows)


if __name__ == "__main__":
    main()
