"""The trainer's side of a weight update: buckets of weights, broadcast from rank 0 to all gservers.

The manager runs the transaction (`gserver/weights.py`); the publisher tells it what will come,
forms the weight group when the gservers have changed, broadcasts, and commits. It only reads
weights, so the next training step may compute meanwhile; it must not update them before
`publish` has returned.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Literal

import torch
from torch import Tensor

from streamrl.config import WeightsConfig
from streamrl.errors import PublicationError
from streamrl.trainer.calls import Published
from streamrl.trainer.weight_source import WeightSource
from streamrl.transport.collective import broadcast, destroy_group, form_group, open_store
from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.publication import PublishBegin, PublishBeginReply, PublishCommit, TensorSpec

log = logging.getLogger(__name__)

Bucket = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes."""
RunInThread = Callable[..., Awaitable[Any]]

COMMIT_MARGIN_SECONDS = 10.0
"""How much longer than the manager's own deadlines the publisher waits for its answer."""
MANAGER_STEPS = 4
"""Steps of the transaction that may each take `timeout_seconds` while the publisher waits."""


class Publisher:
    """Brings weights to the gservers; one for each run, on the trainer's rank 0."""

    def __init__(
        self,
        *,
        client: ControlClient,
        config: WeightsConfig,
        backend: Literal["gloo", "nccl"],
        dtype: torch.dtype,
        device: torch.device,
        in_thread: RunInThread,
    ) -> None:
        self._client = client
        self._config = config
        self._backend: Literal["gloo", "nccl"] = backend
        self._dtype = dtype
        self._device = device
        self._in_thread = in_thread
        self._store: Any = None
        self._group: Any = None
        self._group_name = ""

    async def publish(self, version: int, source: WeightSource) -> Published:
        """Bring the weights of `source` to every live gserver as `version`.

        Raises `PublicationError` when all attempts failed; the gservers then serve what they served.
        """
        began = time.monotonic()
        specs = source.specs()
        buckets = plan_buckets(specs, itemsize=self._dtype.itemsize, limit_bytes=int(self._config.bucket_mb * 2**20))
        problems: list[str] = []
        try:
            for attempt in range(1, self._config.attempts + 1):
                pause, problem = await self._attempt(version, buckets, source)
                if not problem:
                    return Published(
                        seconds=time.monotonic() - began,
                        pause_seconds=pause,
                        bytes=sum(math.prod(shape) for _, shape in specs) * self._dtype.itemsize,
                        attempts=attempt,
                    )
                problems.append(problem)
                log.warning("weights of version %d: attempt %d failed: %s", version, attempt, problem)
        finally:
            await self._in_thread(source.end)
        raise PublicationError(
            f"weights of version {version} did not reach the gservers in {len(problems)} attempts; "
            f"the last failed because: {problems[-1]}"
        )

    def close(self) -> None:
        """Leave the weight group."""
        if self._group is not None:
            destroy_group(self._group)
            self._group, self._group_name = None, ""

    async def _attempt(self, version: int, buckets: Sequence[Bucket], source: WeightSource) -> tuple[float, str]:
        """Pause in seconds, and why the attempt failed, if it did."""
        if self._store is None:
            self._store = open_store(self._config.host)
        limit = self._config.timeout_seconds
        begin = await self._client.publish_begin(
            PublishBegin(
                version=version,
                buckets=[self._specs(bucket) for bucket in buckets],
                master_address=self._config.host,
                master_port=self._store.port,
                backend=self._backend,
                group_name=self._group_name,
            ),
            timeout=limit + COMMIT_MARGIN_SECONDS,
        )
        error = ""
        try:
            await self._in_thread(self._send, begin, buckets, source)
        except PublicationError as failure:
            error = str(failure)
        reply = await self._client.publish_commit(
            PublishCommit(version=version, group_name=begin.group_name, error=error),
            timeout=MANAGER_STEPS * limit + COMMIT_MARGIN_SECONDS,
        )
        if reply.done:
            return reply.pause_seconds, ""
        self.close()
        return 0.0, reply.error or error

    def _send(self, begin: PublishBeginReply, buckets: Sequence[Bucket], source: WeightSource) -> None:
        if begin.group_name != self._group_name:
            self.close()
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
        with closing(source.weights()) as weights:
            for number, bucket in enumerate(buckets):
                flat = flatten(bucket, weights, dtype=self._dtype, device=self._device)
                broadcast(flat, self._group, what=f"weight bucket {number + 1} of {len(buckets)}")

    def _specs(self, bucket: Bucket) -> list[TensorSpec]:
        dtype = str(self._dtype).removeprefix("torch.")
        return [TensorSpec(name=name, dtype=dtype, shape=list(shape)) for name, shape in bucket]


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


def flatten(
    bucket: Bucket, weights: Iterator[tuple[str, Tensor]], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The bytes of the next weights, those of `bucket`, as `dtype`, one after another: uint8 `[bytes]`."""
    flat = torch.empty(sum(math.prod(shape) for _, shape in bucket), dtype=dtype, device=device)
    offset = 0
    for (name, shape), (found, tensor) in zip(bucket, weights, strict=False):
        if found != name or tuple(tensor.shape) != tuple(shape):
            raise PublicationError(f"weight {found} {tuple(tensor.shape)} came where {name} {shape} was announced")
        flat[offset : offset + tensor.numel()].copy_(tensor.reshape(-1))
        offset += tensor.numel()
    return flat.view(torch.uint8)
