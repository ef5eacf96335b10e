"""The trainer's side of a weight update: sends the weights of a version to the gservers.

The manager runs the transaction (`gserver/updates/publication.py`); a `Carrier` moves the weights, by broadcast
(`weight_broadcast.py`) or through files (`weight_files.py`). `Publisher` runs on the trainer's rank 0.

Invariant: weights are only read here, so the next training step may compute at the same time. It must not update them
before `on_read` was called or `publish` has returned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

import torch

from streamrl import checksum
from streamrl.config import Config
from streamrl.errors import ConfigError, PublicationError
from streamrl.lora import adapter_settings
from streamrl.machine import GPUS_OF_WINDOWS, SHARED_MEMORY, machine_identity
from streamrl.trainer.calls import PublicationReply
from streamrl.trainer.worker.weight_broadcast import Broadcaster
from streamrl.trainer.worker.weight_files import SETS, WeightFiles, WeightMemory, has_room
from streamrl.trainer.worker.weight_source import WeightSource
from streamrl.transport.addresses import Reach
from streamrl.transport.control import (
    Broadcast,
    GserverPlaces,
    PublishBegin,
    PublishBeginReply,
    PublishCommit,
    Snapshot,
)
from streamrl.transport.manager_client import ControlClient

log = logging.getLogger(__name__)

RunInThread = Callable[..., Awaitable[Any]]

COMMIT_MARGIN_SECONDS = 10.0
"""How much longer than the manager's own deadlines the publisher waits for its reply, in seconds."""
MANAGER_STEPS = 5
"""Number of steps of the transaction that may each take `timeout_seconds` while the publisher waits."""
NOWHERE = GserverPlaces(machines=[], gpus=[])
VERSIONS = 3
"""Maximal number of versions of the weights in shared memory: two, and one that a gserver still reads."""


class Carrier(Protocol):
    """Transport of weights to gservers; its methods block, and may raise `PublicationError`."""

    dtype: torch.dtype
    """Dtype in which weights are sent."""
    reads_once: bool
    """Whether `prepare` reads all weights, so that no later method reads them."""
    sent_bytes: int
    """Bytes sent or written since construction, counted once for any number of receivers."""

    def prepare(self, version: int, weights: WeightSource) -> None:
        """Prepare to send `weights` as `version`."""

    def announce(self) -> Broadcast | Snapshot:
        """Return the announcement of the weights to the manager."""

    def send(self, begin: PublishBeginReply) -> dict[str, str]:
        """Do the publisher's part of one attempt; return the checksum of each weight that was sent, by name."""

    def abort(self) -> None:
        """Clean up after a failed attempt."""

    def close(self) -> None:
        """Release all resources; no further version follows."""


class Carriers:
    """The carriers from which one is chosen for each publication."""

    def __init__(
        self,
        anywhere: Carrier,
        *,
        near: Carrier | None = None,
        gpu: str = "",
        no_room: Callable[[], str] = lambda: "",
    ) -> None:
        """`near` replaces `anywhere` while all gservers are on this machine (`machine_identity`) and, if it is given,
        on this `gpu` (`gpu_identity`). `no_room` returns why there is too little memory for `near`, or an empty string;
        it is called until `near` is chosen and occupies its memory."""
        self._anywhere = anywhere
        self._near = near
        self._machine = machine_identity()
        self._gpu = gpu
        self._no_room = no_room
        self._chosen: Carrier | None = None

    @property
    def depend_on_places(self) -> bool:
        """Whether the choice depends on the places of the gservers."""
        return self._near is not None

    def choose(self, places: GserverPlaces = NOWHERE) -> Carrier:
        """Return the carrier for gservers at `places`."""
        if self._near is None:
            return self._anywhere
        why_not = self._why_not_near(places)
        chosen = self._anywhere if why_not else self._near
        if not why_not:
            self._no_room = lambda: ""
        if chosen is not self._chosen:
            near = "cuda_ipc" if self._gpu else "shared_memory"
            log.info("weights.mode: %s (%s)", "collective" if why_not else near, why_not or "all gservers are here")
        self._chosen = chosen
        return chosen

    def _why_not_near(self, places: GserverPlaces) -> str:
        if not places.machines:
            return "no gserver is there"
        if set(places.machines) != {self._machine}:
            return "gservers are on other hosts"
        if self._gpu and set(places.gpus) != {self._gpu}:
            return "gservers are not all on the GPU of the trainer's first model worker"
        return self._no_room()

    def close(self) -> None:
        """Close all carriers; no further version follows."""
        if self._near is not None:
            self._near.close()  # first: leaving a weight group may fail
        self._anywhere.close()


class Publisher:
    """Publisher of one version after another."""

    def __init__(self, *, client: ControlClient, config: Config, carriers: Carriers, in_thread: RunInThread) -> None:
        self._client = client
        self._attempts = config.weights.attempts
        self._timeout = config.limits.update_seconds
        self._carriers = carriers
        self._in_thread = in_thread

    async def publish(
        self, version: int, source: WeightSource, *, resync: bool = False, on_read: Callable[[], None] = lambda: None
    ) -> PublicationReply:
        """Send the weights of `source` to every live gserver as `version`; with `resync` only to those that lack it.

        `on_read` is called when `source` is not read any more. Raises `PublicationError` after `weights.attempts`
        failed attempts; the gservers then continue to serve their previous weights. With `resync` it does not raise:
        the manager decides about the gservers that lack the version.
        """
        began = time.monotonic()
        reading = True
        problems: list[str] = []
        try:
            places = await self._client.gserver_places() if self._carriers.depend_on_places else NOWHERE
            carrier = self._carriers.choose(places)
            before = carrier.sent_bytes
            await self._in_thread(carrier.prepare, version, source)
            if carrier.reads_once:
                reading = False
                await self._in_thread(source.end)
                on_read()
            while len(problems) < self._attempts:
                pause, problem = await self._attempt(carrier, version, resync=resync)
                if not problem:
                    break
                problems.append(problem)
                log.warning("weights of version %d: attempt %d failed: %s", version, len(problems), problem)
            else:
                if not resync:
                    raise PublicationError(
                        f"weights of version {version} did not reach the gservers in {len(problems)} attempts; "
                        f"the last failed because: {problems[-1]}"
                    )
        finally:
            if reading:  # the other ranks wait for this, also after a failure here
                await self._in_thread(source.end)
        return PublicationReply(
            seconds=time.monotonic() - began,
            pause_seconds=pause,
            bytes=carrier.sent_bytes - before,
            attempts=len(problems) + 1,
        )

    def close(self) -> None:
        """Leave the weight group, or remove the files."""
        self._carriers.close()

    async def _attempt(self, carrier: Carrier, version: int, *, resync: bool) -> tuple[float, str]:
        """Make one attempt; return the pause in seconds, and the reason of a failure or an empty string."""
        limit = self._timeout
        weights = await self._in_thread(carrier.announce)
        message = PublishBegin(version=version, weights=weights, resync=resync)
        begin = await self._client.publish_begin(message, timeout=limit + COMMIT_MARGIN_SECONDS)
        if begin.world_size == 1:
            return 0.0, ""
        error = ""
        checksums: dict[str, str] = {}
        try:
            checksums = await self._in_thread(carrier.send, begin)
        except PublicationError as failure:
            error = str(failure)
            # before the manager is informed: a gserver that still waits for a part cannot resume
            await self._in_thread(carrier.abort)
        reply = await self._client.publish_commit(
            PublishCommit(version=version, group_name=begin.group_name, error=error, checksums=checksums),
            timeout=MANAGER_STEPS * limit + COMMIT_MARGIN_SECONDS,
        )
        if reply.done:
            return reply.pause_seconds, ""
        await self._in_thread(carrier.abort)
        return 0.0, reply.error or error


def carriers_for(
    config: Config,
    *,
    reach: Reach,
    backend: Literal["gloo", "nccl"],
    dtype: torch.dtype,
    device: torch.device,
    numbers: int,
    gpu: str = "",
    gpu_memory: Callable[[], int] = lambda: 0,
) -> Carriers:
    """Return the carriers that `weights.mode` names. `reach` and `backend` are for a broadcast; `numbers`: the
    total number of elements of all weights; `gpu`: the `gpu_identity` of `device`; `gpu_memory` returns the number of
    free bytes on it."""
    weights = config.weights
    if weights.checksum:
        checksum.make_ready()
    lora = config.model.lora if weights.lora == "adapter" else None
    adapter = adapter_settings(lora, config.model.path) if lora is not None else None

    def files(*, on_disk: bool) -> WeightFiles:
        return WeightFiles(config.run_dir, on_disk=on_disk, dtype=dtype, checksum=weights.checksum, adapter=adapter)

    def in_gpu_memory() -> WeightMemory:
        return WeightMemory(dtype=dtype, device=device, checksum=weights.checksum, gpu=gpu)

    if weights.mode == "disk":
        return Carriers(files(on_disk=True))
    if weights.mode == "shared_memory" or config.named_adapters:
        return Carriers(files(on_disk=False))
    if weights.mode == "cuda_ipc":
        if device.type != "cuda":
            raise ConfigError(f'weights.mode = "cuda_ipc" needs a trainer on a GPU, and it is on {device}')
        return Carriers(in_gpu_memory())
    broadcaster = Broadcaster(config, reach=reach, backend=backend, dtype=dtype, device=device)
    if weights.mode == "collective":
        return Carriers(broadcaster)
    if gpu:
        obstacle = _not_through_gpu(config)
    else:
        obstacle = _no_shared_memory(config, device=device, size=numbers * dtype.itemsize)
    if obstacle:
        log.info("weights.mode: collective, because %s", obstacle)
        return Carriers(broadcaster)
    if not gpu:
        return Carriers(broadcaster, near=files(on_disk=False))
    size = numbers * dtype.itemsize

    def no_room() -> str:
        return _no_gpu_memory(free=gpu_memory(), size=size, gservers=config.gserver.count)

    return Carriers(broadcaster, near=in_gpu_memory(), gpu=gpu, no_room=no_room)


def _not_through_gpu(config: Config) -> str:
    """Return why gservers on the trainer's GPU should not receive weights through its memory, even with enough room;
    empty if they should. A broadcast over gloo is no reason: `streamrl run` reports it wherever GPUs are shared."""
    if config.weights.backend == "nccl":
        return "weights.backend is of a broadcast"
    if not config.gserver.traits.opens_memory:
        return f'gserver.engine is "{config.gserver.engine}"'
    if GPUS_OF_WINDOWS.exists():
        return "processes cannot share a GPU's memory under Windows (WSL 2)"
    return ""


def _no_gpu_memory(*, free: int, size: int, gservers: int) -> str:
    """Return why a GPU with `free` bytes has no room for weights of `size` bytes; empty if it has.

    Called after a training step. Memory for training is then not free: torch keeps the memory of gradients, activations
    and other temporary tensors. The memory in which each gserver stages the weights is still to be allocated.
    """
    needed = (SETS + gservers) * size
    if free >= needed:
        return ""
    return (
        f"{free / 2**30:.1f} GiB of the GPU are free, and {needed / 2**30:.1f} are needed: {SETS} times the weights, "
        "and once more for each gserver to stage them"
    )


def _no_shared_memory(config: Config, *, device: torch.device, size: int) -> str:
    """Return why gservers should not serve weights of `size` bytes from the memory of this host; empty if they
    should."""
    if config.weights.backend != "auto":
        return "weights.backend is of a broadcast"
    if not config.gserver.traits.opens_memory:
        return f'gserver.engine is "{config.gserver.engine}"'
    if device.type != "cpu":
        return f"the trainer is on {device}"
    if not has_room(VERSIONS * size):
        return f"{SHARED_MEMORY} has no room for {VERSIONS} times {size / 2**20:.0f} MiB"
    return ""
