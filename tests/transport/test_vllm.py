"""vLLM's token endpoint as a gserver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from streamrl.errors import PeerError
from streamrl.rollout.generation import check_reply
from streamrl.transport.generation import FinishReason, GenerateReply, GenerateRequest, SamplingParams
from streamrl.transport.vllm import Choice, VllmGenerationClient, finish_reason
from tests.transport.test_control import server


@asynccontextmanager
async def vllm(*responses: dict[str, Any] | None) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server that returns `responses` in turn, and an error for None; yields its URL and the bodies of requests."""
    bodies: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        assert (request.method, request.path) == ("POST", "/inference/v1/generate")
        bodies.append(await request.json())
        found = responses[len(bodies) - 1]
        if found is None:
            return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)
        return web.json_response({"request_id": "any", "choices": [{"index": 0, **found}]})

    async with server(generate) as url:
        yield url, bodies


def response(*tokens: int, finish: str = "stop") -> dict[str, Any]:
    return {
        "token_ids": list(tokens),
        "finish_reason": finish,
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5, "rank": 1} for token in tokens]},
        "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}],
    }


def request(rid: str, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        input_ids=[1, 2], rid=rid, sampling_params=SamplingParams(max_new_tokens=4, **params), return_logprob=True
    )


async def test_each_request_has_its_tokens_with_log_probabilities_and_versions() -> None:
    replies: dict[int, GenerateReply] = {}
    served = vllm(response(5, 6), response(7, finish="length"))
    async with served as (url, bodies), VllmGenerationClient(timeout=10) as client:
        await client.generate_batch(url, [request("a", stop="x", sampling_seed=1), request("b")], replies.__setitem__)
    by_name = {body["request_id"]: body for body in bodies}
    assert by_name["a"]["token_ids"] == [1, 2]
    assert by_name["a"]["sampling_params"]["stop"] == ["x"]
    assert (by_name["a"]["sampling_params"]["seed"], by_name["b"]["sampling_params"]["seed"]) == (1, None)
    for reply in replies.values():
        check_reply(reply, budget=4, peer=url)
        assert reply.meta_info.weight_version == "3"
    finished = {tuple(reply.output_ids): reply.meta_info.finish_reason for reply in replies.values()}
    assert [(end.type, end.matched) for end in (finished[5, 6], finished[7,]) if end] == [("stop", 6), ("length", None)]


async def test_a_refusal_is_an_error_of_the_peer() -> None:
    async with vllm(response(5), None) as (url, _), VllmGenerationClient(timeout=10) as client:
        with pytest.raises(PeerError, match="too long"):
            await client.generate_batch(url, [request("a"), request("b")], lambda index, reply: None)


@pytest.mark.parametrize(
    ("finish", "stop_reason", "expected"),
    [
        ("stop", None, FinishReason("stop", matched=6)),
        ("stop", "no", FinishReason("stop", matched="no")),
        ("length", None, FinishReason("length", length=4)),
        ("abort", None, FinishReason("abort", message="the request was aborted")),
    ],
)
def test_the_end_of_a_response(finish: str, stop_reason: str | None, expected: FinishReason) -> None:
    assert finish_reason(Choice([5, 6], finish, stop_reason), limit=4, last=6) == expected
