"""`streamrl launch ray`: a run on a Ray cluster. Ray places the run's processes.

Every process has an actor, which starts the same process that `streamrl run` would start, and watches it on its node.
The launcher works as on one machine. A gserver or rollout worker that loses its process, actor or node gets a new actor
in its old bundle. The controller and the model workers are one placement group that lives and dies together; after its
death the whole run is restarted from its latest checkpoint. A process never outlives its actor, nor an actor this
launcher.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.console import Console
from rich.table import Table

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import ConfigError, DeadlineExceeded, ProcessDied
from streamrl.launch.children import Child, Children
from streamrl.launch.clusters import Needs, needs
from streamrl.launch.display import make_display
from streamrl.launch.ending import reported, save_and_end
from streamrl.launch.local import Launcher
from streamrl.launch.process import run_until_stopped, set_up_logging
from streamrl.launch.processes import PlanRole, ProcessPlan, plan
from streamrl.launch.run_folders import resume_words, resumed, run_folder
from streamrl.records import progress
from streamrl.transport.secret import Secret
from streamrl.waits import Retry, cancel

log = logging.getLogger(__name__)

GROUPS: Sequence[tuple[str, Sequence[PlanRole], str]] = (
    ("trainer", ("controller", "model_worker"), "PACK"),
    ("gserver", ("gserver",), "SPREAD"),
    ("rollout", ("rollout",), "SPREAD"),
)
"""Placement groups: name, roles in the group, and Ray's strategy."""
PLACE_WARNING_SECONDS = 30.0
"""A warning is logged when Ray has not found a place for a process for this long."""
CONNECT_SECONDS = 10.0
"""Longest time until the head of a Ray cluster accepts a connection."""


class Keeper:
    """An actor that runs and watches one process of the run on its node."""

    def __init__(self, folder: str, config_file: str, config: str, secret: str) -> None:
        """`folder`: base of relative paths; `config_file` is written with `config` unless it has that content."""
        if Path(folder).is_dir():
            os.chdir(folder)
        file = Path(config_file)
        (file.parent / "logs").mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text() != config:
            file.write_text(config)
        handed = Secret(secret, origin="the launcher")
        self._children = Children(logs=file.parent / "logs", secret=handed)
        self._child: Child | None = None

    async def start(self, process: bytes, words: Sequence[str], waits: bool) -> int:
        """Start `process` (`ProcessPlan` as JSON) and return its id; `waits` as in `Children.start`."""
        planned = msgspec.json.decode(process, type=ProcessPlan)
        self._child = await self._children.start(planned, [sys.executable, *words], waits=waits)
        return self._child.pid

    async def ask(self, process: bytes, words: Sequence[str], timeout: float) -> tuple[int, str]:
        """Start the controller; return its id and its URL, with the address by which Ray reaches this node."""
        planned = msgspec.json.decode(process, type=ProcessPlan)
        words = [sys.executable, *words, "--host", ray.util.get_node_ip_address()]
        url = await self._children.ask(planned, words, timeout=timeout)
        (self._child,) = self._children.running
        return self._child.pid, url

    async def ended(self) -> tuple[int | None, str]:
        """Wait for the end of the process; return its exit code and its obituary."""
        assert self._child is not None
        await self._child.ended.wait()
        return self._child.exit_code, self._child.obituary()

    async def send(self, line: str) -> None:
        if self._child is not None:
            self._child.send(line)

    async def signal(self, number: int) -> None:
        if self._child is not None:
            self._child.signal(signal.Signals(number))


def _first_line(error: RayError) -> str:
    return str(error).partition("\n")[0]


async def _future(reference: Any) -> Any:
    """Return the value of a Ray object reference."""
    return await reference


class PlacementGroups:
    """The placement groups of a run: a bundle for each of its processes."""

    def __init__(self, config: Config, processes: Sequence[ProcessPlan]) -> None:
        """Request the placement groups from Ray."""
        self._bundles: dict[str, dict[str, float]] = {p.name: bundle(needs([p], config)) for p in processes}
        self._groups: dict[str, PlacementGroup] = {}
        self._of: dict[str, tuple[str, int]] = {}
        for name, roles, strategy in GROUPS:
            members = [process.name for process in processes if process.role in roles]
            bundles = [self._bundles[member] for member in members]
            if members:
                self._groups[name] = placement_group(bundles, strategy=strategy, name=f"{config.run.name}-{name}")
            self._of |= {member: (name, index) for index, member in enumerate(members)}

    async def until_ready(self, *, seconds: float) -> None:
        """Wait until Ray has room for all groups; raises `DeadlineExceeded` after `seconds`."""
        ready = {asyncio.ensure_future(_future(group.ready())): name for name, group in self._groups.items()}
        _, waiting = await asyncio.wait(ready, timeout=min(seconds, PLACE_WARNING_SECONDS))
        if waiting and seconds > PLACE_WARNING_SECONDS:
            log.warning("waiting for Ray to find room for the run: `ray status` shows what it lacks")
            _, waiting = await asyncio.wait(waiting, timeout=seconds - PLACE_WARNING_SECONDS)
        if waiting:
            names = ", ".join(sorted(ready[future] for future in waiting))
            await cancel(*waiting)  # else they fail when their groups are removed, and nothing retrieves the error
            raise DeadlineExceeded(
                f"waited {seconds:.0f} s for Ray to find room for the placement groups of {names} in vain: `ray "
                "status` shows what the cluster has, and `streamrl launch ray --dry-run` what the run needs"
            )

    def actor(self, process: ProcessPlan, *arguments: str) -> Any:
        """Return a new `Keeper` in the bundle of `process`."""
        group, index = self._of[process.name]
        needed = self._bundles[process.name]
        return (
            ray.remote(Keeper)
            .options(
                num_cpus=needed["CPU"],
                num_gpus=needed.get("GPU", 0),
                name=None,
                max_restarts=0,  # the launcher decides about restarts, as on one machine
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._groups[group], placement_group_bundle_index=index
                ),
            )
            .remote(*arguments)
        )

    def give_back(self) -> None:
        for group in self._groups.values():
            remove_placement_group(group)


def bundle(needed: Needs) -> dict[str, float]:
    """Return the resources to request from Ray for processes with these needs."""
    return {"CPU": needed.cores, **({"GPU": needed.gpus} if needed.gpus else {})}


class KeptChild(Child):
    """A process that an actor runs."""

    _obituary = ""

    def send(self, line: str) -> None:
        self._handle.send.remote(line)

    def signal(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            self._handle.signal.remote(int(number))

    async def wait(self) -> int:
        """Wait for the end of the process, or of its actor; then release the actor."""
        try:
            code, self._obituary = await self._handle.ended.remote()
        except RayError as error:
            self.ended_because = f"Ray lost its actor ({_first_line(error)})"
            code = -signal.SIGKILL
        ray.kill(self._handle)
        self.exit_code = int(code)
        self.ended.set()
        return self.exit_code

    def obituary(self) -> str:
        return self._obituary or f"{self.name} {self.how_it_ended}"


class KeptChildren(Children):
    """The processes of a run with their actors in `places`."""

    def __init__(self, config: Config, places: PlacementGroups, logs: Path, secret: Secret) -> None:
        super().__init__(logs, secret)
        self._patience = config.limits.start_seconds
        self._places = places
        settings = configuration.to_toml(config)
        self._arguments = (os.getcwd(), str(config.run_dir / configuration.CONFIG_FILE), settings, secret.revealed)

    async def start(
        self, process: ProcessPlan, command: Sequence[str], *, waits: bool = False, pass_fds: Sequence[int] = ()
    ) -> Child:
        """Start `process` on the node of its actor; a helper is started on the launcher's machine.

        Until Ray has noticed that a node is gone, it may place the actor there, so an actor that is lost at once is
        replaced. Raises `ProcessDied` if none comes up.
        """
        if not process.is_member:
            return await super().start(process, command, waits=waits, pass_fds=pass_fds)
        retry = Retry(f"to start an actor for {process.name}", patience=self._patience)
        while True:
            actor = self._places.actor(process, *self._arguments)
            try:
                pid = await self._placed(process, actor.start.remote(msgspec.json.encode(process), command[1:], waits))
                return self._kept(process, actor, int(pid))
            except RayError as error:
                ray.kill(actor)
                lost = ProcessDied(f"{process.name} could not be started: {_first_line(error)}")
                if not await retry.pause(lost):
                    raise lost from error

    async def ask(self, process: ProcessPlan, command: Sequence[str], *, timeout: float) -> str:
        """Start `process` and return its line, as on one machine."""
        if not process.is_member:
            return await super().ask(process, command, timeout=timeout)
        actor = self._places.actor(process, *self._arguments)
        try:
            await self._placed(process, actor.__ray_ready__.remote())
            pid, url = await actor.ask.remote(msgspec.json.encode(process), command[1:], timeout)
        except RayError as error:
            ray.kill(actor)
            raise ProcessDied(f"{process.name} did not come up: {_first_line(error)}") from error
        self._kept(process, actor, pid)
        return str(url)

    async def _placed(self, process: ProcessPlan, answer: Any) -> Any:
        """Return the actor's first reply, once the actor of `process` has a node. There is no deadline: a lost node may
        come back, or its group may find room elsewhere."""
        waiting = asyncio.ensure_future(_future(answer))
        while not waiting.done():
            await asyncio.wait([waiting], timeout=PLACE_WARNING_SECONDS)
            if not waiting.done():
                log.warning("%s waits for Ray to find a node for its actor; see `ray status`", process.name)
        return waiting.result()

    def _kept(self, process: ProcessPlan, actor: Any, pid: int) -> Child:
        child = KeptChild(process, actor, pid=pid, log_file=self._log_of(process))
        self._watch(child)
        return child


def run_there(
    config_file: Path, overrides: Sequence[str], console: Console, *, dry_run: bool, address: str, resume: bool
) -> int:
    """Claim the folder of a run, or find the one to resume; carry out the run on the Ray cluster at `address`, and show
    its report; return the exit code. `dry_run`: only show what it would request.

    After the death of a model worker or the controller the run is restarted from its latest checkpoint, at most
    `restarts.number` times. Raises as `run_here` does, and `DeadlineExceeded` if the cluster has no room.
    """
    set_up_logging("ray")
    asked = configuration.load(config_file, overrides)
    if dry_run:
        console.print(table(asked))
        return 0
    config = run_folder(asked, overrides, console, resume=resume)
    again = resume_words(["streamrl", "launch", "ray"], config_file, overrides, config.run_dir)
    with reported(config.run_dir, console, again=again), _connected(address):
        run = _RestartingRun(config, console)
        return run_until_stopped(run.run, departure=run.departure)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect to the Ray cluster at `address`; raises `ConfigError` if there is none."""
    where = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    host, _, port = where.rpartition(":")
    try:
        if "/" not in host and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=where, logging_level="ERROR", log_to_driver=False, namespace="streamrl")
    except OSError as error:
        raise ConfigError(
            f"there is no Ray cluster at {where!r} ({error}); start one with `ray start --head`, or give --address"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def planned(config: Config, *, gpus: bool) -> list[ProcessPlan]:
    """Return the processes of a run on a cluster with or without `gpus`; Ray assigns the GPUs to actors."""
    return plan(config, gpus=["Ray's"] if gpus else [])


def table(config: Config) -> Table:
    """Return a table of the placement groups and bundles that the run would request from Ray."""
    shown = Table("placement group", "strategy", "bundle of", "asks for", box=None)
    processes = planned(config, gpus=config.run.device == "cuda")
    for name, roles, strategy in GROUPS:
        for process in processes:
            if process.role in roles:
                asked = ", ".join(f"{count:g} {what}" for what, count in bundle(needs([process], config)).items())
                shown.add_row(name, strategy, process.name, asked)
    return shown


class _RestartingRun:
    """A run that is restarted as often as `restarts.number` allows."""

    def __init__(self, config: Config, console: Console) -> None:
        self._config = config
        self._console = console
        self._launcher: Launcher | None = None
        self.departure = save_and_end(config, lambda: self._launcher.manager_url if self._launcher else "")
        """Handler of the first Ctrl-C."""

    async def run(self) -> None:
        processes = planned(self._config, gpus=ray.cluster_resources().get("GPU", 0) > 0)
        places = PlacementGroups(self._config, processes)
        try:
            await places.until_ready(seconds=self._config.limits.start_seconds)
            config = self._config
            for attempt in range(self._config.restarts.number + 1):
                self._launcher = Launcher(
                    config,
                    processes=processes,
                    display=make_display(self._console, config=config),
                    children=partial(KeptChildren, config, places),
                    one_disk=False,
                )
                try:
                    return await self._launcher.run()
                except ProcessDied as error:
                    if attempt == self._config.restarts.number or not progress.checkpoints(config.run_dir):
                        raise
                    log.error("%s", error)
                    config = resumed(self._config)
                    log.warning("the run is begun again from %s", config.run.resume_from)
        finally:
            places.give_back()
