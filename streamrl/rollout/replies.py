"""Checks of what an engine answers, before any of it can reach a gradient.

Pure functions. Raise `WireError` for an answer that makes no sense: its group is given up.
"""

from __future__ import annotations

import math

import msgspec

from streamrl.errors import PeerError, WireError
from streamrl.transport.generation import (
    INITIAL_WEIGHT_VERSION,
    MIXED_WEIGHTS,
    FinishReason,
    GenerateReply,
    MetaInfo,
    VersionSpan,
)

LOGPROB_TOLERANCE = 1e-3
"""How far above 0 rounding may lift a log-probability."""


def check_reply(reply: GenerateReply, *, budget: int, peer: str) -> FinishReason:
    """Refuse an answer that cannot be trained on: raises `WireError`; answers why it finished.

    Raises `PeerError` for an abort by which the gserver refuses the request as such.
    """
    finish = reply.meta_info.finish_reason
    tokens = len(reply.output_ids)
    entries = reply.meta_info.output_token_logprobs or []
    if finish is None:
        raise WireError(f"{peer}: an answer without finish_reason")
    if finish.type == "abort" and finish.status_code is not None and 400 <= finish.status_code < 500:
        refusal = PeerError(f"{peer} refused the request: {finish.message}")
        refusal.status = finish.status_code
        raise refusal
    if finish.type != "abort" and tokens == 0:
        raise WireError(f"{peer}: a finished answer ({finish.type}) without a single token")
    if tokens > budget:
        raise WireError(f"{peer}: {tokens} tokens where at most {budget} were asked for")
    if len(entries) != tokens:
        raise WireError(f"{peer}: {len(entries)} log-probabilities for {tokens} tokens")
    for position, (entry, token_id) in enumerate(zip(entries, reply.output_ids, strict=True)):
        logprob, logprob_id = entry[0], entry[1]
        if logprob_id != token_id:
            raise WireError(f"{peer}: token {position} is {token_id}, its log-probability is that of {logprob_id}")
        if logprob is None or not math.isfinite(logprob) or logprob > LOGPROB_TOLERANCE:
            raise WireError(f"{peer}: token {position} has the log-probability {logprob}")
    token_versions(reply.meta_info, tokens=tokens)
    return finish


def serves_mixed_weights(reply: GenerateReply) -> bool:
    """Whether a weight update broke off on the gserver, and left it with parts of two versions."""
    return reply.meta_info.weight_version == MIXED_WEIGHTS or unmixed(reply) is not reply


def unmixed(reply: GenerateReply) -> GenerateReply:
    """`reply` up to the first token that was sampled from mixed weights; cut, it looks like an aborted one."""
    meta = reply.meta_info
    spans = meta.weight_versions
    if spans:
        kept = next((s.start for s in spans if s.version == MIXED_WEIGHTS and s.end > s.start), None)
    else:
        kept = 0 if meta.weight_version == MIXED_WEIGHTS else None
    if kept is None:
        return reply
    return msgspec.structs.replace(
        reply,
        output_ids=reply.output_ids[:kept],
        meta_info=msgspec.structs.replace(
            meta,
            finish_reason=FinishReason(type="abort", message="a weight update broke off"),
            completion_tokens=kept,
            weight_versions=[span for span in spans or () if span.end <= kept],
            output_token_logprobs=(meta.output_token_logprobs or [])[:kept],
        ),
    )


def dated(reply: GenerateReply, *, began: int) -> GenerateReply:
    """`reply` with spans of versions, also of an engine that names only the version at the answer's end.

    `began`: a policy version that was served when the request was made, or an older one. Where the engine does not
    say more, all tokens count as sampled under it, so that they may be younger than they are said to be, never older.
    """
    meta = reply.meta_info
    if meta.weight_versions or not reply.output_ids or meta.weight_version == MIXED_WEIGHTS:
        return reply
    oldest = min(began, _version(meta.weight_version))
    spans = [VersionSpan(str(oldest), 0, len(reply.output_ids))]
    return msgspec.structs.replace(reply, meta_info=msgspec.structs.replace(meta, weight_versions=spans))


def token_versions(meta: MetaInfo, *, tokens: int) -> list[int]:
    """Policy version of each of `tokens` output tokens; raises `WireError` when the spans do not cover them."""
    versions: list[int] = []
    for span in meta.weight_versions or ():
        if span.start != len(versions) or not span.start <= span.end <= tokens:
            raise WireError(f"weight_versions {meta.weight_versions} do not cover {tokens} tokens one after another")
        if span.end > span.start:  # an update leaves an empty span of mixed weights
            versions.extend([_version(span.version)] * (span.end - span.start))
    if len(versions) != tokens:
        raise WireError(f"weight_versions {meta.weight_versions} cover {len(versions)} of {tokens} tokens")
    return versions


def _version(text: str) -> int:
    if text == INITIAL_WEIGHT_VERSION:
        return 0
    if not text.isascii() or not text.isdigit():
        raise WireError(f"weight version {text!r} is not a policy version; start the gserver with a number for it")
    return int(text)
