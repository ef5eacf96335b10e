"""A rollout worker: takes sequence numbers from the manager, and streams finished groups to the trainer.

Owns its reward processes, its connections, and one task for each group that it was admitted.
Invariant: each admitted sequence number ends in exactly one of two ways, as long as the worker
lives: its group is stored with the trainer (who tells the manager), or the worker rejects it with
a reason. What a worker leaves undone when it dies, the manager gives to another.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from streamrl.config import Config
from streamrl.errors import RewardError, StreamRLError, first_error
from streamrl.rollout.activity import Activity
from streamrl.rollout.directed import Director, GroupGate
from streamrl.rollout.groups import GroupMaker
from streamrl.rollout.in_flight import InFlightReports, RequestCount
from streamrl.rollout.partial import GroupRoute
from streamrl.rollout.process import Seat, open_group_maker, serve_until_over
from streamrl.trainer_config import SYNCHRONOUS
from streamrl.transport.control.groups import Admission, Admit, Reject
from streamrl.transport.control.members import FinishRun
from streamrl.transport.push_pull import GroupPusher

log = logging.getLogger(__name__)

UNIFORM_WARNING_GROUPS = 100
"""So many groups in a row without any contrast are worth a warning."""


async def serve(config: Config, *, manager_url: str, index: int = 0, model_dir: Path) -> None:
    """Run rollout worker `index` until the run is over, or the task is cancelled."""
    directed = config.trainer.graph == SYNCHRONOUS

    async def work(seat: Seat) -> None:
        maker, prompts = await open_group_maker(config, seat=seat, model_dir=model_dir)
        pusher = await _open_stream(config, seat)
        worker = RolloutWorker(config, seat=seat, maker=maker, pusher=pusher, data_rows=len(prompts))
        if directed:
            await _follow_master(config, seat, worker)
        else:
            await worker.run()

    await serve_until_over(
        config,
        role="rollout",
        index=index,
        manager_url=manager_url,
        activity=Activity(idle="the master's directions" if directed else "room in the ledger"),
        work=work,
    )


async def _open_stream(config: Config, seat: Seat) -> GroupPusher:
    seat.membership.waiting_for = "the model workers to register"
    workers = await seat.control.topology(
        "model_worker", config.trainer.workers, patience=config.manager.join_timeout_seconds
    )
    pusher = GroupPusher(
        worker=seat.membership.name,
        endpoints=[worker.address for worker in workers if worker.address],  # DP heads have one
        max_group_bytes=config.stream.max_group_bytes,
        resend_seconds=config.stream.resend_seconds,
        warn_seconds=config.trainer.wait_warning_seconds,
    )
    seat.owned.push_async_callback(pusher.close)
    return pusher


async def _follow_master(config: Config, seat: Seat, worker: RolloutWorker) -> None:
    masters = await seat.control.topology("master", 1, patience=config.manager.join_timeout_seconds)
    director = Director(config, index=seat.membership.index, master=masters[0].address, starts=worker)
    seat.owned.push_async_callback(director.close)
    await worker.run(director)


class RolloutWorker:
    """Admits groups, by itself or as a director says, and sees each to its end."""

    def __init__(
        self,
        config: Config,
        *,
        seat: Seat,
        maker: GroupMaker,
        pusher: GroupPusher,
        data_rows: int,
    ) -> None:
        """`data_rows`: of the training data."""
        self._config = config
        self._data_rows = data_rows
        self._membership = seat.membership
        self._control = seat.control
        self._maker = maker
        self._pusher = pusher
        self._activity = seat.activity
        self._failures_in_a_row = 0
        self._uniform_in_a_row = 0
        self._place_free = asyncio.Event()
        self._reports = InFlightReports(seat.control, worker=seat.membership.index)
        self._held: set[int] = set()
        self._groups = asyncio.TaskGroup()
        seat.activity.on_wait(self._show_wait)

    async def run(self, director: Director | None = None) -> None:
        """Until the manager says stop; raises what has to stop the run.

        Groups start as long as there are free places, or when `director` is told so. A worker that is asked
        to leave before the end of the run starts no more, and sees those that it has to their end.
        """
        try:
            async with self._groups:
                reporting = self._groups.create_task(self._reports.run(), name="requests in flight")
                if director is not None:
                    await director.follow()
                elif not await self._start_until_asked_to_leave():
                    await self._until_none_is_held()
                    reporting.cancel()
                    log.info("%s leaves the run, as it was asked to", self._membership.name)
                    return
                raise _RunOver
        except BaseExceptionGroup as errors:
            _, failures = errors.split(_RunOver)
            if failures is not None:
                raise first_error(failures) from None
            log.info("%s: the run is over", self._membership.name)

    async def _start_until_asked_to_leave(self) -> bool:
        """Whether it ended because the run is over."""
        asked = asyncio.create_task(self._membership.leaving.wait())
        starting = asyncio.create_task(self._start_whenever_possible())
        try:
            await asyncio.wait((asked, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            return starting.done()
        finally:
            # An admission that was given and not heard of is taken back by the manager when this worker has left.
            for task in (asked, starting):
                task.cancel()
            await asyncio.gather(asked, starting, return_exceptions=True)

    async def _start_whenever_possible(self) -> None:
        while (admissions := await self.admit(await self._free_places())) is not None:
            for admission in admissions:
                self.start(admission)

    async def _until_none_is_held(self) -> None:
        while self._held:
            self._place_free.clear()
            self._show_wait(f"{len(self._held)} groups to finish, then it leaves")
            await self._place_free.wait()

    def start(self, admission: Admission, gate: GroupGate | None = None) -> None:
        """Make the group; `gate` is between its generation and its scoring."""
        self._held.add(admission.seq)
        self._groups.create_task(self._group(admission, gate), name=f"group {admission.seq}")

    async def _free_places(self) -> int:
        """How many groups may start, once at least one may."""
        limit = self._config.rollout.max_concurrent_groups
        while len(self._held) >= limit:
            self._place_free.clear()
            await self._place_free.wait()
        return limit - len(self._held)

    async def admit(self, count: int) -> list[Admission] | None:
        """Sequence numbers to start, perhaps none yet; None when the run is over."""
        reply = await self._control.admit(Admit(worker=self._membership.index, count=count, data_rows=self._data_rows))
        if reply.stop:
            return None
        # one that is held was given out again while this worker was silent: it still makes it
        return [admission for admission in reply.admissions if admission.seq not in self._held]

    async def _group(self, admission: Admission, gate: GroupGate | None) -> None:
        stored = False
        try:
            with self._activity.group():
                stored = await self._make_and_push(admission, gate)
        finally:
            self._held.discard(admission.seq)
            self._reports.forget(admission.seq)
            self._place_free.set()
            if gate is not None:
                gate.end(stored=stored)

    async def _make_and_push(self, admission: Admission, gate: GroupGate | None) -> bool:
        """Whether the group is stored with the trainer."""
        seq = admission.seq
        route = GroupRoute(
            self._control,
            worker=self._membership.index,
            seq=seq,
            gserver=admission.gserver,
            count=RequestCount(seq, siblings=self._config.rollout.group_size, reports=self._reports),
        )
        try:
            group = await self._maker.make(seq, route, gate.before_scoring if gate is not None else None)
            if self._config.rollout.drop_uniform_groups and bool((group.rewards == group.rewards[0]).all()):
                await self._drop_uniform(seq, float(group.rewards[0]))
                return False
            with self._activity.pushing():
                await self._pusher.push(group)
        except RewardError as error:
            if self._config.rollout.reward.on_error == "stop":
                what = f"{self._membership.name}: {type(error).__name__}: {error}"
                await self._control.finish_run(FinishRun(reason="", error=what))
                raise
            await self._reject(seq, error)
        except Exception as error:  # one group may fail, for example in the user's workflow; many stop the run
            if not isinstance(error, StreamRLError):
                log.exception("group %d failed", seq)
            await self._reject(seq, error)
        else:
            self._failures_in_a_row = self._uniform_in_a_row = 0
            self._activity.done(mean_reward=float(group.rewards.mean()))
            return True
        return False

    async def _drop_uniform(self, seq: int, reward: float) -> None:
        """Give the group's place back; warn when nothing else comes any more, for then training stands still."""
        self._failures_in_a_row = 0
        self._uniform_in_a_row += 1
        self._activity.uniform()
        if self._uniform_in_a_row % UNIFORM_WARNING_GROUPS == 0:
            log.warning(
                "%s: %d groups in a row are dropped because all their responses scored the same (the last: %.3g); "
                "the task may be too easy or too hard by now, see rollout.drop_uniform_groups",
                *(self._membership.name, self._uniform_in_a_row, reward),
            )
        await self._tell_rejection(seq, f"all responses scored {reward:.3g}")

    async def _reject(self, seq: int, reason: Exception) -> None:
        self._failures_in_a_row += 1
        self._activity.rejected(seq, reason)
        await self._tell_rejection(seq, f"{type(reason).__name__}: {reason}")
        limit = self._config.rollout.max_failures
        if self._failures_in_a_row >= limit:
            raise StreamRLError(
                f"{self._failures_in_a_row} groups in a row failed (rollout.max_failures = {limit}); "
                f"the last, {seq}: {type(reason).__name__}: {reason}"
            ) from reason

    async def _tell_rejection(self, seq: int, reason: str) -> None:
        await self._control.reject(Reject(worker=self._membership.index, seq=seq, reason=reason))

    def _show_wait(self, waiting_for: str) -> None:
        self._membership.waiting_for = waiting_for


class _RunOver(Exception):
    """Ends the task group and the groups in it."""
