"""A job inside the embedded engine: its tokens, and its end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamrl.gserver.embedded.adapters import Adapter
from streamrl.gserver.embedded.sampler import Draw
from streamrl.gserver.server.engine import Job, Output, Ticket
from streamrl.stop_strings import Decode, StopStrings
from streamrl.transport.generation import FinishReason, VersionSpan

GREEDY_BELOW = 1e-6
"""Temperatures below this are taken as 0, as in SGLang."""
NO_TOP_K = 2**31 - 1


class Request:
    """A request in the engine; owned by the scheduler's thread."""

    def __init__(self, ticket: Ticket, *, eos_token_ids: frozenset[int], seed: int, decode: Decode) -> None:
        job = ticket.job
        params = job.params
        self.ticket = ticket
        self.job: Job = job
        self.tokens = list(job.input_ids)
        """Prompt and response so far."""
        self.prompt_length = len(job.input_ids)
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[float, int]]] = []
        self.input_logprobs: list[float | None] = []
        self.input_top_logprobs: list[list[tuple[float, int]] | None] = []
        self.cached_tokens = 0
        self.num_retractions = 0
        self.routed_experts: NDArray[np.uint8] | None = None
        self.finish_reason: FinishReason | None = None
        self.draw = Draw(
            seed=seed,
            temperature=params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
            top_p=params.top_p,
            top_k=min(params.top_k, NO_TOP_K),
            min_p=params.min_p,
        )
        self.stop_token_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else eos_token_ids
        )
        self._stop_strings = StopStrings(job.stop, decode)
        self._versions: list[tuple[str, int]] = []
        self.adapter: Adapter | None = None
        """The adapter that computes it; None: it has not begun, or there are no adapters."""

    @property
    def produced(self) -> int:
        """Length of the response so far, in tokens."""
        return len(self.logprobs)

    @property
    def wants_input_logprobs(self) -> bool:
        return 0 <= self.job.logprob_start_len < self.prompt_length and not self.input_logprobs

    @property
    def may_not_stop(self) -> bool:
        return self.produced < self.job.params.min_new_tokens and bool(self.stop_token_ids)

    @property
    def needs_logits(self) -> bool:
        """Whether its next token takes more than a plain draw."""
        return self.may_not_stop or not self.draw.plain or self.job.top_logprobs_num > 0

    @property
    def is_to_be_told(self) -> bool:
        """Whether its last token triggers a report before the end."""
        interval = self.job.stream_interval
        return self.job.stream and self.produced % interval == 1 % interval

    def note_version(self, version: str) -> None:
        """Label tokens with `version` from the next one on."""
        if self._versions and self._versions[-1][1] == self.produced:
            self._versions.pop()
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, self.produced))

    def accept(self, token: int, logprob: float) -> None:
        """Append one sampled token and check whether it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        produced = len(self.logprobs)
        params = self.job.params
        if produced >= params.min_new_tokens:
            if token in self.stop_token_ids:
                self.finish_reason = FinishReason(type="stop", matched=token)
                return
            first = max(self.prompt_length, len(self.tokens) - self._stop_strings.reach)
            if stop := self._stop_strings.at_the_end(self.tokens[first:]):
                self.finish_reason = FinishReason(type="stop", matched=stop)
                return
        if produced >= params.max_new_tokens:
            self.finish_reason = FinishReason(type="length", length=params.max_new_tokens)

    def abort(self, message: str) -> None:
        """End the response with its tokens so far."""
        self.finish_reason = FinishReason(type="abort", message=message)

    def output(self) -> Output:
        """Return the present output, for the ticket."""
        final = self.finish_reason is not None
        return Output(
            output_ids=self.tokens[self.prompt_length :],
            logprobs=list(self.logprobs),
            weight_version=self._versions[-1][0],
            finish_reason=self.finish_reason,
            spans=self._spans() if final else [],
            top_logprobs=list(self.top_logprobs),
            input_logprobs=self.input_logprobs,
            input_top_logprobs=self.input_top_logprobs,
            cached_tokens=self.cached_tokens,
            num_retractions=self.num_retractions,
            routed_experts=self.routed_experts,
        )

    def _spans(self) -> list[VersionSpan]:
        ends = [start for _, start in self._versions[1:]] + [self.produced]
        return [
            VersionSpan(version=version, start=start, end=end)
            for (version, start), end in zip(self._versions, ends, strict=True)
            if end > start
        ]
