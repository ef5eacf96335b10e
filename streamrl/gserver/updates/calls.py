"""What the manager asks of a gserver for its weights: calls in SGLang's API, each with a deadline.

Every call raises a `StreamRLError`: `PeerLost` for a gserver that is gone, `DeadlineExceeded` for one that does not
reply in time, `PeerError` or `PublicationError` for one that refuses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from streamrl.errors import PeerError, PublicationError, StreamRLError
from streamrl.gserver.manager.gserver import Gserver
from streamrl.transport.control import Broadcast, TensorSpec
from streamrl.transport.generation import (
    ADAPTER_PREFIX,
    AbortRequest,
    BeginWeightUpdate,
    DestroyWeightsUpdateGroup,
    GenerationClient,
    InitWeightsUpdateGroup,
    LoadedAdapters,
    LoadLoraAdapter,
    ModelInfo,
    OfferWeights,
    PauseGeneration,
    PauseMode,
    RankSums,
    ReceivedSums,
    ReceiveWeights,
    SendWeights,
    ServerInfo,
    StagedSums,
    UnloadLoraAdapter,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightVersion,
    WeightsChecker,
)

log = logging.getLogger(__name__)

UNKNOWN_ACTION = "Unsupported action"
"""SGLang's reply when /weights_checker is asked for something that it does not know."""
MOST_OLD_ADAPTERS = 32
"""So many adapters that are not named any more may stay loaded for requests that still have them."""
NOTHING = "nothing"
"""Stands for the checksum of a tensor that did not come."""
FORMING_MARGIN_SECONDS = 5.0
PROBE_SECONDS = 5.0
"""A gserver that does not reply to a simple question for so long counts as lost."""


class WeightCalls:
    """One method for each call; `timeout` is the deadline of each, in seconds."""

    def __init__(self, client: GenerationClient, *, timeout: float, request_seconds: float = 0.0) -> None:
        """`request_seconds`: no request to a gserver lasts longer."""
        self._client = client
        self._request_seconds = request_seconds
        self._timeout = timeout
        self._probe_timeout = min(PROBE_SECONDS, timeout)
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Give up calls that are made in the background."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # What it is

    async def info(self, gserver: Gserver) -> ServerInfo:
        """Return what it can do; a gserver that lives replies at once."""
        return await self._client.get(gserver.address, "/server_info", ServerInfo, timeout=self._probe_timeout)

    async def label(self, gserver: Gserver) -> str:
        """Return the name of the weights that it serves: its version, as text, or another name."""
        model = await self._client.get(gserver.address, "/model_info", ModelInfo, timeout=self._probe_timeout)
        return model.weight_version

    async def wait_until_idle(self, gserver: Gserver) -> None:
        """Wait until it is done with the calls that were made before, given up or not: SGLang's scheduler takes one
        after another, and has a part in this reply."""
        await self._client.get(gserver.address, "/server_info", ServerInfo, timeout=self._timeout)

    # The weight group

    async def join_group(self, gserver: Gserver, message: InitWeightsUpdateGroup) -> None:
        # A little longer than the gserver itself waits for the others: it knows what went wrong.
        """Have it meet the others in a weight group."""
        margin = min(FORMING_MARGIN_SECONDS, self._timeout / 4)
        await self._post(gserver, "/init_weights_update_group", message, timeout=self._timeout + margin)

    def leave_group(self, name: str, members: Iterable[Gserver]) -> None:
        """Have `members` leave the group, in the background: nothing depends on it, and a failure is only logged."""
        for gserver in members:
            self._in_background(self._leave_group(gserver, name))

    def _in_background(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _leave_group(self, gserver: Gserver, name: str) -> None:
        try:
            await self._post(gserver, "/destroy_weights_update_group", DestroyWeightsUpdateGroup(group_name=name))
        except StreamRLError as error:
            log.info("%s did not leave the weight group %s: %s", gserver.name, name, error)

    # One gserver sends to another

    async def offer(self, gserver: Gserver, *, group: str, version: int) -> Broadcast:
        """Have it get ready to send its weights, which have to be those of `version`, in `group`."""
        message = OfferWeights(group_name=group, version=version)
        return await self._client.post(gserver.address, "/offer_weights", message, Broadcast, timeout=self._timeout)

    async def send(self, gserver: Gserver, *, group: str, buckets: int) -> None:
        """Have it send the weights that it has offered, which are so many `buckets`."""
        await self._post(gserver, "/send_weights", SendWeights(group_name=group), timeout=(buckets + 1) * self._timeout)

    # The steps of an update

    async def begin(self, gserver: Gserver, *, transfer: str = "") -> None:
        """`transfer`: names weights of which a gserver with a stage keeps what it has."""
        message = BeginWeightUpdate(transfer=transfer)
        try:
            await self._post(gserver, "/begin_weight_update", message)
        except PeerError as error:
            if not 400 <= error.status < 500:
                raise
            await self.end(gserver)  # SGLang refuses as long as an update is open, for example one that broke off
            await self._post(gserver, "/begin_weight_update", message)

    async def receive_all(
        self, gserver: Gserver, message: ReceiveWeights, on_progress: Callable[[list[int]], None]
    ) -> None:
        """Have it receive all weights into its stage, in one call whose deadline is that of a bucket. `on_progress` is
        told how many buckets of each sender it has."""
        await self._client.receive_weights(gserver.address, message, on_progress, timeout=self._timeout)

    async def receive(self, gserver: Gserver, bucket: Sequence[TensorSpec], *, group: str, flush_cache: bool) -> None:
        """Have it receive the next broadcasts in `group`, one for each tensor of `bucket`, over the weights that it
        serves."""
        message = UpdateWeightsFromDistributed(
            names=[spec.name for spec in bucket],
            dtypes=[spec.dtype for spec in bucket],
            shapes=[spec.shape for spec in bucket],
            group_name=group,
            flush_cache=flush_cache,
        )
        await self._post(gserver, "/update_weights_from_distributed", message)

    async def load(self, gserver: Gserver, folder: str, *, version: int | None, flush_cache: bool) -> None:
        """Have it read the weights in `folder`: into its stage where an update has begun, else over those that it
        serves; `version` is None then, and told later."""
        message = UpdateWeightsFromDisk(
            model_path=folder, weight_version=None if version is None else str(version), flush_cache=flush_cache
        )
        await self._post(gserver, "/update_weights_from_disk", message)

    async def load_adapter(self, gserver: Gserver, folder: str, *, name: str) -> None:
        """Have an SGLang server load the adapter in `folder` under `name`, beside those that are in use."""
        try:
            loaded = await self._load_adapter(gserver, folder, name)
        except PeerError as refused:
            if not 400 <= refused.status < 500:
                raise
            try:  # an attempt that broke off, or the run before, may have left one of this name
                await self._unload_adapter(gserver, name)
            except PeerError:
                raise refused from None
            loaded = await self._load_adapter(gserver, folder, name)
        ours = [other for other in loaded.loaded_adapters or () if other.startswith(ADAPTER_PREFIX)]
        gserver.adapters = {other: gserver.adapters.get(other, math.inf) for other in (*ours, name)}

    def unload_old_adapters(self, gserver: Gserver, *, serves: str) -> None:
        """From now on requests name the adapter `serves`. Have it unload those that no request can have any more.

        In the background: nothing depends on it, and a failure is only logged.
        """
        now = time.monotonic()
        old = {name: min(since, now) for name, since in gserver.adapters.items() if name != serves}
        unused = sorted(old, key=old.__getitem__)[: max(0, len(old) - MOST_OLD_ADAPTERS)]
        unused += [name for name, since in old.items() if now - since > self._request_seconds and name not in unused]
        gserver.adapters = {serves: math.inf} | {name: since for name, since in old.items() if name not in unused}
        if unused:
            self._in_background(self._unload_adapters(gserver, unused))

    async def _unload_adapters(self, gserver: Gserver, names: Sequence[str]) -> None:
        for name in names:
            try:
                await self._unload_adapter(gserver, name)
            except StreamRLError as error:
                log.info("%s did not unload %s: %s", gserver.name, name, error)

    async def _load_adapter(self, gserver: Gserver, folder: str, name: str) -> LoadedAdapters:
        message = LoadLoraAdapter(lora_name=name, lora_path=folder)
        return await self._client.post(
            gserver.address, "/load_lora_adapter", message, LoadedAdapters, timeout=self._timeout
        )

    async def _unload_adapter(self, gserver: Gserver, name: str) -> None:
        message = UnloadLoraAdapter(lora_name=name)
        await self._client.post(gserver.address, "/unload_lora_adapter", message, LoadedAdapters, timeout=self._timeout)

    async def verify(self, gserver: Gserver, trained: Mapping[str, str]) -> None:
        """Compare what it received with `trained` (name → checksum; empty: nothing is compared).

        Raises `PublicationError` when they differ.
        """
        if not trained:
            return
        if gserver.info is not None and gserver.info.staged_weight_update:
            message = WeightsChecker(action="staged")
            found = await self._client.post(
                gserver.address, "/weights_checker", message, StagedSums, timeout=self._timeout
            )
            _compare(gserver, found.tensors, trained, unknown=[name for name in found.tensors if name not in trained])
            return
        ranks = await self.received(gserver)
        if ranks is not None and len(ranks) != gserver.ranks:
            raise PublicationError(f"{gserver.name} tells what {len(ranks)} ranks received, and has {gserver.ranks}")
        for rank in ranks or ():
            # It may have been sent more before, by a run that it was in.
            _compare(gserver, {name: rank.checksums.get(name, NOTHING) for name in trained}, trained)

    async def received(self, gserver: Gserver) -> list[RankSums] | None:
        """Return, for each rank of a gserver without a stage, the checksums of the tensors that came last; None if it
        cannot tell, for example because somebody else started it."""
        if not gserver.tells_received:
            return None
        message = WeightsChecker(action="received")
        try:
            sums = await self._client.post(
                gserver.address, "/weights_checker", message, ReceivedSums, timeout=self._timeout
            )
        except PeerError as error:
            if UNKNOWN_ACTION not in str(error):
                raise
            gserver.tells_received = False
            log.info("%s does not tell what it received: its weights show in log-probabilities alone", gserver.name)
            return None
        return sums.ranks

    async def pause(self, gserver: Gserver, mode: PauseMode) -> None:
        """Have it stop between two steps."""
        await self._post(gserver, "/pause_generation", PauseGeneration(mode=mode))

    async def name(self, gserver: Gserver, label: str) -> None:
        """Have it call the weights that it serves `label`."""
        message = UpdateWeightVersion(new_version=label, abort_all_requests=False)
        await self._post(gserver, "/update_weight_version", message)

    async def end(self, gserver: Gserver) -> None:
        """End the update: a gserver with a stage serves the staged weights from here on."""
        await self._post(gserver, "/end_weight_update")

    async def abort_requests(self, gserver: Gserver, *, timeout: float) -> None:
        """Have it end all requests with the tokens that they have."""
        await self._post(gserver, "/abort_request", AbortRequest(abort_all=True), timeout=timeout)

    async def resume(self, gserver: Gserver, *, timeout: float) -> None:
        """Have it go on after a pause."""
        await self._post(gserver, "/continue_generation", timeout=timeout)

    async def _post(
        self, gserver: Gserver, path: str, body: msgspec.Struct | None = None, *, timeout: float | None = None
    ) -> None:
        outcome = await self._client.update(gserver.address, path, body, timeout=timeout or self._timeout)
        if not outcome.success:
            raise PublicationError(f"{gserver.name} refused {path}: {outcome.message or 'no reason given'}")


def _compare(
    gserver: Gserver, found: Mapping[str, str], trained: Mapping[str, str], *, unknown: Sequence[str] = ()
) -> None:
    """`unknown`: tensors that came and were not trained."""
    wrong = [name for name, checksum in found.items() if trained.get(name, checksum) != checksum]
    if wrong or unknown:
        raise PublicationError(
            f"{gserver.name} received other weights than were trained: {len(wrong)} of {len(found)} tensors differ "
            f"({_some(wrong)}), {len(unknown)} were not told ({_some(unknown)})"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) or "none"
