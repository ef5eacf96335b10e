"""The sending end of a resync: a gserver that serves the current weights sends them to one that lacks them.

It is rank 0 of a process group of two, as the publisher is of the weight group; the other end receives as it does
from the publisher (`receiver.py`). Sending blocks a thread of its own, and generation and weight updates go on: what
is sent belongs to the engine, and does not change.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from streamrl.checksum import dtype_name
from streamrl.config import WeightsConfig
from streamrl.errors import PublicationError, Refused
from streamrl.gserver.server.engine import Engine
from streamrl.gserver.server.receiver import CLOSING_SECONDS, in_thread
from streamrl.records.lineage import version_of
from streamrl.transport.addresses import Listening
from streamrl.transport.collective import Broadcaster, backend_for
from streamrl.transport.control import Broadcast, PublishBeginReply
from streamrl.transport.generation import OfferWeights, SendWeights

log = logging.getLogger(__name__)


class WeightSender:
    """Owns the offers of one gserver, by the name of their process group."""

    def __init__(self, engine: Engine, *, config: WeightsConfig, listening: Listening) -> None:
        """`listening`: where the other end meets this one."""
        self._engine = engine
        # Nobody needs this end's checksums: the other's are compared with those of the weights as they were trained.
        # And nobody serves what a delta would be from.
        self._config = msgspec.structs.replace(config, checksum=False, delta=False)
        self._listening = listening
        self._offers: dict[str, Broadcaster] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}

    async def offer(self, message: OfferWeights) -> Broadcast:
        """Return what is served, and where to meet for it; raises `Refused` if that is another version."""
        served = await self._engine.served_weights()
        if served.version != message.version:
            raise Refused(f"weights {message.version} were asked for, and {served.version!r} are served here")
        if message.group_name in self._offers:
            raise Refused(f"weight group {message.group_name} exists already; give every offer its own")
        for name in [name for name in self._offers if not self._is_sending(name)]:
            await self.leave(name)  # whoever asked for it did not come back
        backend = backend_for(self._config, served.device)
        carrier = Broadcaster(
            self._config, listening=self._listening, backend=backend, dtype=served.dtype, device=served.device
        )
        carrier.prepare(version_of(message.version), served)
        announced = await in_thread(carrier.announce)
        self._offers[message.group_name] = carrier
        log.info("weights v%s (%s) are offered in %s", message.version, dtype_name(served.dtype), message.group_name)
        return announced

    async def send(self, message: SendWeights) -> None:
        """Meet the other end and send everything; raises `PublicationError` when it does not come, or goes away."""
        name = message.group_name
        carrier = self._offers.get(name)
        if carrier is None or name in self._sending:
            raise Refused(f"nothing is offered in the weight group {name}; call /offer_weights first")
        begin = PublishBeginReply(group_name=name, world_size=2)
        task = asyncio.create_task(_bring(carrier, begin), name=f"sending in {name}")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._sending[name] = task
        await asyncio.shield(task)

    def has(self, name: str) -> bool:
        """Whether `name` is a process group of this end."""
        return name in self._offers

    async def leave(self, name: str) -> None:
        """Leave the group, once nothing is sent in it any more, and let go of the weights."""
        if task := self._sending.get(name):
            await asyncio.wait({task})
        carrier = self._offers.pop(name, None)  # None: another call to leave it was faster
        if carrier is not None:
            self._sending.pop(name, None)
            await in_thread(carrier.abort)

    def _is_sending(self, name: str) -> bool:
        task = self._sending.get(name)
        return task is not None and not task.done()

    async def close(self) -> None:
        """Leave all groups, unless the other end keeps this one waiting: then they end with the process."""
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await asyncio.gather(*(self.leave(name) for name in list(self._offers)))
        except TimeoutError:
            log.warning("weights are still being sent in %s; leaving without it", ", ".join(self._offers))


async def _bring(carrier: Broadcaster, begin: PublishBeginReply) -> None:
    try:
        await in_thread(lambda: carrier.send(begin))
    except PublicationError as error:
        log.warning("weights could not be sent in %s: %s", begin.group_name, error)
        raise
