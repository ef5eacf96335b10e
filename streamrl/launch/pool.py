"""A pool, or its part on this machine, for a run with a controller that was started separately: `streamrl trainer`,
`streamrl gserver --count N`, `streamrl rollout --count N`.

Owns the processes; their output goes to the launcher's output. Each keeps its index within the run. A dead process is
restarted as often as `streamrl run` would restart it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import msgspec

from streamrl import config as configuration
from streamrl import essential
from streamrl.config import Config
from streamrl.errors import PeerError, ProcessDied, StreamRLError
from streamrl.launch.local import STATUS_SECONDS
from streamrl.launch.process import EXIT_PLACE_TAKEN
from streamrl.launch.processes import (
    COMPONENTS,
    Helper,
    ProcessPlan,
    TrainerShare,
    checkpoint_command,
    command,
    plan_pool,
    plan_trainer,
    threads_of,
    visible_gpus,
)
from streamrl.launch.role import ask_from_where
from streamrl.launch.supervise import (
    Child,
    Children,
    Restarts,
    end_who_is_silent,
    may_go_back,
    restarts_of,
    tell_death,
    until_finished,
    was_left_behind,
)
from streamrl.transport.control import AskPlace, Drain, Status
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import await_secret, of_run_at

log = logging.getLogger(__name__)

PoolRole = Literal["gserver", "rollout"]

FETCH_SECONDS = 86400.0
"""Longest time for a host to make or to fetch the model. While it is fetched, each part has a deadline of its own."""


async def _model_folder(
    children: Children,
    *,
    config_file: Path,
    overrides: Sequence[str],
    manager_url: str,
    components: Mapping[str, str],
    threads: int,
) -> Path:
    """Make or fetch the folder with the run's first weights in a child process; raises as `Children.ask` does."""
    words = checkpoint_command(config_file, overrides=overrides, manager_url=manager_url, components=components)
    return Path(await children.ask(Helper("checkpoint", threads), words, timeout=FETCH_SECONDS))


# --- the trainer ---


async def run_trainer(
    config: Config,
    *,
    config_file: Path,
    overrides: Sequence[str],
    manager_url: str,
    share: TrainerShare,
    advertise: str = "",
    model_dir: Path | None = None,
    components: Mapping[str, str] = COMPONENTS,
) -> None:
    """Start the model workers of `share`, and watch them until the run is over.

    A dead worker is restarted from the checkpoint to which the run goes back. Raises `ProcessDied` if one has died too
    often; then none is left.
    """
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "config.toml").write_text(configuration.to_toml(config))
    await asyncio.to_thread(await_secret, manager_url, config)
    secret = of_run_at(manager_url, config)
    children = Children(logs=None, secret=secret)
    try:
        if model_dir is None:
            model_dir = await _model_folder(
                children,
                config_file=config_file,
                overrides=overrides,
                manager_url=manager_url,
                components=components,
                threads=config.trainer.threads,
            )
        client = ControlClient.of(config, manager_url, timeout=STATUS_SECONDS)
        restarts = restarts_of(config)
        coming: set[asyncio.Task[None]] = set()

        async def start(process: ProcessPlan, *, after: float = 0.0, resume: bool = False) -> None:
            await asyncio.sleep(after)
            words = command(
                process,
                config_file=config_file,
                overrides=overrides,
                manager_url=manager_url,
                model_dir=model_dir,
                advertise=advertise,
                components=components,
                resume=resume,
            )
            await children.start(process, words)

        async def goes_on(child: Child, status: Status | None) -> bool:
            assert child.process is not None
            if not may_go_back(child):
                return False
            left = was_left_behind(child)
            if not left:
                await tell_death(child, client)
            delay = 0.0 if left else restarts.allow(child.name, now=time.monotonic())
            if delay is None:
                return False
            if not left:
                log.warning("%s; it is started again in %g s", child.reason(), delay)
            again = start(child.process, after=delay, resume=True)
            coming.add(essential.begin(again, name=f"restart of {child.name}"))
            return True

        try:
            for process in plan_trainer(config, share=share, gpus=visible_gpus()):
                await start(process)
            watching = essential.begin(end_who_is_silent(children, client), name="the watch over silence")
            coming.add(watching)
            await until_finished(children, client=client, goes_on=goes_on)
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)
            await children.stop()
            await client.close()
    finally:
        children.close()


# --- gservers and rollout workers ---


class Pool:
    """The processes of one role on this machine."""

    def __init__(
        self,
        config: Config,
        *,
        role: PoolRole,
        count: int,
        config_file: Path,
        overrides: Sequence[str],
        manager_url: str,
        resume: bool = False,
        advertise: str = "",
        components: Mapping[str, str] = COMPONENTS,
    ) -> None:
        """`resume`: processes continue from the controller's checkpoint, if this machine has a copy of it."""
        self._config = config
        self._role: PoolRole = role
        self._count = count
        self._config_file = config_file
        self._resume = resume
        self._given = list(overrides)
        self._overrides = self._given
        """Overrides with which processes are started: the given ones, and with `resume` the checkpoint."""
        self._manager_url = manager_url
        self._advertise = advertise
        self._components = components
        self._restarts: Restarts = restarts_of(config)
        self._children: Children | None = None
        self._model_dir: Path | None = None
        self._finding = asyncio.Lock()
        self._coming: set[asyncio.Task[None]] = set()
        self._leaving = False

    async def run(self) -> None:
        """Start all processes, and keep them running until the run is over or all have left it.

        Raises `ProcessDied` if none is left and the last one failed, or if the run failed.
        """
        await asyncio.to_thread(await_secret, self._manager_url, self._config)
        secret = of_run_at(self._manager_url, self._config)
        self._children = children = Children(logs=None, secret=secret)
        client = ControlClient.of(self._config, self._manager_url, timeout=STATUS_SECONDS)
        try:
            await self._find_beginning()
            indices = [await self._place(client) for _ in range(self._count)]
            for process in plan_pool(self._config, self._role, indices=indices, gpus=visible_gpus()):
                await self._start(process)
            watching = essential.begin(end_who_is_silent(children, client), name="the watch over silence")
            try:
                await self._until_all_have_left(children, client)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        finally:
            for task in self._coming:
                task.cancel()
            await asyncio.gather(*self._coming, return_exceptions=True)
            await client.close()
            await children.stop()
            children.close()

    async def leave(self) -> None:
        """Make all processes finish their work and leave the run, which continues."""
        self._leaving = True
        for task in self._coming:
            task.cancel()
        running = self._children.running if self._children is not None else []
        refused: dict[Child, PeerError] = {}
        members = [child for child in running if child.process is not None]
        if not members:
            raise StreamRLError(f"no {self._role} is running here")
        client = ControlClient.of(self._config, self._manager_url, timeout=STATUS_SECONDS)
        try:
            for child in members:
                assert child.process is not None
                try:
                    await client.drain(Drain(role=self._role, index=child.process.index))
                except PeerError as error:
                    if error.status != HTTPStatus.CONFLICT:
                        raise
                    refused[child] = error
        finally:
            await client.close()
        if len(refused) == len(members):
            raise next(iter(refused.values()))
        for child, refusal in refused.items():  # a process that has not joined yet has no work to finish
            log.warning("%s is stopped, since it cannot be asked to leave: %s", child.name, refusal)
            child.signal(signal.SIGTERM)

    async def _find_beginning(self) -> None:
        """Find the checkpoint and the model that processes begin with.

        A restarted run continues from another checkpoint than before, and may have removed the earlier one.
        """
        assert self._children is not None
        async with self._finding:
            overrides = self._given
            if self._resume:
                overrides = await ask_from_where(
                    self._config_file, self._given, manager_url=self._manager_url, needed=False
                )
            if self._model_dir is not None and overrides == self._overrides:
                return
            self._model_dir = await _model_folder(
                self._children,
                config_file=self._config_file,
                overrides=overrides,
                manager_url=self._manager_url,
                components=self._components,
                threads=threads_of(self._role, self._config),
            )
            self._overrides = overrides

    async def _place(self, client: ControlClient) -> int:
        config = self._config
        message = AskPlace(role=self._role, config_digest=config.digest(), settings=config.shared_changes())
        return await client.place(message, patience=config.limits.start_seconds)

    async def _start(self, process: ProcessPlan) -> None:
        assert self._children is not None
        words = command(
            process,
            config_file=self._config_file,
            overrides=self._overrides,
            manager_url=self._manager_url,
            model_dir=self._model_dir,
            advertise=self._advertise,
            components=self._components,
        )
        await self._children.start(process, words)

    async def _until_all_have_left(self, children: Children, client: ControlClient) -> None:
        failed: Child | None = None
        while children.untold or self._coming:
            child = await children.next_exit()
            if child.exit_code == 0:
                log.info("%s has left the run", child.name)
                continue
            state = await _state(client)
            if state in ("finished", "stopped"):
                log.warning("%s %s when the run was over; nothing of it is lost", child.name, child.how_it_ended)
            elif not self._leaving and not self._replace(child, state, client):
                failed = child
        if failed is not None:
            raise ProcessDied(failed.obituary())

    def _replace(self, child: Child, state: str, client: ControlClient) -> bool:
        """Restart a process that failed; return whether it will be. `state`: of the run.

        It is not restarted once the run has failed. One that has died too often is tried again later, unless the
        controller does not respond: then the run is gone.
        """
        assert child.process is not None
        if state == "failed":
            return False
        now = time.monotonic()
        delay = self._restarts.allow(child.name, now=now)
        if delay is not None:
            log.warning("%s %s; it is started again in %g s", child.name, child.how_it_ended, delay)
        else:
            delay = self._restarts.rest(child.name, now=now) if state else None
            log.error(
                "%s %s, and was started again %d times within %g s already; %s",
                *(child.name, child.how_it_ended, self._restarts.most, self._restarts.window),
                "it is left out" if delay is None else f"it is tried again in {delay:.0f} s",
            )
            if delay is None:
                return False
        again = self._start_later(child.process, delay, client if child.exit_code == EXIT_PLACE_TAKEN else None)
        task = essential.begin(again, name=f"restart of {child.name}")
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)
        return True

    async def _start_later(self, process: ProcessPlan, delay: float, asked: ControlClient | None) -> None:
        """Start `process` after `delay` seconds.

        If `asked`, the controller's client, is given, the process gets a new index from it, because another process
        has its own: a restarted controller may have assigned that index before this process was known to it.
        """
        await asyncio.sleep(delay)
        try:
            await self._find_beginning()
        except StreamRLError as error:
            log.warning("%s begins with what it began with before: %s", process.name, error)
        if asked is not None:
            try:
                process = msgspec.structs.replace(process, index=await self._place(asked))
            except StreamRLError as error:
                log.warning("there is no new number for %s: %s", process.name, error)
        await self._start(process)


async def _state(client: ControlClient) -> str:
    """Return the state of the run, or an empty string if the controller does not respond: it may be unreachable."""
    try:
        return (await client.status()).state
    except StreamRLError:
        return ""
