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
import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console

from streamrl import config as configuration
from streamrl import essential
from streamrl.children import Lifeline
from streamrl.config import Config
from streamrl.errors import ConfigError, StreamRLError
from streamrl.launch.children import Children
from streamrl.launch.display import Display, make_display
from streamrl.launch.ending import ending_written, reported, save_and_end
from streamrl.launch.process import run_until_stopped, set_up_logging
from streamrl.launch.processes import URL_FROM_INPUT, ProcessCommands, ProcessPlan, fitted, plan, visible_gpus
from streamrl.launch.run_folders import keep_in_order, resume_words, run_folder
from streamrl.launch.supervisor import STATUS_SECONDS, Supervisor
from streamrl.launch.user_functions import check_functions
from streamrl.models import ensure_checkpoint, is_made
from streamrl.processor import avoid_broken_instructions
from streamrl.records.sinks import check_installed
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import Secret, hold, of_new_run
from streamrl.waits import cancel

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 600.0
"""Longest time to make the first checkpoint."""
PAGE_SECONDS = 60.0
"""Longest time until the page reports its address."""


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


def run_here(
    config_file: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    resume: bool,
    page: bool,
    reports: int | None = None,
) -> int:
    """Claim the folder of a run, or find the one to resume; carry out the run, and show its report; return the exit
    code: 0: finished; 130: stopped by Ctrl-C, after a checkpoint that the first Ctrl-C requests.

    `page`: show the run in a browser, too. `reports`: descriptor of a pipe to the program that started this one
    (`ReportingDisplay`). In all cases no process of the run is left. Raises `ConfigError` if the run cannot begin,
    `ProcessDied` if it failed, `RunStopped` if another process stopped it.
    """
    set_up_logging("run")
    asked = configuration.load(config_file, overrides)
    check_installed(asked.metrics.sinks)
    check_functions(asked)
    config = run_folder(asked, overrides, console, resume=resume)
    again = resume_words(["streamrl", "run"], config_file, overrides, config.run_dir)
    with reported(config.run_dir, console, again=again):
        display = make_display(console, config=config, reports=reports)
        avoid_broken_instructions()  # once, here: the run's processes inherit the result
        gpus = visible_gpus()
        config = fitted(config, gpus=gpus)
        launcher = Launcher(config, processes=plan(config, gpus=gpus), display=display, page=page)
        return run_until_stopped(
            launcher.run,
            lifeline=Lifeline.from_environment(),  # of a Python program that started this one
            before_force=launcher.kill,
            departure=launcher.departure,
        )


@dataclass(eq=False)
class Launcher:
    """The processes of one run from beginning to end, on the machines that `children` manages."""

    config: Config
    _: KW_ONLY
    processes: Sequence[ProcessPlan]
    """In the order in which they start, the controller first."""
    display: Display
    children: Callable[[Path, Secret], Children] = Children
    """Returns the keeper of the processes, from the folder for their logs and the run's secret."""
    one_disk: bool = True
    """The processes share the disk on which this process makes the model; else the run does not go back to a checkpoint
    by itself."""
    page: bool = False

    def __post_init__(self) -> None:
        self._commands = ProcessCommands(self.config.run_dir / configuration.CONFIG_FILE)
        self._secret = hold(of_new_run(self.config))
        self._children: Children | None = None
        self.departure = save_and_end(self.config, lambda: self.manager_url)
        """Handler of the first Ctrl-C."""

    @property
    def manager_url(self) -> str:
        """URL of the controller; empty until it has been started."""
        return self._commands.manager_url

    async def run(self) -> None:
        """Start all processes, watch them until the run ends, and leave none behind."""
        logs = self.config.run_dir / "logs"
        try:
            logs.mkdir(exist_ok=True)
            lock = lock_run_dir(self.config.run_dir)
            self._commands.config_file.write_text(configuration.to_toml(self.config))
        except OSError as error:  # a full disk, or a resumed run of another user
            raise ConfigError(f"run.dir: {self.config.run_dir} cannot be written ({error.strerror})") from error
        self._children = self.children(logs, self._secret)
        try:
            with ending_written(self.config.run_dir), self.display:
                try:
                    await self._start_and_watch(self._children)
                finally:
                    self.display.note(
                        "stopping the remaining processes" if self._children.running else "all processes have left"
                    )
                    await self._children.stop()
        finally:
            lock.close()

    def kill(self) -> None:
        """Kill all processes at once; restore the terminal's cursor, since no later code runs."""
        if self._children is not None:
            self._children.kill()
        self.display.__exit__()

    async def _start_and_watch(self, children: Children) -> None:
        showing = asyncio.create_task(self._show_page(children), name="the start of the page")
        try:
            await self._start(children)
            async with ControlClient.of(self.config, self.manager_url, timeout=STATUS_SECONDS) as client:
                supervisor = Supervisor(
                    self.config,
                    children,
                    self._commands,
                    client,
                    part="run",
                    goes_back=self.one_disk,
                    note=self.display.note,
                )
                await self._watch(supervisor)
        finally:
            await cancel(showing)

    async def _start(self, children: Children) -> None:
        """Start the run's members, which import their modules for seconds. Make the model and start the controller in
        the meantime, and send its URL to the members."""
        config, note = self.config, self.display.note
        controller, *members = self.processes
        note(f"starting {len(members)} processes")
        early = msgspec.structs.replace(self._commands, manager_url=URL_FROM_INPUT)
        starting = [asyncio.create_task(children.start(member, early.of(member), waits=True)) for member in members]
        try:
            waiting = await asyncio.gather(*starting)
        finally:
            await cancel(*starting)
        if self.one_disk and is_made(config):
            await asyncio.to_thread(ensure_checkpoint, config)
        elif self.one_disk:
            note(f"preparing the model {config.model.path}")
            preparing = ProcessPlan("checkpoint", 0, threads=config.trainer.threads)
            await children.ask(preparing, self._commands.of(preparing), timeout=CHECKPOINT_SECONDS)
        note("starting the controller")
        words, timeout = self._commands.of(controller), config.limits.start_seconds
        self._commands.manager_url = await children.ask(controller, words, timeout=timeout)
        note(f"controller at {self.manager_url}")
        for member in waiting:
            member.send(self.manager_url)

    async def _watch(self, supervisor: Supervisor) -> None:
        """Show the run and keep its folder in order until it is over."""
        note = self.display.note
        upkeep = essential.begin(keep_in_order(self.config.run_dir, tell=note), name="the upkeep of the run's folder")
        following = asyncio.create_task(self.display.follow(self.manager_url), name="display")
        try:
            await supervisor.until_over()
        finally:
            upkeep.cancel()
            following.cancel()
            (ended,) = await asyncio.gather(following, return_exceptions=True)
            if isinstance(ended, Exception):
                log.error("the display failed; the run is not affected", exc_info=ended)

    async def _show_page(self, children: Children) -> None:
        """Show the run in a browser if the user wants it; a failure does not affect the run."""
        if not self.page:
            return
        words = [sys.executable, "-m", "streamrl", "page", str(self.config.run_dir)]
        try:
            url = await children.ask(ProcessPlan("page", 0, threads=1), words, timeout=PAGE_SECONDS)
        except (StreamRLError, OSError) as error:
            self.display.note(f"the run is not shown in a browser: {error}")
        else:
            self.display.note(f"the run in a browser: {url}")
