"""`RewardPool`: a few reward processes, each with one call at a time and a limit on how long it takes.

Owns the processes. Invariants: a call ends within the time limit of its start in a process, whatever the function
does; a process that hung or died is replaced before it is used again; after `close` no process is left, nor anything
that the function has started in one. The function's environment has none of the user's secrets unless it is to.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import cast

import msgspec

from streamrl.children import FramedChild, describe_exit, module_command, without_secrets
from streamrl.config import Config
from streamrl.errors import RewardError, RewardTimeout, WireError
from streamrl.rollout.reward.protocol import (
    DataOrigin,
    Failure,
    Ready,
    Response,
    Reward,
    RewardCall,
    RewardReply,
    ScoreCall,
    Setup,
    frame,
)
from streamrl.transport import secret
from streamrl.types import Prompt

_EXIT_SECONDS = 2.0
"""A process whose pipe closed gets this long to leave its exit status."""

_decoder: msgspec.msgpack.Decoder[RewardReply] = msgspec.msgpack.Decoder(RewardReply)


class RewardPool:
    """Calls the configured reward function in `processes` processes."""

    def __init__(
        self,
        setup: Setup,
        *,
        processes: int,
        timeout: float,
        start_timeout: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`timeout` limits one call, `start_timeout` the import of the function; both in seconds. `environment` is the
        processes'; None: as this one's."""
        self._children = [_Child(setup, start_timeout=start_timeout, environment=environment) for _ in range(processes)]
        self._idle: asyncio.Queue[_Child] = asyncio.Queue()
        self._calls: set[asyncio.Task[float]] = set()
        self._function = setup.function
        self._timeout = timeout
        self.busy_seconds = 0.0
        """Sum over all processes and all calls that have ended; waiting for a process is not included."""

    @classmethod
    def of(cls, config: Config) -> RewardPool:
        """Return the pool that `config.rollout.reward` describes, not yet started."""
        reward = config.rollout.reward
        data = config.data
        return cls(
            Setup(
                function=reward.function,
                args=reward.args,
                origin=DataOrigin(
                    source=data.source, path=data.path, args=data.args, size=data.size, seed=config.run.seed
                ),
            ),
            processes=reward.processes,
            timeout=reward.timeout_seconds,
            environment=without_secrets(
                os.environ,
                passed=reward.environment,
                withheld=(secret.VARIABLE, config.gserver.api_key_env),
            ),
        )

    async def start(self) -> None:
        """Start all processes at once; raises `RewardError` when the function cannot be loaded."""
        for child in self._children:
            child.launch()
        try:
            await asyncio.gather(*(child.ready() for child in self._children))
        except BaseException:
            await self.close()
            raise
        for child in self._children:
            self._idle.put_nowait(child)

    async def close(self) -> None:
        """End every process and every call."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in self._children))

    async def score(self, response: Response, prompt: Prompt) -> float:
        """Return what the function says of `response`; waits for an idle process if there is none.

        Raises `RewardTimeout` when it takes too long, and `RewardError` when it raises, crashes or returns something
        else than a finite number.
        """
        child = await self._idle.get()
        call = asyncio.create_task(self._call(child, ScoreCall(response, prompt)), name=f"reward of seq {prompt.seq}")
        self._calls.add(call)
        call.add_done_callback(self._forget)
        # Shielded: a process that has begun a call must end it before it can take another.
        return await asyncio.shield(call)

    async def _call(self, child: _Child, call: ScoreCall) -> float:
        began = time.monotonic()
        try:
            return await self._score(child, call)
        finally:
            self.busy_seconds += time.monotonic() - began
            self._idle.put_nowait(child)

    async def _score(self, child: _Child, call: ScoreCall) -> float:
        """Have `child` score; whatever goes wrong, it is fit for the next call, or about to be."""
        what = f"reward function {self._function}, seq {call.prompt.seq}"
        await child.ready()
        try:
            async with asyncio.timeout(self._timeout):
                reply = await child.exchange(call)
        except TimeoutError as error:
            await child.replace()
            raise RewardTimeout(
                f"{what}: no answer within rollout.reward.timeout_seconds = {self._timeout:g}; its process was replaced"
            ) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            status = await child.replace(grace=_EXIT_SECONDS)
            raise RewardError(f"{what}: its process died ({describe_exit(status)}) and was replaced") from error
        except (TypeError, OverflowError) as error:
            raise RewardError(f"{what}: the prompt's row cannot be sent to it: {error}") from error
        except (WireError, msgspec.DecodeError) as error:
            await child.replace()
            raise RewardError(f"{what}: its process broke the protocol and was replaced: {error}") from error
        match reply:
            case Reward(value):
                return value
            case Failure(message):
                raise RewardError(f"{what}: {message}")
            case Ready():
                raise RewardError(f"{what}: its process replied out of turn")

    def _forget(self, call: asyncio.Task[float]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # seen, also when nobody waits for the call any more


class _Child:
    """One reward process and its successors."""

    def __init__(self, setup: Setup, *, start_timeout: float, environment: Mapping[str, str] | None) -> None:
        self._setup = setup
        self._environment = environment
        self._start_timeout = start_timeout
        self._process: FramedChild | None = None
        self._launching: asyncio.Task[None] | None = None

    def launch(self) -> None:
        """Begin to start a process; `ready` waits for it."""
        self._launching = asyncio.create_task(self._launch(), name="start of a reward process")

    async def ready(self) -> None:
        """Wait until the process has loaded the function; raises `RewardError` when it cannot."""
        if self._launching is None or (self._launching.done() and self._failed_to_launch()):
            self.launch()
        await asyncio.shield(cast("asyncio.Task[None]", self._launching))

    async def exchange(self, call: RewardCall) -> RewardReply:
        """Send `call` and return the reply; raises `IncompleteReadError` when the process ends."""
        process = self._running()
        process.send(frame(call))
        await process.drain()
        return _decoder.decode(await process.receive())

    async def replace(self, *, grace: float = 0.0) -> int | None:
        """Kill the process and begin to start another; return the exit status of the first."""
        status = await self._kill(grace=grace)
        self.launch()
        return status

    async def stop(self) -> None:
        """Kill the process for good."""
        if self._launching is not None:
            self._launching.cancel()
            await asyncio.gather(self._launching, return_exceptions=True)
        await self._kill()

    def _failed_to_launch(self) -> bool:
        launching = self._launching
        return launching is not None and (launching.cancelled() or launching.exception() is not None)

    async def _launch(self) -> None:
        function = self._setup.function
        self._process = await FramedChild.start(
            module_command("streamrl.rollout.reward.child"), environment=self._environment
        )
        try:
            async with asyncio.timeout(self._start_timeout):
                reply = await self.exchange(self._setup)
        except TimeoutError as error:
            await self._kill()
            raise RewardTimeout(
                f"reward function {function} was not imported within {self._start_timeout:.0f} s"
            ) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            status = await self._kill(grace=_EXIT_SECONDS)
            raise RewardError(
                f"reward function {function}: its process died while it was imported ({describe_exit(status)}); "
                "its own words are above"
            ) from error
        if isinstance(reply, Failure):
            await self._kill()
            raise RewardError(f"reward function {function} cannot be loaded: {reply.message}")

    async def _kill(self, *, grace: float = 0.0) -> int | None:
        """Kill the process and all that it started, and return its exit status, if there was a process.

        One that is ending by itself gets `grace` seconds to leave its own status.
        May be cancelled and called again: the process is forgotten only when it is gone.
        """
        process = self._process
        if process is None:
            return None
        status = await process.end(grace=grace)
        self._process = None
        return status

    def _running(self) -> FramedChild:
        if self._process is None:
            raise ConnectionError("the process is gone")
        return self._process
