"""The model workers as the master sees them all together: how they begin, what they are, what they let go of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from streamrl.config import Config
from streamrl.config.trainer import role_config
from streamrl.trainer.calls import (
    PUBLICATION_STEPS,
    BeingScored,
    Call,
    ClearDataCache,
    Done,
    HaveScored,
    Initialize,
    ModelConfig,
    ModelFacts,
    OpenStore,
    Publish,
    Published,
    Sibling,
    Spec,
    StoreOpened,
    WorkerSpec,
)
from streamrl.trainer.layout import ROLES
from streamrl.transport.request_reply import Requests

log = logging.getLogger(__name__)

SPEC_SECONDS = 30.0
"""For an answer to what a worker is, or has."""


class ModelWorkers:
    """Calls to all workers."""

    def __init__(self, config: Config, *, channel: Requests) -> None:
        self._config = config
        self._channel = channel
        self._workers = range(config.trainer.workers)

    async def connected(self) -> None:
        """Until all workers have connected; raises `DeadlineExceeded` when one does not."""
        await self._channel.wait_for(set(self._workers), patience=self._config.manager.join_timeout_seconds)

    async def initialize(self) -> None:
        """Have them meet, and load the models."""
        patience = self._config.manager.join_timeout_seconds
        store = StoreOpened(host="", port=0)
        if len(self._workers) > 1 or self._needs_world():
            store = await self._channel.call(0, OpenStore(), StoreOpened, timeout=patience)
        call = Initialize(store_host=store.host, store_port=store.port)
        await self._channel.request(self._all(call), Done, timeout=patience)
        for role, layout in (await self.specs())[0].roles.items():
            facts = await self._channel.call(0, ModelConfig(role), ModelFacts, timeout=patience)
            log.info("%s: %.1f million parameters, %s", role, facts.parameters / 1e6, layout)

    async def specs(self) -> list[WorkerSpec]:
        """What each worker is and has counted."""
        calls = (self._channel.call(worker, Spec(), WorkerSpec, timeout=SPEC_SECONDS) for worker in self._workers)
        return list(await asyncio.gather(*calls))

    async def clear(self, held: Mapping[int, list[int]], *, come_again: bool) -> None:
        """Have each worker let go of the groups that it holds."""
        calls: dict[int, Call] = {worker: ClearDataCache(seqs, come_again) for worker, seqs in held.items()}
        await self._channel.request(calls, Done, timeout=self._config.trainer.step_timeout_seconds)

    async def have_scored(self, response: Sibling, *, version: int, worker: int) -> list[int]:
        """Have `worker`, who received its group, ask those who serve `version`; return `BeingScored.sampled`."""
        call = HaveScored(version, response)
        return (await self._channel.call(worker, call, BeingScored, timeout=SPEC_SECONDS)).sampled

    async def publish(self, version: int, *, resync: bool = False) -> Published:
        """Send the policy's weights to the gservers as `version`; `resync`: only to those that lack this version."""
        weights = self._config.weights
        limit = weights.attempts * PUBLICATION_STEPS * weights.timeout_seconds
        return (await self._channel.request(self._all(Publish(version, resync=resync)), Published, timeout=limit))[0]

    def _all(self, call: Call) -> dict[int, Call]:
        return dict.fromkeys(self._workers, call)

    def _needs_world(self) -> bool:
        """Megatron wants a process group even for one process."""
        return any(role_config(self._config.trainer, role).backend == "megatron" for role in ROLES)
