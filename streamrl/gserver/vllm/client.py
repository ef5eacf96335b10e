"""The calls of vLLM's HTTP API that a gserver makes, each with a deadline; `transport/vllm.py` has the requests for
responses.

Every call raises `PeerError` if vLLM refuses it, `PeerLost` if the server is gone, and `DeadlineExceeded` if it does
not reply in time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec

from streamrl.transport.generation import Empty
from streamrl.transport.http import call, follow, send
from streamrl.transport.vllm import GENERATE, TokenReply, TokenRequest

PEER = "vLLM"
ADAPTER = "streamrl"
"""Name of the adapter that requests use."""


class AbortRequests(msgspec.Struct, frozen=True):
    """End these requests, with their tokens so far; all if none is named."""

    request_ids: list[str]


class RankCall(msgspec.Struct, frozen=True):
    """Call a method in each rank."""

    method: str
    kwargs: dict[str, str]


class LoadAdapter(msgspec.Struct, frozen=True):
    """Load an adapter in peft's format."""

    lora_name: str
    lora_path: str
    load_inplace: bool = True
    """Whether it replaces a loaded adapter of this name."""


class ServedModel(msgspec.Struct, frozen=True):
    """The model, or an adapter, which has no `max_model_len`."""

    max_model_len: int | None = None


class ServedModels(msgspec.Struct, frozen=True):
    """Part of /v1/models; the model comes first."""

    data: list[ServedModel]


class NewVersion(msgspec.Struct, frozen=True):
    """Name the served weights."""

    new_version: str


class CacheReset(msgspec.Struct, frozen=True):
    """Reply to /reset_prefix_cache."""

    success: bool


class VllmClient:
    """Calls one server; `timeout`: deadline of each call in seconds, and `request_seconds` that of a response."""

    def __init__(self, session: aiohttp.ClientSession, *, url: str, timeout: float, request_seconds: float) -> None:
        self._session = session
        self._url = url
        self._timeout = timeout
        self._request_seconds = request_seconds

    async def generate(self, request: TokenRequest, on_reply: Callable[[TokenReply], None]) -> None:
        """Generate a response; `on_reply` receives it, whole or as the events of a stream."""
        url, seconds = self._url + GENERATE, self._request_seconds
        if request.stream:
            decode = msgspec.json.Decoder(TokenReply).decode
            await follow(self._session, url, request, lambda event: on_reply(decode(event)), timeout=seconds, peer=PEER)
        else:
            on_reply(await call(self._session, url, request, TokenReply, timeout=seconds, peer=PEER))

    async def abort(self, request_ids: list[str]) -> None:
        """End the requests, or all if none is named, with their tokens so far; unknown ones are ignored."""
        await self._post("/abort_requests", AbortRequests([f"generate-tokens-{name}" for name in request_ids]))

    async def max_context(self) -> int:
        """Return the longest context, in tokens."""
        url = f"{self._url}/v1/models"
        found = await call(self._session, url, None, ServedModels, timeout=self._timeout, peer=PEER)
        return found.data[0].max_model_len or 0

    async def pause(self) -> None:
        """Stop between two steps; running requests stay as they are."""
        await self._post("/pause?mode=keep&clear_cache=false", Empty())

    async def resume(self) -> None:
        """Continue after a pause."""
        await self._post("/resume", Empty())

    async def load(self, folder: Path) -> None:
        """Load the weights in `folder`, a checkpoint, over those that are served."""
        body = RankCall("reload_weights", {"weights_path": str(folder)})
        await self._post("/collective_rpc", body)

    async def load_adapter(self, folder: Path) -> None:
        """Load the adapter in `folder` in place of the one that is loaded; running requests continue with it."""
        await self._post("/v1/load_lora_adapter", LoadAdapter(ADAPTER, str(folder)))

    async def name_weights(self, version: str) -> None:
        """Name the served weights `version` from the next token on."""
        await self._post("/update_weight_version", NewVersion(version))

    async def forget_prompts(self, *, running: bool) -> bool:
        """Forget the cached prompts; `running`: those of running requests, too, which are then computed again.

        Returns False, and forgets nothing, if others run.
        """
        path = f"/reset_prefix_cache?reset_running_requests={str(running).lower()}"
        url = self._url + path
        reply = await call(self._session, url, Empty(), CacheReset, timeout=self._timeout, peer=PEER)
        return reply.success

    async def _post(self, path: str, body: msgspec.Struct) -> None:
        await send(self._session, self._url + path, body, timeout=self._timeout, peer=PEER)
