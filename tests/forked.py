"""Processes of tests, forked from one that has loaded torch, transformers and Megatron already.

There is one such fork server for each process of pytest; it starts with the first call. Loading them anew in each
process would cost more than most tests.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Self

from streamrl.children import describe_exit


def forking() -> ForkServerContext:
    """Use it as the module `multiprocessing`. What is handed to a process is pickled, as with `spawn`."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.forked_imports"])
    return context


LAST_WORDS_SECONDS = 1.0
"""Between the first death or error and the failure of the test, for those of others."""


class Forked:
    """Processes that belong together. As soon as one dies, or raises, whoever waits for any of them fails, with what it
    died of; at the end of the block none is left."""

    def __init__(self, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        """Each runs `target(*arguments[rank], answers)`; what it gives `answers.send` is for `take`."""
        self._answers: set[Connection[Any, Any]] = set()
        self._processes: list[BaseProcess] = []
        context = forking()
        for rank, mine in enumerate(arguments):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(target, rank, mine, sending))
            process.start()
            sending.close()
            self._answers.add(receiving)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._answers:
            connection.close()

    def take(self, count: int, *, seconds: float = 120.0) -> list[Any]:
        """The next `count` answers of any."""
        found = self._until(count, seconds)
        assert len(found) == count, f"all ranks ended, after {len(found)} of {count} answers"
        return found

    def end(self, *, seconds: float = 120.0) -> None:
        """Wait until all have ended well."""
        self._until(None, seconds)

    def _until(self, count: int | None, seconds: float) -> list[Any]:
        """Answers, until there are `count` of them or all ranks have ended."""
        deadline = time.monotonic() + seconds
        found: list[Any] = []
        failed: list[str] = []
        running = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        while (running or self._answers) and (failed or count is None or len(found) < count):
            ready = wait([*self._answers, *running], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failed = failed or [f"nothing within {seconds:g} s from ranks {sorted(running.values())}"]
                break
            one = ready[0]
            if isinstance(one, int):
                failed += self._death(running.pop(one))
            elif isinstance(answer := self._answer(one), _Raised):
                failed.append(answer.text)
            elif answer is not _NOTHING:
                found.append(answer)
            if failed:  # one that lost its peer may say so before the peer's own end is known
                deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
        assert not failed, "\n".join(failed)
        return found

    def _answer(self, connection: Connection[Any, Any]) -> Any:
        """`_NOTHING` if there will be no more."""
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            self._answers.discard(connection)
            connection.close()
            return _NOTHING

    def _death(self, rank: int) -> list[str]:
        """How a rank has ended; nothing: well, or after it has raised, which it tells itself."""
        process = self._processes[rank]
        process.join()
        return [] if process.exitcode in (0, _RAISED) else [f"rank {rank}: it {describe_exit(process.exitcode)}"]


class _Raised:
    """What a rank tells of its error."""

    def __init__(self, text: str) -> None:
        self.text = text


_NOTHING = object()
_RAISED = 113
"""Exit code after an error."""


def _run(target: Callable[..., None], rank: int, arguments: tuple[Any, ...], answers: Connection[Any, Any]) -> None:
    try:
        target(*arguments, answers)
    except BaseException:
        answers.send(_Raised(f"rank {rank}:\n{traceback.format_exc()}"))
        raise SystemExit(_RAISED) from None
