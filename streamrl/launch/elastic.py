"""Processes that join and leave a running run: a number on the way in, and the manager's leave on the way out."""

from __future__ import annotations

import asyncio
from typing import cast, get_args

from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.members import AskPlace, Drain, Role
from streamrl.transport.keys import manager_key, read_key

ANSWER_SECONDS = 5.0
"""How long the manager may take to answer a process that wants to leave."""


def free_place(config: Config, *, manager_url: str, role: Role) -> int:
    """A number for a new process of `role`. Raises `StreamRLError` when the manager does not give one."""

    async def ask() -> int:
        client = ControlClient(manager_url, key=manager_key(config))
        try:
            message = AskPlace(role=role, config_digest=config.digest())
            return await client.place(message, patience=config.manager.join_timeout_seconds)
        finally:
            await client.close()

    return asyncio.run(ask())


async def ask_to_leave(config: Config, *, manager_url: str, role: Role, index: int) -> None:
    """Have this process drained. Raises `StreamRLError` when the manager does not know of it, or is not there."""
    await _drain(manager_url, manager_key(config), role, index)


def drain_by_name(manager_url: str, process: str, *, key_variable: str) -> None:
    """Have `process`, for example `gserver/2`, drained. Raises `ConfigError` for a name that makes no sense."""
    role, slash, number = process.partition("/")
    if role not in get_args(Role) or not slash or not number.isdecimal():
        raise ConfigError(f"{process!r} names no process; write it as gserver/2 or rollout/0")
    key = read_key(key_variable, setting="--api-key-env")
    asyncio.run(_drain(manager_url, key, cast(Role, role), int(number)))


async def _drain(manager_url: str, key: str, role: Role, index: int) -> None:
    client = ControlClient(manager_url, key=key, timeout=ANSWER_SECONDS)
    try:
        await client.drain(Drain(role=role, index=index))
    finally:
        await client.close()
