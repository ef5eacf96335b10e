"""An agent of several turns: find a number, with a hint after each guess, higher or lower.

It is written against OpenAI's client and imports nothing of streamrl; examples/guess_number.toml trains it.
"""

from __future__ import annotations

import random
from typing import Any

from openai import AsyncOpenAI

_client = AsyncOpenAI(base_url="http://localhost", api_key="of each episode")
"""Shared, because a client of its own costs an episode twenty milliseconds."""


def numbers(index: int, seed: int, *, highest: int = 5, guesses: int = 3) -> dict[str, Any]:
    """Return row `index` of the data: a number from 1 to `highest`, to be found in so many `guesses`."""
    number = random.Random(f"guess/{seed}/{index}").randint(1, highest)
    return {"prompt": "?", "answer": str(number), "guesses": guesses}


async def play(task: dict[str, Any], policy: Any) -> float:
    """Play one game; it is worth 1 if the number is found."""
    client = _client.with_options(base_url=policy.base_url, api_key=policy.api_key)
    messages: list[Any] = list(task["messages"])
    number = int(task["answer"])
    for _ in range(task["guesses"]):
        reply = await client.chat.completions.create(model=policy.model, messages=messages)
        text = reply.choices[0].message.content or ""
        guess = int(text) if text.isdecimal() else None
        if guess == number:
            return 1.0
        hint = "!" if guess is None else ">" if number > guess else "<"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return 0.0
