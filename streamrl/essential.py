"""Tasks and threads that a process cannot run without: the failure of one ends the process, with its traceback.

No code awaits work that runs forever. If such work failed unseen, the run would wait for its results forever. So all
tasks that receive, send heartbeats or watch are started here, and `ends_with_its_work` encloses each process's
component (`launch/process.py`). Work that ends without an error, or is cancelled, has not failed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from streamrl.errors import EssentialFailed

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class _Owner:
    """The task that is cancelled when essential work that was started inside it fails."""

    def __init__(self) -> None:
        self.error: EssentialFailed | None = None
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task

    def fail_from_thread(self, name: str, error: BaseException) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail, name, error)

    def fail(self, name: str, error: BaseException) -> None:
        if self.error is None and not self._task.cancelling() and not self._task.done():
            self.error = EssentialFailed(f"{name} failed: {type(error).__name__}: {error}")
            self.error.__cause__ = error
            self._task.cancel()

    def uncancel(self) -> None:
        self._task.uncancel()


_owner: ContextVar[_Owner | None] = ContextVar("owner of essential work", default=None)


@asynccontextmanager
async def ends_with_its_work() -> AsyncGenerator[None]:
    """Cancel the block as soon as essential work that was started in it fails, and raise `EssentialFailed`."""
    owner = _Owner()
    outer = _owner.set(owner)
    try:
        yield
    except BaseException as end:
        if owner.error is None:
            raise
        owner.uncancel()
        if not isinstance(end, asyncio.CancelledError):
            log.error("the end of the process failed, too", exc_info=end)
    finally:
        _owner.reset(outer)
    if owner.error is not None:
        raise owner.error


def failure() -> EssentialFailed | None:
    """Return the failure that is ending the process; None if there is none."""
    owner = _owner.get()
    return None if owner is None else owner.error


def begin(work: Coroutine[Any, Any, Result], *, name: str) -> asyncio.Task[Result]:
    """Start and return a task that the process cannot run without."""
    owner = _owner.get()

    def see(ended: asyncio.Task[Result]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            _tell(name, error)
            if owner is not None:
                owner.fail(name, error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(see)
    return task


def thread(work: Callable[[], None], *, name: str) -> threading.Thread:
    """Return a daemon thread, not started yet, that the process cannot run without."""
    owner = _owner.get()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # tolerance point: any error that ends the thread must reach the process
            _tell(name, error)
            if owner is not None:
                owner.fail_from_thread(name, error)

    return threading.Thread(target=run, name=name, daemon=True)


def _tell(name: str, error: BaseException) -> None:
    log.error("%s failed, and this process cannot do without it", name, exc_info=error)
