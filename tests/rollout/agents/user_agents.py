"""Agents as a user might write them, good and bad; `task["question"]` says which."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from openai import AsyncOpenAI

FLOOD, CONNECTIONS = 10_000, 8
ASKED = [{"role": "user", "content": "1+1?"}]


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
            case ["stream"]:
                first = await streamed(client, policy, ("user", "1+1?"))
                second = await streamed(client, policy, ("user", "1+1?"), ("assistant", first), ("user", "Sure?"))
                return float((first, second) == ("Two", "Yes, two"))
            case ["stop"]:
                return float(await say(("user", "1+1?"), stop=[";"]) == "So 2")
            case ["million"]:
                await say(("user", "1+1?"), max_tokens=1_000_000)
                return 1.0
            case ["flood", "regardless"]:
                return await flood(policy)
            case ["garbage" | "big" as what, "regardless"]:
                refused = await misbehave(what, policy)
                await say(("user", "1+1?"))
                return refused
            case ["several"]:
                await say(("user", "1+1?"), n=3)
                return 1.0
            case ["notify", *scores]:
                await say(("user", "1+1?"))
                for score in scores:
                    await asyncio.to_thread(policy.notify_score, float(score))
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
            case ["sleep", seconds, *before_the_end]:
                try:
                    await asyncio.sleep(float(seconds))
                finally:
                    await asyncio.sleep(float("".join(before_the_end) or 0))
                return 1.0
            case ["spin"]:
                while True:
                    pass
            case ["exit", *after_asking]:
                if after_asking:
                    await say(("user", "1+1?"))
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


async def streamed(client: AsyncOpenAI, policy: Any, *messages: tuple[str, str]) -> str:
    """What the policy says, piece by piece; more than one."""
    written: Any = [{"role": role, "content": content} for role, content in messages]
    stream = await client.chat.completions.create(model=policy.model, messages=written, stream=True)
    pieces = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices[0].delta.content]
    return "".join(pieces)


async def misbehave(what: str, policy: Any) -> float:
    """Send what nobody should; return how many requests were refused."""
    body = {"garbage": b'{"messages": [', "big": b" " * 50_000_000}[what]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {policy.api_key}"}) as session:
        try:
            async with session.post(policy.base_url + "/chat/completions", data=body) as answer:
                return float(answer.status in (400, 413))
        except aiohttp.ClientError:  # the server need not read what it refuses
            return 1.0


async def flood(policy: Any) -> float:
    """Ask as often as `FLOOD` over several connections, as fast as they are answered; return how often in vain."""
    url = urlsplit(policy.base_url)
    body = json.dumps({"messages": ASKED})
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {policy.api_key}"
    request = f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    async def ask(times: int) -> int:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        refused = 0
        for _ in range(times):
            writer.write(request)
            said = await reader.readuntil(b"\r\n\r\n")
            refused += said.startswith(b"HTTP/1.1 400")
            await reader.readexactly(int(said.lower().partition(b"content-length:")[2].split()[0]))
        writer.close()
        return refused

    return sum(await asyncio.gather(*(ask(FLOOD // CONNECTIONS) for _ in range(CONNECTIONS))))


def spawn(path: str) -> None:
    """Start a process, and hang."""
    Path(path).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    while True:
        pass
