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
from typing import Any, BinaryIO

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
    setup = calls.get()
    if not isinstance(setup, Setup):
        _reply(replies_out, Failure("a call came before the setup"))
        return
    try:
        function = load_reward(setup)
    except StreamRLError as error:
        _reply(replies_out, Failure(str(error)))
        return
    except Exception as error:  # the user's module may raise anything: the parent reports it
        _reply(replies_out, Failure(traceback_tail(error)))
        return
    at_once = _is_coroutine_function(function)
    _reply(replies_out, Ready(at_once))
    if at_once:
        asyncio.run(_score_at_once(function, calls, replies_out, timeout=setup.timeout))
    else:
        _score_in_turn(function, calls, replies_out)


def _is_coroutine_function(function: RewardFunction) -> bool:
    """Whether calls return coroutines, as far as can be told without one; a method `__call__` counts as well."""
    inner = function.func if isinstance(function, functools.partial) else function
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _score_in_turn(function: RewardFunction, calls: queue.SimpleQueue[RewardCall], replies: BinaryIO) -> None:
    while True:
        call = _score_call(calls.get())
        began = time.monotonic()
        try:
            value = function(call.response, call.prompt)
            if inspect.iscoroutine(value):
                value = _loop().run(value)
        except Exception as error:  # the user's function may raise anything: the parent reports it
            _reply(replies, Failure(traceback_tail(error), call.number, time.monotonic() - began))
        else:
            _reply(replies, _checked(value, call, time.monotonic() - began))


async def _score_at_once(
    function: RewardFunction, calls: queue.SimpleQueue[RewardCall], replies: BinaryIO, *, timeout: float
) -> None:
    """Make each call in a task of its own, which is cancelled after `timeout` seconds."""

    async def score(call: ScoreCall) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout) as limit:
                value = await function(call.response, call.prompt)
        except (Exception, asyncio.CancelledError) as error:  # as above; the function may cancel itself, too
            seconds, late = time.monotonic() - began, limit.expired()
            _reply(replies, Failure(traceback_tail(error), call.number, seconds, timed_out=late))
        else:
            _reply(replies, _checked(value, call, time.monotonic() - began))

    async with asyncio.TaskGroup() as tasks:
        while True:
            tasks.create_task(score(_score_call(await asyncio.to_thread(calls.get))))


def _checked(value: Any, call: ScoreCall, seconds: float) -> RewardReply:
    """Return the reply to `call`, for which the function returned `value`."""
    try:
        number = float(value)
    except Exception:  # what is no number may raise anything: a tensor of torch with several raises a RuntimeError
        told = f"it returned {value!r:.200} ({type(value).__name__}); a reward is a number"
        return Failure(told, call.number, seconds)
    if not math.isfinite(number):
        return Failure(f"it returned {number}; a reward is a finite number", call.number, seconds)
    return Reward(call.number, number, seconds)


def _score_call(call: RewardCall) -> ScoreCall:
    assert isinstance(call, ScoreCall), "a second setup"
    return call


def _reply(replies: BinaryIO, reply: RewardReply) -> None:
    replies.write(frame(reply))
    replies.flush()


@functools.cache
def _loop() -> asyncio.Runner:
    """The event loop of all calls whose function returns a coroutine, where it may keep what belongs to one."""
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
