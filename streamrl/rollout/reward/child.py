"""A reward process: `python -m streamrl.rollout.reward.child`, started by `RewardPool`.

Reads frames from standard input and replies on standard output. The reward function gets neither: its output goes to
standard error and its input is empty, so that it cannot break the protocol. It runs in the main thread, where signals
work. Invariant: the process ends with its parent, also while the function hangs, and whatever the function has started
ends with the process.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import queue
import select
import signal
import sys
import threading
import traceback
from typing import BinaryIO

import msgspec

from streamrl.errors import StreamRLError
from streamrl.rollout.reward.functions import RewardFunction, load_reward
from streamrl.rollout.reward.protocol import (
    LENGTH_BYTES,
    Failure,
    Ready,
    Reward,
    RewardCall,
    RewardReply,
    ScoreCall,
    Setup,
    frame,
)

_PR_SET_PDEATHSIG = 1
_TRACEBACK_LINES = 12


def main() -> None:
    """Serve until standard input ends."""
    _die_with_parent()
    _end_the_rest_after_death()
    calls_in, replies_out = _take_standard_streams()
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
        return None, Failure(_tail(error))


def _score(function: RewardFunction, call: ScoreCall) -> RewardReply:
    try:
        value = function(call.response, call.prompt)
    except Exception as error:  # the user's function may raise anything: the parent reports it
        return Failure(_tail(error))
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Failure(f"it returned {value!r:.200} ({type(value).__name__}); a reward is a number")
    if not math.isfinite(number):
        return Failure(f"it returned {number}; a reward is a finite number")
    return Reward(number)


def _tail(error: BaseException) -> str:
    """Return the last lines of the traceback."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-_TRACEBACK_LINES:])


def _read(stream: BinaryIO, calls: queue.SimpleQueue[RewardCall]) -> None:
    decoder = msgspec.msgpack.Decoder(RewardCall)
    while True:
        header = stream.read(LENGTH_BYTES)
        body = stream.read(int.from_bytes(header, "little"))
        if not body:
            os._exit(0)  # the parent is gone, and the main thread may hang in the user's function
        calls.put(decoder.decode(body))


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return where calls come in and replies go out; the user's function gets other streams."""
    calls_in = os.fdopen(os.dup(0), "rb")
    replies_out = os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return calls_in, replies_out


def _die_with_parent() -> None:
    """On Linux, ask the kernel: a function that holds the interpreter lock keeps `_read` from running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_the_rest_after_death() -> None:
    """On Linux, leave a process behind that waits for the end of this one and then kills what the function has started.

    Nobody else could, where the rollout worker was killed. It is no child of this process, because the function may
    wait for all children of its own.
    """
    leader = os.getpid()
    if not hasattr(os, "pidfd_open") or os.getpgrp() != leader:
        return
    if first := os.fork():
        os.waitpid(first, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            watched = os.pidfd_open(leader)
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):  # nobody is to wait for the end of what it does not write
                os.dup2(nothing, descriptor)
            select.select([watched], [], [])
            os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
