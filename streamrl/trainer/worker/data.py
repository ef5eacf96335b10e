"""The data of a model worker: its own groups from the stream, groups that other workers sent, and the arrays that model
function calls computed.

`WorkerData` finds the data of a group. The worker's own group stays in the StreamDataset until it is discarded here.
All other arrays are in the `ArrayStore`, by sequence number and key, until the group is discarded. The store is safe to
use from several threads; arrays are not copied.

`DataManager` carries out the Redistributor's plans, and owns the process groups over which arrays travel. All ranks of
a transfer carry it out, in a common order of transfers; other ranks need not even see it. The order prevents circular
waits: first every rank posts all its point-to-point sends and receives of the plan at once, then the broadcasts follow
one by one in the order of the plan. All arrays of one transfer travel as one buffer of bytes. Received arrays are
read-only views into it, so its memory is free again once the last of them has been discarded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from streamrl.errors import PublicationError, TransferError
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import MOST_COMPARED, Sibling
from streamrl.trainer.graph import SEQUENCE_KEYS
from streamrl.trainer.redistributor import ArrayFacts, Transfer, concerning, numpy_dtype
from streamrl.transport.collective import destroy_group, form_group, in_thread_on, join_store
from streamrl.types import ARRAY_FIELDS, NO_VERSION, GroupFacts, TrajectoryGroup

Array = NDArray[Any]


class ArrayStore:
    """Arrays of any dtype and shape, named by (sequence number, key)."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[str, Array]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of groups with at least one array."""
        return len(self._groups)

    def put(self, seq: int, key: str, array: Array) -> None:
        """Store `array`; it replaces an array with the same name."""
        with self._lock:
            self._groups.setdefault(seq, {})[key] = array

    def find(self, seq: int, key: str) -> Array | None:
        """Return the stored array, without a copy; None if it is not here."""
        with self._lock:
            return self._groups.get(seq, {}).get(key)

    def get(self, seq: int, key: str) -> Array:
        """Return the stored array, without a copy; raises `TransferError` if it is not here."""
        found = self.find(seq, key)
        if found is None:
            held = ", ".join(sorted(self._groups.get(seq, ()))) or "nothing"
            raise TransferError(f"seq {seq} {key} is not held here; of this group are: {held}")
        return found

    def discard(self, seqs: Iterable[int]) -> None:
        """Remove all arrays of these groups, if there are any."""
        with self._lock:
            for seq in seqs:
                self._groups.pop(seq, None)


# --- between workers ---

ALIGNMENT = 8
"""Arrays begin at multiples of this many bytes in a buffer."""
NCCL_PATIENCE = 2.0
"""NCCL's own deadline, as a multiple of ours: NCCL ends the process, so our deadline has to pass first."""
SHORTEST_WAIT_SECONDS = 0.001

Result = TypeVar("Result")


class TransferBytes(NamedTuple):
    """A transfer with its bytes."""

    transfer: Transfer
    offsets: list[int]
    """Start of each array in `flat`, in bytes."""
    flat: Tensor
    """The bytes to send, or the buffer to receive into: uint8 `[bytes]` on the device."""


class DataManager:
    """One rank's end of all transfers between model workers.

    The ranks meet at a TCP store that one of them has opened (`collective.open_store`). All of them have to be
    constructed at the same time. Each wait, including this one, ends after `timeout_seconds` with a `TransferError`;
    after that the manager is of no further use.
    """

    def __init__(
        self,
        rank: int,
        *,
        world_size: int,
        host: str,
        port: int,
        timeout_seconds: float,
        backend: str = "gloo",
        device: torch.device | None = None,
        name: str = "data",
    ) -> None:
        """Meet the other ranks at `host:port`.

        `backend`: `gloo` with a CPU `device` (the default) or `nccl` with a CUDA one. `name` begins the names of all
        groups; no other component at this store uses it.
        """
        self.rank = rank
        self._host, self._port = host, port
        self._timeout = timeout_seconds
        self._backend_timeout = timeout_seconds * (NCCL_PATIENCE if backend == "nccl" else 1)
        self._backend = backend
        self._device = device or torch.device("cpu")
        self._name = name
        self._groups: dict[tuple[int, ...], Any] = {}
        self._store: Any = None
        self._world: Any = None
        if world_size > 1:
            self._store = self._within_deadline(
                lambda: join_store(host, port, timeout=self._backend_timeout), lambda: f"the store at {host}:{port}"
            )
            self._world = self._group(tuple(range(world_size)))
            self._within_deadline(  # NCCL requires a first operation of all, before some exchange without the others
                lambda: dist.all_reduce(torch.zeros(1, device=self._device), group=self._world),
                lambda: f"first operation of {world_size} ranks",
            )

    def execute(self, plan: Sequence[Transfer], store: ArrayStore) -> None:
        """Carry out this rank's part of `plan`: send arrays from `store`, and put received arrays there.

        Raises `TransferError` if an array is missing or differs from its description, or if a peer is late or gone;
        then no array of the failed transfer is in the store.
        """
        concerned = concerning(plan, self.rank)
        self._exchange([t for t in concerned if len(t.destinations) == 1], store)
        for transfer in concerned:
            if len(transfer.destinations) > 1:
                self._broadcast(transfer, store)

    def close(self) -> None:
        """Leave all process groups."""
        for group in self._groups.values():
            destroy_group(group)
        self._groups.clear()
        self._store = self._world = None

    def _exchange(self, exchanged: list[Transfer], store: ArrayStore) -> None:
        """Carry out all transfers to single ranks at once."""
        parcels = [self._parcel(transfer, store) for transfer in exchanged]
        operations = []
        for transfer, _, flat in parcels:
            sends = transfer.source == self.rank
            if flat.numel():
                peer = transfer.destinations[0] if sends else transfer.source
                call = dist.isend if sends else dist.irecv
                operations.append(dist.P2POp(call, flat, group=self._world, group_peer=peer))
        if operations:
            self._move(lambda: dist.batch_isend_irecv(operations), exchanged)
        for parcel in parcels:
            self._take_over(parcel, store)

    def _broadcast(self, transfer: Transfer, store: ArrayStore) -> None:
        parcel = self._parcel(transfer, store)
        if parcel.flat.numel():
            ranks = tuple(sorted({transfer.source, *transfer.destinations}))
            group = self._group(ranks)
            source = ranks.index(transfer.source)
            self._move(lambda: [dist.broadcast(parcel.flat, group=group, group_src=source, async_op=True)], [transfer])
        self._take_over(parcel, store)

    def _parcel(self, transfer: Transfer, store: ArrayStore) -> TransferBytes:
        offsets, size = layout(transfer.pieces)
        if transfer.source != self.rank:
            return TransferBytes(transfer, offsets, torch.empty(size, dtype=torch.uint8, device=self._device))
        try:
            flat = pack(transfer.pieces, offsets, size, store)
        except TransferError as error:
            raise TransferError(f"{transfer}, but cannot: {error}") from error
        return TransferBytes(transfer, offsets, torch.from_numpy(flat).to(self._device))

    def _take_over(self, parcel: TransferBytes, store: ArrayStore) -> None:
        """Put the received arrays into `store`, if this rank is a receiver."""
        transfer, offsets, flat = parcel
        if transfer.source == self.rank:
            return
        received: NDArray[np.uint8] = flat.cpu().numpy()
        received.flags.writeable = False
        for piece, offset in zip(transfer.pieces, offsets, strict=True):
            store.put(piece.seq, piece.key, np.ndarray(piece.shape, numpy_dtype(piece.dtype), received.data, offset))

    def _move(self, start: Callable[[], list[Any]], moved: list[Transfer]) -> None:
        """Start operations and wait until they have completed."""

        def call() -> None:
            deadline = time.monotonic() + self._timeout
            for work in start():
                work.wait(timedelta(seconds=max(SHORTEST_WAIT_SECONDS, deadline - time.monotonic())))

        self._within_deadline(call, lambda: "; ".join(map(str, moved)))

    def _group(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group of exactly `ranks`, which is formed on first use."""
        if ranks not in self._groups:
            name = f"{self._name}-{'.'.join(map(str, ranks))}"
            self._groups[ranks] = self._within_deadline(
                lambda: form_group(
                    address=self._host,
                    port=self._port,
                    rank=ranks.index(self.rank),
                    world_size=len(ranks),
                    name=name,
                    backend=self._backend,
                    timeout=self._backend_timeout,
                    store=self._store,
                ),
                lambda: f"meeting of ranks {', '.join(map(str, ranks))}",
            )
        return self._groups[ranks]

    def _within_deadline(self, call: Callable[[], Result], what: Callable[[], str]) -> Result:
        """Return the result of `call`; raises any failure in it, including a passed deadline, as a `TransferError`
        about `what`."""

        def on_device() -> Result:
            result = call()
            torch.cuda.current_stream(self._device).synchronize()
            return result

        try:
            if self._device.type == "cuda":  # unlike gloo, NCCL has no deadline: it would block the device
                return in_thread_on(self._device, on_device, seconds=self._timeout)
            return call()
        except (RuntimeError, PublicationError) as error:
            raise TransferError(
                f"rank {self.rank}: {what()}: failed or not through after {self._timeout:.0f} s ({error}); "
                "look for a model worker among these ranks that has ended, or raise the deadline"
            ) from error


def layout(pieces: Iterable[ArrayFacts]) -> tuple[list[int], int]:
    """Return the start of each array in a buffer that contains them all, and the size of the buffer, in bytes."""
    offsets = []
    end = 0
    for piece in pieces:
        offsets.append(end)
        end += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def pack(pieces: Iterable[ArrayFacts], offsets: Iterable[int], size: int, store: ArrayStore) -> NDArray[np.uint8]:
    """Return the bytes of `pieces` from `store`, at `offsets`, in `[size]`; raises `TransferError` if an array is
    missing or differs from its description."""
    flat = np.empty(size, dtype=np.uint8)
    for piece, offset in zip(pieces, offsets, strict=True):
        array = store.get(piece.seq, piece.key)
        dtype = numpy_dtype(piece.dtype)
        if array.shape != piece.shape or array.dtype != dtype:
            raise TransferError(
                f"seq {piece.seq} {piece.key} is {array.dtype.name}{list(array.shape)} here, "
                f"not {piece.dtype}{list(piece.shape)}"
            )
        np.ndarray(piece.shape, dtype, flat.data, offset)[...] = array
    return flat


# --- groups ---


class WorkerData:
    """All data of one worker."""

    def __init__(self, dataset: StreamDataset, *, rank: int) -> None:
        self._dataset = dataset
        self._rank = rank
        self._store = ArrayStore()
        self.manager: DataManager | None = None
        """Moves arrays between workers; None if there is only one."""

    def group(self, seq: int) -> TrajectoryGroup:
        """Return the group with its rewards, if they were computed after its arrival; arrays that are not here are
        blank.

        Raises `TransferError` if its tokens are not here either.
        """
        own = self._dataset.find(seq)
        if own is not None:
            scored = self.optional(seq, "rewards")
            return own if scored is None else msgspec.structs.replace(own, rewards=scored)
        here = {key: self._store.get(seq, key) for key in sorted(SEQUENCE_KEYS)}
        facts = msgspec.msgpack.decode(here.pop("packed_facts").data, type=GroupFacts)
        shape = {"size": len(here["seqlens"]), "tokens": len(here["packed_input_ids"]), "routes": 0}
        for field in ARRAY_FIELDS:
            if field.name not in here:
                blank = NO_VERSION if field.name == "packed_policy_versions" else 0
                sent = self.optional(seq, field.name)
                here[field.name] = np.full(field.length(**shape), blank, field.dtype) if sent is None else sent
        return TrajectoryGroup.of(seq, facts, here)

    def response(self, which: Sibling) -> tuple[list[int], list[int]]:
        """Return the prompt and response of a group that this worker received, cut after the last of the first
        `MOST_COMPARED` sampled tokens, and the positions of these tokens; both empty if the group is gone."""
        group = self._dataset.find(which.seq)
        if group is None:
            return [], []
        first, end = group.bounds(which.index)
        sampled = np.flatnonzero(group.packed_loss_mask[first:end])[:MOST_COMPARED].tolist()
        return group.packed_input_ids[first : first + sampled[-1] + 1].tolist(), sampled

    def put(self, seq: int, key: str, array: NDArray[Any]) -> None:
        """Store an array that a model function call computed."""
        self._store.put(seq, key, array)

    def get(self, seq: int, key: str) -> NDArray[Any]:
        """Return an array that a model function call computed, or one of the group's own; raises `TransferError` if it
        is not here."""
        self._stage(seq, key)
        return self._store.get(seq, key)

    def optional(self, seq: int, key: str) -> NDArray[Any] | None:
        """Return an array that a model function call computed or that was sent here; None if there is none."""
        return self._store.find(seq, key)

    def transfer(self, plan: Sequence[Transfer]) -> None:
        """Carry out this worker's part of `plan`; raises `TransferError` if a peer is late or gone."""
        if self.manager is None:
            return
        for transfer in plan:
            if transfer.source == self._rank:
                for piece in transfer.pieces:
                    self._stage(piece.seq, piece.key)
        self.manager.execute(plan, self._store)

    def discard(self, seqs: Iterable[int], *, come_again: bool) -> None:
        """Discard groups; see `StreamDataset.discard` for `come_again`."""
        gone = list(seqs)
        self._store.discard(gone)
        self._dataset.discard([seq for seq in gone if self._dataset.find(seq) is not None], forget=come_again)

    def close(self) -> None:
        """Leave the process groups."""
        if self.manager is not None:
            self.manager.close()

    def _stage(self, seq: int, key: str) -> None:
        """Put an array of one of the worker's own groups into the store, unless one of its name is there."""
        group = self._dataset.find(seq) if self._store.find(seq, key) is None else None
        if group is not None and key in (*type(group).__struct_fields__, "packed_facts"):
            self._store.put(seq, key, getattr(group, key))
