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
    AbortRequest,
    DestroyWeightsUpdateGroup,
    GenerationClient,
    InitWeightsUpdateGroup,
    ModelInfo,
    OfferWeights,
    PauseGeneration,
    PauseMode,
    RankSums,
    ReceivedSums,
    SendWeights,
    ServerInfo,
    StagedSums,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightVersion,
    WeightsChecker,
)

log = logging.getLogger(__name__)

UNKNOWN_ACTION = "Unsupported action"
"""What SGLang answers when /weights_checker is asked for something that it does not know."""
NOTHING = "nothing"
"""For the checksum of what did not come."""
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

    async def load(self, gserver: Gserver, folder: str, *, version: int | None, flush_cache: bool) -> None:
        """Have the weights in `folder` taken: aside in an update that has begun, else over those that it serves; then
        it is told no `version` yet."""
        message = UpdateWeightsFromDisk(
            model_path=folder, weight_version=None if version is None else str(version), flush_cache=flush_cache
        )
        await self._post(gserver, "/update_weights_from_disk", message)

    async def verify(self, gserver: Gserver, trained: Mapping[str, str]) -> None:
        """Raises `PublicationError` when what it received is not what was `trained` (name → checksum)."""
        if not trained:
            return
        if gserver.info is not None and gserver.info.staged_weight_update:
            message = WeightsChecker(action="staged")
            found = await self._client.post(
                gserver.address, "/weights_checker", message, StagedSums, timeout=self._timeout
            )
            _compare(gserver, found.tensors, trained, untold=[name for name in found.tensors if name not in trained])
            return
        told = await self.received(gserver)
        if told is not None and len(told) != gserver.ranks:
            raise PublicationError(f"{gserver.name} tells what {len(told)} ranks received, and has {gserver.ranks}")
        for rank in told or ():
            # It may have been given more before, by a run that it was in.
            _compare(gserver, {name: rank.checksums.get(name, NOTHING) for name in trained}, trained)

    async def received(self, gserver: Gserver) -> list[RankSums] | None:
        """Of each rank, what one that stages no weights was brought last; None: it cannot tell, for example because
        somebody else started it."""
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

    async def end(self, gserver: Gserver) -> None:
        await self._post(gserver, "/end_weight_update")

    async def name(self, gserver: Gserver, label: str) -> None:
        """Have the weights that it serves called `label`."""
        message = UpdateWeightVersion(new_version=label, abort_all_requests=False)
        await self._post(gserver, "/update_weight_version", message)

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

    async def _post(
        self, gserver: Gserver, path: str, body: msgspec.Struct | None = None, *, timeout: float | None = None
    ) -> None:
        outcome = await self._client.update(gserver.address, path, body, timeout=timeout or self._timeout)
        if not outcome.success:
            raise PublicationError(f"{gserver.name} refused {path}: {outcome.message or 'no reason given'}")


def _compare(
    gserver: Gserver, found: Mapping[str, str], trained: Mapping[str, str], *, untold: Sequence[str] = ()
) -> None:
    """`untold`: those that the publisher did not speak of."""
    wrong = [name for name, checksum in found.items() if trained.get(name, checksum) != checksum]
    if wrong or untold:
        raise PublicationError(
            f"{gserver.name} received other weights than were trained: {len(wrong)} of {len(found)} tensors differ "
            f"({_some(wrong)}), {len(untold)} were not told ({_some(untold)})"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) or "none"
