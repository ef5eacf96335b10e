"""Where weights lie in a safetensors file, for those who write one in place and those who serve one from there.

The format: https://github.com/huggingface/safetensors.

Copies of many large tensors, a few at the same time: one thread alone does not use the memory's whole speed.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from streamrl.device import compute_with
from streamrl.errors import ModelError

# --- safetensors files ---

SHARED_MEMORY = Path("/dev/shm")
"""Files in here are memory of this host."""
ALIGNMENT = 64
"""Bytes; where the first tensor begins in a file."""
LENGTH_BYTES = 8
"""Bytes of the header's length, at the beginning of a file."""
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

METADATA = "__metadata__"
"""What is no tensor's name."""

Specs = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes."""


class _Entry(msgspec.Struct, frozen=True):
    """What the header says of a tensor; offsets are from the header's end."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)


def layout(specs: Specs, dtype: torch.dtype) -> tuple[bytes, dict[str, int], int]:
    """The header, where each tensor begins in the file, and the file's size.

    Vectors come behind all matrices, so that matrices that follow one another in `specs` lie one after another.
    """
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    begins = {}
    end = 0
    for name, shape in sorted(specs, key=lambda spec: len(spec[1]) < 2):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        begins[name] = begin
        entries[name] = _Entry(dtype=DTYPE_NAMES[dtype], shape=list(shape), data_offsets=(begin, end))
    text = msgspec.json.encode(entries)
    text += b" " * (-(len(text) + LENGTH_BYTES) % ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}, len(header) + end


def mapped(file: Path) -> dict[str, Tensor]:
    """The tensors of `file` by name, all views of one mapping of it: nothing is copied, and it must not change.

    Raises `ModelError` for a file that was not written by `layout`.
    """
    try:
        with file.open("rb") as opened:
            # Shared until it is written to. Other than torch's own mappings it is given back without Python's lock.
            memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        length = int.from_bytes(whole[:LENGTH_BYTES].numpy().tobytes(), "little")
        start = LENGTH_BYTES + length
        entries = msgspec.json.decode(whole[LENGTH_BYTES:start].numpy().tobytes(), type=dict[str, _Entry])
        entries.pop(METADATA, None)
        found = {}
        for name, entry in entries.items():
            begin, end = entry.data_offsets
            found[name] = whole[start + begin : start + end].view(DTYPES[entry.dtype]).view(entry.shape)
    except (OSError, RuntimeError, ValueError, KeyError, msgspec.MsgspecError) as error:
        raise ModelError(f"the weights in {file} cannot be read: {error}") from error
    return found


# --- copying ---

Source = TypeVar("Source")
Result = TypeVar("Result")

THREADS = 2
"""More would only wait for the memory."""


class Copiers:
    """A few threads; they end with the object, or with the process."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "copying", initializer=compute_with, initargs=(1,))

    def each(self, copy: Callable[[str, Source], Result], weights: Iterable[tuple[str, Source]]) -> dict[str, Result]:
        """Call `copy` with each of `weights`, some of them at once; return what it returned, by name.

        Takes few more of `weights` than are being copied. Raises what `copy` raises, after the others have ended.
        """
        results: dict[str, Result] = {}
        copying: deque[tuple[str, Future[Result]]] = deque()
        try:
            for name, source in weights:
                copying.append((name, self._pool.submit(copy, name, source)))
                if len(copying) > THREADS:
                    first, done = copying.popleft()
                    results[first] = done.result()
            while copying:
                first, done = copying.popleft()
                results[first] = done.result()
        finally:
            for _, left in copying:
                left.exception()
        return results
