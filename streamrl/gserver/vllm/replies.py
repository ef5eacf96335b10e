"""Requests to vLLM from a gserver's jobs, and a gserver's outputs from vLLM's replies. Pure."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray

from streamrl.gserver.server.engine import Job, Output
from streamrl.transport.generation import FinishReason
from streamrl.transport.vllm import Candidate, Choice, PromptScore, TokenReply, TokenRequest, finish_reason, sampling


def request(job: Job, *, request_id: str, version: str, adapter: str | None = None) -> TokenRequest:
    """Return the request for `job`. `version`: the name of the weights that are served now. `adapter`: the adapter's
    name; None: there is none.

    Prompts that were cached under other weights are not used, since requests of each version share only their own.
    """
    params = job.params
    scores_prompt = job.logprob_start_len >= 0
    return TokenRequest(
        request_id=request_id,
        token_ids=job.input_ids,
        cache_salt=version,
        model=adapter,
        stream=job.stream and not scores_prompt and params.max_new_tokens > 0,  # streams have no scores of prompts
        sampling_params=sampling(
            params, stop=list(job.stop), top_logprobs=job.top_logprobs_num, scores_prompt=scores_prompt
        ),
    )


class ResponseBuilder:
    """The response to one job so far."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[float, int]]] = []
        self._input_logprobs: list[float | None] = []
        self._input_top: list[list[tuple[float, int]] | None] = []
        self._cached = 0
        self._reported = 0
        """Number of tokens in the last output."""
        self.retractions = 0
        """How often it was stopped to be computed again under new weights."""

    def add(self, reply: TokenReply, *, version: str) -> Output | None:
        """Add the reply, or the event of a stream; return an output if it is due. `version`: of the served weights."""
        if reply.prompt_logprobs is not None:
            self._add_prompt(reply.prompt_logprobs)
        if reply.usage is not None and reply.usage.prompt_tokens_details is not None:
            self._cached = reply.usage.prompt_tokens_details.cached_tokens or 0
        for choice in reply.choices:
            self._add_tokens(choice)
            if choice.finish_reason is not None:
                return self._finished(choice, version)
        due = 1 if not self._reported else self._reported + self._job.stream_interval
        if len(self._ids) < due:
            return None
        self._reported = len(self._ids)
        return self._output(version)

    def aborted(self, *, version: str) -> Output:
        """Return the output of a job that vLLM has not begun."""
        return self._finished(Choice(finish_reason="abort"), version)

    def _add_tokens(self, choice: Choice) -> None:
        self._ids += choice.token_ids or []
        wanted = self._job.top_logprobs_num
        for score in (choice.logprobs.content if choice.logprobs else None) or []:
            self._logprobs.append(score.logprob)
            if wanted:
                self._top.append(_likeliest(score.top_logprobs, wanted))

    def _add_prompt(self, scores: list[dict[int, PromptScore] | None]) -> None:
        start, wanted = self._job.logprob_start_len, self._job.top_logprobs_num
        for token, found in zip(self._job.input_ids[start:], scores[start:], strict=True):
            self._input_logprobs.append(None if found is None else found[token].logprob)
            if wanted:
                candidates = [Candidate(name, score.logprob) for name, score in (found or {}).items()]
                self._input_top.append(None if found is None else _likeliest(candidates, wanted))

    def _finished(self, choice: Choice, version: str) -> Output:
        spans = choice.weight_versions or []
        reason = self._reason(choice)
        routes = _routes(choice.routed_experts) if self._job.return_routed_experts else None
        if self._job.params.max_new_tokens == 0:  # vLLM makes at least one token
            self._ids, self._logprobs, self._top = [], [], []
            routes = None if routes is None else routes[: len(self._job.input_ids) - 1]
        return self._output(
            spans[-1].version if spans else version,
            finish_reason=reason,
            spans=spans if self._ids else [],
            routed_experts=routes,
        )

    def _reason(self, choice: Choice) -> FinishReason:
        limit = self._job.params.max_new_tokens
        if not limit and choice.finish_reason != "abort":
            return FinishReason("length", length=0)
        return finish_reason(choice, limit=limit, last=self._ids[-1] if self._ids else None)

    def _output(self, version: str, **end: object) -> Output:
        return Output(
            output_ids=list(self._ids),
            logprobs=list(self._logprobs),
            weight_version=version,
            top_logprobs=list(self._top),
            input_logprobs=self._input_logprobs,
            input_top_logprobs=self._input_top,
            cached_tokens=self._cached,
            num_retractions=self.retractions,
            **end,  # type: ignore[arg-type]
        )


def _likeliest(candidates: list[Candidate], count: int) -> list[tuple[float, int]]:
    """Return log-probability and token of the `count` most likely candidates."""
    ordered = sorted(candidates, key=lambda candidate: -candidate.logprob)
    return [(candidate.logprob, candidate.token_id) for candidate in ordered[:count]]


def _routes(encoded: str | None) -> NDArray[np.uint8] | None:
    if encoded is None:
        return None
    experts: NDArray[np.uint8] = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False).astype(np.uint8)
    return experts
