"""Requests to a run whose controller was started elsewhere: `streamrl status` and `streamrl drain`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from streamrl import config as configuration
from streamrl.config import SecurityConfig
from streamrl.errors import ConfigError
from streamrl.transport.control import Drain, Role
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import Secret, of_run_at, read_file

if TYPE_CHECKING:
    from rich.console import RenderableType

STATUS_SECONDS = 10.0
BETWEEN_SECONDS = 1.5
"""Pause between the two statuses whose difference gives the rates."""
DRAIN_SECONDS = 5.0
"""Longest time for the controller to accept that a process leaves."""


def _client(manager_url: str, secret_file: Path | None, config_file: Path | None, *, timeout: float) -> ControlClient:
    """Return a client of the controller at `manager_url`, without a secret if this machine does not have the run's."""
    config = None if config_file is None else configuration.load(config_file)
    if secret_file is not None:
        secret: Secret | None = read_file(secret_file, setting="--secret-file")
    else:
        secret = of_run_at(manager_url, config)
    security = SecurityConfig() if config is None else config.security
    return ControlClient(manager_url, secret=secret, timeout=timeout, security=security)


def status(manager_url: str, *, secret_file: Path | None, config_file: Path | None) -> RenderableType:
    """Return a picture of the run's present state."""
    from streamrl.launch.dashboard import StatusHistory, dashboard
    from streamrl.records.view import RunView

    run, history = RunView(Path()), StatusHistory(started=time.monotonic())

    async def look() -> None:
        async with _client(manager_url, secret_file, config_file, timeout=STATUS_SECONDS) as client:
            for pause in (0.0, BETWEEN_SECONDS):
                await asyncio.sleep(pause)
                found = await client.status()
                history.add(found, now=time.monotonic())
        if found.last_step is not None:
            run.add_step(found.last_step)

    asyncio.run(look())
    return dashboard(run, history, now=time.monotonic(), height=60)


def drain(manager_url: str, process: str, *, secret_file: Path | None, config_file: Path | None) -> None:
    """Request that `process`, for example `gserver/2`, finish its work and leave. Raises `ConfigError` for an invalid
    name."""
    role, slash, number = process.partition("/")
    if role not in get_args(Role) or not slash or not number.isdecimal():
        raise ConfigError(f"{process!r} names no process; write it as gserver/2 or rollout/0")
    client = _client(manager_url, secret_file, config_file, timeout=DRAIN_SECONDS)
    asyncio.run(drained(client, cast(Role, role), int(number)))


async def drained(client: ControlClient, role: Role, index: int) -> None:
    """Request that a process be drained, and close `client`. Raises `StreamRLError` if the controller has no such
    member or is unreachable."""
    async with client:
        await client.drain(Drain(role=role, index=index))
