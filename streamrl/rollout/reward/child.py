"""A reward process: `python -m streamrl.rollout.reward.child`, started by `RewardPool`.

Reads frames from standard input and replies on standard output. The reward function gets neither: its output goes to
standard error and its input is empty, so that it cannot break the protocol. It runs in the main thread, where signals
work. Invariant: the process ends with its parent, also while the function hangs, and whatever the function has started
ends with the process.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import queue
import threading
import time
from typing import BinaryIO

import msgspec

from streamrl.children import (
    LENGTH_BYTES,
    die_with_parent,
    end_the_rest_after_death,
    take_standard_streams,
    traceback_tail,
)
from streamrl.errors import StreamRLError
from streamrl.rollout.reward.functions import RewardFunction, load_reward
from streamrl.rollout.reward.protocol import (
    Failure,
    Ready,
    Reward,
    RewardCall,
    RewardReply,
    ScoreCall,
    Setup,
    frame,
)


def main() -> None:
    """Serve until standard input ends."""
    die_with_parent()
    end_the_rest_after_death()
    calls_in, replies_out = take_standard_streams()
    calls: queue.SimpleQueue[RewardCall] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(calls_in, calls), daemon=True).start()
    function: RewardFunction | None = None
    while True:
        call = calls.get()
        if isinstance(call, Setup):
            function, reply = _load(call)
        elif function is None:
            reply = Failure("a call came before the setup")
        else:
            reply = _score(function, call)
        replies_out.write(frame(reply))
        replies_out.flush()


def _load(setup: Setup) -> tuple[RewardFunction | None, RewardReply]:
    try:
        return load_reward(setup), Ready()
    except StreamRLError as error:
        return None, Failure(str(error))
    except Exception as error:  # the user's module may raise anything: the parent reports it
        return None, Failure(traceback_tail(error))


def _score(function: RewardFunction, call: ScoreCall) -> RewardReply:
    began = time.monotonic()
    try:
        value = function(call.response, call.prompt)
        if inspect.iscoroutine(value):
            value = _loop().run(value)
    except Exception as error:  # the user's function may raise anything: the parent reports it
        return Failure(traceback_tail(error), time.monotonic() - began)
    seconds = time.monotonic() - began
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Failure(f"it returned {value!r:.200} ({type(value).__name__}); a reward is a number", seconds)
    if not math.isfinite(number):
        return Failure(f"it returned {number}; a reward is a finite number", seconds)
    return Reward(number, seconds)


@functools.cache
def _loop() -> asyncio.Runner:
    """The event loop of all calls of a coroutine function, where it may keep what belongs to one, as a client does."""
    return asyncio.Runner()


def _read(stream: BinaryIO, calls: queue.SimpleQueue[RewardCall]) -> None:
    decoder = msgspec.msgpack.Decoder(RewardCall)
    while True:
        header = stream.read(LENGTH_BYTES)
        body = stream.read(int.from_bytes(header, "little"))
        if not body:
            os._exit(0)  # the parent is gone, and the main thread may hang in the user's function
        calls.put(decoder.decode(body))


if __name__ == "__main__":
    main()
