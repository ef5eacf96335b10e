"""Responses across weight updates, aborts and the death of their gserver, token by token against a replay.

The rollout worker's own generator asks; transformers then computes every token's log-probability
under the weights of the version that the token is said to be of.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from streamrl.config import SamplingConfig
from streamrl.errors import StreamRLError
from streamrl.rollout.generation import Generator, token_versions, unmixed
from streamrl.transport.generation import AbortRequest, GenerateReply, GenerateRequest, GenerationClient
from streamrl.types import Generation
from tests.gserver.contract.fixture import (
    MARKS,
    TOLERANCE,
    TWO_RANKS,
    WHATEVER_THE_PAUSE,
    Contract,
    contract,
    fixed_route,
    request,
    served,
)
from tests.gserver.contract.replay import replay

pytestmark = MARKS

PROMPTS = [[3, 1, 4, 1, 5], [2] * 17, [9, 8, 7, 6], [3, 1, 4, 1, 5]]
MOST_TOKENS = 8000
"""More than a gserver makes while a test lasts."""
LAST_TOKENS = 5
FACTORS = (1.7, 0.6, 1.3)
"""Of the initial weights, for each of the versions that are published: distributions differ by much."""


class Recorder(GenerationClient):
    """Remembers the parts in which each response came; none ends by itself, the last ones are short."""

    def __init__(self, *, key: str) -> None:
        super().__init__(timeout=60.0, key=key)
        self.segments: dict[str, list[tuple[list[int], list[int]]]] = {}
        self.ending = False
        self.asked: dict[str, str] = {}
        """Response → URL of the gserver that it is at."""
        self.asks = asyncio.Event()
        self.answered: dict[str, set[str]] = {}
        """Response → URLs of the gservers that have made a part of it."""
        self.cut: Counter[str] = Counter()
        """Response → its requests that failed or were aborted."""

    async def generate(self, url: str, request: GenerateRequest) -> GenerateReply:
        budget = LAST_TOKENS if self.ending else request.sampling_params.max_new_tokens
        params = msgspec.structs.replace(request.sampling_params, max_new_tokens=budget, ignore_eos=True)
        request = msgspec.structs.replace(request, sampling_params=params)
        assert request.rid is not None
        name = request.rid.partition("/")[0]
        self.asked[name] = url
        self.asks.set()
        try:
            reply = await super().generate(url, request)
        except StreamRLError:
            self.cut[name] += 1
            raise
        taken = unmixed(reply)
        self.cut[name] += taken.meta_info.finish_reason.type == "abort"
        self.answered.setdefault(name, set()).add(url)
        versions = token_versions(taken.meta_info, tokens=len(taken.output_ids))
        self.segments.setdefault(name, []).append((taken.output_ids, versions))
        return reply


class Responses:
    """Responses to `PROMPTS`, on their way."""

    def __init__(self, served: Contract, *, tokens_per_request: int = MOST_TOKENS) -> None:
        self._served = served
        self._recorder = Recorder(key=served.key)
        self._generator = Generator(
            self._recorder,
            sampling=SamplingConfig(),
            seed=1,
            patience=60.0,
            tokens_per_request=tokens_per_request,
            decode=str,
            eos_token_ids=(),
            policy_version=lambda: served.version,
        )
        self._tasks = [
            asyncio.create_task(
                self._generator.generate(
                    prompt, max_new_tokens=MOST_TOKENS, rid=f"r{n}", route=fixed_route(served.urls, first=n)
                )
            )
            for n, prompt in enumerate(PROMPTS)
        ]

    async def have(self, tokens: int) -> None:
        """Until about so many more were sampled for each: another request, which runs beside them, has as many."""
        client = self._served.client
        await asyncio.gather(*(client.generate(url, request([7], tokens)) for url in self._served.living))

    async def move(self) -> None:
        """Until all are at gservers that live."""
        async with asyncio.timeout(60):
            while not set(self._recorder.asked.values()) <= set(self._served.living):
                self._recorder.asks.clear()
                await self._recorder.asks.wait()

    def made_by(self, n: int) -> set[str]:
        """URLs of the gservers that have made a part of the n-th."""
        return self._recorder.answered[f"r{n}"]

    async def end(self) -> list[Generation]:
        """Cut all of them short, by an abort; each token's log-probability is checked."""
        self._recorder.ending = True
        for url in self._served.living:
            assert (await self._served.client.update(url, "/abort_request", AbortRequest(abort_all=True))).success
        responses = await asyncio.gather(*self._tasks)
        await self._recorder.close()
        for n, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
            segments = self._recorder.segments[f"r{n}"]
            assert [token for tokens, _ in segments for token in tokens] == response.output_ids
            assert [version for _, versions in segments for version in versions] == response.versions
            expected = replay(prompt, segments, mode=self._served.pause_mode, model_of=self._served.model_of)
            assert response.logprobs == pytest.approx(expected, abs=TOLERANCE)
            assert response.interruptions == self._recorder.cut[f"r{n}"]
        return list(responses)


@served(*WHATEVER_THE_PAUSE, TWO_RANKS)
async def test_across_updates_and_an_abort(gserver: Contract) -> None:
    before = gserver.version
    responses = Responses(gserver)
    for factor in FACTORS:
        await responses.have(60)
        await gserver.publish(factor)
    await responses.have(60)
    made = await responses.end()
    assert {version for response in made for version in response.versions} >= {before, gserver.version}
    for response in made:
        assert response.versions == sorted(response.versions)
        assert response.interruptions >= (1 + len(FACTORS) if gserver.pause_mode == "abort" else 1)


async def generate_across_an_update_and_a_death(served: Contract, *, tokens_per_request: int = MOST_TOKENS) -> None:
    """The second of two gservers dies while it generates."""
    responses = Responses(served, tokens_per_request=tokens_per_request)
    await responses.have(40)
    await served.publish(FACTORS[0])
    await responses.have(40)
    served.kill(1)
    await served.processes[1].ended()
    await responses.move()
    await responses.have(40)
    made = await responses.end()
    assert {version for response in made for version in response.versions} == {0, 1}
    if tokens_per_request == MOST_TOKENS:
        assert [response.interruptions for response in made] == [1, 2, 1, 2]
    else:  # an abort between two parts interrupts nothing; what a gserver had made before its death is there
        assert all(set(response.versions) == {0, 1} for response in made)
        survivor, dead = served.urls
        made_by = [{survivor}, {survivor, dead}]
        assert [responses.made_by(n) for n in range(len(made))] == made_by * 2


@pytest.mark.parametrize("tokens_per_request", [MOST_TOKENS, 15], ids=["whole", "parts"])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_across_an_update_and_the_death_of_a_gserver(mode: str, tokens_per_request: int, tmp_path: Path) -> None:
    async with contract("embedded", tmp_path, pause_mode=mode, count=2) as served:  # type: ignore[arg-type]
        await generate_across_an_update_and_a_death(served, tokens_per_request=tokens_per_request)
