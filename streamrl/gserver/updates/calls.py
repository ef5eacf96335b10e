"""The calls that the manager makes to a gserver about its weights: SGLang's API, each with a deadline.

A call that fails raises a `StreamRLError`: `PeerLost` if the gserver is gone, `DeadlineExceeded` if it does not reply
in time, `PeerError` or `PublicationError` if it refuses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from streamrl.errors import PeerError, PublicationError, StreamRLError
from streamrl.gserver.manager.gserver import Gserver
from streamrl.transport.control import TensorSpec
from streamrl.transport.generation import (
    ADAPTER_PREFIX,
    AbortRequest,
    DestroyWeightsUpdateGroup,
    GenerationClient,
    InitWeightsUpdateGroup,
    LoadedAdapters,
    LoadLoraAdapter,
    ModelInfo,
    PauseGeneration,
    PauseMode,
    RankSums,
    ReceivedSums,
    ServerInfo,
    StagedSums,
    UnloadLoraAdapter,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightVersion,
    WeightsChecker,
)
from streamrl.waits import ANSWER_SECONDS, cancel

log = logging.getLogger(__name__)

UNKNOWN_ACTION = "Unsupported action"
"""Part of SGLang's reply to an action that its /weights_checker does not know."""
MOST_OLD_ADAPTERS = 32
"""Most old adapters that stay loaded for requests that still use them."""
NOTHING = "nothing"
"""Stands for the checksum of a tensor that was not received."""
FORMING_MARGIN_SECONDS = 5.0
"""Most seconds by which the manager's deadline for forming a weight group exceeds the gserver's own."""
CALLS_PER_TURN = 8
"""Calls that start in one turn of the event loop. A step of an update calls every gserver at once, and a call costs
about 0.3 ms of processor time: replies to admissions would wait for hundreds of calls in one turn."""


class WeightCalls:
    """One method for each call to a `gserver`; `timeout` is the call's deadline in seconds."""

    def __init__(self, client: GenerationClient, *, timeout: float, request_seconds: float = 0.0) -> None:
        """`request_seconds`: the longest duration of a request to a gserver."""
        self._client = client
        self._request_seconds = request_seconds
        self._timeout = timeout
        self._probe_timeout = min(ANSWER_SECONDS, timeout)
        self._background: set[asyncio.Task[Any]] = set()
        self._starts = asyncio.Semaphore(CALLS_PER_TURN)

    async def close(self) -> None:
        """Cancel the calls in progress in the background."""
        await cancel(*self._background)

    async def _turn(self) -> None:
        """Wait for a turn of the event loop in which a call may start, in order of arrival."""
        await self._starts.acquire()
        asyncio.get_running_loop().call_soon(self._starts.release)

    # State and abilities

    async def info(self, gserver: Gserver) -> ServerInfo:
        """Return the abilities of the gserver. A live one replies at once."""
        await self._turn()
        return await self._client.get(gserver.address, "/server_info", ServerInfo, timeout=self._probe_timeout)

    async def label(self, gserver: Gserver) -> str:
        """Return the gserver's label of its served weights: a version, as text, or another name."""
        await self._turn()
        model = await self._client.get(gserver.address, "/model_info", ModelInfo, timeout=self._probe_timeout)
        return model.weight_version

    async def wait_until_idle(self, gserver: Gserver) -> None:
        """Wait until the gserver has finished all earlier calls, including abandoned ones.

        SGLang's scheduler handles calls in order, and this call goes through it.
        """
        await self._client.get(gserver.address, "/server_info", ServerInfo, timeout=self._timeout)

    # The weight group

    async def join_group(self, gserver: Gserver, message: InitWeightsUpdateGroup) -> None:
        """Have the gserver join a weight group; it replies when all ranks have met."""
        # Slightly longer than the gserver itself waits for the others, since its reply has the cause of a failure.
        margin = min(FORMING_MARGIN_SECONDS, self._timeout / 4)
        await self._post(gserver, "/init_weights_update_group", message, timeout=self._timeout + margin)

    def leave_group(self, name: str, members: Iterable[Gserver]) -> None:
        """Have `members` leave the group `name` in the background."""
        message = DestroyWeightsUpdateGroup(group_name=name)
        for gserver in members:
            call = self._post(gserver, "/destroy_weights_update_group", message)
            self._in_background(call, f"{gserver.name} did not leave the weight group {name}")

    def _in_background(self, call: Coroutine[Any, Any, None], failure: str) -> None:
        """Make a call that nothing depends on; if it fails, log `failure` with the error."""

        def ended(task: asyncio.Task[Any]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.info("%s: %s", failure, error, exc_info=None if isinstance(error, StreamRLError) else error)

        task = asyncio.create_task(call)
        self._background.add(task)
        task.add_done_callback(ended)

    # The steps of an update

    async def begin(self, gserver: Gserver) -> None:
        """Begin an update, with nothing staged."""
        try:
            await self._post(gserver, "/begin_weight_update")
        except PeerError as error:
            if not 400 <= error.status < 500:
                raise
            await self.end(gserver)  # SGLang refuses while an update is open, for example an interrupted one
            await self._post(gserver, "/begin_weight_update")

    async def receive(
        self, gserver: Gserver, bucket: Sequence[TensorSpec], *, group: str, label: str | None, flush_cache: bool
    ) -> None:
        """Have the gserver receive the next broadcasts in `group`, one for each tensor of `bucket`: into its stage if
        it has one, else over its served weights. `label` as in `load`."""
        message = UpdateWeightsFromDistributed(
            names=[spec.name for spec in bucket],
            dtypes=[spec.dtype for spec in bucket],
            shapes=[spec.shape for spec in bucket],
            group_name=group,
            weight_version=label,
            flush_cache=flush_cache,
        )
        await self._post(gserver, "/update_weights_from_distributed", message)

    async def load(self, gserver: Gserver, folder: str, *, label: str | None, flush_cache: bool) -> None:
        """Have the gserver read the weights in `folder`: into its stage if it has one, else over its served weights.

        `label`: the name of the new weights, or None if `name` follows.
        """
        message = UpdateWeightsFromDisk(model_path=folder, weight_version=label, flush_cache=flush_cache)
        await self._post(gserver, "/update_weights_from_disk", message)

    async def load_adapter(self, gserver: Gserver, folder: str, *, name: str) -> None:
        """Have an SGLang server load the adapter in `folder` under `name`, in addition to the adapters in use."""
        try:
            loaded = await self._load_adapter(gserver, folder, name)
        except PeerError as refused:
            if not 400 <= refused.status < 500:
                raise
            try:  # an interrupted attempt, or an earlier run, may have left an adapter of this name
                await self._unload_adapter(gserver, name)
            except PeerError:
                raise refused from None
            loaded = await self._load_adapter(gserver, folder, name)
        ours = [other for other in loaded.loaded_adapters or () if other.startswith(ADAPTER_PREFIX)]
        gserver.adapters = {other: gserver.adapters.get(other, math.inf) for other in (*ours, name)}

    def unload_old_adapters(self, gserver: Gserver, *, serves: str) -> None:
        """Have the gserver unload the adapters that no request can still use.

        New requests name the adapter `serves` from now on. The oldest adapters beyond `MOST_OLD_ADAPTERS` are unloaded,
        too. The calls run in the background.
        """
        now = time.monotonic()
        old = {name: min(since, now) for name, since in gserver.adapters.items() if name != serves}
        unused = sorted(old, key=old.__getitem__)[: max(0, len(old) - MOST_OLD_ADAPTERS)]
        unused += [name for name, since in old.items() if now - since > self._request_seconds and name not in unused]
        gserver.adapters = {serves: math.inf} | {name: since for name, since in old.items() if name not in unused}
        for name in unused:
            self._in_background(self._unload_adapter(gserver, name), f"{gserver.name} did not unload {name}")

    async def _load_adapter(self, gserver: Gserver, folder: str, name: str) -> LoadedAdapters:
        message = LoadLoraAdapter(lora_name=name, lora_path=folder)
        return await self._client.post(
            gserver.address, "/load_lora_adapter", message, LoadedAdapters, timeout=self._timeout
        )

    async def _unload_adapter(self, gserver: Gserver, name: str) -> None:  # SGLang handles these one after another
        message = UnloadLoraAdapter(lora_name=name)
        await self._client.post(gserver.address, "/unload_lora_adapter", message, LoadedAdapters, timeout=self._timeout)

    async def verify(self, gserver: Gserver, trained: Mapping[str, str]) -> None:
        """Compare the checksums of the gserver's received weights with `trained` (name → checksum).

        An empty `trained` compares nothing. Raises `PublicationError` if any checksum differs.
        """
        if not trained:
            return
        if gserver.stages_weights:
            message = WeightsChecker(action="staged")
            found = await self._client.post(
                gserver.address, "/weights_checker", message, StagedSums, timeout=self._timeout
            )
            _compare(gserver, found.tensors, trained, unknown=[name for name in found.tensors if name not in trained])
            return
        ranks = await self.received(gserver)
        if ranks is not None and len(ranks) != gserver.ranks:
            raise PublicationError(f"{gserver.name} reports the weights of {len(ranks)} ranks, and has {gserver.ranks}")
        for rank in ranks or ():
            # The list may include tensors received before, in an earlier run.
            _compare(gserver, {name: rank.checksums.get(name, NOTHING) for name in trained}, trained)

    async def received(self, gserver: Gserver) -> list[RankSums] | None:
        """Return the checksums of the tensors that each rank of a gserver without a stage received last.

        Return None if the gserver does not support this, for example because another program started it.
        """
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
            log.info("%s reports no checksums: only log-probabilities show whether its weights are right", gserver.name)
            return None
        return sums.ranks

    async def pause(self, gserver: Gserver, mode: PauseMode) -> None:
        """Have the gserver stop generating between two steps; `mode` determines the fate of its requests."""
        await self._post(gserver, "/pause_generation", PauseGeneration(mode=mode))

    async def name(self, gserver: Gserver, label: str) -> None:
        """Have the gserver label its served weights `label`."""
        message = UpdateWeightVersion(new_version=label, abort_all_requests=False)
        await self._post(gserver, "/update_weight_version", message)

    async def end(self, gserver: Gserver) -> None:
        """End the update: a gserver with a stage swaps the staged weights in."""
        await self._post(gserver, "/end_weight_update")

    async def abort_requests(self, gserver: Gserver, *, timeout: float) -> None:
        """Have the gserver end all requests, each with the tokens generated so far."""
        await self._post(gserver, "/abort_request", AbortRequest(abort_all=True), timeout=timeout)

    async def resume(self, gserver: Gserver, *, timeout: float) -> None:
        """Have the gserver continue generating after a pause."""
        await self._post(gserver, "/continue_generation", timeout=timeout)

    async def _post(
        self, gserver: Gserver, path: str, body: msgspec.Struct | None = None, *, timeout: float | None = None
    ) -> None:
        await self._turn()
        outcome = await self._client.update(gserver.address, path, body, timeout=timeout or self._timeout)
        if not outcome.success:
            raise PublicationError(f"{gserver.name} refused {path}: {outcome.message or 'no reason given'}")


def _compare(
    gserver: Gserver, found: Mapping[str, str], trained: Mapping[str, str], *, unknown: Sequence[str] = ()
) -> None:
    """Raise `PublicationError` if a checksum in `found` differs from `trained`, or there are `unknown` tensors."""
    wrong = [name for name, checksum in found.items() if trained.get(name, checksum) != checksum]
    if wrong or unknown:
        raise PublicationError(
            f"{gserver.name} received other weights than were trained: {len(wrong)} of {len(found)} tensors differ "
            f"({_some(wrong)}), {len(unknown)} have no checksum of the trainer ({_some(unknown)})"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) or "none"
