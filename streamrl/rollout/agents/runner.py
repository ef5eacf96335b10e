"""Execution of agents: functions, programs, and remote agents.

`FunctionAgents` runs many episodes in each of a few processes, `CommandAgents` starts a program for each episode, and
`RemoteAgents` leases episodes to agents elsewhere.

Owns the processes. Invariants: an episode that is cancelled, or hangs, leaves nothing running; a dead process is
replaced before the next episode; after `close` none of the processes is left, nor anything that they started. Agents
receive none of the user's secrets, except those that the configuration passes to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrl import userland
from streamrl.children import describe_exit, kill_group
from streamrl.config import Config
from streamrl.errors import AgentError, UnknownFault, UserCodeError, UserCodeUnusable, UserProcessDied
from streamrl.rollout.agents.policy import Endpoint, EpisodeRequest, Lease, Score
from streamrl.transport import secret
from streamrl.userland import UserProcesses, run_program

log = logging.getLogger(__name__)

MOST_AT_ONCE = 192
"""Episodes of a plain function that one process runs at the same time."""
HANG_SECONDS = 2.0
"""A process that does not react for this long hangs. It is replaced if one of its episodes has to end."""
UNTAKEN_SECONDS = 60.0
"""A warning is logged if no remote agent has requested an episode by then."""
_NAME = re.compile(r"\{(\w+)\}")


class Agents:
    """Runs episodes. Without processes of its own, a kind of agents has nothing to start or close."""

    async def start(self) -> None:
        """Start the processes; raises `AgentError` if none can run."""

    async def close(self) -> None:
        """End every episode and every process."""

    async def run(self, task: dict[str, Any], access: Endpoint, *, begun: Callable[[], None]) -> Score:
        """Run one episode, and return the agent's score; raises `AgentError` if it fails.

        `begun` is called when the agent begins; its time counts from then on. If this call is cancelled, and an episode
        of the same process hangs or has hung, the `CancelledError` has an `UnknownFault` as its cause.
        """
        raise NotImplementedError


PLAYS_VERIFIERS = "streamrl.rollout.agents.verifiers:play"


def environment_of(config: Config) -> dict[str, str]:
    """Return the environment variables of agents."""
    agent = config.rollout.agent
    withheld = (secret.VARIABLE, config.gserver.api_key_env)
    return userland.clean_environment(os.environ, passed=agent.environment, withheld=withheld, python=agent.python)


def agents_of(config: Config, *, tokenizer: Path | None = None, renderer: str = "default") -> Agents:
    """Return the agents that `config.rollout.agent` describes, not yet started.

    `tokenizer`: folder of the policy's tokenizer, for agents that make tokens by themselves; `renderer`: the renderer
    that they use.
    """
    agent = config.rollout.agent
    environment = environment_of(config)
    if agent.remote:
        return RemoteAgents()
    if agent.command:
        return CommandAgents(agent.command, memory_mb=agent.memory_mb, environment=environment)
    function, args = agent.function, agent.args
    if agent.verifiers:
        function = PLAYS_VERIFIERS
        args = {"tokenizer": str(tokenizer or ""), "renderer": {"name": renderer}, "environment": agent.args}
    setup = userland.SetupMessage(
        loader="streamrl.rollout.agents.policy:serve_agent",
        settings={"function": function, "args": args},
        concurrent_calls=sys.maxsize,
        threads=MOST_AT_ONCE,
        hang_seconds=HANG_SECONDS,
        memory_mb=agent.memory_mb,
    )
    return FunctionAgents(
        UserProcesses(
            setup,
            what=f"rollout.agent.function {function}",
            processes=agent.processes,
            environment=environment,
            python=agent.python,
        )
    )


# --- functions ---


class FunctionAgents(Agents):
    """Runs the user's function in `rollout.agent.processes` processes."""

    def __init__(self, processes: UserProcesses) -> None:
        self._processes = processes
        self._death: tuple[UserProcessDied, AgentError] | None = None

    async def start(self) -> None:
        try:
            await self._processes.start()
        except UserCodeError as error:
            raise AgentError(str(error)) from error

    async def close(self) -> None:
        await self._processes.close()

    async def run(self, task: dict[str, Any], access: Endpoint, *, begun: Callable[[], None]) -> Score:
        try:
            return msgspec.convert(await self._processes.call(Lease(task, access), begun=begun), Score)
        except asyncio.CancelledError as cancelled:
            fault = cancelled.__cause__
            if isinstance(fault, UserProcessDied):
                raise cancelled from self._error_of(fault)
            if isinstance(fault, UserCodeError):
                raise cancelled from UnknownFault(f"the agent's process hung: {fault}")
            raise
        except (TypeError, OverflowError) as error:
            raise AgentError(f"the task cannot be sent to the agent: {error}") from error
        except UserProcessDied as death:
            raise self._error_of(death) from death
        except UserCodeUnusable as error:
            raise AgentError(str(error)) from error
        except UserCodeError as error:
            raise AgentError(f"the agent failed: {error}") from error

    def _error_of(self, death: UserProcessDied) -> AgentError:
        """Return one error for all episodes of a process: its death is one failure, even if it costs several groups."""
        if self._death is None or self._death[0] is not death:
            error = AgentError(f"the agent's process {death}")
            if death.calls > 1:
                error = UnknownFault(f"{error}, in which {death.calls} episodes ran")
            self._death = death, error
        return self._death[1]


# --- programs ---


class CommandAgents(Agents):
    """Starts a program for each episode."""

    def __init__(self, command: Sequence[str], *, memory_mb: int, environment: Mapping[str, str]) -> None:
        self._command = command
        self._memory_mb = memory_mb
        self._environment = environment
        self._leaders: set[int] = set()

    async def close(self) -> None:
        for leader in self._leaders:
            kill_group(leader)

    async def run(self, task: dict[str, Any], access: Endpoint, *, begun: Callable[[], None]) -> Score:
        program, variables = self._command[0], _variables(task, access)
        leaders: list[int] = []

        def note(leader: int) -> None:
            leaders.append(leader)
            self._leaders.add(leader)
            begun()

        try:
            status, lines = await run_program(
                [_filled(word, task) for word in self._command],
                memory_mb=self._memory_mb,
                environment={**self._environment, **variables},
                begun=note,
            )
        except OSError as error:
            size = len(variables["STREAMRL_TASK"])
            why = f" (STREAMRL_TASK has {size} bytes)" if error.errno == errno.E2BIG else ""
            raise AgentError(f"the agent {program} cannot be started: {error.strerror}{why}") from error
        finally:
            self._leaders.difference_update(leaders)
        if status:
            tail = "\n".join(lines)
            raise AgentError(f"the agent {program} {describe_exit(status)}; its last output:\n{tail}")
        return _score_of(lines[-1] if lines else "")


def _score_of(line: str) -> Score:
    """Return the score in the last line of a program: a number, or a JSON object like `Score`; raises `AgentError`."""
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
    """Replace `{names}` in `word` by fields of the task; other braces stay."""
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


# --- elsewhere ---


class RemoteAgents(Agents):
    """Offers episodes to remote agents; the episodes end with a score, or at their deadline."""

    def __init__(self) -> None:
        self._offers: asyncio.Queue[tuple[Lease, asyncio.Future[None]]] = asyncio.Queue()
        self._warned = False

    async def run(self, task: dict[str, Any], access: Endpoint, *, begun: Callable[[], None]) -> Score:
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offers.put_nowait((Lease(task, access), taken))
        try:
            await asyncio.wait((taken,), timeout=UNTAKEN_SECONDS)
            if not taken.done() and not self._warned:
                self._warned = True
                waiting, path = self._offers.qsize(), access.root + "/episodes"
                log.warning("%d episodes wait for an agent: no agent has called POST %s", waiting, path)
            await taken
        finally:
            taken.cancel()  # `wait` does not cancel it, and an abandoned episode must not be leased
        begun()
        return Score()

    async def lease(self, seconds: float, request: EpisodeRequest) -> Lease | None:
        """Return an episode to play; None if none is available within `seconds`. `request` is ignored."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    lease, taken = await self._offers.get()
                    if not taken.done():  # otherwise its group was given up
                        taken.set_result(None)
                        return lease
        return None
