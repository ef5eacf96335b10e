"""An agent's episode across weight updates, token by token against a replay.

Real clients ask the gateway; weights change in the middle of each answer. transformers then computes the
log-probability of every token that is under the loss, by the weights of the version that it is said to be of.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from streamrl.config import RewardConfig, SamplingConfig
from streamrl.rollout.activity import Activity
from streamrl.rollout.agents.gateway import Gateway
from streamrl.rollout.agents.policy import Score
from streamrl.rollout.agents.rendering import TemplateRenderer
from streamrl.rollout.agents.workflow import Episode, EpisodeScore, EpisodeTable
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.generation import Generator
from streamrl.rollout.workflows import Session
from streamrl.transport.generation import AbortRequest
from streamrl.types import Prompt
from tests.gserver.contract.fixture import TOLERANCE, Contract, fixed_route, request
from tests.gserver.contract.replay import replay
from tests.gserver.contract.test_contract import Endless
from tests.gserver.contract.test_replay import FACTORS, MOST_TOKENS, Recorder
from tests.gserver.running_sglang import MAX_CONTEXT, START_SECONDS

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(START_SECONDS + 120),
]

PROMPT = Prompt(seq=7, index=0, epoch=0, messages=[], input_ids=[1], answer=None, metadata={})


def episode_at(served: Contract, generator: Generator, *, tokens: int) -> Episode:
    """An episode whose answers have up to `tokens` tokens."""
    chat = ChatTokenizer.load(served.model_dir)
    session = Session(
        prompt=PROMPT,
        sibling=0,
        generator=generator,
        route=fixed_route(served.urls, first=0),
        rewards=None,
        reward=RewardConfig(),
        chat=chat,
        sampling=SamplingConfig(max_new_tokens=tokens),
        max_context=MAX_CONTEXT,
        activity=Activity(idle="nothing"),
    )
    return Episode(session, TemplateRenderer(chat), max_calls=10)


@asynccontextmanager
async def serving(episode: Episode) -> AsyncIterator[str]:
    """The gateway's URL for `episode`."""
    table = EpisodeTable()
    table.add(episode)
    gateway = Gateway(table, model="policy")
    try:
        yield f"{await gateway.start()}/episodes/{episode.name}"
    finally:
        await gateway.close()


class Agent:
    """A client of the gateway, and what its gserver answered."""

    def __init__(self, served: Contract) -> None:
        self._served = served
        self.recorder = Recorder(key=served.key)
        generator = Generator(
            self.recorder,
            sampling=SamplingConfig(),
            seed=1,
            patience=60.0,
            tokens_per_request=MOST_TOKENS,
            decode=served.text.decode,
            eos_token_ids=(),
            policy_version=lambda: served.version,
        )
        self.episode = episode_at(served, generator, tokens=MOST_TOKENS)
        self.messages: list[Any] = []

    async def turn(self, client: AsyncOpenAI, question: str, *, factor: float) -> None:
        """Ask; while the policy answers, publish other weights; then cut the answer short."""
        self.messages.append({"role": "user", "content": question})
        asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=self.messages))
        await self._have(40)
        await self._served.publish(factor)
        await self._have(40)
        assert not asking.done()
        self.recorder.ending = True
        assert (
            await self._served.client.update(self._served.url, "/abort_request", AbortRequest(abort_all=True))
        ).success
        answer = await asking
        self.recorder.ending = False
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})

    async def _have(self, tokens: int) -> None:
        """Until about so many more were sampled: another request, which runs beside the agent's, has as many."""
        await self._served.client.generate(self._served.url, request([7], tokens))


async def test_an_episode_across_updates_is_exact_in_each_token_of_each_branch(gserver: Contract) -> None:
    if gserver.engine != "embedded":
        pytest.skip("what an engine does in an update is test_replay.py's")
    before = gserver.version
    agent = Agent(gserver)
    async with (
        serving(agent.episode) as url,
        AsyncOpenAI(base_url=url + "/v1", api_key=agent.episode.key, max_retries=0, timeout=120) as client,
    ):
        for question, factor in zip(("31", "4", "15"), FACTORS, strict=True):
            await agent.turn(client, question, factor=factor)
        agent.messages = agent.messages[:2]  # another conversation goes on from the first answer
        await agent.turn(client, "92", factor=1.0)
    await agent.recorder.close()

    long, branch = agent.episode.trajectories(EpisodeScore(Score(1.0), []), discount=1.0)
    assert (long.turns, branch.turns) == (3, 1)
    answers = [agent.recorder.segments[f"7.0.{number}"] for number in range(4)]
    for trajectory, of_turns in ((long, answers[:3]), (branch, answers[3:])):
        tokens = trajectory.input_ids.tolist()
        at = 0
        for segments in of_turns:
            said = [token for part, _ in segments for token in part]
            at += int(trajectory.loss_mask[at:].argmax())  # what the policy is given before it
            here = slice(at, at + len(said))
            assert trajectory.loss_mask[here].all()
            assert tokens[here] == said
            assert trajectory.policy_versions[here].tolist() == [v for _, versions in segments for v in versions]
            expected = replay(tokens[:at], segments, mode=gserver.pause_mode, model_of=gserver.model_of)
            assert trajectory.behavior_logprobs[here].tolist() == pytest.approx(expected, abs=TOLERANCE)
            at += len(said)
        assert at == len(tokens)
    assert [sorted({version for _, versions in segments for version in versions}) for segments in answers] == [
        [before + turn, before + turn + 1] for turn in range(4)
    ]
    shared = int(branch.loss_mask.argmax())
    first = sum(len(part) for part, _ in answers[0])
    assert branch.input_ids[:shared].tolist()[: shared - 2] == long.input_ids[: shared - 2].tolist()
    assert not branch.loss_mask[:shared].any()
    assert shared > first


async def openais_texts(url: str, key: str) -> AsyncIterator[str]:
    asked: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "31"}]}
    async with AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=120) as client:
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            yield chunk.choices[0].delta.content or ""


async def anthropics_texts(url: str, key: str) -> AsyncIterator[str]:
    asked: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "31"}], "max_tokens": 100_000}
    async with (
        AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=120) as client,
        client.messages.stream(**asked) as stream,
    ):
        async for text in stream.text_stream:
            yield text


@pytest.mark.parametrize("texts", [openais_texts, anthropics_texts])
async def test_an_answer_is_streamed_through_an_update(gserver: Contract, texts: Any) -> None:
    before = gserver.version
    generator = Endless(
        gserver.client,
        sampling=SamplingConfig(),
        seed=0,
        patience=60.0,
        tokens_per_request=gserver.long,
        decode=gserver.text.decode,
        eos_token_ids=(),
        policy_version=lambda: before,
    )
    episode = episode_at(gserver, generator, tokens=gserver.long)
    said: list[str] = []
    async with serving(episode) as url:
        async for text in texts(url, episode.key):
            if text and not any(said):
                await gserver.publish(FACTORS[0])
            said.append(text)
    (found,) = episode.trajectories(EpisodeScore(Score(1.0), []), discount=1.0)
    tokens, versions = found.input_ids[found.loss_mask].tolist(), found.policy_versions[found.loss_mask].tolist()
    assert "".join(said) == gserver.text.decode(tokens)
    assert len(tokens) == gserver.long
    assert sorted({*versions}) == [before, before + 1]
    prompt = found.input_ids[~found.loss_mask].tolist()
    expected = replay(prompt, [(tokens, versions)], mode=gserver.pause_mode, model_of=gserver.model_of)
    assert found.behavior_logprobs[found.loss_mask].tolist() == pytest.approx(expected, abs=TOLERANCE)
