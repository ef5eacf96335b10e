"""Interruptible generation: one response, whatever happens to gservers meanwhile.

A request that a weight update cuts short is continued from its own tokens under the new policy;
one whose gserver fails, or was left with the weights of two versions, goes on at another. A long
response is asked for in parts, so that a gserver that fails takes no more with it than one of them.
Invariant: every token of a `Generation` has the log-probability and the version of the policy that
sampled it, as the engine reported them; and it ends where it would have ended in one request (`endings.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import msgspec

from streamrl.config import SamplingConfig
from streamrl.errors import DeadlineExceeded, PeerError, StreamRLError
from streamrl.rollout.endings import Endings
from streamrl.rollout.in_flight import RequestCount
from streamrl.rollout.replies import check_reply, dated, serves_mixed_weights, token_versions, unmixed
from streamrl.rollout.siblings import SiblingRequests
from streamrl.stop_strings import Decode, StopStrings
from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.groups import Route as RouteMessage
from streamrl.transport.generation import (
    GenerateReply,
    GenerateRequest,
    GenerationClient,
    SamplingParams,
)

log = logging.getLogger(__name__)

WARNING_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0


class Generation(msgspec.Struct, frozen=True):
    """One response; the lists have one item for each sampled token."""

    output_ids: list[int]
    logprobs: list[float]
    """In nats, under the policy that sampled the token."""
    versions: list[int]
    """Version of the policy that sampled the token."""
    finish_reason: Literal["stop", "length"]
    matched: str | int | None
    """What ended the response: a token id, or a stop string."""
    interruptions: int
    """How often it was cut and continued."""


class Route(Protocol):
    """Which gserver to ask."""

    @property
    def gserver(self) -> str:
        """URL."""

    async def replace(self, failed: str) -> None:
        """Look for another gserver than `failed`; the answer may be the same again."""

    def request(self, tokens: int) -> AbstractContextManager[None]:
        """Around a request with a context of so many `tokens`."""


class GroupRoute:
    """The gserver of one group, shared by its siblings so that they share its prompt cache."""

    def __init__(
        self, control: ControlClient, *, worker: int, seq: int, gserver: str, count: RequestCount | None = None
    ) -> None:
        """`count` hears of the group's requests."""
        self.gserver = gserver
        self._count = count
        self._control = control
        self._worker = worker
        self._seq = seq
        self._asking = asyncio.Lock()

    def request(self, tokens: int) -> AbstractContextManager[None]:
        return self._count.request(tokens) if self._count is not None else nullcontext()

    async def replace(self, failed: str) -> None:
        async with self._asking:
            if self.gserver != failed:
                return  # a sibling has asked already
            reply = await self._control.route(RouteMessage(worker=self._worker, seq=self._seq, failed=failed))
            if reply.gserver:
                self.gserver = reply.gserver


class Generator:
    """Asks gservers for responses, with the sampling parameters of the run."""

    def __init__(
        self,
        client: GenerationClient,
        *,
        sampling: SamplingConfig,
        seed: int,
        patience: float,
        tokens_per_request: int,
        decode: Decode,
        eos_token_ids: Collection[int],
        policy_version: Callable[[], int],
    ) -> None:
        """`patience`: seconds without a single new token after which a response is given up. `tokens_per_request`:
        longer responses come in parts. `decode`, `eos_token_ids`: of the model. `policy_version`: which one gservers
        serve, or an older one."""
        self._most = tokens_per_request
        self._endings = Endings(
            tokens={*eos_token_ids, *sampling.stop_token_ids}, strings=StopStrings(sampling.stop, decode)
        )
        self._siblings = SiblingRequests(client)
        self._sampling = sampling
        self._seed = seed
        self._policy_version = policy_version
        self._patience = patience

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        rid: str,
        route: Route,
    ) -> Generation:
        """Sample up to `max_new_tokens` tokens after `input_ids`; `rid` names the request in logs.

        The request travels together with those that siblings on the same `route` make now.

        Raises `PeerError` when the gserver refuses the request, `WireError` when its answer makes
        no sense, `DeadlineExceeded` when there is no progress for long.
        """
        output = _Output()
        fruitless = _Fruitless(rid, patience=self._patience)
        while True:
            gserver = route.gserver
            began = self._policy_version()
            asked = min(max_new_tokens - len(output.ids), self._most)
            request = GenerateRequest(
                input_ids=[*input_ids, *output.ids],
                sampling_params=self._params(asked, rid=rid, position=len(output.ids)),
                rid=f"{rid}/{output.interruptions}-{uuid.uuid4().hex[:8]}",
                return_logprob=True,
            )
            try:
                reply = await self._siblings.generate(route, gserver, request)
            except (PeerError, DeadlineExceeded) as error:
                if isinstance(error, PeerError) and 400 <= error.status < 500:
                    raise
                await fruitless.pause(error)
                await route.replace(gserver)
                output.interruptions += 1
                continue
            mixed = serves_mixed_weights(reply)
            reply = dated(unmixed(reply), began=began)
            finish = check_reply(reply, budget=asked, peer=gserver)
            before = len(output.ids)
            output.extend(reply)
            if ending := self._endings.overlooked(output.ids, since=before, said=finish.type == "stop"):
                tokens, matched = ending
                return output.up_to(tokens, finish_reason="stop", matched=matched)
            if finish.type == "abort" and len(output.ids) < max_new_tokens:
                output.interruptions += 1
                if reply.output_ids:
                    fruitless.progress()
                else:
                    await fruitless.pause(PeerError(f"gserver {gserver} aborted the request: {finish.message}"))
                if mixed:
                    await route.replace(gserver)
                continue
            if finish.type == "length" and len(reply.output_ids) == asked and len(output.ids) < max_new_tokens:
                fruitless.progress()
                continue  # with the next part
            reason: Literal["stop", "length"] = "stop" if finish.type == "stop" else "length"
            return output.up_to(len(output.ids), finish_reason=reason, matched=finish.matched)

    def _params(self, max_new_tokens: int, *, rid: str, position: int) -> SamplingParams:
        sampling = self._sampling
        digest = hashlib.blake2b(f"{self._seed}/{rid}/{position}".encode(), digest_size=4).digest()
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_new_tokens=max_new_tokens,
            stop=sampling.stop or None,
            stop_token_ids=sampling.stop_token_ids or None,
            sampling_seed=int.from_bytes(digest, "little") >> 1,
        )


class _Output:
    """The response so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.interruptions = 0

    def extend(self, reply: GenerateReply) -> None:
        """Append a checked reply."""
        self.ids.extend(reply.output_ids)
        self.logprobs.extend(min(0.0, entry[0] or 0.0) for entry in reply.meta_info.output_token_logprobs or ())
        self.versions.extend(token_versions(reply.meta_info, tokens=len(reply.output_ids)))

    def up_to(self, tokens: int, *, finish_reason: Literal["stop", "length"], matched: str | int | None) -> Generation:
        """The response, which ends after so many tokens."""
        return Generation(
            output_ids=self.ids[:tokens],
            logprobs=self.logprobs[:tokens],
            versions=self.versions[:tokens],
            finish_reason=finish_reason,
            matched=matched,
            interruptions=self.interruptions,
        )


class _Fruitless:
    """Attempts in a row that brought no token: growing pauses, a warning, an end."""

    def __init__(self, rid: str, *, patience: float) -> None:
        self._rid = rid
        self._patience = patience
        self.progress()

    def progress(self) -> None:
        self._since: float | None = None
        self._attempts = 0
        self._warned = False

    async def pause(self, error: StreamRLError) -> None:
        """Wait before the next attempt; raises `DeadlineExceeded` when it has been too long."""
        now = time.monotonic()
        self._since = self._since or now
        waited = now - self._since
        if waited >= self._patience:
            raise DeadlineExceeded(f"request {self._rid}: no token for {waited:.0f} s; last: {error}") from error
        if waited >= WARNING_SECONDS and not self._warned:
            self._warned = True
            log.warning("request %s waits for a gserver for %.0f s; last: %s", self._rid, waited, error)
        await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**self._attempts))
        self._attempts += 1
