"""The calls that a weight update makes to one gserver, in SGLang's API, each with a deadline.

They raise `StreamRLError`: for a gserver that is lost or late, and for one that says no.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from streamrl.errors import PeerError, PublicationError, StreamRLError
from streamrl.gserver.routing import Gserver
from streamrl.transport.control.publication import Broadcast, TensorSpec
from streamrl.transport.generation import (
    MIXED_WEIGHTS,
    AbortRequest,
    DestroyWeightsUpdateGroup,
    GenerationClient,
    InitWeightsUpdateGroup,
    ModelInfo,
    OfferWeights,
    PauseGeneration,
    PauseMode,
    SendWeights,
    ServerInfo,
    StagedSums,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightVersion,
    WeightsChecker,
)

log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""A gserver that does not answer a simple question for so long counts as lost."""


class WeightCalls:
    """Calls of the weight protocol; `timeout` in seconds for each."""

    def __init__(self, client: GenerationClient, *, timeout: float) -> None:
        self._client = client
        self._timeout = timeout
        self._probe_timeout = min(PROBE_SECONDS, timeout)

    async def join_group(self, gserver: Gserver, message: InitWeightsUpdateGroup) -> None:
        await self._post(gserver, "/init_weights_update_group", message)

    async def leave_group(self, gserver: Gserver, name: str) -> None:
        """Raises nothing: nobody depends on it."""
        try:
            await self._post(gserver, "/destroy_weights_update_group", DestroyWeightsUpdateGroup(group_name=name))
        except StreamRLError as error:
            log.info("%s did not leave the weight group %s: %s", gserver.name, name, error)

    async def offer(self, gserver: Gserver, *, group: str, version: int) -> Broadcast:
        """Have it get ready to send the weights of `version` in `group`."""
        message = OfferWeights(group_name=group, version=version)
        return await self._client.post(gserver.address, "/offer_weights", message, Broadcast, timeout=self._timeout)

    async def send(self, gserver: Gserver, *, group: str, buckets: int) -> None:
        """Have it send what it has offered, so many `buckets`."""
        await self._post(gserver, "/send_weights", SendWeights(group_name=group), timeout=(buckets + 1) * self._timeout)

    async def begin(self, gserver: Gserver) -> None:
        try:
            await self._post(gserver, "/begin_weight_update")
        except PeerError as error:
            if not 400 <= error.status < 500:
                raise
            await self.end(gserver)  # SGLang refuses as long as an update is open, for example one that broke off
            await self._post(gserver, "/begin_weight_update")

    async def mark_mixed(self, gserver: Gserver) -> None:
        """Have the weights called mixed from here on, until they are named as a version."""
        await self._name(gserver, MIXED_WEIGHTS)

    async def receive(
        self, gserver: Gserver, bucket: Sequence[TensorSpec], *, group: str, version: int | None, flush_cache: bool
    ) -> None:
        """Have the next broadcasts in `group` taken as the tensors of `bucket`, one for each; a gserver that writes
        them over those that it serves is told no `version` yet."""
        message = UpdateWeightsFromDistributed(
            names=[spec.name for spec in bucket],
            dtypes=[spec.dtype for spec in bucket],
            shapes=[spec.shape for spec in bucket],
            group_name=group,
            flush_cache=flush_cache,
            weight_version=None if version is None else str(version),
        )
        await self._post(gserver, "/update_weights_from_distributed", message)

    async def settle(self, gserver: Gserver) -> None:
        """Wait until it is done with what it was told before, by calls that were given up maybe: SGLang's scheduler
        takes one after another, and has a part in this answer."""
        await self._client.get(gserver.address, "/server_info", ServerInfo, timeout=self._timeout)

    async def load(self, gserver: Gserver, folder: str, *, version: int, flush_cache: bool) -> None:
        """Have the weights in `folder` taken: aside in an update that has begun, else at once."""
        message = UpdateWeightsFromDisk(model_path=folder, weight_version=str(version), flush_cache=flush_cache)
        await self._post(gserver, "/update_weights_from_disk", message)

    async def verify(self, gserver: Gserver, trained: Mapping[str, str]) -> None:
        """Raises `PublicationError` when what is staged is not what was `trained` (name → checksum)."""
        if not trained:
            return
        found = await self._client.post(
            gserver.address, "/weights_checker", WeightsChecker(action="staged"), StagedSums, timeout=self._timeout
        )
        wrong = [name for name, checksum in found.tensors.items() if trained.get(name, checksum) != checksum]
        missing = [name for name in found.tensors if name not in trained]
        if wrong or missing:
            raise PublicationError(
                f"{gserver.name} received other weights than were trained: {len(wrong)} of {len(found.tensors)} "
                f"tensors differ ({', '.join(wrong[:3]) or 'none'}), {len(missing)} were not told "
                f"({', '.join(missing[:3]) or 'none'})"
            )

    async def end(self, gserver: Gserver) -> None:
        await self._post(gserver, "/end_weight_update")

    async def end_in_place(self, gserver: Gserver, *, version: int) -> None:
        """All weights of `version` are where it serves them from."""
        await self.end(gserver)
        await self._name(gserver, str(version))

    async def pause(self, gserver: Gserver, mode: PauseMode) -> None:
        await self._post(gserver, "/pause_generation", PauseGeneration(mode=mode))

    async def resume(self, gserver: Gserver, *, timeout: float) -> None:
        await self._post(gserver, "/continue_generation", timeout=timeout)

    async def abort_requests(self, gserver: Gserver, *, timeout: float) -> None:
        await self._post(gserver, "/abort_request", AbortRequest(abort_all=True), timeout=timeout)

    async def info(self, gserver: Gserver) -> ServerInfo:
        """What it can do; answered at once by one that lives."""
        return await self._client.get(gserver.address, "/server_info", ServerInfo, timeout=self._probe_timeout)

    async def label(self, gserver: Gserver) -> str:
        """What it calls the weights that it serves."""
        model = await self._client.get(gserver.address, "/model_info", ModelInfo, timeout=self._probe_timeout)
        return model.weight_version

    async def _name(self, gserver: Gserver, label: str) -> None:
        message = UpdateWeightVersion(new_version=label, abort_all_requests=False)
        await self._post(gserver, "/update_weight_version", message)

    async def _post(
        self, gserver: Gserver, path: str, body: msgspec.Struct | None = None, *, timeout: float | None = None
    ) -> None:
        outcome = await self._client.update(gserver.address, path, body, timeout=timeout or self._timeout)
        if not outcome.success:
            raise PublicationError(f"{gserver.name} refused {path}: {outcome.message or 'no reason given'}")
