"""Copies of many large tensors, a few at the same time: one thread alone does not use the memory's whole speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from streamrl.device import compute_with

Source = TypeVar("Source")
Result = TypeVar("Result")

THREADS = 2
"""More would only wait for the memory."""


class Copiers:
    """A few threads; they end with the object, or with the process."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "copying", initializer=compute_with, initargs=(1,))

    def each(self, copy: Callable[[str, Source], Result], weights: Iterable[tuple[str, Source]]) -> dict[str, Result]:
        """Call `copy` with each of `weights`, some of them at once; answers what it answered, by name.

        Takes few more of `weights` than are being copied. Raises what `copy` raises, after the others have ended.
        """
        results: dict[str, Result] = {}
        copying: deque[tuple[str, Future[Result]]] = deque()
        try:
            for name, source in weights:
                copying.append((name, self._pool.submit(copy, name, source)))
                if len(copying) > THREADS:
                    first, done = copying.popleft()
                    results[first] = done.result()
            while copying:
                first, done = copying.popleft()
                results[first] = done.result()
        finally:
            for _, left in copying:
                left.exception()
        return results
