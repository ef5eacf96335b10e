"""Admission of groups, their gservers, and the end of their leases.

`Admissions` decides: it is pure, with times passed in, so that the planner simulates a run with it. `GroupCalls` are
the manager's calls about groups; a call without room or capacity waits in a queue.

Invariants: a group starts only if the ledger has room for it, and only together with a gserver that serves; it counts
as in flight there exactly while its lease lasts; a repeated request with the same ticket returns the same groups; a
worker that went back with the run has the leases that the reply to `keep` names, and none from calls before it; a
request returns to a gserver that failed only after a check of that gserver, unless there is no other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass

from streamrl.config import Config, by_task
from streamrl.gserver.manager.checks import GserverChecks
from streamrl.gserver.manager.evaluations import Evaluations
from streamrl.gserver.manager.gserver import Gserver, Route, Work
from streamrl.gserver.manager.members import Members
from streamrl.gserver.manager.registry import Member
from streamrl.gserver.manager.routing import Fleet
from streamrl.gserver.manager.row_sampler import RowSampler
from streamrl.gserver.manager.run_state import RunState
from streamrl.ledger import Group, Ledger
from streamrl.records.lineage import Lineage
from streamrl.records.progress import Progress
from streamrl.transport.control import (
    LONG_POLL_SECONDS,
    Admission,
    Admit,
    AdmitReply,
    AskRoute,
    DataFacts,
    Done,
    GroupInHand,
    HeldOutResult,
    InFlight,
    InFlightReply,
    Keep,
    KeepReply,
    Reject,
    RouteReply,
)

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""A prompt is given up after this many deaths of workers that had it, if they are more than half of all deaths since
the first of them: it may well be the cause. Where workers come and go, a long response sees several end."""
LEAST_PAUSE_SECONDS = 0.02
"""Least time between two reports of one worker on its requests in flight."""
REPORTS_PER_SECOND = 1000.0
"""Most reports per second, summed over all workers."""
REMEMBERED_TICKETS = 16
"""Number of tickets that are remembered for each worker."""


# --- the decision ---


class Admissions:
    """Gives prompts to rollout workers and keeps account of them."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        fleet: Fleet,
        group_size: int,
        permit: Callable[[int, str], str] = lambda *_: "",
        sampler: RowSampler | None = None,
    ) -> None:
        """`permit` returns the permit for a group, from its seq and the name of the worker that it is given to.
        `sampler`: None if rows follow from sequence numbers."""
        self.admitted = 0
        """Groups given out since the run began, counting repeated ones again."""
        self._ledger = ledger
        self._fleet = fleet
        self._permit = permit
        self._sampler = sampler
        self._new_group = Work(group_size, 0)
        self.given_up = 0
        """Prompts rejected because the workers that had them died."""
        self._all_deaths = 0
        self._tickets: dict[str, OrderedDict[str, list[Admission]]] = {}
        ledger.on_lease_end = self._free_route

    @property
    def possible(self) -> bool:
        """Whether a group could start now."""
        return self._fleet.has_capacity and self._ledger.room > 0

    def given(self, worker: str, ticket: str) -> list[Admission] | None:
        """Return the groups that `worker` received under `ticket`, or None if it has received none."""
        return self._tickets.get(worker, OrderedDict()).get(ticket)

    def take(self, worker: str, count: int, *, workers: int, ticket: str, now: float) -> list[Admission]:
        """Admit up to `count` groups for `worker`, leaving room for the others of `workers` live ones.

        Return the groups admitted now, or earlier under this `ticket`; an empty list if there is no room now.
        """
        if given := self.given(worker, ticket):
            return given
        most = min(count, math.ceil(self._ledger.room / max(1, workers)))
        if self._sampler is not None:
            most = self._sampler.ready(most)
        routes: list[Route] = []
        while len(routes) < most and self._fleet.has_capacity:
            route = self._fleet.assign(self._new_group, now=now)
            assert route is not None, "one has a place, as checked above"
            routes.append(route)
        # Admit all at once: the room that exists only while nothing runs ends with the first group.
        groups = self._ledger.admit(worker, len(routes), now=now)
        admissions: list[Admission] = []
        for group, route in zip(groups, routes, strict=True):
            group.route = route
            permit = self._permit(group.seq, worker)
            gserver, row = route.gserver, self._ledger.rows.chosen.get(group.seq)
            admissions.append(Admission(group.seq, gserver.address, permit=permit, name=gserver.name, row=row))
        self.admitted += len(admissions)
        self.remember(worker, ticket, admissions)
        return admissions

    def keep(self, worker: str, in_hand: Sequence[GroupInHand], *, now: float) -> list[int]:
        """Lease to `worker` the groups that it has in hand and the ledger allows; return the seqs that it holds.

        Its other leases end: it has not received them, for example because the run went back during its call.
        """
        rows = self._ledger.rows.chosen
        by_seq = {group.seq: group for group in in_hand if rows.get(group.seq, group.row) == group.row}
        kept = self._ledger.keep(worker, by_seq, now=now)
        for group in kept:
            own = by_seq[group.seq]
            if own.row is not None:
                rows[group.seq] = own.row
            gserver = self._fleet.at(own.gserver) if group.route is None else None
            if gserver is not None:
                group.route = self._fleet.assign_to(gserver, Work(own.requests, own.tokens), now=now)
        seqs = [group.seq for group in kept]
        self._tickets.pop(worker, None)
        self._came_back(self._ledger.release(worker, but=seqs), f"{worker} has not received them")
        return seqs

    def remember(self, worker: str, ticket: str, admissions: list[Admission]) -> None:
        """Note that `worker` was given `admissions` under `ticket`."""
        if ticket and admissions:
            remembered = self._tickets.setdefault(worker, OrderedDict())
            remembered[ticket] = admissions
            if len(remembered) > REMEMBERED_TICKETS:
                remembered.popitem(last=False)

    def reroute(self, worker: str, seq: int, *, avoid: str, now: float) -> Gserver | None:
        """Return another gserver for `seq`; its load moves along only while `worker` holds the lease."""
        route = self._ledger.groups[seq].route if self._ledger.holder(seq) == worker else None
        return self._fleet.reassign(route, now=now, avoid=avoid)

    def in_flight(self, worker: str, seq: int, work: Work, *, now: float) -> None:
        """Note the `work` in flight that `worker` reports for `seq`; it counts while `worker` holds the lease."""
        if self._ledger.holder(seq) == worker and (route := self._ledger.groups[seq].route) is not None:
            self._fleet.change(route, work, now=now)

    def reject(self, worker: str, seq: int, reason: str, *, reward: float | None = None) -> None:
        """Give `seq` up for `worker`, unless another holds it by now."""
        holder = self._ledger.holder(seq)
        if holder not in (worker, None) or not self._ledger.reject(seq, reward=reward):
            log.info("%s gave seq %d up too late (%s); it is %s", worker, seq, reason, self._ledger.state(seq))
        else:
            log.info("%s gave seq %d up: %s", worker, seq, reason)

    def worker_replaced(self, worker: str) -> None:
        """Take back the prompts of the previous process with the name `worker`, which another process has replaced.

        The prompts may be the cause of its end.
        """
        self._tickets.pop(worker, None)
        self._came_back(self._ledger.release(worker), f"{worker} was replaced")
        open_groups = self._ledger.groups.values()
        if had := [group for group in open_groups if group.state == "returned" and group.worker == worker]:
            self._all_deaths += 1
        for group in had:
            group.worker = ""
            group.deaths.append(self._all_deaths)
            self._consider(group)

    def expire(self, *, now: float) -> bool:
        """Take back prompts whose lease ran out; return whether there are any. Silence alone is no prompt's fault."""
        lost = self._ledger.expire(now=now)
        self._came_back(lost, "their leases ran out")
        return bool(lost)

    def _came_back(self, groups: Sequence[Group], why: str) -> None:
        if groups:
            log.warning("%d prompts go back to be given out again (first: seq %d): %s", len(groups), groups[0].seq, why)

    def _consider(self, group: Group) -> None:
        """Give `group` up if it was present at too many deaths for chance."""
        deaths = group.deaths
        since = self._all_deaths - deaths[0] + 1
        if len(deaths) >= MAX_DEATHS and 2 * len(deaths) > since and self._ledger.reject(group.seq):
            self.given_up += 1
            log.error(
                "seq %d is given up: %d of the last %d workers that died had it; look at its prompt and its workflow",
                *(group.seq, len(deaths), since),
            )

    def _free_route(self, group: Group) -> None:
        """Free the gserver of `group` at the end of its lease."""
        if group.route is not None:
            self._fleet.release(group.route)
            group.route = None


# --- the calls ---


@dataclass(kw_only=True, eq=False)
class GroupCalls:
    """The calls about groups and held-out prompts: admit, keep, route, in flight, reject, and held-out results.

    Nothing is admitted before `start`.
    """

    config: InitVar[Config]
    ledger: Ledger
    admissions: Admissions
    sampler: RowSampler | None
    evaluations: Evaluations
    fleet: Fleet
    checks: GserverChecks
    members: Members
    state: RunState
    live_workers: Callable[[], int]
    """Returns how many rollout workers share the room."""

    def __post_init__(self, config: Config) -> None:
        self._data = DataFacts(rows=0)
        self._held_out_data = DataFacts(rows=0)
        self._epochs = config.run.total_train_epochs
        self._tasks = list(by_task(config))
        self._admitting = False
        self._training_over = False
        self._paused = False
        self._most_drift = config.staleness.most_drift
        self.ledger.observers.append(self.state.admissions.wake)

    def begin(self, lineage: Lineage, begun: Progress | None) -> None:
        """Take all groups back, and count from the progress `begun` at which `lineage` begins, or from zero if None.

        Nothing is admitted before `start`.
        """
        self._admitting = self._training_over = False
        if begun is None:
            self.ledger.restore(lineage, trained=(), rejected=())
            self.ledger.admitted_staleness = 0 if self._most_drift else self.ledger.max_staleness
            return
        if begun.data_rows:
            self._set_data(DataFacts(begun.data_rows, begun.data_digest, begun.data_of_tasks))
        self.ledger.restore(lineage, trained=begun.trained_seqs(), rejected=begun.rejected_seqs(), rows=begun.rows)
        watch = begun.watch.resumed(most_drift=self._most_drift)
        self.ledger.admitted_staleness = watch.staleness(self.ledger.max_staleness)
        log.info("the run continues at version %d, after %d groups", begun.policy_version, begun.groups_trained)

    def start(self) -> None:
        """Admit from now on, unless training is over."""
        self._admitting = not self._training_over
        self.state.admissions.wake()

    def stop(self) -> None:
        """Start no further group, since training is over."""
        self._training_over = True
        self._admitting = False

    def limit_staleness(self, staleness: int) -> None:
        """Admit by this `max_staleness` from now on, if it is less than the configured one."""
        self.ledger.admitted_staleness = min(staleness, self.ledger.max_staleness)
        self.state.admissions.wake()

    def set_staleness(self, staleness: int) -> None:
        """Set `max_staleness` for admission and for batches; from the next step on `most_drift` limits admission."""
        self.ledger.max_staleness = self.ledger.admitted_staleness = staleness
        log.info("max_staleness is %d from now on", staleness)
        self.state.admissions.wake()

    def pause(self, paused: bool) -> None:
        """Start no further group while `paused`; groups that run are finished."""
        self._paused = paused
        log.info("no group starts until the run is resumed" if paused else "groups start again")
        self.state.admissions.wake()

    async def admit(self, message: Admit) -> AdmitReply:
        """Start groups as soon as there is room in the ledger and a gserver with capacity, or a held-out prompt once
        one may begin.

        Return none after a long poll, and none at once for a count of 0, which only reports the data.
        """
        member = self.members.caller("rollout", message.worker)
        if message.data.rows:
            self._compare_data(member, message.data, held_out=message.held_out)

        name, count, ticket, held_out = member.name, message.count, message.ticket, message.held_out

        def attempt() -> list[Admission] | None:
            if member.gone:
                return []  # its leases would belong to the process that now has its name, which renews them
            if not self.members.is_of_this_lineage(member):
                return []  # it registers again first
            if message.times_back < member.times_back:
                return []  # it no longer waits for this reply, and its heartbeats would renew the leases
            if held_out:
                return self._take_held_out(member, ticket)
            if self._paused or not self._admitting:
                return None
            workers, now = self.live_workers(), time.monotonic()
            return self.admissions.take(name, count, workers=workers, ticket=ticket, now=now) or None

        # Groups that were already given are returned without waiting: calls in the queue may wait for these to end.
        found = self.admissions.given(name, ticket)
        if found is None and count and not self.state.over:
            queue = self.state.held_out if held_out else self.state.admissions
            found = await queue.find(attempt, timeout=LONG_POLL_SECONDS)
            self.state.held_out.wake()  # a group that has begun, or no longer waits, leaves a place or a turn
        if self.state.over:
            self.members.tell_over(member)
            found = None
        return AdmitReply(admissions=found or [], policy_version=self.ledger.policy_version, stop=self.state.over)

    async def keep(self, message: Keep) -> KeepReply:
        """Have a worker finish groups that were admitted to it before the run went back."""
        member = self.members.caller("rollout", message.worker)
        member.times_back = max(member.times_back, message.times_back)
        kept = self.admissions.keep(member.name, message.groups, now=time.monotonic())
        self.evaluations.give_back(member.name, lost=False)
        if message.groups:
            log.info("%s keeps %d of %d groups that it has in hand", member.name, len(kept), len(message.groups))
        return KeepReply(kept, policy_version=self.ledger.policy_version)

    async def route(self, message: AskRoute) -> RouteReply:
        """Return a gserver in place of the one that failed, which is checked; none after a long poll, or once the run
        is over."""
        member = self.members.caller("rollout", message.worker)
        if self.state.over:
            return RouteReply(gserver="")

        def choose(avoid: str) -> Gserver | None:
            name, seq, now = member.name, message.seq, time.monotonic()
            if message.evaluation:
                return self.evaluations.reroute(name, message.evaluation, seq, avoid=avoid, now=now)
            return self.admissions.reroute(name, seq, avoid=avoid, now=now)

        suspect = self.fleet.serving_at(message.failed)
        check = self.checks.start(suspect) if suspect is not None else None
        choice = choose(message.failed)
        if choice is None:
            if check is not None:
                await asyncio.wait({check})
            choice = await self.state.routes.find(lambda: choose(""), timeout=LONG_POLL_SECONDS)
        return RouteReply(gserver="" if choice is None or self.state.over else choice.address)

    async def in_flight(self, message: InFlight) -> InFlightReply:
        """Note the requests that a worker's groups have in flight; the reply sets the time until the next report."""
        now = time.monotonic()
        worker = self.members.caller("rollout", message.worker).name
        for group in message.groups:
            self.admissions.in_flight(worker, group.seq, Work(group.requests, group.tokens), now=now)
        pause = max(LEAST_PAUSE_SECONDS, self.live_workers() / REPORTS_PER_SECOND)
        return InFlightReply(pause_seconds=pause)

    async def reject(self, message: Reject) -> Done:
        """Give a prompt up."""
        worker = self.members.caller("rollout", message.worker).name
        self.admissions.reject(worker, message.seq, message.reason, reward=message.reward)
        return Done()

    async def held_out_result(self, message: HeldOutResult) -> Done:
        """Count the result of a held-out prompt; raises the errors of `Evaluations.count`."""
        self.members.caller("rollout", message.worker)
        self.evaluations.count(message)
        self.state.held_out.wake()
        return Done()

    def _take_held_out(self, member: Member, ticket: str) -> list[Admission] | None:
        """Return a held-out prompt for `member`, or the one given under `ticket` before; None if none may begin now."""
        if member.silent:
            return []  # its prompts are given to others
        if given := self.admissions.given(member.name, ticket):
            return given
        wait = self._admitting and self.ledger.room > 0 and len(self.state.admissions) > 0
        begun, now = self.admissions.admitted, time.monotonic()
        prompt = self.evaluations.take(member.name, groups_begun=begun, groups_wait=wait, now=now)
        if prompt is None:
            return None
        self.admissions.remember(member.name, ticket, [prompt])
        return [prompt]

    @property
    def data_rows(self) -> int:
        """Rows of the training data; 0: not known yet."""
        return self._data.rows

    async def data(self) -> DataFacts:
        """Wait until a rollout worker has reported the facts of the training data."""
        await self.state.changed.until(lambda: self.data_rows > 0)
        return self._data

    def _compare_data(self, member: Member, data: DataFacts, *, held_out: bool) -> None:
        known = self._held_out_data if held_out else self._data
        if not known.rows and held_out:
            self._held_out_data = data
            self.evaluations.set_prompts(data.rows)
        elif not known.rows:
            self._set_data(data)
            self.state.changed.notify()
        elif data != known:
            self.state.end(
                "failed",
                f"{member.name} has {data.rows} rows of {'held-out' if held_out else 'training'} data (fingerprint "
                f"{data.digest}), the run has {known.rows} ({known.digest}): sequence numbers would mean other "
                "prompts; give all workers the same data set, also when the run is resumed",
            )

    def _set_data(self, data: DataFacts) -> None:
        self._data = data
        if self.sampler is not None:
            rows = data.of_tasks or [data.rows]
            self.sampler.rows = dict(zip(self._tasks, rows, strict=True))
        self.ledger.ends_after = None if self._epochs is None else self._epochs * data.rows
