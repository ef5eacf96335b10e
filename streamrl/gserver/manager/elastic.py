"""Elastic pools: indices for processes that join a running run, and the procedure by which processes leave it.

A rollout worker that is to leave starts no further group and finishes its own. A gserver is given no further group and
leaves when nothing runs there. After `limits.drain_seconds`, or if it lacks the current weights, its requests are
aborted, which hands them over with their tokens: the gserver stays paused, and another one continues them.

Invariant: a gserver is requested to leave only while no weight update is in progress, and then takes part in none.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable

from streamrl.config import Config
from streamrl.errors import PeerError, StreamRLError
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.manager.member_states import MemberEvent, MemberState
from streamrl.gserver.manager.registry import Member, Registry
from streamrl.gserver.manager.routing import Fleet
from streamrl.gserver.manager.run_state import Signals
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.transport.control import AskPlace, Done, Drain, IndexReservation, Leave, Role

log = logging.getLogger(__name__)

ASKED_TO_LEAVE = (MemberState.DRAINING, MemberState.HANDING_OVER, MemberState.LEAVING)
"""States in which a further `drain` changes nothing."""


class ElasticPools:
    """The calls with which processes join and leave a running run.

    `updating` returns whether a weight update is in progress. `on_left` is called with each member that has left,
    `on_died` with a description of a model worker's death.
    """

    def __init__(
        self,
        *,
        config: Config,
        registry: Registry,
        fleet: Fleet,
        signals: Signals,
        calls: WeightCalls,
        updating: Callable[[], bool],
        on_left: Callable[[Member], None],
        on_died: Callable[[str], None],
    ) -> None:
        self._config = config
        self._configured: dict[Role, int] = {"gserver": config.gserver.count, "rollout": config.rollout.workers}
        self._registry = registry
        self._fleet = fleet
        self._signals = signals
        self._calls = calls
        self._updating = updating
        self._on_left = on_left
        self._on_died = on_died
        self._promised: dict[tuple[Role, int], tuple[float, Member | None]] = {}
        """Reserved indices → expiry of the reservation, and the member that held the index when it was reserved.
        Another holder means that a process has joined under it since."""
        self._draining: set[asyncio.Task[None]] = set()

    async def place(self, message: AskPlace) -> IndexReservation:
        """Reserve an index beyond the configured ones, which belong to the processes that the run was planned with.

        A rollout worker of a synchronous graph gets one of the configured indices: the master calls only these. Raises
        `PeerError` for a role of fixed size, and if all configured rollout workers are present, `ConfigError` for
        another configuration.
        """
        configured = self._configured_count(message.role, "join a running run under a new number")
        self._config.check_shared(message.settings, message.config_digest, who=f"a new {message.role}")
        now = time.monotonic()
        numbers: Iterable[int] = range(configured) if self._is_fixed(message.role) else itertools.count(configured)
        index = next((number for number in numbers if not self._taken(message.role, number, now=now)), None)
        if index is None:
            raise PeerError(
                f"all {configured} rollout workers are there (rollout.workers): in a synchronous graph the master "
                "deals groups to a fixed set of them; a new one may take the place of one that is silent"
            )
        kept_until = now + self._config.limits.start_seconds
        self._promised[message.role, index] = kept_until, self._registry.get(message.role, index)
        return IndexReservation(index)

    async def drain(self, message: Drain) -> Done:
        """Have a process leave; remove a silent one at once. Raises `PeerError` if it cannot leave.

        The controller responds to the request by writing a checkpoint and ending the run.
        """
        if message.role != "controller":
            self._configured_count(message.role, "be drained")
        member = self._registry.get(message.role, message.index)
        if member is None:
            names = ", ".join(m.name for m in self._registry.of(message.role)) or "none"
            raise PeerError(f"{message.role}/{message.index} is not in this run; there are: {names}")
        if self._is_fixed(message.role):
            raise PeerError("in a synchronous graph the master deals groups to a fixed set of rollout workers")
        if member.silent:
            self._remove(member)
        elif member.state not in ASKED_TO_LEAVE:
            member.handle(MemberEvent.DRAINED)
            log.info("%s is asked to leave", member.name)
            if isinstance(member, Gserver):
                task = asyncio.create_task(self._empty(member), name=f"drain {member.name}")
                self._draining.add(task)
                task.add_done_callback(self._draining.discard)
            else:
                member.handle(MemberEvent.EMPTIED)  # it finishes its groups by itself
        return Done()

    async def left(self, message: Leave) -> Done:
        """Note that a process has left, or that a model worker has died."""
        member = self._registry.get(message.role, message.index)
        if member is None or member.pid != message.pid:
            return Done()
        if message.death and member.role == "model_worker":
            self._on_died(message.death)
        else:
            self._remove(member)
        return Done()

    async def close(self) -> None:
        """Stop waiting for gservers to finish their requests."""
        for task in self._draining:
            task.cancel()
        await asyncio.gather(*self._draining, return_exceptions=True)

    def _configured_count(self, role: Role, what: str) -> int:
        """Return the configured number of processes of `role`; raises `PeerError` for roles of fixed size."""
        if role not in self._configured:
            raise PeerError(f"a {role} cannot {what}; only gservers and rollout workers can")
        return self._configured[role]

    def _is_fixed(self, role: Role) -> bool:
        """Whether the run has exactly the configured processes of `role`, under their indices, until it ends."""
        return role == "rollout" and self._config.trainer.synchronous

    def _taken(self, role: Role, index: int, *, now: float) -> bool:
        member = self._registry.get(role, index)
        if member is not None and not member.silent:
            return True
        kept_until, before = self._promised.get((role, index), (now, None))
        return kept_until > now and member is before

    async def _empty(self, gserver: Gserver) -> None:
        """Let `gserver` finish or hand over its requests before it leaves."""
        until, seconds = self._signals.gservers.until, self._config.limits.drain_seconds
        try:
            await until(
                lambda: not gserver.load.routed.requests or gserver.state is not MemberState.DRAINING, timeout=seconds
            )
            await until(lambda: not self._updating(), timeout=None)
            if requests := gserver.load.routed.requests:
                gserver.handle(MemberEvent.OVERDUE)
                if gserver.state is MemberState.HANDING_OVER:
                    log.info("%s hands over %d requests", gserver.name, requests)
                    await self._hand_over(gserver)
        finally:
            gserver.handle(MemberEvent.EMPTIED)

    async def _hand_over(self, gserver: Gserver) -> None:
        try:
            await self._calls.pause(gserver, "abort")
        except StreamRLError as error:
            log.warning("%s is asked to leave with its requests, which start again elsewhere: %s", gserver.name, error)

    def _remove(self, member: Member) -> None:
        self._registry.remove(member.role, member.index)
        self._on_left(member)
        log.info("%s has left the run", member.name)
