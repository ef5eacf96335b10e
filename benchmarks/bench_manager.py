"""How many requests the gserver manager schedules in a second on one core, and how long a call takes.

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

import argparse
import asyncio
import gc
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import uvloop
from common import latest, write_results
from manager_load import Load, figures, percentile
from rich.console import Console
from rich.table import Table

from streamrl.config import Config, from_dict
from streamrl.gserver.manager.admission import GroupCalls
from streamrl.gserver.manager.process import managing
from streamrl.ledger import Ledger
from streamrl.trainer.graph import Graph
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from streamrl.transport.control import Admit, InFlight, InFlightReply
from streamrl.types import SampleMeta

WORKERS = 16
RATE = 5000.0
AIM_MS = 20.0
BATCH = 512
COLUMNS = (
    "admissions_per_second",
    "calls_per_second",
    "p50_ms",
    "p99_ms",
    "manager_cpu_share",
    "manager_cpu_us_per_call",
    "load_cpu_share",
)


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
            "staleness": {"max_staleness": room // batch - 1},
            "stream": {"capacity_groups": room},
            "manager": {"heartbeat_seconds": 1.0, "lease_seconds": 600.0},
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


def allow_many_connections() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65536, hard))


async def measure(process: psutil.Process, load: Load, kind: str, in_flight: int, seconds: float) -> dict[str, Any]:
    async with load.joined():
        await load.fill(in_flight if in_flight > 1 else 0)
        await load.at_full_speed(in_flight, 0.5)
        load.latencies.clear()
        load.calls = 0
        before, own, began = cpu_seconds(process), time.process_time(), time.monotonic()
        if kind == "closed":
            await load.at_full_speed(in_flight, seconds)
        else:
            await load.at_rate(in_flight, RATE, seconds, one_by_one=kind == "one by one")
        return figures(
            load,
            seconds=time.monotonic() - began,
            manager_cpu=cpu_seconds(process) - before,
            load_cpu=time.process_time() - own,
        )


async def measure_waiting(process: psutil.Process, load: Load, waiting: int, wakes: int, pipe: Any) -> dict[str, Any]:
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
        before, own, began = cpu_seconds(process), time.process_time(), time.monotonic()
        for _ in range(wakes):
            start = time.monotonic()
            pipe.send(1)  # dropped: its place is free again
            latencies.append(await served.get() - start)
            assert served.empty(), "more than one was served with one place"
        seconds = time.monotonic() - began
        answer = {
            "admissions_per_second": round(wakes / seconds, 1),
            "calls_per_second": round(wakes / seconds, 1),
            "p50_ms": round(1e3 * percentile(latencies, 0.5), 3),
            "p99_ms": round(1e3 * percentile(latencies, 0.99), 3),
            "manager_cpu_share": round((cpu_seconds(process) - before) / seconds, 3),
            "manager_cpu_us_per_call": round(1e6 * (cpu_seconds(process) - before) / wakes, 1),
            "load_cpu_share": round((time.process_time() - own) / seconds, 3),
        }
        for call in calls:
            call.cancel()
        for connection in connections:
            connection.transport.abort()
        return answer


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


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
        process = psutil.Process(child.pid)
        try:
            if kind == "waiting":
                found = uvloop.run(measure_waiting(process, load, in_flight, min(200, in_flight), ours))
            else:
                found = uvloop.run(measure(process, load, kind, in_flight, seconds))
        finally:
            child.terminate()
            child.join()
    return {"kind": kind, "gservers": gservers, "in_flight": in_flight, **found}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    for kind, title in (
        ("closed", f"As fast as {WORKERS} simulated workers can"),
        ("open", f"{RATE:,.0f} admissions a second; each worker asks for all that it can start"),
        ("one by one", f"{RATE:,.0f} admissions a second, each by a call of its own"),
        ("waiting", "Admissions that wait in line, and one place at a time"),
    ):
        table = Table(title=title)
        for column in ("gservers", "waiting" if kind == "waiting" else "in_flight", *COLUMNS):
            table.add_column(column.replace("_", " "), justify="right")
        for row in rows:
            if row["kind"] == kind:
                figures = (f"{row[name]:,.3g}" if row[name] < 100 else f"{row[name]:,.0f}" for name in COLUMNS)
                table.add_row(f"{row['gservers']:,}", f"{row['in_flight']:,}", *figures)
        console.print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    picture, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for in_flight in sorted({row["in_flight"] for row in rows}):
        for axes, kind, column in ((left, "closed", "admissions_per_second"), (right, "open", "p99_ms")):
            found = [row for row in rows if (row["kind"], row["in_flight"]) == (kind, in_flight)]
            axes.plot(
                [row["gservers"] for row in found],
                [row[column] for row in found],
                marker="o",
                label=f"{in_flight:,} in flight",
            )
    left.axhline(RATE, color="grey", linestyle="--", label="aim")
    right.axhline(AIM_MS, color="grey", linestyle="--", label="aim")
    left.set(xscale="log", xlabel="simulated gservers", ylabel="admissions per second", ylim=(0, None))
    right.set(xscale="log", xlabel="simulated gservers", ylabel="p99 in ms at 5,000 a second", yscale="log")
    left.legend()
    right.legend()
    picture.suptitle("The gserver manager on one core (gservers, workers and training simulated)")
    picture.tight_layout()
    picture.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Scheduled requests per second and latency of the gserver manager.")
    parser.add_argument("--quick", action="store_true", help="two sizes, short")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    arguments = parser.parse_args()
    console = Console(width=140)
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
        console.print(rows[-1], style="dim")
    show(rows, console)
    settings = {
        "workers": WORKERS,
        "rate": RATE,
        "seconds": arguments.seconds,
        "simulated": "gservers, rollout workers and training",
        "quick": arguments.quick,
    }
    console.print(f"written to {write_results('bench_manager', settings, rows)}")
    if not arguments.quick:
        plot(rows, latest("bench_manager.png"))


if __name__ == "__main__":
    main()
