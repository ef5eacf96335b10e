"""A workflow's session whose gserver is scripted, and what came of it as text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from streamrl.config import RewardConfig, SamplingConfig
from streamrl.rollout.activity import Activity
from streamrl.rollout.generation import Generator, GroupRoute
from streamrl.rollout.workflows import Session
from streamrl.transport.generation import GenerationClient
from streamrl.types import Prompt, Trajectory
from tests.rollout.characters import make_chat
from tests.rollout.engine import Engine, Script, answer, serving

CHAT = make_chat()
QUESTION = [{"role": "user", "content": "1+1?"}]
PROMPT = Prompt(seq=0, index=0, epoch=0, messages=QUESTION, input_ids=CHAT.render(QUESTION), answer="2", metadata={})


async def no_other(failed: str) -> str:
    raise AssertionError(f"{failed} failed")


@asynccontextmanager
async def session(
    *texts: str,
    rewards: Any = None,
    script: Script | None = None,
    failures_score_zero: bool = False,
    reward: RewardConfig | None = None,
    max_context: int = 400,
    activity: Activity | None = None,
    tokens: int = 50,
) -> AsyncIterator[tuple[Session, Engine]]:
    """A session whose engine says `texts` one after another, at versions 0, 1, …, or follows `script`."""
    replies = [
        answer(CHAT.encode(text), version=str(i), finish="stop" if text.endswith(">") else "length")
        for i, text in enumerate(texts)
    ]
    client = GenerationClient(timeout=10)
    async with serving(script or (lambda request, number: replies[number])) as engine:
        sampling = SamplingConfig(max_new_tokens=tokens)
        yield (
            Session(
                prompt=PROMPT,
                sibling=0,
                generator=Generator(
                    client,
                    sampling=sampling,
                    seed=0,
                    patience=10,
                    tokens_per_request=4096,
                    decode=CHAT.decode,
                    eos_token_ids=(),
                    policy_version=lambda: 0,
                ),
                route=GroupRoute(engine.url, find_another=no_other),
                rewards=rewards,
                reward=reward or RewardConfig(),
                chat=CHAT,
                sampling=sampling,
                max_context=max_context,
                activity=activity or Activity(idle="nothing"),
                failures_score_zero=failures_score_zero,
            ),
            engine,
        )
        await client.close()


def parts(trajectory: Trajectory) -> list[tuple[bool, str]]:
    """The trajectory as text, cut where the loss mask changes; special tokens as {}."""
    found: list[tuple[bool, str]] = []
    for token, masked in zip(trajectory.input_ids.tolist(), trajectory.loss_mask.tolist(), strict=True):
        text = {1: "{", 2: "}"}.get(token) or CHAT.decode([token])
        if found and found[-1][0] == masked:
            found[-1] = (masked, found[-1][1] + text)
        else:
            found.append((masked, text))
    return found
