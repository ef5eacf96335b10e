"""The scheduler of the engine's steps: continuous batching over the slots of the cache.

A step first computes prompts of waiting requests, then one token for every running one. Request i of `running` is in
slot i; a finished one leaves a hole (None), which the next request fills, or else the last running one.

A slot that waits for its prompt generates no tokens, and a long prompt delays all slots that do. Hence the more slots
are free, the more prompt tokens are allowed between two decode steps (`prefill_budget`), and a long prompt is cut
(`prefill_chunks`). A request with a cut prompt waits at the head of the queue, and the computed part of its prompt is
in a slot behind the running ones.

The `DeterministicScheduler` computes every request in separate forward passes. The rounding of a matrix product depends
on its shape, so the same prompt gives other last bits in a batch with others, after a cached prefix, or when computed
again after a retraction. With this scheduler, the shapes of a request's passes are a function of the request alone: its
whole prompt, then token after token. Its invariant: tokens and log-probabilities do not depend, bit for bit, on other
requests or on the arrival time of a request.

With CUDA graphs, the scheduler launches the next decode step before it reads the tokens of the present one, so that the
device computes while the host accepts tokens. The step in flight is a guess: that the same requests continue with the
same weights. It changes no state of the scheduler, which reads its results only if a new step would compute the same.
Invariant: each step computes the same requests with graphs of the same shape as without a step in flight, and leaves
the same state. A prompt that arrives waits for the step in flight. If a request ends, its row is not read. The
scheduler launches another step after a retraction, new weights, or the end of so many requests that a smaller graph
serves the others. The slot of an ended request may be filled at once, because the device computes in the order of
launches.

A request without new tokens, whose prompt is only scored, waits neither for a slot nor for a pause to end: it is
computed next, in a slot behind the others. A comparison of weights would otherwise come after those weights.

All methods run in the engine's thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

import msgspec
import torch
from torch import Tensor

from streamrl.gserver.embedded.adapters import Adapter
from streamrl.gserver.embedded.graphs import DecodeStep, GraphedModel
from streamrl.gserver.embedded.model import Extension, SlotCache, StepModel
from streamrl.gserver.embedded.prefix_cache import PrefixCache
from streamrl.gserver.embedded.request import Request, SamplerOutput, sample, scaled_logprobs
from streamrl.gserver.embedded.weights import Parameters
from streamrl.gserver.server.engine import Output, Ticket
from streamrl.transport.generation import FinishReason, PauseMode

log = logging.getLogger(__name__)

CHUNK_TOKENS = 256
"""Least prompt budget of a step, in tokens; prompts that need no more are not cut."""
PREFILL_TOKENS = 4096
"""Prompt tokens that are computed between two decode steps while all slots are free; fewer if fewer are."""
LOGITS_ROWS = 256
"""Rows of logits computed at once for the log-probabilities of a prompt."""

Event = tuple[Ticket, Output | str]
"""A ticket with its output, or with the reason of its failure."""


class LaunchedStep(msgspec.Struct, frozen=True):
    """A decode step on the device."""

    step: DecodeStep
    rows: dict[Request, int]
    """The row of each request."""

    def read(self, requests: Sequence[Request]) -> SamplerOutput:
        """Wait for the step and return the tokens of `requests`."""
        drawn, rows = self.step.read(), [self.rows[request] for request in requests]
        return SamplerOutput([drawn.tokens[row] for row in rows], [drawn.logprobs[row] for row in rows])


class Scheduler:
    """Owns the requests and the cache; `step` computes, and leaves the outputs for the tickets in `events`."""

    cuts_prompts = True

    def __init__(
        self,
        *,
        model: StepModel,
        cache: SlotCache,
        max_running: int,
        version: str,
        prefill_tokens: int = PREFILL_TOKENS,
        prefix_cache_bytes: int = 0,
        adapter: Adapter | None = None,
        overlap: bool = True,
    ) -> None:
        """`cache` has a slot more than `max_running`, for prompts that are only scored. `prefill_tokens`: number of
        prompt tokens computed between two decode steps while no request runs. `prefix_cache_bytes`: see `PrefixCache`.
        `adapter`: for requests that begin before the first new one. `overlap`: with CUDA graphs, launch a decode step
        before the tokens of the previous one are read."""
        self.version = version
        self.paused = False
        self.running: list[Request | None] = []
        self.waiting: deque[Request] = deque()
        self.events: list[Event] = []
        self.tokens_generated = 0
        self.decode_steps = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.busy_seconds = 0.0
        self.slot_seconds = 0.0
        self.decode_seconds = 0.0
        """Duration of the latest decode step."""
        self._model = model
        self._graphed = model if isinstance(model, GraphedModel) else None
        self._overlap = overlap
        self._adapter = adapter
        self._cache = cache
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._prefixes = PrefixCache(cache, capacity=prefix_cache_bytes)
        self._cut: tuple[Request, int] | None = None
        """The request with a cut prompt, and the slot with the computed part of it."""
        self._ahead: LaunchedStep | None = None
        """The step in flight; it has a row for every running request."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute until the next command."""
        return self.paused or not (self.waiting or self.occupied)

    @property
    def occupied(self) -> int:
        """Number of running requests."""
        return len(self.running) - self.running.count(None)

    @property
    def adapters(self) -> int:
        """Number of adapters in use: the one for new requests, and those of running requests."""
        used = {id(request.adapter) for request in self.running if request is not None} | {id(self._adapter)}
        return len(used - {id(None)})

    @property
    def cache_bytes(self) -> int:
        """Memory of the slots and of the kept prefixes of finished requests."""
        return self._cache.bytes + self._prefixes.kept_bytes

    def submit(self, request: Request) -> None:
        """Queue a request."""
        request.note_version(self.version)
        if request.job.params.max_new_tokens:
            self.waiting.append(request)
        else:
            self.waiting.appendleft(request)

    def abort(self, rid: str) -> bool:
        """End request `rid` with its tokens so far; return whether it exists."""
        for request in [*self.waiting, *filter(None, self.running)]:
            if request.job.rid == rid:
                self._abort([request])
                return True
        return False

    def abort_all(self) -> int:
        """End all requests with their tokens so far; return their number."""
        requests = [*filter(None, self.running), *self.waiting]
        self._abort(requests)
        return len(requests)

    def pause(self, mode: PauseMode) -> None:
        """Compute nothing until `resume`; `mode` determines the fate of running requests."""
        if not self.paused:
            self._score()
        self.paused = True
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        """Continue after a pause."""
        self.paused = False

    def new_weights(self, parameters: Parameters, version: str | None) -> None:
        """Compute with `parameters` from the next step on."""
        self._model.parameters = parameters
        self._ahead = None
        self._forget_prefixes()
        if version is not None:
            self.set_version(version)

    def new_adapter(self, adapter: Adapter, version: str | None) -> None:
        """Compute requests that have not begun with `adapter`; the others keep their adapters and versions."""
        self._adapter = adapter
        self._forget_prefixes()
        if version is not None:
            self.set_version(version)

    def set_version(self, version: str) -> None:
        """Label tokens with `version`, from the next one on, if computed with the present weights and adapter."""
        self.version = version
        for request in [*filter(None, self.running), *self.waiting]:
            if request.adapter in (None, self._adapter):
                request.note_version(version)

    def step(self) -> None:
        """Admit waiting requests, then make one token for each running one."""
        began = time.perf_counter()
        self._admit()
        self._close_holes()
        slots, admitted = len(self.running), time.perf_counter()
        self.decode_steps += slots > 0
        self._decode()
        ended = time.perf_counter()
        self.decode_seconds = ended - admitted
        self.busy_seconds += ended - began
        self.slot_seconds += (ended - began) * slots

    def _score(self) -> None:
        """Compute the prompts that are only scored."""
        while self.waiting and not self.waiting[0].job.params.max_new_tokens:
            batch = [self.waiting.popleft()]
            self._try_prompts(batch, partial(self._prefill, batch))

    def _admit(self) -> None:
        self._score()
        if self.occupied and self._ahead is not None:
            return
        self._ahead = None  # all of its requests have ended or were retracted
        batch, cut = self._next_batch()
        if batch:
            self._try_prompts(batch, lambda: self._prefill(batch))
        if cut:
            request = self.waiting[0]
            self._try_prompts([request], lambda: self._prefill_part(request, cut))

    def _try_prompts(self, batch: Sequence[Request], compute: Callable[[], None]) -> None:
        try:
            compute()
        except Exception as error:  # tolerance point: a failed step fails its requests, not the engine
            log.exception("prefill of %d requests failed", len(batch))
            self._fail_step(batch, f"the prompt could not be computed: {type(error).__name__}: {error}")

    def _next_batch(self) -> tuple[list[Request], int]:
        """Return the requests whose prompts are completed now, and the number of tokens computed of the next prompt."""
        free = self._max_running - self.occupied
        if not (free and self.waiting):
            return [], 0
        budget = prefill_budget(free=free, slots=self._max_running, most=self._prefill_tokens)
        needs: list[Need] = []
        given = prefill_chunks(self._needs(free, needs), budget=budget)
        cut = given[-1] if given[-1] < needs[len(given) - 1].tokens else 0
        return [self.waiting.popleft() for _ in range(len(given) - bool(cut))], cut

    def _needs(self, most: int, seen: list[Need]) -> Iterator[Need]:
        """Yield the needs of the first `most` waiting requests, and append each to `seen`."""
        prompts: set[tuple[int, ...]] = set()
        for request in islice(self.waiting, most):
            key = tuple(request.tokens)
            scored = request.wants_input_logprobs
            if key in prompts and not scored:
                need = Need(0)
            else:
                cached = self._prefixes.cached(request.tokens, limit=_shareable(request))
                need = Need(len(key) - cached, whole=scored or not self.cuts_prompts)
                prompts.add(key)
            seen.append(need)
            yield need

    def _prefill_part(self, request: Request, count: int) -> None:
        """Compute `count` more tokens of a prompt that does not fit into one step."""
        self._close_holes()  # a hole may take up the slot behind the running ones
        slot = self._cut[1] if self._cut is not None and self._cut[0] is request else len(self.running)
        self._cache.reserve(slots=slot + 1, length=len(request.tokens))
        cached = self._fill(request, slot)
        self._cut = request, slot
        end = cached + count
        part = Extension(slot=slot, cached=cached, tokens=request.tokens[cached:end], last=0, adapter=self._adapter)
        self._model.extend([part])
        self._prefixes.place(slot, request.tokens[:end])
        self.prompt_tokens += count

    def _prefill(self, batch: Sequence[Request]) -> None:
        slots = self._take_slots(batch)
        self._cache.reserve(slots=len(self.running), length=max(len(r.tokens) for r in batch))
        extensions: dict[int, Extension] = {}
        followers: dict[int, list[int]] = {}
        leaders: dict[tuple[int, ...], int] = {}
        for request, slot in zip(batch, slots, strict=True):
            key = tuple(request.tokens)
            if key in leaders and not request.wants_input_logprobs:
                followers[leaders[key]].append(slot)
                request.cached_tokens = len(request.tokens) - 1
                self.prompt_tokens_cached += request.cached_tokens
                continue
            extensions[slot] = self._extension(request, slot)
            followers[slot] = []
            leaders.setdefault(key, slot)
        ordered = sorted(extensions.values(), key=lambda e: (e.cached, len(e.tokens)))
        hidden, starts = self._model.extend(ordered)
        ends = [start + extension.wanted for start, extension in zip(starts, ordered, strict=True)]
        order: list[int] = []
        rows: list[int] = []
        for extension, start, end in zip(ordered, starts, ends, strict=True):
            leader = self._at(extension.slot)
            if leader.wants_input_logprobs:
                self._score_prompt(leader, hidden[start:end], extension.cached)
            if followers[extension.slot]:
                self._cache.copy(extension.slot, followers[extension.slot], len(leader.tokens))
            for slot in (extension.slot, *followers[extension.slot]):
                order.append(slot)
                rows.append(end - 1)
        requests = [self._at(slot) for slot in order]
        for slot, request in zip(order, requests, strict=True):
            self._prefixes.place(slot, request.tokens)
        self.prompt_tokens += sum(len(extension.tokens) for extension in ordered)
        self._sample_for(order, self._logits_of(hidden, rows))

    def _take_slots(self, batch: Sequence[Request]) -> list[int]:
        slots = [i for i, request in enumerate(self.running) if request is None][: len(batch)]
        slots += range(len(self.running), len(self.running) + len(batch) - len(slots))
        self.running.extend([None] * (max(slots) + 1 - len(self.running)))
        for slot, request in zip(slots, batch, strict=True):
            self.running[slot] = request
            request.adapter = self._adapter
        return slots

    def _extension(self, request: Request, slot: int) -> Extension:
        """Return the part of `request` to be computed, after the longest cached prefix."""
        cached = self._fill(request, slot)
        if self._cut is not None and self._cut[0] is request:
            self._forget_cut()
        last = None if request.wants_input_logprobs else 1
        return Extension(slot=slot, cached=cached, tokens=request.tokens[cached:], last=last, adapter=request.adapter)

    def _fill(self, request: Request, slot: int) -> int:
        """Copy the longest cached prefix of `request` into `slot`; return its length."""
        cached = self._prefixes.fill(slot, request.tokens, limit=_shareable(request))
        if self._cut is None or self._cut[0] is not request:  # else a part of it is the request's own work
            request.cached_tokens = cached
            self.prompt_tokens_cached += cached
        return cached

    def _logits_of(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the logits of `rows`, computed once for repeated rows."""
        distinct = sorted(set(rows))
        logits = self._model.logits(hidden[distinct])
        if len(distinct) == len(rows) and list(rows) == distinct:
            return logits
        where = {row: i for i, row in enumerate(distinct)}
        return logits[[where[row] for row in rows]]

    def _score_prompt(self, request: Request, hidden: Tensor, first: int) -> None:
        """Record the log-probabilities of the prompt's tokens; `hidden[0]` belongs to token `first`."""
        start, end = request.job.logprob_start_len, request.prompt_length
        count = request.job.top_logprobs_num
        if start == 0:
            request.input_logprobs.append(None)
            request.input_top_logprobs.append(None)
            start = 1
        for low in range(start, end, LOGITS_ROWS):
            high = min(low + LOGITS_ROWS, end)
            logprobs = self._model.logits(hidden[low - 1 - first : high - 1 - first]).float().log_softmax(-1)
            targets = torch.tensor(request.tokens[low:high], device=logprobs.device)
            request.input_logprobs.extend(logprobs.gather(1, targets[:, None])[:, 0].tolist())
            if count:
                request.input_top_logprobs.extend(_top(logprobs, count))

    def _close_holes(self) -> None:
        """Move the last requests into the holes, so that the slots in use are the first ones."""
        while None in self.running:
            last = self.running.pop()
            if last is None:
                continue
            hole = self.running.index(None)
            # All tokens: the last one's keys and values are there if a step in flight computes them.
            self._cache.copy(len(self.running), [hole], len(last.tokens))
            self._prefixes.move(len(self.running), hole)
            self.running[hole] = last

    def _decode(self) -> None:
        requests = [request for request in self.running if request is not None]
        if not requests:
            return
        try:
            self._cache.reserve(slots=len(requests), length=max(len(request.tokens) for request in requests))
            self._decode_running(requests)
        except Exception as error:  # tolerance point: a failed step fails its requests, not the engine
            log.exception("a decode step of %d requests failed", len(requests))
            self._fail_step(requests, f"a token could not be computed: {type(error).__name__}: {error}")

    def _decode_running(self, requests: Sequence[Request]) -> None:
        """Generate a token for each of `requests`; request i is in slot i."""
        if (launched := self._launched(requests)) is not None:
            if self._overlap and self._continues(requests):
                self._ahead = self._launch(requests, after=launched)
            self._give(range(len(requests)), launched.read(requests))
            return
        positions = [len(request.tokens) - 1 for request in requests]
        adapters = [request.adapter for request in requests] if self._adapter is not None else ()
        logits = self._model.decode([request.tokens[-1] for request in requests], positions, adapters=adapters)
        self._sample_for(range(len(requests)), logits)

    def _launched(self, requests: Sequence[Request]) -> LaunchedStep | None:
        """Return a step for `requests` on the device: the one in flight if it has the right shape, else a new one.
        Return None if graphs do not serve them."""
        ahead, self._ahead = self._ahead, None
        if self._graphed is None or self._adapter is not None or any(request.needs_logits for request in requests):
            return None
        size = self._graphed.size([len(request.tokens) - 1 for request in requests])
        return ahead if ahead is not None and ahead.step.size == size else self._launch(requests)

    def _continues(self, requests: Sequence[Request]) -> bool:
        """Return whether the next step will have the same `requests`, as far as the host knows."""
        prompt_is_next = self.waiting and len(requests) < self._max_running
        all_end = all(request.produced + 1 == request.job.params.max_new_tokens for request in requests)
        return not (prompt_is_next or all_end)

    def _launch(self, requests: Sequence[Request], *, after: LaunchedStep | None = None) -> LaunchedStep | None:
        """Launch a step for `requests`: the next one, or else the one that follows `after`."""
        assert self._graphed is not None
        later = int(after is not None)
        step = self._graphed.launch(
            [request.tokens[-1] if after is None else after.rows[request] for request in requests],
            [len(request.tokens) - 1 + later for request in requests],
            [request.draw for request in requests],
            [request.produced + later for request in requests],
            follows=after is not None,
        )
        return None if step is None else LaunchedStep(step, {request: i for i, request in enumerate(requests)})

    def _sample_for(self, slots: Sequence[int], logits: Tensor) -> None:
        """Give the requests in `slots` a token each, drawn from their rows of `logits`."""
        requests = [self._at(slot) for slot in slots]
        for i, request in enumerate(requests):
            if request.may_not_stop:
                logits[i, list(request.stop_token_ids)] = -math.inf
        sampled = sample(logits, [r.draw for r in requests], [r.produced for r in requests])
        self._add_top_logprobs(requests, logits)
        self._give(slots, sampled)

    def _give(self, slots: Sequence[int], sampled: SamplerOutput) -> None:
        """Give the requests in `slots` the `sampled` tokens."""
        for slot, token, logprob in zip(slots, sampled.tokens, sampled.logprobs, strict=True):
            request = self._at(slot)
            if math.isnan(logprob):
                self._cache.clear(slot)
                self._fail([request], "the model computed NaN: its weights are broken")
                continue
            if request.job.params.max_new_tokens:
                request.accept(token, logprob)
                self.tokens_generated += 1
            else:
                request.finish_reason = FinishReason(type="length", length=0)
            if request.finish_reason is not None:
                self._note_routes(slot, request)
                self._prefixes.finish(slot, request.tokens[:-1])
                self.running[slot] = None
                self._tell(request)
            elif request.is_to_be_told:
                self._tell(request)

    def _add_top_logprobs(self, requests: Sequence[Request], logits: Tensor) -> None:
        rows = [i for i, r in enumerate(requests) if r.job.top_logprobs_num and r.job.params.max_new_tokens]
        if rows:
            count = max(requests[i].job.top_logprobs_num for i in rows)
            logprobs = scaled_logprobs(logits[rows], [requests[i].draw for i in rows])
            for i, top in zip(rows, _top(logprobs, count), strict=True):
                requests[i].top_logprobs.append(top[: requests[i].job.top_logprobs_num])

    def _retract(self) -> None:
        for slot in reversed(range(len(self.running))):
            request = self.running[slot]
            if request is not None:
                request.num_retractions += 1
                request.adapter = None
                request.note_version(self.version)  # it may have kept an earlier adapter
                self._prefixes.remove(slot)
                self.waiting.appendleft(request)
        self.running.clear()
        self._forget_cut()

    def _forget_cut(self) -> None:
        if self._cut is not None:
            self._prefixes.remove(self._cut[1])
            self._cut = None

    def _forget_prefixes(self) -> None:
        self._prefixes.clear()
        self._cut = None

    def _abort(self, requests: Sequence[Request]) -> None:
        gone = set(map(id, requests))
        for slot, request in enumerate(self.running):
            if request is not None and id(request) in gone:  # it may be resumed elsewhere, or here
                self._note_routes(slot, request)
                self._prefixes.finish(slot, request.tokens[:-1])
        for request in requests:
            request.abort("aborted on request")
            self._tell(request)
        self._forget(requests)

    def _fail_step(self, requests: Sequence[Request], message: str) -> None:
        """Fail the unfinished ones of `requests` after a failed step.

        Raises the error of the GPU if the GPU itself has failed: this process can compute nothing afterwards, and an
        engine that continued would fail every request.
        """
        self._fail([request for request in requests if request.finish_reason is None], message)
        self._model.parameters.wait_for_device()

    def _fail(self, requests: Sequence[Request], message: str) -> None:
        self.events.extend((request.ticket, message) for request in requests)
        self._forget(requests)

    def _note_routes(self, slot: int, request: Request) -> None:
        """Record the experts that computed the tokens of `request`, which ends: all tokens but the last one."""
        routes = self._cache.routes
        if routes is not None and request.job.return_routed_experts:
            request.routed_experts = routes[slot, : len(request.tokens) - 1].cpu().numpy().copy()

    def _forget(self, requests: Sequence[Request]) -> None:
        gone = set(map(id, requests))
        for slot, request in enumerate(self.running):
            if request is not None and id(request) in gone:
                self._prefixes.remove(slot)
                self.running[slot] = None
        if self._cut is not None and id(self._cut[0]) in gone:
            self._forget_cut()
        self.waiting = deque(request for request in self.waiting if id(request) not in gone)

    def _tell(self, request: Request) -> None:
        self.events.append((request.ticket, request.output()))

    def _at(self, slot: int) -> Request:
        request = self.running[slot]
        assert request is not None
        return request


def _shareable(request: Request) -> int:
    """Return how many tokens of `request` may come from the cache: requested log-probabilities must be computed."""
    last = len(request.tokens) - 1
    return min(last, max(0, request.job.logprob_start_len - 1)) if request.wants_input_logprobs else last


def _top(logprobs: Tensor, count: int) -> list[list[tuple[float, int]]]:
    """Return the `count` likeliest tokens of each row, as pairs of log-probability and token."""
    values, indices = logprobs.topk(min(count, logprobs.shape[-1]), -1)
    return [list(zip(v, i, strict=True)) for v, i in zip(values.tolist(), indices.tolist(), strict=True)]


class DeterministicScheduler(Scheduler):
    """Admits and reports like `Scheduler`, but keeps and cuts no prompts. Its model must have `copies_cache`."""

    cuts_prompts = False
    repeats_single_steps = True
    """Whether a retracted response is computed again token by token, as it was the first time."""

    def _prefill(self, batch: Sequence[Request]) -> None:
        slots = self._take_slots(batch)
        self._cache.reserve(slots=len(self.running), length=max(len(request.tokens) for request in batch))
        computed: dict[tuple[int, ...], tuple[int, Tensor]] = {}  # prompt → its slot, and its last hidden state
        for request, slot in zip(batch, slots, strict=True):
            end = request.prompt_length if self.repeats_single_steps else len(request.tokens)
            prompt = request.tokens[:end]
            found = computed.get(tuple(prompt))
            if found is None or request.wants_input_logprobs:
                hidden = self._extend(request, slot, 0, prompt)
                if request.wants_input_logprobs:
                    self._score_prompt(request, hidden, 0)
                hidden = hidden[-1:].clone()
                computed[tuple(prompt)] = slot, hidden
                request.cached_tokens = 0
            else:  # a copy of the same computation has the same bits
                source, hidden = found
                self._cache.copy(source, [slot], len(prompt))
                request.cached_tokens = len(prompt) - 1
            for position in range(end, len(request.tokens)):  # response tokens before a retraction
                hidden = self._extend(request, slot, position, request.tokens[position : position + 1])
            self._sample_for([slot], self._model.logits(hidden))

    def _extend(self, request: Request, slot: int, cached: int, tokens: Sequence[int]) -> Tensor:
        """Return the hidden states of `tokens` of `request`, which follow `cached` ones in `slot`."""
        self.prompt_tokens += len(tokens)
        extension = Extension(slot=slot, cached=cached, tokens=tokens, adapter=request.adapter)
        return self._model.extend([extension])[0]

    def _decode_running(self, requests: Sequence[Request]) -> None:
        for slot, request in enumerate(requests):
            last = len(request.tokens) - 1
            extension = Extension(slot=slot, cached=last, tokens=request.tokens[last:], adapter=request.adapter)
            self._sample_for([slot], self._model.logits(self._model.extend([extension])[0]))


class Need(msgspec.Struct, frozen=True):
    """The part of a waiting request's prompt that has not been computed yet."""

    tokens: int
    whole: bool = False
    """Whether it must not be cut."""


def prefill_budget(*, free: int, slots: int, most: int) -> int:
    """Return how many prompt tokens may be computed until the next decode step: `most` times the share of free slots,
    but at least a chunk. Pure."""
    return max(CHUNK_TOKENS, most * free // slots)


def prefill_chunks(needs: Iterable[Need], *, budget: int) -> list[int]:
    """Return the number of tokens to compute of each of the first requests, in order; the others wait for a later step.

    Only the last one may get less than it needs. `budget` is exceeded only by a first request that has to be computed
    whole. `needs` is read no further than necessary. Pure.
    """
    given: list[int] = []
    left = budget
    for need in needs:
        fits = need.tokens <= left
        if not fits and given and (need.whole or need.tokens <= CHUNK_TOKENS):
            break
        chunk = need.tokens if fits or need.whole else left
        given.append(chunk)
        left -= chunk
        if left <= 0:
            break
    return given
