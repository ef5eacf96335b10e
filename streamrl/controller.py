"""The controller: the one process that makes a run's decisions, without torch and without a GPU.

It hosts the gserver manager (`gserver/manager`: members, admission, routing, weight updates) and the trainer's master
(`trainer/master`: batches, steps, checkpoints) on one event loop. They share the ledger's table of groups and call each
other's methods. Its URL is enough to join the run; it leaves once the run is over and every live process has received
the stop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from streamrl.config import Config
from streamrl.errors import DataError, PeerLost, StreamRLError, first_error, is_expected
from streamrl.gserver.manager.http import ManagerService, managing
from streamrl.machine import machine_identity, process_space
from streamrl.records import lineage as lineages
from streamrl.records import progress, snapshots
from streamrl.trainer.calls import StorageNotice
from streamrl.trainer.master.process import Master
from streamrl.transport.addresses import Reach
from streamrl.transport.control import Heartbeat, Register
from streamrl.transport.credentials import ReceiverKeys
from streamrl.transport.membership import MACHINE_SECONDS, machine_seconds, processor_seconds
from streamrl.transport.request_reply import FIRST_ROLLOUT_WORKER, RequestChannel, name_on_channel
from streamrl.transport.secret import encrypts
from streamrl.waits import first_of

log = logging.getLogger(__name__)

NAME = "controller/0"
DEATH_SECONDS = 5.0
"""How long to wait for a death that may have caused a failure: an ended connection counts as a death after 2 s."""
COLLECTION_SECONDS = 300.0
"""Time between full collections of cyclic garbage: with a thousand members, one stops the event loop for 0.3 s."""


async def serve(
    config: Config,
    *,
    host: str,
    port: int,
    advertise: str = "",
    died: str = "",
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Control a run until it is over and every process has received the stop, or until cancelled.

    `advertise`: the address by which others reach the controller; empty: `host`, or, if that stands for all addresses
    of this machine, the source address of its route to others. `died`: how the run's previous controller died; empty if
    it did not. `on_ready` is called with the URL. Raises `StreamRLError` if the address is not available, and, with the
    reason, if the run ended before its last step, so that a cluster restarts the run; `ConfigError` for an invalid
    secret.
    """
    async with managing(config, host=host, port=port, advertise=advertise) as serving:
        if on_ready is not None:
            on_ready(serving.url)
        controlled = _ControlledRun(config, serving)
        with snapshots.kept(config.run_dir), _few_full_collections():
            async with asyncio.TaskGroup() as tasks:
                collecting = tasks.create_task(_collect(), name="collection of garbage")
                beating = tasks.create_task(controlled.beat(), name="heartbeat of the controller")
                training = tasks.create_task(controlled.train(died), name="training")
                await serving.manager.until_all_know_of_the_end()
                await asyncio.wait({training})
                beating.cancel()
                collecting.cancel()
            try:
                if not serving.manager.finished:
                    await asyncio.to_thread(progress.copy_latest_snapshot, config.run_dir)
                snapshots.remove(config.run_dir)
            except DataError as error:  # the reason of the run's end is raised below
                log.error("%s", error)
    serving.manager.raise_early_end()


@contextmanager
def _few_full_collections() -> Iterator[None]:
    """Have the interpreter collect young cyclic garbage alone: a full collection examines all objects of the members,
    and calls would wait for it. Existing objects are excluded from all collections."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(usual[0], usual[1], 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


async def _collect() -> None:
    """Make the full collections, rarely."""
    while True:
        await asyncio.sleep(COLLECTION_SECONDS)
        gc.collect()


class _ControlledRun:
    """The controller's execution of a run: one lineage after another, each with its own master and channel, until the
    run is over. The manager and its state of gservers and rollout workers persist."""

    def __init__(self, config: Config, serving: ManagerService) -> None:
        self._config = config
        self._manager = serving.manager
        self._reach = serving.reach
        self._encrypted = encrypts(config, self._reach.local)
        self._master: Master | None = None
        self._leaving = False

    async def train(self, died: str) -> None:
        """Run all steps, and end the run; an error ends it as failed. `died`: as in `serve`."""
        config, cause = self._config, died
        while True:
            try:
                self._check_budget(cause)
                if cause:
                    config = await self._from_latest()
                cause = await self._make_lineage(config, cause=cause)
            except Exception as error:  # tolerance point: any error ends the run with its reason
                failure = first_error(error)
                if not is_expected(error):
                    log.exception("training failed")
                self._manager.fail(f"{NAME}: {type(failure).__name__}: {failure}")
                return
            if not cause:
                return
            log.error("%s: the run goes back to its latest checkpoint", cause)

    async def _from_latest(self) -> Config:
        """Return the configuration that begins at the latest checkpoint. Raises `DataError` for a full disk."""
        to_disk = not self._manager.trainer_is_here  # model workers elsewhere cannot read a snapshot
        return await asyncio.to_thread(progress.from_latest, self._config, to_disk=to_disk)

    async def beat(self) -> None:
        """Record the controller's own heartbeats, as long as it lives."""
        while True:
            own = {**processor_seconds(), MACHINE_SECONDS: machine_seconds()}
            master = self._master
            stats = {**self._manager.stats(), **(master.stats() if master is not None else {}), **own}
            waiting_for = master.waiting_for if master is not None else "the model workers' end"
            beat = Heartbeat(role="controller", index=0, stats=stats, waiting_for=waiting_for)
            if (await self._manager.members.heartbeat(beat)).leave:
                self._leaving = True
                if master is not None:
                    master.leave()
            await asyncio.sleep(self._config.limits.heartbeat_seconds)

    async def _make_lineage(self, config: Config, *, cause: str) -> str:
        """Train until the run is over or a model worker has died; return how it died, or an empty string. `cause`: the
        death that made the run go back to `run.resume_from` of `config`. Raises any other error."""
        stored: asyncio.Queue[StorageNotice] = asyncio.Queue()
        async with AsyncExitStack() as stack:
            channel = await self._open_channel(config, stack, stored)
            lineage = progress.begin_lineage(config, cause=cause)
            await self._manager.begin(config, lineage=lineage)
            master = self._master = Master(config, pool=self._manager, channel=channel, stored=stored, lineage=lineage)
            stack.push_async_callback(master.close)
            if self._leaving:
                master.leave()
            dying = asyncio.create_task(self._death(channel), name="death of a model worker")
            stack.callback(dying.cancel)
            try:
                await first_of(self._work(master), self._manager.until_over(), _ended(dying))
            except Exception as error:  # a death may have caused any error; otherwise it is raised again
                failure = first_error(error)
                if not isinstance(failure, PeerLost):
                    await asyncio.wait({dying}, timeout=DEATH_SECONDS)
                    if not dying.done():
                        raise
                unexpected = None if is_expected(error) else error
                log.warning("training ended, perhaps because a process died: %s", failure, exc_info=unexpected)
                return str(failure) if isinstance(failure, PeerLost) else dying.result()
            finally:
                master.write_final()
            return dying.result() if dying.done() else ""

    async def _work(self, master: Master) -> None:
        reason = await master.run() + await master.finish()
        self._manager.finish(reason, stopped=master.stopped)

    async def _death(self, channel: RequestChannel[StorageNotice]) -> str:
        """Wait until a model worker has died; return how."""
        workers = range(self._config.trainer.workers)
        found = await first_of(self._manager.death(), channel.until_lost(workers))
        how: str = next(task.result() for task in found if not task.cancelled())
        return how

    def _check_budget(self, cause: str) -> None:
        """Raise `StreamRLError` if the run has gone back too often recently."""
        restarts = self._config.restarts
        since = time.time() - restarts.window_seconds
        recent = [lineage for lineage in lineages.read(self._config.run_dir) if lineage.cause and lineage.time > since]
        if cause and len(recent) >= restarts.number:
            first = f"; the first time because {recent[0].cause}" if recent else ""
            raise StreamRLError(
                f"{cause}; the run went back {len(recent)} times within {restarts.window_seconds:g} s already "
                f"(restarts.number){first}"
            )

    async def _open_channel(
        self, config: Config, stack: AsyncExitStack, stored: asyncio.Queue[StorageNotice]
    ) -> RequestChannel[StorageNotice]:
        """Return the channel of the lineage that begins with `config`; the controller registers itself, with the
        channel's address, with its own manager."""
        channel = _channel(
            stored, self._reach, keys=self._manager.access.receivers["controller"], encrypted=self._encrypted
        )
        stack.push_async_callback(channel.close)
        self._manager.enter(_registration(config, channel.endpoint))
        return channel


async def _ended(task: asyncio.Task[str]) -> None:
    await asyncio.wait({task})


def _channel(
    stored: asyncio.Queue[StorageNotice], reach: Reach, *, keys: ReceiverKeys, encrypted: bool
) -> RequestChannel[StorageNotice]:
    """Return the channel to model workers and, in a synchronous graph, rollout workers."""

    def note(worker: int, notice: StorageNotice) -> None:
        own = [meta for meta in notice.metas if meta.head == worker < FIRST_ROLLOUT_WORKER]
        if len(own) < len(notice.metas):
            log.warning("%s reports groups that it does not hold: ignored", name_on_channel(worker))
        stored.put_nowait(StorageNotice(own))

    return RequestChannel(
        keys=keys,
        encrypted=encrypted,
        reach=reach,
        notice_type=StorageNotice,
        on_notice=note,
    )


def _registration(config: Config, address: str) -> Register:
    return Register(
        role="controller",
        index=0,
        address=address,
        config_digest=config.digest(),
        settings=config.shared_changes(),
        pid=os.getpid(),
        host=socket.gethostname(),
        machine=machine_identity(),
        process_space=process_space(),
        process=uuid.uuid4().hex,
        begins_from=progress.identity(config),
    )
