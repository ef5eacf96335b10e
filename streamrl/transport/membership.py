"""A process's place in the run: it registers with the manager, beats, and learns when to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable

from streamrl.errors import PeerLost, StreamRLError, first_error
from streamrl.metrics import finite
from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.members import Heartbeat, Leave, Register, Role

log = logging.getLogger(__name__)


class Membership:
    """Joins the run on `join`, beats until `leave`.

    `stopping` is set when the run is over; `leaving` when the run goes on without this process, which then
    finishes what it has and leaves; `lost` holds the error when the manager stayed
    silent for `patience` seconds (then `stopping` is set too).
    """

    def __init__(
        self,
        client: ControlClient,
        *,
        role: Role,
        index: int,
        address: str,
        config_digest: str,
        stats: Callable[[], dict[str, float]] = dict,
        patience: float = 30.0,
    ) -> None:
        self.client = client
        self.role: Role = role
        self.index = index
        self.stopping = asyncio.Event()
        self.leaving = asyncio.Event()
        self.lost: StreamRLError | None = None
        self.policy_version = 0
        self.waiting_for = ""
        self._address = address
        self._digest = config_digest
        self._stats = stats
        self._patience = patience
        self._beating: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"

    async def join(self, *, patience: float) -> None:
        """Register, waiting up to `patience` seconds for the manager, and start to beat."""
        interval = await self._register(patience)
        self._beating = asyncio.create_task(self._beat(interval), name=f"heartbeat of {self.name}")
        self._beating.add_done_callback(self._beat_ended)

    async def fail(self, error: BaseException) -> None:
        """Tell the manager that this process has to give up, which stops the run.

        A manager that cannot be told is only logged: the caller raises `error` itself.
        """
        cause = first_error(error)
        try:
            await self._send(error=f"{self.name}: {type(cause).__name__}: {cause}")
        except StreamRLError as unheard:
            log.warning("%s: the manager could not be told of the failure: %s", self.name, unheard)

    async def leave(self) -> None:
        """Stop beating; one that was asked to leave a run that goes on says that it has gone."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self.leaving.is_set() and not self.stopping.is_set():
            try:
                await self.client.leave(Leave(role=self.role, index=self.index, pid=os.getpid()))
            except StreamRLError as error:
                log.warning("%s: the manager could not be told that it has left: %s", self.name, error)

    async def _register(self, patience: float) -> float:
        reply = await self.client.register(
            Register(
                role=self.role,
                index=self.index,
                address=self._address,
                config_digest=self._digest,
                pid=os.getpid(),
                host=socket.gethostname(),
            ),
            patience=patience,
        )
        self.policy_version = reply.policy_version
        return reply.heartbeat_seconds

    async def _beat(self, interval: float) -> None:
        heard = time.monotonic()
        while not self.stopping.is_set():
            await asyncio.sleep(interval)
            try:
                await self._send()
                heard = time.monotonic()
            except StreamRLError as error:
                silent = time.monotonic() - heard
                if silent > self._patience:
                    self.lost = PeerLost(f"{self.name}: the manager has been silent for {silent:.0f} s: {error}")
                    log.error("%s; leaving", self.lost)
                    self.stopping.set()
                else:
                    log.warning("%s: heartbeat failed, trying on: %s", self.name, error)

    def _beat_ended(self, beating: asyncio.Task[None]) -> None:
        """A heartbeat that dies of a bug must not leave a process that nobody knows is there."""
        error = None if beating.cancelled() else beating.exception()
        if error is not None:
            self.lost = StreamRLError(f"{self.name}: the heartbeat failed: {type(error).__name__}: {error}")
            log.error("%s; leaving", self.lost, exc_info=error)
            self.stopping.set()

    async def _send(self, *, error: str = "") -> None:
        reply = await self.client.heartbeat(
            Heartbeat(
                role=self.role,
                index=self.index,
                stats=finite(self._stats()),
                waiting_for=self.waiting_for,
                error=error,
            )
        )
        self.policy_version = reply.policy_version
        if reply.leave:
            self.leaving.set()
        if reply.stop:
            self.stopping.set()
        elif not reply.known and not error:
            await self._register(self._patience)
