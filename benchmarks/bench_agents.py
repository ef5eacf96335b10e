"""The cost of the gateway for agents: calls a second through it, and through `/generate` directly.

    python benchmarks/bench_agents.py [--quick]

64 episodes of several turns at the same time, on an embedded engine with a model from scratch. "direct" keeps its own
token ids and asks the gserver; "gateway" speaks `/v1/chat/completions` over plain HTTP, as a client that costs nothing
would, to the gateway in a process of its own, as a rollout worker has it. Answers end where the model ends them, and
after 32 tokens, so tokens a second are compared; rounds alternate. Reported are the processor time of the gateway's
process for each call, and the tokens that it renders in a turn, which must not grow with the conversation, with the
length of the last turn's conversation, which a server without memory of it renders in each turn.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
from common import parser_of, report
from engine_contenders import Served

from streamrl.config import Config, GserverConfig, ModelConfig, RewardConfig, SamplingConfig, ScratchConfig
from streamrl.models import ensure_checkpoint
from streamrl.rollout.activity import Activity
from streamrl.rollout.agents.gateway import Gateway
from streamrl.rollout.agents.rendering import SampledTokens, TemplateRenderer
from streamrl.rollout.agents.workflow import Episode, EpisodeTable
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.generation import Generator, GroupRoute
from streamrl.rollout.workflows import Session
from streamrl.transport.generation import GenerateRequest, GenerationClient, SamplingParams
from streamrl.types import Prompt

EPISODES, TURNS, TOKENS = 64, 8, 32
QUESTION, FEEDBACK = "0123456789" * 3, "012345="
CONFIG = Config(
    model=ModelConfig(
        path="scratch",
        scratch=ScratchConfig(
            alphabet="0123456789= ",
            hidden_size=256,
            layers=4,
            heads=4,
            kv_heads=2,
            head_dim=64,
            max_position_embeddings=1024,
        ),
    ),
    gserver=GserverConfig(dtype="float32", max_running=EPISODES, max_context=1024),
)


def main() -> None:
    rounds = 2 if parser_of(__doc__, quick="fewer rounds").parse_args().quick else 5
    folder = ensure_checkpoint(CONFIG)
    served = Served("embedded", CONFIG, folder)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_serve_gateway, args=(served.url, folder, there))
    worker.start()
    rates: dict[str, list[float]] = {"direct": [], "gateway": []}
    tokens: dict[str, list[float]] = {"direct": [], "gateway": []}
    processor: list[float] = []
    first = conversations = later = whole = 0
    try:
        for number in range(rounds + 1):  # the first warms up
            direct = asyncio.run(_directly(served.url, folder))
            here.send("begin")
            through = asyncio.run(_through_gateway(here.recv()))
            here.send("end")
            first, conversations, later, whole, seconds = here.recv()
            if number:
                for name, found in (("direct", direct), ("gateway", through)):
                    rates[name].append(EPISODES * TURNS / found.seconds)
                    tokens[name].append(found.tokens / found.seconds)
                processor.append(1000 * seconds / (EPISODES * TURNS))
    finally:
        here.close()
        worker.join(30)
        served.close()
    row = {
        "direct_calls_per_second": median(rates["direct"]),
        "gateway_calls_per_second": median(rates["gateway"]),
        "direct_tokens_per_second": median(tokens["direct"]),
        "gateway_tokens_per_second": median(tokens["gateway"]),
        "ratio": median(g / d for g, d in zip(tokens["gateway"], tokens["direct"], strict=True)),
        "gateway_processor_ms_per_call": median(processor),
        "tokens_of_whole_conversation": whole,
        "tokens_rendered_first": first,
        "tokens_rendered_later": later,
        "conversations_rendered": conversations,
    }
    settings = {"episodes": EPISODES, "turns": TURNS, "tokens": TOKENS, "rounds": rounds}
    report("bench_agents", settings, [row])


# --- contenders ---


class Round(NamedTuple):
    """All episodes, played once."""

    seconds: float
    tokens: int
    """That were sampled."""


async def _directly(url: str, folder: Path) -> Round:
    """Play all episodes without a gateway."""
    chat = ChatTokenizer.load(folder)
    client = GenerationClient(timeout=600)
    feedback = chat.encode(FEEDBACK)
    tokens = 0

    async def episode(number: int) -> None:
        nonlocal tokens
        ids = chat.encode(QUESTION)
        for turn in range(TURNS):
            sampling = SamplingParams(max_new_tokens=TOKENS)
            request = GenerateRequest(
                input_ids=ids,
                sampling_params=sampling,
                rid=f"direct/{number}/{turn}/{time.time()}",
                return_logprob=True,
            )
            said = (await client.generate(url, request)).output_ids
            tokens += len(said)
            ids = [*ids, *said, *feedback]

    began = time.perf_counter()
    await asyncio.gather(*map(episode, range(EPISODES)))
    seconds = time.perf_counter() - began
    await client.close()
    return Round(seconds, tokens)


async def _through_gateway(access: list[tuple[str, str]]) -> Round:
    """Play all episodes; `access`: URL and key of each."""
    tokens = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def episode(url: str, key: str) -> None:
            nonlocal tokens
            messages = [{"role": "user", "content": QUESTION}]
            for _ in range(TURNS):
                body = {"model": "policy", "messages": messages, "max_tokens": TOKENS}
                async with client.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                    answer.raise_for_status()
                    reply = await answer.json()
                said = reply["choices"][0]["message"]["content"]
                tokens += reply["usage"]["completion_tokens"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": FEEDBACK}]

        began = time.perf_counter()
        await asyncio.gather(*(episode(url, key) for url, key in access))
        return Round(time.perf_counter() - began, tokens)


# --- the gateway, in a process of its own ---


class _Counting(TemplateRenderer):
    """Keeps how many tokens it makes."""

    def __init__(self, chat: ChatTokenizer) -> None:
        super().__init__(chat)
        self.whole: list[int] = []
        self.later: list[int] = []
        self.longest = 0
        """Tokens of the longest conversation that was continued."""

    def render(self, messages: Any, tools: Any) -> list[int]:
        ids = super().render(messages, tools)
        self.whole.append(len(ids))
        return ids

    def extend(self, sampled: SampledTokens, messages: Any) -> list[int] | None:
        ids = super().extend(sampled, messages)
        if ids is not None:
            self.later.append(len(ids))
            self.longest = max(self.longest, len(sampled.prompt_ids) + len(sampled.output_ids) + len(ids))
        return ids


def _serve_gateway(gserver: str, folder: Path, pipe: Connection) -> None:
    asyncio.run(_gateway(gserver, folder, pipe))


async def _gateway(gserver: str, folder: Path, pipe: Connection) -> None:
    chat = ChatTokenizer.load(folder)
    client = GenerationClient(timeout=600)
    sampling = SamplingConfig(max_new_tokens=TOKENS)
    generator = Generator(
        client,
        sampling=sampling,
        seed=0,
        patience=600,
        tokens_per_request=4096,
        decode=chat.decode,
        eos_token_ids=(),
        policy_version=int,
    )
    table = EpisodeTable()
    gateway = Gateway(table, model="policy")
    url = await gateway.start()
    while await _received(pipe):
        renderer = _Counting(chat)
        episodes = [
            Episode(_session(seq, chat, generator, gserver, sampling), renderer, max_calls=TURNS)
            for seq in range(EPISODES)
        ]
        for episode in episodes:
            table.add(episode)
        began = time.process_time()
        pipe.send([(f"{url}/episodes/{episode.name}/v1/chat/completions", episode.key) for episode in episodes])
        await _received(pipe)
        seconds = time.process_time() - began
        for episode in episodes:
            table.remove(episode)
            gateway.forget(episode.key)
        pipe.send((max(renderer.whole), len(renderer.whole), max(renderer.later), renderer.longest, seconds))
    await gateway.close()
    await client.close()


def _session(seq: int, chat: ChatTokenizer, generator: Generator, gserver: str, sampling: SamplingConfig) -> Session:
    async def no_other(failed: str) -> str:
        return failed

    messages = [{"role": "user", "content": QUESTION}]
    return Session(
        prompt=Prompt(seq, seq, 0, messages, chat.render(messages), None, {}),
        sibling=0,
        generator=generator,
        route=GroupRoute(gserver, find_another=no_other),
        rewards=None,
        reward=RewardConfig(),
        chat=chat,
        sampling=sampling,
        max_context=CONFIG.gserver.max_context,
        activity=Activity(idle="nothing"),
    )


async def _received(pipe: Connection) -> str:
    """The benchmark's next word; empty when it has ended."""
    try:
        return str(await asyncio.to_thread(pipe.recv))
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
