"""Carries weights by collective broadcast: rank 0 of the weight group, which all gservers join.

Owns the group, the store at which it meets, and two buffers of the size of a bucket: while one bucket is on its way
the next one is laid out and its checksums are taken, in a thread of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from streamrl.checksum import copy_and_sum, dtype_name
from streamrl.config import WeightsConfig
from streamrl.device import compute_with
from streamrl.errors import PublicationError
from streamrl.trainer.weight_source import WeightSource
from streamrl.transport.collective import broadcast, destroy_group, form_group, open_store
from streamrl.transport.control.publication import Broadcast, PublishBeginReply, TensorSpec

Bucket = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes."""


class Broadcaster:
    """A `Carrier`."""

    reads_once = False

    def __init__(
        self, config: WeightsConfig, *, backend: Literal["gloo", "nccl"], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self._config = config
        self._backend: Literal["gloo", "nccl"] = backend
        self._device = device
        self._store: Any = None
        self._group: Any = None
        self._group_name = ""
        self._source: WeightSource
        self._buckets: list[list[tuple[str, tuple[int, ...]]]] = []
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._laying_out = ThreadPoolExecutor(1, "weight buckets", initializer=compute_with, initargs=(1,))

    def prepare(self, version: int, source: WeightSource) -> None:
        limit = int(self._config.bucket_mb * 2**20)
        self._source = source
        self._buckets = plan_buckets(source.specs(), itemsize=self.dtype.itemsize, limit_bytes=limit)
        if self._buffers is None:  # the model stays the same
            largest = max(_numbers(bucket) for bucket in self._buckets)
            empty = torch.empty(largest, dtype=self.dtype, device=self._device)
            self._buffers = empty, torch.empty_like(empty)

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
            next_one = self._laying_out.submit(self._lay_out, 0, weights)
            try:
                for number in range(1, len(self._buckets) + 1):
                    flat, sums = next_one.result()
                    if number < len(self._buckets):
                        next_one = self._laying_out.submit(self._lay_out, number, weights)
                    checksums |= sums
                    broadcast(flat, self._group, what=f"weight bucket {number} of {len(self._buckets)}")
            finally:
                next_one.exception()  # nobody may be reading `weights` when they are closed
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
        self._laying_out.shutdown(wait=False)

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

    def _lay_out(self, number: int, weights: Iterator[tuple[str, Tensor]]) -> tuple[Tensor, dict[str, str]]:
        """The next weights, those of bucket `number`, one after another as bytes, and their checksums by name."""
        assert self._buffers is not None
        bucket = self._buckets[number]
        flat = self._buffers[number % 2][: _numbers(bucket)]
        sums: dict[str, str] = {}
        places = torch.split(flat, [math.prod(shape) for _, shape in bucket])
        for place, (name, shape), (found, tensor) in zip(places, bucket, islice(weights, len(bucket)), strict=True):
            if found != name or tuple(tensor.shape) != tuple(shape):
                raise PublicationError(f"weight {found} {tuple(tensor.shape)} came where {name} {shape} was announced")
            if self._config.checksum:
                sums[name] = copy_and_sum(place.view(shape), tensor)
            else:
                place.view(shape).copy_(tensor)
        return flat.view(torch.uint8), sums


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


def _numbers(bucket: Bucket) -> int:
    return sum(math.prod(shape) for _, shape in bucket)
