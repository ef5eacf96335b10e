"""Run a component as an operating-system process: event loop, signals, exit code.

Owns the process's logging and its signal handlers. Invariants:

- the first SIGTERM or SIGINT cancels the component, so that it cleans up; the second ends the process at once;
  if there is a `Departure`, the first signal starts it, and the second and third cancel and end the component;
- a process that a launcher started never outlives it, not even when the launcher is killed by SIGKILL: its lifeline
  (`children.py`) stops it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import uvloop

from streamrl.children import EXIT_GONE_BACK, EXIT_ORPHANED, GRACE_SECONDS, Lifeline, end_at_once
from streamrl.errors import ConfigError, GoneBack, PeerError, RunStopped, StreamRLError
from streamrl.essential import ends_with_its_work
from streamrl.transport.manager_client import PLACE_TAKEN
from streamrl.waits import cancel

log = logging.getLogger(__name__)

LOG_LEVEL = "STREAMRL_LOG"
"""Environment variable: the least level that is logged, for example `DEBUG`; default: `INFO`."""
STDOUT, STDERR = 1, 2
STACKS_SIGNAL = signal.SIGUSR2
"""Signal on which a process of a run prints the stacks of its threads."""
OPEN_FILES = 65536
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_PLACE_TAKEN = 3

Work = Callable[[], Coroutine[Any, Any, None]]


class Departure(NamedTuple):
    """An orderly end that the first signal starts; the component then ends by itself."""

    work: Work
    """If it raises, the component is cancelled."""
    announcement: str
    """Description for the log."""


class Component(NamedTuple):
    """The work of a process."""

    work: Work
    departure: Departure | None = None
    """Not used in a process that a launcher started: the launcher decides about its end."""


class _Output(io.RawIOBase):
    """A writable descriptor that never fails: output that a full disk or a closed terminal does not accept is lost.

    So neither a log line, nor a user's `print`, nor the flush at the end of the process can end it with an error.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lost = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, content: Any) -> int:
        left = memoryview(content)
        if self._lost:
            left = memoryview(f"\n[{self._lost} bytes of output were lost here]\n".encode() + bytes(content))
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
            self._lost = 0
        except OSError:
            self._lost += len(content)
        return len(content)


def _never_fail() -> None:
    """Replace stdout and stderr by outputs that do not raise, unless other code has replaced them already."""
    for name, descriptor in (("stdout", STDOUT), ("stderr", STDERR)):
        if getattr(sys, name) is getattr(sys, f"__{name}__") and getattr(sys, name) is not None:
            stream = getattr(sys, name)
            output = io.TextIOWrapper(  # type: ignore[type-var]
                _Output(descriptor),
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=True,
                write_through=True,
            )
            setattr(sys, name, output)


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which a live display replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")
        sys.stderr.flush()


class _Formatter(logging.Formatter):
    """Formats `12:34:56 WARNING gserver/0 the message`; on a terminal warnings are yellow and errors red."""

    def __init__(self, name: str, *, coloured: bool) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {name} %(message)s", datefmt="%H:%M:%S")
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self._coloured or record.levelno < logging.WARNING:
            return text
        return f"\x1b[{31 if record.levelno >= logging.ERROR else 33}m{text}\x1b[0m"


def set_up_logging(name: str) -> None:
    """Log to stderr with time, level and `name`, at the level of `STREAMRL_LOG`."""
    level = os.environ.get(LOG_LEVEL, "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"{LOG_LEVEL}={level}: not a log level; use DEBUG, INFO, WARNING or ERROR")
    _never_fail()
    handler = _StderrHandler()
    handler.setFormatter(_Formatter(name, coloured=sys.stderr.isatty()))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("streamrl").setLevel(level)
    logging.captureWarnings(True)
    faulthandler.register(STACKS_SIGNAL, file=STDERR, all_threads=True)


def allow_many_connections() -> None:
    """Raise the soft limit on open files: each request in flight is a connection, and the usual 1024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_component(prepare: Callable[[], Component]) -> int:
    """Run the component that `prepare` returns to its end; return the exit code, and log the reason if it is not 0.

    1: an error (logged with a traceback unless it is a `StreamRLError`); 2: a configuration that cannot work;
    3: another live process has this one's index; 69: the run has gone back to a checkpoint that this process does not
    begin from; 128 + n: stopped by signal n.

    Afterwards the process ends within `GRACE_SECONDS`, whether its threads end or not.
    """
    allow_many_connections()
    code = _code_of(prepare)
    threading.Thread(target=_end_despite_threads, args=(code,), name="end", daemon=True).start()
    return code


def _end_despite_threads(code: int) -> None:
    """End the process with `code` if threads keep it from ending.

    The interpreter waits for all threads, and one may wait in a collective for a peer that is gone or waits as well.
    """
    threading.Event().wait(GRACE_SECONDS)
    busy = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if busy:
        log.warning("%s did not end within %g s: ending without it", ", ".join(busy), GRACE_SECONDS)
        os._exit(code)


def _code_of(prepare: Callable[[], Component]) -> int:
    lifeline = Lifeline.from_environment()
    try:
        work, departure = prepare()
        return run_until_stopped(work, lifeline=lifeline, departure=departure if lifeline is None else None)
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_BAD_CONFIG
    except GoneBack as error:
        log.warning("%s", error)
        return EXIT_GONE_BACK
    except StreamRLError as error:
        log.error("%s: %s", type(error).__name__, error)
        taken = isinstance(error, PeerError) and error.status == PLACE_TAKEN
        return EXIT_PLACE_TAKEN if taken else EXIT_FAILED
    except ExceptionGroup as group:
        expected, unexpected = group.split(StreamRLError)
        for leaf in _leaves(expected) if expected else ():
            log.error("%s: %s", type(leaf).__name__, leaf)
        if unexpected:
            log.error("unexpected errors", exc_info=unexpected)
        return EXIT_FAILED
    except Exception:  # the tolerance point of a process: any error is logged and becomes the exit code
        log.exception("unexpected error")
        return EXIT_FAILED


def run_until_stopped(
    work: Work,
    *,
    lifeline: Lifeline | None = None,
    before_force: Callable[[], None] | None = None,
    departure: Departure | None = None,
) -> int:
    """Run `work` in a new event loop until it ends (0) or is stopped by signal n (128 + n).

    `before_force` is called when a second signal demands the end at once. A `RunStopped` that follows the `departure`
    counts as stopped by the signal. Raises the exceptions of `work`, and `EssentialFailed` if essential background work
    fails.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_until_stopped(work, lifeline, before_force, departure))


def _leaves(group: ExceptionGroup[Any]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def _until_stopped(
    work: Work, lifeline: Lifeline | None, before_force: Callable[[], None] | None, departure: Departure | None
) -> int:
    loop = asyncio.get_running_loop()

    async def until_essential_work_fails() -> None:
        async with ends_with_its_work():
            await work()

    task = loop.create_task(until_essential_work_fails(), name="component")
    received: list[signal.Signals] = []
    leaving: list[asyncio.Task[None]] = []
    stopping = False

    async def leave(departure: Departure) -> None:
        nonlocal stopping
        try:
            await departure.work()
        except Exception as error:  # tolerance point: the process has to end after any error
            log.warning("%s failed (%s: %s); stopping", departure.announcement, type(error).__name__, error)
            stopping = True
            task.cancel()

    def stop(number: signal.Signals) -> None:
        nonlocal stopping
        received.append(number)
        if departure is not None and not leaving and not stopping:
            log.info("%s: %s; once more to stop at once", number.name, departure.announcement)
            leaving.append(loop.create_task(leave(departure)))
        elif not stopping:
            stopping = True
            log.info("%s: stopping; once more to end by force", number.name)
            task.cancel()
        else:
            log.warning("%s again: ending by force", number.name)
            if before_force is not None:
                before_force()
            end_at_once(128 + number)

    def launcher_gone(cut: Future[None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    if lifeline is not None:
        lifeline.cut.add_done_callback(launcher_gone)
    try:
        await task
    except asyncio.CancelledError:
        return 128 + received[0] if received else EXIT_ORPHANED
    except RunStopped:
        if not leaving:
            raise
        return 128 + received[0]
    finally:
        await cancel(*leaving)
    return 128 + received[0] if stopping and received else 0
