"""What a rollout worker and its reward processes say to each other over a pipe.

A frame is the length of its body (4 bytes, little endian) and the body in msgpack. The worker
sends one `Setup`, then any number of `Call`s; the process answers each in turn.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.types import Prompt

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 28


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
    """Which function to serve."""

    function: str
    """As `rollout.reward.function`."""
    args: dict[str, Any]
    origin: DataOrigin


class Call(msgspec.Struct, frozen=True, tag="call"):
    response: Response
    prompt: Prompt


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The function is imported."""


class Score(msgspec.Struct, frozen=True, tag="score"):
    value: float


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The function could not be loaded, raised, or answered no finite number."""

    message: str


Request = Setup | Call
Answer = Ready | Score | Failure


def frame(message: Request | Answer) -> bytes:
    """`message` as it goes through the pipe; raises `TypeError` for values that msgpack has no type for."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
