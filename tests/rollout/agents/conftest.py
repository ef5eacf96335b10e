"""A gateway with one scripted episode, whose key is `secret` and whose id is `e1`."""

import asyncio

import pytest

from streamrl.rollout.agents.gateway import Gateway
from streamrl.rollout.agents.messages import Completion, Message, RequestRefused, ToolCall


class Episode:
    """Answers "answer 1", "answer 2", …; calls the tool `add` in the first answer where there are tools."""

    def __init__(self):
        self.requests = []
        self.seen = 0
        self.names = []
        self.found = asyncio.Semaphore(0)
        self.ended = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.started = asyncio.Semaphore(0)
        self.finished = asyncio.Event()
        self.arguments = '{"a": 1}'
        self.reasoning = ""
        self.padding = ""
        self.finish_reason = "stop"
        self.matched_stop = ""

    def count(self, request):
        pass

    async def complete(self, request, *, call, on_piece=None):
        self.requests.append(request)
        text = f"answer {len(self.requests)}" + self.padding
        self.started.release()
        await self.may_answer.wait()
        told = any(message.role == "tool" for message in request.messages)
        calls = (ToolCall("call_1", "add", self.arguments),) if request.tools and not told else ()
        said = Message("assistant", text, self.reasoning, calls)
        reason = "tool_calls" if calls else self.finish_reason
        done = Completion(said, reason, (1, 2), (3, 4), (-0.5, -0.25), ("a", "b"), self.matched_stop)
        self.finished.set()
        return [done] * request.n

    def delivered(self, completions):
        self.seen += len(completions)


class Served:
    def __init__(self, url, episode, gateway):
        self.root = url
        self.url = url + "/episodes/e1"
        self.episode = episode
        self.gateway = gateway


@pytest.fixture
async def serve():
    gateways = []

    async def start(**options):
        episode = Episode()

        class Only:
            def ended_with(self, key, score):
                return False

            def find(self, key, name):
                if key != "secret":
                    return None
                if episode.ended:
                    raise RequestRefused("the episode has ended", status=410)
                episode.names.append(name)
                episode.found.release()
                return episode if name in ("", "e1", "session") else None

        gateway = Gateway(Only(), model="policy", **options)
        gateways.append(gateway)
        return Served(await gateway.start(), episode, gateway)

    yield start
    for gateway in gateways:
        await gateway.close()


@pytest.fixture
async def served(serve):
    return await serve()
