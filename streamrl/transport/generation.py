"""The part of SGLang's native HTTP API that streamrl uses: its message types, and a client.

The embedded gserver replies with the same types, so the rest of streamrl treats both alike. Field names are SGLang's
(https://docs.sglang.ai, native API).
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Literal, Self, TypeVar

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.errors import UNDECODABLE, PeerError, PeerLost, WireError
from streamrl.transport import http
from streamrl.transport.credentials import bearer
from streamrl.types import NO_EXPERT

PauseMode = Literal["in_place", "retract", "abort"]

INITIAL_WEIGHT_VERSION = "default"
"""A server's name for the weights that it was started with, unless it was started with another name."""
MIXED_WEIGHTS = "mixed"
"""A server's name for its weights while new ones are written over them: samples from them must not be used."""

ADAPTER_PREFIX = "streamrl-v"
"""Prefix of the names of adapters that were published to SGLang servers; the policy version follows."""
NO_ADAPTER = "LoRA adapter"
"""Part of SGLang's error message for a request whose adapter is not loaded."""

GENERATION_CALLS = frozenset(
    (
        "/generate",
        "/health_generate",
        "/model_info",
        "/get_model_info",
        "/server_info",
        "/get_server_info",
        "/v1/models",
    )
)
"""Paths that require only the generation key; /health requires none, and all other paths change the gserver."""

Reply = TypeVar("Reply")


def adapter_name(version: int) -> str | None:
    """Return the name of a policy version's adapter on SGLang servers; None for version 0, which has no adapter."""
    return f"{ADAPTER_PREFIX}{version}" if version else None


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are sampled and when a response ends."""

    temperature: float = 1.0
    """0: greedy (the most likely token)."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    min_p: float = 0.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: list[str] | str | None = None
    """Strings that end the response."""
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int = 1
    """Responses to the prompt."""
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    stream_interval: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """In a streamed reply: number of tokens per event."""


class GenerateRequest(msgspec.Struct, frozen=True):
    """Body of POST /generate: `text` or `input_ids`, one prompt or a list of them."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    """Token ids of one prompt, or a list of token ids per prompt."""
    sampling_params: SamplingParams | list[SamplingParams] = SamplingParams()
    rid: str | list[str] | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    """Index of the first prompt token that `input_token_logprobs` covers; with -1 it covers no prompt token."""
    top_logprobs_num: int = 0
    return_routed_experts: bool = False
    """Whether the reply contains the experts that computed each token."""
    lora_path: str | list[str | None] | None = None
    """Name of the adapter (SGLang only), or a name for each prompt; None selects the base model."""
    stream: bool = False


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens `start` (included) to `end` (excluded) were sampled under `version`."""

    version: str
    start: int
    end: int


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a response ended."""

    type: Literal["stop", "length", "abort"]
    length: int | None = None
    """With `length`: the limit."""
    matched: int | str | None = None
    """With `stop`: the token id or the string."""
    message: str | None = None
    """With `abort`: the reason."""
    status_code: int | None = None
    err_type: str | None = None


TokenLogprob = tuple[float | None, int, str | None]
"""Log-probability in nats, token id, always null (SGLang: token text)."""


class MetaInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Data about a response in addition to its tokens."""

    id: str
    """The request's `rid`."""
    finish_reason: FinishReason | None
    """None while the response is not finished."""
    prompt_tokens: int = 0
    """SGLang omits this and the next field when it aborts a request that has not run yet."""
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache."""
    weight_version: str = INITIAL_WEIGHT_VERSION
    """Version of the weights that the server holds when it sends the reply."""
    weight_versions: list[VersionSpan] | None = None
    """In the final reply only."""
    num_retractions: int = 0
    """How often the request was stopped and queued again: for an update, or (SGLang) because the cache was full."""
    e2e_latency: float = 0.0
    """Time from the request to the reply, in seconds."""
    input_token_logprobs: list[TokenLogprob] | None = None
    output_token_logprobs: list[TokenLogprob] | None = None
    input_top_logprobs: list[list[TokenLogprob] | None] | None = None
    output_top_logprobs: list[list[TokenLogprob] | None] | None = None
    routed_experts: str | None = None
    """In the final reply, if it was requested and the model has experts: base64 of little-endian int32, `[tokens - 1,
    layers, top_k]`, of prompt and response without the last token. -1 means no expert; in layers without experts any
    value does."""


def encoded_routes(experts: NDArray[np.uint8]) -> str:
    """Return `MetaInfo.routed_experts` for the experts of a `types.Trajectory`."""
    known = experts.astype("<i4")
    return base64.b64encode(np.where(experts == NO_EXPERT, np.int32(-1), known).astype("<i4").tobytes()).decode()


def decoded_routes(meta: MetaInfo, *, tokens: int) -> NDArray[np.uint8] | None:
    """Return the experts of the first `tokens` tokens as `[tokens, layers · top_k]`; None if the reply has none.

    Raises `WireError` if they belong to another number of tokens, or are out of range.
    """
    if meta.routed_experts is None or tokens < 1:
        return None
    try:
        data = base64.b64decode(meta.routed_experts, validate=True)
    except ValueError as error:
        raise WireError(f"routed_experts is not base64: {error}") from error
    if not data or len(data) % (4 * tokens):
        raise WireError(f"routed_experts has {len(data)} bytes: not as many numbers for each of {tokens} tokens")
    experts = np.frombuffer(data, "<i4").reshape(tokens, -1)
    if experts.min() < -1 or experts.max() >= NO_EXPERT:
        raise WireError(f"routed_experts has experts from {experts.min()} to {experts.max()}; at most {NO_EXPERT - 1}")
    return np.where(experts < 0, NO_EXPERT, experts).astype(np.uint8)


class GenerateReply(msgspec.Struct, frozen=True):
    """One response."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class StreamError(msgspec.Struct, frozen=True):
    """Why a stream ends early."""

    message: str
    code: int | None = None
    """As an HTTP status."""


class StreamPart(msgspec.Struct, frozen=True):
    """One event of a streamed reply: a response so far, or the error that ends the stream."""

    text: str = ""
    output_ids: list[int] = []
    meta_info: MetaInfo | msgspec.UnsetType = msgspec.UNSET
    index: int | msgspec.UnsetType = msgspec.UNSET
    """Which response of a batch this event belongs to."""
    error: StreamError | msgspec.UnsetType = msgspec.UNSET


_part_decoder = msgspec.json.Decoder(StreamPart)


class PauseGeneration(msgspec.Struct, frozen=True):
    """Pause sampling until `/continue_generation`; `mode` decides what happens to running requests."""

    mode: PauseMode = "abort"


class AbortRequest(msgspec.Struct, frozen=True):
    """End the request `rid`, or all of them."""

    rid: str = ""
    abort_all: bool = False


class InitWeightsUpdateGroup(msgspec.Struct, frozen=True):
    """Join the group in which weights are broadcast."""

    master_address: str
    master_port: int
    rank_offset: int
    """Rank of the gserver in the group, or the first of its ranks; the publisher is rank 0."""
    world_size: int
    group_name: str
    backend: str = "nccl"


class DestroyWeightsUpdateGroup(msgspec.Struct, frozen=True):
    """Leave the group in which weights are broadcast."""

    group_name: str


class UpdateWeightsFromDistributed(msgspec.Struct, frozen=True):
    """Receive these weights from rank 0 of the group, in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None
    """None means one broadcast per tensor, the only format of the embedded engine."""


class UpdateWeightsFromDisk(msgspec.Struct, frozen=True):
    """Load weights from a folder."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class LoadLoraAdapter(msgspec.Struct, frozen=True):
    """Load the adapter in a folder, in peft's format, in addition to the loaded ones. SGLang only."""

    lora_name: str
    """Name that requests use; must not be loaded."""
    lora_path: str


class UnloadLoraAdapter(msgspec.Struct, frozen=True):
    """Unload an adapter after the requests that use it have ended; nothing can be loaded until then. SGLang only."""

    lora_name: str


class LoadedAdapters(msgspec.Struct, frozen=True):
    """Reply to `LoadLoraAdapter` and `UnloadLoraAdapter`; a rejection has the HTTP status 400."""

    loaded_adapters: dict[str, str] | None = None
    """Name → folder of every loaded adapter."""


class ModelCard(msgspec.Struct, frozen=True):
    """A model that a request can name, or an adapter."""

    id: str
    parent: str | None = None
    """Name of the base model, if this is an adapter."""


class ModelCards(msgspec.Struct, frozen=True):
    """Part of SGLang's /v1/models."""

    data: list[ModelCard]


class UpdateWeightVersion(msgspec.Struct, frozen=True):
    """Give the served weights another version name."""

    new_version: str
    abort_all_requests: bool = False
    """SGLang's default is true."""


class WeightsChecker(msgspec.Struct, frozen=True):
    """Request checksums of weights."""

    action: Literal["checksum", "staged", "received"] = "checksum"
    """`checksum`: of the weights that are served; `staged`: of the staged weights of an update (reply: `StagedSums`;
    not SGLang); `received`: of the weights that were loaded last, as they arrived (reply: `ReceivedSums`; only SGLang
    servers that streamrl has started)."""


class StagedSums(msgspec.Struct, frozen=True):
    """Checksums of the staged weights of an update; `tensors` is empty if the gserver has none."""

    tensors: dict[str, str]
    """Hugging Face name → `checksum.tensor_sums`."""


class RankSums(msgspec.Struct, frozen=True):
    """Checksums of the weights of one rank of a server."""

    checksums: dict[str, str]
    """Hugging Face name → `checksum.tensor_sums`."""


class ReceivedSums(msgspec.Struct, frozen=True):
    """Checksums of the weights that a server has loaded, each computed before its weight was loaded."""

    ranks: list[RankSums]


class Outcome(msgspec.Struct, frozen=True):
    """Reply to every call that changes something; some of SGLang's replies lack `success`, or are empty."""

    success: bool = True
    message: str = ""


class ModelInfo(msgspec.Struct, frozen=True):
    """Part of /model_info."""

    model_path: str
    weight_version: str


class ServerInfo(msgspec.Struct, frozen=True):
    """Part of /server_info; SGLang sends much more."""

    engine: str = "sglang"
    """`embedded` and `simulated` are streamrl's own."""
    staged_weight_update: bool = False
    """Whether tensors received between begin and end are staged until /end_weight_update."""
    max_running_requests: int | None = None
    """Maximum number of concurrent requests; None if the server does not report it."""
    max_total_num_tokens: int | None = None
    """Capacity of the cache in tokens; None if the server does not report it."""
    tp_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Number of its ranks; each is a rank of the weight group."""
    stats: dict[str, float] = {}


class Empty(msgspec.Struct, frozen=True):
    """Body of a call without arguments."""


class GenerationClient:
    """Calls gservers over SGLang's API; a process has one client for any number of gservers."""

    def __init__(self, *, timeout: float, key: str = "", tls: ssl.SSLContext | None = None) -> None:
        """`timeout` limits one call, in seconds. `key`: the key that gservers require for generation; empty if they
        require none. `tls`: the TLS context that verifies encrypted gservers."""
        self.control_keys: dict[str, str] = {}
        """URL of a gserver → the key that it requires for calls that change it; only for gservers that this process may
        change."""
        self._timeout = timeout
        self._headers = bearer(key)
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._given_up: Collection[str] = ()
        self._calls: dict[str, set[asyncio.Timeout]] = {}
        """URL → the time limits of the calls that are in flight there."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def give_up(self, urls: Collection[str]) -> None:
        """Expect no reply from `urls` until this is called without them.

        Calls in flight there raise `PeerLost` now, and new calls raise it at once.
        """
        self._given_up = urls
        now = asyncio.get_running_loop().time()
        for url in urls:
            for call in self._calls.get(url, ()):
                if not call.expired():
                    call.reschedule(now)

    async def generate(self, url: str, request: GenerateRequest) -> GenerateReply:
        """Return the response to one prompt."""
        return await self.post(url, "/generate", request, GenerateReply)

    async def generate_streamed(
        self, url: str, request: GenerateRequest, on_part: Callable[[GenerateReply], None]
    ) -> GenerateReply:
        """Return the response to one prompt; call `on_part` with the whole response so far each time it grows.

        Raises as `generate_batch` does; errors of `on_part` pass through.
        """
        whole: GenerateReply | None = None

        def take(part: StreamPart) -> None:
            nonlocal whole
            if not part.meta_info:
                raise WireError(f"gserver {url} streamed an empty event")
            reply = GenerateReply(text=part.text, output_ids=part.output_ids, meta_info=part.meta_info)
            if part.meta_info.finish_reason is None:
                on_part(reply)
            else:
                whole = reply

        await self._follow(url, msgspec.structs.replace(request, stream=True), take)
        if whole is None:
            raise WireError(f"gserver {url} ended a stream without a finished response")
        return whole

    async def generate_batch(
        self, url: str, requests: Sequence[GenerateRequest], on_reply: Callable[[int, GenerateReply], None]
    ) -> None:
        """Generate a response to each of `requests`, which must agree on log-probabilities and experts, by one call.

        `on_reply` is called with the index of a request and its response as soon as it is finished. Raises `WireError`
        for an invalid reply, `PeerError` if the gserver fails, and `PeerLost` if the connection does.
        """
        if len(requests) == 1:
            on_reply(0, await self.generate(url, requests[0]))
            return
        unanswered = set(range(len(requests)))

        def take(part: StreamPart) -> None:
            if not part.meta_info or part.meta_info.finish_reason is None:
                return  # SGLang also sends an event for the first token
            if part.index not in unanswered:
                raise WireError(
                    f"gserver {url} answered prompt {part.index} of {len(requests)} twice, or there is none"
                )
            unanswered.remove(part.index)
            on_reply(part.index, GenerateReply(text=part.text, output_ids=part.output_ids, meta_info=part.meta_info))

        await self._follow(url, _batch(requests), take)
        if unanswered:
            answered = len(requests) - len(unanswered)
            raise WireError(f"gserver {url} answered {len(requests)} prompts with {answered} responses")

    async def update(
        self, url: str, path: str, body: msgspec.Struct | None = None, *, timeout: float | None = None
    ) -> Outcome:
        """Make a call that changes the gserver, for example `/pause_generation`."""
        return await self._call(url, path, body or Empty(), Outcome, timeout, if_empty=Outcome())

    async def model_info(self, url: str) -> ModelInfo:
        """Return the model that `url` serves, and its version."""
        return await self.get(url, "/model_info", ModelInfo)

    async def server_info(self, url: str) -> ServerInfo:
        """Return the capabilities and the capacity of the gserver at `url`."""
        return await self.get(url, "/server_info", ServerInfo)

    async def post(
        self, url: str, path: str, body: msgspec.Struct, reply: type[Reply], *, timeout: float | None = None
    ) -> Reply:
        """Make a call with a body; return its reply."""
        return await self._call(url, path, body, reply, timeout)

    async def get(self, url: str, path: str, reply: type[Reply], *, timeout: float | None = None) -> Reply:
        """Make a call without a body; return its reply."""
        return await self._call(url, path, None, reply, timeout)

    async def _call(
        self,
        url: str,
        path: str,
        body: msgspec.Struct | None,
        reply: type[Reply],
        timeout: float | None,
        *,
        if_empty: Reply | None = None,
    ) -> Reply:
        async with self._unless_given_up(url):
            return await http.call(
                self._opened(),
                url + path,
                body,
                reply,
                timeout=timeout or self._timeout,
                peer=f"gserver {url}",
                if_empty=if_empty,
                headers=None if path in GENERATION_CALLS else self._control(url),
            )

    async def _follow(self, url: str, request: GenerateRequest, take: Callable[[StreamPart], None]) -> None:
        """Pass each event of a streamed reply to `take`."""

        def decode(data: bytes) -> None:
            take(_decoded_part(url, data))

        async with self._unless_given_up(url):
            await http.follow(
                self._opened(), url + "/generate", request, decode, timeout=self._timeout, peer=f"gserver {url}"
            )

    def _control(self, url: str) -> dict[str, str] | None:
        """Return the headers of a call that changes `url`."""
        key = self.control_keys.get(url)
        return bearer(key) if key else None

    @asynccontextmanager
    async def _unless_given_up(self, url: str) -> AsyncIterator[None]:
        """Around a call of `url`: raise `PeerLost` if `url` is given up before or during the call."""
        if url in self._given_up:
            raise PeerLost(f"gserver {url} is silent: it is not asked")
        calls = self._calls.setdefault(url, set())
        cut = asyncio.timeout(None)
        calls.add(cut)
        try:
            async with cut:
                yield
        except TimeoutError as error:
            raise PeerLost(f"gserver {url} fell silent before its reply") from error
        finally:
            calls.discard(cut)
            if not calls:
                self._calls.pop(url, None)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = http.new_session(self._tls, headers=self._headers)
        return self._session


def _decoded_part(url: str, data: bytes) -> StreamPart:
    """Return an event of a stream; raises `WireError` if it is invalid, and `PeerError` if it reports an error."""
    try:
        part = _part_decoder.decode(data)
    except UNDECODABLE as error:
        raise WireError(f"gserver {url} replied with something else than responses: {error}") from error
    if part.error:
        raise PeerError(f"gserver {url} failed: {part.error.message}", status=part.error.code or 500)
    return part


def _batch(requests: Sequence[GenerateRequest]) -> GenerateRequest:
    """Return one request for a response to each of `requests`, with one event when each is finished."""
    return GenerateRequest(
        input_ids=[request.input_ids for request in requests],  # type: ignore[misc]
        sampling_params=[_told_at_its_end(request.sampling_params) for request in requests],  # type: ignore[arg-type]
        rid=[request.rid for request in requests],  # type: ignore[misc]
        return_logprob=requests[0].return_logprob,
        return_routed_experts=requests[0].return_routed_experts,
        lora_path=[request.lora_path for request in requests] if any(r.lora_path for r in requests) else None,  # type: ignore[misc]
        stream=True,
    )


def _told_at_its_end(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, stream_interval=max(1, params.max_new_tokens))
