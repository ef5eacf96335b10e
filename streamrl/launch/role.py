"""One component in this process: configuration, threads, model folder, and then its `serve`.

A line for the launcher is sent through a pipe (`answer`); everything else is the same whether a person or a launcher
started the process. A process that joins a running run requests an index from the controller first, and permission to
leave before it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast, get_args

from streamrl import config as configuration
from streamrl.children import Lifeline
from streamrl.config import Config, SecurityConfig
from streamrl.errors import ConfigError
from streamrl.importing import load_object, without_garbage_collection
from streamrl.launch.process import Component, Departure, run_component, set_up_logging
from streamrl.launch.processes import COMPONENTS, PlanRole, thread_environment, threads_of
from streamrl.launch.supervise import ANSWER_SECONDS, ending_written, save_and_end
from streamrl.processor import avoid_broken_instructions
from streamrl.records import progress, snapshots
from streamrl.records.metrics import METRICS_FILE
from streamrl.records.sinks import check_installed
from streamrl.transport.addresses import LOCAL, reach_towards, use_interface_of
from streamrl.transport.control import AskPlace, Drain, Role
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.model_files import fetched_model, is_elsewhere
from streamrl.transport.secret import Secret, await_secret, given

log = logging.getLogger(__name__)


# --- joining and leaving a run ---


def free_place(config: Config, *, manager_url: str, role: Role) -> int:
    """Return an index for a new process of `role`. Raises `StreamRLError` if the controller does not assign one."""

    async def ask() -> int:
        client = ControlClient.of(config, manager_url)
        try:
            message = AskPlace(role=role, config_digest=config.digest(), settings=config.shared_changes())
            return await client.place(message, patience=config.limits.start_seconds)
        finally:
            await client.close()

    return asyncio.run(ask())


async def ask_to_leave(config: Config, *, manager_url: str, role: Role, index: int) -> None:
    """Request that this process be drained. Raises `StreamRLError` if the controller has no such member or is
    unreachable."""
    client = ControlClient.of(config, manager_url, timeout=ANSWER_SECONDS)
    await _drain(client, role, index)


def drain_by_name(manager_url: str, process: str, *, secret: Secret | None, security: SecurityConfig) -> None:
    """Request that `process`, for example `gserver/2`, be drained. Raises `ConfigError` for an invalid name."""
    role, slash, number = process.partition("/")
    if role not in get_args(Role) or not slash or not number.isdecimal():
        raise ConfigError(f"{process!r} names no process; write it as gserver/2 or rollout/0")

    async def drain() -> None:
        client = ControlClient(manager_url, secret=secret, timeout=ANSWER_SECONDS, security=security)
        await _drain(client, cast(Role, role), int(number))

    asyncio.run(drain())


async def _drain(client: ControlClient, role: Role, index: int) -> None:
    try:
        await client.drain(Drain(role=role, index=index))
    finally:
        await client.close()


# --- the process ---


def from_latest(config_file: Path, overrides: Sequence[str], *, on_one_host: bool = False) -> list[str]:
    """Return `overrides` with a `run.resume_from` that names the run's latest checkpoint, if there is one.

    `on_one_host`: whether all model workers are on this host. If not, a snapshot is copied to the disk for them.
    """
    run_dir = configuration.load(config_file, overrides).run_dir
    if not on_one_host and not snapshots.in_use(run_dir):
        progress.copy_latest_snapshot(run_dir)
    found = progress.checkpoints(run_dir)
    return [*overrides, f"run.resume_from={found[-1].absolute()}"] if found else list(overrides)


def from_controllers(config_file: Path, overrides: Sequence[str], *, manager_url: str, needed: bool) -> list[str]:
    """Return `overrides` with a `run.resume_from` that names the checkpoint from which the controller continues.

    So all processes use the same one no matter when each is started, even if a checkpoint is written in between. That
    checkpoint is one of the run's own, or the one in `run.resume_from` until the run has written one. A process without
    a copy of it begins with the model, or, if `needed`, raises `ConfigError`. Also raises `StreamRLError`.
    """
    await_secret(manager_url, configuration.load(config_file, overrides))
    return asyncio.run(ask_from_where(config_file, overrides, manager_url=manager_url, needed=needed))


async def ask_from_where(config_file: Path, overrides: Sequence[str], *, manager_url: str, needed: bool) -> list[str]:
    """Return the same as `from_controllers`, for a process that has the run's secret."""
    config = configuration.load(config_file, overrides)
    client = ControlClient.of(config, manager_url)
    try:
        point = await client.resume_point(patience=config.limits.start_seconds)
    finally:
        await client.close()
    if not point.checkpoint:
        return list(overrides)
    named = [Path(config.run.resume_from)] if config.run.resume_from is not None else []
    for folder in (*progress.checkpoints(config.run_dir, abandoned=True), *named):
        if folder.name != point.checkpoint or not (folder / progress.STATE / progress.FILE).is_file():
            continue
        chosen = [*overrides, f"run.resume_from={folder.absolute()}"]
        identity = progress.identity(configuration.load(config_file, chosen))
        if identity == point.identity:
            return chosen
    if needed:
        raise ConfigError(
            f"the controller goes on from {point.checkpoint} ({point.identity}), which is not among the "
            f"checkpoints of {config.run_dir.absolute()} on this machine: bring a copy of it from the machine of model "
            "worker 0, or give all machines one disk for run.dir"
        )
    return list(overrides)


def refuse_another_run(config: Config) -> None:
    """Raise `ConfigError` if the folder of a run that starts from the beginning holds the figures of an earlier one."""
    metrics = config.run_dir / METRICS_FILE
    if config.run.resume_from is None and metrics.exists() and metrics.stat().st_size:
        raise ConfigError(
            f"run.name: {config.run_dir} holds another run; choose a new run.name for this one, "
            "or set run.resume_from to one of its checkpoints to go on with it"
        )


Arguments = Callable[[Config], dict[str, Any]]
REPLAY = "streamrl.trainer.replay.process:serve"
"""The component of a model worker in a replay."""


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
    component: str | None,
) -> int:
    """Run the controller; return its exit code.

    `host` and `port` replace those of the configuration; `advertise`: the address that it announces. `resume`: a run
    that has no checkpoint starts from the beginning, in the same folder. `died`: how the run's previous controller
    died. `on_end` is called with the run's folder after the end of a run that has begun.

    Without a launcher, the first signal makes the run write a checkpoint and end.
    """
    urls: list[str] = []
    begun = ExitStack()
    """Closed at the end of a run that has begun."""

    def leave(config: Config) -> list[Departure]:
        return save_and_end(config, lambda: next(iter(urls), ""))

    def arguments(config: Config) -> dict[str, Any]:
        check_installed(config.metrics.sinks)
        if not resume:
            refuse_another_run(config)

        def listening(url: str) -> None:
            # not before: if another controller listens here, the records belong to it
            if on_end is not None:
                begun.callback(on_end, config.run_dir)
            begun.enter_context(ending_written(config.run_dir, keep_failure=True))
            _keep_settings(config, config_file)
            urls.append(url)
            on_ready(url)

        return {
            "host": config.run.host if host is None else host,
            "port": config.run.port if port is None else port,
            "advertise": advertise,
            "died": died,
            "on_ready": listening,
        }

    return _run_role("controller", 0, config_file, overrides, component, arguments, leave=leave, within=begun)


def _keep_settings(config: Config, config_file: Path) -> None:
    """Write the configuration into the run's folder, for readers of its records, unless a launcher has done so."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    kept = config.run_dir / "config.toml"
    if kept.absolute() != config_file.absolute():
        kept.write_text(configuration.to_toml(config))


def run_member(
    role: PlanRole,
    index: int | None,
    config_file: Path,
    overrides: Sequence[str],
    *,
    manager_url: str,
    model_dir: Path | None,
    component: str | None,
    advertise: str = "",
) -> int:
    """Run a process that joins the controller at `manager_url`; return its exit code.

    `advertise`: the address by which others reach it; empty: the one from which it reaches the controller.

    `index`: None, for a gserver or a rollout worker, if the controller shall assign one. If no launcher started the
    process, the first signal makes a gserver or rollout worker leave the run without loss.
    """
    set_up_logging(role)
    await_secret(manager_url, configuration.load(config_file, overrides))
    number = index if index is not None else _ask_place(role, config_file, overrides, manager_url=manager_url)

    def arguments(config: Config) -> dict[str, Any]:
        patience = config.limits.start_seconds
        reach = reach_towards(manager_url, advertise=advertise, patience=patience)
        use_interface_of(reach.local)  # before the component makes a process group
        folder = _make_checkpoint(config, manager_url=manager_url) if model_dir is None else model_dir
        return {"manager_url": manager_url, "index": number, "model_dir": folder, "advertise": advertise}

    def leave(config: Config) -> list[Departure]:
        async def ask() -> None:
            await ask_to_leave(config, manager_url=manager_url, role=role, index=number)

        return [Departure(ask, "leaving the run")]

    departs = role in ("gserver", "rollout")
    return _run_role(role, number, config_file, overrides, component, arguments, leave=leave if departs else None)


def _ask_place(role: PlanRole, config_file: Path, overrides: Sequence[str], *, manager_url: str) -> int:
    config = configuration.load(config_file, overrides)
    number = free_place(config, manager_url=manager_url, role=role)
    log.info("the controller calls this process %s/%d", role, number)
    return number


def run_checkpoint(
    config_file: Path,
    overrides: Sequence[str],
    *,
    on_ready: Callable[[str], None],
    component: str | None,
    manager_url: str = "",
) -> int:
    """Make the run's model folder and report its path with `on_ready`; return the exit code.

    `manager_url`: the controller from which to fetch files that this host does not have.
    """
    set_up_logging("checkpoint")
    lifeline = Lifeline.from_environment()

    def prepare() -> Component:
        avoid_broken_instructions()
        folder = _make_checkpoint(configuration.load(config_file, overrides), component, manager_url=manager_url)

        async def tell() -> None:
            on_ready(str(folder))

        return tell

    return run_component(prepare, lifeline=lifeline)


def run_replay_rank(config_file: Path, *, run_dir: Path, index: int, last_step: int, meeting_place: Path) -> int:
    """Run one rank of a replay of the record in `run_dir`; return its exit code."""

    def arguments(config: Config) -> dict[str, Any]:
        use_interface_of(LOCAL.local)
        return {"run_dir": run_dir, "index": index, "last_step": last_step, "meeting_place": meeting_place}

    return _run_role("model_worker", index, config_file, (), REPLAY, arguments)


def answer(descriptor: int, line: str) -> None:
    """Send the launcher one line."""
    with os.fdopen(descriptor, "w") as pipe:
        pipe.write(f"{line}\n")


def _run_role(
    role: PlanRole,
    index: int,
    config_file: Path,
    overrides: Sequence[str],
    component: str | None,
    arguments: Arguments,
    leave: Callable[[Config], list[Departure]] | None = None,
    within: AbstractContextManager[object] | None = None,
) -> int:
    """Run the component of `role`; return the exit code.

    `leave` makes the departure, if any, of a process that no launcher started. The component runs in the context
    `within`.
    """
    set_up_logging(f"{role}/{index}")
    lifeline = Lifeline.from_environment()
    on_first_signal: list[Departure] = []

    def prepare() -> Component:
        config = configuration.load(config_file, overrides)
        given(config)  # reads the secret that a launcher hands on, before this process has children of its own
        if leave is not None and lifeline is None:
            on_first_signal.extend(leave(config))
        os.environ.update(thread_environment(threads_of(role, config)))  # before the component loads torch
        avoid_broken_instructions()
        serve = _load(component or COMPONENTS[role])
        keywords = arguments(config)

        async def run() -> None:
            with within or nullcontext():
                await serve(config, **keywords)

        return run

    return run_component(prepare, lifeline=lifeline, on_first_signal=on_first_signal)


def _make_checkpoint(config: Config, component: str | None = None, *, manager_url: str = "") -> Path:
    """Return the folder with the run's initial weights and tokenizer; it is made or fetched if it does not exist."""
    if manager_url and is_elsewhere(config):
        return fetched_model(config, manager_url=manager_url)
    folder: Path = _load(component or COMPONENTS["checkpoint"])(config)
    return folder


def _load(name: str) -> Callable[..., Any]:
    """Return the function that `module:function` names; most of them load torch."""
    with without_garbage_collection():
        found: Callable[..., Any] = load_object(name, key="--component")
    return found
