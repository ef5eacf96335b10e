"""Sends weights by collective broadcast: rank 0 of a weight group, which gservers join.

Owns the group, and the store at which it meets. A weight is sent from where it lies, or from a buffer if it has to
be converted first. While some are on their way the next one is converted and its checksum is taken. The publisher
sends to all gservers so, and a gserver to one that came late.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from streamrl.checksum import copy_and_sum, dtype_name, tensor_sums
from streamrl.config import WeightsConfig
from streamrl.errors import PublicationError
from streamrl.transport.collective import AT_ONCE, broadcasts, destroy_group, form_group, open_store
from streamrl.transport.control.publication import Broadcast, PublishBeginReply, TensorSpec

Bucket = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes."""


class Source(Protocol):
    """Weights by Hugging Face name, in one order."""

    def specs(self) -> list[tuple[str, tuple[int, ...]]]: ...

    def weights(self) -> Generator[tuple[str, Tensor]]: ...


class Broadcaster:
    """A `Carrier` of the publisher (`trainer/publisher.py`), or a gserver's means to send what it serves."""

    reads_once = False

    def __init__(
        self, config: WeightsConfig, *, backend: Literal["gloo", "nccl"], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self._config = config
        self._backend: Literal["gloo", "nccl"] = backend
        self._device = device if backend == "nccl" else torch.device("cpu")
        """Where a weight is when it is sent."""
        self._store: Any = None
        self._group: Any = None
        self._group_name = ""
        self._source: Source
        self._buckets: list[list[tuple[str, tuple[int, ...]]]] = []
        self._buffers = [torch.empty(0, dtype=dtype, device=self._device)] * AT_ONCE
        """Used in turn: one is on the way no more when its turn comes again."""

    def prepare(self, version: int, source: Source) -> None:
        limit = int(self._config.bucket_mb * 2**20)
        self._source = source
        self._buckets = plan_buckets(source.specs(), itemsize=self.dtype.itemsize, limit_bytes=limit)

    def announce(self) -> Broadcast:
        if self._store is None:
            self._store = open_store(self._config.host)
        dtype = dtype_name(self.dtype)
        return Broadcast(
            buckets=[
                [TensorSpec(name=name, dtype=dtype, shape=list(shape)) for name, shape in bucket]
                for bucket in self._buckets
            ],
            master_address=self._config.host,
            master_port=self._store.port,
            backend=self._backend,
            group_name=self._group_name,
        )

    def bring(self, begin: PublishBeginReply) -> dict[str, str]:
        if begin.group_name != self._group_name:
            self._form(begin)
        checksums: dict[str, str] = {}
        with closing(self._source.weights()) as weights:
            for _ in broadcasts(self._ready(weights, checksums), self._group):
                pass
        return checksums

    def give_up(self) -> None:
        """Leave the group: a broadcast that broke off leaves it useless.

        The store goes with it. Real SGLang, which would wait there half an hour for a rank that does not come, and
        do nothing else meanwhile, is let go.
        """
        self._leave()
        self._store = None

    def close(self) -> None:
        self.give_up()

    def _leave(self) -> None:
        if self._group is not None:
            destroy_group(self._group)
            self._group, self._group_name = None, ""

    def _form(self, begin: PublishBeginReply) -> None:
        self._leave()
        self._group = form_group(
            address=self._config.host,
            port=self._store.port,
            rank=0,
            world_size=begin.world_size,
            name=begin.group_name,
            backend=self._backend,
            timeout=self._config.timeout_seconds,
            store=self._store,
        )
        self._group_name = begin.group_name

    def _ready(self, weights: Iterator[tuple[str, Tensor]], checksums: dict[str, str]) -> Generator[tuple[str, Tensor]]:
        """Names and contents of what was announced, in its order; puts the checksums into `checksums`."""
        for place, (name, shape) in enumerate(chain.from_iterable(self._buckets)):
            found, tensor = next(weights, ("nothing", torch.empty(0)))
            if found != name or tuple(tensor.shape) != tuple(shape):
                raise PublicationError(f"weight {found} {tuple(tensor.shape)} came where {name} {shape} was announced")
            weight = tensor.detach()
            if weight.dtype == self.dtype and weight.device == self._device and weight.is_contiguous():
                sums = tensor_sums(weight) if self._config.checksum else ""
            else:
                weight = self._buffer(place, weight.numel()).view(shape)
                sums = self._convert(weight, tensor.detach())
            if sums:
                checksums[name] = sums
            yield name, weight

    def _convert(self, target: Tensor, source: Tensor) -> str:
        if self._config.checksum:
            return copy_and_sum(target, source)
        target.copy_(source)
        return ""

    def _buffer(self, place: int, numbers: int) -> Tensor:
        """For the weight at this `place` in the order."""
        which = place % len(self._buffers)
        if self._buffers[which].numel() < numbers:
            self._buffers[which] = torch.empty(numbers, dtype=self.dtype, device=self._device)
        return self._buffers[which][:numbers]


def backend_for(config: WeightsConfig, device: torch.device) -> Literal["gloo", "nccl"]:
    """What weights that are on `device` are broadcast over."""
    if config.backend != "auto":
        return config.backend
    return "nccl" if device.type == "cuda" else "gloo"


def plan_buckets(specs: Bucket, *, itemsize: int, limit_bytes: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Cut weights in order into buckets of at most `limit_bytes`; a larger one is a bucket alone."""
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
