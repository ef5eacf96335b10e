"""Agents with a tool, on a framework and on Anthropic's client; both add two numbers by asking the policy how."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable
from typing import Any


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def with_pydantic_ai(task: dict[str, Any], policy: Any) -> float:
    """The framework's own loop: it asks, calls the tool, tells its result, and asks again."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=policy.base_url, api_key=policy.api_key)
    agent = Agent(OpenAIChatModel(policy.model, provider=provider), tools=[add], instructions="Use the tool.")
    handler = drain if task["question"] == "stream" else None  # with one it streams
    return float((await agent.run("1+1?", event_stream_handler=handler)).output == "2.")


async def with_pydantic_ai_and_anthropic(task: dict[str, Any], policy: Any) -> float:
    """The same loop over Anthropic's API."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=policy.anthropic_base_url, api_key=policy.api_key)
    agent = Agent(AnthropicModel(policy.model, provider=provider), tools=[add], instructions="Use the tool.")
    handler = drain if task["question"] == "stream" else None  # with one it streams
    return float((await agent.run("1+1?", event_stream_handler=handler)).output == "2.")


async def drain(_: Any, events: AsyncIterable[Any]) -> None:
    async for _ in events:
        pass


async def with_anthropic(task: dict[str, Any], policy: Any) -> float:
    """A loop written by hand."""
    from anthropic import AsyncAnthropic

    tools: Any = [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}}]
    messages: Any = [{"role": "user", "content": "1+1?"}]
    asked: dict[str, Any] = {"model": policy.model, "max_tokens": 200, "tools": tools, "system": "Use the tool."}
    async with AsyncAnthropic(base_url=policy.anthropic_base_url, api_key=policy.api_key) as client:
        while True:
            if task["question"] == "stream":
                async with client.messages.stream(messages=messages, **asked) as stream:
                    reply = await stream.get_final_message()
            else:
                reply = await client.messages.create(messages=messages, **asked)
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return float(reply.content[0].text == "2.")  # type: ignore[union-attr]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps(add(**call.input))}  # type: ignore[arg-type]
                for call in calls
            ]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
