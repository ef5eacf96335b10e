"""A part of a run on this machine, whose controller was started separately: `streamrl trainer`, `streamrl gserver
--count N`, `streamrl rollout --count N`.

Owns the processes; their output goes to the launcher's output. Each keeps its index within the run. A dead process is
restarted as often as `streamrl run` would restart it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Literal

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import PeerError, StreamRLError
from streamrl.launch.children import Child, Children
from streamrl.launch.ending import save_and_end
from streamrl.launch.process import Departure, run_until_stopped, set_up_logging
from streamrl.launch.processes import (
    MemberRole,
    ProcessCommands,
    ProcessPlan,
    plan_pool,
    plan_trainer,
    share_of,
    visible_gpus,
)
from streamrl.launch.role import keep_settings, place_of
from streamrl.launch.supervisor import STATUS_SECONDS, Supervisor
from streamrl.transport.control import Drain
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import await_secret, of_run_at

log = logging.getLogger(__name__)


def run_pool(role: MemberRole, count: int, commands: ProcessCommands) -> int:
    """Run `count` gservers or rollout workers on this machine; return the exit code. The first signal makes them leave
    the run, which continues."""
    set_up_logging(f"{role}s")
    config = configuration.load(commands.config_file, commands.overrides)

    async def planned(client: ControlClient) -> Sequence[ProcessPlan]:
        indices = [await place_of(client, config, role) for _ in range(count)]
        return plan_pool(config, role, indices=indices, gpus=visible_gpus())

    part = PoolShare(config, commands, role=role, planned=planned)
    return run_until_stopped(part.run, departure=Departure(part.leave, "leaving the run"))


def run_trainer(commands: ProcessCommands, *, node: int | None, nodes: int | None) -> int:
    """Run part `node` of `nodes` of the trainer; return the exit code. Both None: torchrun's variables, or all of it.
    The first signal makes the run write a checkpoint and end."""
    config = configuration.load(commands.config_file, commands.overrides)
    share = share_of(config, node=node, nodes=nodes, environment=os.environ)
    set_up_logging("trainer" if share.nodes == 1 else f"trainer {share.node}")

    async def planned(client: ControlClient) -> Sequence[ProcessPlan]:
        keep_settings(config, commands.config_file)
        return plan_trainer(config, share=share, gpus=visible_gpus())

    part = PoolShare(config, commands, role="model_worker", planned=planned)
    return run_until_stopped(part.run, departure=save_and_end(config, lambda: commands.manager_url))


class PoolShare:
    """The model workers, gservers or rollout workers that one command starts on this machine."""

    def __init__(
        self,
        config: Config,
        commands: ProcessCommands,
        *,
        role: MemberRole,
        planned: Callable[[ControlClient], Awaitable[Sequence[ProcessPlan]]],
    ) -> None:
        """`planned` returns the processes to start, once the controller has been found."""
        self._config = config
        self._commands = commands
        self._role = role
        self._planned = planned
        self.children: Children | None = None
        self.supervisor: Supervisor | None = None
        self.client: ControlClient | None = None

    async def run(self) -> None:
        """Start all processes, and keep them running until the run is over or all have left it.

        Raises as `Supervisor.until_over` does.
        """
        url = self._commands.manager_url
        await asyncio.to_thread(await_secret, url, self._config)
        self.children = Children(logs=None, secret=of_run_at(url, self._config))
        part: Literal["trainer", "pool"] = "trainer" if self._role == "model_worker" else "pool"
        try:
            async with ControlClient.of(self._config, url, timeout=STATUS_SECONDS) as self.client:
                self.supervisor = Supervisor(self._config, self.children, self._commands, self.client, part=part)
                for process in await self._planned(self.client):
                    await self.supervisor.start(process)
                await self.supervisor.until_over()
        finally:
            await self.children.stop()

    async def leave(self) -> None:
        """Make all processes finish their work and leave the run, which continues."""
        if self.supervisor is not None:
            self.supervisor.replace_none()
        members = self.children.members if self.children is not None else []
        if self.client is None or not members:
            raise StreamRLError(f"no {self._role} is running here")
        refused: dict[Child, PeerError] = {}
        for child in members:
            try:
                await self.client.drain(Drain(role=self._role, index=child.process.index))
            except PeerError as error:
                if error.status != HTTPStatus.CONFLICT:
                    raise
                refused[child] = error
        if len(refused) == len(members):
            raise next(iter(refused.values()))
        for child, refusal in refused.items():  # a process that has not joined yet has no work to finish
            log.warning("%s is stopped, since it cannot leave in order: %s", child.name, refusal)
            child.signal(signal.SIGTERM)
