"""Watches the processes of a run until it is over, and says which one is to blame when it fails.

Owns no process: `Children` does. Invariant: the death of any process ends the wait, either by a
restart (of roles whose work the manager gives out again) or by an error that
names the process and shows the last it said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from streamrl.errors import ProcessDied, StreamRLError
from streamrl.launch.children import Child, Children
from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.status import Status

log = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
"""How long processes may take to leave by themselves once the run is over."""
CULPRIT_SECONDS = 3.0
"""How long a process that gave up may take to end, so that its log is complete."""

Restart = Callable[[Child, bool], Awaitable[bool]]
"""From a child that died, and whether it had joined the run as far as is known, to whether another takes its place."""


async def never(child: Child, had_joined: bool) -> bool:
    """Restart nothing."""
    return False


async def until_finished(children: Children, *, client: ControlClient, restart: Restart = never) -> None:
    """Wait until the master has ended well and all others had time to leave.

    `restart` is asked about each child that died while the run went on; it answers whether another
    takes its place. Raises `ProcessDied` when the run cannot go on.
    """
    while True:
        child = await children.next_exit()
        assert child.process is not None
        status = await _status(client)
        state = "unknown" if status is None else status.state
        if status is not None and state == "failed":
            raise ProcessDied(await _failure(children, child, status.message))
        # A manager that does not answer may have left already; if it broke, its own exit code tells.
        if child.exit_code == 0 and state in ("finished", "unknown"):
            log.debug("%s left", child.name)
            if child.process.role == "master":
                break
        elif child.exit_code == 0 and state == "running" and _is_no_member(child, status) and _may_leave(child):
            log.info("%s has left the run, as it was asked to", child.name)
        elif not (child.exit_code != 0 and await restart(child, _had_joined(child, status))):
            early = "the run was not over, but " if child.exit_code == 0 else ""
            raise ProcessDied(early + child.obituary())
    await _let_leave(children)


async def _let_leave(children: Children) -> None:
    waiting = [asyncio.create_task(child.ended.wait()) for child in children.running]
    if not waiting:
        return
    try:
        await asyncio.wait(waiting, timeout=LEAVE_SECONDS)
    finally:
        for task in waiting:
            task.cancel()
    for child in children.running:
        log.warning("%s has not left %.0f s after the end of the run: stopping it", child.name, LEAVE_SECONDS)


def _may_leave(child: Child) -> bool:
    """Whether the run goes on without `child` where it has left in order."""
    return child.process is not None and child.process.role in ("gserver", "rollout")


async def _status(client: ControlClient) -> Status | None:
    try:
        return await client.status()
    except StreamRLError as error:  # the manager may be the one that died
        log.debug("the manager does not tell its state: %s", error)
        return None


def _had_joined(child: Child, status: Status | None) -> bool:
    """Whether the manager has heard of `child`; True if it cannot be asked."""
    return status is None or any(process.pid == child.pid for process in status.processes)


def _is_no_member(child: Child, status: Status | None) -> bool:
    names = {f"{process.role}/{process.index}" for process in status.processes} if status is not None else set()
    return child.name not in names


async def _failure(children: Children, first: Child, message: str) -> str:
    """What to tell of a run that gave up with `message`; `first` is the first process seen to end."""
    culprit = next((child for child in children.known if message.startswith(f"{child.name}:")), first)
    if culprit.exit_code is None:
        with_end = asyncio.create_task(culprit.ended.wait())
        await asyncio.wait([with_end], timeout=CULPRIT_SECONDS)
        with_end.cancel()
    text = f"the run failed: {message}"
    if culprit.exit_code == 0:
        return text
    return f"{text}\n{culprit.obituary()}"
