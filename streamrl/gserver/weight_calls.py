"""The calls that a weight update makes to one gserver, in SGLang's API, each with a deadline.

All raise `StreamRLError`: for a gserver that is lost or late, and for one that says no.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamrl.errors import PublicationError, StreamRLError
from streamrl.gserver.routing import Gserver, serves
from streamrl.transport.control.publication import TensorSpec
from streamrl.transport.generation import (
    AbortRequest,
    DestroyWeightsUpdateGroup,
    GenerationClient,
    InitWeightsUpdateGroup,
    ModelInfo,
    PauseGeneration,
    PauseMode,
    ServerInfo,
    UpdateWeightsFromDistributed,
)

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
        await self._post(gserver, "/destroy_weights_update_group", DestroyWeightsUpdateGroup(group_name=name))

    async def begin(self, gserver: Gserver) -> None:
        await self._post(gserver, "/begin_weight_update")

    async def receive(
        self, gserver: Gserver, bucket: Sequence[TensorSpec], *, group: str, version: int, flush_cache: bool
    ) -> None:
        """Have the next broadcast in `group` taken as the tensors of `bucket`."""
        message = UpdateWeightsFromDistributed(
            names=[spec.name for spec in bucket],
            dtypes=[spec.dtype for spec in bucket],
            shapes=[spec.shape for spec in bucket],
            group_name=group,
            flush_cache=flush_cache,
            weight_version=str(version),
            load_format="flattened_bucket",
        )
        await self._post(gserver, "/update_weights_from_distributed", message)

    async def end(self, gserver: Gserver) -> None:
        await self._post(gserver, "/end_weight_update")

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

    async def lives(self, gserver: Gserver) -> bool:
        """Whether it answers a simple question."""
        try:
            await self.info(gserver)
        except StreamRLError:
            return False
        return True

    async def serves(self, gserver: Gserver, version: int) -> bool:
        """Whether it says that it serves `version`."""
        try:
            return serves(await self.label(gserver), version)
        except StreamRLError:
            return False

    async def _post(
        self, gserver: Gserver, path: str, body: msgspec.Struct | None = None, *, timeout: float | None = None
    ) -> None:
        outcome = await self._client.update(gserver.address, path, body, timeout=timeout or self._timeout)
        if not outcome.success:
            raise PublicationError(f"{gserver.name} refused {path}: {outcome.message or 'no reason given'}")
