"""A `Carrier` (`publisher.py`) that broadcasts weights to the gservers, as rank 0 of a process group.

It owns the group, and the store at which the group meets. A weight is sent from its own memory, or from a buffer if it
has to be converted first. While some weights are in flight, the next one is converted and its checksum computed.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Literal

import torch
from torch import Tensor

from streamrl.checksum import LineSums, checksums, copy_and_sum, dtype_name, line_sums
from streamrl.config import Config, WeightsConfig
from streamrl.device import SideStream
from streamrl.errors import PublicationError
from streamrl.trainer.worker.weight_source import Weights
from streamrl.transport.addresses import LOOPBACK, Reach
from streamrl.transport.collective import (
    AT_ONCE,
    MEETING_SHARE,
    broadcasts,
    destroy_group,
    form_group,
    open_store,
    open_while_forming,
)
from streamrl.transport.control import Broadcast, PublishBeginReply, TensorSpec

Bucket = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes."""


class Broadcaster:
    """The broadcasting side of the weight group."""

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
                meeting_seconds=MEETING_SHARE * self._timeout,
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
