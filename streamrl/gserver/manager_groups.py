"""The manager's calls about groups: admitted with a gserver, routed anew, given up, settled.

Invariant: a group is admitted only into the ledger's room and only together with a gserver that serves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from streamrl import progress
from streamrl.config import Config
from streamrl.gserver.admissions import Admissions
from streamrl.gserver.load import Work
from streamrl.gserver.manager_members import Members
from streamrl.gserver.registry import Member
from streamrl.gserver.rerouting import Rerouting
from streamrl.gserver.run_state import RunState, Signals
from streamrl.ledger import Ledger
from streamrl.transport.control.groups import (
    Admission,
    Admit,
    AdmitReply,
    DataFacts,
    InFlight,
    Reject,
    Rejections,
    Route,
    RouteReply,
    Settle,
)
from streamrl.transport.control.members import Done

log = logging.getLogger(__name__)


class Groups:
    """`live_workers` tells how many rollout workers share the room. Nothing is admitted before `start`."""

    def __init__(
        self,
        *,
        config: Config,
        ledger: Ledger,
        admissions: Admissions,
        rerouting: Rerouting,
        members: Members,
        state: RunState,
        signals: Signals,
        live_workers: Callable[[], int],
        long_poll_seconds: float,
    ) -> None:
        self.data_rows = 0
        """Of the training data; 0: not known yet."""
        self._epochs = config.run.total_train_epochs
        self._ledger = ledger
        self._admissions = admissions
        self._rerouting = rerouting
        self._members = members
        self._state = state
        self._signals = signals
        self._live_workers = live_workers
        self._long_poll = long_poll_seconds
        self._admitting = False
        self._training_over = False
        begun = progress.of_run(config)
        if begun is not None:
            if begun.data_rows:
                self._set_data_rows(begun.data_rows)
            ledger.restore(
                policy_version=begun.policy_version,
                trained=list(begun.trained_seqs()),
                rejected=list(begun.rejected_seqs()),
            )
            log.info("the run goes on at version %d, after %d groups", begun.policy_version, begun.groups_trained)

    def start(self) -> None:
        """Admit from now on, unless training is over."""
        self._admitting = not self._training_over
        self._signals.admissions.wake()

    def stop(self) -> None:
        """Training is over: no further group starts."""
        self._training_over = True
        self._admitting = False

    async def admit(self, message: Admit) -> AdmitReply:
        member = self._members.caller("rollout", message.worker)
        if message.data_rows:
            self._compare_data_rows(member, message.data_rows)

        def attempt() -> list[Admission] | None:
            given = self._admissions.given(member.name, message.ticket)
            if given is not None or not (self._admitting and self._admissions.possible):
                return given
            return self._admissions.take(
                member.name,
                message.count,
                workers=self._live_workers(),
                ticket=message.ticket,
                now=time.monotonic(),
            )

        admissions = None if self._state.over else await self._signals.admissions.find(attempt, timeout=self._long_poll)
        if self._state.over:
            self._members.tell_over(member)
            admissions = None
        return AdmitReply(
            admissions=admissions or [], policy_version=self._ledger.policy_version, stop=self._state.over
        )

    async def route(self, message: Route) -> RouteReply:
        member = self._members.caller("rollout", message.worker)
        if self._state.over:
            return RouteReply(gserver="")
        found = await self._rerouting.find(
            lambda avoid: self._admissions.reroute(member.name, message.seq, avoid=avoid, now=time.monotonic()),
            failed=message.failed,
        )
        return RouteReply(gserver="" if self._state.over else found)

    async def in_flight(self, message: InFlight) -> Done:
        now = time.monotonic()
        worker = self._members.caller("rollout", message.worker).name
        for group in message.groups:
            self._admissions.in_flight(worker, group.seq, Work(group.requests, group.tokens), now=now)
        return Done()

    async def reject(self, message: Reject) -> Done:
        self._admissions.reject(f"rollout/{message.worker}", message.seq, message.reason)
        self._signals.rejected.notify()
        self._signals.admissions.wake()
        return Done()

    async def settle(self, message: Settle) -> Done:
        self._admissions.settle(message.groups)
        self._signals.admissions.wake()
        return Done()

    async def rejections(self, after: int) -> Rejections:
        rejected = self._ledger.rejections
        await self._signals.rejected.until(lambda: len(rejected) > after or self._state.over, timeout=self._long_poll)
        return Rejections(rejected=rejected[after:])

    async def data(self) -> DataFacts:
        await self._signals.data.until(lambda: self.data_rows > 0 or self._state.over, timeout=self._long_poll)
        return DataFacts(rows=self.data_rows)

    def _compare_data_rows(self, member: Member, rows: int) -> None:
        if not self.data_rows:
            self._set_data_rows(rows)
            self._signals.data.notify()
        elif rows != self.data_rows:
            self._state.end(
                "failed",
                f"{member.name} has {rows} rows of training data, the run has {self.data_rows}: sequence numbers "
                "would mean other prompts; give all workers the same data set, also when the run is resumed",
            )

    def _set_data_rows(self, rows: int) -> None:
        self.data_rows = rows
        self._ledger.ends_after = None if self._epochs is None else self._epochs * rows
