"""How tokens are drawn and where a response ends: what the rest of streamrl asks for, against both engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamrl.config import SamplingConfig
from streamrl.rollout.generation import Generator, check_reply
from streamrl.transport.generation import GenerateReply, GenerateRequest, SamplingParams
from streamrl.types import Generation
from tests.gserver.contract.fixture import MARKS, TOLERANCE, Contract, fixed_route, output_logprobs

pytestmark = MARKS

PROMPT = [3, 1, 4, 1, 5]
TOKENS = 24
STOP_LENGTH = 4
"""Characters, which are tokens."""


async def draw(gserver: Contract, **sampling: Any) -> GenerateReply:
    params = SamplingParams(max_new_tokens=TOKENS, **sampling)
    reply = await gserver.client.generate(
        gserver.url, GenerateRequest(input_ids=PROMPT, sampling_params=params, return_logprob=True)
    )
    check_reply(reply, budget=TOKENS, peer=gserver.url)
    return reply


async def respond(gserver: Contract, *, tokens_per_request: int, stop: list[str]) -> Generation:
    """As a rollout worker has it: the likeliest tokens."""
    generator = Generator(
        gserver.client,
        sampling=SamplingConfig(temperature=0.0, stop=stop),
        seed=1,
        patience=60.0,
        tokens_per_request=tokens_per_request,
        decode=gserver.text.decode,
        eos_token_ids=(),
        policy_version=lambda: gserver.version,
    )
    route = fixed_route(gserver.urls, first=0)
    return await generator.generate(PROMPT, max_new_tokens=TOKENS, rid="r", route=route)


async def test_log_probabilities_are_of_the_temperature_and_of_all_tokens(gserver: Contract) -> None:
    reply = await draw(gserver, temperature=0.5, top_k=5, ignore_eos=True)
    expected = gserver.logprobs(PROMPT, reply.output_ids, temperature=0.5)
    assert output_logprobs(reply) == pytest.approx(expected, abs=TOLERANCE)
    assert expected != pytest.approx(gserver.logprobs(PROMPT, reply.output_ids), abs=TOLERANCE)
    likeliest = gserver.logits(PROMPT, reply.output_ids).topk(5).indices
    assert (likeliest == torch.tensor(reply.output_ids)[:, None]).any(1).all()


async def test_a_token_that_ends_a_response_is_its_last(gserver: Contract) -> None:
    whole = (await draw(gserver, temperature=0.0, ignore_eos=True)).output_ids
    last = whole[TOKENS // 2]
    reply = await draw(gserver, temperature=0.0, stop_token_ids=[last])
    assert reply.output_ids == whole[: whole.index(last) + 1]
    finish = reply.meta_info.finish_reason
    assert finish is not None
    assert (finish.type, finish.matched) == ("stop", last)


@pytest.mark.parametrize("tokens_per_request", [TOKENS, 3, 1])
async def test_a_stop_string_ends_a_response_also_when_it_is_asked_for_in_parts(
    gserver: Contract, tokens_per_request: int
) -> None:
    whole = (await respond(gserver, tokens_per_request=TOKENS, stop=[])).output_ids
    text = gserver.text.decode(whole)
    assert len(text) >= 2 * STOP_LENGTH
    stop = text[-STOP_LENGTH:]
    never_there = stop * TOKENS
    response = await respond(gserver, tokens_per_request=tokens_per_request, stop=[never_there, stop])
    assert (response.finish_reason, response.matched) == ("stop", stop)
    assert response.output_ids == whole[: len(response.output_ids)]
    assert gserver.text.decode(response.output_ids) == text[: text.index(stop) + STOP_LENGTH]
    assert response.logprobs == pytest.approx(gserver.logprobs(PROMPT, response.output_ids), abs=TOLERANCE)
