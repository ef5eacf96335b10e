"""Process groups across programs without a common launcher, and broadcasts in them.

Groups are formed like SGLang's weight-update group (at a TCP store on rank 0, prefixed with the group's name), so that
either side may be SGLang. The publisher meets the gservers this way, and so do the model workers among themselves.

Neither gloo nor the store at which the ranks meet (`TCPStore`) authenticates connections. gloo accepts any client that
sends the right number as another rank, and these numbers count up from 0. A client with another number stays connected
as long as the group lives, so a stranger could exhaust the process's file descriptors, and gloo ends a process that
cannot open more. The store keeps all data that strangers write to it, and never frees the part of a command that
arrived before its sender disconnected.

But once a group has formed, all ranks are connected to each other and to the store. Neither gloo nor the store can
close its listening socket, and gloo treats a failing one as a fatal error. So the sockets stay open behind a kernel
filter (`SO_ATTACH_FILTER`, socket(7)) that drops all packets to them: a new client gets no reply. When another group is
to meet at a store, the store is opened again. The filter is not used on machines with a GPU, where NCCL opens sockets
of the same process at any time and needs them later; nor on systems other than Linux; nor if ranks connect lazily
(`TORCH_GLOO_LAZY_INIT`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from streamrl.device import compute_with
from streamrl.errors import DeadlineExceeded, PublicationError
from streamrl.transport.addresses import meeting_interface

log = logging.getLogger(__name__)

LAZY = "TORCH_GLOO_LAZY_INIT"
"""Torch's own variable: two ranks of a group connect only when one first sends data to the other."""
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
"""Linux socket options that Python does not name."""
_LET_NOTHING_THROUGH = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""The filter's only instruction: return, and keep 0 bytes of the packet (`struct sock_filter`)."""

Place = tuple[str, int]
"""Address and port of a listening socket."""


class _Meetings:
    """The groups that are forming in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._others: set[Place] = set()
        """Addresses where this process listens for other purposes."""

    def begin(self) -> None:
        with self._lock:
            if not self._under_way:
                self._others = set(_listening())
            self._under_way += 1

    def end(self) -> None:
        """End one forming; the last of several at once closes all sockets, as it is unknown which belongs to which."""
        with self._lock:
            self._under_way -= 1
            if self._under_way:
                return
            for place, descriptor in _listening().items():
                if place not in self._others:
                    _let_nobody_in(place, descriptor)

    def open_another(self, host: str) -> socket.socket:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with self._lock:
            listening = socket.create_server(address[:2], family=family)
            self._others.add(listening.getsockname()[:2])
        return listening


_meetings = _Meetings()


def closing_is_possible() -> bool:
    """Whether listening sockets can be closed to new connections in this process."""
    return sys.platform == "linux" and not torch.cuda.is_available() and not os.environ.get(LAZY)


@contextmanager
def closed_after_forming() -> Iterator[None]:
    """Close the listening sockets that were opened in the block to new connections at its end: the sockets of the
    groups that form in it. May be nested, and used by several threads at once."""
    if not closing_is_possible():
        yield
        return
    _meetings.begin()
    try:
        yield
    finally:
        _meetings.end()


def open_for_good(host: str) -> socket.socket:
    """Return a socket that listens at a free port of `host` and that no `closed_after_forming` closes."""
    return _meetings.open_another(host)


@contextmanager
def open_while_forming(port: int) -> Iterator[None]:
    """Open the store that this process has at `port` to new connections for the duration of the block."""
    if closing_is_possible():
        for descriptor in _listening_at(port).values():
            _let_everybody_in(descriptor)
    try:
        yield
    finally:
        shut(port)


def shut(port: int) -> None:
    """Close the store that this process has at `port` to new connections: all ranks that meet there are connected."""
    if closing_is_possible():
        for place, descriptor in _listening_at(port).items():
            _let_nobody_in(place, descriptor)


def _listening_at(port: int) -> dict[Place, int]:
    return {place: descriptor for place, descriptor in _listening().items() if place[1] == port}


def _listening() -> dict[Place, int]:
    """Return the addresses where this process listens, with the file descriptor of each socket."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port): one.fd for one in found if one.status == psutil.CONN_LISTEN}


def _let_nobody_in(place: Place, descriptor: int) -> None:
    instructions = ctypes.create_string_buffer(_LET_NOTHING_THROUGH)
    program = struct.pack("@HP", 1, ctypes.addressof(instructions))
    try:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    except OSError as error:
        log.warning(
            "the port %s:%d of a process group that has formed stays open to all hosts (%s)", *place, error.strerror
        )


def _let_everybody_in(descriptor: int) -> None:
    with suppress(FileNotFoundError), socket.socket(fileno=os.dup(descriptor)) as one:  # not found: has no filter
        one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NCCL_MEMORY = "NCCL_CUMEM_ENABLE"
"""Environment variable: whether NCCL allocates memory by CUDA's virtual-memory API; NCCL reads it once."""
FIRST_KNOCK_SECONDS = 0.1
"""Timeout of the first attempt to reach a store; it doubles with each further attempt."""
AT_ONCE = 4
"""Maximum number of broadcasts in flight."""
MEETING_SHARE = 0.25
"""Share of a weight group's deadline in which its ranks have to meet. Unless one is gone, they do within a second."""

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
            f"no reply from {address}:{port} ({error.strerror or error}): is that machine up, and does a firewall drop "
            f"packets to port {port}?"
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
    meeting_seconds: float | None = None,
    store: Any = None,
) -> Any:
    """Meet the other ranks at `address:port` and return the group; blocks until all are there.

    Rank 0 passes the `store` that it opened there. Raises `PublicationError` if the others do not come within
    `meeting_seconds`, by default `timeout`, which is also the deadline of each operation in the group (seconds).
    """
    seconds = timeout if meeting_seconds is None else meeting_seconds

    def meet() -> Any:
        # c10d has no public way to make a group next to (or without) the default one.
        return c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]
            timeout=timedelta(seconds=timeout),
        )

    try:
        if store is None:
            store = join_store(address, port, timeout=seconds)
        with _left_to_us(), closed_after_forming():
            # gloo waits five times its timeout for a rank that has given its address and is then gone.
            group, _ = in_thread_on(torch.device("cpu"), meet, seconds=seconds) if backend == "gloo" else meet()
    except (RuntimeError, ValueError) as error:
        raise PublicationError(
            f"process group {name}: {_not_met(rank, world_size, backend, address, port, seconds)}: {error}"
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
    """Return the result of `call`, which waits for other ranks, run in its own thread on the current stream of
    `device`; raise `RuntimeError` if it takes longer than `seconds`, and abandon the thread.

    NCCL forms its communicator in a group's first operation, and blocks the caller until all ranks are there: forever,
    if one is gone.
    """
    outcome: Future[Result] = Future()
    stream = torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else nullcontext()

    def run() -> None:
        compute_with(1)
        try:
            with stream:
                outcome.set_result(call())
        except Exception as error:  # raised in the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="waits for other ranks", daemon=True).start()
    if not wait([outcome], seconds).done:
        raise RuntimeError(f"not all ranks of the group were there within {seconds:g} s")
    return outcome.result()


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
