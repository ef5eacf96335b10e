"""`streamrl` commands without the time that imports take: a launcher and its children are forks of a process that has
imported everything that they use (`tests.forked`).

They differ from commands that a user types in that no new Python is executed, so each writes its command line over that
of the fork server, for `ps` and the tests to see, and executes the `sitecustomize.py` of its PYTHONPATH itself. Where
the difference matters, and in some runs because it might, tests start commands as a user does
(`harness.start(..., fresh=True)`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import faulthandler
import gc
import multiprocessing.resource_tracker as resource_tracker
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from tests.forked import forking
from tests.hosts.network import enter

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "streamrl")
COMMAND_SECONDS = 120.0
SUPPORTED = hasattr(os, "pidfd_open")
"""Whether the launcher can wait for forks as it waits for processes that it has executed."""


class PreloadedProcess:
    """A `streamrl` command in a process of its own, with as much of `subprocess.Popen` as tests need."""

    def __init__(self, words: Sequence[str], *, environment: Mapping[str, str], holder: int | None = None) -> None:
        """`words`: what a user would type behind `streamrl`; `holder`: of the host on which it runs (`tests.hosts`)."""
        reading, writing = os.pipe()
        self.stdout: IO[str] = os.fdopen(reading, errors="replace")
        try:
            arguments = (words, dict(environment), DupFd(writing), holder)
            self._process = forking().Process(target=_launch, args=arguments, daemon=True)  # none outlives pytest
            self._process.start()
        finally:
            os.close(writing)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
        return self._process.exitcode

    async def ended(self) -> int:
        """As `wait`, for a coroutine."""
        descriptor = os.dup(self._process.sentinel)  # several may wait
        try:
            await _readable(descriptor)
        finally:
            os.close(descriptor)
        return self.wait()

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_command(
    words: Sequence[str], *, folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a `streamrl` command in `folder` to its end, which has to come within `COMMAND_SECONDS`.

    What it starts is executed anew.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        streams = [DupFd(file.fileno()) for file in (output, errors)]
        process = forking().Process(target=_be, args=(words, folder, dict(environment), streams), daemon=True)
        process.start()
        process.join(COMMAND_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([*COMMAND, *words], COMMAND_SECONDS)
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess([*COMMAND, *words], process.exitcode, output.read(), errors.read())


def _be(words: Sequence[str], folder: Path, environment: dict[str, str], streams: Sequence[Any]) -> None:
    """The process of `run_command`."""
    os.chdir(folder)
    for descriptor, stream in enumerate(streams, start=1):
        opened = stream.detach()
        os.dup2(opened, descriptor)
        os.close(opened)
    _run_command(words, environment)


def _launch(words: Sequence[str], environment: dict[str, str], output: Any, holder: int | None) -> None:
    """The launcher; what it starts as a process of streamrl's is forked from it."""
    if holder is not None:
        enter(holder)
    descriptor = output.detach()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    asyncio.create_subprocess_exec = _create_subprocess  # type: ignore[assignment]
    _run_command(words, environment)


_execute = asyncio.create_subprocess_exec


async def _create_subprocess(*command: str, **options: Any) -> Any:
    """In the place of `asyncio.create_subprocess_exec`, with those options that the launcher uses."""
    if tuple(command[: len(COMMAND)]) != COMMAND:
        return await _execute(*command, **options)
    launchers = _open_files()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code: Any = 1
        try:
            os.dup2(reading, 0)
            os.close(reading)
            os.close(writing)
            _leave_the_launcher(options["stdout"], launchers=launchers, keep=options["pass_fds"])
            contextvars.Context().run(_run_command, command[len(COMMAND) :], options["env"])
        except SystemExit as end:
            code = end.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            _end(code)
    os.close(reading)
    stdin = os.fdopen(writing, "wb", buffering=0)
    if options["stdin"] != asyncio.subprocess.PIPE:
        stdin.close()
    return _Child(pid, stdin)


class _Child:
    """As much of `asyncio.subprocess.Process` as the launcher needs."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    async def wait(self) -> int:
        descriptor = os.pidfd_open(self.pid)
        try:
            await _readable(descriptor)
        finally:
            os.close(descriptor)
        _, status = os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222 (it has ended)
        return os.waitstatus_to_exitcode(status)


async def _readable(descriptor: int) -> None:
    """Until it can be read from."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


def _open_files() -> dict[int, tuple[int, int]]:
    """What each descriptor of this process refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            status = os.fstat(int(name))
            found[int(name)] = status.st_dev, status.st_ino
    return found


def _leave_the_launcher(
    output: IO[bytes] | None, *, launchers: Mapping[int, tuple[int, int]], keep: Collection[int]
) -> None:
    """Have no more of the launcher than a process would that it has executed.

    `launchers`: its open files. Those that libuv has opened anew for this process as it was forked stay open. The
    launcher's objects, its event loop among them, stay until the process ends, which must be the last that happens to
    them.
    """
    gc.freeze()
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if output is not None:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for descriptor, file in _open_files().items():
        if descriptor > 2 and descriptor not in keep and launchers.get(descriptor) == file:
            os.close(descriptor)


def _run_command(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Be `streamrl WORDS`; ends with `SystemExit`, as it does."""
    import torch

    from streamrl import cli

    os.environ.clear()
    os.environ.update(environment)
    _show_as([*COMMAND, *words])
    sys.argv, sys.orig_argv = ["streamrl", *words], [*COMMAND, *words]
    _customize(environment.get("PYTHONPATH", ""))
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    # Shared memory is looked after by a process of one's own, which notices when one dies.
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
    cli.main()


def _customize(path: str) -> None:
    """Do what a Python that begins does with the first `sitecustomize.py` of its PYTHONPATH."""
    for folder in filter(None, path.split(os.pathsep)):
        if (file := Path(folder) / "sitecustomize.py").is_file():
            runpy.run_path(str(file))
            return


def _show_as(command: Sequence[str]) -> None:
    """Have the system show `command` as this process's command line, as `setproctitle` does: in the memory of the
    arguments and of the environment that lies behind it. Nothing reads these any more, since `_run_command` has set
    every variable anew."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end_of_arguments, _, end = map(int, fields[45:49])
    text = " ".join(command).encode()[: end - begin - 1].ljust(end_of_arguments - begin + 1)
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)  # at once: somebody may be reading it


def _end(code: Any) -> None:
    """As the interpreter ends, but that nothing of the launcher's is cleaned up."""
    threading._shutdown()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
