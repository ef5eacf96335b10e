"""A rollout worker: takes sequence numbers from the manager, and streams finished groups to the trainer.

Owns its reward processes, its connections, and one task for each group that it was admitted.
Invariant: each admitted sequence number ends in exactly one of two ways, as long as the worker
lives: its group is stored with the trainer (who tells the manager), or the worker rejects it with
a reason. What a worker leaves undone when it dies, the manager gives to another.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from contextlib import AsyncExitStack
from pathlib import Path

from streamrl.config import Config
from streamrl.errors import DeadlineExceeded, PeerError, RewardError, StreamRLError
from streamrl.rollout.activity import Activity
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.data import PromptSource
from streamrl.rollout.groups import GroupMaker, first_error
from streamrl.rollout.partial import Generator, GroupRoute
from streamrl.rollout.reward.pool import RewardPool
from streamrl.rollout.workflows import load_workflow
from streamrl.transport.control import Admission, Admit, ControlClient, Reject
from streamrl.transport.generation import GenerationClient
from streamrl.transport.membership import Membership
from streamrl.transport.push_pull import GroupPusher

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Between calls of the manager while it cannot be reached; `Membership` decides when it is lost."""
UNIFORM_WARNING_GROUPS = 100
"""So many groups in a row without any contrast are worth a warning."""
PATIENCE_REQUESTS = 2
"""A response without a new token for so many request time limits is given up."""

OPEN_FILES = 65536


async def serve(config: Config, *, manager_url: str, index: int = 0, model_dir: Path) -> None:
    """Run rollout worker `index` until the run is over, or the task is cancelled."""
    _allow_many_connections()
    async with AsyncExitStack() as owned:
        control = ControlClient(manager_url)
        owned.push_async_callback(control.close)
        activity = Activity()
        membership = Membership(
            control,
            role="rollout",
            index=index,
            address="",
            config_digest=config.digest(),
            stats=activity.stats,
        )
        await membership.join(patience=config.manager.join_timeout_seconds)
        owned.push_async_callback(membership.leave)
        work = asyncio.create_task(
            _work(
                config,
                control=control,
                membership=membership,
                activity=activity,
                model_dir=model_dir,
                owned=owned,  # not closed by the task: its cancellation would cut the closing short
            ),
            name=membership.name,
        )
        stop = asyncio.create_task(membership.stopping.wait(), name=f"end of {membership.name}")
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            cause = first_error(error)
            await _tell(membership, cause)
            raise cause
        if membership.lost is not None:
            raise membership.lost


async def _work(
    config: Config,
    *,
    control: ControlClient,
    membership: Membership,
    activity: Activity,
    model_dir: Path,
    owned: AsyncExitStack,
) -> None:
    """Build the parts and make groups, until cancelled or the manager says stop; `owned` closes the parts."""
    membership.waiting_for = "reward processes and tokenizer"
    rewards = RewardPool.of(config)
    owned.push_async_callback(rewards.close)
    workflow = load_workflow(config.rollout.workflow)
    async with asyncio.TaskGroup() as starting:
        starting.create_task(rewards.start())
        loading = starting.create_task(asyncio.to_thread(_load_data, config, model_dir))
    chat, prompts = loading.result()
    membership.waiting_for = "the model workers to register"
    heads = await control.topology(
        "model_worker", config.trainer.data_parallel, patience=config.manager.join_timeout_seconds
    )
    pusher = GroupPusher(
        worker=membership.name,
        endpoints=[head.address for head in heads],
        max_group_bytes=int(config.stream.max_group_mb * 1e6),
        resend_seconds=config.stream.resend_seconds,
        warn_seconds=config.trainer.wait_warning_seconds,
    )
    owned.push_async_callback(pusher.close)
    client = GenerationClient(timeout=config.rollout.request_timeout_seconds)
    owned.push_async_callback(client.close)
    generator = Generator(
        client,
        sampling=config.rollout.sampling,
        seed=config.run.seed,
        patience=PATIENCE_REQUESTS * config.rollout.request_timeout_seconds,
    )
    maker = GroupMaker(
        config,
        worker=membership.name,
        prompts=prompts,
        workflow=workflow,
        chat=chat,
        generator=generator,
        rewards=rewards,
        activity=activity,
    )
    worker = RolloutWorker(
        config,
        membership=membership,
        control=control,
        maker=maker,
        pusher=pusher,
        activity=activity,
        data_rows=len(prompts),
    )
    await worker.run()


class RolloutWorker:
    """Admits groups as long as there are free places, and sees each to its end."""

    def __init__(
        self,
        config: Config,
        *,
        membership: Membership,
        control: ControlClient,
        maker: GroupMaker,
        pusher: GroupPusher,
        activity: Activity,
        data_rows: int,
    ) -> None:
        """`data_rows`: of the training data."""
        self._config = config
        self._data_rows = data_rows
        self._membership = membership
        self._control = control
        self._maker = maker
        self._pusher = pusher
        self._activity = activity
        self._failures_in_a_row = 0
        self._uniform_in_a_row = 0
        self._place_free = asyncio.Event()
        self._held: set[int] = set()
        activity.on_wait(self._show_wait)

    async def run(self) -> None:
        """Until the manager says stop; raises what has to stop the run."""
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    admissions = await self._admit(await self._free_places())
                    if admissions is None:
                        break
                    for admission in admissions:
                        if admission.seq in self._held:
                            continue  # given out again while this worker was silent: it still makes it
                        self._held.add(admission.seq)
                        groups.create_task(self._group(admission), name=f"group {admission.seq}")
                raise _RunOver
        except BaseExceptionGroup as errors:
            _, failures = errors.split(_RunOver)
            if failures is not None:
                raise first_error(failures) from None
            log.info("%s: the run is over", self._membership.name)

    async def _free_places(self) -> int:
        """How many groups may start, once at least one may."""
        limit = self._config.rollout.max_concurrent_groups
        while len(self._held) >= limit:
            self._place_free.clear()
            await self._place_free.wait()
        return limit - len(self._held)

    async def _admit(self, count: int) -> list[Admission] | None:
        """Sequence numbers to work on, perhaps none yet; None when the run is over."""
        try:
            reply = await self._control.admit(
                Admit(worker=self._membership.index, count=count, data_rows=self._data_rows)
            )
        except (PeerError, DeadlineExceeded) as error:
            log.warning("%s: not admitted, trying on: %s", self._membership.name, error)
            await asyncio.sleep(RETRY_SECONDS)
            return []
        return None if reply.stop else reply.admissions

    async def _group(self, admission: Admission) -> None:
        try:
            with self._activity.group():
                await self._make_and_push(admission)
        finally:
            self._held.discard(admission.seq)
            self._place_free.set()

    async def _make_and_push(self, admission: Admission) -> None:
        seq = admission.seq
        route = GroupRoute(self._control, worker=self._membership.index, seq=seq, gserver=admission.gserver)
        try:
            group = await self._maker.make(seq, route)
            if self._config.rollout.drop_uniform_groups and bool((group.rewards == group.rewards[0]).all()):
                await self._drop_uniform(seq, float(group.rewards[0]))
                return
            with self._activity.pushing():
                await self._pusher.push(group)
        except RewardError as error:
            if self._config.rollout.reward.on_error == "stop":
                raise
            await self._reject(seq, error)
        except Exception as error:  # one group may fail, for example in the user's workflow; many stop the run
            if not isinstance(error, StreamRLError):
                log.exception("group %d failed", seq)
            await self._reject(seq, error)
        else:
            self._failures_in_a_row = self._uniform_in_a_row = 0
            self._activity.done(mean_reward=float(group.rewards.mean()))

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
        """Until the manager has heard it: a group that nobody rejects would keep its place for ever."""
        while True:
            try:
                await self._control.reject(Reject(worker=self._membership.index, seq=seq, reason=reason))
                return
            except (PeerError, DeadlineExceeded) as error:
                log.warning("%s: rejection of %d not delivered, trying on: %s", self._membership.name, seq, error)
                await asyncio.sleep(RETRY_SECONDS)

    def _show_wait(self, waiting_for: str) -> None:
        self._membership.waiting_for = waiting_for


class _RunOver(Exception):
    """Ends the task group and the groups in it."""


def _load_data(config: Config, model_dir: Path) -> tuple[ChatTokenizer, PromptSource]:
    chat = ChatTokenizer.load(model_dir, chat_template=config.model.chat_template)
    return chat, PromptSource.open(config, chat)


async def _tell(membership: Membership, error: BaseException) -> None:
    """Report a fatal error, if the manager still listens."""
    try:
        await membership.fail(error)
    except (PeerError, DeadlineExceeded) as silence:
        log.warning("%s: the manager could not be told of the failure: %s", membership.name, silence)


def _allow_many_connections() -> None:
    """Each request in flight is a connection, and the usual limit of 1024 open files is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
