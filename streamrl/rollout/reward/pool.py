"""`RewardPool`: the reward function of a run, in a few processes with a limit on the time of each call."""

from __future__ import annotations

import os

from streamrl import userland
from streamrl.config import Config
from streamrl.errors import (
    RewardError,
    RewardTimeout,
    UserCodeError,
    UserCodeTimeout,
    UserCodeUnusable,
    UserProcessDied,
)
from streamrl.rollout.reward.functions import DataOrigin, Response
from streamrl.transport import secret
from streamrl.types import Prompt
from streamrl.userland import UserProcesses

HANG_SECONDS = 5.0
"""Grace period of a call after its time limit. A process that runs concurrent calls cancels a call at its limit; a
process whose call lasts this much longer is replaced."""


class RewardPool:
    """Calls the configured reward function in `rollout.reward.processes` processes."""

    def __init__(self, config: Config) -> None:
        reward, data = config.rollout.reward, config.data
        origin = DataOrigin(source=data.source, path=data.path, args=data.args, size=data.size, seed=config.run.seed)
        self._function = f"reward function {reward.function}"
        self._limit = f"rollout.reward.timeout_seconds = {reward.timeout_seconds:g}"
        self._concurrent_calls = reward.concurrent_calls
        self._processes = UserProcesses(
            userland.SetupMessage(
                loader="streamrl.rollout.reward.functions:serve_reward",
                settings={"function": reward.function, "args": reward.args, "origin": origin},
                concurrent_calls=reward.concurrent_calls,
                timeout=reward.timeout_seconds,
                hang_seconds=HANG_SECONDS,
            ),
            what=self._function,
            processes=reward.processes,
            environment=userland.clean_environment(
                os.environ,
                passed=reward.environment,
                withheld=(secret.VARIABLE, config.gserver.api_key_env, config.rollout.agent.api_key_env),
            ),
            repeatable=True,
        )

    @property
    def busy_seconds(self) -> float:
        """Seconds spent in the function, over all calls that have ended."""
        return self._processes.busy_seconds

    @property
    def calls_at_once(self) -> int:
        """Simultaneous calls in each process: more than one only for a coroutine function, once it is loaded."""
        return self._concurrent_calls if self._processes.coroutine else 1

    async def start(self) -> None:
        """Start all processes; raises `RewardError` if the function cannot be loaded."""
        try:
            await self._processes.start()
        except UserCodeError as error:
            raise RewardError(str(error)) from error

    async def close(self) -> None:
        """Stop every process and every call."""
        await self._processes.close()

    async def score(self, response: Response, prompt: Prompt) -> float:
        """Return the reward of `response`; waits for an idle process if there is none.

        Raises `RewardTimeout` if the function takes too long, and `RewardError` if it raises, crashes or returns
        anything but a finite number.
        """
        where = f"{self._function}, seq {prompt.seq}"
        try:
            return float(await self._processes.call((response, prompt)))
        except (TypeError, OverflowError) as error:
            raise RewardError(f"{where}: the prompt's row cannot be sent to it: {error}") from error
        except UserCodeTimeout as error:
            raise RewardTimeout(f"{where}: no answer within {self._limit}; {error}") from error
        except UserProcessDied as error:
            raise RewardError(f"{where}: its process died ({error}) and was replaced") from error
        except UserCodeUnusable as error:
            raise RewardError(str(error)) from error
        except UserCodeError as error:
            raise RewardError(f"{where}: {error}") from error
