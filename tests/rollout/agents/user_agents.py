"""Agents as a user might write them, good and bad; `task["question"]` says which."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI


def is_first(mark: Path) -> bool:
    """Whether this is the first call with `mark`."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


async def fail(how: str) -> None:
    match how:
        case "raise":
            raise LookupError("no such tool")
        case "exit":
            os._exit(7)
        case "hang":
            await asyncio.sleep(600)


async def solve(task: dict[str, Any], policy: Any) -> Any:
    """Do what the task says, so that one function covers all cases."""
    async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:

        async def say(*messages: tuple[str, str], **more: Any) -> str:
            written: Any = [{"role": role, "content": content} for role, content in messages]
            answer = await client.chat.completions.create(model=policy.model, messages=written, **more)
            return str(answer.choices[0].message.content)

        match task["question"].split():
            case ["nothing"]:
                return 1.0
            case ["once"]:
                await say(("user", "1+1?"))
                return 0.5
            case ["once", failure, path]:
                await say(("user", "1+1?"))
                if is_first(Path(path)):
                    await fail(failure)
                return 0.5
            case ["none"]:
                await say(("user", "1+1?"))
            case ["twice"]:
                first = await say(("user", "1+1?"))
                second = await say(("user", "1+1?"), ("assistant", first), ("user", "Sure?"))
                return float(len(first) == len(second))
            case ["rewrite"]:
                await say(("user", "1+1?"))
                await say(("user", "1+1?"), ("assistant", "Three"), ("user", "Sure?"))
                return 1.0
            case ["branches"]:
                first = await say(("user", "1+1?"))
                for question in ("Sure?", "Why?"):
                    await say(("user", "1+1?"), ("assistant", first), ("user", question))
                await say(("user", "Something else"))
                return 1.0
            case ["million"]:
                await say(("user", "1+1?"), max_tokens=1_000_000)
                return 1.0
            case ["garbage" | "big" as what, "regardless"]:
                refused = await misbehave(what, policy)
                await say(("user", "1+1?"))
                return refused
            case ["rewards", *names]:
                ids = []
                asked: list[Any] = []
                for question in ("1+1?", "Sure?"):
                    asked.append({"role": "user", "content": question})
                    answer = await client.chat.completions.create(model=policy.model, messages=asked)
                    asked.append({"role": "assistant", "content": answer.choices[0].message.content})
                    ids.append(answer.id)
                named = [ids[int(name)] if name.isdecimal() else name for name in names]
                rewards = {name: 0.25 * place + 0.5 for place, name in enumerate(named)}
                return {"score": 1.0, "rewards": rewards, "metrics": {"tools": len(names)}}
            case ["notify_rewards", name]:
                await say(("user", "1+1?"), n=2)
                reward = {int(name) if name.isdecimal() else name: 0.5}
                await asyncio.to_thread(policy.notify_score, 1.0, rewards=reward, metrics={"seen": 2})
                return {"metrics": {"own": 3}}
            case ["raise"]:
                await say(("user", "1+1?"))
                raise LookupError("no such tool")
            case ["broken_name"]:
                raise FileNotFoundError(os.fsdecode(b"caf\xe9"))
            case ["mapping"]:
                await say(("user", "1+1?"))
                return {"scores": 1.0}
            case ["text"]:
                return "good"
            case ["hang"]:
                await say(("user", "1+1?"))
                await asyncio.sleep(600)
            case ["spin"]:
                while True:
                    pass
            case ["exit"]:
                os._exit(7)
            case ["memory"]:
                return float(len(bytearray(1 << 40)))
            case ["flood"]:
                for _ in range(10_000):
                    await say(("user", "1+1?"))
            case ["long"]:
                await say(("user", "x" * 1000))
            case ["variable", name]:
                await say(("user", "1+1?"))
                return float(name in os.environ)
            case ["spawn", path]:
                spawn(path)
        return None


async def misbehave(what: str, policy: Any) -> float:
    """Send what nobody should; return how many requests were refused."""
    body = {"garbage": b'{"messages": [', "big": b" " * 50_000_000}[what]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {policy.api_key}"}) as session:
        try:
            async with session.post(policy.base_url + "/chat/completions", data=body) as answer:
                return float(answer.status in (400, 413))
        except aiohttp.ClientError:  # the server need not read what it refuses
            return 1.0


def spawn(path: str) -> None:
    """Start a process, and hang."""
    Path(path).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    while True:
        pass
