"""What the rest of streamrl relies on, against a gserver with the embedded engine and one with real SGLang.

One gserver for each engine and pause mode serves all tests of this package, which publish one version after another.
"""

from __future__ import annotations

import asyncio

import pytest

from streamrl.errors import PeerError
from streamrl.rollout.replies import check_reply, token_versions
from streamrl.transport.generation import AbortRequest, PauseGeneration, PauseMode
from tests.gserver.contract.fixture import (
    MAX_CONTEXT,
    MODES,
    START_SECONDS,
    TOLERANCE,
    Contract,
    output_logprobs,
    request,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(START_SECONDS + 120),
]

PROMPT = [3, 1, 4, 1, 5]
LONG = 400


async def test_answers_are_trained_on_as_they_are(gserver: Contract) -> None:
    prompts = [PROMPT, [7, 8, 9], [2] * 40]
    requests = [request(prompt, 20, rid=f"group/{i}") for i, prompt in enumerate(prompts)]
    for prompt, reply in zip(prompts, await gserver.client.generate_batch(gserver.url, requests), strict=True):
        assert check_reply(reply, budget=20, peer=gserver.url).type == "length"
        assert reply.meta_info.prompt_tokens == len(prompt)
        assert len(reply.output_ids) == 20
        assert output_logprobs(reply) == pytest.approx(gserver.logprobs(prompt, reply.output_ids), abs=TOLERANCE)
        assert token_versions(reply.meta_info, tokens=20) == [gserver.version] * 20


async def test_what_it_says_of_itself(gserver: Contract) -> None:
    info = await gserver.client.server_info(gserver.url)
    assert info.engine == gserver.engine
    assert info.staged_weight_update == (gserver.engine == "embedded")
    await gserver.generate(PROMPT, 8)
    await gserver.run.until(lambda status: status.processes[0].stats.get("tokens_generated_total", 0) >= 8, timeout=20)


async def test_too_long_a_prompt_is_refused(gserver: Contract) -> None:
    with pytest.raises(PeerError, match="context") as refused:
        await gserver.generate([1] * (MAX_CONTEXT + 10), 4)
    assert refused.value.status == 400


async def test_an_aborted_request_answers_with_what_it_has(gserver: Contract) -> None:
    other = asyncio.create_task(gserver.generate(PROMPT, 30, rid="another"))
    long = await gserver.begin(PROMPT, LONG, rid="long")
    assert (await gserver.client.update(gserver.url, "/abort_request", AbortRequest(rid="long"))).success
    reply = await long
    assert check_reply(reply, budget=LONG, peer=gserver.url).type == "abort"
    assert len(reply.output_ids) < LONG
    assert output_logprobs(reply) == pytest.approx(gserver.logprobs(PROMPT, reply.output_ids), abs=TOLERANCE)
    assert len((await other).output_ids) == 30


async def test_a_request_that_has_not_begun_can_be_aborted(gserver: Contract) -> None:
    await gserver.client.update(gserver.url, "/pause_generation", PauseGeneration(mode="in_place"))
    waiting = asyncio.create_task(gserver.generate(PROMPT, 8, rid="waits"))
    await asyncio.sleep(0.3)
    assert (await gserver.client.update(gserver.url, "/abort_request", AbortRequest(rid="waits"))).success
    assert (await gserver.client.update(gserver.url, "/continue_generation")).success
    reply = await waiting
    if check_reply(reply, budget=8, peer=gserver.url).type == "abort":  # else SGLang was told before it knew of it
        assert reply.output_ids == []


@pytest.mark.parametrize("mode", MODES)
async def test_pause_and_continue(mode: PauseMode, gserver: Contract) -> None:
    long = await gserver.begin(PROMPT, LONG)
    assert (await gserver.client.update(gserver.url, "/pause_generation", PauseGeneration(mode=mode))).success
    late = asyncio.create_task(gserver.generate(PROMPT, 4))
    await asyncio.sleep(0.5)
    assert not late.done()
    assert (await gserver.client.update(gserver.url, "/continue_generation")).success
    reply = await long
    finish = check_reply(reply, budget=LONG, peer=gserver.url)
    assert finish.type == ("abort" if mode == "abort" else "length")
    assert output_logprobs(reply) == pytest.approx(gserver.logprobs(PROMPT, reply.output_ids), abs=TOLERANCE)
    assert len((await late).output_ids) == 4


async def test_a_published_update_takes_effect_between_two_tokens(gserver: Contract) -> None:
    before = gserver.version
    old = await gserver.client.checksum(gserver.url)
    running = await gserver.begin(PROMPT, LONG)
    await gserver.publish(2.0)
    during = await running
    finish = check_reply(during, budget=LONG, peer=gserver.url)
    versions = token_versions(during.meta_info, tokens=len(during.output_ids))
    if gserver.pause_mode == "abort":
        assert finish.type == "abort"
        assert set(versions) == {before}
    else:
        assert finish.type == "length"
        assert versions == sorted(versions)
        assert set(versions) == {before, gserver.version}
    assert await gserver.client.checksum(gserver.url) != old
    assert (await gserver.client.model_info(gserver.url)).weight_version == str(gserver.version)
    if gserver.pause_mode == "retract":  # the tokens before were computed again under the new weights
        swap = versions.index(gserver.version)
        expected = gserver.logprobs(PROMPT, during.output_ids)[swap:]
        assert output_logprobs(during)[swap:] == pytest.approx(expected, abs=TOLERANCE)

    again = await gserver.generate(PROMPT, 20)  # no prompt of the old weights is left
    assert output_logprobs(again) == pytest.approx(gserver.logprobs(PROMPT, again.output_ids), abs=TOLERANCE)
    assert token_versions(again.meta_info, tokens=20) == [gserver.version] * 20

    await gserver.publish(1.0)  # in the same weight group
    assert await gserver.client.checksum(gserver.url) == old
    expected = gserver.logprobs(PROMPT, during.output_ids)[: versions.count(before)]
    assert output_logprobs(during)[: len(expected)] == pytest.approx(expected, abs=TOLERANCE)
