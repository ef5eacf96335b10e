"""Decode steps and draws as CUDA graphs: all kernels of a step are launched by one call.

A small model's kernels take a GPU less time than their launches take the host. A graph is recorded for a number of rows
and a length of the cache; batches are filled up to the next such size. Filling rows write to the cache's spare slot,
and their results are not read. A graph reads weights and cache at fixed addresses: graphs are kept for
each of the two sets of weights, which take turns, and forgotten when the cache grows.

`GraphedModel.launch` returns while the device computes, and `DecodeStep.read` waits for the result. The next step may
be launched in between: it takes the drawn tokens from the device's memory. The device computes everything in the order
of the launches. Only memory of the host can be overwritten too early; hence two steps in a row use different buffers.

The eager path computes whatever graphs cannot: prompts, adapters, mixtures of experts, and draws with filters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from itertools import cycle
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import Tensor

from streamrl.gserver.embedded.adapters import Adapter
from streamrl.gserver.embedded.model import KVCache, Model
from streamrl.gserver.embedded.request import Draw, SamplerOutput, draw_plain, read_drawn, uniform
from streamrl.gserver.embedded.weights import Parameters
from streamrl.native.operations import TorchOperations

log = logging.getLogger(__name__)

Replay = Callable[[], object]
"""Computes once more, on the present contents of the same tensors."""
Size = TypeVar("Size", bound=Hashable)

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows of small batches; larger ones are multiples of 32."""
LENGTHS = ((512, 128), (2048, 256))
"""Up to this many tokens of the cache, multiples of that; beyond, of `LONG`."""
LONG = 1024


def filled_rows(rows: int, most: int) -> int:
    """Return the number of rows to which a batch is filled up; `most`: of the cache."""
    size = next((size for size in ROWS if size >= rows), -(-rows // 32) * 32)
    return max(rows, min(size, most))


def filled_length(length: int, most: int) -> int:
    """Return how many tokens of each slot are attended to, masked beyond the present ones."""
    step = next((step for limit, step in LENGTHS if length <= limit), LONG)
    return min(-(-length // step) * step, most)


class DeviceEvent(Protocol):
    """A mark between the device's computations, as `torch.cuda.Event`."""

    def record(self) -> None:
        """Set the mark after the computations launched so far."""

    def synchronize(self) -> None:
        """Wait until the device reaches the mark, if it was set."""


class Record(Protocol):
    """Records computations of a device."""

    pinned: bool
    """Whether the host's buffers are locked in memory, so that copies of them need not wait."""

    def __call__(self, compute: Replay) -> Replay:
        """Run `compute` once and return it in a form that is cheap to start."""

    def event(self) -> DeviceEvent:
        """Return a new event."""


class CudaRecorder:
    """`Record` for a GPU."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Replay) -> Replay:
        """Run `compute` once as usual, so that libraries set themselves up, and record it. The mode lets
        another thread receive weights at the same time."""
        present = torch.cuda.current_stream()
        self._stream.wait_stream(present)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            compute()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            finally:
                graph.capture_end()
        present.wait_stream(self._stream)
        return graph.replay

    def event(self) -> DeviceEvent:
        event: DeviceEvent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event


class Recordings:
    """Computations of one kind, recorded when they are first needed."""

    def __init__(self, record: Record, *, name: str) -> None:
        """`name`: of the computations, for the log."""
        self._record = record
        self._name = name
        self.possible = True
        """False once a computation could not be recorded."""

    def run(self, recorded: dict[Size, Replay], size: Size, compute: Replay) -> bool:
        """Compute by the replay in `recorded`, which is recorded first if there is none of that `size`. Return whether
        it has been computed; if recording fails, log why."""
        if size not in recorded:
            try:
                recorded[size] = self._record(compute)
            except RuntimeError as error:
                log.warning("%s without CUDA graphs, which is slower: %s", self._name, error)
                self.possible = False
                return False
        recorded[size]()
        return True


class HostBuffers:
    """Inputs and results of one step on the host."""

    def __init__(self, rows: int, record: Record) -> None:
        self.place = torch.zeros(3 * rows, dtype=torch.long, pin_memory=record.pinned)
        """For each row: its token (or the row of the step before that draws it), its position and its slot."""
        self.chances = torch.zeros(2 * rows, dtype=torch.float64, pin_memory=record.pinned)
        """For each row: the factor on its logits, and its random number."""
        self.drawn = torch.zeros(2 * rows, dtype=torch.float64, pin_memory=record.pinned)
        """As `draw_plain` returns it."""
        self.done = record.event()
        """Set after the last use of these buffers."""


class DecodeStep(msgspec.Struct, frozen=True):
    """A launched step."""

    size: tuple[int, int]
    """Its numbers of rows and of attended tokens."""
    drawn: Tensor
    """As `draw_plain` returns it, once `done`."""
    done: DeviceEvent

    def read(self) -> SamplerOutput:
        """Wait for the drawn tokens and return them. Possible until a second step is launched after this one."""
        self.done.synchronize()
        return read_drawn(self.drawn)


class GraphedModel(Model):
    """`Model` whose decode steps are recorded; adapters are computed without graphs."""

    def __init__(self, parameters: Parameters, cache: KVCache, *, max_length: int, record: Record) -> None:
        """`cache` has a spare slot."""
        super().__init__(parameters, cache, max_length=max_length, native=False)
        self._forwards = Recordings(record, name="decode steps are computed")
        self._draws = Recordings(record, name="tokens are drawn")
        self._forward_graphs: WeakKeyDictionary[Parameters, dict[tuple[int, int], Replay]] = WeakKeyDictionary()
        self._draw_graphs: dict[int, Replay] = {}
        self._cache_at = -1
        most = filled_rows(cache.max_slots, cache.max_slots)
        self._place = torch.zeros(3 * most, dtype=torch.long, device=self._device)
        self._chances = torch.zeros(2 * most, dtype=torch.float64, device=self._device)
        self._drawn = torch.zeros(2 * most, dtype=torch.float64, device=self._device)
        self._logits = torch.zeros((most, self._a.vocab_size), dtype=parameters.compute_dtype, device=self._device)
        self._buffers = cycle([HostBuffers(most, record) for _ in range(2)])

    def size(self, positions: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of rows and of attended tokens with which a step at `positions` is computed."""
        return filled_rows(len(positions), self.cache.slots), filled_length(max(positions) + 1, self.cache.length)

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], *, adapters: Sequence[Adapter | None] = ()
    ) -> Tensor:
        """As `Model.decode`; the logits are valid until the next step."""
        if not self._forwards.possible or any(adapter is not None for adapter in adapters):
            return super().decode(tokens, positions, adapters=adapters)
        size = self.size(positions)
        buffers = self._filled_buffers(size[0], tokens, positions)
        self._upload(buffers, size[0])
        buffers.done.record()
        if not self._compute_logits(size):
            return super().decode(tokens, positions, adapters=adapters)
        return self._logits[: len(tokens)]

    def launch(
        self,
        inputs: Sequence[int],
        positions: Sequence[int],
        draws: Sequence[Draw],
        numbers: Sequence[int],
        *,
        follows: bool = False,
    ) -> DecodeStep | None:
        """Launch a step that computes the token `inputs[i]` at `positions[i]` of slot i, and draws output token
        `numbers[i]` with `draws[i]`, which is plain.

        `follows`: `inputs` are instead rows of the step launched last, whose drawn tokens are computed. Returns None if
        the step cannot be recorded, or if the cache is too short for it.
        """
        if not (self._forwards.possible and self._draws.possible) or max(positions) >= self.cache.length:
            return None
        n, size = len(inputs), self.size(positions)
        rows = size[0]
        buffers = self._filled_buffers(rows, inputs, positions)
        chances = buffers.chances[: 2 * rows].view(2, rows)
        chances[0, :n] = torch.tensor([draw.scale for draw in draws], dtype=torch.float64)
        chances[1, :n] = torch.from_numpy(uniform([draw.seed for draw in draws], numbers))
        if not self._enqueue(buffers, size, followers=n if follows else 0):
            return None
        return DecodeStep(size, buffers.drawn[: 2 * rows].view(2, rows)[:, :n], buffers.done)

    def _filled_buffers(self, rows: int, inputs: Sequence[int], positions: Sequence[int]) -> HostBuffers:
        """Return the buffers that are not used by the latest step, with the inputs of another step of `rows` rows."""
        filling = [0] * (rows - len(inputs))
        spare = [self.cache.slots] * len(filling)
        flat = [*inputs, *filling, *positions, *filling, *range(len(inputs)), *spare]
        buffers = next(self._buffers)
        buffers.done.synchronize()
        buffers.place[: 3 * rows] = torch.tensor(flat)
        return buffers

    def _upload(self, buffers: HostBuffers, rows: int) -> None:
        self._place[: 3 * rows].copy_(buffers.place[: 3 * rows], non_blocking=True)

    def _enqueue(self, buffers: HostBuffers, size: tuple[int, int], *, followers: int) -> bool:
        """Launch all work of a step, without waiting for any; return whether it could be recorded. The first
        `followers` of the inputs are rows of the step before."""
        rows = size[0]
        self._upload(buffers, rows)
        self._chances[: 2 * rows].copy_(buffers.chances[: 2 * rows], non_blocking=True)
        if followers:
            self._place[:followers] = self._drawn[self._place[:followers]]
        if not self._compute_logits(size):
            return False
        if not self._draws.run(self._draw_graphs, rows, lambda: self._draw(rows)):
            return False
        buffers.drawn[: 2 * rows].copy_(self._drawn[: 2 * rows], non_blocking=True)
        buffers.done.record()
        return True

    def _compute_logits(self, size: tuple[int, int]) -> bool:
        """Write the logits of the step in `_place` to `_logits`; return whether it could be recorded."""
        if self._cache_at != (at := self.cache.layers[0].data_ptr()):
            self._forward_graphs.clear()
            self._cache_at = at
        graphs = self._forward_graphs.setdefault(self.parameters, {})
        return self._forwards.run(graphs, size, lambda: self._step(*size))

    def _step(self, rows: int, length: int) -> None:
        place = self._place[: 3 * rows].view(3, rows)
        assert isinstance(self._operations, TorchOperations)
        attend = self._operations.attend_slots(place[1] + 1, length)
        self._logits[:rows].copy_(self.logits(self._forward(place, attend)))

    def _draw(self, rows: int) -> None:
        scales, uniforms = self._chances[: 2 * rows].view(2, rows).unbind()
        self._drawn[: 2 * rows].view(2, rows).copy_(draw_plain(self._logits[:rows], scales, uniforms))
