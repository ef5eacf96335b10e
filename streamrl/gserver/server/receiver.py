"""The receiving end of a weight update: process groups, and the staged set of tensors.

Between `begin` and `take` tensors are staged separately from the served ones: received in their final place if
possible, else copied there while the next one is received. Receiving blocks a separate thread, so that generation
continues. A failed receive discards the staged set.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamrl import checksum, cuda_memory
from streamrl.checksum import LineSums, checksums, dtype_name, line_sums
from streamrl.cuda_memory import Open, OpenWeights
from streamrl.device import SideStream, compute_with
from streamrl.errors import ModelError, PublicationError, Refused
from streamrl.machine import SHARED_MEMORY
from streamrl.safetensors_files import Copiers, mapped
from streamrl.transport.collective import MEETING_SHARE, broadcasts, destroy_group, form_group, wait_for_pending
from streamrl.transport.control import TensorSpec
from streamrl.transport.generation import InitWeightsUpdateGroup, UpdateWeightsFromDistributed

log = logging.getLogger(__name__)

Result = TypeVar("Result")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES_SHOWN = 8
CLOSING_SECONDS = 2.0
"""Longest time, in seconds, that a receive may keep the gserver from stopping."""


class ExpectedWeights(msgspec.Struct, frozen=True):
    """Shapes and dtype of the weights that an engine serves."""

    shapes: Mapping[str, tuple[int, ...]]
    """Hugging Face name → shape."""
    dtype: torch.dtype
    ignored: frozenset[str] = frozenset()
    """Names that may arrive and are dropped (the head of a tied model)."""


class StagedWeights(msgspec.Struct):
    """The tensors received since `begin`."""

    sums: dict[str, str] = {}
    """Name → `tensor_sums` of each tensor as stored; an empty string for a tensor that is not kept."""
    version: str | None = None
    """The last version named in a message."""
    abort_all_requests: bool = False


class WeightsAside(Protocol):
    """Storage for the staged set of an update, which is not served. Called in threads."""

    def store(self, name: str, tensor: Tensor) -> LineSums:
        """Keep a copy of `tensor`; return the sums of the copy. Several calls may run at a time."""

    def place(self, name: str) -> Tensor | None:
        """Return the memory of `name`, to be written in its served form; None if only `store` can write it."""

    def sums(self, name: str) -> LineSums:
        """Return the sums of `name`, which was written to its place."""

    def adopt(self, weights: Mapping[str, Tensor]) -> bool:
        """Keep `weights`, a complete set, in place until the next set is served; return False if `store` is needed.

        They are in memory of this host and never change.
        """

    def forget(self) -> None:
        """Keep the next set in other memory, since an aborted broadcast may still write to the places handed out."""

    def make_ready(self) -> None:
        """Prepare to compute with the complete set. Do nothing if nothing was written since the last call."""


class WeightReceiver:
    """Owns the weight groups of one gserver and its staged set."""

    def __init__(
        self,
        *,
        expected: ExpectedWeights | None,
        aside: WeightsAside | None,
        device: torch.device,
        timeout: float,
        open_shared: Open = cuda_memory.open_shared,
    ) -> None:
        """`aside`: storage for the weights that `expected` describes. `open_shared` opens the publisher's GPU memory.

        Without these two, tensors of any name are received and discarded.
        """
        self._expected = expected
        self._aside = aside
        self._device = device
        self._timeout = timeout
        self._shared = OpenWeights(open_shared)
        self._groups: dict[str, tuple[Any, torch.device]] = {}
        """Name → the process group, and the device on which tensors arrive."""
        self._staged: StagedWeights | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        """Buffer for tensors that cannot be received in place. It is kept, since new memory costs as much as a copy."""
        self._pending: list[Any] = []
        """Broadcasts that were in progress when one failed, and may still write."""
        self._beside = SideStream(device)
        self._busy = asyncio.Lock()
        self._copiers = Copiers()
        if aside is not None:
            checksum.make_ready()

    async def join_group(self, message: InitWeightsUpdateGroup) -> None:
        """Join a weight group; raises `PublicationError` if the other members do not."""
        if message.group_name in self._groups:
            raise Refused(f"weight group {message.group_name} exists already; destroy it first")
        if message.backend == "nccl" and self._device.type != "cuda":
            raise Refused('backend "nccl" needs a CUDA device and this gserver computes on the CPU; use "gloo"')
        # Not `exclusively`: a join that waits for a lost publisher must not delay the join with the next publisher.
        await in_thread(lambda: self._join_group(message))

    async def leave_group(self, name: str) -> None:
        """Leave a weight group; raises `Refused` if there is none of this name."""
        if name not in self._groups:
            raise Refused(f"there is no weight group {name}; known: {', '.join(self._groups) or 'none'}")
        await self.exclusively(lambda: self._leave_group(name))

    @property
    def begun(self) -> bool:
        """Whether an update has begun, so that arriving tensors are staged."""
        return self._staged is not None

    async def begin(self) -> None:
        """Start an empty staged set."""
        self._staged = StagedWeights()

    async def discard(self) -> None:
        """Discard an unfinished staged set."""
        self._staged = None

    async def receive(self, message: UpdateWeightsFromDistributed) -> None:
        """Receive the tensors that `message` announces, in its order; all or nothing."""
        staged = self._expecting()
        self._group(message.group_name)
        if message.load_format is not None:
            raise Refused(f"load_format {message.load_format!r} is not supported: send one broadcast for each tensor")
        if not len(message.names) == len(message.dtypes) == len(message.shapes):
            raise Refused("names, dtypes and shapes must be lists of equal length, one entry for each tensor")
        bucket = list(map(TensorSpec, message.names, message.dtypes, message.shapes))
        self._check(bucket)
        try:
            await self.exclusively(lambda: self._receive(message.group_name, bucket, staged))
        except PublicationError:
            self._drop(staged)
            raise
        staged.version = message.weight_version or staged.version
        staged.abort_all_requests |= message.abort_all_requests

    async def load(self, folder: Path, version: str | None) -> None:
        """Stage the tensors of the safetensors files in `folder`, which are read as they are copied."""
        staged = self._expecting()
        try:
            await self.exclusively(lambda: self._load(folder, staged))
        except ModelError:
            self._drop(staged)
            raise
        staged.version = version or staged.version

    async def staged_sums(self) -> dict[str, str]:
        """Return the checksums of the staged tensors."""
        staged = self._expecting()
        return {name: sums for name, sums in staged.sums.items() if sums}

    async def take(self) -> StagedWeights:
        """End the update and return its staged tensors; raises `Refused` if some are missing."""
        staged = self._expecting()
        self._drop(staged)
        missing = self._missing(staged)
        if missing and self._expected is not None:
            raise Refused(
                f"{len(missing)} of {len(self._expected.shapes)} tensors were not received: {_some(missing)}; "
                "the old weights are kept, begin again"
            )
        return staged

    async def close(self) -> None:
        """Leave all groups, except one in which a receive hangs: that one ends with the process."""
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                for name in list(self._groups):
                    await self.exclusively(lambda name=name: self._leave_group(name))  # type: ignore[misc]
        except TimeoutError:
            log.warning("a receive in weight group %s has not ended; leaving without it", ", ".join(self._groups))

    async def exclusively(self, call: Callable[[], Result]) -> Result:
        """Run `call` in a thread, never at the same time as a receive."""
        return await self.apart(lambda: in_thread(call))

    async def apart(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do `work` while nothing is received; it runs to its end even if the caller is cancelled."""

        async def run() -> Result:
            async with self._busy:
                return await work()

        task = asyncio.create_task(run())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    def _join_group(self, message: InitWeightsUpdateGroup) -> None:
        group = form_group(
            address=message.master_address,
            port=message.master_port,
            rank=message.rank_offset,
            world_size=message.world_size,
            name=message.group_name,
            backend=message.backend,
            timeout=self._timeout,
            meeting_seconds=MEETING_SHARE * self._timeout,
        )
        device = self._device if message.backend == "nccl" else torch.device("cpu")
        self._groups[message.group_name] = group, device

    def _leave_group(self, name: str) -> None:
        group, _ = self._groups.pop(name)
        destroy_group(group)

    def _group(self, name: str) -> tuple[Any, torch.device]:
        if name not in self._groups:
            raise Refused(
                f"there is no weight group {name}; call /init_weights_update_group first "
                f"(known: {', '.join(self._groups) or 'none'})"
            )
        return self._groups[name]

    def _expecting(self) -> StagedWeights:
        if self._staged is None:
            raise Refused("no weight update has begun, or a receive failed; call /begin_weight_update first")
        return self._staged

    def _drop(self, staged: StagedWeights) -> None:
        if self._staged is staged:
            self._staged = None

    def _keep(self, received: Iterable[tuple[str, Tensor | None]], staged: StagedWeights) -> None:
        """Stage tensors while further ones are `received`; None stands for a tensor received in its final place."""
        if self._device.type == "cpu":
            sums = self._copiers.each(self._store, received)
        else:  # copies are queued in the current stream of this thread
            sums = {name: self._store(name, tensor) for name, tensor in received}
        staged.sums |= dict.fromkeys(sums, "") | checksums({name: s for name, s in sums.items() if s is not None})

    def _store(self, name: str, received: Tensor | None) -> LineSums | None:
        aside = self._aside
        if aside is None or self._is_ignored(name):
            return None
        return aside.sums(name) if received is None else aside.store(name, received)

    def _is_ignored(self, name: str) -> bool:
        return self._expected is not None and name in self._expected.ignored

    def _make_ready(self, staged: StagedWeights) -> None:
        """Prepare the staged set if it is complete."""
        if self._aside is not None and not self._missing(staged):
            self._aside.make_ready()

    def _missing(self, staged: StagedWeights) -> list[str]:
        return [] if self._expected is None else [name for name in self._expected.shapes if name not in staged.sums]

    def _check_current(self, staged: StagedWeights) -> None:
        """Raise `Refused` if another update has begun while this one waited for a receive to end."""
        if self._staged is not staged:
            raise Refused("another weight update has begun")

    def _load(self, folder: Path, staged: StagedWeights) -> None:
        self._check_current(staged)
        wait_for_pending(self._pending)
        try:
            if self._adopt(folder, staged):
                return
            with self._beside.after_computation():
                self._keep(self._read(folder), staged)
                self._make_ready(staged)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the weights in {folder} cannot be read: {error}") from error

    def _adopt(self, folder: Path, staged: StagedWeights) -> bool:
        """Use the weights in `folder` in place if they are complete and in this host's memory; return whether it
        does."""
        if self._aside is None or self._expected is None or not folder.is_relative_to(SHARED_MEMORY):
            return False
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= mapped(file)
        for name, tensor in weights.items():
            self._check([_spec(name, tensor)])
        if not weights.keys() >= self._expected.shapes.keys() or not self._aside.adopt(weights):
            return False
        staged.sums |= checksums(self._copiers.each(lambda _, tensor: line_sums(tensor), weights.items()))
        self._make_ready(staged)
        return True

    def _read(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        if (folder / cuda_memory.FILE).exists():
            for name, tensor in self._shared.read(folder).items():
                self._check([_spec(name, tensor)])
                yield name, tensor
            return
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder} has no safetensors files (is it on this host?)")
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    tensor = opened.get_tensor(name)
                    self._check([_spec(name, tensor)])
                    yield name, tensor

    def _check(self, bucket: Sequence[TensorSpec]) -> None:
        """Raise `Refused` for tensors that the model does not have."""
        if not bucket:
            raise Refused("a bucket has no tensors; it needs at least one")
        unknown = [f"{spec.name}: {spec.dtype}" for spec in bucket if spec.dtype not in DTYPES]
        if unknown:
            raise Refused(f"dtypes must be {', '.join(DTYPES)}; got {_some(unknown)}")
        if self._expected is None:
            return
        problems = []
        for spec in bucket:
            name, shape = spec.name, tuple(spec.shape)
            if name in self._expected.ignored:
                continue
            if name not in self._expected.shapes:
                problems.append(f"{name} is unknown")
            elif shape != self._expected.shapes[name]:
                problems.append(f"{name} has shape {list(shape)} instead of {list(self._expected.shapes[name])}")
            elif DTYPES[spec.dtype] != self._expected.dtype:
                problems.append(f"{name} is {spec.dtype}, served as {dtype_name(self._expected.dtype)}")
        if problems:
            raise Refused(f"{len(problems)} tensors do not fit the model: {_some(problems)}")

    def _receive(self, group_name: str, bucket: Sequence[TensorSpec], staged: StagedWeights) -> None:
        """Receive and stage one bucket; prepare the set after the last one."""
        self._check_current(staged)
        wait_for_pending(self._pending)
        group, device = self._group(group_name)
        try:
            with self._beside.after_computation():
                self._keep(self._arriving(group, device, bucket), staged)
                self._make_ready(staged)
        except PublicationError:
            if device.type != "cpu":  # an aborted broadcast may still write there
                self._buffer = torch.empty(0, dtype=torch.uint8)
                self._pending.clear()
                if self._aside is not None:
                    self._aside.forget()
            raise

    def _arriving(
        self, group: Any, device: torch.device, bucket: Sequence[TensorSpec]
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Yield each tensor of the bucket as soon as it has arrived; None for one received in its final place."""
        places = self._places([spec.name for spec in bucket], device)
        others = [(spec.name, DTYPES[spec.dtype], spec.shape) for spec in bucket if spec.name not in places]
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in others]
        pieces = torch.split(self._room(sum(sizes), device), sizes) if sizes else ()
        buffered = {
            name: _aligned(piece, dtype).view(dtype).view(shape)
            for (name, dtype, shape), piece in zip(others, pieces, strict=True)
        }
        tensors = [(spec.name, (places | buffered)[spec.name]) for spec in bucket]
        watched = self._timeout if dist.get_backend(group) == "nccl" else None
        for name, _ in broadcasts(tensors, group, pending=self._pending, watched_seconds=watched):
            yield name, buffered.get(name)

    def _places(self, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
        """Return the storage of the tensors that can be received there."""
        if self._aside is None or self._expected is None:
            return {}
        kept = {name: self._aside.place(name) for name in names if not self._is_ignored(name)}
        return {name: place for name, place in kept.items() if place is not None and place.device == device}

    def _room(self, size: int, device: torch.device) -> Tensor:
        """Return `size` bytes of the buffer."""
        if self._buffer.numel() < size or self._buffer.device != device:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffer[:size]


async def in_thread(call: Callable[[], Result]) -> Result:
    """Run `call` in a separate thread, since it may hang in a collective.

    The thread is no daemon: the interpreter would shut down around a daemon thread, and its return from C++ would then
    end the process with SIGABRT. `launch/process.py: run_component` ends a process in which a thread still hangs after
    the gserver has ended.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def resolve(result: Any, error: BaseException | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def run() -> None:
        compute_with(1)
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(resolve, result, failure)

    threading.Thread(target=run, name="weight receiver").start()
    return await future


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, dtype_name(tensor.dtype), list(tensor.shape))


def _aligned(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `content`, or a copy of it that can be viewed as `dtype`."""
    return content if content.storage_offset() % dtype.itemsize == 0 else content.clone()


def _some(items: list[str]) -> str:
    rest = len(items) - NAMES_SHOWN
    return "; ".join(items[:NAMES_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
