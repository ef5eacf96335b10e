"""What the rest of streamrl relies on, against a gserver with the embedded engine and one with real SGLang.

One gserver for each engine and pause mode serves the tests of this package, which publish one version after another.
"""

from __future__ import annotations

import asyncio

import pytest

from streamrl.errors import PeerError
from streamrl.rollout.generation import check_reply, token_versions
from streamrl.transport.generation import (
    AbortRequest,
    GenerationClient,
    PauseGeneration,
    PauseMode,
    WeightsChecker,
)
from tests.gserver.contract.fixture import (
    JOINED,
    MARKS,
    MODES,
    ONE_OF_EACH,
    TOLERANCE,
    TWO_RANKS,
    WAYS,
    WHATEVER_THE_PAUSE,
    Contract,
    Way,
    output_logprobs,
    request,
    served,
)
from tests.gserver.running_sglang import MAX_CONTEXT, MAX_RUNNING

pytestmark = MARKS

PROMPT = [3, 1, 4, 1, 5]
MOST_TOKENS = 3000
"""More than a gserver makes while a test lasts."""
CHANGES = (
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/init_weights_update_group",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/end_weight_update",
    "/destroy_weights_update_group",
    "/weights_checker",
)
"""Calls that change it, or show its weights."""


@served(*ONE_OF_EACH, JOINED, TWO_RANKS)
async def test_answers_are_trained_on_as_they_are(gserver: Contract) -> None:
    prompts = [PROMPT, [7, 8, 9], [2] * 40]
    requests = [request(prompt, 20, rid=f"group/{i}") for i, prompt in enumerate(prompts)]
    replies = {}
    await gserver.client.generate_batch(gserver.url, requests, replies.__setitem__)
    assert replies.keys() == {0, 1, 2}
    for index, reply in replies.items():
        prompt = prompts[index]
        assert check_reply(reply, budget=20, peer=gserver.url).type == "length"
        assert reply.meta_info.prompt_tokens == len(prompt)
        assert len(reply.output_ids) == 20
        assert output_logprobs(reply) == pytest.approx(gserver.logprobs(prompt, reply.output_ids), abs=TOLERANCE)
        assert token_versions(reply.meta_info, tokens=20) == [gserver.version] * 20


async def test_what_it_says_of_itself(gserver: Contract) -> None:
    info = await gserver.client.server_info(gserver.url)
    assert info.engine == gserver.engine
    assert info.staged_weight_update == (gserver.engine != "sglang")
    await gserver.generate(PROMPT, 8)
    await gserver.run.until(lambda status: status.processes[0].stats.get("tokens_generated_total", 0) >= 8, timeout=20)


async def test_too_long_a_prompt_is_refused(gserver: Contract) -> None:
    with pytest.raises(PeerError, match="context") as refused:
        await gserver.generate([1] * (MAX_CONTEXT + 10), 4)
    assert refused.value.status == 400


async def test_an_aborted_request_answers_with_what_it_has(gserver: Contract) -> None:
    other = asyncio.create_task(gserver.generate(PROMPT, 30, rid="another"))
    long = await gserver.begin(PROMPT, gserver.long, rid="long")
    assert (await gserver.client.update(gserver.url, "/abort_request", AbortRequest(rid="long"))).success
    reply = await long
    assert check_reply(reply, budget=gserver.long, peer=gserver.url).type == "abort"
    assert len(reply.output_ids) < gserver.long
    assert output_logprobs(reply) == pytest.approx(gserver.logprobs(PROMPT, reply.output_ids), abs=TOLERANCE)
    assert len((await other).output_ids) == 30


async def test_a_request_that_has_not_begun_can_be_aborted(gserver: Contract) -> None:
    running = await asyncio.gather(
        *(gserver.begin([n], MOST_TOKENS, rid=f"runs/{n}") for n in range(1, MAX_RUNNING + 1))
    )
    waiting = asyncio.create_task(gserver.generate(PROMPT, 8, rid="waits"))
    await gserver.run.until(lambda status: status.processes[0].stats.get("queued") == 1, timeout=60)
    assert (await gserver.client.update(gserver.url, "/abort_request", AbortRequest(rid="waits"))).success
    reply = await waiting
    assert check_reply(reply, budget=8, peer=gserver.url).type == "abort"
    assert reply.output_ids == []
    assert not any(task.done() for task in running)
    assert (await gserver.client.update(gserver.url, "/abort_request", AbortRequest(abort_all=True))).success
    for reply in await asyncio.gather(*running):
        assert check_reply(reply, budget=MOST_TOKENS, peer=gserver.url).type == "abort"


@served(JOINED)
async def test_callers_without_its_key_are_refused(gserver: Contract) -> None:
    assert gserver.key
    for key in ("", gserver.key[:-1] + "x"):
        stranger = GenerationClient(timeout=20.0, key=key)
        try:
            with pytest.raises(PeerError) as refused:
                await stranger.generate(gserver.url, request(PROMPT, 4))
            assert refused.value.status == 401
            with pytest.raises(PeerError) as refused:
                await stranger.model_info(gserver.url)
            assert refused.value.status == 401
            for path in CHANGES:
                with pytest.raises(PeerError) as refused:
                    await stranger.update(gserver.url, path)
                assert refused.value.status == 401, path
        finally:
            await stranger.close()
    assert len((await gserver.generate(PROMPT, 4)).output_ids) == 4


@pytest.mark.parametrize("mode", MODES)
async def test_pause_and_continue(mode: PauseMode, gserver: Contract) -> None:
    long = await gserver.begin(PROMPT, gserver.long)
    assert (await gserver.client.update(gserver.url, "/pause_generation", PauseGeneration(mode=mode))).success
    late = asyncio.create_task(gserver.generate(PROMPT, 4))
    await asyncio.sleep(0.5)
    assert not late.done()
    assert (await gserver.client.update(gserver.url, "/continue_generation")).success
    reply = await long
    finish = check_reply(reply, budget=gserver.long, peer=gserver.url)
    assert finish.type == ("abort" if mode == "abort" else "length")
    assert output_logprobs(reply) == pytest.approx(gserver.logprobs(PROMPT, reply.output_ids), abs=TOLERANCE)
    assert len((await late).output_ids) == 4


@served(*WHATEVER_THE_PAUSE, TWO_RANKS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_published_update_takes_effect_between_two_tokens(gserver: Contract, way: Way) -> None:
    await gserver.publish(1.0, way=way)
    before = gserver.version
    old = await gserver.client.post(gserver.url, "/weights_checker", WeightsChecker(), dict)
    running = await gserver.begin(PROMPT, gserver.long)
    await gserver.publish(2.0, way=way)
    during = await running
    finish = check_reply(during, budget=gserver.long, peer=gserver.url)
    versions = token_versions(during.meta_info, tokens=len(during.output_ids))
    if gserver.pause_mode == "abort":
        assert finish.type == "abort"
        assert set(versions) == {before}
    else:
        assert finish.type == "length"
        assert versions == sorted(versions)
        assert set(versions) == {before, gserver.version}
    assert await gserver.client.post(gserver.url, "/weights_checker", WeightsChecker(), dict) != old
    assert (await gserver.client.model_info(gserver.url)).weight_version == str(gserver.version)
    if gserver.pause_mode == "retract":  # the tokens before were computed again under the new weights
        swap = versions.index(gserver.version)
        expected = gserver.logprobs(PROMPT, during.output_ids)[swap:]
        assert output_logprobs(during)[swap:] == pytest.approx(expected, abs=TOLERANCE)

    again = await gserver.generate(PROMPT, 20)  # no prompt of the old weights is left
    assert output_logprobs(again) == pytest.approx(gserver.logprobs(PROMPT, again.output_ids), abs=TOLERANCE)
    assert token_versions(again.meta_info, tokens=20) == [gserver.version] * 20

    await gserver.publish(1.0, way=way)  # in the same weight group, if they are broadcast
    assert await gserver.client.post(gserver.url, "/weights_checker", WeightsChecker(), dict) == old
    expected = gserver.logprobs(PROMPT, during.output_ids)[: versions.count(before)]
    assert output_logprobs(during)[: len(expected)] == pytest.approx(expected, abs=TOLERANCE)
