"""The controller: the one process that makes a run's decisions, without torch and without a GPU.

It hosts the gserver manager (`gserver/manager`: members, admission, routing, weight updates) and the trainer's master
(`trainer/master`: batches, steps, checkpoints) on one event loop. They share the ledger's table of groups and call each
other's methods. Its URL is enough to join the run; it leaves once the run is over and every live process knows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack

from streamrl.config import Config
from streamrl.errors import StreamRLError, first_error
from streamrl.gserver.manager.core import Manager
from streamrl.gserver.manager.process import managing
from streamrl.machine import machine_identity, process_space
from streamrl.records import progress
from streamrl.trainer.calls import Stored
from streamrl.trainer.master.process import Master
from streamrl.transport.addresses import Listening
from streamrl.transport.control import AskMember, Heartbeat, Register
from streamrl.transport.credentials import CurveKeys, Doorkeeper, Verifier
from streamrl.transport.membership import MACHINE_SECONDS, machine_seconds, processor_seconds
from streamrl.transport.request_reply import RequestChannel
from streamrl.transport.secret import encrypts
from streamrl.transport.synchronous import FIRST_ROLLOUT_WORKER, name_on_channel, number_on_channel
from streamrl.waits import first_of

log = logging.getLogger(__name__)

NAME = "controller/0"


async def serve(
    config: Config,
    *,
    host: str,
    port: int,
    advertise: str = "",
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Control a run until it is over and every process knows, or until cancelled.

    `advertise`: the address by which others reach the controller; empty: `host`, or if that stands for all addresses
    of this machine, the one from which it reaches others. `on_ready` is called with the URL. Raises `StreamRLError`
    when the address cannot be had, and with the reason when the run ended before its last step, so that a cluster
    starts the run again; `ConfigError` for a secret that cannot be used.
    """
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(managing(config, host=host, port=port, advertise=advertise))
        manager = serving.manager
        listening = serving.reach.listening(config.stream.host)
        encrypted = encrypts(config, listening.at)
        keys = CurveKeys.make()
        stored: asyncio.Queue[Stored] = asyncio.Queue()
        channel = _channel(stored, listening, keys=keys if encrypted else None)
        stack.push_async_callback(channel.close)
        if encrypted:
            doorkeeper = Doorkeeper(channel.context, lambda key: _is_member(manager, key))
            doorkeeper.start()
            stack.callback(doorkeeper.stop)
        master = Master(config, pool=manager, channel=channel, stored=stored)
        stack.push_async_callback(master.close)
        granted = manager.enter(_registration(config, channel.endpoint, keys=keys, encrypted=encrypted))
        channel.admit(Verifier("controller", key=bytes.fromhex(granted.verification_key), encrypted=encrypted))
        if on_ready is not None:
            on_ready(serving.url)
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(_beat(config, manager, master), name="heartbeat of the controller")
            training = tasks.create_task(_train(manager, master), name="training")
            await serving.until_all_know_of_the_end()
            await asyncio.wait({training})
            beating.cancel()
    manager.raise_early_end()


def _channel(stored: asyncio.Queue[Stored], listening: Listening, *, keys: CurveKeys | None) -> RequestChannel[Stored]:
    """Return the channel to model workers and, in a synchronous graph, rollout workers."""

    def note(worker: int, notice: Stored) -> None:
        own = [meta for meta in notice.metas if meta.head == worker < FIRST_ROLLOUT_WORKER]
        if len(own) < len(notice.metas):
            log.warning("%s reports groups that it does not hold: ignored", name_on_channel(worker))
        stored.put_nowait(Stored(own))

    return RequestChannel(
        host=listening.at,
        announced=listening.announced,
        notice_type=Stored,
        on_notice=note,
        name_of=name_on_channel,
        number_of=number_on_channel,
        keys=keys,
    )


def _registration(config: Config, address: str, *, keys: CurveKeys, encrypted: bool) -> Register:
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
        curve_key=keys.public,
        encrypted=encrypted,
        begins_from=progress.identity(config),
    )


async def _is_member(manager: Manager, curve_key: str) -> bool:
    return (await manager.members.is_member(AskMember(curve_key))).known


async def _train(manager: Manager, master: Master) -> None:
    """Carry out all steps, and end the run; an error ends it as failed."""

    async def work() -> None:
        reason = await master.run() + await master.finish()
        manager.finish(reason, stopped=master.stopped)

    try:
        await first_of(work(), manager.until_over())
    except Exception as error:  # tolerance point: any error ends the run with its reason
        cause = first_error(error)
        if not isinstance(cause, StreamRLError):
            log.exception("training failed")
        manager.fail(f"{NAME}: {type(cause).__name__}: {cause}")
    finally:
        master.write_final()


async def _beat(config: Config, manager: Manager, master: Master) -> None:
    """Record the controller's own heartbeats, for as long as it lives."""
    while True:
        stats = {**manager.stats(), **master.stats(), **processor_seconds(), MACHINE_SECONDS: machine_seconds()}
        beat = Heartbeat(role="controller", index=0, stats=stats, waiting_for=master.waiting_for)
        if (await manager.members.heartbeat(beat)).leave:
            master.leave()
        await asyncio.sleep(config.manager.heartbeat_seconds)
