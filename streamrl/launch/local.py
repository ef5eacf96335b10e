"""`streamrl run`: a whole run on this machine.

Owns the run folder and every process of the run:

    run_dir/config.toml         the resolved configuration, which every process reads
    run_dir/logs/ROLE-INDEX.log the log of each process
    run_dir/...                 the controller's records (metrics.jsonl, timeline.jsonl, final.json)

The launcher itself stays light: it loads no model library, and waits for events (a pipe for the controller's URL, the
end of a process) instead of polling.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from streamrl import config as configuration
from streamrl import essential
from streamrl.children import Lifeline
from streamrl.config import Config
from streamrl.errors import ConfigError, StreamRLError
from streamrl.launch.display import Display
from streamrl.launch.files import keep_in_order
from streamrl.launch.process import run_until_stopped
from streamrl.launch.processes import (
    COMPONENTS,
    Helper,
    PlanRole,
    ProcessPlan,
    checkpoint_command,
    command,
    fitted,
    page_command,
    plan,
    visible_gpus,
)
from streamrl.launch.supervise import (
    Child,
    Children,
    Restarts,
    ending_written,
    may_go_back,
    restarts_of,
    save_and_end,
    tell_death,
    until_finished,
    was_left_behind,
)
from streamrl.processor import avoid_broken_instructions
from streamrl.transport.control import Status
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import Secret, hold, of_new_run

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 600.0
"""Longest time to make the first checkpoint."""
PAGE_SECONDS = 60.0
"""Longest time until the page reports its address."""
STATUS_SECONDS = 5.0
"""Longest time until the controller returns its state."""
WORK_GOES_ON: Mapping[PlanRole, str] = {
    "gserver": "its requests go on at others",
    "rollout": "its prompts go to others",
    "model_worker": "the run goes back to its latest checkpoint",
    "controller": "the run goes back to its latest checkpoint",
}
"""Roles of processes that are replaced when they die, and the consequence for their work."""


def lock_run_dir(run_dir: Path) -> IO[str]:
    """Return the run's lock, which this process holds until it is closed. Two launchers would write the same files.

    Raises `ConfigError` if another process holds the lock.
    """
    lock = (run_dir / "run.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(f"{run_dir} is being run by another process") from error
    except OSError as error:  # a file system without locks, as Lustre often is
        log.warning("%s cannot be locked (%s): start no second launcher for it", run_dir, error.strerror)
    return lock


def run_locally(
    config: Config,
    *,
    display: Display,
    components: Mapping[str, str] = COMPONENTS,
    page: bool = False,
) -> int:
    """Carry out the run in `config.run_dir` (claimed before); return the exit code.

    0: finished; 130: stopped by Ctrl-C, after a checkpoint that the first Ctrl-C requests. Raises `ProcessDied` if the
    run failed, `RunStopped` if another process stopped it. In all cases no process of the run is left. `page`: show the
    run in a browser, too.
    """
    avoid_broken_instructions()  # once, here: the run's processes inherit the result
    gpus = visible_gpus()
    config = fitted(config, gpus=gpus)
    processes = plan(config, gpus=gpus)
    launcher = Launcher(config, processes=processes, display=display, components=components, page=page)
    return run_until_stopped(
        launcher.run,
        lifeline=Lifeline.from_environment(),  # of a Python program that started this one
        before_force=launcher.kill,
        on_first_signal=launcher.departures,
    )


def of_this_machine(logs: Path, secret: Secret) -> Children:
    """Return the keeper of the processes of a run that is all on this machine."""
    return Children(logs=logs, secret=secret)


class Launcher:
    """The processes of one run from beginning to end, on the machines that `children` manages."""

    def __init__(
        self,
        config: Config,
        *,
        processes: Sequence[ProcessPlan],
        display: Display,
        components: Mapping[str, str] = COMPONENTS,
        children: Callable[[Path, Secret], Children] = of_this_machine,
        one_disk: bool = True,
        page: bool = False,
    ) -> None:
        """`processes`: in the order in which they start, the controller first. `children` returns the keeper of the
        processes, from the folder for their logs and the run's secret. `one_disk`: they share the disk on which this
        process makes the model; else the run does not go back to a checkpoint by itself."""
        self._config = config
        self._plan = processes
        self._config_file = config.run_dir / "config.toml"
        self._display = display
        self._components = components
        self._secret = hold(of_new_run(config))
        self._page = page
        self._make_children = children
        self._one_disk = one_disk
        self._children: Children | None = None
        self.departures = save_and_end(config, lambda: self.manager_url)
        """Handler of the first Ctrl-C."""
        self.manager_url = ""
        self._model_dir: Path | None = None
        self._restarts: Mapping[PlanRole, Restarts] = {role: restarts_of(config) for role in WORK_GOES_ON}
        self._came_up: set[str] = set()
        """Names of processes that have joined the run at least once."""
        self._coming: set[str] = set()
        """Names of processes that are about to be restarted."""
        self._starting: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Start all processes, watch them until the run ends, and leave none behind."""
        logs = self._config.run_dir / "logs"
        try:
            logs.mkdir(exist_ok=True)
            lock = lock_run_dir(self._config.run_dir)
            self._config_file.write_text(configuration.to_toml(self._config))
        except OSError as error:  # a full disk, or a resumed run of another user
            raise ConfigError(f"run.dir: {self._config.run_dir} cannot be written ({error.strerror})") from error
        self._children = self._make_children(logs, self._secret)
        try:
            with ending_written(self._config.run_dir), self._display:
                try:
                    await self._start_and_watch(self._children)
                finally:
                    self._display.note("stopping what is left" if self._children.running else "all processes have left")
                    await self._children.stop()
        finally:
            self._children.close()
            lock.close()

    def kill(self) -> None:
        """Kill all processes at once; restore the terminal's cursor, since no later code runs."""
        if self._children is not None:
            self._children.kill()
        self._display.__exit__(None, None, None)

    async def _show_page(self, children: Children) -> None:
        """Show the run in a browser; a failure does not affect the run."""
        try:
            url = await children.ask(Helper("page", 1), page_command(self._config.run_dir), timeout=PAGE_SECONDS)
        except (StreamRLError, OSError) as error:
            self._display.note(f"the run is not shown in a browser: {error}")
        else:
            self._display.note(f"to be looked at in a browser: {url}")

    async def _start_and_watch(self, children: Children) -> None:
        if self._page:
            self._starting.append(asyncio.create_task(self._show_page(children), name="the start of the page"))
        if self._one_disk:
            self._display.note(f"preparing the model {self._config.model.path}")
            helper = Helper("checkpoint", self._config.trainer.threads)
            words = checkpoint_command(self._config_file, components=self._components)
            self._model_dir = Path(await children.ask(helper, words, timeout=CHECKPOINT_SECONDS))
        controller, *others = self._plan
        self._display.note("starting the controller")
        words = command(controller, config_file=self._config_file, components=self._components)
        timeout = self._config.limits.start_seconds
        self.manager_url = await children.ask(controller, words, timeout=timeout)
        self._display.note(f"controller at {self.manager_url}; starting {len(others)} processes")
        starting = [asyncio.create_task(self._start(children, process)) for process in others]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
        client = ControlClient.of(self._config, self.manager_url, timeout=STATUS_SECONDS)
        upkeep = essential.begin(
            keep_in_order(self._config.run_dir, tell=self._display.note), name="the upkeep of the run's folder"
        )
        following = asyncio.create_task(self._display.follow(self.manager_url), name="display")
        try:
            await until_finished(children, client=client, goes_on=partial(self._goes_on, client))
        finally:
            for task in self._starting:
                task.cancel()
            await asyncio.gather(*self._starting, return_exceptions=True)
            upkeep.cancel()
            following.cancel()
            (ended,) = await asyncio.gather(following, return_exceptions=True)
            if isinstance(ended, Exception):
                log.error("the display failed; the run did not suffer", exc_info=ended)
            await client.close()

    async def _start(self, children: Children, process: ProcessPlan, *, died: str = "") -> None:
        """Start `process`; `died`: how its predecessor died, empty if it has none."""
        controls = process.role == "controller"
        words = command(
            process,
            config_file=self._config_file,
            manager_url=None if controls else self.manager_url,
            model_dir=None if controls else self._model_dir,
            components=self._components,
            resume=bool(died) and process.role in ("controller", "model_worker"),
        )
        if controls:
            words += ["--port", str(urlsplit(self.manager_url).port), "--died", died]
        await children.start(process, words)

    async def _goes_on(self, client: ControlClient, child: Child, status: Status | None) -> bool:
        """Restart a process that died, if its role allows it; return whether the run can continue.

        A process that never came up is not restarted. One that has died too often is left out for a while, unless it
        was the last of its pool.
        """
        assert child.process is not None
        work, restarts = WORK_GOES_ON.get(child.process.role), self._restarts.get(child.process.role)
        if was_left_behind(child):
            self._starting.append(essential.begin(self._start_again(child, 0.0), name=f"restart of {child.name}"))
            return True
        if status is None or any(process.pid == child.pid for process in status.processes):
            self._came_up.add(child.name)
        if work is None or restarts is None or child.name not in self._came_up:
            return False
        if child.process.role in ("controller", "model_worker") and not (self._one_disk and may_go_back(child)):
            return False
        if child.process.role == "controller":
            self._end_model_workers()
        await tell_death(child, client)
        now = time.monotonic()
        delay = restarts.allow(child.name, now=now)
        if delay is not None:
            soon = f"it is started again ({restarts.count(child.name)} of {restarts.most}, in {delay:g} s)"
            self._coming.add(child.name)
        else:
            too_often = f"it was started again {restarts.most} times within {restarts.window:g} s already"
            others = self._others(child, status)
            if not others:
                log.error("%s died, and %s", child.name, too_often)
                return False
            delay = restarts.rest(child.name, now=now)
            soon = f"{too_often}: the run goes on with {', '.join(sorted(others))}"
            soon += ", without it" if delay is None else f", and tries it again in {delay:.0f} s"
            log.warning("%s died, and %s", child.name, soon)
        self._display.note(f"{child.name} {child.how_it_ended}; {work}, and {soon}; see {child.log_file}")
        if delay is not None:
            again = self._start_again(child, delay)
            self._starting.append(essential.begin(again, name=f"restart of {child.name}"))
        return True

    def _others(self, child: Child, status: Status | None) -> set[str]:
        """Return the names of other processes that do the work of `child`, or are about to."""
        assert child.process is not None
        role = child.process.role
        if role in ("controller", "model_worker") or (role == "rollout" and self._config.trainer.synchronous):
            return set()  # each process has work that no other can do
        told = {f"{p.role}/{p.index}": p.state for p in status.processes if p.role == role} if status else {}
        assert self._children is not None
        ours = {c.name for c in self._children.known if c.process is not None and c.process.role == role}
        running = {c.name for c in self._children.running if c.name in ours}
        of_other_launchers = told.keys() - ours
        silent = {name for name, state in told.items() if state == "silent"}
        return ((running | of_other_launchers) - silent | self._coming & ours) - {child.name}

    def _end_model_workers(self) -> None:
        """Kill the model workers of a dead controller: those that hang would not notice the next one."""
        assert self._children is not None
        for child in self._children.running:
            if child.process is not None and child.process.role == "model_worker":
                ending = child.end_by_force("the run goes back")
                self._starting.append(asyncio.create_task(ending, name=f"end of {child.name}"))

    async def _start_again(self, child: Child, delay: float) -> None:
        assert self._children is not None
        assert child.process is not None
        await asyncio.sleep(delay)
        await self._start(self._children, child.process, died=child.reason())
        self._coming.discard(child.name)
