# mypy: disable-error-code="untyped-decorator"
"""A taskset of verifiers: additions, asked in two turns, by a program that runs in the environment's own process."""

from __future__ import annotations

import openai
import verifiers.v1 as vf


class Addition(vf.TaskData):
    answer: int


class AdditionTask(vf.Task[Addition]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class AdditionConfig(vf.TasksetConfig):
    n: int = 4
    first: int = 1


class AdditionTaskset(vf.Taskset[AdditionTask, AdditionConfig]):
    def load(self) -> list[AdditionTask]:
        print("a taskset may print")  # noqa: T201
        numbers = range(self.config.first, self.config.first + self.config.n)
        return [AdditionTask(Addition(prompt=f"{i}+{i}?", answer=2 * i), self.config.task) for i in numbers]


class AskTwice(vf.Harness[vf.HarnessConfig]):
    """Asks, says that it is not sure, and asks something else in a conversation of its own."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):  # type: ignore[no-untyped-def]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:

            async def say(*messages: tuple[str, str]) -> str:
                written = [{"role": role, "content": content} for role, content in messages]
                answer = await client.chat.completions.create(model=ctx.model, messages=written)  # type: ignore
                return answer.choices[0].message.content or ""

            if data.answer > 100:
                raise ValueError("such numbers are not added here")
            await say(("user", "Hi."))
            first = await say(("user", data.prompt))
            await say(("user", data.prompt), ("assistant", first), ("user", "Sure?"))
        return vf.ProgramResult(0, "", "")


__all__ = ["AdditionTaskset", "AskTwice"]
