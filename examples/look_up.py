"""An agent that uses a tool: it has to count the items on a shelf, by looking there.

It is written against OpenAI's client and imports nothing of streamrl; examples/look_up.toml trains it.
"""

from __future__ import annotations

import json
import random
from typing import Any

from openai import AsyncOpenAI

SHELVES = "abc"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Count the items on a shelf.",
            "parameters": {
                "type": "object",
                "properties": {"shelf": {"type": "string", "enum": list(SHELVES)}},
                "required": ["shelf"],
            },
        },
    }
]

_client = AsyncOpenAI(base_url="http://localhost", api_key="of each episode")
"""Shared, because a client of its own costs an episode twenty milliseconds."""


def shelves(index: int, seed: int) -> dict[str, Any]:
    """Return row `index` of the data: a shelf, and the stock of each, which only the tool returns."""
    drawn = random.Random(f"shelves/{seed}/{index}")
    stock = {shelf: drawn.randint(0, 9) for shelf in SHELVES}
    shelf = drawn.choice(SHELVES)
    return {"prompt": shelf, "answer": str(stock[shelf]), "stock": stock}


async def answer(task: dict[str, Any], policy: Any) -> float:
    """Ask once; worth 0.2 if the policy looks at the right shelf, and 1 if it then replies with the stock."""
    client = _client.with_options(base_url=policy.base_url, api_key=policy.api_key)
    messages: list[Any] = list(task["messages"])
    reply = await client.chat.completions.create(model=policy.model, messages=messages, tools=TOOLS)
    message = reply.choices[0].message
    if not message.tool_calls:
        return 0.0
    call: Any = message.tool_calls[0]
    shelf = json.loads(call.function.arguments)["shelf"]
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": str(task["stock"][shelf])}]
    reply = await client.chat.completions.create(model=policy.model, messages=messages, tools=TOOLS)
    if shelf != task["question"]:
        return 0.0
    return 1.0 if reply.choices[0].message.content == task["answer"] else 0.2
