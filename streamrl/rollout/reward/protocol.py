"""What a rollout worker and its reward processes say to each other over a pipe.

In frames (`streamrl/children.py`) with a body in msgpack. The worker sends one `Setup`, then any number of
`ScoreCall`s, several at once if it likes; the process replies to each in turn, as soon as it has scored it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.children import framed
from streamrl.types import Prompt


class Response(msgspec.Struct, frozen=True):
    """What a reward function gets to see of a response."""

    text: str
    """The answer as text, without special tokens and without the stop string that ended it."""
    finish_reason: str
    """`stop`: the model ended it; `length`: it was cut."""
    output_tokens: int
    """Tokens that the model sampled for it."""
    turn: int = 1
    """Which of the policy's turns this is, from 1."""


class DataOrigin(msgspec.Struct, frozen=True):
    """Enough of the data configuration to make a reasoning-gym entry again."""

    source: str
    path: str
    args: dict[str, Any]
    size: int
    seed: int


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Which function to serve; the reply is `Ready` or `Failure`."""

    function: str
    """As `rollout.reward.function`."""
    args: dict[str, Any]
    """As `rollout.reward.args`."""
    origin: DataOrigin


class ScoreCall(msgspec.Struct, frozen=True, tag="call"):
    """Score one response; the reply is `Reward` or `Failure`."""

    response: Response
    prompt: Prompt


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The function is imported."""


class Reward(msgspec.Struct, frozen=True, tag="score"):
    """What the function returned; finite."""

    value: float
    seconds: float
    """How long the function took."""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The function could not be loaded, raised, or returned something else than a finite number."""

    message: str
    seconds: float = 0.0
    """How long the function took, if it was called."""


RewardCall = Setup | ScoreCall
RewardReply = Ready | Reward | Failure


def frame(message: RewardCall | RewardReply) -> bytes:
    """Return `message` as it goes through the pipe; raises `TypeError` for values that msgpack has no type for."""
    return framed(msgspec.msgpack.encode(message))
