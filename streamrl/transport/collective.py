"""Process groups across programs without a common launcher, and the broadcast of weights in them.

Groups are formed like SGLang's weight-update group (at a TCP store on rank 0, prefixed with the group's name), so that
either side may be SGLang. The publisher meets the gservers this way, and so do the model workers among themselves.

`Broadcaster` sends weights as rank 0 of such a group, from the publisher to the gservers. It owns the group, and the
store at which the group meets. A weight is sent from its own memory, or from a buffer if it has to be converted first.
While some weights are in flight, the next one is converted and its checksum computed.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from streamrl.checksum import LineSums, checksums, copy_and_sum, dtype_name, line_sums
from streamrl.config import Config, WeightsConfig
from streamrl.device import SideStream
from streamrl.errors import DeadlineExceeded, PublicationError
from streamrl.transport.addresses import LOOPBACK, Reach, meeting_interface
from streamrl.transport.control import Broadcast, PublishBeginReply, TensorSpec
from streamrl.transport.group_sockets import closed_after_forming, open_for_good, open_while_forming

NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NCCL_MEMORY = "NCCL_CUMEM_ENABLE"
"""Environment variable: whether NCCL allocates memory by CUDA's virtual-memory API; NCCL reads it once."""
FIRST_KNOCK_SECONDS = 0.1
"""Timeout of the first attempt to reach a store; it doubles with each further attempt."""
AT_ONCE = 4
"""Maximum number of broadcasts in flight."""

Result = TypeVar("Result")


def open_store(host: str) -> Any:
    """Open the store at which the ranks of all later groups meet, on a free port of `host` (`.port`); on rank 0.

    Torch's own socket would listen at every address of the machine, and the store has no authentication.
    """
    listening = open_for_good(host)
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def join_store(address: str, port: int, *, timeout: float) -> Any:
    """Return a client of the store that rank 0 has opened at `address:port`. Raises `RuntimeError`.

    If nothing replies at all, wait for only half of `timeout` (seconds). A rank behind a firewall then reports this
    before the other ranks give up, so the log shows which rank it is.
    """
    try:
        _knock(address, port, timeout=timeout / 2)
    except ConnectionRefusedError:
        pass  # torch's client keeps trying
    except OSError as error:
        raise RuntimeError(
            f"nobody answers at {address}:{port} ({error.strerror or error}): is that machine up, and does a firewall "
            f"drop what is sent to port {port}?"
        ) from error
    limit = timedelta(seconds=timeout)
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)


def _knock(address: str, port: int, *, timeout: float) -> None:
    """Connect, and disconnect; raises `OSError` if nothing replies within `timeout` seconds.

    Rank 0 may open the store a moment later, and the system would wait a second before it retries.
    """
    end, patience = time.monotonic() + timeout, min(FIRST_KNOCK_SECONDS, timeout)
    while True:
        try:
            socket.create_connection((address, port), timeout=patience).close()
            return
        except TimeoutError:
            left = end - time.monotonic()
            if left <= 0:
                raise
            patience = min(2 * patience, left)


def form_group(
    *,
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout: float,
    store: Any = None,
) -> Any:
    """Meet the other ranks at `address:port` and return the group; blocks until all are there.

    Rank 0 passes the `store` that it opened there. Raises `PublicationError` if the others do not come within `timeout`
    seconds.
    """
    limit = timedelta(seconds=timeout)
    try:
        if store is None:
            store = join_store(address, port, timeout=timeout)
        with _left_to_us(), closed_after_forming():
            # c10d has no public way to make a group next to (or without) the default one.
            group, _ = c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                dist.Backend(backend),
                PrefixStore(name, store),
                group_name=name,  # type: ignore[arg-type]
                timeout=limit,
            )
    except (RuntimeError, ValueError) as error:
        raise PublicationError(
            f"process group {name}: {_not_met(rank, world_size, backend, address, port, timeout)}: {error}"
        ) from error
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


@contextmanager
def _left_to_us() -> Iterator[None]:
    """Disable the error handling of torch's NCCL backend in groups that are made in the block: it would end the whole
    process because of one gserver. The backend reads this variable when a group is made."""
    before = os.environ.get(NCCL_ERROR_HANDLING)
    os.environ[NCCL_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NCCL_ERROR_HANDLING]
        else:
            os.environ[NCCL_ERROR_HANDLING] = before


def allocate_as_sglang(*, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL allocate memory as in SGLang's processes, which set this variable to 0 unless it is set. NCCL may hang
    or crash in a group of processes with different values.

    Call it before this process's first group over NCCL.
    """
    environment.setdefault(NCCL_MEMORY, "0")


def join_world(
    *, address: str, port: int, rank: int, world_size: int, backend: str, timeout: float, store: Any = None
) -> None:
    """Form torch's default process group with the other ranks; rank 0 passes the `store` that it opened.

    Raises `DeadlineExceeded` if the others do not come within `timeout` seconds.
    """
    limit = timedelta(seconds=timeout)
    try:
        if store is None:
            store = join_store(address, port, timeout=timeout)
        with closed_after_forming():
            dist.init_process_group(
                backend, store=PrefixStore("world", store), rank=rank, world_size=world_size, timeout=limit
            )
    except (RuntimeError, ValueError) as error:
        raise DeadlineExceeded(
            f"the trainer's process group: {_not_met(rank, world_size, backend, address, port, timeout)}: {error}"
        ) from error


def _not_met(rank: int, world_size: int, backend: str, address: str, port: int, timeout: float) -> str:
    return (
        f"rank {rank} of {world_size} ({backend} at {meeting_interface(backend)}) could not meet the others, "
        f"with rank 0 at {address}:{port}, within {timeout:.0f} s"
    )


def destroy_group(group: Any) -> None:
    """Leave `group`, unless `watch` has already aborted it."""
    if group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def broadcast(tensor: Tensor, group: Any, *, what: str) -> None:
    """Broadcast `tensor` from rank 0 in place; raises `PublicationError` on failure."""
    for _ in broadcasts([(what, tensor)], group):
        pass


def broadcasts(
    tensors: Iterable[tuple[str, Tensor]],
    group: Any,
    *,
    pending: list[Any] | None = None,
    watched_seconds: float | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Broadcast `tensors` (by name) from rank 0 in place; yield each when it has been sent, in their order.

    Up to `AT_ONCE` broadcasts are in flight, so that neither side waits between two of them. Raises `PublicationError`
    on failure; other broadcasts may be in flight then and are added to `pending`: their memory must not be written to
    before `wait_for_pending` has returned. `watched_seconds`: time limit of each broadcast if the group itself has no
    deadline, as with NCCL (`watch`).
    """
    on_the_way: deque[tuple[str, Tensor, Any]] = deque()

    def begin(tensor: Tensor) -> Any:
        return dist.broadcast(tensor, src=0, group=group, async_op=True)

    def first() -> tuple[str, Tensor]:
        name, tensor, work = on_the_way.popleft()
        with _failing(name):
            if watched_seconds is None:
                work.wait()
            else:
                watch(work, group, seconds=watched_seconds)
        return name, tensor

    try:
        for number, (name, tensor) in enumerate(tensors):
            with _failing(name):
                if watched_seconds is None or number:
                    work = begin(tensor)
                else:
                    work = in_thread_on(tensor.device, partial(begin, tensor), seconds=watched_seconds)
                on_the_way.append((name, tensor, work))
            if len(on_the_way) == AT_ONCE:
                yield first()
        while on_the_way:
            yield first()
    finally:
        if pending is not None:
            pending += [(tensor, work) for _, tensor, work in on_the_way]


def watch(work: Any, group: Any, *, seconds: float) -> None:
    """Wait until `work` is done; abort `group` and raise `RuntimeError` if it fails, or takes longer than `seconds`.

    For NCCL. Without a deadline, waiting for its work only queues the current stream behind the work and returns, even
    if the work never ends, or has failed.
    """
    began = time.monotonic()
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        c10d._abort_process_group(group)
        late = time.monotonic() - began >= seconds
        what = f"nothing came within {seconds:g} s" if late else str(error)
        raise RuntimeError(f"{what}, and the group was aborted") from error


def in_thread_on(device: torch.device, call: Callable[[], Result], *, seconds: float) -> Result:
    """Return the result of `call`, run in its own thread on the current stream; raise `RuntimeError` if it takes longer
    than `seconds`.

    NCCL forms its communicator in a group's first operation, and blocks the caller until all ranks are there: forever,
    if one is gone. The thread is then abandoned.
    """
    answers: list[Result] = []
    failures: list[Exception] = []
    stream = torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else nullcontext()

    def run() -> None:
        try:
            with stream:
                answers.append(call())
        except Exception as error:  # raised in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=run, name="forms a communicator", daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not answers:
        raise RuntimeError(f"not all ranks of the group were there within {seconds:g} s")
    return answers[0]


def wait_for_pending(pending: list[Any]) -> None:
    """Wait until gloo no longer uses the memory of broadcasts that were in flight when one failed: they complete, fail,
    or time out. Empties `pending`."""
    while pending:
        _, work = pending[-1]
        with suppress(RuntimeError):
            work.wait()
        pending.pop()


@contextmanager
def _failing(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PublicationError(f"broadcast of {name} failed: {error}") from error


Bucket = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes."""


class Weights(Protocol):
    """All weights of a model, in one order."""

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the Hugging Face name and shape of each weight."""

    def weights(self) -> Generator[tuple[str, Tensor]]:
        """Yield each weight with its name; close the generator if it is not exhausted, because sending failed."""


class Broadcaster:
    """A `Carrier` (`trainer/worker/publisher.py`) that broadcasts weights."""

    reads_once = False

    def __init__(
        self,
        config: Config,
        *,
        reach: Reach = LOOPBACK,
        backend: Literal["gloo", "nccl"],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`reach`: where the gservers meet the publisher."""
        self.dtype = dtype
        self._config = config.weights
        self._timeout = config.limits.update_seconds
        self._reach = reach
        self._backend: Literal["gloo", "nccl"] = backend
        self._device = device if backend == "nccl" else torch.device("cpu")
        """Device from which weights are sent."""
        self._watched_seconds = self._timeout if backend == "nccl" else None
        self._beside = SideStream(device)
        self._store: Any = None
        self._group: Any = None
        self._group_name = ""
        self._weights: Weights
        self._buckets: list[list[tuple[str, tuple[int, ...]]]] = []
        self.sent_bytes = 0
        self._buffers = [torch.empty(0, dtype=dtype, device=self._device)] * AT_ONCE
        """Used in turn: a buffer's content has been sent before its next turn."""

    def prepare(self, version: int, weights: Weights) -> None:
        """Plan the buckets for the next sending of `weights`."""
        self._weights = weights
        limit = int(self._config.bucket_mb * 2**20)
        self._buckets = plan_buckets(weights.specs(), itemsize=self.dtype.itemsize, limit_bytes=limit)

    def announce(self) -> Broadcast:
        """Return the buckets, and the address at which gservers meet the publisher."""
        if self._store is None:
            self._store = open_store(self._reach.local)
        dtype = dtype_name(self.dtype)
        return Broadcast(
            buckets=[
                [TensorSpec(name=name, dtype=dtype, shape=list(shape)) for name, shape in bucket]
                for bucket in self._buckets
            ],
            address=self._reach.announced,
            port=self._store.port,
            backend=self._backend,
            group_name=self._group_name,
        )

    def send(self, begin: PublishBeginReply) -> dict[str, str]:
        """Form the group if it is new, and send all weights; return the checksum of each weight, by name."""
        if begin.group_name != self._group_name:
            self._form(begin)
        sums: dict[str, LineSums] = {}
        with self._beside.after_computation(), closing(self._weights.weights()) as weights:
            for bucket in self._buckets:
                # One bucket after another: no gserver gets far ahead of a failing one.
                contents = self._contents(bucket, weights, sums)
                for _, content in broadcasts(contents, self._group, watched_seconds=self._watched_seconds):
                    self.sent_bytes += content.nbytes
            return checksums(sums)

    def abort(self) -> None:
        """Leave the group: it is unusable after an interrupted broadcast.

        The store is closed, too. This frees real SGLang, which would otherwise wait half an hour for the missing rank
        and do nothing else.
        """
        self._leave()
        self._store = None

    def close(self) -> None:
        self.abort()

    def _leave(self) -> None:
        if self._group is not None:
            destroy_group(self._group)
            self._group, self._group_name = None, ""

    def _form(self, begin: PublishBeginReply) -> None:
        self._leave()
        with open_while_forming(self._store.port):
            self._group = form_group(
                address=self._reach.announced,
                port=self._store.port,
                rank=0,
                world_size=begin.world_size,
                name=begin.group_name,
                backend=self._backend,
                timeout=self._timeout,
                store=self._store,
            )
        self._group_name = begin.group_name

    def _contents(
        self, bucket: Bucket, weights: Iterator[tuple[str, Tensor]], sums: dict[str, LineSums]
    ) -> Generator[tuple[str, Tensor]]:
        """Yield names and contents of `bucket`, the next of `weights`; enter their sums into `sums`."""
        for place, (name, shape) in enumerate(bucket):
            weight = _next(weights, name, shape)
            if weight.dtype == self.dtype and weight.device == self._device and weight.is_contiguous():
                if self._config.checksum:
                    sums[name] = line_sums(weight)
            else:
                source, weight = weight, self._buffer(place % AT_ONCE, weight.numel()).view(shape)
                if self._config.checksum:
                    sums[name] = copy_and_sum(weight, source)
                else:
                    weight.copy_(source)
            yield name, weight

    def _buffer(self, which: int, numbers: int) -> Tensor:
        if self._buffers[which].numel() < numbers:
            self._buffers[which] = torch.empty(numbers, dtype=self.dtype, device=self._device)
        return self._buffers[which][:numbers]


def _next(weights: Iterator[tuple[str, Tensor]], name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the next of `weights`, which must match the announced one."""
    found, tensor = next(weights, ("nothing", torch.empty(0)))
    if found != name or tuple(tensor.shape) != tuple(shape):
        raise PublicationError(f"weight {found} {tuple(tensor.shape)} came where {name} {shape} was announced")
    return tensor.detach()


def backend_for(config: WeightsConfig, device: torch.device) -> Literal["gloo", "nccl"]:
    """Return the backend that broadcasts weights on `device`."""
    if config.backend != "auto":
        return config.backend
    return "nccl" if device.type == "cuda" else "gloo"


def plan_buckets(specs: Bucket, *, itemsize: int, limit_bytes: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Cut weights in order into buckets of at most `limit_bytes`; a larger weight has a bucket of its own."""
    buckets: list[list[tuple[str, tuple[int, ...]]]] = []
    room = 0
    for name, shape in specs:
        size = math.prod(shape) * itemsize
        if not buckets or size > room:
            buckets.append([])
            room = limit_bytes
        buckets[-1].append((name, shape))
        room -= size
    return buckets
