"""A model worker: holds groups in its StreamDataset, and carries out the master's calls on them.

Calls are carried out one after another in a compute thread, in the order that all workers share. There are two
exceptions. Calls that need no model, such as `Spec`, are carried out at once. `Publish` runs in parallel with the
computation: weights may be read while the next step computes, and are changed only when the publication has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from streamrl import essential
from streamrl.architecture import read_architecture
from streamrl.children import EXIT_GONE_BACK
from streamrl.config import Config
from streamrl.cuda_memory import gpu_identity
from streamrl.device import compute_repeatably, compute_with, empty_cache, resolve_device, resolve_dtype
from streamrl.errors import GoneBack, PeerLost, StreamRLError, TrainingError
from streamrl.models import routing_of, special_token_ids, vocab_size, weights_fingerprint
from streamrl.records import progress
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import (
    PUBLICATION_STEPS,
    Call,
    CallDone,
    ClearDataCache,
    FinishSave,
    Function,
    Inference,
    Initialize,
    ModelConfigRequest,
    OpenStore,
    PublicationReply,
    Publish,
    ResponseReply,
    ResponseRequest,
    Save,
    Spec,
    StorageNotice,
    StoreAddress,
    TrainStep,
    WorkerSpec,
)
from streamrl.trainer.graph import graph_of
from streamrl.trainer.layout import layout_of
from streamrl.trainer.worker.assembly import Assembly, resume
from streamrl.trainer.worker.computation import ACTOR, Computation
from streamrl.trainer.worker.data import DataManager, WorkerData
from streamrl.trainer.worker.publisher import Publisher, carriers_for
from streamrl.trainer.worker.weight_broadcast import backend_for
from streamrl.trainer.worker.weight_source import WeightSource
from streamrl.transport.addresses import LOOPBACK, Reach, reach_towards
from streamrl.transport.codec import Limits
from streamrl.transport.collective import allocate_as_sglang, closed_after_forming, join_world, open_store, shut
from streamrl.transport.credentials import ReceiverKeys
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.membership import Membership
from streamrl.transport.puller import GroupPuller
from streamrl.transport.request_reply import ReplyChannel
from streamrl.transport.secret import encrypts
from streamrl.types import SampleMeta
from streamrl.waits import first_of

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""Longest wait at the end for a publication that is under way, in seconds."""
GIVEN_UP = 1000
"""Maximal number of prompts that a run may give up for each group that it keeps."""


async def serve(config: Config, *, manager_url: str, index: int = 0, model_dir: Path, advertise: str = "") -> None:
    """Run model worker `index` until the run is over.

    `advertise`: the address by which others reach this process; if it is empty, the address from which this process
    reaches the manager.
    """
    reach = reach_towards(manager_url, advertise=advertise)
    async with AsyncExitStack() as stack:
        client = ControlClient.of(config, manager_url)
        stack.push_async_callback(client.close)
        arrivals = _Arrivals(asyncio.get_running_loop())
        dataset = StreamDataset(
            rank=index,
            capacity_groups=config.capacity_groups,
            on_stored=arrivals.put_from_thread,
            special=special_token_ids(model_dir, stop_token_ids=config.stop_token_ids),
        )
        begun = progress.of_run(config)
        if begun is not None:
            dataset.restore(begun.trained)
        address, door = "", None
        if index in layout_of(config.trainer, "actor").heads:
            version = begun.policy_version if begun else 0
            door = GroupReceiver(
                config,
                dataset,
                model_dir=model_dir,
                policy_version=version,
                reach=reach,
                keys=client.receiver_keys("model_worker"),
            )
            stack.callback(door.puller.close)
            address = door.puller.endpoint
        worker = ModelWorker(
            config, index=index, model_dir=model_dir, dataset=dataset, door=door, client=client, reach=reach
        )
        membership = Membership(
            client,
            role="model_worker",
            index=index,
            address=address,
            config=config,
            model=weights_fingerprint(model_dir),
            stats=worker.stats,
            begins_from=progress.identity(config),
        )
        await membership.join(patience=config.limits.start_seconds)
        if door is not None:
            door.puller.start()
        stack.push_async_callback(membership.leave)

        async def work() -> None:
            controllers = await client.topology("controller", 1, patience=config.limits.start_seconds)
            channel: ReplyChannel[Call] = ReplyChannel(
                master=controllers[0], credential=membership.credential("controller"), call_type=Call
            )
            stack.push_async_callback(channel.close)
            stack.push_async_callback(worker.close)
            await first_of(worker.work(channel), arrivals.report(channel))

        try:
            await membership.until_over(work())
        except (GoneBack, PeerLost) as lost:
            if lost is not membership.lost:
                raise
            log.warning("%s: %s", membership.name, lost)
            os._exit(EXIT_GONE_BACK)  # at once: other ranks may be gone, and a thread may wait for them


class GroupReceiver:
    """The entrance for groups at a data-parallel head, which refuses groups that cannot have been admitted.

    Policy version v + 1 is known here before any gserver can sample from it, since all heads take part in the training
    step that makes it. Only the manager knows which sequence numbers were handed out. But admission bounds the number
    of accepted or running groups, and a run that gives up more than `GIVEN_UP` prompts for each of them makes no
    progress.
    """

    def __init__(
        self,
        config: Config,
        dataset: StreamDataset,
        *,
        model_dir: Path,
        policy_version: int,
        keys: ReceiverKeys,
        reach: Reach = LOOPBACK,
    ) -> None:
        routes, experts = routing_of(model_dir) or (0, 0)
        self._ahead = config.staleness.max_staleness + 1
        self._groups_per_batch = config.trainer.batch_groups
        self.puller = GroupPuller(
            dataset,
            keys=keys,
            encrypted=encrypts(config, reach.local),
            reach=reach,
            limits=Limits(
                max_group_bytes=config.limits.group_bytes,
                fewest_siblings=config.rollout.fewest_siblings,
                group_size=config.rollout.group_size,
                max_context=config.gserver.max_context,
                vocab_size=vocab_size(model_dir),
                routes=routes,
                experts=experts,
            ),
            silence_seconds=config.limits.silence_seconds,
        )
        self.open_for(policy_version)

    def open_for(self, policy_version: int) -> None:
        """Accept groups that were sampled from policies up to `policy_version`."""
        seqs = (1 + GIVEN_UP) * (policy_version + self._ahead) * self._groups_per_batch
        self.puller.expect(newest_version=policy_version, seqs=seqs)


class _Arrivals:
    """Passes metadata of stored groups from the stream's thread to the master, many at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._metas: list[SampleMeta] = []
        self._some = asyncio.Event()

    def put_from_thread(self, meta: SampleMeta) -> None:
        with self._lock:
            self._metas.append(meta)
            first = len(self._metas) == 1
        if first:
            self._loop.call_soon_threadsafe(self._some.set)

    async def report(self, channel: ReplyChannel[Call]) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            with self._lock:
                metas, self._metas = self._metas, []
            channel.notify(StorageNotice(metas))


@dataclass(eq=False)
class ModelWorker:
    """Carries out the master's calls."""

    config: Config
    _: KW_ONLY
    index: int
    model_dir: Path
    dataset: StreamDataset
    door: GroupReceiver | None
    """The entrance to the data set, if this worker is a data-parallel head."""
    client: ControlClient
    reach: Reach = LOOPBACK
    """How others reach this process."""

    def __post_init__(self) -> None:
        self._device = resolve_device(self.config.run.device, index=self.index)
        compute_with(1)  # in this thread; `config.trainer.threads` is for the compute thread
        self._compute = ThreadPoolExecutor(
            1, thread_name_prefix="compute", initializer=compute_with, initargs=(self.config.trainer.threads,)
        )
        self._publishing = ThreadPoolExecutor(1, thread_name_prefix="publish", initializer=compute_with, initargs=(1,))
        self._weights_free = threading.Event()
        self._weights_free.set()
        self._data = WorkerData(self.dataset, rank=self.index)
        self._computation: Computation | None = None
        self._source: WeightSource | None = None
        self._publisher: Publisher | None = None
        self._store: Any = None
        self._side_tasks: set[asyncio.Task[None]] = set()

    async def work(self, channel: ReplyChannel[Call]) -> None:
        """Serve calls forever; an exception is sent to the master, which stops the run."""
        ordered: asyncio.Queue[tuple[int, Call]] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._work_in_order(channel, ordered), name="calls in order")
            while True:
                call_id, call = await channel.receive()
                match call:
                    case Spec() | ModelConfigRequest() | ResponseRequest() | ClearDataCache():
                        tasks.create_task(self._answer(channel, call_id, call))
                    case Publish():
                        self._weights_free.clear()
                        task = essential.begin(self._answer_beside(channel, call_id, call), name="publication")
                        self._side_tasks.add(task)
                        task.add_done_callback(self._side_tasks.discard)
                    case _:
                        if isinstance(call, TrainStep) and self.door is not None:
                            self.door.open_for(call.policy_version + 1)
                        ordered.put_nowait((call_id, call))

    def stats(self) -> dict[str, float]:
        """Return counters, for people."""
        return self.dataset.stats() | (self._computation.stats() if self._computation is not None else {})

    async def close(self) -> None:
        """Stop, after a short wait for a publication that is under way."""
        for task in self._side_tasks:
            task.cancel()
        if self._side_tasks:
            _, late = await asyncio.wait(self._side_tasks, timeout=GRACE_SECONDS)
            if late:
                log.warning("a publication waits for gservers or other ranks that may be gone; leaving without its end")
        self._weights_free.set()
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._publishing.shutdown(wait=False, cancel_futures=True)
        if self._publisher is not None:
            self._publisher.close()
        self._data.close()
        if self._computation is not None:
            await asyncio.to_thread(self._computation.close)

    async def _work_in_order(self, channel: ReplyChannel[Call], ordered: asyncio.Queue[tuple[int, Call]]) -> None:
        while True:
            await self._answer(channel, *await ordered.get())

    async def _answer_beside(self, channel: ReplyChannel[Call], call_id: int, call: Publish) -> None:
        try:
            await self._answer(channel, call_id, call)
        finally:
            self._weights_free.set()

    async def _answer(self, channel: ReplyChannel[Call], call_id: int, call: Call) -> None:
        try:
            result = await self._carry_out(call)
        except Exception as error:  # the one place where any failure of a call is turned into its reply
            log.exception("%s failed", type(call).__name__)
            expected = isinstance(error, StreamRLError)  # its message is complete
            text = f"{type(error).__name__}: {error}" if expected else traceback.format_exc(limit=-6)
            channel.fail(call_id, text)
        else:
            channel.reply(call_id, result)

    async def _carry_out(self, call: Call) -> msgspec.Struct:
        match call:
            case Spec():
                return WorkerSpec(
                    roles=self._computation.describe() if self._computation else {},
                    duplicated=int(self.dataset.stats()["groups_duplicated_total"]),
                )
            case ClearDataCache():
                self._data.discard(call.seqs, come_again=call.come_again)
                if not call.come_again:
                    self._compute.submit(empty_cache, self._device)
                return CallDone(compute_seconds=0.0)
            case ModelConfigRequest():
                return read_architecture(self.model_dir, any_type=True)
            case ResponseRequest():
                return ResponseReply(*self._data.response(call.response))
            case OpenStore():
                self._store = open_store(self.reach.local)
                return StoreAddress(host=self.reach.announced, port=self._store.port)
            case Initialize():
                with closed_after_forming():
                    done = await self._in_compute(self._initialize, call)
                if self._store is not None:
                    shut(self._store.port)  # all ranks have met in the last group that is formed there
                return done
            case Inference() | Function() | TrainStep() | Save() | FinishSave():
                return await self._in_compute(self._ready.carry_out, call)
            case Publish():
                return await self._publish(call)

    async def _in_compute(self, function: Callable[[Any], msgspec.Struct], call: Any) -> msgspec.Struct:
        return await asyncio.get_running_loop().run_in_executor(self._compute, function, call)

    def _initialize(self, call: Initialize) -> CallDone:
        began = time.monotonic()
        config = self.config
        world = config.trainer.workers
        torch.manual_seed(config.run.seed)
        if config.run.record:
            compute_repeatably(self._device)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        if config.gserver.traits.nccl_as_sglang:
            allocate_as_sglang()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if call.store_host:
            join_world(
                address=call.store_host,
                port=call.store_port,
                rank=self.index,
                world_size=world,
                backend=backend,
                timeout=config.limits.call_seconds,
                store=self._store,
            )
        if world > 1:
            self._data.manager = DataManager(
                self.index,
                world_size=world,
                host=call.store_host,
                port=call.store_port,
                timeout_seconds=config.limits.call_seconds,
                backend=backend,
                device=self._device,
            )
        graph = graph_of(config)
        assembly = Assembly(config, roles=graph.roles, model_dir=self.model_dir, rank=self.index, device=self._device)
        if config.run.resume_from:
            resume(assembly, Path(config.run.resume_from))
        weights = config.weights
        carried_by = backend_for(weights, self._device) if config.gserver.traits.receives_nccl else "gloo"
        dtype = resolve_dtype(config.gserver.dtype, self._device)
        self._source = WeightSource(
            assembly.published(),
            world=world,
            timeout_seconds=PUBLICATION_STEPS * weights.attempts * config.limits.update_seconds,
            dtype=dtype,
        )
        if self.index == 0:
            carriers = carriers_for(
                config,
                backend=carried_by,
                dtype=dtype,
                device=self._device,
                reach=self.reach,
                numbers=sum(math.prod(shape) for _, shape in self._source.specs()),
                gpu=gpu_identity(self._device),
                gpu_memory=lambda: torch.cuda.mem_get_info(self._device)[0],
            )
            self._publisher = Publisher(
                client=self.client, config=config, carriers=carriers, in_thread=self._in_publishing
            )
        self._computation = Computation(
            config, rank=self.index, graph=graph, assembly=assembly, data=self._data, weights_free=self._weights_free
        )
        return CallDone(compute_seconds=time.monotonic() - began)

    async def _in_publishing(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._publishing, function, *args)

    async def _publish(self, call: Publish) -> PublicationReply:
        if self._source is None:
            raise TrainingError(f"model_worker/{self.index} was asked to publish before Initialize")
        # not in the compute thread, where the next step may already wait for this publication
        await self._in_publishing(self._ready.bring_back, ACTOR)
        if self._publisher is not None:
            return await self._publisher.publish(
                call.version, self._source, resync=call.resync, on_read=self._weights_free.set
            )
        await self._in_publishing(self._source.serve)
        return PublicationReply(seconds=0.0, pause_seconds=0.0, bytes=0, attempts=0)

    @property
    def _ready(self) -> Computation:
        if self._computation is None:
            raise TrainingError(f"model_worker/{self.index} was asked to compute before Initialize")
        return self._computation
