"""Membership calls: processes register, send heartbeats, query the members and the silences, and leave.

This module only orders the steps: the registry owns the members, and callbacks carry out the consequences of a change.

A rollout worker that is to leave starts no further group and finishes its own. A gserver is given no further group and
leaves when nothing runs there. After `limits.drain_seconds`, or if it lacks the current weights, its requests are
aborted, which hands them over with their tokens: the gserver stays paused, and another one continues them.

Invariant: a gserver is requested to leave only while no weight update is in progress, and then takes part in none.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil

from streamrl.config import Config
from streamrl.errors import ConfigError, PeerError, StreamRLError
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.manager.registry import Access, Member, MemberEvent, MemberState, Registry
from streamrl.gserver.manager.run_state import RunState
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.ledger import Ledger
from streamrl.machine import process_space
from streamrl.records import lineage as lineages
from streamrl.records import progress
from streamrl.records.lineage import Lineage
from streamrl.records.timeline import HeartbeatEntry, Timeline
from streamrl.transport.addresses import host_of, is_loopback
from streamrl.transport.control import (
    LONG_POLL_SECONDS,
    AskPlace,
    Done,
    Drain,
    Heartbeat,
    HeartbeatReply,
    IndexReservation,
    Leave,
    Peer,
    Register,
    RegisterReply,
    ResumePoint,
    Role,
    Silence,
    SilentProcess,
    Topology,
)
from streamrl.transport.manager_client import GONE_BACK, PLACE_TAKEN
from streamrl.waits import cancel

log = logging.getLogger(__name__)

TRAINER_PATIENCE_SECONDS = 60.0
"""Lower bound, in seconds; a process of the trainer that is silent for longer ends the run, as nothing else would."""
ASKED_TO_LEAVE = (MemberState.DRAINING, MemberState.HANDING_OVER, MemberState.LEAVING)
"""States in which a further `drain` changes nothing."""


@dataclass(kw_only=True, eq=False)
class Members:
    """The membership calls of a run.

    A process counts as silent when it has sent nothing for a lease (`limits.silence_seconds`), a process of the trainer
    not before `TRAINER_PATIENCE_SECONDS`.
    """

    config: Config
    registry: Registry
    access: Access
    state: RunState
    timeline: Timeline
    ledger: Ledger
    calls: WeightCalls
    updating: Callable[[], bool]
    """Returns whether a weight update is in progress."""
    on_joined: Callable[[Member], None]
    on_heard: Callable[[Member], None]
    """Called with each member that has made a call; its `stats` are then those in its last heartbeat."""
    on_silent: Callable[[Member], None]
    on_left: Callable[[Member], None]
    on_died: Callable[[str], None]
    """Called with a description of a model worker's death."""
    open_to_others: bool = False
    """Whether other machines can reach the manager; every member must then be reachable from them."""

    def __post_init__(self) -> None:
        self._resume_point = _resume_point(self.config)
        self._lineage = self.ledger.lineage
        self._gone_back = False
        self._left_behind: list[Member] = []
        """Model workers of earlier lineages that have to end."""
        self._model: tuple[str, str] | None = None
        """Fingerprint of the run's first weights, and the name of the member that reported it."""
        self._configured: dict[Role, int] = {
            "gserver": self.config.gserver.count,
            "rollout": self.config.rollout.workers,
        }
        self._promised: dict[tuple[Role, int], tuple[float, Member | None]] = {}
        """Reserved indices → expiry of the reservation, and the member that held the index when it was reserved.
        Another holder means that a process has joined under it since."""
        self._draining: set[asyncio.Task[None]] = set()

    async def register(self, message: Register) -> RegisterReply:
        """Enter a process. A repeated registration, after a lost reply or an unknown membership, changes nothing.

        Raises `ConfigError` if the process has another configuration than the manager, or resumes from another
        checkpoint; `PeerError` if it trained under an earlier manager, or made groups for the trainer of that manager,
        since this manager does not know those groups and versions; and `PeerError` (423) if another process holds its
        place and is not gone, that is, neither silent nor visibly ended (`has_ended`).
        """
        if message.role == "controller":
            raise PeerError("the process at this address is the run's controller; a run has one")
        return self.enter(message)

    def enter(self, message: Register) -> RegisterReply:
        """Enter a process as `register` does, or the controller, which is this process."""
        who = f"{message.role}/{message.index}"
        sender = f"{who} (process {message.pid} on {message.host})"
        self.config.check_shared(message.settings, message.config_digest, who=sender)
        self._check_beginning(message, sender=sender)
        self._check_model(message, who=who)
        self._check_address(message, sender=sender)
        now = time.monotonic()
        member = self.registry.registered(message)
        if member is not None:
            self._hear(member, now=now)
        else:
            self._check_free(message, now=now)
            self._model = self._model or self._model_of(message)  # only from a process that passed every check
            member = self._record(message, now=now)
            before = self.registry.add(member, now=now)
            self._hear(member, now=now)
            log.info("%s joined%s", who, f" at {message.address}" if message.address else "")
            if before is not None:
                log.warning("%s: process %d on %s took the place of %d", who, member.pid, member.host, before.pid)
            self.on_joined(member)
            self.state.changed.notify()
        member.lineage = self.access.lineage
        return self.access.grant(
            member, policy_version=self.ledger.policy_version, heartbeat_seconds=self.config.limits.heartbeat_seconds
        )

    async def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        """Record a heartbeat and its figures; return the run's state for the sender.

        A heartbeat with an error ends the run, unless others can do the sender's work: it then counts as silent.
        """
        now = time.monotonic()
        member = self.registry.get(message.role, message.index)
        if message.error and (member is None or not self._goes_on_without(member)):
            self.state.end("failed", message.error)
        if member is not None:
            member.stats = message.stats
            member.waiting_for = message.waiting_for
            member.failure = message.failure
            self._hear(member, now=now)
            if message.error and not self.state.over:
                log.error("%s", message.error)
                self.registry.give_up(member)
                self._fell_silent(member)
            if self.state.over:
                self.tell_over(member)
            self._write_down(member)
        return HeartbeatReply(
            stop=self.state.over,
            policy_version=self.ledger.policy_version,
            known=member is not None,
            lineage=self.access.lineage,
            leave=member is not None and member.state is MemberState.LEAVING,
            unanswering=self.registry.unanswering(now=now) if message.role == "rollout" else [],
        )

    async def resume_point(self) -> ResumePoint:
        """Return the checkpoint that the run resumes from. Raises `PeerError` if the run is over: the next run may
        resume from another one."""
        if self.state.over:
            raise PeerError("this run is over")
        return self._resume_point

    async def silence(self, after: int) -> Silence:
        """Return the silent members and the model workers of earlier lineages, once the number of changes is not
        `after`."""
        registry = self.registry
        await self.state.changed.until(
            lambda: registry.silence_changes != after or self.state.over, timeout=LONG_POLL_SECONDS
        )
        silent = [*registry.silent(), *self._without_successor()]
        return Silence(
            changes=registry.silence_changes,
            processes=[SilentProcess(m.role, m.index, m.pid, m.host) for m in silent],
            over=self.state.over,
        )

    async def topology(self, role: Role, count: int, *, wait: float) -> Topology:
        """Return the addresses of the first `count` processes of `role`, waiting up to `wait` seconds for all."""

        def complete() -> bool:
            return all(self.registry.get(role, index) is not None for index in range(count))

        await self.state.changed.until(lambda: complete() or self.state.over, timeout=min(wait, LONG_POLL_SECONDS))
        peers = [Peer(m.role, m.index, m.address) for m in self.registry.of(role) if m.index < count]
        return Topology(peers)

    async def place(self, message: AskPlace) -> IndexReservation:
        """Reserve an index beyond the configured ones, which belong to the processes that the run was planned with.

        A rollout worker of a synchronous graph gets one of the configured indices: the master calls only these. Raises
        `PeerError` for a role of fixed size, and if all configured rollout workers are present, `ConfigError` for
        another configuration.
        """
        configured = self._configured_count(message.role, "join a running run under a new number")
        self.config.check_shared(message.settings, message.config_digest, who=f"a new {message.role}")
        now = time.monotonic()
        numbers: Iterable[int] = range(configured) if self._is_fixed(message.role) else itertools.count(configured)
        index = next((number for number in numbers if not self._taken(message.role, number, now=now)), None)
        if index is None:
            raise PeerError(
                f"all {configured} rollout workers are there (rollout.workers): in a synchronous graph the master "
                "deals groups to a fixed set of them; a new one may take the place of one that is silent"
            )
        kept_until = now + self.config.limits.start_seconds
        self._promised[message.role, index] = kept_until, self.registry.get(message.role, index)
        return IndexReservation(index)

    async def drain(self, message: Drain) -> Done:
        """Have a process leave; remove a silent one at once. Raises `PeerError` if it cannot leave.

        The controller responds to the request by writing a checkpoint and ending the run.
        """
        if message.role != "controller":
            self._configured_count(message.role, "be drained")
        member = self.registry.get(message.role, message.index)
        if member is None:
            names = ", ".join(m.name for m in self.registry.of(message.role)) or "none"
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
        member = self.registry.get(message.role, message.index)
        if member is None or member.pid != message.pid:
            return Done()
        if message.death and member.role == "model_worker":
            self.on_died(message.death)
        else:
            self._remove(member)
        return Done()

    async def close(self) -> None:
        """Stop waiting for gservers to finish their requests."""
        await cancel(*self._draining)

    def caller(self, role: Role, index: int) -> Member:
        """Return the registered process that makes a call, and count the call as a sign of life.

        Raises `PeerError` if the process is not registered, or is of an earlier lineage (409).
        """
        member = self.registry.get(role, index)
        if member is None:
            raise PeerError(f"{role}/{index} is not registered with this controller; register first")
        self._hear(member, now=time.monotonic())
        if not self.is_of_this_lineage(member):
            raise PeerError(
                f"{member.name} speaks of groups that the run has gone back behind; it registers again first",
                status=HTTPStatus.CONFLICT,
            )
        return member

    def begin_lineage(self, config: Config, lineage: Lineage) -> None:
        """Begin `lineage` from `run.resume_from` of `config`, and remove the model workers of the previous lineage."""
        self._resume_point = _resume_point(config)
        self._lineage = lineage
        self._gone_back = bool(lineage.cause)
        self._model = None
        self.access.begin_lineage(lineages.read(config.run_dir))
        present = self.registry.of("model_worker")
        self._left_behind = [*self._without_successor(), *present]
        for member in present:
            self.registry.remove(member.role, member.index)
        self.state.changed.notify()

    def _without_successor(self) -> list[Member]:
        """Return the model workers of earlier lineages that no new process has replaced yet."""
        return [member for member in self._left_behind if self.registry.get(member.role, member.index) is None]

    def is_of_this_lineage(self, member: Member) -> bool:
        """Whether `member` has registered in the present lineage, and the ledger counts in it, too."""
        return member.lineage == self.access.lineage and self.ledger.lineage is self._lineage

    def tell_over(self, member: Member) -> None:
        """Note that the reply in progress reports the end of the run to `member`."""
        member.end_reported = True
        self.state.changed.notify()

    def notice_silence(self, *, now: float) -> None:
        """Mark the members that have sent nothing for too long as silent."""
        for member in self.registry.notice_silence(now=now):
            log.warning("%s has been silent for %.0f s", member.name, member.last_heard.seconds(now=now))
            self._fell_silent(member)

    def _configured_count(self, role: Role, what: str) -> int:
        """Return the configured number of processes of `role`; raises `PeerError` for roles of fixed size."""
        if role not in self._configured:
            raise PeerError(f"a {role} cannot {what}; only gservers and rollout workers can")
        return self._configured[role]

    def _is_fixed(self, role: Role) -> bool:
        """Whether the run has exactly the configured processes of `role`, under their indices, until it ends."""
        return role == "rollout" and self.config.trainer.synchronous

    def _taken(self, role: Role, index: int, *, now: float) -> bool:
        member = self.registry.get(role, index)
        if member is not None and not member.silent:
            return True
        kept_until, before = self._promised.get((role, index), (now, None))
        return kept_until > now and member is before

    async def _empty(self, gserver: Gserver) -> None:
        """Let `gserver` finish or hand over its requests before it leaves."""
        until, load = self.state.gservers.until, gserver.load
        try:
            await until(
                lambda: not load.routed.requests or gserver.state is not MemberState.DRAINING,
                timeout=self.config.limits.drain_seconds,
            )
            await until(lambda: not self.updating())
            if load.routed.requests:
                gserver.handle(MemberEvent.OVERDUE)
            if load.routed.requests and gserver.state is MemberState.HANDING_OVER:
                log.info("%s hands over %d requests", gserver.name, load.routed.requests)
                await self.calls.pause(gserver, "abort")
        except StreamRLError as error:
            log.warning("%s is asked to leave with its requests, which start again elsewhere: %s", gserver.name, error)
        finally:
            gserver.handle(MemberEvent.EMPTIED)

    def _remove(self, member: Member) -> None:
        self.registry.remove(member.role, member.index)
        self.state.changed.notify()
        self.on_left(member)
        log.info("%s has left the run", member.name)

    def _write_down(self, member: Member) -> None:
        """Add the last heartbeat of `member` to the timeline."""
        stats = member.stats
        if member.role == "gserver" and member.state in (MemberState.SERVING, MemberState.DRAINING):
            stats = {**stats, "policy_version": float(self.ledger.policy_version)}
        self.timeline.add(
            HeartbeatEntry(
                time=time.time(),
                role=member.role,
                index=member.index,
                stats=stats,
                waiting_for=member.waiting_for,
                failure=member.failure,
            )
        )

    def _check_address(self, message: Register, *, sender: str) -> None:
        """Raise `ConfigError` for an invalid address, or one that other machines cannot reach although they have to."""
        host = host_of(message.address)
        try:
            host.encode("idna")  # as every process that connects to it does
        except UnicodeError as error:
            raise ConfigError(
                f"{sender} announces {message.address}, and {host} is no valid name of a host ({error}): give "
                "--advertise the address by which others reach it"
            ) from error
        if self.open_to_others and is_loopback(host):
            raise ConfigError(
                f"{sender} announces {message.address}, which only its own machine reaches, while the controller is "
                "open to others: join with the controller's address that others use in place of localhost, leave the "
                "hosts in the configuration empty, or give --advertise ADDRESS"
            )

    def _check_free(self, message: Register, *, now: float) -> None:
        """Raise `PeerError` if the requested place belongs to another process that is not gone."""
        holder = self.registry.get(message.role, message.index)
        if holder is None or holder.silent or has_ended(holder):
            if holder is not None and holder.role == "model_worker":
                self.on_silent(holder)
                raise PeerError(f"{holder.name} has died, and the run goes back: start it again", status=GONE_BACK)
            return
        left = holder.last_heard.silent_at - now
        log.warning(
            "process %d on %s claims to be %s, which is process %d on %s, heard %.1f s ago: refused",
            *(message.pid, message.host, holder.name, holder.pid, holder.host, holder.last_heard.seconds(now=now)),
        )
        raise PeerError(
            f"{holder.name} is process {holder.pid} on {holder.host}, heard {holder.last_heard.seconds(now=now):.1f} s "
            f"ago: process {message.pid} on {message.host} cannot be it, too; end that one, or start this one with "
            "another --index, or with none",
            status=PLACE_TAKEN,
            retry_seconds=left,
        )

    def _record(self, message: Register, *, now: float) -> Member:
        """Return a new record of the process that registers."""
        names = ("pid", "host", "machine", "process_space", "gpu", "process")
        sender: dict[str, Any] = {name: getattr(message, name) for name in names}
        patiences = {
            "controller": math.inf,
            "model_worker": max(self.config.limits.silence_seconds, TRAINER_PATIENCE_SECONDS),
        }
        patience = patiences.get(message.role, self.config.limits.silence_seconds)
        if message.role == "gserver":
            return Gserver(message.index, message.address, **sender, now=now, patience=patience)
        return Member(message.role, message.index, message.address, **sender, now=now, patience=patience)

    def _check_model(self, message: Register, *, who: str) -> None:
        """Raise `ConfigError` if the process begins with other weights than the first member that reported any."""
        if self._model is None or self._model_of(message) is None:
            return
        model, first = self._model
        if message.model != model:
            raise ConfigError(
                f"{who} on {message.host} begins with other weights than {first}: the folders that model.path (or "
                "run.resume_from) names on the two differ; bring copies of one checkpoint to all hosts"
            )

    def _model_of(self, message: Register) -> tuple[str, str] | None:
        """Return the fingerprint of the process's first weights, and its name; None if they may differ from the run's.

        A gserver may begin with any weights if it does not begin from the checkpoint that the run resumes from, because
        it has no copy or has run since an earlier start of the run: it does not serve the run's version, and
        is updated to that version before it is given groups. With [model.lora] all processes begin with the base, which
        does not change.
        """
        ours, theirs = self._resume_point.identity, message.begins_from
        same_version = theirs.partition(",")[0] == f"version {self.ledger.policy_version}"
        compared = message.role != "gserver" or not ours or theirs == ours or same_version or self.config.model.lora
        if not message.model or not compared:
            return None
        return message.model, f"{message.role}/{message.index} on {message.host}"

    def _check_beginning(self, message: Register, *, sender: str) -> None:
        """Raise unless the model worker begins at the same groups and versions as the ledger.

        Raises `PeerError` (`GONE_BACK`) if the run has gone back since the process began, `ConfigError` if it resumes
        from another checkpoint than the controller.
        """
        if message.role != "model_worker":
            return
        if message.joined_before not in ("", self.access.lineage):
            raise PeerError(
                f"{sender} has trained in a lineage that the run has gone back behind: start it again with --resume",
                status=GONE_BACK,
            )
        ours = self._resume_point.identity
        if message.begins_from != ours and self._gone_back:
            raise PeerError(f"{sender} begins from where the run no longer is: start it again", status=GONE_BACK)
        if message.begins_from != ours:
            raise ConfigError(
                f"{sender} continues from {message.begins_from or 'no checkpoint'}, and the controller from "
                f"{ours or 'no checkpoint'}: start both with the same run.resume_from; with --resume the trainer takes "
                "the controller's"
            )

    def _goes_on_without(self, member: Member) -> bool:
        """Whether other processes can do the work of `member`, which has reported an error that ends it.

        An error that occurs in every rollout worker, such as a reward function that cannot be loaded, has to end the
        run with its message, and at once. Hence only rollout workers that have finished a group since they began count
        as able to continue.
        """
        if member.role == "gserver":
            return True  # the run waits until a gserver is started again
        return (
            member.role == "rollout"
            and not self._is_fixed("rollout")
            and any(
                other.stats.get("groups_done_total", 0.0) > 0
                for other in self.registry.of("rollout")
                if other is not member and other.state is MemberState.SERVING
            )
        )

    def _fell_silent(self, member: Member) -> None:
        self.state.changed.notify()
        self.on_silent(member)

    def _hear(self, member: Member, *, now: float) -> None:
        if self.registry.hear(member, now=now):
            log.warning("%s is heard of again", member.name)
            self.state.changed.notify()
        if member.state is not MemberState.GAVE_UP:
            self.on_heard(member)


def _resume_point(config: Config) -> ResumePoint:
    folder = config.run.resume_from
    return ResumePoint(checkpoint=Path(folder).name if folder else "", identity=progress.identity(config))


def has_ended(member: Member) -> bool:
    """Whether the process of `member` has visibly ended: it shares a process space with this one, and is gone."""
    if not member.process_space or member.process_space != process_space():
        return False
    try:
        return bool(psutil.Process(member.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return not _is_hidden(member.pid)
    except psutil.Error:
        return False


def _is_hidden(pid: int) -> bool:
    """Whether a process `pid` exists that /proc does not show, such as one of another user under `hidepid=2`."""
    try:
        os.kill(pid, 0)  # sends no signal
    except PermissionError:  # the process exists
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
