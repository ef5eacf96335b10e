"""What a model says that `renderers` reads, streamed to real clients as it comes, through an update of the weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from streamrl.rollout.agents.gateway import Gateway
from streamrl.rollout.agents.model_renderer import ModelRenderer, renderer_of
from streamrl.rollout.agents.workflow import Episode, EpisodeScore, EpisodeTable, Score
from streamrl.transport.generation import GenerateRequest
from tests.rollout.engine import answer
from tests.rollout.qwen import make_qwen
from tests.rollout.sessions import session

CHAT = make_qwen()
THOUGHT, CONTENT = "Two and two.", "I add < them:"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
SAID = f"<think>\n{THOUGHT}\n</think>\n\n{CONTENT}\n{CALL}<|im_end|>"
ASKED: Any = [{"role": "user", "content": "What is 2 + 2?"}]
PARAMETERS = {"type": "object"}


class Heard(NamedTuple):
    """An answer as a client has it in the end."""

    reasoning: str
    content: str
    calls: list[tuple[str, Any]]


class Policy:
    """Says `SAID`: a part of it, then weights are updated, and the rest only once the client has `heard` something."""

    def __init__(self, *, cut: str) -> None:
        """`cut`: what it says first."""
        self.heard = asyncio.Event()
        self._cut = len(CHAT.encode(cut))
        self._said = CHAT.encode(SAID)

    async def __call__(self, request: GenerateRequest, number: int) -> Any:
        if number == 0:
            first = [answer(self._said[:n], finish=None) for n in range(1, self._cut)]
            return self._told(request, [*first, answer(self._said[: self._cut], finish="abort")])
        if request.stream:
            async with asyncio.timeout(60):
                await self.heard.wait()
        rest = self._said[self._cut :]
        parts = [answer(rest[:n], finish=None, version="1") for n in range(1, len(rest))]
        return self._told(request, [*parts, answer(rest, version="1")])

    @staticmethod
    def _told(request: GenerateRequest, parts: list[Any]) -> Any:
        return parts if request.stream else parts[-1]


async def with_openai(url: str, key: str, stream: bool, heard: asyncio.Event) -> Heard:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    asked: dict[str, Any] = {"model": "policy", "messages": ASKED, "tools": tools}
    async with AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as client:
        if not stream:
            message = (await client.chat.completions.create(**asked)).choices[0].message
            calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]  # type: ignore[union-attr]
            return Heard(message.reasoning_content, message.content or "", calls)  # type: ignore[attr-defined]
        reasoning, content = "", ""
        calls = []
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            delta = chunk.choices[0].delta
            reasoning += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
            calls += [(call.function.name, json.loads(call.function.arguments)) for call in delta.tool_calls or []]
            if reasoning:
                heard.set()
        return Heard(reasoning, content, calls)


async def with_anthropic(url: str, key: str, stream: bool, heard: asyncio.Event) -> Heard:
    tools: Any = [{"name": "add", "input_schema": PARAMETERS}]
    asked: dict[str, Any] = {"model": "policy", "messages": ASKED, "tools": tools, "max_tokens": 200}
    async with AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        if stream:
            async with client.messages.stream(**asked) as events:
                async for event in events:
                    if event.type in ("thinking", "text"):
                        heard.set()
                message: Any = await events.get_final_message()
        else:
            message = await client.messages.create(**asked)
    thinking, text, call = message.content
    return Heard(thinking.thinking, text.text, [(call.name, call.input)])


async def with_responses(url: str, key: str, stream: bool, heard: asyncio.Event) -> Heard:
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
    asked: dict[str, Any] = {"model": "policy", "input": "What is 2 + 2?", "tools": tools}
    deltas = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
    async with AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as client:
        if stream:
            async with client.responses.stream(**asked) as events:
                async for event in events:
                    if event.type in deltas:
                        deltas[event.type] += event.delta  # type: ignore[union-attr]
                        heard.set()
                answered: Any = await events.get_final_response()
        else:
            answered = await client.responses.create(**asked)
    reasoning, _, call = answered.output
    found = Heard(reasoning.content[0].text, answered.output_text, [(call.name, json.loads(call.arguments))])
    assert not stream or tuple(deltas.values()) == found[:2]
    return found


@asynccontextmanager
async def asked(policy: Policy) -> AsyncIterator[tuple[str, Episode]]:
    renderer = renderer_of(CHAT)
    assert isinstance(renderer, ModelRenderer)
    table = EpisodeTable()
    gateway = Gateway(table, model="policy")
    async with session(chat=CHAT, script=policy, tokens=200, max_context=4000) as (made, _):
        episode = Episode(made, renderer, max_calls=10)
        table.add(episode)
        try:
            yield f"{await gateway.start()}/episodes/{episode.name}", episode
        finally:
            await gateway.close()


@pytest.mark.parametrize("ask", [with_openai, with_anthropic, with_responses])
@pytest.mark.parametrize("cut", ["", "<think>\nTwo and", f"<think>\n{THOUGHT}\n</think>\n\nI add"])
async def test_a_model_is_streamed_as_it_speaks_and_says_the_same_as_in_one_piece(ask: Any, cut: str) -> None:
    found = []
    for stream in (True, False):
        policy = Policy(cut=cut)
        if not cut:
            policy.heard.set()  # nothing comes before the update
        async with asked(policy) as (url, episode):
            found.append(await ask(url, episode.key, stream, policy.heard))
            (one,) = episode.trajectories(EpisodeScore(Score(1.0), []), discount=1.0)
        assert one.input_ids[one.loss_mask].tolist() == CHAT.encode(SAID)
        before = len(CHAT.encode(cut))
        versions = one.policy_versions[one.loss_mask].tolist()
        assert versions == [0] * before + [1] * (len(versions) - before)
    assert found == [Heard(THOUGHT, CONTENT, [("add", {"a": 2})])] * 2
