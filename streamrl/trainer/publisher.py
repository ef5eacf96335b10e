"""The trainer's side of a weight update: brings the weights of a version to all gservers.

The manager runs the transaction (`gserver/weights.py`); a carrier brings the weights, by broadcast
(`transport/broadcaster.py`) or through files (`weight_files.py`). The publisher only reads weights, so the next
training step may compute meanwhile; it must not update them before `on_read` was called or `publish` has returned.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

import torch

from streamrl import checksum
from streamrl.config import Config, WeightsConfig
from streamrl.errors import PublicationError
from streamrl.safetensors_files import SHARED_MEMORY
from streamrl.trainer.calls import Published
from streamrl.trainer.weight_files import WeightFiles, has_room
from streamrl.trainer.weight_source import WeightSource
from streamrl.transport.broadcaster import Broadcaster
from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.publication import Broadcast, PublishBegin, PublishBeginReply, PublishCommit, Snapshot
from streamrl.transport.keys import is_loopback

log = logging.getLogger(__name__)

RunInThread = Callable[..., Awaitable[Any]]

COMMIT_MARGIN_SECONDS = 10.0
"""How much longer than the manager's own deadlines the publisher waits for its answer."""
VERSIONS = 3
"""Of the weights that may be in shared memory: two, and one that a gserver still reads."""
MANAGER_STEPS = 5
"""Steps of the transaction that may each take `timeout_seconds` while the publisher waits."""


class Carrier(Protocol):
    """Brings weights to gservers; its methods block, and may raise `PublicationError`."""

    dtype: torch.dtype
    """In which weights are brought."""
    reads_once: bool
    """Whether `prepare` reads all there is to read of the source."""

    def prepare(self, version: int, source: WeightSource) -> None:
        """These weights come next."""

    def announce(self) -> Broadcast | Snapshot:
        """What the manager is told of them."""

    def bring(self, begin: PublishBeginReply) -> dict[str, str]:
        """Do the publisher's part of one attempt; answers the checksums of what was brought, by name."""

    def give_up(self) -> None:
        """The attempt failed."""

    def close(self) -> None:
        """No version comes any more."""


class Publisher:
    """Brings weights to the gservers; one for each run, on the trainer's rank 0."""

    def __init__(
        self, *, client: ControlClient, config: WeightsConfig, carrier: Carrier, in_thread: RunInThread
    ) -> None:
        self._client = client
        self._config = config
        self._carrier = carrier
        self._in_thread = in_thread

    async def publish(
        self, version: int, source: WeightSource, *, again: bool = False, on_read: Callable[[], None] = lambda: None
    ) -> Published:
        """Bring the weights of `source` to every live gserver as `version`; with `again` to those that lack it.

        `on_read` hears that `source` is not read any more. Raises `PublicationError` when all attempts failed; the
        gservers then serve what they served. `again` does not: the manager decides what becomes of those gservers.
        """
        began = time.monotonic()
        size = sum(math.prod(shape) for _, shape in source.specs()) * self._carrier.dtype.itemsize
        reading = True
        problems: list[str] = []
        try:
            await self._in_thread(self._carrier.prepare, version, source)
            if self._carrier.reads_once:
                reading = False
                await self._in_thread(source.end)
                on_read()
            while len(problems) < self._config.attempts:
                pause, problem = await self._attempt(version, again=again)
                if not problem:
                    break
                problems.append(problem)
                log.warning("weights of version %d: attempt %d failed: %s", version, len(problems), problem)
            else:
                if not again:
                    raise PublicationError(
                        f"weights of version {version} did not reach the gservers in {len(problems)} attempts; "
                        f"the last failed because: {problems[-1]}"
                    )
        finally:
            if reading:
                await self._in_thread(source.end)
        return Published(seconds=time.monotonic() - began, pause_seconds=pause, bytes=size, attempts=len(problems) + 1)

    def close(self) -> None:
        """Leave the weight group, or remove the files."""
        self._carrier.close()

    async def _attempt(self, version: int, *, again: bool) -> tuple[float, str]:
        """Pause in seconds, and why the attempt failed, if it did."""
        limit = self._config.timeout_seconds
        weights = await self._in_thread(self._carrier.announce)
        message = PublishBegin(version=version, weights=weights, again=again)
        begin = await self._client.publish_begin(message, timeout=limit + COMMIT_MARGIN_SECONDS)
        if begin.world_size == 1:
            return 0.0, ""
        error = ""
        checksums: dict[str, str] = {}
        try:
            checksums = await self._in_thread(self._carrier.bring, begin)
        except PublicationError as failure:
            error = str(failure)
            # before the manager hears: a gserver that still waits for a part cannot resume
            await self._in_thread(self._carrier.give_up)
        reply = await self._client.publish_commit(
            PublishCommit(version=version, group_name=begin.group_name, error=error, checksums=checksums),
            timeout=MANAGER_STEPS * limit + COMMIT_MARGIN_SECONDS,
        )
        if reply.done:
            return reply.pause_seconds, ""
        await self._in_thread(self._carrier.give_up)
        return 0.0, reply.error or error


def carrier_for(
    config: Config, *, backend: Literal["gloo", "nccl"], dtype: torch.dtype, device: torch.device, numbers: int
) -> Carrier:
    """The carrier that `weights.mode` names. `backend` is for a broadcast; `numbers`: how many all weights are."""
    weights = config.weights
    if weights.checksum:
        checksum.make_ready()
    mode = weights.mode
    if mode == "auto":
        obstacle = _no_shared_memory(config, device=device, size=numbers * dtype.itemsize)
        mode = "collective" if obstacle else "shared_memory"
        log.info("weights.mode: %s%s", mode, f", because {obstacle}" if obstacle else "")
    if mode == "shared_memory":
        return WeightFiles.in_memory(config.run_dir, dtype=dtype, checksum=weights.checksum)
    if mode == "disk":
        return WeightFiles.on_disk(config.run_dir, weights.dir, dtype=dtype, checksum=weights.checksum)
    return Broadcaster(weights, backend=backend, dtype=dtype, device=device)


def _no_shared_memory(config: Config, *, device: torch.device, size: int) -> str:
    """Why gservers should not serve weights of `size` bytes from the memory of this host; empty: they should."""
    if not is_loopback(config.weights.host):
        return "weights.host is there for several hosts"
    if config.weights.backend != "auto":
        return "weights.backend is of a broadcast"
    if config.gserver.engine != "embedded":
        return f'gserver.engine is "{config.gserver.engine}"'
    if device.type != "cpu":
        return f"the trainer is on {device}"
    if not has_room(VERSIONS * size):
        return f"{SHARED_MEMORY} has no room for {VERSIONS} times {size / 2**20:.0f} MiB"
    return ""
