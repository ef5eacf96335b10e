"""One role's component in this process: configuration, threads, model folder, and then its `serve`.

A line for the launcher is sent through a pipe (`answering`); everything else is the same whether a person or a launcher
started the process. A process that joins a running run requests an index from the controller first, and permission to
leave before it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import ConfigError, StreamRLError
from streamrl.hooks import load_object, without_garbage_collection
from streamrl.launch.ending import ending_written, save_and_end
from streamrl.launch.process import Component, Departure, run_component, set_up_logging
from streamrl.launch.processes import (
    COMPONENTS,
    URL_FROM_INPUT,
    MemberRole,
    ProcessCommands,
    imports_of,
    thread_environment,
    threads_of,
)
from streamrl.launch.remote import DRAIN_SECONDS, drained
from streamrl.processor import avoid_broken_instructions
from streamrl.records import progress, snapshots
from streamrl.records.metrics import METRICS_FILE
from streamrl.records.sinks import check_installed
from streamrl.transport.addresses import LOOPBACK, reach_towards, use_interface_of
from streamrl.transport.control import AskPlace, Role
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.model_files import fetched_model, is_elsewhere
from streamrl.transport.secret import await_secret, given

log = logging.getLogger(__name__)

STDIN = 0

# --- joining and leaving a run ---


async def place_of(client: ControlClient, config: Config, role: Role) -> int:
    """Return an index for a new process of `role`. Raises `StreamRLError` if the controller does not assign one."""
    message = AskPlace(role=role, config_digest=config.digest(), settings=config.shared_changes())
    return await client.place(message, patience=config.limits.start_seconds)


async def resumed_there(config: Config, *, manager_url: str, needed: bool) -> Config:
    """Return `config` with a `run.resume_from` that names the checkpoint from which the controller continues.

    So all processes use the same one no matter when each is started, even if a checkpoint is written in between. That
    checkpoint is one of the run's own, or the one in `run.resume_from` until the run has written one. A process without
    a copy of it begins with the model, or, if `needed`, raises `ConfigError`. Also raises `StreamRLError`.
    """
    async with ControlClient.of(config, manager_url) as client:
        point = await client.resume_point(patience=config.limits.start_seconds)
    if not point.checkpoint:
        return config
    named = [Path(config.run.resume_from)] if config.run.resume_from is not None else []
    for folder in (*progress.checkpoints(config.run_dir, abandoned=True), *named):
        if folder.name != point.checkpoint or not (folder / progress.STATE / progress.FILE).is_file():
            continue
        chosen = progress.resuming(config, folder)
        if progress.identity(chosen) == point.identity:
            return chosen
    if needed:
        raise ConfigError(
            f"the controller continues from {point.checkpoint} ({point.identity}), which is not among the "
            f"checkpoints of {config.run_dir.absolute()} on this machine: bring a copy of it from the machine of model "
            "worker 0, or give all machines one disk for run.dir"
        )
    return config


def refuse_another_run(config: Config) -> None:
    """Raise `ConfigError` if the folder of a run that starts from the beginning holds the figures of an earlier one."""
    metrics = config.run_dir / METRICS_FILE
    if config.run.resume_from is None and metrics.exists() and metrics.stat().st_size:
        raise ConfigError(
            f"run.name: {config.run_dir} holds another run; choose a new run.name for this one, "
            "or set run.resume_from to one of its checkpoints to continue it"
        )


# --- the process ---


def run_member(role: MemberRole, commands: ProcessCommands, *, index: int | None) -> int:
    """Run a process that joins the controller at `commands.manager_url`; return its exit code.

    `index`: None if the controller shall assign one. If no launcher started it, the first signal makes a gserver or
    rollout worker leave the run without loss.
    """
    set_up_logging(role if index is None else f"{role}/{index}")
    advertise = commands.advertise

    def prepare() -> Component:
        config = configuration.load(commands.config_file, commands.overrides)
        early = commands.manager_url == URL_FROM_INPUT
        if not early:
            await_secret(commands.manager_url, config)
        serve = _component(role, config)
        url = _url_from_input() if early else commands.manager_url
        if commands.resume:
            config = asyncio.run(resumed_there(config, manager_url=url, needed=role == "model_worker"))
        number = _assigned(role, config, url) if index is None else index
        reach = reach_towards(url, advertise=advertise, patience=config.limits.start_seconds)
        use_interface_of(reach.local)  # before the component makes a process group
        folder = (
            fetched_model(config, manager_url=url) if is_elsewhere(config) else _load(COMPONENTS["checkpoint"])(config)
        )
        work = partial(serve, config, manager_url=url, index=number, model_dir=folder, advertise=advertise)
        return Component(work, None if role == "model_worker" else _departure(role, number, config, url))

    return run_component(prepare)


def _url_from_input() -> str:
    """Wait for the controller's URL, which the launcher writes to this process's input."""
    with open(STDIN, closefd=False) as lines:
        if url := lines.readline().strip():
            return url
    raise StreamRLError("the launcher has ended before there was a controller")


def _assigned(role: MemberRole, config: Config, manager_url: str) -> int:
    """Return the index that the controller assigns to this process."""

    async def ask() -> int:
        async with ControlClient.of(config, manager_url) as client:
            return await place_of(client, config, role)

    index = asyncio.run(ask())
    set_up_logging(f"{role}/{index}")
    log.info("this process is %s/%d", role, index)
    return index


def _departure(role: MemberRole, index: int, config: Config, manager_url: str) -> Departure:
    async def ask() -> None:
        await drained(ControlClient.of(config, manager_url, timeout=DRAIN_SECONDS), role, index)

    return Departure(ask, "leaving the run")


def run_controller(
    config_file: Path,
    overrides: Sequence[str],
    *,
    host: str | None,
    port: int | None,
    advertise: str = "",
    resume: bool = False,
    died: str = "",
    on_ready: Callable[[str], None],
    on_end: Callable[[Path], None] | None = None,
) -> int:
    """Run the controller; return its exit code.

    `host` and `port` replace those of the configuration; `advertise`: the address that it announces. `resume`: a run
    that has no checkpoint starts from the beginning, in the same folder. `died`: how the run's previous controller
    died. `on_end` is called with the run's folder after the end of a run that has begun.

    Without a launcher, the first signal makes the run write a checkpoint and end.
    """
    set_up_logging("controller/0")
    urls: list[str] = []
    begun = ExitStack()
    """Closed at the end of a run that has begun."""

    def prepare() -> Component:
        config = configuration.load(config_file, overrides)
        if resume:  # the model workers of a controller that died are on this host, and read its snapshots
            config = progress.from_latest(config, to_disk=not died and not snapshots.in_use(config.run_dir))
        check_installed(config.metrics.sinks)
        if not resume:
            refuse_another_run(config)
        serve = _component("controller", config)

        def listening(url: str) -> None:
            # not before: if another controller listens here, the records belong to it
            if on_end is not None:
                begun.callback(on_end, config.run_dir)
            begun.enter_context(ending_written(config.run_dir, keep_failure=True))
            keep_settings(config, config_file)
            urls.append(url)
            on_ready(url)

        at, listens = config.run.host if host is None else host, config.run.port if port is None else port

        async def run() -> None:
            with begun:
                await serve(config, host=at, port=listens, advertise=advertise, died=died, on_ready=listening)

        return Component(run, save_and_end(config, lambda: next(iter(urls), "")))

    return run_component(prepare)


def keep_settings(config: Config, config_file: Path) -> None:
    """Write the configuration into the run's folder, for readers of its records, unless a launcher has done so."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    kept = config.run_dir / configuration.CONFIG_FILE
    if kept.absolute() != config_file.absolute():
        kept.write_text(configuration.to_toml(config))


def run_checkpoint(config_file: Path, overrides: Sequence[str], *, on_ready: Callable[[str], None]) -> int:
    """Make the run's model folder and report its path with `on_ready`; return the exit code."""
    set_up_logging("checkpoint")

    def prepare() -> Component:
        avoid_broken_instructions()
        folder = _load(COMPONENTS["checkpoint"])(configuration.load(config_file, overrides))

        async def report() -> None:
            on_ready(str(folder))

        return Component(report)

    return run_component(prepare)


def run_replay_rank(config_file: Path, *, run_dir: Path, index: int, last_step: int, meeting_place: Path) -> int:
    """Run one rank of a replay of the record in `run_dir`; return its exit code."""
    set_up_logging(f"model_worker/{index}")

    def prepare() -> Component:
        config = configuration.load(config_file)
        serve = _component("replay_rank", config)
        use_interface_of(LOOPBACK.local)
        return Component(
            partial(serve, config, run_dir=run_dir, index=index, last_step=last_step, meeting_place=meeting_place)
        )

    return run_component(prepare)


def answering(descriptor: int | None, show: Callable[[str], None]) -> Callable[[str], None]:
    """Return the function that reports a line: to the launcher, through the pipe `descriptor`, or else by `show`."""

    def answer(line: str) -> None:
        assert descriptor is not None
        with os.fdopen(descriptor, "w") as pipe:
            pipe.write(f"{line}\n")

    return show if descriptor is None else answer


def _component(role: str, config: Config) -> Callable[..., Any]:
    """Prepare this process for the work of `role`, and return the function that does the work."""
    given(config)  # reads the secret that a launcher hands on, before this process has children of its own
    os.environ.update(thread_environment(threads_of(role, config)))  # before the component loads torch
    avoid_broken_instructions()
    return _load(*imports_of(role, config))


def _load(component: str, *further: str) -> Callable[..., Any]:
    """Import and return the function `component` (`module:function`); also import `further`. Most of them load
    torch."""
    with without_garbage_collection():
        found, *_ = [load_object(spec, key="a component") for spec in (component, *further)]
    return cast(Callable[..., Any], found)
