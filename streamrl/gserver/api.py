"""From the body of /generate to jobs, and from outputs to its answer.

Every mistake that a request can contain is found here, before the engine sees it, and named
together with what to do.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection
from typing import Any, Protocol

import msgspec

from streamrl.errors import UNDECODABLE
from streamrl.gserver.engine import Job, Output, Refused
from streamrl.transport.generation import (
    GenerateReply,
    GenerateRequest,
    MetaInfo,
    SamplingParams,
    TokenLogprob,
)

MAX_RESPONSES = 4096
"""Of one request: prompts times `n`."""
MAX_TOP_LOGPROBS = 1024
HARMLESS_KEYS = frozenset(("log_metrics", "priority", "modalities", "background", "conversation_id"))
NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "spaces_between_special_tokens": True,
}
"""Sampling parameters of SGLang that are not supported, with the values that change nothing."""

_REQUEST_KEYS = frozenset(field.encode_name for field in msgspec.structs.fields(GenerateRequest))
_SAMPLING_KEYS = frozenset(field.encode_name for field in msgspec.structs.fields(SamplingParams))


class TextCodec(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str: ...


class Limits(msgspec.Struct, frozen=True):
    """What the engine can take."""

    vocab_size: int
    max_context: int


class Generation(msgspec.Struct, frozen=True):
    """A checked request."""

    rids: dict[str, list[str]]
    """Name that the client knows → names of its jobs: one for the whole, or one for each prompt."""
    jobs: list[Job]
    single: bool
    """Answered with one object, not with a list."""
    return_logprob: bool
    stream: bool


def parse(body: bytes, *, limits: Limits, text: TextCodec) -> Generation:
    """Check the body of /generate; raises `Refused`."""
    try:
        tree = msgspec.json.decode(body)
        _refuse_unknown(tree)
        request = msgspec.convert(tree, GenerateRequest)
    except UNDECODABLE as error:
        raise Refused(f"the body is not a generate request: {error}") from error
    prompts, single = _prompts(request, text)
    params = _params(request, len(prompts))
    responses = sum(p.n for p in params)
    if responses > MAX_RESPONSES:
        raise Refused(f"one request may ask for {MAX_RESPONSES} responses, not {responses}; send several requests")
    names = _names(request, len(prompts))
    rids: dict[str, list[str]] = {name: [] for name in names}
    jobs: list[Job] = []
    for known_as, prompt, sampling in zip(names, prompts, params, strict=True):
        _check_prompt(prompt, limits)
        _check_params(sampling, limits)
        _check_length(prompt, sampling, limits)
        for sibling in range(sampling.n):
            alone = sampling.n == 1 and len(rids) == len(prompts)
            name = known_as if alone else f"{known_as}-{len(rids[known_as])}"
            rids[known_as].append(name)
            jobs.append(_job(request, name, prompt, _sibling_params(sampling, sibling)))
    _check_logprobs(request)
    return Generation(
        rids=rids,
        jobs=jobs,
        single=single and responses == 1,
        return_logprob=request.return_logprob,
        stream=request.stream,
    )


def _names(request: GenerateRequest, prompts: int) -> list[str]:
    """What each prompt is known by: names of their own, or one for all."""
    if not isinstance(request.rid, list):
        return [request.rid or uuid.uuid4().hex] * prompts
    if len(request.rid) != prompts or len(set(request.rid)) != prompts:
        raise Refused(f"rid must be one string, or {prompts} different ones, one for each prompt")
    return request.rid


def reply(output: Output, job: Job, *, text: TextCodec, return_logprob: bool, began: float) -> GenerateReply:
    """The answer for one response, finished or not; `began` is its arrival on the monotonic clock."""
    wants_prompt = return_logprob and job.logprob_start_len >= 0
    wants_top = return_logprob and job.top_logprobs_num > 0
    return GenerateReply(
        text=visible_text(output, job, text),
        output_ids=output.output_ids,
        meta_info=MetaInfo(
            id=job.rid,
            finish_reason=output.finish_reason,
            prompt_tokens=len(job.input_ids),
            completion_tokens=len(output.output_ids),
            cached_tokens=output.cached_tokens,
            weight_version=output.weight_version,
            weight_versions=output.spans if output.finish_reason is not None else None,
            num_retractions=output.num_retractions,
            e2e_latency=time.monotonic() - began,
            input_token_logprobs=_with_ids(output.input_logprobs, job.input_ids[job.logprob_start_len :])
            if wants_prompt
            else None,
            output_token_logprobs=_with_ids(output.logprobs, output.output_ids) if return_logprob else None,
            input_top_logprobs=[_pairs(pairs) for pairs in output.input_top_logprobs]
            if wants_top and wants_prompt
            else None,
            output_top_logprobs=[_pairs(pairs) for pairs in output.top_logprobs] if wants_top else None,
        ),
    )


def visible_text(output: Output, job: Job, text: TextCodec) -> str:
    """The response without what stopped it; while it grows, also without what may still change."""
    reason = output.finish_reason
    tokens = output.output_ids
    if reason is not None and isinstance(reason.matched, int):
        tokens = tokens[:-1]
    decoded = text.decode(tokens, skip_special_tokens=job.params.skip_special_tokens)
    if reason is not None:
        if isinstance(reason.matched, str) and reason.matched in decoded:
            decoded = decoded[: decoded.index(reason.matched)]
        return decoded
    decoded = decoded.rstrip("\ufffd")  # the first bytes of a character whose rest is to come
    return decoded[: len(decoded) - max((_overlap(decoded, stop) for stop in job.stop), default=0)]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _refuse_unknown(tree: Any) -> None:
    """Refuse what would change the answer if it were understood."""
    if not isinstance(tree, dict):
        raise Refused("the body must be a JSON object")
    _refuse_keys(tree, _REQUEST_KEYS | HARMLESS_KEYS, where="the request")
    sampling = tree.get("sampling_params", {})
    for params in sampling if isinstance(sampling, list) else [sampling]:
        if isinstance(params, dict):
            others = {key: value for key, value in params.items() if NEUTRAL.get(key, ...) != value}
            _refuse_keys(others, _SAMPLING_KEYS, where="sampling_params")


def _refuse_keys(tree: dict[str, Any], known: Collection[str], *, where: str) -> None:
    unknown = sorted(key for key, value in tree.items() if key not in known and value not in (None, False, "", [], {}))
    if unknown:
        raise Refused(
            f"{where} asks for {', '.join(unknown)}, which this gserver does not support; "
            f"supported: {', '.join(sorted(known))}"
        )


def _prompts(request: GenerateRequest, text: TextCodec) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether there is one that did not come as a list."""
    if (request.text is None) == (request.input_ids is None):
        raise Refused("give either text or input_ids")
    if request.text is not None:
        single = isinstance(request.text, str)
        texts = [request.text] if isinstance(request.text, str) else request.text
        prompts = [text.encode(t) for t in texts]
    else:
        ids: Any = request.input_ids
        single = not ids or isinstance(ids[0], int)
        prompts = [ids] if single else ids
    if not prompts:
        raise Refused("the list of prompts is empty; give at least one")
    return prompts, single


def _params(request: GenerateRequest, prompts: int) -> list[SamplingParams]:
    if isinstance(request.sampling_params, SamplingParams):
        return [request.sampling_params] * prompts
    if len(request.sampling_params) != prompts:
        raise Refused(
            f"{len(request.sampling_params)} sampling_params for {prompts} prompts; give one for each, or one"
        )
    return request.sampling_params


def _sibling_params(params: SamplingParams, sibling: int) -> SamplingParams:
    """Siblings of one seed would all be equal, so each gets a seed of its own."""
    if params.sampling_seed is None or sibling == 0:
        return params
    return msgspec.structs.replace(params, sampling_seed=params.sampling_seed + sibling)


def _job(request: GenerateRequest, rid: str, prompt: list[int], params: SamplingParams) -> Job:
    stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    return Job(
        rid=rid,
        input_ids=prompt,
        params=params,
        stop=stop,
        logprob_start_len=request.logprob_start_len if request.return_logprob else -1,
        top_logprobs_num=request.top_logprobs_num if request.return_logprob else 0,
        stream=request.stream and (params.stream_interval or 1) < params.max_new_tokens,
    )


def _check_prompt(prompt: list[int], limits: Limits) -> None:
    if not prompt:
        raise Refused("the prompt is empty; give at least one token")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < limits.vocab_size:
            raise Refused(f"token id {token} is outside the vocabulary of {limits.vocab_size} tokens")


def _check_params(params: SamplingParams, limits: Limits) -> None:
    problems = []
    if params.temperature < 0:
        problems.append(f"temperature must be at least 0, not {params.temperature}")
    if not 0 < params.top_p <= 1:
        problems.append(f"top_p must be above 0 and at most 1, not {params.top_p}")
    if params.top_k < -1 or params.top_k == 0:
        problems.append(f"top_k must be at least 1, or -1 for no limit, not {params.top_k}")
    if not 0 <= params.min_p <= 1:
        problems.append(f"min_p must be from 0 to 1, not {params.min_p}")
    if params.max_new_tokens < 0:
        problems.append(f"max_new_tokens must be at least 0, not {params.max_new_tokens}")
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        problems.append(
            f"min_new_tokens must be from 0 to max_new_tokens ({params.max_new_tokens}), not {params.min_new_tokens}"
        )
    if params.n < 1:
        problems.append(f"n must be at least 1, not {params.n}")
    if "" in ([params.stop] if isinstance(params.stop, str) else params.stop or ()):
        problems.append("stop must not contain an empty string")
    outside = [token for token in params.stop_token_ids or () if not 0 <= token < limits.vocab_size]
    if outside:
        problems.append(f"stop_token_ids {outside} are outside the vocabulary of {limits.vocab_size} tokens")
    if problems:
        raise Refused("sampling_params: " + "; ".join(problems))


def _check_length(prompt: list[int], params: SamplingParams, limits: Limits) -> None:
    if len(prompt) + params.max_new_tokens > limits.max_context:
        raise Refused(
            f"a prompt of {len(prompt)} tokens and max_new_tokens = {params.max_new_tokens} exceed the context of "
            f"{limits.max_context} tokens; shorten one of them, or raise gserver.max_context if the model allows it"
        )


def _check_logprobs(request: GenerateRequest) -> None:
    if request.logprob_start_len < -1:
        raise Refused(f"logprob_start_len must be at least -1 (none), not {request.logprob_start_len}")
    if not 0 <= request.top_logprobs_num <= MAX_TOP_LOGPROBS:
        raise Refused(f"top_logprobs_num must be from 0 to {MAX_TOP_LOGPROBS}, not {request.top_logprobs_num}")


def _with_ids(logprobs: list[Any], ids: list[int]) -> list[TokenLogprob]:
    return [(logprob, token, None) for logprob, token in zip(logprobs, ids, strict=True)]


def _pairs(pairs: list[tuple[float, int]] | None) -> list[TokenLogprob] | None:
    return None if pairs is None else [(logprob, token, None) for logprob, token in pairs]
