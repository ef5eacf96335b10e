"""The calls with which processes take part: they register, beat, ask who is there and who is silent, and are told of
the end.

Owns nothing but the order of things: the registry says who is there, and what follows from a change is
told to `on_joined`, `on_heard` and `on_silent`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil

from streamrl.config import Config
from streamrl.errors import ConfigError, PeerError
from streamrl.gserver.manager.access import Access
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.manager.member_states import MemberState
from streamrl.gserver.manager.registry import Member, Registry
from streamrl.gserver.manager.run_state import RunState, Signals
from streamrl.ledger import Ledger
from streamrl.machine import process_space
from streamrl.records import lineage as lineages
from streamrl.records import progress
from streamrl.records.lineage import Lineage
from streamrl.records.timeline import HeartbeatEntry, Timeline
from streamrl.transport.addresses import host_of, is_loopback
from streamrl.transport.control import (
    AskMember,
    Heartbeat,
    HeartbeatReply,
    IsMember,
    Peer,
    Register,
    RegisterReply,
    ResumePoint,
    Role,
    Silence,
    SilentProcess,
    Topology,
)
from streamrl.transport.credentials import HEARS
from streamrl.transport.manager_client import GONE_BACK, PLACE_TAKEN

log = logging.getLogger(__name__)


class Members:
    """Whoever says nothing for a lease (`manager.lease_seconds`) counts as silent, a process of the trainer not before
    `trainer_patience_seconds`.

    `open_to_others`: whether the manager can be reached from other machines, so that all must be.

    `on_heard` is called whenever a member said something; its `stats` are then those of its last heartbeat.
    """

    def __init__(
        self,
        *,
        config: Config,
        registry: Registry,
        access: Access,
        trainer_patience_seconds: float,
        state: RunState,
        timeline: Timeline,
        signals: Signals,
        ledger: Ledger,
        on_joined: Callable[[Member], None],
        on_heard: Callable[[Member], None],
        on_silent: Callable[[Member], None],
        long_poll_seconds: float,
        open_to_others: bool = False,
    ) -> None:
        self._config = config
        self._open = open_to_others
        self._resume_point = _resume_point(config)
        self._lineage = ledger.lineage
        self._gone_back = False
        self._left_behind: list[Member] = []
        """Model workers of earlier lineages that have to end."""
        self._model: tuple[str, str] | None = None
        """The fingerprint of the run's first weights, and who told it."""
        self._elastic = not config.trainer.synchronous
        """Whether groups are given to whichever rollout workers there are."""
        self._heartbeat_seconds = config.manager.heartbeat_seconds
        self._registry = registry
        self._access = access
        self._lease = config.manager.lease_seconds
        self._trainer_patience = max(self._lease, trainer_patience_seconds)
        self._state = state
        self._timeline = timeline
        self._signals = signals
        self._ledger = ledger
        self._on_joined = on_joined
        self._on_heard = on_heard
        self._on_silent = on_silent
        self._long_poll = long_poll_seconds

    async def register(self, message: Register) -> RegisterReply:
        """Enter a process; one that registers again, because its reply was lost or it was not known, changes nothing.

        Raises `ConfigError` when it has another configuration than the manager, or goes on from another checkpoint;
        `PeerError` when it trained under an earlier manager, or made groups for that one's trainer, whose groups and
        versions this one does not know; and `PeerError` (423) when another process has its place that is not gone:
        neither silent nor, where it can be seen from here, ended.
        """
        if message.role == "controller":
            raise PeerError("the process at this address is the run's controller; a run has one")
        return self.enter(message)

    def enter(self, message: Register) -> RegisterReply:
        """As `register`; also enters the controller, which this process is."""
        who = f"{message.role}/{message.index}"
        sender = f"{who} (process {message.pid} on {message.host})"
        self._config.check_shared(message.settings, message.config_digest, who=sender)
        self._check_beginning(message, sender=sender)
        self._check_model(message, who=who)
        self._check_address(message, sender=sender)
        now = time.monotonic()
        member = self._registry.registered(message)
        if member is not None:
            self._hear(member, now=now)
        else:
            self._check_free(message, now=now)
            self._model = self._model or self._model_of(message)  # of one that is not refused for any reason
            member = self._record(message, now=now)
            before = self._registry.add(member, now=now)
            self._hear(member, now=now)
            log.info("%s joined%s", who, f" at {message.address}" if message.address else "")
            if before is not None:
                log.warning("%s: process %d on %s took the place of %d", who, member.pid, member.host, before.pid)
            self._on_joined(member)
            self._signals.deadlines.notify()
            self._signals.joined.notify()
        member.lineage = self._access.lineage
        return self._access.grant(
            member, policy_version=self._ledger.policy_version, heartbeat_seconds=self._heartbeat_seconds
        )

    async def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        """Record a heartbeat and its figures; return what its sender has to know. A heartbeat with an error ends the
        run, unless others can do the sender's work: it counts as silent then."""
        now = time.monotonic()
        member = self._registry.get(message.role, message.index)
        if message.error and (member is None or not self._goes_on_without(member)):
            self._state.end("failed", message.error)
        if member is not None:
            member.stats = message.stats
            member.waiting_for = message.waiting_for
            member.failure = message.failure
            self._hear(member, now=now)
            if message.error and not self._state.over:
                log.error("%s", message.error)
                self._registry.give_up(member)
                self._fell_silent(member)
            if self._state.over:
                self.tell_over(member)
            self._write_down(member)
        return HeartbeatReply(
            stop=self._state.over,
            policy_version=self._ledger.policy_version,
            known=member is not None,
            lineage=self._access.lineage,
            leave=member is not None and member.state is MemberState.LEAVING,
            unanswering=self._registry.unanswering(now=now) if message.role == "rollout" else [],
        )

    async def resume_point(self) -> ResumePoint:
        """Return what the run goes on from. Raises `PeerError` when it is over: the next one may go on from another."""
        if self._state.over:
            raise PeerError("this run is over")
        return self._resume_point

    async def silence(self, after: int) -> Silence:
        """Return who is silent, and the model workers of earlier lineages, as soon as that has changed since the number
        of changes `after`."""
        registry = self._registry
        await self._signals.silences.until(
            lambda: registry.silence_changes != after or self._state.over, timeout=self._long_poll
        )
        silent = [*registry.silent(), *self._without_successor()]
        return Silence(
            changes=registry.silence_changes,
            processes=[SilentProcess(m.role, m.index, m.pid, m.host) for m in silent],
            over=self._state.over,
        )

    async def topology(self, role: Role, count: int, *, wait: float) -> Topology:
        """Return the addresses of the first `count` processes of `role`, waiting up to `wait` seconds for all."""

        def complete() -> bool:
            return all(self._registry.get(role, index) is not None for index in range(count))

        await self._signals.joined.until(lambda: complete() or self._state.over, timeout=min(wait, self._long_poll))
        peers = [
            Peer(m.role, m.index, m.address, m.curve_key if m.encrypted else "")
            for m in self._registry.of(role)
            if m.index < count
        ]
        return Topology(complete=complete(), peers=peers)

    async def is_member(self, message: AskMember) -> IsMember:
        """Return whether a key is that of a member who has anything to say over ZMQ."""
        member = self._registry.with_curve_key(message.curve_key)
        return IsMember(known=member is not None and any(member.role in heard for heard in HEARS.values()))

    def caller(self, role: Role, index: int) -> Member:
        """Return the registered process that makes a call, which is a sign of life; raises `PeerError` for a
        stranger."""
        member = self._registry.get(role, index)
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
        """Forget the model workers of the lineage before this one, which begins from `run.resume_from` of `config`."""
        self._resume_point = _resume_point(config)
        self._lineage = lineage
        self._gone_back = bool(lineage.cause)
        self._model = None
        self._access.begin_lineage(lineages.read(config.run_dir))
        present = self._registry.of("model_worker")
        self._left_behind = [*self._without_successor(), *present]
        for member in present:
            self._registry.remove(member.role, member.index)
        self._signals.silences.notify()

    def _without_successor(self) -> list[Member]:
        """Return the model workers of earlier lineages whose places no other process has taken yet."""
        return [member for member in self._left_behind if self._registry.get(member.role, member.index) is None]

    def is_of_this_lineage(self, member: Member) -> bool:
        """Whether `member` has heard that the run has gone back, if it has, and the ledger counts from there."""
        return member.lineage == self._access.lineage and self._ledger.lineage is self._lineage

    def tell_over(self, member: Member) -> None:
        """Note that `member` is told, in the reply that is under way, that the run is over."""
        member.end_reported = True
        self._signals.told.notify()

    def notice_silence(self, *, now: float) -> None:
        """Mark those who said nothing for too long as silent."""
        for member in self._registry.notice_silence(now=now):
            log.warning("%s has been silent for %.0f s", member.name, member.last_heard.seconds(now=now))
            self._fell_silent(member)

    def _write_down(self, member: Member) -> None:
        """Add the last heartbeat of `member` to the timeline."""
        stats = member.stats
        if member.role == "gserver" and member.state in (MemberState.SERVING, MemberState.DRAINING):
            stats = {**stats, "policy_version": float(self._ledger.policy_version)}
        self._timeline.add(
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
        """Raise `ConfigError` for a process that others cannot reach, where they have to, or whose address is none."""
        host = host_of(message.address)
        try:
            host.encode("idna")  # as whoever connects to it will have to
        except UnicodeError as error:
            raise ConfigError(
                f"{sender} announces {message.address}, and {host} can be nobody's name ({error}): give --advertise "
                "the address by which others reach it"
            ) from error
        if self._open and is_loopback(host):
            raise ConfigError(
                f"{sender} announces {message.address}, which only its own machine reaches, while the controller is "
                "open to others: join with the controller's address that others use in place of localhost, leave the "
                "hosts in the configuration empty, or give --advertise ADDRESS"
            )

    def _check_free(self, message: Register, *, now: float) -> None:
        """Raise `PeerError` when the place that the process asks for belongs to another one that is not gone."""
        holder = self._registry.get(message.role, message.index)
        if holder is None or holder.silent or has_ended(holder):
            if holder is not None and holder.role == "model_worker":
                self._on_silent(holder)
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
        sender: dict[str, Any] = {
            "pid": message.pid,
            "host": message.host,
            "machine": message.machine,
            "process_space": message.process_space,
            "gpu": message.gpu,
            "curve_key": message.curve_key,
            "encrypted": message.encrypted,
        }
        patiences = {"controller": math.inf, "model_worker": self._trainer_patience}
        patience = patiences.get(message.role, self._lease)
        if message.role == "gserver":
            return Gserver(message.index, message.address, **sender, now=now, patience=patience)
        return Member(message.role, message.index, message.address, **sender, now=now, patience=patience)

    def _check_model(self, message: Register, *, who: str) -> None:
        """The first one who joins and tells of a model decides which is the run's."""
        if self._model is None or self._model_of(message) is None:
            return
        model, first = self._model
        if message.model != model:
            raise ConfigError(
                f"{who} on {message.host} begins with other weights than {first}: the folders that model.path (or "
                "run.resume_from) names on the two differ; bring copies of one checkpoint to all hosts"
            )

    def _model_of(self, message: Register) -> tuple[str, str] | None:
        """Return the fingerprint of the weights that have to be the run's, and who tells it; None: none have to.

        A gserver that does not begin from the checkpoint that a run goes on from, because it has no copy or has been
        there since an earlier start of the run, may begin with anything: it does not serve the run's version, and is
        brought up to it before it is given groups. With [model.lora] everybody begins with the base, which stays.
        """
        ours, theirs = self._resume_point.identity, message.begins_from
        same_version = theirs.partition(",")[0] == f"version {self._ledger.policy_version}"
        compared = message.role != "gserver" or not ours or theirs == ours or same_version or self._config.model.lora
        if not message.model or not compared:
            return None
        return message.model, f"{message.role}/{message.index} on {message.host}"

    def _check_beginning(self, message: Register, *, sender: str) -> None:
        """The ledger and the trainer count from the same groups and versions, or not at all."""
        if message.role != "model_worker":
            return
        if message.joined_before not in ("", self._access.lineage):
            raise PeerError(
                f"{sender} has trained in a lineage that the run has gone back behind: start it again with --resume",
                status=GONE_BACK,
            )
        ours = self._resume_point.identity
        if message.begins_from != ours and self._gone_back:
            raise PeerError(f"{sender} begins from where the run no longer is: start it again", status=GONE_BACK)
        if message.begins_from != ours:
            raise ConfigError(
                f"{sender} goes on from {message.begins_from or 'no checkpoint'}, and the controller from "
                f"{ours or 'no checkpoint'}: start both with the same run.resume_from; with --resume the trainer takes "
                "the controller's"
            )

    def _goes_on_without(self, member: Member) -> bool:
        """Whether others do the work of `member`, which gives up.

        What goes wrong in every rollout worker, such as a reward function that cannot be loaded, is to end the run with
        its message, and at once: so those others count that have finished a group since they began.
        """
        if member.role == "gserver":
            return True  # the run waits for one that is started again
        return (
            member.role == "rollout"
            and self._elastic
            and any(
                other.stats.get("groups_done_total", 0.0) > 0
                for other in self._registry.of("rollout")
                if other is not member and other.state is MemberState.SERVING
            )
        )

    def _fell_silent(self, member: Member) -> None:
        self._signals.silences.notify()
        self._on_silent(member)

    def _hear(self, member: Member, *, now: float) -> None:
        if self._registry.hear(member, now=now):
            log.warning("%s is heard of again", member.name)
            self._signals.deadlines.notify()
            self._signals.silences.notify()
        if member.state is not MemberState.GAVE_UP:
            self._on_heard(member)


def _resume_point(config: Config) -> ResumePoint:
    folder = config.run.resume_from
    return ResumePoint(checkpoint=Path(folder).name if folder else "", identity=progress.identity(config))


def has_ended(member: Member) -> bool:
    """Whether this process can see that the process of `member` is gone."""
    if not member.process_space or member.process_space != process_space():
        return False
    try:
        return bool(psutil.Process(member.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return not _is_hidden(member.pid)
    except psutil.Error:
        return False


def _is_hidden(pid: int) -> bool:
    """Whether there is such a process although /proc does not show it, as those of other users under `hidepid=2`."""
    try:
        os.kill(pid, 0)  # which sends nothing
    except PermissionError:  # it is there
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
