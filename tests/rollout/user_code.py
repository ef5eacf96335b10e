"""Data, rewards and workflows as a user might write them, good and bad."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from streamrl.rollout.reward.functions import Response
from streamrl.rollout.workflows import Session, TrajectoryBuilder
from streamrl.types import Prompt, Trajectory


def row(index: int, seed: int, *, word: str = "item") -> dict[str, Any]:
    return {"prompt": f"{word} {index} of {seed}", "answer": str(index), "level": index % 3}


def no_row(index: int, seed: int) -> Any:
    return "not a row"


class TwoNumbers:
    """As a tensor of torch is no float."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    def __repr__(self) -> str:
        return "tensor([0., 1.])"


def reward(response: Response, prompt: Prompt, *, scale: float = 1.0) -> Any:
    """Does what the response says, so that one function covers all cases."""
    match response.text.split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["abort"]:
            os.abort()
        case ["sysexit"]:
            sys.exit(3)
        case ["raise"]:
            raise LookupError("no such thing")
        case ["nan"]:
            return float("nan")
        case ["text"]:
            return "good"
        case ["huge"]:
            return 10**400
        case ["two"]:
            return TwoNumbers()
        case ["pid"]:
            return os.getpid()
        case ["variable", name]:
            return float(name in os.environ)
    return scale


_inside = _most_inside = 0


async def judge(response: Response, prompt: Prompt) -> float:
    """As `reward`, for a coroutine function."""
    global _inside, _most_inside
    _inside += 1
    _most_inside = max(_inside, _most_inside)
    try:
        match response.text.split():
            case ["meet", count]:  # returns only once `count` calls are here at the same time
                while _most_inside < int(count):  # noqa: ASYNC110 - nothing else tells it
                    await asyncio.sleep(0.01)
            case ["sleep", seconds]:
                await asyncio.sleep(float(seconds))
            case ["block"]:
                time.sleep(600)  # noqa: ASYNC251 - what it should not do
            case ["pid"]:
                return os.getpid()
            case ["raise"]:
                raise LookupError("no such thing")
            case ["nan"]:
                return float("nan")
            case ["huge"]:
                return 10**400
            case ["most"]:
                return _most_inside
        return 1.0
    finally:
        _inside -= 1


class Judge:
    def __init__(self) -> None:
        self.__name__ = "judge"

    async def __call__(self, response: Response, prompt: Prompt) -> float:
        return await judge(response, prompt)


judge_object = Judge()


not_a_function = 5


def length_reward(response: Response, prompt: Prompt) -> float:
    return float(response.output_tokens)


def failing_reward(response: Response, prompt: Prompt) -> float:
    raise LookupError("no such thing")


class Hinted:
    """Puts a hint before the prompt."""

    def __init__(self, *, hint: str) -> None:
        self.hint = hint

    async def run(self, prompt: Prompt, session: Session) -> Trajectory:
        builder = TrajectoryBuilder()
        builder.append_prompt(session.chat.encode(self.hint))
        builder.append_prompt(prompt.input_ids)
        generation = await session.generate(builder.input_ids, max_new_tokens=3)
        builder.append_sampled(generation)
        return builder.build(reward=0.5, finish_reason="hinted")


class NotAWorkflow:
    pass
