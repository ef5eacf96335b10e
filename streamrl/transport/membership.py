"""A process's membership of the run: it registers with the manager, sends heartbeats, and receives the stop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Coroutine
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import psutil

from streamrl import essential
from streamrl.config import Config
from streamrl.errors import GoneBack, PeerError, PeerLost, StreamRLError, first_error
from streamrl.machine import machine_identity, process_space
from streamrl.records.lineage import LineageHistory
from streamrl.records.metrics import finite
from streamrl.records.timeline import CHILDREN_SECONDS, PROCESSOR_SECONDS, FrequentFailure
from streamrl.transport.control import Credential, Heartbeat, Leave, Register, RegisterReply, Role
from streamrl.transport.manager_client import GONE_BACK, PATIENCE_SECONDS, UNKNOWN, ControlClient
from streamrl.waits import cancel, first_of

log = logging.getLogger(__name__)

MACHINE_SECONDS = "machine_processor_seconds_total"
"""Processor time of all processes on the machine, of all users."""


@dataclass(eq=False)
class Membership:
    """Joins the run with `join`, and sends heartbeats until `leave`.

    `stopping` is set when the run is over. `leaving` is set when the run continues without this process, which then
    finishes its work and leaves. `lost` holds the error if the manager was silent for more than `patience` seconds, or
    the run has gone back to a checkpoint that this process did not start from; then `stopping` is set, too.
    """

    client: ControlClient
    _: KW_ONLY
    role: Role
    index: int
    address: str
    """Where others reach the process."""
    config: Config
    model: str = ""
    stats: Callable[[], dict[str, float]] = dict
    failure: Callable[[], FrequentFailure | None] = lambda: None
    """As in `Heartbeat`."""
    begins_from: str = ""
    gpu: str = ""
    """Both as in `Register`."""

    def __post_init__(self) -> None:
        self.granted = RegisterReply(policy_version=0, heartbeat_seconds=0.0)
        """The manager's reply when this process joined."""
        self.stopping = asyncio.Event()
        self.leaving = asyncio.Event()
        self.lost: StreamRLError | None = None
        self.policy_version = 0
        """Newest served policy version that the manager has reported."""
        self.waiting_for = ""
        self.on_unanswering: Callable[[Collection[str]], None] | None = None
        """Called after each heartbeat with the addresses of gservers that will not reply."""
        self.history = LineageHistory()
        """History of the run's current weights; only rollout workers receive it."""
        self.gone_back = asyncio.Event()
        """Set when the run has gone back to a checkpoint, or started again, under another lineage."""
        self.times_back = 0
        """How often a rollout worker has gone back with the run, and kept groups of an earlier lineage."""
        self._process = uuid.uuid4().hex
        self._beating: asyncio.Task[None] | None = None

    def note_version(self, policy_version: int) -> None:
        """Raise `policy_version` to the one in a reply of the manager; replies may arrive out of order."""
        self.policy_version = max(self.policy_version, policy_version)

    def credential(self, receiver: Role) -> Credential:
        """Return the credential for receivers of that role. Requires that this process has joined."""
        return self.granted.credentials[receiver]

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"

    async def join(self, *, patience: float) -> None:
        """Register, waiting up to `patience` seconds for the manager, and start the heartbeats."""
        interval = await self._register(patience)
        self._beating = essential.begin(self._beat(interval), name=f"heartbeat of {self.name}")

    async def until_over(self, *works: Coroutine[Any, Any, Any]) -> None:
        """Run `works` until the run is over, or one of them ends; then cancel the others.

        Raises the loss of the manager, or the first error of `works`. Such an error is reported to the manager first,
        which stops the run.
        """
        try:
            await first_of(self.stopping.wait(), *works)
        except Exception as error:  # tolerance point: any error that ends the work is reported, and raised
            await self.fail(error)
            raise first_error(error) from error
        if self.lost is not None:
            raise self.lost

    async def fail(self, error: BaseException) -> None:
        """Report to the manager that this process has to give up, which stops the run.

        If the manager cannot be reached, only log that: the caller raises `error` itself.
        """
        cause = first_error(error)
        try:
            await self._send(error=f"{self.name}: {type(cause).__name__}: {cause}")
        except StreamRLError as unheard:
            log.warning("%s: the failure could not be reported to the manager: %s", self.name, unheard)

    async def leave(self) -> None:
        """Stop the heartbeats. Report a failure of essential work, or, if the run continues, that this process has left
        as requested."""
        await cancel(self._beating)
        if (failed := essential.failure()) is not None:
            await self.fail(failed)
        if self.leaving.is_set() and not self.stopping.is_set():
            try:
                await self.client.leave(Leave(role=self.role, index=self.index, pid=os.getpid()))
            except StreamRLError as error:
                log.warning("%s: its leaving could not be reported to the manager: %s", self.name, error)

    async def _register(self, patience: float) -> float:
        message = self._registration()
        try:
            reply = await self.client.register(message, patience=patience)
        except PeerError as refusal:
            if refusal.status == GONE_BACK:
                raise GoneBack(str(refusal)) from None
            raise
        self.policy_version = reply.policy_version  # may be lower: the run may have gone back to a checkpoint
        if self.granted.lineage != reply.lineage:
            self.history = LineageHistory(reply.lineages)
            if self.granted.lineage:
                self.gone_back.set()
        self.granted = reply
        return reply.heartbeat_seconds

    def _registration(self) -> Register:
        return Register(
            role=self.role,
            index=self.index,
            address=self.address,
            config_digest=self.config.digest(),
            settings=self.config.shared_changes(),
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=machine_identity(),
            process_space=process_space(),
            gpu=self.gpu,
            process=self._process,
            model=self.model,
            begins_from=self.begins_from,
            joined_before=self.granted.lineage,
        )

    async def _beat(self, interval: float) -> None:
        try:
            while not self.stopping.is_set():
                await asyncio.sleep(interval)
                await self._send(patience=PATIENCE_SECONDS)
        except GoneBack as error:
            self.lost = error
            self.stopping.set()
        except StreamRLError as error:
            self.lost = PeerLost(f"{self.name} has lost the manager: {error}")
            log.error("%s; leaving", self.lost)
            self.stopping.set()

    async def _send(self, *, error: str = "", patience: float = 0.0) -> None:
        message = Heartbeat(
            role=self.role,
            index=self.index,
            stats={} if error else {**finite(self.stats()), **processor_seconds()},
            waiting_for=self.waiting_for,
            error=error,
            failure=self.failure(),
        )
        try:
            reply = await self.client.heartbeat(message, patience=patience)
        except PeerError as refusal:
            if refusal.status != UNKNOWN or error:
                raise
            await self._register(PATIENCE_SECONDS)  # the manager no longer knows this process
            return
        self.note_version(reply.policy_version)
        if self.on_unanswering is not None:
            self.on_unanswering(reply.unanswering)
        if reply.leave:
            self.leaving.set()
        if reply.stop:
            self.stopping.set()
        elif (not reply.known or reply.lineage != self.granted.lineage) and not error:
            await self._register(PATIENCE_SECONDS)


def processor_seconds() -> dict[str, float]:
    """Return the processor seconds used by this process, and by its living children, with all their threads.

    Only children of the main thread count, and only on Linux, which lists them.
    """
    me = os.getpid()
    try:
        children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    except OSError:
        children = []
    seconds = 0.0
    for child in children:
        try:
            used = psutil.Process(int(child)).cpu_times()
        except psutil.Error:
            continue
        seconds += used.user + used.system
    return {PROCESSOR_SECONDS: time.process_time(), CHILDREN_SECONDS: seconds}


def machine_seconds() -> float:
    """Return the processor seconds used by all processes on this machine since it started, except low-priority ones
    (`nice`). Seconds that the hypervisor gave to other machines count as used."""
    used = psutil.cpu_times()
    return float(used.user + used.system + getattr(used, "steal", 0.0))
