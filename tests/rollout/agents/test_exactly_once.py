"""Whatever an agent asks over HTTP, and however it asks: each token that it was answered is trained on exactly once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.rollout.agents.gateway import Gateway
from streamrl.rollout.agents.rendering import TemplateRenderer
from streamrl.rollout.agents.workflow import Episode, EpisodeScore, EpisodeTable, Score
from streamrl.rollout.groups import check_trajectory
from streamrl.transport.generation import GenerateRequest
from tests.rollout.engine import answer
from tests.rollout.sessions import CHAT, session

Token = tuple[int, float, int]
"""Its id, log-probability and version."""


class Step(msgspec.Struct, frozen=True):
    """Something that an agent does."""

    kind: str
    conversation: int
    """Which of those so far, counted round, it is about."""
    cuts: tuple[int, ...]
    """After so many tokens each an update of the weights cuts the answer."""
    n: int = 1
    stream: bool = False


KINDS = ("new", "continue", "continue", "again", "edit", "retry", "twice by key", "hang up", "hang up and come back")
STEPS = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from(KINDS),
        conversation=st.integers(0, 9),
        cuts=st.lists(st.integers(0, 2), max_size=2).map(tuple),
        n=st.sampled_from([1, 1, 2]),
        stream=st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


class Policy:
    """Says "1.", "2.", ...; no two of its tokens have the same log-probability."""

    def __init__(self) -> None:
        self.said: dict[str, list[Token]] = {}
        """Of each answer, by its text: what was sampled."""
        self.cuts: tuple[int, ...] = ()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked = asyncio.Event()
        self._left: dict[str, tuple[str, list[int], list[int]]] = {}
        """Of each response that is being made, by its name: its text, the tokens and the cuts that are left."""
        self._tokens = 0
        self._version = 0

    async def __call__(self, request: GenerateRequest, number: int) -> Any:
        self.asked.set()
        await self.may_answer.wait()
        assert request.rid is not None
        name = request.rid.partition("/")[0]
        if name not in self._left:
            text = f"{len(self._left) + 1}."
            self._left[name] = text, CHAT.encode(f"{text}<|im_end|>"), [*self.cuts]
            self.said[text] = []
        text, left, cuts = self._left[name]
        count = cuts.pop(0) if cuts else len(left)
        part, left[:] = left[:count], left[count:]
        logprobs = [-(self._tokens + place) / 4096 for place in range(1, len(part) + 1)]
        self._tokens += len(part)
        self.said[text] += zip(part, logprobs, [self._version] * len(part), strict=True)
        made = answer(
            part,
            finish="abort" if left else "stop",
            version=str(self._version),
            logprobs=[(logprob, token, None) for logprob, token in zip(logprobs, part, strict=True)],
        )
        self._version += bool(left)
        alone = (
            request.sampling_params.stream_interval == 1
        )  # a stream; siblings that travel together are told at the end
        if not alone:
            return made
        unfinished = msgspec.structs.replace(made.meta_info, finish_reason=None)
        return [msgspec.structs.replace(made, meta_info=unfinished), made]


class Agent:
    """Does what the steps say, and knows what it was answered."""

    def __init__(self, policy: Policy, gateway: Gateway, episode: Episode, client: aiohttp.ClientSession) -> None:
        self.had: list[str] = []
        self._policy = policy
        self._gateway = gateway
        self.episode = episode
        self._client = client
        self._conversations: list[list[dict[str, str]]] = []
        self._bodies: list[dict[str, Any]] = []

    def trained(self) -> Counter[Token]:
        """What is under the loss in all trajectories of the episode."""
        found: Counter[Token] = Counter()
        for one in self.episode.trajectories(EpisodeScore(Score(1.0), []), discount=1.0):
            check_trajectory(one)
            mask = one.loss_mask
            values = (one.input_ids, one.behavior_logprobs, one.policy_versions)
            found.update(zip(*(value[mask].tolist() for value in values), strict=True))
        return found

    async def take(self, step: Step, number: int) -> None:
        self._policy.cuts = step.cuts
        body = {"messages": self._messages(step, number), "n": step.n, "stream": step.stream}
        match step.kind:
            case "retry" if self._bodies:
                body = self._bodies[-1]
                before = len(self.had)
                again = await self._ask(body, {"x-stainless-retry-count": "1"})
                assert again == self.had[before - len(again) :], "a retry is answered with what it asks for again"
                return
            case "twice by key":
                answers = [await self._ask(body, {"Idempotency-Key": str(number)}) for _ in range(2)]
                assert answers[0] == answers[1]
                self._heard(body, answers[0])
            case "hang up" | "hang up and come back":
                await self._hang_up(body)
                if step.kind == "hang up and come back":
                    self._heard(body, await self._ask(body, {}))
            case _:
                self._heard(body, await self._ask(body, {}))

    def _messages(self, step: Step, number: int) -> list[dict[str, str]]:
        question = {"role": "user", "content": f"question {number}?"}
        if step.kind == "new" or not self._conversations:
            return [question]
        earlier = self._conversations[step.conversation % len(self._conversations)]
        match step.kind:
            case "again":
                return earlier[:-1]
            case "edit":
                return [{"role": "user", "content": f"what was said before {number}"}, *earlier[1:], question]
            case _:
                return [*earlier, question]

    def _heard(self, body: dict[str, Any], texts: list[str]) -> None:
        self._bodies.append(body)
        self.had += texts
        self._conversations += [[*body["messages"], {"role": "assistant", "content": text}] for text in texts]

    async def _ask(self, body: dict[str, Any], headers: dict[str, str]) -> list[str]:
        async with self._client.post("v1/chat/completions", json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            if not body["stream"]:
                return [choice["message"]["content"] for choice in (await reply.json())["choices"]]
            texts = [""] * body["n"]
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    texts[choice["index"]] += choice["delta"].get("content", "")
            return texts

    async def _hang_up(self, body: dict[str, Any]) -> None:
        """Ask, and go away before there is an answer; return when it is made all the same."""
        self._policy.may_answer.clear()
        self._policy.asked.clear()
        asking = asyncio.create_task(self._ask(body, {}))
        await self._policy.asked.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        generation = self._gateway._asked[self.episode.key][self.episode.name].kept[-1]
        await until(lambda: generation.waiting == 0)
        self._policy.may_answer.set()
        await until(generation.task.done)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():  # noqa: ASYNC110 (the gateway has no event of this)
            await asyncio.sleep(0.001)


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_each_token_that_an_agent_was_answered_is_under_the_loss_once_as_it_was_sampled(steps: list[Step]) -> None:
    asyncio.run(play(steps))


async def play(steps: list[Step]) -> None:
    policy = Policy()
    async with asking(policy) as agent:
        for number, step in enumerate(steps):
            await agent.take(step, number)
    assert agent.trained() == Counter(token for text in agent.had for token in policy.said[text])


async def test_what_is_still_being_generated_when_the_episode_ends_is_given_up_and_not_trained_on() -> None:
    policy = Policy()
    async with asking(policy) as agent:
        await agent.take(Step("new", 0, ()), 0)
        policy.may_answer.clear()
        policy.asked.clear()
        late = asyncio.create_task(agent.take(Step("continue", 0, ()), 1))
        await policy.asked.wait()
        agent.episode.end()
        with pytest.raises(AssertionError, match="this episode has ended"):
            await asyncio.wait_for(late, 30)
        policy.may_answer.set()
    assert agent.trained() == Counter(policy.said["1."])
    assert list(policy.said) == ["1."]


@asynccontextmanager
async def asking(policy: Policy) -> AsyncIterator[Agent]:
    """An agent of an episode whose gserver says what `policy` does."""
    table = EpisodeTable()
    gateway = Gateway(table, model="policy")
    async with session(script=policy, max_context=4000) as (made, _):
        episode = Episode(made, TemplateRenderer(CHAT), max_calls=100)
        table.add(episode)
        root = f"{await gateway.start()}/episodes/{episode.name}/"
        headers = {"Authorization": f"Bearer {episode.key}"}
        async with aiohttp.ClientSession(root, headers=headers) as client:
            yield Agent(policy, gateway, episode, client)
        await gateway.close()
