"""What a rollout worker and its reward processes say to each other over a pipe.

In frames (`streamrl/children.py`) with a body in msgpack. The worker sends one `Setup`, then any number of
`ScoreCall`s, several at once if it likes; the process replies to each as soon as it has scored it, in turn unless the
function is a coroutine function.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.children import framed
from streamrl.types import Prompt


class Response(msgspec.Struct, frozen=True):
    """What a reward function gets to see of a response."""

    text: str
    """The sampled tokens as text, without the stop string that ended them and without special tokens: the end token and
    all others that the model's tokenizer.json marks as special, such as `<pad>`."""
    finish_reason: str
    """`stop`: the model ended it; `length`: it was cut."""
    output_tokens: int
    """Tokens that the model sampled for it, special ones included."""
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
    timeout: float
    """Longest time of one call, in seconds. The process limits those of a coroutine function itself."""
    origin: DataOrigin


class ScoreCall(msgspec.Struct, frozen=True, tag="call"):
    """Score one response; the reply is `Reward` or `Failure`."""

    number: int
    """Names the call in its reply."""
    response: Response
    prompt: Prompt


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The function is imported."""

    at_once: bool
    """Whether it is a coroutine function, whose calls run at the same time."""


class Reward(msgspec.Struct, frozen=True, tag="score"):
    """What the function returned; finite."""

    number: int
    """That of the call."""
    value: float
    seconds: float
    """How long the function took."""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The function could not be loaded, raised, or returned something else than a finite number."""

    message: str
    number: int = -1
    """That of the call; -1: the function could not be loaded."""
    seconds: float = 0.0
    """How long the function took, if it was called."""
    timed_out: bool = False
    """The call took too long and was cancelled."""


RewardCall = Setup | ScoreCall
RewardReply = Ready | Reward | Failure


def frame(message: RewardCall | RewardReply) -> bytes:
    """Return `message` as it goes through the pipe; raises `TypeError` for values that msgpack has no type for."""
    return framed(msgspec.msgpack.encode(message))
