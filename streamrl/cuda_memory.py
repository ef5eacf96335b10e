"""Memory of a GPU that processes share (CUDA IPC): for weights, between a trainer and gservers on one GPU, where NCCL
allows only one rank.

The owner writes a file with CUDA's handle of the memory, as bytes, and the position of each weight in it; torch would
pickle the same data. The owner keeps the memory, and does not write to it while other processes read.
"""

from __future__ import annotations

import fcntl
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec
import torch
from torch import Tensor, UntypedStorage

from streamrl.disk import OWNER
from streamrl.errors import ModelError

FILE = "cuda_memory.msgpack"
ALIGNMENT = 256
"""Alignment of each weight, in bytes, as in CUDA's allocations."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Handle(msgspec.Struct, frozen=True):
    """The result of `torch.UntypedStorage._share_cuda_` without the device index, which differs between processes."""

    gpu: str
    """UUID of the GPU."""
    memory: bytes
    size: int
    offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync_required: bool


class WeightPlace(msgspec.Struct, frozen=True):
    """Position and type of a weight in the shared memory."""

    offset: int
    """In bytes."""
    shape: tuple[int, ...]
    dtype: str


class SharedWeights(msgspec.Struct, frozen=True):
    """Content of `FILE`."""

    handle: Handle
    places: dict[str, WeightPlace]
    """By Hugging Face name."""

    def views(self, storage: UntypedStorage) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in `storage`; raises `ModelError` for one that does not lie within it."""
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for name, place in self.places.items():
            dtype = DTYPES.get(place.dtype)
            size = math.prod(place.shape) * (dtype.itemsize if dtype else 0)
            if dtype is None or not 0 <= place.offset <= len(memory) - size or place.offset % ALIGNMENT:
                raise ModelError(f"{name} ({place}) does not lie in shared memory of {len(memory)} bytes")
            yield name, memory[place.offset : place.offset + size].view(dtype).view(place.shape)


_decoder = msgspec.msgpack.Decoder(SharedWeights)


def lay_out(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[dict[str, WeightPlace], int]:
    """Return a place for each weight, and the total size in bytes."""
    places: dict[str, WeightPlace] = {}
    end = 0
    for name, shape in shapes.items():
        places[name] = WeightPlace(end, tuple(shape), str(dtype).removeprefix("torch."))
        size = math.prod(shape) * dtype.itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end


def write(folder: Path, content: SharedWeights) -> None:
    (folder / FILE).write_bytes(msgspec.msgpack.encode(content))


def read(folder: Path) -> SharedWeights:
    """Return the content of the file; raises `ModelError` if it is invalid."""
    try:
        return _decoder.decode((folder / FILE).read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{folder / FILE} cannot be read: {error}") from error


Share = Callable[[UntypedStorage], Handle]
Open = Callable[[Handle], UntypedStorage]


class OpenWeights:
    """The weights of one publisher. Its memory stays open from one update to the next.

    The memory is closed when the publisher releases its lock, by its end at the latest, or when weights of another
    publisher are read.
    """

    def __init__(self, open_shared: Open) -> None:
        self._open = open_shared
        self._owner: Path | None = None
        """The publisher's folder."""
        self._sets: dict[Path, tuple[SharedWeights, dict[str, Tensor]]] = {}
        """By folder: the content of `FILE`, and the weights by name."""
        self._lock = threading.Lock()

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights that `folder` describes, by name; raises `ModelError` or `OSError`."""
        content = read(folder)
        with self._lock:
            if folder.parent != self._owner:
                self._follow(folder.parent)
            if folder not in self._sets or self._sets[folder][0] != content:
                self._sets[folder] = content, dict(content.views(self._open(content.handle)))
            return self._sets[folder][1]

    def _follow(self, owner: Path) -> None:
        """Close the memory of the previous publisher; close the memory of `owner` as soon as its lock is free."""
        lock = (owner / OWNER).open("rb")
        self._sets.clear()
        self._owner = owner
        # A daemon: it may wait for as long as the process lives.
        threading.Thread(target=self._close_after, args=(owner, lock), name="owner of weights", daemon=True).start()

    def _close_after(self, owner: Path, lock: IO[bytes]) -> None:
        with lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        with self._lock:
            if self._owner == owner:
                self._owner = None
                self._sets.clear()


def share(storage: UntypedStorage) -> Handle:
    """Return the handle by which another process opens `storage`, which is on a GPU."""
    found = storage._share_cuda_()  # type: ignore[no-untyped-call]
    device, memory, size, offset, ref_counter, ref_counter_offset, event, sync = found
    return Handle(
        gpu_identity(torch.device("cuda", device)), memory, size, offset, ref_counter, ref_counter_offset, event, sync
    )


def open_shared(handle: Handle) -> UntypedStorage:
    """Return the memory of another process; raises `ModelError` if this process does not see its GPU."""
    found = [n for n in range(torch.cuda.device_count()) if gpu_identity(torch.device("cuda", n)) == handle.gpu]
    if not found:
        raise ModelError(f"the weights are on GPU {handle.gpu}, which this process does not see")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    opened: UntypedStorage = UntypedStorage._new_shared_cuda(
        found[0],
        handle.memory,
        handle.size,
        handle.offset,
        handle.ref_counter,
        handle.ref_counter_offset,
        handle.event,
        handle.event_sync_required,
    )
    return opened


def gpu_identity(device: torch.device) -> str:
    """Return the UUID of the GPU `device`, equal in all processes that see it; empty for another kind of device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
