"""A model worker: holds groups in its StreamDataset, and computes on them what the master asks.

Calls are carried out one after another in a compute thread, except `Publish`, which runs beside
them: weights may be read while the next step computes, and are changed only when the
publication is through.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from streamrl import progress
from streamrl.config import Config
from streamrl.device import compute_with, resolve_device, resolve_dtype
from streamrl.errors import DeadlineExceeded, TrainingError
from streamrl.models import initial_checkpoint
from streamrl.stream_dataset import StreamDataset, StreamIngress
from streamrl.trainer.backends.base import Backend, TrainItem
from streamrl.trainer.calls import (
    Call,
    Count,
    Counted,
    Discard,
    Done,
    Infer,
    Initialize,
    OpenStore,
    Publish,
    Published,
    Save,
    Stored,
    StoreOpened,
    Train,
    Trained,
)
from streamrl.trainer.checkpoint import write_folder
from streamrl.trainer.publisher import Publisher
from streamrl.transport.collective import destroy_group, form_group, open_store
from streamrl.transport.control import ControlClient
from streamrl.transport.membership import Membership
from streamrl.transport.request_reply import ReplyChannel
from streamrl.types import SampleMeta, TrajectoryGroup

log = logging.getLogger(__name__)

_GIVES = {"ref_inf": "ref_logprobs", "actor_inf": "proximal_logprobs"}


async def serve(config: Config, *, manager_url: str, index: int = 0, model_dir: Path) -> None:
    """Run model worker `index` until the run is over."""
    async with AsyncExitStack() as stack:
        client = ControlClient(manager_url)
        stack.push_async_callback(client.close)
        arrivals = _Arrivals(asyncio.get_running_loop())
        dataset = StreamDataset(
            rank=index, capacity_groups=config.stream.capacity_groups, on_stored=arrivals.put_from_thread
        )
        begun = progress.of_run(config)
        if begun is not None:
            dataset.restore(begun.trained)
        ingress = StreamIngress(
            dataset,
            host=config.stream.host,
            max_group_bytes=int(config.stream.max_group_mb * 2**20),
            resend_seconds=config.stream.resend_seconds,
        )
        ingress.start()
        stack.callback(ingress.close)
        membership = Membership(
            client,
            role="model_worker",
            index=index,
            address=ingress.endpoint,
            config_digest=config.digest(),
            stats=dataset.stats,
        )
        await membership.join(patience=config.manager.join_timeout_seconds)
        stack.push_async_callback(membership.leave)
        masters = await client.topology("master", 1, patience=config.manager.join_timeout_seconds)
        channel: ReplyChannel[Call] = ReplyChannel(endpoint=masters[0].address, worker=index, call_type=Call)
        stack.push_async_callback(channel.close)
        worker = ModelWorker(config, index=index, model_dir=model_dir, dataset=dataset, client=client)
        stack.push_async_callback(worker.close)
        tasks = [
            asyncio.create_task(worker.work(channel), name="calls"),
            asyncio.create_task(arrivals.report(channel), name="arrivals"),
            asyncio.create_task(membership.stopping.wait(), name="stop"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if membership.lost:
            raise membership.lost


class _Arrivals:
    """Brings metadata of stored groups from the stream's thread to the master, many at a time."""

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
            await channel.notify(Stored(metas))


class ModelWorker:
    """Carries out the master's calls."""

    def __init__(
        self, config: Config, *, index: int, model_dir: Path, dataset: StreamDataset, client: ControlClient
    ) -> None:
        self._config = config
        self._index = index
        self._model_dir = model_dir
        self._dataset = dataset
        self._client = client
        self._device = resolve_device(config.run.device, index=index)
        compute_with(1)  # in this thread; `config.trainer.threads` are those of the one that computes
        self._compute = ThreadPoolExecutor(
            1, thread_name_prefix="compute", initializer=compute_with, initargs=(config.trainer.threads,)
        )
        self._publishing = ThreadPoolExecutor(1, thread_name_prefix="publish", initializer=compute_with, initargs=(1,))
        self._weights_free = threading.Event()
        self._weights_free.set()
        self._backend: Backend | None = None
        self._publisher: Publisher | None = None
        self._store: Any = None
        self._group: Any = None
        self._keys: dict[str, dict[int, NDArray[np.float32]]] = {key: {} for key in _GIVES.values()}
        self._side_tasks: set[asyncio.Task[None]] = set()

    async def work(self, channel: ReplyChannel[Call]) -> None:
        """Serve calls for ever; an exception goes to the master, which stops the run."""
        while True:
            call_id, call = await channel.receive()
            if isinstance(call, Publish):
                self._weights_free.clear()
                task = asyncio.create_task(self._answer(channel, call_id, call))
                self._side_tasks.add(task)
                task.add_done_callback(self._side_tasks.discard)
            else:
                await self._answer(channel, call_id, call)

    async def close(self) -> None:
        for task in self._side_tasks:
            task.cancel()
        await asyncio.gather(*self._side_tasks, return_exceptions=True)
        self._weights_free.set()
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._publishing.shutdown(wait=False, cancel_futures=True)
        if self._publisher is not None:
            self._publisher.close()
        if self._group is not None:
            destroy_group(self._group)

    async def _answer(self, channel: ReplyChannel[Call], call_id: int, call: Call) -> None:
        try:
            result = await self._carry_out(call)
        except Exception:  # the one place where any failure of a call is turned into its answer
            log.exception("%s failed", type(call).__name__)
            await channel.fail(call_id, traceback.format_exc(limit=-6))
        else:
            await channel.reply(call_id, result)

    async def _carry_out(self, call: Call) -> msgspec.Struct:
        match call:
            case OpenStore():
                host = self._config.weights.host
                self._store = open_store(host)
                return StoreOpened(host=host, port=self._store.port)
            case Initialize():
                return await self._in_compute(self._initialize, call)
            case Infer():
                return await self._in_compute(self._infer, call)
            case Train():
                return await self._in_compute(self._train, call)
            case Discard():
                self._forget(call.seqs, come_again=True)
                return Done(compute_seconds=0.0)
            case Publish():
                return await self._publish(call)
            case Save():
                return await self._in_compute(self._save, call)
            case Count():
                return self._count()

    async def _in_compute(self, function: Callable[[Any], msgspec.Struct], call: Any) -> msgspec.Struct:
        return await asyncio.get_running_loop().run_in_executor(self._compute, function, call)

    def _initialize(self, call: Initialize) -> Done:
        # imported here: transformers takes seconds, and the stream should be open before
        from streamrl.trainer.backends.torch import TorchBackend

        began = time.monotonic()
        config = self._config
        torch.manual_seed(config.run.seed)
        if call.world_size > 1:
            self._group = form_group(
                address=call.store_host,
                port=call.store_port,
                rank=self._index,
                world_size=call.world_size,
                name="data_parallel",
                backend="nccl" if self._device.type == "cuda" else "gloo",
                timeout=config.manager.join_timeout_seconds,
                store=self._store,
            )
        self._backend = TorchBackend(
            model_dir=self._model_dir,
            reference_dir=initial_checkpoint(config) if config.run.resume_from else self._model_dir,
            trainer=config.trainer,
            algorithm=config.algorithm,
            temperature=config.rollout.sampling.temperature,
            longest=config.rollout.sampling.max_new_tokens,
            total_steps=config.planned_steps,
            device=self._device,
            dtype=resolve_dtype(config.trainer.dtype, self._device),
            process_group=self._group,
        )
        if config.run.resume_from:
            self._backend.load_state(Path(config.run.resume_from) / progress.STATE)
        if self._index == 0:
            self._publisher = self._make_publisher()
        return Done(compute_seconds=time.monotonic() - began)

    def _make_publisher(self) -> Publisher:
        weights = self._config.weights
        loop_executor = self._publishing

        async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(loop_executor, function, *args)

        default = "nccl" if self._device.type == "cuda" else "gloo"
        return Publisher(
            client=self._client,
            config=weights,
            backend=default if weights.backend == "auto" else weights.backend,  # type: ignore[arg-type]
            dtype=resolve_dtype(self._config.gserver.dtype, self._device),
            device=self._device,
            in_thread=in_thread,
        )

    def _infer(self, call: Infer) -> Done:
        began = time.monotonic()
        groups = self._dataset.get(call.seqs)
        values = self._ready_backend.logprobs(groups, reference=call.mfc == "ref_inf")
        self._keys[_GIVES[call.mfc]].update(zip(call.seqs, values, strict=True))
        return Done(compute_seconds=time.monotonic() - began)

    def _train(self, call: Train) -> Trained:
        began = time.monotonic()
        blocked = 0.0
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        ages: dict[int, int] = {}

        def wait_for_publication() -> None:
            nonlocal blocked
            started = time.monotonic()
            limit = self._config.trainer.step_timeout_seconds
            if not self._weights_free.wait(limit):
                raise DeadlineExceeded(f"the publication of version {call.policy_version} took more than {limit:.0f} s")
            blocked += time.monotonic() - started

        for number, minibatch in enumerate(call.minibatches * self._config.algorithm.epochs):
            items = [self._item(seq, call, updated=number > 0) for seq in minibatch.seqs]
            if number < len(call.minibatches):  # the first epoch
                for item in items:
                    _count_ages(ages, item)
            statistics = self._ready_backend.train(
                items,
                loss_tokens=minibatch.loss_tokens,
                sequences=minibatch.sequences,
                before_update=wait_for_publication,
            )
            for name, value in statistics.sums.items():
                sums[name] = sums.get(name, 0.0) + value
            for name, value in statistics.maxima.items():
                maxima[name] = max(maxima.get(name, value), value)
        self._forget([seq for m in call.minibatches for seq in m.seqs], come_again=False)
        return Trained(
            compute_seconds=time.monotonic() - began - blocked,
            blocked_seconds=blocked,
            sums=sums,
            maxima=maxima,
            token_ages=ages,
        )

    def _item(self, seq: int, call: Train, *, updated: bool) -> TrainItem:
        """`updated`: the policy is no longer the one at the start of the step."""
        group = self._dataset.get([seq])[0]
        versions = group.packed_policy_versions
        proximal = self._keys["proximal_logprobs"].get(seq)
        return TrainItem(
            group=group,
            age=call.policy_version - versions,
            trainable=group.packed_loss_mask & (versions >= call.oldest_version),
            fresh=_comparable(group, call.policy_version) & (proximal is not None or not updated),
            proximal_logprobs=proximal,
            ref_logprobs=self._keys["ref_logprobs"].get(seq),
        )

    def _forget(self, seqs: list[int], *, come_again: bool) -> None:
        self._dataset.discard(seqs, forget=come_again)
        for values in self._keys.values():
            for seq in seqs:
                values.pop(seq, None)

    async def _publish(self, call: Publish) -> Published:
        if self._publisher is None:
            raise TrainingError(f"model_worker/{self._index} was asked to publish, which only worker 0 does")
        try:
            return await self._publisher.publish(call.version, list(self._ready_backend.named_weights()))
        finally:
            self._weights_free.set()

    def _save(self, call: Save) -> Done:
        began = time.monotonic()
        folder = Path(call.folder)

        def write(unfinished: Path) -> None:
            self._ready_backend.save(unfinished)
            progress.write(unfinished, call.progress)
            self._ready_backend.save_state(unfinished / progress.STATE)

        try:
            write_folder(folder, write)
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"the checkpoint {folder} cannot be written ({error}); those before it are whole: make room there, "
                "or lower trainer.keep_checkpoints, then go on with `streamrl run CONFIG --resume`"
            ) from error
        config = self._config
        progress.prune(folder.parent, keep=config.trainer.keep_checkpoints, spare=config.run.resume_from)
        return Done(compute_seconds=time.monotonic() - began)

    def _count(self) -> Counted:
        stats = self._dataset.stats()
        return Counted(
            stored=int(stats["groups_stored_total"]),
            duplicated=int(stats["groups_duplicated_total"]),
            refused=int(stats["groups_refused_total"]),
            held=int(stats["groups_held"]),
        )

    @property
    def _ready_backend(self) -> Backend:
        if self._backend is None:
            raise TrainingError(f"model_worker/{self._index} was asked to compute before Initialize")
        return self._backend


def _comparable(group: TrajectoryGroup, version: int) -> NDArray[np.bool_]:
    """`[tokens]`: sampled tokens of responses that `version` wrote alone.

    Where weights changed in the middle, the rest may attend to keys and values of the old ones
    (`weights.pause_mode`), so the two sides differ without anything being wrong.
    """
    sampled = group.packed_loss_mask
    starts = np.cumsum(group.seqlens) - group.seqlens
    others = sampled & (group.packed_policy_versions != version)
    mixed: NDArray[np.bool_] = np.logical_or.reduceat(others, starts)
    return sampled & ~np.repeat(mixed, group.seqlens)


def _count_ages(ages: dict[int, int], item: TrainItem) -> None:
    found, counts = np.unique(item.age[item.trainable], return_counts=True)
    for age, count in zip(found.tolist(), counts.tolist(), strict=True):
        ages[age] = ages.get(age, 0) + count
