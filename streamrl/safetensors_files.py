"""Named tensors in safetensors files: layout, writing, and reading of whole tensors or parts.

The format: https://github.com/huggingface/safetensors. A folder holds `STEM.safetensors`, or several files
`STEM-00001-of-00004.safetensors` as Hugging Face names them. A file may also hold *parts* of tensors: boxes that
together make up the whole. Then its metadata list, under `parts`, the tensor and the position of each part. Any box can
be read from any of these files; only the box and a buffer are held in memory. `Copiers` copy many large tensors, a few
at the same time, since one thread does not reach the full memory bandwidth.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from streamrl.device import compute_with
from streamrl.errors import ModelError

# --- safetensors files ---

ALIGNMENT = 64
"""Alignment in bytes of the first tensor in a file."""
LENGTH_BYTES = 8
"""Size in bytes of the header's length, at the beginning of a file."""
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

MODEL = "model"
"""The stem of the files with a model's weights."""
METADATA = "__metadata__"
"""The key of a header that holds metadata; all other keys are tensor names."""

Specs = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors."""
Entries = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
"""Name, dtype and shape of each tensor in a file, in order."""


class _Entry(msgspec.Struct, frozen=True):
    """A tensor's entry in the header; offsets count from the header's end."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)


def layout(specs: Specs, dtype: torch.dtype) -> tuple[bytes, dict[str, int], int]:
    """Return the header, the offset of each tensor in the file, and the file's size in bytes.

    Vectors come after all matrices, so that matrices that are adjacent in `specs` are adjacent in the file.
    """
    ordered = sorted(specs, key=lambda spec: len(spec[1]) < 2)
    header, begins = _header([(name, dtype, shape) for name, shape in ordered], {})
    return header, begins, len(header) + sum(math.prod(shape) for _, shape in specs) * dtype.itemsize


def _header(entries: Entries, metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with `entries` in this order, and the offset of each in the file."""
    found: dict[str, Any] = {METADATA: {"format": "pt", **metadata}}
    begins = {}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        begins[name] = begin
        found[name] = _Entry(dtype=DTYPE_NAMES[dtype], shape=list(shape), data_offsets=(begin, end))
    text = msgspec.json.encode(found)
    text += b" " * (-(len(text) + LENGTH_BYTES) % ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def mapped(file: Path) -> dict[str, Tensor]:
    """Return the tensors of `file` by name, as views of one memory mapping: nothing is copied, and the file must not
    change.

    Raises `ModelError` for a file that was not written with the header of `layout`.
    """
    try:
        with file.open("rb") as opened:
            # Copy-on-write. Unlike torch's own mappings, it is unmapped without the interpreter lock.
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


# --- parts ---

PARTS = "parts"
"""Key in a file's metadata: maps the entries that are parts to their tensors and positions."""
BUFFER_BYTES = 8 * 2**20
"""Size of one read if rows are sliced or dtypes converted."""
MOST_HEADER_BYTES = 2**28


class TensorBox(NamedTuple):
    """A box of a named tensor: the whole tensor, or the part of one rank."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    """Position of the box in the whole tensor."""
    values: Tensor
    """The values inside the box."""

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> TensorBox:
        """Return the part that is the whole `tensor`."""
        return cls(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    @property
    def is_whole(self) -> bool:
        """Whether the box is the whole tensor."""
        return tuple(self.values.shape) == self.shape

    @property
    def key(self) -> str:
        """Its name in a file: the tensor's name, with the box as a suffix unless it is the whole tensor."""
        if self.is_whole:
            return self.name
        ends = (first + size for first, size in zip(self.start, self.values.shape, strict=True))
        return f"{self.name}[{','.join(f'{a}:{b}' for a, b in zip(self.start, ends, strict=True))}]"


class _PartOf(msgspec.Struct, frozen=True, array_like=True):
    """Tensor and position of an entry that is a part; fields as in `TensorBox`."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


def file_name(stem: str, number: int, count: int) -> str:
    """Return the name of file `number`, from 0, of `count`."""
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"


Bytes = bytes | memoryview


def write_file(file: Path, entries: Entries, tensors: Iterable[Tensor]) -> None:
    """Write `tensors`, which are consumed one by one and must have the names, dtypes and shapes of `entries`."""
    write_bytes(file, _content(entries, tensors, {}))


def bytes_of_parts(parts: Sequence[TensorBox]) -> Iterator[Bytes]:
    """Yield the content of a file with `parts`, without copying their values."""
    described = {part.key: _PartOf(part.name, part.shape, part.start) for part in parts if not part.is_whole}
    metadata = {PARTS: msgspec.json.encode(described).decode()} if described else {}
    entries = [(part.key, part.values.dtype, tuple(part.values.shape)) for part in parts]
    return _content(entries, (part.values for part in parts), metadata)


def write_bytes(file: Path, content: Iterable[Bytes]) -> None:
    """Write `content` into `file`; it is on disk when this returns."""
    with file.open("wb") as opened:
        for some in content:
            opened.write(some)
        opened.flush()
        os.fsync(opened.fileno())


def _content(entries: Entries, tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> Iterator[Bytes]:
    yield _header(entries, metadata)[0]
    for tensor in tensors:
        held = tensor.detach().to("cpu").contiguous()
        yield _memory_of(held)


def write_index(folder: Path, stem: str) -> None:
    """Write the index that Hugging Face requires for several files of whole tensors."""
    weight_map = TensorFiles(folder, stem).files_of_wholes()
    index = {"metadata": {}, "weight_map": {name: file.name for name, file in weight_map.items()}}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))


class _StoredBox(NamedTuple):
    """A box of a tensor in a file."""

    file: Path
    begin: int
    """Offset of its first byte in the file."""
    dtype: str
    start: tuple[int, ...]
    size: tuple[int, ...]


class TensorFiles:
    """Reads the tensors of one stem in a folder, whole or by box, from files of any writer."""

    def __init__(self, folder: Path, stem: str) -> None:
        """Raises `ModelError` if there are no such files, one is missing, or they cannot be read."""
        self._folder = folder
        self._stem = stem
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, list[_StoredBox]] = {}
        for file in _files(folder, stem):
            try:
                self._take(file)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                raise ModelError(f"the weights in {file} cannot be read: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def names(self) -> Iterator[str]:
        """Return the names of all tensors, in the order of the files."""
        yield from self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor `name`; raises `ModelError` if it does not exist."""
        if name not in self._shapes:
            raise ModelError(f"{self._folder}: {self._stem}.safetensors has no tensor {name}")
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of `name`; raises `ModelError` if it does not exist, or has an unsupported dtype."""
        self.shape(name)
        stored = self._stored[name][0]
        if stored.dtype not in DTYPES:
            raise ModelError(f"{stored.file}: {name} is of the type {stored.dtype}, not of {', '.join(DTYPES)}")
        return DTYPES[stored.dtype]

    @property
    def are_wholes(self) -> bool:
        """Whether each tensor is stored whole in one file, as in Hugging Face checkpoints."""
        return all(found[0].size == self._shapes[name] for name, found in self._stored.items())

    def files_of_wholes(self) -> dict[str, Path]:
        """Return name → file of each tensor; all tensors must be whole."""
        return {name: found[0].file for name, found in self._stored.items()}

    def check(self, specs: Specs) -> None:
        """Raise `ModelError`, with file and name, unless all tensors of `specs` exist, whole, in their shapes."""
        problems = []
        for name, shape in specs:
            if name not in self._shapes:
                problems.append(f"{name} is missing")
                continue
            file = self._stored[name][0].file.name
            if self._shapes[name] != tuple(shape):
                problems.append(f"{file}: {name} has the shape {self._shapes[name]}, the model's has {tuple(shape)}")
            elif sum(math.prod(stored.size) for stored in self._stored[name]) != math.prod(shape):
                problems.append(f"{file}: parts of {name} are missing")
            problems += [
                f"{stored.file.name}: {name} is of the type {stored.dtype}, not of {', '.join(DTYPES)}"
                for stored in self._stored[name]
                if stored.dtype not in DTYPES
            ]
        if problems:
            rest = f"; and {len(problems) - SOME} more" if len(problems) > SOME else ""
            raise ModelError(
                f"the weights in {self._folder} ({self._stem}*.safetensors) do not fit the model: "
                f"{'; '.join(problems[:SOME])}{rest}"
            )

    def read(self, name: str) -> Tensor:
        """Return one whole tensor, in its stored dtype."""
        values = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read_into(TensorBox.whole(name, values))
        return values

    def read_into(self, part: TensorBox) -> None:
        """Fill `part.values`, of any dtype, with that box of the tensor."""
        if self.shape(part.name) != part.shape:
            raise ModelError(
                f"{self._stored[part.name][0].file}: {part.name} has the shape {self.shape(part.name)}, "
                f"the model's has {part.shape}"
            )
        filled = 0
        for stored in self._stored[part.name]:
            first = [max(a, b) for a, b in zip(part.start, stored.start, strict=True)]
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(part.start, part.values.shape, stored.start, stored.size, strict=True)
            ]
            if all(a < b for a, b in zip(first, ends, strict=True)):
                target = part.values[
                    tuple(slice(a - o, b - o) for a, b, o in zip(first, ends, part.start, strict=True))
                ]
                box = [slice(a - o, b - o) for a, b, o in zip(first, ends, stored.start, strict=True)]
                try:
                    _read_box(stored, box, target)
                except (OSError, ValueError) as error:
                    raise ModelError(f"{stored.file}: {part.name} cannot be read: {error}") from error
                filled += target.numel()
        if filled != part.values.numel():
            raise ModelError(f"{self._folder}: parts of {part.name} are missing")

    def _take(self, file: Path) -> None:
        """Add the entries of `file`."""
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            if not 0 < length <= min(size - LENGTH_BYTES, MOST_HEADER_BYTES):
                raise ValueError("it is no safetensors file, or not whole")
            raw = msgspec.json.decode(opened.read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        parts = msgspec.json.decode(metadata.get(PARTS, "{}"), type=dict[str, _PartOf])
        for key, text in raw.items():
            entry = msgspec.json.decode(text, type=_Entry)
            begin, end = (LENGTH_BYTES + length + offset for offset in entry.data_offsets)
            box = tuple(entry.shape)
            of = parts.get(key, _PartOf(key, box, (0,) * len(box)))
            wanted = math.prod(box) * DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else end - begin
            if end > size or end - begin != wanted:
                raise ValueError(f"it ends before {key} does" if end > size else f"the size of {key} is wrong")
            if self._shapes.setdefault(of.name, of.shape) != of.shape or len(of.start) != len(box):
                raise ValueError(f"{key} does not fit the other parts of its tensor")
            self._stored.setdefault(of.name, []).append(_StoredBox(file, begin, entry.dtype, of.start, box))


SOME = 8
"""Maximum number of problems that an error names."""


def _files(folder: Path, stem: str) -> list[Path]:
    """Return the files of a stem; raises `ModelError` if any is missing."""
    alone = folder / f"{stem}.safetensors"
    if alone.exists():
        return [alone]
    index = folder / f"{stem}.safetensors.index.json"
    found = sorted(folder.glob(f"{stem}-*.safetensors"))
    try:
        wanted = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else set()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} cannot be read: {error}") from error
    if not wanted:
        counts = {int(match[1]) for file in found if (match := re.search(r"-of-(\d+)\.safetensors$", file.name))}
        wanted = {file_name(stem, number, count) for count in counts for number in range(count)}
    if not wanted:
        raise ModelError(f"{folder} has no {stem}.safetensors")
    if missing := sorted(name for name in wanted if not (folder / name).is_file()):
        raise ModelError(f"{folder} lacks {', '.join(missing[:SOME])}")
    return [folder / name for name in sorted(wanted)]


def _read_box(stored: _StoredBox, box: Sequence[slice], target: Tensor) -> None:
    """Read the part `box` of a stored box into `target`, in chunks of rows."""
    dtype = DTYPES.get(stored.dtype)
    if dtype is None:
        raise ValueError(f"its type is {stored.dtype}; supported are {', '.join(DTYPES)}")
    if not box:  # a single number
        stored, box, target = stored._replace(size=(1,)), [slice(0, 1)], target.reshape(1)
    row = math.prod(stored.size[1:])
    rows = box[0].stop - box[0].start
    with stored.file.open("rb", buffering=0) as opened:
        opened.seek(stored.begin + box[0].start * row * dtype.itemsize)
        whole_rows = all(part == slice(0, size) for part, size in zip(box[1:], stored.size[1:], strict=True))
        if whole_rows and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
            _read_exactly(opened, target)
            return
        step = max(1, min(rows, BUFFER_BYTES // (row * dtype.itemsize)))
        buffer = torch.empty((step, *stored.size[1:]), dtype=dtype)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            _read_exactly(opened, buffer[:count])
            target[first : first + count].copy_(buffer[(slice(0, count), *box[1:])])


def _read_exactly(opened: BinaryIO | RawIOBase, target: Tensor) -> None:
    """Fill a contiguous tensor from the file; raises `ValueError` if the file ends early."""
    left = _memory_of(target)
    while left:
        count = opened.readinto(left)  # type: ignore[union-attr]
        if not count:
            raise ValueError("the file ends early")
        left = left[count:]


def _memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, valid while the tensor lives.

    `numpy()` is not used, because the tensor's memory could never be freed again after it.
    """
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


# --- copying ---

Source = TypeVar("Source")
Result = TypeVar("Result")

THREADS = 2
"""More threads would only wait for the memory."""


class Copiers:
    """A few copying threads; they end with the object, or with the process."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "copying", initializer=compute_with, initargs=(1,))

    def each(self, copy: Callable[[str, Source], Result], weights: Iterable[tuple[str, Source]]) -> dict[str, Result]:
        """Call `copy` with each of `weights`, several at once; return its results by name.

        Consumes only a few more of `weights` than are being copied. Raises the error of `copy`, after the other calls
        have ended.
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
