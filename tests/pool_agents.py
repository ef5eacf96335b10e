"""Agents for tests/test_task_pool.py."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI

_client = AsyncOpenAI(base_url="http://localhost", api_key="of each episode")


async def _ask(policy: Any, messages: list[Any]) -> str:
    client = _client.with_options(base_url=policy.base_url, api_key=policy.api_key)
    reply = await client.chat.completions.create(model=policy.model, messages=messages, max_tokens=1, stop=["7"])
    return reply.choices[0].message.content or ""


async def two_rounds(task: dict[str, Any], policy: Any) -> None:
    """Ask, ask again with the answer, and score the number that the answers have."""
    messages = list(task["messages"])
    first = await _ask(policy, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "?"}]
    second = await _ask(policy, messages)
    await asyncio.to_thread(policy.notify_score, float(first == second == "1"))


async def unscored(task: dict[str, Any], policy: Any) -> None:
    """Ask once and leave the score to others."""
    await _ask(policy, task["messages"])


async def failing_once(task: dict[str, Any], policy: Any) -> float:
    """Fail on a task that demands it."""
    if task.get("fails"):
        raise RuntimeError("no such luck")
    await _ask(policy, task["messages"])
    return 1.0
