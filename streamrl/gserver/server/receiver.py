"""The receiving end of a weight update: process groups, and the set of tensors that waits aside.

Between `begin` and `take` tensors are kept aside, where nobody serves them: received there, if that can be, or copied
there while the next one is received. Receiving blocks a thread of its own, so that generation goes on. A receive that
fails discards the set, unless it was a part of a named transfer (`ReceiveWeights`): what is whole of that is kept, and
it may go on in another group.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamrl import checksum, cuda_memory
from streamrl.checksum import dtype_name, tensor_sums
from streamrl.cuda_memory import Open
from streamrl.delta import Delta, apply
from streamrl.device import SideStream, compute_with
from streamrl.errors import ModelError, PublicationError, Refused, StreamRLError
from streamrl.machine import SHARED_MEMORY
from streamrl.safetensors_files import Copiers, mapped
from streamrl.transport.collective import broadcasts, destroy_group, form_group, wait_for_pending
from streamrl.transport.control import TensorSpec, group_of_sender
from streamrl.transport.generation import (
    InitWeightsUpdateGroup,
    Meeting,
    ReceiveWeights,
    StagedWeights,
    UpdateWeightsFromDistributed,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES_SHOWN = 8
CLOSING_SECONDS = 2.0
"""How long a receive may keep the gserver from stopping."""


class Expected(msgspec.Struct, frozen=True):
    """The weights that an engine serves."""

    shapes: Mapping[str, tuple[int, ...]]
    """Hugging Face name → shape."""
    dtype: torch.dtype
    ignored: frozenset[str] = frozenset()
    """Names that may come and are not kept (the head of a tied model)."""


class Staged(msgspec.Struct):
    """What was received since `begin`."""

    sums: dict[str, str] = {}
    """Name → `tensor_sums` of each tensor as it lies stored; empty strings where none is kept."""
    version: str | None = None
    """The last one that was named."""
    abort_all_requests: bool = False
    transfer: str = ""
    """Names the weights, if they may come in several attempts."""
    buckets: list[int] = []
    """For each sender of such weights, how many of its buckets are here."""


class WeightsAside(Protocol):
    """Where the staged set of an update is kept, and nobody serves it. Called in threads."""

    def store(self, name: str, tensor: Tensor) -> str:
        """Keep a copy of `tensor`; return `checksum.tensor_sums` of it as it is kept. Several at a time."""

    def place(self, name: str) -> Tensor | None:
        """Return the memory in which `name` is kept, to be written to as it is served; None: only `store` can do it."""

    def served_weight(self, name: str) -> Tensor:
        """Return `name` as it is served now, which stays as it is while an update is staged."""

    def sums(self, name: str) -> str:
        """Return `checksum.tensor_sums` of `name`, which was written to its place."""

    def adopt(self, weights: Mapping[str, Tensor]) -> bool:
        """Keep `weights`, which are all, where they are, until the next set is served; False: they have to be stored.

        They lie in memory of this host and never change.
        """

    def forget(self) -> None:
        """Somebody may still write to places that were handed out: keep the next set elsewhere."""

    def make_ready(self) -> None:
        """The set is complete: prepare to compute with it. Nothing is to be done when nothing was written since."""


class WeightReceiver:
    """Owns the weight groups of one gserver and its staged set."""

    def __init__(
        self,
        *,
        expected: Expected | None,
        aside: WeightsAside | None,
        device: torch.device,
        timeout: float,
        open_shared: Open = cuda_memory.open_shared,
    ) -> None:
        """`aside`: where the weights are kept that `expected` describes. `open_shared` opens memory of a GPU that the
        publisher shares.

        Without the two tensors of any name are received and thrown away.
        """
        self._expected = expected
        self._aside = aside
        self._device = device
        self._timeout = timeout
        self._open_shared = open_shared
        self._groups: dict[str, tuple[list[Any], torch.device]] = {}
        """For each weight group the process groups of its senders."""
        self._staged: Staged | None = None
        self._buffers: dict[int, Tensor] = {}
        """Sender → buffer for what cannot be received in its final place."""
        self._pending: list[Any] = []
        """Broadcasts that were on the way when one failed, and may still write."""
        self._beside = SideStream(device)
        self._busy = asyncio.Lock()
        self._counting = threading.Lock()
        """Held by whoever counts a bucket: one of the senders' threads sees that it was the last."""
        self._copiers = Copiers()
        if aside is not None:
            checksum.make_ready()

    async def join_group(self, message: InitWeightsUpdateGroup) -> None:
        """Meet the others; raises `PublicationError` when they do not come."""
        if message.group_name in self._groups:
            raise Refused(f"weight group {message.group_name} exists already; destroy it first")
        if message.backend == "nccl" and self._device.type != "cuda":
            raise Refused('backend "nccl" needs a CUDA device and this gserver computes on the CPU; use "gloo"')
        # Not `exclusively`: whoever was asked to meet a publisher that is gone must not wait for it with the next one.
        await in_thread(lambda: self._join_group(message))

    async def leave_group(self, name: str) -> None:
        """Leave a weight group; raises `Refused` when there is none of this name."""
        if name not in self._groups:
            raise Refused(f"there is no weight group {name}; known: {', '.join(self._groups) or 'none'}")
        await self.exclusively(lambda: self._leave_group(name))

    @property
    def begun(self) -> bool:
        """Whether tensors that come now are kept aside."""
        return self._staged is not None

    async def begin(self, transfer: str = "") -> None:
        """Start an empty staged set, unless there is a part of the weights that `transfer` names."""
        if not transfer or self._staged is None or self._staged.transfer != transfer:
            self._staged = Staged(transfer=transfer)

    def staged(self) -> StagedWeights | None:
        """Return what is here of weights that may come in several attempts."""
        staged = self._staged
        if staged is None or not staged.transfer or not staged.buckets:
            return None
        return StagedWeights(transfer=staged.transfer, buckets=list(staged.buckets))

    async def discard(self) -> None:
        """Forget an unfinished staged set."""
        self._staged = None

    async def receive(self, message: UpdateWeightsFromDistributed) -> None:
        """Receive what `message` announces, in its order; all or nothing."""
        staged = self._expecting()
        self._group(message.group_name)
        if not len(message.names) == len(message.dtypes) == len(message.shapes):
            raise Refused("names, dtypes and shapes must be lists of equal length, one entry for each tensor")
        bucket = list(map(TensorSpec, message.names, message.dtypes, message.shapes))
        self._check(bucket)
        try:
            await self.exclusively(lambda: self._receive_one(message, bucket, staged))
        except PublicationError:
            self._drop(staged)
            raise
        staged.version = message.weight_version or staged.version
        staged.abort_all_requests |= message.abort_all_requests

    async def receive_all(self, message: ReceiveWeights, on_progress: Callable[[list[int]], None]) -> None:
        """Receive from all senders at once what `message` announces, bucket by bucket. `on_progress` is called, in any
        thread, with how many buckets of each sender are staged. Whole buckets are kept when it fails."""
        staged = self._expecting()
        threads = self._planned(message, staged)
        failure: asyncio.Future[StreamRLError] = asyncio.get_running_loop().create_future()

        async def receive_from(senders: Sequence[int]) -> None:
            try:
                await in_thread(partial(self._receive_from, senders, message, staged, on_progress))
            except StreamRLError as error:
                if not failure.done():
                    failure.set_result(error)

        async def receive() -> None:
            self._check_current(staged)
            if self._pending:
                await in_thread(partial(wait_for_pending, self._pending))
            staged.buckets = list(message.first_buckets)
            for fault in await asyncio.gather(*map(receive_from, threads), return_exceptions=True):
                if fault is not None:
                    raise fault

        # The first failure is told at once; what other senders send meanwhile still comes, and the next call waits.
        receiving = asyncio.create_task(self.apart(receive))
        either: list[asyncio.Future[Any]] = [receiving, failure]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            if not staged.transfer:
                self._drop(staged)
            raise failure.result()
        await receiving
        staged.version = message.weight_version

    def _planned(self, message: ReceiveWeights, staged: Staged) -> list[list[int]]:
        """Return, for each thread that is to receive, the senders of its buckets, in order: one thread for all of them
        where they take turns, else one for each. Raises `Refused` for a message that does not fit the model, the
        senders that have met, or what is here."""
        groups, _ = self._group(message.group_name)
        if not len(groups) == len(message.senders) == len(message.first_buckets) > 0:
            raise Refused(f"{len(groups)} senders have met; senders and first_buckets must be lists of as many entries")
        for buckets in message.senders:
            for bucket in buckets:
                self._check(bucket)
        here = staged.buckets or [0] * len(groups)
        if len(here) != len(groups) or any(a > b for a, b in zip(message.first_buckets, here, strict=True)):
            raise Refused(f"the buckets before {message.first_buckets} are not here, only those before {here}")
        left = [len(buckets) - first for buckets, first in zip(message.senders, message.first_buckets, strict=True)]
        if message.turns and sorted(message.turns) != [n for n, count in enumerate(left) for _ in range(count)]:
            raise Refused(f"turns must name each sender once for each bucket that it sends: {left} of them")
        return [message.turns] if message.turns else [[sender] * count for sender, count in enumerate(left)]

    def _receive_from(
        self, senders: Sequence[int], message: ReceiveWeights, staged: Staged, on_progress: Callable[[list[int]], None]
    ) -> None:
        """Receive the next bucket of each of `senders`, one after another; prepare the set after the last of all."""
        for number in senders:
            bucket = message.senders[number][staged.buckets[number]]
            self._receive(message.group_name, bucket, staged, sender=number, as_deltas=message.base is not None)
            with self._counting:
                staged.buckets[number] += 1
                here = list(staged.buckets)
            on_progress(here)
            if here == [len(buckets) for buckets in message.senders]:
                self._make_ready(staged)

    async def load(self, folder: Path, version: str | None) -> None:
        """Take the tensors of the safetensors files in `folder`, which are read as they are copied.

        Raises `Refused` where there is room for a transfer alone, which would go on from a mixture otherwise.
        """
        staged = self._expecting()
        if staged.transfer:
            raise Refused(
                "weights are being received, or a part of them is kept for the next attempt: to load others call "
                "/begin_weight_update first, which discards that, and then /end_weight_update"
            )
        try:
            await self.exclusively(lambda: self._load(folder, staged))
        except ModelError:
            self._drop(staged)
            raise
        staged.version = version or staged.version

    async def staged_sums(self) -> dict[str, str]:
        """Return the checksums of the tensors that are kept aside."""
        staged = self._expecting()
        return {name: sums for name, sums in staged.sums.items() if sums}

    async def take(self) -> Staged:
        """End the update, whose tensors are all stored; raises `Refused` when some are missing."""
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
        """Leave all groups, unless a receive hangs in one: it ends with the process."""
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                for name in list(self._groups):
                    await self.exclusively(lambda name=name: self._leave_group(name))  # type: ignore[misc]
        except TimeoutError:
            log.warning("a receive in weight group %s has not ended; leaving without it", ", ".join(self._groups))

    async def exclusively(self, call: Callable[[], Result]) -> Result:
        """Run `call` in a thread, apart from receives."""
        return await self.apart(lambda: in_thread(call))

    async def apart(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do `work` while nothing is received, to its end even if the asking side goes away."""

        async def run() -> Result:
            async with self._busy:
                return await work()

        task = asyncio.create_task(run())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    def _join_group(self, message: InitWeightsUpdateGroup) -> None:
        groups: list[Any] = []
        senders = [Meeting(message.master_address, message.master_port), *message.further_senders]
        try:
            for number, sender in enumerate(senders):
                groups.append(
                    form_group(
                        address=sender.address,
                        port=sender.port,
                        rank=message.rank_offset,
                        world_size=message.world_size,
                        name=group_of_sender(message.group_name, number),
                        backend=message.backend,
                        timeout=self._timeout,
                    )
                )
        except PublicationError:
            for group in groups:
                destroy_group(group)
            raise
        device = self._device if message.backend == "nccl" else torch.device("cpu")
        self._groups[message.group_name] = groups, device

    def _leave_group(self, name: str) -> None:
        groups, _ = self._groups.pop(name)
        for group in groups:
            destroy_group(group)

    def _group(self, name: str) -> tuple[list[Any], torch.device]:
        if name not in self._groups:
            raise Refused(
                f"there is no weight group {name}; call /init_weights_update_group first "
                f"(known: {', '.join(self._groups) or 'none'})"
            )
        return self._groups[name]

    def _expecting(self) -> Staged:
        if self._staged is None:
            raise Refused("no weight update has begun, or a receive failed; call /begin_weight_update first")
        return self._staged

    def _drop(self, staged: Staged) -> None:
        if self._staged is staged:
            self._staged = None

    def _keep(self, received: Iterable[tuple[str, Tensor | Delta | None]], staged: Staged) -> None:
        """Store what is `received`, while more of it comes; None: it lies where it is kept."""
        staged.sums.update(self._copiers.each(self._store, received))

    def _store(self, name: str, received: Tensor | Delta | None) -> str:
        aside = self._aside
        if aside is None or self._is_ignored(name):
            return ""
        if received is None:
            return aside.sums(name)
        if isinstance(received, Tensor):
            return aside.store(name, received)
        base, place = aside.served_weight(name), aside.place(name)
        whole = base.clone() if place is None else place.copy_(base)
        apply(received, whole)
        return aside.store(name, whole) if place is None else aside.sums(name)

    def _is_ignored(self, name: str) -> bool:
        return self._expected is not None and name in self._expected.ignored

    def _make_ready(self, staged: Staged) -> None:
        """Have the set prepared, if it is complete."""
        if self._aside is not None and not self._missing(staged):
            self._aside.make_ready()

    def _missing(self, staged: Staged) -> list[str]:
        return [] if self._expected is None else [name for name in self._expected.shapes if name not in staged.sums]

    def _check_current(self, staged: Staged) -> None:
        """Raise `Refused` if another update has begun while this one waited for a receive to end."""
        if self._staged is not staged:
            raise Refused("another weight update has begun meanwhile")

    def _load(self, folder: Path, staged: Staged) -> None:
        self._check_current(staged)
        wait_for_pending(self._pending)
        try:
            if not self._adopt(folder, staged):
                self._keep(self._read(folder), staged)
                self._make_ready(staged)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the weights in {folder} cannot be read: {error}") from error

    def _adopt(self, folder: Path, staged: Staged) -> bool:
        """Take what lies in `folder` as it lies there, if that is memory of this host and all that is served."""
        if self._aside is None or self._expected is None or not folder.is_relative_to(SHARED_MEMORY):
            return False
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= mapped(file)
        for name, tensor in weights.items():
            self._check([_spec(name, tensor)])
        if not weights.keys() >= self._expected.shapes.keys() or not self._aside.adopt(weights):
            return False
        staged.sums |= self._copiers.each(lambda _, tensor: tensor_sums(tensor), weights.items())
        self._make_ready(staged)
        return True

    def _read(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        if (folder / cuda_memory.FILE).exists():
            shared = cuda_memory.read(folder)
            for name, tensor in shared.views(self._open_shared(shared.handle)):
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

    def _receive_one(self, message: UpdateWeightsFromDistributed, bucket: Sequence[TensorSpec], staged: Staged) -> None:
        """Receive the `bucket` that one call of SGLang's API announces."""
        self._check_current(staged)
        wait_for_pending(self._pending)
        self._receive(message.group_name, bucket, staged, flattened=message.load_format == "flattened_bucket")
        self._make_ready(staged)

    def _receive(
        self,
        group_name: str,
        bucket: Sequence[TensorSpec],
        staged: Staged,
        *,
        sender: int = 0,
        flattened: bool = False,
        as_deltas: bool = False,
    ) -> None:
        """Receive and keep one bucket. `flattened`: all of it comes in one broadcast."""
        groups, device = self._groups[group_name]
        try:
            if as_deltas:
                arriving = self._deltas(groups[sender], device, bucket, sender=sender)
            else:
                arriving = self._arriving(groups[sender], device, bucket, sender=sender, flattened=flattened)
            with self._beside.after_computation():
                self._keep(arriving, staged)
        except PublicationError:
            if device.type != "cpu":  # who knows who still writes there
                self._buffers.clear()
                self._pending.clear()
                self._drop(staged)
                if self._aside is not None:
                    self._aside.forget()
            raise

    def _arriving(
        self,
        group: Any,
        device: torch.device,
        bucket: Sequence[TensorSpec],
        *,
        sender: int,
        flattened: bool,
    ) -> Iterator[tuple[str, Tensor | Delta | None]]:
        """Yield the tensors, as soon as each is here."""
        names = [spec.name for spec in bucket]
        places = {} if flattened else self._places(names, device)
        others = [(spec.name, DTYPES[spec.dtype], spec.shape) for spec in bucket if spec.name not in places]
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in others]
        flat = self._room(sum(sizes), device, sender=sender)
        if flattened:
            what = f"a bucket of {len(others)} tensors from {names[0]} on"
            self._come([(what, flat)], group)
        views = {
            name: _aligned(piece, dtype).view(dtype).view(shape)
            for (name, dtype, shape), piece in zip(others, torch.split(flat, sizes) if sizes else (), strict=True)
        }
        if flattened:
            yield from views.items()
        else:
            tensors = [(name, (places | views)[name]) for name in names]
            for name, _ in self._broadcasts(tensors, group):
                yield name, views.get(name)

    def _deltas(
        self, group: Any, device: torch.device, bucket: Sequence[TensorSpec], *, sender: int
    ) -> Iterator[tuple[str, Tensor | Delta | None]]:
        """Yield the deltas of those tensors that have changed little, and the others, as `Broadcaster` sends them."""
        counts = torch.empty(len(bucket), dtype=torch.int64, device=device)
        what = f"what has changed of {len(bucket)} weights from {bucket[0].name} on"
        self._come([(what, counts)], group)
        changed = dict(zip([spec.name for spec in bucket], counts.tolist(), strict=True))
        for spec in bucket:
            if not -1 <= (count := changed[spec.name]) <= math.prod(spec.shape):
                raise PublicationError(f"{count} numbers of {spec.name} {spec.shape} are said to have changed")
        few = [spec for spec in bucket if changed[spec.name] >= 0]
        sizes = [changed[spec.name] for spec in few]
        places = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        values = torch.empty(sum(sizes), dtype=DTYPES[bucket[0].dtype], device=device)
        if len(places):
            self._come([(what, places), (what, values)], group)
        end = 0
        for spec, size in zip(few, sizes, strict=True):
            begin, end = end, end + size
            yield spec.name, Delta(places[begin:end], values[begin:end])
        others = [spec for spec in bucket if changed[spec.name] < 0]
        if others:
            yield from self._arriving(group, device, others, sender=sender, flattened=False)

    def _come(self, tensors: Iterable[tuple[str, Tensor]], group: Any) -> None:
        """Wait until `tensors` have been received."""
        for _ in self._broadcasts(tensors, group):
            pass

    def _broadcasts(self, tensors: Iterable[tuple[str, Tensor]], group: Any) -> Iterator[tuple[str, Tensor]]:
        watched = self._timeout if dist.get_backend(group) == "nccl" else None
        return broadcasts(tensors, group, pending=self._pending, watched_seconds=watched)

    def _places(self, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
        """Return where those tensors are kept that can be received there."""
        if self._aside is None or self._expected is None:
            return {}
        kept = {name: self._aside.place(name) for name in names if not self._is_ignored(name)}
        return {name: place for name, place in kept.items() if place is not None and place.device == device}

    def _room(self, size: int, device: torch.device, *, sender: int) -> Tensor:
        """Return `size` bytes of the sender's buffer, which is kept: new memory costs as much as a copy into it."""
        buffer = self._buffers.get(sender)
        if buffer is None or buffer.numel() < size or buffer.device != device:
            buffer = self._buffers[sender] = torch.empty(size, dtype=torch.uint8, device=device)
        return buffer[:size]


async def in_thread(call: Callable[[], Result]) -> Result:
    """Run `call` in a thread of its own, for it may hang in a collective.

    No daemon thread: the interpreter would be taken down around it, and its return from C++ then ends the process with
    SIGABRT. Who still hangs when the gserver has ended is left by `launch/process.py: run_component`.
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
