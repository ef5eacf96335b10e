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
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import msgspec

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import PeerError, StreamRLError
from streamrl.launch.children import Child, Children
from streamrl.launch.ending import save_and_end
from streamrl.launch.process import EXIT_PLACE_TAKEN, Departure, run_until_stopped, set_up_logging
from streamrl.launch.processes import (
    MemberRole,
    ProcessCommands,
    ProcessPlan,
    TrainerShare,
    helper,
    plan_pool,
    plan_trainer,
    share_of,
    visible_gpus,
)
from streamrl.launch.role import place_of, resumed_there
from streamrl.launch.supervisor import STATUS_SECONDS, Supervisor
from streamrl.transport.control import Drain
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import await_secret, of_run_at

log = logging.getLogger(__name__)

FETCH_SECONDS = 86400.0
"""Longest time for a host to make or to fetch the model. While it is fetched, each part has a deadline of its own."""


def run_pool(role: Literal["gserver", "rollout"], count: int, commands: ProcessCommands, *, resume: bool) -> int:
    """Run `count` gservers or rollout workers on this machine; return the exit code. The first signal makes them leave
    the run, which continues."""
    set_up_logging(f"{role}s")
    config = configuration.load(commands.config_file, commands.overrides)
    part = PoolShare(config, commands, role=role, count=count, resume=resume)
    return run_until_stopped(part.run, on_first_signal=[Departure(part.leave, "leaving the run")])


def run_trainer(commands: ProcessCommands, *, node: int | None, nodes: int | None, resume: bool) -> int:
    """Run part `node` of `nodes` of the trainer; return the exit code. Both None: torchrun's variables, or all of it.
    The first signal makes the run write a checkpoint and end."""
    config = configuration.load(commands.config_file, commands.overrides)
    share = share_of(config, node=node, nodes=nodes, environment=os.environ)
    set_up_logging("trainer" if share.nodes == 1 else f"trainer {share.node}")
    part = PoolShare(config, commands, role="model_worker", share=share, resume=resume)
    return run_until_stopped(part.run, on_first_signal=save_and_end(config, lambda: commands.manager_url))


class PoolShare:
    """The model workers, gservers or rollout workers that one command starts on this machine."""

    def __init__(
        self,
        config: Config,
        commands: ProcessCommands,
        *,
        role: MemberRole,
        count: int = 0,
        share: TrainerShare | None = None,
        resume: bool = False,
    ) -> None:
        """`count`: number of gservers or rollout workers. `share`: the part of the trainer. `resume`: processes
        continue from the controller's checkpoint; gservers and rollout workers only if this machine has a copy."""
        self._config = config
        self._commands = commands
        self._role = role
        self._count = count
        self._share = share
        self._resume = resume
        self._given = list(commands.overrides)
        """Overrides without the checkpoint from which the controller continues."""
        self._finding = asyncio.Lock()
        self.children: Children | None = None
        self.supervisor: Supervisor | None = None
        self.client: ControlClient | None = None

    async def run(self) -> None:
        """Start all processes, and keep them running until the run is over or all have left it.

        Raises as `Supervisor.until_over` does, and `ConfigError` if a model worker lacks the controller's checkpoint.
        """
        url = self._commands.manager_url
        await asyncio.to_thread(await_secret, url, self._config)
        self.children = Children(logs=None, secret=of_run_at(url, self._config))
        self.client = ControlClient.of(self._config, url, timeout=STATUS_SECONDS)
        try:
            await self.find_beginning()
            if self._share is not None:
                self._write_settings()
            self.supervisor = Supervisor(
                self._config,
                self.children,
                self._commands,
                self.client,
                part="pool" if self._share is None else "trainer",
                renew=self.renewed if self._share is None else None,
            )
            for process in await self._plan():
                await self.supervisor.start(process)
            await self.supervisor.until_over()
        finally:
            await self.children.stop()
            await self.client.close()
            self.children.close()

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

    async def find_beginning(self) -> None:
        """Find the checkpoint and the model that processes begin with.

        A restarted run continues from another checkpoint than before, and may have removed the earlier one.
        """
        assert self.children is not None
        commands, found = self._commands, list(self._given)
        async with self._finding:
            if self._resume:
                needed = self._share is not None
                config = await resumed_there(self._config, manager_url=commands.manager_url, needed=needed)
                if config is not self._config:
                    found.append(f"run.resume_from={config.run.resume_from}")
            if commands.model_dir is not None and found == commands.overrides:
                return
            process = helper("checkpoint", self._config)
            words = msgspec.structs.replace(commands, overrides=found).of(process)
            commands.model_dir = Path(await self.children.ask(process, words, timeout=FETCH_SECONDS))
            commands.overrides = found

    def _write_settings(self) -> None:
        """Write the trainer's configuration into the run's folder."""
        config = configuration.load(self._commands.config_file, self._commands.overrides)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / configuration.CONFIG_FILE).write_text(configuration.to_toml(config))

    async def _plan(self) -> list[ProcessPlan]:
        if self._share is not None:
            return plan_trainer(self._config, share=self._share, gpus=visible_gpus())
        indices = [await self._place() for _ in range(self._count)]
        return plan_pool(self._config, self._role, indices=indices, gpus=visible_gpus())

    async def _place(self) -> int:
        assert self.client is not None
        return await place_of(self.client, self._config, self._role)

    async def renewed(self, child: Child) -> ProcessPlan:
        """Return the process to start in the place of `child`, which has died, and find out where it begins.

        If another process has its index, it gets a new one: a restarted controller may have assigned that index before
        this process joined it.
        """
        try:
            await self.find_beginning()
        except StreamRLError as error:
            log.warning("%s begins from the same checkpoint as before: %s", child.name, error)
        if child.exit_code == EXIT_PLACE_TAKEN:
            try:
                return msgspec.structs.replace(child.process, index=await self._place())
            except StreamRLError as error:
                log.warning("there is no new index for %s: %s", child.name, error)
        return child.process
