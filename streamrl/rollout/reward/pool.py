"""`RewardPool`: a few reward processes, and a limit on how long each call may take.

Owns the processes. Invariants: a call ends within the time limit of its start in a process, whatever the function
does; a process that hung or died is replaced before it is used again; after `close` no process is left, nor anything
that the function has started in one. The function's environment has none of the user's secrets unless it is to.

Each process is sent as many calls ahead as it will have scored within milliseconds, going by the longest of the last
ones: one message for each call costs more than most reward functions do. A function that takes longer is sent one call
after another, so that none waits behind another while a process is idle. Calls of a coroutine function, which mostly
waits for others, run at the same time in each process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec

from streamrl import essential
from streamrl.children import FramedChild, describe_exit, module_command, without_secrets
from streamrl.config import Config
from streamrl.errors import RewardError, RewardTimeout, WireError
from streamrl.rollout.reward.protocol import (
    DataOrigin,
    Failure,
    Ready,
    Response,
    Reward,
    RewardReply,
    ScoreCall,
    Setup,
    frame,
)
from streamrl.transport import secret
from streamrl.types import Prompt

_EXIT_SECONDS = 2.0
"""A process whose pipe closed gets this long to leave its exit status."""

AHEAD_SECONDS = 0.005
"""Longest time that a call waits in a process for those sent with it, if they take as long as the last ones did."""
MOST_AHEAD = 64
"""Calls that are sent together."""
HANG_SECONDS = 5.0
"""A process in which calls run at the same time cancels each of them when its time is over; one in which a call goes on
for this much longer is replaced."""
FORGOTTEN = 0.01
"""Share by which the longest call counts less after each that was shorter."""

_decoder: msgspec.msgpack.Decoder[RewardReply] = msgspec.msgpack.Decoder(RewardReply)


@dataclass(eq=False)
class _Scoring:
    """A response to be scored, and where to tell what came of it."""

    number: int
    frame: bytes
    what: str
    """What to call it in an error."""
    outcome: asyncio.Future[float]
    began: float = 0.0
    """When its process got to it, as far as is known, on the event loop's clock."""
    under_way: bool = False
    """Whether its process has certainly got to it: one that was sent later has been made."""
    alone: bool = False
    """Whether nothing is made beside it: it was one of several that a process was at work on when it died, or hung."""


class RewardPool:
    """Calls the configured reward function in `processes` processes."""

    def __init__(
        self,
        setup: Setup,
        *,
        processes: int,
        at_once: int = 1,
        start_timeout: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`at_once`: calls of a coroutine function that run in a process at the same time. `start_timeout` limits the
        import of the function, in seconds. `environment` is the processes'; None: as this one's."""
        self._children = [_Child(setup, start_timeout=start_timeout, environment=environment) for _ in range(processes)]
        self._waiting: deque[_Scoring] = deque()
        self._came = asyncio.Event()
        self._serving: list[asyncio.Task[None]] = []
        self._longest = AHEAD_SECONDS
        """The longest of the last calls, in seconds, or a little more."""
        self._numbers = itertools.count()
        self._at_once = at_once
        self._function = setup.function
        self._timeout = setup.timeout
        self._limit = f"rollout.reward.timeout_seconds = {setup.timeout:g}"
        self.busy_seconds = 0.0
        """Time that the function took, over all calls that have ended."""

    @classmethod
    def of(cls, config: Config) -> RewardPool:
        """Return the pool that `config.rollout.reward` describes, not yet started."""
        reward = config.rollout.reward
        data = config.data
        return cls(
            Setup(
                function=reward.function,
                args=reward.args,
                timeout=reward.timeout_seconds,
                origin=DataOrigin(
                    source=data.source, path=data.path, args=data.args, size=data.size, seed=config.run.seed
                ),
            ),
            processes=reward.processes,
            at_once=reward.concurrent_calls,
            environment=without_secrets(
                os.environ,
                passed=reward.environment,
                withheld=(secret.VARIABLE, config.gserver.api_key_env, config.rollout.agent.api_key_env),
            ),
        )

    @property
    def calls_at_once(self) -> int:
        """How many calls each process makes at the same time: more than one only of a coroutine function, once it is
        loaded."""
        return self._at_once if any(child.at_once for child in self._children) else 1

    async def start(self) -> None:
        """Start all processes at once; raises `RewardError` when the function cannot be loaded."""
        for child in self._children:
            child.launch()
        try:
            await asyncio.gather(*(child.ready() for child in self._children))
        except BaseException:
            await self.close()
            raise
        self._serving = [
            essential.begin(self._serve(child), name=f"reward process {number}")
            for number, child in enumerate(self._children)
        ]

    async def close(self) -> None:
        """End every process and every call."""
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for scoring in self._waiting:
            scoring.outcome.cancel()
        self._waiting.clear()
        await asyncio.gather(*(child.stop() for child in self._children))

    async def score(self, response: Response, prompt: Prompt) -> float:
        """Return what the function says of `response`; waits for an idle process if there is none.

        Raises `RewardTimeout` when it takes too long, and `RewardError` when it raises, crashes or returns something
        else than a finite number.
        """
        what, number = f"reward function {self._function}, seq {prompt.seq}", next(self._numbers)
        try:
            call = frame(ScoreCall(number, response, prompt))
        except (TypeError, OverflowError) as error:
            raise RewardError(f"{what}: the prompt's row cannot be sent to it: {error}") from error
        scoring = _Scoring(number, call, what, asyncio.get_running_loop().create_future())
        self._waiting.append(scoring)
        self._came.set()
        return await scoring.outcome

    async def _serve(self, child: _Child) -> None:
        """Have `child` score whatever waits, for ever."""
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            sent = self._take(self._at_once if child.at_once else max(1, int(AHEAD_SECONDS / self._longest)))
            try:
                if sent:
                    await self._score(child, sent)
            except Exception as error:  # whatever it is, it is of the first of them, and whoever asked for it is told
                outcome = sent.popleft().outcome
                if not outcome.done():
                    outcome.set_exception(error)
            finally:
                self._waiting.extendleft(reversed(sent))  # what it has not begun

    def _take(self, most: int) -> deque[_Scoring]:
        """Take those that have waited longest, without those that nobody waits for any more."""
        taken: deque[_Scoring] = deque()
        while self._waiting and len(taken) < most:
            if taken and self._waiting[0].alone:
                break
            scoring = self._waiting.popleft()
            if scoring.outcome.done():
                continue
            taken.append(scoring)
            if scoring.alone:
                break
        return taken

    async def _score(self, child: _Child, sent: deque[_Scoring]) -> None:
        """Have `child` score all of `sent`, each of which is taken out when it has ended.

        Raises what goes wrong with the first that is left; `child` is fit for the next call then, or about to be. If it
        dies of one of several at the same time, or one blocks it, these are left to be made one by one, which tells
        whose fault it was.
        """
        await child.ready()
        try:
            child.send(sent)
            if child.at_once:
                await self._receive_while_more_come(child, sent)
            else:
                await self._receive(child, sent)
        except TimeoutError as error:
            self._took(self._timeout)
            several = _to_be_made_alone(child, sent)
            await child.replace()
            if several:
                return
            raise RewardTimeout(f"{sent[0].what}: no answer within {self._limit}; its process was replaced") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            several = _to_be_made_alone(child, sent)
            status = await child.replace(grace=_EXIT_SECONDS)
            if several:
                return
            raise RewardError(f"{sent[0].what}: its process died ({describe_exit(status)}) and was replaced") from error
        except (WireError, msgspec.DecodeError) as error:
            await child.replace()
            raise RewardError(f"{sent[0].what}: its process broke the protocol and was replaced: {error}") from error

    async def _receive_while_more_come(self, child: _Child, sent: deque[_Scoring]) -> None:
        """Receive the replies to all of `sent`, to which others are added meanwhile, as many as there is room for."""
        receiving = asyncio.create_task(self._receive(child, sent))
        try:
            while not receiving.done():
                self._came.clear()
                room = 0 if sent and sent[0].alone else self._at_once - len(sent)
                if room and self._waiting and not self._waiting[0].alone and (more := self._take(room)):
                    sent.extend(more)
                    child.send(more)
                coming = asyncio.create_task(self._came.wait())
                await asyncio.wait((receiving, coming), return_when=asyncio.FIRST_COMPLETED)
                coming.cancel()
            await receiving
        finally:
            receiving.cancel()

    async def _receive(self, child: _Child, sent: deque[_Scoring]) -> None:
        """Receive replies until each of `sent` has one; raises `TimeoutError` when the time of the first is over.

        Where calls run at the same time their process cancels them in time, unless it hangs, or a call does not let
        itself be cancelled.
        """
        within = self._timeout + (HANG_SECONDS if child.at_once else 0.0)
        while sent:
            async with asyncio.timeout_at(sent[0].began + within):
                reply = await child.receive()
            if isinstance(reply, Ready):
                raise WireError("it replied out of turn")
            scoring = next((one for one in sent if one.number == reply.number), None)
            if scoring is None:
                raise WireError(f"it replied to call {reply.number}, which it does not have")
            self._note_progress(sent, scoring, reply)
            sent.remove(scoring)
            self._ended(scoring, reply)
            if child.at_once:
                self._came.set()  # there is room for another

    def _note_progress(self, sent: deque[_Scoring], ended: _Scoring, reply: Reward | Failure) -> None:
        """Note when the process got to those of `sent` of which the end of one tells it.

        It begins them in the order in which they were sent. So it has begun those before `ended`, no later than that;
        and where there is none, it may have come to the next one only now: coroutines that await nothing are made one
        after another.
        """
        now = asyncio.get_running_loop().time()
        before = list(itertools.takewhile(lambda one: one is not ended, sent))
        for scoring in before:
            if not scoring.under_way:
                scoring.began, scoring.under_way = max(scoring.began, now - reply.seconds), True
        if not before and len(sent) > 1 and not sent[1].under_way:
            sent[1].began = now

    def _ended(self, scoring: _Scoring, reply: Reward | Failure) -> None:
        """Tell who asked, unless nobody waits any more."""
        self._took(reply.seconds)
        if scoring.outcome.done():
            return
        match reply:
            case Reward(value=value):
                scoring.outcome.set_result(value)
            case Failure(timed_out=True):
                scoring.outcome.set_exception(
                    RewardTimeout(f"{scoring.what}: no answer within {self._limit}; the call was cancelled")
                )
            case Failure(message=message):
                scoring.outcome.set_exception(RewardError(f"{scoring.what}: {message}"))

    def _took(self, seconds: float) -> None:
        self.busy_seconds += seconds
        self._longest = max(seconds, (1 - FORGOTTEN) * self._longest, AHEAD_SECONDS / MOST_AHEAD)


def _to_be_made_alone(child: _Child, sent: deque[_Scoring]) -> bool:
    """Whether `child`, which is lost, was at work on several of `sent`; these are to be made one by one then."""
    several = child.at_once and len(sent) > 1
    for scoring in sent if several else ():
        scoring.alone = True
    return several


class _Child:
    """One reward process and its successors."""

    def __init__(self, setup: Setup, *, start_timeout: float, environment: Mapping[str, str] | None) -> None:
        self._setup = setup
        self._environment = environment
        self._start_timeout = start_timeout
        self._process: FramedChild | None = None
        self.at_once = False
        """Whether the function is a coroutine function, whose calls it makes at the same time."""
        self._launching: asyncio.Task[None] | None = None

    def launch(self) -> None:
        """Begin to start a process; `ready` waits for it."""
        self._launching = asyncio.create_task(self._launch(), name="start of a reward process")

    async def ready(self) -> None:
        """Wait until the process has loaded the function; raises `RewardError` when it cannot."""
        if self._launching is None or (self._launching.done() and self._failed_to_launch()):
            self.launch()
        await asyncio.shield(cast("asyncio.Task[None]", self._launching))

    def send(self, scorings: Iterable[_Scoring]) -> None:
        """Send calls; raises `ConnectionError` when the process is gone."""
        now = asyncio.get_running_loop().time()
        for scoring in scorings:
            scoring.began, scoring.under_way = now, False
        self._running().send(b"".join(scoring.frame for scoring in scorings))

    async def receive(self) -> RewardReply:
        """Return the next reply; raises `IncompleteReadError` when the process ends."""
        return _decoder.decode(await self._running().receive())

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
                self._running().send(frame(self._setup))
                reply = await self.receive()
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
        self.at_once = isinstance(reply, Ready) and reply.at_once

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
