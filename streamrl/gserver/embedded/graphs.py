"""Decode steps and draws as CUDA graphs: all kernels of a step are launched by one call.

A small model's kernels take a GPU less time than their launches take the host. A graph is recorded for a number of rows
and a length of the cache; batches are filled up to the next such size. Filling rows write to the cache's spare slot,
and their results are not read. A graph reads weights and cache at fixed addresses: graphs are kept for
each of the two sets of weights, which take turns, and forgotten when the cache grows.

The eager path computes whatever graphs cannot: prompts, adapters, mixtures of experts, and draws with filters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from streamrl.gserver.embedded.adapters import Adapter
from streamrl.gserver.embedded.model import KVCache, Model
from streamrl.gserver.embedded.sampler import Draw, SamplerOutput, draw_plain, read_drawn, sample, uniform
from streamrl.gserver.embedded.weights import Parameters
from streamrl.native.operations import TorchOperations

log = logging.getLogger(__name__)

Replay = Callable[[], object]
"""Computes once more, on the present contents of the same tensors."""
Record = Callable[[Replay], Replay]
"""Runs a computation once and returns it in a form that is cheap to start."""
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


class CudaRecorder:
    """`Record` for a GPU."""

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


class GraphedModel(Model):
    """`Model` whose decode steps are recorded; adapters are computed without graphs."""

    def __init__(
        self, parameters: Parameters, cache: KVCache, *, max_length: int, record: Record, pinned: bool = False
    ) -> None:
        """`cache` has a spare slot. `pinned`: the host's copy of inputs is locked in memory, so that copies of it need
        not wait."""
        super().__init__(parameters, cache, max_length=max_length, native=False)
        self._recordings = Recordings(record, name="decode steps are computed")
        self._graphs: WeakKeyDictionary[Parameters, dict[tuple[int, int], Replay]] = WeakKeyDictionary()
        self._cache_at = -1
        most = filled_rows(cache.max_slots, cache.max_slots)
        self._place = torch.zeros(3 * most, dtype=torch.long, device=self._device)
        self._host_place = torch.zeros(3 * most, dtype=torch.long, pin_memory=pinned)
        self._logits = torch.zeros((most, self._a.vocab_size), dtype=parameters.compute_dtype, device=self._device)
        self._sampler = GraphedSampler(self._logits, record=record, pinned=pinned)

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], *, adapters: Sequence[Adapter | None] = ()
    ) -> Tensor:
        """As `Model.decode`; the logits are valid until the next step."""
        if not self._recordings.possible or any(adapter is not None for adapter in adapters):
            return super().decode(tokens, positions, adapters=adapters)
        if self._cache_at != (at := self.cache.layers[0].data_ptr()):
            self._graphs.clear()
            self._cache_at = at
        n, rows = len(tokens), filled_rows(len(tokens), self.cache.slots)
        length = filled_length(max(positions) + 1, self.cache.length)
        filling = rows - n
        spare = [self.cache.slots] * filling
        flat = [*tokens, *[0] * filling, *positions, *[0] * filling, *range(n), *spare]
        self._host_place[: 3 * rows] = torch.tensor(flat)
        self._place[: 3 * rows].copy_(self._host_place[: 3 * rows], non_blocking=True)
        graphs = self._graphs.setdefault(self.parameters, {})
        if not self._recordings.run(graphs, (rows, length), lambda: self._step(rows, length)):
            return super().decode(tokens, positions, adapters=adapters)
        return self._logits[:n]

    def sample(self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> SamplerOutput:
        """As `sampler.sample`."""
        return self._sampler(logits, draws, positions)

    def _step(self, rows: int, length: int) -> None:
        place = self._place[: 3 * rows].view(3, rows)
        assert isinstance(self._operations, TorchOperations)
        attend = self._operations.attend_slots(place[1] + 1, length)
        self._logits[:rows].copy_(self.logits(self._forward(place, attend)))


class GraphedSampler:
    """`sampler.sample`, recorded for draws without filters from the rows of `logits`."""

    def __init__(self, logits: Tensor, *, record: Record, pinned: bool) -> None:
        most, device = len(logits), logits.device
        self._logits = logits
        self._recordings = Recordings(record, name="tokens are drawn")
        self._graphs: dict[int, Replay] = {}
        self._inputs = torch.zeros(2 * most, dtype=torch.float64, device=device)
        self._host_inputs = torch.zeros(2 * most, dtype=torch.float64, pin_memory=pinned)
        self._drawn = torch.zeros(2 * most, dtype=torch.float64, device=device)

    def __call__(self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> SamplerOutput:
        """Draw as `sampler.sample` does."""
        n = len(draws)
        kept = logits.data_ptr() == self._logits.data_ptr() and len(logits) == n
        if not kept or not self._recordings.possible or not all(draw.plain for draw in draws):
            return sample(logits, draws, positions)
        rows = filled_rows(n, len(self._logits))
        inputs = self._host_inputs[: 2 * rows].view(2, rows)
        inputs[0, :n] = torch.tensor([draw.scale for draw in draws], dtype=torch.float64)
        inputs[1, :n] = torch.from_numpy(uniform([draw.seed for draw in draws], positions))
        self._inputs[: 2 * rows].copy_(self._host_inputs[: 2 * rows], non_blocking=True)
        if not self._recordings.run(self._graphs, rows, lambda: self._draw(rows)):
            return sample(logits, draws, positions)
        return read_drawn(self._drawn[: 2 * rows].view(2, rows)[:, :n])

    def _draw(self, rows: int) -> None:
        scales, uniforms = self._inputs[: 2 * rows].view(2, rows).unbind()
        self._drawn[: 2 * rows].view(2, rows).copy_(draw_plain(self._logits[:rows], scales, uniforms))
