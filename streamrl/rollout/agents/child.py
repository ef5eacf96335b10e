"""A process in which episodes of an agent's function run: `python -m streamrl.rollout.agents.child`.

Started by `FunctionAgents`. A coroutine function shares the event loop with the other episodes of its process; a plain
one gets a thread. Invariant: the process ends with its parent, and what the function has started ends with it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import resource
import selectors
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, BinaryIO

import msgspec

from streamrl.children import (
    die_with_parent,
    end_the_rest_after_death,
    read_frame,
    reading,
    take_standard_streams,
    traceback_tail,
)
from streamrl.errors import StreamRLError
from streamrl.importing import load_object
from streamrl.rollout.agents.pipe import (
    HANG_SECONDS,
    MOST_AT_ONCE,
    Begin,
    Ended,
    Failed,
    FromAgents,
    Ready,
    Score,
    Setup,
    ToAgents,
    frame,
)
from streamrl.rollout.agents.policy import Policy

MOST_ABANDONED = 64
"""Plain functions that may run on though their episodes were cancelled: each has a thread. With one more the process
ends, to be replaced."""
MOST_THREADS = MOST_AT_ONCE + MOST_ABANDONED
"""So that each episode finds a free one."""


def main() -> None:
    """Serve until standard input ends."""
    die_with_parent()
    end_the_rest_after_death()
    calls_in, replies_out = take_standard_streams()
    running: dict[int, asyncio.Task[None]] = {}
    hangs = _Hangs(running)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(hangs)) as runner:
        runner.run(_serve(os.dup(calls_in.fileno()), replies_out, running, hangs))


class _Hangs(selectors.DefaultSelector):
    """With this the event loop waits for what comes next; between two waits the process reacts to nothing.

    Knows the episodes in whose time that took long. One that was alone then has nobody else to blame.
    """

    def __init__(self, running: Mapping[int, object]) -> None:
        """`running`: by number, the episodes that run; one that has just ended is there until the loop has waited."""
        super().__init__()
        self.held_up: set[int] = set()
        self.until = -math.inf
        """When the process last began to react again."""
        self._running = running
        self._working_since = math.inf

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        now = time.monotonic()
        if self._running and now - self._working_since >= HANG_SECONDS:
            self.until = now
            if len(self._running) > 1:
                self.held_up.update(self._running)
        try:
            return super().select(timeout)
        finally:
            self._working_since = time.monotonic()


async def _serve(calls_in: int, replies_out: BinaryIO, running: dict[int, asyncio.Task[None]], hangs: _Hangs) -> None:
    decoder = msgspec.msgpack.Decoder(ToAgents)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MOST_THREADS))

    def reply(message: FromAgents) -> None:
        replies_out.write(frame(message))
        replies_out.flush()

    async with reading(calls_in) as reader:
        function: Callable[..., Any] | None = None
        while True:
            try:
                call = decoder.decode(await read_frame(reader))
            except asyncio.IncompleteReadError:
                os._exit(0)  # the parent is gone, and threads may hang in the user's function
            if isinstance(call, Setup):
                function = _load(call, reply)
            elif isinstance(call, Begin):
                if function is None:
                    reply(Failed(call.episode, "it came before the setup"))
                    continue
                if call.sent < hangs.until:  # its time has begun before it was read
                    hangs.held_up.add(call.episode)
                task = asyncio.create_task(_run(function, call, reply, hangs), name=f"episode {call.episode}")
                running[call.episode] = task
                task.add_done_callback(partial(_forget, running, hangs, call.episode))
            elif (found := running.get(call.episode)) is not None:
                found.cancel()


def _forget(running: dict[int, asyncio.Task[None]], hangs: _Hangs, episode: int, _: asyncio.Task[None]) -> None:
    running.pop(episode, None)
    hangs.held_up.discard(episode)


def _load(setup: Setup, reply: Callable[[FromAgents], None]) -> Callable[..., Any] | None:
    if setup.memory_mb:
        most = setup.memory_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        function: Callable[..., Any] = load_object(setup.function, key="rollout.agent.function")
        inspect.signature(function).bind(None, None, **setup.args)
    except StreamRLError as error:
        reply(Failed(-1, str(error)))
    except TypeError as error:
        names = "".join(f", *, {name}" if not place else f", {name}" for place, name in enumerate(setup.args))
        reply(Failed(-1, f"rollout.agent.function = {setup.function!r} must take (task, policy{names}): {error}"))
    except Exception as error:  # the user's module may raise anything: the parent reports it
        reply(Failed(-1, f"rollout.agent.function = {setup.function!r} cannot be imported:\n{traceback_tail(error)}"))
    else:
        reply(Ready(threads=not inspect.iscoroutinefunction(function)))
        return partial(function, **setup.args)
    return None


async def _run(function: Callable[..., Any], begin: Begin, reply: Callable[[FromAgents], None], hangs: _Hangs) -> None:
    policy = Policy(begin.access)
    try:
        if inspect.iscoroutinefunction(getattr(function, "func", function)):
            value = await function(begin.task, policy)
        else:
            value = await _in_a_thread(function, begin.task, policy)
            if inspect.isawaitable(value):  # a decorated coroutine function, or an object with such a `__call__`
                value = await value
        reply(Ended(begin.episode, as_score(value)))
    except asyncio.CancelledError:
        reply(Failed(begin.episode, "it was cancelled", held_up=begin.episode in hangs.held_up))
    except BaseException as error:  # the user's function may raise anything: the parent reports it
        reply(Failed(begin.episode, traceback_tail(error)))


_abandoned: set[asyncio.Task[Any]] = set()


async def _in_a_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function` returns. Where this is cancelled it runs on, since a thread cannot be ended."""
    running = asyncio.create_task(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            _abandoned.add(running)
            running.add_done_callback(_has_ended)
        if len(_abandoned) > MOST_ABANDONED:
            sys.stderr.write(f"{len(_abandoned)} episodes go on though they were given up: their process ends\n")
            sys.stderr.flush()
            os._exit(1)
        raise


def _has_ended(running: asyncio.Task[Any]) -> None:
    _abandoned.discard(running)
    if not running.cancelled():
        running.exception()  # seen


def as_score(value: object) -> Score:
    """Return what an agent returned as its score; raises `ValueError` when it is none."""
    if not isinstance(value, Mapping):
        return Score(None if value is None else _number(value, "a score"))
    unknown = value.keys() - set(Score.__struct_fields__)
    if unknown:
        known, found = ", ".join(Score.__struct_fields__), ", ".join(sorted(map(repr, unknown)))
        raise ValueError(f"it returned a mapping with {found}; known: {known}")
    score = value.get("score")
    numbers: dict[str, dict[str, float]] = {}
    for name, what in (("rewards", "a reward"), ("metrics", "a metric")):
        given = value.get(name) or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"it returned {name} = {given!r:.200}; it is a mapping to numbers")
        numbers[name] = {str(key): _number(number, f"{what} ({key})") for key, number in given.items()}
    return Score(None if score is None else _number(score, "a score"), **numbers)


def _number(value: object, what: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"it returned {value!r:.200} ({type(value).__name__}); {what} is a number") from None
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}; {what} is a finite number")
    return number


if __name__ == "__main__":
    main()
