"""A manager that listens on a real port, and the processes that a test pretends to be."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.gserver.manager.core import Manager
from streamrl.gserver.manager.http import ManagerService, managing
from streamrl.machine import machine_identity, process_space
from streamrl.records import progress
from streamrl.records.evaluation import EvaluationReport
from streamrl.transport.control import (
    Admission,
    Admit,
    Broadcast,
    Heartbeat,
    HeartbeatReply,
    ProcessStatus,
    PublishBegin,
    PublishBeginReply,
    PublishCommit,
    PublishReply,
    Register,
    RegisterReply,
    Role,
    Status,
    TensorSpec,
)
from streamrl.transport.credentials import bearer
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import Secret, of_run_at
from streamrl.types import SampleMeta
from tests.groups import make_group
from tests.gserver.scripted import ScriptedGserver, scripted

HERE = socket.gethostname()
Ready = TypeVar("Ready")
NO_PROCESS = 2**22
"""Linux gives no process a number above this one."""


def small_config(folder: Path, **sections: dict[str, Any]) -> Config:
    """One gserver, one worker, batches of 2 groups, η = 1 from the beginning: room for 4 groups at version 0."""
    tree: dict[str, Any] = {
        "run": {"dir": str(folder)},
        "gserver": {"count": 1},
        "trainer": {"batch_groups": 2},
        "staleness": {"max_staleness": 1, "most_drift": 0.0},
        "limits": {"update_seconds": 0.5, "heartbeat_seconds": 0.05},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return configuration.from_dict(tree)


class Run:
    """A manager under test and a client of it."""

    def __init__(self, config: Config, url: str, serving: asyncio.Task[None], manager: Manager | None = None) -> None:
        self.config = config
        self._manager = manager
        self.url = url
        self.serving = serving
        self.reports: list[EvaluationReport] = []
        """Of evaluations, as the master gets them."""
        if manager is not None:
            manager.on_evaluation(self.reports.append)
        found = of_run_at(url)
        self.secret = found if found is not None else Secret.make()  # no manager listens
        self.client = ControlClient(url, secret=self.secret, timeout=10.0)
        """The run's owner, who may make every call."""

    @property
    def manager(self) -> Manager:
        """What the master in its process calls."""
        assert self._manager is not None, "this run has no manager"
        return self._manager

    def take(self, *seqs: int) -> None:
        """The trainer has these groups."""
        for seq in seqs:
            assert self.manager.ledger.accept(SampleMeta.of(make_group(seq), head=0)) is not None

    def drop(self, *seqs: int) -> None:
        """The trainer has these groups, and discards them as too old."""
        self.take(*seqs)
        for seq in seqs:
            self.manager.ledger.discarding(seq)
            self.manager.ledger.discarded(seq)

    def registration(
        self,
        role: Role,
        index: int = 0,
        *,
        address: str = "",
        pid: int = 1,
        machine: str | None = None,
        config: Config | None = None,
        **fields: Any,
    ) -> Register:
        """`pid`: which of the processes that a test pretends to be; the manager sees that it has ended, so that another
        may take its place. `machine`, `config`: None: this machine, the run's configuration. `fields`: others."""
        config = config or self.config
        return Register(
            role=role,
            index=index,
            address=address,
            config_digest=config.digest(),
            settings=config.shared_changes(),
            pid=NO_PROCESS + pid,
            host=HERE,
            machine=machine_identity() if machine is None else machine,
            process_space=process_space() if machine is None else machine,
            **fields,
        )

    async def register(self, role: Role, index: int = 0, **registration: Any) -> RegisterReply:
        """Join as the process that `registration` describes."""
        async with self.member() as client:
            return await client.register(self.registration(role, index, **registration), patience=5.0)

    async def join(self, *gservers: ScriptedGserver, workers: int = 1) -> None:
        """Register `gservers` and rollout workers, and wait until the gservers take groups."""
        for index, gserver in enumerate(gservers):
            await self.register("gserver", index, address=gserver.url, pid=100 + index)
        for index in range(workers):
            await self.register("rollout", index, pid=200 + index)
        await self.until_live(*range(len(gservers)))

    def session(self) -> aiohttp.ClientSession:
        """For raw requests of the run's owner."""
        return aiohttp.ClientSession(headers=bearer(self.secret.shown))

    @asynccontextmanager
    async def member(self, token: str = "") -> AsyncIterator[ControlClient]:
        """A client that shows `token`, which `register` has brought; without one it can join."""
        client = ControlClient(self.url, secret=self.secret, timeout=10.0)
        client.token = token
        try:
            yield client
        finally:
            await client.close()

    async def beat(self, role: Role, index: int = 0, **fields: Any) -> HeartbeatReply:
        return await self.client.heartbeat(Heartbeat(role=role, index=index, **{"stats": {}, **fields}))

    async def admit(self, count: int = 100, *, worker: int = 0) -> list[Admission]:
        return (await self.client.admit(Admit(worker=worker, count=count))).admissions

    async def admit_seqs(self, count: int = 100, *, worker: int = 0) -> list[int]:
        return [admission.seq for admission in await self.admit(count, worker=worker)]

    async def next_report(self, known: int = 0) -> EvaluationReport:
        """Return the report after the first `known`."""
        async with asyncio.timeout(60):
            while len(self.reports) <= known:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return self.reports[known]

    async def process(self, role: Role, index: int = 0) -> ProcessStatus:
        status = await self.client.status()
        return next(p for p in status.processes if (p.role, p.index) == (role, index))

    async def until(self, ready: Callable[[Status], bool], *, timeout: float = 30.0) -> Status:
        """Ask for the status until it is as wanted: tests have no other way to see inside."""
        async with asyncio.timeout(timeout):
            while not ready(status := await self.client.status()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return status

    async def until_live(self, *indices: int) -> None:
        """Until the gservers `indices` are routed to."""
        await self.until(lambda status: set(indices) <= live_gservers(status))


def live_gservers(status: Status) -> set[int]:
    return {p.index for p in status.processes if p.role == "gserver" and p.state == "live"}


@asynccontextmanager
async def managed(config: Config, *, host: str = "127.0.0.1") -> AsyncIterator[Run]:
    """A running manager; cancelled at the end if the run is not over."""
    ready: asyncio.Future[ManagerService] = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with managing(config, host=host, port=0) as found:
            await found.manager.begin(config, lineage=progress.begin_lineage(config))
            ready.set_result(found)
            await found.manager.until_all_know_of_the_end()
        found.manager.raise_early_end()

    serving = asyncio.create_task(serve())
    found = await first_result(serving, ready)
    async with cancelled_at_the_end(Run(config, found.url, serving, found.manager)) as run:
        yield run


@asynccontextmanager
async def joined(
    folder: Path, gservers: int = 1, *, workers: int = 1, scripted_as: Mapping[str, Any] | None = None, **sections: Any
) -> AsyncIterator[tuple[Run, list[ScriptedGserver]]]:
    """A run whose gservers and rollout workers have joined; `scripted_as`: options of the gservers."""
    config = small_config(folder, **sections | {"gserver": {"count": gservers, **sections.get("gserver", {})}})
    async with managed(config) as run, scripted(gservers, **(scripted_as or {})) as made:
        await run.join(*made, workers=workers)
        yield run, made


async def first_result(serving: asyncio.Task[None], ready: asyncio.Future[Ready]) -> Ready:
    """Return the result of `ready`; raises the error of `serving` if that ends first."""
    await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    return ready.result()


@asynccontextmanager
async def cancelled_at_the_end(run: Run) -> AsyncIterator[Run]:
    try:
        yield run
    finally:
        await run.client.close()
        run.serving.cancel()
        await asyncio.gather(run.serving, return_exceptions=True)


async def publish(run: Run, version: int) -> PublishReply:
    """The publisher's two calls, without any broadcast."""
    begin = await begin_publication(run, version)
    return await commit_publication(run, version, begin.group_name)


async def still_waits(task: asyncio.Task[Any]) -> None:
    """See that a call that has to wait does not return at once."""
    done, _ = await asyncio.wait({task}, timeout=0.1)
    assert not done, task.result()


async def begin_publication(
    run: Run, version: int, *, group: str = "", buckets: int = 2, resync: bool = False
) -> PublishBeginReply:
    specs = [TensorSpec(f"layer.{number}.weight", "float32", [2, 3]) for number in range(buckets)]
    message = PublishBegin(
        version=version,
        weights=Broadcast([[spec] for spec in specs], "127.0.0.1", 29500, backend="gloo", group_name=group),
        resync=resync,
    )
    return await run.client.publish_begin(message, timeout=10.0)


async def commit_publication(
    run: Run, version: int, group: str, *, error: str = "", timeout: float = 10.0
) -> PublishReply:
    message = PublishCommit(version=version, group_name=group, error=error)
    return await run.client.publish_commit(message, timeout=timeout)


async def keep_beating(run: Run, *roles: Any) -> None:
    """Until cancelled, for the first process of each role."""
    while True:
        for role in roles:
            await run.beat(role)
        await asyncio.sleep(0.05)
