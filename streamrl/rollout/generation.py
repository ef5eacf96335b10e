"""Interruptible generation: one complete response, also across weight updates and failures of gservers.

A response takes one request or several. If a weight update interrupts a request, the worker continues it from its own
tokens under the new policy. If a gserver fails, or is left with a mix of two weight versions, the response continues at
another gserver. A long response is requested in parts of `rollout.tokens_per_request` tokens, so that the failure of a
gserver costs at most one part.

Invariant: every token of a `Generation` has the log-probability and the policy version under which it was sampled, as
the engine reported them; and the response ends where it would have ended in one request.

From top to bottom: `Generator` makes a response; `GroupRoute` is the gserver that generates it; `Endings` finds the end
of a response that no gserver reported; `check_reply` and the functions after it keep unusable replies out of every
gradient; `SiblingRequests` sends the simultaneous requests of siblings as one HTTP request; and `InFlightReports`
reports to the manager how much of each group still runs, so that the manager gives a place on a gserver to the next
group as soon as it is free.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.config import SamplingConfig
from streamrl.errors import DeadlineExceeded, PeerError, StreamRLError, WireError
from streamrl.records.lineage import LineageHistory, version_of
from streamrl.stop_strings import Decode, StopStrings
from streamrl.transport.control import GroupInFlight, GroupInHand, InFlight
from streamrl.transport.generation import (
    INITIAL_WEIGHT_VERSION,
    MIXED_WEIGHTS,
    NO_ADAPTER,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    GenerationClient,
    MetaInfo,
    SamplingParams,
    VersionSpan,
    adapter_name,
    decoded_routes,
)
from streamrl.transport.manager_client import ControlClient
from streamrl.types import NO_EXPERT, Generation
from streamrl.waits import WARNING_SECONDS, Retry

FIRST_PAUSE_SECONDS = 0.05
"""Pause after the first of several attempts in a row without a token: a weight update has often ended by then."""


STREAM_EVENTS = 128
"""Most events of one streamed request; each event carries all tokens so far."""
OnTokens = Callable[[list[int]], None]
"""Called with the further tokens of a response, at least one."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Generator:
    """Requests responses from gservers, with the sampling parameters of the run."""

    client: GenerationClient
    _: KW_ONLY
    sampling: SamplingConfig
    seed: int
    patience: float
    """Seconds without a single new token after which a response is given up."""
    tokens_per_request: int
    """Longer responses are requested in parts."""
    decode: InitVar[Decode]
    eos_token_ids: InitVar[Collection[int]]
    policy_version: Callable[[], int]
    """Returns the version that gservers serve, or an older one."""
    history: Callable[[], LineageHistory] = LineageHistory
    """Returns the history of the present weights."""
    named_adapters: bool = False
    """As in `Config`."""
    return_routed_experts: bool = False
    """Whether the experts that compute each token are requested."""

    def __post_init__(self, decode: Decode, eos_token_ids: Collection[int]) -> None:
        self._endings = Endings(
            tokens={*eos_token_ids, *self.sampling.stop_token_ids}, strings=StopStrings(self.sampling.stop, decode)
        )
        self._siblings = SiblingRequests(self.client)

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        rid: str,
        route: GroupRoute,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Sample up to `max_new_tokens` tokens after `input_ids`; `rid` names the request in logs.

        `stop` and `stop_token_ids` are added to the run's. Simultaneous requests of siblings on the same `route` are
        sent together. With `on_tokens` a request is sent alone, and its tokens are passed on as they arrive; they stay
        in the response, unless they contain a stop string.

        Raises `PeerError` if the gserver refuses the request, `WireError` if its reply is inconsistent, and
        `DeadlineExceeded` if no token has arrived for `patience` seconds.
        """
        response = _PartialResponse(prompt=len(input_ids))
        endings = self._endings.and_also(tokens=stop_token_ids, strings=stop)
        route.resumable &= on_tokens is None and not self.named_adapters
        retry = Retry(
            f"request {rid}", patience=self.patience, first_pause=FIRST_PAUSE_SECONDS, warn_after=WARNING_SECONDS
        )
        while True:
            gserver, before = route.gserver, len(response.ids)
            version, history = self.policy_version(), self.history()
            budget = min(max_new_tokens - before, self.tokens_per_request)
            request = GenerateRequest(
                input_ids=[*input_ids, *response.ids],
                sampling_params=self._params(budget, rid, before, stop, stop_token_ids, streamed=on_tokens is not None),
                rid=f"{rid}/{response.interruptions}-{uuid.uuid4().hex[:8]}",
                return_logprob=True,
                return_routed_experts=self.return_routed_experts,
                lora_path=adapter_name(version) if self.named_adapters else None,
            )
            broken = False
            try:
                if on_tokens is None:
                    reply = await self._siblings.generate(route, gserver, request)
                else:
                    reply, broken = await self._streamed(gserver, request, on_tokens)
            except (PeerError, DeadlineExceeded) as error:
                # an adapter may have been unloaded in the meantime, or not have arrived there yet
                lacks_adapter = request.lora_path is not None and NO_ADAPTER in str(error)
                if isinstance(error, PeerError) and 400 <= error.status < 500 and not lacks_adapter:
                    raise
                await _pause(retry, rid, error)
                await route.replace(gserver)
                response.interruptions += 1
                continue
            whole = unmixed(reply)
            mixed = reply.meta_info.weight_version == MIXED_WEIGHTS or whole is not reply
            reply, abandoned = self._usable(whole, version, history)
            finish = check_reply(reply, budget=budget, peer=gserver)
            response.extend(reply)
            route.sampled_by(reply)
            if reply.output_ids or abandoned:
                retry.succeeded()
            if ending := endings.overlooked(response.ids, earlier=before, reported=finish.type == "stop"):
                length, matched = ending
                return response.up_to(length, finish_reason="stop", matched=matched)
            incomplete = len(response.ids) < max_new_tokens
            if finish.type == "abort" and incomplete:
                response.interruptions += 1
                if not reply.output_ids and not abandoned:
                    await _pause(retry, rid, PeerError(f"gserver {gserver} aborted the request: {finish.message}"))
                if mixed or abandoned or broken:
                    await route.replace(gserver)
            elif not (finish.type == "length" and len(reply.output_ids) == budget and incomplete):  # the response ended
                reason: Literal["stop", "length"] = "stop" if finish.type == "stop" else "length"
                return response.up_to(len(response.ids), finish_reason=reason, matched=finish.matched)

    def _usable(self, reply: GenerateReply, version: int, history: LineageHistory) -> tuple[GenerateReply, bool]:
        """Return the usable tokens of `reply` with their versions, and whether tokens were removed.

        Tokens are usable up to the first one of a policy that the run has abandoned by going back.

        `version`, `history`: the policy version and the history of its weights at the time of the request.
        """
        if self.named_adapters:
            return with_version(reply, history.label(version)), False
        present = self.history()
        usable = of_history(reply, present, requested_in=history)
        return with_version_spans(usable, version, present), usable is not reply

    async def _streamed(
        self, gserver: str, request: GenerateRequest, on_tokens: OnTokens
    ) -> tuple[GenerateReply, bool]:
        """Return a reply whose tokens were passed to `on_tokens`, and whether the stream broke off.

        The tokens of a broken stream have already been passed on, so they are kept, as the tokens of an aborted reply
        are. Raises as `GenerationClient.generate_streamed` does if no token had arrived.
        """
        latest: GenerateReply | None = None

        def take(part: GenerateReply) -> None:
            nonlocal latest
            told = latest.output_ids if latest is not None else []
            if part.output_ids[: len(told)] != told:
                raise WireError(f"{gserver} takes {len(told)} tokens back that it has streamed")
            if part.meta_info.weight_version == MIXED_WEIGHTS:
                return  # tokens since the last part will be cut off
            if len(part.output_ids) > len(told):
                latest = part
                on_tokens(part.output_ids[len(told) :])

        try:
            reply = await self.client.generate_streamed(gserver, request, take)
        except (PeerError, DeadlineExceeded) as error:
            if latest is None:
                raise
            meta = latest.meta_info
            log.info("the stream of %s broke off after %d tokens: %s", request.rid, len(latest.output_ids), error)
            cut = FinishReason(type="abort", message=f"the stream broke off: {error}")
            return msgspec.structs.replace(latest, meta_info=msgspec.structs.replace(meta, finish_reason=cut)), True
        told = latest.output_ids if latest is not None else []
        kept = unmixed(reply).output_ids
        if kept[: len(told)] != told:
            raise WireError(f"{gserver} takes back some of {len(told)} tokens that it has streamed")
        if further := kept[len(told) :]:
            on_tokens(further)
        return reply, False

    def _params(
        self,
        max_new_tokens: int,
        rid: str,
        position: int,
        stop: Sequence[str],
        stop_token_ids: Sequence[int],
        *,
        streamed: bool,
    ) -> SamplingParams:
        """Return the parameters of one request. Each request has its own seed, which depends on the run's seed, `rid`
        and the position of the first token."""
        digest = hashlib.blake2b(f"{self.seed}/{rid}/{position}".encode(), digest_size=4).digest()
        return msgspec.structs.replace(
            sampling_params(self.sampling, max_new_tokens=max_new_tokens, stop=stop, stop_token_ids=stop_token_ids),
            sampling_seed=int.from_bytes(digest, "little") >> 1,
            stream_interval=max(1, max_new_tokens // STREAM_EVENTS) if streamed else None,
        )


def sampling_params(
    sampling: SamplingConfig, *, max_new_tokens: int, stop: Sequence[str], stop_token_ids: Sequence[int]
) -> SamplingParams:
    """Return the parameters of a request under `sampling`; `stop` and `stop_token_ids` are added to its own."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_new_tokens=max_new_tokens,
        stop=[*sampling.stop, *stop] or None,
        stop_token_ids=[*sampling.stop_token_ids, *stop_token_ids] or None,
    )


class _PartialResponse:
    """The tokens of a response that have been sampled so far."""

    def __init__(self, *, prompt: int) -> None:
        """`prompt`: number of tokens before the response."""
        self._prompt = prompt
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.interruptions = 0
        self.routed_experts: NDArray[np.uint8] | None = None

    def extend(self, reply: GenerateReply) -> None:
        """Append a checked reply."""
        computed = self._prompt + len(self.ids) + len(reply.output_ids) - 1
        self.routed_experts = first_known(self.routed_experts, decoded_routes(reply.meta_info, tokens=computed))
        self.ids.extend(reply.output_ids)
        self.logprobs.extend(min(0.0, entry[0] or 0.0) for entry in reply.meta_info.output_token_logprobs or ())
        self.versions.extend(token_versions(reply.meta_info, tokens=len(reply.output_ids)))

    def up_to(self, length: int, *, finish_reason: Literal["stop", "length"], matched: str | int | None) -> Generation:
        """Return the first `length` tokens as a finished response."""
        return Generation(
            output_ids=self.ids[:length],
            logprobs=self.logprobs[:length],
            versions=self.versions[:length],
            finish_reason=finish_reason,
            matched=matched,
            interruptions=self.interruptions,
            routed_experts=self.routed_experts[: self._prompt + length - 1]
            if self.routed_experts is not None
            else None,
        )


def first_known(earlier: NDArray[np.uint8] | None, later: NDArray[np.uint8] | None) -> NDArray[np.uint8] | None:
    """Return the known experts of two arrays `[tokens, layers · top_k]`, for as many tokens as the longer one has.

    Experts of `earlier`, with which the following token was sampled, take precedence over `later` if they are known.

    Raises `WireError` if the arrays come from different models.
    """
    if earlier is None or later is None:
        return later if earlier is None else earlier
    if earlier.shape[1] != later.shape[1]:
        raise WireError(f"routed_experts has {later.shape[1]} experts for a token, and had {earlier.shape[1]} before")
    found = np.full((max(len(earlier), len(later)), later.shape[1]), NO_EXPERT, np.uint8)
    found[: len(later)] = later
    np.copyto(found[: len(earlier)], earlier, where=earlier != NO_EXPERT)
    return found


def of_all_tokens(known: NDArray[np.uint8] | None, tokens: int) -> NDArray[np.uint8] | None:
    """Return `Trajectory.routed_experts` for `tokens` tokens; `known` are the experts of the first ones."""
    if known is None:
        return None
    return np.pad(known, ((0, tokens - len(known)), (0, 0)), constant_values=NO_EXPERT)


async def _pause(retry: Retry, rid: str, error: StreamRLError) -> None:
    """Wait after an attempt without a token; raises `DeadlineExceeded` if patience has run out."""
    if not await retry.pause(error):
        waited = retry.failing_seconds
        raise DeadlineExceeded(f"request {rid}: no token for {waited:.0f} s; last: {error}") from error


# --- the gserver of a group ---


class GroupRoute:
    """The gserver of one group. All siblings share it, and thus the prompt in its cache."""

    def __init__(
        self,
        gserver: str,
        *,
        find_another: Callable[[str], Awaitable[str]],
        requests: RequestCount | None = None,
        name: str = "",
    ) -> None:
        """`gserver`: a URL; `name`: its readable name. `find_another` takes the URL of the gserver that failed and
        returns the URL to continue at, perhaps the same one; empty: none is available now. `requests` counts the
        group's requests for the manager; None: no count is needed."""
        self.gserver = gserver
        self.name = name or gserver
        """Name of the gserver, or its URL if the name is unknown."""
        self.labels: set[str] = set()
        """Labels of the weights that sampled tokens of the group."""
        self.resumable = True
        """Whether its requests can lose tokens of abandoned weights. This holds unless a request names an adapter or
        has passed on its tokens."""
        self._find_another = find_another
        self._requests = requests
        self._asking = asyncio.Lock()

    async def replace(self, failed: str) -> None:
        """Find a replacement for the gserver `failed`; it may be the same one again."""
        async with self._asking:
            if self.gserver == failed:  # otherwise a sibling has already found one
                self.gserver = await self._find_another(failed) or failed
                self.name = self.name if self.gserver == failed else self.gserver

    def sampled_by(self, reply: GenerateReply) -> None:
        """Record the weights that sampled a checked reply."""
        spans = reply.meta_info.weight_versions or ()
        self.labels.update(_label(span.version) for span in spans if span.end > span.start)

    def in_hand(self, seq: int) -> GroupInHand:
        """Return the group's work in flight; `seq` is its sequence number."""
        if self._requests is None:
            return GroupInHand(seq, self.gserver)
        return GroupInHand(seq, self.gserver, self._requests.requests, self._requests.tokens)

    def request(self, tokens: int) -> AbstractContextManager[None]:
        """Count a request with a context of `tokens` tokens as in flight while inside."""
        return self._requests.request(tokens) if self._requests is not None else nullcontext()


# --- the end of a response ---


class Endings:
    """The tokens and strings that end the responses of a run.

    The worker searches for them again because a gserver sees only one request: it misses a stop string that began in an
    earlier part of the response. Also, a gserver that aborts a request in the step that samples its last token reports
    the abort and not the end; SGLang does this.
    """

    def __init__(self, *, tokens: Collection[int], strings: StopStrings) -> None:
        self._tokens = tokens
        self._strings = strings

    def and_also(self, *, tokens: Collection[int], strings: Sequence[str]) -> Endings:
        """Return these endings together with the given ones."""
        if not tokens and not strings:
            return self
        return Endings(tokens={*self._tokens, *tokens}, strings=self._strings.and_also(strings))

    def overlooked(self, output_ids: Sequence[int], *, earlier: int, reported: bool) -> tuple[int, str | int] | None:
        """Return the length at which `output_ids` should have ended, and the token or string that ends it there.

        `earlier`: how many of `output_ids` came with earlier requests. `reported`: whether the gserver reported that
        the last token ends the response. Returns None if the response continues, or if the gserver reported the end
        correctly.
        """
        length = len(output_ids)
        if earlier:
            for end in range(earlier + 1, min(earlier + self._strings.reach, length)):
                if found := self._strings.at_the_end(output_ids[:end]):
                    return end, found
        if reported or not length:
            return None
        if output_ids[-1] in self._tokens:
            return length, output_ids[-1]
        found = self._strings.at_the_end(output_ids)
        return (length, found) if found else None


# --- checks of an engine's reply; pure functions ---

LOGPROB_TOLERANCE = 1e-3
"""Largest positive log-probability that is accepted as a rounding error."""


def check_reply(reply: GenerateReply, *, budget: int, peer: str) -> FinishReason:
    """Check that `reply` can be trained on, and return why it finished.

    `budget`: the number of tokens requested. `peer` names the gserver in errors. Raises `WireError` for an inconsistent
    reply, and `PeerError` if the gserver refused the request.
    """
    finish = reply.meta_info.finish_reason
    tokens = len(reply.output_ids)
    entries = reply.meta_info.output_token_logprobs or []
    if finish is None:
        raise WireError(f"{peer}: an answer without finish_reason")
    if finish.type == "abort" and finish.status_code is not None and 400 <= finish.status_code < 500:
        raise PeerError(f"{peer} refused the request: {finish.message}", status=finish.status_code)
    if finish.type != "abort" and tokens == 0:
        raise WireError(f"{peer}: a finished answer ({finish.type}) without a single token")
    if tokens > budget:
        raise WireError(f"{peer}: {tokens} tokens where at most {budget} were asked for")
    if len(entries) != tokens:
        raise WireError(f"{peer}: {len(entries)} log-probabilities for {tokens} tokens")
    for position, (entry, token_id) in enumerate(zip(entries, reply.output_ids, strict=True)):
        logprob, logprob_id = entry[0], entry[1]
        if logprob_id != token_id:
            raise WireError(
                f"{peer}: token {position} is {token_id}, its log-probability belongs to token {logprob_id}"
            )
        if logprob is None or not math.isfinite(logprob) or logprob > LOGPROB_TOLERANCE:
            raise WireError(f"{peer}: token {position} has the log-probability {logprob}")
    token_versions(reply.meta_info, tokens=tokens)
    return finish


def unmixed(reply: GenerateReply) -> GenerateReply:
    """Cut `reply` before the first token that was sampled from mixed weights, and mark a cut reply as aborted."""
    meta = reply.meta_info
    spans = meta.weight_versions
    if spans:
        kept = next((s.start for s in spans if s.version == MIXED_WEIGHTS and s.end > s.start), None)
    else:
        kept = 0 if meta.weight_version == MIXED_WEIGHTS else None
    return reply if kept is None else _cut(reply, kept, "a weight update broke off")


def of_history(reply: GenerateReply, history: LineageHistory, *, requested_in: LineageHistory) -> GenerateReply:
    """Cut `reply` before the first token of a policy that is not in `history`, and mark a cut reply as aborted.

    Some engines report only the version at the end of a reply. If the run has gone back since the request, earlier
    tokens may then have had any version. `requested_in` is the history at the time of the request.
    """
    meta = reply.meta_info
    if spans := meta.weight_versions:
        kept = next((s.start for s in spans if s.end > s.start and not _is_in(history, s.version)), None)
    elif reply.output_ids and (history != requested_in or not _is_in(history, meta.weight_version)):
        kept = 0
    else:
        kept = None
    return reply if kept is None else _cut(reply, kept, "the run has gone back")


def _cut(reply: GenerateReply, kept: int, why: str) -> GenerateReply:
    """Return the first `kept` tokens of `reply`, marked as aborted there."""
    meta = reply.meta_info
    return msgspec.structs.replace(
        reply,
        output_ids=reply.output_ids[:kept],
        meta_info=msgspec.structs.replace(
            meta,
            finish_reason=FinishReason(type="abort", message=why),
            completion_tokens=kept,
            weight_versions=[span for span in meta.weight_versions or () if span.end <= kept],
            output_token_logprobs=(meta.output_token_logprobs or [])[:kept],
            routed_experts=None,
        ),
    )


def with_version_spans(reply: GenerateReply, oldest: int, history: LineageHistory) -> GenerateReply:
    """Return `reply` with spans of versions, also if the engine reports only the version at the end of the reply.

    `oldest`: a policy version in `history` that was served at the time of the request, or an older one. Without spans,
    all tokens count as sampled under it: they may be younger than recorded, never older.
    """
    meta = reply.meta_info
    if meta.weight_versions or not reply.output_ids or meta.weight_version == MIXED_WEIGHTS:
        return reply
    return with_version(reply, history.label(min(oldest, policy_version_of(meta.weight_version))))


def with_version(reply: GenerateReply, label: str) -> GenerateReply:
    """Return `reply` with all of its tokens attributed to the weights called `label`.

    A request that names an adapter uses that adapter to its end, however the engine names its weights.
    """
    spans = [VersionSpan(label, 0, len(reply.output_ids))]
    return msgspec.structs.replace(reply, meta_info=msgspec.structs.replace(reply.meta_info, weight_versions=spans))


def token_versions(meta: MetaInfo, *, tokens: int) -> list[int]:
    """Return the policy version of each of `tokens` output tokens; raises `WireError` if spans do not cover them."""
    versions: list[int] = []
    for span in meta.weight_versions or ():
        if span.start != len(versions) or not span.start <= span.end <= tokens:
            raise WireError(f"weight_versions {meta.weight_versions} do not cover {tokens} tokens one after another")
        if span.end > span.start:  # an update leaves an empty span of mixed weights
            versions.extend([policy_version_of(span.version)] * (span.end - span.start))
    if len(versions) != tokens:
        raise WireError(f"weight_versions {meta.weight_versions} cover {len(versions)} of {tokens} tokens")
    return versions


def policy_version_of(text: str) -> int:
    """Return the policy version that an engine calls `text`; raises `WireError` if it is none."""
    try:
        return version_of(_label(text))
    except ValueError:
        raise WireError(
            f"weight version {text!r} is not a policy version; start the gserver with a number for it"
        ) from None


def _is_in(history: LineageHistory, text: str) -> bool:
    """Return whether weights that an engine calls `text` are in `history`; raises as `policy_version_of`."""
    policy_version_of(text)
    return history.has(_label(text))


def _label(text: str) -> str:
    return "0" if text == INITIAL_WEIGHT_VERSION else text


# --- batches of sibling requests ---

_Waiting = tuple[GenerateRequest, "asyncio.Future[GenerateReply]"]


class SiblingRequests:
    """Collects the requests of a group within one turn of the event loop and sends them as one.

    One HTTP request for all of them costs both sides hardly more than one for a single response. Each sibling gets its
    reply as soon as it is done, so counts of running requests stay exact. If the request fails, all siblings without a
    reply fail together.
    """

    def __init__(self, client: GenerationClient) -> None:
        self._client = client
        self._batches: dict[tuple[int, str], list[_Waiting]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def generate(self, group: object, url: str, request: GenerateRequest) -> GenerateReply:
        """Send `request` together with others of `group` in this turn of the event loop, and return its reply."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[GenerateReply] = loop.create_future()
        key = (id(group), url)
        if key not in self._batches:
            self._batches[key] = []
            loop.call_soon(self._send, key)
        self._batches[key].append((request, future))
        return await future

    def _send(self, key: tuple[int, str]) -> None:
        batch = self._batches.pop(key)
        task = asyncio.get_running_loop().create_task(self._exchange(key[1], batch), name=f"{len(batch)} siblings")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

        def cancel_if_nobody_waits(ended: asyncio.Future[GenerateReply]) -> None:
            if all(future.done() for _, future in batch) and any(future.cancelled() for _, future in batch):
                task.cancel()  # otherwise it is about to end, and the connection serves the next batch

        for _, future in batch:
            future.add_done_callback(cancel_if_nobody_waits)

    async def _exchange(self, url: str, batch: list[_Waiting]) -> None:
        def hand_over(index: int, reply: GenerateReply) -> None:
            future = batch[index][1]
            if not future.done():
                future.set_result(reply)

        try:
            await self._client.generate_batch(url, [request for request, _ in batch], hand_over)
        except Exception as error:  # passed on to every sibling
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)


# --- reports of requests in flight to the manager ---

REPORT_SECONDS = 0.02
"""Changes within this time go into the first message. The manager's reply sets the pause before each later message."""


class InFlightReports:
    """Reports to the manager how much of each group of one worker is in flight.

    Owns the unsent reports. Invariant: a report is a group's latest count, never a difference, so a lost or repeated
    message does no harm.
    """

    def __init__(self, control: ControlClient, *, worker: int) -> None:
        """`worker`: the rollout worker's index."""
        self._control = control
        self._worker = worker
        self._unreported: dict[int, GroupInFlight] = {}
        self._changed = asyncio.Event()

    def report(self, group: GroupInFlight) -> None:
        """Send `group` to the manager soon; it replaces an earlier unsent report of the group."""
        self._unreported[group.seq] = group
        self._changed.set()

    def forget(self, seq: int) -> None:
        """Drop the report of a group that has ended; the manager learns of the end from others."""
        self._unreported.pop(seq, None)

    async def run(self) -> None:
        """Send reports until cancelled."""
        pause = REPORT_SECONDS
        while True:
            await self._changed.wait()
            await asyncio.sleep(pause)
            self._changed.clear()
            groups, self._unreported = self._unreported, {}
            if groups:
                message = InFlight(worker=self._worker, groups=list(groups.values()))
                pause = (await self._control.in_flight(message)).pause_seconds


class RequestCount:
    """Counts the requests of one group: running ones, and one for each sibling that has not begun."""

    def __init__(self, seq: int, *, siblings: int, reports: InFlightReports) -> None:
        self.tokens = 0
        """Tokens in the contexts of the running requests."""
        self._seq = seq
        self._to_begin = siblings
        self._running = 0
        self._reports = reports

    @property
    def requests(self) -> int:
        """Requests that are running or have not begun yet."""
        return self._to_begin + self._running

    @contextmanager
    def request(self, tokens: int) -> Iterator[None]:
        """Count a request with a context of `tokens` tokens while inside."""
        self._to_begin = max(0, self._to_begin - 1)
        self._change(1, tokens)
        try:
            yield
        finally:
            self._change(-1, -tokens)

    def _change(self, requests: int, tokens: int) -> None:
        self._running += requests
        self.tokens += tokens
        self._reports.report(GroupInFlight(self._seq, self.requests, self.tokens))
