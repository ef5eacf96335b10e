"""What the gserver manager decides: membership, admission, routing, versions, the end of the run.

Wires the registry, the ledger, the fleet of gservers and the weight updates together; one method
for each call of `transport/control.py`. State changes happen between two awaits of one event loop,
and every change that somebody may wait for ends in `_changed.notify()`.

Invariants: a group is admitted only into the ledger's room and only together with a gserver that
serves; a run that is over admits nothing and says so to everyone.
"""

from __future__ import annotations

import logging
import time
from typing import Literal

from streamrl import progress
from streamrl.config import Config
from streamrl.errors import ConfigError, PeerError
from streamrl.gserver.admissions import Admissions
from streamrl.gserver.checks import GserverChecks
from streamrl.gserver.evaluations import Evaluations
from streamrl.gserver.manager_status import RunState, build_status, waits_for_members
from streamrl.gserver.registry import Member, Registry
from streamrl.gserver.rerouting import Rerouting
from streamrl.gserver.routing import Fleet, Standing
from streamrl.gserver.timeline import HeartbeatEntry, Timeline
from streamrl.gserver.wakeup import Wakeup
from streamrl.gserver.weight_calls import WeightCalls
from streamrl.gserver.weight_update import UpdateRecord
from streamrl.gserver.weights import WeightUpdates
from streamrl.ledger import Ledger
from streamrl.transport.control import (
    LONG_POLL_SECONDS,
    Admit,
    AdmitReply,
    DataFacts,
    Done,
    FinishRun,
    Heartbeat,
    HeartbeatReply,
    Peer,
    PublishBegin,
    PublishBeginReply,
    PublishCommit,
    PublishReply,
    Register,
    RegisterReply,
    Reject,
    Rejections,
    Role,
    Route,
    RouteReply,
    Settle,
    Status,
    StepReport,
    Topology,
    Wanted,
)
from streamrl.transport.generation import GenerationClient

log = logging.getLogger(__name__)

MASTER_PATIENCE_SECONDS = 60.0
"""At least; a master silent for longer ends the run, since nobody else would."""


class Manager:
    """One run. `watch` has to run beside the calls; `close` ends what is in progress."""

    def __init__(
        self,
        config: Config,
        *,
        client: GenerationClient,
        timeline: Timeline,
        long_poll_seconds: float = LONG_POLL_SECONDS,
        master_patience_seconds: float = MASTER_PATIENCE_SECONDS,
    ) -> None:
        self.pause_seconds_total = 0.0
        """Sum of the longest pauses of generation of all updates."""
        lease = config.manager.lease_seconds
        self._config = config
        self._digest = config.digest()
        self._timeline = timeline
        self._long_poll = long_poll_seconds
        self._changed = Wakeup()
        self._deadline_moved_closer = Wakeup()
        self._registry = Registry(
            patience={
                "gserver": lease,
                "rollout": lease,
                "evaluator": lease,
                "model_worker": lease,
                "master": max(lease, master_patience_seconds),
            }
        )
        self._ledger = Ledger(
            groups_per_batch=config.trainer.batch_groups,
            max_staleness=config.staleness.max_staleness,
            lease_seconds=lease,
        )
        self._data_rows = 0
        begun = progress.of_run(config)
        if begun is not None:
            if begun.data_rows:
                self._set_data_rows(begun.data_rows)
            self._ledger.restore(
                policy_version=begun.policy_version,
                trained=list(begun.trained_seqs()),
                rejected=list(begun.rejected_seqs()),
            )
            log.info("the run goes on at version %d, after %d groups", begun.policy_version, begun.groups_trained)
        self._fleet = Fleet()
        self._admissions = Admissions(ledger=self._ledger, fleet=self._fleet)
        calls = WeightCalls(client, timeout=config.weights.timeout_seconds)
        self._checks = GserverChecks(
            calls=calls,
            version=lambda: self._ledger.policy_version,
            on_checked=self._gserver_checked,
        )
        self._weights = WeightUpdates(
            config=config.weights,
            fleet=self._fleet,
            changed=self._changed,
            calls=calls,
            on_version=self._version_served,
            on_record=self._update_ended,
            on_hopeless=lambda reason: self._end("failed", reason),
            version=self._ledger.policy_version,
        )
        self._state = RunState()
        self._rerouting = Rerouting(
            fleet=self._fleet,
            checks=self._checks,
            changed=self._changed,
            over=lambda: self._state.over,
            long_poll_seconds=long_poll_seconds,
        )
        self.evaluations = Evaluations(
            fleet=self._fleet,
            changed=self._changed,
            rerouting=self._rerouting,
            evaluator=lambda index: self._member("evaluator", index),
            on_training_over=self._stop_admitting,
            over=lambda: self._state.over,
            long_poll_seconds=long_poll_seconds,
        )
        self._join_deadline: float | None = time.monotonic() + config.manager.join_timeout_seconds
        self._admitting = False  # until the gservers have joined
        self._training_over = False
        self._last_step: StepReport | None = None

    @property
    def admitted(self) -> int:
        """Groups given out, those given out again included."""
        return self._admissions.admitted

    # Membership

    async def register(self, message: Register) -> RegisterReply:
        who = f"{message.role}/{message.index}"
        if message.config_digest != self._digest:
            raise ConfigError(
                f"{who} (process {message.pid} on {message.host}) has another configuration than the manager: "
                f"{message.config_digest} instead of {self._digest}; start all processes of a run with the same "
                "file and the same overrides ([run] and [manager] may differ)"
            )
        now = time.monotonic()
        before = self._registry.get(message.role, message.index)
        member, fresh = self._registry.register(message, now=now)
        self._hear(member, now=now)
        if fresh:
            log.info("%s joined%s", who, f" at {message.address}" if message.address else "")
            if before is not None:
                log.warning("%s: process %d on %s took the place of %d", who, member.pid, member.host, before.pid)
            self._took_place(member)
        self._deadline_moved_closer.notify()
        self._changed.notify()
        return RegisterReply(
            policy_version=self._ledger.policy_version, heartbeat_seconds=self._config.manager.heartbeat_seconds
        )

    async def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        if message.error and message.role != "gserver":
            self._end("failed", message.error)
        member = self._registry.get(message.role, message.index)
        if member is not None:
            self._hear(member, now=time.monotonic())
            member.stats = message.stats
            member.waiting_for = message.waiting_for
            member.told = self._state.over
            if message.error and member.role == "gserver":  # its requests go on at others
                log.error("%s", message.error)
                self._registry.leaves(member)
                self._fell_silent(member)
            if member.role in ("gserver", "rollout"):
                self._timeline.heartbeat(
                    HeartbeatEntry(
                        time=time.time(),
                        role=member.role,
                        index=member.index,
                        stats=member.stats,
                        waiting_for=member.waiting_for,
                    )
                )
            self._changed.notify()
        return HeartbeatReply(
            stop=self._state.over, policy_version=self._ledger.policy_version, known=member is not None
        )

    async def topology(self, role: Role, count: int, *, wait: float) -> Topology:
        def complete() -> bool:
            return all(self._registry.get(role, index) is not None for index in range(count))

        await self._changed.until(lambda: complete() or self._state.over, timeout=min(wait, self._long_poll))
        peers = [Peer(m.role, m.index, m.address) for m in self._registry.of(role) if m.index < count]
        return Topology(complete=complete(), peers=peers)

    # Groups

    async def admit(self, message: Admit) -> AdmitReply:
        member = self._member("rollout", message.worker)
        if message.data_rows:
            self._compare_data_rows(member, message.data_rows)
        await self._changed.until(
            lambda: (
                self._state.over
                or self._admissions.given(member.name, message.ticket) is not None
                or (self._admitting and self._admissions.possible)
            ),
            timeout=self._long_poll,
        )
        admissions = []
        if self._state.over:
            member.told = True
            self._changed.notify()
        elif self._admitting:
            admissions = self._admissions.take(
                member.name,
                message.count,
                workers=sum(not m.silent for m in self._registry.of("rollout")),
                ticket=message.ticket,
                now=time.monotonic(),
            )
            self._changed.notify()
        return AdmitReply(admissions=admissions, policy_version=self._ledger.policy_version, stop=self._state.over)

    async def route(self, message: Route) -> RouteReply:
        member = self._member("rollout", message.worker)
        if self._state.over:
            return RouteReply(gserver="")
        found = await self._rerouting.find(
            lambda avoid: self._admissions.reroute(member.name, message.seq, avoid=avoid), failed=message.failed
        )
        return RouteReply(gserver=found)

    async def reject(self, message: Reject) -> Done:
        self._admissions.reject(f"rollout/{message.worker}", message.seq, message.reason)
        self._changed.notify()
        return Done()

    async def settle(self, message: Settle) -> Done:
        self._admissions.settle(message.finished, message.dropped)
        self._changed.notify()
        return Done()

    async def rejections(self, after: int) -> Rejections:
        rejected = self._ledger.rejected
        await self._changed.until(lambda: len(rejected) > after or self._state.over, timeout=self._long_poll)
        return Rejections(rejected=rejected[after:])

    async def data(self) -> DataFacts:
        await self._changed.until(lambda: self._data_rows > 0 or self._state.over, timeout=self._long_poll)
        return DataFacts(rows=self._data_rows)

    # Weights and steps

    async def publish_begin(self, message: PublishBegin) -> PublishBeginReply:
        return await self._weights.begin(message)

    async def publish_commit(self, message: PublishCommit) -> PublishReply:
        return await self._weights.commit(message)

    async def weights_wanted(self) -> Wanted:
        await self._changed.until(lambda: bool(self._weights.wanted()) or self._state.over, timeout=self._long_poll)
        return Wanted(
            version=self._weights.version,
            gservers=[g.name for g in self._weights.wanted()],
            serving=len(self._fleet.serving()),
        )

    async def report(self, message: StepReport) -> Done:
        self._last_step = message
        return Done()

    # The end

    async def finish_run(self, message: FinishRun) -> Done:
        if message.error:
            self._end("failed", message.error)
        else:
            self._end("finished", message.reason)
        for master in self._registry.of("master"):
            master.told = True
        self._changed.notify()
        return Done()

    async def wait_until_told(self, *, timeout: float) -> None:
        """Until the run is over and every live member knows, at most `timeout` seconds after its end."""
        await self._changed.until(lambda: self._state.over, timeout=None)
        if not await self._changed.until(lambda: not self._registry.untold(), timeout=timeout):
            names = ", ".join(m.name for m in self._registry.untold())
            log.warning("the manager leaves although these did not ask whether the run is over: %s", names)

    def status(self) -> Status:
        return build_status(
            config=self._config,
            state=self._state,
            registry=self._registry,
            fleet=self._fleet,
            ledger=self._ledger,
            last_step=self._last_step,
            publication=self._weights.status(),
            data_rows=self._data_rows,
            evaluation=self.evaluations.status() if self._config.evaluation.enabled else None,
            now=time.monotonic(),
        )

    async def watch(self) -> None:
        """Let leases run out and members fall silent, each at its time."""
        while True:
            now = time.monotonic()
            for member in self._registry.silence(now=now):
                self._fell_silent(member)
            self._admissions.expire(now=now)
            if self._join_deadline is not None and now >= self._join_deadline:
                self._joining_took_too_long()
            self._changed.notify()
            deadlines = (self._registry.next_silence(), self._admissions.next_expiry(), self._join_deadline)
            known = [deadline for deadline in deadlines if deadline is not None]
            timeout = min(known) - time.monotonic() if known else None
            await self._deadline_moved_closer.sleep(timeout)

    async def close(self) -> None:
        """Stop: who waits for an answer is told that the run is over, paused gservers are resumed."""
        self._end("failed", "the manager was stopped")
        await self._weights.close()
        await self._checks.close()

    # What follows from what

    def _member(self, role: Role, index: int) -> Member:
        member = self._registry.get(role, index)
        if member is None:
            raise PeerError(f"{role}/{index} is not registered with this manager; register first")
        self._hear(member, now=time.monotonic())
        return member

    def _compare_data_rows(self, member: Member, rows: int) -> None:
        if not self._data_rows:
            self._set_data_rows(rows)
            self._changed.notify()
        elif rows != self._data_rows:
            self._end(
                "failed",
                f"{member.name} has {rows} rows of training data, the run has {self._data_rows}: sequence numbers "
                "would mean other prompts; give all workers the same data set, also when the run is resumed",
            )

    def _set_data_rows(self, rows: int) -> None:
        self._data_rows = rows
        epochs = self._config.run.total_train_epochs
        self._ledger.ends_after = None if epochs is None else epochs * rows

    def _hear(self, member: Member, *, now: float) -> None:
        was_silent = self._registry.hear(member, now=now)
        if was_silent:
            log.warning("%s is heard of again", member.name)
            self._deadline_moved_closer.notify()
        if member.role == "rollout":
            self._ledger.renew(member.name, now=now)
        elif member.role == "gserver":
            self._gserver_heard(member.index, was_silent=was_silent)

    def _gserver_heard(self, index: int, *, was_silent: bool) -> None:
        gserver = self._fleet.get(index)
        if gserver is None:
            return
        self._fleet.news += 1
        if was_silent:
            gserver.standing = Standing.UNCHECKED
        if gserver.standing is Standing.UNCHECKED:
            self._checks.start(gserver)

    def _took_place(self, member: Member) -> None:
        if member.role == "gserver":
            self._checks.start(self._fleet.join(member.index, member.address, host=member.host))
            self._fleet.news += 1
        elif member.role == "rollout":
            self._admissions.worker_replaced(member.name)
        elif member.role == "evaluator":
            self.evaluations.lost(member.name)
        if self._state.name == "joining" and not waits_for_members(self._registry, self._config):
            self._state.name = "running"
            log.info("all processes have joined")

    def _fell_silent(self, member: Member) -> None:
        log.warning("%s has been silent for %.0f s", member.name, time.monotonic() - member.heard)
        if member.role == "gserver":
            gserver = self._fleet.get(member.index)
            if gserver is not None:
                gserver.standing = Standing.SILENT
            if not self._fleet.serving():
                log.error("no gserver is left to generate; the run waits for one to (re)join")
        elif member.role == "evaluator":
            self.evaluations.lost(member.name)
        elif member.role == "master" and not self._state.over:
            self._end("failed", f"{member.name} has been silent for {time.monotonic() - member.heard:.0f} s")

    def _gserver_checked(self) -> None:
        self._weights.look_for_laggards()
        if len(self._fleet.serving()) >= self._config.gserver.count:
            self._start_admitting()
        self._changed.notify()

    def _joining_took_too_long(self) -> None:
        self._join_deadline = None
        self._start_admitting()
        missing = waits_for_members(self._registry, self._config)
        if missing:
            log.warning("after %.0f s the run still waits for %s", self._config.manager.join_timeout_seconds, missing)

    def _start_admitting(self) -> None:
        self._admitting = not self._training_over
        self._changed.notify()

    def _stop_admitting(self) -> None:
        self._training_over = True
        self._admitting = False

    def _version_served(self, version: int) -> None:
        self._ledger.advance(version)
        self._start_admitting()

    def _update_ended(self, record: UpdateRecord) -> None:
        self.pause_seconds_total += record.pause_seconds
        self._timeline.publication(record)
        self._changed.notify()

    def _end(self, name: Literal["finished", "failed"], message: str) -> None:
        if self._state.over:
            return
        self._state.end(name, message)
        log.log(logging.ERROR if name == "failed" else logging.INFO, "the run is over (%s): %s", name, message)
        self._changed.notify()
