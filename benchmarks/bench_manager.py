"""Requests that the gserver manager schedules in a second on one core, and the latency of a call.

    python benchmarks/bench_manager.py [--quick]

The manager is the real one, in a process of its own, on one core. With it is the master's buffer, which takes each
group that has ended and forms training batches of 512; no model worker computes. gservers and rollout workers are
SIMULATED: they make the calls of real ones from one process on another core, and generate nothing. Each request is a
group of its own. There are also the calls that end requests (batched for each worker every 10 ms), and every member's
heartbeat each second. A real run schedules `group_size` requests with each admitted group.

Four kinds of measurements, the first three for each number of gservers and of requests in flight:

- `closed`: as fast as 16 workers can ask for one group after another. Each group is a call, which is the dearest way.
- `open`: 5,000 admissions a second, whether the manager keeps up or not. A worker asks as real ones do: by one call at
  a time, for all groups that it can start by then. The latency of an admission counts from when it was due.
- `one by one`: the same, but each group is asked for by a call of its own.
- `waiting`: many admissions wait for room while a place becomes free now and then. The latency counts from a change of
  groups to the reply to the call that is first in line.

CPU time of both processes is in the figures: where the load generator's share is near 1, it is the limit. Where other
programs use the cores, compare the manager's CPU time per call and not the wall-clock figures.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import tempfile
import time
from typing import Any

import uvloop
from common import cpu_seconds, parser_of, report
from manager_load import Load, figures

from streamrl.config import Config, from_dict
from streamrl.gserver.manager.admission import GroupCalls
from streamrl.gserver.manager.http import managing
from streamrl.launch.process import allow_many_connections
from streamrl.ledger import Ledger
from streamrl.trainer.graph import Graph
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from streamrl.transport.control import Admit, InFlight, InFlightReply
from streamrl.types import SampleMeta

WORKERS = 16
RATE = 5000.0
BATCH = 512


def config_for(folder: str, *, room: int) -> Config:
    """Room for `room` groups beyond those that were trained on."""
    batch = min(room, BATCH)
    return from_dict(
        {
            "run": {"dir": folder},
            "gserver": {"engine": "simulated"},
            "rollout": {"group_size": 1},
            "algorithm": {"advantage": "reinforce++"},
            "trainer": {"batch_groups": batch},
            "staleness": {"max_staleness": room // batch - 1, "most_drift": 0.0},
            "limits": {"heartbeat_seconds": 1.0, "silence_seconds": 600.0},
        }
    )


def serve(folder: str, room: int, core: int | None, pipe: Any) -> None:
    """The manager, in a process of its own. It sends its URL, and drops as many groups as it is sent."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    allow_many_connections()
    gc.freeze()  # as in a controller: a collection would look through all imported modules for 0.1 s

    async def control() -> None:
        config = config_for(folder, room=room)
        async with managing(config, host="127.0.0.1", port=0) as found:
            trainer = Trainer(config, found.manager.ledger)
            asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: trainer.drop(pipe.recv()))
            pipe.send(found.url)
            await asyncio.Event().wait()

    uvloop.run(control())


class Trainer:
    """The master's part in groups: it takes each one whose requests have ended, and trains on full batches at once."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self._ledger = ledger
        self._buffer = AsyncIOSequenceBuffer(Graph(()), ledger)
        self._former = BatchFormer(config)
        in_flight = GroupCalls.in_flight

        async def and_take(calls: GroupCalls, message: InFlight) -> InFlightReply:
            reply = await in_flight(calls, message)
            self._take([group.seq for group in message.groups if not group.requests])
            return reply

        GroupCalls.in_flight = and_take  # type: ignore[method-assign]

    def drop(self, count: int) -> None:
        """Take `count` groups, and discard them as too old: their prompts go back."""
        seqs = [group.seq for group in self._ledger.groups.values() if group.state == "leased"][:count]
        self._buffer.put_batch(map(self._meta, seqs))
        with self._buffer.dropping(seqs):
            pass

    def _take(self, seqs: list[int]) -> None:
        self._buffer.put_batch(map(self._meta, seqs))
        version = self._ledger.policy_version
        selection = self._former.select(
            self._buffer.ready, policy_version=version, next_in_order=self._ledger.next_in_order
        )
        if selection.batch:
            self._buffer.trained_on(selection.batch)
            self._ledger.advance(version + 1)

    def _meta(self, seq: int) -> SampleMeta:
        versions = {self._ledger.policy_version: 100}
        return SampleMeta(
            seq=seq,
            head=0,
            worker="",
            size=1,
            tokens=200,
            rewards=[0.0],
            response_lengths=[100],
            version_counts=versions,
            generation_seconds=1.0,
        )


async def measure(pid: int, load: Load, kind: str, in_flight: int, seconds: float) -> dict[str, Any]:
    async with load.joined():
        await load.fill(in_flight if in_flight > 1 else 0)
        await load.at_full_speed(in_flight, 0.5)
        load.latencies.clear()
        load.calls = 0
        before, own, began = cpu_seconds(pid), time.process_time(), time.monotonic()
        if kind == "closed":
            await load.at_full_speed(in_flight, seconds)
        else:
            await load.at_rate(in_flight, RATE, seconds, one_by_one=kind == "one by one")
        return figures(
            load.latencies,
            load.calls,
            seconds=time.monotonic() - began,
            manager_cpu=cpu_seconds(pid) - before,
            load_cpu=time.process_time() - own,
        )


async def measure_waiting(pid: int, load: Load, waiting: int, wakes: int, pipe: Any) -> dict[str, Any]:
    """`waiting` admissions stand in line; one place after another becomes free."""
    async with load.joined():
        await load.admit(0, [time.monotonic()])  # takes the only place
        connections = [await load.connect() for _ in range(waiting)]
        served: asyncio.Queue[float] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        calls = [loop.create_task(c.post("/admit", Admit(worker=0, count=1))) for c in connections]
        for call in calls:
            call.add_done_callback(lambda _: served.put_nowait(time.monotonic()))
        await asyncio.sleep(1.0 + waiting / 2000)
        latencies = []
        before, own, began = cpu_seconds(pid), time.process_time(), time.monotonic()
        for _ in range(wakes):
            start = time.monotonic()
            pipe.send(1)  # dropped: its place is free again
            latencies.append(await served.get() - start)
            assert served.empty(), "more than one was served with one place"
        seconds = time.monotonic() - began
        found = figures(
            latencies,
            wakes,
            seconds=seconds,
            manager_cpu=cpu_seconds(pid) - before,
            load_cpu=time.process_time() - own,
        )
        for call in calls:
            call.cancel()
        for connection in connections:
            connection.transport.abort()
        return found


def one_row(kind: str, gservers: int, in_flight: int, seconds: float, cores: tuple[int, int] | None) -> dict[str, Any]:
    """Start a manager, measure, end it."""
    room = 1 if kind == "waiting" else 10_000_000
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = spawn.Process(target=serve, args=(folder, room, cores[0] if cores else None, theirs), daemon=True)
        child.start()
        url: str = ours.recv()
        host, _, port = url.removeprefix("http://").partition(":")
        load = Load(
            host,
            int(port),
            config_for(folder, room=room).digest(),
            workers=1 if kind == "waiting" else WORKERS,
            gservers=gservers,
            heartbeat=1.0,
        )
        pid = child.pid or 0
        try:
            if kind == "waiting":
                found = uvloop.run(measure_waiting(pid, load, in_flight, min(200, in_flight), ours))
            else:
                found = uvloop.run(measure(pid, load, kind, in_flight, seconds))
        finally:
            child.terminate()
            child.join()
    return {"kind": kind, "gservers": gservers, "in_flight": in_flight, **found}


def main() -> None:
    parser = parser_of(__doc__, quick="two sizes, short")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    arguments = parser.parse_args()
    allow_many_connections()
    available = sorted(os.sched_getaffinity(0))
    cores = (available[0], available[1]) if len(available) > 1 else None
    if cores is not None:
        os.sched_setaffinity(0, {cores[1]})
    sizes = (1, 1000) if arguments.quick else (1, 30, 1000)
    in_flights = (100,) if arguments.quick else (1, 100, 10_000)
    points = [(kind, g, n) for kind in ("closed", "open", "one by one") for g in sizes for n in in_flights]
    points += [("waiting", 1, n) for n in ((100,) if arguments.quick else (100, 10_000))]
    rows = []
    for point in points:
        rows.append(one_row(*point, arguments.seconds, cores))
        print(rows[-1], flush=True)
    settings = {
        "workers": WORKERS,
        "rate": RATE,
        "seconds": arguments.seconds,
        "simulated": "gservers, rollout workers and training",
        "quick": arguments.quick,
    }
    report("bench_manager", settings, rows)


if __name__ == "__main__":
    main()
