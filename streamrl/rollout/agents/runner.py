"""Where agents run: `FunctionAgents` in a few processes with many episodes each, `CommandAgents` in one for each,
`RemoteAgents` wherever somebody leases an episode.

Owns the processes. Invariants: an episode that is cancelled, or hangs, keeps nothing running; a process that died is
replaced before the next episode; after `close` none is left, nor anything that it has started. Agents see none of the
user's secrets unless they are to.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import math
import os
import re
import time
from asyncio.subprocess import DEVNULL
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from streamrl.children import (
    FramedChild,
    describe_exit,
    kill_group,
    module_command,
    module_environment,
    reading,
    without_secrets,
)
from streamrl.config import Config
from streamrl.errors import AgentError, UnknownFault, WireError
from streamrl.rollout.agents.pipe import (
    HANG_SECONDS,
    MOST_AT_ONCE,
    Begin,
    Cancel,
    Ended,
    Endpoint,
    Failed,
    FromAgents,
    Lease,
    Ready,
    Score,
    Setup,
    frame,
)
from streamrl.transport import secret

log = logging.getLogger(__name__)

START_SECONDS = 120.0
UNTAKEN_SECONDS = 60.0
"""An episode that no agent elsewhere has asked for by then is worth a warning."""
REST_SECONDS = 1.0
"""How long what a program printed is read on when it has ended: a daemon of its own may hold its output open."""
TAIL_LINES = 12
_NAME = re.compile(r"\{(\w+)\}")


class Agents(Protocol):
    """Run episodes."""

    async def start(self) -> None:
        """Raises `AgentError` when there is nothing that could run."""

    async def close(self) -> None:
        """End every episode and every process."""

    async def run(self, task: dict[str, Any], access: Endpoint, *, begun: Callable[[], None]) -> Score:
        """Run one episode, and return what the agent says of it; raises `AgentError` when it fails.

        `begun` is called when the agent begins, from when on its time counts. Where this is cancelled, and one of the
        episodes of its process had that react to nothing for a while, be it now or before, the `CancelledError` has an
        `UnknownFault` as its cause.
        """


PLAYS_VERIFIERS = "streamrl.rollout.agents.verifiers:play"


def environment_of(config: Config) -> dict[str, str]:
    """Return the environment variables of agents."""
    agent = config.rollout.agent
    withheld = (secret.VARIABLE, config.gserver.api_key_env)
    variables = without_secrets(os.environ, passed=agent.environment, withheld=withheld)
    return module_environment(variables, python=agent.python)


def agents_of(config: Config, *, tokenizer: Path | None = None, renderer: str = "default") -> Agents:
    """Return the agents that `config.rollout.agent` describes, not yet started.

    `tokenizer`: a folder with the policy's, for agents that make tokens by themselves; `renderer`: what makes them.
    """
    agent = config.rollout.agent
    environment = environment_of(config)
    if agent.remote:
        return RemoteAgents()
    if agent.command:
        return CommandAgents(agent.command, memory_mb=agent.memory_mb, environment=environment)
    setup = Setup(agent.function, agent.memory_mb, agent.args)
    if agent.verifiers:
        args = {"tokenizer": str(tokenizer or ""), "renderer": {"name": renderer}, "environment": agent.args}
        setup = Setup(PLAYS_VERIFIERS, agent.memory_mb, args)
    return FunctionAgents(setup, processes=agent.processes, environment=environment, python=agent.python)


# --- functions ---


class FunctionAgents:
    """Runs a function of the user's in `processes` processes."""

    def __init__(self, setup: Setup, *, processes: int, environment: Mapping[str, str], python: str = "") -> None:
        """`python`: the interpreter; empty: this one."""
        self._processes = [_AgentProcess(setup, environment, python) for _ in range(processes)]

    async def start(self) -> None:
        try:
            await asyncio.gather(*(process.ready() for process in self._processes))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def run(self, task: dict[str, Any], access: Endpoint, *, begun: Callable[[], None]) -> Score:
        process = min(self._processes, key=lambda process: process.running)
        return await process.run(task, access, begun)


class _AgentProcess:
    """One process and its successors."""

    def __init__(self, setup: Setup, environment: Mapping[str, str], python: str) -> None:
        self._setup = setup
        self._python = python
        self._environment = environment
        self._episodes = itertools.count()
        self._waiting: dict[int, asyncio.Future[Score]] = {}
        self._process: FramedChild | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._plain = False
        """Whether the function is a plain one, of which each episode takes a thread."""
        self._threads = asyncio.Semaphore(MOST_AT_ONCE)
        self.running = 0
        """Episodes under way, and those that wait for a thread."""

    async def ready(self) -> None:
        """Wait until there is a process that has imported the function; raises `AgentError`."""
        async with self._starting:
            if self._reading is None or self._reading.done():
                await self._start()

    async def run(self, task: dict[str, Any], access: Endpoint, begun: Callable[[], None]) -> Score:
        self.running += 1
        try:
            await self.ready()
            place: AbstractAsyncContextManager[None] = self._threads if self._plain else contextlib.nullcontext()
            async with place:
                await self.ready()  # it may have ended while a thread was waited for
                return await self._play(task, access, begun)
        finally:
            self.running -= 1

    async def _play(self, task: dict[str, Any], access: Endpoint, begun: Callable[[], None]) -> Score:
        """Run an episode in the process that is there."""
        episode = next(self._episodes)
        try:
            self._send(Begin(episode, task, access, sent=time.monotonic()))
        except TypeError as error:
            raise AgentError(f"the task cannot be sent to the agent: {error}") from error
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting[episode] = future
        future.add_done_callback(partial(self._ended, episode))
        begun()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError as cancelled:
            if not future.done():
                await asyncio.shield(self._cancel(episode, future))
            if future.done() and isinstance(fault := future.exception(), UnknownFault):
                raise cancelled from fault
            raise

    def _ended(self, episode: int, future: asyncio.Future[Score]) -> None:
        """Forget an episode: not before it has ended, though it may be given up several times meanwhile."""
        del self._waiting[episode]
        if not future.cancelled():
            future.exception()  # seen

    async def stop(self) -> None:
        """End the process for good."""
        if self._process is not None:
            await self._process.end()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _cancel(self, episode: int, future: asyncio.Future[Score]) -> None:
        """Have the episode ended; end the whole process where it does not react."""
        with contextlib.suppress(ConnectionError):
            self._send(Cancel(episode))
        await asyncio.wait((future,), timeout=HANG_SECONDS)
        if not future.done() and self._process is not None and self._reading is not None:
            kill_group(self._process.pid)
            await asyncio.wait((self._reading,))

    async def _start(self) -> None:
        what = f"rollout.agent.function {self._setup.function}"
        try:
            self._process = await FramedChild.start(
                module_command("streamrl.rollout.agents.child", python=self._python), environment=self._environment
            )
        except OSError as error:
            raise AgentError(f"rollout.agent.python = {self._python!r} cannot be started: {error.strerror}") from error
        self._send(self._setup)
        try:
            async with asyncio.timeout(START_SECONDS):
                reply = _decoder.decode(await self._process.receive())
        except (TimeoutError, asyncio.IncompleteReadError, WireError, msgspec.DecodeError) as error:
            ended = describe_exit(await self._process.end())
            needs = f" ({self._python} needs the package msgspec)" if self._python else ""
            raise AgentError(
                f"{what} could not be imported: its process {ended}{needs}; its own words are above"
            ) from error
        except asyncio.CancelledError:
            await self.stop()  # whoever needs a process next starts one
            raise
        if isinstance(reply, Failed):
            await self.stop()
            raise AgentError(reply.message)
        self._plain = isinstance(reply, Ready) and reply.threads
        self._reading = asyncio.create_task(self._read(self._process), name="replies of an agent's process")

    async def _read(self, process: FramedChild) -> None:
        """Hand replies over until the process ends; whoever waits then hears of it."""
        why = "broke the protocol"
        try:
            while True:
                self._take(_decoder.decode(await process.receive()))
        except (asyncio.IncompleteReadError, ConnectionError):
            why = describe_exit(await process.wait())
        except (WireError, msgspec.DecodeError):
            pass
        finally:
            kill_group(process.pid)
            ended = [future for future in self._waiting.values() if not future.done()]
            error = AgentError(f"the agent's process {why}")
            if len(ended) > 1:
                error = UnknownFault(f"{error}, in which {len(ended)} episodes ran")
            for future in ended:
                future.set_exception(error)  # one for all: it is one failure, however many groups it costs

    def _take(self, reply: FromAgents) -> None:
        if isinstance(reply, Ready):
            return
        future = self._waiting.get(reply.episode)
        if future is None or future.done():
            return
        if isinstance(reply, Ended):
            future.set_result(reply.score)
        elif reply.held_up:
            future.set_exception(
                UnknownFault("one of several episodes had the agent's process hang, and this one is late")
            )
        else:
            future.set_exception(AgentError(f"the agent failed: {reply.message}"))

    def _send(self, message: Setup | Begin | Cancel) -> None:
        if self._process is None:
            raise ConnectionError("the agent's process is gone")
        self._process.send(frame(message))


_decoder: msgspec.msgpack.Decoder[FromAgents] = msgspec.msgpack.Decoder(FromAgents)


# --- programs ---


class CommandAgents:
    """Starts a program for each episode."""

    def __init__(self, command: Sequence[str], *, memory_mb: int, environment: Mapping[str, str]) -> None:
        self._command = command
        self._memory_mb = memory_mb
        self._environment = environment
        self._leaders: set[int] = set()

    async def start(self) -> None:
        """Nothing to start before there are episodes."""

    async def close(self) -> None:
        for leader in self._leaders:
            kill_group(leader)

    async def run(self, task: dict[str, Any], access: Endpoint, *, begun: Callable[[], None]) -> Score:
        lines: deque[str] = deque(maxlen=TAIL_LINES)
        printed, end = os.pipe()  # one of asyncio's would keep the process's end back for as long as anybody holds it
        async with reading(printed) as reader:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(*module_command("streamrl.children"), str(self._memory_mb)),
                    *(_filled(word, task) for word in self._command),
                    stdin=DEVNULL,
                    stdout=end,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**self._environment, **_variables(task, access)},
                    start_new_session=True,
                )
            except OSError as error:
                size = len(_variables(task, access)["STREAMRL_TASK"])
                why = f" (STREAMRL_TASK has {size} bytes)" if error.errno == errno.E2BIG else ""
                raise AgentError(f"the agent {self._command[0]} cannot be started: {error.strerror}{why}") from error
            finally:
                os.close(end)
            self._leaders.add(process.pid)
            begun()
            last = asyncio.create_task(_read_last(reader, lines), name=f"what {self._command[0]} prints")
            try:
                status = await process.wait()
                kill_group(process.pid)
                await asyncio.wait((last,), timeout=REST_SECONDS)
            finally:
                last.cancel()
                await asyncio.gather(last, return_exceptions=True)
                kill_group(process.pid)
                self._leaders.discard(process.pid)
                with contextlib.suppress(ProcessLookupError):
                    await asyncio.shield(process.wait())
        if status:
            said = "\n".join(lines)
            raise AgentError(f"the agent {self._command[0]} {describe_exit(status)}; it said last:\n{said}")
        return _score_of(lines[-1] if lines else "")


def _score_of(line: str) -> Score:
    """Return what the last line of a program says: a number, or a JSON object like `Score`; raises `AgentError`."""
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(line)):
            return Score(number)
        raise AgentError(f"the last line that the agent printed is no score: {line:.200}")
    if not line.lstrip().startswith("{"):
        return Score()
    try:
        return msgspec.json.decode(line, type=Score)
    except msgspec.DecodeError as error:
        raise AgentError(f"the last line that the agent printed is no score: {error}: {line:.200}") from error


def _filled(word: str, task: Mapping[str, Any]) -> str:
    """Put fields of the task in the place of their `{names}`; other braces stay."""
    return _NAME.sub(lambda found: str(task[found.group(1)]) if found.group(1) in task else found.group(0), word)


def _variables(task: Mapping[str, Any], access: Endpoint) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "ANTHROPIC_BASE_URL": access.anthropic_base_url,
        "ANTHROPIC_API_KEY": access.api_key,
        "STREAMRL_MODEL": access.model,
        "STREAMRL_TASK": json.dumps(task),
        "STREAMRL_SCORE_URL": access.score_url,
    }


async def _read_last(reader: asyncio.StreamReader, lines: deque[str]) -> None:
    """Read all that a program prints, and put the last lines that are not empty into `lines`."""
    rest = b""
    try:
        while piece := await reader.read(1 << 16):
            *whole, rest = (rest + piece).split(b"\n")
            rest = rest[-(1 << 16) :]
            lines.extend(line.decode(errors="replace") for line in whole if line.strip())
    finally:
        if rest.strip():
            lines.append(rest.decode(errors="replace"))


# --- elsewhere ---


class RemoteAgents:
    """Offers episodes to whoever asks; they end with a score, or at their deadline."""

    def __init__(self) -> None:
        self._offers: asyncio.Queue[tuple[Lease, asyncio.Future[None]]] = asyncio.Queue()
        self._warned = False

    async def start(self) -> None:
        """Nothing to start: agents come by themselves."""

    async def close(self) -> None:
        """Nothing to end."""

    async def run(self, task: dict[str, Any], access: Endpoint, *, begun: Callable[[], None]) -> Score:
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offers.put_nowait((Lease(task, access), taken))
        try:
            await asyncio.wait((taken,), timeout=UNTAKEN_SECONDS)
            if not taken.done() and not self._warned:
                self._warned = True
                waiting, path = self._offers.qsize(), access.root + "/episodes"
                log.warning("%d episodes wait for an agent: nobody asks POST %s", waiting, path)
            await taken
        finally:
            taken.cancel()  # to `wait` for it would not: one that was given up is not to be leased
        begun()
        return Score()

    async def lease(self, seconds: float) -> Lease | None:
        """Return an episode to play; None when none is there within `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    lease, taken = await self._offers.get()
                    if not taken.done():  # otherwise its group was given up
                        taken.set_result(None)
                        return lease
        return None
