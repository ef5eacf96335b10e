"""A rollout worker: takes sequence numbers from the manager, and streams finished groups to the trainer.

Owns its reward processes, its connections, and one task for each admitted group that has not ended: the group is being
generated, being scored, or on its way to the trainer. Invariant: while the worker lives and the run does not go back,
each group ends in exactly one of two ways: it is stored with the trainer, which reports it to the manager, or the
worker rejects it with a reason. After the run has gone back, the worker keeps the groups that the present weights can
learn from and that the controller leases to it again; it drops all others. The manager gives the unfinished groups of a
dead worker to another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from streamrl.config import Config
from streamrl.errors import DataError, PeerLost, StreamRLError, first_error
from streamrl.mixture import Mixture
from streamrl.records.lineage import LineageHistory
from streamrl.rollout.activity import PUSHING, Activity
from streamrl.rollout.generation import GroupRoute, InFlightReports, RequestCount
from streamrl.rollout.groups import GroupMaker, load_filter
from streamrl.rollout.held_out import HeldOutPrompts
from streamrl.rollout.process import RunConnection, WorkerShutdown, facts_of, open_workshops, serve_until_over
from streamrl.rollout.synchronous import ScoringGate, SynchronousRollout
from streamrl.transport import codec
from streamrl.transport.control import Admission, Admit, DataFacts, FailRun, GroupInHand, Keep, Reject
from streamrl.transport.push_pull import GroupPusher
from streamrl.types import TrajectoryGroup
from streamrl.waits import first_of

log = logging.getLogger(__name__)

STORED_BYTES = 128 * 2**20
"""Most bytes of arrays of groups that the trainer has stored; they are sent again if the trainer loses them."""
FILTER_WARNING_GROUPS = 100
"""A warning is logged after `rollout.filter` has left out this many groups in a row."""


async def serve(config: Config, *, manager_url: str, index: int = 0, model_dir: Path, advertise: str = "") -> None:
    """Run rollout worker `index` until the run is over, or the task is cancelled.

    `advertise`: the address by which others reach this process; empty: the address from which it reaches the manager.
    """
    synchronous = config.trainer.synchronous

    async def work(joined: RunConnection) -> None:
        workshops, mixture = await open_workshops(config, joined=joined, model_dir=model_dir), Mixture.of(config)
        makers = {
            name: each.group_maker(each.config, prompts=each.prompts, rewards=each.rewards, activity=joined.activity)
            for name, each in workshops.items()
        }
        prompts = {name: each.prompts for name, each in workshops.items()}
        data = await asyncio.to_thread(facts_of, prompts, most={})
        held_out = HeldOutPrompts(config, joined=joined, workshops=workshops) if config.evaluation.enabled else None
        worker = RolloutWorker(
            config, joined=joined, maker=lambda seq: makers[mixture.task(seq)], data=data, held_out=held_out
        )
        joined.activity.describe_row = lambda seq: prompts[mixture.task(seq)].describe(seq, row=worker.row_of(seq))
        await worker.run()

    await serve_until_over(
        config,
        index=index,
        manager_url=manager_url,
        advertise=advertise,
        activity=Activity(idle="the master's calls" if synchronous else "room in the ledger"),
        work=work,
    )


async def _open_pusher(config: Config, joined: RunConnection) -> GroupPusher:
    """Connect to the model workers that store groups, once all of them have registered."""
    joined.membership.waiting_for = "the model workers to register"
    workers = await joined.control.topology(
        "model_worker", config.trainer.workers, patience=config.limits.start_seconds
    )
    return GroupPusher(
        worker=joined.membership.name,
        heads=[worker for worker in workers if worker.address],  # only DP heads have one
        credential=joined.membership.credential("model_worker"),
        max_group_bytes=config.limits.group_bytes,
        beat_seconds=config.limits.heartbeat_seconds,
        warn_seconds=config.limits.warning_seconds,
    )


async def _open_calls(config: Config, joined: RunConnection, worker: RolloutWorker) -> SynchronousRollout:
    """Connect to the master, once it has registered, to take its calls."""
    controllers = await joined.control.topology("controller", 1, patience=config.limits.start_seconds)
    return SynchronousRollout(
        config,
        master=controllers[0],
        credential=joined.membership.credential("controller"),
        admit=worker.admit,
        start=worker.start,
    )


@dataclass(eq=False)
class _Group:
    """A group that was admitted to this worker."""

    admission: Admission
    route: GroupRoute
    made: TrajectoryGroup | None = None
    """The finished group; None until then."""
    task: asyncio.Task[None] | None = None

    def can_be_kept(self, history: LineageHistory) -> bool:
        """Return whether the group can be trained on, or finished, with weights of this `history`."""
        known = all(history.has(label) for label in self.route.labels)
        return known and (self.made is not None or self.route.resumable)

    def in_hand(self) -> GroupInHand:
        """Return the group's entry for a `Keep` message to the controller."""
        seq, row = self.admission.seq, self.admission.row
        found = GroupInHand(seq) if self.made is not None else self.route.in_hand(seq)
        return msgspec.structs.replace(found, row=row)


class StoredGroups:
    """The groups that were stored last with the trainer, by sequence number, up to a limit of bytes.

    The death of a model worker loses groups that no checkpoint covers yet; they can be sent again from here.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._groups: dict[int, _Group] = {}  # the latest one last

    def add(self, group: _Group) -> None:
        """Add a finished group; the oldest groups are removed to make room for it."""
        self._remove(group.admission.seq)
        self._groups[group.admission.seq] = group
        self._bytes += _bytes(group)
        while self._bytes > self._most_bytes:
            self._remove(next(iter(self._groups)))

    def take_all(self) -> dict[int, _Group]:
        """Remove and return all groups."""
        groups, self._groups, self._bytes = self._groups, {}, 0
        return groups

    def _remove(self, seq: int) -> None:
        if (group := self._groups.pop(seq, None)) is not None:
            self._bytes -= _bytes(group)


def _bytes(group: _Group) -> int:
    assert group.made is not None, "it is finished"
    return codec.group_bytes(group.made)


class RolloutWorker:
    """Requests admissions, by itself or at the master's calls, and processes each group to its end."""

    def __init__(
        self,
        config: Config,
        *,
        joined: RunConnection,
        maker: Callable[[int], GroupMaker],
        data: DataFacts,
        held_out: HeldOutPrompts | None = None,
    ) -> None:
        """`maker` returns the maker of the group of a sequence number. `held_out`: None if there is no evaluation."""
        self._config = config
        self._held_out = held_out
        self._data = data
        self._joined = joined
        self._membership = joined.membership
        self._control = joined.control
        self._maker = maker
        self._pusher: asyncio.Future[GroupPusher] = asyncio.get_running_loop().create_future()
        """Pusher to the present model workers, once all of them have registered."""
        self._activity = joined.activity
        self._failures: list[Exception] = []
        """Errors of the groups that failed since the last success. An error that several groups share, such as the
        death of their agents' process, is listed once."""
        self._filtered_in_a_row = 0
        self._unfinished: dict[int, _Group] = {}
        """Groups that were admitted here, and are neither stored with the trainer nor rejected."""
        self._stored = StoredGroups(0 if config.trainer.synchronous else STORED_BYTES)
        self._finished_one = asyncio.Event()
        self._reports = InFlightReports(joined.control, worker=joined.membership.index)
        self._groups = asyncio.TaskGroup()
        self._is_wanted = load_filter(config.rollout)

    async def run(self) -> None:
        """Make groups until the run is over; raises errors that have to stop the run.

        If the worker is asked to leave before the end of the run, it starts no further group and finishes those it has,
        including held-out prompts.
        """
        gone_back = self._membership.gone_back
        try:
            async with self._groups:
                reporting = self._groups.create_task(self._reports.run(), name="requests in flight")
                while True:
                    making, _ = await first_of(self._make_groups(), gone_back.wait())
                    if not making.cancelled():
                        break
                    gone_back.clear()
                    await self._go_back()
                making.result()
                reporting.cancel()
                log.info("%s leaves the run, as it was asked to", self._membership.name)
        except BaseExceptionGroup as errors:
            _, failures = errors.split(WorkerShutdown)
            if failures is not None:
                raise first_error(failures) from None
            log.info("%s: the run is over", self._membership.name)

    async def _make_groups(self) -> None:
        """Make groups for the present model workers until this worker was asked to leave and has finished them; raises
        `WorkerShutdown` at the end of the run.

        Groups start whenever `rollout.max_concurrent_groups` allows, or in a synchronous graph when the master calls
        for them.
        """
        async with AsyncExitStack() as stack:
            self._pusher.set_result(await _open_pusher(self._config, self._joined))
            stack.push_async_callback(self._close_pusher)
            self._activity.on_wait(self._show_wait)
            calls = None
            if self._config.trainer.synchronous:
                calls = await _open_calls(self._config, self._joined, self)
                stack.push_async_callback(calls.close)
            async with asyncio.TaskGroup() as tasks:
                held_out = self._held_out.run() if self._held_out is not None else None
                evaluating = tasks.create_task(held_out, name="held-out prompts") if held_out else None
                if calls is not None:
                    await calls.run()
                elif not await self._start_until_asked_to_leave():
                    await self._finish_groups()
                    if evaluating is not None:
                        self._show_wait("held-out prompts to finish, then it leaves")
                        await evaluating
                    return
                raise WorkerShutdown

    async def _close_pusher(self) -> None:
        """Close the connections to the model workers; groups that they have not stored wait for their successors."""
        pusher = self._pusher.result()
        self._pusher = asyncio.get_running_loop().create_future()
        await pusher.close()

    async def _go_back(self) -> None:
        """Keep trainable groups with a place in the ledger, resend groups of dead model workers, drop the rest."""
        history, stored = self._membership.history, self._stored.take_all()
        in_hand: dict[int, _Group] = {}
        if not self._config.trainer.synchronous:
            in_hand = {seq: group for seq, group in (stored | self._unfinished).items() if group.can_be_kept(history)}
        before = len(self._unfinished)
        dropped = self._drop(self._unfinished.keys() - in_hand.keys())
        self._membership.times_back += 1
        groups = [group.in_hand() for group in in_hand.values()]
        message = Keep(self._membership.index, groups, times_back=self._membership.times_back)
        reply = await self._control.keep(message)
        self._membership.policy_version = reply.policy_version
        dropped += self._drop(self._unfinished.keys() - set(reply.kept))
        again = [in_hand[seq] for seq in reply.kept if in_hand[seq] is stored.get(seq)]
        for group in again:
            self._begin(group)
        log.warning(
            "%s: the run has gone back; of %d groups under way %d are dropped, and %d that were stored are sent again",
            *(self._membership.name, before, len(dropped), len(again)),
        )
        await asyncio.gather(*dropped, return_exceptions=True)

    def _drop(self, seqs: Collection[int]) -> list[asyncio.Task[None]]:
        """Cancel these unfinished groups; return their tasks, which are about to end."""
        tasks = [task for seq in seqs if (task := self._unfinished.pop(seq).task) is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def _start_until_asked_to_leave(self) -> bool:
        """Start groups; return True when the run is over, False when this worker is asked to leave."""
        # If an admission was granted but not received here, the manager takes it back after this worker has left.
        starting, _ = await first_of(self._start_whenever_possible(), self._membership.leaving.wait())
        return not starting.cancelled()

    async def _start_whenever_possible(self) -> None:
        while (admissions := await self.admit(await self._room())) is not None:
            for admission in admissions:
                self.start(admission)

    async def _finish_groups(self) -> None:
        while self._unfinished:
            self._finished_one.clear()
            self._show_wait(f"{len(self._unfinished)} groups to finish, then it leaves")
            await self._finished_one.wait()

    def row_of(self, seq: int) -> int | None:
        """Return the row that was chosen for an unfinished group; None if it follows from `seq`."""
        group = self._unfinished.get(seq)
        return group.admission.row if group is not None else None

    def start(self, admission: Admission, gate: ScoringGate | None = None) -> None:
        """Make the group in its own task; `gate` stands between its generation and its scoring."""
        requests = RequestCount(admission.seq, siblings=self._config.rollout.group_size, reports=self._reports)
        self._begin(_Group(admission, self._joined.route(admission, requests)), gate)

    def _begin(self, group: _Group, gate: ScoringGate | None = None) -> None:
        seq = group.admission.seq
        self._unfinished[seq] = group
        group.task = self._groups.create_task(self._see_to_end(group, gate), name=f"group {seq}")

    async def _room(self) -> int:
        """Wait until at least one group may start, and return how many may."""
        limit = self._config.rollout.max_concurrent_groups
        while len(self._unfinished) >= limit:
            self._finished_one.clear()
            await self._finished_one.wait()
        return limit - len(self._unfinished)

    async def admit(self, count: int) -> list[Admission] | None:
        """Request up to `count` groups; return those to start, perhaps none yet, or None at the end of the run."""
        member = self._membership
        message = Admit(worker=member.index, count=count, data=self._data, times_back=member.times_back)
        reply = await self._control.admit(message)
        if reply.stop:
            return None
        member.note_version(reply.policy_version)
        # after a silence of this worker the manager may admit groups again that are still being made here
        return [admission for admission in reply.admissions if admission.seq not in self._unfinished]

    async def _see_to_end(self, group: _Group, gate: ScoringGate | None) -> None:
        seq, stored = group.admission.seq, False
        try:
            with self._activity.group():
                stored = await self._make_and_push(group, gate)
        finally:
            if self._unfinished.get(seq) is group:  # not if it was dropped, and perhaps admitted again
                del self._unfinished[seq]
            self._reports.forget(seq)
            self._finished_one.set()
            if gate is not None:
                gate.end(stored=stored)

    async def _make_and_push(self, group: _Group, gate: ScoringGate | None) -> bool:
        """Return whether the group is stored with the trainer; otherwise it was rejected, or the run has gone back."""
        seq = group.admission.seq
        try:
            if group.made is None:
                before_scoring = gate.before_scoring if gate is not None else None
                begun, most = self._membership.policy_version, self._config.staleness.max_staleness
                made = await self._maker(seq).make(
                    seq,
                    group.route,
                    before_scoring,
                    row=group.admission.row,
                    may_retry=lambda: self._membership.policy_version - begun <= most,
                )
                if not self._is_wanted(made):
                    await self._leave_out(made)
                    return False
                group.made = made
            with self._activity.in_stage(PUSHING):
                await self._push(group.made, permit=group.admission.permit)
        except Exception as error:  # one group may fail, for example in the user's workflow; many stop the run
            if not isinstance(error, StreamRLError):
                log.exception("group %d failed", seq)
            if not group.can_be_kept(self._membership.history):
                return False
            if self._config.rollout.on_failed_sibling == "stop" and not isinstance(error, DataError):
                what = f"{self._membership.name}: {type(error).__name__}: {error}"
                await self._control.fail_run(FailRun(worker=self._membership.index, error=what))
                raise
            await self._reject(seq, error)
        else:
            self._failures.clear()
            self._filtered_in_a_row = 0
            self._activity.done(mean_reward=group.made.mean_reward)
            self._stored.add(group)
            return True
        return False

    async def _push(self, group: TrajectoryGroup, *, permit: str) -> None:
        """Return once `group` is stored with the trainer; model workers may be replaced in the meantime."""
        while True:
            pusher = await asyncio.shield(self._pusher)
            try:
                return await pusher.push(group, permit=permit)
            except PeerLost:  # the pusher was closed
                continue

    async def _leave_out(self, group: TrajectoryGroup) -> None:
        """Give the group's place back, and warn after many in a row: without other groups training stands still."""
        self._failures.clear()
        self._filtered_in_a_row += 1
        self._activity.groups_filtered += 1
        rewards = np.unique(group.rewards).tolist()
        if self._filtered_in_a_row % FILTER_WARNING_GROUPS == 0:
            log.warning(
                "%s: rollout.filter = %r left out %d groups in a row (rewards of the last: %s); the task may be too "
                "easy or too hard by now",
                *(self._membership.name, self._config.rollout.filter, self._filtered_in_a_row, rewards),
            )
        await self._tell_rejection(group.seq, f"left out by rollout.filter (rewards: {rewards})", group.mean_reward)

    async def _reject(self, seq: int, reason: Exception) -> None:
        if all(reason is not failure for failure in self._failures):
            self._failures.append(reason)
        self._activity.rejected(seq, reason)
        await self._tell_rejection(seq, f"{type(reason).__name__}: {reason}")
        limit = self._config.rollout.max_failures
        if len(self._failures) >= limit:
            raise StreamRLError(
                f"{len(self._failures)} groups in a row failed (rollout.max_failures = {limit}); "
                f"the last, {seq}: {type(reason).__name__}: {reason}"
            ) from reason

    async def _tell_rejection(self, seq: int, reason: str, reward: float | None = None) -> None:
        await self._control.reject(Reject(self._membership.index, seq, reason, reward))

    def _show_wait(self, waiting_for: str) -> None:
        self._membership.waiting_for = waiting_for
